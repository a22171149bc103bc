//! The type in which gradients travel.

use std::fmt;
use std::str::FromStr;

use comm_core::{Buffer, DType, bf16, f16};
use half::slice::HalfFloatSliceExt;
use serde::{Deserialize, Serialize};

/// The type in which gradients travel. Sums of 16-bit values are formed in f32 and rounded once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// 4 bytes a gradient.
    #[default]
    F32,
    /// 2 bytes, 8 bits of exponent.
    Bf16,
    /// 2 bytes, 5 bits of exponent: small gradients are lost without loss scaling.
    F16,
}

impl Wire {
    const ALL: [Wire; 3] = [Wire::F32, Wire::Bf16, Wire::F16];

    /// The element type of its buffers.
    pub fn dtype(self) -> DType {
        match self {
            Wire::F32 => DType::F32,
            Wire::Bf16 => DType::Bf16,
            Wire::F16 => DType::F16,
        }
    }

    /// A buffer that holds `values`, rounded to this type.
    pub(super) fn pack(self, values: Vec<f32>) -> Buffer {
        match self {
            Wire::F32 => Buffer::from_vec(values),
            Wire::Bf16 => {
                let mut packed = vec![bf16::ZERO; values.len()];
                packed.convert_from_f32_slice(&values);
                Buffer::from_vec(packed)
            }
            Wire::F16 => {
                let mut packed = vec![f16::ZERO; values.len()];
                packed.convert_from_f32_slice(&values);
                Buffer::from_vec(packed)
            }
        }
    }

    /// A buffer for `count` values to come.
    pub(super) fn empty(self, count: usize) -> Buffer {
        Buffer::Host(comm_core::HostBuffer::zeros(self.dtype(), count))
    }

    /// The values of a buffer that [`pack`](Wire::pack) or [`empty`](Wire::empty) made.
    pub(super) fn unpack(self, buffer: Buffer) -> comm_core::Result<Vec<f32>> {
        Ok(match self {
            Wire::F32 => buffer.into_vec()?,
            Wire::Bf16 => widen(&buffer.into_vec::<bf16>()?),
            Wire::F16 => widen(&buffer.into_vec::<f16>()?),
        })
    }
}

impl fmt::Display for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dtype().fmt(f)
    }
}

impl FromStr for Wire {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Wire::ALL
            .into_iter()
            .find(|wire| wire.to_string() == name)
            .ok_or_else(|| format!("`{name}` is no wire type; choose one of f32, bf16, f16"))
    }
}

fn widen<T>(values: &[T]) -> Vec<f32>
where
    [T]: HalfFloatSliceExt,
{
    let mut wide = vec![0.0; values.len()];
    values.convert_to_f32_slice(&mut wide);
    wide
}
