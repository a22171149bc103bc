//! Whether two cells differ.

use serde::Serialize;

use super::interval::{Interval, Location, RunValue};

/// What is known about the difference between two cells.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// B less A.
    pub difference: Interval,
    /// B over A; `None` where a run's figure is not positive.
    pub ratio: Option<Interval>,
    /// Rounds that both cells have, or runs of the cell that has fewer.
    pub rounds: usize,
    pub verdict: Verdict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    NoSignificantDifference,
    Difference(Change),
    /// A single run does not tell how much runs differ by themselves.
    TooFewRuns,
}

/// What B's figure is beside A's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    Lower,
    Higher,
}

/// Compares cells of one sweep, whose runs of one round ran one after the other: by their differences in each. `None`
/// where they have no round in common.
pub fn paired(a: &[RunValue], b: &[RunValue], level: f64) -> Option<Comparison> {
    let other = |run: &RunValue| b.iter().find(|other| other.round == run.round).map(|other| (*run, *other));
    let pairs: Vec<(RunValue, RunValue)> = a.iter().filter_map(other).collect();
    let across = |difference: fn(f64, f64) -> f64, error: fn(&RunValue) -> f64| {
        let values: Vec<f64> = pairs.iter().map(|(a, b)| difference(b.value, a.value)).collect();
        let errors = pairs.iter().map(|(a, b)| error(a).powi(2) + error(b).powi(2)).sum::<f64>();
        Some(Interval::around(&Location::of(&values, errors / pairs.len().max(1) as f64)?, level))
    };
    let difference = across(|b, a| b - a, |run| run.error)?;
    let positive = pairs.iter().all(|(a, b)| a.value > 0.0 && b.value > 0.0);
    let ratio = positive.then(|| across(|b, a| b.ln() - a.ln(), |run| run.error / run.value)).flatten();
    let size = pairs.iter().fold(0.0_f64, |size, (a, b)| size.max(a.value.abs()).max(b.value.abs()));
    Some(Comparison::of(difference, ratio.map(Interval::exp), pairs.len(), size))
}

/// Compares cells of different sweeps. `None` where one has no runs.
pub fn unpaired(a: &[RunValue], b: &[RunValue], level: f64) -> Option<Comparison> {
    let difference = |value: fn(f64) -> f64, error: fn(&RunValue) -> f64| {
        let location = |runs: &[RunValue]| {
            let values: Vec<f64> = runs.iter().map(|run| value(run.value)).collect();
            let errors = runs.iter().map(|run| error(run).powi(2)).sum::<f64>();
            Location::of(&values, errors / runs.len().max(1) as f64)
        };
        Some(Interval::around(&location(b)?.minus(&location(a)?), level))
    };
    let absolute = difference(|value| value, |run| run.error)?;
    let positive = a.iter().chain(b).all(|run| run.value > 0.0);
    let ratio = positive.then(|| difference(f64::ln, |run| run.error / run.value)).flatten();
    let size = a.iter().chain(b).fold(0.0_f64, |size, run| size.max(run.value.abs()));
    Some(Comparison::of(absolute, ratio.map(Interval::exp), a.len().min(b.len()), size))
}

impl Comparison {
    /// With figures up to `size`.
    fn of(mut difference: Interval, ratio: Option<Interval>, rounds: usize, size: f64) -> Comparison {
        // What is left of equal figures after rounding is no difference.
        if difference.width() == 0.0 && difference.estimate.abs() <= 1e-12 * size {
            difference = Interval { estimate: 0.0, low: 0.0, high: 0.0, ..difference };
        }
        let verdict = if rounds < 2 { Verdict::TooFewRuns } else { Comparison::judge(&difference) };
        Comparison { difference, ratio, rounds, verdict }
    }

    /// For figures that are the same in every run unless something was changed: one run is enough.
    pub fn of_exact_figures(self) -> Comparison {
        Comparison { verdict: Comparison::judge(&self.difference), ..self }
    }

    fn judge(difference: &Interval) -> Verdict {
        match difference {
            Interval { low, .. } if *low > 0.0 => Verdict::Difference(Change::Higher),
            Interval { high, .. } if *high < 0.0 => Verdict::Difference(Change::Lower),
            _ => Verdict::NoSignificantDifference,
        }
    }

