//! Out of place, on borrowed memory, with shards of unequal lengths, and all-to-all.

use std::sync::Arc;

use super::data::{Pattern, Sample, check};
use super::{CallMode, Case, CaseResult, ensure, exchange_number, failed, run, run_call};
use crate::buffer::{Buffer, View, ViewMut};
use crate::collectives::CommunicatorExt;
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::error::Error;
use crate::op::{BorrowedCall, Call, Counts, Mode, Op, shard_range};
use crate::splitmix::mix;

use super::reductions::COUNTS;

pub(super) fn add(cases: &mut Vec<Case>) {
    add_type::<f32>(cases);
    add_type::<half::f16>(cases);
    add_type::<u8>(cases);
    add_type::<i64>(cases);
    cases.push(Case::shared("counts/conveniences", 1, conveniences));
    cases.push(Case::shared("counts/refused", 1, refused));
    cases.push(Case::shared("all_to_all/unequal", 1, all_to_all_v));
    cases.push(Case::shared("overlapping_groups", 3, overlapping));
}

fn add_type<T: Sample>(cases: &mut Vec<Case>) {
    let dtype = T::DTYPE;
    cases.push(Case::shared(format!("out_of_place/{dtype}"), 1, out_of_place::<T>));
    cases.push(Case::shared(format!("borrowed/{dtype}"), 1, borrowed::<T>));
    cases.push(Case::shared(format!("all_to_all/{dtype}"), 1, all_to_all::<T>));
    cases.push(Case::shared(format!("counts/{dtype}"), 1, counts::<T>));
}

/// What rank `rank` passes and what it gets, for every operation out of place: (operation, input, buffer's length, result).
/// An input of `None` is not passed; a result of `None` is not specified.
type Expected<T> = (Op, Option<Vec<T>>, usize, Option<Vec<T>>);

fn expected<T: Sample>(seed: u64, count: usize, root: usize, rank: usize, ranks: usize) -> Vec<Expected<T>> {
    let of = |rank: usize| Pattern::<T>::of_rank(seed, rank, ranks).take(0, count);
    let (mine, of_root) = (of(rank), of(root));
    let sum = Pattern::<T>::reduction(seed, ReduceOp::Sum, ranks).take(0, count);
    let shard = shard_range(count, ranks, rank);
    let is_root = rank == root;
    let total = count;
    // Blocks of one length: what does not divide is left out.
    let block = count / ranks;
    let blocks = |values: &[T]| values[..block * ranks].to_vec();
    let transposed: Vec<T> = (0..ranks).flat_map(|from| of(from)[rank * block..(rank + 1) * block].to_vec()).collect();
    vec![
        (Op::AllReduce(ReduceOp::Sum), Some(mine.clone()), count, Some(sum.clone())),
        (Op::Broadcast { root }, is_root.then(|| mine.clone()), count, Some(of_root.clone())),
        (Op::Reduce { root, op: ReduceOp::Sum }, Some(mine.clone()), count, is_root.then(|| sum.clone())),
        (
            Op::Scatter { root, total },
            is_root.then(|| mine.clone()),
            shard.len(),
            Some(of_root[shard.clone()].to_vec()),
        ),
        (Op::Gather { root, total }, Some(of_root[shard.clone()].to_vec()), count, is_root.then(|| of_root.clone())),
        (Op::AllGather, Some(of_root[shard.clone()].to_vec()), count, Some(of_root.clone())),
        (Op::ReduceScatter(ReduceOp::Sum), Some(mine.clone()), shard.len(), Some(sum[shard.clone()].to_vec())),
        (Op::AllToAll, Some(blocks(&mine)), block * ranks, Some(transposed)),
    ]
}

