//! Runs made up with the noise that real ones have, to see whether intervals hold what they promise.

use comm_core::splitmix::SplitMix64;

use super::interval::RunValue;
use super::{Change, Comparison, Verdict, paired, unpaired};
use crate::stats::interval::interval;

/// Seeded draws.
pub(super) struct Random(SplitMix64);

/// Distributions with mean or median 0 and about unit scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Noise {
    Normal,
    /// Student's with 3 degrees of freedom, scaled to standard deviation 1.
    HeavyTail,
}

impl Random {
    pub(super) fn new(seed: u64) -> Self {
        Random(SplitMix64::stream(seed, &[7]))
    }

    pub(super) fn unit(&mut self) -> f64 {
        self.0.unit()
    }

    pub(super) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.unit()).cos()
    }

    pub(super) fn draw(&mut self, noise: Noise) -> f64 {
        let normal = self.normal();
        match noise {
            Noise::Normal => normal,
            Noise::HeavyTail => {
                let squares: f64 = (0..3).map(|_| self.normal().powi(2)).sum();
                normal / squares.sqrt()
            }
        }
    }
}

/// What a cell of made-up runs is like.
#[derive(Clone, Copy)]
struct SyntheticCell {
    ms: f64,
    noise: Noise,
    /// Of the level of runs, in percent of `ms`, from the first round to the last.
    drift: f64,
    rounds: u32,
    steps: usize,
}

/// Of runs, and of steps inside a run, in shares of the step.
const RUN_SD: f64 = 0.02;
const STEP_SD: f64 = 0.05;
/// Share of steps that something delays, and by how much on average, in shares of the step.
const SLOW: f64 = 0.03;
const SLOWER: f64 = 0.5;

impl SyntheticCell {
    /// Median steps of runs. Drift is around the middle round, so that `ms` stays the truth, but for slow steps.
    fn runs(&self, random: &mut Random) -> Vec<RunValue> {
        let run = |round: u32| {
            let along = f64::from(round - 1) / f64::from(self.rounds - 1) - 0.5;
            let level = self.ms * (1.0 + self.drift / 100.0 * along + RUN_SD * random.draw(self.noise));
            let mut near = 0.0;
            let steps: Vec<f64> = (0..self.steps)
                .map(|_| {
                    near = 0.3 * near + 0.95 * random.draw(self.noise);
                    let delay = if random.unit() < SLOW { -SLOWER * (1.0 - random.unit()).ln() } else { 0.0 };
                    level * (1.0 + STEP_SD * near + delay)
                })
                .collect();
            RunValue::of_steps(round, &steps).unwrap()
        };
        (1..=self.rounds).map(run).collect()
    }

    fn comparison(
        self,
        planted: f64,
        random: &mut Random,
        compare: fn(&[RunValue], &[RunValue]) -> Option<Comparison>,
    ) -> Comparison {
        let (a, b) = (self.runs(random), SyntheticCell { ms: self.ms + planted, ..self }.runs(random));
        compare(&a, &b).unwrap()
    }
}

const REALISTIC: SyntheticCell = SyntheticCell { ms: 40.0, noise: Noise::HeavyTail, drift: 3.0, rounds: 5, steps: 30 };
const PAIRED: fn(&[RunValue], &[RunValue]) -> Option<Comparison> = |a, b| paired(a, b, 0.95);
const UNPAIRED: fn(&[RunValue], &[RunValue]) -> Option<Comparison> = |a, b| unpaired(a, b, 0.95);

/// How many of `tries` hold, with a seed of its own for each setting.
fn count(tries: usize, seed: u64, mut holds: impl FnMut(&mut Random) -> bool) -> usize {
    let mut random = Random::new(seed);
    (0..tries).filter(|_| holds(&mut random)).count()
}

/// All settings in which intervals must hold.
fn settings() -> impl Iterator<Item = SyntheticCell> {
    let noises = [Noise::Normal, Noise::HeavyTail];
    let all = noises.into_iter().flat_map(|noise| [3, 5, 7, 9].map(|rounds| (noise, rounds)));
    all.map(|(noise, rounds)| SyntheticCell { noise, rounds, steps: 20, ..REALISTIC })
}

