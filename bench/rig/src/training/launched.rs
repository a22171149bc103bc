//! Training on the ranks of a job that a launcher has started: each of its processes starts its own rank of every run, and rank 0 has what all
//! leave.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use comm_core::control::{TcpControl, TcpOptions};
use comm_core::interfaces;
use comm_core::job::{EXIT_ECHO, Job};
use comm_core::launch::{Launch, Output};
use comm_core::location::bind_address;
use comm_core::{Control, Deadline, Error};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::job::{FOLDER, Training};
use super::task::{Network, RankOutput, Task};
use super::text::TextSource;
use crate::BenchError;
use crate::flag::Flag;
use crate::launched::{self, ClockReading, Machine, START, addresses, exchange, exchange_long};
use crate::link::TestNetwork;
use crate::machine::{self, Watch};
use crate::outcome::{self, RunError};
use crate::rank;
use crate::record::Host;
use crate::signal::{Interrupted, Signals};
use crate::sys;

/// This process's place among those of a launcher.
pub struct LaunchedRanks {
    job: Job,
    control: Arc<TcpControl>,
    machines: Vec<Machine>,
    /// The longest that a run may take.
    timeout: Duration,
    /// Runs so far.
    runs: AtomicU64,
}

/// What a run leaves.
pub(super) struct Ran {
    pub(super) outputs: Vec<RankOutput>,
    pub(super) hosts: Vec<Host>,
    /// About machines other than rank 0's.
    pub(super) doubts: Vec<Flag>,
}

/// What rank 0 has the others do.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Run(Box<Task>),
    Quit,
}

/// How a run ended.
struct Ended {
    /// By rank.
    ends: Vec<RankEnd>,
    hosts: Vec<Host>,
    /// About machines other than rank 0's.
    doubts: Vec<Flag>,
}

/// How a rank of a run ended.
#[derive(Debug, Serialize, Deserialize)]
enum RankEnd {
    Done(Box<RankOutput>),
    Failed {
        why: String,
        /// Because of another rank.
        is_echo: bool,
    },
    TimedOut(String),
    Interrupted(i32),
}

/// How much longer than a run may take its end is waited for on the other ranks: processes that do not want to end are killed.
const GRACE: Duration = Duration::from_secs(30);

/// How long the next run is waited for: rank 0 also writes and evaluates.
const BETWEEN: Duration = Duration::from_secs(600);

/// How long short messages are waited for.
const SOON: Duration = Duration::from_secs(60);

/// How often a rank that waits for rank 0 looks for a signal.
const GLANCE: Duration = Duration::from_millis(50);

impl LaunchedRanks {
    /// Meets the other ranks of `job`, which all have the same `agreement`, in (name, value); a run may take `timeout`.
    ///
    /// # Errors
    /// The ranks do not meet, or do not agree.
    pub fn meet(job: Job, agreement: &[(&str, String)], timeout: Duration) -> Result<Self, Error> {
        let control = TcpControl::connect_with(&job, agreement, TcpOptions::default(), Deadline::after(START))?;
        let machines = launched::machines(&*control, Deadline::after(SOON))?;
        Ok(LaunchedRanks { job, control, machines, timeout, runs: AtomicU64::new(0) })
    }

    pub fn rank(&self) -> usize {
        self.job.rank
    }

    pub fn world_size(&self) -> usize {
        self.job.world_size
    }

    /// The machines, in the order of their first ranks.
    pub fn machines(&self) -> &[Machine] {
        &self.machines
    }

    /// What every rank says, in order. All ranks call it together.
    ///
    /// # Errors
    /// Those of the control plane.
    pub fn gather(&self, label: &str, mine: &Result<String, String>) -> Result<Vec<Result<String, String>>, Error> {
        exchange(&*self.control, label, mine, Deadline::after(self.timeout.max(START)))
    }

    /// Why no run can begin any more, if so.
    pub fn failure(&self) -> Option<Error> {
        self.control.settled_failure()
    }

