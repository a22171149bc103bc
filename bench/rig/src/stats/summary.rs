//! Records, gathered by cell and summed up.

use std::collections::HashMap;
use std::fmt;

use serde::Serialize;

use super::interval::{Interval, RunValue, interval};
use super::metric::{Metric, Over};
use super::warm_up::{WarmUp, unsettled, warm_up};
use super::{Comparison, LEVEL, paired, unpaired};
use crate::flag::{Flag, FlagKind};
use crate::record::{Cell, Record, Status};

/// Which runs count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All that ended well, whatever their flags.
    All,
    /// Not those that measured something else than the cell: work off the formula, an emulator that could not keep up.
    Sound,
}

/// A cell and its runs, in order of their rounds.
#[derive(Clone, Debug)]
pub struct CellRuns<'a> {
    pub cell: &'a Cell,
    /// One a round.
    pub runs: Vec<&'a Record>,
    pub left_out: Vec<ExcludedRun>,
}

/// A run that does not count.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExcludedRun {
    pub round: u32,
    pub why: ExclusionReason,
    /// In words, of the run itself.
    pub what: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExclusionReason {
    Failed,
    TimedOut,
    NotAvailable,
    /// By its flags.
    Unsound,
    /// The same round was run again.
    Repeated,
}

/// One figure of a cell over its runs.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Of a single run it covers what its steps vary, not what differs from run to run.
    pub interval: Interval,
    pub runs: Vec<RunValue>,
    /// By round: which steps were left out.
    pub warm_up: Vec<(u32, WarmUp)>,
    /// By round: doubts about runs that do count.
    pub flags: Vec<(u32, Flag)>,
}

/// Gathers records by cell, in the order in which cells first appear.
pub fn cell_runs(records: &[Record], keep: Keep) -> Vec<CellRuns<'_>> {
    let mut places = HashMap::new();
    let mut cells: Vec<CellRuns<'_>> = Vec::new();
    for record in records {
        let place = *places.entry(&record.cell).or_insert(cells.len());
        if place == cells.len() {
            cells.push(CellRuns { cell: &record.cell, runs: Vec::new(), left_out: Vec::new() });
        }
        cells[place].add(record, keep);
    }
    cells.iter_mut().for_each(|cell| cell.runs.sort_by_key(|run| run.round));
    cells
}

/// The time of a step.
pub fn step_time(runs: &[&Record]) -> Option<Summary> {
    summary(Metric::Step, Over::Mean, runs)
}

/// One figure of a cell; `None` where no run has it.
pub fn summary(metric: Metric, over: Over, runs: &[&Record]) -> Option<Summary> {
    let mut summary = Summary {
        interval: Interval { estimate: 0.0, low: 0.0, high: 0.0, level: LEVEL },
        runs: Vec::new(),
        warm_up: Vec::new(),
        flags: Vec::new(),
    };
    for record in runs {
        let steps = record.step_ms();
        let found = warm_up(&steps);
        let Some(value) = metric.of(record, over, found.cut) else { continue };
        summary.runs.push(value);
        summary.warm_up.push((record.round, found));
        let known = record.flags.iter().any(|flag| flag.kind == FlagKind::NoSteadyState);
        // Of steps that nobody watched nothing is known.
        let new = unsettled(&steps).filter(|_| !known && !steps.is_empty());
        summary.flags.extend(record.flags.iter().cloned().chain(new).map(|flag| (record.round, flag)));
    }
    summary.interval = interval(&summary.runs, LEVEL)?;
    Some(summary)
}

/// Compares two cells of one sweep, round by round; `None` where no round has figures of both.
pub fn compare_paired(metric: Metric, over: Over, a: &[&Record], b: &[&Record]) -> Option<Comparison> {
    let (a, b) = (summary(metric, over, a)?, summary(metric, over, b)?);
    Some(judged(metric, paired(&a.runs, &b.runs, LEVEL)?))
}

/// Compares summaries of a cell of two sweeps.
pub fn compare_unpaired(metric: Metric, a: &Summary, b: &Summary) -> Option<Comparison> {
    Some(judged(metric, unpaired(&a.runs, &b.runs, LEVEL)?))
}

