//! Strategies that all-reduce gradients, so that every rank updates every parameter: `ring` and `ddp`.

use comm_core::{Algorithm, Op, OpKind, ReduceOp, table};

use super::channels::{Pending, Route};
use super::compress;
use super::formula::{Expected, Run, Tally, units};
use super::layout::BucketFiller;
use super::{
    Built, Channels, DuringPass, LocalStep, Setup, Spec, StepOutcome, Strategy, StrategyKind, Synchronous, put_own,
    synchronous,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};
use crate::precision::Precision;

/// Fusion buffers of what is ready, reduced around the ring one after another while the backward pass goes on. Horovod's ranks agree by messages on
/// what is ready; here every buffer ends at the same segment on all of them.
pub(super) const RING: Spec = Spec {
    name: "ring",
    about: "Horovod: fusion buffers",
    is_one_device: true,
    tells_nodes_apart: false,
    in_buckets: false,
    overlaps: true,
    settings: &[],
    build: |setup| {
        let (options, ranks) = (setup.options, setup.comms.world.world_size());
        let bytes = (options.fusion_bytes, options.fusion_bytes);
        let way = Way { one_by_one: true, algorithm: ring(options.wire, ranks) };
        let compressed = compress::built(setup, StrategyKind::Ring, bytes, way.one_by_one, way.algorithm)?;
        Ok(compressed.unwrap_or_else(|| Buckets::build(setup, StrategyKind::Ring, bytes, way)))
    },
    expected: |run, layout, rank| {
        let options = run.options;
        let (bytes, algorithm) = ((options.fusion_bytes, options.fusion_bytes), ring(options.wire, run.ranks));
        let compressed = compress::expected(run, layout, bytes, algorithm, rank);
        compressed.unwrap_or_else(|| all_reduced(run, units(layout, bytes.0, bytes.1), algorithm, rank))
    },
};

/// Buckets that leave while the backward pass goes on.
pub(super) const DDP: Spec = Spec {
    name: "ddp",
    about: "DistributedDataParallel: buckets",
    is_one_device: true,
    tells_nodes_apart: false,
    in_buckets: true,
    overlaps: true,
    settings: &[],
    build: |setup| {
        let options = setup.options;
        let bytes = (options.first_bucket_bytes, options.bucket_bytes);
        let way = Way { one_by_one: false, algorithm: None };
        let compressed = compress::built(setup, StrategyKind::Ddp, bytes, way.one_by_one, way.algorithm)?;
        Ok(compressed.unwrap_or_else(|| Buckets::build(setup, StrategyKind::Ddp, bytes, way)))
    },
    expected: |run, layout, rank| {
        let options = run.options;
        let bytes = (options.first_bucket_bytes, options.bucket_bytes);
        let compressed = compress::expected(run, layout, bytes, None, rank);
        compressed.unwrap_or_else(|| all_reduced(run, units(layout, bytes.0, bytes.1), None, rank))
    },
};

fn all_reduced(run: &Run<'_>, units: Vec<usize>, algorithm: Option<Algorithm>, rank: usize) -> Expected {
    let mut tally = Tally::of(run, rank);
    for count in units {
        tally.collective(algorithm, Op::AllReduce(ReduceOp::Mean), run.options.wire.dtype(), count);
    }
    tally.sum
}

/// The ring, where it can reduce the wire type: 16-bit gradients meet in one place, so that they are rounded once.
fn ring(wire: Precision, ranks: usize) -> Option<Algorithm> {
    table::supports(Algorithm::Ring, OpKind::AllReduce, wire.dtype(), ranks).then_some(Algorithm::Ring)
}

/// How buckets are all-reduced.
#[derive(Clone, Copy)]
struct Way {
    /// Whether one waits for the one before; else as many are under way as there are lanes.
    one_by_one: bool,
    /// `None` for the table's choice.
    algorithm: Option<Algorithm>,
}

/// Gradients in buckets of whole segments, each all-reduced once.
struct Buckets {
    buckets: BucketFiller,
    /// Whether a full bucket's all-reduce starts at once.
    overlap: bool,
    way: Way,
    /// All-reduces under way, by bucket.
    started: Vec<Pending>,
    expected: Expected,
}

impl Buckets {
    fn build(setup: &Setup<'_>, kind: StrategyKind, (first, others): (usize, usize), way: Way) -> Built {
        let layout = setup.layout();
        let buckets = Buckets {
            buckets: BucketFiller::new(&layout, first, others),
            overlap: setup.options.overlap,
            way,
            started: Vec::new(),
            expected: setup.expected(kind),
        };
        Built::new(buckets, setup.channels(), layout.everything())
    }

    /// Starts the buckets that are full.
    fn start_full(&mut self, channels: &Channels) -> comm_core::Result<()> {
        while let Some((index, grads)) = self.buckets.next_full() {
            let label = self.buckets.label(index);
            let route = match (self.overlap, self.way.one_by_one) {
                (true, true) => Route::lane(label, 0),
                (true, false) => Route::lane(label, index),
                (false, _) => Route::blocking(label),
            };
            self.started.push(channels.gradients.all_reduce(grads, route.by(self.way.algorithm))?);
        }
        Ok(())
    }
}

impl DuringPass for Buckets {
    fn room(&mut self, segment: usize) -> Vec<f32> {
        self.buckets.room(segment)
    }

    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.buckets.add(segment, grads)?;
        if self.overlap { self.start_full(channels) } else { Ok(()) }
    }
}

impl Synchronous for Buckets {
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        self.start_full(channels)?;
        let mut grads = self.buckets.vectors();
        for (bucket, pending) in self.buckets.restart().iter().zip(std::mem::take(&mut self.started)) {
            bucket.put_into(pending.finish_shared(0..bucket.len(), &bucket.lengths())?, &mut grads);
        }
        Ok(grads)
    }

    fn distribute(&mut self, train: &mut dyn LocalStep, channels: &mut Channels) -> Result<(), TrainError> {
        // Every rank has computed the same.
        put_own(train, channels)
    }
}

impl Strategy for Buckets {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        synchronous(self, self.expected, train, channels)
    }
}
