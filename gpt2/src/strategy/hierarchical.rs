//! Two levels: a fast communicator inside each node, another between nodes.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Call, Communicator, Error, HostBuffer, Op, ReduceOp, shard_range};

use super::buckets::labels;
use super::clock::{EVERYONE, Started, Waits};
use super::layout::{Bucket, buckets};
use super::{Clock, Comms, Layout, Put, Strategy, StrategyOptions, put_own};
use crate::flat::{Flat, Packer};

/// Each bucket is reduce-scattered inside the node, its shards are all-reduced between the nodes' ranks of the same place, and gathered
/// inside the node. A 16-bit wire rounds at both levels. With n ranks a node and m nodes, 2S(n−1)/n inside and 2(S/n)(m−1)/m between,
/// instead of 2S(nm−1)/(nm) between.
///
/// Each level works in the device's memory where its communicator does, and on bytes in host memory otherwise: where the two differ, it is
/// only the shards that change places in between.
pub(super) struct Hierarchical {
    /// The ranks of this node.
    node: Arc<dyn Communicator>,
    /// The ranks of all nodes that have the same place.
    between: Arc<dyn Communicator>,
    /// What the two groups are called in the step's times.
    groups: Groups,
    /// For buckets inside the node.
    wire: Packer,
    /// For shards between nodes.
    wire_between: Packer,
    weights: Packer,
    overlap: bool,
    owned: Vec<Range<usize>>,
    plan: Vec<Bucket>,
    labels: Vec<Arc<str>>,
    waiting: Vec<Option<Flat>>,
    next: usize,
    /// Three stages of a pipeline: a bucket enters the first as it leaves, and moves on one place with each bucket that follows. All
    /// ranks therefore start their operations in one order.
    scattering: VecDeque<(usize, Started)>,
    reducing: VecDeque<(usize, Kept, Started)>,
    gathering: VecDeque<(usize, Started)>,
}

