//! Communicators made from communicators.

use std::sync::Arc;
use std::time::Duration;

use super::data::{Pattern, check};
use super::{
    CALL_MODES, CallMode, Case, CaseResult, Step, TIMEOUT, barrier, call, ensure, exchange_number, failed, need_lanes,
    run,
};
use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::error::Error;
use crate::op::{Mode, Op};

pub(super) fn add(cases: &mut Vec<Case>) {
    cases.push(Case::shared("split/by_parity", 1, by_parity));
    cases.push(Case::shared("split/reversed_by_key", 1, reversed));
    cases.push(Case::shared("split/equal_keys_keep_the_order", 1, equal_keys));
    cases.push(Case::shared("split/none", 1, none));
    cases.push(Case::shared("split/each_alone", 1, alone));
    cases.push(Case::shared("split/nested", 1, nested));
    cases.push(Case::shared("split/identities", 1, identities));
    cases.push(Case::shared("split/parent_and_child_in_turn", 1, in_turn));
    cases.push(Case::shared("split/background_in_parent_and_child", 1, background));
    cases.push(Case::shared("split/roots_and_messages", 2, roots_and_messages));
    cases.push(Case::shared("split/finish", 1, finish));
    cases.push(Case::shared("split/finish_leaves_the_parent_alone", 2, finish_beside_the_parent));
    cases.push(Case::shared("split/finish_that_gives_up_ends_nothing", 2, finish_gives_up));
}

fn split(communicator: &Arc<dyn Communicator>, color: u64, key: i64) -> Step<Arc<dyn Communicator>> {
    match communicator.split(Some(color), key)? {
        Some(child) => Ok(child),
        None => failed(format!("split with color {color} gave no communicator")),
    }
}

/// Whether `child` consists of these ranks of the parent, in this order, by what they contribute to collectives.
fn check_members(child: &Arc<dyn Communicator>, parent_rank: usize, members: &[usize]) -> CaseResult {
    let place = members.iter().position(|member| *member == parent_rank);
    ensure(child.world_size() == members.len(), || {
        format!("the child has {} ranks, expected {members:?}", child.world_size())
    })?;
    ensure(Some(child.rank()) == place, || format!("rank {} in the child, expected {place:?}", child.rank()))?;
    let expected: Vec<i64> = members.iter().map(|member| *member as i64).collect();
    check(&exchange_number(child, parent_rank as i64)?, &expected, format_args!("members"))?;
    for call_mode in CALL_MODES {
        let sum = run(child, Op::AllReduce(ReduceOp::Sum), vec![parent_rank as i64; 10_007], call_mode)?;
        check(&sum, &vec![expected.iter().sum::<i64>(); 10_007], format_args!("sum over the child, {call_mode:?}"))?;
    }
    Ok(())
}

fn by_parity(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let child = split(communicator, rank as u64 % 2, 0)?;
    let members: Vec<usize> = (0..ranks).filter(|other| other % 2 == rank % 2).collect();
    check_members(&child, rank, &members)
}

fn reversed(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let child = split(communicator, u64::MAX, -(rank as i64))?;
    let members: Vec<usize> = (0..ranks).rev().collect();
    check_members(&child, rank, &members)?;
    // Shards, too, go by the child's ranks.
    let count = 10_007;
    let values = Pattern::<i32>::of_rank(31, rank, ranks).take(0, count);
    let got = run(&child, Op::ReduceScatter(ReduceOp::Sum), values, CallMode::Blocking)?;
    let shard = crate::op::shard_range(count, ranks, child.rank());
    let sum = Pattern::<i32>::reduction(31, ReduceOp::Sum, ranks);
    sum.check(&got[shard.clone()], shard.start, format_args!("reduce-scatter in the reversed child"))
}

fn equal_keys(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let child = split(communicator, 5, i64::MIN)?;
    check_members(&child, rank, &(0..ranks).collect::<Vec<_>>())
}

