//! The level of a cell over its runs, with an interval.

use serde::Serialize;

use super::beta::student;
use super::bootstrap::MedianError;
use super::median::median;

/// An estimate, and between which values the truth lies with a probability of `level`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    pub estimate: f64,
    pub low: f64,
    pub high: f64,
    pub level: f64,
}

/// One run's figure: the median of its steps, or what it counted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RunValue {
    pub round: u32,
    pub value: f64,
    /// Standard error of `value` from what steps vary inside the run; 0 for what was counted.
    pub error: f64,
    /// Between which values the steps of this run alone would put the truth.
    pub low: f64,
    pub high: f64,
}

impl Interval {
    pub fn contains(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }

    pub fn width(&self) -> f64 {
        self.high - self.low
    }

    /// The estimate alone, where too little is known for ends that mean anything; they are not numbers then.
    #[must_use]
    pub fn without_ends(self) -> Interval {
        Interval { low: f64::NAN, high: f64::NAN, ..self }
    }

    /// Whether there are ends.
    pub fn has_ends(&self) -> bool {
        !self.low.is_nan() && !self.high.is_nan()
    }

    /// `40.1 (39.5 … 40.8)`.
    pub fn text(&self, digits: usize) -> String {
        let Interval { estimate, low, high, .. } = self;
        format!("{estimate:.digits$} ({low:.digits$} … {high:.digits$})")
    }

    pub(super) fn around(location: &Location, level: f64) -> Interval {
        let half = location.half_width(level);
        Interval { estimate: location.centre, low: location.centre - half, high: location.centre + half, level }
    }

    /// Of the exponentials of values.
    pub(super) fn exp(self) -> Interval {
        Interval { estimate: self.estimate.exp(), low: self.low.exp(), high: self.high.exp(), level: self.level }
    }
}

impl RunValue {
    /// The median of `steps`, which have settled; `None` of nothing.
    pub fn of_steps(round: u32, steps: &[f64]) -> Option<RunValue> {
        let value = median(steps).filter(|value| value.is_finite())?;
        let MedianError { error, low, high } = MedianError::of_median(steps, super::LEVEL)?;
        Some(RunValue { round, value, error, low, high })
    }

    /// What a run says once.
    pub fn counted(round: u32, value: f64) -> RunValue {
        RunValue { round, value, error: 0.0, low: value, high: value }
    }
}

/// The level of a cell's runs; `None` without a run. Of a single run the interval covers its steps only, not what
/// differs from run to run. Of values that are all above 0 it is one of ratios, by their logarithms, so that it is above 0 as they are.
pub fn interval(runs: &[RunValue], level: f64) -> Option<Interval> {
    if let [run] = runs {
        return Some(Interval { estimate: run.value, low: run.low, high: run.high, level });
    }
    let mean_square = |errors: &dyn Fn(&RunValue) -> f64| {
        runs.iter().map(|run| errors(run).powi(2)).sum::<f64>() / runs.len().max(1) as f64
    };
    let values: Vec<f64> = runs.iter().map(|run| run.value).collect();
    let location = Location::of(&values, mean_square(&|run| run.error))?;
    if values.iter().all(|value| *value > 0.0) {
        let logs: Vec<f64> = values.iter().map(|value| value.ln()).collect();
        let half = Location::of(&logs, mean_square(&|run| run.error / run.value))?.half_width(level).exp();
        let estimate = location.centre;
        return Some(Interval { estimate, low: estimate / half, high: estimate * half, level });
    }
    let mut found = Interval::around(&location, level);
    if values.iter().all(|value| *value >= 0.0) {
        found.low = found.low.max(0.0);
    }
    Some(found)
}

/// A trimmed mean and what is known about it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Location {
    pub(super) centre: f64,
    /// Of `centre`.
    pub(super) variance: f64,
    /// Degrees of freedom of that variance.
    pub(super) freedom: f64,
}

/// One value in so many is trimmed at each end.
const TRIMMED: usize = 7;

