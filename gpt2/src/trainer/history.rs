//! What a rank keeps of its steps until the summary: little, so that a run may take any number of them.

use std::collections::BTreeMap;

use super::traffic::StepTraffic;
use super::{Parts, StepReport, median};
use crate::memory::{Allocations, Copies};
use crate::strategy::formula::Expected;
use crate::strategy::{Staleness, StepOutcome};

/// Steps whose figures are kept at a time, for medians. Of more steps those of every second are kept, then of every fourth, and so on.
const MOST_FIGURES: usize = 1 << 14;

/// Steps for whose losses there is room from the start.
const ROOM: usize = 1 << 16;

/// The steps of a run so far. Takes 32 bytes for each, in lists that the summary hands out, and besides at most 2 MB, however many there
/// are: the medians are those of all steps up to [`MOST_FIGURES`], and beyond that those of a sample of at least half as many, evenly
/// spread over the run.
#[derive(Debug)]
pub(super) struct History {
    /// Of each step.
    pub(super) losses: Vec<f64>,
    pub(super) grad_norms: Vec<f64>,
    pub(super) epochs: Vec<u64>,
    /// Seconds from the first step to the end of each.
    pub(super) seconds: Vec<f64>,
    pub(super) skipped: u64,
    /// Whether the strategy does more in some steps than in others.
    steps_differ: bool,
    /// Of the first steps that were not skipped, which no median counts where there are enough others.
    first: Vec<Figures>,
    /// Of the others.
    others: Downsampled<Figures>,
    /// What each step sent, without those that were skipped before they had sent all.
    pub(super) payload: Tally<u64>,
    pub(super) messages: Tally<u64>,
    pub(super) scalars: Tally<u64>,
    pub(super) framing: Tally<u64>,
    /// Payload bytes, and messages, of them over the node's own transport.
    pub(super) node_payload: Tally<u64>,
    pub(super) node_messages: Tally<u64>,
    /// Operations on gradients and parameters.
    pub(super) operations: Tally<u64>,
    /// What each of them was to send.
    expected: Tally<Expected>,
    /// Payload bytes and messages that were expected so far and not sent, and those of them inside the node.
    owed: [i128; 4],
    /// Of all gradients that were applied by a server that does not wait for all.
    pub(super) staleness: Staleness,
    /// Whether nothing was owed after any step that left nothing under way.
    pub(super) is_as_expected: bool,
}

/// What medians are taken of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Figures {
    pub(super) tokens_per_s: f64,
    pub(super) ms: f64,
    pub(super) matrix_share: f64,
    pub(super) parts: Parts,
    pub(super) cpu_utilization: f64,
    pub(super) gpu_utilization_percent: Option<f64>,
    pub(super) allocations: Option<Allocations>,
    pub(super) copies: Copies,
}

impl History {
    /// Steps that are left out of medians where there are more than [`FEW`](Self::FEW).
    const FIRST: usize = 2;
    const FEW: u64 = 4;

    /// Before the first of about `steps` steps.
    pub(super) fn of(steps: u64) -> Self {
        let room = usize::try_from(steps).unwrap_or(usize::MAX);
        let list = room.min(ROOM);
        History {
            losses: Vec::with_capacity(list),
            grad_norms: Vec::with_capacity(list),
            epochs: Vec::with_capacity(list),
            seconds: Vec::with_capacity(list),
            skipped: 0,
            steps_differ: false,
            first: Vec::with_capacity(Self::FIRST),
            others: Downsampled::of(room, MOST_FIGURES),
            payload: Tally::default(),
            messages: Tally::default(),
            scalars: Tally::default(),
            framing: Tally::default(),
            node_payload: Tally::default(),
            node_messages: Tally::default(),
            operations: Tally::default(),
            expected: Tally::default(),
            owed: [0; 4],
            staleness: Staleness::default(),
            is_as_expected: true,
        }
    }

    /// The same of a strategy that does more in some steps than in others.
    pub(super) fn where_steps_differ(self, steps_differ: bool) -> Self {
        History { steps_differ, ..self }
    }