/// Rank 0 stays out, on larger groups only that one.
fn none(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let color = (rank > 0).then_some(1);
    match communicator.split(color, 0)? {
        None => ensure(color.is_none(), || "a rank with a color got no communicator".into())?,
        Some(child) => {
            ensure(color.is_some(), || "a rank without a color got a communicator".into())?;
            check_members(&child, rank, &(1..ranks).collect::<Vec<_>>())?;
        }
    }
    // Nobody at all.
    ensure(communicator.split(None, 0)?.is_none(), || "a split without colors gave a communicator".into())?;
    barrier(communicator)
}

fn alone(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let rank = communicator.rank();
    let child = split(communicator, rank as u64, 0)?;
    check_members(&child, rank, &[rank])?;
    barrier(&child)?;
    barrier(communicator)
}

fn nested(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let halves = split(communicator, rank as u64 % 2, -(rank as i64))?;
    let grandchild = split(&halves, halves.rank() as u64 / 2, 0)?;
    let half: Vec<usize> = (0..ranks).rev().filter(|other| other % 2 == rank % 2).collect();
    check_members(&halves, rank, &half)?;
    let first = halves.rank() / 2 * 2;
    check_members(&grandchild, rank, &half[first..half.len().min(first + 2)])?;
    check_members(communicator, rank, &(0..ranks).collect::<Vec<_>>())
}

fn identities(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let first = split(communicator, rank as u64 % 2, 0)?;
    let second = split(communicator, rank as u64 % 2, 0)?;
    let parent = exchange_number(communicator, communicator.id() as i64)?;
    let firsts = exchange_number(communicator, first.id() as i64)?;
    let seconds = exchange_number(communicator, second.id() as i64)?;
    for other in 0..ranks {
        let is_same_half = other % 2 == rank % 2;
        ensure(parent[other] == parent[0], || format!("rank {other} has another id for the parent"))?;
        for (name, ids) in [("first", &firsts), ("second", &seconds)] {
            ensure((ids[other] == ids[rank]) == is_same_half, || {
                format!("{name} child: ids of ranks {rank} and {other} are {} and {}", ids[rank], ids[other])
            })?;
            ensure(ids[other] != parent[0], || format!("{name} child of rank {other} has the parent's id"))?;
        }
        ensure(!seconds.contains(&firsts[other]), || format!("two splits gave the id {}", firsts[other]))?;
    }
    ensure(first.name() == communicator.name(), || format!("the child is called {}", first.name()))?;
    ensure(first.lanes() == communicator.lanes(), || format!("the child has {} lanes", first.lanes()))
}

fn in_turn(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let child = split(communicator, rank as u64 % 2, 0)?;
    let siblings = child.world_size() as i64;
    for round in 1..6 {
        for call_mode in CALL_MODES {
            for (within, members) in [(communicator, ranks as i64), (&child, siblings)] {
                let got = run(within, Op::AllReduce(ReduceOp::Sum), vec![round; 1000], call_mode)?;
                check(&got, &[round * members; 1000], format_args!("round {round} over {members} ranks"))?;
            }
        }
        barrier(&child)?;
    }
    Ok(())
}

fn background(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, lanes) = (communicator.rank(), communicator.lanes());
    let child = split(communicator, rank as u64 % 2, 0)?;
    let mut pending = Vec::new();
    for index in 0..4 * lanes {
        let within = if index / lanes % 2 == 0 { communicator } else { &child };
        let buffer = Buffer::from_vec(vec![index as i64; 5003]);
        let handle = within.start(call(Op::AllReduce(ReduceOp::Sum), buffer, index % lanes, Mode::Background));
        pending.push((index, within.world_size(), handle));
    }
    for (index, members, handle) in pending.into_iter().rev() {
        let got = handle.wait()?.buffer.into_vec::<i64>()?;
        check(&got, &[(index * members) as i64; 5003], format_args!("operation {index} over {members} ranks"))?;
    }
    Ok(())
}

