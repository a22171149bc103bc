//! One row: a strategy in one precision, and whether it did what was asked of it.

use gpt2::cli::MAX_THREADS;
use gpt2::memory::{Category, Usage};
use gpt2::optim::LossScaling;
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use gpt2::trainer::{RankReport, Summary, TrainConfig};
use rig::environment::Environment;
use rig::formula::off_the_formula;
use rig::outcome;
use rig::signal::Interrupted;
use rig::training::Training;
use serde::Serialize;

use super::options::Settings;

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
    pub(super) loss_scaling: LossScaling,
    /// Whether the parameter server only serves, as one more rank.
    pub(super) dedicated: bool,
}

impl Variant {
    /// A row in f32.
    pub(super) fn new(strategy: StrategyKind, paper: &'static str) -> Self {
        Variant {
            name: strategy.to_string(),
            paper,
            strategy,
            precision: Precision::F32,
            loss_scaling: LossScaling::Off,
            dedicated: false,
        }
    }

    /// The run that `base` describes, with this strategy.
    fn config(&self, base: &TrainConfig) -> TrainConfig {
        let mut config = base.clone();
        config.strategy = self.strategy;
        config.precision = self.precision;
        config.loss_scaling = self.loss_scaling;
        config.options.wire = self.precision;
        config.options.dedicated_server = self.dedicated;
        config
    }

    /// Processes of the row, where `computing` ranks compute in all rows but `single`.
    fn ranks(&self, computing: usize) -> usize {
        match self.strategy {
            StrategyKind::Single => 1,
            _ => computing + usize::from(self.dedicated),
        }
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

/// A row's line in `results.jsonl`.
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
    /// Everything that was measured, step by step and rank by rank.
    pub(super) summary: Option<Summary>,
    pub(super) environment: Environment,
}

impl Row {
    /// Runs the row. One that fails says why.
    ///
    /// # Errors
    /// [`Interrupted`] when the user has had enough.
    pub(super) fn measure(
        variant: &Variant,
        base: &TrainConfig,
        settings: &Settings,
        reference: Option<&Summary>,
    ) -> Result<Self, Interrupted> {
        let ranks = variant.ranks(settings.ranks);
        let transport = (ranks > 1).then_some(settings.transport);
        let config = variant.config(base);
        let training =
            Training::new(config.clone(), transport, ranks, settings.threads.min(MAX_THREADS), settings.row_timeout);
        let training = Training { source: settings.source.clone(), tokenizer: settings.tokenizer, ..training };
        let mut row = Row {
            name: variant.name.clone(),
            paper: variant.paper,
            transport: transport.map_or("none".into(), |transport| transport.to_string()),
            ranks,
            threads_per_rank: settings.threads,
            parameter_servers: variant.servers(settings.ranks),
            config,
            status: "ok".into(),
            problems: Vec::new(),
            loss_difference: None,
            norm_difference: None,
            summary: None,
            environment: settings.environment.clone(),
        };
        match outcome::settled(training.summary())? {
            Ok(summary) => row.judge(base, summary, reference),
            Err(why) => row.status = format!("failed: {why}"),
        }
        Ok(row)
    }

    /// Whether the row ran and every assertion holds.
    pub(super) fn is_sound(&self) -> bool {
        self.status == "ok" && self.problems.is_empty()
    }

