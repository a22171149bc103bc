//! Combining received bytes into a buffer.
//!
//! Received bytes have any alignment and are read as they are. Loops are compiled for each vector extension and the widest that
//! the machine has is taken at run time; no extension changes a result, because each element is computed by itself.

use bytemuck::{AnyBitPattern, NoUninit};
use half::{bf16, f16};

use crate::dtype::{DType, Factor, ReduceOp};
use crate::float16::Float16;
use crate::sys::{Kernel, vectorised};

/// `accumulator[i] = accumulator[i] ∘ incoming[i]`, element by element. `incoming` may have any alignment; both hold whole
/// elements of `dtype` and have the same length, and `accumulator` is aligned for it. A mean is a sum here: [`finish_mean`]
/// divides at the end; so is a scaled sum, whose contributions [`scale`] has multiplied.
///
/// # Panics
/// If the lengths differ or the accumulator is not aligned: a bug of the caller.
pub(crate) fn combine(dtype: DType, op: ReduceOp, accumulator: &mut [u8], incoming: &[u8]) {
    assert_eq!(accumulator.len(), incoming.len(), "reduction of unequal lengths");
    vectorised(Combine { dtype, op, accumulator, incoming });
}

/// Turns the sum over `ranks` in `bytes` into a mean. Integers truncate toward zero.
pub(crate) fn finish_mean(dtype: DType, bytes: &mut [u8], ranks: usize) {
    match dtype {
        DType::F32 => map::<f32>(bytes, |sum| sum / ranks as f32),
        DType::F64 => map::<f64>(bytes, |sum| sum / ranks as f64),
        DType::F16 => map::<f16>(bytes, |sum| f16::from_f32(sum.to_f32() / ranks as f32)),
        DType::Bf16 => map::<bf16>(bytes, |sum| bf16::from_f32(sum.to_f32() / ranks as f32)),
        DType::I8 => map::<i8>(bytes, |sum| (i64::from(sum) / ranks as i64) as i8),
        DType::I16 => map::<i16>(bytes, |sum| (i64::from(sum) / ranks as i64) as i16),
        DType::I32 => map::<i32>(bytes, |sum| (i64::from(sum) / ranks as i64) as i32),
        DType::I64 => map::<i64>(bytes, |sum| sum / ranks as i64),
        DType::U8 => map::<u8>(bytes, |sum| (u64::from(sum) / ranks as u64) as u8),
        DType::U16 => map::<u16>(bytes, |sum| (u64::from(sum) / ranks as u64) as u16),
        DType::U32 => map::<u32>(bytes, |sum| (u64::from(sum) / ranks as u64) as u32),
        DType::U64 => map::<u64>(bytes, |sum| sum / ranks as u64),
    }
}

/// Multiplies a contribution by its rank's factor, rounding each product to the type. Integers wrap; the factor is whole.
pub(crate) fn scale(dtype: DType, factor: Factor, bytes: &mut [u8]) {
    let factor = factor.value();
    // The low 64 bits are the factor modulo 2^64, which is all that a wrapping product needs.
    let whole = factor as i128 as i64;
    match dtype {
        DType::F32 => map::<f32>(bytes, |value| value * factor as f32),
        DType::F64 => map::<f64>(bytes, |value| value * factor),
        DType::F16 => map::<f16>(bytes, |value| f16::from_f32(value.to_f32() * factor as f32)),
        DType::Bf16 => map::<bf16>(bytes, |value| bf16::from_f32(value.to_f32() * factor as f32)),
        DType::I8 => map::<i8>(bytes, |value| value.wrapping_mul(whole as i8)),
        DType::I16 => map::<i16>(bytes, |value| value.wrapping_mul(whole as i16)),
        DType::I32 => map::<i32>(bytes, |value| value.wrapping_mul(whole as i32)),
        DType::I64 => map::<i64>(bytes, |value| value.wrapping_mul(whole)),
        DType::U8 => map::<u8>(bytes, |value| value.wrapping_mul(whole as u8)),
        DType::U16 => map::<u16>(bytes, |value| value.wrapping_mul(whole as u16)),
        DType::U32 => map::<u32>(bytes, |value| value.wrapping_mul(whole as u32)),
        DType::U64 => map::<u64>(bytes, |value| value.wrapping_mul(whole as u64)),
    }
}

