//! A parameter server on every rank, each for one shard of the parameters.

use std::ops::Range;

use comm_core::{Buffer, Op, shard_range};

use super::channels::{Channel, Pending, Route};
use super::formula::{Expected, Run, Tally};
use super::layout::FullGradient;
use super::{
    Built, Channels, DuringPass, Layout, LocalStep, Setup, Spec, StepOutcome, Strategy, StrategyKind, Synchronous,
    synchronous,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};

pub(super) const SPEC: Spec = Spec {
    name: "sharded-ps",
    about: "every rank computes, and serves a shard",
    is_one_device: true,
    tells_nodes_apart: false,
    in_buckets: false,
    overlaps: false,
    settings: &[],
    build,
    expected,
};

fn expected(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    let (mut tally, total) = (Tally::of(run, rank), layout.total());
    tally.receive(2 * (run.ranks as u64 - 1));
    let mine = shard_range(total, run.ranks, rank).len();
    for to in (0..run.ranks).filter(|to| *to != rank) {
        let theirs = shard_range(total, run.ranks, to).len();
        tally.collective(None, Op::Send { to }, run.options.wire.dtype(), theirs);
        tally.collective(None, Op::Send { to }, run.precision.dtype(), mine);
    }
    tally.sum
}

/// Every rank sends shard s of its gradients to rank s, which averages them in rank order, updates its parameters and sends them to
/// everyone: 2S(N−1)/N each way, evenly.
struct ShardedServer {
    rank: usize,
    layout: Layout,
    /// The shard of each rank, in the flat vector.
    shards: Vec<Range<usize>>,
    grads: FullGradient,
    expected: Expected,
}

fn build(setup: &Setup<'_>) -> comm_core::Result<Built> {
    let layout = setup.layout();
    let (rank, ranks) = (setup.comms.world.rank(), setup.comms.world.world_size());
    let shards: Vec<_> = (0..ranks).map(|rank| shard_range(layout.total(), ranks, rank)).collect();
    let owned = layout.within(&shards[rank]);
    let server = ShardedServer {
        rank,
        shards,
        grads: FullGradient::new(&layout),
        expected: setup.expected(StrategyKind::ShardedPs),
        layout,
    };
    Ok(Built::new(server, setup.channels(), owned))
}

/// One message from every rank to every other: `outgoing(peer)` leaves, and `incoming(peer)` values arrive. Returns what arrived, by rank,
/// with `None` at this rank's place.
fn everyone_to_everyone(
    channel: &Channel,
    label: &'static str,
    outgoing: impl Fn(usize) -> comm_core::Result<Flat>,
    incoming: impl Fn(usize) -> usize,
) -> comm_core::Result<Vec<Option<Buffer>>> {
    let (rank, ranks) = (channel.rank(), channel.ranks());
    let mut leaving = Vec::new();
    let mut arriving: Vec<Option<Pending>> = (0..ranks).map(|_| None).collect();
    for (from, to) in schedule(ranks).filter(|(from, to)| rank == *from || rank == *to) {
        // Messages to higher ranks and to lower ones on lanes of their own, where there are two: both directions at once.
        let route = Route::lane(label, usize::from(from > to));
        if from == rank {
            leaving.push(channel.send(to, || outgoing(to), route)?);
        } else {
            arriving[from] = Some(channel.receive(from, incoming(from), route)?);
        }
    }
    let arrived = arriving.into_iter().map(|pending| pending.map(Pending::wait).transpose()).collect();
    for pending in leaving {
        pending.wait()?;
    }
    arrived
}

impl DuringPass for ShardedServer {
    fn gradient(&mut self, segment: usize, grads: Gradients, _channels: &mut Channels) -> comm_core::Result<()> {
        self.grads.add(segment, grads)
    }
}

impl Synchronous for ShardedServer {
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        let (gradients, mine) = (&channels.gradients, &self.shards[self.rank]);
        let whole = self.grads.take()?;
        let shard_of = |owner: usize| Ok(whole.slice(self.shards[owner].clone()));
        let own = gradients.pack(|| shard_of(self.rank))?;
        let mut arrived = everyone_to_everyone(gradients, "gradients of a shard", shard_of, |_| mine.len())?;
        drop(whole);
        arrived[self.rank] = Some(own);
        gradients.unpacking(|| {
            let mut sum = (!gradients.is_native()).then(|| Flat::Host(vec![0.0; mine.len()]));
            for buffer in arrived.into_iter().flatten() {
                let theirs = gradients.unpack(buffer)?;
                sum = Some(match sum.take() {
                    Some(sum) => sum.plus(theirs)?,
                    None => theirs,
                });
            }
            let sum = sum.unwrap_or_default().divided(self.shards.len() as f32);
            Ok(self.layout.cut(sum, mine))
        })
    }

    fn distribute(&mut self, train: &mut dyn LocalStep, channels: &mut Channels) -> Result<(), TrainError> {
        let parameters = &channels.parameters;
        let masters = train.masters().iter().map(|values| (values, 0..values.len()));
        let own = |_| Flat::concat_of(masters.clone());
        let len = |owner: usize| self.shards[owner].len();
        let mut arrived = everyone_to_everyone(parameters, "parameters of a shard", own, len)?;
        arrived[self.rank] = Some(parameters.pack(|| own(self.rank))?);
        let parts = parameters.cut_all(arrived.into_iter().flatten().collect(), &self.layout.lengths())?;
        parts.into_iter().enumerate().try_for_each(|(segment, part)| train.put(segment, part))
    }
}

impl Strategy for ShardedServer {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        synchronous(self, self.expected, train, channels)
    }
}

/// Every (from, to), nearest neighbours first. Each rank issues its part in this order; because it is one order for all, no cycle of
/// ranks can wait for each other on a lane.
fn schedule(ranks: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..ranks).flat_map(move |distance| (0..ranks).map(move |from| (from, (from + distance) % ranks)))
}
