//! Broadcast, scatter, gather and all-gather, and the conveniences over slices.

use std::sync::Arc;

use half::{bf16, f16};

use super::data::{Pattern, Sample, check};
use super::reductions::{COUNTS, large};
use super::{CALL_MODES, Case, CaseResult, FEW_TYPES, ensure, run};
use crate::collectives::CommunicatorExt;
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::op::{Op, shard_range};
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
    cases.push(Case::shared("conveniences/slices", 1, conveniences));
}

fn add_type<T: Sample>(cases: &mut Vec<Case>) {
    let dtype = T::DTYPE;
    cases.push(Case::shared(format!("broadcast/{dtype}"), 1, broadcast::<T>).of_type::<T>(&FEW_TYPES));
    cases.push(Case::shared(format!("scatter/{dtype}"), 1, scatter::<T>).of_type::<T>(&FEW_TYPES));
    cases.push(Case::shared(format!("gather/{dtype}"), 1, gather::<T>).of_type::<T>(&FEW_TYPES));
    cases.push(Case::shared(format!("all_gather/{dtype}"), 1, all_gather::<T>).of_type::<T>(&FEW_TYPES));
}

fn seed<T: Sample>(kind: u64) -> u64 {
    mix(kind << 16 | T::DTYPE as u64)
}

fn counts<T>() -> impl Iterator<Item = (usize, usize)> {
    COUNTS.into_iter().chain([large::<T>()]).enumerate()
}

fn broadcast<T: Sample>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, seed) = (communicator.rank(), communicator.world_size(), seed::<T>(11));
    let mine = Pattern::<T>::of_rank(seed, rank, ranks);
    for (index, count) in counts::<T>() {
        for root in 0..ranks {
            let call_mode = CALL_MODES[(index + root) % 2];
            let got = run(communicator, Op::Broadcast { root }, mine.take(root, count), call_mode)?;
            ensure(got.len() == count, || format!("count {count}: came back with {}", got.len()))?;
            let expected = Pattern::<T>::of_rank(seed, root, ranks);
            expected.check(&got, root, format_args!("count {count}, root {root}, {call_mode:?}"))?;
        }
    }
    Ok(())
}

fn scatter<T: Sample>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, seed) = (communicator.rank(), communicator.world_size(), seed::<T>(12));
    for (index, total) in counts::<T>() {
        for root in 0..ranks {
            let call_mode = CALL_MODES[(index + root) % 2];
            let whole = Pattern::<T>::of_rank(seed, root, ranks);
            let shard = shard_range(total, ranks, rank);
            let what = format_args!("total {total}, root {root}, {call_mode:?}");
            if rank == root {
                let got = run(communicator, Op::Scatter { root, total }, whole.take(0, total), call_mode)?;
                check(&got, &whole.take(0, total), format_args!("{what}: the root's whole changed"))?;
            } else {
                let empty = vec![T::zeroed(); shard.len()];
                let got = run(communicator, Op::Scatter { root, total }, empty, call_mode)?;
                check(&got, &whole.take(shard.start, shard.len()), what)?;
            }
        }
    }
    Ok(())
}

fn gather<T: Sample>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, seed) = (communicator.rank(), communicator.world_size(), seed::<T>(13));
    let whole = Pattern::<T>::of_rank(seed, 0, ranks);
    for (index, total) in counts::<T>() {
        for root in 0..ranks {
            let call_mode = CALL_MODES[(index + root) % 2];
            let shard = shard_range(total, ranks, rank);
            let mine = whole.take(root + shard.start, shard.len());
            let what = format_args!("total {total}, root {root}, {call_mode:?}");
            if rank == root {
                let mut values = vec![T::zeroed(); total];
                values[shard].copy_from_slice(&mine);
                let got = run(communicator, Op::Gather { root, total }, values, call_mode)?;
                check(&got, &whole.take(root, total), what)?;
            } else {
                let got = run(communicator, Op::Gather { root, total }, mine.clone(), call_mode)?;
                check(&got, &mine, format_args!("{what}: own shard changed"))?;
            }
        }
    }
    Ok(())
}

fn all_gather<T: Sample>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks, seed) = (communicator.rank(), communicator.world_size(), seed::<T>(14));
    let whole = Pattern::<T>::of_rank(seed, 0, ranks);
    for (index, total) in counts::<T>() {
        for call_mode in CALL_MODES {
            let shard = shard_range(total, ranks, rank);
            let mut values = vec![T::zeroed(); total];
            values[shard.clone()].copy_from_slice(&whole.take(index + shard.start, shard.len()));
            let got = run(communicator, Op::AllGather, values, call_mode)?;
            check(&got, &whole.take(index, total), format_args!("total {total}, {call_mode:?}"))?;
        }
    }
    Ok(())
}

/// Every form of [`CommunicatorExt`] once, with shards of unequal length.
fn conveniences(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let (root, total) = (ranks - 1, 10 * ranks + 3);
    let whole: Vec<i32> = (0..total as i32).collect();
    let shard = shard_range(total, ranks, rank);
    let times = |factor: usize| -> Vec<i32> { whole.iter().map(|value| value * factor as i32).collect() };

    let mut values = whole.clone();
    communicator.all_reduce(&mut values, ReduceOp::Sum)?;
    check(&values, &times(ranks), format_args!("all_reduce"))?;

    let most = communicator.all_reduce_scalar(rank as i64, ReduceOp::Max)?;
    check(&[most], &[root as i64], format_args!("all_reduce_scalar"))?;

    let mut values = times(rank);
    communicator.broadcast(&mut values, root)?;
    check(&values, &times(root), format_args!("broadcast"))?;

    let mut values = times(rank + 1);
    communicator.reduce(&mut values, root, ReduceOp::Max)?;
    check(&values, &times(rank + 1), format_args!("reduce"))?;

    let scattered = communicator.scatter(if rank == root { &whole } else { &[] }, total, root)?;
    check(&scattered, &whole[shard.clone()], format_args!("scatter"))?;

    let gathered = communicator.gather(&whole[shard.clone()], total, root)?;
    ensure(gathered.is_some() == (rank == root), || "gather gave the whole to the wrong rank".into())?;
    check(&gathered.unwrap_or_else(|| whole.clone()), &whole, format_args!("gather"))?;

    let gathered = communicator.all_gather(&whole[shard.clone()], total)?;
    check(&gathered, &whole, format_args!("all_gather"))?;

    let scattered = communicator.reduce_scatter(&whole, ReduceOp::Sum)?;
    check(&scattered, &times(ranks)[shard], format_args!("reduce_scatter"))?;

    if ranks > 1 && rank == 0 {
        communicator.send(&whole, root)?;
    } else if ranks > 1 && rank == root {
        check(&communicator.recv::<i32>(total, 0)?, &whole, format_args!("recv"))?;
    }
    communicator.barrier()?;
    Ok(())
}
