//! A single parameter server.

use std::collections::VecDeque;
use std::sync::Arc;

use comm_core::{Buffer, DType, Error, Op};

use super::arrivals::Arrivals;
use super::aside::Aside;
use super::channels::{Channel, Pending, Route, finish_until};
use super::compress::{Push, Pushed, in_host_memory, pushed_bytes};
use super::formula::{Expected, Run, Tally, units};
use super::layout::{Bucket, BucketFiller};
use super::{
    Built, Channels, CheckedGradients, DuringPass, KeptVector, Layout, LocalStep, Ranks, SavedKept, Setup, Spec,
    StepOutcome, Strategy, StrategyKind, put_own,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients, Weights};

pub(super) const SPEC: Spec = Spec {
    name: "ps",
    about: "one parameter server",
    is_one_device: true,
    tells_nodes_apart: false,
    in_buckets: true,
    overlaps: true,
    settings: &[],
    build,
    expected: |run, layout, rank| [pushes(run, layout, rank), pulls(run, layout, rank)].into_iter().sum(),
};

/// What is sent for gradients.
fn pushes(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    let mut tally = Tally::of(run, rank);
    for count in units(layout, run.options.first_bucket_bytes, run.options.bucket_bytes) {
        match rank {
            SERVER => tally.receive(run.ranks as u64 - 1),
            _ => {
                let compressed = pushed_bytes(run.options.compress, count).map(|bytes| (DType::U8, bytes));
                let (dtype, count) = compressed.unwrap_or((run.options.wire.dtype(), count));
                tally.collective(None, Op::Send { to: SERVER }, dtype, count);
            }
        }
    }
    tally.sum
}

/// What is sent for the parameters of an update.
fn pulls(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    let mut tally = Tally::of(run, rank);
    for count in units(layout, run.options.first_bucket_bytes, run.options.bucket_bytes) {
        match rank {
            SERVER => {
                (1..run.ranks).for_each(|to| tally.collective(None, Op::Send { to }, run.precision.dtype(), count))
            }
            _ => tally.receive(1),
        }
    }
    tally.sum
}

/// The rank that serves.
const SERVER: usize = 0;

/// Rank 0 receives every worker's gradients, averages them in rank order, with its own unless it is dedicated, updates all parameters
/// and sends them to every worker: (N−1)·S each way through one rank.
///
/// A worker pushes a bucket when the backward pass has ended its segments, and the server adds up what is pushed while its own pass goes on, as
/// soon as it has its own part: of the workers' buckets it holds no more than it has lanes. The update waits for all buckets, since clipping
/// needs the norm of all gradients. Then the server updates a bucket after another, in the order in which the next forward pass needs them, and
/// sends each while it updates the next, and beside its own next pass; a worker waits for a bucket when its own next forward pass comes to
/// it. What is pushed may be compressed; the server's own gradients and the parameters never are. In device memory the server adds up after its
/// pass, and parameters are sent and received before the next one.
struct ParameterServer {
    rank: usize,
    dedicated: bool,
    overlap: bool,
    buckets: BucketFiller,
    serving: Serving,
    /// On a server beside whose passes something goes on.
    aside: Option<Aside<Serving, Vec<Flat>>>,
    /// How a worker's gradients are compressed, where they are.
    compressed: Option<Push>,
    /// A worker's buckets that are on their way.
    pushed: Vec<Pending>,
    /// Parameters that are on their way to a worker.
    arrivals: Arrivals<Pending>,
    /// Whether the server's have left, or are leaving, beside the pass.
    publishes: bool,
    /// Updates whose parameters the server has sent since the last step.
    published: usize,
    /// What is sent for gradients in a step, and for the parameters of an update.
    expected: [Expected; 2],
}