/// Reduces the ranks' contributions into `out` in rank order: the 16-bit floats in f32, with one rounding at the end, every
/// other type element by element. `contribution(rank)` gives a rank's; `None` stands for `out`'s own, which is read before it
/// is overwritten. All have `out`'s length.
pub(crate) fn reduce_in_rank_order<'a>(
    dtype: DType,
    op: ReduceOp,
    ranks: usize,
    contribution: impl Fn(usize) -> Option<&'a [u8]>,
    out: &mut [u8],
) {
    // In blocks, so that sums stay in cache.
    const BLOCK: usize = 16 << 10;
    let mut own = Aligned([0; BLOCK]);
    for (index, out) in out.chunks_mut(BLOCK).enumerate() {
        let start = index * BLOCK;
        let own = &mut own.0[..out.len()];
        own.copy_from_slice(out);
        let own = &*own;
        let of_rank = |rank: usize| contribution(rank).map_or(own, |bytes| &bytes[start..start + own.len()]);
        match dtype {
            DType::F16 => in_f32::<f16>(op, ranks, of_rank, out),
            DType::Bf16 => in_f32::<bf16>(op, ranks, of_rank, out),
            _ => {
                out.copy_from_slice(of_rank(0));
                for rank in 1..ranks {
                    combine(dtype, op, out, of_rank(rank));
                }
                if op == ReduceOp::Mean {
                    finish_mean(dtype, out, ranks);
                }
            }
        }
    }
}

/// Aligned for every element type.
#[repr(align(64))]
struct Aligned<const N: usize>([u8; N]);

/// Elements that are widened at a time.
const LANES: usize = 1024;

/// One block: `out` is at most 16 KiB.
fn in_f32<'a, T: Float16>(op: ReduceOp, ranks: usize, contribution: impl Fn(usize) -> &'a [u8], out: &mut [u8]) {
    let mut sums = [0f32; LANES];
    let mut next = [0f32; LANES];
    let mut raw = [T::zeroed(); LANES];
    let bytes = LANES * size_of::<T>();
    for (index, out) in out.chunks_mut(bytes).enumerate() {
        let count = out.len() / size_of::<T>();
        let (sums, next, raw) = (&mut sums[..count], &mut next[..count], &mut raw[..count]);
        let mut widen = |rank: usize, into: &mut [f32]| {
            let start = index * bytes;
            let values = &contribution(rank)[start..start + count * size_of::<T>()];
            bytemuck::cast_slice_mut::<T, u8>(raw).copy_from_slice(values);
            T::widen(raw, into);
        };
        widen(0, sums);
        for rank in 1..ranks {
            widen(rank, next);
            combine(DType::F32, op, bytemuck::cast_slice_mut(sums), bytemuck::cast_slice(next));
        }
        if op == ReduceOp::Mean {
            finish_mean(DType::F32, bytemuck::cast_slice_mut(sums), ranks);
        }
        T::narrow(sums, raw);
        out.copy_from_slice(bytemuck::cast_slice(raw));
    }
}

/// The loops of [`combine`].
struct Combine<'a> {
    dtype: DType,
    op: ReduceOp,
    accumulator: &'a mut [u8],
    incoming: &'a [u8],
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Combine { dtype, op, accumulator, incoming } = self;
        match dtype {
            DType::F32 => by_op::<f32>(op, accumulator, incoming),
            DType::F64 => by_op::<f64>(op, accumulator, incoming),
            DType::F16 => pair_in_f32::<f16>(op, accumulator, incoming),
            DType::Bf16 => pair_in_f32::<bf16>(op, accumulator, incoming),
            DType::I8 => by_op::<i8>(op, accumulator, incoming),
            DType::I16 => by_op::<i16>(op, accumulator, incoming),
            DType::I32 => by_op::<i32>(op, accumulator, incoming),
            DType::I64 => by_op::<i64>(op, accumulator, incoming),
            DType::U8 => by_op::<u8>(op, accumulator, incoming),
            DType::U16 => by_op::<u16>(op, accumulator, incoming),
            DType::U32 => by_op::<u32>(op, accumulator, incoming),
            DType::U64 => by_op::<u64>(op, accumulator, incoming),
        }
    }
}