/// Roots and peers are ranks of the child, not of the parent.
fn roots_and_messages(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let child = split(communicator, 1, -(rank as i64))?;
    let mine = ranks - 1 - rank;
    for root in 0..ranks {
        let got = run(&child, Op::Broadcast { root }, vec![rank as i32; 10], CallMode::Blocking)?;
        check(&got, &[(ranks - 1 - root) as i32; 10], format_args!("broadcast from {root} of the child"))?;
    }
    if mine == 0 {
        run(&child, Op::Send { to: ranks - 1 }, vec![rank as i32], CallMode::Background)?;
    } else if mine == ranks - 1 {
        let got = run(&child, Op::Recv { from: 0 }, vec![-1i32], CallMode::Background)?;
        check(&got, &[ranks as i32 - 1], format_args!("the message from rank 0 of the child"))?;
    }
    Ok(())
}

/// A child ends although an operation of its parent waits for a message.
fn finish_beside_the_parent(communicator: &Arc<dyn Communicator>) -> CaseResult {
    need_lanes(communicator, 2)?;
    let (rank, last) = (communicator.rank(), communicator.lanes() - 1);
    let child = split(communicator, 0, 0)?;
    let message = |op| call(op, Buffer::from_vec(vec![rank as i32 + 7]), last, Mode::Background);
    let waiting = (rank == 1).then(|| communicator.start(message(Op::Recv { from: 0 })));
    child.finish(TIMEOUT)?;
    match waiting {
        Some(mut waiting) => {
            // Which the sender knows only after this.
            ensure(!waiting.test(), || "the message was there before it was sent".into())?;
            barrier(communicator)?;
            check(&waiting.wait()?.buffer.into_vec::<i32>()?, &[7], format_args!("the message"))
        }
        None => {
            barrier(communicator)?;
            if rank == 0 {
                communicator.start(message(Op::Send { to: 1 })).wait()?;
            }
            Ok(())
        }
    }
}

/// A child cannot end yet, first because of an operation of its own, then because of one of its parent on the lane where its ranks
/// meet. It says so at its deadline, nothing is harmed, and later it can.
fn finish_gives_up(communicator: &Arc<dyn Communicator>) -> CaseResult {
    need_lanes(communicator, 2)?;
    let (rank, last) = (communicator.rank(), communicator.lanes() - 1);
    let child = split(communicator, 0, 0)?;
    for (within, lane, free) in [(&child, last, 0), (communicator, 0, last)] {
        let message = |op| call(op, Buffer::from_vec(vec![rank as i32 + 7]), lane, Mode::Background);
        let token = |op| call(op, Buffer::from_vec(vec![1u8]), free, Mode::Background);
        match rank {
            0 => {
                communicator.start(token(Op::Recv { from: 1 })).wait()?;
                within.start(message(Op::Send { to: 1 })).wait()?;
            }
            1 => {
                let waiting = within.start(message(Op::Recv { from: 0 }));
                match child.finish(Duration::from_millis(100)) {
                    Err(Error::Timeout { operation, .. }) if operation.contains("finishing") => {}
                    other => return failed(format!("expected finish to give up, got: {other:?}")),
                }
                communicator.start(token(Op::Send { to: 0 })).wait()?;
                check(&waiting.wait()?.buffer.into_vec::<i32>()?, &[7], format_args!("the message"))?;
            }
            _ => {}
        }
    }
    child.finish(TIMEOUT)?;
    barrier(communicator)
}

/// A child can end before its parent, which goes on.
fn finish(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let rank = communicator.rank();
    let child = split(communicator, rank as u64 % 2, 0)?;
    barrier(&child)?;
    child.finish(TIMEOUT)?;
    drop(child);
    std::thread::sleep(Duration::from_millis(1));
    check_members(communicator, rank, &(0..communicator.world_size()).collect::<Vec<_>>())
}
