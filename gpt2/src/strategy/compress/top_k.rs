//! The elements of largest magnitude.

use comm_core::{Buffer, Error, Op};

use super::encoding::{Encoding, check_length};
use super::strategy::{Codec, ExpectedOperation, ReadKept};
use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::memory::{self, Category};
use crate::strategy::channels::{Channel, Pending, Route};

/// Bytes of a value, an f32, and of its place, a u32.
const VALUE: usize = 4;
const PLACE: usize = 4;

/// How many of `count` elements are sent.
pub(super) fn kept(fraction: f64, count: usize) -> usize {
    ((fraction * count as f64).ceil() as usize).clamp(1.min(count), count)
}

/// What a bucket of `count` elements takes.
pub(super) fn operations(fraction: f64, count: usize, ranks: usize) -> Vec<ExpectedOperation> {
    vec![ExpectedOperation::bytes(Op::AllGather, ranks * Largest { fraction }.bytes(count))]
}

/// The places of the `kept` elements of largest magnitude, ascending; of equal ones the first. What is no number is larger than any.
fn largest(values: &[f32], kept: usize) -> Vec<usize> {
    let magnitude = |value: &f32| value.to_bits() & 0x7fff_ffff;
    if kept == 0 {
        return Vec::new();
    }
    let mut magnitudes: Vec<u32> = values.iter().map(magnitude).collect();
    let at = magnitudes.len() - kept;
    let (_, least, above) = magnitudes.select_nth_unstable(at);
    let least = *least;
    // Of those that are as large as the least, so many are taken.
    let mut equal = kept - above.iter().filter(|magnitude| **magnitude > least).count();
    let mut takes = |value: &f32| {
        let own = magnitude(value);
        let takes = own > least || (own == least && equal > 0);
        equal -= usize::from(own == least && takes);
        takes
    };
    values.iter().enumerate().filter_map(|(place, value)| takes(value).then_some(place)).collect()
}

/// The largest: all values, then all places.
#[derive(Clone, Copy, Debug)]
pub(super) struct Largest {
    /// The part of all elements that is sent.
    pub(super) fraction: f64,
}

impl Encoding for Largest {
    fn bytes(&self, count: usize) -> usize {
        kept(self.fraction, count) * (VALUE + PLACE)
    }

    fn encode(&self, values: &mut [f32], out: &mut [u8]) {
        let kept = kept(self.fraction, values.len());
        let (sent, places) = out.split_at_mut(kept * VALUE);
        let out = sent.chunks_exact_mut(VALUE).zip(places.chunks_exact_mut(PLACE));
        for (place, (value, at)) in largest(values, kept).into_iter().zip(out) {
            value.copy_from_slice(&std::mem::take(&mut values[place]).to_le_bytes());
            // A bucket has fewer elements: see `check`.
            at.copy_from_slice(&(place as u32).to_le_bytes());
        }
    }

    fn add(&self, bytes: &[u8], sums: &mut [f32], from: usize) -> comm_core::Result<()> {
        let count = sums.len();
        check_length(self, bytes, count, from)?;
        let (values, places) = bytes.split_at(bytes.len() / (VALUE + PLACE) * VALUE);
        let (values, places) = (values.as_chunks::<VALUE>().0, places.as_chunks::<PLACE>().0);
        for (value, place) in values.iter().zip(places) {
            let place = u32::from_le_bytes(*place);
            let Some(sum) = usize::try_from(place).ok().and_then(|place| sums.get_mut(place)) else {
                return Err(Error::Protocol {
                    who: format!("rank {from}"),
                    what: format!("a gradient for element {place} of a bucket of {count}"),
                });
            };
            *sum += f32::from_le_bytes(*value);
        }
        Ok(())
    }
}

/// Whether places can name the elements of a bucket of `count`.
///
/// # Errors
/// `InvalidArgument` where they cannot.
pub(super) fn check(count: usize) -> comm_core::Result<()> {
    if u32::try_from(count).is_ok() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "a bucket of {count} elements is too large for --compress topk; give a smaller --bucket-bytes or --fusion-bytes"
    )))
}

/// A bucket: every rank gets what every rank sends of it.
pub(super) struct TopK {
    encoding: Largest,
    ranks: usize,
    rank: usize,
    /// What of this rank's gradients has not been sent.
    left: Vec<f32>,
    under_way: Option<Pending>,
}

