//! One row: a strategy in one precision, and whether it did what was asked of it.

use gpt2::memory::{Category, Usage};
use gpt2::optim::LossScaling;
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use gpt2::trainer::{Parts, TrainConfig};
use rig::flag::FlagKind;
use rig::record::{Cell, Measured, Record, numbers};
use rig::training::{config, outcome};
use serde::Serialize;

/// First steps whose loss and gradient norm are compared with the reference's. Later ones are not: training amplifies differences of
/// rounding.
const COMPARED: usize = 10;

/// Largest relative difference to the reference in f32: sums run in another order, and ten steps of AdamW amplify what that changes. A
/// step too many or too few changes the loss by a hundred times as much.
const TOLERANCE: f64 = 1e-4;

/// Where values are rounded to 8 or 11 bits.
const TOLERANCE_16_BIT: f64 = 2e-2;

/// What a row runs.
#[derive(Clone, Debug)]
pub(super) struct Variant {
    /// In tables and pictures.
    pub(super) name: String,
    /// What the paper calls it.
    pub(super) paper: &'static str,
    pub(super) strategy: StrategyKind,
    /// Of computation and of gradients on their way.
    pub(super) precision: Precision,
    /// Whether the parameter server only serves, as one more rank.
    pub(super) dedicated: bool,
}

impl Variant {
    /// A row in f32.
    pub(super) fn new(strategy: StrategyKind, paper: &'static str) -> Self {
        Variant { name: strategy.to_string(), paper, strategy, precision: Precision::F32, dedicated: false }
    }

    /// Whether a cell is this row's.
    pub(super) fn is(&self, cell: &Cell) -> bool {
        cell.strategy == self.strategy.name()
            && cell.precision == self.precision.to_string()
            && cell.dedicated_server == self.dedicated
    }

    /// Parameter servers, where the strategy has any.
    fn servers(&self, computing: usize) -> Option<usize> {
        match self.strategy {
            StrategyKind::Ps => Some(1),
            StrategyKind::ShardedPs => Some(computing),
            _ => None,
        }
    }
}

/// A row's line in `rows.jsonl`.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    /// What the paper calls it.
    pub(super) paper: &'static str,
    pub(super) transport: String,
    /// Processes, or threads with `local`.
    pub(super) ranks: usize,
    pub(super) threads_per_rank: usize,
    pub(super) parameter_servers: Option<usize>,
    pub(super) config: TrainConfig,
    /// `ok`, or why not.
    pub(super) status: String,
    /// Assertions that do not hold.
    pub(super) problems: Vec<String>,
    /// Largest relative difference of the first losses to those of the reference.
    pub(super) loss_difference: Option<f64>,
    /// Likewise of the gradient norms.
    pub(super) norm_difference: Option<f64>,
    /// What was measured, which is in `results.jsonl`.
    #[serde(skip)]
    pub(super) summary: Option<Run>,
}

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) tokens_per_s: f64,
    pub(super) step_ms: f64,
    /// Steps taken.
    pub(super) steps: u64,
    pub(super) skipped_steps: u64,
    pub(super) final_loss: f64,
    pub(super) validation_loss: Option<f64>,
    pub(super) validations: Vec<(u64, f64)>,
    pub(super) losses: Vec<f64>,
    pub(super) grad_norms: Vec<f64>,
    pub(super) epochs: Vec<u64>,
    pub(super) seconds: Vec<f64>,
    pub(super) ranks: Vec<RankRun>,
}

/// What one rank of it did.
#[derive(Clone, Debug, Default)]
pub(super) struct RankRun {
    pub(super) rank: usize,
    pub(super) operations: u64,
    pub(super) operations_expected: u64,
    pub(super) bytes_counted: Option<u64>,
    pub(super) bytes_expected: u64,
    pub(super) optimizer_steps: (u64, u64),
    pub(super) parts: Parts,
    pub(super) cpu_utilization: f64,
    pub(super) gpu_utilization: Option<f64>,
    pub(super) peak_rss_bytes: u64,
    pub(super) memory: Option<Usage>,
}

impl Run {
    fn of(measured: &Measured) -> Self {
        let trained = measured.trained.clone().unwrap_or_default();
        let number = |value: Option<f64>| value.unwrap_or(f64::NAN);
        let ranks = measured.ranks.iter().map(|rank| {
            let own = rank.trained.clone().unwrap_or_default();
            RankRun {
                rank: rank.rank,
                operations: own.operations,
                operations_expected: own.operations_expected,
                bytes_counted: rank.payload_bytes,
                bytes_expected: rank.payload_expected,
                optimizer_steps: own.optimizer_steps,
                parts: own.parts,
                cpu_utilization: number(own.cpu_utilization),
                gpu_utilization: own.gpu_utilization,
                peak_rss_bytes: rank.peak_rss_bytes,
                memory: own.memory,
            }
        });
        let validations: Vec<(u64, f64)> =
            trained.validations.iter().map(|(step, loss)| (*step, number(*loss))).collect();
        Run {
            tokens_per_s: number(trained.tokens_per_s),
            step_ms: number(trained.step_ms),
            steps: measured.losses.len() as u64,
            skipped_steps: trained.skipped_steps,
            final_loss: measured.losses.iter().copied().flatten().last().unwrap_or(f64::NAN),
            validation_loss: validations.last().map(|(_, loss)| *loss),
            validations,
            losses: numbers(&measured.losses),
            grad_norms: numbers(&measured.grad_norms),
            epochs: trained.epochs,
            seconds: measured.seconds.clone(),
            ranks: ranks.collect(),
        }
    }
}

