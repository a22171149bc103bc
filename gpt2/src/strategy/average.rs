//! The mean of all ranks' parameters, or of what else they have of each segment.

use std::sync::Arc;

use super::channels::{Channel, Pending, Route};
use super::formula::{Expected, Run, Tally, units_of};
use super::layout::{Bucket, buckets};
use super::{KeptVector, Layout, SavedKept, Setup};
use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::flat::Flat;
use crate::precision::Precision;
use comm_core::{Op, ReduceOp};

/// Averages vectors of some segments over all ranks, in buckets that travel beside each other.
pub(super) struct Averager {
    channel: Channel,
    buckets: Vec<Bucket>,
    labels: Vec<Arc<str>>,
    /// All-reduces under way, by bucket.
    started: Vec<Pending>,
    /// Instead of them the means that have come and nobody has taken, each with its segment.
    arrived: Vec<(usize, Flat)>,
}

impl Averager {
    /// Of these segments, whose values travel as `wire`; `what` is what they are called in errors and in the step's times.
    pub(super) fn new(setup: &Setup<'_>, segments: &[usize], wire: Precision, what: &str) -> Self {
        let options = setup.options;
        let layout = setup.layout();
        let last_to_first = segments.iter().rev().copied();
        let buckets = buckets(&layout, last_to_first, options.first_bucket_bytes, options.bucket_bytes);
        let label = |(index, bucket): (usize, &Bucket)| format!("{what}, bucket {index}: {}", bucket.name).into();
        let labels = buckets.iter().enumerate().map(label).collect();
        let (started, arrived) = (Vec::new(), Vec::new());
        Averager { channel: Channel::of_masters(setup.comms, wire), buckets, labels, started, arrived }
    }

    /// Starts it, of what `values` gives of each segment.
    ///
    /// # Errors
    /// Those of `values` and of packing; the communicator's come in the end.
    pub(super) fn start(&mut self, mut values: impl FnMut(usize) -> comm_core::Result<Flat>) -> comm_core::Result<()> {
        for (index, bucket) in self.buckets.iter().enumerate() {
            let parts = bucket.segments.iter().map(|segment| values(*segment));
            let packed = self.channel.pack(|| Flat::concat(parts.collect::<comm_core::Result<Vec<_>>>()?))?;
            let route = Route::lane(self.labels[index].clone(), index);
            self.started.push(self.channel.start(Op::AllReduce(ReduceOp::Mean), packed, route));
        }
        Ok(())
    }

    /// Whether it was started and has not been finished.
    pub(super) fn is_under_way(&self) -> bool {
        !(self.started.is_empty() && self.arrived.is_empty())
    }

    /// Waits for its end, and keeps what has come until it is finished.
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn settle(&mut self) -> comm_core::Result<()> {
        for (bucket, pending) in self.buckets.iter().zip(self.started.drain(..)) {
            let means = pending.finish_split(&bucket.lengths())?;
            self.arrived.extend(bucket.segments.iter().copied().zip(means));
        }
        Ok(())
    }

    /// What has come and nobody has taken.
    pub(super) fn kept(&self) -> impl Iterator<Item = KeptVector<'_>> {
        self.arrived.iter().map(|(segment, mean)| KeptVector::of(Kept::Arrived, *segment, mean))
    }

    /// Takes what had come, if anything.
    ///
    /// # Errors
    /// What cannot be read, and `InvalidArgument` where only some of the means are there: they come together.
    pub(super) fn restore(&mut self, saved: &mut SavedKept<'_>) -> Result<(), TrainError> {
        for bucket in &self.buckets {
            for (segment, len) in bucket.segments.iter().zip(bucket.lengths()) {
                let mean = saved.whole(Kept::Arrived, *segment, len)?;
                self.arrived.extend(mean.map(|mean| (*segment, mean)));
            }
        }
        let (found, all) = (self.arrived.len(), self.buckets.iter().map(|bucket| bucket.segments.len()).sum::<usize>());
        if found != 0 && found != all {
            let what = format!(
                "the checkpoint has the means of {found} of {all} segments that are averaged together: it was changed or damaged after it \
                 was written; continue from another checkpoint"
            );
            return Err(comm_core::Error::invalid(what).into());
        }
        Ok(())
    }

    /// Waits for its end, and hands each segment's mean to `take`, with the channel that it came through.
    ///
    /// # Errors
    /// The communicator's, and those of `take`.
    pub(super) fn finish<E: From<comm_core::Error>>(
        &mut self,
        mut take: impl FnMut(usize, Flat, &Channel) -> Result<(), E>,
    ) -> Result<(), E> {
        for (segment, mean) in self.arrived.drain(..) {
            take(segment, mean, &self.channel)?;
        }
        for (bucket, pending) in self.buckets.iter().zip(self.started.drain(..)) {
            let means = pending.finish_split(&bucket.lengths())?;
            bucket.segments.iter().zip(means).try_for_each(|(segment, mean)| take(*segment, mean, &self.channel))?;
        }
        Ok(())
    }

    /// A copy of the parameters that optimizers update, to find out later how they have changed.
    pub(super) fn keep(&self, masters: &[Flat]) -> Vec<Flat> {
        self.channel.applying(|| masters.to_vec())
    }
}

/// What is kept of each segment as all ranks had it after their last synchronisation, if there is any.
pub(super) fn anchored(anchors: &[Flat]) -> impl Iterator<Item = KeptVector<'_>> {
    anchors.iter().enumerate().map(|(segment, anchor)| KeptVector::of(Kept::Anchor, segment, anchor))
}

/// What was kept of segments of these lengths, if of all of them.
///
/// # Errors
/// What cannot be read.
pub(super) fn saved_anchors(saved: &mut SavedKept<'_>, lengths: &[usize]) -> Result<Vec<Flat>, TrainError> {
    let mut anchors = Vec::with_capacity(lengths.len());
    for (segment, len) in lengths.iter().enumerate() {
        let Some(anchor) = saved.whole(Kept::Anchor, segment, *len)? else { return Ok(Vec::new()) };
        anchors.push(anchor);
    }
    Ok(anchors)
}

/// What a rank sends where these segments are averaged once.
pub(super) fn averaged(run: &Run<'_>, layout: &Layout, segments: &[usize], wire: Precision, rank: usize) -> Expected {
    let mut tally = Tally::of(run, rank);
    let options = run.options;
    let lengths = segments.iter().rev().map(|segment| layout.len(*segment));
    for count in units_of(lengths, options.first_bucket_bytes, options.bucket_bytes) {
        tally.collective(None, Op::AllReduce(ReduceOp::Mean), wire.dtype(), count);
    }
    tally.sum
}
