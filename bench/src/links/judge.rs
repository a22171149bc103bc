//! Whether what was measured is what was asked for.

use rig::link::Loss;
use serde::Serialize;

use super::udp::Times;

/// How far a rate may be off.
const RATE: f64 = 0.03;
/// How far a delay may be off: a share, or as long as it takes to wake a sleeping core or two.
const DELAY: f64 = 0.03;
const WAKE_MS: f64 = 0.1;
/// Both bounds of a normal variable, 99 % of the time.
const Z: f64 = 2.576;

/// What is right, from and to, and whether it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Range {
    pub(super) least: f64,
    pub(super) most: f64,
}

impl Range {
    pub(super) fn holds(self, value: f64) -> bool {
        (self.least..=self.most).contains(&value)
    }

    /// Of a rate while the link is kept busy.
    pub(super) fn of_rate(asked: f64) -> Self {
        Range { least: asked * (1.0 - RATE), most: asked * (1.0 + RATE) }
    }

    /// Of a rate of something that need not fill the link.
    pub(super) fn up_to_rate(asked: f64) -> Self {
        Range { least: 0.0, ..Range::of_rate(asked) }
    }

    /// Of a delay in milliseconds.
    pub(super) fn of_delay(asked: f64) -> Self {
        let off = (DELAY * asked).max(WAKE_MS);
        Range { least: (asked - off).max(0.0), most: asked + off }
    }

    /// Of the median of `count` round trips, which are off by `jitter` at most. That median varies by no more than jitter² / count, 99 % of
    /// the time.
    pub(super) fn of_round_trip(asked: f64, jitter: f64, count: usize) -> Self {
        let by_chance = Z * jitter / (count.max(1) as f64).sqrt();
        let off = (DELAY * asked).max(2.0 * WAKE_MS) + by_chance;
        Range { least: (asked - off).max(0.0), most: asked + off }
    }

    /// Of what [`jitter`] makes of `count` delays, 99 % of the time. A quantile p of a uniform distribution of width w varies by
    /// p (1 - p) w² / count, and two of them together by p² w² / count, so the half width by (asked / 2)² / count.
    pub(super) fn of_jitter(asked: f64, count: usize) -> Self {
        let off = (Z * 0.5 * asked / (count.max(1) as f64).sqrt()).max(WAKE_MS);
        Range { least: (asked - off).max(0.0), most: asked + off }
    }

    /// Of a share among `count` packets, 99 % of the time (binomial, by its normal approximation). `spread` is by how much more the number
    /// varies than if every packet counted for itself.
    pub(super) fn of_share(asked: f64, count: u64, spread: f64) -> Self {
        if asked <= 0.0 || count == 0 {
            return Range { least: 0.0, most: 0.0 };
        }
        let n = count as f64;
        let off = Z * (asked * (1.0 - asked) * spread / n).sqrt() + 0.5 / n;
        Range { least: (asked - off).max(0.0), most: (asked + off).min(1.0) }
    }
}

/// The half width of uniformly distributed delays, from the middle eight tenths of them. A few packets that come late because a machine is
/// busy are not jitter; they would decide about a standard deviation.
pub(super) fn jitter(delays: &Times) -> f64 {
    // The extremes of n values are (n - 1) / (n + 1) of the whole width apart, and so are all other quantiles between them.
    let n = delays.count as f64;
    (delays.high - delays.low) / 1.6 * (n + 1.0) / (n - 1.0).max(1.0)
}

/// The middle of uniformly distributed delays, by the same two quantiles, which vary less than their mean, and for the same reason.
pub(super) fn middle(delays: &Times) -> f64 {
    f64::midpoint(delays.low, delays.high)
}

