//! `bench sweep`: the cells of a plan, interleaved and repeated, each run a line of results with everything that was measured.

mod launched;
mod networks;
mod order;
mod tokens;
mod undecided;

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use comm_core::job;
use gpt2::cli::say;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::folder::{read_small, results_folder};
use rig::link::{TestNetwork, gain_namespaces};
use rig::outcome;
use rig::progress::{ProgressBar, bar};
use rig::record::{Axis, Cell, Record, Status, Trainer};
use rig::results::{self, HEADER, PLAN, Results, TRACES};
use rig::signal::Signals;
use rig::stats::Metric;
use rig::training::{CellRun, FOLDER, LaunchedRanks, TextSource};
use serde::{Deserialize, Serialize};

use crate::budget::budget;
use crate::links::keep_possible;
use crate::plan::{Draft, Plan, READY};
use crate::prices::price_list;
use crate::pytorch::Torch;
use networks::TestNetworks;

/// Runs the cells of a plan, and writes a report.
#[derive(Debug, clap::Args)]
pub(crate) struct SweepArgs {
    /// The plan: a TOML file, or the name of a plan that comes with this program (see --list).
    plan: Option<PathBuf>,
    /// List the plans that come with this program, and what each is for.
    #[arg(long)]
    list: bool,
    /// Print the cells of the plan, and run none.
    #[arg(long)]
    dry_run: bool,
    /// Folder for results.jsonl, traces and the report. [default: a new folder under bench-results/]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Continue the sweep of the same plan that was interrupted in --out.
    #[arg(long, requires = "out")]
    resume: bool,
    /// With --resume, also run failed cells again.
    #[arg(long, requires = "resume")]
    retry: bool,
    /// How often each cell runs, instead of the plan's number.
    #[arg(long)]
    rounds: Option<u32>,
    /// Time for the sweep, such as 30m. The first round always runs to its end; the plan's other rounds may exceed the budget by half. Time that is
    /// left is used for further rounds of cells that are not told apart yet. [default: the plan's rounds, however long they take]
    #[arg(long, conflicts_with = "rounds", value_parser = budget)]
    budget: Option<Duration>,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// A sweep that may have been begun before.
pub(crate) struct Sweep {
    pub(crate) plan: Plan,
    pub(crate) text: TextSource,
    pub(crate) out: PathBuf,
    pub(crate) environment: Environment,
    pub(crate) signals: Signals,
    /// PyTorch, for cells that it trains, or why there is none.
    pub(crate) torch: Result<Torch, String>,
    /// Until when cells that are not told apart get further rounds, beyond those of the plan. From the second round on it ends those, too.
    pub(crate) budget: Option<Duration>,
    /// The ranks that run the cells, where a launcher has started them.
    pub(crate) launched: Option<LaunchedRanks>,
}

/// Most rounds of a cell.
const MOST_ROUNDS: u32 = 30;

/// Name of the file that keeps other sweeps out of a folder.
const LOCK: &str = "lock";

pub(crate) fn run(args: &SweepArgs) -> Result<ExitCode, BenchError> {
    let job = job::Job::from_env()?.filter(|job| job.world_size > 1);
    let speaks = job.as_ref().is_none_or(|job| job.rank == 0);
    if (args.list || args.dry_run) && !speaks {
        return Ok(ExitCode::SUCCESS);
    }
    if args.list {
        for (name, text) in READY {
            say(format_args!("{name:<10} {}", Plan::parse(text)?.about));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let path = args.plan.as_deref().ok_or("give a plan; --list shows those that come with this program")?;
    let (mut plan, text) = Plan::load(path)?;
    match args.rounds {
        Some(0) => return Err("--rounds must be at least 1".into()),
        Some(rounds) => plan.rounds = rounds,
        None => {}
    }
    if args.dry_run {
        print_cells(&plan);
        return Ok(ExitCode::SUCCESS);
    }
    if plan.tokens && args.data.is_some() {
        return Err(
            "--data: this plan trains on random tokens (tokens = true); leave out --data, or change the plan".into()
        );
    }
    debug::refuse(args.allow_debug, debug::NO_TIMINGS)?;
    let launched = job.map(|job| launched::meet(job, &plan, &text)).transpose()?;
    if launched.as_ref().is_some_and(|ranks| ranks.machines().len() > 1) {
        plan.over_network();
    }
    match launched {
        Some(ranks) if !speaks => launched::serve(&ranks, &plan, args.data.clone()),
        launched => lead(args, plan, text, launched),
    }
}

/// The process that measures, alone or as rank 0 of a launcher's.
fn lead(args: &SweepArgs, plan: Plan, text: String, launched: Option<LaunchedRanks>) -> Result<ExitCode, BenchError> {
    let prepared = prepare(args, plan, text, launched.as_ref());
    // The others wait for it.
    let mine = launched::told(prepared.as_ref().map(|(sweep, _)| &sweep.text));
    let agreed = launched.as_ref().map_or(Ok(Ok(())), |ranks| launched::agree(ranks, &mine))?;
    let (sweep, _alone) = prepared?;
    agreed?;
    let sweep = Sweep { launched, ..sweep };
    sweep.introduce();
    let earlier = if args.resume { sweep.earlier(args.retry) } else { Ok(BTreeSet::new()) };
    let outcome = earlier.and_then(|earlier| sweep.run(&earlier));
    let told = sweep.tell();
    if let Some(ranks) = &sweep.launched {
        ranks.quit();
    }
    match (outcome, told) {
        (Ok(code), told) => told.map(|()| code),
        // What ended the sweep says more than what then became of its report.
        (Err(error), told) => {
            if let Err(why) = told {
                eprintln!("warning: the report could not be written: {why}");
            }
            Err(error)
        }
    }
}

/// A sweep that may begin or go on in its folder, which no other one writes to while the file is held.
fn prepare(
    args: &SweepArgs,
    mut plan: Plan,
    text: String,
    launched: Option<&LaunchedRanks>,
) -> Result<(Sweep, File), BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    if launched.is_none() && plan.cells.iter().any(networks::needs_namespaces) {
        gain_namespaces();
        keep_possible(
            &mut plan.cells.iter().map(|cell| cell.link.clone()).collect::<BTreeSet<_>>().into_iter().collect(),
        );
    }
    let signals = Signals::catch()?;
    let out = results_folder(args.out.clone(), &plan.name)?;
    let alone = alone_in(&out)?;
    let source = source(&plan, args.data.clone(), &out)?;
    let environment = Environment::read();
    let network = launched.is_some_and(|ranks| ranks.machines().len() > 1);
    let placed = launched.map(|ranks| ranks.machines().iter().map(|machine| machine.ranks.clone()).collect());
    let header = Header { plan: text, rounds: plan.rounds, text: source.description.clone(), network, placed };
    let torch = if plan.cells.iter().any(|cell| cell.program.is_pytorch()) {
        outcome::settled(Torch::find(Path::new("python3")))?
    } else {
        Err("no cell was planned for it".into())
    };
    if args.resume {
        let earlier = header.of(&out)?;
        plan.rounds = args.rounds.unwrap_or(earlier.rounds);
    } else {
        begin(&out, ", or continue it with --resume")?;
    }
    Header { rounds: plan.rounds, ..header }.write(&out)?;
    let budget = args.budget;
    Ok((Sweep { plan, text: source, out, environment, signals, torch, budget, launched: None }, alone))
}

/// The text that a plan asks for: that of `data`, or random tokens, in the folder of results.
pub(crate) fn source(plan: &Plan, data: Option<PathBuf>, out: &Path) -> Result<TextSource, BenchError> {
    match plan.cells.first() {
        Some(cell) if plan.tokens => Ok(tokens::write(&out.join(tokens::FILE), cell)?),
        _ => TextSource::bytes(data),
    }
}

/// What a command measures, and where.
pub(crate) struct Job<'a> {
    pub(crate) draft: &'a Draft,
    /// Where the results lie, or none, if nobody is to keep them.
    pub(crate) out: Option<&'a Path>,
    pub(crate) text: TextSource,
    pub(crate) signals: Signals,
    pub(crate) torch: Result<Torch, String>,
}

impl Job<'_> {
    /// Runs the plan; the records in the order of its cells, round by round.
    ///
    /// # Errors
    /// Files that cannot be written, and an end by a signal.
    pub(crate) fn records(self) -> Result<Vec<Record>, BenchError> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let out = self.out.unwrap_or(folder.path()).to_owned();
        let plan = self.draft.plan()?;
        let _alone = alone_in(&out)?;
        begin(&out, "")?;
        let text = self.text.description.clone();
        Header { plan: self.draft.text()?, rounds: plan.rounds, text, network: false, placed: None }.write(&out)?;
        let Job { text, signals, torch, .. } = self;
        let environment = Environment::read();
        let sweep = Sweep { plan, text, out, environment, signals, torch, budget: None, launched: None };
        sweep.run(&BTreeSet::new())?;
        let mut records = results::read_records(&sweep.out)?.records;
        let place = |record: &Record| sweep.plan.cells.iter().position(|cell| *cell == record.cell);
        records.sort_by_key(|record| (place(record), record.round));
        Ok(records)
    }
}