impl Location {
    /// Of `values`, each of which cannot vary less than by the variance `least`; `None` of nothing.
    pub(super) fn of(values: &[f64], least: f64) -> Option<Location> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (count, cut) = (sorted.len(), sorted.len() / TRIMMED);
        let kept = &sorted[cut..count - cut];
        let (&first, &last) = (kept.first()?, kept.last()?);
        let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
        // Those trimmed count as much as the outermost that were kept (Tukey and McLaughlin 1963).
        sorted.iter_mut().for_each(|value| *value = value.max(first).min(last));
        let centre = if first == last { first } else { mean(&sorted[cut..count - cut]) };
        let middle = mean(&sorted);
        let squares: f64 = sorted.iter().map(|value| (value - middle).powi(2)).sum();
        let between = if first == last { 0.0 } else { squares / (count.max(2) - 1) as f64 };
        let share = (count - 2 * cut) as f64 / count as f64;
        let variance = (between / (share * share)).max(least) / count as f64;
        Some(Location { centre, variance, freedom: (count - 2 * cut) as f64 - 1.0 })
    }

    /// This less `other`, which is independent of it, with Welch's degrees of freedom.
    pub(super) fn minus(&self, other: &Location) -> Location {
        let variance = self.variance + other.variance;
        let share = |one: &Location| one.variance.powi(2) / one.freedom.max(f64::MIN_POSITIVE);
        let squares = share(self) + share(other);
        let freedom = if squares > 0.0 { variance.powi(2) / squares } else { self.freedom + other.freedom };
        Location { centre: self.centre - other.centre, variance, freedom }
    }

    fn half_width(&self, level: f64) -> f64 {
        // Of a single value, what is known is the variance inside it, from many steps.
        const MANY: f64 = 1e6;
        let freedom = if self.freedom >= 1.0 { self.freedom } else { MANY };
        if self.variance == 0.0 { 0.0 } else { student(level, freedom) * self.variance.sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(values: &[f64]) -> Vec<RunValue> {
        values.iter().zip(1..).map(|(&value, round)| RunValue::counted(round, value)).collect()
    }

    #[test]
    fn students_interval_of_known_values() {
        let half = 2.776_445 * (2.5_f64 / 5.0).sqrt();
        let around_nothing = interval(&counted(&[-2.0, -1.0, 0.0, 1.0, 2.0]), 0.95).unwrap();
        assert_eq!(around_nothing.estimate, 0.0);
        assert!((around_nothing.low + half).abs() < 1e-5 && (around_nothing.high - half).abs() < 1e-5);
        // The same in ratios: powers of two, whose logarithms are as far apart.
        let found = interval(&counted(&[1.0, 2.0, 4.0, 8.0, 16.0]), 0.95).unwrap();
        let half = (half * 2.0_f64.ln()).exp();
        assert_eq!(found.estimate, 6.2);
        assert!((found.low - 6.2 / half).abs() < 1e-5 && (found.high - 6.2 * half).abs() < 1e-5, "{found:?}");
        assert_eq!(found.text(1), format!("6.2 ({:.1} … {:.1})", 6.2 / half, 6.2 * half));
    }

    #[test]
    fn what_cannot_be_negative_has_no_negative_end() {
        for values in [[10.0, 11.0, 190.0], [1e-3, 5.0, 60.0], [0.0, 0.0, 7.0], [0.0, 20.0, 0.0]] {
            let found = interval(&counted(&values), 0.95).unwrap();
            assert!(found.low >= 0.0 && found.low <= found.estimate && found.estimate <= found.high, "{found:?}");
        }
        let unknown = interval(&counted(&[1.0, 2.0]), 0.95).unwrap().without_ends();
        assert!(unknown.estimate == 1.5 && !unknown.has_ends() && !unknown.contains(1.5), "{unknown:?}");
    }

    #[test]
    fn one_outlier_among_seven_is_trimmed() {
        let found = interval(&counted(&[10.0, 10.1, 9.9, 10.2, 9.8, 10.0, 99.0]), 0.95).unwrap();
        assert!(found.high < 10.5 && found.low > 9.5, "{found:?}");
    }

    #[test]
    fn runs_that_happen_to_agree_are_not_taken_for_certain() {
        let steps: Vec<f64> = (0..30).map(|step| 10.0 + f64::from(step * 7 % 11)).collect();
        let runs: Vec<RunValue> = (1..=3).map(|round| RunValue::of_steps(round, &steps).unwrap()).collect();
        assert!(interval(&runs, 0.95).unwrap().width() > 1.0);
    }

    #[test]
    fn of_one_run_its_steps_and_of_none_nothing() {
        let run = RunValue::of_steps(1, &[3.0, 1.0, 2.0, 2.0, 2.5]).unwrap();
        let found = interval(&[run], 0.95).unwrap();
        assert_eq!(found.estimate, 2.0);
        assert!(found.contains(2.0) && found.width() > 1.0, "{found:?}");
        assert_eq!(interval(&[], 0.95), None);
        assert_eq!(RunValue::of_steps(1, &[]), None);
        assert_eq!(interval(&counted(&[0.1, 0.1, 0.1]), 0.95).unwrap().estimate, 0.1);
    }
}
