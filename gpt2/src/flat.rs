//! Flat vectors of gradients and parameters, in host memory or on the device that computes, and their way to a communicator.
//!
//! On the CPU everything is a host vector. On another device gradients stay there until a bucket is full; what then becomes of them
//! depends on the communicator: one that moves bytes gets them in host memory, read back once, and all that follows happens on the
//! host; one that works on the device's own memory gets them lent by [`DeviceCollectives`], and they never leave the device. Either way
//! the strategies are written once, over [`Flat`] and what `Packer` makes of it.

mod arithmetic;
mod packer;

use std::io;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use comm_core::{Buffer, Error, Result, bf16, f16};

use crate::devices;
use crate::memory::{self, Category};
use crate::precision::{Precision, split};
use crate::record::{self, Activity};

pub(crate) use packer::Packer;

/// Lends tensors to a communicator that works on the memory of their device.
///
/// A strategy's buffers are always lent whole, go through one operation and are taken back when it has ended; several may be lent at a
/// time. All calls of a rank come from its training thread.
pub trait DeviceCollectives: Send + Sync {
    /// The device whose memory it is.
    fn device(&self) -> &Device;

    /// Waits until the device has done what it was asked to. Called before [`lend`](Self::lend), which waits as well, so that this time
    /// is not taken for lending.
    ///
    /// # Errors
    /// `Io` where the device fails.
    fn wait(&self) -> Result<()> {
        settle(self.device())
    }

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
    /// `InvalidArgument` for a buffer that does not belong here.
    fn take_back(&self, buffer: Buffer) -> Result<Tensor<1>>;
}