fn print_cells(plan: &Plan) {
    let axes = Cell::varied(plan.cells.iter());
    say(format_args!("{}: {} cells × {} rounds", plan.name, plan.cells.len(), plan.rounds));
    for cell in &plan.cells {
        say(format_args!("  {}", cell.label(&axes)));
    }
}

/// Sees that a folder is ready for a new sweep; `instead` is what else there is to do.
fn begin(out: &Path, instead: &str) -> Result<(), BenchError> {
    // Rows of an earlier run are hours of somebody's time.
    if let Some(old) = [results::FILE, PLAN, HEADER].map(|name| out.join(name)).into_iter().find(|path| path.exists()) {
        return Err(format!("{} holds an earlier run; give another folder with --out{instead}", old.display()).into());
    }
    Ok(())
}

/// Keeps other sweeps out of a folder, as long as it is held.
fn alone_in(out: &Path) -> Result<File, BenchError> {
    let path = out.join(LOCK);
    let told = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let file = OpenOptions::new().create(true).append(true).open(&path).map_err(|error| told(&error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(format!(
            "another sweep is writing to {}; wait until it has ended, or give another folder with --out",
            out.display()
        )
        .into()),
        Err(TryLockError::Error(error)) => Err(told(&error).into()),
    }
}

/// What all parts of a sweep have in common, however often it was stopped.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Header {
    #[serde(skip)]
    plan: String,
    rounds: u32,
    /// The text, with its hash.
    text: String,
    /// Whether the ranks are on several machines.
    #[serde(default)]
    network: bool,
    /// The ranks of each machine, where a launcher has started them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    placed: Option<Vec<Vec<usize>>>,
}

