//! The floating-point types in which a model computes and values travel.

use std::ops::Range;

use burn::tensor::FloatDType;
use comm_core::{Buffer, DType, Element, Float16, bf16, f16};
use serde::{Deserialize, Serialize};

/// A floating-point type of computation, or of values on their way between ranks. Sums of 16-bit values that travel are formed in f32
/// and rounded once; by `hierarchical`, once inside a node and once between nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// 4 bytes.
    #[default]
    F32,
    /// 2 bytes, 8 bits of exponent.
    Bf16,
    /// 2 bytes, 5 bits of exponent: small gradients vanish without loss scaling.
    F16,
}

comm_core::names!(pub Precision, "floating-point type": F32 = "f32", Bf16 = "bf16", F16 = "f16");

impl Precision {
    /// The element type of its buffers.
    pub fn dtype(self) -> DType {
        match self {
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
            Precision::F16 => DType::F16,
        }
    }

    /// The same type, as burn calls it.
    pub(crate) fn float(self) -> FloatDType {
        match self {
            Precision::F32 => FloatDType::F32,
            Precision::Bf16 => FloatDType::BF16,
            Precision::F16 => FloatDType::F16,
        }
    }

    /// A buffer that holds `values`, rounded to this type.
    pub(crate) fn pack(self, values: Vec<f32>) -> Buffer {
        match self {
            Precision::F32 => Buffer::from_vec(values),
            Precision::Bf16 => Buffer::from_vec(narrow::<bf16>(&values)),
            Precision::F16 => Buffer::from_vec(narrow::<f16>(&values)),
        }
    }

    /// A buffer for `count` values to come.
    pub(crate) fn empty(self, count: usize) -> Buffer {
        Buffer::Host(comm_core::HostBuffer::zeros(self.dtype(), count))
    }

    /// The values of a buffer that [`pack`](Precision::pack) or [`empty`](Precision::empty) made.
    pub(crate) fn unpack(self, buffer: Buffer) -> comm_core::Result<Vec<f32>> {
        Ok(match self {
            Precision::F32 => buffer.into_vec()?,
            Precision::Bf16 => widen(&buffer.into_vec::<bf16>()?),
            Precision::F16 => widen(&buffer.into_vec::<f16>()?),
        })
    }
}

impl Precision {
    /// The values `range` of such a buffer; the rest is dropped.
    pub(crate) fn unpack_part(self, buffer: Buffer, range: Range<usize>) -> comm_core::Result<Vec<f32>> {
        Ok(match self {
            Precision::F32 => buffer.into_vec::<f32>()?[range].to_vec(),
            Precision::Bf16 => widen(&buffer.into_vec::<bf16>()?[range]),
            Precision::F16 => widen(&buffer.into_vec::<f16>()?[range]),
        })
    }

    /// A buffer of `count` elements that holds `values`, rounded to this type, from element `start` on, and zeros elsewhere.
    pub(crate) fn pack_into(self, values: &[f32], start: usize, count: usize) -> Buffer {
        self.pack_parts_into(&[values], start, count)
    }

    /// As [`pack_into`](Precision::pack_into), of values that come in parts, one after another.
    pub(crate) fn pack_parts_into(self, parts: &[&[f32]], start: usize, count: usize) -> Buffer {
        match self {
            Precision::F32 => placed(parts, start, count, |whole, part| whole.extend_from_slice(part)),
            Precision::Bf16 => placed(parts, start, count, append_rounded::<bf16>),
            Precision::F16 => placed(parts, start, count, append_rounded::<f16>),
        }
    }

    /// Cuts a buffer into pieces of these lengths, which together are as long as it. The first keeps the buffer's memory.
    pub(crate) fn cut(self, buffer: Buffer, lengths: &[usize]) -> comm_core::Result<Vec<Buffer>> {
        Ok(match self {
            Precision::F32 => cut(buffer.into_vec::<f32>()?, lengths),
            Precision::Bf16 => cut(buffer.into_vec::<bf16>()?, lengths),
            Precision::F16 => cut(buffer.into_vec::<f16>()?, lengths),
        })
    }
}

/// `count` elements, zeros but for those that `append` makes of `parts`, one after another from `start` on.
fn placed<T: Element + Default>(
    parts: &[&[f32]],
    start: usize,
    count: usize,
    append: impl Fn(&mut Vec<T>, &[f32]),
) -> Buffer {
    let mut whole = Vec::with_capacity(count);
    whole.resize(start, T::default());
    parts.iter().for_each(|part| append(&mut whole, part));
    whole.resize(count, T::default());
    Buffer::from_vec(whole)
}

fn append_rounded<T: Float16>(whole: &mut Vec<T>, part: &[f32]) {
    let start = whole.len();
    whole.resize(start + part.len(), T::zeroed());
    T::narrow(part, &mut whole[start..]);
}

fn cut<T: Element>(values: Vec<T>, lengths: &[usize]) -> Vec<Buffer> {
    split(values, lengths).into_iter().map(Buffer::from_vec).collect()
}

/// Cuts a vector into pieces of these lengths, from the back, so that at no time more than the vector and one piece are held.
pub(crate) fn split<T>(mut values: Vec<T>, lengths: &[usize]) -> Vec<Vec<T>> {
    let mut pieces: Vec<Vec<T>> = Vec::with_capacity(lengths.len());
    for (index, length) in lengths.iter().enumerate().rev() {
        if index == 0 {
            values.truncate(*length);
            pieces.push(std::mem::take(&mut values));
        } else {
            pieces.push(values.split_off(values.len() - length));
            values.shrink_to_fit();
        }
    }
    pieces.reverse();
    pieces
}

fn narrow<T: Float16>(values: &[f32]) -> Vec<T> {
    let mut narrow = vec![T::zeroed(); values.len()];
    T::narrow(values, &mut narrow);
    narrow
}

fn widen<T: Float16>(values: &[T]) -> Vec<f32> {
    let mut wide = vec![0.0; values.len()];
    T::widen(values, &mut wide);
    wide
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_packing_as_far_as_the_type_holds_them() {
        for precision in Precision::ALL {
            let values = vec![1.0, -2.5, 0.0, 1024.0];
            assert_eq!(precision.unpack(precision.pack(values.clone())).unwrap(), values);
            let placed = precision.pack_into(&values[1..3], 3, 6);
            assert_eq!(precision.unpack(placed).unwrap(), [0.0, 0.0, 0.0, -2.5, 0.0, 0.0]);
            assert_eq!(precision.unpack_part(precision.pack(values.clone()), 1..3).unwrap(), values[1..3]);
            let pieces = precision.cut(precision.pack(values.clone()), &[1, 0, 3]).unwrap();
            let pieces: Vec<Vec<f32>> = pieces.into_iter().map(|piece| precision.unpack(piece).unwrap()).collect();
            assert_eq!(pieces, [values[..1].to_vec(), vec![], values[1..].to_vec()]);
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
        assert!("f8".parse::<Precision>().is_err());
    }
}
