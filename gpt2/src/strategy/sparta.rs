//! SPARTA (Beton et al. 2025): ranks train by themselves, and a few of their parameters are averaged in every step.

use comm_core::splitmix::SplitMix64;
use comm_core::{Op, ReduceOp};

use super::average::{Averager, averaged};
use super::channels::{Channel, Route};
use super::formula::{Expected, Run, Tally};
use super::own_step::OwnGradients;
use super::settings::Setting;
use super::{
    Built, Channels, DuringPass, Layout, LocalStep, Setup, Spec, StepOutcome, Strategy, StrategyKind, put_own,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};
use crate::precision::Precision;

pub(super) const SPEC: Spec = Spec {
    name: "sparta",
    about: "every rank trains by itself, and a few random parameters are averaged in every step",
    is_one_device: false,
    tells_nodes_apart: false,
    in_buckets: true,
    overlaps: false,
    settings: &[Setting::SpartaShare],
    build: |setup| Ok(Sparta::build(setup)),
    expected: |run, layout, rank| {
        let mut tally = Tally::of(run, rank);
        let count = count(run.options.local.sparta_share, layout.total());
        tally.collective(None, Op::AllReduce(ReduceOp::Mean), run.options.wire.dtype(), count);
        tally.sum
    },
};

/// The type of the average after the last step: parameters, which lose more by 16 bits than gradients do.
const AT_THE_END: Precision = Precision::F32;

fn at_the_end(run: &Run<'_>, layout: &Layout, rank: usize) -> Expected {
    averaged(run, layout, &layout.all(), AT_THE_END, rank)
}

/// Steps between two in which ranks may ask each other for more than their parameters.
const LOOKS: u64 = 8;

/// What a seed is used for, so that other uses draw other numbers.
const PURPOSE: u64 = 0x5350_4152_5441;

/// How many of `total` parameters are averaged in a step.
fn count(share: f64, total: usize) -> usize {
    ((share * total as f64).ceil() as usize).clamp(1.min(total), total)
}

/// Which `count` of `total` elements take their turn in a step, ascending: one of each of `count` stretches that together are all, so that in
/// every step each element is as likely as any other, give or take that stretches differ by one. A function of the seed and the step alone.
fn chosen(seed: u64, step: u64, count: usize, total: usize) -> Vec<usize> {
    let mut random = SplitMix64::stream(seed, &[PURPOSE, step]);
    let start = |stretch: usize| (stretch as u128 * total as u128 / count as u128) as usize;
    let one = |stretch: usize| start(stretch) + random.below((start(stretch + 1) - start(stretch)) as u64) as usize;
    (0..count).map(one).collect()
}

/// In every step the chosen parameters of each rank become the mean of all ranks', and after the last step all of them. Of a 16-bit wire every rank
/// keeps what rounding has taken from its own values, and adds it to the mean.
struct Sparta {
    seed: u64,
    layout: Layout,
    /// How many are averaged in a step.
    count: usize,
    own: OwnGradients,
    channel: Channel,
    /// Whether values are rounded on their way.
    rounds: bool,
    last: Averager,
    /// In a step, and in the last.
    expected: [Expected; 2],
}

impl Sparta {
    fn build(setup: &Setup<'_>) -> Built {
        let (layout, options) = (setup.layout(), setup.options);
        let strategy = Sparta {
            seed: setup.seed,
            count: count(options.local.sparta_share, layout.total()),
            own: OwnGradients::of(&layout),
            channel: Channel::of_masters(setup.comms, options.wire),
            rounds: options.wire != Precision::F32,
            last: Averager::new(setup, &layout.all(), AT_THE_END, "parameters"),
            expected: [setup.expected(StrategyKind::Sparta), setup.expected_by(at_the_end)],
            layout,
        };
        let layout = setup.layout();
        Built::alone(strategy, setup.channels(), &layout)
    }