    /// `no significant difference (-0.3 ms, 95 % CI -1.1 … 0.6)`, or what `names` calls lower and higher: `slower by
    /// 5.1 ms (95 % CI …)`.
    pub fn words(&self, names: (&str, &str), unit: &str, digits: usize) -> String {
        let Interval { estimate, low, high, level } = self.difference;
        let (lower, higher) = names;
        let unit = if unit.is_empty() { String::new() } else { format!(" {unit}") };
        let percent = level * 100.0;
        let ends = |low: f64, high: f64| format!(" ({percent:.0} % CI {low:.digits$} … {high:.digits$})");
        let ends = |low: f64, high: f64| if low == high { String::new() } else { ends(low, high) };
        match self.verdict {
            Verdict::NoSignificantDifference if low == high => "no difference".into(),
            Verdict::NoSignificantDifference => format!(
                "no significant difference ({estimate:.digits$}{unit}, {percent:.0} % CI {low:.digits$} \
                 … {high:.digits$})"
            ),
            Verdict::Difference(Change::Higher) => format!("{higher} by {estimate:.digits$}{unit}{}", ends(low, high)),
            Verdict::Difference(Change::Lower) => {
                format!("{lower} by {:.digits$}{unit}{}", -estimate, ends(-high, -low))
            }
            Verdict::TooFewRuns => format!("too few runs to tell ({estimate:.digits$}{unit})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(values: &[f64]) -> Vec<RunValue> {
        values.iter().zip(1..).map(|(&value, round)| RunValue::counted(round, value)).collect()
    }

    const NAMES: (&str, &str) = ("faster", "slower");

    #[test]
    fn pairs_see_through_a_drift_that_hides_the_difference_from_others() {
        let (a, b) = (counted(&[40.0, 44.0, 48.0, 52.0, 56.0]), counted(&[42.0, 46.1, 49.9, 54.0, 58.1]));
        let together = paired(&a, &b, 0.95).unwrap();
        assert_eq!(together.verdict, Verdict::Difference(Change::Higher));
        assert!(together.difference.contains(2.0) && together.difference.width() < 0.5, "{together:?}");
        assert!(together.ratio.unwrap().contains(1.042), "{together:?}");
        assert!(together.words(NAMES, "ms", 1).starts_with("slower by 2.0 ms (95 % CI 1.9 … 2.1)"));
        assert_eq!(unpaired(&a, &b, 0.95).unwrap().verdict, Verdict::NoSignificantDifference);
        assert!(
            paired(&b, &a, 0.95).unwrap().words(NAMES, "ms", 1).starts_with("faster by 2.0 ms (95 % CI 1.9 … 2.1)")
        );
    }

    #[test]
    fn only_rounds_that_both_have_are_paired() {
        let a = counted(&[1.0, 2.0, 3.0]);
        let found = paired(&a, &[RunValue::counted(3, 4.0), RunValue::counted(9, 0.0)], 0.95).unwrap();
        assert_eq!((found.rounds, found.difference.estimate, found.verdict), (1, 1.0, Verdict::TooFewRuns));
        assert_eq!(found.words(NAMES, "ms", 1), "too few runs to tell (1.0 ms)");
        assert_eq!(found.of_exact_figures().verdict, Verdict::Difference(Change::Higher));
        assert_eq!(paired(&a, &[], 0.95), None);
        assert_eq!(unpaired(&a, &[], 0.95), None);
    }

    #[test]
    fn equal_figures_do_not_differ_and_constant_ones_differ_exactly() {
        let same = unpaired(&counted(&[0.1; 3]), &counted(&[0.1; 7]), 0.95).unwrap();
        assert_eq!(same.words(NAMES, "", 1), "no difference");
        let other = unpaired(&counted(&[100.0; 3]), &counted(&[90.0; 3]), 0.95).unwrap();
        assert_eq!(other.verdict, Verdict::Difference(Change::Lower));
        assert_eq!(other.words(("less", "more"), "bytes", 0), "less by 10 bytes");
    }

    #[test]
    fn figures_of_zero_have_no_ratio() {
        let found = unpaired(&counted(&[0.0, 0.0]), &counted(&[1.0, 2.0]), 0.95).unwrap();
        assert_eq!(found.ratio, None);
    }
}
