//! Combining received bytes into a buffer.

use bytemuck::{AnyBitPattern, NoUninit};
use half::{bf16, f16};

use crate::dtype::{DType, ReduceOp};

/// `accumulator[i] = accumulator[i] ∘ incoming[i]`, element by element. `incoming` may have any alignment; both hold whole
/// elements of `dtype` and have the same length, and `accumulator` is aligned for it. A mean is a sum here: [`finish_mean`]
/// divides at the end.
///
/// # Panics
/// If the lengths differ or the accumulator is not aligned: a bug of the caller.
pub(crate) fn combine(dtype: DType, op: ReduceOp, accumulator: &mut [u8], incoming: &[u8]) {
    assert_eq!(accumulator.len(), incoming.len(), "reduction of unequal lengths");
    match dtype {
        DType::F32 => by_op(op, accumulator, incoming, |a: f32, b| a + b, f32_min, f32_max),
        DType::F64 => by_op(op, accumulator, incoming, |a: f64, b| a + b, f64_min, f64_max),
        DType::I32 => by_op(op, accumulator, incoming, i32::wrapping_add, i32::min, i32::max),
        DType::I64 => by_op(op, accumulator, incoming, i64::wrapping_add, i64::min, i64::max),
        DType::U8 => by_op(op, accumulator, incoming, u8::wrapping_add, u8::min, u8::max),
        // Callers that sum more than two of these keep the sum in f32: see `reduce_in_rank_order`.
        DType::F16 => by_op(
            op,
            accumulator,
            incoming,
            |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32()),
            |a, b| f16::from_f32(f32_min(a.to_f32(), b.to_f32())),
            |a, b| f16::from_f32(f32_max(a.to_f32(), b.to_f32())),
        ),
        DType::Bf16 => by_op(
            op,
            accumulator,
            incoming,
            |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32()),
            |a, b| bf16::from_f32(f32_min(a.to_f32(), b.to_f32())),
            |a, b| bf16::from_f32(f32_max(a.to_f32(), b.to_f32())),
        ),
    }
}

/// Turns the sum over `ranks` in `bytes` into a mean. Integers truncate toward zero.
pub(crate) fn finish_mean(dtype: DType, bytes: &mut [u8], ranks: usize) {
    match dtype {
        DType::F32 => map::<f32>(bytes, |sum| sum / ranks as f32),
        DType::F64 => map::<f64>(bytes, |sum| sum / ranks as f64),
        DType::I32 => map::<i32>(bytes, |sum| (i64::from(sum) / ranks as i64) as i32),
        DType::I64 => map::<i64>(bytes, |sum| sum / ranks as i64),
        DType::U8 => map::<u8>(bytes, |sum| (usize::from(sum) / ranks) as u8),
        DType::F16 => map::<f16>(bytes, |sum| f16::from_f32(sum.to_f32() / ranks as f32)),
        DType::Bf16 => map::<bf16>(bytes, |sum| bf16::from_f32(sum.to_f32() / ranks as f32)),
    }
}

/// Reduces the ranks' 16-bit contributions, in rank order, in f32, with one rounding at the end; for every other type element
/// by element in rank order. All contributions have `out`'s length.
pub(crate) fn reduce_in_rank_order(dtype: DType, op: ReduceOp, contributions: &[&[u8]], out: &mut [u8]) {
    let Some((first, rest)) = contributions.split_first() else { return };
    match dtype {
        DType::F16 => in_f32::<f16>(op, contributions, out, f16::to_f32, f16::from_f32),
        DType::Bf16 => in_f32::<bf16>(op, contributions, out, bf16::to_f32, bf16::from_f32),
        _ => {
            out.copy_from_slice(first);
            for contribution in rest {
                combine(dtype, op, out, contribution);
            }
            if op == ReduceOp::Mean {
                finish_mean(dtype, out, contributions.len());
            }
        }
    }
}

