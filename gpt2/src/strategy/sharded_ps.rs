//! A parameter server on every rank, each for one shard of the parameters.

use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Call, Communicator, Op, shard_range};

use super::clock::Started;
use super::ps::{add, host_vectors};
use super::{Clock, Layout, Put, Strategy};
use crate::flat::{Flat, Weights};
use crate::memory::{self, Category};
use crate::precision::Precision;

/// Every rank sends shard s of its gradients to rank s, which averages them in rank order, updates its parameters and sends them to
/// everyone: 2S(N−1)/N each way, evenly.
pub(super) struct ShardedServer {
    comm: Arc<dyn Communicator>,
    layout: Layout,
    wire: Precision,
    precision: Precision,
    /// The shard of each rank, in the flat vector.
    shards: Vec<Range<usize>>,
    owned: Vec<Range<usize>>,
    grads: Vec<Vec<f32>>,
}

impl ShardedServer {
    pub(super) fn new(comm: Arc<dyn Communicator>, layout: Layout, wire: Precision, precision: Precision) -> Self {
        let ranks = comm.world_size();
        let shards: Vec<_> = (0..ranks).map(|rank| shard_range(layout.total(), ranks, rank)).collect();
        let owned = layout.within(&shards[comm.rank()]);
        let grads = vec![Vec::new(); layout.segments()];
        ShardedServer { comm, layout, wire, precision, shards, owned, grads }
    }

    /// One message from every rank to every other: `outgoing(peer)` leaves, and a buffer like `incoming(peer)` arrives. Returns what
    /// arrived, by rank, with `None` at this rank's place.
    fn everyone_to_everyone(
        &self,
        what: &'static str,
        clock: &mut Clock,
        mut outgoing: impl FnMut(usize) -> Buffer,
        mut incoming: impl FnMut(usize) -> Buffer,
    ) -> comm_core::Result<Vec<Option<Buffer>>> {
        let (rank, ranks) = (self.comm.rank(), self.comm.world_size());
        let mut leaving = Vec::new();
        let mut arriving: Vec<Option<Started>> = (0..ranks).map(|_| None).collect();
        for (from, to) in schedule(ranks).filter(|(from, to)| rank == *from || rank == *to) {
            // Messages to higher ranks and to lower ones on lanes of their own, where there are two: both directions at once.
            let lane = usize::from(from > to) % self.comm.lanes();
            if from == rank {
                let buffer = clock.pack(|| outgoing(to));
                let call = Call::background(Op::Send { to }, buffer, lane);
                leaving.push(clock.start(&*self.comm, call.labelled(what)));
            } else {
                let call = Call::background(Op::Recv { from }, incoming(from), lane);
                arriving[from] = Some(clock.start(&*self.comm, call.labelled(what)));
            }
        }
        let arrived = arriving.into_iter().map(|handle| handle.map(|handle| clock.wait(handle)).transpose()).collect();
        for handle in leaving {
            clock.wait(handle)?;
        }
        arrived
    }
}

impl Strategy for ShardedServer {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn gradient(&mut self, segment: usize, grads: Flat, clock: &mut Clock) -> comm_core::Result<()> {
        self.grads[segment] = clock.to_host(grads)?;
        Ok(())
    }

    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Flat>> {
        let rank = self.comm.rank();
        let mine = self.shards[rank].clone();
        let empty = vec![Vec::new(); self.layout.segments()];
        let grads = std::mem::replace(&mut self.grads, empty);
        let shard_of = |owner: usize| self.wire.pack(self.layout.gather(&grads, &self.shards[owner]));
        let own = clock.pack(|| shard_of(rank));
        let incoming = |_| memory::within(Category::Gradients, || self.wire.empty(mine.len()));
        let mut arrived = self.everyone_to_everyone("gradients of a shard", clock, shard_of, incoming)?;
        drop(grads);
        arrived[rank] = Some(own);
        clock.unpack(|| {
            let mut sum = vec![0.0; mine.len()];
            for buffer in arrived.into_iter().flatten() {
                add(&mut sum, &self.wire.unpack(buffer)?);
            }
            let ranks = self.comm.world_size() as f32;
            sum.iter_mut().for_each(|value| *value /= ranks);
            Ok(self.layout.cut(&sum, &mine).into_iter().map(Flat::Host).collect())
        })
    }

    fn distribute(&mut self, masters: &[Flat], put: Put<'_>, clock: &mut Clock) -> comm_core::Result<()> {
        let rank = self.comm.rank();
        let masters = host_vectors(masters)?;
        let own = || memory::within(Category::Parameters, || self.precision.pack(masters.concat()));
        let mut arrived = self.everyone_to_everyone(
            "parameters of a shard",
            clock,
            |_| own(),
            |owner| memory::within(Category::Parameters, || self.precision.empty(self.shards[owner].len())),
        )?;
        arrived[rank] = Some(clock.pack(own));
        let parts = clock.unpack(|| {
            memory::within(Category::Parameters, || {
                let mut whole = comm_core::HostBuffer::zeros(self.precision.dtype(), self.layout.total());
                let width = self.precision.dtype().size();
                for (shard, buffer) in self.shards.iter().zip(arrived) {
                    if let Some(Buffer::Host(buffer)) = buffer {
                        let range = shard.start * width..shard.end * width;
                        comm_core::copy(&mut whole.bytes_mut()[range], buffer.bytes());
                    }
                }
                self.precision.cut(Buffer::Host(whole), &self.layout.lengths())
            })
        })?;
        parts.into_iter().enumerate().for_each(|(segment, part)| put(segment, Weights::Host(part)));
        Ok(())
    }
}

/// Every (from, to), nearest neighbours first. Each rank issues its part in this order; because it is one order for all, no cycle of
/// ranks can wait for each other on a lane.
fn schedule(ranks: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..ranks).flat_map(move |distance| (0..ranks).map(move |from| (from, (from + distance) % ranks)))
}