impl TopK {
    /// # Errors
    /// Those of [`check`].
    pub(super) fn new(fraction: f64, count: usize, channel: &Channel) -> comm_core::Result<Self> {
        check(count)?;
        let left = memory::within(Category::Optimizer, || vec![0.0; count]);
        let (rank, ranks) = (channel.rank(), channel.ranks());
        Ok(TopK { encoding: Largest { fraction }, ranks, rank, left, under_way: None })
    }
}

impl Codec for TopK {
    fn start(&mut self, grads: Vec<f32>, channel: &Channel, route: Route) -> comm_core::Result<()> {
        let bytes = channel.packing(|| {
            self.left.iter_mut().zip(&grads).for_each(|(left, own)| *left += own);
            drop(grads);
            let len = self.encoding.bytes(self.left.len());
            let mut bytes = vec![0; self.ranks * len];
            self.encoding.encode(&mut self.left, &mut bytes[self.rank * len..(self.rank + 1) * len]);
            bytes
        });
        self.under_way = Some(channel.start(Op::AllGather, Buffer::from_vec(bytes), route));
        Ok(())
    }

    fn finish(&mut self, channel: &Channel) -> comm_core::Result<Vec<f32>> {
        let pending = self.under_way.take().ok_or_else(|| Error::Internal("no elements are under way".into()))?;
        let bytes = pending.wait()?.into_vec::<u8>()?;
        channel.unpacking(|| {
            let mut mean = vec![0.0; self.left.len()];
            let mut of_ranks = bytes.chunks(self.encoding.bytes(mean.len()).max(1)).enumerate();
            // In rank order.
            of_ranks.try_for_each(|(from, bytes)| self.encoding.add(bytes, &mut mean, from))?;
            let ranks = self.ranks as f32;
            mean.iter_mut().for_each(|sum| *sum /= ranks);
            Ok(mean)
        })
    }

    fn kept(&self) -> Vec<(Kept, usize, &[f32])> {
        vec![(Kept::Left, 0, &self.left)]
    }

    fn restore(&mut self, read: ReadKept<'_>) -> Result<(), TrainError> {
        self.left = read(Kept::Left, 0..self.left.len())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::splitmix::SplitMix64;

    #[test]
    fn the_largest_are_found_and_of_equal_ones_the_first() {
        let values = [1.0, -3.0, 2.0, 3.0, -0.0, 2.0];
        for (kept, expected) in [
            (0, vec![]),
            (1, vec![1]),
            (2, vec![1, 3]),
            (3, vec![1, 2, 3]),
            (4, vec![1, 2, 3, 5]),
            (6, (0..6).collect()),
        ] {
            assert_eq!(largest(&values, kept), expected);
        }
        assert_eq!(largest(&[1.0, f32::NAN, f32::INFINITY], 1), [1]);
        assert_eq!([kept(0.01, 1000), kept(0.001, 10), kept(1.0, 7), kept(0.5, 0)], [10, 1, 7, 0]);
    }

    #[test]
    fn what_is_sent_and_what_is_left_are_the_gradient_exactly() {
        let mut random = SplitMix64::new(2);
        for count in [1, 10, 333] {
            for fraction in [0.001, 0.1, 0.5, 1.0] {
                let values: Vec<f32> = (0..count).map(|_| (random.unit() as f32 - 0.5) * 1e3).collect();
                let encoding = Largest { fraction };
                let (mut left, mut bytes) = (values.clone(), vec![0; encoding.bytes(count)]);
                encoding.encode(&mut left, &mut bytes);
                let mut sent = vec![0.0; count];
                encoding.add(&bytes, &mut sent, 0).unwrap();
                assert_eq!(sent.iter().filter(|value| **value != 0.0).count(), kept(fraction, count));
                for ((value, sent), left) in values.iter().zip(&sent).zip(&left) {
                    // One of them is the value, the other nothing.
                    assert_eq!(sent + left, *value);
                    assert!(*sent == 0.0 || *left == 0.0);
                }
            }
        }
    }

    #[test]
    fn a_place_outside_the_bucket_is_refused() {
        let (mut bytes, encoding) = (vec![0; 8], Largest { fraction: 0.3 });
        encoding.encode(&mut [0.0, 0.0, 5.0], &mut bytes);
        let error = encoding.add(&bytes, &mut [0.0, 0.0], 3).unwrap_err().to_string();
        assert!(error.contains("rank 3") && error.contains("element 2 of a bucket of 2"), "{error}");
        encoding.add(&bytes, &mut [0.0; 3], 3).unwrap();
    }
}