impl Row {
    /// The row of a record, judged beside the reference; `base` is the configuration that all rows share but for strategy and precision.
    ///
    /// # Errors
    /// The record's cell names what there is not.
    pub(super) fn of(
        variant: &Variant,
        record: &Record,
        vocabulary: usize,
        base: Option<&TrainConfig>,
        reference: Option<&Run>,
    ) -> Result<Self, String> {
        let cell = &record.cell;
        let config = config(cell, vocabulary)?;
        let base = base.cloned().unwrap_or_else(|| config.clone());
        let mut row = Row {
            name: variant.name.clone(),
            paper: variant.paper,
            transport: cell.transport.clone(),
            ranks: cell.ranks,
            threads_per_rank: cell.threads,
            parameter_servers: variant.servers(cell.workers()),
            config,
            status: "ok".into(),
            problems: Vec::new(),
            loss_difference: None,
            norm_difference: None,
            summary: None,
        };
        match outcome(record) {
            Ok(measured) => {
                let off = record.flags.iter().find(|flag| flag.kind == FlagKind::OffTheFormula);
                row.judge(&base, Run::of(measured), off.map(|off| off.what.clone()), reference);
            }
            Err(why) => row.status = format!("failed: {why}"),
        }
        Ok(row)
    }

    /// Whether the row ran and every assertion holds.
    pub(super) fn is_sound(&self) -> bool {
        self.status == "ok" && self.problems.is_empty()
    }

    /// The rank whose process held most.
    pub(super) fn fullest(&self) -> Option<(&RankRun, Usage)> {
        let ranks = self.summary.iter().flat_map(|summary| &summary.ranks);
        ranks.filter_map(|rank| Some((rank, rank.memory?))).max_by_key(|(_, usage)| usage.total.peak)
    }

    /// Lower and upper quartile of tokens a second over the steps after the first two, or after the first where there are few. The few
    /// steps before which there was a validation lie outside.
    pub(super) fn quartiles(&self) -> Option<(f64, f64)> {
        let seconds = &self.summary.as_ref()?.seconds;
        let mut speeds: Vec<f64> =
            seconds.windows(2).map(|pair| self.tokens_per_step() / (pair[1] - pair[0])).collect();
        if speeds.len() > 4 {
            speeds.remove(0);
        }
        speeds.sort_unstable_by(f64::total_cmp);
        Some((*speeds.get(speeds.len() / 4)?, *speeds.get(speeds.len() * 3 / 4)?))
    }

    fn tokens_per_step(&self) -> f64 {
        (self.config.global_batch * self.config.model.block_size) as f64
    }

    /// Seconds from the first step to the end of the last.
    pub(super) fn seconds(&self) -> Option<f64> {
        self.summary.as_ref()?.seconds.last().copied()
    }

    fn judge(&mut self, base: &TrainConfig, summary: Run, off: Option<String>, reference: Option<&Run>) {
        self.problems = problems(&self.config, base, &summary, off);
        if let Some(reference) = reference {
            let first = |values: &[f64]| values[..values.len().min(COMPARED)].to_vec();
            let difference = |of: fn(&Run) -> &[f64]| difference(&first(of(&summary)), &first(of(reference)));
            let loss = difference(|summary| &summary.losses);
            let norm = difference(|summary| &summary.grad_norms);
            let exact = self.config.precision == Precision::F32;
            let tolerance = if exact { TOLERANCE } else { TOLERANCE_16_BIT };
            // A scale that shrinks skips its first steps, after which losses are those of other weights.
            let same_steps = summary.skipped_steps == 0;
            if same_steps && loss > tolerance {
                self.problems.push(format!(
                    "the first losses differ from the reference's by {loss:.1e}, more than {tolerance:.0e}"
                ));
            }
            if same_steps && exact && norm > tolerance {
                self.problems.push(format!(
                    "the first gradient norms differ from the reference's by {norm:.1e}, more than {tolerance:.0e}"
                ));
            }
            self.loss_difference = Some(loss);
            self.norm_difference = Some(norm);
        }
        if let Some(problem) = self.problems.first() {
            self.status = format!("wrong: {problem}");
        }
        self.summary = Some(summary);
    }
}

/// Peak bytes of each purpose.
pub(super) fn by_purpose(usage: &Usage) -> [f64; Category::ALL.len()] {
    Category::ALL.map(|category| usage.of(category).peak as f64)
}