/// What is kept of a bucket inside the node while its shard is between nodes.
enum Kept {
    /// All of it, in host memory: the shard goes back to its place.
    Whole(HostBuffer),
    /// On the device nothing but its number of elements: a buffer is made around the shard, whose rest the gathering fills.
    Count(usize),
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
pub(super) fn place(rank: usize, ranks_per_node: usize) -> (usize, usize) {
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

impl Hierarchical {
    pub(super) fn new(
        comms: &Comms,
        layout: Layout,
        options: &StrategyOptions,
        wire: Packer,
        weights: Packer,
    ) -> comm_core::Result<Self> {
        let world = &comms.world;
        let (node, inside) = place(world.rank(), ranks_per_node(comms, options)?);
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
        let plan = buckets(&layout, options.first_bucket_bytes, options.bucket_bytes);
        Ok(Hierarchical {
            node,
            between,
            groups,
            wire,
            wire_between: Packer::new(options.wire, comms.native.clone()),
            weights,
            overlap: options.overlap,
            owned: layout.everything(),
            labels: labels(&plan),
            plan,
            waiting: vec![None; layout.segments()],
            next: 0,
            scattering: VecDeque::new(),
            reducing: VecDeque::new(),
            gathering: VecDeque::new(),
        })
    }

    fn call(&self, op: Op, buffer: Buffer, lane: usize, lanes: usize, bucket: usize) -> Call {
        Call { label: self.labels.get(bucket).cloned(), ..Call::background(op, buffer, lane % lanes) }
    }

    /// Starts the buckets, in order, whose gradients have all come.
    fn start_full(&mut self, clock: &mut Clock) -> comm_core::Result<()> {
        while let Some(bucket) = self.plan.get(self.next) {
            let (waiting, wire) = (&mut self.waiting, &self.wire);
            let packed = clock.pack(|waits| bucket.take(waiting).map(|flat| wire.pack(flat?, waits)));
            let Some(buffer) = packed.transpose()? else { break };
            let op = Op::ReduceScatter(ReduceOp::Mean);
            let call = self.call(op, buffer, 0, self.node.lanes(), self.next);
            let handle = clock.start_among(self.groups.node, &*self.node, call);
            // Those before move on only now, so that two are never in one stage for want of a third.
            if !self.reducing.is_empty() {
                self.gather_first(clock)?;
            }
            if !self.scattering.is_empty() {
                self.reduce_first(clock)?;
            }
            self.scattering.push_back((self.next, handle));
            self.next += 1;
        }
        Ok(())
    }

    /// From the reduction inside the node to that between nodes.
    fn reduce_first(&mut self, clock: &mut Clock) -> comm_core::Result<()> {
        let Some((index, handle)) = self.scattering.pop_front() else { return Ok(()) };
        let whole = clock.wait(handle)?;
        let shard = self.shard(index);
        let (part, kept) = clock.pack(|waits| self.take_out(whole, &shard, waits))?;
        let op = Op::AllReduce(ReduceOp::Mean);
        let call = self.call(op, part, 1, self.between.lanes(), index);
        self.reducing.push_back((index, kept, clock.start_among(self.groups.between, &*self.between, call)));
        Ok(())
    }

    /// From the reduction between nodes to the gathering inside the node.
    fn gather_first(&mut self, clock: &mut Clock) -> comm_core::Result<()> {
        let Some((index, kept, handle)) = self.reducing.pop_front() else { return Ok(()) };
        let part = clock.wait(handle)?;
        let shard = self.shard(index);
        let whole = clock.pack(|waits| self.put_back(kept, &shard, part, waits))?;
        let call = self.call(Op::AllGather, whole, 0, self.node.lanes(), index);
        self.gathering.push_back((index, clock.start_among(self.groups.node, &*self.node, call)));
        Ok(())
    }

    /// A buffer for between nodes of the elements `shard` of one from inside the node, and what is kept of that.
    fn take_out(&self, whole: Buffer, shard: &Range<usize>, waits: &mut Waits) -> comm_core::Result<(Buffer, Kept)> {
        match whole {
            Buffer::Host(whole) => {
                let part = copy_out(&whole, shard);
                let part = match self.wire_between.is_native() {
                    true => self.wire_between.pack(self.wire_between.upload(part)?, waits)?,
                    false => Buffer::Host(part),
                };
                Ok((part, Kept::Whole(whole)))
            }
            Buffer::Device(_) => {
                let count = whole.count();
                let part = self.wire.unpack_part(whole, shard.clone())?;
                Ok((self.wire_between.pack(part, waits)?, Kept::Count(count)))
            }
        }
    }

    /// A buffer for inside the node, with the elements `shard` as they came from between nodes.
    fn put_back(&self, kept: Kept, shard: &Range<usize>, part: Buffer, waits: &mut Waits) -> comm_core::Result<Buffer> {
        match (kept, part) {
            (Kept::Whole(mut whole), Buffer::Host(part)) => {
                copy_in(&mut whole, shard, &part);
                Ok(Buffer::Host(whole))
            }
            (Kept::Whole(whole), part @ Buffer::Device(_)) => {
                // Inside the node nothing is lent, so this comes in host memory.
                let part = self.wire.pack(self.wire_between.unpack(part)?, waits)?;
                match part {
                    Buffer::Host(_) => self.put_back(Kept::Whole(whole), shard, part, waits),
                    Buffer::Device(_) => Err(Error::Internal("what was to come to the host was lent".into())),
                }
            }
            (Kept::Count(count), Buffer::Host(part)) => {
                self.wire.pack_into(&self.wire.upload(part)?, shard.start, count, waits)
            }
            (Kept::Count(count), part @ Buffer::Device(_)) => {
                self.wire.pack_into(&self.wire_between.unpack(part)?, shard.start, count, waits)
            }
        }
    }

    /// This rank's shard of a bucket, inside its node.
    fn shard(&self, bucket: usize) -> Range<usize> {
        shard_range(self.plan[bucket].len(), self.node.world_size(), self.node.rank())
    }
}

impl Strategy for Hierarchical {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn gradient(&mut self, segment: usize, grads: Flat, clock: &mut Clock) -> comm_core::Result<()> {
        self.waiting[segment] = Some(grads);
        if self.overlap { self.start_full(clock) } else { Ok(()) }
    }

    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Flat>> {
        self.start_full(clock)?;
        while !(self.scattering.is_empty() && self.reducing.is_empty()) {
            self.gather_first(clock)?;
            self.reduce_first(clock)?;
        }
        self.next = 0;
        let mut grads = vec![Flat::default(); self.owned.len()];
        for (index, handle) in std::mem::take(&mut self.gathering) {
            let buffer = clock.wait(handle)?;
            let (bucket, wire) = (&self.plan[index], &self.wire);
            clock.unpack(|| -> comm_core::Result<()> {
                bucket.cut_into(wire.unpack(buffer)?, &mut grads);
                Ok(())
            })?;
        }
        Ok(grads)
    }

    fn distribute(&mut self, masters: &[Flat], put: Put<'_>, clock: &mut Clock) -> comm_core::Result<()> {
        put_own(masters, &self.weights, put, clock);
        Ok(())
    }
}

/// The elements `range` of `whole`.
fn copy_out(whole: &HostBuffer, range: &Range<usize>) -> HostBuffer {
    let width = whole.dtype().size();
    let mut part = HostBuffer::zeros(whole.dtype(), range.len());
    part.bytes_mut().copy_from_slice(&whole.bytes()[range.start * width..range.end * width]);
    part
}

/// Writes `part` over the elements `range` of `whole`.
fn copy_in(whole: &mut HostBuffer, range: &Range<usize>, part: &HostBuffer) {
    let width = part.dtype().size();
    whole.bytes_mut()[range.start * width..range.end * width].copy_from_slice(part.bytes());
}
