//! Two sweeps, compared.

use rig::flag::FlagKind;
use rig::record::{Axis, Cell};
use rig::results::Results;
use rig::stats::{
    CellRuns, Change, Comparison, ExclusionReason, Interval, Keep, Metric, Over, Summary, Verdict, cell_runs,
};
use rig::stats::{compare_unpaired, summary};
use serde::Serialize;

use super::changes::{Difference, cells_changed, environments_changed};

/// All that is to be said.
#[derive(Debug, Serialize)]
pub(crate) struct Findings {
    pub(crate) a: Sweep,
    pub(crate) b: Sweep,
    pub(crate) threshold: f64,
    pub(crate) warnings: Vec<String>,
    /// What differs besides figures, and may be why they do.
    pub(crate) changes: Vec<Difference>,
    /// Cells of one sweep only.
    pub(crate) only_a: Vec<String>,
    pub(crate) only_b: Vec<String>,
    /// One for each metric.
    pub(crate) tables: Vec<Table>,
    pub(crate) regressions: usize,
    pub(crate) improvements: usize,
}

/// One of the two.
#[derive(Debug, Serialize)]
pub(crate) struct Sweep {
    pub(crate) file: String,
    pub(crate) plans: Vec<String>,
    pub(crate) cells: usize,
    pub(crate) runs: usize,
    /// Runs that do not count.
    pub(crate) left_out: usize,
}

#[derive(Debug, Serialize)]
pub(crate) struct Table {
    pub(crate) metric: Metric,
    pub(crate) rows: Vec<Row>,
}

/// A cell of both sweeps.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) label: String,
    pub(crate) cell: Cell,
    pub(crate) a: Option<Figure>,
    pub(crate) b: Option<Figure>,
    pub(crate) comparison: Option<Comparison>,
    pub(crate) outcome: Outcome,
    /// Doubts about runs that count, and why others do not.
    pub(crate) notes: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Figure {
    pub(crate) interval: Interval,
    /// Runs behind it.
    pub(crate) runs: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Outcome {
    /// Significantly worse, and by more than the threshold.
    Regression,
    /// There are no figures any more, though nothing says that the machine cannot run it.
    Gone,
    /// Significantly better, and by more than the threshold.
    Improvement,
    /// Significantly different, but by less than the threshold.
    Small,
    /// Certainly not different by as much as the threshold.
    Same,
    /// Nothing is certain.
    Open,
    /// There are no figures to compare.
    Nothing,
}

impl Findings {
    /// # Errors
    /// The sweeps have no cell in common.
    pub(crate) fn of(a: &Results, b: &Results, metrics: &[Metric], threshold: f64) -> Result<Findings, String> {
        let (cells_a, cells_b) = (cell_runs(&a.records, Keep::Sound), cell_runs(&b.records, Keep::Sound));
        let all = cells_a.iter().chain(&cells_b).map(|runs| runs.cell);
        let varied = Cell::varied(all);
        let main = [Axis::Strategy, Axis::Transport, Axis::Link];
        let axes: Vec<Axis> =
            Axis::ALL.into_iter().filter(|axis| main.contains(axis) || varied.contains(axis)).collect();
        let partner = |of: &CellRuns, among: &[CellRuns]| among.iter().position(|other| other.cell == of.cell);
        let pairs: Vec<Pair> = cells_a
            .iter()
            .filter_map(|a| Some(Pair { label: a.cell.label(&axes), a, b: &cells_b[partner(a, &cells_b)?] }))
            .collect();
        if pairs.is_empty() {
            return Err(format!(
                "{} and {} have no cell in common: no combination of axis values occurs in both; compare sweeps of the same plan",
                a.file.display(),
                b.file.display()
            ));
        }
        let only = |of: &[CellRuns], other: &[CellRuns]| -> Vec<String> {
            of.iter().filter(|runs| partner(runs, other).is_none()).map(|runs| runs.cell.label(&axes)).collect()
        };
        let tables: Vec<Table> = metrics
            .iter()
            .map(|&metric| Table { metric, rows: pairs.iter().map(|pair| pair.row(metric, threshold)).collect() })
            .collect();
        let count = |outcomes: &[Outcome]| {
            tables.iter().flat_map(|table| &table.rows).filter(|row| outcomes.contains(&row.outcome)).count()
        };
        let mut changes = environments_changed(&a.records, &b.records);
        changes.extend(cells_changed(pairs.iter().map(|pair| (pair.label.as_str(), pair.a, pair.b))));
        Ok(Findings {
            a: Sweep::of(a, &cells_a),
            b: Sweep::of(b, &cells_b),
            threshold,
            warnings: a.warnings.iter().chain(&b.warnings).cloned().collect(),
            changes,
            only_a: only(&cells_a, &cells_b),
            only_b: only(&cells_b, &cells_a),
            regressions: count(&[Outcome::Regression, Outcome::Gone]),
            improvements: count(&[Outcome::Improvement]),
            tables,
        })
    }
}

impl Sweep {
    fn of(results: &Results, cells: &[CellRuns]) -> Sweep {
        let mut plans: Vec<String> = results.records.iter().map(|record| record.plan.clone()).collect();
        plans.sort_unstable();
        plans.dedup();
        Sweep {
            file: results.file.display().to_string(),
            plans,
            cells: cells.len(),
            runs: results.records.len(),
            left_out: cells.iter().map(|cell| cell.left_out.len()).sum(),
        }
    }
}

/// The same cell in both sweeps.
struct Pair<'a> {
    label: String,
    a: &'a CellRuns<'a>,
    b: &'a CellRuns<'a>,
}