fn out_of_place<T: Sample>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    for (index, count) in COUNTS.into_iter().chain([150_001]).enumerate() {
        let root = index % ranks;
        for (op, input, length, result) in expected::<T>(mix(count as u64), count, root, rank, ranks) {
            let rubbish = Pattern::<T>::of_rank(99, rank, ranks).take(7, length);
            let mode = if index % 2 == 0 { Mode::Blocking } else { Mode::Background };
            let mut call = Call { mode, ..Call::blocking(op, Buffer::from_vec(rubbish.clone())) };
            if let Some(input) = &input {
                call = call.out_of_place(Buffer::from_vec(input.clone()));
            }
            let (got, back) = run_call::<T>(communicator, call)?;
            let what = format!("{op:?} of {count}, {mode:?}");
            ensure(back.is_some() == input.is_some(), || format!("{what}: the input did not come back"))?;
            if let (Some(back), Some(input)) = (&back, &input) {
                check(back, input, format_args!("{what}: the input changed"))?;
            }
            // Where nothing is specified there is nothing to receive, so nothing was touched.
            check(&got, result.as_ref().unwrap_or(&rubbish), format_args!("{what}"))?;
        }
    }
    Ok(())
}

fn borrowed<T: Sample>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    for (index, count) in COUNTS.into_iter().enumerate() {
        let root = (index + 1) % ranks;
        for (op, input, length, result) in expected::<T>(mix(count as u64 + 1), count, root, rank, ranks) {
            let rubbish = Pattern::<T>::of_rank(98, rank, ranks).take(3, length);
            let mut values = rubbish.clone();
            let mut call = BorrowedCall::new(op, ViewMut::of(&mut values));
            if let Some(input) = &input {
                call = call.out_of_place(View::of(input));
            }
            // While an operation is under way on its lane, the call cannot run in this thread.
            let before = (index % 2 == 1).then(|| {
                let buffer = Buffer::from_vec(vec![1i32; 100_003]);
                communicator.start(Call::background(Op::AllReduce(ReduceOp::Sum), buffer, 0))
            });
            communicator.run_borrowed(call)?;
            if let Some(before) = before {
                let sum = before.wait()?.buffer.into_vec::<i32>()?;
                check(&sum, &vec![ranks as i32; 100_003], format_args!("the operation before"))?;
            }
            check(&values, result.as_ref().unwrap_or(&rubbish), format_args!("{op:?} of {count}"))?;
        }
    }
    Ok(())
}

fn all_to_all<T: Sample>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    for block in [0, 1, 10, 1000, 10_007, 100_003] {
        for call_mode in super::CALL_MODES {
            let of = |rank: usize| Pattern::<T>::of_rank(mix(block as u64), rank, ranks);
            let got = run(communicator, Op::AllToAll, of(rank).take(0, block * ranks), call_mode)?;
            for from in 0..ranks {
                let what = format_args!("blocks of {block}, {call_mode:?}, from rank {from}");
                of(from).check(&got[from * block..(from + 1) * block], rank * block, what)?;
            }
        }
    }
    Ok(())
}

/// Shards of lengths that differ a lot, one of them empty.
fn unequal(total: usize, ranks: usize) -> Vec<usize> {
    let mut counts = vec![0; ranks];
    let mut left = total;
    for (rank, count) in counts.iter_mut().enumerate().skip(usize::from(ranks > 1)) {
        *count = if rank + 1 == ranks { left } else { left / 3 };
        left -= *count;
    }
    counts
}

fn counts<T: Sample>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    for (index, total) in COUNTS.into_iter().chain([700_001]).enumerate() {
        let root = index % ranks;
        let lengths = unequal(total, ranks);
        let start: usize = lengths[..rank].iter().sum();
        let shard = start..start + lengths[rank];
        let seed = mix(total as u64 + 5);
        let whole = Pattern::<T>::of_rank(seed, root, ranks);
        let mine = Pattern::<T>::of_rank(seed, rank, ranks);
        let sum = Pattern::<T>::reduction(seed, ReduceOp::Sum, ranks);
        let is_root = rank == root;
        let run = |op: Op, values: Vec<T>| {
            let call = Call::blocking(op, Buffer::from_vec(values)).with_counts(Counts::new(lengths.clone()));
            run_call::<T>(communicator, call)
        };
        let mut placed = vec![T::zeroed(); total];
        placed[shard.clone()].copy_from_slice(&whole.take(shard.start, shard.len()));
        let what = |op: &str| format!("{op} of {total} as {lengths:?}");

        let (got, _) = run(Op::AllGather, placed.clone())?;
        whole.check(&got, 0, format_args!("{}", what("all-gather")))?;
        let (got, _) = run(Op::ReduceScatter(ReduceOp::Sum), mine.take(0, total))?;
        sum.check(&got[shard.clone()], shard.start, format_args!("{}", what("reduce-scatter")))?;
        let values = if is_root { whole.take(0, total) } else { vec![T::zeroed(); shard.len()] };
        let (got, _) = run(Op::Scatter { root, total }, values)?;
        let got = if is_root { &got[shard.clone()] } else { &got[..] };
        whole.check(got, shard.start, format_args!("{}", what("scatter")))?;
        let values = if is_root { placed } else { whole.take(shard.start, shard.len()) };
        let (got, _) = run(Op::Gather { root, total }, values)?;
        let (got, start) = if is_root { (&got[..], 0) } else { (&got[..], shard.start) };
        whole.check(got, start, format_args!("{}", what("gather")))?;
    }
    Ok(())
}

