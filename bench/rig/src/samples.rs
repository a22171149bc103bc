//! Values whose reductions are exact in any order, and the count of those that came out wrong.

use std::fmt;
use std::str::FromStr;

use comm_core::{DType, Element, ReduceOp, bf16, f16};
use serde::{Deserialize, Serialize};

/// How elements are combined, by nccl-tests' names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reduction {
    Sum,
    Prod,
    Min,
    Max,
    Avg,
}

impl Reduction {
    pub const ALL: [Reduction; 5] = [Reduction::Sum, Reduction::Prod, Reduction::Min, Reduction::Max, Reduction::Avg];

    pub fn name(self) -> &'static str {
        match self {
            Reduction::Sum => "sum",
            Reduction::Prod => "prod",
            Reduction::Min => "min",
            Reduction::Max => "max",
            Reduction::Avg => "avg",
        }
    }

    /// What a communicator calls it.
    pub fn op(self) -> ReduceOp {
        match self {
            Reduction::Sum => ReduceOp::Sum,
            Reduction::Prod => ReduceOp::Prod,
            Reduction::Min => ReduceOp::Min,
            Reduction::Max => ReduceOp::Max,
            Reduction::Avg => ReduceOp::Mean,
        }
    }
}

impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Reduction {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let name = if name == "mean" { "avg" } else { name };
        Reduction::ALL.into_iter().find(|reduction| reduction.name() == name).ok_or_else(|| {
            let names = Reduction::ALL.map(Reduction::name).join(", ");
            format!("unknown reduction '{name}', expected one of {names}, all")
        })
    }
}

/// An element type that small whole numbers fit into exactly.
pub trait Sample: Element {
    /// All whole numbers from 0 to this one are exact.
    const EXACT: i64;

    /// The element of this value, at most [`EXACT`](Sample::EXACT).
    fn of(value: i64) -> Self;
}

macro_rules! sample {
    ($($type:ty, $exact:expr, $of:expr;)*) => {$(
        impl Sample for $type {
            const EXACT: i64 = $exact;

            fn of(value: i64) -> Self {
                $of(value)
            }
        }
    )*};
}

sample! {
    f32, 1 << 24, |value| value as f32;
    f64, 1 << 53, |value| value as f64;
    f16, 1 << 11, |value| f16::from_f64(value as f64);
    bf16, 1 << 8, |value| bf16::from_f64(value as f64);
    i32, i32::MAX as i64, |value| value as i32;
    i64, 1 << 53, |value| value;
    i8, i8::MAX as i64, |value| value as i8;
    i16, i16::MAX as i64, |value| value as i16;
    u8, u8::MAX as i64, |value| value as u8;
    u16, u16::MAX as i64, |value| value as u16;
    u32, u32::MAX as i64, |value| value as u32;
    u64, 1 << 53, |value| value as u64;
}

/// Runs `$body` with `$type` standing for the Rust type of `$dtype`, or `$otherwise` for one that is not known here.
#[macro_export]
macro_rules! with_sample {
    ($dtype:expr, $type:ident => $body:expr, else $otherwise:expr) => {
        match $dtype {
            comm_core::DType::F32 => {
                type $type = f32;
                $body
            }
            comm_core::DType::F64 => {
                type $type = f64;
                $body
            }
            comm_core::DType::F16 => {
                type $type = comm_core::f16;
                $body
            }
            comm_core::DType::Bf16 => {
                type $type = comm_core::bf16;
                $body
            }
            comm_core::DType::I32 => {
                type $type = i32;
                $body
            }
            comm_core::DType::I64 => {
                type $type = i64;
                $body
            }
            comm_core::DType::U8 => {
                type $type = u8;
                $body
            }
            comm_core::DType::I8 => {
                type $type = i8;
                $body
            }
            comm_core::DType::I16 => {
                type $type = i16;
                $body
            }
            comm_core::DType::U16 => {
                type $type = u16;
                $body
            }
            comm_core::DType::U32 => {
                type $type = u32;
                $body
            }
            comm_core::DType::U64 => {
                type $type = u64;
                $body
            }
            _ => $otherwise,
        }
    };
}

/// What each rank contributes, element by element, and what the reduction of it is. Every intermediate result of every order
/// is a whole number that the type holds exactly.
#[derive(Clone, Copy, Debug)]
pub struct Pattern {
    seed: u64,
    ranks: i64,
    reduction: Reduction,
    /// Values are below this.
    bound: i64,
}

/// Ranks that contribute a factor of 2 to a product; the others contribute 1. 2⁶ fits into every type.
const FACTORS: usize = 6;

impl Pattern {
    /// The pattern of `ranks` ranks for type `T`. Without a reduction, values that a sum would be exact of.
    pub fn new<T: Sample>(seed: u64, ranks: usize, reduction: Option<Reduction>) -> Self {
        let reduction = reduction.unwrap_or(Reduction::Sum);
        let ranks = ranks.max(1) as i64;
        // A mean is whole when every value is a multiple of the number of ranks.
        let step = if reduction == Reduction::Avg { ranks } else { 1 };
        let bound = match reduction {
            Reduction::Sum | Reduction::Avg => T::EXACT / (ranks * step) + 1,
            Reduction::Min | Reduction::Max => T::EXACT,
            Reduction::Prod => 2,
        };
        Pattern { seed, ranks, reduction, bound }
    }

