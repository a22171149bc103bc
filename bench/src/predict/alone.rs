//! What one rank of a job does by itself, recorded without the others: its computation is as long as when nothing else runs on its cores, and it
//! asks for the operations that it would ask for.

use burn::tensor::Device;
use gpt2::run::{RankOptions, run_alone};
use gpt2::strategy::StrategyKind;
use gpt2::trainer::{Keep, Observer, StepReport};
use isocomm::{TransportKind, TransportOptions};
use predict::trace::RankTrace;
use rig::BenchError;
use rig::rank::load_text;
use rig::record::Cell;
use rig::training::{Step, TextSource, config};

use super::steps;

/// Fewest periods of which a trace is made.
const PERIODS: usize = 3;

/// Whether what a rank does depends on nobody else: it knows its node, and waits for named ranks, not for whoever comes first.
pub(super) fn can_be_alone(kind: StrategyKind) -> bool {
    !kind.spec().tells_nodes_apart && kind != StrategyKind::AsyncPs
}

/// What `rank` of a cell does.
///
/// # Errors
/// The cell's strategy needs the others, or what else ended the training.
pub(super) fn rank_trace(cell: &Cell, text: &TextSource, rank: usize) -> Result<RankTrace, BenchError> {
    let kind: StrategyKind = cell.strategy.parse()?;
    if !can_be_alone(kind) {
        return Err(format!(
            "{kind}: what a rank does depends on the other ranks, so it cannot be recorded alone; record a run of all ranks with `bench \
             record`, and give its trace with --trace"
        )
        .into());
    }
    let period = cell.period();
    let mut config = config(cell, text.vocabulary)?;
    config.steps = cell.steps.max(2 + (PERIODS * period) as u64);
    let corpus = load_text(text.source.as_deref(), text.tokenizer)?;
    let options = RankOptions {
        transport: TransportKind::LOCAL,
        options: TransportOptions { lanes: kind.lanes(cell.ranks, cell.lanes), ..TransportOptions::default() },
        node_transport: None,
        threads: Some(cell.threads),
        keep: Keep::default(),
    };
    let mut seen = Seen(Vec::new());
    run_alone(&config, &corpus, (rank, cell.ranks), &options, &Device::flex(), &mut seen)?;
    // When its operations ended without the others says nothing.
    Ok(steps::rank_trace(&seen.0, period)?.without_times())
}

/// Keeps what each step did.
struct Seen(Vec<Step>);

impl Observer for Seen {
    fn step(&mut self, report: &StepReport) {
        self.0.push(Step {
            ms: report.ms,
            spans: report.spans.clone(),
            operations: report.communications.clone(),
            communication: report.parts.communication,
            hidden: report.parts.hidden,
        });
    }
}
