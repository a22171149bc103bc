//! Two levels: a fast communicator inside each node, another between nodes.

use std::collections::VecDeque;
use std::ops::Range;

use comm_core::{Error, Op, ReduceOp, shard_range};

use super::channels::{Channel, HostRemainder, Pending, Route};
use super::formula::{Expected, Run, Tally, units};
use super::layout::BucketFiller;
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
    /// This rank's shard of each bucket, inside its node.
    shards: Vec<Range<usize>>,
    /// Three stages of a pipeline: a bucket enters the first as it leaves, and moves on one place with each bucket that follows. All
    /// ranks therefore start their operations in one order.
    scattering: VecDeque<(usize, Pending)>,
    reducing: VecDeque<(usize, HostRemainder, Pending)>,
    gathering: VecDeque<Pending>,
    expected: Expected,
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
    let shard = |len: usize| shard_range(len, node.world_size(), node.rank());
    let options = StrategyOptions { ranks_per_node: size, ..options.clone() };
    let hierarchical = Hierarchical {
        overlap: options.overlap,
        shards: buckets.plan().iter().map(|bucket| shard(bucket.len())).collect(),
        buckets,
        scattering: VecDeque::new(),
        reducing: VecDeque::new(),
        gathering: VecDeque::new(),
        expected: Setup { options: &options, ..*setup }.expected(StrategyKind::Hierarchical),
    };
    Ok(Built::new(hierarchical, channels, layout.everything()))
}

impl Hierarchical {
    fn route(&self, bucket: usize, lane: usize) -> Route {
        Route::lane(self.buckets.label(bucket), lane)
    }

    /// Starts the buckets that are full.
    fn start_full(&mut self, channels: &Channels) -> comm_core::Result<()> {
        while let Some((index, grads)) = self.buckets.next_full() {
            let buffer = channels.gradients.pack(|| Ok(grads))?;
            let op = Op::ReduceScatter(ReduceOp::Mean);
            let pending = channels.gradients.start(op, buffer, self.route(index, 0));
            // Those before move on only now, so that two are never in one stage for want of a third.
            self.gather_first(channels)?;
            self.reduce_first(channels)?;
            self.scattering.push_back((index, pending));
        }
        Ok(())
    }

    /// From the reduction inside the node to that between nodes.
    fn reduce_first(&mut self, channels: &Channels) -> comm_core::Result<()> {
        let Some((index, pending)) = self.scattering.pop_front() else { return Ok(()) };
        let whole = pending.wait()?;
        let (part, kept) = channels.gradients.take_out(whole, &self.shards[index], &channels.between)?;
        let op = Op::AllReduce(ReduceOp::Mean);
        self.reducing.push_back((index, kept, channels.between.start(op, part, self.route(index, 1))));
        Ok(())
    }

    /// From the reduction between nodes to the gathering inside the node.
    fn gather_first(&mut self, channels: &Channels) -> comm_core::Result<()> {
        let Some((index, kept, pending)) = self.reducing.pop_front() else { return Ok(()) };
        let part = pending.wait()?;
        let whole = channels.gradients.put_back(kept, &self.shards[index], part, &channels.between)?;
        self.gathering.push_back(channels.gradients.start(Op::AllGather, whole, self.route(index, 0)));
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
        while !(self.scattering.is_empty() && self.reducing.is_empty()) {
            self.gather_first(channels)?;
            self.reduce_first(channels)?;
        }
        let mut grads = self.buckets.vectors();
        for (bucket, pending) in self.buckets.restart().iter().zip(std::mem::take(&mut self.gathering)) {
            bucket.put_into(pending.finish_split(0..bucket.len(), &bucket.lengths())?, &mut grads);
        }
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
