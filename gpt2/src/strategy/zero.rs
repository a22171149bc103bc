//! Strategies that keep optimizer state for a shard of each bucket: `zero1` and `zero2` (Rajbhandari et al. 2020, stages 1 and 2).

use std::collections::VecDeque;
use std::ops::Range;

use comm_core::{Op, ReduceOp, shard_range};

use super::arrivals::Arrivals;
use super::channels::{Channel, Pending, Route, finish_until};
use super::formula::{Expected, Run, Tally, units};
use super::layout::{Bucket, BucketFiller, Layout};
use super::{Built, Channels, DuringPass, LocalStep, Setup, Spec, StepOutcome, Strategy, Synchronous, synchronous};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients, Weights};

pub(super) const ZERO1: Spec = Spec {
    name: "zero1",
    about: "ZeRO stage 1",
    is_one_device: true,
    tells_nodes_apart: false,
    in_buckets: true,
    overlaps: true,
    settings: &[],
    build: |setup| Ok(Zero::build(setup, Stage::One)),
    expected,
};

pub(super) const ZERO2: Spec = Spec {
    name: "zero2",
    about: "ZeRO stage 2",
    is_one_device: true,
    tells_nodes_apart: false,
    in_buckets: true,
    overlaps: true,
    settings: &[],
    build: |setup| Ok(Zero::build(setup, Stage::Two)),
    expected,
};

fn expected(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    [gradients(run, layout, rank), parameters(run, layout, rank)].into_iter().sum()
}

fn gradients(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    let mut tally = Tally::of(run, rank);
    for count in units(layout, run.options.first_bucket_bytes, run.options.bucket_bytes) {
        tally.collective(None, Op::ReduceScatter(ReduceOp::Mean), run.options.wire.dtype(), count);
    }
    tally.sum
}

fn parameters(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    let mut tally = Tally::of(run, rank);
    for count in units(layout, run.options.first_bucket_bytes, run.options.bucket_bytes) {
        tally.collective(None, Op::AllGather, run.precision.dtype(), count);
    }
    tally.sum
}

/// How much is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Optimizer state.
    One,
    /// And gradients.
    Two,
}

/// Whole buckets that are in memory at a time, where memory is what counts: one that is under way, and the next.
const WHOLE: usize = 2;

/// A reduce-scatter for each bucket of gradients, and an all-gather for its parameters: 2S(N−1)/N each way. The next step's forward pass gathers
/// them, a bucket ahead of their use; with `overlap` off, and where something else than a step follows, the step that updates them does.
struct Zero {
    stage: Stage,
    overlap: bool,
    buckets: BucketFiller,
    /// This rank's shard of each bucket.
    shards: Vec<Range<usize>>,
    started: VecDeque<(usize, Pending)>,
    /// Averaged gradients of the owned ranges that have come.
    grads: Vec<Flat>,
    arrivals: Arrivals<Pending>,
    /// What is sent for gradients in a step, and for the parameters of an update.
    expected: [Expected; 2],
}

impl Zero {
    fn build(setup: &Setup<'_>, stage: Stage) -> Built {
        let (layout, comm, options) = (setup.layout(), &setup.comms.world, setup.options);
        let buckets = BucketFiller::new(&layout, options.first_bucket_bytes, options.bucket_bytes);
        let shard = |bucket: &Bucket| shard_range(bucket.len(), comm.world_size(), comm.rank());
        let shards: Vec<_> = buckets.plan().iter().map(shard).collect();
        let mut owned = layout.nothing();
        for (segment, range) in buckets.plan().iter().zip(&shards).flat_map(|(bucket, shard)| bucket.within(shard)) {
            owned[segment] = range;
        }
        let zero = Zero {
            stage,
            overlap: options.overlap,
            buckets,
            shards,
            started: VecDeque::new(),
            grads: layout.vectors(),
            arrivals: Arrivals::none(),
            expected: [setup.expected_by(gradients), setup.expected_by(parameters)],
        };
        Built::new(zero, setup.channels(), owned)
    }

