//! Values whose reductions are exact in any order, and the check that finds the first wrong element.

use std::fmt;

use half::{bf16, f16};

use super::{Step, failed};
use crate::buffer::Element;
use crate::dtype::ReduceOp;
use crate::splitmix::{SplitMix64, mix};

/// Values repeat after this many elements: a prime, so that no segment or shard of a usual size is a multiple of it and a
/// piece in a wrong place shows.
const PERIOD: usize = 2039;

/// An element type with test values and with reference reductions.
pub(super) trait Sample: Element {
    /// A value from 64 random bits. Sums over `ranks` such values, and their means, are exact.
    fn sample(bits: u64, ranks: usize) -> Self;
    /// A value whose product over ranks is exact in any order.
    fn factor(bits: u64, ranks: usize) -> Self;
    /// What the reduction of these values, one of each rank in rank order, must be.
    fn reduced(op: ReduceOp, values: &[Self]) -> Self;
}

/// The reductions that are tried: every one without a parameter, and a sum in which each rank has a factor of its own.
pub(super) fn reductions(rank: usize) -> impl Iterator<Item = ReduceOp> {
    ReduceOp::ALL.into_iter().chain([ReduceOp::scaled_sum(factor_of(rank))])
}

/// Whole, and a power of two or −1, so that products are exact.
fn factor_of(rank: usize) -> f64 {
    [2.0, -1.0, 4.0][rank % 3]
}

macro_rules! float {
    ($type:ty, $mantissa:literal, $from:expr, $to:expr) => {
        impl Sample for $type {
            fn sample(bits: u64, ranks: usize) -> Self {
                // Multiples of the number of ranks, so that the mean is whole; sums stay within the mantissa.
                let limit = ((1u64 << $mantissa) / (ranks * ranks) as u64).max(2);
                let whole = (bits % (2 * limit - 1)) as i64 - (limit as i64 - 1);
                $from((whole * ranks as i64) as f64)
            }

            fn factor(bits: u64, ranks: usize) -> Self {
                // With many ranks the exponents could add up to more than 16 bits hold.
                let magnitude = if ranks > 12 { 1.0 } else { [1.0, 2.0, 0.5][(bits / 2 % 3) as usize] };
                $from(if bits % 2 == 0 { magnitude } else { -magnitude })
            }

            fn reduced(op: ReduceOp, values: &[Self]) -> Self {
                let values = values.iter().map(|value| $to(*value));
                let ranks = values.len() as f64;
                $from(match op {
                    ReduceOp::Prod => values.product(),
                    ReduceOp::ScaledSum(_) => values.enumerate().map(|(rank, value)| value * factor_of(rank)).sum(),
                    ReduceOp::Sum => values.sum(),
                    ReduceOp::Mean => values.sum::<f64>() / ranks,
                    ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
                    ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
                })
            }
        }
    };
}

float!(f32, 24, |value: f64| value as f32, f64::from);
float!(f64, 53, |value: f64| value, |value: f64| value);
float!(f16, 11, f16::from_f64, f16::to_f64);
float!(bf16, 8, bf16::from_f64, bf16::to_f64);

macro_rules! integer {
    ($type:ty) => {
        impl Sample for $type {
            fn sample(bits: u64, _ranks: usize) -> Self {
                // The full range, so that sums wrap.
                bits as $type
            }

            fn factor(bits: u64, _ranks: usize) -> Self {
                bits as $type
            }

            fn reduced(op: ReduceOp, values: &[Self]) -> Self {
                let sum = || values.iter().fold(0, |sum: $type, value| sum.wrapping_add(*value));
                match op {
                    ReduceOp::Prod => values.iter().fold(1, |product: $type, value| product.wrapping_mul(*value)),
                    ReduceOp::ScaledSum(_) => values.iter().enumerate().fold(0, |sum: $type, (rank, value)| {
                        sum.wrapping_add(value.wrapping_mul(factor_of(rank) as i64 as $type))
                    }),
                    ReduceOp::Sum => sum(),
                    ReduceOp::Mean => (i128::from(sum()) / values.len() as i128) as $type,
                    ReduceOp::Min => values.iter().copied().min().unwrap_or(0),
                    ReduceOp::Max => values.iter().copied().max().unwrap_or(0),
                }
            }
        }
    };
}

integer!(i8);
integer!(i16);
integer!(i32);
integer!(i64);
integer!(u8);
integer!(u16);
integer!(u32);
integer!(u64);

/// An endless sequence of values, the same on every rank that asks for the same one.
#[derive(Clone, Debug)]
pub(super) struct Pattern<T> {
    values: Vec<T>,
}

impl<T: Sample> Pattern<T> {
    /// What `rank` of `ranks` contributes. Different for every rank and seed.
    pub(super) fn of_rank(seed: u64, rank: usize, ranks: usize) -> Self {
        Pattern::of_bits(seed, rank, |bits| T::sample(bits, ranks))
    }

