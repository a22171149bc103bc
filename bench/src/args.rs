//! The command line, checked.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::{Parser, Subcommand};
use comm_core::launch::ending_signals;
use gpt2::cli::{MAX_RANKS_HERE, MAX_THREADS};
use gpt2::config::Preset;
use gpt2::corpus::{Corpus, CorpusSource};
use gpt2::env::default_cargo_home;
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::TokenizerKind;
use isocomm::TransportKind;

use crate::BenchError;
use crate::chaos::{ChaosArgs, ChaosRankArgs};
use crate::collectives::{CollectivesArgs, RankArgs};
use crate::compare::CompareArgs;
use crate::environment::Environment;
use crate::folder::results_folder;
use crate::hostile::{HostileArgs, HostileRankArgs};
use crate::link::{EmulateArgs, EnterArgs, ProbeArgs, RankArgs as LinkRankArgs};
use crate::links::{LinksArgs, LinksRankArgs};
use crate::memory::MemoryArgs;
use crate::overlap::OverlapArgs;
use crate::paper::PaperArgs;
use crate::parity::ParityArgs;
use crate::peers::PeersArgs;
use crate::report::ReportArgs;
use crate::runner::Interrupted;
use crate::soak::SoakArgs;
use crate::sweep::{RankArgs as SweepRankArgs, SweepArgs};
use crate::worker::WorkerArgs;

/// Measures each training strategy over each transport of this machine.
#[derive(Debug, Parser)]
#[command(name = "bench", version, about, args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Folder for results.jsonl and proof.jsonl. [default: a new folder under bench-results/]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    pub(crate) allow_debug: bool,
    /// Leave out the proof at 3 and 4 ranks.
    #[arg(long)]
    pub(crate) skip_proof: bool,
    /// Strategies, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "single,ps,sharded-ps,ring,ddp,zero1,zero2,fsdp,hierarchical")]
    strategies: Vec<StrategyKind>,
    /// Transports, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = TransportKind::all())]
    transports: Vec<TransportKind>,
    /// Ranks of the matrix.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Model size.
    #[arg(long, default_value = "tiny")]
    preset: Preset,
    /// Optimizer steps of a run.
    #[arg(long, default_value_t = 12)]
    steps: u64,
    /// How often each cell of the matrix runs; differences are told from chance from 3 rounds on.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Sequences a step, over all ranks; a multiple of --ranks.
    #[arg(long, default_value_t = 12)]
    batch: usize,
    /// Seed of weights and data order.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Type in which gradients travel.
    #[arg(long, default_value = "f32")]
    wire: Precision,
    /// Threads that compute, in each rank. [default: the machine's cores divided by --ranks]
    #[arg(long)]
    threads: Option<usize>,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Seconds that a cell may take.
    #[arg(long, default_value_t = 120)]
    cell_timeout: u64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// One rank, or all ranks as threads, of one cell.
    #[command(hide = true)]
    Worker(WorkerArgs),
    Collectives(Box<CollectivesArgs>),
    #[command(hide = true)]
    CollectivesRank(RankArgs),
    Hostile(Box<HostileArgs>),
    #[command(hide = true)]
    HostileRank(HostileRankArgs),
    Chaos(Box<ChaosArgs>),
    #[command(hide = true)]
    ChaosRank(ChaosRankArgs),
    Soak(Box<SoakArgs>),
    Parity(Box<ParityArgs>),
    Memory(Box<MemoryArgs>),
    Paper(Box<PaperArgs>),
    Overlap(Box<OverlapArgs>),
    Peers(Box<PeersArgs>),
    /// One rank of a job, on its way into a network namespace.
    #[command(hide = true)]
    LinkEnter(EnterArgs),
    /// One end of a measurement of a link.
    #[command(hide = true)]
    LinkProbe(ProbeArgs),
    /// One rank of a job on a link or on loopback.
    #[command(hide = true)]
    LinkRank(LinkRankArgs),
    Sweep(SweepArgs),
    /// One rank, or all ranks as threads, of a run of a sweep.
    #[command(hide = true)]
    SweepRank(SweepRankArgs),
    Report(ReportArgs),
    Compare(CompareArgs),
    Links(LinksArgs),
    /// The process that carries the packets of an emulated link.
    #[command(hide = true)]
    LinkEmulate(EmulateArgs),
    /// One end of a check of a link.
    #[command(hide = true)]
    LinksRank(LinksRankArgs),
}

