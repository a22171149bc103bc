//! Whether the method finds what is there and nothing else: cells that are the same, and delays that were put in on purpose.

use rig::flag::FlagKind;
use rig::record::{Axis, Cell, InjectedDelay, Record};

use super::super::case::ROUNDS;
use super::super::digest::{Case, Comparison, Digest, Grouped};
use super::super::html::Mark;
use super::super::text::{count, figure, interval};
use super::statements::Statements;

/// Whether runs did the work that they were to do: bytes by the formula, and weights that are equal where they should be.
pub(super) fn work(digest: &Digest<'_>) -> Statements {
    let mut said = Statements::new();
    let sent = |record: &&Record| {
        let ranks = record.measured.iter().flat_map(|measured| &measured.ranks);
        ranks.clone().count() > 1 && ranks.clone().all(|rank| rank.payload_bytes.is_some())
    };
    let off = |record: &&Record| record.flags.iter().any(|flag| flag.kind == FlagKind::OffTheFormula);
    let counted: Vec<&Record> = digest.results.records.iter().filter(sent).collect();
    let wrong = counted.iter().copied().filter(|record| off(record)).count();
    let runs = count(counted.len(), "run");
    if wrong > 0 {
        said.push((
            Mark::Doubt,
            format!("Of {runs} whose bytes were counted, {wrong} sent other bytes than the formulas say."),
        ));
    } else if !counted.is_empty() {
        said.push((
            Mark::Found,
            format!("What was sent is what the formulas say, to the byte, in all runs that count it ({runs})."),
        ));
    }
    let (groups, equal) = super::super::loss::equal_weights(digest);
    if groups > equal {
        let text = format!(
            "In {} of {groups} groups of cells that should end with the same weights, the weights differ.",
            groups - equal
        );
        said.push((Mark::Doubt, text));
    } else if groups > 0 {
        let groups = count(groups, "group");
        let text = "Cells that should end with the same weights over every transport and link do so, to the last bit";
        said.push((Mark::Found, format!("{text} ({groups} of cells).")));
    }
    said
}

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
        "Of {} of identical cells, {told} differ significantly; by chance one in twenty does. The largest ratio is {} ({label}).",
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
        true => (Mark::Open, "too small to be distinguished from 0"),
        false => (Mark::Doubt, "NOT the delay that was added"),
    };
    let text = format!(
        "{place}: {} ms were added to each step of {whom}, and {} ms more were measured: {verdict}.",
        figure(put),
        interval(&found.difference)
    );
    Some((mark, text))
}