    /// Processes of other ranks on this machine.
    pub fn beside(&self) -> Vec<u32> {
        let here = self.machines.iter().find(|machine| machine.ranks.contains(&self.job.rank));
        let processes = here.into_iter().flat_map(|machine| machine.processes.iter().copied());
        processes.filter(|process| *process != std::process::id()).collect()
    }

    /// The doubt about runs whose ranks have `threads` computing threads each, on a machine with fewer cores.
    pub fn shared_cores(&self, threads: usize) -> Option<Flag> {
        self.machines.iter().find_map(|machine| machine::shared_among(machine.ranks.len(), threads, machine.cores))
    }

    /// One line about what the ranks talk over.
    pub fn describe(&self) -> String {
        format!("the ranks of a launcher, on {}", launched::describe(&self.machines))
    }

    /// On rank 0: has every process run its rank of `training`; what all leave, in order, with times by the clock of this machine.
    ///
    /// # Errors
    /// As [`Training::run`]. When the control plane has failed, no other run can begin.
    pub(super) fn run(&self, training: &Training) -> Result<Ran, RunError> {
        let task = training.task(&TestNetwork::loopback(), Path::new(""));
        let order = Some(Order::Run(Box::new(task.clone())));
        let told = exchange::<_, Option<Order>>(&*self.control, "order", &order, Deadline::after(SOON));
        let result = told.and_then(|_| self.take_part(task, training.within.as_deref()));
        let Ended { ends, hosts, doubts } = result.map_err(|error| self.end(&error).to_string())?;
        let mut outputs = together(ends)?;
        for host in &hosts {
            let Some(clock) = host.clock else { continue };
            let ahead = (clock.offset_ms * 1e6) as i64;
            for rank in &host.ranks {
                outputs.get_mut(*rank).into_iter().for_each(|output| output.shift(ahead));
            }
        }
        Ok(Ran { outputs, hosts, doubts })
    }

    /// On all other ranks: does what rank 0 says, until the end, with this process's own copy of the text.
    ///
    /// # Errors
    /// Those of the control plane, and an end by a signal.
    pub fn serve(&self, text: &TextSource, signals: &Signals) -> Result<(), BenchError> {
        loop {
            let told = self.unless_signalled(signals, || {
                exchange::<_, Option<Order>>(&*self.control, "order", &None::<Order>, Deadline::after(BETWEEN))
            })?;
            match told.into_iter().next().flatten() {
                Some(Order::Run(task)) => {
                    signals.check()?;
                    let task = Task { source: text.source.clone(), ..*task };
                    self.take_part(task, None).map_err(|error| self.end(&error))?;
                    signals.check()?;
                }
                Some(Order::Quit) | None => break,
            }
        }
        self.leave();
        signals.check()?;
        Ok(())
    }

    /// Waits for other ranks, unless a signal asks this process to end: then the job ends on all of them.
    ///
    /// # Errors
    /// Those of `wait`, and an end by a signal.
    fn unless_signalled<T>(&self, signals: &Signals, wait: impl FnOnce() -> Result<T, Error>) -> Result<T, BenchError> {
        let waited = thread::scope(|scope| {
            let (waits, ended) = mpsc::channel::<()>();
            scope.spawn(move || {
                while ended.recv_timeout(GLANCE) == Err(RecvTimeoutError::Timeout) {
                    if let Err(interrupted) = signals.check() {
                        let reason = format!("signal {} has ended it", interrupted.signal);
                        return self.control.poison(&Error::Aborted { by: self.job.rank, reason });
                    }
                }
            });
            let waited = wait();
            drop(waits);
            waited
        });
        signals.check()?;
        Ok(waited?)
    }

    /// On rank 0: the end of all.
    pub fn quit(&self) {
        // Whoever is gone has ended already.
        let quit = exchange::<_, Option<Order>>(&*self.control, "order", &Some(Order::Quit), Deadline::after(SOON));
        if quit.is_ok() {
            self.leave();
        }
    }