fn build(setup: &Setup<'_>) -> comm_core::Result<Built> {
    let (layout, options) = (setup.layout(), setup.options);
    let (rank, ranks) = (setup.comms.world.rank(), setup.comms.world.world_size());
    if options.dedicated_server && ranks == 1 {
        return Err(Error::invalid("a dedicated parameter server needs at least one worker beside it: 2 ranks"));
    }
    let owned = if rank == SERVER { layout.everything() } else { layout.nothing() };
    let dedicated = options.serves_only(StrategyKind::Ps, ranks, SERVER);
    let (buckets, channels) =
        (BucketFiller::new(&layout, options.first_bucket_bytes, options.bucket_bytes), setup.channels());
    in_host_memory(options.compress, &channels.gradients)?;
    let pushed = Pushed::new(options.compress, buckets.plan())?;
    let compressed = if rank == SERVER { None } else { Push::new(options.compress, buckets.plan()) };
    let serving = Serving::new(&buckets, &channels, (ranks, ranks - usize::from(dedicated)), pushed);
    let serves_beside = rank == SERVER && ranks > 1 && options.overlap && !channels.gradients.is_native();
    let aside = serves_beside.then(|| Aside::start("comm-server", &channels.gradients, serving.clone())).transpose()?;
    let server = ParameterServer {
        rank,
        dedicated,
        overlap: options.overlap,
        buckets,
        serving,
        aside,
        compressed,
        pushed: Vec::new(),
        arrivals: Arrivals::none(),
        publishes: false,
        published: 0,
        expected: [setup.expected_by(pushes), setup.expected_by(pulls)],
    };
    let computes = !(dedicated && rank == SERVER);
    Ok(Built { computes, ..Built::new(server, channels, owned) })
}

/// What the server does, in whichever thread.
#[derive(Clone)]
struct Serving {
    gradients: Channel,
    parameters: Channel,
    ranks: usize,
    /// Ranks whose gradients are averaged.
    computing: usize,
    buckets: Arc<[Bucket]>,
    /// How workers' gradients are compressed, where they are.
    compressed: Option<Pushed>,
    /// What a bucket's gradients and parameters are called in errors and in the step's times.
    labels: Arc<[[Arc<str>; 2]]>,
}

impl Serving {
    /// On so many ranks, of which so many compute.
    fn new(
        buckets: &BucketFiller,
        channels: &Channels,
        (ranks, computing): (usize, usize),
        compressed: Option<Pushed>,
    ) -> Self {
        let label = |(index, bucket): (usize, &Bucket)| {
            let parameters = format!("the server's parameters, bucket {index}: {}", bucket.name);
            [buckets.label(index), parameters.into()]
        };
        Serving {
            gradients: channels.gradients.clone(),
            parameters: channels.parameters.clone(),
            ranks,
            computing,
            labels: buckets.plan().iter().enumerate().map(label).collect(),
            buckets: buckets.plan().into(),
            compressed,
        }
    }

    /// How a worker's bucket of gradients travels.
    fn push(&self, bucket: usize, worker: usize) -> Route {
        Route::lane(self.labels[bucket][0].clone(), worker)
    }

    /// How a worker's bucket of parameters travels.
    fn pull(&self, bucket: usize, worker: usize) -> Route {
        Route::lane(self.labels[bucket][1].clone(), worker)
    }

    /// The mean of everyone's gradients of a bucket, summed in rank order and cut into its segments. `own` are the server's, as they would travel.
    fn reduce(&self, bucket: usize, own: Option<Buffer>) -> comm_core::Result<Vec<Flat>> {
        let Serving { gradients, computing, .. } = self;
        let segments = &self.buckets[bucket];
        let mut sum = own.map(|own| gradients.unpack(own)).transpose()?;
        let receive = |worker: usize| self.receive(bucket, worker);
        self.with_each_worker(gradients, receive, |worker, pending| {
            let theirs = pending.wait()?;
            sum = Some(gradients.unpacking(|| self.plus(bucket, sum.take(), theirs, worker))?);
            Ok(())
        })?;
        Ok(gradients.unpacking(|| sum.unwrap_or_default().divided(*computing as f32).share(&segments.lengths())))
    }

    /// Starts receiving a worker's bucket of gradients.
    fn receive(&self, bucket: usize, worker: usize) -> comm_core::Result<Pending> {
        let (count, route) = (self.buckets[bucket].len(), self.push(bucket, worker));
        match &self.compressed {
            Some(compressed) => Ok(self.gradients.receive_into(worker, || compressed.room(count), route)),
            None => self.gradients.receive(worker, count, route),
        }
    }

