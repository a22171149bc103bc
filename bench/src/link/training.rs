//! Training jobs in a world: ranks that train together, or as many that train alone at the same time.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::job::{self, Address, Job};
use gpt2::corpus::{Corpus, CorpusSource};
use gpt2::env::default_cargo_home;
use gpt2::run::{RankOptions, run_rank as run_training_rank, run_threads};
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{RankReport, Summary, TrainConfig, TrainError};
use isocomm::{TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

use super::World;
use super::place::{self, Ends, this_program};
use crate::BenchError;
use crate::runner::RunError;

/// What to train, and by whom.
#[derive(Clone, Debug)]
pub(crate) struct Training {
    pub(crate) config: TrainConfig,
    /// `None` for ranks that all run `config` alone, at the same time.
    pub(crate) transport: Option<TransportKind>,
    pub(crate) options: TransportOptions,
    pub(crate) ranks: usize,
    pub(crate) threads: usize,
    /// A text file, a folder of text files, or token shards; `None` for the documentation of this program's dependencies.
    pub(crate) source: Option<PathBuf>,
    pub(crate) tokenizer: TokenizerKind,
    /// When to end it if it has not ended.
    pub(crate) timeout: Duration,
}

/// The figures of a job: medians over its steps but the first two.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Figures {
    /// Of the slowest rank, where each has its own.
    pub(crate) step_ms: f64,
    /// Of all ranks together.
    pub(crate) tokens_per_s: f64,
    /// How long a step waits for gradients and parameters, on the rank that waits longest.
    pub(crate) exposed_ms: f64,
    /// How long it waits for loss and norm, on the rank where that is longest.
    pub(crate) scalars_ms: f64,
    /// How long at least one operation on gradients or parameters is under way, on the rank of `exposed_ms`.
    pub(crate) communication_ms: f64,
    /// How much of that nobody waited for.
    pub(crate) hidden_ms: f64,
    /// Forward and backward pass, on the slowest rank.
    pub(crate) compute_ms: f64,
    /// Payload sent a step, on the rank that sends most.
    pub(crate) payload_bytes: Option<u64>,
    pub(crate) first_loss: f64,
    pub(crate) final_loss: f64,
    pub(crate) weights_hash: String,
    pub(crate) transport_facts: Vec<(String, String)>,
}

/// What the processes of a job are told.
#[derive(Debug, Serialize, Deserialize)]
struct Task {
    config: TrainConfig,
    transport: Option<TransportKind>,
    options: TransportOptions,
    threads: usize,
    source: Option<PathBuf>,
    tokenizer: TokenizerKind,
    ends: Option<Ends>,
    /// Where each rank that has one leaves its summary.
    results: PathBuf,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RankArgs {
    /// The task, as JSON.
    #[arg(long)]
    task: PathBuf,
}

impl Training {
    /// Of bytes of text, with all settings of the transport at their defaults; it must end within `timeout`.
    pub(crate) fn new(
        config: TrainConfig,
        transport: Option<TransportKind>,
        ranks: usize,
        threads: usize,
        timeout: Duration,
    ) -> Self {
        let options = TransportOptions { timeout: timeout / 2, ..TransportOptions::default() };
        let (source, tokenizer) = (None, TokenizerKind::Bytes);
        Training { config, transport, options, ranks, threads, source, tokenizer, timeout }
    }

    /// Runs it in processes of its own.
    ///
    /// # Errors
    /// The first thing that went wrong, bytes that are off the strategy's formula included, or that the user has had enough.
    pub(crate) fn run(&self, world: &World) -> Result<Figures, RunError> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let task_file = folder.path().join("task.json");
        let task = Task {
            config: self.config.clone(),
            transport: self.transport,
            options: self.options.clone(),
            threads: self.threads,
            source: self.source.clone(),
            tokenizer: self.tokenizer,
            ends: world.addresses(),
            results: folder.path().to_owned(),
        };
        let bytes = serde_json::to_vec(&task).map_err(|error| format!("the task of a job: {error}"))?;
        fs::write(&task_file, bytes).map_err(|error| format!("{}: {error}", task_file.display()))?;
        let arguments: Vec<OsString> = vec!["link-rank".into(), "--task".into(), task_file.into()];
        place::run(&world.launch(&this_program()?, arguments, self.ranks, self.timeout)?)?;
        let summaries = if self.transport.is_some() { 1 } else { self.ranks };
        let summaries = (0..summaries).map(|rank| read(&result(folder.path(), rank))).collect::<Result<Vec<_>, _>>()?;
        Ok(Figures::of(&summaries)?)
    }
}