    fn leave(&self) {
        let _ = self.control.leave(Deadline::after(SOON));
    }

    /// What ended the job: nobody waits for this rank after it.
    fn end(&self, error: &Error) -> Error {
        self.control.poison(error);
        self.failure().unwrap_or_else(|| error.clone())
    }

    /// Runs this process's rank of a run, with its folder `within`: how all ended, by rank, where they were, and doubts about other machines.
    fn take_part(&self, task: Task, within: Option<&Path>) -> Result<Ended, Error> {
        let name = format!("run-{}", self.runs.fetch_add(1, Ordering::Relaxed));
        // Before the address: its port is free until a process listens there.
        let before = self.clocks()?;
        let address = addresses(&self.job, std::slice::from_ref(&name), &*self.control, SOON)?;
        let Some(address) = address.into_iter().next() else {
            return Err(Error::Rendezvous(format!("rank 0 gave no address for {name}")));
        };
        let job = Job { address, id: format!("{}-{name}", self.job.id), ..self.job.clone() };
        let failed = |why: String| RankEnd::Failed { why: format!("rank {}: {why}", self.job.rank), is_echo: false };
        let prepared = self.prepare(task, job, within);
        // Nobody starts where one cannot: its process would wait for that one until its time is up.
        let ready = prepared.as_ref().map(|_| ()).map_err(Clone::clone);
        let ready =
            exchange::<_, Result<(), String>>(&*self.control, "ready for a run", &ready, Deadline::after(SOON))?;
        let missing = ready.iter().position(Result::is_err);
        let watch = self.looks_after_another_machine().then(|| Watch::start(self.beside()));
        let end = match (prepared, missing) {
            (Err(why), _) => failed(why),
            (Ok(_), Some(rank)) => RankEnd::Failed { why: format!("rank {rank} could not begin"), is_echo: true },
            (Ok((launch, folder)), None) => self.process(&launch, &folder).unwrap_or_else(|error| match error {
                RunError::Failed(why) => failed(why),
                RunError::TimedOut(why) => RankEnd::TimedOut(why),
                RunError::Interrupted(Interrupted { signal }) => RankEnd::Interrupted(signal),
            }),
        };
        let deadline = Deadline::after(self.timeout.saturating_add(GRACE));
        let ends = exchange_long(&*self.control, "figures of a run", &end, deadline, SOON)?;
        let after = self.clocks()?;
        let doubts: Vec<Flag> = watch.map(Watch::finish).unwrap_or_default();
        let doubts: Vec<Vec<Flag>> = exchange(&*self.control, "doubts about a run", &doubts, Deadline::after(SOON))?;
        let named = |(rank, flags): (usize, Vec<Flag>)| {
            let name = self.machine_of(rank).map_or("?", |machine| &machine.name).to_owned();
            flags.into_iter().map(move |flag| Flag { what: format!("{name}: {}", flag.what), ..flag })
        };
        let doubts = doubts.into_iter().enumerate().flat_map(named).collect();
        Ok(Ended { ends, hosts: self.hosts(&before, &after), doubts })
    }

