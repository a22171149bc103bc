//! Medians, percentiles, ratios and differences.

use serde::Serialize;

/// A ratio of two times, round by round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Ratio {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Ratio {
    /// Of `ours` to `theirs`, both measured in the same rounds; `None` without a round that both have.
    pub fn of(ours: &[f64], theirs: &[f64]) -> Option<Self> {
        let ratios: Vec<f64> =
            ours.iter().zip(theirs).filter(|(_, theirs)| **theirs > 0.0).map(|(ours, theirs)| ours / theirs).collect();
        Some(Ratio {
            median: median(&ratios)?,
            min: ratios.iter().copied().min_by(f64::total_cmp)?,
            max: ratios.iter().copied().max_by(f64::total_cmp)?,
        })
    }
}

/// The middle value, or the mean of the two in the middle; `None` of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    let upper = *sorted.get(middle)?;
    Some(if sorted.len().is_multiple_of(2) { f64::midpoint(sorted[middle - 1], upper) } else { upper })
}

/// The smallest of the sorted `values` that at least `percent` of them do not exceed; `None` of nothing.
pub fn percentile(sorted: &[u64], percent: f64) -> Option<u64> {
    let rank = (percent / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

/// Largest relative difference; infinite if the lengths differ, or where one alone is no finite number.
pub fn difference(values: &[f64], reference: &[f64]) -> f64 {
    if values.len() != reference.len() || values.is_empty() {
        return f64::INFINITY;
    }
    let differ = |(a, b): (&f64, &f64)| match ((a - b) / b).abs() {
        // As a skipped step's norm is on both sides.
        _ if a == b || (a.is_nan() && b.is_nan()) => 0.0,
        difference if difference.is_nan() => f64::INFINITY,
        difference => difference,
    };
    values.iter().zip(reference).map(differ).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let values: Vec<u64> = (1..=100).collect();
        assert_eq!(percentile(&values, 50.0), Some(50));
        assert_eq!(percentile(&values, 99.0), Some(99));
        assert_eq!(percentile(&[7], 95.0), Some(7));
        assert_eq!(percentile(&[], 50.0), None);
    }

    #[test]
    fn ratios_pair_the_rounds() {
        let ratio = Ratio::of(&[2.0, 30.0, 4.0], &[1.0, 10.0, 4.0]).unwrap();
        assert_eq!((ratio.median, ratio.min, ratio.max), (2.0, 1.0, 3.0));
        assert_eq!(Ratio::of(&[1.0], &[]), None);
    }

    #[test]
    fn what_is_no_number_on_one_side_alone_differs() {
        assert_eq!(difference(&[1.0, 3.0], &[2.0, 3.0]), 0.5);
        for alone in [f64::NAN, f64::INFINITY] {
            assert_eq!(difference(&[alone, 1.0], &[1.0, 1.0]), f64::INFINITY);
            assert_eq!(difference(&[1.0, 1.0], &[alone, 1.0]), f64::INFINITY);
            assert_eq!(difference(&[alone, 1.0], &[alone, 2.0]), 0.5);
        }
        assert_eq!(difference(&[0.0], &[0.0]), 0.0);
        assert_eq!(difference(&[], &[]), f64::INFINITY);
        assert_eq!(difference(&[1.0], &[1.0, 1.0]), f64::INFINITY);
    }
}
