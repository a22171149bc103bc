//! What the processes of a run do: this executable, started again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::job::{self, Address, Job};
use comm_core::{Control, Error, printer};
use gpt2::corpus::{Corpus, CorpusSource};
use gpt2::env::default_cargo_home;
use gpt2::run::{RankOptions, run_rank_over, run_watched_threads};
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{Observer, StepReport, Summary, TrainConfig, TrainError};
use isocomm::{Connected, Rung, TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

use super::skew::Step;
use crate::BenchError;
use crate::link::Ends;
use crate::record::{self, Planted};
use crate::why::{Figures, Probe, Scope, quic_figures};

/// What the processes of a run are told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Task {
    pub(super) config: TrainConfig,
    /// `None` for a single rank.
    pub(super) rung: Option<Rung>,
    pub(super) options: TransportOptions,
    /// What connects the ranks of a node, for strategies that tell nodes apart.
    pub(super) node_transport: Option<TransportKind>,
    pub(super) ranks: usize,
    /// Threads that compute, in each rank.
    pub(super) threads: usize,
    /// The path given with `--data`.
    pub(super) source: Option<PathBuf>,
    pub(super) tokenizer: TokenizerKind,
    pub(super) network: Network,
    pub(super) planted: Option<Planted>,
    /// Where each rank leaves its figures.
    pub(super) results: PathBuf,
}

/// Where the ranks of a run live.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Network {
    /// The address of each rank and where all meet; `None` on loopback.
    pub(super) addresses: Option<Ends>,
    /// The network interface that ranks talk through.
    pub(super) interface: String,
    /// Whether several ranks have the same one.
    pub(super) shared: bool,
}

/// What a process leaves behind.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Left {
    /// Of its ranks, in order.
    pub(super) steps: Vec<Vec<Step>>,
    pub(super) network: record::Network,
    /// From rank 0, equal on all others.
    pub(super) summary: Option<Summary>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RankArgs {
    /// The task, as JSON.
    #[arg(long)]
    task: PathBuf,
}

/// One process of a run.
pub(crate) fn run_rank(args: &RankArgs) -> Result<ExitCode, BenchError> {
    job::die_with_parent()?;
    let task: Task = serde_json::from_slice(&fs::read(&args.task)?)
        .map_err(|error| format!("{}: not a task of this program: {error}", args.task.display()))?;
    let source = CorpusSource::from_path(task.source.clone(), default_cargo_home());
    let corpus = Corpus::load(&source, task.tokenizer)?;
    let device = Device::flex();
    let Some(rung) = task.rung.filter(|rung| !rung.is_threads()) else {
        return threads(&task, &corpus, &device);
    };
    let mut job = Job::from_env()?.ok_or("sweep-rank is started by a launcher, as one rank of its job")?;
    let mut options = rank_options(&task);
    if let Some(addresses) = &task.network.addresses {
        let (host, port) = addresses.meeting();
        job.address = Address::Tcp { host: host.to_string(), port };
        options.options.bind = Some(addresses.own(job.rank, job.world_size));
    }
    options.options = rung.options(&options.options);
    let mut watch = Watch::new(&task, job.rank);
    let figures = watch.quic.clone();
    let connect = |control| connect(rung, control, &options.options, &figures);
    let name = rung.to_string();
    match run_rank_over(&job, &task.config, &corpus, &options, (&name, &connect), &device, &mut watch) {
        Ok(summary) => {
            let summary = (job.rank == 0).then_some(summary);
            leave(&task.results, job.rank, &Left { summary, ..watch.left() })?;
            Ok(ExitCode::SUCCESS)
        }
        Err(TrainError::Comm(error)) => {
            printer::stderr().line(format_args!("error: {error}"));
            let code = u8::try_from(job::exit_code(&error, job.rank));
            Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
        }
        Err(error) => Err(error.into()),
    }
}

/// Connects a rank, and leaves the figures of its connections where the kernel has none.
fn connect(
    rung: Rung,
    control: Arc<dyn Control>,
    options: &TransportOptions,
    figures: &OnceLock<Figures>,
) -> Result<Connected, Error> {
    let connected = rung.connect(control, options)?;
    if let Some(monitor) = &connected.quic {
        let _ = figures.set(quic_figures(vec![monitor.clone()]));
    }
    Ok(connected)
}

