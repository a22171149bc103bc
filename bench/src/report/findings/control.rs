//! Whether the method finds what is there and nothing else: cells that are the same, and delays that were put in on purpose.

use rig::record::{Axis, Cell, InjectedDelay};

use super::super::case::ROUNDS;
use super::super::digest::{Case, Comparison, Digest, Grouped};
use super::super::html::Mark;
use super::super::text::{count, figure, interval};
use super::statements::Statements;

pub(super) fn all(digest: &Digest<'_>) -> Statements {
    same(digest).into_iter().chain(planted(digest)).collect()
}

/// Cells that differ in nothing but the name of their variant.
fn same(digest: &Digest<'_>) -> Option<(Mark, String)> {
    if !digest.axes.contains(&Axis::Variant) {
        return None;
    }
    let mut compared: Vec<(Comparison, String)> = Vec::new();
    for Grouped { label, cases, .. } in digest.groups(&[Axis::Variant]) {
        for (index, one) in cases.iter().enumerate() {
            let others = cases[index + 1..].iter().filter_map(|other| other.against(one));
            compared.extend(others.filter(|found| found.rounds >= ROUNDS).map(|found| (found, label.clone())));
        }
    }
    let told = compared.iter().filter(|(found, _)| found.verdict != 0).count();
    let off = |found: &Comparison| found.ratio.estimate.ln().abs();
    let (most, label) = compared.iter().max_by(|a, b| off(&a.0).total_cmp(&off(&b.0)))?;
    // One in twenty is what a confidence of 95 % means; of a few pairs one may be.
    let mark = if told * 20 <= compared.len().max(20) { Mark::Found } else { Mark::Doubt };
    let text = format!(
        "Of {} of cells that are the same, {told} differ significantly, where one in twenty is to be expected; the largest ratio is {} ({label}).",
        count(compared.len(), "pair"),
        most.times()
    );
    Some((mark, text))
}

/// Delays that were put in, and what was found of them.
fn planted(digest: &Digest<'_>) -> Statements {
    let delayed = digest.cases.iter().filter_map(|case| Some((case, case.cell.planted.as_ref()?)));
    delayed.filter_map(|(case, planted)| recovered(digest, case, planted)).collect()
}

fn recovered(digest: &Digest<'_>, case: &Case<'_>, planted: &InjectedDelay) -> Option<(Mark, String)> {
    let without = digest.case(&Cell { planted: None, ..case.cell.clone() })?;
    let found = case.against(without).filter(|found| found.rounds >= ROUNDS)?;
    let put = planted.microseconds as f64 / 1e3;
    let place = digest.label_without(case.cell, &[Axis::Planted]);
    let whom = planted.rank.map_or("every rank".into(), |rank| format!("rank {rank}"));
    let (mark, verdict) = match found.difference.contains(put) {
        true if found.verdict > 0 => (Mark::Found, "found"),
        true => (Mark::Open, "too small to be told from nothing"),
        false => (Mark::Doubt, "NOT what was put in"),
    };
    let text = format!(
        "{place}: of {} ms put into each step of {whom}, {} ms come out: {verdict}.",
        figure(put),
        interval(&found.difference)
    );
    Some((mark, text))
}
