//! Asynchronous forms, waited for and awaited.

use std::time::{Duration, Instant};

use super::*;
use crate::local;
use crate::op::Algorithm;

/// Far below the deadline of operations (120 s), far above what a busy machine takes.
const SOON: Duration = Duration::from_secs(20);

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

#[test]
fn operations_are_awaited_side_by_side_under_tokio() {
    let outcomes = local::run(3, |comm| {
        let rank = comm.rank();
        runtime().block_on(async {
            let sum = comm.all_reduce_async(vec![rank as f32; 1000], ReduceOp::Sum);
            let ring = comm.on_lane(1);
            let sent = ring.send_async(vec![rank as u8], (rank + 1) % 3);
            let received = ring.recv_async::<u8>(1, (rank + 2) % 3);
            let later = async {
                tokio::time::sleep(Duration::from_millis(10)).await;
                comm.barrier_async().await
            };
            let (received, later, sum, sent) = tokio::join!(received, later, sum, sent);
            later.unwrap();
            assert_eq!(sent.unwrap(), [rank as u8]);
            (received.unwrap()[0], sum.unwrap()[999])
        })
    });
    assert_eq!(outcomes, [(2, 3.0), (0, 3.0), (1, 3.0)]);
}

#[test]
fn every_asynchronous_form_gives_what_its_blocking_form_gives() {
    local::run(3, |comm| {
        let (rank, second) = (comm.rank(), comm.on_lane(1));
        let whole: Vec<i32> = (0..7).map(|index| index * (rank as i32 + 1)).collect();
        let shard = &whole[shard_range(7, 3, rank)];
        let mut expected = whole.clone();
        comm.broadcast(&mut expected, 2).unwrap();
        assert_eq!(second.broadcast_async(whole.clone(), 2).wait().unwrap(), expected);
        let mut expected = whole.clone();
        comm.reduce(&mut expected, 1, ReduceOp::Max).unwrap();
        assert_eq!(second.reduce_async(whole.clone(), 1, ReduceOp::Max).wait().unwrap(), expected);
        let expected = comm.scatter(&whole, 7, 1).unwrap();
        assert_eq!(second.scatter_async(whole.clone(), 7, 1).wait().unwrap(), expected);
        let expected = comm.gather(shard, 7, 1).unwrap().unwrap_or_default();
        assert_eq!(second.gather_async(shard.to_vec(), 7, 1).wait().unwrap(), expected);
        let expected = comm.all_gather(shard, 7).unwrap();
        assert_eq!(second.all_gather_async(shard.to_vec(), 7).wait().unwrap(), expected);
        let expected = comm.reduce_scatter(&whole, ReduceOp::Sum).unwrap();
        assert_eq!(second.reduce_scatter_async(whole.clone(), ReduceOp::Sum).wait().unwrap(), expected);
        let expected = comm.all_to_all(&whole[..6]).unwrap();
        assert_eq!(second.all_to_all_async(whole[..6].to_vec()).wait().unwrap(), expected);
    });
}

#[test]
fn a_pending_result_that_is_dropped_lets_its_operation_go_on() {
    let sums = local::run(2, |comm| {
        if comm.rank() == 0 {
            drop(comm.all_reduce_async(vec![1u8], ReduceOp::Sum));
            0
        } else {
            comm.all_reduce_async(vec![2u8], ReduceOp::Sum).wait().unwrap()[0]
        };
        // In order, so the first one has ended.
        comm.all_reduce_scalar(1u8, ReduceOp::Sum).unwrap()
    });
    assert_eq!(sums, [2, 2]);
}

#[test]
fn bad_arguments_come_out_of_the_pending_result() {
    local::run(2, |comm| {
        let wrong = [
            comm.all_gather_async(vec![1u8; 9], 2),
            comm.recv_async(usize::MAX, 1 - comm.rank()),
            comm.broadcast_async(vec![1], 2),
            comm.all_to_all_async(vec![1; 3]),
            comm.on_lane(2).all_reduce_async(vec![1], ReduceOp::Sum),
        ];
        for pending in wrong {
            let error = pending.wait().unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
        }
        // With the buffer, for those who want it back.
        let failed = comm.broadcast_async(vec![5], 2).into_handle().wait().unwrap_err();
        assert_eq!(failed.buffer.unwrap().into_vec::<i32>().unwrap(), [5]);
        comm.barrier().unwrap();
    });
}

#[test]
fn an_awaited_operation_ends_at_its_deadline() {
    let began = Instant::now();
    let errors = local::run(2, |comm| {
        runtime().block_on(async {
            // Nobody sends.
            let never = comm.on_lane(1).with_timeout(Duration::from_millis(100)).labelled("bucket 3");
            let mut never = never.recv_async::<f32>(1, 1 - comm.rank());
            let early = tokio::time::timeout(Duration::from_millis(10), &mut never).await;
            assert!(early.is_err(), "{early:?}");
            never.await.unwrap_err()
        })
    });
    for error in errors {
        let Error::Timeout { operation, .. } = &error else { panic!("{error}") };
        assert!(operation.contains("bucket 3"), "{error}");
    }
    assert!(began.elapsed() < SOON);
}

#[test]
fn a_preset_is_for_blocking_forms_too() {
    local::run(2, |comm| {
        // On lane 0 the others would wait behind this one.
        let waiting = (comm.rank() == 0).then(|| comm.recv_async::<u8>(1, 1));
        let second = comm.on_lane(1).with_algorithm(Algorithm::Direct);
        assert_eq!(second.all_reduce_scalar(2i64, ReduceOp::Sum).unwrap(), 4);
        let wrong = comm.on_lane(1).with_algorithm(Algorithm::Tree).all_reduce_scalar(2i64, ReduceOp::Sum);
        assert!(matches!(wrong, Err(Error::InvalidArgument(_))), "{wrong:?}");
        comm.on_lane(0).on_lane(1).barrier().unwrap();
        match waiting {
            Some(waiting) => assert_eq!(waiting.wait().unwrap(), [7]),
            None => comm.send(&[7u8], 0).unwrap(),
        }
    });
}