    /// Starts the buckets that are full.
    fn start_full(&mut self, channels: &Channels) -> comm_core::Result<()> {
        while let Some((index, grads)) = self.buckets.next_full() {
            let buffer = channels.gradients.pack(|| Ok(grads))?;
            // Whole buckets are what stage 2 does not keep.
            if self.stage == Stage::Two {
                self.finish_until(WHOLE - 1)?;
            }
            let route = Route::lane(self.buckets.label(index), index);
            let op = Op::ReduceScatter(ReduceOp::Mean);
            self.started.push_back((index, channels.gradients.start(op, buffer, route)));
        }
        Ok(())
    }

    /// Waits for the oldest reduce-scatters until fewer than `most` are under way, and keeps this rank's shards of them.
    fn finish_until(&mut self, most: usize) -> comm_core::Result<()> {
        let Zero { stage, started, buckets, shards, grads, .. } = self;
        finish_until(most, started, |(index, pending)| {
            let (bucket, shard) = (&buckets.plan()[index], &shards[index]);
            let lengths: Vec<usize> = bucket.within(shard).iter().map(|(_, range)| range.len()).collect();
            let own = match stage {
                // All of the buckets are in memory at the end of the pass in any case.
                Stage::One => pending.finish_shared(shard.clone(), &lengths)?,
                Stage::Two => pending.finish_part(shard.clone())?.share(&lengths),
            };
            bucket.put_into(own, grads);
            Ok(())
        })
    }
}

/// Starts gathering the parameters of a bucket, of which this rank has its `shard`.
fn gather(
    index: usize,
    (bucket, shard): (&Bucket, &Range<usize>),
    masters: &[Flat],
    parameters: &Channel,
) -> comm_core::Result<Pending> {
    let masters = bucket.segments.iter().map(|segment| &masters[*segment]);
    let route = Route::lane(format!("parameters, bucket {index}: {}", bucket.name), index);
    parameters.all_gather(masters, (shard.start, bucket.len()), None, route)
}

impl DuringPass for Zero {
    fn gathers_weights(&self) -> bool {
        true
    }

    fn arriving(
        &mut self,
        segment: usize,
        masters: &[Flat],
        channels: &mut Channels,
    ) -> comm_core::Result<Vec<(usize, Weights)>> {
        if !self.arrivals.has_next(segment, self.buckets.plan()) {
            return Ok(Vec::new());
        }
        self.prefetch(masters, channels)?;
        self.arrivals.finish_next(self.buckets.plan(), |bucket, pending| pending.finish_weights(&bucket.lengths()))
    }

    fn prefetch(&mut self, masters: &[Flat], channels: &mut Channels) -> comm_core::Result<()> {
        let Zero { arrivals, buckets, shards, .. } = self;
        let plan = buckets.plan();
        arrivals.ask(plan.len(), |index| gather(index, (&plan[index], &shards[index]), masters, &channels.parameters))
    }

    fn room(&mut self, segment: usize) -> Vec<f32> {
        self.buckets.room(segment)
    }

    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.buckets.add(segment, grads)?;
        if self.overlap { self.start_full(channels) } else { Ok(()) }
    }
}

impl Synchronous for Zero {
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        self.start_full(channels)?;
        self.finish_until(1)?;
        self.buckets.restart();
        Ok(self.grads.iter_mut().map(std::mem::take).collect())
    }

    fn distribute(&mut self, train: &mut dyn LocalStep, channels: &mut Channels) -> Result<(), TrainError> {
        let Zero { arrivals, buckets, shards, .. } = self;
        let plan = buckets.plan();
        arrivals.expect(plan.len());
        if self.overlap && !train.rests() {
            return Ok(());
        }
        let parameters = &channels.parameters;
        let start = |index: usize, train: &dyn LocalStep| {
            gather(index, (&plan[index], &shards[index]), train.masters(), parameters)
        };
        arrivals.bring(plan, train, start, |index, pending| pending.finish_weights(&plan[index].lengths()))
    }
}

impl Strategy for Zero {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        let outcome = synchronous(self, Expected::default(), train, channels)?;
        let [gradients, parameters] = self.expected;
        Ok(outcome.that_sent(gradients, (parameters, self.arrivals.take_rounds())))
    }
}
