//! A parameter server on every rank, each for one shard of the parameters.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, HostBuffer, Op, shard_range};

use super::arrivals::Arrivals;
use super::aside::Aside;
use super::channels::{Channel, Pending, Route, finish_until};
use super::formula::{Expected, Run, Tally, units};
use super::layout::{Bucket, BucketFiller};
use super::{
    Built, Channels, DuringPass, Layout, LocalStep, Setup, Spec, StepOutcome, Strategy, Synchronous, synchronous,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients, Weights};

pub(super) const SPEC: Spec = Spec {
    name: "sharded-ps",
    about: "every rank computes, and serves a shard",
    is_one_device: true,
    tells_nodes_apart: false,
    in_buckets: true,
    overlaps: true,
    settings: &[],
    build,
    expected: |run, layout, rank| [pushes(run, layout, rank), pulls(run, layout, rank)].into_iter().sum(),
};

/// What is sent for gradients: to each rank its shard of every bucket.
fn pushes(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    exchanges(run, layout, rank, |tally, count, to| {
        let theirs = shard_range(count, run.ranks, to).len();
        tally.collective(None, Op::Send { to }, run.options.wire.dtype(), theirs);
    })
}

/// What is sent for the parameters of an update: to each rank this one's shard of every bucket.
fn pulls(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    exchanges(run, layout, rank, |tally, count, to| {
        let mine = shard_range(count, run.ranks, rank).len();
        tally.collective(None, Op::Send { to }, run.precision.dtype(), mine);
    })
}

fn exchanges(run: &Run<'_>, layout: &Layout, rank: usize, send: impl Fn(&mut Tally, usize, usize)) -> Expected {
    let mut tally = Tally::of(run, rank);
    for count in units(layout, run.options.first_bucket_bytes, run.options.bucket_bytes) {
        (0..run.ranks).filter(|to| *to != rank).for_each(|to| send(&mut tally, count, to));
        tally.receive(run.ranks as u64 - 1);
    }
    tally.sum
}

/// Exchanges of gradients that are under way at a time: one whose messages travel, and the one that is added up.
const AT_ONCE: usize = 2;

/// Every rank sends shard s of each bucket of its gradients to rank s, which averages them in rank order, updates its parameters and sends
/// them to everyone: 2S(N−1)/N each way, evenly.
///
/// A bucket is pushed when the backward pass has ended its segments, and added up beside the pass; the other ranks' shards of it are together
/// no longer than a bucket. The update waits for all buckets, since clipping needs the norm of all gradients; its parameters come during the
/// next forward pass, a bucket ahead of their use.
struct ShardedServer {
    overlap: bool,
    buckets: BucketFiller,
    serving: Serving,
    /// Does it beside the passes, in host memory.
    aside: Option<Aside<Serving, Mean>>,
    /// What has been averaged of this rank's shards.
    means: Vec<Mean>,
    arrivals: Arrivals<Exchange>,
    /// What is sent for gradients in a step, and for the parameters of an update.
    expected: [Expected; 2],
}

/// A bucket, and the mean of this rank's shard of it, cut into its segments.
type Mean = (usize, Vec<Flat>);

fn build(setup: &Setup<'_>) -> comm_core::Result<Built> {
    let (layout, comm, options) = (setup.layout(), &setup.comms.world, setup.options);
    let (buckets, channels) =
        (BucketFiller::new(&layout, options.first_bucket_bytes, options.bucket_bytes), setup.channels());
    let serving = Serving::new(&buckets, &channels.gradients);
    let mut owned = layout.nothing();
    for (segment, range) in serving.buckets.iter().flat_map(|bucket| bucket.within(&serving.mine(bucket))) {
        owned[segment] = range;
    }
    let serves_beside = comm.world_size() > 1 && options.overlap && !channels.gradients.is_native();
    let aside = serves_beside.then(|| Aside::start("comm-server", &channels.gradients, serving.clone())).transpose()?;
    let server = ShardedServer {
        overlap: options.overlap,
        buckets,
        serving,
        aside,
        means: Vec::new(),
        arrivals: Arrivals::none(),
        expected: [setup.expected_by(pushes), setup.expected_by(pulls)],
    };
    Ok(Built::new(server, channels, owned))
}

/// What a rank does as a server of its shards, in whichever thread.
struct Serving {
    gradients: Channel,
    buckets: Arc<[Bucket]>,
    labels: Arc<[Arc<str>]>,
    /// Exchanges of gradients, by bucket, with this rank's own shard.
    under_way: VecDeque<(usize, Exchange)>,
}

impl Clone for Serving {
    /// The same with nothing under way.
    fn clone(&self) -> Self {
        let Serving { gradients, buckets, labels, .. } = self;
        Serving {
            gradients: gradients.clone(),
            buckets: buckets.clone(),
            labels: labels.clone(),
            under_way: VecDeque::new(),
        }
    }
}

