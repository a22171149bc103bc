//! Operations in flight: several on one lane, on all lanes, beside blocking ones, and what their handles say.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake};
use std::thread;
use std::time::{Duration, Instant};

use super::data::{Pattern, check};
use super::{
    CallMode, Case, CaseResult, Step, TIMEOUT, barrier, call, ensure, exchange_number, failed, need_lanes, run,
};
use crate::buffer::Buffer;
use crate::collectives::CommunicatorExt;
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::handle::Handle;
use crate::op::{Mode, Op, shard_range};

pub(super) fn add(cases: &mut Vec<Case>) {
    cases.push(Case::shared("background/several_on_one_lane", 1, one_lane));
    cases.push(Case::shared("background/several_on_all_lanes", 1, all_lanes));
    cases.push(Case::shared("background/mixed_with_blocking", 1, mixed));
    cases.push(Case::shared("background/different_operations", 1, different_operations));
    cases.push(Case::shared("background/lanes_do_not_wait_for_each_other", 2, independent_lanes));
    cases.push(Case::shared("background/order_of_waiting_is_free", 1, reverse_waits));
    cases.push(Case::shared("background/dropped_handles_still_run", 1, dropped));
    cases.push(Case::shared("background/polling", 1, polling));
    cases.push(Case::shared("background/large_and_small", 1, large_and_small));
    cases.push(Case::shared("background/awaited", 1, awaited));
    cases.push(Case::shared("blocking/complete_on_return", 1, complete_on_return));
}

/// An all-reduce under way, and what it must give.
struct Pending {
    handle: Handle,
    reduced: Vec<f32>,
    what: String,
}

fn start(communicator: &Arc<dyn Communicator>, seed: u64, count: usize, lane: usize) -> Pending {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let values = Pattern::<f32>::of_rank(seed, rank, ranks).take(0, count);
    let reduced = Pattern::<f32>::reduction(seed, ReduceOp::Sum, ranks).take(0, count);
    let op = Op::AllReduce(ReduceOp::Sum);
    let handle = communicator.start(call(op, Buffer::from_vec(values), lane, Mode::Background));
    Pending { handle, reduced, what: format!("all-reduce {seed} of {count} on lane {lane}") }
}

impl Pending {
    /// Waits for it and checks it; when it ended.
    fn finish(self) -> Step<(Instant, Instant)> {
        let completed = self.handle.wait()?;
        ensure(completed.began <= completed.ended, || format!("{}: ended before it began", self.what))?;
        ensure(completed.ended <= Instant::now(), || format!("{}: ended in the future", self.what))?;
        check(&completed.buffer.into_vec::<f32>()?, &self.reduced, format_args!("{}", self.what))?;
        Ok((completed.began, completed.ended))
    }
}

fn one_lane(communicator: &Arc<dyn Communicator>) -> CaseResult {
    for lane in 0..communicator.lanes() {
        let counts = [10_007, 0, 1, 5000, 10, 100_003, 3, 1000];
        let pending: Vec<Pending> =
            counts.iter().enumerate().map(|(seed, count)| start(communicator, seed as u64, *count, lane)).collect();
        let mut previous = None;
        for pending in pending {
            let what = pending.what.clone();
            let (_, ended) = pending.finish()?;
            let in_order = previous.is_none_or(|previous| previous <= ended);
            ensure(in_order, || format!("{what} ended before the one started earlier on its lane"))?;
            previous = Some(ended);
        }
    }
    Ok(())
}

fn all_lanes(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let lanes = communicator.lanes();
    let pending: Vec<Pending> = (0..4 * lanes)
        .map(|index| start(communicator, index as u64, [10_007, 1, 1000, 65_537][index / lanes], index % lanes))
        .collect();
    pending.into_iter().try_for_each(|pending| pending.finish().map(drop))
}

