//! Every rank averages a shard of all ranks' gradients: what travels is encoded, and so is the mean.

use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Error, Op};

use super::encoding::Encoding;
use super::strategy::{Codec, ExpectedOperation, ReadKept};
use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::memory::{self, Category};
use crate::strategy::channels::{Channel, Pending, Route};

/// Elements of a rank's shard of `count`; of the last ranks fewer, where they do not divide them.
fn shard(count: usize, ranks: usize) -> usize {
    count.div_ceil(ranks)
}

/// What a bucket of `count` elements takes.
pub(super) fn operations(encoding: &dyn Encoding, count: usize, ranks: usize) -> Vec<ExpectedOperation> {
    let bytes = ranks * encoding.bytes(shard(count, ranks));
    vec![ExpectedOperation::bytes(Op::AllToAll, bytes), ExpectedOperation::bytes(Op::AllGather, bytes)]
}

/// A bucket: every rank sends each shard to the rank that averages it, and that sends the average to all. Each shard has as many bytes in a
/// message as the longest.
pub(super) struct Averaged {
    encoding: Arc<dyn Encoding>,
    count: usize,
    ranks: usize,
    rank: usize,
    /// What of this rank's gradients has not been sent.
    left: Vec<f32>,
    /// What of the averages of this rank's shard has not been sent.
    left_of_average: Vec<f32>,
    under_way: Option<Pending>,
}

impl Averaged {
    pub(super) fn new(encoding: Arc<dyn Encoding>, count: usize, channel: &Channel) -> Self {
        let (rank, ranks) = (channel.rank(), channel.ranks());
        let zeros = |count| memory::within(Category::Optimizer, || vec![0.0; count]);
        let own = part(count, ranks, rank);
        let (left, left_of_average) = (zeros(count), zeros(own.len()));
        Averaged { encoding, count, ranks, rank, left, left_of_average, under_way: None }
    }

    /// Elements of a shard and its bytes in a message, at least 1 each, by which both are cut.
    fn steps(&self) -> (usize, usize) {
        let shard = shard(self.count, self.ranks);
        (shard.max(1), self.encoding.bytes(shard).max(1))
    }

    /// The elements of this rank's shard.
    fn own(&self) -> Range<usize> {
        part(self.count, self.ranks, self.rank)
    }

    /// What has come of the operation under way.
    fn arrived(&mut self) -> comm_core::Result<Vec<u8>> {
        let pending = self.under_way.take().ok_or_else(|| Error::Internal("no shards are under way".into()))?;
        pending.wait()?.into_vec()
    }
}

/// The elements of the shard of `rank`, of `count`.
fn part(count: usize, ranks: usize, rank: usize) -> Range<usize> {
    let shard = shard(count, ranks);
    (rank * shard).min(count)..((rank + 1) * shard).min(count)
}

impl Codec for Averaged {
    fn start(&mut self, grads: Vec<f32>, channel: &Channel, route: Route) -> comm_core::Result<()> {
        let (shard, len) = self.steps();
        let Averaged { encoding, left, ranks, .. } = self;
        let bytes = channel.packing(|| {
            left.iter_mut().zip(&grads).for_each(|(left, own)| *left += own);
            drop(grads);
            let mut bytes = vec![0; *ranks * len];
            for (values, bytes) in left.chunks_mut(shard).zip(bytes.chunks_mut(len)) {
                let bytes = &mut bytes[..encoding.bytes(values.len())];
                encoding.encode(values, bytes);
            }
            bytes
        });
        self.under_way = Some(channel.start(Op::AllToAll, Buffer::from_vec(bytes), route));
        Ok(())
    }

    fn go_on(&mut self, channel: &Channel, route: Route) -> comm_core::Result<()> {
        let mut bytes = self.arrived()?;
        let (_, len) = self.steps();
        let Averaged { encoding, left_of_average, ranks, rank, .. } = self;
        channel.packing(|| {
            let mut mean = vec![0.0; left_of_average.len()];
            let used = encoding.bytes(mean.len());
            // In rank order.
            let mut of_ranks = bytes.chunks(len).enumerate();
            of_ranks.try_for_each(|(from, bytes)| encoding.add(&bytes[..used], &mut mean, from))?;
            let ranks = *ranks as f32;
            left_of_average.iter_mut().zip(&mean).for_each(|(left, sum)| *left += sum / ranks);
            let start = *rank * len;
            encoding.encode(left_of_average, &mut bytes[start..start + used]);
            Ok::<(), Error>(())
        })?;
        self.under_way = Some(channel.start(Op::AllGather, Buffer::from_vec(bytes), route));
        Ok(())
    }

