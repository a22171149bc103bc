//! What can be asked of a run.

use std::borrow::Cow;
use std::fmt;

use clap::ValueEnum;
use serde::Serialize;

use super::interval::RunValue;
use super::median::median;
use crate::record::{Rank, Record, Steps};

/// A figure of a run: a time of each step, or something counted once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// Time of a step, on the rank that takes longest.
    Step,
    /// Tokens a second over all ranks.
    Tokens,
    /// Reading the batch.
    Data,
    /// Forward and backward pass; on a GPU until they have finished.
    Compute,
    /// Packing gradients and parameters for the network.
    Pack,
    /// Waiting for gradients and parameters (exposed communication).
    Exposed,
    /// Waiting for loss and gradient norm.
    Scalars,
    /// Waiting for ranks that had not begun the operation.
    Skew,
    /// All waiting: exposed, scalars and skew.
    Waits,
    /// Unpacking gradients and parameters that were received.
    Unpack,
    /// Gradient norm and the optimizer's update; on a GPU until they have finished.
    Optimizer,
    /// Time that belongs to no other part.
    Other,
    /// Communication in progress, hidden or exposed.
    Communication,
    /// Communication during other work (hidden communication).
    Hidden,
    /// Payload bytes sent in a step, by the rank that sends most.
    Bytes,
    /// Training loss of the last step.
    Loss,
    /// Memory of the rank that takes most.
    Memory,
}

/// Which rank's part of the steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Over {
    /// The mean over ranks, step by step.
    #[default]
    Mean,
    /// The rank whose median is the largest.
    Longest,
}

impl Metric {
    /// As a heading says it.
    pub fn title(self) -> String {
        match self {
            Metric::Step => "step time".into(),
            Metric::Tokens => "throughput".into(),
            Metric::Bytes => "payload a step".into(),
            Metric::Loss => "final loss".into(),
            Metric::Memory => "peak memory".into(),
            _ => format!("{self} in a step"),
        }
    }

