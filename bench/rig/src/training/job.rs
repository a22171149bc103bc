//! A training job, from its task to what its ranks leave.

use std::path::{Path, PathBuf};
use std::time::Duration;

use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{Summary, TrainConfig};
use isocomm::{Rung, TransportKind, TransportOptions};

use super::task::{Network, RankOutput, Task};
use crate::link::TestNetwork;
use crate::outcome::{self, RunError};
use crate::rank;
use crate::record::InjectedDelay;

/// What to train, and by whom. The ranks are this executable, started again.
#[derive(Clone, Debug)]
pub struct Training {
    pub config: TrainConfig,
    /// `None` for ranks that talk to nobody: each runs `config` alone, all at the same time.
    pub rung: Option<Rung>,
    /// What connects the ranks of a node, for strategies that tell nodes apart.
    pub node_transport: Option<TransportKind>,
    pub options: TransportOptions,
    pub ranks: usize,
    /// Threads that compute, in each rank.
    pub threads: usize,
    /// A text file, a folder of text files, or token shards; `None` for the documentation of this program's dependencies.
    pub source: Option<PathBuf>,
    pub tokenizer: TokenizerKind,
    /// Whether each rank keeps what every step did, and what the network did meanwhile. It takes memory that grows with the steps.
    pub watched: bool,
    /// A delay in each step.
    pub planted: Option<InjectedDelay>,
    /// The job must end within this time.
    pub timeout: Duration,
    /// Where its temporary folder is made; `None` for the system's place for such.
    pub within: Option<PathBuf>,
}

/// How the names of temporary folders of jobs begin. What a killed program has left, the next one takes away.
pub const FOLDER: &str = "run-";

impl Training {
    /// Of bytes of text, not watched, with all settings of the transport at their defaults; it must end within `timeout`.
    pub fn new(
        config: TrainConfig,
        transport: Option<TransportKind>,
        ranks: usize,
        threads: usize,
        timeout: Duration,
    ) -> Self {
        Training {
            config,
            rung: transport.map(Rung::from),
            node_transport: None,
            options: TransportOptions { timeout: timeout / 2, ..TransportOptions::default() },
            ranks,
            threads,
            source: None,
            tokenizer: TokenizerKind::Bytes,
            watched: false,
            planted: None,
            timeout,
            within: None,
        }
    }

    /// Runs it over `network`, whose counters begin anew; what each process leaves, in order.
    ///
    /// # Errors
    /// The first thing that went wrong, that the time was up, or that a signal came.
    pub fn run(&self, network: &TestNetwork) -> Result<Vec<RankOutput>, RunError> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(FOLDER);
        let folder = match &self.within {
            Some(within) => builder.tempdir_in(within),
            None => builder.tempdir(),
        };
        let folder = folder.map_err(|error| format!("no temporary folder: {error}"))?;
        let arguments = rank::arguments(&self.task(network, folder.path()), folder.path())?;
        let processes = self.processes();
        let launch = network.launch(&rank::this_program()?, arguments, processes, self.timeout)?;
        network.reset_counters()?;
        outcome::run(&launch)?;
        Ok((0..processes).map(|rank| RankOutput::of(folder.path(), rank)).collect::<Result<_, _>>()?)
    }

    /// Runs it on loopback; what rank 0 says of it.
    ///
    /// # Errors
    /// As [`run`](Training::run).
    pub fn summary(&self) -> Result<Summary, RunError> {
        let outputs = self.run(&TestNetwork::loopback())?;
        let summary = outputs.into_iter().find_map(|output| output.summary);
        Ok(summary.ok_or_else(|| "rank 0 left no summary".to_string())?)
    }

    /// The threads of `local` live in one process, started the same way.
    fn processes(&self) -> usize {
        if self.rung.is_some_and(Rung::is_threads) { 1 } else { self.ranks }
    }

    pub(super) fn task(&self, network: &TestNetwork, results: &Path) -> Task {
        Task {
            config: self.config.clone(),
            rung: self.rung,
            options: self.options.clone(),
            node_transport: self.node_transport,
            ranks: self.ranks,
            threads: self.threads,
            source: self.source.clone(),
            tokenizer: self.tokenizer,
            network: Network {
                addresses: network.addresses(),
                interface: network.interface().into(),
                shared: network.ends() < self.ranks,
            },
            watched: self.watched,
            planted: self.planted.clone(),
            results: results.to_owned(),
        }
    }
}