/// A vector of gradients or of f32 parameters.
#[derive(Clone, Debug)]
pub enum Flat {
    /// In host memory.
    Host(Vec<f32>),
    /// In host memory, some elements of a vector whose others are elsewhere in use: to be read.
    Part(Arc<Vec<f32>>, Range<usize>),
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
            flat if flat.is_empty() => Ok(Vec::new()),
            Flat::Host(_) | Flat::Part(..) => Err(misplaced()),
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
            Flat::Part(_, range) => range.len(),
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
            Flat::Part(whole, range) => Ok(copy(&whole[range])),
            Flat::Device(parts) => joined(parts, Precision::F32).map_or(Ok(Vec::new()), read_back),
        }
    }

    /// In a vector of its own, where it is in host memory.
    fn apart(self) -> Flat {
        match self {
            Flat::Part(whole, range) => Flat::Host(copy(&whole[range])),
            own => own,
        }
    }

    /// The values, which are in host memory.
    pub(crate) fn host(&self) -> Result<&[f32]> {
        match self {
            Flat::Host(values) => Ok(values),
            Flat::Part(whole, range) => Ok(&whole[range.clone()]),
            Flat::Device(_) => Err(misplaced()),
        }
    }

    /// The values, which are in host memory, to be changed.
    pub(crate) fn host_mut(&mut self) -> Result<&mut Vec<f32>> {
        match self {
            Flat::Host(values) => Ok(values),
            Flat::Part(..) => Err(Error::Internal("what others share was to be changed".into())),
            Flat::Device(_) => Err(misplaced()),
        }
    }

    /// The values in one tensor of f32, which are on the device; `None` of no values.
    pub(crate) fn into_tensor(self) -> Result<Option<Tensor<1>>> {
        match self {
            Flat::Device(parts) => Ok(joined(parts, Precision::F32)),
            flat if flat.is_empty() => Ok(None),
            Flat::Host(_) | Flat::Part(..) => Err(misplaced()),
        }
    }

    /// `self + other`, element by element, in f32.
    pub(crate) fn plus(self, other: &Flat) -> Result<Flat> {
        match (self.apart(), other) {
            (Flat::Host(mut sum), values @ (Flat::Host(_) | Flat::Part(..))) => {
                sum.iter_mut().zip(values.host()?).for_each(|(sum, value)| *sum += value);
                Ok(Flat::Host(sum))
            }
            (Flat::Device(sum), Flat::Device(values)) => {
                let values = values.clone();
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

    /// `parts` one after another.
    pub(crate) fn concat(parts: impl IntoIterator<Item = Flat>) -> Result<Flat> {
        let mut parts = parts.into_iter();
        let mut whole = parts.next().unwrap_or_default().apart();
        for part in parts {
            match (&mut whole, part) {
                (Flat::Host(whole), part @ (Flat::Host(_) | Flat::Part(..))) => append(whole, part.host()?),
                (Flat::Device(whole), Flat::Device(part)) => whole.extend(part),
                _ => return Err(misplaced()),
            }
        }
        Ok(whole)
    }

    /// Copies of these elements of some vectors, one after another. Without any vector, nothing in host memory.
    pub(crate) fn concat_of<'a>(parts: impl Iterator<Item = (&'a Flat, Range<usize>)> + Clone) -> Result<Flat> {
        if parts.clone().any(|(part, _)| matches!(part, Flat::Device(_))) {
            return Flat::concat(parts.map(|(part, range)| part.slice(range)));
        }
        let mut whole = Vec::with_capacity(parts.clone().map(|(_, range)| range.len()).sum());
        for (part, range) in parts {
            append(&mut whole, &part.host()?[range]);
        }
        Ok(Flat::Host(whole))
    }

    /// A copy of the elements `range`.
    pub(crate) fn slice(&self, range: Range<usize>) -> Flat {
        match self {
            Flat::Host(values) => Flat::Host(copy(&values[range])),
            Flat::Part(whole, own) => Flat::Host(copy(&whole[own.clone()][range])),
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
        match self.apart() {
            Flat::Host(mut values) => {
                values.iter_mut().for_each(|value| *value /= divisor);
                Flat::Host(values)
            }
            // `apart` leaves none.
            part @ Flat::Part(..) => part,
            Flat::Device(parts) => Flat::Device(parts.into_iter().map(|part| part.div_scalar(divisor)).collect()),
        }
    }

    /// Cut into pieces of these lengths, which together are as long. In host memory each has a vector of its own.
    pub(crate) fn split(self, lengths: &[usize]) -> Vec<Flat> {
        match self.apart() {
            Flat::Host(values) => split(values, lengths).into_iter().map(Flat::Host).collect(),
            flat => flat.share(lengths),
        }
    }

    /// The same to be read alone: in host memory the pieces stay where they are, and the last that is let go of frees them all.
    pub(crate) fn share(self, lengths: &[usize]) -> Vec<Flat> {
        let within = |whole: Arc<Vec<f32>>, mut start: usize| -> Vec<Flat> {
            let part = |length: &usize| {
                let range = start..start + length;
                start = range.end;
                Flat::Part(whole.clone(), range)
            };
            lengths.iter().map(part).collect()
        };
        match self {
            Flat::Host(values) => match lengths {
                [_] => vec![Flat::Host(values)],
                _ => within(Arc::new(values), 0),
            },
            Flat::Part(whole, range) => within(whole, range.start),
            Flat::Device(parts) => {
                let whole = joined(parts, Precision::F32);
                pieces(whole, lengths).into_iter().map(|piece| Flat::Device(piece.into_iter().collect())).collect()
            }
        }
    }
}

/// One segment's gradients, where the backward pass has left them. In host memory they are where they wait, or
/// in the bucket in which they leave; else they are copied there once.
#[derive(Debug)]
pub struct Gradients(Source);

#[derive(Debug)]
enum Source {
    Flat(Flat),
    /// In host memory, one after another, of any floating-point type.
    Tensors(Vec<Tensor<1>>),
}

impl From<Flat> for Gradients {
    fn from(flat: Flat) -> Self {
        Gradients(Source::Flat(flat))
    }
}

impl Gradients {
    /// Those of `tensors`, which stay on their device until they are packed, or are in host memory.
    pub(crate) fn of_tensors(tensors: Vec<Tensor<1>>, stay_on_device: bool) -> Self {
        Gradients(if stay_on_device { Source::Flat(Flat::Device(tensors)) } else { Source::Tensors(tensors) })
    }

    /// As one vector.
    ///
    /// # Errors
    /// `Io` where the device fails.
    pub fn into_flat(self) -> Result<Flat> {
        let (mut flat, len) = (Flat::default(), self.len());
        self.append_to(&mut flat, len)?;
        Ok(flat)
    }

    /// Behind what `flat` holds, which is to have `len` elements in the end.
    ///
    /// # Errors
    /// `Io` where the device fails; `Internal` where one is in host memory and the other on a device.
    pub(crate) fn append_to(self, flat: &mut Flat, len: usize) -> Result<()> {
        packing(|| match (self.0, flat) {
            (Source::Flat(own), flat) if flat.is_empty() => {
                *flat = own;
                Ok(())
            }
            (Source::Flat(Flat::Host(own)), Flat::Host(values)) => {
                values.reserve_exact(len.saturating_sub(values.len()));
                append(values, &own);
                Ok(())
            }
            (Source::Flat(Flat::Device(own)), Flat::Device(parts)) => {
                parts.extend(own);
                Ok(())
            }
            (Source::Tensors(tensors), Flat::Host(values)) => {
                values.reserve_exact(len.saturating_sub(values.len()));
                let add = |tensor| with_values(tensor, |own| append(values, own));
                tensors.into_iter().try_for_each(add).map_err(unreadable)
            }
            _ => Err(misplaced()),
        })
    }

    /// `sum` and these, element by element, in f32.
    ///
    /// # Errors
    /// As [`append_to`](Self::append_to).
    pub(crate) fn added_to(self, sum: Flat) -> Result<Flat> {
        packing(|| match (self.0, sum) {
            (Source::Flat(own), sum) => sum.plus(&own),
            (Source::Tensors(tensors), Flat::Host(mut sum)) => {
                tensor_by_tensor(tensors, &mut sum, |sum, own| {
                    sum.iter_mut().zip(own).for_each(|(sum, value)| *sum += value);
                })?;
                Ok(Flat::Host(sum))
            }
            _ => Err(misplaced()),
        })
    }

    fn len(&self) -> usize {
        match &self.0 {
            Source::Flat(flat) => flat.len(),
            Source::Tensors(tensors) => tensors.iter().map(length).sum(),
        }
    }
}

/// Copies of gradients are a part of packing, and memory of gradients.
fn packing<R>(work: impl FnOnce() -> R) -> R {
    record::charged(Activity::Pack, Category::Gradients, work)
}

/// Runs `work` on the values of each tensor, in host memory, and their place in `whole`, which is as long as all of them.
fn tensor_by_tensor(
    tensors: Vec<Tensor<1>>,
    whole: &mut [f32],
    mut work: impl FnMut(&mut [f32], &[f32]),
) -> Result<()> {
    let mut rest = whole;
    for tensor in tensors {
        let (place, others) = rest.split_at_mut_checked(length(&tensor)).ok_or_else(misplaced)?;
        rest = others;
        with_values(tensor, |own| work(place, own)).map_err(unreadable)?;
    }
    Ok(())
}

/// Runs `work` on the values of a tensor in host memory, in f32: on its own memory where it is of that type.
///
/// # Errors
/// What its device says.
pub(crate) fn with_values<R>(tensor: Tensor<1>, work: impl FnOnce(&[f32]) -> R) -> std::result::Result<R, String> {
    let data = tensor.try_into_data().map_err(devices::reason)?;
    if let Ok(values) = data.as_slice::<f32>() {
        return Ok(work(values));
    }
    Ok(work(&data.try_into_vec_as::<f32>().map_err(|error| error.to_string())?))
}

/// A segment's weights in the type of computation, for the model.
#[derive(Debug)]
pub enum Weights {
    /// In host memory.
    Host(Buffer),
    /// On the model's device.
    Device(Box<Tensor<1>>),
}

/// Waits until `device` has done what it was asked to.
fn settle(device: &Device) -> Result<()> {
    device
        .sync()
        .map_err(|error| Error::io("waiting for gradients or parameters", io::Error::other(devices::reason(error))))
}

/// The values of a buffer of `precision`, on `device`.
///
/// # Errors
/// `InvalidArgument` for values of another type, or on a device already.
pub(crate) fn upload(values: Buffer, precision: Precision, device: &Device) -> Result<Tensor<1>> {
    let count = values.count();
    let data = match precision {
        Precision::F32 => TensorData::new(values.into_vec::<f32>()?, [count]),
        Precision::Bf16 => TensorData::new(values.into_vec::<bf16>()?, [count]),
        Precision::F16 => TensorData::new(values.into_vec::<f16>()?, [count]),
    };
    Ok(Tensor::from_data(data, (device, precision.float().into())))
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
pub(crate) fn joined(parts: Vec<Tensor<1>>, precision: Precision) -> Option<Tensor<1>> {
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
    tensor.try_into_vec_as::<E>().map_err(|error| unreadable(devices::reason(error)))
}

fn unreadable(detail: String) -> Error {
    Error::io("reading gradients or parameters back from the device", io::Error::other(detail))
}

fn length(tensor: &Tensor<1>) -> usize {
    tensor.dims()[0]
}

fn copy(values: &[f32]) -> Vec<f32> {
    memory::copied::<f32>(values.len());
    values.to_vec()
}

fn append(whole: &mut Vec<f32>, values: &[f32]) {
    memory::copied::<f32>(values.len());
    whole.extend_from_slice(values);
}

fn misplaced() -> Error {
    Error::Internal("gradients or parameters are in host memory and on a device at once".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These pieces on a device.
    pub(super) fn device(pieces: &[&[f32]]) -> Flat {
        let parts = pieces.iter().map(|piece| Flat::on_device(piece, &Device::flex()));
        Flat::concat(parts).unwrap()
    }

    #[test]
    fn pieces_that_share_a_vector_are_not_copied_until_one_is_changed() {
        let whole = vec![1.0, 2.0, 3.0, 4.0];
        let (start, before) = (whole.as_ptr(), memory::copies());
        let pieces = Flat::Host(whole).share(&[1, 0, 3]);
        let inner = pieces[2].clone().share(&[2, 1]);
        assert_eq!(pieces.iter().map(Flat::len).collect::<Vec<_>>(), [1, 0, 3]);
        assert_eq!((pieces[0].host().unwrap().as_ptr(), pieces[2].host().unwrap()), (start, &[2.0, 3.0, 4.0][..]));
        assert_eq!(inner[1].host().unwrap(), [4.0]);
        assert_eq!(memory::copies(), before);
        assert!(pieces[2].clone().host_mut().is_err() && pieces[2].pieces().is_err());
        assert!(pieces[1].pieces().unwrap().is_empty());
        let sum = Flat::Host(vec![1.0; 3]).plus(&pieces[2]).unwrap().into_host().unwrap();
        assert_eq!((sum, memory::copies()), (vec![3.0, 4.0, 5.0], before));
        let halves = pieces[2].clone().divided(2.0).into_host().unwrap();
        assert_eq!((halves, pieces[2].host().unwrap()), (vec![1.0, 1.5, 2.0], &[2.0, 3.0, 4.0][..]));
        assert_eq!(memory::copies().since(before), memory::Copies { copied: 12, zeroed: 0 });
        let whole = Flat::concat(pieces).unwrap();
        assert_eq!(whole.split(&[3, 1])[0].host().unwrap(), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn vectors_on_a_device_are_cut_and_added_as_those_of_the_host() {
        let flat = device(&[&[1.0, 2.0], &[], &[3.0, 4.0, 5.0]]);
        assert_eq!((flat.len(), device(&[&[]]).len()), (5, 0));
        for (range, expected) in
            [(0..5, vec![1.0, 2.0, 3.0, 4.0, 5.0]), (1..3, vec![2.0, 3.0]), (3..4, vec![4.0]), (2..2, vec![])]
        {
            assert_eq!(flat.slice(range.clone()).into_host().unwrap(), expected);
        }
        let pieces = flat.clone().split(&[2, 0, 3]).into_iter().map(|piece| piece.into_host().unwrap());
        assert_eq!(pieces.collect::<Vec<_>>(), [vec![1.0, 2.0], vec![], vec![3.0, 4.0, 5.0]]);
        let sum = flat.clone().plus(&device(&[&[10.0, 20.0], &[30.0, 40.0, 50.0]])).unwrap();
        assert_eq!(sum.divided(11.0).into_host().unwrap(), [1.0, 2.0, 3.0, 4.0, 5.0]);
        let otherwise_cut = flat.clone().plus(&device(&[&[1.0, 1.0, 1.0, 1.0, 1.0]])).unwrap();
        assert_eq!(otherwise_cut.into_host().unwrap(), [2.0, 3.0, 4.0, 5.0, 6.0]);
        assert!(flat.clone().plus(&Flat::Host(vec![0.0; 5])).is_err());
        assert!(Flat::concat([flat.clone(), Flat::Host(vec![0.0])]).is_err());
        assert!(flat.host().is_err() && Flat::Host(vec![1.0]).into_tensor().is_err());
        assert!(Flat::default().into_tensor().unwrap().is_none());
    }
}
