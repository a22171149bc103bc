//! What the network costs each strategy: what a link adds to a step, and what share of it waits.

use rig::record::Axis;
use rig::stats::Interval;

use super::super::case::{LATE, NETWORK, ROUNDS};
use super::super::digest::{Case, Comparison, Digest, Grouped, SINGLE, is_timing_only};
use super::super::html::{Mark, Page, Table};
use super::super::text::{interval, share_interval};

/// A cell that talks over a network, for what is said of it.
pub(in super::super) fn is_networked(case: &Case<'_>) -> bool {
    case.cell.strategy != SINGLE && !is_timing_only(case.cell) && case.step.is_some()
}

/// What a cell's link adds to a step: against the same cell over a link that holds nothing up, whose name comes with it.
pub(in super::super) fn added<'d>(digest: &'d Digest<'_>, case: &Case<'_>) -> Option<(Comparison, &'d str)> {
    let there = digest.unhindered(case.cell)?;
    let found = case.against(there).filter(|found| found.rounds >= ROUNDS)?;
    Some((found, there.cell.link.as_str()))
}

/// The least and the largest.
pub(super) fn ends<T>(mut values: Vec<(Interval, T)>) -> Option<((Interval, T), (Interval, T))>
where
    T: Clone,
{
    values.sort_by(|a, b| a.0.estimate.total_cmp(&b.0.estimate));
    Some((values.first()?.clone(), values.last()?.clone()))
}

/// A line for each link, transport and number of ranks, and a folded one for each cell.
pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    let groups: Vec<Grouped<'_, '_>> = digest.groups(&[Axis::Strategy]);
    let (mut own, mut shared, mut cells) = (lines(), lines(), each());
    for Grouped { label, mut cases, .. } in groups {
        cases.retain(|case| is_networked(case));
        let Some(first) = cases.first() else { continue };
        let table = if first.crowd.is_some() { &mut shared } else { &mut own };
        let name = if label.is_empty() { "all".into() } else { label };
        table.row(line(digest, name, &cases));
        cases.iter().for_each(|case| cells.row(cell(digest, case)));
    }
    if cells.rows.is_empty() {
        return;
    }
    page.topic("network", "What the network costs, by link and by cell");
    page.small(
        "Added: milliseconds more than the same cell on the link unlimited or loopback, in the same rounds. Network: the share of the mean step in \
         which ranks wait for gradients, parameters, loss and gradient norm. Late ranks: the share in which they wait for ranks that are still \
         computing. By null's: the step divided by that of the same cell over null, which sends nothing. By single's: the step divided by that of \
         one rank that does all the work alone.",
    );
    let single = digest.cases.iter().filter(|case| case.cell.strategy == SINGLE);
    for (single, step) in single.filter_map(|case| Some((case, case.step?))).take(1) {
        let text = format!("One rank that does all the work alone (single) takes {} ms a step.", interval(&step));
        page.statements(&[(if single.good.len() < ROUNDS { Mark::Open } else { Mark::Found }, text)]);
    }
    if !own.rows.is_empty() {
        page.table(&filled(&own));
    }
    match (shared.rows.is_empty(), own.rows.is_empty()) {
        (true, _) => {}
        (false, true) => page.table(&filled(&shared)),
        (false, false) => page.folded_table("Where ranks share cores", &filled(&shared)),
    }
    page.folded_table("The same for each cell", &filled(&cells));
}

fn lines() -> Table {
    let head = ["cells", "added (ms)", "network", "late ranks, at most", "by null's, at most", "by single's"];
    Table::new(&head, head.len())
}

fn each() -> Table {
    Table::new(&["cell", "step (ms)", "added (ms)", "network", "late ranks", "by null's", "by single's"], 1)
}

/// The table without columns in which nothing stands.
fn filled(table: &Table) -> Table {
    let kept: Vec<usize> =
        (0..table.head.len()).filter(|column| table.rows.iter().any(|row| row[*column] != "–")).collect();
    let pick = |row: &Vec<String>| kept.iter().map(|column| row[*column].clone()).collect();
    let names = kept.iter().filter(|column| **column < table.names).count();
    Table { head: pick(&table.head), names, rows: table.rows.iter().map(pick).collect() }
}

fn line(digest: &Digest<'_>, name: String, cases: &[&Case<'_>]) -> Vec<String> {
    let both = |pick: &dyn Fn(&Case<'_>) -> Option<Interval>, text: &dyn Fn(&Interval) -> String| {
        let values = cases.iter().filter_map(|case| Some((pick(case)?, case.cell.strategy.as_str()))).collect();
        let one = |(value, name): (Interval, &str)| format!("{} {name}", text(&value));
        ends(values).map(|(least, most)| (one(least), one(most)))
    };
    let range = |ends: Option<(String, String)>| match ends {
        Some((least, most)) if least == most => least,
        Some((least, most)) => format!("{least} to {most}"),
        None => "–".into(),
    };
    let most = |ends: Option<(String, String)>| ends.map_or("–".into(), |ends| ends.1);
    vec![
        name,
        range(both(&|case| Some(added(digest, case)?.0.difference), &interval)),
        range(both(&|case| case.share_of(&NETWORK), &share_interval)),
        most(both(&|case| case.share_of(&LATE), &share_interval)),
        most(both(&|case| Some(by_null(digest, case)?.ratio), &times)),
        range(both(&|case| Some(by_single(digest, case)?.ratio), &times)),
    ]
}

fn cell(digest: &Digest<'_>, case: &Case<'_>) -> Vec<String> {
    let shares = |parts: &[&str]| case.share_of(parts).map_or("–".into(), |share| share_interval(&share));
    let signed = |found: Option<Comparison>| found.map_or("–".into(), |found| super::quic::signed(&found));
    vec![
        digest.label(case.cell),
        case.step_text(),
        added(digest, case).map_or("–".into(), |(found, _)| interval(&found.difference)),
        shares(&NETWORK),
        shares(&LATE),
        signed(by_null(digest, case)),
        signed(by_single(digest, case)),
    ]
}

fn times(ratio: &Interval) -> String {
    format!("{}×", interval(ratio))
}

fn by_null(digest: &Digest<'_>, case: &Case<'_>) -> Option<Comparison> {
    case.against(digest.over_nothing(case)?).filter(|found| found.rounds >= ROUNDS)
}

fn by_single(digest: &Digest<'_>, case: &Case<'_>) -> Option<Comparison> {
    case.against(digest.single(case)?).filter(|found| found.rounds >= ROUNDS)
}
