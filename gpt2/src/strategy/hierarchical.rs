//! Two levels: a fast communicator inside each node, another between nodes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Error, Op, ReduceOp, shard_range};

use super::aside::Aside;
use super::channels::{Channel, HostRemainder, Pending, Route};
use super::formula::{Expected, Run, Tally, units};
use super::layout::{Bucket, BucketFiller};
use super::{
    Built, Channels, Comms, DuringPass, Layout, LocalStep, Setup, Spec, StepOutcome, Strategy, StrategyKind,
    StrategyOptions, Synchronous, put_own, synchronous,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients, Packer};
use crate::memory::Category;
use crate::record::EVERYONE;

pub(super) const SPEC: Spec = Spec {
    name: "hierarchical",
    about: "reduced inside each node, then between nodes",
    is_one_device: true,
    tells_nodes_apart: true,
    in_buckets: true,
    overlaps: true,
    settings: &[],
    build,
    expected,
};

fn expected(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    let options = run.options;
    let size = if options.ranks_per_node == 0 { run.ranks } else { options.ranks_per_node };
    let (node, inside) = place(rank, size);
    let wire = options.wire.dtype();
    let (mut within, mut between) = (Tally::among(run, size, inside), Tally::among(run, run.ranks / size, node));
    for count in units(layout, options.first_bucket_bytes, options.bucket_bytes) {
        within.collective(None, Op::ReduceScatter(ReduceOp::Mean), wire, count);
        within.collective(None, Op::AllGather, wire, count);
        let shard = shard_range(count, size, inside).len();
        between.collective(None, Op::AllReduce(ReduceOp::Mean), wire, shard);
    }
    between.within_node(within);
    between.sum
}

/// Each bucket is reduce-scattered inside the node, its shards are all-reduced between the nodes' ranks of the same place, and gathered
/// inside the node. A 16-bit wire rounds at both levels. With n ranks a node and m nodes, 2S(n−1)/n inside and 2(S/n)(m−1)/m between,
/// instead of 2S(nm−1)/(nm) between.
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

/// A bucket's way: reduced inside the node, between nodes, and gathered inside the node. What is under way of each stage, oldest first. All ranks
/// start their operations in one order, which is that of the buckets and not that in which operations end.
struct Stages {
    gradients: Channel,
    between: Channel,
    buckets: Arc<[Bucket]>,
    labels: Arc<[Arc<str>]>,
    /// Whether a bucket's first stage is waited for as soon as it has begun, so that the second begins as early as it can: not in the training
    /// thread while it has something to compute. There a bucket moves on one place with each bucket that follows.
    waits: bool,
    scattering: VecDeque<(usize, Pending)>,
    reducing: VecDeque<(usize, HostRemainder, Pending)>,
    gathering: VecDeque<(usize, Pending)>,
}

/// Numbers of a rank's groups, each other than those of all other groups.
struct Groups {
    node: u64,
    between: u64,
}

impl Groups {
    fn of(node: usize, inside: usize, ranks: usize) -> Self {
        Groups { node: EVERYONE + 1 + node as u64, between: EVERYONE + 1 + (ranks + inside) as u64 }
    }
}

/// The node of `rank`, and its place in it.
fn place(rank: usize, ranks_per_node: usize) -> (usize, usize) {
    (rank / ranks_per_node, rank % ranks_per_node)
}

/// Ranks of a node, or an error.
fn ranks_per_node(comms: &Comms, options: &StrategyOptions) -> comm_core::Result<usize> {
    let ranks = comms.world.world_size();
    let size = match (options.ranks_per_node, &comms.node) {
        (0, Some(node)) => node.world_size(),
        (0, None) => ranks,
        (size, _) => size,
    };
    if !ranks.is_multiple_of(size) {
        return Err(Error::invalid(format!(
            "{ranks} ranks cannot be divided into nodes of {size}; see --ranks-per-node"
        )));
    }
    match &comms.node {
        Some(node) if node.world_size() != size => Err(Error::invalid(format!(
            "nodes of {size} ranks were asked for, but this rank's node has {}",
            node.world_size()
        ))),
        _ => Ok(size),
    }
}

