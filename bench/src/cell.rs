//! One cell: a strategy over a transport on some ranks.

use gpt2::config::{ModelConfig, Preset};
use gpt2::optim::LearningRate;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::trainer::{Parts, RankReport, Summary, TrainConfig};
use isocomm::{Medium, TransportKind};
use serde::Serialize;

use crate::args::Setup;
use crate::environment::Environment;
use crate::runner::{Interrupted, Run, RunError};

/// What to run.
#[derive(Clone, Debug)]
pub(crate) struct Cell {
    pub(crate) strategy: StrategyKind,
    /// `None` for a single rank, which talks to nobody.
    pub(crate) transport: Option<TransportKind>,
    pub(crate) ranks: usize,
    pub(crate) preset: Preset,
    pub(crate) steps: u64,
    pub(crate) batch: usize,
    pub(crate) threads: usize,
    /// What connects the ranks of a node, for strategies that tell nodes apart.
    pub(crate) node_transport: Option<TransportKind>,
}

/// A cell's line in `results.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) strategy: String,
    pub(crate) transport: String,
    pub(crate) node_transport: Option<String>,
    pub(crate) ranks: usize,
    pub(crate) threads_per_rank: usize,
    pub(crate) model: ModelConfig,
    pub(crate) global_batch: usize,
    pub(crate) steps: u64,
    pub(crate) seed: u64,
    pub(crate) wire: String,
    /// `ok`, or why there are no figures.
    pub(crate) status: String,
    pub(crate) tokens_per_s: Option<f64>,
    pub(crate) step_ms: Option<f64>,
    /// How long a step waits for communication (gradients, parameters, scalars): the median, on the rank where it is largest.
    pub(crate) exposed_ms: Option<f64>,
    /// Median payload bytes sent a step, on the rank that sends most.
    pub(crate) bytes_counted: Option<u64>,
    pub(crate) bytes_expected: Option<u64>,
    pub(crate) bytes_by_rank: Vec<Option<u64>>,
    pub(crate) bytes_expected_by_rank: Vec<u64>,
    /// Payload of scalars and bytes of headers sent a step, by rank.
    pub(crate) scalar_bytes_by_rank: Vec<Option<u64>>,
    pub(crate) framing_bytes_by_rank: Vec<Option<u64>>,
    pub(crate) messages_by_rank: Vec<Option<u64>>,
    pub(crate) messages_expected_by_rank: Vec<u64>,
    pub(crate) weights_hash: Option<String>,
    pub(crate) final_loss: Option<f64>,
    pub(crate) losses: Vec<f64>,
    pub(crate) grad_norms: Vec<f64>,
    /// Of the rank that holds most.
    pub(crate) peak_rss_bytes: Option<u64>,
    /// Whether `peak_rss_bytes` is a process's memory divided by the ranks in it.
    pub(crate) peak_rss_is_shared: bool,
    pub(crate) parts_by_rank: Vec<Parts>,
    pub(crate) mfu: Option<f64>,
    pub(crate) mfu_formula: Option<String>,
    pub(crate) transport_facts: Vec<(String, String)>,
    pub(crate) environment: Environment,
}

impl Row {
    /// Whether the cell ran, and each rank sent in every step what the formula says.
    pub(crate) fn is_sound(&self) -> bool {
        self.status == "ok"
    }
}

impl Cell {
    /// Runs the cell in processes of its own. A cell that fails is a row that says why.
    ///
    /// # Errors
    /// [`Interrupted`] when the user has had enough.
    pub(crate) fn run(&self, setup: &Setup) -> Result<Row, Interrupted> {
        let mut row = self.row(setup);
        match self.summary(setup) {
            Ok(summary) => fill(&mut row, &summary),
            Err(RunError::Failed(error) | RunError::TimedOut(error)) => row.status = format!("failed: {error}"),
            Err(RunError::Interrupted(interrupted)) => return Err(interrupted),
        }
        Ok(row)
    }

    fn summary(&self, setup: &Setup) -> Result<Summary, RunError> {
        let run = Run::new(self.config(setup), self.transport, self.ranks, self.threads, setup.cell_timeout);
        Run { source: setup.source.clone(), node_transport: self.node_transport, ..run }.summary()
    }

    fn config(&self, setup: &Setup) -> TrainConfig {
        // Two nodes, where the ranks can be divided so.
        let ranks_per_node = if self.ranks.is_multiple_of(2) { self.ranks / 2 } else { self.ranks };
        TrainConfig {
            options: StrategyOptions { wire: setup.wire, ranks_per_node, ..StrategyOptions::default() },
            seed: setup.seed,
            steps: self.steps,
            global_batch: self.batch,
            learning_rate: LearningRate::WarmupCosine { peak: 1e-3, floor: 1e-4, warmup: 5, total: self.steps.max(10) },
            ..TrainConfig::of(self.preset.config(setup.corpus.vocab_size()), self.strategy)
        }
    }

