//! A single parameter server.

use std::collections::VecDeque;

use comm_core::{Error, Op};

use super::channels::{Channel, Pending, Route, finish_until};
use super::formula::{Expected, Run, Tally};
use super::layout::FullGradient;
use super::{
    Built, Channels, DuringPass, Layout, LocalStep, Setup, Spec, StepOutcome, Strategy, StrategyKind, Synchronous,
    put_own, synchronous,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};

pub(super) const SPEC: Spec = Spec {
    name: "ps",
    about: "one parameter server",
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
    if rank == SERVER {
        tally.receive(run.ranks as u64 - 1);
        (1..run.ranks).for_each(|to| tally.collective(None, Op::Send { to }, run.precision.dtype(), total));
    } else {
        tally.collective(None, Op::Send { to: SERVER }, run.options.wire.dtype(), total);
        tally.receive(1);
    }
    tally.sum
}

/// The rank that serves.
const SERVER: usize = 0;

/// What its messages are called in errors.
const GRADIENTS: &str = "a worker's gradients";
const PARAMETERS: &str = "the server's parameters";

/// Rank 0 receives every worker's gradients, averages them in rank order, with its own unless it is dedicated, updates all parameters
/// and sends them to every worker: (N−1)·S each way through one rank.
struct ParameterServer {
    rank: usize,
    ranks: usize,
    layout: Layout,
    /// The server does not compute.
    dedicated: bool,
    grads: FullGradient,
    expected: Expected,
}

fn build(setup: &Setup<'_>) -> comm_core::Result<Built> {
    let (layout, options) = (setup.layout(), setup.options);
    let (rank, ranks) = (setup.comms.world.rank(), setup.comms.world.world_size());
    if options.dedicated_server && ranks == 1 {
        return Err(Error::invalid("a dedicated parameter server needs at least one worker beside it: 2 ranks"));
    }
    let owned = if rank == SERVER { layout.everything() } else { layout.nothing() };
    let dedicated = options.serves_only(StrategyKind::Ps, ranks, SERVER);
    let server = ParameterServer {
        rank,
        ranks,
        dedicated,
        grads: FullGradient::new(&layout),
        expected: setup.expected(StrategyKind::Ps),
        layout,
    };
    let computes = !(dedicated && rank == SERVER);
    Ok(Built { computes, ..Built::new(server, setup.channels(), owned) })
}

impl ParameterServer {
    fn serves(&self) -> bool {
        self.rank == SERVER
    }

    /// Starts an operation with each worker and finishes it, in rank order, as many at a time as have a lane to themselves.
    fn with_each_worker(
        &self,
        channel: &Channel,
        start: impl Fn(usize) -> comm_core::Result<Pending>,
        mut finish: impl FnMut(Pending) -> comm_core::Result<()>,
    ) -> comm_core::Result<()> {
        let mut under_way = VecDeque::new();
        for worker in 1..self.ranks {
            finish_until(channel.lanes(), &mut under_way, &mut finish)?;
            under_way.push_back(start(worker)?);
        }
        finish_until(1, &mut under_way, finish)
    }

    /// The sum of everyone's gradients, in rank order.
    fn sum_of_all(&mut self, gradients: &Channel) -> comm_core::Result<Flat> {
        // The server's own are rounded to the wire type like everyone's.
        let mut sum = match self.dedicated {
            true => None,
            false => Some(gradients.rounded(|| self.grads.take())?),
        };
        let receive = |worker: usize| gradients.receive(worker, self.layout.total(), Route::lane(GRADIENTS, worker));
        self.with_each_worker(gradients, receive, |pending| {
            let theirs = pending.wait()?;
            gradients.unpacking(|| {
                let theirs = gradients.unpack(theirs)?;
                sum = Some(match sum.take() {
                    Some(sum) => sum.plus(theirs)?,
                    None => theirs,
                });
                Ok(())
            })
        })?;
        Ok(sum.unwrap_or_default())
    }
}

impl DuringPass for ParameterServer {
    fn gradient(&mut self, segment: usize, grads: Gradients, _channels: &mut Channels) -> comm_core::Result<()> {
        self.grads.add(segment, grads)
    }
}

impl Synchronous for ParameterServer {
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        let gradients = &channels.gradients;
        if !self.serves() {
            gradients.send(SERVER, || self.grads.take(), Route::lane(GRADIENTS, self.rank))?.wait()?;
            return Ok(self.layout.vectors());
        }
        let sum = self.sum_of_all(gradients)?;
        let computing = self.ranks - usize::from(self.dedicated);
        Ok(gradients.unpacking(|| sum.divided(computing as f32).split(&self.layout.lengths())))
    }

    fn distribute(&mut self, train: &mut dyn LocalStep, channels: &mut Channels) -> Result<(), TrainError> {
        let parameters = &channels.parameters;
        if !self.serves() {
            let arriving = parameters.receive(SERVER, self.layout.total(), Route::lane(PARAMETERS, self.rank))?;
            let parts = arriving.finish_weights(&self.layout.lengths())?;
            return parts.into_iter().enumerate().try_for_each(|(segment, part)| train.put(segment, part));
        }
        let masters = train.masters();
        let send = |worker: usize| {
            let whole = || Flat::concat_of(masters.iter().map(|values| (values, 0..values.len())));
            parameters.send(worker, whole, Route::lane(PARAMETERS, worker))
        };
        self.with_each_worker(parameters, send, |pending| pending.wait().map(drop))?;
        if !self.dedicated { put_own(train, channels) } else { Ok(()) }
    }
}

impl Strategy for ParameterServer {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        synchronous(self, self.expected, train, channels)
    }
}
