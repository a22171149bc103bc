//! The floating-point types in which a model computes and values travel.

use std::ops::Range;

use burn::tensor::FloatDType;
use comm_core::{Buffer, DType, Element, Error, Float16, HostBuffer, bf16, f16};
use serde::{Deserialize, Serialize};

use crate::memory;

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
        memory::zeroed::<u8>(count * self.dtype().size());
        Buffer::Host(HostBuffer::zeros(self.dtype(), count))
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
            Precision::F32 => {
                memory::copied::<f32>(range.len());
                buffer.into_vec::<f32>()?[range].to_vec()
            }
            Precision::Bf16 => widen(&buffer.into_vec::<bf16>()?[range]),
            Precision::F16 => widen(&buffer.into_vec::<f16>()?[range]),
        })
    }

    /// A buffer of `count` elements that holds `values`, rounded to this type, from element `start` on, and zeros elsewhere.
    pub(crate) fn pack_into(self, values: &[f32], start: usize, count: usize) -> Buffer {
        self.pack_parts_into(&[values], start, count, None)
    }

    /// As [`pack_into`](Precision::pack_into), of values that come in parts, one after another. In `spare`, where that is such a buffer; it then
    /// keeps its other values.
    pub(crate) fn pack_parts_into(self, parts: &[&[f32]], start: usize, count: usize, spare: Option<Buffer>) -> Buffer {
        match self {
            Precision::F32 => match fitting(spare, count) {
                Some(whole) => overwritten(whole, parts, start, |place, part| place.copy_from_slice(part)),
                None => between_zeros(parts, start, count),
            },
            Precision::Bf16 => {
                let whole = fitting(spare, count).unwrap_or_else(|| zeros(count));
                overwritten(whole, parts, start, |place: &mut [bf16], part| bf16::narrow(part, place))
            }
            Precision::F16 => {
                let whole = fitting(spare, count).unwrap_or_else(|| zeros(count));
                overwritten(whole, parts, start, |place: &mut [f16], part| f16::narrow(part, place))
            }
        }
    }

    /// A copy of the elements `range` of a buffer.
    ///
    /// # Errors
    /// `InvalidArgument` for a buffer of another type.
    pub(crate) fn copied_part(self, buffer: &HostBuffer, range: Range<usize>) -> comm_core::Result<HostBuffer> {
        match self {
            Precision::F32 => copied_part::<f32>(buffer, range),
            Precision::Bf16 => copied_part::<bf16>(buffer, range),
            Precision::F16 => copied_part::<f16>(buffer, range),
        }
    }

    /// What lies one after another in several buffers, in pieces of these lengths, which together are as long.
    ///
    /// # Errors
    /// `InvalidArgument` for a buffer of another type; `Internal` for other lengths.
    pub(crate) fn rejoin(self, buffers: &[HostBuffer], lengths: &[usize]) -> comm_core::Result<Vec<Buffer>> {
        match self {
            Precision::F32 => rejoin::<f32>(buffers, lengths),
            Precision::Bf16 => rejoin::<bf16>(buffers, lengths),
            Precision::F16 => rejoin::<f16>(buffers, lengths),
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

/// The values of `spare`, if it has `count` of the type.
fn fitting<T: Element>(spare: Option<Buffer>, count: usize) -> Option<Vec<T>> {
    spare.and_then(|spare| spare.into_vec().ok()).filter(|values: &Vec<T>| values.len() == count)
}

/// `whole` with what `write` makes of `parts`, one after another from `start` on.
fn overwritten<T: Element>(
    mut whole: Vec<T>,
    parts: &[&[f32]],
    start: usize,
    write: impl Fn(&mut [T], &[f32]),
) -> Buffer {
    let mut rest = &mut whole[start..];
    for part in parts {
        let (place, others) = rest.split_at_mut(part.len());
        write(place, part);
        memory::copied::<T>(part.len());
        rest = others;
    }
    Buffer::from_vec(whole)
}

/// `count` elements, zeros but for `parts`, one after another from `start` on.
fn between_zeros(parts: &[&[f32]], start: usize, count: usize) -> Buffer {
    let given: usize = parts.iter().map(|part| part.len()).sum();
    memory::copied::<f32>(given);
    memory::zeroed::<f32>(count - given);
    let mut whole = Vec::with_capacity(count);
    whole.resize(start, 0.0);
    parts.iter().for_each(|part| whole.extend_from_slice(part));
    whole.resize(count, 0.0);
    Buffer::from_vec(whole)
}

fn rejoin<T: Element>(buffers: &[HostBuffer], lengths: &[usize]) -> comm_core::Result<Vec<Buffer>> {
    let mut rest = buffers.iter().map(elements::<T>);
    let mut open: &[T] = &[];
    let mut piece = |length: &usize| {
        let mut piece = Vec::with_capacity(*length);
        while piece.len() < *length {
            if open.is_empty() {
                let next = rest.next();
                open = next.ok_or_else(|| Error::Internal("the pieces are longer than the buffers".into()))??;
                continue;
            }
            let (own, others) = open.split_at(open.len().min(length - piece.len()));
            piece.extend_from_slice(own);
            open = others;
        }
        memory::copied::<T>(*length);
        Ok(Buffer::from_vec(piece))
    };
    lengths.iter().map(&mut piece).collect()
}

/// The elements of a buffer of their type.
fn elements<T: Element>(buffer: &HostBuffer) -> comm_core::Result<&[T]> {
    if buffer.dtype() != T::DTYPE {
        return Err(Error::invalid(format!("a buffer holds {}, not {}", buffer.dtype(), T::DTYPE)));
    }
    Ok(bytemuck::cast_slice(buffer.bytes()))
}

fn copied_part<T: Element>(buffer: &HostBuffer, range: Range<usize>) -> comm_core::Result<HostBuffer> {
    memory::copied::<T>(range.len());
    Ok(T::into_buffer(elements::<T>(buffer)?[range].to_vec()))
}

fn zeros<T: Element>(count: usize) -> Vec<T> {
    memory::zeroed::<T>(count);
    vec![T::zeroed(); count]
}

fn cut<T: Element>(values: Vec<T>, lengths: &[usize]) -> Vec<Buffer> {
    split(values, lengths).into_iter().map(Buffer::from_vec).collect()
}

/// Cuts a vector into pieces of these lengths, from the back, so that at no time more than the vector and one piece are held.
pub(crate) fn split<T>(mut values: Vec<T>, lengths: &[usize]) -> Vec<Vec<T>> {
    memory::copied::<T>(lengths.iter().skip(1).sum());
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
    let mut narrow = zeros(values.len());
    memory::copied::<T>(values.len());
    T::narrow(values, &mut narrow);
    narrow
}

fn widen<T: Float16>(values: &[T]) -> Vec<f32> {
    let mut wide = zeros(values.len());
    memory::copied::<f32>(values.len());
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
            // In memory of another use.
            let spare = || Some(precision.pack(vec![9.0; 4]));
            let placed = precision.pack_parts_into(&[&values[..1], &values[2..3]], 1, 4, spare());
            assert_eq!(precision.unpack(placed).unwrap(), [9.0, 1.0, 0.0, 9.0]);
            assert_eq!(precision.unpack(precision.pack_parts_into(&[], 0, 5, spare())).unwrap(), [0.0; 5]);
            let buffers = [vec![1.0, 2.0, 3.0], vec![], vec![4.0]].map(|values| match precision.pack(values) {
                Buffer::Host(buffer) => buffer,
                Buffer::Device(_) => panic!("packed in host memory"),
            });
            let pieces = precision.rejoin(&buffers, &[0, 1, 3]).unwrap();
            let pieces: Vec<Vec<f32>> = pieces.into_iter().map(|piece| precision.unpack(piece).unwrap()).collect();
            assert_eq!(pieces, [vec![], vec![1.0], vec![2.0, 3.0, 4.0]]);
            assert!(precision.rejoin(&buffers, &[5]).is_err());
            let part = precision.copied_part(&buffers[0], 1..3).unwrap();
            assert_eq!(precision.unpack(Buffer::Host(part)).unwrap(), [2.0, 3.0]);
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
        assert!("f8".parse::<Precision>().is_err());
    }
}