/// By how much more the number of lost packets varies than if each were lost for itself. Losses in bursts come together: with `h` lost of
/// a burst, the share `b` of packets in bursts and `r` = 1 - enter - leave, losses that are k packets apart have the covariance
/// h² b (1 - b) r^k, which sums up to this over all k.
pub(super) fn spread(loss: &Loss) -> f64 {
    let Loss::Bursty { enter, leave, loss_in_burst } = *loss else { return 1.0 };
    let mean = loss.average();
    let variance = mean * (1.0 - mean);
    if variance <= 0.0 {
        return 1.0;
    }
    let in_burst = enter / (enter + leave);
    let (remains, ends) = (1.0 - enter - leave, enter + leave);
    let covariances = loss_in_burst * loss_in_burst * in_burst * (1.0 - in_burst) * remains / ends;
    (1.0 + 2.0 * covariances / variance).max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_delays_have_their_tolerance() {
        let rate = Range::of_rate(100.0);
        assert!(rate.holds(97.1) && rate.holds(102.9) && !rate.holds(96.9) && !rate.holds(103.1));
        assert!(Range::up_to_rate(100.0).holds(1.0) && !Range::up_to_rate(100.0).holds(103.1));
        assert!(Range::of_delay(0.0).holds(0.09) && !Range::of_delay(0.0).holds(0.11));
        assert!(Range::of_delay(25.0).holds(25.7) && !Range::of_delay(25.0).holds(25.8));
        let trip = Range::of_round_trip(50.0, 0.0, 100);
        assert!(trip.holds(51.4) && !trip.holds(51.6));
        assert!(Range::of_round_trip(60.0, 10.0, 75).holds(64.7) && !Range::of_round_trip(60.0, 10.0, 75).holds(64.9));
        assert!(!Range::of_rate(100.0).holds(f64::NAN));
    }

    #[test]
    fn a_loss_is_right_if_it_is_likely() {
        // 500 of 100,000 are expected, with a standard deviation of 22.3.
        let range = Range::of_share(0.005, 100_000, 1.0);
        assert!(range.holds(0.00555) && range.holds(0.00445) && !range.holds(0.0057) && !range.holds(0.0043));
        assert!(Range::of_share(0.005, 100_000, 4.0).holds(0.0057), "bursts vary more");
        let none = Range::of_share(0.0, 1000, 1.0);
        assert!(none.holds(0.0) && !none.holds(0.001));
        assert!(Range::of_share(1.0, 10, 1.0).holds(1.0));
    }

    #[test]
    fn jitter_is_told_from_packets_that_are_late() {
        let mut random = random();
        let mut estimate = |half: f64, late: usize| {
            let mut delays: Vec<f64> = (0..149).map(|_| 30.0 + half * (2.0 * random() - 1.0)).collect();
            delays.iter_mut().take(late).for_each(|delay| *delay = 50.0);
            jitter(&Times::of(&delays).unwrap())
        };
        let mean = (0..1000).map(|_| estimate(5.0, 0)).sum::<f64>() / 1000.0;
        assert!((mean - 5.0).abs() < 0.02, "{mean}, without a bias");
        let mut often =
            |half, late| (0..1000).filter(|_| Range::of_jitter(5.0, 149).holds(estimate(half, late))).count();
        // 99 % of the time when it is what was asked for, late packets or not; and seldom when it is not.
        assert!(often(5.0, 0) > 970 && often(5.0, 4) > 970);
        assert!(often(4.0, 0) < 20 && often(4.0, 4) < 20 && often(6.5, 0) < 20 && often(6.5, 4) < 20);
    }

    /// Numbers in [0, 1), always the same.
    fn random() -> impl FnMut() -> f64 {
        let mut state = 12345_u64;
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        }
    }

    #[test]
    fn bursts_widen_the_interval_as_a_simulation_says() {
        let loss = Loss::Bursty { enter: 0.01, leave: 0.1, loss_in_burst: 0.5 };
        let mut random = random();
        let (runs, packets) = (400, 2000);
        let mut in_burst = false;
        let counts: Vec<f64> = (0..runs)
            .map(|_| {
                let lost = (0..packets).filter(|_| {
                    in_burst = if in_burst { random() >= 0.1 } else { random() < 0.01 };
                    in_burst && random() < 0.5
                });
                lost.count() as f64
            })
            .collect();
        let mean = counts.iter().sum::<f64>() / f64::from(runs);
        let variance = counts.iter().map(|count| (count - mean).powi(2)).sum::<f64>() / f64::from(runs - 1);
        let p = loss.average();
        let expected = f64::from(packets) * p * (1.0 - p) * spread(&loss);
        assert!((variance / expected - 1.0).abs() < 0.2, "{variance} and {expected}");
        assert_eq!(spread(&Loss::Random { probability: 0.1 }), 1.0);
    }
}