    fn finish(&mut self, channel: &Channel) -> comm_core::Result<Vec<f32>> {
        let bytes = self.arrived()?;
        let (shard, len) = self.steps();
        channel.unpacking(|| {
            let mut mean = vec![0.0; self.count];
            for (from, (mean, bytes)) in mean.chunks_mut(shard).zip(bytes.chunks(len)).enumerate() {
                self.encoding.add(&bytes[..self.encoding.bytes(mean.len())], mean, from)?;
            }
            Ok(mean)
        })
    }

    fn kept(&self) -> Vec<(Kept, usize, &[f32])> {
        vec![(Kept::Left, 0, &self.left), (Kept::LeftOfMean, self.own().start, &self.left_of_average)]
    }

    fn restore(&mut self, read: ReadKept<'_>) -> Result<(), TrainError> {
        self.left = read(Kept::Left, 0..self.count)?;
        self.left_of_average = read(Kept::LeftOfMean, self.own())?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Compression;
    use super::*;
    use crate::flat::Packer;
    use crate::precision::Precision;
    use crate::record::EVERYONE;
    use comm_core::splitmix::SplitMix64;
    use comm_core::{Communicator, local};

    const RANKS: usize = 3;
    const STEPS: u64 = 8;

    fn gradients(rank: usize, step: u64, count: usize) -> Vec<f32> {
        let mut random = SplitMix64::stream(step, &[rank as u64]);
        (0..count).map(|_| random.unit() as f32 - 0.5).collect()
    }

    /// The sum of the means of all steps, and what is left of the mean of all gradients: this rank's share of what ranks have left, and what is
    /// left of the means of its shard.
    fn run(compress: Compression, count: usize) -> Vec<[Vec<f32>; 2]> {
        local::run(RANKS, |comm| {
            let own = comm.rank();
            let all = comm.split(Some(0), 0).unwrap().unwrap();
            let channel = Channel::new(all, EVERYONE, Packer::new(Precision::F32, None), Category::Gradients);
            let mut codec = Averaged::new(compress.encoding().unwrap(), count, &channel);
            let mut total = vec![0.0; count];
            for step in 0..STEPS {
                codec.start(gradients(own, step, count), &channel, Route::blocking("first")).unwrap();
                codec.go_on(&channel, Route::blocking("second")).unwrap();
                let mean = codec.finish(&channel).unwrap();
                total.iter_mut().zip(mean).for_each(|(total, mean)| *total += mean);
            }
            let mut left: Vec<f32> = codec.left.iter().map(|left| left / RANKS as f32).collect();
            left[codec.own()].iter_mut().zip(&codec.left_of_average).for_each(|(left, of_mean)| *left += of_mean);
            [total, left]
        })
    }

    #[test]
    fn what_was_sent_and_what_is_left_are_the_mean_of_all_gradients() {
        for compress in [Compression::Int8, Compression::Sign] {
            // One shard of an element and two without any, a last shard without any, and shards of a block and of less.
            for count in [1, 4, 600] {
                let ranks = run(compress, count);
                assert!(ranks.iter().all(|rank| rank[0] == ranks[0][0]), "{compress}");
                let mut expected = vec![0.0; count];
                for (rank, step) in (0..RANKS).flat_map(|rank| (0..STEPS).map(move |step| (rank, step))) {
                    expected
                        .iter_mut()
                        .zip(gradients(rank, step, count))
                        .for_each(|(sum, own)| *sum += own / RANKS as f32);
                }
                let mut found = ranks[0][0].clone();
                for [_, left] in &ranks {
                    found.iter_mut().zip(left).for_each(|(sum, left)| *sum += left);
                }
                for (found, expected) in found.iter().zip(&expected) {
                    assert!((found - expected).abs() < 1e-4, "{compress} of {count}: {found} is not {expected}");
                }
            }
        }
    }
}