    pub fn unit(self) -> &'static str {
        match self {
            Metric::Tokens => "tokens/s",
            Metric::Bytes => "bytes",
            Metric::Loss => "nats",
            Metric::Memory => "MB",
            _ => "ms",
        }
    }

    /// Whether more of it is what one wants.
    pub fn more_is_better(self) -> bool {
        matches!(self, Metric::Tokens | Metric::Hidden)
    }

    /// Whether it is the same in every run unless something was changed.
    pub fn is_exact(self) -> bool {
        self == Metric::Bytes
    }

    /// What a lower and a higher figure are called.
    pub fn comparatives(self) -> (&'static str, &'static str) {
        match self {
            Metric::Step => ("faster", "slower"),
            Metric::Tokens => ("slower", "faster"),
            Metric::Loss => ("lower", "higher"),
            _ => ("less", "more"),
        }
    }

    /// Digits after the point for figures of about this size, so that four stand in all.
    pub fn digits(self, size: f64) -> usize {
        match self {
            Metric::Bytes => 0,
            Metric::Loss => 4,
            _ => [100.0, 10.0, 1.0].iter().position(|&limit| size.abs() >= limit).map_or(3, |place| place + 1),
        }
    }

    /// The run's figure, from the steps after the first `cut`; `None` where it has none. Of a run whose steps nobody watched, step time and
    /// throughput are the medians that the trainer itself gives.
    pub fn of(self, record: &Record, over: Over, cut: usize) -> Option<RunValue> {
        let measured = record.measured.as_ref()?;
        let counted = |value: f64| value.is_finite().then(|| RunValue::counted(record.round, value));
        let period = record.cell.period();
        let settled = |series: &[f64]| RunValue::of_steps(record.round, &rounds(series.get(cut..)?, period));
        match self {
            Metric::Bytes => counted(measured.ranks.iter().filter_map(|rank| rank.payload_bytes).max()? as f64),
            Metric::Loss => counted((*measured.losses.last()?)?),
            Metric::Memory => counted(measured.ranks.iter().map(|rank| rank.peak_rss_bytes).max()? as f64 / 1e6),
            Metric::Step => {
                let trainer = || counted(measured.trained.as_ref()?.step_ms?);
                settled(&record.step_ms()).or_else(trainer)
            }
            Metric::Tokens => {
                let tokens = measured.tokens_per_step as f64;
                let a_second = |ms: &f64| (*ms > 0.0).then(|| tokens / ms * 1e3);
                let trainer = || counted(measured.trained.as_ref()?.tokens_per_s?);
                let steps = record.step_ms();
                let speeds = || {
                    let times = rounds(steps.get(cut..)?, period);
                    let speeds = times.iter().map(a_second).collect::<Option<Vec<_>>>()?;
                    RunValue::of_steps(record.round, &speeds)
                };
                speeds().or_else(trainer)
            }
            part => settled(&part.over(&measured.ranks, over, (cut, period))?),
        }
    }

    /// This part of the steps of one rank.
    pub fn column(self, steps: &Steps) -> Cow<'_, [f64]> {
        Cow::Borrowed(match self {
            Metric::Waits => {
                let together = steps.exposed.iter().zip(&steps.scalars).zip(&steps.skew);
                return together.map(|((exposed, scalars), skew)| exposed + scalars + skew).collect();
            }
            Metric::Data => &steps.data,
            Metric::Compute => &steps.compute,
            Metric::Pack => &steps.pack,
            Metric::Exposed => &steps.exposed,
            Metric::Scalars => &steps.scalars,
            Metric::Skew => &steps.skew,
            Metric::Unpack => &steps.unpack,
            Metric::Optimizer => &steps.optimizer,
            Metric::Other => &steps.other,
            Metric::Communication => &steps.communication,
            Metric::Hidden => &steps.hidden,
            Metric::Step | Metric::Tokens | Metric::Bytes | Metric::Loss | Metric::Memory => &steps.total,
        })
    }

    fn over(self, ranks: &[Rank], over: Over, (cut, period): (usize, usize)) -> Option<Vec<f64>> {
        let columns: Vec<Cow<'_, [f64]>> = ranks.iter().map(|rank| self.column(&rank.steps)).collect();
        match over {
            Over::Longest => {
                let middle = |column: &[f64]| median(&rounds(column.get(cut..)?, period));
                let settled = |column: &[f64]| middle(column).unwrap_or(f64::NEG_INFINITY);
                columns.into_iter().max_by(|a, b| settled(a).total_cmp(&settled(b))).map(Cow::into_owned)
            }
            Over::Mean => {
                let steps = columns.iter().map(|column| column.len()).min()?;
                let mean = |step: usize| columns.iter().map(|column| column[step]).sum::<f64>() / ranks.len() as f64;
                Some((0..steps).map(mean).collect())
            }
        }
    }
}

