//! Element types and reduction operations.

use std::fmt;
use std::str::FromStr;

use half::{bf16, f16};

use crate::buffer::HostBuffer;
use crate::error::Error;

/// The type of a buffer's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// Signed 32-bit integer; sums wrap.
    I32 = 5,
    /// Signed 64-bit integer; sums wrap.
    I64 = 6,
    /// Unsigned byte; sums wrap.
    U8 = 7,
}

impl DType {
    /// Every element type.
    pub const ALL: [DType; 7] = [DType::F32, DType::F64, DType::F16, DType::Bf16, DType::I32, DType::I64, DType::U8];

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::U8 => 1,
        }
    }

    /// Whether reductions of this type accumulate in f32 and round once (the 16-bit floats).
    pub const fn accumulates_in_f32(self) -> bool {
        matches!(self, DType::F16 | DType::Bf16)
    }

    /// The type with this code in a header.
    pub fn from_code(code: u8) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::I32 => "i32",
            DType::I64 => "i64",
            DType::U8 => "u8",
        })
    }
}

impl FromStr for DType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        DType::ALL.into_iter().find(|dtype| dtype.to_string() == name).ok_or_else(|| {
            let names: Vec<String> = DType::ALL.iter().map(DType::to_string).collect();
            Error::invalid(format!("unknown element type '{name}'; choose one of {}", names.join(", ")))
        })
    }
}

/// How elements are combined across ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum ReduceOp {
    /// Σ over ranks. Integers wrap; 16-bit floats are summed in f32 in rank order and rounded once.
    Sum = 1,
    /// Σ over ranks divided by their number. Integer means wrap in the sum and truncate toward zero.
    Mean = 2,
    /// The least element; NaN if any is NaN.
    Min = 3,
    /// The greatest element; NaN if any is NaN.
    Max = 4,
}

impl ReduceOp {
    /// Every reduction.
    pub const ALL: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Min, ReduceOp::Max];

    /// The reduction with this code in a header.
    pub fn from_code(code: u8) -> Option<ReduceOp> {
        ReduceOp::ALL.into_iter().find(|op| *op as u8 == code)
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Mean => "mean",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
        })
    }
}

/// A Rust type that travels in buffers.
pub trait Element: bytemuck::Pod + Send + Sync + PartialEq + fmt::Debug + private::Sealed {
    /// Its code.
    const DTYPE: DType;
    /// A buffer that owns `values`, without a copy.
    fn into_buffer(values: Vec<Self>) -> HostBuffer;
    /// The values of a buffer of this type; the buffer itself when it holds another type.
    fn from_buffer(buffer: HostBuffer) -> Result<Vec<Self>, HostBuffer>;
}

mod private {
    pub trait Sealed {}
}

macro_rules! element {
    ($($rust:ty => $variant:ident),* $(,)?) => {$(
        impl private::Sealed for $rust {}
        impl Element for $rust {
            const DTYPE: DType = DType::$variant;
            fn into_buffer(values: Vec<Self>) -> HostBuffer {
                HostBuffer::$variant(values)
            }
            fn from_buffer(buffer: HostBuffer) -> Result<Vec<Self>, HostBuffer> {
                match buffer {
                    HostBuffer::$variant(values) => Ok(values),
                    other => Err(other),
                }
            }
        }
    )*};
}

element!(f32 => F32, f64 => F64, f16 => F16, bf16 => Bf16, i32 => I32, i64 => I64, u8 => U8);
