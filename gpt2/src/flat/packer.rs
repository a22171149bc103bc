//! The way of flat vectors to a communicator and back.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{FloatDType, Tensor};
use comm_core::{Buffer, Error, HostBuffer, Result, bf16, f16};

use super::{DeviceCollectives, Flat, Weights, joined, length, misplaced, pieces, read_back, settle, unshared, upload};
use crate::precision::Precision;
use crate::record::{self, Activity};

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

    /// A buffer that holds `values`, rounded to the type. Values on the device are rounded and concatenated there; where they cannot
    /// be lent they are read back, once. Waiting for the device is a span of its own.
    pub(crate) fn pack(&self, values: Flat) -> Result<Buffer> {
        match (values, &self.native) {
            (values @ (Flat::Host(_) | Flat::Part(..)), _) => Ok(self.precision.pack(values.into_host()?)),
            (Flat::Device(parts), Some(native)) => {
                let is_single = parts.len() == 1;
                match joined(parts, self.precision) {
                    Some(whole) => lend(&**native, if is_single { unshared(whole) } else { whole }),
                    None => self.empty(0),
                }
            }
            (Flat::Device(parts), None) => {
                let Some(whole) = joined(parts, self.precision) else { return Ok(self.precision.empty(0)) };
                record::span(Activity::Device, || settle(&whole.device()))?;
                Ok(match self.precision {
                    Precision::F32 => Buffer::from_vec(read_back::<f32>(whole)?),
                    Precision::Bf16 => Buffer::from_vec(read_back::<bf16>(whole)?),
                    Precision::F16 => Buffer::from_vec(read_back::<f16>(whole)?),
                })
            }
        }
    }

    /// Values of this type that came in host memory, on the device, where this one lends them.
    ///
    /// # Errors
    /// `Internal` where it lends nothing; `InvalidArgument` for values of another type.
    pub(crate) fn upload(&self, values: HostBuffer) -> Result<Flat> {
        let native = self.native.as_ref().ok_or_else(misplaced)?;
        if values.count() == 0 {
            return Ok(Flat::Device(Vec::new()));
        }
        Ok(Flat::Device(vec![upload(Buffer::Host(values), self.precision, native.device())?]))
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

    /// The values of a buffer that went another way than this one's do, by `other`, a packer of the same type: in f32, where those of this one
    /// are.
    pub(crate) fn unpack_from(&self, other: &Packer, buffer: Buffer) -> Result<Flat> {
        match buffer {
            Buffer::Host(values) if self.is_native() => {
                let pieces = self.upload(values)?.pieces()?;
                Ok(Flat::Device(pieces.into_iter().map(|piece| piece.cast(FloatDType::F32)).collect()))
            }
            buffer if self.is_native() => other.unpack(buffer),
            buffer => Ok(Flat::Host(other.unpack(buffer)?.into_host()?)),
        }
    }

    /// The values `range` of such a buffer; the rest is let go of.
    pub(crate) fn unpack_part(&self, buffer: Buffer, range: Range<usize>) -> Result<Flat> {
        match buffer {
            _ if range == (0..buffer.count()) => self.unpack(buffer),
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

    /// The values `range` of such a buffer, cut into pieces of these lengths, which are to be read: they stay in the buffer where they can, all of
    /// it until the last piece is let go of.
    pub(crate) fn share_part(&self, buffer: Buffer, range: Range<usize>, lengths: &[usize]) -> Result<Vec<Flat>> {
        match buffer {
            Buffer::Host(HostBuffer::F32(values)) if self.precision == Precision::F32 => {
                Ok(Flat::Part(Arc::new(values), range).share(lengths))
            }
            buffer => Ok(self.unpack_part(buffer, range)?.share(lengths)),
        }
    }

    /// A buffer of `count` elements that holds those of `parts`, rounded to the type, from element `start` on. Elsewhere it has the values of
    /// `spare`, where that is such a buffer, or else zeros.
    pub(crate) fn pack_into<'a>(
        &self,
        parts: impl Iterator<Item = &'a Flat> + Clone,
        (start, count): (usize, usize),
        spare: Option<Buffer>,
    ) -> Result<Buffer> {
        if !parts.clone().any(|part| matches!(part, Flat::Device(_))) {
            let parts = parts.map(Flat::host).collect::<Result<Vec<_>>>()?;
            return Ok(self.precision.pack_parts_into(&parts, start, count, spare));
        }
        let native = self.native.as_ref().ok_or_else(misplaced)?;
        let zeros = |count: usize| -> Option<Tensor<1>> {
            let options = (native.device(), self.precision.float().into());
            (count > 0).then(|| Tensor::zeros([count], options))
        };
        let rest = count - start - parts.clone().map(Flat::len).sum::<usize>();
        let pieces = parts.map(Flat::pieces).collect::<Result<Vec<_>>>()?.concat();
        let whole = zeros(start).into_iter().chain(pieces).chain(zeros(rest)).collect();
        self.pack(Flat::Device(whole))
    }

    /// A buffer for `count` values to come.
    pub(crate) fn empty(&self, count: usize) -> Result<Buffer> {
        match &self.native {
            None => Ok(self.precision.empty(count)),
            Some(native) => {
                let zeros = Tensor::zeros([count], (native.device(), self.precision.float().into()));
                lend(&**native, zeros)
            }
        }
    }

    /// A copy of the elements `range` of a buffer in host memory.
    pub(crate) fn copied_part(&self, buffer: &HostBuffer, range: Range<usize>) -> Result<HostBuffer> {
        self.precision.copied_part(buffer, range)
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
        let buffers = buffers.into_iter().map(|buffer| match buffer {
            Buffer::Host(buffer) => Ok(buffer),
            Buffer::Device(_) => Err(misplaced()),
        });
        let pieces = self.precision.rejoin(&buffers.collect::<Result<Vec<_>>>()?, lengths)?;
        Ok(pieces.into_iter().map(Weights::Host).collect())
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
            Flat::Part(whole, range) => Weights::Host(self.precision.pack_into(&whole[range.clone()], 0, range.len())),
            Flat::Device(parts) => match joined(parts.clone(), self.precision) {
                Some(whole) => Weights::Device(Box::new(whole)),
                None => Weights::Host(self.precision.empty(0)),
            },
        }
    }

    fn take_back(&self, buffer: Buffer) -> Result<Tensor<1>> {
        let native = self.native.as_ref();
        native
            .ok_or_else(|| Error::Internal("a buffer came back in device memory that was not lent".into()))?
            .take_back(buffer)
    }
}

/// Lends a tensor that the device has computed.
fn lend(native: &dyn DeviceCollectives, tensor: Tensor<1>) -> Result<Buffer> {
    record::span(Activity::Device, || native.wait())?;
    native.lend(tensor)
}

#[cfg(test)]
mod tests {
    use super::super::tests::device;
    use super::*;

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
        let pack = |values| packer.pack(Flat::Host(values)).unwrap();
        let buffers = [vec![1.0, 2.0, 3.0], vec![], vec![4.0]].map(pack);
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
