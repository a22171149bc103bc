//! What a cell's processes do: this executable, started again.

use std::path::PathBuf;

use burn::tensor::Device;
use comm_core::job::Job;
use gpt2::run::{RankOptions, run_rank, run_threads};
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::TrainConfig;
use gpt2::transports::{TransportKind, TransportOptions};
use serde::{Deserialize, Serialize};

use crate::BenchError;
use crate::rank::{Program, leave, load_text};

/// What a cell's processes are told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Task {
    pub config: TrainConfig,
    pub transport: TransportKind,
    /// What connects the ranks of a node, for strategies that tell nodes apart.
    pub node_transport: Option<TransportKind>,
    pub options: TransportOptions,
    pub ranks: usize,
    pub threads: usize,
    /// The path given with `--data`.
    pub source: Option<PathBuf>,
    pub tokenizer: TokenizerKind,
    /// Where rank 0 writes its [`Summary`](gpt2::trainer::Summary).
    pub result: PathBuf,
}

impl Program for Task {
    const COMMAND: &'static str = "worker";

    fn run(&self, job: Option<&Job>) -> Result<(), BenchError> {
        let corpus = load_text(self.source.as_deref(), self.tokenizer)?;
        let options = RankOptions {
            transport: self.transport,
            options: self.options.clone(),
            node_transport: self.node_transport,
            threads: self.threads,
            checkpoint: None,
        };
        let device = Device::flex();
        // The threads of `local` are one process of a job that has no other.
        let job = job.filter(|_| self.transport != TransportKind::Local);
        let summary = match job {
            Some(job) => {
                let summary = run_rank(job, &self.config, &corpus, &options, &device, &mut ())?;
                if job.rank != 0 {
                    return Ok(());
                }
                summary
            }
            None => run_threads(&self.config, &corpus, self.ranks, &options, &device, &mut ())?,
        };
        leave(&self.result, &summary)
    }
}