fn build(setup: &Setup<'_>) -> comm_core::Result<Built> {
    let Setup { comms, options, precision, .. } = *setup;
    let (world, layout) = (&comms.world, setup.layout());
    let size = ranks_per_node(comms, options)?;
    let (node, inside) = place(world.rank(), size);
    let groups = Groups::of(node, inside, world.world_size());
    let group = |color: usize| {
        let part = world.split(Some(color as u64), world.rank() as i64)?;
        part.ok_or_else(|| Error::Internal("a split with a colour gave no communicator".into()))
    };
    let between = group(inside)?;
    let node = match &comms.node {
        Some(node) => node.clone(),
        None => group(node)?,
    };
    let native = comms.lender(StrategyKind::Hierarchical);
    let wire = |native| Packer::new(options.wire, native);
    let channels = Channels {
        gradients: Channel::new(node.clone(), groups.node, wire(native.clone()), Category::Gradients),
        between: Channel::new(between, groups.between, wire(comms.native.clone()), Category::Gradients),
        parameters: Channel::new(world.clone(), EVERYONE, Packer::new(precision, native), Category::Parameters),
    };
    let buckets = BucketFiller::new(&layout, options.first_bucket_bytes, options.bucket_bytes);
    let options = StrategyOptions { ranks_per_node: size, ..options.clone() };
    let is_native = channels.gradients.is_native() || channels.between.is_native();
    let stages = |waits: bool| Stages::new(&buckets, &channels, waits);
    let beside = options.overlap && !is_native && world.world_size() > 1;
    let aside = beside.then(|| Aside::start("hierarchical", stages(true))).transpose()?;
    let hierarchical = Hierarchical {
        overlap: options.overlap,
        stages: stages(false),
        buckets,
        aside,
        expected: Setup { options: &options, ..*setup }.expected(StrategyKind::Hierarchical),
    };
    Ok(Built::new(hierarchical, channels, layout.everything()))
}

impl Stages {
    fn new(buckets: &BucketFiller, channels: &Channels, waits: bool) -> Self {
        Stages {
            gradients: channels.gradients.clone(),
            between: channels.between.clone(),
            labels: (0..buckets.plan().len()).map(|index| buckets.label(index)).collect(),
            buckets: buckets.plan().into(),
            waits,
            scattering: VecDeque::new(),
            reducing: VecDeque::new(),
            gathering: VecDeque::new(),
        }
    }

    fn route(&self, bucket: usize, lane: usize) -> Route {
        Route::lane(self.labels[bucket].clone(), lane)
    }

    /// This rank's shard of a bucket, inside its node.
    fn shard(&self, bucket: usize) -> Range<usize> {
        shard_range(self.buckets[bucket].len(), self.gradients.ranks(), self.gradients.rank())
    }

    /// Starts a bucket's way.
    fn enter(&mut self, index: usize, grads: Buffer) -> comm_core::Result<()> {
        let pending = self.gradients.start(Op::ReduceScatter(ReduceOp::Mean), grads, self.route(index, 0));
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
        let (part, kept) = self.gradients.take_out(whole, &self.shard(index), &self.between)?;
        let pending = self.between.start(Op::AllReduce(ReduceOp::Mean), part, self.route(index, 1));
        self.reducing.push_back((index, kept, pending));
        Ok(())
    }

    /// From the reduction between nodes to the gathering inside the node.
    fn gather_first(&mut self) -> comm_core::Result<()> {
        let Some((index, kept, pending)) = self.reducing.pop_front() else { return Ok(()) };
        let part = pending.wait()?;
        let whole = self.gradients.put_back(kept, &self.shard(index), part, &self.between)?;
        self.gathering.push_back((index, self.gradients.start(Op::AllGather, whole, self.route(index, 0))));
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
            pending.finish_split(0..buckets[index].len(), &buckets[index].lengths())
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