impl Header {
    /// That of the sweep in a folder, which has to be one of the same plan over the same text.
    fn of(&self, out: &Path) -> Result<Header, BenchError> {
        let read = |name: &str| {
            let path = out.join(name);
            let hint = "--resume needs the folder of a sweep that was interrupted";
            read_small(&path).map_err(|why| format!("{why}; {hint}"))
        };
        let other = |name: &str, what: &str| {
            let path = out.join(name);
            format!(
                "{} has another {what}; give those of that sweep to continue it, or begin a new sweep in another folder",
                path.display()
            )
        };
        if read(PLAN)? != self.plan {
            return Err(other(PLAN, "plan than the one given").into());
        }
        let header: Header = serde_json::from_str(&read(HEADER)?)
            .map_err(|error| format!("{}: {error}; begin a new sweep in another folder", out.join(HEADER).display()))?;
        if header.network != self.network {
            return Err(other(HEADER, "network: one of the two is on several machines").into());
        }
        if header.placed != self.placed {
            let of = |placed: &Option<Vec<Vec<usize>>>| match placed {
                Some(machines) => format!("ranks {machines:?}, one list a machine"),
                None => "no launcher".into(),
            };
            let what = format!("placement of ranks ({}, now {})", of(&header.placed), of(&self.placed));
            return Err(other(HEADER, &what).into());
        }
        if header.text != self.text {
            return Err(other(HEADER, &format!("text ({}), see --data", header.text)).into());
        }
        Ok(header)
    }

    fn write(&self, out: &Path) -> Result<(), BenchError> {
        for (name, text) in [(PLAN, self.plan.clone()), (HEADER, serde_json::to_string(self)?)] {
            fs::write(out.join(name), text).map_err(|error| format!("{}: {error}", out.join(name).display()))?;
        }
        Ok(())
    }
}

impl Sweep {
    pub(crate) fn introduce(&self) {
        let Plan { name, about, rounds, cells, .. } = &self.plan;
        say(format_args!("plan: {name}, {} cells × {rounds} rounds: {about}", cells.len()));
        say(format_args!("text: {}", self.text.description));
        say(format_args!("machine: {}", self.environment.one_line()));
        if let Some(ranks) = &self.launched {
            say(format_args!("ranks: {}", ranks.describe()));
            launched::tell_left_out(cells, ranks).into_iter().for_each(say);
        }
        say(format_args!("results: {}", self.out.display()));
    }