    /// The rank whose process held most.
    pub(super) fn fullest(&self) -> Option<(&RankReport, Usage)> {
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

    fn judge(&mut self, base: &TrainConfig, summary: Summary, reference: Option<&Summary>) {
        self.problems = problems(&self.config, base, &summary);
        if let Some(reference) = reference {
            let first = |values: &[f64]| values[..values.len().min(COMPARED)].to_vec();
            let difference = |of: fn(&Summary) -> &[f64]| difference(&first(of(&summary)), &first(of(reference)));
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
            self.status = format!("off: {problem}");
        }
        self.summary = Some(summary);
    }
}

/// Peak bytes of each purpose.
pub(super) fn by_purpose(usage: &Usage) -> [f64; Category::ALL.len()] {
    Category::ALL.map(|category| usage.of(category).peak as f64)
}

/// Everything in which a run is not what its configuration and the definition of its strategy say.
fn problems(config: &TrainConfig, base: &TrainConfig, summary: &Summary) -> Vec<String> {
    let mut problems = Vec::new();
    let alike = TrainConfig {
        strategy: base.strategy,
        options: base.options.clone(),
        precision: base.precision,
        loss_scaling: base.loss_scaling,
        ..config.clone()
    };
    if alike != *base {
        problems.push("its configuration differs from the other rows' in more than strategy and precision".into());
    }
    problems.extend(summary.ranks.iter().find_map(off_the_formula));
    let steps = config.steps;
    let lengths = [summary.losses.len(), summary.grad_norms.len(), summary.seconds.len(), summary.epochs.len()];
    if summary.steps != steps || lengths.iter().any(|length| *length as u64 != steps) {
        problems.push(format!("{} steps and {lengths:?} records of them, not {steps}", summary.steps));
    }
    if summary.skipped_steps > 0 && config.loss_scaling == LossScaling::Off {
        problems.push(format!("{} steps were skipped without loss scaling", summary.skipped_steps));
    }
    let updates = steps.saturating_sub(summary.skipped_steps);
    for RankReport { rank, optimizer_steps: (fewest, most), .. } in &summary.ranks {
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
    use gpt2::strategy::formula::Expected;
    use gpt2::trainer::Parts;

    fn base() -> TrainConfig {
        TrainConfig { steps: 3, ..TrainConfig::of(Preset::Micro.config(256), StrategyKind::Single) }
    }

    fn summary() -> Summary {
        let expected = Expected { operations: 4, payload: 100, messages: 8, ..Expected::default() };
        let rank = |rank| RankReport {
            rank,
            computes: true,
            bytes_counted: Some(100),
            bytes_expected: 100,
            bytes_steady: true,
            scalar_bytes: None,
            framing_bytes: None,
            messages: Some(8),
            expected,
            node_sent: None,
            between_nodes: false,
            operations: 4,
            optimizer_steps: (3, 3),
            parts: Parts::default(),
            cpu_utilization: 1.0,
            gpu_utilization: None,
            peak_rss_bytes: 0,
            memory: None,
            weights_hash: String::new(),
        };
        Summary {
            steps: 3,
            weights_hash: String::new(),
            final_loss: 3.0,
            validation_loss: None,
            validations: Vec::new(),
            losses: vec![5.0, 4.0, 3.0],
            grad_norms: vec![1.0, 1.0, 1.0],
            epochs: vec![1, 1, 1],
            seconds: vec![0.1, 0.2, 0.3],
            skipped_steps: 0,
            tokens_per_s: 1.0,
            step_ms: 1.0,
            parts: Parts::default(),
            ranks: vec![rank(0), rank(1)],
            mfu: 0.1,
            mfu_formula: String::new(),
            transport: Vec::new(),
            checkpoint: None,
        }
    }

    #[test]
    fn a_run_as_it_should_be_has_no_problems() {
        assert_eq!(problems(&base(), &base(), &summary()), [""; 0]);
    }

    #[test]
    fn an_optimizer_that_steps_twice_is_noticed() {
        let mut doubled = summary();
        doubled.ranks[1].optimizer_steps = (6, 6);
        let found = problems(&base(), &base(), &doubled);
        assert!(found.len() == 1 && found[0].contains("rank 1 took 6 to 6 optimizer steps in 3"), "{found:?}");
        let mut uneven = summary();
        uneven.ranks[0].optimizer_steps = (2, 3);
        assert_eq!(problems(&base(), &base(), &uneven).len(), 1);
    }

    #[test]
    fn an_operation_too_many_is_noticed() {
        let mut more = summary();
        more.ranks[0].operations = 5;
        let found = problems(&base(), &base(), &more);
        assert!(found.len() == 1 && found[0].contains("5 operations a step, not 4"), "{found:?}");
    }

    #[test]
    fn a_row_with_another_batch_or_rate_is_noticed() {
        let other = TrainConfig { global_batch: 24, ..base() };
        assert_eq!(problems(&other, &base(), &summary()).len(), 1);
        let allowed =
            Variant { precision: Precision::Bf16, ..Variant::new(StrategyKind::Ring, "Horovod") }.config(&base());
        assert_eq!(problems(&allowed, &base(), &summary()), [""; 0]);
    }

    #[test]
    fn skipped_steps_need_a_reason() {
        let skipped = Summary { skipped_steps: 1, ..summary() };
        assert_eq!(problems(&base(), &base(), &skipped).len(), 3, "the skip itself, and on two ranks a step too many");
        let mut scaled = skipped;
        scaled.ranks.iter_mut().for_each(|rank| rank.optimizer_steps = (2, 2));
        let config = TrainConfig { loss_scaling: LossScaling::DYNAMIC, ..base() };
        assert_eq!(problems(&config, &base(), &scaled), [""; 0]);
    }

    #[test]
    fn differences_are_relative_and_what_is_no_number_is_one() {
        assert_eq!(difference(&[1.0, 2.0], &[1.0, 4.0]), 0.5);
        assert_eq!(difference(&[f64::NAN, 1.0], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(difference(&[1.0], &[1.0, 2.0]), f64::INFINITY);
    }
}