/// Steps of a strategy that does the same in every `period` of them, as the mean of each such round; of fewer steps than one, their mean.
fn rounds(steps: &[f64], period: usize) -> Cow<'_, [f64]> {
    let mean = |round: &[f64]| round.iter().sum::<f64>() / round.len() as f64;
    match steps.len() {
        0 => Cow::Borrowed(steps),
        _ if period < 2 => Cow::Borrowed(steps),
        few if few < period => Cow::Owned(vec![mean(steps)]),
        _ => steps.chunks_exact(period).map(mean).collect(),
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // As on the command line.
        f.pad(self.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Cell, Trained};
    use crate::stats::summary::made_up::{cell, record};

    #[test]
    fn a_step_is_of_the_slowest_rank_and_parts_are_of_all() {
        let record = record(cell("ddp"), 1, &[10.0; 8]);
        let value = |metric: Metric, over| metric.of(&record, over, 2).map(|run| run.value);
        assert_eq!(value(Metric::Step, Over::Mean), Some(10.0));
        assert_eq!(value(Metric::Tokens, Over::Mean), Some(51_200.0));
        assert_eq!(value(Metric::Exposed, Over::Mean), Some(3.0));
        assert_eq!(value(Metric::Exposed, Over::Longest), Some(4.0));
        // One rank's waits together, not the largest of each kind.
        let opposite = |exposed: f64, skew: f64| Rank {
            steps: Steps { exposed: vec![exposed; 8], scalars: vec![1.0; 8], skew: vec![skew; 8], ..Steps::default() },
            ..Rank::default()
        };
        let opposed = [opposite(25.0, 0.0), opposite(0.0, 26.0)];
        assert_eq!(Metric::Waits.over(&opposed, Over::Longest, (0, 1)), Some(vec![27.0; 8]));
        assert_eq!(value(Metric::Bytes, Over::Mean), Some(1000.0));
        assert_eq!(value(Metric::Loss, Over::Mean), Some(3.5));
        // Of steps that nobody watched the trainer's own medians.
        let mut unwatched = record.clone();
        let measured = unwatched.measured.as_mut().unwrap();
        measured.ranks.iter_mut().for_each(|rank| rank.steps = Steps::default());
        assert_eq!(Metric::Step.of(&unwatched, Over::Mean, 0), None);
        let measured = unwatched.measured.as_mut().unwrap();
        measured.trained = Some(Trained { step_ms: Some(12.0), tokens_per_s: Some(99.0), ..Trained::default() });
        let told = |metric: Metric| metric.of(&unwatched, Over::Mean, 0).map(|run| (run.value, run.error));
        assert_eq!((told(Metric::Step), told(Metric::Tokens)), (Some((12.0, 0.0)), Some((99.0, 0.0))));
        assert_eq!(told(Metric::Exposed), None);
        assert_eq!(value(Metric::Memory, Over::Mean), Some(8.0));
    }

    #[test]
    fn steps_of_ranks_that_synchronise_now_and_then_are_means_over_rounds() {
        let slow = |step: usize| if step % 4 == 3 { 50.0 } else { 10.0 };
        let steps: Vec<f64> = (0..15).map(slow).collect();
        let local = Cell { sync_every: Some(4), ..cell("local-sgd") };
        let of = |cell: Cell, cut| Metric::Step.of(&record(cell, 1, &steps), Over::Mean, cut).unwrap().value;
        assert_eq!([of(local.clone(), 0), of(local.clone(), 2)], [20.0, 20.0]);
        assert_eq!(of(cell("ddp"), 0), 10.0);
        // Fewer than a round.
        assert_eq!(of(local, 13), 10.0);
        let tokens =
            Metric::Tokens.of(&record(Cell { sync_every: Some(4), ..cell("diloco") }, 1, &steps), Over::Mean, 0);
        assert_eq!(tokens.unwrap().value, 25_600.0);
    }

    #[test]
    fn what_a_run_lacks_is_none() {
        let mut record = record(cell("ddp"), 1, &[10.0; 8]);
        assert_eq!(Metric::Step.of(&record, Over::Mean, 8), None);
        assert_eq!(Metric::Step.of(&record, Over::Mean, 99), None);
        let measured = record.measured.as_mut().unwrap();
        measured.losses.push(None);
        measured.ranks.iter_mut().for_each(|rank| rank.payload_bytes = None);
        measured.ranks[1].steps.exposed.truncate(3);
        assert_eq!(Metric::Exposed.of(&record, Over::Mean, 3), None);
        assert_eq!(Metric::Loss.of(&record, Over::Mean, 0), None);
        assert_eq!(Metric::Bytes.of(&record, Over::Mean, 0), None);
        record.measured.as_mut().unwrap().ranks.clear();
        let metrics = [Metric::Step, Metric::Compute, Metric::Exposed, Metric::Other, Metric::Hidden];
        assert!(metrics.into_iter().all(|metric| metric.of(&record, Over::Mean, 0).is_none()));
        record.measured = None;
        assert_eq!(Metric::Step.of(&record, Over::Mean, 0), None);
    }

    #[test]
    fn names_are_those_of_the_command_line() {
        assert_eq!(Metric::Communication.to_string(), "communication");
        assert_eq!(Metric::Exposed.title(), "exposed in a step");
    }

    #[test]
    fn four_digits_stand() {
        let digits = |size| Metric::Step.digits(size);
        assert_eq!((digits(1234.0), digits(12.0), digits(1.2), digits(-0.01)), (1, 2, 3, 3));
        assert_eq!((Metric::Bytes.digits(1.0), Metric::Loss.digits(10.0)), (0, 4));
    }
}