    /// What an earlier part of this sweep has done: cells by place in the plan, with their round.
    fn earlier(&self, retry: bool) -> Result<BTreeSet<(Cell, u32)>, BenchError> {
        self.remove_leftovers();
        let path = self.out.join(results::FILE);
        if !path.exists() {
            return Ok(BTreeSet::new());
        }
        let Results { records, warnings, whole_bytes, .. } = results::read_records(&self.out)?;
        warnings.iter().for_each(|warning| say(format_args!("{warning}")));
        if records.last().is_some_and(|last| last.environment != self.environment) {
            say(format_args!(
                "WARNING: the machine or this program has changed since the earlier part of this sweep; rounds from before and after \
                 cannot be compared"
            ));
        }
        if let Some(ranks) = &self.launched
            && let Some(moved) = launched::tell_moved(&records, ranks.machines())
        {
            say(format_args!("{moved}"));
        }
        // The sweep may have been stopped while it wrote its last line.
        let file = OpenOptions::new().write(true).open(&path);
        file.and_then(|file| file.set_len(whole_bytes)).map_err(|error| format!("{}: {error}", path.display()))?;
        // Other ranks may run what these could not.
        let is_left_out = |record: &Record| self.launched.is_some() && matches!(record.status, Status::NotAvailable(_));
        let counts = |record: &&Record| if retry { record.status == Status::Ok } else { !is_left_out(record) };
        Ok(records.iter().filter(counts).map(|record| (record.cell.clone(), record.round)).collect())
    }

    /// Takes away what runs of a killed sweep have left.
    fn remove_leftovers(&self) {
        let entries = fs::read_dir(&self.out).into_iter().flatten().flatten();
        let left = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(FOLDER));
        // What cannot go does no harm.
        left.for_each(|entry| drop(fs::remove_dir_all(entry.path())));
    }

    /// Runs what has not been run; false in the exit code if a cell that could have run did not, or sent what no formula says.
    pub(crate) fn run(&self, earlier: &BTreeSet<(Cell, u32)>) -> Result<ExitCode, BenchError> {
        let Plan { name, rounds, watched, cells, .. } = &self.plan;
        if *watched {
            let traces = self.out.join(TRACES);
            fs::create_dir_all(&traces).map_err(|error| format!("{}: {error}", traces.display()))?;
        }
        let bar = bar(cells.len() * *rounds as usize);
        let mut course = Course {
            sweep: self,
            file: Appending::open(&self.out.join(results::FILE))?,
            networks: TestNetworks::new(self.plan.probe),
            bare: TestNetwork::loopback(),
            axes: Cell::varied(cells.iter()),
            budget: self.budget.map(|budget| (Instant::now(), budget)),
            bar,
            position: 0,
            sound: true,
        };
        let seed = order::seed(name);
        for round in 1..=*rounds {
            course.round(round, &order::order(cells, seed, round), earlier)?;
        }
        for round in rounds + 1..=MOST_ROUNDS {
            if !course.has_time(round) {
                break;
            }
            let records = results::read_records(&self.out)?.records;
            let undecided = undecided::undecided(&records);
            let mut order = order::order(cells, seed, round);
            order.retain(|index| undecided.contains(&cells[*index]));
            if order.is_empty() {
                break;
            }
            course.bar.inc_length(order.len() as u64);
            course.round(round, &order, earlier)?;
        }
        course.bar.finish_and_clear();
        self.signals.check()?;
        Ok(if course.sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// Says what came out, and writes the report.
    fn tell(&self) -> Result<(), BenchError> {
        let results = results::read_records(&self.out)?;
        if let Some(prices) = price_list(&results.records, Metric::Step).render() {
            say(format_args!("\n{prices}"));
        }
        self.report()
    }

    /// Says the answer, and writes the report of what there is.
    pub(crate) fn report(&self) -> Result<(), BenchError> {
        let results = results::read_records(&self.out)?;
        say(format_args!("\n{}\n", crate::report::screen(&results, &self.plan.cells)));
        let path = crate::report::write(&results, &self.out)?;
        say(format_args!("rows: {}", self.out.join(results::FILE).display()));
        say(format_args!("report: {}", path.display()));
        Ok(())
    }
}

/// A sweep under way.
struct Course<'s> {
    sweep: &'s Sweep,
    file: Appending,
    networks: TestNetworks,
    /// What is there without an emulator.
    bare: TestNetwork,
    /// What tells the cells apart.
    axes: Vec<Axis>,
    /// When the sweep began and what time it has, if there is a limit.
    budget: Option<(Instant, Duration)>,
    bar: ProgressBar,
    position: u64,
    sound: bool,
}

