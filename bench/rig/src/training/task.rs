//! The program of a rank that trains.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::job::{Address, Job};
use comm_core::{Control, Error};
use gpt2::corpus::Corpus;
use gpt2::run::{RankOptions, run_rank_over, run_watched_threads};
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{Keep, Observer, StepReport, Summary, TrainConfig};
use isocomm::{Connected, Rung, TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

use super::skew::Step;
use crate::BenchError;
use crate::link::JobEndpoints;
use crate::rank::{self, Program, leave, load_text, of_a_job};
use crate::record::InjectedDelay;
use crate::why::{self, Figures, Probe, Scope, quic_figures};

/// What the processes of a job are told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    pub config: TrainConfig,
    /// `None` for ranks that talk to nobody.
    pub rung: Option<Rung>,
    pub options: TransportOptions,
    /// What connects the ranks of a node, for strategies that tell nodes apart.
    pub node_transport: Option<TransportKind>,
    pub ranks: usize,
    /// Threads that compute, in each rank.
    pub threads: usize,
    /// The path given with `--data`.
    pub source: Option<PathBuf>,
    pub tokenizer: TokenizerKind,
    pub network: Network,
    /// Whether each rank keeps what every step did.
    pub watched: bool,
    pub planted: Option<InjectedDelay>,
    /// Where each process leaves its [`RankOutput`].
    pub results: PathBuf,
}

/// Where the ranks of a job live.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Network {
    /// The address of each rank and where all meet; `None` on loopback.
    pub addresses: Option<JobEndpoints>,
    /// The network interface that ranks talk through.
    pub interface: String,
    /// Whether several ranks have the same one.
    pub shared: bool,
}

/// What a process leaves.
#[derive(Debug, Serialize, Deserialize)]
pub struct RankOutput {
    /// Of its ranks, in order; without steps where nobody watched.
    pub steps: Vec<Vec<Step>>,
    pub network: why::Network,
    /// Of the job, from rank 0; from every rank where each trained alone.
    pub summary: Option<Summary>,
}

impl Program for Task {
    const COMMAND: &'static str = "train-rank";

    fn run(&self, job: Option<&Job>) -> Result<(), BenchError> {
        let job = of_a_job(job)?;
        let corpus = load_text(self.source.as_deref(), self.tokenizer)?;
        let device = Device::flex();
        let output = match self.rung {
            None => self.threads(1, job.rank, &corpus, &device)?,
            Some(rung) if rung.is_threads() => self.threads(self.ranks, 0, &corpus, &device)?,
            Some(rung) => self.connected(rung, job, &corpus, &device)?,
        };
        leave(&RankOutput::file(&self.results, job.rank), &output)
    }
}

impl Task {
    /// One rank of several processes.
    fn connected(&self, rung: Rung, job: &Job, corpus: &Corpus, device: &Device) -> Result<RankOutput, BenchError> {
        let mut job = job.clone();
        let mut options = self.rank_options();
        if let Some(addresses) = &self.network.addresses {
            let (host, port) = addresses.meeting();
            job.address = Address::Tcp { host: host.to_string(), port };
            options.options.bind = Some(addresses.own(job.rank, job.world_size).into());
        }
        options.options = rung.options(&options.options);
        let mut watch = Watch::new(self, job.rank);
        if let Address::Tcp { port, .. } = &job.address {
            watch.control_port = Some(*port);
        }
        let figures = watch.quic.clone();
        let connect = |control| connect(rung, control, &options.options, &figures);
        let name = rung.to_string();
        let summary = run_rank_over(&job, &self.config, corpus, &options, (&name, &connect), device, &mut watch)?;
        Ok(RankOutput { summary: (job.rank == 0).then_some(summary), ..watch.output() })
    }

    /// `count` ranks from `first` on as threads of this process.
    fn threads(&self, count: usize, first: usize, corpus: &Corpus, device: &Device) -> Result<RankOutput, BenchError> {
        let mut watches: Vec<Watch> = (first..first + count).map(|rank| Watch::new(self, rank)).collect();
        // The figures of the process are those of all its ranks.
        watches.iter_mut().skip(1).for_each(|watch| watch.probes = false);
        let observers = watches.iter_mut().map(|watch| watch as &mut (dyn Observer + Send)).collect();
        let summary = run_watched_threads(&self.config, corpus, count, &self.rank_options(), device, observers)?;
        let mut outputs = watches.into_iter().map(Watch::output);
        let Some(mut output) = outputs.next() else { return Err("a job needs at least one rank".into()) };
        output.steps.extend(outputs.flat_map(|other| other.steps));
        Ok(RankOutput { summary: Some(summary), ..output })
    }

    fn rank_options(&self) -> RankOptions {
        RankOptions {
            // What is connected is said elsewhere; this is what there is for one process.
            transport: TransportKind::LOCAL,
            options: self.options.clone(),
            node_transport: self.node_transport,
            threads: Some(self.threads),
            keep: Keep::default(),
        }
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

impl RankOutput {
    fn file(folder: &Path, rank: usize) -> PathBuf {
        folder.join(format!("rank-{rank}.json"))
    }

    /// Takes so many nanoseconds off all times, by which this machine's clock is `ahead` of another one's.
    pub(super) fn shift(&mut self, ahead: i64) {
        let shift = |time: &mut u64| *time = time.saturating_add_signed(ahead.saturating_neg());
        for step in self.steps.iter_mut().flatten() {
            step.spans.iter_mut().for_each(|span| [&mut span.began, &mut span.ended].into_iter().for_each(shift));
            for operation in &mut step.operations {
                [&mut operation.asked, &mut operation.began, &mut operation.ended].into_iter().for_each(shift);
            }
        }
    }

    /// What the process of `rank` has left in `folder`.
    ///
    /// # Errors
    /// It has left nothing that can be read.
    pub fn of(folder: &Path, rank: usize) -> Result<Self, String> {
        rank::left(&RankOutput::file(folder, rank), rank)
    }
}

/// Watches a rank.
struct Watch {
    /// Without it nothing is kept.
    keeps: bool,
    steps: Vec<Step>,
    total: u64,
    /// A delay put into each step.
    planted: Option<Duration>,
    probes: bool,
    network: Network,
    control_port: Option<u16>,
    quic: Arc<OnceLock<Figures>>,
    probe: Option<Probe>,
    seen: why::Network,
}

impl Watch {
    fn new(task: &Task, rank: usize) -> Self {
        let planted = task.planted.as_ref().filter(|planted| planted.rank.is_none_or(|late| late == rank));
        Watch {
            keeps: task.watched,
            steps: Vec::new(),
            total: task.config.steps,
            planted: planted.map(|planted| Duration::from_micros(planted.microseconds)),
            probes: task.watched,
            network: task.network.clone(),
            control_port: None,
            quic: Arc::default(),
            probe: None,
            seen: why::Network::default(),
        }
    }

    fn output(self) -> RankOutput {
        RankOutput { steps: vec![self.steps], network: self.seen, summary: None }
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
        if !self.keeps {
            return;
        }
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
