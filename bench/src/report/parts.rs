//! What a step consists of, and which operation it waits for.

use rig::plot::{Group, Stack, stack};
use rig::record::{Axis, Rank};
use rig::stats::median;

use super::charts::{each_group, name, titled};
use super::digest::{Case, Digest, distinct};
use super::html::{Page, Table};
use super::text::{figure, listed, maybe, share};

/// The parts as they are shown: work, what nothing accounts for, and in the end all waiting. Name, what it is called, number of its colour,
/// and whether it is hatched.
const SHOWN: [(&str, &str, usize, bool); 9] = [
    ("data", "data", 7, false),
    ("compute", "compute", 4, false),
    ("pack", "pack", 2, false),
    ("unpack", "unpack", 3, true),
    ("optimizer", "optimizer", 3, false),
    ("other", "other", 0, true),
    ("exposed", "waiting: gradients, parameters", 5, false),
    ("scalars", "waiting: loss, norm", 1, false),
    ("skew", "waiting: late ranks", 6, true),
];

/// Share of a step that may be left over before it is told of.
const LEFT_OVER: f64 = 0.05;

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    if !digest.cases.iter().any(has_parts) {
        return;
    }
    page.topic("parts", "What a step consists of, in each cell");
    page.small(
        "Means over ranks, settled steps and rounds. They add up to the mean step, which is longer than the median step where some steps are slow. \
         exposed: waiting for gradients and parameters. scalars: waiting for loss and gradient norm. Both are waiting for the network. skew: \
         waiting for ranks that are still computing. other: the rest of the step, which belongs to no part. The thin bar below is communication \
         that takes place during other work, and is not part of the sum.",
    );
    unattributed(page, digest);
    super::findings::late_table(page, digest);
    let timed = |cases: &[&Case<'_>]| cases.iter().any(|case| has_parts(case));
    each_group(page, digest.groups_and_single(&[Axis::Strategy, Axis::Transport]), timed, |page, label, cases| {
        decomposition(page, digest, label, cases);
        operations(page, cases);
    });
}

/// Whether its steps were watched, so that their parts are known.
fn has_parts(case: &Case<'_>) -> bool {
    case.mean("total").is_some()
}

fn several_transports(cases: &[&Case<'_>]) -> bool {
    super::charts::varies(cases, Axis::Transport)
}

fn decomposition(page: &mut Page, digest: &Digest<'_>, label: &str, cases: &[&Case<'_>]) {
    let names = SHOWN.map(|(name, ..)| name);
    let parts = SHOWN.map(|(_, called, colour, hatched)| (called.to_string(), colour, hatched)).to_vec();
    let transports = several_transports(cases);
    let mut sorted: Vec<&&Case<'_>> = cases.iter().filter(|case| has_parts(case)).collect();
    sorted.sort_by_key(|case| super::order::known(&super::order::STRATEGIES, &case.cell.strategy));
    let group = |case: &&&Case<'_>| Group {
        name: name(case, transports),
        values: names.iter().map(|part| case.mean(part).unwrap_or(0.0)).collect(),
        behind: case.mean("hidden").unwrap_or(0.0),
    };
    let title = titled("Parts of a step", label);
    let groups: Vec<Group> = sorted.iter().map(group).collect();
    let picture = stack(&Stack { title: &title, value: "milliseconds a step", parts, behind: "hidden", groups });
    page.figure(
        &title,
        picture,
        "Each bar is one cell's mean step; the thin bar is communication during other work. Where ranks have no spare cores, it makes compute \
         longer. If the plan also has the same cell over null, which sends nothing, the table shows by how much.",
    );
    let mut head = vec!["cell", "step"];
    head.extend(names);
    head.extend([
        "communication",
        "hidden",
        "compute minus compute over null",
        "other: median share",
        "other: worst share",
    ]);
    let mut table = Table::new(&head, 1);
    for case in sorted {
        let (median, worst) = left_over(case);
        let mut row = vec![name(case, transports), maybe(case.mean("total"))];
        row.extend(names.iter().map(|part| maybe(case.mean(part))));
        row.extend([maybe(case.mean("communication")), maybe(case.mean("hidden")), maybe(slowed(digest, case))]);
        row.extend([median, worst].map(|value| value.map_or("–".into(), share)));
        table.row(row);
    }
    page.folded_table("The same as a table (milliseconds)", &table);
}

/// How much longer the passes take than over the transport that moves nothing: what communication behind them costs.
fn slowed(digest: &Digest<'_>, case: &Case<'_>) -> Option<f64> {
    Some(case.mean("compute")? - digest.over_nothing(case)?.mean("compute")?)
}