    /// The sum of a bucket's gradients so far, with what has come of `worker`'s.
    fn plus(&self, bucket: usize, sum: Option<Flat>, theirs: Buffer, worker: usize) -> comm_core::Result<Flat> {
        if let Some(compressed) = &self.compressed {
            let none = || Ok(vec![0.0; self.buckets[bucket].len()]);
            let mut sum = sum.map_or_else(none, Flat::into_host)?;
            compressed.add(theirs, &mut sum, worker)?;
            return Ok(Flat::Host(sum));
        }
        let theirs = self.gradients.unpack(theirs)?;
        match sum {
            Some(sum) => sum.plus(&theirs),
            None => Ok(theirs),
        }
    }

    /// Sends every worker its bucket of parameters, which `packed` gives each time.
    fn publish(&self, bucket: usize, packed: impl Fn() -> comm_core::Result<Buffer>) -> comm_core::Result<()> {
        let send =
            |worker: usize| Ok(self.parameters.start(Op::Send { to: worker }, packed()?, self.pull(bucket, worker)));
        self.with_each_worker(&self.parameters, send, |_, pending| pending.wait().map(drop))
    }

    /// Starts an operation with each worker and finishes it, in rank order, as many at a time as have a lane to themselves.
    fn with_each_worker(
        &self,
        channel: &Channel,
        start: impl Fn(usize) -> comm_core::Result<Pending>,
        mut finish: impl FnMut(usize, Pending) -> comm_core::Result<()>,
    ) -> comm_core::Result<()> {
        let mut under_way = VecDeque::new();
        let mut finish = |(worker, pending)| finish(worker, pending);
        for worker in 1..self.ranks {
            finish_until(channel.lanes(), &mut under_way, &mut finish)?;
            under_way.push_back((worker, start(worker)?));
        }
        finish_until(1, &mut under_way, finish)
    }
}

impl ParameterServer {
    fn serves(&self) -> bool {
        self.rank == SERVER
    }

    /// What leaves of a worker's bucket of gradients.
    fn outgoing(&mut self, bucket: usize, grads: Flat, gradients: &Channel) -> comm_core::Result<Buffer> {
        let packed = gradients.pack(|| Ok(grads))?;
        let Some(compressed) = &mut self.compressed else { return Ok(packed) };
        let grads = packed.into_vec()?;
        Ok(gradients.packing(|| compressed.encode(bucket, grads)))
    }

    /// Has the buckets that are full leave, or added up beside the pass.
    fn start_full(&mut self, channels: &Channels) -> comm_core::Result<()> {
        if self.serves() && self.aside.is_none() {
            return Ok(());
        }
        while let Some((index, grads)) = self.buckets.next_full() {
            match &self.aside {
                Some(aside) => {
                    let own = channels.gradients.pack(|| Ok(grads))?;
                    aside.run(move |serving| Ok(vec![serving.reduce(index, Some(own))?]));
                }
                None => {
                    let own = self.outgoing(index, grads, &channels.gradients)?;
                    let route = self.serving.push(index, self.rank);
                    self.pushed.push(channels.gradients.start(Op::Send { to: SERVER }, own, route));
                }
            }
        }
        Ok(())
    }

    /// Everyone's mean, on the server.
    fn means(&mut self, channels: &Channels) -> comm_core::Result<Vec<Flat>> {
        let mut means = self.buckets.vectors();
        for index in 0..self.buckets.plan().len() {
            let parts = match &self.aside {
                Some(aside) => aside.next()?,
                None => {
                    let own = self.buckets.next_full();
                    let own = own.map(|(_, grads)| channels.gradients.pack(|| Ok(grads))).transpose()?;
                    self.serving.reduce(index, own)?
                }
            };
            self.buckets.plan()[index].put_into(parts, &mut means);
        }
        // What was sent beside the passes was sent before.
        self.published += usize::from(std::mem::take(&mut self.publishes));
        Ok(means)
    }

    /// Updates the parameters, bucket by bucket in the order in which the workers need them, where that costs no more, and sends them each: beside
    /// the update of the others and the next pass, or now.
    fn update(
        &mut self,
        checked: &mut CheckedGradients,
        train: &mut dyn LocalStep,
        channels: &Channels,
    ) -> Result<(), TrainError> {
        let beside = if train.rests() { None } else { self.aside.as_ref() };
        let apart = train.updates_apart();
        if !apart {
            train.update(checked)?;
        }
        for (index, bucket) in self.buckets.plan().iter().enumerate().rev() {
            if apart {
                train.update_some(checked, &bucket.segments)?;
            }
            let masters = train.masters();
            let whole = || {
                let parts = bucket.segments.iter().map(|segment| &masters[*segment]);
                Flat::concat_of(parts.map(|part| (part, 0..part.len())))
            };
            let pack = || channels.parameters.pack(whole);
            let Some(aside) = beside else {
                self.serving.publish(index, pack)?;
                continue;
            };
            let Buffer::Host(packed) = pack()? else {
                return Err(Error::Internal("parameters are in device memory and leave beside the pass".into()).into());
            };
            aside.run(move |serving| {
                serving.publish(index, || Ok(Buffer::Host(packed.clone())))?;
                Ok(Vec::new())
            });
        }
        self.publishes = beside.is_some();
        self.published += usize::from(beside.is_none());
        if self.dedicated { Ok(()) } else { put_own(train, channels) }
    }
}

