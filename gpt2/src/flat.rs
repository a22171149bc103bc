//! Flat vectors of gradients and parameters, in host memory or on the device that computes, and their way to a communicator.
//!
//! On the CPU everything is a host vector. On another device gradients stay there until a bucket is full; what then becomes of them
//! depends on the communicator: one that moves bytes gets them in host memory, read back once, and all that follows happens on the
//! host; one that works on the device's own memory gets them lent by [`DeviceCollectives`], and they never leave the device. Either way
//! the strategies are written once, over [`Flat`] and what `Packer` makes of it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use comm_core::{Buffer, Error, Result, bf16, f16};

use crate::precision::{Precision, split};

/// Lends tensors to a communicator that works on the memory of their device.
///
/// A strategy's buffers are always lent whole, go through one operation and are taken back when it has ended; several may be lent at a
/// time. All calls of a rank come from its training thread.
pub trait DeviceCollectives: Send + Sync {
    /// The device whose memory it is.
    fn device(&self) -> &Device;

    /// A buffer over the memory of `tensor`, of the tensor's length and type (f32, bf16 or f16), which an operation may read and
    /// overwrite at once: everything that computes the tensor has ended when this returns. The tensor shares its memory with no other
    /// (see [`unshared`]).
    ///
    /// # Errors
    /// `InvalidArgument` for a tensor of another device or type; `Io` where the device fails.
    fn lend(&self, tensor: Tensor<1>) -> Result<Buffer>;

    /// The tensor over the memory of a buffer that [`lend`](Self::lend) gave, with what the operation has written there, which has
    /// ended.
    ///
    /// # Errors
    /// `InvalidArgument` for a buffer of somebody else's.
    fn take_back(&self, buffer: Buffer) -> Result<Tensor<1>>;
}

/// A vector of gradients or of f32 parameters.
#[derive(Clone, Debug)]
pub enum Flat {
    /// In host memory.
    Host(Vec<f32>),
    /// On the device: pieces that follow one another, each of any floating-point type, none of them empty.
    Device(Vec<Tensor<1>>),
}

impl Default for Flat {
    fn default() -> Self {
        Flat::Host(Vec::new())
    }
}

impl Flat {
    /// The pieces on the device.
    ///
    /// # Errors
    /// `Internal` for what is in host memory.
    pub(crate) fn pieces(&self) -> Result<Vec<Tensor<1>>> {
        match self {
            Flat::Device(pieces) => Ok(pieces.clone()),
            Flat::Host(values) if values.is_empty() => Ok(Vec::new()),
            Flat::Host(_) => Err(misplaced()),
        }
    }