/// Two contributions of a 16-bit float. Callers that sum more keep the sum in f32: see [`reduce_in_rank_order`].
fn pair_in_f32<T: Float16>(op: ReduceOp, accumulator: &mut [u8], incoming: &[u8]) {
    let mut sums = [0f32; LANES];
    let mut next = [0f32; LANES];
    let mut raw = [T::zeroed(); LANES];
    let bytes = LANES * size_of::<T>();
    for (accumulator, incoming) in accumulator.chunks_mut(bytes).zip(incoming.chunks(bytes)) {
        let accumulator: &mut [T] = bytemuck::cast_slice_mut(accumulator);
        let count = accumulator.len();
        bytemuck::cast_slice_mut::<T, u8>(&mut raw[..count]).copy_from_slice(incoming);
        T::widen(accumulator, &mut sums[..count]);
        T::widen(&raw[..count], &mut next[..count]);
        by_op::<f32>(op, bytemuck::cast_slice_mut(&mut sums[..count]), bytemuck::cast_slice(&next[..count]));
        T::narrow(&sums[..count], accumulator);
    }
}

#[inline(always)]
fn by_op<T: Arithmetic>(op: ReduceOp, accumulator: &mut [u8], incoming: &[u8]) {
    match op {
        ReduceOp::Sum | ReduceOp::Mean | ReduceOp::ScaledSum(_) => zip(accumulator, incoming, T::sum),
        ReduceOp::Prod => zip(accumulator, incoming, T::product),
        ReduceOp::Min => zip(accumulator, incoming, T::least),
        ReduceOp::Max => zip(accumulator, incoming, T::greatest),
    }
}

#[inline(always)]
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

/// Each is commutative bit for bit (NaN payloads aside), so that two ranks which combine the same two values in opposite order
/// get the same.
trait Arithmetic: AnyBitPattern + NoUninit {
    fn sum(self, other: Self) -> Self;
    fn product(self, other: Self) -> Self;
    fn least(self, other: Self) -> Self;
    fn greatest(self, other: Self) -> Self;
}

macro_rules! integer {
    ($($type:ty),*) => {$(
        impl Arithmetic for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                self.max(other)
            }
        }
    )*};
}

integer!(i8, i16, i32, i64, u8, u16, u32, u64);

macro_rules! float {
    ($($type:ty),*) => {$(
        impl Arithmetic for $type {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn product(self, other: Self) -> Self {
                self * other
            }

            // Two equal values differ at most in the sign of zero: the bits' union has the minus, their intersection the plus.
            // A comparison with NaN is false, so a NaN on the right falls through to the end, and one on the left is kept.
            #[inline(always)]
            fn least(self, other: Self) -> Self {
                let equal = <$type>::from_bits(self.to_bits() | other.to_bits());
                let less = if self < other { self } else { other };
                let ordered = if self == other { equal } else { less };
                if self.is_nan() { self } else { ordered }
            }

            #[inline(always)]
            fn greatest(self, other: Self) -> Self {
                let equal = <$type>::from_bits(self.to_bits() & other.to_bits());
                let more = if self > other { self } else { other };
                let ordered = if self == other { equal } else { more };
                if self.is_nan() { self } else { ordered }
            }
        }
    )*};
}

float!(f32, f64);

#[cfg(test)]
mod tests {
    use super::*;

    fn pair<T: NoUninit + AnyBitPattern>(dtype: DType, op: ReduceOp, a: T, b: T) -> T {
        let mut value = [a];
        combine(dtype, op, bytemuck::cast_slice_mut(&mut value), bytemuck::bytes_of(&b));
        value[0]
    }