impl Serving {
    fn new(buckets: &BucketFiller, gradients: &Channel) -> Self {
        Serving {
            gradients: gradients.clone(),
            labels: (0..buckets.plan().len()).map(|index| buckets.label(index)).collect(),
            buckets: buckets.plan().into(),
            under_way: VecDeque::new(),
        }
    }

    /// The shard of a bucket that rank `rank` serves.
    fn shard(&self, bucket: &Bucket, rank: usize) -> Range<usize> {
        shard_range(bucket.len(), self.gradients.ranks(), rank)
    }

    fn mine(&self, bucket: &Bucket) -> Range<usize> {
        self.shard(bucket, self.gradients.rank())
    }

    /// Pushes a bucket, and receives what the others push of it. Returns what has been averaged meanwhile.
    fn push(&mut self, index: usize, grads: &Grads) -> comm_core::Result<Vec<Mean>> {
        let (bucket, gradients) = (&self.buckets[index], &self.gradients);
        let outgoing = |owner: usize| grads.part(&self.shard(bucket, owner), gradients);
        let incoming = |_| self.mine(bucket).len();
        let exchange = Exchange::start(gradients, &self.labels[index], outgoing, incoming)?;
        self.under_way.push_back((index, exchange));
        self.average(AT_ONCE)
    }

    /// Averages what has been exchanged until fewer than `most` are under way.
    fn average(&mut self, most: usize) -> comm_core::Result<Vec<Mean>> {
        let Serving { gradients, buckets, under_way, .. } = self;
        let mut means = Vec::new();
        finish_until(most, under_way, |(index, exchange)| {
            let bucket = &buckets[index];
            let mine = shard_range(bucket.len(), gradients.ranks(), gradients.rank());
            let arrived = exchange.finish()?;
            let mean = gradients.unpacking(|| {
                let mut sum = (!gradients.is_native()).then(|| Flat::Host(vec![0.0; mine.len()]));
                for buffer in arrived {
                    let theirs = gradients.unpack(buffer)?;
                    sum = Some(match sum.take() {
                        Some(sum) => sum.plus(&theirs)?,
                        None => theirs,
                    });
                }
                let lengths: Vec<usize> = bucket.within(&mine).iter().map(|(_, range)| range.len()).collect();
                Ok::<_, comm_core::Error>(sum.unwrap_or_default().divided(gradients.ranks() as f32).share(&lengths))
            })?;
            means.push((index, mean));
            Ok::<_, comm_core::Error>(())
        })?;
        Ok(means)
    }
}

/// A bucket's gradients on their way to where shards of them are cut out.
enum Grads {
    /// As they travel.
    Packed(HostBuffer),
    /// In device memory, where each shard is packed by itself.
    OnDevice(Flat),
}

impl Grads {
    fn new(grads: Flat, gradients: &Channel) -> comm_core::Result<Self> {
        if gradients.is_native() {
            return Ok(Grads::OnDevice(grads));
        }
        match gradients.pack(|| Ok(grads))? {
            Buffer::Host(packed) => Ok(Grads::Packed(packed)),
            Buffer::Device(_) => Err(comm_core::Error::Internal("what was to leave from the host was lent".into())),
        }
    }

    /// A buffer of these elements.
    fn part(&self, range: &Range<usize>, gradients: &Channel) -> comm_core::Result<Buffer> {
        match self {
            Grads::Packed(packed) => gradients.cut_out(packed, range),
            Grads::OnDevice(grads) => gradients.pack(|| Ok(grads.slice(range.clone()))),
        }
    }
}

/// One message from every rank to every other, under way.
struct Exchange {
    leaving: Vec<Pending>,
    /// By rank; `None` at this rank's place.
    arriving: Vec<Option<Pending>>,
    /// What this rank would send to itself.
    own: Buffer,
}

impl Exchange {
    /// `outgoing(peer)` leaves, and `incoming(peer)` values arrive.
    fn start(
        channel: &Channel,
        label: &Arc<str>,
        outgoing: impl Fn(usize) -> comm_core::Result<Buffer>,
        incoming: impl Fn(usize) -> usize,
    ) -> comm_core::Result<Self> {
        let (rank, ranks) = (channel.rank(), channel.ranks());
        let mut leaving = Vec::new();
        let mut arriving: Vec<Option<Pending>> = (0..ranks).map(|_| None).collect();
        for (from, to) in schedule(ranks).filter(|(from, to)| rank == *from || rank == *to) {
            // Messages to higher ranks and to lower ones on lanes of their own, where there are two: both directions at once.
            let route = Route::lane(label.clone(), usize::from(from > to));
            if from == rank {
                leaving.push(channel.start(Op::Send { to }, outgoing(to)?, route));
            } else {
                arriving[from] = Some(channel.receive(from, incoming(from), route)?);
            }
        }
        Ok(Exchange { leaving, arriving, own: outgoing(rank)? })
    }

