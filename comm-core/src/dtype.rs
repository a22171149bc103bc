//! Element types and reduction operations.

use std::fmt;

use crate::names;

/// The type of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
#[repr(u8)]
pub enum DType {
    /// 32-bit IEEE float.
    F32 = 1,
    /// 64-bit IEEE float.
    F64 = 2,
    /// 16-bit IEEE float.
    F16 = 3,
    /// bfloat16.
    Bf16 = 4,
    /// Signed 32-bit integer; sums and products of integers wrap.
    I32 = 5,
    /// Signed 64-bit integer.
    I64 = 6,
    /// Unsigned byte.
    U8 = 7,
    /// Signed byte.
    I8 = 8,
    /// Signed 16-bit integer.
    I16 = 9,
    /// Unsigned 16-bit integer.
    U16 = 10,
    /// Unsigned 32-bit integer.
    U32 = 11,
    /// Unsigned 64-bit integer.
    U64 = 12,
}

impl DType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::Bf16 | DType::I16 | DType::U16 => 2,
            DType::I8 | DType::U8 => 1,
        }
    }

    /// Whether reductions of this type accumulate in f32 and round once (the 16-bit floats).
    pub const fn accumulates_in_f32(self) -> bool {
        matches!(self, DType::F16 | DType::Bf16)
    }

    /// Whether it is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::Bf16)
    }

    /// The type with this code in a header.
    pub fn from_code(code: u8) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }
}

names!(
    pub DType, "element type":
    F32 = "f32",
    F64 = "f64",
    F16 = "f16",
    Bf16 = "bf16",
    I8 = "i8",
    I16 = "i16",
    I32 = "i32",
    I64 = "i64",
    U8 = "u8",
    U16 = "u16",
    U32 = "u32",
    U64 = "u64",
);

/// How elements are combined across ranks.
///
/// NaN: a reduction in which any contribution is NaN gives NaN, for `Min` and `Max` too; which NaN is not specified. −0 is less
/// than +0. Both hold for every transport, algorithm and order of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Σ over ranks. Integers wrap; 16-bit floats are summed in f32 in rank order and rounded once.
    Sum,
    /// Σ over ranks divided by their number. Integer means wrap in the sum and truncate toward zero.
    Mean,
    /// The least element.
    Min,
    /// The greatest element.
    Max,
    /// Π over ranks. Integers wrap; 16-bit floats are multiplied in f32 in rank order and rounded once.
    Prod,
    /// Σ over ranks of each rank's contribution times that rank's own factor, which may differ from rank to rank (NCCL's
    /// `PreMulSum`). The factor is rounded to the type first (for 16-bit floats to f32), the product before it is summed. For integers the factor must be whole, and the
    /// product wraps.
    ScaledSum(Factor),
}

impl ReduceOp {
    /// Every reduction that has no parameter.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod];

    /// A [`ScaledSum`](ReduceOp::ScaledSum).
    pub fn scaled_sum(factor: f64) -> Self {
        ReduceOp::ScaledSum(Factor::new(factor))
    }

    /// Its code in a header.
    pub const fn code(self) -> u8 {
        match self {
            ReduceOp::Sum => 1,
            ReduceOp::Mean => 2,
            ReduceOp::Min => 3,
            ReduceOp::Max => 4,
            ReduceOp::Prod => 5,
            ReduceOp::ScaledSum(_) => 6,
        }
    }

    /// The reduction with this code in a header. Factors stay on their ranks: a scaled sum comes back with the factor 1.
    pub fn from_code(code: u8) -> Option<ReduceOp> {
        let scaled = ReduceOp::ScaledSum(Factor::ONE);
        ReduceOp::ALL.into_iter().chain([scaled]).find(|op| op.code() == code)
    }

    /// What ranks must agree on: the same with the factor 1.
    pub(crate) fn shared(self) -> ReduceOp {
        if matches!(self, ReduceOp::ScaledSum(_)) { ReduceOp::ScaledSum(Factor::ONE) } else { self }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Prod => "prod",
            ReduceOp::ScaledSum(_) => "scaled sum",
        })
    }
}

/// The factor of a [`ReduceOp::ScaledSum`]. Two are equal when their bits are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Factor(u64);

impl Factor {
    /// 1.
    pub const ONE: Factor = Factor(1.0f64.to_bits());

    /// Any number.
    pub fn new(value: f64) -> Self {
        Factor(value.to_bits())
    }

    /// The number.
    pub fn value(self) -> f64 {
        f64::from_bits(self.0)
    }
}