    #[test]
    fn sixteen_bit_sums_round_once() {
        // 256 + 1 + 1 in bf16 rounds to 256 twice if each sum is rounded, to 258 if only the last is.
        let values = [256.0f32, 1.0, 1.0].map(bf16::from_f32);
        let bytes: Vec<&[u8]> = values.iter().map(bytemuck::bytes_of).collect();
        for (own, value) in values.iter().enumerate() {
            let mut out = [*value];
            let of_rank = |rank: usize| (rank != own).then(|| bytes[rank]);
            reduce_in_rank_order(DType::Bf16, ReduceOp::Sum, 3, of_rank, bytemuck::cast_slice_mut(&mut out));
            assert_eq!(out[0].to_f32(), 258.0);
        }
    }

    #[test]
    fn blocks_cover_everything() {
        for count in [0, 1, 1023, 1024, 1025, 8191, 8192, 8193, 20_000] {
            let of = |rank: usize| -> Vec<f16> {
                (0..count).map(|index| f16::from_f32(((index * 7 + rank) % 512) as f32)).collect()
            };
            let others = [of(0), of(2)];
            let mut out = of(1);
            let of_rank = |rank: usize| match rank {
                0 => Some(bytemuck::cast_slice(&others[0])),
                1 => None,
                _ => Some(bytemuck::cast_slice(&others[1])),
            };
            reduce_in_rank_order(DType::F16, ReduceOp::Sum, 3, of_rank, bytemuck::cast_slice_mut(&mut out));
            for (index, value) in out.iter().enumerate() {
                let sum: f32 = (0..3).map(|rank| ((index * 7 + rank) % 512) as f32).sum();
                assert_eq!(*value, f16::from_f32(sum), "element {index} of {count}");
            }
        }
    }

    #[test]
    fn integer_means_truncate_toward_zero_and_sums_and_products_wrap() {
        let mut sums = [-7i32, 7];
        finish_mean(DType::I32, bytemuck::cast_slice_mut(&mut sums), 2);
        assert_eq!(sums, [-3, 3]);
        let mut sums = [-7i8, 7];
        finish_mean(DType::I8, bytemuck::cast_slice_mut(&mut sums), 300);
        assert_eq!(sums, [0, 0]);
        assert_eq!(pair(DType::I32, ReduceOp::Sum, i32::MAX, 1), i32::MIN);
        assert_eq!(pair(DType::U16, ReduceOp::Prod, 300u16, 300), 24_464);
        assert_eq!(pair(DType::U64, ReduceOp::Max, 1u64 << 63, 1), 1 << 63);
        assert_eq!(pair(DType::I8, ReduceOp::Min, -128i8, 127), -128);
    }

    #[test]
    fn factors_round_once_and_wrap() {
        let mut values = [1.5f32, -2.0];
        scale(DType::F32, Factor::new(0.5), bytemuck::cast_slice_mut(&mut values));
        assert_eq!(values, [0.75, -1.0]);
        let mut values = [3u8, 200];
        scale(DType::U8, Factor::new(-2.0), bytemuck::cast_slice_mut(&mut values));
        assert_eq!(values, [250, 112]);
    }

    #[test]
    fn nan_wins_from_either_side() {
        for (a, b) in [(f32::NAN, 1.0), (1.0, f32::NAN), (f32::NAN, f32::NAN)] {
            for op in ReduceOp::ALL {
                assert!(pair(DType::F32, op, a, b).is_nan(), "{op} of {a} and {b}");
                assert!(pair(DType::Bf16, op, bf16::from_f32(a), bf16::from_f32(b)).is_nan(), "{op} of {a} and {b}");
            }
        }
    }

    #[test]
    fn minus_zero_is_less_than_zero_in_either_order() {
        for (a, b) in [(-0.0f64, 0.0), (0.0, -0.0)] {
            assert!(pair(DType::F64, ReduceOp::Min, a, b).is_sign_negative());
            assert!(pair(DType::F64, ReduceOp::Max, a, b).is_sign_positive());
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
