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
