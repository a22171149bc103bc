//! How sure one can be of a share that was counted, such as that of lost packets.

use super::beta::quantile;
use super::interval::Interval;

/// The share of `lost` among `offered` with its exact interval (Clopper and Pearson, 1934), which covers at least as
/// often as `level` says; `None` where nothing was offered, or less than was lost.
pub(crate) fn binomial_interval(lost: u64, offered: u64, level: f64) -> Option<Interval> {
    let kept = offered.checked_sub(lost).filter(|_| offered > 0)?;
    let outside = (1.0 - level) / 2.0;
    let (lost, kept, estimate) = (lost as f64, kept as f64, lost as f64 / offered as f64);
    let low = if lost == 0.0 { 0.0 } else { quantile(outside, lost, kept + 1.0) };
    let high = if kept == 0.0 { 1.0 } else { quantile(1.0 - outside, lost + 1.0, kept) };
    Some(Interval { estimate, low: low.min(estimate), high: high.max(estimate), level })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpt2::splitmix::SplitMix64;

    #[test]
    fn intervals_are_those_of_the_tables() {
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 5e-5, "{found}, not {expected}");
        let some = binomial_interval(5, 20, 0.95).unwrap();
        near(some.low, 0.08657);
        near(some.high, 0.49105);
        // Nothing lost of n: the rule of three, 1 - 0.025^(1/n) two-sided.
        let none = binomial_interval(0, 100, 0.95).unwrap();
        assert_eq!((none.estimate, none.low), (0.0, 0.0));
        near(none.high, 1.0 - 0.025_f64.powf(0.01));
        let all = binomial_interval(100, 100, 0.95).unwrap();
        assert_eq!((all.estimate, all.high), (1.0, 1.0));
    }

    #[test]
    fn of_nothing_there_is_none_and_large_counts_end() {
        assert_eq!(binomial_interval(0, 0, 0.95), None);
        assert_eq!(binomial_interval(2, 1, 0.95), None);
        let large = binomial_interval(10_000_000, 1_000_000_000, 0.95).unwrap();
        let width = 2.0 * 1.96 * (0.01_f64 * 0.99 / 1e9).sqrt();
        assert!((large.high - large.low - width).abs() < 0.02 * width, "{large:?}");
        assert!(large.low < 0.01 && large.high > 0.01, "{large:?}");
    }

    #[test]
    fn covers_at_least_as_often_as_it_says() {
        let (share, offered, tries) = (0.01, 500, 400);
        let mut random = SplitMix64::new(1);
        let covered = (0..tries).filter(|_| {
            let lost = (0..offered).filter(|_| random.unit() < share).count() as u64;
            binomial_interval(lost, offered, 0.95).is_some_and(|interval| interval.contains(share))
        });
        let covered = covered.count();
        assert!(covered >= tries * 95 / 100, "{covered} of {tries}");
    }
}
