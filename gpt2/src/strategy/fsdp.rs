//! Fully sharded data parallel: ZeRO stage 3 (Rajbhandari et al. 2020; Zhao et al. 2023); among all ranks, or inside each node.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Error, Op, ReduceOp, shard_range};

use super::channels::{Pending, Route, finish_until};
use super::formula::{Expected, Run, Tally};
use super::levels::{self, Parameters};
use super::{
    Built, Channels, DuringPass, Layout, LocalStep, Setup, Spec, StepOutcome, Strategy, StrategyKind, Synchronous,
    synchronous,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients, Weights};
use crate::segments::Released;

pub(super) const FSDP: Spec = Spec {
    name: "fsdp",
    about: "fully sharded, ZeRO stage 3",
    is_one_device: true,
    tells_nodes_apart: false,
    in_buckets: false,
    overlaps: true,
    settings: &[],
    build: |setup| Ok(build(setup, StrategyKind::Fsdp, setup.channels())),
    expected: |run, layout, rank| sharded(layout, run, Tally::of(run, rank)).sum,
};

pub(super) const HSDP: Spec = Spec {
    name: "hsdp",
    about: "fsdp inside each node, with a replica of the model in every node",
    is_one_device: true,
    tells_nodes_apart: true,
    in_buckets: false,
    overlaps: true,
    settings: &[],
    build: |setup| {
        let nodes = &setup.comms.nodes;
        if nodes.even_size().is_none() {
            return Err(Error::invalid(format!(
                "hsdp needs nodes of equal size, and the job has {nodes}; see --ranks-per-node"
            )));
        }
        if nodes.even_size() == Some(1) && nodes.ranks() > 1 {
            return Err(Error::invalid(format!(
                "--strategy hsdp shards the model inside each node, and the job has {nodes}, so each rank would keep the whole model; put \
                 several ranks in a node with --ranks-per-node, or choose fsdp, which shards over all ranks, or ddp"
            )));
        }
        let channels = levels::channels(setup, StrategyKind::Hsdp, true, Parameters::InNode)?;
        Ok(build(setup, StrategyKind::Hsdp, channels))
    },
    expected: |run, layout, rank| {
        let (node, place) = run.nodes.place(rank);
        let size = run.nodes.size(node);
        let mut between = Tally::among(run, run.nodes.count(), node);
        for segment in 0..layout.segments() {
            let shard = shard_range(layout.len(segment), size, place).len();
            between.collective(None, Op::AllReduce(ReduceOp::Mean), run.options.wire.dtype(), shard);
        }
        between.within_node(sharded(layout, run, Tally::among(run, size, place)));
        between.sum
    },
};

/// What is sent among the ranks that have shards of one model.
fn sharded(layout: &Layout, run: &Run<'_>, mut tally: Tally) -> Tally {
    for segment in 0..layout.segments() {
        let count = layout.len(segment);
        tally.collective(None, Op::ReduceScatter(ReduceOp::Mean), run.options.wire.dtype(), count);
        let gathers = if segment == 0 { run.accumulation } else { 2 * run.accumulation };
        for _ in 0..gathers {
            tally.collective(None, Op::AllGather, run.precision.dtype(), count);
        }
    }
    tally
}

/// Segments whose whole gradients are in memory at a time: one that is under way, and the next.
const WHOLE: usize = 2;

/// Every rank keeps a shard of each segment: of its parameters, gradients and optimizer state. A segment's weights are gathered, one
/// segment ahead, in the forward pass and again in the backward pass; the embedding, which is also the head, once for both, and it
/// stays in between. (3S − S_emb)(N−1)/N each way.
///
/// With `hsdp` that is so inside each node, of n ranks, whose shards are averaged over those of the same place in all m nodes: (3S − S_emb)(n−1)/n
/// inside, and 2(S/n)(m−1)/m between nodes.
///
/// Whole gradients are in memory where they cannot leave at once: with accumulation, since only the last micro-step communicates them,
/// and with `overlap` off.
struct Fsdp {
    layout: Layout,
    overlap: bool,
    /// This rank's part of each segment.
    shards: Vec<Range<usize>>,
    /// What each segment's gradients and weights are called in errors.
    labels: Vec<[Arc<str>; 2]>,
    /// The segments that the pass still has to gather.
    to_come: VecDeque<usize>,
    /// The one that has been asked for ahead.
    coming: Option<Pending>,
    /// Weights that were left, in whose memory the next ones are gathered: no more than were in the model and on their way at one time.
    released: Vec<Released>,
    started: VecDeque<(usize, Pending)>,
    /// Whether nodes have replicas, whose shards are averaged once they have been inside the node.
    has_replicas: bool,
    averaging: Vec<(usize, Pending)>,
    /// With `overlap` off: gradients that wait for the end of the pass.
    waiting: Vec<(usize, Flat)>,
    grads: Vec<Flat>,
    expected: Expected,
}

