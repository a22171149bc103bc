//! Traces carried out on a real transport, without a model: the program of a rank, and the job that runs it.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::TcpControl;
use comm_core::job::{Address, Job};
use comm_core::{
    Buffer, Call, Communicator, CommunicatorExt, Control, Deadline, Handle, HostBuffer, Mode, Op, OpKind, ReduceOp,
};
use isocomm::{Rung, TransportOptions};
use predict::trace::{Collective, Message, RankTrace, Trace, Work};
use rig::BenchError;
use rig::link::{JobEndpoints, TestNetwork};
use rig::outcome::{self, RunError};
use rig::rank::{self, Program, leave, left, of_a_job};
use rig::sys::process_cpu_time;
use serde::{Deserialize, Serialize};

use super::load::Load;

/// A trace, and how often ranks go through it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Run {
    pub(super) trace: Trace,
    /// Before the clock starts.
    pub(super) warm_up: u32,
    pub(super) times: u32,
    /// Nothing is done for so long before each time, in seconds.
    pub(super) pause_s: f64,
}

/// What a run of all ranks came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Performed {
    /// Seconds of each time through, of the rank that took longest.
    pub(super) seconds: Vec<f64>,
    /// Seconds of each in which the rank that waited longest waited.
    pub(super) waited: Vec<f64>,
    /// Seconds of each in which an operation was under way, of the rank of which that is longest.
    pub(super) under_way: Vec<f64>,
    /// Of each rank and time with two operations: by which share of an even one's the one got more that ended first.
    pub(super) unevenness: Vec<f64>,
    /// Processor time of all ranks together, of one time through.
    pub(super) cpu_s: f64,
}

/// What the ranks of a job are told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    runs: PathBuf,
    rung: Rung,
    options: TransportOptions,
    addresses: Option<JobEndpoints>,
    results: PathBuf,
}

/// Carries out `runs`, in order, over `rung` through `network`.
///
/// # Errors
/// Why a rank failed, that the time was up, or that a signal came.
pub(super) fn perform(
    runs: &[Run],
    rung: Rung,
    options: &TransportOptions,
    network: &TestNetwork,
    timeout: Duration,
) -> Result<Vec<Performed>, RunError> {
    let ranks = runs.first().map_or(0, |run| run.trace.ranks.len());
    let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
    let file = folder.path().join("runs.json");
    let bytes = serde_json::to_vec(runs).map_err(|error| format!("the traces of a job: {error}"))?;
    fs::write(&file, bytes).map_err(|error| format!("{}: {error}", file.display()))?;
    let task = Task {
        runs: file,
        rung,
        options: options.clone(),
        addresses: network.addresses(),
        results: folder.path().to_owned(),
    };
    let arguments = rank::arguments(&task, folder.path())?;
    let launch = network.launch(&rank::this_program()?, arguments, ranks, timeout)?;
    outcome::run(&launch)?;
    let left = (0..ranks).map(|rank| left::<Vec<Performed>>(&Task::file(folder.path(), rank), rank));
    let left = left.collect::<Result<Vec<_>, String>>()?;
    Ok((0..runs.len()).map(|run| together(left.iter().filter_map(|rank| rank.get(run)))).collect())
}

/// What the ranks say of a run, together.
fn together<'a>(ranks: impl Iterator<Item = &'a Performed>) -> Performed {
    let mut all = Performed::default();
    for rank in ranks {
        let longest = |all: &mut Vec<f64>, of_rank: &[f64]| {
            all.resize(all.len().max(of_rank.len()), 0.0);
            all.iter_mut().zip(of_rank).for_each(|(all, of_rank)| *all = all.max(*of_rank));
        };
        longest(&mut all.seconds, &rank.seconds);
        longest(&mut all.waited, &rank.waited);
        longest(&mut all.under_way, &rank.under_way);
        all.unevenness.extend(&rank.unevenness);
        all.cpu_s += rank.cpu_s;
    }
    all
}

