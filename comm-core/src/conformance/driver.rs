//! Runs cases on a group of ranks, and merges what the ranks say to one outcome a case.
//!
//! A driver tells its ranks what to do, one command at a time, and waits for the answer of each: so a rank that fails or hangs
//! is known by name, and the next case starts on a group that works. Ranks are threads here, processes in
//! `processes.rs`; the driver knows no difference.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel, sync_channel};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Case, Stop};
use crate::communicator::Communicator;
use crate::error::{Result, text_of};

/// How a case ended, over all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CaseOutcome {
    /// As it should, on every rank.
    Passed,
    /// The backend cannot do it.
    Skipped(String),
    /// What was wrong, by rank.
    Failed(String),
}

/// Limits of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// A case that runs longer on a rank is aborted and reported as hung. Longer than any deadline that a case sets (60 s).
    pub case_limit: Duration,
}

impl Default for RunOptions {
    fn default() -> Self {
        RunOptions { case_limit: Duration::from_secs(120) }
    }
}

/// Makes one rank's communicator, in that rank's thread.
pub type Connector = Box<dyn FnOnce() -> Result<Arc<dyn Communicator>> + Send>;

/// Runs the cases on `ranks` threads of this process. `group` makes the connectors of a new group, one a rank in rank order; it
/// is called for every group: one for the cases that share theirs, one for each case that needs its own, and one after each
/// failure.
///
/// The outcomes are those of `cases`, in order.
pub fn run_threads(
    ranks: usize,
    group: &(dyn Fn(usize) -> Result<Vec<Connector>> + Sync),
    cases: &[Case],
    options: RunOptions,
) -> Vec<CaseOutcome> {
    let shared: Arc<[Case]> = cases.into();
    let fleet = Fleet {
        ranks: (0..ranks)
            .map(|_| {
                let (commands, next) = channel::<Command<Connector>>();
                let (reply, replies) = channel();
                let cases = shared.clone();
                thread::spawn(move || {
                    let connect: fn(Connector) -> Result<Arc<dyn Communicator>> = |connector| connector();
                    serve(
                        &cases,
                        &connect,
                        &mut || next.recv().ok(),
                        &mut |answer| reply.send(answer).is_ok(),
                        options,
                    );
                });
                let tell = move |command| commands.send(command).map_err(|_| "its thread has ended".to_string());
                RankHandle { tell: Box::new(tell), replies }
            })
            .collect(),
        options,
    };
    fleet.drive(cases, &mut || group(ranks).map_err(|error| error.to_string()))
}

/// What a rank is told to do. `J` is what it needs to connect.
#[derive(Serialize, Deserialize)]
pub(super) enum Command<J> {
    /// Join a new group.
    Connect(J),
    /// Run this case, by its place in the table.
    Run(usize),
    /// End the communicator in an orderly way.
    Finish,
    /// Drop the communicator.
    Drop,
}

/// The answer to a [`Command`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    /// To all but `Run`.
    Done(Result<(), String>),
    /// To `Run`: how the case ended on this rank, and what it returned there if it has passed.
    Ran(CaseOutcome, String),
}

/// The driver's end of all ranks.
pub(super) struct Fleet<J> {
    pub(super) ranks: Vec<RankHandle<J>>,
    pub(super) options: RunOptions,
}

/// The driver's end of one rank.
pub(super) struct RankHandle<J> {
    pub(super) tell: Box<dyn FnMut(Command<J>) -> Result<(), String>>,
    pub(super) replies: Receiver<Reply>,
}

/// What remains of a case's time for the answer after the case was given up.
const ANSWER: Duration = Duration::from_secs(10);