fn build(setup: &Setup<'_>, kind: StrategyKind, channels: Channels) -> Built {
    let (layout, owners) = (setup.layout(), &channels.parameters);
    let shard = |len: &usize| shard_range(*len, owners.ranks(), owners.rank());
    let shards: Vec<_> = layout.lengths().iter().map(shard).collect();
    let labels = |segment: usize| {
        let name = layout.name(segment);
        [format!("gradients of {name}").into(), format!("parameters of {name}").into()]
    };
    let fsdp = Fsdp {
        overlap: setup.options.overlap,
        shards: shards.clone(),
        labels: (0..layout.segments()).map(labels).collect(),
        to_come: VecDeque::new(),
        coming: None,
        released: Vec::new(),
        started: VecDeque::new(),
        has_replicas: kind == StrategyKind::Hsdp,
        averaging: Vec::new(),
        waiting: Vec::new(),
        grads: layout.vectors(),
        expected: setup.expected(kind),
        layout,
    };
    Built::new(fsdp, channels, shards)
}

impl Fsdp {
    fn start_gather(&mut self, segment: usize, masters: &[Flat], channels: &Channels) -> comm_core::Result<Pending> {
        let place = (self.shards[segment].start, self.layout.len(segment));
        let route = Route::lane(self.labels[segment][1].clone(), 0);
        let spare = self.spare(self.layout.len(segment));
        channels.parameters.all_gather([&masters[segment]].into_iter(), place, spare, route)
    }

    /// Memory for so many weights, of those that a pass has left.
    fn spare(&mut self, count: usize) -> Option<Buffer> {
        let index = self.released.iter().position(|released| released.len() == count)?;
        self.released.swap_remove(index).into_vec().map(Buffer::from_vec)
    }

    fn start_reduction(&mut self, segment: usize, grads: Flat, channels: &Channels) -> comm_core::Result<()> {
        let buffer = channels.gradients.pack(|| Ok(grads))?;
        self.finish_until(WHOLE - 1, channels)?;
        // Beside the gathers, where there is a second lane.
        let route = Route::lane(self.labels[segment][0].clone(), 1);
        let op = Op::ReduceScatter(ReduceOp::Mean);
        self.started.push_back((segment, channels.gradients.start(op, buffer, route)));
        Ok(())
    }

    /// Waits for the oldest reductions until fewer than `most` are under way.
    fn finish_until(&mut self, most: usize, channels: &Channels) -> comm_core::Result<()> {
        let Fsdp { started, grads, shards, labels, averaging, has_replicas, .. } = self;
        finish_until(most, started, |(segment, pending)| {
            let shard = &shards[segment];
            if !*has_replicas {
                grads[segment] = pending.finish_part(shard.clone())?;
                return Ok(());
            }
            let (part, _) = channels.gradients.take_out(pending.wait()?, shard, &channels.between)?;
            let route = Route::lane(labels[segment][0].clone(), 1);
            averaging.push((segment, channels.between.start(Op::AllReduce(ReduceOp::Mean), part, route)));
            Ok(())
        })
    }
}

impl DuringPass for Fsdp {
    fn brings_weights(&self) -> bool {
        true
    }

    fn begin(&mut self, training: bool) {
        let segments = self.layout.segments();
        self.to_come =
            if training { (0..segments).chain((1..segments).rev()).collect() } else { (0..segments).collect() };
    }

    fn weights(&mut self, segment: usize, masters: &[Flat], channels: &mut Channels) -> comm_core::Result<Weights> {
        let pending = match self.coming.take() {
            Some(pending) => pending,
            None => {
                self.to_come.pop_front();
                self.start_gather(segment, masters, channels)?
            }
        };
        pending.finish_whole()
    }

    fn released(&mut self, weights: Released) {
        self.released.push(weights);
    }

    fn prefetch(&mut self, masters: &[Flat], channels: &mut Channels) -> comm_core::Result<()> {
        if self.overlap
            && let Some(next) = self.to_come.pop_front()
        {
            self.coming = Some(self.start_gather(next, masters, channels)?);
        }
        Ok(())
    }

    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        let grads = grads.into_flat()?;
        if self.overlap {
            return self.start_reduction(segment, grads, channels);
        }
        self.waiting.push((segment, grads));
        Ok(())
    }
}

impl Synchronous for Fsdp {
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        for (segment, grads) in std::mem::take(&mut self.waiting) {
            self.start_reduction(segment, grads, channels)?;
        }
        self.finish_until(1, channels)?;
        for (segment, pending) in std::mem::take(&mut self.averaging) {
            self.grads[segment] = channels.gradients.unpack_from(&channels.between, pending.wait()?)?;
        }
        Ok(self.grads.iter_mut().map(std::mem::take).collect())
    }

    fn distribute(&mut self, _train: &mut dyn LocalStep, _channels: &mut Channels) -> Result<(), TrainError> {
        // The next pass gathers what it needs.
        Ok(())
    }
}

impl Strategy for Fsdp {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        synchronous(self, self.expected, train, channels)
    }
}
