//! The command line of `bench parity`, checked.

use std::path::PathBuf;

use gpt2::corpus::Corpus;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::TokenizerKind;
use isocomm::TransportKind;
use rig::BenchError;
use rig::folder;
use rig::rank::load_text;
use rig::record::Axis;
use rig::transports;

use super::plan::Variant;
use crate::plan::{Draft, default};

/// Compares the losses and gradient norms of every strategy with those of one device, and its bytes and messages with its formula. Planted faults
/// check that a wrong result is noticed.
///
/// For the comparison ranks are threads of one process; for the counts they are processes, except with `local`. The exit code is 1 if a run differs
/// by more than the bound of its column, if a planted fault stays within the bound, or if a count differs from the formula.
#[derive(Debug, clap::Args)]
pub(crate) struct ParityArgs {
    /// Strategies, separated by commas; ps runs with and without a dedicated server.
    #[arg(long, value_delimiter = ',', default_value = default("parity", Axis::Strategy))]
    strategies: Vec<StrategyKind>,
    /// Numbers of ranks for the comparison, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = default("parity", Axis::Ranks))]
    ranks: Vec<usize>,
    /// Transports for the counts, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = transports::of_bytes())]
    transports: Vec<TransportKind>,
    /// Optimizer steps of each run of the comparison.
    #[arg(long, default_value = default("parity", Axis::Steps))]
    steps: u64,
    /// Random seed of weights and data order.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Folder for parity.jsonl, which has a line of JSON for each row.
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
    pub(super) draft: Draft,
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
        if let Some(other) = self.strategies.iter().find(|kind| !kind.spec().is_one_device) {
            return Err(format!(
                "--strategies {other}: it cannot be compared, because its ranks do not all average gradients in every step, so it computes \
                 something else than one device; leave it out"
            )
            .into());
        }
        let variants = Variant::of(&self.strategies);
        if variants.is_empty() {
            return Err("--strategies: at least one must communicate, such as ddp".into());
        }
        // Up to so many ranks every share of the batch is even, with one worker less too.
        if let Some(ranks) = self.ranks.iter().find(|ranks| !(1..=4).contains(*ranks)) {
            let batch = default("parity", Axis::Batch);
            return Err(format!("--ranks {ranks} must be from 1 to 4, because a step has {batch} sequences").into());
        }
        if let Some(why) = self.transports.iter().find_map(|transport| transport.missing()) {
            return Err(why.into());
        }
        if let Some(out) = &self.out {
            folder::make(out)?;
        }
        let corpus = load_text(self.data.as_deref(), TokenizerKind::Bytes)?;
        let strategies: Vec<StrategyKind> =
            self.strategies.iter().copied().filter(|strategy| *strategy != StrategyKind::Single).collect();
        let mut draft = Draft::ready("parity")?;
        draft
            .set(Axis::Strategy, &strategies)
            .set(Axis::Ranks, &self.ranks)
            .set(Axis::Steps, &[self.steps])
            .set(Axis::Seed, &[self.seed])
            .set_also(Axis::Transport, &self.transports);
        // Before there is any file.
        draft.plan()?;
        Ok(Settings {
            variants,
            ranks: self.ranks.clone(),
            transports: self.transports.clone(),
            draft,
            corpus,
            source: self.data.clone(),
            out: self.out.clone(),
        })
    }
}
