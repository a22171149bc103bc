//! The suite as a test program: one trial for every case, group size and kind of rank.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::thread;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use super::driver::{BoundedResult, CaseOutcome, Connector, RunOptions, run_threads, within};
use super::processes::{self, Connect, WORKER};
use super::transports::{self, TransportCase};
use super::{Case, Stop, cases};
use crate::communicator::Communicator;
use crate::control::Control;
use crate::error::{Error, Result};
use crate::local::{self, LocalRank};
use crate::transport::Transport;

type Group = dyn Fn(usize) -> Result<Vec<Connector>> + Send + Sync;

/// A backend under test.
pub struct Suite {
    name: String,
    group: Arc<Group>,
    /// What a process needs to connect; a backend without it runs as threads only.
    connect: Option<Arc<Connect>>,
    /// For the cases of a transport.
    transport: Option<Arc<transports::Connect>>,
    lanes: usize,
    /// As threads, and as processes.
    ranks: [Vec<usize>; 2],
    further_types: Types,
    /// Larger groups, and the cases that they run.
    crowds: Vec<(usize, Vec<String>)>,
    without: Vec<(String, String)>,
    options: RunOptions,
}

/// How many groups run the cases that repeat another with a further element type.
#[derive(Clone, Copy)]
enum Types {
    None,
    One,
    All,
}

/// Group sizes that are tried unless `--ranks=` says otherwise: as threads, and as processes, which take longer. Each size is tried in one way.
const RANKS: [&[usize]; 2] = [&[1, 3, 7], &[2, 4]];

/// Enough for operations on different lanes to be in flight at once, with one lane between the first and the last.
const LANES: usize = 3;

/// Runs the whole suite on one backend, as threads and as processes: the `main` of a test target with `harness = false`.
///
/// One group runs every element type, the others one type of each size and kind. Besides the arguments of `cargo test` it takes
/// `--ranks=2,7` for other group sizes than 1, 3 and 7 threads and 2 and 4 processes, all with every type.
pub fn main(
    name: &str,
    connect: impl Fn(Arc<dyn Control>, usize) -> Result<Arc<dyn Communicator>> + Send + Sync + 'static,
) -> ExitCode {
    main_of(vec![Suite::new(name, connect)])
}

/// As [`main`], for several backends in one program.
pub fn main_of(suites: Vec<Suite>) -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().collect();
    if let Some(place) = arguments.iter().position(|argument| argument == WORKER) {
        let suite = arguments.get(place + 1).and_then(|name| suites.iter().find(|suite| suite.name == *name));
        return match suite.and_then(|suite| suite.connect.clone().map(|connect| (suite, connect))) {
            Some((suite, connect)) => processes::worker(connect, suite.lanes, suite.options),
            None => ExitCode::FAILURE,
        };
    }
    let ranks = match take_ranks(&mut arguments) {
        Ok(ranks) => ranks,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let mut arguments = Arguments::from_iter(arguments);
    // Most of a group's time is spent waiting for deadlines.
    arguments.test_threads =
        arguments.test_threads.or(thread::available_parallelism().ok().map(|cores| 2 * cores.get()));
    let mut trials = Trials::default();
    for mut suite in suites {
        if let Some(ranks) = &ranks {
            suite.ranks = [ranks.clone(), ranks.clone()];
            suite.further_types = Types::All;
            suite.crowds.clear();
        }
        suite.add_trials(&arguments, &mut trials);
    }
    libtest_mimic::run(&arguments, trials.in_order()).exit_code()
}

impl Suite {
    /// A backend that connects over a control plane: in memory for threads, over TCP for processes.
    pub fn new(
        name: &str,
        connect: impl Fn(Arc<dyn Control>, usize) -> Result<Arc<dyn Communicator>> + Send + Sync + 'static,
    ) -> Self {
        let connect: Arc<Connect> = Arc::new(connect);
        let of_threads = connect.clone();
        let group = move |ranks: usize| -> Result<Vec<Connector>> {
            let ranks = local::group(ranks, LANES);
            let connector = |rank: local::LocalRank| -> Connector {
                let connect = of_threads.clone();
                let control = rank.control;
                Box::new(move || connect(control, LANES))
            };
            Ok(ranks.into_iter().map(connector).collect())
        };
        Suite { connect: Some(connect), ..Suite::of_threads(name, group) }
    }