fn mixed(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let lanes = communicator.lanes();
    for round in 0..3 {
        let pending: Vec<Pending> =
            (0..2 * lanes).map(|index| start(communicator, index as u64, 20_011, index % lanes)).collect();
        // Lane 0 is busy, so this one waits for its turn.
        let numbers = exchange_number(communicator, communicator.rank() as i64 + round)?;
        for (rank, number) in numbers.into_iter().enumerate() {
            ensure(number == rank as i64 + round, || format!("round {round}: rank {rank} is said to hold {number}"))?;
        }
        let late = start(communicator, 99, 10, lanes - 1);
        barrier(communicator)?;
        late.finish()?;
        pending.into_iter().try_for_each(|pending| pending.finish().map(drop))?;
    }
    Ok(())
}

fn different_operations(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, lanes) = (communicator.rank(), communicator.world_size(), communicator.lanes());
    let (root, count) = (ranks - 1, 10_007);
    let mine = Pattern::<i32>::of_rank(21, rank, ranks).take(0, count);
    let sum = Pattern::<i32>::reduction(21, ReduceOp::Sum, ranks).take(0, count);
    let of_root = Pattern::<i32>::of_rank(21, root, ranks).take(0, count);
    let shard = shard_range(count, ranks, rank);

    let scattered = if rank == root { mine.clone() } else { vec![0; shard.len()] };
    let mut placed = vec![0; count];
    placed[shard.clone()].copy_from_slice(&sum[shard.clone()]);
    let operations = [
        (Op::AllReduce(ReduceOp::Sum), mine.clone()),
        (Op::Broadcast { root }, mine.clone()),
        (Op::ReduceScatter(ReduceOp::Sum), mine.clone()),
        (Op::AllGather, placed),
        (Op::Scatter { root, total: count }, scattered),
        (Op::Reduce { root, op: ReduceOp::Sum }, mine.clone()),
        (Op::Barrier, Vec::new()),
    ];
    let handles: Vec<Handle> = operations
        .into_iter()
        .enumerate()
        .map(|(index, (op, values))| {
            communicator.start(call(op, Buffer::from_vec(values), index % lanes, Mode::Background))
        })
        .collect();
    let mut results = Vec::new();
    for handle in handles {
        results.push(handle.wait()?.buffer.into_vec::<i32>()?);
    }
    check(&results[0], &sum, format_args!("all-reduce"))?;
    check(&results[1], &of_root, format_args!("broadcast"))?;
    check(&results[2][shard.clone()], &sum[shard.clone()], format_args!("reduce-scatter"))?;
    check(&results[3], &sum, format_args!("all-gather"))?;
    let mine_of_root = if rank == root { &of_root[..] } else { &of_root[shard] };
    check(&results[4], mine_of_root, format_args!("scatter"))?;
    check(&results[5], if rank == root { &sum } else { &mine }, format_args!("reduce"))
}

/// Odd ranks start a receive on lane 1. Its message is sent only after all ranks have met on lane 0.
fn independent_lanes(communicator: &Arc<dyn Communicator>) -> CaseResult {
    need_lanes(communicator, 2)?;
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let is_receiver = rank % 2 == 1;
    let received = is_receiver.then(|| {
        let buffer = Buffer::from_vec(vec![0u8; 4]);
        communicator.start(call(Op::Recv { from: rank - 1 }, buffer, 1, Mode::Background))
    });
    barrier(communicator)?;
    start(communicator, 1, 10_007, 0).finish()?;
    if let Some(mut received) = received {
        // The sender is still waiting for this rank in the barrier below.
        ensure(!received.test(), || "a receive ended before its message was sent".into())?;
        barrier(communicator)?;
        check(&received.wait()?.buffer.into_vec::<u8>()?, &[7; 4], format_args!("the message"))
    } else {
        barrier(communicator)?;
        if rank + 1 < ranks {
            let buffer = Buffer::from_vec(vec![7u8; 4]);
            communicator.start(call(Op::Send { to: rank + 1 }, buffer, 1, Mode::Background)).wait()?;
        }
        Ok(())
    }
}