/// What all cells share.
pub(crate) struct Setup {
    pub(crate) out: PathBuf,
    pub(crate) corpus: Corpus,
    pub(crate) source: Option<PathBuf>,
    pub(crate) strategies: Vec<StrategyKind>,
    pub(crate) transports: Vec<TransportKind>,
    pub(crate) ranks: usize,
    pub(crate) preset: Preset,
    pub(crate) steps: u64,
    pub(crate) rounds: u32,
    pub(crate) batch: usize,
    pub(crate) seed: u64,
    pub(crate) wire: Precision,
    pub(crate) threads: usize,
    pub(crate) cell_timeout: Duration,
    pub(crate) environment: Environment,
    /// The signal that came since the start, 0 for none.
    pub(crate) interrupted: Arc<AtomicUsize>,
}

impl Setup {
    /// Whether the user still wants the results.
    pub(crate) fn go_on(&self) -> Result<(), Interrupted> {
        match self.interrupted.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => Err(Interrupted { signal: signal as i32 }),
        }
    }
}

impl Args {
    pub(crate) fn check(&self) -> Result<Setup, BenchError> {
        if self.ranks == 0 || self.ranks > MAX_RANKS_HERE {
            return Err(format!("--ranks {} must lie between 1 and {MAX_RANKS_HERE}", self.ranks).into());
        }
        let at_least_one =
            [("--steps", self.steps), ("--rounds", self.rounds.into()), ("--cell-timeout", self.cell_timeout)];
        for (name, value) in at_least_one {
            if value == 0 {
                return Err(format!("{name} must be at least 1").into());
            }
        }
        if self.batch == 0 || !self.batch.is_multiple_of(self.ranks) {
            return Err(format!("--batch {} cannot be divided evenly among {} ranks", self.batch, self.ranks).into());
        }
        if self.threads.is_some_and(|threads| threads == 0 || threads > MAX_THREADS) {
            return Err(format!("--threads must lie between 1 and {MAX_THREADS}").into());
        }
        let out = results_folder(self.out.clone(), "run")?;
        // Rows of an earlier run are hours of somebody's time.
        if let Some(old) = ["results.jsonl", "proof.jsonl"].iter().map(|name| out.join(name)).find(|path| path.exists())
        {
            return Err(format!("{} holds an earlier run; give a new folder with --out", old.display()).into());
        }
        let source = CorpusSource::from_path(self.data.clone(), default_cargo_home());
        let corpus = Corpus::load(&source, TokenizerKind::Bytes)?;
        // A launcher catches signals while its ranks run; this is for the time between two cells.
        let interrupted = Arc::new(AtomicUsize::new(0));
        for signal in ending_signals() {
            signal_hook::flag::register_usize(signal, interrupted.clone(), signal as usize)?;
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Setup {
            out,
            corpus,
            source: self.data.clone(),
            strategies: self.strategies.clone(),
            transports: self.transports.clone(),
            ranks: self.ranks,
            preset: self.preset,
            steps: self.steps,
            rounds: self.rounds,
            batch: self.batch,
            seed: self.seed,
            wire: self.wire,
            threads: self.threads.unwrap_or_else(|| (cores / self.ranks).max(1)),
            cell_timeout: Duration::from_secs(self.cell_timeout),
            environment: Environment::read(),
            interrupted,
        })
    }
}
