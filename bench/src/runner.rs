//! Training runs in processes of their own.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use comm_core::launch::{Launch, Output};
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{Summary, TrainConfig};
use isocomm::{Medium, TransportKind, TransportOptions};

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

/// A signal ended the run.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("interrupted by signal {signal}; what was measured before is in the results")]
pub(crate) struct Interrupted {
    pub(crate) signal: i32,
}

/// Why there is no summary.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RunError {
    #[error("{0}")]
    Failed(String),
    /// It did not end by its deadline.
    #[error("{0}")]
    TimedOut(String),
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

impl From<String> for RunError {
    fn from(reason: String) -> Self {
        RunError::Failed(reason)
    }
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
    /// The cause, in one line; [`Interrupted`] when the user has had enough.
    pub(crate) fn summary(&self) -> Result<Summary, RunError> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let (task_file, result) = (folder.path().join("task.json"), folder.path().join("summary.json"));
        self.task(result.clone()).write(&task_file)?;
        self.launch(&task_file)?;
        let bytes = fs::read(&result).map_err(|error| format!("rank 0 left no summary: {error}"))?;
        serde_json::from_slice(&bytes).map_err(|error| format!("rank 0's summary: {error}").into())
    }

    /// What the ranks are told.
    pub(crate) fn task(&self, result: PathBuf) -> Task {
        Task {
            config: self.config.clone(),
            transport: self.transport.unwrap_or(TransportKind::LOCAL),
            node_transport: self.node_transport,
            options: self.options.clone(),
            ranks: self.ranks,
            threads: self.threads,
            source: self.source.clone(),
            tokenizer: self.tokenizer,
            result,
        }
    }

    fn launch(&self, task: &Path) -> Result<(), RunError> {
        let program = std::env::current_exe().map_err(|error| format!("where is this program? {error}"))?;
        let arguments: Vec<OsString> = vec!["worker".into(), "--task".into(), task.into()];
        // The threads of `local` live in one process, started the same way.
        let processes = match self.transport {
            Some(transport) if transport.medium() != Medium::Threads => self.ranks,
            _ => 1,
        };
        let mut launch = Launch::new(program, processes);
        launch.args = arguments;
        launch.output = Output::Captured;
        launch.timeout = Some(self.timeout);
        let outcome = launch.run().map_err(|error| format!("{error}"))?;
        if outcome.code == 0 {
            return Ok(());
        }
        // The launcher has caught the signal for all of us.
        if let Some(signal) = outcome.interrupted_by {
            return Err(Interrupted { signal }.into());
        }
        let lines =
            || outcome.captured.iter().flat_map(|rank| rank.stderr.lines()).filter(|line| !line.trim().is_empty());
        let said = lines().find(|line| line.contains("error:")).or_else(|| lines().next());
        let cause = outcome.cause.clone().unwrap_or_else(|| format!("exit code {}", outcome.code));
        Err(format!("{cause}: {}", said.unwrap_or("it said nothing")).into())
    }
}
