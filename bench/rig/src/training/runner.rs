//! Training runs in processes of their own.

use std::path::PathBuf;
use std::time::Duration;

use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{Summary, TrainConfig};
use gpt2::transports::{TransportKind, TransportOptions};

use super::worker::Task;
use crate::link::World;
use crate::outcome::{self, RunError};
use crate::rank;

/// A training run: its ranks are this executable, started again.
#[derive(Clone, Debug)]
pub struct Run {
    pub config: TrainConfig,
    /// `None` for a single rank, which talks to nobody.
    pub transport: Option<TransportKind>,
    /// What connects the ranks of a node, for strategies that tell nodes apart.
    pub node_transport: Option<TransportKind>,
    pub options: TransportOptions,
    pub ranks: usize,
    /// Threads that compute, in each rank.
    pub threads: usize,
    /// The path given with `--data`.
    pub source: Option<PathBuf>,
    pub tokenizer: TokenizerKind,
    /// The whole run must end within this time.
    pub timeout: Duration,
}

impl Run {
    /// A run of bytes of text over `transport` with all settings at their defaults, which must end within `timeout`.
    pub fn new(
        config: TrainConfig,
        transport: Option<TransportKind>,
        ranks: usize,
        threads: usize,
        timeout: Duration,
    ) -> Self {
        Run {
            config,
            transport,
            node_transport: None,
            options: TransportOptions { timeout: timeout / 2, ..TransportOptions::default() },
            ranks,
            threads,
            source: None,
            tokenizer: TokenizerKind::Bytes,
            timeout,
        }
    }

    /// Trains, and returns what rank 0 says of it.
    ///
    /// # Errors
    /// The cause, in one line; [`Interrupted`](RunError::Interrupted) when a signal came.
    pub fn summary(&self) -> Result<Summary, RunError> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let result = folder.path().join("summary.json");
        let arguments = rank::arguments(&self.task(result.clone()), folder.path())?;
        // The threads of `local` live in one process, started the same way.
        let processes = match self.transport {
            None | Some(TransportKind::Local) => 1,
            Some(_) => self.ranks,
        };
        outcome::run(&World::loopback().launch(&rank::this_program()?, arguments, processes, self.timeout)?)?;
        Ok(rank::left(&result, 0)?)
    }

    /// What the ranks are told.
    fn task(&self, result: PathBuf) -> Task {
        Task {
            config: self.config.clone(),
            transport: self.transport.unwrap_or(TransportKind::Local),
            node_transport: self.node_transport,
            options: self.options.clone(),
            ranks: self.ranks,
            threads: self.threads,
            source: self.source.clone(),
            tokenizer: self.tokenizer,
            result,
        }
    }
}
