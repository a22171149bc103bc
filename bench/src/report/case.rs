//! All runs of one cell put together, and cells compared.

use std::cmp::Ordering;

use rig::flag::{Flag, FlagKind};
use rig::record::{Cell, Measured, Rank, Record};
use rig::stats::median;
use rig::stats::{CellRuns, ExcludedRun, ExclusionReason, Interval, LEVEL, Summary, interval, paired, step_time};

use super::links::Traits;
use super::order::{STRATEGIES, known, transports};

/// Rounds that two cells must have in common before one is called faster.
pub(crate) const ROUNDS: usize = 3;

/// The parts of a step that wait for the network: for gradients and parameters, and for loss and norm.
pub(crate) const NETWORK: [&str; 2] = ["exposed", "scalars"];

/// The part that waits for ranks which are still computing.
pub(crate) const LATE: [&str; 1] = ["skew"];

/// All runs of one cell.
pub(crate) struct Case<'a> {
    pub(crate) cell: &'a Cell,
    /// Those that count, by round.
    pub(crate) good: Vec<Run<'a>>,
    pub(crate) left_out: Vec<ExcludedRun>,
    /// What is doubted in any of its runs, by round.
    pub(crate) flags: Vec<(u32, Flag)>,
    /// `4 ranks on 2 cores`, where ranks share cores.
    pub(crate) crowd: Option<String>,
    /// Milliseconds a step; of fewer than [`ROUNDS`] runs without ends.
    pub(crate) step: Option<Interval>,
    /// Of `step`, run by run.
    timed: Option<Summary>,
    pub(crate) traits: Traits,
}

/// A run that counts.
pub(crate) struct Run<'a> {
    pub(crate) round: u32,
    pub(crate) measured: &'a Measured,
    /// Steps before it settled.
    pub(crate) from: usize,
}

/// One cell against another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    /// Times of the first by times of the second, round by round.
    pub(crate) ratio: Interval,
    /// Milliseconds of the first less those of the second, likewise.
    pub(crate) difference: Interval,
    /// Rounds that both have.
    pub(crate) rounds: usize,
    /// Whether the first is slower (1), faster (−1), or neither for all that the data says (0): by the interval of the ratio alone.
    pub(crate) verdict: i32,
}