    /// A backend whose ranks can only be threads of one process. `group` makes the connectors of a group of so many ranks, in
    /// rank order.
    pub fn of_threads(name: &str, group: impl Fn(usize) -> Result<Vec<Connector>> + Send + Sync + 'static) -> Self {
        Suite {
            name: name.into(),
            group: Arc::new(group),
            connect: None,
            transport: None,
            lanes: LANES,
            ranks: RANKS.map(<[usize]>::to_vec),
            further_types: Types::One,
            crowds: Vec::new(),
            without: Vec::new(),
            options: RunOptions::default(),
        }
    }

    /// Tries the transport below the communicators as well, between two threads: `connect` makes that of one rank, of its control plane, for
    /// so many lanes. Its cases are called `NAME/transport/…`.
    #[must_use]
    pub fn with_transport(
        mut self,
        connect: impl Fn(LocalRank, usize) -> Result<Arc<dyn Transport>> + Send + Sync + 'static,
    ) -> Self {
        self.transport = Some(Arc::new(connect));
        self
    }

    /// Ignores the cases whose name contains `part`, for the reason that the test's output gives.
    #[must_use]
    pub fn without(mut self, part: &str, reason: &str) -> Self {
        self.without.push((part.into(), reason.into()));
        self
    }

    /// Runs the cases of these names on a group of `ranks` processes as well.
    #[must_use]
    pub fn with_crowd(mut self, ranks: usize, cases: &[&str]) -> Self {
        self.crowds.push((ranks, cases.iter().map(|case| case.to_string()).collect()));
        self
    }

    /// The same on other group sizes, of threads and of processes.
    #[must_use]
    pub fn with_ranks(mut self, threads: &[usize], processes: &[usize]) -> Self {
        self.ranks = [threads.to_vec(), processes.to_vec()];
        self
    }

    /// Runs no case that repeats another with a further element type, unless `--ranks=` is given: for another form of a transport whose own
    /// suite runs them. A transport carries bytes and does not know their type.
    #[must_use]
    pub fn with_one_type(mut self) -> Self {
        self.further_types = Types::None;
        self
    }

    /// The same with other limits.
    #[must_use]
    pub fn with_options(mut self, options: RunOptions) -> Self {
        self.options = options;
        self
    }

    fn add_trials(self, arguments: &Arguments, trials: &mut Trials) {
        let suite = Arc::new(self);
        for (kind, ranks) in suite.groups() {
            suite.clone().add_group(kind, ranks, None, arguments, trials);
        }
        if let Some(connect) = &suite.transport {
            let cases = transports::CASES.iter().map(|case| suite.transport_trial(case, connect.clone()));
            trials.others.extend(cases);
        }
        for (ranks, cases) in &suite.crowds {
            suite.clone().add_group(Kind::Processes, *ranks, Some(cases.as_slice()), arguments, trials);
        }
    }

    fn groups(&self) -> Vec<(Kind, usize)> {
        let kinds: &[Kind] = if self.connect.is_some() { &[Kind::Threads, Kind::Processes] } else { &[Kind::Threads] };
        kinds.iter().zip(&self.ranks).flat_map(|(kind, ranks)| ranks.iter().map(|ranks| (*kind, *ranks))).collect()
    }

    /// The smallest group of threads whose shards are of unequal length, or what comes closest to it.
    fn group_of_every_type(&self) -> Option<(Kind, usize)> {
        self.groups().into_iter().min_by_key(|(kind, ranks)| (*kind, ranks.abs_diff(3)))
    }

    fn transport_trial(&self, case: &'static TransportCase, connect: Arc<transports::Connect>) -> Trial {
        let (lanes, limit) = (self.lanes, self.options.case_limit);
        let name = format!("{}/transport/{}", self.name, case.name);
        Trial::ignorable_test(name, move || match within(limit, case.name, move || case.run(&*connect, lanes)) {
            BoundedResult::Value(Ok(())) => Ok(Completion::Completed),
            BoundedResult::Value(Err(Stop::Skipped(why))) => Ok(Completion::ignored_with(why)),
            BoundedResult::Value(Err(Stop::Failed(why))) => Err(why.into()),
            BoundedResult::Panicked(why) => Err(format!("panicked: {why}").into()),
            BoundedResult::Hung => Err(format!("hung: still running after {:.0} s", limit.as_secs_f64()).into()),
        })
    }

