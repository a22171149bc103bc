//! All-reduce, reduce and reduce-scatter: every type, every reduction, and the rules of rounding, wrapping and NaN.

use std::sync::Arc;

use half::{bf16, f16};

use super::data::{Pattern, Sample, check, fingerprint, reductions};
use super::{CALL_MODES, CallMode, Case, CaseResult, FEW_TYPES, Step, ensure, exchange_number, failed, run};
use crate::buffer::Element;
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::op::{Op, shard_range};
use crate::splitmix::mix;

/// Element counts around the edges: none, fewer than ranks, odd, prime.
pub(super) const COUNTS: [usize; 5] = [0, 1, 10, 1000, 10_007];

/// About 1 MiB, and no multiple of anything.
pub(super) fn large<T>() -> usize {
    (1 << 20) / size_of::<T>() + 3
}

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
    add_float::<f32>(cases);
    add_float::<f64>(cases);
    add_float::<f16>(cases);
    add_float::<bf16>(cases);
    cases.push(Case::shared("rounding/f16", 2, |c| rounds_once::<f16>(c, 2048.0, f16::from_f32)));
    cases.push(Case::shared("rounding/bf16", 2, |c| rounds_once::<bf16>(c, 256.0, bf16::from_f32)));
    cases.push(Case::shared("integers/sums_wrap", 2, |c| {
        wraps(c, i32::MAX, i32::MIN)?;
        wraps(c, i64::MAX, i64::MIN)?;
        wraps(c, i8::MAX, i8::MIN)?;
        wraps(c, u16::MAX, 0)?;
        wraps(c, u64::MAX, 0)?;
        wraps(c, u8::MAX, 0)
    }));
    cases.push(Case::shared("integers/means_truncate_toward_zero", 1, |c| {
        mean_truncates(c, [-7i32, 7, -1, i32::MIN], |sum, ranks| sum / ranks as i32)?;
        mean_truncates(c, [-7i8, 7, -1, i8::MIN], |sum, ranks| (i64::from(sum) / ranks as i64) as i8)?;
        mean_truncates(c, [7u64, u64::MAX, 1, 0], |sum, ranks| sum / ranks as u64)?;
        mean_truncates(c, [-7i64, 7, -1, i64::MIN], |sum, ranks| sum / ranks as i64)?;
        mean_truncates(c, [7u8, 255, 1, 0], |sum, ranks| sum / ranks as u8)
    }));
}

fn add_type<T: Sample>(cases: &mut Vec<Case>) {
    for op in reductions(0) {
        let name = format!("{}/{}", T::DTYPE, op.to_string().replace(' ', "_"));
        cases.push(
            Case::shared(format!("all_reduce/{name}"), 1, move |c| all_reduce::<T>(c, op)).of_type::<T>(&FEW_TYPES),
        );
        cases.push(Case::shared(format!("reduce/{name}"), 1, move |c| reduce::<T>(c, op)).of_type::<T>(&FEW_TYPES));
        cases.push(
            Case::shared(format!("reduce_scatter/{name}"), 1, move |c| reduce_scatter::<T>(c, op))
                .of_type::<T>(&FEW_TYPES),
        );
    }
}

fn add_float<T: Float>(cases: &mut Vec<Case>) {
    let dtype = T::DTYPE;
    cases.push(Case::shared(format!("identical_on_all_ranks/{dtype}"), 1, identical::<T>));
    cases.push(Case::shared(format!("nan/{dtype}"), 1, nan_wins::<T>));
}

fn seed<T: Element>(kind: u64, op: ReduceOp) -> u64 {
    mix(kind << 16 | (T::DTYPE as u64) << 8 | u64::from(op.code()))
}

/// The same reduction with this rank's own parameter.
fn own(op: ReduceOp, rank: usize) -> ReduceOp {
    reductions(rank).find(|own| own.code() == op.code()).unwrap_or(op)
}

/// Every count; the large one only for sums, because the other reductions cut messages in the same way.
fn counts<T>(op: ReduceOp) -> Vec<usize> {
    let mut counts = COUNTS.to_vec();
    if op == ReduceOp::Sum {
        counts.push(large::<T>());
    }
    counts
}

/// Both, but the large one once.
fn call_modes(count: usize) -> &'static [CallMode] {
    if count > 100_000 { &CALL_MODES[1..] } else { &CALL_MODES }
}

