//! A parameter server on every rank, each for one shard of the parameters.

use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Call, Communicator, Op, shard_range};

use super::clock::{Started, Waits};
use super::{Clock, Layout, Put, Strategy};
use crate::flat::{Flat, Packer};
use crate::memory::{self, Category};

/// Every rank sends shard s of its gradients to rank s, which averages them in rank order, updates its parameters and sends them to
/// everyone: 2S(N−1)/N each way, evenly.
pub(super) struct ShardedServer {
    comm: Arc<dyn Communicator>,
    layout: Layout,
    wire: Packer,
    weights: Packer,
    /// The shard of each rank, in the flat vector.
    shards: Vec<Range<usize>>,
    owned: Vec<Range<usize>>,
    grads: Vec<Flat>,
}

impl ShardedServer {
    pub(super) fn new(comm: Arc<dyn Communicator>, layout: Layout, wire: Packer, weights: Packer) -> Self {
        let ranks = comm.world_size();
        let shards: Vec<_> = (0..ranks).map(|rank| shard_range(layout.total(), ranks, rank)).collect();
        let owned = layout.within(&shards[comm.rank()]);
        let grads = vec![Flat::default(); layout.segments()];
        ShardedServer { comm, layout, wire, weights, shards, owned, grads }
    }

    /// One message from every rank to every other: `outgoing(peer)` leaves, and a buffer like `incoming(peer)` arrives. Returns what
    /// arrived, by rank, with `None` at this rank's place.
    fn everyone_to_everyone(
        &self,
        what: &'static str,
        clock: &mut Clock,
        mut outgoing: impl FnMut(usize, &mut Waits) -> comm_core::Result<Buffer>,
        mut incoming: impl FnMut(usize, &mut Waits) -> comm_core::Result<Buffer>,
    ) -> comm_core::Result<Vec<Option<Buffer>>> {
        let (rank, ranks) = (self.comm.rank(), self.comm.world_size());
        let mut leaving = Vec::new();
        let mut arriving: Vec<Option<Started>> = (0..ranks).map(|_| None).collect();
        for (from, to) in schedule(ranks).filter(|(from, to)| rank == *from || rank == *to) {
            // Messages to higher ranks and to lower ones on lanes of their own, where there are two: both directions at once.
            let lane = usize::from(from > to) % self.comm.lanes();
            if from == rank {
                let buffer = clock.pack(|waits| outgoing(to, waits))?;
                let call = Call::background(Op::Send { to }, buffer, lane);
                leaving.push(clock.start(&*self.comm, call.labelled(what)));
            } else {
                let buffer = clock.pack(|waits| incoming(from, waits))?;
                let call = Call::background(Op::Recv { from }, buffer, lane);
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

    fn gradient(&mut self, segment: usize, grads: Flat, _clock: &mut Clock) -> comm_core::Result<()> {
        self.grads[segment] = grads;
        Ok(())
    }

    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Flat>> {
        let rank = self.comm.rank();
        let mine = self.shards[rank].clone();
        let empty = vec![Flat::default(); self.layout.segments()];
        let grads = std::mem::replace(&mut self.grads, empty);
        let shard_of =
            |owner: usize, waits: &mut Waits| self.wire.pack(self.layout.gather(&grads, &self.shards[owner])?, waits);
        let own = clock.pack(|waits| shard_of(rank, waits))?;
        let incoming = |_, waits: &mut Waits| self.wire.empty(mine.len(), waits);
        let mut arrived = self.everyone_to_everyone("gradients of a shard", clock, shard_of, incoming)?;
        drop(grads);
        arrived[rank] = Some(own);
        clock.unpack(|| {
            let mut sum = (!self.wire.is_native()).then(|| Flat::Host(vec![0.0; mine.len()]));
            for buffer in arrived.into_iter().flatten() {
                let theirs = self.wire.unpack(buffer)?;
                sum = Some(match sum.take() {
                    Some(sum) => sum.plus(theirs)?,
                    None => theirs,
                });
            }
            let sum = sum.unwrap_or_default().divided(self.comm.world_size() as f32);
            Ok(self.layout.cut(sum, &mine))
        })
    }

    fn distribute(&mut self, masters: &[Flat], put: Put<'_>, clock: &mut Clock) -> comm_core::Result<()> {
        let rank = self.comm.rank();
        let masters = masters.iter().map(|values| (values, 0..values.len()));
        let own = |waits: &mut Waits| {
            memory::within(Category::Parameters, || self.weights.pack(Flat::concat_of(masters.clone())?, waits))
        };
        let mut arrived = self.everyone_to_everyone(
            "parameters of a shard",
            clock,
            |_, waits| own(waits),
            |owner, waits| memory::within(Category::Parameters, || self.weights.empty(self.shards[owner].len(), waits)),
        )?;
        arrived[rank] = Some(clock.pack(own)?);
        let parts = clock.unpack(|| {
            memory::within(Category::Parameters, || {
                self.weights.cut_all(arrived.into_iter().flatten().collect(), &self.layout.lengths())
            })
        })?;
        parts.into_iter().enumerate().for_each(|(segment, part)| put(segment, part));
        Ok(())
    }
}

/// Every (from, to), nearest neighbours first. Each rank issues its part in this order; because it is one order for all, no cycle of
/// ranks can wait for each other on a lane.
fn schedule(ranks: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..ranks).flat_map(move |distance| (0..ranks).map(move |from| (from, (from + distance) % ranks)))
}
