//! Two levels: a fast communicator inside each node, another between nodes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Op, ReduceOp, shard_range};

use super::aside::Aside;
use super::channels::{Channel, HostRemainder, Pending, Route};
use super::formula::{Expected, Run, Tally, units};
use super::layout::{Bucket, BucketFiller};
use super::levels::{self, Parameters};
use super::{
    Built, Channels, DuringPass, Layout, LocalStep, Setup, Spec, StepOutcome, Strategy, StrategyKind, Synchronous,
    put_own, synchronous,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};

pub(super) const SPEC: Spec = Spec {
    name: "hierarchical",
    about: "gradients are reduced inside each node, then between nodes",
    is_one_device: true,
    tells_nodes_apart: true,
    in_buckets: true,
    overlaps: true,
    settings: &[],
    build,
    expected,
};

fn expected(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    let (nodes, options) = (run.nodes, run.options);
    let (node, place) = nodes.place(rank);
    let wire = options.wire.dtype();
    let mut within = Tally::among(run, nodes.size(node), place);
    let mut between = Tally::among(run, nodes.count(), node);
    for count in units(layout, options.first_bucket_bytes, options.bucket_bytes) {
        if let Some(size) = nodes.even_size() {
            within.collective(None, Op::ReduceScatter(ReduceOp::Mean), wire, count);
            within.collective(None, Op::AllGather, wire, count);
            let shard = shard_range(count, size, place).len();
            between.collective(None, Op::AllReduce(ReduceOp::Mean), wire, shard);
            continue;
        }
        within.collective(None, Op::Reduce { root: LEADER, op: ReduceOp::scaled_sum(1.0) }, wire, count);
        within.collective(None, Op::Broadcast { root: LEADER }, wire, count);
        if place == LEADER {
            between.collective(None, Op::AllReduce(ReduceOp::Sum), wire, count);
        }
    }
    between.within_node(within);
    between.sum
}

/// The place of the rank that speaks for a node, where nodes have unequal sizes.
const LEADER: usize = 0;

/// Each bucket is reduce-scattered inside the node, its shards are all-reduced between the nodes' ranks of the same place, and gathered
/// inside the node. A 16-bit wire rounds at both levels. With n ranks a node and m nodes, 2S(n−1)/n inside and 2(S/n)(m−1)/m between,
/// instead of 2S(nm−1)/(nm) between.
///
/// Where nodes have unequal sizes, shards of theirs would not match. There each bucket, divided by the number of all ranks, is reduced to the first
/// rank of the node, all-reduced among those, and broadcast inside the node: S(n−1)/n inside each way, and all of S between nodes.
///
/// Each level works in the device's memory where its communicator does, and on bytes in host memory otherwise: where the two differ, it is
/// only the shards that change places in between.
struct Hierarchical {
    overlap: bool,
    buckets: BucketFiller,
    stages: Stages,
    /// Moves buckets from stage to stage beside the pass, in host memory.
    aside: Option<Aside<Stages, Mean>>,
    expected: Expected,
}

/// The mean of a bucket, cut into its segments.
type Mean = Vec<Flat>;

/// What goes between nodes.
#[derive(Clone, Copy, Debug)]
enum Way {
    /// Each rank's shard of its node's mean.
    Shards,
    /// The sum of a node's gradients, each times this `share`, from the rank that `speaks` for it.
    Leaders { speaks: bool, share: f64 },
}

/// A bucket's way: reduced inside the node, between nodes, and gathered inside the node. What is under way of each stage, oldest first. All ranks
/// start their operations in one order, which is that of the buckets and not that in which operations end.
struct Stages {
    gradients: Channel,
    between: Channel,
    buckets: Arc<[Bucket]>,
    labels: Arc<[Arc<str>]>,
    way: Way,
    /// Whether a bucket's first stage is waited for as soon as it has begun, so that the second begins as early as it can: not in the training
    /// thread while it has something to compute. There a bucket moves on one place with each bucket that follows.
    waits: bool,
    scattering: VecDeque<(usize, Pending)>,
    /// Where this rank speaks for none, the buckets that its node waits for.
    reducing: VecDeque<(usize, Reducing)>,
    gathering: VecDeque<(usize, Pending)>,
}

fn build(setup: &Setup<'_>) -> comm_core::Result<Built> {
    let Setup { comms, options, .. } = *setup;
    let (world, nodes, layout) = (&comms.world, &comms.nodes, setup.layout());
    let (_, place) = nodes.place(world.rank());
    let is_even = nodes.even_size().is_some();
    // Who does not speak for its node has nobody to speak to.
    let speaks = is_even || place == LEADER;
    let channels = levels::channels(setup, StrategyKind::Hierarchical, speaks, Parameters::Everywhere)?;
    let buckets = BucketFiller::new(&layout, options.first_bucket_bytes, options.bucket_bytes);
    let is_native = channels.gradients.is_native() || channels.between.is_native();
    let share = 1.0 / world.world_size() as f64;
    let way = if is_even { Way::Shards } else { Way::Leaders { speaks, share } };
    let stages = |waits: bool| Stages::new(&buckets, &channels, way, waits);
    let beside = options.overlap && !is_native && world.world_size() > 1;
    let aside = beside.then(|| Aside::start("comm-stages", &channels.gradients, stages(true))).transpose()?;
    let hierarchical = Hierarchical {
        overlap: options.overlap,
        stages: stages(false),
        buckets,
        aside,
        expected: setup.expected(StrategyKind::Hierarchical),
    };
    Ok(Built::new(hierarchical, channels, layout.everything()))
}

