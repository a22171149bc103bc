//! Strategies that keep optimizer state for a shard of each bucket: `zero1` and `zero2` (Rajbhandari et al. 2020, stages 1 and 2).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use comm_core::{Call, Communicator, Op, ReduceOp, shard_range};

use super::buckets::labels;
use super::clock::Started;
use super::layout::{Bucket, buckets};
use super::{Clock, Layout, Put, Strategy, StrategyOptions};
use crate::flat::{Flat, Packer};
use crate::memory::{self, Category};

/// How much is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Optimizer state.
    One,
    /// And gradients.
    Two,
}

/// Whole buckets that are in memory at a time, where memory is what counts: one that is under way, and the next.
const WHOLE: usize = 2;

/// A reduce-scatter for each bucket of gradients, and an all-gather for its parameters: 2S(N−1)/N each way.
pub(super) struct Zero {
    comm: Arc<dyn Communicator>,
    wire: Packer,
    weights: Packer,
    stage: Stage,
    overlap: bool,
    plan: Vec<Bucket>,
    labels: Vec<Arc<str>>,
    /// This rank's shard of each bucket.
    shards: Vec<Range<usize>>,
    owned: Vec<Range<usize>>,
    waiting: Vec<Option<Flat>>,
    /// Buckets started so far.
    next: usize,
    started: VecDeque<(usize, Started)>,
    /// Averaged gradients of the owned ranges that have come.
    grads: Vec<Flat>,
}

impl Zero {
    pub(super) fn new(
        comm: Arc<dyn Communicator>,
        layout: Layout,
        options: &StrategyOptions,
        (wire, weights): (Packer, Packer),
        stage: Stage,
    ) -> Self {
        let plan = buckets(&layout, options.first_bucket_bytes, options.bucket_bytes);
        let shards: Vec<_> =
            plan.iter().map(|bucket| shard_range(bucket.len(), comm.world_size(), comm.rank())).collect();
        let mut owned = layout.nothing();
        for (segment, range) in plan.iter().zip(&shards).flat_map(|(bucket, shard)| bucket.within(shard)) {
            owned[segment] = range;
        }
        Zero {
            comm,
            wire,
            weights,
            stage,
            overlap: options.overlap,
            labels: labels(&plan),
            plan,
            shards,
            owned,
            waiting: vec![None; layout.segments()],
            next: 0,
            started: VecDeque::new(),
            grads: vec![Flat::default(); layout.segments()],
        }
    }

    /// Starts the buckets, in order, whose gradients have all come.
    fn start_full(&mut self, clock: &mut Clock) -> comm_core::Result<()> {
        while let Some(bucket) = self.plan.get(self.next).filter(|bucket| bucket.is_complete(&self.waiting)) {
            let (waiting, wire) = (&mut self.waiting, &self.wire);
            let packed = clock.pack(|waits| bucket.take(waiting).map(|flat| wire.pack(flat?, waits)));
            let Some(buffer) = packed.transpose()? else { break };
            let call = Call::background(Op::ReduceScatter(ReduceOp::Mean), buffer, self.next % self.comm.lanes());
            let call = Call { label: self.labels.get(self.next).cloned(), ..call };
            // Whole buckets are what stage 2 does not keep.
            while self.stage == Stage::Two && self.started.len() + 1 >= WHOLE {
                self.finish_first(clock)?;
            }
            self.started.push_back((self.next, clock.start(&*self.comm, call)));
            self.next += 1;
        }
        Ok(())
    }

    /// Waits for the oldest reduce-scatter and keeps this rank's shard of it.
    fn finish_first(&mut self, clock: &mut Clock) -> comm_core::Result<()> {
        let Some((index, handle)) = self.started.pop_front() else { return Ok(()) };
        let buffer = clock.wait(handle)?;
        let (bucket, shard, wire, grads) = (&self.plan[index], &self.shards[index], &self.wire, &mut self.grads);
        clock.unpack(|| {
            let parts = bucket.within(shard);
            match wire.unpack_part(buffer, shard.clone())? {
                Flat::Host(flat) => {
                    let mut rest = flat.as_slice();
                    for (segment, range) in parts {
                        let (part, others) = rest.split_at(range.len());
                        grads[segment] = Flat::Host(part.to_vec());
                        rest = others;
                    }
                }
                flat @ Flat::Device(_) => {
                    let lengths: Vec<usize> = parts.iter().map(|(_, range)| range.len()).collect();
                    parts.iter().zip(flat.split(&lengths)).for_each(|((segment, _), part)| grads[*segment] = part);
                }
            }
            Ok(())
        })
    }
}

impl Strategy for Zero {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn gradient(&mut self, segment: usize, grads: Flat, clock: &mut Clock) -> comm_core::Result<()> {
        self.waiting[segment] = Some(grads);
        if self.overlap { self.start_full(clock) } else { Ok(()) }
    }

    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Flat>> {
        self.start_full(clock)?;
        while !self.started.is_empty() {
            self.finish_first(clock)?;
        }
        self.next = 0;
        let empty = vec![Flat::default(); self.grads.len()];
        Ok(std::mem::replace(&mut self.grads, empty))
    }

    fn distribute(&mut self, masters: &[Flat], put: Put<'_>, clock: &mut Clock) -> comm_core::Result<()> {
        let mut under_way: VecDeque<(&Bucket, Started)> = VecDeque::new();
        let mut finish = |(bucket, handle): (&Bucket, Started), clock: &mut Clock| -> comm_core::Result<()> {
            let whole = clock.wait(handle)?;
            let parts =
                clock.unpack(|| memory::within(Category::Parameters, || self.weights.cut(whole, &bucket.lengths())))?;
            for (segment, part) in bucket.segments.iter().zip(parts) {
                put(*segment, part);
            }
            Ok(())
        };
        for (index, (bucket, shard)) in self.plan.iter().zip(&self.shards).enumerate() {
            let buffer = clock.pack(|waits| {
                memory::within(Category::Parameters, || {
                    let own = Flat::concat_of(
                        bucket.segments.iter().map(|segment| (&masters[*segment], 0..masters[*segment].len())),
                    )?;
                    self.weights.pack_into(&own, shard.start, bucket.len(), waits)
                })
            })?;
            let call = Call::background(Op::AllGather, buffer, index % self.comm.lanes());
            let call = call.labelled(format!("parameters, bucket {index}: {}", bucket.name));
            under_way.push_back((bucket, clock.start(&*self.comm, call)));
            if under_way.len() >= WHOLE {
                under_way.pop_front().map_or(Ok(()), |first| finish(first, clock))?;
            }
        }
        under_way.into_iter().try_for_each(|next| finish(next, clock))
    }
}