    /// Averages the parameters whose turn it is.
    fn exchange(&self, step: u64, masters: &mut [Flat]) -> comm_core::Result<()> {
        let Sparta { channel, layout, .. } = self;
        let chosen = layout.by_segment(&chosen(self.seed, step, self.count, layout.total()));
        let taken = || Flat::concat(masters.iter().zip(&chosen).map(|(masters, indices)| masters.take_at(indices)));
        let (buffer, own) = match self.rounds {
            false => (channel.pack(taken)?, None),
            true => {
                let own = channel.applying(taken)?;
                (channel.pack(|| Ok(own.clone()))?, Some(own))
            }
        };
        let op = Op::AllReduce(ReduceOp::Mean);
        let pending = channel.start(op, buffer, Route::blocking("parameters whose turn it is"));
        let mean = pending.finish_part(0..self.count)?;
        let lost = own.map(|own| own.clone().plus_scaled(-1.0, &channel.rounded(|| Ok(own))?)).transpose()?;
        channel.applying(|| {
            let values = match lost {
                Some(lost) => mean.plus_scaled(1.0, &lost)?,
                None => mean,
            };
            let lengths: Vec<usize> = chosen.iter().map(Vec::len).collect();
            for ((masters, indices), values) in masters.iter_mut().zip(&chosen).zip(values.split(&lengths)) {
                *masters = std::mem::take(masters).with_at(indices, &values)?;
            }
            Ok(())
        })
    }
}

impl DuringPass for Sparta {
    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.own.gradient(segment, grads, channels)
    }
}

impl Strategy for Sparta {
    fn step(
        &mut self,
        step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        let checked = self.own.step(train, channels)?;
        let is_last = train.is_last();
        let masters = train.masters_mut();
        if is_last {
            self.last.start(|segment| Ok(std::mem::take(&mut masters[segment])))?;
            self.last.finish(|segment, mean, _| {
                masters[segment] = mean;
                Ok::<_, TrainError>(())
            })?;
        } else {
            self.exchange(step, masters)?;
        }
        put_own(train, channels)?;
        let all_agree = is_last || (self.count == self.layout.total() && !self.rounds);
        // They meet in every step, and are not asked in each whether they are to leave.
        let have_met = is_last || (step + 1).is_multiple_of(LOOKS);
        let expected = Some(self.expected[usize::from(is_last)]);
        Ok(StepOutcome { have_met, ..StepOutcome::new(&checked, expected, all_agree) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_long_run_every_parameter_has_its_turn_as_often_as_any_other() {
        let (total, steps) = (97, 20_000);
        let count = count(0.1, total);
        assert_eq!(count, 10);
        let mut turns = vec![0u32; total];
        for step in 0..steps {
            let chosen = chosen(7, step, count, total);
            assert_eq!(chosen.len(), count);
            assert!(chosen.is_sorted_by(|a, b| a < b) && chosen.iter().all(|index| *index < total), "{chosen:?}");
            chosen.iter().for_each(|index| turns[*index] += 1);
        }
        // One in nine or one in ten, by the length of its stretch; six standard deviations.
        for (index, turns) in turns.iter().enumerate() {
            let share = f64::from(*turns) / steps as f64;
            assert!((1.0 / 10.0 - 0.014..=1.0 / 9.0 + 0.014).contains(&share), "{index}: {share}");
        }
    }

    #[test]
    fn the_choice_is_a_function_of_seed_and_step_and_may_be_all() {
        assert_eq!(chosen(1, 5, 10, 1000), chosen(1, 5, 10, 1000));
        assert_ne!(chosen(1, 5, 10, 1000), chosen(1, 6, 10, 1000));
        assert_ne!(chosen(1, 5, 10, 1000), chosen(2, 5, 10, 1000));
        assert_eq!(chosen(1, 5, count(1.0, 50), 50), (0..50).collect::<Vec<_>>());
        assert_eq!([count(1e-9, 50), count(0.5, 5), count(1.0, 0)], [1, 3, 0]);
    }
}
