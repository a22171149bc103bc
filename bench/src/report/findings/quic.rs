//! QUIC against ZeroMQ over TCP: the same strategy on the same link, and all else equal.

use rig::record::Axis;

use super::super::case::ROUNDS;
use super::super::digest::{Case, Comparison, Digest, distinct};
use super::super::html::{Mark, Page, Table};
use super::super::text::all_of;
use super::congestion::Control;

/// A cell over QUIC, the same over TCP, and the first by the second.
pub(in super::super) type Pair<'d, 'a> = (&'d Case<'a>, &'d Case<'a>, Comparison);

/// All pairs with enough rounds in common.
pub(in super::super) fn pairs<'d, 'a>(digest: &'d Digest<'a>) -> Vec<Pair<'d, 'a>> {
    let quic = digest.cases.iter().filter(|case| case.cell.transport == "quic");
    let pairs = quic.filter_map(|case| {
        let tcp = digest.over(case.cell, "tcp")?;
        Some((case, tcp, case.against(tcp)?))
    });
    pairs.filter(|pair| pair.2.rounds >= ROUNDS).collect()
}

/// A table of ratios: strategies (and what else differs) by links.
pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    let pairs = pairs(digest);
    if pairs.is_empty() {
        return;
    }
    controls(page, &pairs);
    page.topic("pairs", "QUIC and ZeroMQ over TCP, strategy by strategy");
    page.small(
        "The time over QUIC divided by the time over ZeroMQ, in the same rounds: below 1, QUIC is faster. ● the two are told apart; ○ they are not.",
    );
    let whole = [Axis::Link, Axis::Transport];
    let links = distinct(pairs.iter().map(|pair| pair.0.cell.link.as_str()));
    let mut head = vec!["strategy"];
    head.extend(&links);
    let mut rows: Vec<(bool, String)> =
        distinct(pairs.iter().map(|pair| (pair.0.crowd.is_some(), digest.label_without(pair.0.cell, &whole))));
    rows.sort_by_key(|row| row.0);
    let (own, shared): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| !row.0);
    let table = |rows: &[(bool, String)]| {
        let mut table = Table::new(&head, 1);
        for (_, name) in rows {
            let of_row = |link: &&str| {
                let mut here = pairs
                    .iter()
                    .filter(|pair| pair.0.cell.link == **link && digest.label_without(pair.0.cell, &whole) == *name);
                here.next().map_or("–".into(), |pair| signed(&pair.2))
            };
            table.row(std::iter::once(name.clone()).chain(links.iter().map(of_row)).collect());
        }
        table
    };
    if !own.is_empty() {
        page.table(&table(&own));
    }
    match (shared.is_empty(), own.is_empty()) {
        (true, _) => {}
        (false, true) => page.table(&table(&shared)),
        (false, false) => page.folded_table("Where ranks share cores", &table(&shared)),
    }
}

/// `● 0.85× [0.81, 0.89]`.
pub(super) fn signed(comparison: &Comparison) -> String {
    format!("{} {}", if comparison.verdict == 0 { "○" } else { "●" }, comparison.times())
}

/// Under which congestion controls, link by link, where they are not everywhere the same.
fn controls(page: &mut Page, pairs: &[Pair<'_, '_>]) {
    let mut told: Vec<(Control, Vec<String>)> = Vec::new();
    for link in distinct(pairs.iter().map(|pair| pair.0.cell.link.as_str())) {
        let here = pairs.iter().filter(|pair| pair.0.cell.link == link);
        let control = Control::of(here.map(|pair| (pair.0, pair.1)));
        match told.iter_mut().find(|(known, _)| *known == control) {
            Some((_, links)) => links.push(link.into()),
            None => told.push((control, vec![link.into()])),
        }
    }
    let everywhere = told.len() == 1;
    let confounded = told.iter().any(|(control, _)| control.differs());
    let mut texts: Vec<String> = told
        .iter()
        .filter(|(control, _)| !control.told().is_empty())
        .map(|(control, links)| match everywhere {
            true => format!("on every link {}", control.told()),
            false => format!("on {} {}", all_of(links).unwrap_or_default(), control.told()),
        })
        .collect();
    if texts.is_empty() {
        return;
    }
    if confounded {
        texts.push("so what differs between the two is not the transport alone".into());
    }
    let mark = if confounded { Mark::Doubt } else { Mark::Found };
    page.statements(&[(mark, format!("Congestion control: {}.", texts.join("; ")))]);
}