    /// Adds a step that ended so many seconds after the first began, what came of it, and what it sent, where that is counted.
    pub(super) fn add(&mut self, report: &StepReport, seconds: f64, outcome: &StepOutcome, sent: Option<StepTraffic>) {
        self.losses.push(report.loss);
        self.grad_norms.push(report.grad_norm);
        self.epochs.push(report.epoch);
        self.seconds.push(seconds);
        self.staleness.add(outcome.staleness);
        if report.skipped {
            self.skipped += 1;
        } else {
            self.add_figures(report);
        }
        let Some(expected) = outcome.expected else { return };
        self.operations.add(report.operations);
        self.expected.add(expected);
        let Some(sent) = sent else { return };
        let Expected { payload, messages, node_payload, node_messages, .. } = expected;
        let node = sent.node.unwrap_or((node_payload, node_messages));
        let expected = [payload, messages, node_payload, node_messages];
        let sums = self.owed.iter_mut().zip(expected.into_iter().zip([sent.payload, sent.messages, node.0, node.1]));
        sums.for_each(|(owed, (expected, sent))| *owed += i128::from(expected) - i128::from(sent));
        self.is_as_expected &= outcome.under_way || self.owed == [0; 4];
        self.payload.add(sent.payload);
        self.messages.add(sent.messages);
        self.scalars.add(sent.scalars);
        self.framing.add(sent.framing);
        if let Some((payload, messages)) = sent.node {
            self.node_payload.add(payload);
            self.node_messages.add(messages);
        }
    }

    /// Keeps what medians are taken of.
    fn add_figures(&mut self, report: &StepReport) {
        let figures = Figures {
            tokens_per_s: report.tokens_per_s,
            ms: report.ms,
            matrix_share: report.matrix_share,
            parts: report.parts,
            cpu_utilization: report.cpu_utilization,
            gpu_utilization_percent: report.gpu_utilization_percent,
            allocations: report.allocations,
            copies: report.copies,
        };
        if self.first.len() < Self::FIRST {
            self.first.push(figures);
        } else {
            self.others.push(figures);
        }
    }

    /// The figures of the steps that were not skipped, without the first two where there are more than four.
    pub(super) fn steady(&self) -> impl Iterator<Item = &Figures> + Clone {
        let whole = self.first.len() as u64 + self.others.seen;
        let first = if whole > Self::FEW { &[][..] } else { &self.first };
        first.iter().chain(&self.others.kept)
    }

    /// The mean of what steps were to send, of each figure by itself.
    pub(super) fn expected(&self) -> Expected {
        let of = |figure: fn(&Expected) -> u64| self.expected.mean_of(figure).unwrap_or(0);
        Expected {
            operations: of(|expected| expected.operations),
            payload: of(|expected| expected.payload),
            messages: of(|expected| expected.messages),
            node_payload: of(|expected| expected.node_payload),
            node_messages: of(|expected| expected.node_messages),
        }
    }

    /// The loss of the last step that has one: where loss scaling skips steps, that of a step may be no number.
    pub(super) fn final_loss(&self) -> f64 {
        self.losses.iter().rev().copied().find(|loss| loss.is_finite()).unwrap_or(f64::NAN)
    }

    /// The median of each count of the [`steady`](Self::steady) steps, where they are counted.
    pub(super) fn allocations(&self) -> Option<Allocations> {
        let counted = || self.steady().filter_map(|figures| figures.allocations);
        counted().next()?;
        let of = |count: fn(Allocations) -> u64| median(counted().map(|step| count(step) as f64)).round() as u64;
        Some(Allocations { count: of(|step| step.count), bytes: of(|step| step.bytes), large: of(|step| step.large) })
    }

    /// The median of each count of the [`steady`](Self::steady) steps.
    pub(super) fn copies(&self) -> Copies {
        let of = |count: fn(Copies) -> u64| median(self.steady().map(|step| count(step.copies) as f64)).round() as u64;
        Copies { copied: of(|step| step.copied), zeroed: of(|step| step.zeroed) }
    }

