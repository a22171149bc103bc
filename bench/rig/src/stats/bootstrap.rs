//! The median of a run's steps, resampled: how far chance inside the run may have moved it.
//!
//! Neighbouring steps resemble one another, so what is drawn is not steps but blocks of neighbours (Künsch 1989), of a
//! length that grows with the root of the series' so that likeness over several steps stays inside. The draws are
//! seeded: the same series always gives the same figures.

use comm_core::splitmix::SplitMix64;

use super::beta::student;
use super::median::median;

/// Draws: enough for a standard error (Efron and Tibshirani: 50 to 200), and for the ends of an interval that only a
/// single run needs.
const DRAWS: usize = 200;

/// Steps whose likeness is kept: blocks are at least this long where the series allows.
const SHORTEST_BLOCK: usize = 3;

const SEED: u64 = 0x626f_6f74;

/// What chance inside a run does to the median of its steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MedianError {
    /// Standard error.
    pub(super) error: f64,
    /// Between which the truth lies with a probability of the level asked for: percentiles of the resamples, or as many
    /// standard errors as Student asks for with as many values as there are blocks where that is wider, since few
    /// blocks resampled vary too little.
    pub(super) low: f64,
    pub(super) high: f64,
}

impl MedianError {
    /// `None` of nothing.
    pub(super) fn of_median(series: &[f64], level: f64) -> Option<MedianError> {
        let centre = median(series)?;
        let mut medians = medians(series, DRAWS);
        medians.sort_by(f64::total_cmp);
        let count = medians.len() as f64;
        let mean = medians.iter().sum::<f64>() / count;
        let squares: f64 = medians.iter().map(|median| (median - mean).powi(2)).sum();
        let at = |share: f64| medians.get(((count - 1.0) * share).round() as usize).copied();
        // One value resampled is itself, but for rounding in the mean.
        let error = if series.len() < 2 { 0.0 } else { (squares / (count - 1.0)).sqrt() };
        let blocks = series.len() as f64 / block(series.len()) as f64;
        let half = if error > 0.0 { student(level, (blocks - 1.0).max(1.0)) * error } else { 0.0 };
        let (low, high) = (at((1.0 - level) / 2.0)?, at((1.0 + level) / 2.0)?);
        Some(MedianError { error, low: low.min(centre - half), high: high.max(centre + half) })
    }
}

/// Medians of `draws` series put together from blocks of `series`, each the upper of the middle values.
fn medians(series: &[f64], draws: usize) -> Vec<f64> {
    let length = series.len();
    if length == 0 {
        return Vec::new();
    }
    let block = block(length);
    let starts = (length - block + 1) as u64;
    // Sorted once: a draw counts how often each place of the order occurs.
    let mut order: Vec<usize> = (0..length).collect();
    order.sort_by(|&a, &b| series[a].total_cmp(&series[b]));
    let mut places = vec![0; length];
    order.iter().enumerate().for_each(|(place, &step)| places[step] = place);
    let mut random = SplitMix64::new(SEED);
    let mut times = vec![0_usize; length];
    let draw = |_| {
        times.fill(0);
        let mut left = length;
        while left > 0 {
            let start = random.below(starts) as usize;
            places[start..start + block.min(left)].iter().for_each(|&place| times[place] += 1);
            left -= block.min(left);
        }
        let mut before = 0;
        let middle = times.iter().position(|&times| {
            before += times;
            before > length / 2
        });
        middle.map(|place| series[order[place]])
    };
    (0..draws).filter_map(draw).collect()
}

/// How long blocks of a series of this length are.
fn block(length: usize) -> usize {
    ((length as f64).sqrt().round() as usize).max(SHORTEST_BLOCK).min(length.div_ceil(3)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::simulate::{Noise, Random};

    fn error(series: &[f64]) -> f64 {
        MedianError::of_median(series, 0.95).unwrap().error
    }

    #[test]
    fn the_error_is_that_of_theory_for_independent_steps() {
        // The standard error of a median of n normal values is about 1.253 / √n.
        let mut random = Random::new(1);
        let errors: Vec<f64> = (0..30).map(|_| error(&(0..100).map(|_| random.normal()).collect::<Vec<_>>())).collect();
        let middle = median(&errors).unwrap();
        assert!((0.09..0.16).contains(&middle), "{middle}");
    }

    #[test]
    fn steps_that_resemble_their_neighbours_say_less() {
        let mut random = Random::new(2);
        let mut mean_error = |likeness: f64| {
            let mut last = 0.0;
            let mut next = || {
                last = likeness * last + (1.0 - likeness * likeness).sqrt() * random.normal();
                last
            };
            (0..20).map(|_| error(&(0..200).map(|_| next()).collect::<Vec<_>>())).sum::<f64>() / 20.0
        };
        // Of a mean it would be √(1.7 / 0.3) = 2.4 times as much.
        let (alike, independent) = (mean_error(0.7), mean_error(0.0));
        assert!(alike > 1.6 * independent, "{alike} and {independent}");
    }

    #[test]
    fn percentiles_cover_what_one_run_can_know() {
        let mut random = Random::new(3);
        let covered = (0..100).filter(|_| {
            let series: Vec<f64> = (0..60).map(|_| 40.0 + random.draw(Noise::HeavyTail)).collect();
            MedianError::of_median(&series, 0.95).is_some_and(|chance| chance.low <= 40.0 && chance.high >= 40.0)
        });
        let covered = covered.count();
        println!("single run: {covered} %");
        assert!(covered >= 92, "{covered} of 100");
    }

    #[test]
    fn the_same_series_always_gives_the_same_and_tiny_ones_do_no_harm() {
        let series: Vec<f64> = (0..37).map(|step| f64::from(step * 7 % 11)).collect();
        assert_eq!(MedianError::of_median(&series, 0.95), MedianError::of_median(&series, 0.95));
        assert_eq!(MedianError::of_median(&[], 0.95), None);
        assert_eq!(MedianError::of_median(&[0.1], 0.95), Some(MedianError { error: 0.0, low: 0.1, high: 0.1 }));
    }
}
