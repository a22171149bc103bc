//! Training jobs in a world: ranks that train together, or as many that train alone at the same time.

use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::tensor::Device;
use comm_core::job::{Address, Job};
use gpt2::run::{RankOptions, run_rank as run_training_rank, run_threads};
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{RankReport, Summary, TrainConfig};
use gpt2::transports::{TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

use crate::BenchError;
use crate::formula::off_the_formula;
use crate::link::{Ends, World};
use crate::outcome::{self, RunError};
use crate::rank::{self, Program, leave, load_text, of_a_job};

/// What to train, and by whom.
#[derive(Clone, Debug)]
pub struct Training {
    pub config: TrainConfig,
    /// `None` for ranks that all run `config` alone, at the same time.
    pub transport: Option<TransportKind>,
    pub options: TransportOptions,
    pub ranks: usize,
    pub threads: usize,
    /// A text file, a folder of text files, or token shards; `None` for the documentation of this program's dependencies.
    pub source: Option<PathBuf>,
    pub tokenizer: TokenizerKind,
    /// When to end it if it has not ended.
    pub timeout: Duration,
}

/// The figures of a job: medians over its steps but the first two.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Of the slowest rank, where each has its own.
    pub step_ms: f64,
    /// Of all ranks together.
    pub tokens_per_s: f64,
    /// How long a step waits for gradients and parameters, on the rank that waits longest.
    pub exposed_ms: f64,
    /// How long it waits for loss and norm, on the rank where that is longest.
    pub scalars_ms: f64,
    /// How long at least one operation on gradients or parameters is under way, on the rank of `exposed_ms`.
    pub communication_ms: f64,
    /// How much of that nobody waited for.
    pub hidden_ms: f64,
    /// Forward and backward pass, on the slowest rank.
    pub compute_ms: f64,
    /// Payload sent a step, on the rank that sends most.
    pub payload_bytes: Option<u64>,
    pub first_loss: f64,
    pub final_loss: f64,
    pub weights_hash: String,
    pub transport_facts: Vec<(String, String)>,
}

/// What the processes of a job are told.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
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

impl Training {
    /// Of bytes of text, with all settings of the transport at their defaults; it must end within `timeout`.
    pub fn new(
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
    pub fn run(&self, world: &World) -> Result<Figures, RunError> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
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
        let arguments = rank::arguments(&task, folder.path())?;
        outcome::run(&world.launch(&rank::this_program()?, arguments, self.ranks, self.timeout)?)?;
        let summaries = if self.transport.is_some() { 1 } else { self.ranks };
        let summaries =
            (0..summaries).map(|rank| rank::left(&result(folder.path(), rank), rank)).collect::<Result<Vec<_>, _>>()?;
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
        if let Some(off) = ranks.iter().find_map(|rank| off_the_formula(rank)) {
            return Err(off);
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

impl Program for Task {
    const COMMAND: &'static str = "link-rank";

    fn run(&self, job: Option<&Job>) -> Result<(), BenchError> {
        let mut job = of_a_job(job)?.clone();
        let corpus = load_text(self.source.as_deref(), self.tokenizer)?;
        let mut options = RankOptions {
            transport: self.transport.unwrap_or(TransportKind::Local),
            options: self.options.clone(),
            // The ranks of one end of a link, which share a machine.
            node_transport: (self.ends.is_some() && self.transport.is_some()).then_some(TransportKind::Shm),
            threads: self.threads,
            checkpoint: None,
        };
        let device = Device::flex();
        let result = result(&self.results, job.rank);
        if self.transport.is_none() {
            return leave(&result, &run_threads(&self.config, &corpus, 1, &options, &device, &mut ())?);
        }
        if let Some(ends) = &self.ends {
            let (host, port) = ends.meeting();
            job.address = Address::Tcp { host: host.to_string(), port };
            options.options.bind = Some(ends.own(job.rank, job.world_size));
        }
        let summary = run_training_rank(&job, &self.config, &corpus, &options, &device, &mut ())?;
        if job.rank == 0 { leave(&result, &summary) } else { Ok(()) }
    }
}

fn result(folder: &Path, rank: usize) -> PathBuf {
    folder.join(format!("summary-{rank}.json"))
}
