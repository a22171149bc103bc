//! The table at the end.

use isocomm::Rung;
use rig::record::{Cell, Record, Status};
use rig::stats::{CellRuns, Interval, Keep, Metric, Over, cell_runs, summary};
use rig::text::columns;

const COLUMNS: usize = 11;

const HEADER: [&str; COLUMNS] = [
    "strategy",
    "transport",
    "ranks",
    "tokens/s",
    "step ms",
    "exposed ms",
    "share",
    "payload/step",
    "formula",
    "final loss",
    "peak MB",
];

/// Cells in the order of their plan, with the reason instead of figures where there are none.
pub(crate) fn render(plan: &[Cell], records: &[Record]) -> String {
    let mut cells = cell_runs(records, Keep::All);
    cells.sort_by_key(|runs| plan.iter().position(|cell| cell == runs.cell));
    let lines: Vec<[String; COLUMNS]> = cells.iter().map(line).collect();
    let mut text = String::new();
    // Reasons are not to make a column wide.
    for (index, line) in columns(&HEADER, &lines, 2).lines().enumerate() {
        if index > 0 {
            text.push('\n');
        }
        text.push_str(line);
        if let Some(why) = index.checked_sub(1).and_then(|cell| reason(records, cells.get(cell)?)) {
            text.push_str("  ");
            text.push_str(&why);
        }
    }
    if cells.iter().any(|cell| is_threads(cell.cell)) {
        text.push_str("\n* memory of the process, divided by the number of its ranks");
    }
    text
}

/// Whether the ranks of a cell share a process.
fn is_threads(cell: &Cell) -> bool {
    cell.transport.parse().is_ok_and(Rung::is_threads)
}

fn line(cell: &CellRuns<'_>) -> [String; COLUMNS] {
    let of = |metric: Metric, over: Over| summary(metric, over, &cell.runs).map(|summary| summary.interval);
    let number = |value: Option<f64>, digits: usize| value.map_or("-".into(), |value| format!("{value:.digits$}"));
    let middle = |interval: Option<Interval>| interval.map(|interval| interval.estimate);
    let waits = middle(of(Metric::Waits, Over::Longest));
    let step = middle(of(Metric::Step, Over::Mean));
    let share = waits.zip(step).map(|(waits, step)| format!("{:.1}%", 100.0 * waits / step));
    let ranks = cell.runs.last().and_then(|run| run.measured.as_ref()).map(|measured| measured.ranks.as_slice());
    let most = |of: fn(&rig::record::Rank) -> Option<u64>| ranks.and_then(|ranks| ranks.iter().filter_map(of).max());
    let bytes = |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| format!("{:.3} MB", bytes as f64 / 1e6));
    let mark = if is_threads(cell.cell) { "*" } else { "" };
    [
        cell.cell.strategy.clone(),
        cell.cell.transport.clone(),
        cell.cell.ranks.to_string(),
        number(middle(of(Metric::Tokens, Over::Mean)), 0),
        number(step, 1),
        number(waits, 2),
        share.unwrap_or_else(|| "-".into()),
        bytes(most(|rank| rank.payload_bytes)),
        bytes(most(|rank| Some(rank.payload_expected))),
        number(middle(of(Metric::Loss, Over::Mean)), 4),
        most(|rank| Some(rank.peak_rss_bytes)).map_or("-".into(), |bytes| format!("{:.0}{mark}", bytes as f64 / 1e6)),
    ]
}

/// Why a cell has no figures, or doubtful ones.
fn reason(records: &[Record], cell: &CellRuns<'_>) -> Option<String> {
    let runs = || records.iter().filter(|record| record.cell == *cell.cell);
    let failed = runs().find_map(|run| match &run.status {
        Status::Ok => None,
        Status::Failed(why) => Some(format!("failed: {why}")),
        Status::TimedOut(why) => Some(format!("timed out: {why}")),
        Status::NotAvailable(why) => Some(format!("not available: {why}")),
    });
    failed.or_else(|| {
        let doubts = runs().flat_map(|run| &run.flags);
        doubts.map(|flag| flag.what.clone()).find(|what| what.starts_with("off the formula"))
    })
}