    /// What starts this rank's process, and its folder.
    ///
    /// # Errors
    /// Why it cannot be started.
    fn prepare(&self, task: Task, job: Job, within: Option<&Path>) -> Result<(Launch, TempDir), String> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(FOLDER);
        let folder = within.map_or_else(|| builder.tempdir(), |within| builder.tempdir_in(within));
        let folder = folder.map_err(|error| format!("no temporary folder: {error}"))?;
        // That of the data: the one that the user has chosen, or else that of the route to rank 0.
        let address = bind_address(task.options.bind.as_ref(), &*self.control).map_err(|error| error.to_string())?;
        let network = Network {
            addresses: None,
            interface: interfaces::name_of(address.ip()).unwrap_or_else(|| "lo".into()),
            shared: self.machine_of(self.job.rank).is_some_and(|machine| machine.ranks.len() > 1),
        };
        let task = Task { network, results: folder.path().to_owned(), ..task };
        let program = rank::this_program()?;
        // The others would wait for a process that cannot be started.
        fs::metadata(&program).map_err(|error| format!("{}: {error}", program.display()))?;
        let launch = Launch {
            args: rank::arguments(&task, folder.path())?,
            output: Output::Captured,
            timeout: Some(self.timeout),
            in_place_of: Some(job),
            ..Launch::new(program, 1)
        };
        Ok((launch, folder))
    }

    /// The process of this rank, to its end.
    fn process(&self, launch: &Launch, folder: &TempDir) -> Result<RankEnd, RunError> {
        let ended = launch.run().map_err(|error| error.to_string())?;
        let is_echo = ended.code == EXIT_ECHO;
        match outcome::captured(ended) {
            Ok(_) => Ok(RankEnd::Done(Box::new(RankOutput::of(folder.path(), self.job.rank)?))),
            Err(RunError::Failed(why)) => Ok(RankEnd::Failed { why, is_echo }),
            Err(error) => Err(error),
        }
    }

    /// Readings of the other ranks' clocks; none where all are on one machine.
    fn clocks(&self) -> Result<Vec<ClockReading>, Error> {
        match self.machines.len() {
            1 => Ok(Vec::new()),
            _ => launched::compare(&*self.control, &sys::now, Deadline::after(SOON)),
        }
    }

    /// The machines, with their clocks, from readings of all ranks before and after a run: of the ranks of a machine, those of the one with the
    /// least error.
    fn hosts(&self, before: &[ClockReading], after: &[ClockReading]) -> Vec<Host> {
        let readings: BTreeMap<usize, _> = (1..).zip(before.iter().zip(after)).collect();
        let host = |machine: &Machine| {
            let of_ranks = machine.ranks.iter().filter_map(|rank| readings.get(rank));
            let clocks = of_ranks.map(|(before, after)| launched::between(before, after));
            let clock = clocks.min_by(|a, b| a.error_ms.total_cmp(&b.error_ms));
            let clock = clock.filter(|_| !machine.ranks.contains(&0));
            Host { name: machine.name.clone(), ranks: machine.ranks.clone(), clock }
        };
        self.machines.iter().map(host).collect()
    }

    fn machine_of(&self, rank: usize) -> Option<&Machine> {
        self.machines.iter().find(|machine| machine.ranks.contains(&rank))
    }

    /// Whether this is the first rank of a machine that is not rank 0's, which that one's process watches.
    fn looks_after_another_machine(&self) -> bool {
        self.machines.iter().skip(1).any(|machine| machine.ranks.first() == Some(&self.job.rank))
    }
}

/// What all ranks leave, or the one reason why there is nothing: of a rank that failed by itself, if there is one.
fn together(ends: Vec<RankEnd>) -> Result<Vec<RankOutput>, RunError> {
    let (mut outputs, mut failed, mut echo, mut late, mut interrupted) = (Vec::new(), None, None, None, None);
    for (rank, end) in ends.into_iter().enumerate() {
        match end {
            RankEnd::Done(output) => outputs.push(*output),
            RankEnd::Failed { why, is_echo: false } => failed = failed.or(Some(why)),
            RankEnd::Failed { why, is_echo: true } => echo = echo.or(Some(why)),
            RankEnd::TimedOut(why) => late = late.or(Some(why)),
            RankEnd::Interrupted(signal) if rank == 0 => return Err(RunError::Interrupted(Interrupted { signal })),
            RankEnd::Interrupted(signal) => {
                interrupted = interrupted.or(Some(format!("signal {signal} has ended rank {rank}")));
            }
        }
    }
    match (failed.or(interrupted), late, echo) {
        (Some(why), ..) | (None, None, Some(why)) => Err(RunError::Failed(why)),
        (None, Some(why), _) => Err(RunError::TimedOut(why)),
        (None, None, None) => Ok(outputs),
    }
}