#[test]
fn intervals_of_one_cell_cover_the_truth() {
    for made in settings() {
        // Slow steps move the median of steps by this much.
        let truth = made.ms * (1.0 + STEP_SD * 1.25 * SLOW / 2.0);
        let covered = count(200, 1, |random| interval(&made.runs(random), 0.95).unwrap().contains(truth));
        println!("{:?} {} rounds: {:.1} %", made.noise, made.rounds, covered as f64 / 2.0);
        assert!(covered >= 184, "{:?}, {} rounds: {covered} of 200", made.noise, made.rounds);
    }
}

#[test]
fn intervals_of_differences_cover_the_truth() {
    for (name, compare) in [("paired", PAIRED), ("unpaired", UNPAIRED)] {
        for made in settings().filter(|made| [5, 7].contains(&made.rounds)) {
            let covered = count(100, 2, |random| {
                made.comparison(2.0, random, compare).difference.contains(2.0 * (1.0 + STEP_SD * 1.25 * SLOW / 2.0))
            });
            println!("{name} {:?} {} rounds: {:.1} %", made.noise, made.rounds, covered as f64);
            assert!(covered >= 90, "{name}, {:?}, {} rounds: {covered} of 100", made.noise, made.rounds);
        }
    }
}

#[test]
fn the_same_against_itself_is_no_difference() {
    for (rounds, seed) in [(5, 3), (7, 4)] {
        let made = SyntheticCell { rounds, ..REALISTIC };
        let same =
            |random: &mut Random| made.comparison(0.0, random, PAIRED).verdict == Verdict::NoSignificantDifference;
        let few = count(20, seed, same);
        assert!(few >= 17, "{few} of 20 tries with {rounds} rounds");
        let many = count(200, seed + 10, same);
        println!("A/A, {rounds} rounds: {many} of 200");
        assert!(many >= 186, "{many} of 200 tries with {rounds} rounds");
    }
}

#[test]
fn five_planted_milliseconds_are_found() {
    for (rounds, seed) in [(5, 5), (7, 6)] {
        let made = SyntheticCell { rounds, ..REALISTIC };
        let (mut found, mut held, mut narrow) = (0, 0, 0);
        let mut random = Random::new(seed);
        for _ in 0..100 {
            let comparison = made.comparison(5.0, &mut random, PAIRED);
            found += usize::from(comparison.verdict == Verdict::Difference(Change::Higher));
            held += usize::from(comparison.difference.contains(5.0));
            narrow += usize::from(comparison.difference.width() <= 5.0);
        }
        println!("5 ms, {rounds} rounds: found {found}, held {held}, at most 5 wide {narrow} of 100");
        assert!(found >= 93 && held >= 92 && narrow >= 90, "{rounds} rounds: {found}, {held}, {narrow} of 100");
    }
}

#[test]
fn one_disturbed_round_of_seven_does_not_hide_a_difference() {
    let made = SyntheticCell { rounds: 7, ..REALISTIC };
    let mut random = Random::new(8);
    let (mut found, mut held) = (0, 0);
    for _ in 0..60 {
        let (a, mut b) = (made.runs(&mut random), SyntheticCell { ms: 45.0, ..made }.runs(&mut random));
        b[2].value += 30.0;
        let comparison = paired(&a, &b, 0.95).unwrap();
        found += usize::from(comparison.verdict == Verdict::Difference(Change::Higher));
        held += usize::from(comparison.difference.contains(5.0));
    }
    assert!(found >= 57 && held >= 55, "found {found}, held {held} of 60");
}

/// Why rounds are not resampled: the percentiles of so few promise too much.
#[test]
fn resampling_five_rounds_covers_less_than_students_interval() {
    let made = SyntheticCell { noise: Noise::Normal, drift: 0.0, steps: 20, ..REALISTIC };
    let truth = made.ms * (1.0 + STEP_SD * 1.25 * SLOW / 2.0);
    let covered = count(200, 9, |random| {
        let values: Vec<f64> = made.runs(random).iter().map(|run| run.value).collect();
        let mut means: Vec<f64> =
            (0..200).map(|_| (0..5).map(|_| values[(random.unit() * 5.0) as usize]).sum::<f64>() / 5.0).collect();
        means.sort_by(f64::total_cmp);
        means[5] <= truth && truth <= means[194]
    });
    println!("percentiles of 5 resampled rounds: {:.1} %", covered as f64 / 2.0);
    assert!(covered < 186, "{covered} of 200");
}
