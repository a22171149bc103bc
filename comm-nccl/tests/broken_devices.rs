//! Devices that never end what they are given, and devices that are lost, on the stand-in for NCCL and the CUDA driver: every wait
//! ends, every rank gets one clear error, and nothing is freed that a kernel may still use (freeing would wait for it).

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::conformance::Barrier;
use comm_core::{Buffer, Call, Communicator, CommunicatorExt, Control, DType, Deadline, Error, Op, ReduceOp, local};
use comm_nccl::{Behaviour, NcclCommunicator, NcclOptions};

/// Of the operations here.
const TIMEOUT: Duration = Duration::from_secs(1);

/// What an abort gets to end what runs, before that counts as running for ever, and some time for a busy machine.
const SETTLED: Duration = Duration::from_secs(20);

/// In which ranks connect, on a machine that does much else.
const CONNECTED: Duration = Duration::from_secs(20);

/// For what must not wait for that.
const SOON: Duration = Duration::from_secs(6);

const SUM: Op = Op::AllReduce(ReduceOp::Sum);

/// Runs `body` as each of two ranks. Fails if they take longer than `limit` once they have connected.
fn two(limit: Duration, body: impl Fn(NcclCommunicator) + Send + Sync + 'static) {
    let body = Arc::new(body);
    let (done, ended) = std::sync::mpsc::channel();
    // What happens to the one must not reach the other while that still connects.
    let connected = Arc::new(Barrier::new(2));
    for rank in local::group(2, 2) {
        let (body, done, connected) = (body.clone(), done.clone(), connected.clone());
        thread::spawn(move || {
            let control: Arc<dyn Control> = rank.control;
            let options = NcclOptions::default().on_stand_in().with_timeout(TIMEOUT);
            let comm = NcclCommunicator::connect(control, &options, Deadline::after(CONNECTED)).unwrap();
            connected.wait();
            done.send(()).unwrap();
            body(comm);
            done.send(()).unwrap();
        });
    }
    drop(done);
    let both = |limit: Duration, what: &str| {
        let deadline = Deadline::after(limit);
        for _ in 0..2 {
            ended.recv_timeout(deadline.remaining()).expect(what);
        }
    };
    both(CONNECTED, "a rank does not connect");
    both(limit, "a rank hangs or has panicked");
}

fn on_device(comm: &NcclCommunicator) -> Buffer {
    Buffer::Device(Box::new(comm.device().buffer(DType::F32, &[0; 4000]).unwrap()))
}

#[test]
fn an_operation_whose_kernel_never_ends_keeps_the_memory_that_it_may_write_to() {
    two(SETTLED, |comm| {
        let rank = comm.rank();
        let (mine, other) = (on_device(&comm), on_device(&comm));
        if rank == 1 {
            comm.device().behave(Behaviour::Hangs);
        }
        let failed = comm.start(Call::blocking(SUM, mine)).wait().unwrap_err();
        assert!(matches!(failed.error, Error::Timeout { .. }), "{}", failed.error);
        assert!(failed.error.to_string().contains("all-reduce"), "{}", failed.error);
        // An abort has ended rank 0's kernel, and nothing ends rank 1's.
        assert_eq!(failed.buffer.is_some(), rank == 0);
        let began = Instant::now();
        drop((other, failed));
        drop(comm);
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    });
}

#[test]
fn memory_of_the_host_comes_back_at_the_deadline_from_a_copy_that_never_ends() {
    memory_of_the_host_comes_back(1000);
}

#[test]
fn memory_of_the_host_comes_back_from_a_copy_in_pieces_that_never_ends() {
    memory_of_the_host_comes_back(1 << 20);
}

fn memory_of_the_host_comes_back(count: usize) {
    two(SETTLED, move |comm| {
        let (mut values, other) = (vec![1.0f32; count], on_device(&comm));
        if comm.rank() == 1 {
            comm.device().behave(Behaviour::Hangs);
        }
        let began = Instant::now();
        let error = comm.all_reduce(&mut values, ReduceOp::Sum).unwrap_err();
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        assert!(error.to_string().contains("all-reduce"), "{error}");
        assert_eq!(values, vec![1.0; count]);
        // Which would wait for the device for ever.
        drop(other);
    });
}

#[test]
fn finishing_on_a_device_that_hangs_ends_at_its_deadline() {
    two(SETTLED, |comm| {
        comm.device().behave(Behaviour::Hangs);
        let began = Instant::now();
        let error = comm.finish(TIMEOUT).unwrap_err();
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
    });
}

/// One operation runs on the device, and one waits for its turn.
#[test]
fn a_communicator_can_be_dropped_while_its_operations_hang() {
    let both_run = Arc::new(Barrier::new(2));
    two(SOON, move |comm| {
        comm.device().behave(Behaviour::Hangs);
        let start = || comm.start(Call::background(SUM, Buffer::from_vec(vec![1.0f32; 1000]), 0));
        let handles = [start(), start()];
        let deadline = Deadline::after(CONNECTED);
        while !comm.device().is_busy() {
            assert!(!deadline.has_passed(), "the device is given nothing to do");
            thread::sleep(Duration::from_millis(1));
        }
        // The end of one rank is that of the other's operations.
        both_run.wait();
        drop(comm);
        for handle in handles {
            let error = handle.wait().unwrap_err().error;
            assert!(matches!(error, Error::Aborted { .. }), "{error}");
        }
    });
}

#[test]
fn a_buffer_is_not_read_for_ever_from_a_device_that_hangs() {
    two(SETTLED, |comm| {
        let buffer = comm.device().buffer(DType::F32, &[0; 4000]).unwrap();
        comm.device().behave(Behaviour::Hangs);
        let error = comm.device().read(&buffer).unwrap_err().to_string();
        assert!(error.contains("CUDA device 0") && error.contains("no progress"), "{error}");
        let began = Instant::now();
        drop(buffer);
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    });
}

/// That an error is the one of the device that rank 1 has lost.
fn is_loss(error: &Error) {
    let text = error.to_string();
    assert!(
        text.contains("rank 1") && text.contains("CUDA error 700") && text.contains("can no longer use the GPU"),
        "{text}"
    );
    assert!(text.contains("all-reduce"), "{text}");
}

#[test]
fn a_device_that_was_lost_before_an_operation_is_the_error_of_every_rank() {
    two(SOON, |comm| {
        let buffer = on_device(&comm);
        if comm.rank() == 1 {
            comm.device().behave(Behaviour::Lost);
        }
        is_loss(&comm.start(Call::blocking(SUM, buffer)).wait().unwrap_err().error);
        // And stays it.
        is_loss(&comm.all_reduce_scalar(1i32, ReduceOp::Sum).unwrap_err());
    });
}

#[test]
fn a_device_that_is_lost_under_an_operation_is_the_error_of_every_rank() {
    two(SOON, |comm| {
        let began = Instant::now();
        if comm.rank() == 1 {
            let handle = comm.start(Call::background(SUM, on_device(&comm), 1).with_timeout(Duration::from_secs(60)));
            thread::sleep(Duration::from_millis(200));
            comm.device().behave(Behaviour::Lost);
            is_loss(&handle.wait().unwrap_err().error);
        } else {
            let handle = comm.start(
                Call::background(Op::Recv { from: 1 }, on_device(&comm), 0).with_timeout(Duration::from_secs(60)),
            );
            let failed = handle.wait().unwrap_err();
            is_loss(&failed.error);
            assert!(failed.buffer.is_some(), "the memory is lost, though this rank's device works");
        }
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
        drop(comm);
    });
}