/// Rank r sends r + 2p elements to rank p.
fn all_to_all_v(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let number = |from: usize, to: usize| (from + 2 * to) * 501;
    let value = |from: usize, to: usize, index: usize| (from * 1_000_000 + to * 10_000 + index) as i32;
    let block = |from: usize, to: usize| (0..number(from, to)).map(move |index| value(from, to, index));
    let send: Vec<usize> = (0..ranks).map(|to| number(rank, to)).collect();
    let receive: Vec<usize> = (0..ranks).map(|from| number(from, rank)).collect();
    let out: Vec<i32> = (0..ranks).flat_map(|to| block(rank, to)).collect();
    let expected: Vec<i32> = (0..ranks).flat_map(|from| block(from, rank)).collect();
    check(&communicator.all_to_all_v(&out, &send, &receive)?, &expected, format_args!("out of place"))?;
    let mut values = out.clone();
    values.resize(out.len().max(expected.len()), -1);
    let call = Call::background(Op::AllToAll, Buffer::from_vec(values), communicator.lanes() - 1)
        .with_counts(Counts::all_to_all(send, receive));
    let (got, _) = run_call::<i32>(communicator, call)?;
    check(&got[..expected.len()], &expected, format_args!("in place"))
}

/// Every form of [`CommunicatorExt`] that has to do with unequal shards, and those that give memory back.
fn conveniences(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let (root, lengths) = (ranks - 1, unequal(100, ranks));
    let whole: Vec<i32> = (0..100).collect();
    let start: usize = lengths[..rank].iter().sum();
    let shard = &whole[start..start + lengths[rank]];

    let scattered = communicator.scatter_v(if rank == root { &whole } else { &[] }, &lengths, root)?;
    check(&scattered, shard, format_args!("scatter_v"))?;
    let gathered = communicator.gather_v(shard, &lengths, root)?;
    ensure(gathered.is_some() == (rank == root), || "gather_v gave the whole to the wrong rank".into())?;
    check(&gathered.unwrap_or_else(|| whole.clone()), &whole, format_args!("gather_v"))?;
    check(&communicator.all_gather_v(shard, &lengths)?, &whole, format_args!("all_gather_v"))?;

    let mut sum = vec![0; 100];
    communicator.all_reduce_into(&whole, &mut sum, ReduceOp::Sum)?;
    let times = |factor: i32| -> Vec<i32> { whole.iter().map(|value| value * factor).collect() };
    check(&sum, &times(ranks as i32), format_args!("all_reduce_into"))?;

    let blocks: Vec<i32> = (0..ranks as i32).map(|to| rank as i32 * 100 + to).collect();
    let expected: Vec<i32> = (0..ranks as i32).map(|from| from * 100 + rank as i32).collect();
    check(&communicator.all_to_all(&blocks)?, &expected, format_args!("all_to_all"))?;

    if ranks > 1 && rank == 0 {
        communicator.send(&whole, root)?;
    } else if ranks > 1 && rank == root {
        let mut received = vec![0; 100];
        communicator.recv_into(&mut received, 0)?;
        check(&received, &whole, format_args!("recv_into"))?;
    }
    communicator.barrier()?;
    Ok(())
}