impl Figures {
    /// Of one summary of a job, or one of each rank that trained alone.
    ///
    /// # Errors
    /// Bytes were sent that the strategy's formula does not know.
    fn of(summaries: &[Summary]) -> Result<Self, String> {
        let first = summaries.first().ok_or("no rank has left a summary")?;
        let ranks: Vec<&RankReport> = summaries.iter().flat_map(|summary| &summary.ranks).collect();
        let off = |rank: &&&RankReport| {
            !rank.bytes_steady || rank.bytes_counted.is_some_and(|counted| counted != rank.bytes_expected)
        };
        if let Some(rank) = ranks.iter().find(off) {
            let (rank, counted, expected) = (rank.rank, rank.bytes_counted.unwrap_or(0), rank.bytes_expected);
            return Err(format!("off the formula: rank {rank} sent {counted} B a step, not {expected}"));
        }
        let most = |of: fn(&RankReport) -> f64| ranks.iter().map(|rank| of(rank)).fold(0.0, f64::max);
        let waiting =
            ranks.iter().max_by(|a, b| a.parts.exposed.total_cmp(&b.parts.exposed)).ok_or("no rank has reported")?;
        Ok(Figures {
            step_ms: summaries.iter().map(|summary| summary.step_ms).fold(0.0, f64::max),
            tokens_per_s: summaries.iter().map(|summary| summary.tokens_per_s).sum(),
            exposed_ms: waiting.parts.exposed,
            scalars_ms: most(|rank| rank.parts.scalars),
            communication_ms: waiting.parts.communication,
            hidden_ms: waiting.parts.hidden,
            compute_ms: most(|rank| rank.parts.compute),
            payload_bytes: ranks.iter().filter_map(|rank| rank.bytes_counted).max(),
            first_loss: first.losses.first().copied().unwrap_or(f64::NAN),
            final_loss: first.final_loss,
            weights_hash: first.weights_hash.clone(),
            transport_facts: first.transport.clone(),
        })
    }
}

/// One process of a job.
pub(crate) fn run_rank(args: &RankArgs) -> Result<ExitCode, BenchError> {
    job::die_with_parent()?;
    let task: Task = serde_json::from_slice(&fs::read(&args.task)?)
        .map_err(|error| format!("{}: not a task of this program: {error}", args.task.display()))?;
    let mut job = Job::from_env()?.ok_or("link-rank is started by a launcher, as one rank of its job")?;
    let source = CorpusSource::from_path(task.source.clone(), default_cargo_home());
    let corpus = Corpus::load(&source, task.tokenizer)?;
    let mut options = RankOptions {
        transport: task.transport.unwrap_or(TransportKind::LOCAL),
        options: task.options.clone(),
        // The ranks of one end of a link, which share a machine.
        node_transport: (task.ends.is_some() && task.transport.is_some()).then_some(TransportKind::SHM),
        threads: task.threads,
        checkpoint: None,
    };
    let device = Device::flex();
    let result = result(&task.results, job.rank);
    if task.transport.is_none() {
        let summary = run_threads(&task.config, &corpus, 1, &options, &device, &mut ())?;
        fs::write(result, serde_json::to_vec(&summary)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(ends) = &task.ends {
        let (host, port) = ends.meeting();
        job.address = Address::Tcp { host: host.to_string(), port };
        options.options.bind = Some(ends.own(job.rank, job.world_size));
    }
    match run_training_rank(&job, &task.config, &corpus, &options, &device, &mut ()) {
        Ok(summary) if job.rank == 0 => fs::write(result, serde_json::to_vec(&summary)?)?,
        Ok(_) => {}
        Err(TrainError::Comm(error)) => {
            eprintln!("error: {error}");
            let code = u8::try_from(job::exit_code(&error, job.rank));
            return Ok(code.map_or(ExitCode::FAILURE, ExitCode::from));
        }
        Err(error) => return Err(error.into()),
    }
    Ok(ExitCode::SUCCESS)
}

fn result(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("summary-{rank}.json"))
}

fn read(path: &Path) -> Result<Summary, String> {
    let bytes = fs::read(path).map_err(|error| format!("a rank left no summary: {error}"))?;
    serde_json::from_slice(&bytes).map_err(|error| format!("a rank's summary: {error}"))
}
