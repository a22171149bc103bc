//! The command line of `bench memory`, checked.

use std::path::PathBuf;

use gpt2::config::{ModelConfig, Preset};
use gpt2::segments::{SegmentInfo, layout};
use gpt2::strategy::StrategyKind;
use rig::BenchError;
use rig::check::even_batch;
use rig::folder;
use rig::record::Axis;
use rig::training::TextSource;

use crate::plan::{Draft, default};

/// The largest part of the parameters that the embedding may be: it is held as a whole by every strategy.
const MOST_EMBEDDING: f64 = 0.35;

/// Measures the memory of a rank by purpose, for each strategy, and compares it with bounds from theory.
///
/// Ranks are processes that communicate through shared memory. The exit code is 1 if parameters, gradients or optimizer take more memory than their
/// bound; or if ddp stays within the bounds of the sharding strategies, because then those bounds prove nothing.
#[derive(Debug, clap::Args)]
pub(crate) struct MemoryArgs {
    /// Strategies, separated by commas: single, ddp, zero1, zero2, fsdp.
    #[arg(long, value_delimiter = ',', default_value = default("memory", Axis::Strategy))]
    strategies: Vec<StrategyKind>,
    /// Numbers of ranks, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = default("memory", Axis::Ranks))]
    ranks: Vec<usize>,
    /// Model size.
    #[arg(long, default_value = default("memory", Axis::Preset))]
    preset: Preset,
    /// Transformer blocks of the model, instead of the preset's number. The more blocks, the smaller a segment is compared with the whole model.
    #[arg(long, default_value = default("memory", Axis::Layers))]
    layers: usize,
    /// Optimizer steps of each run.
    #[arg(long, default_value = default("memory", Axis::Steps))]
    steps: u64,
    /// Sequences of a step, all ranks together; a multiple of every number in --ranks.
    #[arg(long, default_value = default("memory", Axis::Batch))]
    batch: usize,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Folder for memory.jsonl, which has a line of JSON for each row.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// What the command line means.
pub(crate) struct Settings {
    pub(super) ranks: Vec<usize>,
    pub(super) preset: Preset,
    pub(super) model: ModelConfig,
    /// Its segments, in forward order.
    pub(super) segments: Vec<SegmentInfo>,
    pub(super) steps: u64,
    pub(super) batch: usize,
    pub(super) out: Option<PathBuf>,
}

impl MemoryArgs {
    pub(super) fn allows_debug(&self) -> bool {
        self.allow_debug
    }

    /// What the command line means, the plan that it makes of the ready one, and the text.
    pub(super) fn check(&self) -> Result<(Settings, Draft, TextSource), BenchError> {
        const OFFERED: [StrategyKind; 5] =
            [StrategyKind::Single, StrategyKind::Ddp, StrategyKind::Zero1, StrategyKind::Zero2, StrategyKind::Fsdp];
        if let Some(strategy) = self.strategies.iter().find(|strategy| !OFFERED.contains(strategy)) {
            return Err(format!(
                "--strategies {strategy}: this command has no bounds for it; choose single, ddp, zero1, zero2 or fsdp"
            )
            .into());
        }
        if self.steps == 0 {
            return Err("--steps must be at least 1".into());
        }
        self.ranks.iter().try_for_each(|ranks| even_batch(self.batch, *ranks))?;
        let text = TextSource::bytes(self.data.clone())?;
        let model = ModelConfig { n_layer: self.layers, ..self.preset.config(text.vocabulary) };
        let segments = layout(&model)?;
        let share = embedding_share(&segments);
        if share >= MOST_EMBEDDING {
            return Err(format!(
                "the embedding has {:.0} % of this model's parameters, and every strategy keeps all of it in memory, so sharding could not \
                 show; choose a larger --preset or more --layers",
                100.0 * share
            )
            .into());
        }
        let draft = self.draft()?;
        // Before there is any file.
        draft.plan()?;
        if let Some(out) = &self.out {
            folder::make(out)?;
        }
        let settings = Settings {
            ranks: self.ranks.clone(),
            preset: self.preset,
            model,
            segments,
            steps: self.steps,
            batch: self.batch,
            out: self.out.clone(),
        };
        Ok((settings, draft, text))
    }

    fn draft(&self) -> Result<Draft, String> {
        let mut draft = Draft::ready("memory")?;
        let most = self.ranks.iter().copied().max().unwrap_or(1);
        // One device is one rank.
        let asked = |strategy: &StrategyKind| *strategy != StrategyKind::Single || self.ranks.contains(&1);
        let strategies: Vec<StrategyKind> = self.strategies.iter().copied().filter(asked).collect();
        if strategies.is_empty() {
            return Err("--strategies single runs on 1 rank: add 1 to --ranks, or another strategy".into());
        }
        draft
            .set(Axis::Strategy, &strategies)
            .set(Axis::Ranks, &self.ranks)
            .set_also(Axis::Ranks, &[most])
            .set(Axis::Preset, &[self.preset])
            .set(Axis::Layers, &[self.layers])
            .set(Axis::Steps, &[self.steps])
            .set(Axis::Batch, &[self.batch])
            .retain(Axis::Strategy, |name| strategies.iter().any(|strategy| strategy.name() == name));
        Ok(draft)
    }
}

/// The embedding's part of all parameters.
pub(super) fn embedding_share(segments: &[SegmentInfo]) -> f64 {
    let total: usize = segments.iter().map(|segment| segment.len).sum();
    segments.first().map_or(0.0, |embedding| embedding.len as f64 / total as f64)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: MemoryArgs,
    }

    fn draft(arguments: &[&str]) -> Result<Draft, String> {
        Program::try_parse_from([&["bench"], arguments].concat()).map_err(|error| error.to_string())?.args.draft()
    }

    #[test]
    fn the_plan_is_the_command_without_options() {
        let cells = |draft: Draft| draft.plan().unwrap().cells;
        assert_eq!(cells(draft(&[]).unwrap()), cells(Draft::ready("memory").unwrap()));
        let some = cells(draft(&["--strategies", "single,fsdp", "--ranks", "2"]).unwrap());
        let found: Vec<(&str, usize, bool, &str)> = some
            .iter()
            .map(|cell| (cell.strategy.as_str(), cell.ranks, cell.recompute, cell.precision.as_str()))
            .collect();
        assert_eq!(found, [("fsdp", 2, false, "f32"), ("fsdp", 2, true, "f32"), ("fsdp", 2, false, "bf16")]);
    }

    #[test]
    fn one_device_is_one_rank() {
        let why = draft(&["--strategies", "single", "--ranks", "2,4"]).unwrap_err();
        assert!(why.contains("add 1 to --ranks"), "{why}");
    }
}