    /// The median of a time of the [`steady`](Self::steady) steps, or, where steps differ in what they do, the mean.
    pub(super) fn time(&self, of: impl Fn(&Figures) -> f64) -> f64 {
        if self.steps_differ {
            mean(self.steady().map(|figures| (of(figures), 1.0)))
        } else {
            median(self.steady().map(of))
        }
    }

    /// The same of what is counted by time, where the mean is that over time.
    pub(super) fn rate(&self, of: impl Fn(&Figures) -> f64) -> f64 {
        if self.steps_differ {
            mean(self.steady().map(|figures| (of(figures), figures.ms)))
        } else {
            median(self.steady().map(of))
        }
    }
}

/// The mean of values by their weights; NaN of nothing.
fn mean(values: impl Iterator<Item = (f64, f64)>) -> f64 {
    let (sum, weights) =
        values.fold((0.0, 0.0), |(sum, weights), (value, weight)| (sum + value * weight, weights + weight));
    sum / weights
}

/// Some of the values that were added, evenly spread over them.
#[derive(Debug)]
struct Downsampled<T> {
    kept: Vec<T>,
    /// Most that are kept.
    most: usize,
    /// One of so many is kept.
    stride: u64,
    seen: u64,
}

impl<T> Downsampled<T> {
    /// Of about `count` values to come, at most `most`, an even number, are kept at a time.
    fn of(count: usize, most: usize) -> Self {
        Downsampled { kept: Vec::with_capacity(count.min(most)), most, stride: 1, seen: 0 }
    }

    fn push(&mut self, value: T) {
        if self.seen.is_multiple_of(self.stride) {
            if self.kept.len() == self.most {
                let mut index = 0;
                self.kept.retain(|_| {
                    index += 1;
                    index % 2 == 1
                });
                self.stride *= 2;
            }
            // The number of the first that is kept no more is a multiple of the new stride, since `most` is even.
            self.kept.push(value);
        }
        self.seen += 1;
    }
}

/// How often each value came. There are few: steps send what others have sent.
#[derive(Debug)]
pub(super) struct Tally<T>(BTreeMap<T, u64>);

impl<T> Default for Tally<T> {
    fn default() -> Self {
        Tally(BTreeMap::new())
    }
}

impl<T: Ord + Copy> Tally<T> {
    fn add(&mut self, value: T) {
        *self.0.entry(value).or_default() += 1;
    }

    /// The mean of a figure of the values, without its fraction; `None` of nothing.
    fn mean_of(&self, of: impl Fn(&T) -> u64) -> Option<u64> {
        let sum: u128 = self.0.iter().map(|(value, count)| u128::from(of(value)) * u128::from(*count)).sum();
        let count: u64 = self.0.values().sum();
        sum.checked_div(count.into()).and_then(|mean| u64::try_from(mean).ok())
    }
}

