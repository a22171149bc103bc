//! Where a series of steps has settled, found in the series.
//!
//! The cut is where the standard error of what is left is least (the marginal standard error rule, MSER: White 1997):
//! each step cut off costs precision, unless it was unlike the rest. Two changes suit it to a few dozen steps with
//! stray slow ones. Values are first drawn in to what the second half calls usual, so that one slow step neither
//! attracts a cut nor hides a start that is slow. And steps go into the rule one by one where they are few, in groups
//! of up to five (MSER-5) where they are many.

use serde::Serialize;

use super::median::median;
use crate::flag::{Flag, FlagKind};

/// How many steps came before a run settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WarmUp {
    /// Steps to leave out, at most half of them.
    pub cut: usize,
    /// Whether the rest is level.
    pub settled: bool,
}

/// With fewer steps nothing can be said, nor with fewer on one side of a place where the level may have changed.
const FEWEST: usize = 6;
const FEWEST_A_SIDE: usize = 3;

/// Usual is what lies within so many standard deviations of the median.
const USUAL: f64 = 3.0;

/// The rest is not level if it differs before and after some place by more than this share, and by more standard errors
/// than chance explains.
const UNEVEN: f64 = 0.05;
const BEYOND_CHANCE: f64 = 3.5;

/// Finds the cut.
pub fn warm_up(series: &[f64]) -> WarmUp {
    if series.len() < FEWEST {
        return WarmUp { cut: series.len() / 2, settled: false };
    }
    let group = (series.len() / 20).clamp(1, 5);
    let usual = drawn_in(series);
    let groups: Vec<f64> = usual.chunks_exact(group).map(|steps| steps.iter().sum::<f64>() / group as f64).collect();
    let cut = least_error(&groups) * group;
    WarmUp { cut, settled: unevenness(&series[cut..]).is_none() }
}

/// The doubt about a run whose steps never settled.
pub(crate) fn unsettled(series: &[f64]) -> Option<Flag> {
    let WarmUp { cut, settled } = warm_up(series);
    let all = series.len();
    let what = match unevenness(&series[cut..]) {
        _ if settled => return None,
        Some((place, before, after)) => {
            let place = cut + place;
            format!("steps {} to {place} take {before:.2} ms, steps {} to {all} {after:.2} ms", cut + 1, place + 1)
        }
        None => format!("{all} steps are too few to tell the warm-up from the rest; give at least {FEWEST} steps"),
    };
    Some(Flag { kind: FlagKind::NoSteadyState, what })
}

/// The series with unusual values drawn in to the limit of the usual.
fn drawn_in(series: &[f64]) -> Vec<f64> {
    let (_, late) = halves(series);
    let centre = median(late).unwrap_or(0.0);
    // Where steps hardly vary, what differs by less than a two-hundredth is still usual.
    let limit = USUAL * deviation(late).max(centre.abs() / 200.0);
    series.iter().map(|value| value.max(centre - limit).min(centre + limit)).collect()
}

/// How many of the first values to leave out, up to half, for the least standard error of the others.
fn least_error(values: &[f64]) -> usize {
    let error = |cut: &usize| {
        let rest = &values[*cut..];
        let mean = rest.iter().sum::<f64>() / rest.len() as f64;
        rest.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (rest.len() as f64).powi(2)
    };
    (0..=values.len() / 2).min_by(|a, b| error(a).total_cmp(&error(b))).unwrap_or(0)
}

/// The place in `rest` where its level changes most, and the medians before and after; `None` where it is level.
fn unevenness(rest: &[f64]) -> Option<(usize, f64, f64)> {
    // Noise is what neighbours differ by, which no trend adds to. The error of a median of n values is 1.2533 σ / √n.
    let changes: Vec<f64> = rest.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let noise = deviation(&changes) / 2.0_f64.sqrt();
    let change = |place: usize| {
        let (early, late) = rest.split_at(place);
        let (before, after) = (median(early)?, median(late)?);
        let chance = 1.2533 * noise * (1.0 / early.len() as f64 + 1.0 / late.len() as f64).sqrt();
        let shift = (before - after).abs();
        let uneven = shift > UNEVEN * after.abs() && shift > BEYOND_CHANCE * chance;
        (uneven && early.len().min(late.len()) >= FEWEST_A_SIDE).then_some((place, before, after))
    };
    let places = [1, 2, 3].map(|quarter| rest.len() * quarter / 4);
    let size = |(_, before, after): &(usize, f64, f64)| (before - after).abs();
    places.into_iter().filter_map(change).max_by(|a, b| size(a).total_cmp(&size(b)))
}

fn halves(values: &[f64]) -> (&[f64], &[f64]) {
    values.split_at(values.len() / 2)
}

