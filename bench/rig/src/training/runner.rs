//! Training runs in processes of their own.

use std::path::PathBuf;
use std::time::Duration;

use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{Summary, TrainConfig};
use gpt2::transports::{TransportKind, TransportOptions};

use crate::link::World;
use crate::outcome::{self, RunError};
use crate::rank;
use crate::worker::Task;

/// A training run: its ranks are this executable, started again.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) config: TrainConfig,
    /// `None` for a single rank, which talks to nobody.
    pub(crate) transport: Option<TransportKind>,
    /// What connects the ranks of a node, for strategies that tell nodes apart.
    pub(crate) node_transport: Option<TransportKind>,
    pub(crate) options: TransportOptions,
    pub(crate) ranks: usize,
    /// Threads that compute, in each rank.
    pub(crate) threads: usize,
    /// The path given with `--data`.
    pub(crate) source: Option<PathBuf>,
    pub(crate) tokenizer: TokenizerKind,
    /// The whole run must end within this time.
    pub(crate) timeout: Duration,
}

impl Run {
    /// A run of bytes of text over `transport` with all settings at their defaults, which must end within `timeout`.
    pub(crate) fn new(
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
    pub(crate) fn summary(&self) -> Result<Summary, RunError> {
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