fn reverse_waits(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let lanes = communicator.lanes();
    let pending: Vec<Pending> =
        (0..3 * lanes).map(|index| start(communicator, index as u64, 3001 + index, index % lanes)).collect();
    pending.into_iter().rev().try_for_each(|pending| pending.finish().map(drop))
}

fn dropped(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let lanes = communicator.lanes();
    for index in 0..3 * lanes {
        // Dropping the handle leaves the operation running.
        drop(start(communicator, index as u64, 10_007, index % lanes).handle);
    }
    (0..lanes).try_for_each(|lane| start(communicator, 7, 10, lane).finish().map(drop))
}

fn polling(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let mut pending = start(communicator, 1, 100_003, 0);
    let began = Instant::now();
    while !pending.handle.test() {
        ensure(began.elapsed() < TIMEOUT, || "test() never became true".into())?;
        std::thread::sleep(Duration::from_micros(200));
    }
    ensure(pending.handle.test(), || "test() became false again".into())?;
    pending.finish()?;

    let mut pending = start(communicator, 2, 100_003, 0);
    while began.elapsed() < 2 * TIMEOUT {
        match pending.handle.wait_timeout(Duration::from_micros(300)) {
            Ok(outcome) => return check(&outcome?.buffer.into_vec::<f32>()?, &pending.reduced, format_args!("result")),
            Err(handle) => pending.handle = handle,
        }
    }
    failed("wait_timeout() never gave the outcome")
}

fn large_and_small(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let last = communicator.lanes() - 1;
    let large = start(communicator, 1, 1_000_003, 0);
    let small: Vec<Pending> = (0..10).map(|index| start(communicator, 10 + index, 10, last)).collect();
    small.into_iter().try_for_each(|pending| pending.finish().map(drop))?;
    large.finish().map(drop)
}

/// Typed results, awaited without a runtime.
fn awaited(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, last) = (communicator.rank(), communicator.world_size(), communicator.lanes() - 1);
    let sum = communicator.all_reduce_async(vec![rank as i32; 10_007], ReduceOp::Sum);
    let all = communicator.on_lane(last).all_gather_async(vec![rank as u16], ranks);
    let both = pin!(async { (all.await, sum.await) });
    let (all, sum) = block_on(both)?;
    check(&all?, &(0..ranks as u16).collect::<Vec<_>>(), format_args!("all-gather"))?;
    check(&sum?, &vec![(0..ranks as i32).sum(); 10_007], format_args!("all-reduce"))
}

/// Runs `future` in this thread, which sleeps until it is woken.
fn block_on<F: Future>(mut future: Pin<&mut F>) -> Step<F::Output> {
    struct Thread(thread::Thread);

    impl Wake for Thread {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let (waker, began) = (Arc::new(Thread(thread::current())).into(), Instant::now());
    loop {
        if let Poll::Ready(value) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return Ok(value);
        }
        let left = TIMEOUT.saturating_sub(began.elapsed());
        ensure(!left.is_zero(), || "the task was not woken, or its operations did not end".into())?;
        thread::park_timeout(left);
    }
}

/// Nothing is under way on the lane, so a blocking call has ended when `start` returns.
fn complete_on_return(communicator: &Arc<dyn Communicator>) -> CaseResult {
    for lane in 0..communicator.lanes() {
        let op = Op::AllReduce(ReduceOp::Sum);
        let mut handle = communicator.start(call(op, Buffer::from_vec(vec![1i32; 1000]), lane, Mode::Blocking));
        ensure(handle.test(), || format!("a blocking all-reduce on lane {lane} was still running"))?;
        let got = handle.wait()?.buffer.into_vec::<i32>()?;
        check(&got, &[communicator.world_size() as i32; 1000], format_args!("lane {lane}"))?;
    }
    let got = run(communicator, Op::AllReduce(ReduceOp::Max), vec![communicator.rank() as i32], CallMode::Blocking)?;
    check(&got, &[communicator.world_size() as i32 - 1], format_args!("all-reduce afterwards"))
}
