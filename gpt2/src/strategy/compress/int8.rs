//! Integers of 8 bits, in blocks with a scale each.

use std::ops::Range;

use comm_core::{Buffer, Error, Op};
use rayon::prelude::*;

use super::strategy::{Codec, ExpectedOperation, ReadKept};
use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::memory::{self, Category};
use crate::strategy::channels::{Channel, Pending, Route};

/// Elements of a block.
const BLOCK: usize = 256;

/// Bytes of a scale, an f32.
const SCALE: usize = 4;

/// Bytes of so many elements.
fn encoded(elements: usize) -> usize {
    elements + elements.div_ceil(BLOCK) * SCALE
}

/// Elements of a rank's shard of `count`. All shards are equal: the last ones may be longer than what is left for them.
fn shard(count: usize, ranks: usize) -> usize {
    count.div_ceil(ranks)
}

/// What a bucket of `count` elements takes.
pub(super) fn operations(count: usize, ranks: usize) -> Vec<ExpectedOperation> {
    let bytes = ranks * encoded(shard(count, ranks));
    vec![ExpectedOperation::bytes(Op::AllToAll, bytes), ExpectedOperation::bytes(Op::AllGather, bytes)]
}

/// Replaces `values` by what rounding takes from them, and writes the rounded values to `out`: of each block the scale, then an integer for each
/// element. What is sent and what is left over are together the value, exactly. A block with a value that is not finite is sent as one of
/// values that are none, and left as it is.
fn encode(values: &mut [f32], out: &mut [u8]) {
    values.par_chunks_mut(BLOCK).zip(out.par_chunks_mut(SCALE + BLOCK)).for_each(|(values, out)| {
        let (scale, integers) = out.split_at_mut(SCALE);
        let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
        if !values.iter().all(|value| value.is_finite()) {
            scale.copy_from_slice(&f32::NAN.to_le_bytes());
            integers.fill(0);
            return;
        }
        let unit = largest / 127.0;
        scale.copy_from_slice(&unit.to_le_bytes());
        for (value, integer) in values.iter_mut().zip(integers) {
            let whole = rounded(*value / unit) as i8;
            *integer = whole.cast_unsigned();
            // Half of the value to twice the value, or nothing: the difference is exact.
            *value -= f32::from(whole) * unit;
        }
    });
}

/// To the nearest integer from -127 to 127; no number gives none.
fn rounded(value: f32) -> f32 {
    // Adding and subtracting 1.5·2²³ rounds.
    const ROUND: f32 = 12_582_912.0;
    value.clamp(-127.0, 127.0) + ROUND - ROUND
}

/// Adds the values of `bytes`, which [`encode`] wrote, to `sums`.
fn add_decoded(bytes: &[u8], sums: &mut [f32]) {
    sums.par_chunks_mut(BLOCK).zip(bytes.par_chunks(SCALE + BLOCK)).for_each(|(sums, bytes)| {
        let (scale, integers) = bytes.split_at(SCALE);
        let unit = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
        sums.iter_mut().zip(integers).for_each(|(sum, integer)| *sum += f32::from(integer.cast_signed()) * unit);
    });
}

/// A bucket: every rank sends each shard to the rank that averages it, and that sends the average to all.
pub(super) struct Int8 {
    count: usize,
    ranks: usize,
    rank: usize,
    /// What of this rank's gradients has not been sent, and of shards that are longer than what is left for them zeros.
    left: Vec<f32>,
    /// What of the averages of this rank's shard has not been sent.
    left_of_average: Vec<f32>,
    under_way: Option<Pending>,
}

impl Int8 {
    pub(super) fn new(count: usize, channel: &Channel) -> Self {
        let (rank, ranks) = (channel.rank(), channel.ranks());
        let shard = shard(count, ranks);
        let zeros = |count| memory::within(Category::Optimizer, || vec![0.0; count]);
        let (left, left_of_average) = (zeros(ranks * shard), zeros(shard));
        Int8 { count, ranks, rank, left, left_of_average, under_way: None }
    }

    /// The elements of this rank's shard, as far as there are any.
    fn own(&self) -> Range<usize> {
        let shard = shard(self.count, self.ranks);
        (self.rank * shard).min(self.count)..((self.rank + 1) * shard).min(self.count)
    }

    /// What has come of the operation under way.
    fn arrived(&mut self) -> comm_core::Result<Vec<u8>> {
        let pending = self.under_way.take().ok_or_else(|| Error::Internal("no integers are under way".into()))?;
        pending.wait()?.into_vec()
    }
}