#[cfg(test)]
mod tests {
    use comm_core::job::{Address, Secret};
    use gpt2::tokenizer::TokenizerKind;

    use super::*;
    use crate::record::Cell;
    use crate::training::cell::config;

    fn failed(why: &str, is_echo: bool) -> RankEnd {
        RankEnd::Failed { why: why.into(), is_echo }
    }

    /// Two ranks that have met, in threads that know of each other only what processes would.
    fn with_two<R: Send>(
        rank_0: impl FnOnce(LaunchedRanks) -> R + Send,
        rank_1: impl FnOnce(LaunchedRanks) -> Result<(), BenchError> + Send,
    ) -> (R, String) {
        let folder = tempfile::tempdir().unwrap();
        let secret = Secret::random().unwrap();
        let meet = |rank| {
            let address = Address::File(folder.path().join("address"));
            let job = Job::new(rank, 2, address, secret.clone()).unwrap();
            // Longer than the tests may take.
            LaunchedRanks::meet(job, &[], Duration::from_secs(600)).unwrap()
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| rank_1(meet(1)).map_err(|error| error.to_string()));
            let mine = rank_0(meet(0));
            (mine, other.join().unwrap().err().unwrap_or_default())
        })
    }

    fn text() -> TextSource {
        let description = "none that is read".into();
        TextSource { source: None, tokenizer: TokenizerKind::Bytes, vocabulary: 256, description }
    }

    #[test]
    fn a_signal_ends_a_rank_that_waits_for_rank_0_and_the_job() {
        let signals = Signals::default();
        let (failure, ended) = with_two(
            |ranks| {
                // It never says what to do next.
                signals.raise(15);
                let deadline = Deadline::after(Duration::from_secs(60));
                loop {
                    match ranks.failure() {
                        Some(error) => return error.to_string(),
                        None if deadline.has_passed() => return "none".into(),
                        None => thread::sleep(Duration::from_millis(5)),
                    }
                }
            },
            |ranks| ranks.serve(&text(), &signals),
        );
        assert!(ended.contains("interrupted by signal 15"), "{ended}");
        assert!(failure.contains("rank 1 aborted the job: signal 15"), "{failure}");
    }

    #[test]
    fn no_process_starts_where_that_of_one_rank_cannot() {
        let config = config(&Cell { ranks: 2, ..Cell::default() }, 256).unwrap();
        let mut training = Training::new(config, None, 2, 1, Duration::from_secs(600));
        training.within = Some("/nowhere at all".into());
        let (outcome, ended) = with_two(
            |ranks| {
                let outcome = ranks.run(&training).map(|_| ()).unwrap_err().to_string();
                ranks.quit();
                outcome
            },
            |ranks| ranks.serve(&text(), &Signals::default()),
        );
        assert!(outcome.contains("rank 0: no temporary folder"), "{outcome}");
        assert_eq!(ended, "");
    }

    #[test]
    fn the_rank_that_failed_by_itself_is_the_reason() {
        let late = || RankEnd::TimedOut("late".into());
        let of = |ends| together(ends).map(|_| ()).unwrap_err();
        assert_eq!(of(vec![failed("0: 1 was lost", true), failed("1: broke", false)]).to_string(), "1: broke");
        assert_eq!(of(vec![failed("0: 1 was lost", true), failed("2: 1 was lost", true)]).to_string(), "0: 1 was lost");
        assert!(matches!(of(vec![failed("0: 1 was lost", true), late()]), RunError::TimedOut(why) if why == "late"));
        assert!(of(vec![late(), RankEnd::Interrupted(15)]).to_string().contains("signal 15 has ended rank 1"));
        assert!(matches!(of(vec![RankEnd::Interrupted(2), late()]), RunError::Interrupted(_)));
        assert!(together(Vec::new()).unwrap().is_empty());
    }
}