impl Pair<'_> {
    fn row(&self, metric: Metric, threshold: f64) -> Row {
        let of = |runs: &CellRuns| summary(metric, Over::Mean, &runs.runs);
        let (a, b) = (of(self.a), of(self.b));
        let comparison = a.as_ref().zip(b.as_ref()).and_then(|(a, b)| compare_unpaired(metric, a, b));
        let figure = |summary: &Summary| Figure { interval: summary.interval, runs: summary.runs.len() };
        let outcome = match (&a, &b, &comparison) {
            (Some(a), Some(_), Some(comparison)) => judge(metric, a.interval.estimate, comparison, threshold),
            (Some(_), None, _) if !self.b.left_out.iter().all(|out| out.why == ExclusionReason::NotAvailable) => {
                Outcome::Gone
            }
            // All its runs ended well, but without this figure: a loss that is no number.
            (Some(_), None, _) if !self.b.runs.is_empty() => Outcome::Gone,
            _ => Outcome::Nothing,
        };
        let notes = [("A", self.a, &a), ("B", self.b, &b)];
        Row {
            label: self.label.clone(),
            cell: self.a.cell.clone(),
            notes: notes.into_iter().flat_map(|(name, runs, summary)| notes_of(name, runs, summary.as_ref())).collect(),
            a: a.as_ref().map(figure),
            b: b.as_ref().map(figure),
            comparison,
            outcome,
        }
    }
}

fn judge(metric: Metric, a: f64, comparison: &Comparison, threshold: f64) -> Outcome {
    let within = |ratio: f64| (ratio - 1.0).abs() <= threshold;
    // Beside nothing, anything is more than a share of it.
    let estimate = comparison.ratio.map(|ratio| ratio.estimate);
    let small = estimate.or((a > 0.0).then(|| 1.0 + comparison.difference.estimate / a)).is_some_and(within);
    match comparison.verdict {
        Verdict::Difference(_) if small => Outcome::Small,
        Verdict::Difference(change) if (change == Change::Higher) == metric.more_is_better() => Outcome::Improvement,
        Verdict::Difference(_) => Outcome::Regression,
        Verdict::NoSignificantDifference if comparison.difference.width() == 0.0 => Outcome::Same,
        Verdict::NoSignificantDifference
            if comparison.ratio.is_some_and(|ratio| within(ratio.low) && within(ratio.high)) =>
        {
            Outcome::Same
        }
        Verdict::NoSignificantDifference | Verdict::TooFewRuns => Outcome::Open,
    }
}

/// How many runs are doubtful or do not count, by reason, each with one example.
fn notes_of(name: &str, runs: &CellRuns, summary: Option<&Summary>) -> Vec<String> {
    let mut notes: Vec<(String, usize, String)> = Vec::new();
    let mut note = |why: String, what: &str| match notes.iter_mut().find(|(other, ..)| *other == why) {
        Some((_, count, _)) => *count += 1,
        None => notes.push((why, 1, what.to_string())),
    };
    runs.left_out.iter().for_each(|out| note(out.why.to_string(), &out.what));
    summary.iter().flat_map(|summary| &summary.flags).for_each(|(_, flag)| note(doubt(flag.kind).into(), &flag.what));
    notes
        .into_iter()
        .map(|(why, count, what)| format!("{name}: {count} run{} {why}: {what}", if count == 1 { "" } else { "s" }))
        .collect()
}