fn all_reduce<T: Sample>(communicator: &Arc<dyn Communicator>, op: ReduceOp) -> CaseResult {
    let (rank, ranks, seed) = (communicator.rank(), communicator.world_size(), seed::<T>(1, op));
    let (mine, op) = (Pattern::<T>::contribution(seed, op, rank, ranks), own(op, rank));
    let reduced = Pattern::<T>::reduction(seed, op, ranks);
    for (index, count) in counts::<T>(op).into_iter().enumerate() {
        for call_mode in call_modes(count).iter().copied() {
            let start = 31 * index + call_mode as usize;
            let got = run(communicator, Op::AllReduce(op), mine.take(start, count), call_mode)?;
            ensure(got.len() == count, || format!("count {count}: came back with {}", got.len()))?;
            reduced.check(&got, start, format_args!("count {count}, {call_mode:?}"))?;
        }
    }
    Ok(())
}

fn reduce<T: Sample>(communicator: &Arc<dyn Communicator>, op: ReduceOp) -> CaseResult {
    let (rank, ranks, seed) = (communicator.rank(), communicator.world_size(), seed::<T>(2, op));
    let (mine, op) = (Pattern::<T>::contribution(seed, op, rank, ranks), own(op, rank));
    let reduced = Pattern::<T>::reduction(seed, op, ranks);
    for (index, count) in counts::<T>(op).into_iter().enumerate() {
        let roots = if count == large::<T>() { ranks - 1..ranks } else { 0..ranks };
        for root in roots {
            let call_mode = CALL_MODES[(index + root) % 2];
            let start = 31 * index + root;
            let got = run(communicator, Op::Reduce { root, op }, mine.take(start, count), call_mode)?;
            ensure(got.len() == count, || format!("count {count}: came back with {}", got.len()))?;
            if rank == root {
                reduced.check(&got, start, format_args!("count {count}, root {root} (this rank), {call_mode:?}"))?;
            } else {
                mine.check(&got, start, format_args!("count {count}, root {root}, {call_mode:?}: own buffer changed"))?;
            }
        }
    }
    Ok(())
}

fn reduce_scatter<T: Sample>(communicator: &Arc<dyn Communicator>, op: ReduceOp) -> CaseResult {
    let (rank, ranks, seed) = (communicator.rank(), communicator.world_size(), seed::<T>(3, op));
    let (mine, op) = (Pattern::<T>::contribution(seed, op, rank, ranks), own(op, rank));
    let reduced = Pattern::<T>::reduction(seed, op, ranks);
    for (index, count) in counts::<T>(op).into_iter().enumerate() {
        for call_mode in call_modes(count).iter().copied() {
            let start = 31 * index + call_mode as usize;
            let got = run(communicator, Op::ReduceScatter(op), mine.take(start, count), call_mode)?;
            ensure(got.len() == count, || format!("count {count}: came back with {}", got.len()))?;
            let shard = shard_range(count, ranks, rank);
            let what = format_args!("count {count}, {call_mode:?}, shard {rank}");
            reduced.check(&got[shard.clone()], start + shard.start, what)?;
        }
    }
    Ok(())
}

/// A floating-point type with values that do not sum exactly.
trait Float: Sample {
    const NAN: Self;
    fn rough(bits: u64) -> Self;
}

macro_rules! float {
    ($type:ty, $from:expr) => {
        impl Float for $type {
            const NAN: Self = <$type>::NAN;
            fn rough(bits: u64) -> Self {
                // A full mantissa and one of 16 exponents.
                let scale = 2f64.powi((bits % 16) as i32 - 8);
                $from(((bits >> 11) as f64 / (1u64 << 53) as f64 - 0.5) * scale)
            }
        }
    };
}

float!(f32, |value: f64| value as f32);
float!(f64, |value: f64| value);
float!(f16, f16::from_f64);
float!(bf16, bf16::from_f64);

/// Sums that round depend on their order, but every rank has the same bits, and has them again the next time.
fn identical<T: Float>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    for count in [1, 10, 10_007, 50_021] {
        let base = mix(count as u64) ^ mix(communicator.rank() as u64 + 1);
        let values: Vec<T> = (0..count as u64).map(|index| T::rough(mix(base.wrapping_add(index)))).collect();
        for op in [ReduceOp::Sum, ReduceOp::Mean] {
            let once = run(communicator, Op::AllReduce(op), values.clone(), CallMode::Blocking)?;
            let again = run(communicator, Op::AllReduce(op), values.clone(), CallMode::Background)?;
            check(&again, &once, format_args!("count {count}, {op}: the second run"))?;
            let hashes = exchange_number(communicator, fingerprint(&once))?;
            if let Some(other) = hashes.iter().position(|hash| *hash != hashes[0]) {
                return failed(format!("count {count}, {op}: ranks 0 and {other} have different bits"));
            }
        }
    }
    Ok(())
}