    /// `values` on `device`.
    pub(crate) fn on_device(values: &[f32], device: &Device) -> Self {
        let tensor = |values: &[f32]| {
            let data = TensorData::new(values.to_vec(), [values.len()]);
            Tensor::from_data(data, (device, FloatDType::F32.into()))
        };
        Flat::Device(if values.is_empty() { Vec::new() } else { vec![tensor(values)] })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Flat::Host(values) => values.len(),
            Flat::Device(parts) => parts.iter().map(length).sum(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values in host memory; from the device they come concatenated, in one transfer.
    ///
    /// # Errors
    /// `Io` where the device fails.
    pub fn into_host(self) -> Result<Vec<f32>> {
        match self {
            Flat::Host(values) => Ok(values),
            Flat::Device(parts) => joined(parts, Precision::F32).map_or(Ok(Vec::new()), read_back),
        }
    }

    /// The values, which are in host memory.
    pub(crate) fn host(&self) -> Result<&Vec<f32>> {
        match self {
            Flat::Host(values) => Ok(values),
            Flat::Device(_) => Err(misplaced()),
        }
    }

    /// The values, which are in host memory, to be changed.
    pub(crate) fn host_mut(&mut self) -> Result<&mut Vec<f32>> {
        match self {
            Flat::Host(values) => Ok(values),
            Flat::Device(_) => Err(misplaced()),
        }
    }

    /// The values in one tensor of f32, which are on the device; `None` of no values.
    pub(crate) fn into_tensor(self) -> Result<Option<Tensor<1>>> {
        match self {
            Flat::Host(values) if values.is_empty() => Ok(None),
            Flat::Host(_) => Err(misplaced()),
            Flat::Device(parts) => Ok(joined(parts, Precision::F32)),
        }
    }

    /// `self + other`, element by element, in f32.
    pub(crate) fn plus(self, other: Flat) -> Result<Flat> {
        match (self, other) {
            (Flat::Host(mut sum), Flat::Host(values)) => {
                sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += value);
                Ok(Flat::Host(sum))
            }
            (Flat::Device(sum), Flat::Device(values)) => {
                let wide = |tensor: Tensor<1>| tensor.cast(FloatDType::F32);
                if sum.iter().map(length).eq(values.iter().map(length)) {
                    let pairs = sum.into_iter().zip(values);
                    return Ok(Flat::Device(pairs.map(|(sum, value)| wide(sum) + wide(value)).collect()));
                }
                // A pass without any data cuts its zeros otherwise.
                let sum =
                    joined(sum, Precision::F32).zip(joined(values, Precision::F32)).map(|(sum, value)| sum + value);
                Ok(Flat::Device(sum.into_iter().collect()))
            }
            _ => Err(misplaced()),
        }
    }

    /// `parts` one after another, `len` elements together.
    pub(crate) fn concat(parts: impl IntoIterator<Item = Flat>, len: usize) -> Result<Flat> {
        let mut parts = parts.into_iter();
        let mut whole = parts.next().unwrap_or_default();
        if let Flat::Host(values) = &mut whole {
            values.reserve_exact(len.saturating_sub(values.len()));
        }
        for part in parts {
            match (&mut whole, part) {
                (Flat::Host(whole), Flat::Host(part)) => whole.extend_from_slice(&part),
                (Flat::Device(whole), Flat::Device(part)) => whole.extend(part),
                _ => return Err(misplaced()),
            }
        }
        Ok(whole)
    }

    /// Copies of these elements of some vectors, one after another. Without any vector, nothing in host memory.
    pub(crate) fn concat_of<'a>(parts: impl Iterator<Item = (&'a Flat, Range<usize>)> + Clone) -> Result<Flat> {
        if parts.clone().any(|(part, _)| matches!(part, Flat::Device(_))) {
            return Flat::concat(parts.map(|(part, range)| part.slice(range)), 0);
        }
        let mut whole = Vec::with_capacity(parts.clone().map(|(_, range)| range.len()).sum());
        for (part, range) in parts {
            whole.extend_from_slice(&part.host()?[range]);
        }
        Ok(Flat::Host(whole))
    }

    /// A copy of the elements `range`.
    fn slice(&self, range: Range<usize>) -> Flat {
        match self {
            Flat::Host(values) => Flat::Host(values[range].to_vec()),
            Flat::Device(parts) => {
                let mut start = 0;
                let meet = |part: &Tensor<1>| {
                    let own = start..start + length(part);
                    start = own.end;
                    let (begin, end) = (range.start.max(own.start), range.end.min(own.end));
                    (begin < end).then(|| part.clone().narrow(0, begin - own.start, end - begin))
                };
                Flat::Device(parts.iter().filter_map(meet).collect())
            }
        }
    }

    /// Every element divided by `divisor`.
    pub(crate) fn divided(self, divisor: f32) -> Flat {
        match self {
            Flat::Host(mut values) => {
                values.iter_mut().for_each(|value| *value /= divisor);
                Flat::Host(values)
            }
            Flat::Device(parts) => Flat::Device(parts.into_iter().map(|part| part.div_scalar(divisor)).collect()),
        }
    }

    /// Cut into pieces of these lengths, which together are as long.
    pub(crate) fn split(self, lengths: &[usize]) -> Vec<Flat> {
        match self {
            Flat::Host(values) => split(values, lengths).into_iter().map(Flat::Host).collect(),
            Flat::Device(parts) => {
                let whole = joined(parts, Precision::F32);
                pieces(whole, lengths).into_iter().map(|piece| Flat::Device(piece.into_iter().collect())).collect()
            }
        }
    }
}

/// A segment's weights in the type of computation, for the model.
#[derive(Debug)]
pub enum Weights {
    /// In host memory.
    Host(Buffer),
    /// On the model's device.
    Device(Box<Tensor<1>>),
}