impl Course<'_> {
    /// Whether a cell may still be begun: in the first round always, in the plan's other rounds, without which nothing can be told, for half
    /// as long again as the budget, and in further ones while it lasts.
    fn has_time(&self, round: u32) -> bool {
        let of_plan = round <= self.sweep.plan.rounds;
        match self.budget {
            Some((began, budget)) => round == 1 || began.elapsed() < if of_plan { budget + budget / 2 } else { budget },
            None => of_plan,
        }
    }

    /// Runs the cells of a round in this order, but for those that have been run earlier.
    fn round(&mut self, round: u32, order: &[usize], earlier: &BTreeSet<(Cell, u32)>) -> Result<(), BenchError> {
        for index in order {
            if !self.has_time(round) {
                return Ok(());
            }
            let cell = &self.sweep.plan.cells[*index];
            self.bar.set_message(format!("round {round}: {}", cell.label(&self.axes)));
            self.position += 1;
            if !earlier.contains(&(cell.clone(), round)) {
                self.sweep.signals.check()?;
                self.cell(round, *index, cell)?;
            }
            self.bar.inc(1);
        }
        Ok(())
    }

    fn cell(&mut self, round: u32, index: usize, cell: &Cell) -> Result<(), BenchError> {
        let Sweep { plan, text, out, environment, signals, torch, launched, .. } = self.sweep;
        let job = CellRun {
            plan: &plan.name,
            round,
            position: self.position - 1,
            timeout: plan.timeout,
            watched: plan.watched,
            text,
            environment,
            out,
            signals,
            launched: launched.as_ref(),
            trace: (plan.watched && round == 1).then(|| out.join(TRACES).join(trace_name(index))),
        };
        let left_out = |ranks: &LaunchedRanks| launched::left_out(cell, ranks.world_size(), ranks.machines());
        let (network, probe) = match launched {
            Some(ranks) => (left_out(ranks).map_or(Ok(&self.bare), |why| Err(Status::NotAvailable(why))), None),
            None => match self.networks.of(cell)? {
                Ok((network, probe)) => (Ok(network), probe),
                Err(status) => (Err(status), None),
            },
        };
        let mut record = match cell.program {
            Trainer::Ours => job.run(cell, network)?,
            Trainer::Pytorch | Trainer::PytorchCompiled => job.run_by(cell, network, |network| match torch {
                Ok(torch) => torch.train(&job, cell, network),
                Err(why) => Ok(Err(Status::NotAvailable(why.clone()))),
            })?,
        };
        if let Some(measured) = &mut record.measured {
            measured.link.probe = probe;
        }
        let broken = launched.as_ref().and_then(LaunchedRanks::failure);
        if let Some(error) = broken.as_ref().filter(|_| record.status != Status::Ok) {
            // It is the job that ended, not the cell: --resume runs it.
            return Err(no_more(error).into());
        }
        self.sound &= is_sound(&record);
        self.file.append(&record)?;
        if let Status::Failed(why) | Status::TimedOut(why) = &record.status {
            let label = cell.label(&self.axes);
            self.bar.suspend(|| say(format_args!("round {round}: {label}: {why}")));
        }
        broken.map_or(Ok(()), |error| Err(no_more(&error).into()))
    }
}

fn no_more(error: &comm_core::Error) -> String {
    format!("no cell can run any more: {error}; --resume continues where the sweep ended")
}

/// The file of a cell's trace, by its place in the plan.
pub(crate) fn trace_name(index: usize) -> String {
    format!("cell-{index}.json")
}

fn is_sound(record: &Record) -> bool {
    let off = record.flags.iter().any(|flag| flag.kind == rig::flag::FlagKind::OffTheFormula);
    matches!(record.status, Status::Ok | Status::NotAvailable(_)) && !off
}

/// A file of JSON lines that is only ever longer by whole lines.
struct Appending {
    file: File,
    path: PathBuf,
    length: u64,
}

impl Appending {
    fn open(path: &Path) -> Result<Self, BenchError> {
        let told = |error: std::io::Error| format!("{}: {error}", path.display());
        let mut file = OpenOptions::new().create(true).append(true).read(true).open(path).map_err(told)?;
        let mut length = file.seek(SeekFrom::End(0)).map_err(told)?;
        let mut last = [b'\n'];
        if length > 0 {
            file.seek(SeekFrom::End(-1)).and_then(|_| file.read_exact(&mut last)).map_err(told)?;
        }
        if last != *b"\n" {
            file.write_all(b"\n").map_err(told)?;
            length += 1;
        }
        Ok(Appending { file, path: path.to_owned(), length })
    }

    fn append(&mut self, record: &Record) -> Result<(), BenchError> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        if let Err(error) = self.file.write_all(&line) {
            // No half line: what is there stays readable.
            let _ = self.file.set_len(self.length);
            return Err(format!(
                "{}: {error}; the earlier runs are saved: free some space, and continue with --resume",
                self.path.display()
            )
            .into());
        }
        self.length += line.len() as u64;
        Ok(())
    }
}