impl<J> Fleet<J> {
    /// Runs `cases`, those that share a group first. `jobs` makes what the ranks of a new group need to connect.
    pub(super) fn drive(
        mut self,
        cases: &[Case],
        jobs: &mut dyn FnMut() -> Result<Vec<J>, String>,
    ) -> Vec<CaseOutcome> {
        let mut outcomes = BTreeMap::new();
        let mut broken = None;
        let mut last_shared = None;
        for (index, case) in cases.iter().enumerate().filter(|(_, case)| !case.fresh) {
            if let Some(why) = &broken {
                outcomes.insert(index, CaseOutcome::Failed(format!("not run: {why}")));
                continue;
            }
            if last_shared.is_none()
                && let Err(why) = self.connect(jobs)
            {
                outcomes.insert(index, CaseOutcome::Failed(why.clone()));
                broken = Some(why);
                continue;
            }
            let outcome = self.run(index, case);
            last_shared = Some(index);
            if matches!(outcome, CaseOutcome::Failed(_)) {
                // The ranks may have left the case at different places. The next case gets a new group.
                let _ = self.all(|_| Command::Drop);
                last_shared = None;
            }
            outcomes.insert(index, outcome);
        }
        if let Some(last) = last_shared {
            if let Err(why) = self.all(|_| Command::Finish) {
                let why = format!("the group could not finish after its last case, this one: {why}");
                outcomes.insert(last, CaseOutcome::Failed(why));
            }
            let _ = self.all(|_| Command::Drop);
        }
        for (index, case) in cases.iter().enumerate().filter(|(_, case)| case.fresh) {
            let outcome = match &broken {
                Some(why) => CaseOutcome::Failed(format!("not run: {why}")),
                None => match self.connect(jobs) {
                    Ok(()) => self.run(index, case),
                    Err(why) => {
                        broken = Some(why.clone());
                        CaseOutcome::Failed(why)
                    }
                },
            };
            let _ = self.all(|_| Command::Drop);
            outcomes.insert(index, outcome);
        }
        outcomes.into_values().collect()
    }

    fn connect(&mut self, jobs: &mut dyn FnMut() -> Result<Vec<J>, String>) -> Result<(), String> {
        let mut jobs = jobs().map_err(|why| format!("no new group: {why}"))?.into_iter().map(Some).collect::<Vec<_>>();
        if jobs.len() != self.ranks.len() {
            return Err(format!("a group of {} ranks instead of {}", jobs.len(), self.ranks.len()));
        }
        let mut missing = Vec::new();
        for (rank, (handle, job)) in self.ranks.iter_mut().zip(&mut jobs).enumerate() {
            if let Some(job) = job.take()
                && let Err(why) = (handle.tell)(Command::Connect(job))
            {
                missing.push(format!("rank {rank}: {why}"));
            }
        }
        if !missing.is_empty() {
            return Err(missing.join("; "));
        }
        self.answers().map_err(|why| format!("the ranks could not connect: {why}"))
    }

    /// Tells all ranks the same and waits for all of them.
    fn all(&mut self, command: impl Fn(usize) -> Command<J>) -> Result<(), String> {
        for (rank, handle) in self.ranks.iter_mut().enumerate() {
            // A rank that is gone says so by its missing answer.
            let _ = (handle.tell)(command(rank));
        }
        self.answers()
    }

    fn answers(&mut self) -> Result<(), String> {
        let wrong: Vec<String> = (0..self.ranks.len())
            .filter_map(|rank| match self.answer(rank, self.options.case_limit) {
                Ok(Reply::Done(Ok(()))) => None,
                Ok(Reply::Done(Err(why))) => Some(format!("rank {rank}: {why}")),
                Ok(Reply::Ran(outcome, _)) => Some(format!("rank {rank} answered {outcome:?} to another question")),
                Err(why) => Some(format!("rank {rank}: {why}")),
            })
            .collect();
        if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
    }

