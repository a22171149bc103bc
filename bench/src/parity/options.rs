//! The command line of `bench parity`, checked.

use std::path::PathBuf;

use gpt2::corpus::Corpus;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::TokenizerKind;
use isocomm::TransportKind;
use rig::BenchError;
use rig::folder;
use rig::rank::load_text;

use super::plan::{BATCH, Base, Variant};

/// Compares every strategy with one device, with faults planted as a control, and its messages with its formula.
///
/// Ranks are threads of this process for the comparison, and processes over each transport for the count. The program exits with 1
/// when a run differs by more than the bound of its column, a planted fault stays within the bound, or a count is off the formula.
#[derive(Debug, clap::Args)]
pub(crate) struct ParityArgs {
    /// Strategies, separated by commas; ps also with a dedicated server.
    #[arg(long, value_delimiter = ',', default_value = "ps,sharded-ps,ring,ddp,zero1,zero2,fsdp,hierarchical")]
    strategies: Vec<StrategyKind>,
    /// Numbers of ranks of the comparison, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3,4")]
    ranks: Vec<usize>,
    /// Transports of the count, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "local,shm,tcp-raw,tcp,quic")]
    transports: Vec<TransportKind>,
    /// Optimizer steps of a run of the comparison.
    #[arg(long, default_value_t = 20)]
    steps: u64,
    /// Seed of weights and data order.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Folder for parity.jsonl, a line of JSON for each row.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// What the command line means.
pub(crate) struct Settings {
    pub(super) variants: Vec<Variant>,
    pub(super) ranks: Vec<usize>,
    pub(super) transports: Vec<TransportKind>,
    pub(super) base: Base,
    pub(super) corpus: Corpus,
    pub(super) source: Option<PathBuf>,
    pub(super) out: Option<PathBuf>,
}

impl ParityArgs {
    pub(super) fn allows_debug(&self) -> bool {
        self.allow_debug
    }

    pub(super) fn check(&self) -> Result<Settings, BenchError> {
        if self.steps == 0 {
            return Err("--steps must be at least 1".into());
        }
        let variants = Variant::of(&self.strategies);
        if variants.is_empty() {
            return Err("--strategies: none of them communicates".into());
        }
        // Up to so many ranks every share of the batch is even, with one worker less too.
        if let Some(ranks) = self.ranks.iter().find(|ranks| !(1..=4).contains(*ranks)) {
            return Err(format!("--ranks {ranks} must lie between 1 and 4: a step has {BATCH} sequences").into());
        }
        if let Some(why) = self.transports.iter().find_map(|transport| transport.missing()) {
            return Err(why.into());
        }
        if let Some(out) = &self.out {
            folder::make(out)?;
        }
        let corpus = load_text(self.data.as_deref(), TokenizerKind::Bytes)?;
        Ok(Settings {
            variants,
            ranks: self.ranks.clone(),
            transports: self.transports.clone(),
            base: Base { seed: self.seed, steps: self.steps, vocabulary: corpus.vocab_size() },
            corpus,
            source: self.data.clone(),
            out: self.out.clone(),
        })
    }
}
