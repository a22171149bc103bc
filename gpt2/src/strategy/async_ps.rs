//! A parameter server that nobody waits for, within a bound (stale synchronous parallel, Ho et al. 2013).

use std::collections::VecDeque;
use std::time::Duration;

use comm_core::{Buffer, DType, Error, Op};
use serde::{Deserialize, Serialize};

use super::channels::{Channel, Pending, Route, first_ended};
use super::formula::{Expected, Run, Tally};
use super::own_step::OwnGradients;
use super::settings::Setting;
use super::{Built, Channels, DuringPass, Layout, LocalStep, Ranks, Setup, Spec, StepOutcome, Strategy, StrategyKind};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};

pub(super) const SPEC: Spec = Spec {
    name: "async-ps",
    about: "one parameter server, which applies each worker's gradients as they arrive",
    is_one_device: false,
    tells_nodes_apart: false,
    in_buckets: false,
    overlaps: false,
    settings: &[Setting::Staleness],
    build,
    expected: |run, layout, rank| match rank {
        SERVER => (1..run.ranks).flat_map(|worker| [received(run), replied(run, layout, worker)]).sum(),
        _ => pushed(run, layout, rank),
    },
};

/// The rank that serves, and does not compute.
const SERVER: usize = 0;

/// What its messages are called in errors.
const SCALARS: &str = "a worker's loss";
const GRADIENTS: &str = "a worker's gradients";
const MEETING: &str = "when all ranks meet";
const PARAMETERS: &str = "the server's parameters";

/// Numbers that travel in front of gradients: the worker's part of the step's loss; 1 if all ranks meet after this step, else 0; and 1 if the
/// worker was asked to leave.
const NUMBERS: usize = 3;

/// The number that travels in front of parameters: after how many steps all ranks meet because one was asked to leave; 0 if none was.
const REPLIED: usize = 1;

/// What a worker sends and takes part in for a push.
fn pushed(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    let mut tally = Tally::of(run, rank);
    tally.collective(None, Op::Send { to: SERVER }, DType::F64, NUMBERS);
    tally.collective(None, Op::Send { to: SERVER }, run.options.wire.dtype(), layout.total());
    tally.receive(2);
    tally.sum
}

/// What the server takes part in for a push.
fn received(run: &Run<'_>) -> Expected {
    let mut tally = Tally::of(run, SERVER);
    tally.receive(2);
    tally.sum
}

/// What the server sends for a reply.
fn replied(run: &Run<'_>, layout: &Layout, worker: usize) -> Expected {
    let mut tally = Tally::of(run, SERVER);
    tally.collective(None, Op::Send { to: worker }, DType::F64, REPLIED);
    tally.collective(None, Op::Send { to: worker }, run.precision.dtype(), layout.total());
    tally.sum
}

/// By how many steps of the slowest worker the parameters were behind on which gradients were computed, over some pushes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staleness {
    /// Their number.
    pub pushes: u64,
    /// The sum over them, in steps.
    pub sum: u64,
    /// The most, in steps.
    pub max: u64,
}

impl Staleness {
    fn count(&mut self, steps: u64) {
        self.add(Staleness { pushes: 1, sum: steps, max: steps });
    }

    /// Adds other pushes.
    pub fn add(&mut self, other: Staleness) {
        let Staleness { pushes, sum, max } = other;
        (self.pushes, self.sum, self.max) = (self.pushes + pushes, self.sum + sum, self.max.max(max));
    }

    /// The mean over pushes, in steps; no number where there were none.
    pub fn mean(&self) -> f64 {
        self.sum as f64 / self.pushes as f64
    }
}

impl StrategyKind {
    /// Whether equal runs have equal results with this bound of staleness: whatever arrives first.
    pub fn is_repeatable(self, staleness: u64) -> bool {
        self != StrategyKind::AsyncPs || staleness == 0
    }

    /// Lanes that a job of `ranks` ranks needs, where others have `usual`.
    pub fn lanes(self, ranks: usize, usual: usize) -> usize {
        if self == StrategyKind::AsyncPs { usual.max(ranks) } else { usual }
    }

    /// Whether so many lanes are enough.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the option as a user types it.
    pub fn check_lanes(self, lanes: usize, ranks: usize) -> comm_core::Result<()> {
        if lanes >= self.lanes(ranks, 1) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "--strategy {self} on {ranks} ranks needs --lanes {ranks}, one for each worker and one more, not {lanes}: workers that share a \
             lane would wait for each other"
        )))
    }
}