    /// Waits, and returns what has come from each rank, with this rank's own at its place.
    fn finish(self) -> comm_core::Result<Vec<Buffer>> {
        let Exchange { leaving, arriving, own } = self;
        let mut own = Some(own);
        let came = arriving.into_iter().filter_map(|pending| match pending {
            Some(pending) => Some(pending.wait()),
            None => own.take().map(Ok),
        });
        let came = came.collect();
        leaving.into_iter().try_for_each(|pending| pending.wait().map(drop))?;
        came
    }
}

/// Starts sending this rank's parameters of a bucket to everyone, and receiving everyone's.
fn pull(serving: &Serving, index: usize, masters: &[Flat], parameters: &Channel) -> comm_core::Result<Exchange> {
    let bucket = &serving.buckets[index];
    let own = bucket.segments.iter().map(|segment| &masters[*segment]).map(|values| (values, 0..values.len()));
    let outgoing = |_| parameters.pack(|| Flat::concat_of(own.clone()));
    let label = format!("parameters, bucket {index}: {}", bucket.name).into();
    Exchange::start(parameters, &label, outgoing, |owner| serving.shard(bucket, owner).len())
}

/// The weights of a bucket's segments, from all ranks.
fn pulled(exchange: Exchange, bucket: &Bucket, parameters: &Channel) -> comm_core::Result<Vec<Weights>> {
    parameters.cut_all(exchange.finish()?, &bucket.lengths())
}

impl ShardedServer {
    /// Pushes the buckets that are full.
    fn start_full(&mut self, channels: &Channels) -> comm_core::Result<()> {
        while let Some((index, grads)) = self.buckets.next_full() {
            let grads = Grads::new(grads, &channels.gradients)?;
            match &self.aside {
                Some(aside) => aside.run(move |serving| serving.push(index, &grads)),
                None => self.means.extend(self.serving.push(index, &grads)?),
            }
        }
        Ok(())
    }
}

impl DuringPass for ShardedServer {
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
        self.arrivals
            .finish_next(self.buckets.plan(), |bucket, exchange| pulled(exchange, bucket, &channels.parameters))
    }

    fn prefetch(&mut self, masters: &[Flat], channels: &mut Channels) -> comm_core::Result<()> {
        let ShardedServer { arrivals, buckets, serving, .. } = self;
        arrivals.ask(buckets.plan().len(), |index| pull(serving, index, masters, &channels.parameters))
    }

    fn room(&mut self, segment: usize) -> Vec<f32> {
        self.buckets.room(segment)
    }

    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.buckets.add(segment, grads)?;
        if self.overlap { self.start_full(channels) } else { Ok(()) }
    }
}

impl Synchronous for ShardedServer {
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        self.start_full(channels)?;
        if let Some(aside) = &self.aside {
            aside.run(|serving| serving.average(1));
            let buckets = 0..self.buckets.plan().len();
            self.means = buckets.map(|_| aside.next()).collect::<comm_core::Result<_>>()?;
        } else {
            self.means.extend(self.serving.average(1)?);
        }
        let mut grads = self.buckets.vectors();
        let plan = self.buckets.restart();
        self.means.drain(..).for_each(|(index, mean)| plan[index].put_into(mean, &mut grads));
        Ok(grads)
    }

    fn distribute(&mut self, train: &mut dyn LocalStep, channels: &mut Channels) -> Result<(), TrainError> {
        let ShardedServer { arrivals, buckets, serving, .. } = self;
        let plan = buckets.plan();
        arrivals.expect(plan.len());
        if self.overlap && !train.rests() {
            return Ok(());
        }
        let parameters = &channels.parameters;
        let start = |index: usize, train: &dyn LocalStep| pull(serving, index, train.masters(), parameters);
        arrivals.bring(plan, train, start, |index, exchange| pulled(exchange, &plan[index], parameters))
    }
}

impl Strategy for ShardedServer {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        let outcome = synchronous(self, Expected::default(), train, channels)?;
        let [pushes, pulls] = self.expected;
        Ok(outcome.that_sent(pushes, (pulls, self.arrivals.take_rounds())))
    }
}

/// Every (from, to), nearest neighbours first. Each rank issues its part in this order; because it is one order for all, no cycle of
/// ranks can wait for each other on a lane.
fn schedule(ranks: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..ranks).flat_map(move |distance| (0..ranks).map(move |from| (from, (from + distance) % ranks)))
}
