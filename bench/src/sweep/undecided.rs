//! Which cells need further rounds.

use std::collections::BTreeSet;

use isocomm::Rung;
use rig::record::{Cell, Record};
use rig::stats::{CellRuns, Keep, Metric, Over, cell_runs, compare_paired, step_time};

/// Rounds that two cells must have in common before one is called faster.
const ROUNDS: usize = 3;

/// Two cells whose ratio surely lies this close to 1 are equal for all that anybody wants to know.
const EQUAL: std::ops::RangeInclusive<f64> = 0.98..=1.02;

/// The cells of which it is not known whether they are faster or slower than their neighbour: the next in order of step time among those that
/// differ in strategy alone, and among those that differ in transport alone. Cells without figures, and those over which nothing arrives, have
/// no neighbours.
pub(super) fn undecided(records: &[Record]) -> BTreeSet<&Cell> {
    let cells: Vec<CellRuns<'_>> = cell_runs(records, Keep::Sound);
    let mut timed: Vec<(f64, &CellRuns<'_>)> = cells
        .iter()
        .filter(|runs| !runs.cell.transport.parse().is_ok_and(Rung::is_timing_only))
        .filter_map(|runs| Some((step_time(&runs.runs)?.interval.estimate, runs)))
        .collect();
    timed.sort_by(|a, b| a.0.total_cmp(&b.0));
    let strategy = |cell: &Cell| Cell { strategy: String::new(), ..cell.clone() };
    let transport = |cell: &Cell| Cell { transport: String::new(), ..cell.clone() };
    let mut found = BTreeSet::new();
    for alike in [&strategy as &dyn Fn(&Cell) -> Cell, &transport] {
        for (place, (_, faster)) in timed.iter().enumerate() {
            let common = alike(faster.cell);
            let next = timed[place + 1..].iter().find(|(_, other)| alike(other.cell) == common);
            if let Some((_, slower)) = next.filter(|(_, slower)| !is_decided(faster, slower)) {
                found.extend([faster.cell, slower.cell]);
            }
        }
    }
    found
}

fn is_decided(a: &CellRuns<'_>, b: &CellRuns<'_>) -> bool {
    let Some(found) = compare_paired(Metric::Step, Over::Mean, &a.runs, &b.runs) else { return false };
    let Some(ratio) = found.ratio.filter(|_| found.rounds >= ROUNDS) else { return false };
    !ratio.contains(1.0) || EQUAL.contains(&ratio.low) && EQUAL.contains(&ratio.high)
}

#[cfg(test)]
mod tests {
    use rig::stats::made_up::record;

    use super::*;

    fn cell(strategy: &str, transport: &str) -> Cell {
        Cell { transport: transport.into(), ..rig::stats::made_up::cell(strategy) }
    }

    /// Rounds of steps that take about so long, and that differ by so much from round to round.
    fn rounds(cell: &Cell, count: u32, ms: f64, spread: f64) -> Vec<Record> {
        let level = |round: u32| ms + spread * f64::from(round * 7 % 5);
        (1..=count).map(|round| record(cell.clone(), round, &[level(round); 8])).collect()
    }

    #[test]
    fn neighbours_that_overlap_need_more_and_others_do_not() {
        let cells =
            [cell("ddp", "tcp"), cell("ring", "tcp"), cell("ps", "tcp"), cell("ps", "quic"), cell("fsdp", "shm")];
        let records = [
            rounds(&cells[0], 3, 10.0, 1.0),
            rounds(&cells[1], 3, 10.3, -1.0),
            rounds(&cells[2], 3, 50.0, 1.0),
            rounds(&cells[3], 3, 90.0, 1.0),
            rounds(&cells[4], 3, 10.0, 1.0),
        ]
        .concat();
        let expected: BTreeSet<&Cell> = cells[..2].iter().collect();
        assert_eq!(undecided(&records), expected);
    }

    #[test]
    fn too_few_rounds_decide_nothing_and_equal_cells_are_done() {
        let cells = [cell("ddp", "tcp"), cell("ring", "tcp")];
        let far = [rounds(&cells[0], 2, 10.0, 0.01), rounds(&cells[1], 2, 90.0, 0.01)].concat();
        assert_eq!(undecided(&far).len(), 2);
        let equal = [rounds(&cells[0], 5, 10.0, 0.001), rounds(&cells[1], 5, 10.001, -0.001)].concat();
        assert_eq!(undecided(&equal).len(), 0);
        assert_eq!(undecided(&[]).len(), 0);
    }
}