impl Program for Task {
    const COMMAND: &'static str = "trace-rank";

    fn run(&self, job: Option<&Job>) -> Result<(), BenchError> {
        let job = of_a_job(job)?;
        let about = |error: &dyn std::fmt::Display| format!("{}: {error}", self.runs.display());
        let bytes = fs::read(&self.runs).map_err(|error| about(&error))?;
        let runs: Vec<Run> = serde_json::from_slice(&bytes).map_err(|error| about(&error))?;
        let connected = self.connect(job)?;
        // All ranks at the same time, as they compute later.
        connected.comm.barrier()?;
        let mut load = Load::new()?;
        let mut performed = Vec::with_capacity(runs.len());
        for run in &runs {
            performed.push(perform_one(&connected.comm, run, &mut load)?);
        }
        connected.comm.finish(self.options.timeout)?;
        leave(&Task::file(&self.results, job.rank), &performed)
    }
}

impl Task {
    fn file(folder: &Path, rank: usize) -> PathBuf {
        folder.join(format!("rank-{rank}.json"))
    }

    fn connect(&self, job: &Job) -> Result<isocomm::Connected, BenchError> {
        let (mut job, mut options) = (job.clone(), self.options.clone());
        if let Some(addresses) = &self.addresses {
            let (host, port) = addresses.meeting();
            job.address = Address::Tcp { host: host.to_string(), port };
            options.bind = Some(addresses.own(job.rank, job.world_size).into());
        }
        let options = self.rung.options(&options);
        let agreement = [("transport", self.rung.to_string())];
        let control = TcpControl::connect_with(&job, &agreement, options.control(), Deadline::after(options.timeout))?;
        let connected = self.rung.connect(control.clone(), &options).inspect_err(|error| control.poison(error))?;
        Ok(connected)
    }
}

/// Goes through a trace, again and again; between two times all ranks meet.
fn perform_one(world: &Arc<dyn Communicator>, run: &Run, load: &mut Load) -> Result<Performed, BenchError> {
    let trace = run.trace.ranks.get(world.rank()).ok_or("the trace has fewer ranks than the job")?;
    let mut performer = Performer::new(world, &run.trace, trace, load)?;
    let mut performed = Performed::default();
    let mut cpu = Duration::ZERO;
    let pause = Duration::try_from_secs_f64(run.pause_s)?;
    for number in 0..run.warm_up + run.times {
        thread::sleep(pause);
        world.barrier()?;
        let (before, began) = (process_cpu_time()?, Instant::now());
        let Once { waited, under_way, unevenness } = performer.once()?;
        let seconds = began.elapsed().as_secs_f64();
        if number < run.warm_up {
            continue;
        }
        cpu += process_cpu_time()?.saturating_sub(before);
        performed.seconds.push(seconds);
        performed.waited.push(waited.as_secs_f64());
        performed.under_way.push(under_way.as_secs_f64());
        performed.unevenness.extend(unevenness);
    }
    performed.cpu_s = cpu.as_secs_f64() / f64::from(run.times.max(1));
    Ok(performed)
}

/// Carries out what a rank does.
struct Performer<'a> {
    world: &'a Arc<dyn Communicator>,
    trace: &'a RankTrace,
    /// Communicators of groups, by their ranks.
    groups: HashMap<Vec<usize>, Arc<dyn Communicator>>,
    /// The memory of each operation, kept from one time to the next.
    buffers: Vec<Option<Buffer>>,
    load: &'a mut Load,
}

/// What a rank did in one time through.
struct Once {
    /// How long it waited.
    waited: Duration,
    /// How long operations were under way.
    under_way: Duration,
    /// See [`Performed::unevenness`].
    unevenness: Option<f64>,
}

/// An operation under way.
enum Pending {
    Running(Handle),
    Done,
}

