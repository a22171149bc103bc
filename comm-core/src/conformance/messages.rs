//! Send, receive and barrier.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use half::{bf16, f16};

use super::data::{Pattern, Sample, check};
use super::reductions::{COUNTS, large};
use super::{CallMode, Case, CaseResult, FEW_TYPES, barrier, ensure, exchange_number, need_lanes, run};
use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::op::{Mode, Op};
use crate::splitmix::mix;

pub(super) fn add(cases: &mut Vec<Case>) {
    add_type::<f32>(cases);
    add_type::<f64>(cases);
    add_type::<f16>(cases);
    add_type::<bf16>(cases);
    add_type::<i8>(cases);
    add_type::<i16>(cases);
    add_type::<i32>(cases);
    add_type::<i64>(cases);
    add_type::<u8>(cases);
    add_type::<u16>(cases);
    add_type::<u32>(cases);
    add_type::<u64>(cases);
    cases.push(Case::shared("send_recv/both_directions_at_once", 2, both_directions));
    cases.push(Case::shared("send_recv/many_in_order", 2, many_in_order));
    cases.push(Case::shared("send_recv/all_to_one", 2, all_to_one));
    cases.push(Case::shared("send_recv/between_collectives", 2, between_collectives));
    cases.push(Case::shared("send_recv/one_pair_of_many", 2, one_pair));
    cases.push(Case::shared("barrier/returns_at_once_when_all_are_there", 1, |communicator| {
        (0..20).try_for_each(|_| barrier(communicator))
    }));
    cases.push(Case::shared("barrier/waits_for_the_last", 1, barrier_waits));
}

fn add_type<T: Sample>(cases: &mut Vec<Case>) {
    cases.push(Case::shared(format!("send_recv/ring/{}", T::DTYPE), 2, ring::<T>).of_type::<T>(&FEW_TYPES));
}

/// Every rank sends to the next and receives from the one before. Even ranks send first, so nothing depends on buffers.
fn ring<T: Sample>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, seed) = (communicator.rank(), communicator.world_size(), mix(T::DTYPE as u64));
    let (to, from) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let mine = Pattern::<T>::of_rank(seed, rank, ranks);
    let theirs = Pattern::<T>::of_rank(seed, from, ranks);
    for count in COUNTS.into_iter().chain([large::<T>()]) {
        for (index, call_mode) in super::CALL_MODES.into_iter().enumerate() {
            let send = || -> CaseResult {
                let back = run(communicator, Op::Send { to }, mine.take(index, count), call_mode)?;
                mine.check(&back, index, format_args!("count {count}, {call_mode:?}: the sent buffer changed"))
            };
            if rank % 2 == 0 {
                send()?;
            }
            let got = run(communicator, Op::Recv { from }, vec![T::zeroed(); count], call_mode)?;
            ensure(got.len() == count, || format!("count {count}: came back with {}", got.len()))?;
            theirs.check(&got, index, format_args!("count {count}, {call_mode:?}, from {from}"))?;
            if rank % 2 == 1 {
                send()?;
            }
        }
    }
    Ok(())
}

/// Neighbours 0–1, 2–3, … send 1 MiB to each other at the same time, each direction on a lane of its own.
fn both_directions(communicator: &Arc<dyn Communicator>) -> CaseResult {
    need_lanes(communicator, 2)?;
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let peer = rank ^ 1;
    if peer >= ranks {
        return Ok(());
    }
    for count in [0, 1, 10_007, large::<f32>()] {
        let (send_lane, recv_lane) = (rank % 2, peer % 2);
        let mine = Pattern::<f32>::of_rank(5, rank, ranks);
        let sent = communicator.start(super::call(
            Op::Send { to: peer },
            Buffer::from_vec(mine.take(0, count)),
            send_lane,
            Mode::Background,
        ));
        let received = communicator.start(super::call(
            Op::Recv { from: peer },
            Buffer::from_vec(vec![0f32; count]),
            recv_lane,
            Mode::Background,
        ));
        let got = received.wait()?.buffer.into_vec::<f32>()?;
        sent.wait()?;
        Pattern::of_rank(5, peer, ranks).check(&got, 0, format_args!("count {count} from {peer}"))?;
    }
    Ok(())
}