/// Lengths and counts that do not fit together are refused where they are passed, with the buffers given back.
fn refused(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let ranks = communicator.world_size();
    let buffer = |count: usize| Buffer::from_vec(vec![1i32; count]);
    let of = |counts: Vec<usize>| Counts::new(counts);
    let mut calls = vec![
        Call::blocking(Op::AllReduce(ReduceOp::Sum), buffer(3)).out_of_place(buffer(4)),
        Call::blocking(Op::AllReduce(ReduceOp::Sum), buffer(3)).out_of_place(Buffer::from_vec(vec![1f32; 3])),
        Call::blocking(Op::AllReduce(ReduceOp::Sum), buffer(3)).with_counts(of(vec![1; ranks])),
        Call::blocking(Op::AllReduce(ReduceOp::scaled_sum(0.5)), buffer(3)),
        Call::blocking(Op::AllReduce(ReduceOp::scaled_sum(f64::NAN)), buffer(3)),
        Call::blocking(Op::Barrier, buffer(0)).out_of_place(buffer(0)),
        Call::blocking(Op::AllGather, buffer(ranks)).with_counts(of(vec![1; ranks + 1])),
        Call::blocking(Op::AllGather, buffer(ranks + 1)).with_counts(of(vec![1; ranks])),
        Call::blocking(Op::AllGather, buffer(ranks)).with_counts(of(vec![usize::MAX; ranks.max(2)])),
        Call::blocking(Op::AllGather, buffer(ranks)).with_counts(Counts::all_to_all(vec![1; ranks], vec![1; ranks])),
        Call::blocking(Op::AllToAll, buffer(ranks)).with_counts(of(vec![1; ranks])),
        Call::blocking(Op::AllToAll, buffer(ranks)).out_of_place(buffer(2 * ranks)),
        Call::blocking(Op::AllToAll, buffer(2 * ranks)).with_counts(Counts::all_to_all(vec![1; ranks], vec![2; ranks])),
        Call::blocking(Op::ReduceScatter(ReduceOp::Sum), buffer(2)).out_of_place(buffer(ranks)),
        Call::blocking(Op::Scatter { root: 0, total: ranks }, buffer(1)).with_counts(of(vec![2; ranks])),
    ];
    if ranks > 1 {
        calls.push(Call::blocking(Op::AllToAll, buffer(ranks + 1)));
    }
    for call in calls {
        let what = format!("{call:?}");
        let has_input = call.input.is_some();
        match communicator.start(call).wait() {
            Ok(_) => return failed(format!("{what}: was accepted")),
            Err(error) => {
                let is_invalid = matches!(error.error, Error::InvalidArgument(_));
                ensure(is_invalid, || format!("{what}: expected InvalidArgument, got: {}", error.error))?;
                ensure(error.buffer.is_some() && error.input.is_some() == has_input, || {
                    format!("{what}: a buffer was not given back")
                })?;
            }
        }
    }
    let sum = run(communicator, Op::AllReduce(ReduceOp::Sum), vec![1i32; 10], CallMode::Blocking)?;
    check(&sum, &[ranks as i32; 10], format_args!("all-reduce afterwards"))
}

/// Groups {0, 1, …, N−2}, {1, …, N−1} and all, with operations of all three in flight at once on shared lanes.
fn overlapping(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, lanes) = (communicator.rank(), communicator.world_size(), communicator.lanes());
    let low = communicator.split((rank + 1 < ranks).then_some(1), 0)?;
    let high = communicator.split((rank > 0).then_some(2), 0)?;
    let mut handles = Vec::new();
    for round in 0..6 {
        for (group, members) in
            [(low.as_ref(), 0..ranks - 1), (high.as_ref(), 1..ranks), (Some(communicator), 0..ranks)]
        {
            let Some(group) = group else { continue };
            let buffer = Buffer::from_vec(vec![rank as i64 + round; 2003]);
            let handle = group.start(Call::background(Op::AllReduce(ReduceOp::Sum), buffer, round as usize % lanes));
            handles.push((members.map(|member| member as i64 + round).sum::<i64>(), handle));
        }
    }
    for (sum, handle) in handles.into_iter().rev() {
        check(&handle.wait()?.buffer.into_vec::<i64>()?, &[sum; 2003], format_args!("a sum over some ranks"))?;
    }
    for (group, first, last) in [(&low, 0, ranks - 2), (&high, 1, ranks - 1)] {
        if let Some(group) = group {
            let expected: Vec<i64> = (first..=last).map(|member| member as i64).collect();
            check(&exchange_number(group, rank as i64)?, &expected, format_args!("members"))?;
        }
    }
    Ok(())
}
