//! Ranks that the others wait for, where waiting for them matters.

use rig::record::Rank;

use super::super::case::LATE;
use super::super::digest::{Case, Digest};
use super::super::html::{Mark, Page, Table};
use super::super::text::{interval, share, share_interval};
use super::statements::Statements;

/// Share of a step from which on waiting for late ranks is told of.
const MATTERS: f64 = 0.05;

/// Share of that waiting from which on a rank is named.
const MOST_OF_IT: f64 = 0.5;

/// Cells that are told of in words; the others stand in a table.
const TOLD: usize = 3;

/// The cells that wait longest, cells whose ranks have cores of their own first.
pub(super) fn statements(digest: &Digest<'_>) -> Statements {
    let found = found(digest);
    let text = |(case, waits): &(&Case<'_>, rig::stats::Interval)| {
        let ms = case.ms_of(&LATE).map_or("?".into(), |ms| interval(&ms));
        let whom =
            whom(case).map_or("no rank stands out".into(), |(who, part)| format!("{} of it for {who}", share(part)));
        format!(
            "{}: {ms} ms of a step ({}) are spent waiting for ranks that are still computing; {whom}.",
            digest.label(case.cell),
            share_interval(waits)
        )
    };
    let mut said: Statements = found.iter().take(TOLD).map(|found| (Mark::Found, text(found))).collect();
    if found.len() > TOLD {
        let rest = found.len() - TOLD;
        said.push((Mark::Found, format!("{rest} more are in a table below, with the parts of a step.")));
    }
    said
}

/// All of them, where there are more than are told of in words.
pub(crate) fn table(page: &mut Page, digest: &Digest<'_>) {
    let found = found(digest);
    if found.len() <= TOLD {
        return;
    }
    let mut table = Table::new(&["cell", "most of it for", "its part", "late ranks (ms)", "share of a step"], 2);
    for (case, waits) in &found {
        let (who, part) =
            whom(case).map_or(("no rank stands out".into(), "–".into()), |(who, part)| (who, share(part)));
        let ms = case.ms_of(&LATE).map_or("–".into(), |ms| interval(&ms));
        table.row(vec![digest.label(case.cell), who, part, ms, share_interval(waits)]);
    }
    page.folded_table("Cells that wait for late ranks", &table);
}

/// Cells in which such waiting matters, with its share of a step.
fn found<'d, 'a>(digest: &'d Digest<'a>) -> Vec<(&'d Case<'a>, rig::stats::Interval)> {
    let several = |case: &&Case<'_>| case.cell.ranks > 1 && case.good.len() > 1;
    let waits = digest.cases.iter().filter(several).filter_map(|case| Some((case, case.share_of(&LATE)?)));
    let mut found: Vec<_> = waits.filter(|(_, waits)| waits.estimate >= MATTERS && waits.low > 0.0).collect();
    found.sort_by(|a, b| {
        let shared = a.0.crowd.is_some().cmp(&b.0.crowd.is_some());
        shared.then_with(|| b.1.estimate.total_cmp(&a.1.estimate))
    });
    found
}

/// The rank that most of the waiting is for, and its part of all waiting for late ranks.
fn whom(case: &Case<'_>) -> Option<(String, f64)> {
    let skew = case.mean("skew").filter(|ms| *ms > 0.0)?;
    let ranks = case.cell.ranks;
    // How long a rank waited for each, over all ranks, as the skew is.
    let waited = (0..ranks).filter_map(|late| {
        let by = |rank: &Rank| Some(rank.waited_for.get(late).copied().unwrap_or(0.0));
        Some((late, case.by_rank(by, |ranks| Some(ranks.iter().sum::<f64>() / ranks.len() as f64))?))
    });
    let (rank, ms) = waited.max_by(|a, b| a.1.total_cmp(&b.1))?;
    let part = ms / skew;
    let name = match case.cell.strategy.as_str() {
        "ps" if rank == 0 => "the server".into(),
        _ => format!("rank {rank}"),
    };
    // Medians of parts are not parts of a mean to the last digit.
    (part.is_finite() && part >= MOST_OF_IT).then(|| (name, part.min(1.0)))
}
