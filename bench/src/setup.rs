//! What all cells of the bare `bench` share.

use std::path::PathBuf;
use std::time::Duration;

use gpt2::config::Preset;
use gpt2::corpus::Corpus;
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use isocomm::TransportKind;
use rig::environment::Environment;
use rig::signal::Signals;

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
    /// Time for rounds beyond these, in cells that are not told apart.
    pub(crate) budget: Option<Duration>,
    /// Links whose cells are measured, by name.
    pub(crate) links: Vec<String>,
    /// Whether each cell gets a line of the last table.
    pub(crate) table: bool,
    pub(crate) batch: usize,
    pub(crate) seed: u64,
    pub(crate) wire: Precision,
    pub(crate) threads: usize,
    pub(crate) cell_timeout: Duration,
    pub(crate) environment: Environment,
    pub(crate) signals: Signals,
}