fn judged(metric: Metric, comparison: Comparison) -> Comparison {
    if metric.is_exact() { comparison.of_exact_figures() } else { comparison }
}

impl<'a> CellRuns<'a> {
    fn add(&mut self, record: &'a Record, keep: Keep) {
        match doubt(record, keep) {
            Some((why, what)) => self.left_out.push(ExcludedRun { round: record.round, why, what }),
            None => {
                // Of a round that was run twice the later run counts.
                let earlier = self.runs.iter().position(|run| run.round == record.round);
                if let Some(earlier) = earlier {
                    self.runs.remove(earlier);
                    let what = "the round was run again".into();
                    self.left_out.push(ExcludedRun { round: record.round, why: ExclusionReason::Repeated, what });
                }
                self.runs.push(record);
            }
        }
    }
}

/// Why a run does not count.
fn doubt(record: &Record, keep: Keep) -> Option<(ExclusionReason, String)> {
    let spoils = |flag: &&Flag| matches!(flag.kind, FlagKind::OffTheFormula | FlagKind::EmulatorBehind);
    match &record.status {
        Status::Ok if record.measured.is_none() => {
            Some((ExclusionReason::Failed, "it is marked as successful, but holds no figures".into()))
        }
        Status::Ok if keep == Keep::All => None,
        Status::Ok => record.flags.iter().find(spoils).map(|flag| (ExclusionReason::Unsound, flag.what.clone())),
        Status::Failed(what) => Some((ExclusionReason::Failed, what.clone())),
        Status::TimedOut(what) => Some((ExclusionReason::TimedOut, what.clone())),
        Status::NotAvailable(what) => Some((ExclusionReason::NotAvailable, what.clone())),
    }
}

impl fmt::Display for ExclusionReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            ExclusionReason::Failed => "failed",
            ExclusionReason::TimedOut => "timed out",
            ExclusionReason::NotAvailable => "not available",
            ExclusionReason::Unsound => "left out because of its flags",
            ExclusionReason::Repeated => "repeated",
        })
    }
}

/// Records for tests.
#[cfg(any(test, feature = "made-up"))]
pub mod made_up {
    use crate::environment::Environment;
    use crate::record::{Cell, Measured, Rank, Record, SCHEMA, Status, Steps};

    pub fn cell(strategy: &str) -> Cell {
        Cell { strategy: strategy.into(), lanes: 1, seed: 1, batch: 4, steps: 8, ..Cell::default() }
    }