/// All ranks as threads of this process.
fn threads(task: &Task, corpus: &Corpus, device: &Device) -> Result<ExitCode, BenchError> {
    let mut watches: Vec<Watch> = (0..task.ranks).map(|rank| Watch::new(task, rank)).collect();
    // The figures of the process are those of all its ranks.
    watches.iter_mut().skip(1).for_each(|watch| watch.probes = false);
    let observers = watches.iter_mut().map(|watch| watch as &mut (dyn Observer + Send)).collect();
    let summary = run_watched_threads(&task.config, corpus, task.ranks, &rank_options(task), device, observers)?;
    let mut lefts = watches.into_iter().map(Watch::left);
    let Some(mut left) = lefts.next() else { return Err("a run needs at least one rank".into()) };
    left.steps.extend(lefts.flat_map(|other| other.steps));
    leave(&task.results, 0, &Left { summary: Some(summary), ..left })?;
    Ok(ExitCode::SUCCESS)
}

fn rank_options(task: &Task) -> RankOptions {
    RankOptions {
        // What is connected is said elsewhere; this is what there is for one process.
        transport: TransportKind::LOCAL,
        options: task.options.clone(),
        node_transport: task.node_transport,
        threads: task.threads,
        checkpoint: None,
    }
}

fn leave(folder: &Path, rank: usize, left: &Left) -> Result<(), BenchError> {
    let path = file(folder, rank);
    fs::write(&path, serde_json::to_vec(left)?).map_err(|error| format!("{}: {error}", path.display()).into())
}

/// Where a rank leaves its figures.
fn file(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("rank-{rank}.json"))
}

/// What all processes of a run have left.
///
/// # Errors
/// A rank has left nothing that can be read.
pub(super) fn collect(folder: &Path, processes: usize) -> Result<Vec<Left>, String> {
    let read = |rank: usize| {
        let path = file(folder, rank);
        let bytes = fs::read(&path).map_err(|error| format!("rank {rank} left no figures: {error}"))?;
        serde_json::from_slice(&bytes).map_err(|error| format!("the figures of rank {rank}: {error}"))
    };
    (0..processes).map(read).collect()
}

/// Watches a rank.
struct Watch {
    steps: Vec<Step>,
    total: u64,
    /// A delay put into each step.
    planted: Option<Duration>,
    probes: bool,
    network: Network,
    control_port: Option<u16>,
    quic: Arc<OnceLock<Figures>>,
    probe: Option<Probe>,
    seen: record::Network,
}

impl Watch {
    fn new(task: &Task, rank: usize) -> Self {
        let planted = task.planted.as_ref().filter(|planted| planted.rank.is_none_or(|late| late == rank));
        Watch {
            steps: Vec::new(),
            total: task.config.steps,
            planted: planted.map(|planted| Duration::from_micros(planted.microseconds)),
            probes: true,
            network: task.network.clone(),
            control_port: task.network.addresses.as_ref().map(|addresses| addresses.meeting().1),
            quic: Arc::default(),
            probe: None,
            seen: record::Network::default(),
        }
    }

    fn left(self) -> Left {
        Left { steps: vec![self.steps], network: self.seen, summary: None }
    }
}

impl Observer for Watch {
    fn started(&mut self, _steps: u64) {
        if self.probes {
            self.probe = Some(Probe::start(Scope {
                interface: self.network.interface.clone(),
                shared_interface: self.network.shared,
                control_port: self.control_port,
                quic: self.quic.get().cloned(),
            }));
        }
    }

    fn reading(&mut self, _step: u64) {
        if let Some(delay) = self.planted {
            thread::sleep(delay);
        }
    }

    fn step(&mut self, report: &StepReport) {
        if report.step == self.total
            && let Some(probe) = self.probe.take()
        {
            self.seen = probe.finish();
        }
        self.steps.push(Step {
            ms: report.ms,
            spans: report.spans.clone(),
            operations: report.communications.clone(),
            communication: report.parts.communication,
            hidden: report.parts.hidden,
        });
    }
}