impl Tally<u64> {
    /// The mean, without its fraction; `None` of nothing.
    pub(super) fn mean(&self) -> Option<u64> {
        self.mean_of(|value| *value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use comm_core::splitmix::SplitMix64;

    const EXPECTED: Expected = Expected { operations: 3, payload: 0, messages: 0, node_payload: 0, node_messages: 0 };

    const OUTCOME: StepOutcome = StepOutcome {
        loss: 0.0,
        grad_norm: 0.0,
        skipped: false,
        expected: Some(EXPECTED),
        under_way: false,
        replicas_agree: true,
        have_met: true,
        staleness: Staleness { pushes: 0, sum: 0, max: 0 },
    };

    /// A report with figures of its own.
    fn report(step: u64, random: &mut SplitMix64) -> StepReport {
        let mut figure = || random.below(1 << 20) as f64 / 1024.0;
        StepReport {
            step,
            loss: figure(),
            grad_norm: figure(),
            skipped: false,
            loss_scale: 1.0,
            epoch: step / 10,
            learning_rate: 0.0,
            ms: figure(),
            tokens_per_s: figure(),
            matrix_share: figure(),
            mfu: None,
            parts: Parts { compute: figure(), hidden: figure(), ..Parts::default() },
            bytes_sent: None,
            messages_sent: None,
            operations: 3,
            cpu_utilization: figure(),
            gpu_utilization_percent: step.is_multiple_of(3).then(&mut figure),
            gpu_memory_bytes: None,
            peak_memory_bytes: None,
            memory: None,
            allocations: None,
            copies: Copies::default(),
            spans: Vec::new(),
            communications: Vec::new(),
        }
    }

    #[test]
    fn medians_are_those_of_all_reports() {
        for steps in [0, 1, 2, 3, 4, 5, 6, 7, 100, 1001, 5000] {
            let mut random = SplitMix64::stream(1, &[steps]);
            let mut reports: Vec<StepReport> = (1..=steps).map(|step| report(step, &mut random)).collect();
            // The first of them too: left out are the first two of those that were not skipped.
            reports.iter_mut().for_each(|report| report.skipped = report.step % 7 == 1);
            let mut history = History::of(steps);
            for report in &reports {
                history.add(report, report.step as f64, &OUTCOME, None);
            }
            let whole: Vec<&StepReport> = reports.iter().filter(|report| !report.skipped).collect();
            let steady = &whole[if whole.len() > 4 { 2 } else { 0 }..];
            let check = |of_report: fn(&StepReport) -> f64, of_figures: fn(&Figures) -> f64| {
                let expected = median(steady.iter().map(|report| of_report(report)));
                assert_eq!(history.time(of_figures).to_bits(), expected.to_bits(), "{steps}");
                assert_eq!(history.rate(of_figures).to_bits(), expected.to_bits(), "{steps}");
            };
            check(|report| report.ms, |figures| figures.ms);
            check(|report| report.tokens_per_s, |figures| figures.tokens_per_s);
            check(|report| report.matrix_share, |figures| figures.matrix_share);
            check(|report| report.parts.hidden, |figures| figures.parts.hidden);
            check(|report| report.cpu_utilization, |figures| figures.cpu_utilization);
            let of_gpu: Vec<f64> = steady.iter().filter_map(|report| report.gpu_utilization_percent).collect();
            assert!(history.steady().filter_map(|figures| figures.gpu_utilization_percent).eq(of_gpu));
            assert!(history.losses.iter().eq(reports.iter().map(|report| &report.loss)));
            assert!(history.epochs.iter().eq(reports.iter().map(|report| &report.epoch)));
            assert_eq!(history.skipped, steps.div_ceil(7).min(steps));
            assert_eq!(history.operations.mean(), (steps > 0).then_some(3));
        }
    }

    #[test]
    fn figures_of_many_steps_are_spread_over_them_and_take_no_more_room() {
        let mut sample = Downsampled::of(usize::MAX, 8);
        let room = sample.kept.capacity();
        let mut next = 0;
        for (count, kept) in [
            (3, vec![0, 1, 2]),
            (8, vec![0, 1, 2, 3, 4, 5, 6, 7]),
            (9, vec![0, 2, 4, 6, 8]),
            (10, vec![0, 2, 4, 6, 8]),
            (16, vec![0, 2, 4, 6, 8, 10, 12, 14]),
            (17, vec![0, 4, 8, 12, 16]),
            (33, vec![0, 8, 16, 24, 32]),
        ] {
            while next < count {
                sample.push(next);
                next += 1;
            }
            assert_eq!(sample.kept, kept, "{count}");
        }
        assert_eq!((sample.kept.capacity(), sample.seen), (room, 33));

        let mut history = History::of(u64::MAX);
        let mut random = SplitMix64::stream(1, &[]);
        let mut report = report(1, &mut random);
        let steps = 5 * MOST_FIGURES as u64;
        for step in 1..=steps {
            report.ms = step as f64;
            history.add(&report, 0.0, &OUTCOME, None);
        }
        assert_eq!(history.others.kept.capacity(), MOST_FIGURES);
        let kept = history.steady().count();
        assert!((MOST_FIGURES / 2..=MOST_FIGURES).contains(&kept), "{kept}");
        let (median, expected) = (history.time(|figures| figures.ms), steps as f64 / 2.0);
        assert!((median / expected - 1.0).abs() < 1e-3, "{median} {expected}");
    }

    #[test]
    fn where_steps_differ_times_are_means_and_rates_those_over_time() {
        let mut random = SplitMix64::stream(5, &[]);
        let mut history = History::of(8).where_steps_differ(true);
        // The first two are left out.
        for (step, ms) in [90.0, 90.0, 10.0, 10.0, 10.0, 50.0].into_iter().enumerate() {
            let report = StepReport { ms, tokens_per_s: 1000.0 / ms, ..report(step as u64 + 1, &mut random) };
            history.add(&report, 0.0, &OUTCOME, None);
        }
        assert_eq!(history.time(|figures| figures.ms), 20.0);
        assert!((history.rate(|figures| figures.tokens_per_s) - 50.0).abs() < 1e-9);
    }

    #[test]
    fn the_mean_of_a_tally_is_that_of_its_values() {
        let mut random = SplitMix64::stream(2, &[]);
        for count in 0..40 {
            let values: Vec<u64> = (0..count).map(|_| random.below(5)).collect();
            let mut tally = Tally::default();
            values.iter().for_each(|value| tally.add(*value));
            assert_eq!(tally.mean(), values.iter().sum::<u64>().checked_div(count), "{values:?}");
        }
    }

    #[test]
    fn the_final_loss_is_the_last_that_is_a_number() {
        let mut history = History::of(3);
        assert!(history.final_loss().is_nan());
        let mut random = SplitMix64::stream(3, &[]);
        let report = report(1, &mut random);
        for (loss, skipped) in [(3.0, false), (2.0, true), (f64::NAN, true), (f64::INFINITY, true)] {
            history.add(&StepReport { loss, skipped, ..report.clone() }, 0.0, &OUTCOME, None);
        }
        assert_eq!((history.final_loss(), history.skipped), (2.0, 3));
    }

    #[test]
    fn what_is_sent_is_held_against_each_steps_own_expectation() {
        let mut random = SplitMix64::stream(4, &[]);
        let report = report(1, &mut random);
        // Payload that was expected and sent, and whether some of it may still be under way.
        let add = |steps: &[(u64, u64, bool)]| {
            let mut history = History::of(8);
            for (expected, sent, under_way) in steps {
                let expected = Expected { payload: *expected, ..EXPECTED };
                let outcome = StepOutcome { expected: Some(expected), under_way: *under_way, ..OUTCOME };
                history.add(&report, 0.0, &outcome, Some(StepTraffic { payload: *sent, ..StepTraffic::default() }));
            }
            history
        };
        // Every second step sends; the last one of a round, what others began.
        let local = add(&[(0, 0, false), (100, 100, false), (0, 0, false), (100, 100, false)]);
        assert_eq!((local.is_as_expected, local.expected().payload, local.payload.mean()), (true, 50, Some(50)));
        assert!(add(&[(100, 40, true), (100, 160, false)]).is_as_expected);
        assert!(!add(&[(100, 40, false), (100, 160, false)]).is_as_expected);
        assert!(!add(&[(100, 40, true), (100, 150, false)]).is_as_expected);
        assert!(!add(&[(0, 100, false), (100, 0, false)]).is_as_expected);
        // Of the same bytes too many inside the node.
        let mut history = History::of(1);
        let expected = Expected { payload: 100, node_payload: 60, ..EXPECTED };
        let sent = StepTraffic { payload: 100, node: Some((70, 0)), ..StepTraffic::default() };
        history.add(&report, 0.0, &StepOutcome { expected: Some(expected), ..OUTCOME }, Some(sent));
        assert!(!history.is_as_expected);
    }
}