    fn row(&self, setup: &Setup) -> Row {
        Row {
            strategy: self.strategy.to_string(),
            transport: self.transport.map_or("none".into(), |transport| transport.to_string()),
            node_transport: self.node_transport.map(|transport| transport.to_string()),
            ranks: self.ranks,
            threads_per_rank: self.threads,
            model: self.preset.config(setup.corpus.vocab_size()),
            global_batch: self.batch,
            steps: self.steps,
            seed: setup.seed,
            wire: setup.wire.to_string(),
            status: "ok".into(),
            tokens_per_s: None,
            step_ms: None,
            exposed_ms: None,
            bytes_counted: None,
            bytes_expected: None,
            bytes_by_rank: Vec::new(),
            bytes_expected_by_rank: Vec::new(),
            scalar_bytes_by_rank: Vec::new(),
            framing_bytes_by_rank: Vec::new(),
            messages_by_rank: Vec::new(),
            messages_expected_by_rank: Vec::new(),
            weights_hash: None,
            final_loss: None,
            losses: Vec::new(),
            grad_norms: Vec::new(),
            peak_rss_bytes: None,
            peak_rss_is_shared: self.transport.is_some_and(|kind| kind.medium() == Medium::Threads),
            parts_by_rank: Vec::new(),
            mfu: None,
            mfu_formula: None,
            transport_facts: Vec::new(),
            environment: setup.environment.clone(),
        }
    }
}

fn fill(row: &mut Row, summary: &Summary) {
    let ranks = &summary.ranks;
    row.tokens_per_s = Some(summary.tokens_per_s);
    row.step_ms = Some(summary.step_ms);
    row.exposed_ms = ranks.iter().map(|rank| rank.parts.exposed + rank.parts.scalars).max_by(f64::total_cmp);
    row.bytes_by_rank = ranks.iter().map(|rank| rank.bytes_counted).collect();
    row.bytes_expected_by_rank = ranks.iter().map(|rank| rank.bytes_expected).collect();
    row.bytes_counted = row.bytes_by_rank.iter().flatten().max().copied();
    row.bytes_expected = row.bytes_expected_by_rank.iter().max().copied();
    row.scalar_bytes_by_rank = ranks.iter().map(|rank| rank.scalar_bytes).collect();
    row.framing_bytes_by_rank = ranks.iter().map(|rank| rank.framing_bytes).collect();
    row.messages_by_rank = ranks.iter().map(|rank| rank.messages).collect();
    row.messages_expected_by_rank = ranks.iter().map(|rank| rank.expected.messages).collect();
    row.weights_hash = Some(summary.weights_hash.clone());
    row.final_loss = Some(summary.final_loss);
    row.losses.clone_from(&summary.losses);
    row.grad_norms.clone_from(&summary.grad_norms);
    row.peak_rss_bytes = ranks.iter().map(|rank| rank.peak_rss_bytes).max();
    row.parts_by_rank = ranks.iter().map(|rank| rank.parts).collect();
    row.mfu = Some(summary.mfu);
    row.mfu_formula = Some(summary.mfu_formula.clone());
    row.transport_facts.clone_from(&summary.transport);
    if let Some(off) = ranks.iter().find_map(off_the_formula) {
        row.status = off;
    }
}

/// What a rank did otherwise than the formula says.
pub(crate) fn off_the_formula(rank: &RankReport) -> Option<String> {
    let RankReport { expected, .. } = rank;
    let pairs = [
        ("bytes", rank.bytes_counted, expected.payload),
        ("messages", rank.messages, expected.messages),
        ("operations", Some(rank.operations), expected.operations),
    ];
    if let Some((bytes, messages)) = rank.node_sent
        && (bytes, messages) != (expected.node_payload, expected.node_messages)
    {
        return Some(format!(
            "off the formula: rank {}: {bytes} bytes in {messages} messages inside its node a step, not {} in {}",
            rank.rank, expected.node_payload, expected.node_messages
        ));
    }
    let wrong = pairs.into_iter().find_map(|(what, counted, expected)| {
        let counted = counted.filter(|counted| *counted != expected)?;
        Some(format!("off the formula: rank {}: {counted} {what} a step, not {expected}", rank.rank))
    });
    let unsteady =
        || format!("off the formula: rank {} did not send the same number of bytes in every step", rank.rank);
    wrong.or_else(|| (!rank.bytes_steady).then(unsteady))
}