impl<'a> Case<'a> {
    pub(super) fn of(runs: CellRuns<'a>, mut flags: Vec<(u32, Flag)>, traits: Traits) -> Self {
        let CellRuns { cell, runs, left_out } = runs;
        let timed = step_time(&runs);
        // Whether steps settled is found when they are summed up; runs need not say so themselves.
        for (round, flag) in timed.iter().flat_map(|timed| &timed.flags) {
            if !flags.iter().any(|(there, known)| there == round && known.kind == flag.kind) {
                flags.push((*round, flag.clone()));
            }
        }
        flags.sort_by_key(|(round, _)| *round);
        let cut = |round: u32| timed.iter().flat_map(|timed| &timed.warm_up).find(|(there, _)| *there == round);
        let run = |record: &&'a Record| {
            let (_, warm_up) = cut(record.round)?;
            Some(Run { round: record.round, measured: record.measured.as_ref()?, from: warm_up.cut })
        };
        let good: Vec<Run<'_>> = runs.iter().filter_map(run).collect();
        let shared = flags.iter().find(|(_, flag)| flag.kind == FlagKind::SharedCores);
        let crowd = shared.map(|(_, flag)| crowd(cell, &flag.what));
        let step = timed
            .as_ref()
            .map(|timed| if good.len() < ROUNDS { timed.interval.without_ends() } else { timed.interval });
        Case { cell, good, left_out, flags, crowd, step, timed, traits }
    }

    /// Strategies, transports and links in the order in which they are told of, everything else by its value.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        let key = |case: &Self| (known(&STRATEGIES, &case.cell.strategy), known(&transports(), &case.cell.transport));
        let links = self.traits.order(&other.traits).then_with(|| self.cell.link.cmp(&other.cell.link));
        links.then_with(|| key(self).cmp(&key(other))).then_with(|| self.cell.cmp(other.cell))
    }

    /// Times of this cell by those of `other`, by rounds that both have.
    pub(crate) fn against(&self, other: &Case<'_>) -> Option<Comparison> {
        let found = paired(&other.timed.as_ref()?.runs, &self.timed.as_ref()?.runs, LEVEL)?;
        let ratio = found.ratio?;
        let verdict = match found.rounds >= ROUNDS {
            true if ratio.low > 1.0 => 1,
            true if ratio.high < 1.0 => -1,
            _ => 0,
        };
        Some(Comparison { ratio, difference: found.difference, rounds: found.rounds, verdict })
    }

    /// The mean of a part over settled steps, ranks and rounds: means add up, medians do not.
    pub(crate) fn mean(&self, part: &str) -> Option<f64> {
        let values: Vec<f64> = self.good.iter().flat_map(|run| run.values(part)).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    /// What share of the mean step some parts take, all of the same settled steps, with the interval over runs.
    pub(crate) fn share_of(&self, parts: &[&str]) -> Option<Interval> {
        self.over_runs(|run| {
            let total = run.mean("total").filter(|ms| *ms > 0.0)?;
            Some(run.sum(parts)? / total)
        })
    }

    /// Milliseconds that some parts take of the mean step, with the interval over runs.
    pub(crate) fn ms_of(&self, parts: &[&str]) -> Option<Interval> {
        self.over_runs(|run| run.sum(parts))
    }

    /// The mean over runs of what `one` makes of each, without ends where there are few. Chance inside a run is taken to move it as much as it
    /// moves the run's steps.
    fn over_runs(&self, one: impl Fn(&Run<'_>) -> Option<f64>) -> Option<Interval> {
        let timed = self.timed.as_ref()?;
        let mut values = Vec::new();
        for run in &self.good {
            let known = timed.runs.iter().find(|known| known.round == run.round);
            let (Some(known), Some(value)) = (known, one(run).filter(|value| value.is_finite())) else { continue };
            let mut found = *known;
            found.error = if known.value > 0.0 { value.abs() * known.error / known.value } else { 0.0 };
            found.value = value;
            values.push(found);
        }
        let found = interval(&values, LEVEL).filter(|found| found.estimate.is_finite())?;
        Some(if values.len() < ROUNDS { found.without_ends() } else { found })
    }

    /// Ends of the link, where its description or its emulator tells: fewer than ranks where neighbours stand behind one.
    pub(crate) fn ends(&self) -> Option<usize> {
        self.good.iter().find_map(|run| super::links::ends(&run.measured.link))
    }

    /// `2 ends for 4 ranks`, where ranks share ends of the link.
    pub(crate) fn shared_ends(&self) -> Option<String> {
        let ends = self.ends().filter(|ends| *ends < self.cell.ranks)?;
        Some(format!("{} for {} ranks", super::text::count(ends, "end"), self.cell.ranks))
    }

    pub(crate) fn tokens_per_s(&self) -> Option<Interval> {
        let tokens = self.good.first()?.measured.tokens_per_step as f64;
        let step = self.step?;
        let speed = |ms: f64| tokens * 1e3 / ms;
        Some(Interval {
            estimate: speed(step.estimate),
            low: speed(step.high),
            high: speed(step.low),
            level: step.level,
        })
    }

    /// Something of each rank of each good run, as the median over runs of what `over_ranks` makes of it.
    pub(crate) fn by_rank(
        &self,
        one: impl Fn(&Rank) -> Option<f64>,
        over_ranks: impl Fn(Vec<f64>) -> Option<f64>,
    ) -> Option<f64> {
        let runs = self.good.iter().filter_map(|run| {
            let ranks = run.measured.ranks.iter().map(&one).collect::<Option<Vec<f64>>>()?;
            over_ranks(ranks)
        });
        median(&runs.collect::<Vec<_>>())
    }

    /// `210.3 [208.1, 213.0]`, or why there is nothing.
    pub(crate) fn step_text(&self) -> String {
        self.step.map_or_else(|| self.hole().0, |step| super::text::interval(&step))
    }

    /// In a word and in a sentence why it has no figures.
    pub(crate) fn hole(&self) -> (String, String) {
        if self.good.is_empty() && self.left_out.is_empty() {
            return ("not reached".into(), "the sweep ended before this cell ran".into());
        }
        let Some(ExcludedRun { why, what, .. }) = self.left_out.iter().find(|out| out.why != ExclusionReason::Repeated)
        else {
            return ("no figures".into(), "it ended without an error, but its steps have no times".into());
        };
        let word = match why {
            ExclusionReason::Failed => "failed",
            ExclusionReason::TimedOut => "timed out",
            ExclusionReason::NotAvailable => "not available",
            ExclusionReason::Unsound => "not sound",
            ExclusionReason::Repeated => "run again",
        };
        (word.into(), what.clone())
    }

    /// Whether any of its runs is doubted for this reason.
    pub(crate) fn is_flagged(&self, kind: FlagKind) -> bool {
        self.flags.iter().any(|(_, flag)| flag.kind == kind)
    }
}

impl Run<'_> {
    /// The mean of a part over settled steps and ranks.
    fn mean(&self, part: &str) -> Option<f64> {
        let values = self.values(part);
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    /// The sum of the means of some parts; one that was not recorded counts as nothing, unless none was.
    fn sum(&self, parts: &[&str]) -> Option<f64> {
        let means: Vec<f64> = parts.iter().filter_map(|part| self.mean(part)).collect();
        (!means.is_empty()).then(|| means.iter().sum())
    }

    /// A part's values of all ranks, settled steps alone.
    pub(crate) fn values(&self, part: &str) -> Vec<f64> {
        let ranks = self.measured.ranks.iter();
        ranks.flat_map(|rank| column(rank, part).iter().skip(self.from).copied()).filter(|ms| ms.is_finite()).collect()
    }
}

fn column<'r>(rank: &'r Rank, part: &str) -> &'r [f64] {
    match part {
        "total" => &rank.steps.total,
        "communication" => &rank.steps.communication,
        "hidden" => &rank.steps.hidden,
        _ => rank.steps.parts().into_iter().find(|(name, _)| *name == part).map_or(&[], |(_, values)| values),
    }
}