impl<'a> Performer<'a> {
    fn new(
        world: &'a Arc<dyn Communicator>,
        all: &Trace,
        trace: &'a RankTrace,
        load: &'a mut Load,
    ) -> Result<Self, BenchError> {
        let mut groups = HashMap::new();
        for members in all.groups() {
            let color = members.contains(&world.rank()).then_some(0);
            if let Some(part) = world.split(color, i64::try_from(world.rank())?)? {
                groups.insert(members, part);
            }
        }
        let ranks = all.ranks.len();
        let buffers = trace.nodes.iter().map(|node| buffer(&node.work, world.rank(), ranks)).collect();
        Ok(Performer { world, trace, groups, buffers, load })
    }

    /// Once through.
    fn once(&mut self) -> Result<Once, BenchError> {
        let mut pending: Vec<Pending> = Vec::with_capacity(self.trace.nodes.len());
        let mut waited = Duration::ZERO;
        let mut spans: Vec<(Instant, Instant)> = Vec::new();
        let trace = self.trace;
        for (index, node) in trace.nodes.iter().enumerate() {
            for after in &node.after {
                waited += self.finish(*after, &mut pending, &mut spans)?;
            }
            pending.push(match &node.work {
                Work::Compute { ns } => {
                    let time = Duration::from_nanos(*ns);
                    match node.recorded {
                        Some(_) => self.load.until(Instant::now() + time),
                        None => self.load.run(time),
                    }
                    Pending::Done
                }
                work => {
                    let began = Instant::now();
                    let handle = self.start(index, work)?;
                    waited += if is_background(work) { Duration::ZERO } else { began.elapsed() };
                    Pending::Running(handle)
                }
            });
            if !is_background(&node.work) {
                waited += self.finish(index, &mut pending, &mut spans)?;
            }
        }
        for index in 0..pending.len() {
            waited += self.finish(index, &mut pending, &mut spans)?;
        }
        Ok(Once { waited, unevenness: unevenness(&spans), under_way: covered(spans) })
    }

    fn start(&mut self, index: usize, work: &Work) -> Result<Handle, BenchError> {
        let buffer = self.buffers.get_mut(index).and_then(Option::take).ok_or("an operation without memory")?;
        let (comm, op, algorithm, lane) = match work {
            Work::Compute { .. } => return Err("a computation is no operation".into()),
            Work::Send(message) => (self.world, Op::Send { to: message.peer }, None, message.lane),
            Work::Receive(message) => (self.world, Op::Recv { from: message.peer }, None, message.lane),
            Work::Collective(collective) => {
                let comm =
                    if collective.group.is_empty() { Some(self.world) } else { self.groups.get(&collective.group) };
                (comm.ok_or("a group of other ranks")?, operation(collective)?, collective.algorithm, collective.lane)
            }
        };
        let lane = lane % comm.lanes();
        let call = if is_background(work) {
            Call::background(op, buffer, lane)
        } else {
            Call { lane, mode: Mode::Blocking, ..Call::blocking(op, buffer) }
        };
        Ok(comm.start(Call { algorithm, ..call }))
    }

    /// Waits for an operation, if it is one that nobody has waited for; how long.
    fn finish(
        &mut self,
        index: usize,
        pending: &mut [Pending],
        spans: &mut Vec<(Instant, Instant)>,
    ) -> Result<Duration, BenchError> {
        let Some(Pending::Running(handle)) = pending.get_mut(index).map(|slot| std::mem::replace(slot, Pending::Done))
        else {
            return Ok(Duration::ZERO);
        };
        let began = Instant::now();
        let completed = handle.wait().map_err(comm_core::Failed::into_error)?;
        spans.push((completed.began, completed.ended));
        self.buffers[index] = Some(completed.buffer);
        Ok(began.elapsed())
    }
}

fn is_background(work: &Work) -> bool {
    match work {
        Work::Compute { .. } => true,
        Work::Collective(Collective { background, .. }) => *background,
        Work::Send(Message { background, .. }) | Work::Receive(Message { background, .. }) => *background,
    }
}