fn build(setup: &Setup<'_>) -> comm_core::Result<Built> {
    let (layout, channels) = (setup.layout(), setup.channels());
    let world = &setup.comms.world;
    let (rank, ranks, lanes) = (world.rank(), world.world_size(), world.lanes());
    if ranks == 1 {
        return Err(Error::invalid("the strategy `async-ps` needs at least one worker beside its server: 2 ranks"));
    }
    StrategyKind::AsyncPs.check_lanes(lanes, ranks)?;
    if channels.gradients.is_native() {
        return Err(Error::invalid(
            "the strategy `async-ps` works in host memory, and this transport moves GPU memory; choose shm, tcp-raw, tcp or quic",
        ));
    }
    let bound = setup.options.local.staleness;
    let expected = setup.expected(StrategyKind::AsyncPs);
    if rank != SERVER {
        // Where all ranks meet, the slowest may be so many steps behind, each of which may take as long as an operation.
        let steps = u32::try_from(bound).unwrap_or(u32::MAX).saturating_add(2);
        let patience = setup.comms.timeout.saturating_mul(steps);
        let worker = Worker { rank, bound, patience, own: OwnGradients::of(&layout), expected, layout: layout.clone() };
        return Ok(Built::new(worker, channels, layout.nothing()));
    }
    let of = |worker: usize| Served {
        rank: worker,
        steps: setup.first_step,
        parameters_of: setup.first_step,
        state: State::Computes,
        rests: false,
        sending: None,
        reply: setup.expected_by(|run, layout, _| replied(run, layout, worker)),
    };
    let server = Server {
        bound,
        workers: (1..ranks).map(of).collect(),
        losses: VecDeque::new(),
        meets: None,
        push: setup.expected_by(|run, _, _| received(run)),
        done: Done::default(),
        layout: layout.clone(),
    };
    Ok(Built { computes: false, ..Built::new(server, channels, layout.everything()) })
}

/// A rank that computes: in every step it sends its gradients to the server, which answers with parameters.
struct Worker {
    rank: usize,
    bound: u64,
    /// How long parameters may take to come.
    patience: Duration,
    layout: Layout,
    own: OwnGradients,
    expected: Expected,
}

impl DuringPass for Worker {
    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.own.gradient(segment, grads, channels)
    }
}

impl Strategy for Worker {
    fn step(
        &mut self,
        step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        let part_of_loss = train.backward(&mut *self, channels)?;
        let mut checked = train.check(part_of_loss, self.own.take(), Ranks::This)?;
        let grads = std::mem::take(&mut checked.grads);
        let (gradients, parameters) = (&channels.gradients, &channels.parameters);
        let said = |yes: bool| f64::from(u8::from(yes));
        let numbers = vec![part_of_loss, said(train.rests()), said(train.is_asked_to_leave())];
        let route = |label: &'static str| Route::lane(label, self.rank);
        let sending = [
            gradients.start(Op::Send { to: SERVER }, Buffer::from_vec(numbers), route(SCALARS)),
            gradients.send(SERVER, || Flat::concat(grads), route(GRADIENTS))?,
        ];
        let number = Buffer::from_vec(vec![0.0f64; REPLIED]);
        let meeting = gradients.start(Op::Recv { from: SERVER }, number, route(MEETING).within(self.patience));
        let arriving = parameters.receive(SERVER, self.layout.total(), route(PARAMETERS).within(self.patience))?;
        sending.into_iter().try_for_each(|pending| pending.wait().map(drop))?;
        let meets = meeting.wait()?.into_vec::<f64>()?.first().is_some_and(|meets| *meets == (step + 1) as f64);
        let parts = arriving.finish_weights(&self.layout.lengths())?;
        parts.into_iter().enumerate().try_for_each(|(segment, part)| train.put(segment, part))?;
        let have_met = meets || train.rests();
        let outcome = StepOutcome::new(&checked, Some(self.expected), self.bound == 0 || have_met);
        Ok(StepOutcome { have_met, ..outcome })
    }
}

/// What the server awaits of a worker.
enum State {
    /// It computes on the parameters that it has, and nothing is received yet.
    Computes,
    /// The loss and gradients of its next step are being received.
    Receives(Box<(Pending, Pending)>),
    /// Its gradients wait for those of the others.
    Pushed(Flat),
    /// Its gradients have been applied, and it waits for parameters.
    Waits,
}

/// A worker, as the server sees it.
struct Served {
    rank: usize,
    /// Steps of which its gradients have come.
    steps: u64,
    /// Steps of the slowest worker that were in the parameters that it has.
    parameters_of: u64,
    state: State,
    /// Whether all ranks meet after the step of its last gradients.
    rests: bool,
    /// Parameters on their way to it, with the number in front of them.
    sending: Option<(Pending, Pending)>,
    /// What the server sends for a reply.
    reply: Expected,
}