/// Element i is NaN on one rank, or on none when i leaves the remainder `ranks`.
fn nan_wins<T: Float>(communicator: &Arc<dyn Communicator>) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let nan_of = |index: usize| index % (ranks + 1);
    for op in [ReduceOp::Min, ReduceOp::Max] {
        let seed = seed::<T>(4, op);
        for count in [1, 10, 10_007] {
            let poisoned = |pattern: &Pattern<T>, is_nan: &dyn Fn(usize) -> bool| -> Vec<T> {
                let values = pattern.take(0, count).into_iter().enumerate();
                values.map(|(index, value)| if is_nan(index) { T::NAN } else { value }).collect()
            };
            let values = poisoned(&Pattern::of_rank(seed, rank, ranks), &|index| nan_of(index) == rank);
            let expected = poisoned(&Pattern::reduction(seed, op, ranks), &|index| nan_of(index) < ranks);
            let got = run(communicator, Op::AllReduce(op), values.clone(), CallMode::Blocking)?;
            check(&got, &expected, format_args!("all-reduce, {op}, count {count}"))?;
            let got = run(communicator, Op::ReduceScatter(op), values.clone(), CallMode::Blocking)?;
            let shard = shard_range(count, ranks, rank);
            check(&got[shard.clone()], &expected[shard], format_args!("reduce-scatter, {op}, count {count}"))?;
            let got = run(communicator, Op::Reduce { root: ranks - 1, op }, values, CallMode::Blocking)?;
            if rank == ranks - 1 {
                check(&got, &expected, format_args!("reduce, {op}, count {count}"))?;
            }
        }
    }
    Ok(())
}

/// One rank holds the first number after which the type has no room for 1, the others hold 1: their sum is right only if it is
/// rounded once, at the end.
fn rounds_once<T: Sample>(communicator: &Arc<dyn Communicator>, big: f32, round: fn(f32) -> T) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    let total = big + (ranks - 1) as f32;
    for count in [1, 10, 10_007] {
        let values: Vec<T> = (0..count).map(|index| round(if index % ranks == rank { big } else { 1.0 })).collect();
        for (op, exact) in [(ReduceOp::Sum, total), (ReduceOp::Mean, total / ranks as f32)] {
            let expected = vec![round(exact); count];
            let got = run(communicator, Op::AllReduce(op), values.clone(), CallMode::Blocking)?;
            check(&got, &expected, format_args!("all-reduce, {op}, count {count}"))?;
            let got = run(communicator, Op::Reduce { root: 0, op }, values.clone(), CallMode::Blocking)?;
            if rank == 0 {
                check(&got, &expected, format_args!("reduce, {op}, count {count}"))?;
            }
            let got = run(communicator, Op::ReduceScatter(op), values.clone(), CallMode::Blocking)?;
            let shard = shard_range(count, ranks, rank);
            check(&got[shard.clone()], &expected[shard], format_args!("reduce-scatter, {op}, count {count}"))?;
        }
    }
    Ok(())
}

/// The greatest value plus one is the least.
fn wraps<T: Sample>(communicator: &Arc<dyn Communicator>, greatest: T, least: T) -> CaseResult {
    let one = T::sample(1, 1);
    for count in [1, 10_007] {
        let value = match communicator.rank() {
            0 => greatest,
            1 => one,
            _ => T::zeroed(),
        };
        let got = run(communicator, Op::AllReduce(ReduceOp::Sum), vec![value; count], CallMode::Blocking)?;
        check(&got, &vec![least; count], format_args!("{}, count {count}", T::DTYPE))?;
    }
    Ok(())
}

/// Rank 0 holds the sums, the others zeros.
fn mean_truncates<T: Sample>(
    communicator: &Arc<dyn Communicator>,
    sums: [T; 4],
    divide: fn(T, usize) -> T,
) -> Step<()> {
    let ranks = communicator.world_size();
    for count in [4, 10_008] {
        let whole: Vec<T> = sums.into_iter().cycle().take(count).collect();
        let mine = if communicator.rank() == 0 { whole.clone() } else { vec![T::zeroed(); count] };
        let expected: Vec<T> = whole.into_iter().map(|sum| divide(sum, ranks)).collect();
        let got = run(communicator, Op::AllReduce(ReduceOp::Mean), mine, CallMode::Blocking)?;
        check(&got, &expected, format_args!("{}, count {count}", T::DTYPE))?;
    }
    Ok(())
}