    /// What `rank` of `ranks` contributes to a reduction that `op` then does exactly.
    pub(super) fn contribution(seed: u64, op: ReduceOp, rank: usize, ranks: usize) -> Self {
        Pattern::of_bits(seed, rank, |bits| match op {
            ReduceOp::Prod => T::factor(bits, ranks),
            // Room for the factors.
            ReduceOp::ScaledSum(_) => T::sample(bits, 4 * ranks),
            _ => T::sample(bits, ranks),
        })
    }

    fn of_bits(seed: u64, rank: usize, value: impl Fn(u64) -> T) -> Self {
        let mut bits = SplitMix64::new(mix(seed ^ mix(rank as u64 + 1)));
        Pattern { values: (0..PERIOD).map(|_| value(bits.next_u64())).collect() }
    }

    /// The reduction of what all `ranks` contribute.
    pub(super) fn reduction(seed: u64, op: ReduceOp, ranks: usize) -> Self {
        let of_ranks: Vec<Pattern<T>> = (0..ranks).map(|rank| Pattern::contribution(seed, op, rank, ranks)).collect();
        let reduce = |index| {
            let values: Vec<T> = of_ranks.iter().map(|pattern| pattern.values[index]).collect();
            T::reduced(op, &values)
        };
        Pattern { values: (0..PERIOD).map(reduce).collect() }
    }
}

impl<T: Element> Pattern<T> {
    /// `count` elements, the first of them element `start` of the sequence.
    pub(super) fn take(&self, start: usize, count: usize) -> Vec<T> {
        let mut out = Vec::with_capacity(count);
        while out.len() < count {
            let from = (start + out.len()) % PERIOD;
            let to = PERIOD.min(from + count - out.len());
            out.extend_from_slice(&self.values[from..to]);
        }
        out
    }

    /// Whether `got` are, bit for bit, the elements from `start` on.
    pub(super) fn check(&self, got: &[T], start: usize, what: fmt::Arguments<'_>) -> Step<()> {
        check(got, &self.take(start, got.len()), what)
    }
}

/// Whether `got` equals `expected` bit for bit, except that any NaN is as good as another.
pub(super) fn check<T: Element>(got: &[T], expected: &[T], what: fmt::Arguments<'_>) -> Step<()> {
    if got.len() != expected.len() {
        return failed(format!("{what}: {} elements, expected {}", got.len(), expected.len()));
    }
    if bytes(got) == bytes(expected) {
        return Ok(());
    }
    let is_nan = |value: &T| !T::eq(value, value);
    let differs = |(got, expected): (&T, &T)| {
        bytes(std::slice::from_ref(got)) != bytes(std::slice::from_ref(expected)) && !(is_nan(got) && is_nan(expected))
    };
    let wrong: Vec<usize> = (0..got.len()).filter(|index| differs((&got[*index], &expected[*index]))).collect();
    match wrong.first() {
        None => Ok(()),
        Some(first) => failed(format!(
            "{what}: element {first} is {:?}, expected {:?} ({} of {} elements are wrong)",
            got[*first],
            expected[*first],
            wrong.len(),
            got.len()
        )),
    }
}

/// A number that is different for different contents, for all that matters here (FNV-1a over 8-byte words).
pub(super) fn fingerprint<T: Element>(values: &[T]) -> i64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for chunk in bytes(values).chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = mix(hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3);
    }
    hash as i64
}

fn bytes<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::must_cast_slice(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_exact_in_any_order() {
        for ranks in 1..9 {
            let patterns: Vec<Pattern<bf16>> = (0..ranks).map(|rank| Pattern::of_rank(1, rank, ranks)).collect();
            let reduced = Pattern::<bf16>::reduction(1, ReduceOp::Sum, ranks);
            for index in 0..PERIOD {
                // Rounding after every addition changes nothing if no addition rounds.
                let sum = patterns.iter().rev().fold(bf16::ZERO, |sum, pattern| sum + pattern.values[index]);
                assert_eq!(sum, reduced.values[index]);
            }
        }
    }

    #[test]
    fn a_wrong_element_is_named() {
        let pattern = Pattern::<i32>::of_rank(3, 0, 2);
        let mut values = pattern.take(5, 3 * PERIOD);
        pattern.check(&values, 5, format_args!("whole")).unwrap();
        values[17] = values[17].wrapping_add(1);
        let Err(super::super::Stop::Failed(text)) = pattern.check(&values, 5, format_args!("whole")) else {
            panic!("a wrong element passed");
        };
        assert!(text.contains("element 17") && text.contains("1 of 6117"), "{text}");
        assert!(pattern.check(&pattern.take(6, 100), 5, format_args!("moved")).is_err());
    }
}