    fn answer(&mut self, rank: usize, limit: Duration) -> Result<Reply, String> {
        let timeout = limit + ANSWER;
        self.ranks[rank].replies.recv_timeout(timeout).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("no answer for {:.0} s", timeout.as_secs_f64()),
            RecvTimeoutError::Disconnected => "it has ended".to_string(),
        })
    }

    fn run(&mut self, index: usize, case: &Case) -> CaseOutcome {
        for handle in &mut self.ranks {
            let _ = (handle.tell)(Command::Run(index));
        }
        let limit = case.limit(self.options.case_limit);
        let outcomes = (0..self.ranks.len()).map(|rank| match self.answer(rank, limit) {
            Ok(Reply::Ran(outcome, said)) => (outcome, said),
            Ok(Reply::Done(result)) => wrong(format!("answered {result:?} to another question")),
            Err(why) => wrong(format!("{why}, in case {}", case.name)),
        });
        let (outcomes, said): (Vec<CaseOutcome>, Vec<String>) = outcomes.unzip();
        match merge(outcomes) {
            CaseOutcome::Passed => compared(&said),
            other => other,
        }
    }
}

fn wrong(why: String) -> (CaseOutcome, String) {
    (CaseOutcome::Failed(why), String::new())
}

/// Whether all ranks have said the same.
fn compared(said: &[String]) -> CaseOutcome {
    if said.iter().all(|text| Some(text) == said.first()) {
        return CaseOutcome::Passed;
    }
    let lines: Vec<String> = said.iter().enumerate().map(|(rank, text)| format!("rank {rank}: {text}")).collect();
    CaseOutcome::Failed(format!("the ranks differ:\n{}", lines.join("\n")))
}

/// One outcome of those of all ranks. Ranks that failed only because another gave up come last.
fn merge(outcomes: Vec<CaseOutcome>) -> CaseOutcome {
    let mut failures: Vec<(bool, String)> = Vec::new();
    let mut skipped = None;
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            CaseOutcome::Passed => {}
            CaseOutcome::Skipped(why) => skipped = Some(why),
            CaseOutcome::Failed(why) => failures.push((why.contains(GAVE_UP), format!("rank {rank}: {why}"))),
        }
    }
    failures.sort_by_key(|(is_echo, _)| *is_echo);
    match (failures.is_empty(), skipped) {
        (true, None) => CaseOutcome::Passed,
        (true, Some(why)) => CaseOutcome::Skipped(why),
        (false, _) => {
            let lines: Vec<String> = failures.into_iter().map(|(_, line)| line).collect();
            CaseOutcome::Failed(lines.join("\n"))
        }
    }
}

/// Marks the abort of a rank whose case failed.
const GAVE_UP: &str = "conformance case given up";

/// A rank's side: obeys until there are no more commands, or nobody takes its answers.
pub(super) fn serve<J: Send + 'static>(
    cases: &[Case],
    connect: &(impl Fn(J) -> Result<Arc<dyn Communicator>> + Clone + Send + 'static),
    next: &mut dyn FnMut() -> Option<Command<J>>,
    reply: &mut dyn FnMut(Reply) -> bool,
    options: RunOptions,
) {
    let mut communicator: Option<Arc<dyn Communicator>> = None;
    while let Some(command) = next() {
        let answer = match command {
            Command::Connect(job) => {
                let connect = connect.clone();
                let connected = match within(options.case_limit, "connect", move || connect(job)) {
                    BoundedResult::Value(result) => result.map_err(|error| error.to_string()),
                    BoundedResult::Panicked(why) => Err(format!("connecting panicked: {why}")),
                    BoundedResult::Hung => {
                        Err(format!("connecting hung for {:.0} s", options.case_limit.as_secs_f64()))
                    }
                };
                Reply::Done(connected.map(|connected| communicator = Some(connected)))
            }
            Command::Run(index) => {
                let (outcome, said) = match (cases.get(index), &communicator) {
                    (Some(case), Some(communicator)) => run_case(case, communicator, options),
                    (None, _) => wrong(format!("no case has the number {index}")),
                    (_, None) => wrong("not connected".into()),
                };
                Reply::Ran(outcome, said)
            }
            Command::Finish => Reply::Done(match communicator.clone() {
                None => Ok(()),
                Some(ending) => {
                    let timeout = options.case_limit / 2;
                    match within(options.case_limit, "finish", move || ending.finish(timeout)) {
                        BoundedResult::Value(result) => result.map_err(|error| error.to_string()),
                        BoundedResult::Panicked(why) => Err(format!("finish panicked: {why}")),
                        BoundedResult::Hung => Err("finish hung".into()),
                    }
                }
            }),
            Command::Drop => {
                let dropped = communicator.take();
                Reply::Done(match within(options.case_limit, "drop", move || drop(dropped)) {
                    BoundedResult::Value(()) => Ok(()),
                    BoundedResult::Panicked(why) => Err(format!("dropping the communicator panicked: {why}")),
                    BoundedResult::Hung => Err("dropping the communicator hung".into()),
                })
            }
        };
        if !reply(answer) {
            return;
        }
    }
}