/// What share of a step nothing accounts for: the median over settled steps and ranks, and the worst.
fn left_over(case: &Case<'_>) -> (Option<f64>, Option<f64>) {
    let shares: Vec<f64> = case
        .good
        .iter()
        .flat_map(|run| run.values("other").into_iter().zip(run.values("total")))
        .filter(|(_, total)| *total > 0.0)
        .map(|(other, total)| other.abs() / total)
        .collect();
    (median(&shares), shares.iter().copied().max_by(f64::total_cmp))
}

fn unattributed(page: &mut Page, digest: &Digest<'_>) {
    let shares: Vec<(f64, f64, String)> = digest
        .cases
        .iter()
        .filter_map(|case| {
            let (median, worst) = left_over(case);
            Some((median?, worst?, digest.label(case.cell)))
        })
        .collect();
    let middle = median(&shares.iter().map(|share| share.0).collect::<Vec<_>>());
    let worst = shares.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let (Some(middle), Some((_, worst, cell))) = (middle, worst) else { return };
    page.text(&format!(
        "Time that belongs to no part is {} of a step in the median cell, and {} in the worst single step ({cell}).",
        share(middle),
        share(*worst)
    ));
    let much: Vec<String> = shares
        .iter()
        .filter(|(median, _, _)| *median > LEFT_OVER)
        .map(|(median, _, cell)| format!("{cell} {}", share(*median)))
        .collect();
    if !much.is_empty() {
        page.warning(&format!(
            "more than {} of the median step belongs to no part in {}.",
            share(LEFT_OVER),
            listed(&much, 6)
        ));
    }
}

/// By bucket or other operation: means over ranks and rounds of the medians over steps.
fn operations(page: &mut Page, cases: &[&Case<'_>]) {
    let transports = several_transports(cases);
    let mut table = Table::new(&["cell", "operation", "under way (ms)", "exposed (ms)", "hidden (ms)", "skew (ms)"], 2);
    for case in cases {
        let ranks: Vec<&Rank> = case.good.iter().flat_map(|run| &run.measured.ranks).collect();
        for label in distinct(ranks.iter().flat_map(|rank| &rank.operations).map(|one| one.label.as_str())) {
            let all = || ranks.iter().flat_map(|rank| &rank.operations).filter(|one| one.label == label);
            let mean = |pick: fn(&rig::record::Operation) -> f64| {
                let values: Vec<f64> = all().map(pick).filter(|ms| ms.is_finite()).collect();
                figure(values.iter().sum::<f64>() / values.len() as f64)
            };
            table.row(vec![
                name(case, transports),
                label.into(),
                mean(|one| one.communication),
                mean(|one| one.exposed),
                mean(|one| one.hidden),
                mean(|one| one.skew),
            ]);
        }
    }
    if !table.rows.is_empty() {
        page.folded_table("By bucket and other operations", &table);
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::synthetic::sweep;
    use super::*;
    use rig::record::Steps;
    use rig::results::Results;

    #[test]
    fn the_passes_are_held_against_those_over_nothing() {
        let mut records = sweep(&["null", "tcp"], &[2], 3);
        for record in &mut records {
            let ms = if record.cell.transport == "null" { 50.0 } else { 62.0 };
            let ranks = record.measured.iter_mut().flat_map(|measured| &mut measured.ranks);
            ranks.for_each(|rank| rank.steps.compute.fill(ms));
        }
        let results = Results { file: PathBuf::new(), records, warnings: Vec::new(), whole_bytes: 0 };
        let digest = Digest::of(&results, &[]);
        let of = |transport: &'static str| {
            let cases = digest.cases.iter().filter(move |case| case.cell.transport == transport);
            cases.map(|case| slowed(&digest, case).map(|ms| (1e6 * ms).round() / 1e6)).collect::<Vec<_>>()
        };
        assert!(!of("tcp").is_empty() && of("tcp").iter().all(|slowed| *slowed == Some(12.0)), "{:?}", of("tcp"));
        assert!(!of("null").is_empty() && of("null").iter().all(Option::is_none), "{:?}", of("null"));
    }

    #[test]
    fn every_part_is_shown_once_and_waiting_last() {
        let mut shown = SHOWN.map(|(name, ..)| name);
        assert_eq!(shown[6..], [super::super::case::NETWORK.as_slice(), &super::super::case::LATE].concat());
        let mut parts = Steps::default().parts().map(|(name, _)| name);
        shown.sort_unstable();
        parts.sort_unstable();
        assert_eq!(shown, parts);
    }
}