/// The second stage.
enum Reducing {
    /// Of this part of a bucket, with the rest.
    Part(HostRemainder, Pending),
    /// By another rank of the node. The bucket is where its mean goes.
    Elsewhere(Buffer),
}

impl Stages {
    fn new(buckets: &BucketFiller, channels: &Channels, way: Way, waits: bool) -> Self {
        Stages {
            gradients: channels.gradients.clone(),
            between: channels.between.clone(),
            labels: (0..buckets.plan().len()).map(|index| buckets.label(index)).collect(),
            buckets: buckets.plan().into(),
            way,
            waits,
            scattering: VecDeque::new(),
            reducing: VecDeque::new(),
            gathering: VecDeque::new(),
        }
    }

    fn route(&self, bucket: usize, lane: usize) -> Route {
        Route::lane(self.labels[bucket].clone(), lane)
    }

    /// The part of a bucket that this rank sends between nodes.
    fn part(&self, bucket: usize) -> Range<usize> {
        let len = self.buckets[bucket].len();
        match self.way {
            Way::Shards => shard_range(len, self.gradients.ranks(), self.gradients.rank()),
            Way::Leaders { .. } => 0..len,
        }
    }

    /// The operations of the three stages.
    fn operations(&self) -> [Op; 3] {
        let mean = ReduceOp::Mean;
        match self.way {
            Way::Shards => [Op::ReduceScatter(mean), Op::AllReduce(mean), Op::AllGather],
            Way::Leaders { share, .. } => {
                let inside = Op::Reduce { root: LEADER, op: ReduceOp::scaled_sum(share) };
                [inside, Op::AllReduce(ReduceOp::Sum), Op::Broadcast { root: LEADER }]
            }
        }
    }

    /// Starts a bucket's way.
    fn enter(&mut self, index: usize, grads: Buffer) -> comm_core::Result<()> {
        let [inside, ..] = self.operations();
        let pending = self.gradients.start(inside, grads, self.route(index, 0));
        if self.waits {
            self.scattering.push_back((index, pending));
            self.gather_first()?;
            self.reduce_first()
        } else {
            // Those before move on only now, so that two are never in one stage for want of a third.
            self.gather_first()?;
            self.reduce_first()?;
            self.scattering.push_back((index, pending));
            Ok(())
        }
    }

    /// From the reduction inside the node to that between nodes.
    fn reduce_first(&mut self) -> comm_core::Result<()> {
        let Some((index, pending)) = self.scattering.pop_front() else { return Ok(()) };
        let whole = pending.wait()?;
        let reducing = if let Way::Leaders { speaks: false, .. } = self.way {
            Reducing::Elsewhere(whole)
        } else {
            let (part, kept) = self.gradients.take_out(whole, &self.part(index), &self.between)?;
            let [_, between, _] = self.operations();
            Reducing::Part(kept, self.between.start(between, part, self.route(index, 1)))
        };
        self.reducing.push_back((index, reducing));
        Ok(())
    }

    /// From the reduction between nodes to the gathering inside the node.
    fn gather_first(&mut self) -> comm_core::Result<()> {
        let Some((index, reducing)) = self.reducing.pop_front() else { return Ok(()) };
        let whole = match reducing {
            Reducing::Part(kept, pending) => {
                let part = pending.wait()?;
                self.gradients.put_back(kept, &self.part(index), part, &self.between)?
            }
            Reducing::Elsewhere(whole) => whole,
        };
        let [.., inside] = self.operations();
        self.gathering.push_back((index, self.gradients.start(inside, whole, self.route(index, 0))));
        Ok(())
    }

    /// All buckets, in order, at the end of their way.
    fn finish(&mut self) -> comm_core::Result<Vec<Mean>> {
        while !(self.scattering.is_empty() && self.reducing.is_empty()) {
            self.gather_first()?;
            self.reduce_first()?;
        }
        let buckets = &self.buckets;
        let mean = |(index, pending): (usize, Pending)| {
            pending.finish_shared(0..buckets[index].len(), &buckets[index].lengths())
        };
        self.gathering.drain(..).map(mean).collect()
    }
}

impl Hierarchical {
    /// Starts the buckets that are full.
    fn start_full(&mut self, channels: &Channels) -> comm_core::Result<()> {
        while let Some((index, grads)) = self.buckets.next_full() {
            let grads = channels.gradients.pack(|| Ok(grads))?;
            match &self.aside {
                Some(aside) => aside.run(move |stages| {
                    stages.enter(index, grads)?;
                    Ok(Vec::new())
                }),
                None => self.stages.enter(index, grads)?,
            }
        }
        Ok(())
    }
}

impl DuringPass for Hierarchical {
    fn room(&mut self, segment: usize) -> Vec<f32> {
        self.buckets.room(segment)
    }

    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.buckets.add(segment, grads)?;
        if self.overlap { self.start_full(channels) } else { Ok(()) }
    }
}

impl Synchronous for Hierarchical {
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        self.start_full(channels)?;
        let means = match &self.aside {
            Some(aside) => {
                aside.run(Stages::finish);
                self.buckets.plan().iter().map(|_| aside.next()).collect()
            }
            None => self.stages.finish(),
        };
        let mut grads = self.buckets.vectors();
        self.buckets.restart().iter().zip(means?).for_each(|(bucket, mean)| bucket.put_into(mean, &mut grads));
        Ok(grads)
    }

    fn distribute(&mut self, train: &mut dyn LocalStep, channels: &mut Channels) -> Result<(), TrainError> {
        put_own(train, channels)
    }
}

impl Strategy for Hierarchical {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        synchronous(self, self.expected, train, channels)
    }
}