/// What has ended, of the worker at a place.
enum Event {
    /// Its gradients have come.
    Came(usize),
    /// Parameters have left for it.
    Left(usize),
}

/// What the server has done in a step.
#[derive(Default)]
struct Done {
    expected: Vec<Expected>,
    /// Norms of the gradients that were applied.
    norms: Vec<f64>,
    staleness: Staleness,
}

/// Rank 0: has all parameters and optimizers, and does not compute. A step of it lasts until all workers have sent the gradients of theirs.
///
/// Gradients are applied as they arrive, each worker's by themselves, with the step's learning rate divided by the number of workers: then the
/// updates of a step are together as large as that of `ps`. A worker gets parameters at once, unless it is more than `bound` steps ahead of the
/// slowest: then when it is not any more. With a bound of 0, where nobody could see the difference before all have sent theirs, the mean of all
/// gradients is applied in one update, as `ps` does. After the last step all get the last parameters.
struct Server {
    bound: u64,
    layout: Layout,
    /// In rank order.
    workers: Vec<Served>,
    /// Each worker's part of the loss of each step, from the first that has not ended.
    losses: VecDeque<Vec<f64>>,
    /// After how many steps all ranks meet because one was asked to leave, if one was.
    meets: Option<u64>,
    /// What it takes part in for a push.
    push: Expected,
    done: Done,
}

impl Server {
    /// Steps of which the gradients of all workers have come.
    fn slowest(&self) -> u64 {
        self.workers.iter().map(|worker| worker.steps).min().unwrap_or(0)
    }

    /// Has all ranks meet, since one was asked to leave: after the step that no worker has ended yet, so that each is told with the
    /// parameters that it gets before or then.
    fn meet(&mut self) {
        let farthest = self.workers.iter().map(|worker| worker.steps).max().unwrap_or(0);
        self.meets.get_or_insert(farthest + 1);
    }

    /// Begins to receive from each worker that computes.
    fn receive(&mut self, gradients: &Channel) -> comm_core::Result<()> {
        for worker in self.workers.iter_mut().filter(|worker| matches!(worker.state, State::Computes)) {
            let (from, numbers) = (worker.rank, Buffer::from_vec(vec![0.0f64; NUMBERS]));
            let numbers = gradients.start(Op::Recv { from }, numbers, Route::lane(SCALARS, from));
            let values = gradients.receive(from, self.layout.total(), Route::lane(GRADIENTS, from))?;
            worker.state = State::Receives(Box::new((numbers, values)));
            self.done.expected.push(self.push);
        }
        Ok(())
    }

    /// Waits for any worker's gradients, and takes them. Returns the worker's place.
    fn take_next(&mut self, step: u64, gradients: &Channel) -> comm_core::Result<usize> {
        // Of several, those of the slowest.
        let mut workers: Vec<(usize, &mut Served)> = self.workers.iter_mut().enumerate().collect();
        workers.sort_by_key(|(_, worker)| worker.steps);
        let place = loop {
            let mut under_way: Vec<(Event, &mut Pending)> = Vec::new();
            for (place, worker) in &mut workers {
                let Served { sending, state, .. } = &mut **worker;
                if let State::Receives(receiving) = state {
                    under_way.push((Event::Came(*place), &mut receiving.1));
                }
                under_way.extend(sending.as_mut().map(|sending| (Event::Left(*place), &mut sending.1)));
            }
            match first_ended(under_way) {
                Some(Event::Came(place)) => break place,
                // What has left takes memory no longer.
                Some(Event::Left(place)) => {
                    let of_worker = workers.iter_mut().find(|(other, _)| *other == place);
                    of_worker.and_then(|(_, worker)| worker.sending.take()).map_or(Ok(()), sent)?;
                }
                None => return Err(Error::Internal("the server waits for workers that all wait for it".into())),
            }
        };
        let count = self.workers.len();
        let worker = &mut self.workers[place];
        let State::Receives(receiving) = std::mem::replace(&mut worker.state, State::Waits) else {
            return Err(Error::Internal("no gradients were awaited".into()));
        };
        let (numbers, values) = *receiving;
        let numbers = numbers.wait()?.into_vec::<f64>()?;
        let values = gradients.unpack(values.wait()?)?;
        worker.sending.take().map_or(Ok(()), sent)?;
        let [loss, rests, asked] = numbers[..] else { return Err(Error::Internal("a loss came alone".into())) };
        let of_step = usize::try_from(worker.steps - step).unwrap_or(usize::MAX);
        while self.losses.len() <= of_step {
            self.losses.push_back(vec![0.0; count]);
        }
        self.losses[of_step][place] = loss;
        self.done.staleness.count(worker.steps - worker.parameters_of);
        worker.steps += 1;
        worker.rests = rests > 0.0;
        worker.state = State::Pushed(values);
        if asked > 0.0 {
            self.meet();
        }
        Ok(place)
    }