    /// Element `index` of what `rank` contributes.
    pub fn value(&self, rank: usize, index: usize) -> i64 {
        let bits = mix(self.seed ^ mix((rank as u64) << 40 ^ index as u64));
        let below = |bound: i64| (bits % bound.max(1).unsigned_abs()).cast_signed();
        match self.reduction {
            Reduction::Prod => {
                if rank < FACTORS {
                    1 + below(2)
                } else {
                    1
                }
            }
            Reduction::Sum | Reduction::Avg => {
                let step = if self.reduction == Reduction::Avg { self.ranks } else { 1 };
                if self.bound >= 2 {
                    step * below(self.bound)
                } else {
                    // So many ranks that only one of them can contribute.
                    i64::from(index as i64 % self.ranks == rank as i64) * step
                }
            }
            Reduction::Min | Reduction::Max => below(self.bound),
        }
    }

    /// Element `index` of the reduction over all ranks.
    pub fn reduced(&self, index: usize) -> i64 {
        let values = (0..self.ranks as usize).map(|rank| self.value(rank, index));
        match self.reduction {
            Reduction::Sum => values.sum(),
            Reduction::Avg => values.sum::<i64>() / self.ranks,
            Reduction::Prod => values.product(),
            Reduction::Min => values.min().unwrap_or(0),
            Reduction::Max => values.max().unwrap_or(0),
        }
    }
}

/// Overwrites `values` with elements `start..` of what `rank` contributes.
pub fn fill<T: Sample>(values: &mut [T], pattern: &Pattern, rank: usize, start: usize) {
    for (offset, value) in values.iter_mut().enumerate() {
        *value = T::of(pattern.value(rank, start + offset));
    }
}

/// How many of `values` are not what `expected` says of their position.
pub fn count_wrong<T: Sample>(values: &[T], expected: impl Fn(usize) -> i64) -> u64 {
    let wrong = |(index, value): (usize, &T)| *value != T::of(expected(index));
    values.iter().enumerate().filter(|pair| wrong(*pair)).count() as u64
}

/// Whether this program has test values of the type.
pub fn is_known(dtype: DType) -> bool {
    with_sample!(dtype, _T => true, else false)
}

/// A bijection of 64-bit numbers that spreads every bit: multiply and fold, twice.
fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let bits = (bits ^ (bits >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits ^ (bits >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds, in the type itself, in both orders.
    fn sums_exactly<T: Sample + std::ops::Add<Output = T>>() {
        for ranks in [1, 2, 3, 8, 100, 200] {
            let pattern = Pattern::new::<T>(7, ranks, Some(Reduction::Sum));
            for index in 0..500 {
                let add = |sum: T, rank| sum + T::of(pattern.value(rank, index));
                let expected = T::of(pattern.reduced(index));
                assert_eq!((0..ranks).fold(T::of(0), add), expected, "{ranks} ranks, element {index}");
                assert_eq!((0..ranks).rev().fold(T::of(0), add), expected, "{ranks} ranks, element {index}");
            }
        }
    }

    #[test]
    fn sums_are_exact_in_any_order() {
        sums_exactly::<f32>();
        sums_exactly::<f16>();
        sums_exactly::<bf16>();
        sums_exactly::<u8>();
        sums_exactly::<i64>();
    }

    #[test]
    fn means_are_whole_and_products_small() {
        for ranks in [1, 2, 3, 8] {
            let mean = Pattern::new::<bf16>(1, ranks, Some(Reduction::Avg));
            let product = Pattern::new::<u8>(1, ranks, Some(Reduction::Prod));
            for index in 0..500 {
                let sum: i64 = (0..ranks).map(|rank| mean.value(rank, index)).sum();
                assert_eq!(sum, mean.reduced(index) * ranks as i64);
                assert!(sum <= bf16::EXACT);
                assert!((1..=64).contains(&product.reduced(index)));
            }
        }
    }

    #[test]
    fn a_planted_wrong_element_is_counted() {
        let pattern = Pattern::new::<f32>(3, 2, Some(Reduction::Sum));
        let mut values: Vec<f32> = (0..1000).map(|index| f32::of(pattern.reduced(index))).collect();
        let wrong = |values: &[f32]| count_wrong(values, |index| pattern.reduced(index));
        assert_eq!(wrong(&values), 0);
        values[17] += 1.0;
        assert_eq!(wrong(&values), 1);
        values[999] = f32::NAN;
        assert_eq!(wrong(&values), 2);
        // Shifted by one, all but a few chance hits are wrong.
        values.rotate_left(1);
        assert!(wrong(&values) > 990);
    }

    #[test]
    fn ranks_and_seeds_differ() {
        let first = Pattern::new::<f32>(1, 2, None);
        let second = Pattern::new::<f32>(2, 2, None);
        let same = |a: &dyn Fn(usize) -> i64, b: &dyn Fn(usize) -> i64| (0..1000).filter(|i| a(*i) == b(*i)).count();
        assert!(same(&|i| first.value(0, i), &|i| first.value(1, i)) < 5);
        assert!(same(&|i| first.value(0, i), &|i| second.value(0, i)) < 5);
    }
}