/// Takes vectors to a communicator and back, in the type in which they travel.
#[derive(Clone)]
pub(crate) struct Packer {
    precision: Precision,
    native: Option<Arc<dyn DeviceCollectives>>,
}

impl fmt::Debug for Packer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Packer").field("precision", &self.precision).field("native", &self.native.is_some()).finish()
    }
}

impl Packer {
    /// For values that travel as `precision`, in device memory where it can be lent by `native`, else in host memory.
    pub(crate) fn new(precision: Precision, native: Option<Arc<dyn DeviceCollectives>>) -> Self {
        Packer { precision, native }
    }

    /// The type in which values travel.
    pub(crate) fn precision(&self) -> Precision {
        self.precision
    }

    /// A buffer that holds `values`, rounded to the type. Values on the device are rounded and concatenated there; where they cannot
    /// be lent they are read back, once.
    pub(crate) fn pack(&self, values: Flat) -> Result<Buffer> {
        match (values, &self.native) {
            (Flat::Host(values), _) => Ok(self.precision.pack(values)),
            (Flat::Device(parts), Some(native)) => {
                let is_single = parts.len() == 1;
                match joined(parts, self.precision) {
                    Some(whole) => native.lend(if is_single { unshared(whole) } else { whole }),
                    None => native.lend(Tensor::zeros([0], (native.device(), self.precision.float().into()))),
                }
            }
            (Flat::Device(parts), None) => {
                let Some(whole) = joined(parts, self.precision) else { return Ok(self.precision.empty(0)) };
                Ok(match self.precision {
                    Precision::F32 => Buffer::from_vec(read_back::<f32>(whole)?),
                    Precision::Bf16 => Buffer::from_vec(read_back::<bf16>(whole)?),
                    Precision::F16 => Buffer::from_vec(read_back::<f16>(whole)?),
                })
            }
        }
    }

    /// The values of a buffer that [`pack`](Self::pack) or [`pack_into`](Self::pack_into) made, in f32, where they are.
    pub(crate) fn unpack(&self, buffer: Buffer) -> Result<Flat> {
        match buffer {
            Buffer::Host(_) => Ok(Flat::Host(self.precision.unpack(buffer)?)),
            Buffer::Device(_) => {
                let whole = self.take_back(buffer)?;
                let parts = if length(&whole) == 0 { Vec::new() } else { vec![whole.cast(FloatDType::F32)] };
                Ok(Flat::Device(parts))
            }
        }
    }

    /// The values `range` of such a buffer; the rest is let go of.
    pub(crate) fn unpack_part(&self, buffer: Buffer, range: Range<usize>) -> Result<Flat> {
        match buffer {
            Buffer::Host(_) => Ok(Flat::Host(self.precision.unpack_part(buffer, range)?)),
            Buffer::Device(_) => {
                let whole = self.take_back(buffer)?;
                if range.is_empty() {
                    return Ok(Flat::Device(Vec::new()));
                }
                // A view would keep the whole in memory.
                let part = unshared(whole.narrow(0, range.start, range.len()));
                Ok(Flat::Device(vec![part.cast(FloatDType::F32)]))
            }
        }
    }

    /// A buffer of `count` elements that holds `values`, rounded to the type, from element `start` on, and zeros elsewhere.
    pub(crate) fn pack_into(&self, values: &Flat, start: usize, count: usize) -> Result<Buffer> {
        let parts = match values {
            Flat::Host(values) => return Ok(self.precision.pack_into(values, start, count)),
            Flat::Device(parts) => parts,
        };
        let native = self.native.as_ref().ok_or_else(misplaced)?;
        let zeros = |count: usize| -> Option<Tensor<1>> {
            let options = (native.device(), self.precision.float().into());
            (count > 0).then(|| Tensor::zeros([count], options))
        };
        let rest = count - start - values.len();
        let whole = zeros(start).into_iter().chain(parts.iter().cloned()).chain(zeros(rest)).collect();
        self.pack(Flat::Device(whole))
    }

    /// A buffer for `count` values to come.
    pub(crate) fn empty(&self, count: usize) -> Result<Buffer> {
        match &self.native {
            None => Ok(self.precision.empty(count)),
            Some(native) => native.lend(Tensor::zeros([count], (native.device(), self.precision.float().into()))),
        }
    }