    /// The trials of one group size share one run, which starts when the first of them is due and leaves out those that the
    /// command line filters out.
    fn add_group(
        self: Arc<Self>,
        kind: Kind,
        ranks: usize,
        only: Option<&[String]>,
        arguments: &Arguments,
        trials: &mut Trials,
    ) {
        let mut run = GroupRun { suite: self.clone(), kind, ranks, selected: Vec::new(), outcomes: OnceLock::new() };
        let mut names = Vec::new();
        let every_type = match self.further_types {
            _ if only.is_some() => true,
            Types::None => false,
            Types::One => self.group_of_every_type() == Some((kind, ranks)),
            Types::All => true,
        };
        let is_due = |case: &Case| {
            case.min_ranks <= ranks
                && only.is_none_or(|only| only.contains(&case.name))
                && (every_type || !case.repeats)
        };
        for (index, case) in cases().into_iter().enumerate().filter(|(_, case)| is_due(case)) {
            let name = format!("{}/{}/n={ranks}/{}", self.name, kind.name(), case.name);
            let left_out = self.without.iter().find(|(part, _)| case.name.contains(part));
            if let Some((_, reason)) = left_out {
                let reason = reason.clone();
                trials.others.push(Trial::ignorable_test(name, move || Ok(Completion::ignored_with(reason))));
            } else if !arguments.is_filtered_out(&Trial::test(&name, || Ok(())).with_ignored_flag(case.heavy)) {
                names.push((name, case.name.clone(), case.heavy));
                // An ignored trial is listed and not run.
                if !case.heavy || arguments.ignored || arguments.include_ignored {
                    run.selected.push((index, case));
                }
            }
        }
        let run = Arc::new(run);
        let mut group = names.into_iter().map(|(name, case, is_heavy)| {
            let run = run.clone();
            Trial::ignorable_test(name, move || run.outcome(&case)).with_ignored_flag(is_heavy)
        });
        trials.first.extend(group.next().map(|trial| (kind, ranks, trial)));
        trials.others.extend(group);
    }
}

/// The program's trials. The first of each group runs the whole group: those come first, so that groups run beside each other.
#[derive(Default)]
struct Trials {
    first: Vec<(Kind, usize, Trial)>,
    others: Vec<Trial>,
}

impl Trials {
    /// The groups that take longest first.
    fn in_order(mut self) -> Vec<Trial> {
        self.first.sort_by_key(|(kind, ranks, _)| Reverse((*kind, *ranks)));
        self.first.into_iter().map(|(_, _, trial)| trial).chain(self.others).collect()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Threads,
    Processes,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Threads => "threads",
            Kind::Processes => "processes",
        }
    }
}

struct GroupRun {
    suite: Arc<Suite>,
    kind: Kind,
    ranks: usize,
    /// With their places in the whole table.
    selected: Vec<(usize, Case)>,
    outcomes: OnceLock<HashMap<String, CaseOutcome>>,
}

impl GroupRun {
    fn outcome(&self, case: &str) -> Result<Completion, Failed> {
        match self.outcomes.get_or_init(|| self.run()).get(case) {
            Some(CaseOutcome::Passed) => Ok(Completion::Completed),
            Some(CaseOutcome::Skipped(why)) => Ok(Completion::ignored_with(why)),
            Some(CaseOutcome::Failed(why)) => Err(why.into()),
            None => Err("the case was not run".into()),
        }
    }

    fn run(&self) -> HashMap<String, CaseOutcome> {
        let (places, selected): (Vec<usize>, Vec<Case>) = self.selected.iter().cloned().unzip();
        let outcomes = match self.kind {
            Kind::Threads => run_threads(self.ranks, &*self.suite.group, &selected, self.suite.options),
            Kind::Processes => processes::run(&self.suite.name, self.ranks, &selected, &places, self.suite.options),
        };
        selected.into_iter().map(|case| case.name).zip(outcomes).collect()
    }
}

/// Takes `--ranks=…` out of the arguments.
fn take_ranks(arguments: &mut Vec<String>) -> Result<Option<Vec<usize>>> {
    let Some(place) = arguments.iter().position(|argument| argument.starts_with("--ranks=")) else {
        return Ok(None);
    };
    let argument = arguments.remove(place);
    let list = argument.trim_start_matches("--ranks=");
    let sizes = list.split(',').map(|size| size.parse().ok().filter(|size| (1..=64).contains(size)));
    let sizes: Option<Vec<usize>> = sizes.collect();
    sizes
        .map(Some)
        .ok_or_else(|| Error::invalid(format!("{argument}: expected group sizes from 1 to 64, like --ranks=2,7")))
}