/// The memory of an operation: zeros, which stay finite however often they are summed.
fn buffer(work: &Work, rank: usize, ranks: usize) -> Option<Buffer> {
    let (dtype, count) = elements(work, rank, ranks)?;
    Some(Buffer::Host(HostBuffer::zeros(dtype, count)))
}

/// The elements that a rank needs memory for in an operation.
fn elements(work: &Work, rank: usize, ranks: usize) -> Option<(comm_core::DType, usize)> {
    match work {
        Work::Compute { .. } => None,
        Work::Send(message) | Work::Receive(message) => {
            Some((comm_core::DType::U8, usize::try_from(message.bytes).ok()?))
        }
        Work::Collective(Collective { kind, dtype, count, root, group, .. }) => {
            let (members, own) = match group.iter().position(|each| *each == rank) {
                Some(own) => (group.len(), own),
                None => (ranks, rank),
            };
            let is_part = matches!(kind, OpKind::Scatter | OpKind::Gather) && own != *root;
            Some((*dtype, if is_part { comm_core::shard_range(*count, members, own).len() } else { *count }))
        }
    }
}

/// Bytes that all ranks together need for the operations of a trace.
pub(super) fn memory(trace: &Trace) -> f64 {
    let ranks = trace.ranks.len();
    let of_rank = |(rank, of_rank): (usize, &RankTrace)| -> f64 {
        let elements = of_rank.nodes.iter().filter_map(|node| elements(&node.work, rank, ranks));
        elements.map(|(dtype, count)| count as f64 * dtype.size() as f64).sum()
    };
    trace.ranks.iter().enumerate().map(of_rank).sum()
}

fn operation(collective: &Collective) -> Result<Op, String> {
    let Collective { kind, root, count, .. } = *collective;
    Ok(match kind {
        OpKind::AllReduce => Op::AllReduce(ReduceOp::Mean),
        OpKind::Broadcast => Op::Broadcast { root },
        OpKind::Reduce => Op::Reduce { root, op: ReduceOp::Mean },
        OpKind::Scatter => Op::Scatter { root, total: count },
        OpKind::Gather => Op::Gather { root, total: count },
        OpKind::AllGather => Op::AllGather,
        OpKind::ReduceScatter => Op::ReduceScatter(ReduceOp::Mean),
        OpKind::AllToAll => Op::AllToAll,
        OpKind::Barrier => Op::Barrier,
        other => return Err(format!("{other} is no operation of all ranks")),
    })
}

/// By how much more than an even share of the time that both took the one of two equal operations got that ended first: with even shares it ends with the other.
fn unevenness(spans: &[(Instant, Instant)]) -> Option<f64> {
    let [one, other] = spans else { return None };
    let began = one.0.min(other.0);
    let (first, last) = (one.1.min(other.1) - began, one.1.max(other.1) - began);
    (!first.is_zero()).then(|| (last.as_secs_f64() / first.as_secs_f64() - 1.0).min(1.0))
}

/// How long at least one of the spans lasted.
fn covered(mut spans: Vec<(Instant, Instant)>) -> Duration {
    spans.sort_unstable();
    let (mut total, mut until) = (Duration::ZERO, None::<Instant>);
    for (began, ended) in spans {
        let from = until.map_or(began, |until| until.max(began));
        total += ended.saturating_duration_since(from);
        until = Some(until.map_or(ended, |until| until.max(ended)));
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_from_who_ends_first() {
        let origin = Instant::now();
        let at = |ms: u64| origin + Duration::from_millis(ms);
        assert_eq!(unevenness(&[(at(0), at(100)), (at(0), at(100))]), Some(0.0));
        // Two thirds of the rate for the first, and then all of it for the other.
        let found = unevenness(&[(at(0), at(75)), (at(0), at(100))]).unwrap();
        assert!((found - 1.0 / 3.0).abs() < 1e-9, "{found}");
        assert_eq!(unevenness(&[(at(0), at(75))]), None);
        assert_eq!(covered(vec![(at(50), at(80)), (at(0), at(60)), (at(90), at(95))]), Duration::from_millis(85));
    }
}