    /// Whether values travel in device memory.
    pub(crate) fn is_native(&self) -> bool {
        self.native.is_some()
    }

    /// Cuts what lies one after another in several buffers of weights into the segments'.
    pub(crate) fn cut_all(&self, buffers: Vec<Buffer>, lengths: &[usize]) -> Result<Vec<Weights>> {
        if self.is_native() {
            let parts = buffers.into_iter().filter(|buffer| buffer.count() > 0).map(|buffer| self.take_back(buffer));
            let whole = joined(parts.collect::<Result<_>>()?, self.precision);
            return Ok(pieces(whole, lengths)
                .into_iter()
                .flatten()
                .map(|piece| Weights::Device(Box::new(piece)))
                .collect());
        }
        let mut whole = comm_core::HostBuffer::zeros(self.precision.dtype(), lengths.iter().sum());
        let mut rest = whole.bytes_mut();
        for buffer in buffers {
            let Buffer::Host(buffer) = buffer else { return Err(misplaced()) };
            let (own, others) = rest.split_at_mut(buffer.bytes().len());
            comm_core::copy(own, buffer.bytes());
            rest = others;
        }
        self.cut(Buffer::Host(whole), lengths)
    }

    /// Cuts a buffer of weights into the segments'.
    pub(crate) fn cut(&self, buffer: Buffer, lengths: &[usize]) -> Result<Vec<Weights>> {
        match buffer {
            Buffer::Host(_) => Ok(self.precision.cut(buffer, lengths)?.into_iter().map(Weights::Host).collect()),
            Buffer::Device(_) => {
                let pieces = pieces(Some(self.take_back(buffer)?), lengths);
                Ok(pieces.into_iter().flatten().map(|piece| Weights::Device(Box::new(piece))).collect())
            }
        }
    }

    /// A buffer of one segment's weights.
    pub(crate) fn whole(&self, buffer: Buffer) -> Result<Weights> {
        match buffer {
            Buffer::Host(_) => Ok(Weights::Host(buffer)),
            Buffer::Device(_) => Ok(Weights::Device(Box::new(self.take_back(buffer)?))),
        }
    }

    /// The weights that follow from masters of this rank.
    pub(crate) fn weights(&self, masters: &Flat) -> Weights {
        match masters {
            Flat::Host(values) => Weights::Host(self.precision.pack_into(values, 0, values.len())),
            Flat::Device(parts) => match joined(parts.clone(), self.precision) {
                Some(whole) => Weights::Device(Box::new(whole)),
                None => Weights::Host(self.precision.empty(0)),
            },
        }
    }

    fn take_back(&self, buffer: Buffer) -> Result<Tensor<1>> {
        let native = self.native.as_ref();
        native
            .ok_or_else(|| Error::Internal("a buffer came back in device memory that nobody lent".into()))?
            .take_back(buffer)
    }
}

/// The same values in memory of their own.
pub fn unshared(tensor: Tensor<1>) -> Tensor<1> {
    // An operation reuses its argument's memory only where that is not needed any more.
    let kept = tensor.clone();
    let copy = tensor.mul_scalar(1.0f32);
    drop(kept);
    copy
}

/// `parts` rounded to `precision` and concatenated, on the device; `None` of no parts.
fn joined(parts: Vec<Tensor<1>>, precision: Precision) -> Option<Tensor<1>> {
    let float = precision.float();
    let mut parts: Vec<Tensor<1>> = parts.into_iter().map(|part| part.cast(float)).collect();
    if parts.len() > 1 { Some(Tensor::cat(parts, 0)) } else { parts.pop() }
}

/// `whole` in pieces of these lengths; `None` for those of no elements.
fn pieces(whole: Option<Tensor<1>>, lengths: &[usize]) -> Vec<Option<Tensor<1>>> {
    let mut start = 0;
    let piece = |len: &usize| {
        let begin = start;
        start += len;
        let whole = whole.as_ref().filter(|_| *len > 0)?;
        Some(whole.clone().narrow(0, begin, *len))
    };
    lengths.iter().map(piece).collect()
}