impl Codec for Int8 {
    fn start(&mut self, grads: Vec<f32>, channel: &Channel, route: Route) -> comm_core::Result<()> {
        let shard = shard(self.count, self.ranks);
        let bytes = channel.packing(|| {
            self.left.iter_mut().zip(&grads).for_each(|(left, own)| *left += own);
            drop(grads);
            let mut bytes = vec![0; self.ranks * encoded(shard)];
            let shards = self.left.chunks_mut(shard).zip(bytes.chunks_mut(encoded(shard)));
            shards.for_each(|(values, bytes)| encode(values, bytes));
            bytes
        });
        self.under_way = Some(channel.start(Op::AllToAll, Buffer::from_vec(bytes), route));
        Ok(())
    }

    fn go_on(&mut self, channel: &Channel, route: Route) -> comm_core::Result<()> {
        let mut bytes = self.arrived()?;
        let len = encoded(shard(self.count, self.ranks));
        channel.packing(|| {
            let mut mean = vec![0.0; self.left_of_average.len()];
            // In rank order.
            bytes.chunks(len).for_each(|bytes| add_decoded(bytes, &mut mean));
            let ranks = self.ranks as f32;
            self.left_of_average.iter_mut().zip(&mean).for_each(|(left, sum)| *left += sum / ranks);
            encode(&mut self.left_of_average, &mut bytes[self.rank * len..(self.rank + 1) * len]);
        });
        self.under_way = Some(channel.start(Op::AllGather, Buffer::from_vec(bytes), route));
        Ok(())
    }

    fn finish(&mut self, channel: &Channel) -> comm_core::Result<Vec<f32>> {
        let bytes = self.arrived()?;
        let shard = shard(self.count, self.ranks);
        Ok(channel.unpacking(|| {
            let mut mean = vec![0.0; self.ranks * shard];
            let shards = mean.chunks_mut(shard).zip(bytes.chunks(encoded(shard)));
            shards.for_each(|(mean, bytes)| add_decoded(bytes, mean));
            mean.truncate(self.count);
            mean
        }))
    }

    fn kept(&self) -> Vec<(Kept, usize, &[f32])> {
        let own = self.own();
        let of_average = &self.left_of_average[..own.len()];
        vec![(Kept::Left, 0, &self.left[..self.count]), (Kept::LeftOfMean, own.start, of_average)]
    }

    fn restore(&mut self, read: ReadKept<'_>) -> Result<(), TrainError> {
        let own = self.own();
        self.left[..self.count].copy_from_slice(&read(Kept::Left, 0..self.count)?);
        self.left_of_average[..own.len()].copy_from_slice(&read(Kept::LeftOfMean, own.clone())?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::splitmix::SplitMix64;

    fn sent(values: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (mut left, mut bytes) = (values.to_vec(), vec![0; encoded(values.len())]);
        encode(&mut left, &mut bytes);
        let mut sent = vec![0.0; values.len()];
        add_decoded(&bytes, &mut sent);
        (sent, left)
    }

    #[test]
    fn what_is_sent_and_what_is_left_are_the_value_exactly() {
        let mut random = SplitMix64::new(1);
        for count in [0, 1, 255, 256, 257, 1000] {
            for scale in [0, 1, 2, 100, 126, 127, 140, 200, 253, 254] {
                // From numbers below the normal ones to the largest.
                let mut value = |index: usize| {
                    let exponent = (scale as u64).saturating_sub(random.below(12));
                    let bits = (random.next_u64() & 0x807f_ffff) | exponent << 23;
                    if index % 7 == 3 { 0.0 } else { f32::from_bits(bits as u32) }
                };
                let values: Vec<f32> = (0..count).map(&mut value).collect();
                let (sent, left) = sent(&values);
                let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
                for ((value, sent), left) in values.iter().zip(&sent).zip(&left) {
                    assert_eq!(f64::from(*sent) + f64::from(*left), f64::from(*value));
                    // Below the normal numbers a scale has few digits.
                    let half_a_unit = f64::from(largest) / 254.0 * 1.000_001;
                    assert!(f64::from(left.abs()) <= half_a_unit || scale <= 8, "{left} of {largest}");
                }
            }
        }
    }

    #[test]
    fn a_block_that_is_not_finite_arrives_as_one_and_spoils_no_other() {
        for spoilt in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![1.0; 3 * BLOCK];
            values[BLOCK + 17] = spoilt;
            let (sent, left) = sent(&values);
            assert!(sent[..BLOCK].iter().chain(&sent[2 * BLOCK..]).all(|value| (value - 1.0).abs() < 1e-6));
            assert!(sent[BLOCK..2 * BLOCK].iter().all(|value| value.is_nan()));
            assert!(left[..BLOCK].iter().all(|value| value.is_finite()));
        }
    }
}