/// Starts receiving a bucket of parameters, on the worker `rank`.
fn receive(serving: &Serving, bucket: usize, rank: usize) -> comm_core::Result<Pending> {
    serving.parameters.receive(SERVER, serving.buckets[bucket].len(), serving.pull(bucket, rank))
}

impl DuringPass for ParameterServer {
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
        self.arrivals.finish_next(self.buckets.plan(), |bucket, pending| pending.finish_weights(&bucket.lengths()))
    }

    fn prefetch(&mut self, _masters: &[Flat], _channels: &mut Channels) -> comm_core::Result<()> {
        let ParameterServer { arrivals, buckets, serving, rank, .. } = self;
        arrivals.ask(buckets.plan().len(), |index| receive(serving, index, *rank))
    }

    fn room(&mut self, segment: usize) -> Vec<f32> {
        self.buckets.room(segment)
    }

    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.buckets.add(segment, grads)?;
        if self.overlap { self.start_full(channels) } else { Ok(()) }
    }
}

impl ParameterServer {
    /// Everyone's gradients, averaged, on the server.
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        self.start_full(channels)?;
        if let (true, Some(aside)) = (self.dedicated, &self.aside) {
            let buckets = 0..self.buckets.plan().len();
            buckets.for_each(|index| aside.run(move |serving| Ok(vec![serving.reduce(index, None)?])));
        }
        let means = if self.serves() {
            self.means(channels)?
        } else {
            std::mem::take(&mut self.pushed).into_iter().try_for_each(|pending| pending.wait().map(drop))?;
            self.buckets.vectors()
        };
        self.buckets.restart();
        Ok(means)
    }

    /// Has the parameters come that the server has updated, if not with the next pass.
    fn pull(&mut self, train: &mut dyn LocalStep, channels: &Channels) -> Result<(), TrainError> {
        let ParameterServer { arrivals, buckets, serving, rank, .. } = self;
        let plan = buckets.plan();
        arrivals.expect(plan.len());
        // In device memory the server sends before its next pass.
        if self.overlap && !train.rests() && !channels.parameters.is_native() {
            return Ok(());
        }
        let start = |index: usize, _: &dyn LocalStep| receive(serving, index, *rank);
        arrivals.bring(plan, train, start, |index, pending| pending.finish_weights(&plan[index].lengths()))
    }
}

impl Strategy for ParameterServer {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        let loss = train.backward(self, channels)?;
        let grads = self.synchronise(channels)?;
        let mut checked = train.check(loss, grads, Ranks::All)?;
        if !checked.skip {
            if self.serves() {
                self.update(&mut checked, train, channels)?;
            } else {
                train.update(&mut checked)?;
                self.pull(train, channels)?;
            }
        }
        let outcome = StepOutcome::new(&checked, None, true);
        let [pushes, pulls] = self.expected;
        let times = self.arrivals.take_rounds() + std::mem::take(&mut self.published);
        Ok(StepOutcome { under_way: self.publishes, ..outcome.that_sent(pushes, (pulls, times)) })
    }

    fn kept(&self) -> Vec<KeptVector<'_>> {
        self.compressed.as_ref().map(|compressed| compressed.kept(self.buckets.plan())).unwrap_or_default()
    }

    fn restore(&mut self, saved: &mut SavedKept<'_>) -> Result<(), TrainError> {
        let Serving { ranks, computing, .. } = self.serving;
        let shares = computing as f32 / (ranks - 1).max(1) as f32;
        let plan = self.buckets.plan();
        self.compressed.as_mut().map_or(Ok(()), |compressed| compressed.restore(plan, shares, saved))
    }
}