fn read_back<E: burn::tensor::Element>(tensor: Tensor<1>) -> Result<Vec<E>> {
    tensor.try_into_vec_as::<E>().map_err(|error| {
        Error::io("reading gradients or parameters back from the device", io::Error::other(error.to_string()))
    })
}

fn length(tensor: &Tensor<1>) -> usize {
    tensor.dims()[0]
}

fn misplaced() -> Error {
    Error::Internal("gradients or parameters are in host memory and on a device at once".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These pieces on a device.
    fn device(pieces: &[&[f32]]) -> Flat {
        let parts = pieces.iter().map(|piece| Flat::on_device(piece, &Device::flex()));
        Flat::concat(parts, 0).unwrap()
    }

    #[test]
    fn vectors_on_a_device_are_cut_and_added_as_those_of_the_host() {
        let flat = device(&[&[1.0, 2.0], &[], &[3.0, 4.0, 5.0]]);
        assert_eq!((flat.len(), device(&[&[]]).len()), (5, 0));
        for (range, expected) in
            [(0..5, vec![1.0, 2.0, 3.0, 4.0, 5.0]), (1..3, vec![2.0, 3.0]), (3..4, vec![4.0]), (2..2, vec![])]
        {
            assert_eq!(flat.slice(range.clone()).into_host().unwrap(), expected);
            let copy = Flat::concat_of([(&flat, range.clone()), (&flat, range)].into_iter()).unwrap();
            assert_eq!(copy.into_host().unwrap(), [expected.clone(), expected].concat());
        }
        let pieces = flat.clone().split(&[2, 0, 3]).into_iter().map(|piece| piece.into_host().unwrap());
        assert_eq!(pieces.collect::<Vec<_>>(), [vec![1.0, 2.0], vec![], vec![3.0, 4.0, 5.0]]);
        let sum = flat.clone().plus(device(&[&[10.0, 20.0], &[30.0, 40.0, 50.0]])).unwrap();
        assert_eq!(sum.divided(11.0).into_host().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0]);
        let otherwise_cut = flat.clone().plus(device(&[&[1.0, 1.0, 1.0, 1.0, 1.0]])).unwrap();
        assert_eq!(otherwise_cut.into_host().unwrap(), [2.0, 3.0, 4.0, 5.0, 6.0]);
        assert!(flat.clone().plus(Flat::Host(vec![0.0; 5])).is_err());
        assert!(Flat::concat([flat.clone(), Flat::Host(vec![0.0])], 6).is_err());
        assert!(flat.host().is_err() && Flat::Host(vec![1.0]).into_tensor().is_err());
        assert!(Flat::default().into_tensor().unwrap().is_none());
    }

    #[test]
    fn what_is_packed_on_a_device_is_what_the_host_packs() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32 - 500.0).powi(3) * 1.3e-5).collect();
        for precision in Precision::ALL {
            let packer = Packer::new(precision, None);
            let on_device = packer.pack(device(&[&values[..333], &values[333..]])).unwrap();
            let on_host = packer.pack(Flat::Host(values.clone())).unwrap();
            let (Buffer::Host(on_device), Buffer::Host(on_host)) = (on_device, on_host) else { panic!("{precision}") };
            assert_eq!(on_device, on_host);
            assert_eq!(packer.pack(device(&[])).unwrap().count(), 0);
        }
    }

    #[test]
    fn weights_that_lie_in_several_buffers_are_cut_into_segments() {
        let packer = Packer::new(Precision::Bf16, None);
        let buffers = [vec![1.0, 2.0, 3.0], vec![], vec![4.0]].map(|values| packer.pack(Flat::Host(values)).unwrap());
        let pieces = packer.cut_all(buffers.into(), &[1, 3]).unwrap();
        let pieces: Vec<Vec<bf16>> = pieces
            .into_iter()
            .map(|piece| match piece {
                Weights::Host(buffer) => buffer.into_vec().unwrap(),
                Weights::Device(_) => panic!("the weights were in host memory"),
            })
            .collect();
        assert_eq!(
            pieces,
            [vec![1.0], vec![2.0, 3.0, 4.0]].map(|piece| piece.into_iter().map(bf16::from_f32).collect::<Vec<_>>())
        );
    }
}