fn in_f32<T: AnyBitPattern + NoUninit>(
    op: ReduceOp,
    contributions: &[&[u8]],
    out: &mut [u8],
    widen: impl Fn(T) -> f32,
    narrow: impl Fn(f32) -> T,
) {
    // In blocks, so that the f32 sums stay in cache.
    const BLOCK: usize = 4096;
    let size = size_of::<T>();
    let mut sums = [0.0f32; BLOCK];
    for (index, out) in out.chunks_mut(BLOCK * size).enumerate() {
        let start = index * BLOCK * size;
        let sums = &mut sums[..out.len() / size];
        for (rank, contribution) in contributions.iter().enumerate() {
            let values = contribution[start..start + out.len()].chunks_exact(size);
            for (sum, value) in sums.iter_mut().zip(values) {
                let value = widen(bytemuck::pod_read_unaligned(value));
                *sum = match op {
                    _ if rank == 0 => value,
                    ReduceOp::Sum | ReduceOp::Mean => *sum + value,
                    ReduceOp::Min => f32_min(*sum, value),
                    ReduceOp::Max => f32_max(*sum, value),
                };
            }
        }
        let divisor = if op == ReduceOp::Mean { contributions.len() as f32 } else { 1.0 };
        for (out, sum) in out.chunks_exact_mut(size).zip(sums) {
            out.copy_from_slice(bytemuck::bytes_of(&narrow(*sum / divisor)));
        }
    }
}

fn by_op<T: AnyBitPattern + NoUninit>(
    op: ReduceOp,
    accumulator: &mut [u8],
    incoming: &[u8],
    sum: impl Fn(T, T) -> T,
    min: impl Fn(T, T) -> T,
    max: impl Fn(T, T) -> T,
) {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => zip(accumulator, incoming, sum),
        ReduceOp::Min => zip(accumulator, incoming, min),
        ReduceOp::Max => zip(accumulator, incoming, max),
    }
}

fn zip<T: AnyBitPattern + NoUninit>(accumulator: &mut [u8], incoming: &[u8], combine: impl Fn(T, T) -> T) {
    let accumulator: &mut [T] = bytemuck::cast_slice_mut(accumulator);
    for (a, b) in accumulator.iter_mut().zip(incoming.chunks_exact(size_of::<T>())) {
        *a = combine(*a, bytemuck::pod_read_unaligned(b));
    }
}

fn map<T: AnyBitPattern + NoUninit>(bytes: &mut [u8], apply: impl Fn(T) -> T) {
    for value in bytemuck::cast_slice_mut::<u8, T>(bytes) {
        *value = apply(*value);
    }
}

// NaN wins, whichever side it is on, so that the result does not depend on the order of ranks.
fn f32_min(a: f32, b: f32) -> f32 {
    if a.is_nan() || a < b { a } else { b }
}

fn f32_max(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

fn f64_min(a: f64, b: f64) -> f64 {
    if a.is_nan() || a < b { a } else { b }
}

fn f64_max(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bit_sums_round_once() {
        // 256 + 1 + 1 in bf16 rounds to 256 twice if each sum is rounded, to 258 if only the last is.
        let values = [256.0f32, 1.0, 1.0].map(bf16::from_f32);
        let bytes: Vec<&[u8]> = values.iter().map(bytemuck::bytes_of).collect();
        let mut out = [bf16::ZERO];
        reduce_in_rank_order(DType::Bf16, ReduceOp::Sum, &bytes, bytemuck::cast_slice_mut(&mut out));
        assert_eq!(out[0].to_f32(), 258.0);
    }

    #[test]
    fn integer_means_truncate_toward_zero_and_sums_wrap() {
        let mut sums = [-7i32, 7];
        finish_mean(DType::I32, bytemuck::cast_slice_mut(&mut sums), 2);
        assert_eq!(sums, [-3, 3]);
        let mut sum = [i32::MAX];
        combine(DType::I32, ReduceOp::Sum, bytemuck::cast_slice_mut(&mut sum), &1i32.to_le_bytes());
        assert_eq!(sum, [i32::MIN]);
    }

    #[test]
    fn nan_wins_from_either_side() {
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN)] {
            for op in [ReduceOp::Min, ReduceOp::Max] {
                let mut value = [a];
                combine(DType::F32, op, bytemuck::cast_slice_mut(&mut value), &f32::to_ne_bytes(b));
                assert!(value[0].is_nan());
            }
        }
    }

    #[test]
    fn incoming_bytes_may_have_any_alignment() {
        let mut raw = [0u8; 9];
        raw[1..5].copy_from_slice(&1.5f32.to_ne_bytes());
        raw[5..9].copy_from_slice(&2.5f32.to_ne_bytes());
        let mut sum = [1.0f32, 1.0];
        combine(DType::F32, ReduceOp::Sum, bytemuck::cast_slice_mut(&mut sum), &raw[1..]);
        assert_eq!(sum, [2.5, 3.5]);
    }
}