fn run_case(case: &Case, communicator: &Arc<dyn Communicator>, options: RunOptions) -> (CaseOutcome, String) {
    let limit = case.limit(options.case_limit);
    let outcome = {
        let (case, communicator) = (case.clone(), communicator.clone());
        within(limit, &case.name.clone(), move || case.run(&communicator))
    };
    let why = match outcome {
        BoundedResult::Value(Ok(said)) => return (CaseOutcome::Passed, said),
        BoundedResult::Value(Err(Stop::Skipped(why))) => return (CaseOutcome::Skipped(why), String::new()),
        BoundedResult::Value(Err(Stop::Failed(why))) => why,
        BoundedResult::Panicked(why) => format!("panicked: {why}"),
        BoundedResult::Hung => format!("hung: still running after {:.0} s", limit.as_secs_f64()),
    };
    // The other ranks may be waiting for this one.
    communicator.abort(&format!("{GAVE_UP}: {} failed on rank {}", case.name, communicator.rank()));
    wrong(why)
}

pub(super) enum BoundedResult<R> {
    Value(R),
    Panicked(String),
    Hung,
}

/// Runs `work` in a thread of its own, which is left behind when it takes longer than `limit`.
pub(super) fn within<R: Send + 'static>(
    limit: Duration,
    name: &str,
    work: impl FnOnce() -> R + Send + 'static,
) -> BoundedResult<R> {
    let (sender, receiver) = sync_channel(1);
    let spawned = thread::Builder::new().name(name.into()).spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(work));
        let _ = sender.send(result);
    });
    if let Err(error) = spawned {
        return BoundedResult::Panicked(format!("no thread for it: {error}"));
    }
    match receiver.recv_timeout(limit) {
        Ok(Ok(value)) => BoundedResult::Value(value),
        Ok(Err(panic)) => BoundedResult::Panicked(text_of(&*panic)),
        Err(RecvTimeoutError::Timeout) => BoundedResult::Hung,
        Err(RecvTimeoutError::Disconnected) => BoundedResult::Panicked("the thread ended without a result".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::local;
    use crate::mesh::{Mesh, MeshOptions};

    #[test]
    fn the_rank_that_failed_first_comes_first() {
        let echo = CaseOutcome::Failed(format!("rank 1 aborted the job: {GAVE_UP}: x failed on rank 1"));
        let cause = CaseOutcome::Failed("element 17 is 3, expected 6".into());
        let merged = merge(vec![echo, cause, CaseOutcome::Passed]);
        let CaseOutcome::Failed(text) = merged else { panic!("a failure was lost") };
        assert!(text.starts_with("rank 1: element 17 is 3, expected 6\nrank 0: "), "{text}");
    }

    #[test]
    fn ranks_that_do_not_say_the_same_fail_the_case() {
        assert_eq!(compared(&["a".into(), "a".into()]), CaseOutcome::Passed);
        assert_eq!(
            compared(&["a".into(), "b".into()]),
            CaseOutcome::Failed("the ranks differ:\nrank 0: a\nrank 1: b".into())
        );
        let case = Case::agreed("says its rank", 1, |communicator| Ok(communicator.rank().to_string()));
        let outcomes = run_threads(2, &group, &[case], RunOptions::default());
        assert_eq!(outcomes, [CaseOutcome::Failed("the ranks differ:\nrank 0: 0\nrank 1: 1".into())]);
    }

    #[test]
    fn skipped_on_one_rank_is_skipped() {
        let skipped = CaseOutcome::Skipped("no lanes".into());
        assert_eq!(merge(vec![CaseOutcome::Passed, skipped.clone()]), skipped);
    }

    fn group(ranks: usize) -> Result<Vec<Connector>> {
        let connector = |rank: local::LocalRank| -> Connector {
            Box::new(|| Ok(Arc::new(Mesh::new(rank.transport, rank.control, MeshOptions::default())?) as _))
        };
        Ok(local::group(ranks, 1).into_iter().map(connector).collect())
    }

    #[test]
    fn a_bad_case_is_named_and_the_next_one_has_a_working_group() {
        let cases = [
            Case::shared("good", 1, super::super::barrier),
            Case::shared("one rank fails, the others wait", 1, |communicator| {
                if communicator.rank() == 1 {
                    return Err(Stop::Failed("element 17 is 3, expected 6".into()));
                }
                super::super::barrier(communicator)
            }),
            Case::shared("good after a failure", 1, super::super::barrier),
            Case::shared("one rank panics", 1, |communicator| {
                assert!(communicator.rank() != 2, "on purpose");
                super::super::barrier(communicator)
            }),
            Case::shared("hangs", 1, |communicator| {
                if communicator.rank() == 0 {
                    thread::sleep(Duration::from_secs(4));
                }
                Ok(())
            }),
            Case::shared("skipped", 1, |_| Err(Stop::Skipped("no such thing here".into()))),
            Case::fresh("alone", 1, |communicator| {
                communicator.abort("the end");
                Ok(())
            }),
            Case::shared("good after all", 1, super::super::barrier),
        ];
        let options = RunOptions { case_limit: Duration::from_secs(1) };
        let outcomes = run_threads(3, &group, &cases, options);
        let failure = |index: usize| match &outcomes[index] {
            CaseOutcome::Failed(why) => why.as_str(),
            other => panic!("case {index}: {other:?}"),
        };
        assert!(failure(1).starts_with("rank 1: element 17 is 3, expected 6\n"), "{}", failure(1));
        assert!(failure(3).starts_with("rank 2: panicked: on purpose\n"), "{}", failure(3));
        assert!(failure(4).starts_with("rank 0: hung"), "{}", failure(4));
        assert_eq!(outcomes[5], CaseOutcome::Skipped("no such thing here".into()));
        for index in [0, 2, 6, 7] {
            assert_eq!(outcomes[index], CaseOutcome::Passed, "case {index}");
        }
    }

    #[test]
    fn ranks_that_cannot_connect_fail_every_case() {
        let cases = [Case::shared("a", 1, super::super::barrier), Case::fresh("b", 1, super::super::barrier)];
        let refuse = |ranks: usize| -> Result<Vec<Connector>> {
            let connector = |_| -> Connector { Box::new(|| Err(Error::Rendezvous("nobody came".into()))) };
            Ok((0..ranks).map(connector).collect())
        };
        for outcome in run_threads(2, &refuse, &cases, RunOptions::default()) {
            assert!(matches!(&outcome, CaseOutcome::Failed(why) if why.contains("nobody came")), "{outcome:?}");
        }
    }

    #[test]
    fn work_that_hangs_or_panics_is_told_apart() {
        let hung = within(Duration::from_millis(20), "sleeper", || thread::sleep(Duration::from_secs(2)));
        assert!(matches!(hung, BoundedResult::Hung));
        let panicked = within(Duration::from_secs(5), "thrower", || panic!("on purpose"));
        assert!(matches!(panicked, BoundedResult::<()>::Panicked(why) if why == "on purpose"));
    }
}