/// A hundred messages of changing size and type follow each other before the receiver takes the first.
fn many_in_order(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let last = ranks - 1;
    let sizes = (0..100usize).map(|index| (index, index * index % 97));
    if rank == 0 {
        for (index, size) in sizes {
            if index % 2 == 0 {
                run(communicator, Op::Send { to: last }, vec![index as i32; size], CallMode::Blocking)?;
            } else {
                run(communicator, Op::Send { to: last }, vec![index as u8; size], CallMode::Blocking)?;
            }
        }
    } else if rank == last {
        std::thread::sleep(Duration::from_millis(5));
        for (index, size) in sizes {
            if index % 2 == 0 {
                let got = run(communicator, Op::Recv { from: 0 }, vec![-1i32; size], CallMode::Blocking)?;
                check(&got, &vec![index as i32; size], format_args!("message {index}"))?;
            } else {
                let got = run(communicator, Op::Recv { from: 0 }, vec![0u8; size], CallMode::Blocking)?;
                check(&got, &vec![index as u8; size], format_args!("message {index}"))?;
            }
        }
    }
    barrier(communicator)
}

/// All ranks send to rank 0 at once, which takes the messages in the reverse order of ranks.
fn all_to_one(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, count) = (communicator.rank(), communicator.world_size(), 50_021);
    if rank > 0 {
        let mine = Pattern::<f32>::of_rank(6, rank, ranks).take(0, count);
        run(communicator, Op::Send { to: 0 }, mine, CallMode::Blocking)?;
        return Ok(());
    }
    for from in (1..ranks).rev() {
        let got = run(communicator, Op::Recv { from }, vec![0f32; count], CallMode::Blocking)?;
        Pattern::of_rank(6, from, ranks).check(&got, 0, format_args!("from {from}"))?;
    }
    Ok(())
}

/// Messages between two ranks and collectives of all share the lane; the numbers of both go on undisturbed.
fn between_collectives(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    for round in 0..5i64 {
        let sum = run(communicator, Op::AllReduce(ReduceOp::Sum), vec![round; 10], CallMode::Blocking)?;
        check(&sum, &[round * ranks as i64; 10], format_args!("round {round}, all-reduce"))?;
        if rank == 0 {
            run(communicator, Op::Send { to: 1 }, vec![round; 3], CallMode::Blocking)?;
        } else if rank == 1 {
            let got = run(communicator, Op::Recv { from: 0 }, vec![0i64; 3], CallMode::Blocking)?;
            check(&got, &[round; 3], format_args!("round {round}, receive"))?;
        }
        let root = round as usize % ranks;
        let got = run(communicator, Op::Broadcast { root }, vec![rank as i64; 4], CallMode::Blocking)?;
        check(&got, &[root as i64; 4], format_args!("round {round}, broadcast"))?;
    }
    Ok(())
}

/// Two ranks talk to each other while the others wait in a barrier.
fn one_pair(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let last = ranks - 1;
    for turn in 0..10i32 {
        if rank == 0 {
            run(communicator, Op::Send { to: last }, vec![turn], CallMode::Blocking)?;
            let got = run(communicator, Op::Recv { from: last }, vec![0i32], CallMode::Blocking)?;
            check(&got, &[turn + 1], format_args!("turn {turn}, answer"))?;
        } else if rank == last {
            let got = run(communicator, Op::Recv { from: 0 }, vec![0i32], CallMode::Blocking)?;
            check(&got, &[turn], format_args!("turn {turn}, question"))?;
            run(communicator, Op::Send { to: 0 }, vec![turn + 1], CallMode::Blocking)?;
        }
    }
    barrier(communicator)
}

/// No rank leaves a barrier before the last has entered it, by the clock that the ranks of one machine share.
fn barrier_waits(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let now = || SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as i64);
    let ranks = communicator.world_size();
    for last in 0..ranks {
        for mode in [Mode::Blocking, Mode::Background] {
            if communicator.rank() == last {
                std::thread::sleep(Duration::from_millis(10));
            }
            let entered = now();
            let call = super::call(Op::Barrier, Buffer::from_vec::<u8>(Vec::new()), 0, mode);
            communicator.start(call).wait()?;
            let left = now();
            let entries = exchange_number(communicator, entered)?;
            let latest = entries.into_iter().max().unwrap_or(0);
            ensure(left >= latest, || format!("left {mode:?} {} ns before rank {last} entered", latest - left))?;
        }
    }
    Ok(())
}
