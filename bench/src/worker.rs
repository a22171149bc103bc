//! What a cell's processes do: this executable, started again.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use burn::tensor::Device;
use comm_core::job::{self, Job};
use comm_core::printer;
use gpt2::corpus::{Corpus, CorpusSource};
use gpt2::env::default_cargo_home;
use gpt2::run::{RankOptions, run_rank, run_threads};
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{TrainConfig, TrainError};
use isocomm::{Medium, TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

use crate::BenchError;

#[derive(Debug, clap::Args)]
pub(crate) struct WorkerArgs {
    /// The task, as JSON.
    #[arg(long)]
    task: PathBuf,
}

/// What a cell's processes are told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) config: TrainConfig,
    pub(crate) transport: TransportKind,
    /// What connects the ranks of a node, for strategies that tell nodes apart.
    pub(crate) node_transport: Option<TransportKind>,
    pub(crate) options: TransportOptions,
    pub(crate) ranks: usize,
    pub(crate) threads: usize,
    /// The path given with `--data`.
    pub(crate) source: Option<PathBuf>,
    pub(crate) tokenizer: TokenizerKind,
    /// Where rank 0 writes its [`Summary`](gpt2::trainer::Summary).
    pub(crate) result: PathBuf,
}

impl Task {
    /// Writes the task for the ranks to read.
    pub(crate) fn write(&self, path: &Path) -> Result<(), String> {
        let bytes = serde_json::to_vec(self).map_err(|error| format!("a task: {error}"))?;
        fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
    }
}

pub(crate) fn run(args: &WorkerArgs) -> Result<ExitCode, BenchError> {
    job::die_with_parent()?;
    let task: Task = serde_json::from_slice(&fs::read(&args.task)?)
        .map_err(|error| format!("{}: not a task of this program: {error}", args.task.display()))?;
    let source = CorpusSource::from_path(task.source.clone(), default_cargo_home());
    let corpus = Corpus::load(&source, task.tokenizer)?;
    let options = RankOptions {
        transport: task.transport,
        options: task.options.clone(),
        node_transport: task.node_transport,
        threads: task.threads,
        checkpoint: None,
    };
    let device = Device::flex();
    // The threads of `local` are one process of a job that has no other.
    let job = if task.transport.medium() == Medium::Threads { None } else { Job::from_env()? };
    let summary = match job {
        Some(job) => {
            let summary = match run_rank(&job, &task.config, &corpus, &options, &device, &mut ()) {
                Ok(summary) => summary,
                Err(TrainError::Comm(error)) => {
                    printer::stderr().line(format_args!("error: {error}"));
                    let code = u8::try_from(job::exit_code(&error, job.rank));
                    return Ok(code.map_or(ExitCode::FAILURE, ExitCode::from));
                }
                Err(error) => return Err(error.into()),
            };
            if job.rank != 0 {
                return Ok(ExitCode::SUCCESS);
            }
            summary
        }
        None => run_threads(&task.config, &corpus, task.ranks, &options, &device, &mut ())?,
    };
    fs::write(&task.result, serde_json::to_vec(&summary)?)?;
    Ok(ExitCode::SUCCESS)
}