impl Comparison {
    /// `1.25× [1.21, 1.30]`.
    pub(crate) fn times(&self) -> String {
        let Interval { estimate, low, high, .. } = self.ratio;
        // Close to 1 it matters on which side the ends are.
        let near = if (estimate - 1.0).abs() < 0.1 { 3 } else { 2 };
        let hidden = |digits: &usize| [low, high].iter().any(|end| *end != 1.0 && is_one(*end, *digits));
        let digits = (near..5).find(|digits| !hidden(digits)).unwrap_or(5);
        format!("{estimate:.digits$}× [{low:.digits$}, {high:.digits$}]")
    }
}

/// Whether a number is 1 as it is printed.
fn is_one(value: f64, digits: usize) -> bool {
    (value - 1.0).abs() < 0.5 * 10f64.powi(-(digits as i32))
}

/// How many ranks share how many cores, of which the doubt speaks.
fn crowd(cell: &Cell, doubt: &str) -> String {
    let cores = doubt.split_once("share ").and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
    let cores = cores.map_or("too few cores".into(), |cores| super::text::count(cores, "core"));
    // Where a launcher has started them, those of one machine.
    let ranks = doubt.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(cell.ranks);
    format!("{ranks} ranks on {cores}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_printed_on_the_side_of_1_where_they_are() {
        let times = |estimate, low, high| {
            let ratio = Interval { estimate, low, high, level: LEVEL };
            Comparison { ratio, difference: ratio, rounds: 3, verdict: 0 }.times()
        };
        assert_eq!(times(1.25, 1.21, 1.3), "1.25× [1.21, 1.30]");
        assert_eq!(times(1.11, 1.003, 1.24), "1.110× [1.003, 1.240]");
        assert_eq!(times(1.05, 1.0001, 1.1), "1.0500× [1.0001, 1.1000]");
        assert_eq!(times(1.0, 1.0, 1.0), "1.000× [1.000, 1.000]");
    }
}