    /// Applies what has come of the worker at `place`, or, with a bound of 0, what has come of all, once it has.
    fn apply(&mut self, place: usize, train: &mut dyn LocalStep, gradients: &Channel) -> Result<(), TrainError> {
        let count = self.workers.len();
        let places = if self.bound == 0 { 0..count } else { place..place + 1 };
        let pushed = |worker: &Served| matches!(worker.state, State::Pushed(_));
        if !self.workers[places.clone()].iter().all(pushed) {
            return Ok(());
        }
        let updates = count / places.len();
        let mut sum: Option<Flat> = None;
        for worker in &mut self.workers[places.clone()] {
            let State::Pushed(theirs) = std::mem::replace(&mut worker.state, State::Waits) else { continue };
            sum = Some(match sum.take() {
                Some(sum) => gradients.unpacking(|| sum.plus(&theirs))?,
                None => theirs,
            });
        }
        let mean = gradients.unpacking(|| {
            let sum = sum.unwrap_or_default();
            let mean = if places.len() > 1 { sum.divided(places.len() as f32) } else { sum };
            mean.split(&self.layout.lengths())
        });
        // The loss has been looked at by the worker.
        let mut checked = train.check(0.0, mean, Ranks::This)?;
        checked.part_of_rate /= updates as f64;
        self.done.norms.push(checked.grad_norm);
        train.update(&mut checked)
    }

    /// Sends parameters to the workers that wait and are not too far ahead; before all ranks meet, which they do after the last step too, once the
    /// slowest has come as far, so that none waits for it then.
    fn reply(&mut self, is_last: bool, train: &dyn LocalStep, channels: &Channels) -> comm_core::Result<()> {
        let (gradients, parameters) = (&channels.gradients, &channels.parameters);
        let (slowest, meets) = (self.slowest(), self.meets);
        for worker in self.workers.iter_mut().filter(|worker| matches!(worker.state, State::Waits)) {
            let most = if worker.rests || meets == Some(worker.steps) { 0 } else { self.bound };
            if worker.steps - slowest > most {
                continue;
            }
            let masters = train.masters();
            let whole = || Flat::concat_of(masters.iter().map(|values| (values, 0..values.len())));
            let to = worker.rank;
            let route = |label: &'static str| Route::lane(label, to);
            let number = Buffer::from_vec(vec![meets.unwrap_or(0) as f64]);
            let number = gradients.start(Op::Send { to }, number, route(MEETING));
            worker.sending = Some((number, parameters.send(to, whole, route(PARAMETERS))?));
            worker.parameters_of = slowest;
            self.done.expected.push(worker.reply);
            // After the last step nothing comes any more.
            if !is_last {
                worker.state = State::Computes;
            }
        }
        Ok(())
    }
}

/// Waits until parameters have left, and the number in front of them.
fn sent((number, parameters): (Pending, Pending)) -> comm_core::Result<()> {
    number.wait()?;
    parameters.wait().map(drop)
}

impl DuringPass for Server {
    fn gradient(&mut self, _segment: usize, _grads: Gradients, _channels: &mut Channels) -> comm_core::Result<()> {
        Err(Error::Internal("a server that does not compute was given gradients of its own".into()))
    }
}

impl Strategy for Server {
    fn step(
        &mut self,
        step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        let gradients = &channels.gradients;
        let is_last = train.is_last();
        while self.slowest() <= step {
            self.receive(gradients)?;
            let place = self.take_next(step, gradients)?;
            if train.is_asked_to_leave() {
                self.meet();
            }
            self.apply(place, train, gradients)?;
            self.reply(is_last && self.slowest() > step, train, channels)?;
        }
        let have_met = train.rests() || self.meets == Some(step + 1);
        if have_met {
            self.workers.iter_mut().filter_map(|worker| worker.sending.take()).try_for_each(sent)?;
        }
        let Done { expected, norms, staleness } = std::mem::take(&mut self.done);
        // In rank order.
        let loss = self.losses.pop_front().map_or(0.0, |losses| losses.iter().sum());
        let is_under_way = |worker: &Served| worker.sending.is_some() || matches!(worker.state, State::Receives(..));
        Ok(StepOutcome {
            loss,
            grad_norm: norms.iter().sum::<f64>() / norms.len() as f64,
            skipped: false,
            expected: Some(expected.into_iter().sum()),
            under_way: self.workers.iter().any(is_under_way),
            replicas_agree: self.bound == 0 || have_met,
            have_met,
            staleness,
        })
    }
}