/// Everything in which a run is not what its configuration and the definition of its strategy say.
fn problems(config: &TrainConfig, base: &TrainConfig, summary: &Run, off: Option<String>) -> Vec<String> {
    let mut problems = Vec::new();
    let alike = TrainConfig {
        strategy: base.strategy,
        options: base.options.clone(),
        precision: base.precision,
        loss_scaling: base.loss_scaling,
        ..config.clone()
    };
    if alike != *base {
        problems
            .push("its configuration differs from that of the other rows in more than strategy and precision".into());
    }
    problems.extend(off);
    let steps = config.steps;
    let lengths = [summary.losses.len(), summary.grad_norms.len(), summary.seconds.len(), summary.epochs.len()];
    if summary.steps != steps || lengths.iter().any(|length| *length as u64 != steps) {
        problems.push(format!("{} steps, and {lengths:?} records of steps, instead of {steps}", summary.steps));
    }
    if summary.skipped_steps > 0 && config.loss_scaling == LossScaling::Off {
        problems.push(format!("{} steps were skipped without loss scaling", summary.skipped_steps));
    }
    let updates = steps.saturating_sub(summary.skipped_steps);
    for RankRun { rank, optimizer_steps: (fewest, most), .. } in &summary.ranks {
        if (*fewest, *most) != (updates, updates) {
            problems.push(format!(
                "rank {rank} took {fewest} to {most} optimizer steps in {steps} steps, of which {} were skipped: not one a step",
                summary.skipped_steps
            ));
        }
    }
    problems
}

/// Largest relative difference; infinite if the lengths differ or a value is not a number.
fn difference(values: &[f64], reference: &[f64]) -> f64 {
    if values.len() != reference.len() || values.is_empty() {
        return f64::INFINITY;
    }
    let relative = |(a, b): (&f64, &f64)| ((a - b) / b).abs();
    let apart = values.iter().zip(reference).map(relative);
    apart.fold(0.0, |most, next| if next.is_nan() { f64::INFINITY } else { f64::max(most, next) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpt2::config::Preset;

    fn base() -> TrainConfig {
        TrainConfig { steps: 3, ..TrainConfig::of(Preset::Micro.config(256), StrategyKind::Single) }
    }

    fn summary() -> Run {
        let rank = |rank| RankRun { rank, optimizer_steps: (3, 3), ..RankRun::default() };
        Run {
            steps: 3,
            losses: vec![5.0, 4.0, 3.0],
            grad_norms: vec![1.0, 1.0, 1.0],
            epochs: vec![1, 1, 1],
            seconds: vec![0.1, 0.2, 0.3],
            ranks: vec![rank(0), rank(1)],
            ..Run::default()
        }
    }

    fn found(config: &TrainConfig, base: &TrainConfig, summary: &Run) -> Vec<String> {
        problems(config, base, summary, None)
    }

    #[test]
    fn a_run_as_it_should_be_has_no_problems() {
        assert_eq!(found(&base(), &base(), &summary()), [""; 0]);
    }

    #[test]
    fn an_optimizer_that_steps_twice_is_noticed() {
        let mut doubled = summary();
        doubled.ranks[1].optimizer_steps = (6, 6);
        let wrong = found(&base(), &base(), &doubled);
        assert!(wrong.len() == 1 && wrong[0].contains("rank 1 took 6 to 6 optimizer steps in 3"), "{wrong:?}");
        let mut uneven = summary();
        uneven.ranks[0].optimizer_steps = (2, 3);
        assert_eq!(found(&base(), &base(), &uneven).len(), 1);
    }

    #[test]
    fn what_is_off_the_formula_is_noticed() {
        assert_eq!(problems(&base(), &base(), &summary(), Some("off".into())), ["off"]);
    }

    #[test]
    fn a_row_with_another_batch_or_rate_is_noticed() {
        let other = TrainConfig { global_batch: 24, ..base() };
        assert_eq!(found(&other, &base(), &summary()).len(), 1);
        let allowed = TrainConfig { precision: Precision::Bf16, strategy: StrategyKind::Ring, ..base() };
        assert_eq!(found(&allowed, &base(), &summary()), [""; 0]);
    }

    #[test]
    fn skipped_steps_need_a_reason() {
        let skipped = Run { skipped_steps: 1, ..summary() };
        assert_eq!(found(&base(), &base(), &skipped).len(), 3, "the skip itself, and on two ranks a step too many");
        let mut scaled = skipped;
        scaled.ranks.iter_mut().for_each(|rank| rank.optimizer_steps = (2, 2));
        let config = TrainConfig { loss_scaling: LossScaling::DYNAMIC, ..base() };
        assert_eq!(found(&config, &base(), &scaled), [""; 0]);
    }

    #[test]
    fn differences_are_relative_and_what_is_no_number_is_one() {
        assert_eq!(difference(&[1.0, 2.0], &[1.0, 4.0]), 0.5);
        assert_eq!(difference(&[f64::NAN, 1.0], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(difference(&[1.0], &[1.0, 2.0]), f64::INFINITY);
    }
}