    /// A run whose slower rank, the second, takes `step_ms`.
    pub fn record(cell: Cell, round: u32, step_ms: &[f64]) -> Record {
        let rank = |rank: usize| {
            let of = |share: f64| step_ms.iter().map(|ms| ms * share).collect::<Vec<_>>();
            let faster = if rank == 0 { 0.9 } else { 1.0 };
            let steps = Steps {
                total: of(faster),
                data: of(0.0),
                compute: of(faster - 0.2 * (rank + 1) as f64),
                exposed: of(0.2 * (rank + 1) as f64),
                ..Steps::default()
            };
            Rank {
                rank,
                steps,
                payload_bytes: Some(1000 - rank as u64),
                payload_expected: 1000 - rank as u64,
                peak_rss_bytes: 8_000_000,
                ..Rank::default()
            }
        };
        Record {
            schema: SCHEMA,
            plan: "made-up".into(),
            cell,
            round,
            position: u64::from(round),
            started_unix_s: 1.0,
            wall_s: 1.0,
            status: Status::Ok,
            flags: Vec::new(),
            measured: Some(Measured {
                tokens_per_step: 512,
                parameters: 1000,
                losses: vec![Some(4.0), Some(3.5)],
                weights_hash: "abc".into(),
                ranks: vec![rank(0), rank(1)],
                ..Measured::default()
            }),
            environment: Environment::read(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::made_up::{cell, record};
    use super::*;
    use crate::stats::{Change, Verdict};

    fn steps(level: f64) -> Vec<f64> {
        (0..20).map(|step| level + f64::from(step * 7 % 5) / 10.0 + if step < 2 { 30.0 } else { 0.0 }).collect()
    }

    fn flagged(mut record: Record, kind: FlagKind) -> Record {
        record.flags.push(Flag { kind, what: "seen".into() });
        record
    }

    #[test]
    fn steps_that_nobody_watched_are_not_doubted() {
        let flags =
            |steps: &[f64]| summary(Metric::Bytes, Over::Mean, &[&record(cell("ddp"), 1, steps)]).unwrap().flags;
        assert_eq!((flags(&[]).len(), flags(&[10.0; 3]).len()), (0, 1));
    }

    #[test]
    fn records_are_gathered_by_cell_and_bad_runs_left_out() {
        let failed =
            Record { status: Status::Failed("it broke".into()), measured: None, ..record(cell("ddp"), 2, &[]) };
        let records = [
            record(cell("ddp"), 3, &steps(40.0)),
            record(cell("ring"), 1, &steps(50.0)),
            failed,
            record(cell("ddp"), 1, &steps(41.0)),
            flagged(record(cell("ddp"), 4, &steps(41.0)), FlagKind::EmulatorBehind),
            flagged(record(cell("ddp"), 5, &steps(41.0)), FlagKind::MachineBusy),
            record(cell("ddp"), 3, &steps(42.0)),
            Record { measured: None, ..record(cell("ddp"), 6, &[]) },
        ];
        let cells = cell_runs(&records, Keep::Sound);
        assert_eq!(cells.iter().map(|cell| cell.cell.strategy.as_str()).collect::<Vec<_>>(), ["ddp", "ring"]);
        assert_eq!(
            cells[0].runs.iter().map(|run| (run.round, run.step_ms()[2])).collect::<Vec<_>>(),
            [(1, 41.4), (3, 42.4), (5, 41.4)]
        );
        let why: Vec<(u32, ExclusionReason)> = cells[0].left_out.iter().map(|out| (out.round, out.why)).collect();
        assert_eq!(
            why,
            [
                (2, ExclusionReason::Failed),
                (4, ExclusionReason::Unsound),
                (3, ExclusionReason::Repeated),
                (6, ExclusionReason::Failed)
            ]
        );
        assert_eq!(cell_runs(&records, Keep::All)[0].runs.len(), 4);

        let found = step_time(&cells[0].runs).unwrap();
        assert_eq!(found.runs.len(), 3);
        assert!(
            found.warm_up.iter().all(|(_, found)| found.settled && (2..=4).contains(&found.cut)),
            "{:?}",
            found.warm_up
        );
        assert_eq!(
            found.flags.iter().map(|(round, flag)| (*round, flag.kind)).collect::<Vec<_>>(),
            [(5, FlagKind::MachineBusy)]
        );
        assert!(found.interval.contains(41.6), "{:?}", found.interval);
    }

    #[test]
    fn cells_of_one_sweep_are_compared_by_rounds() {
        let drift = [0.0, 5.0, 9.0, 2.0, 7.0];
        let runs = |name: &str, level: f64| -> Vec<Record> {
            drift.iter().zip(1..).map(|(drift, round)| record(cell(name), round, &steps(level + drift))).collect()
        };
        let (a, b) = (runs("ddp", 40.0), runs("ring", 43.0));
        let (a, b): (Vec<&Record>, Vec<&Record>) = (a.iter().collect(), b.iter().collect());
        let found = compare_paired(Metric::Step, Over::Mean, &a, &b).unwrap();
        assert_eq!(found.verdict, Verdict::Difference(Change::Higher));
        assert!(found.difference.contains(3.0), "{found:?}");
        let other = compare_unpaired(Metric::Step, &step_time(&a).unwrap(), &step_time(&b).unwrap()).unwrap();
        assert_eq!(other.verdict, Verdict::NoSignificantDifference);
        assert!(summary(Metric::Step, Over::Mean, &[]).is_none());
    }

    #[test]
    fn a_run_that_never_settles_is_flagged_once() {
        let rising: Vec<f64> = (0..40).map(|step| 40.0 + f64::from(step)).collect();
        let run = record(cell("ddp"), 1, &rising);
        assert_eq!(step_time(&[&run]).unwrap().flags[0].1.kind, FlagKind::NoSteadyState);
        let run = flagged(run, FlagKind::NoSteadyState);
        assert_eq!(step_time(&[&run]).unwrap().flags.len(), 1);
    }
}