/// The standard deviation of normal values whose absolute deviations from the median have this median.
fn deviation(values: &[f64]) -> f64 {
    let centre = median(values).unwrap_or(0.0);
    1.4826 * median(&values.iter().map(|value| (value - centre).abs()).collect::<Vec<_>>()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::simulate::{Noise, Random};

    /// Steps of 40 ms, the first `warm` of them slower by what `extra` says, one in `slow` delayed.
    fn series(seed: u64, steps: usize, warm: usize, extra: impl Fn(usize) -> f64) -> Vec<f64> {
        let mut random = Random::new(seed);
        let step = |step: usize| {
            let slow = if random.unit() < 0.04 { 40.0 } else { 0.0 };
            40.0 + 2.0 * random.draw(Noise::HeavyTail) + slow + if step < warm { extra(step) } else { 0.0 }
        };
        (0..steps).map(step).collect()
    }

    #[test]
    fn a_slow_start_is_cut_off_and_little_else() {
        for (steps, warm) in [(10, 1), (20, 2), (30, 5), (60, 10), (200, 40)] {
            let cuts: Vec<WarmUp> = (0..50).map(|seed| warm_up(&series(seed, steps, warm, |_| 12.0))).collect();
            let enough = cuts.iter().filter(|found| found.cut + steps / 20 >= warm && found.settled).count();
            let wasted: Vec<f64> = cuts.iter().map(|found| found.cut.saturating_sub(warm) as f64).collect();
            println!("{steps} steps, {warm} slow: cut {enough} of 50, {:?} too many", median(&wasted));
            assert!(enough >= 45, "{steps} steps, {warm} slow: {enough} of 50: {cuts:?}");
            assert!(median(&wasted).unwrap() <= steps as f64 / 10.0, "{steps} steps: {wasted:?}");
        }
    }

    #[test]
    fn what_fades_is_cut_until_it_no_longer_matters() {
        let steady = |seed: u64| {
            let all = series(seed, 80, 80, |step| 60.0 * (-(step as f64) / 4.0).exp());
            let WarmUp { cut, settled } = warm_up(&all);
            settled && (4..=40).contains(&cut) && (median(&all[cut..]).unwrap() - 40.0).abs() < 1.5
        };
        assert!((0..40).filter(|&seed| steady(seed)).count() >= 38);
    }

    #[test]
    fn a_level_series_is_settled_and_loses_little() {
        for steps in [10, 30, 100, 200] {
            let found: Vec<WarmUp> = (0..50).map(|seed| warm_up(&series(seed, steps, 0, |_| 0.0))).collect();
            let settled = found.iter().filter(|found| found.settled).count();
            let cut = median(&found.iter().map(|found| found.cut as f64).collect::<Vec<_>>()).unwrap();
            println!("{steps} level steps: settled {settled} of 50, {cut} cut");
            assert!(settled >= 48 && cut <= steps as f64 / 10.0, "{steps} steps: {settled} of 50, {cut} cut");
        }
    }

    #[test]
    fn what_never_settles_is_said() {
        let rising = |seed: u64| warm_up(&series(seed, 60, 60, |step| step as f64 / 3.0)).settled;
        assert!((0..30).filter(|&seed| rising(seed)).count() <= 1);
        let late = |seed: u64| warm_up(&series(seed, 60, 45, |_| 20.0)).settled;
        assert!((0..30).filter(|&seed| late(seed)).count() <= 1);
        let flag = unsettled(&series(1, 60, 45, |_| 20.0)).unwrap();
        assert_eq!(flag.kind, FlagKind::NoSteadyState);
        assert!(flag.what.contains(" ms, steps 4") && flag.what.contains(" to 60 "), "{}", flag.what);
        assert_eq!(unsettled(&series(1, 60, 0, |_| 0.0)), None);
    }

    #[test]
    fn tiny_constant_and_odd_series_do_no_harm() {
        assert_eq!(warm_up(&[]), WarmUp { cut: 0, settled: false });
        assert_eq!(warm_up(&[5.0, 1.0, 1.0]), WarmUp { cut: 1, settled: false });
        assert_eq!(warm_up(&[1.0; 40]), WarmUp { cut: 0, settled: true });
        assert_eq!(warm_up(&[[9.0].as_slice(), &[1.0; 39]].concat()), WarmUp { cut: 1 + 1, settled: true });
        assert_eq!(warm_up(&[0.0; 8]), WarmUp { cut: 0, settled: true });
        for odd in [f64::NAN, f64::INFINITY, f64::MAX, -1.0] {
            let mut series = vec![1.0; 12];
            series[0] = odd;
            assert!(warm_up(&series).cut <= 6);
            assert!(warm_up(&[odd; 12]).cut <= 6);
        }
        assert!(unsettled(&[1.0]).unwrap().what.starts_with("1 steps are too few"));
    }
}