fn doubt(kind: FlagKind) -> &'static str {
    match kind {
        FlagKind::OffTheFormula => "off the formula",
        FlagKind::MachineBusy => "on a busy machine",
        FlagKind::ClockMoved => "while the processor's clock changed",
        FlagKind::EmulatorBehind => "with a link emulator that fell behind",
        FlagKind::SharedCores => "with more ranks than cores",
        FlagKind::NoSteadyState => "without a steady state",
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use rig::flag::Flag;
    use rig::record::{Record, Status};
    use rig::stats::made_up::{cell, record};

    fn results(records: Vec<Record>) -> Results {
        Results { file: PathBuf::from("x/results.jsonl"), records, warnings: Vec::new(), whole_bytes: 0 }
    }

    /// Five runs with a little noise.
    fn runs(ms: f64) -> Vec<Record> {
        let steps =
            |round: u32| (0..20).map(|step| ms + f64::from((round * 13 + step * 7) % 11) / 5.0).collect::<Vec<_>>();
        (1..=5).map(|round| record(cell("ddp"), round, &steps(round))).collect()
    }

    fn outcome(a: &[Record], b: &[Record], metric: Metric) -> Row {
        let (a, b) = (results(a.to_vec()), results(b.to_vec()));
        Findings::of(&a, &b, &[metric], 0.05).unwrap().tables.remove(0).rows.remove(0)
    }

    #[test]
    fn outcomes() {
        let of = |a: f64, b: f64| outcome(&runs(a), &runs(b), Metric::Step).outcome;
        assert_eq!(of(40.0, 40.0), Outcome::Same);
        assert_eq!(of(40.0, 41.4), Outcome::Small);
        assert_eq!(of(40.0, 44.0), Outcome::Regression);
        assert_eq!(of(44.0, 40.0), Outcome::Improvement);
        assert_eq!(outcome(&runs(40.0), &runs(44.0), Metric::Tokens).outcome, Outcome::Regression);
        assert_eq!(outcome(&runs(40.0)[..1], &runs(44.0), Metric::Step).outcome, Outcome::Open);
    }

    #[test]
    fn a_cell_that_no_longer_runs_is_gone_unless_the_machine_cannot_run_it() {
        let with = |status: Status| {
            let ended = |record: Record| Record { status: status.clone(), measured: None, ..record };
            outcome(&runs(40.0), &runs(40.0).into_iter().map(ended).collect::<Vec<_>>(), Metric::Step)
        };
        let failed = with(Status::Failed("it broke".into()));
        assert_eq!((failed.outcome, failed.notes), (Outcome::Gone, vec!["B: 5 runs failed: it broke".into()]));
        assert_eq!(with(Status::NotAvailable("no GPU".into())).outcome, Outcome::Nothing);
        let mut diverged = runs(40.0);
        diverged.iter_mut().for_each(|run| run.measured.as_mut().unwrap().losses = vec![None]);
        assert_eq!(outcome(&runs(40.0), &diverged, Metric::Loss).outcome, Outcome::Gone);
        assert_eq!(outcome(&diverged, &diverged, Metric::Loss).outcome, Outcome::Nothing);
    }

    #[test]
    fn bytes_need_one_run_and_no_chance() {
        let mut b = runs(40.0);
        for rank in b.iter_mut().flat_map(|run| &mut run.measured.as_mut().unwrap().ranks) {
            rank.payload_bytes = Some(2000);
        }
        assert_eq!(outcome(&runs(40.0)[..1], &b[..1], Metric::Bytes).outcome, Outcome::Regression);
        assert_eq!(outcome(&b, &b, Metric::Bytes).outcome, Outcome::Same);
    }

    #[test]
    fn doubts_are_counted() {
        let mut b = runs(40.0);
        b[0].flags.push(Flag { kind: FlagKind::MachineBusy, what: "others took 40 %".into() });
        b[3].flags.push(Flag { kind: FlagKind::MachineBusy, what: "others took 50 %".into() });
        b[4].flags.push(Flag { kind: FlagKind::OffTheFormula, what: "7 bytes".into() });
        let row = outcome(&runs(40.0), &b, Metric::Step);
        assert_eq!(row.b.unwrap().runs, 4);
        assert_eq!(
            row.notes,
            ["B: 1 run left out because of its flags: 7 bytes", "B: 2 runs on a busy machine: others took 40 %"]
        );
    }
}
