//! What every textbook says, looked for in the data: only where the cells for it are there.

use rig::record::{Axis, Cell};

use super::case::NETWORK;
use super::digest::{Case, Digest, Grouped};
use super::html::{Page, Table};
use super::text::{bytes, figure, share};

/// By what a count of bytes may be off: shards differ by an element.
const BYTES: f64 = 0.01;

/// Share of a step from which on the network decides.
const SLOW: f64 = 0.5;

/// The backward pass takes about two thirds of forward and backward together.
const BACKWARD: f64 = 2.0 / 3.0;

struct Check {
    what: &'static str,
    cells: String,
    found: String,
    expected: String,
    verdict: &'static str,
}

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    let checks: Vec<Check> = [more_ranks(digest), fsdp(digest), latency(digest), overlap(digest), wire(digest)]
        .into_iter()
        .flatten()
        .collect();
    if checks.is_empty() {
        return;
    }
    page.topic("textbook", "What textbooks say, checked with these figures");
    let mut table = Table::new(&["what", "cells", "found", "expected", "verdict"], 5);
    for check in checks {
        table.row(vec![check.what.into(), check.cells, check.found, check.expected, check.verdict.into()]);
    }
    page.table(&table);
}

/// Whether a ratio is within a range, and the range as it is printed: what is not seen does not decide.
fn within(found: f64, low: f64, high: f64) -> (String, &'static str) {
    let printed = |value: f64| (value * 100.0).round() / 100.0;
    let (low, high) = (printed(low), printed(high));
    (format!("{low:.2}× to {high:.2}×"), verdict((low..=high).contains(&printed(found))))
}

/// Whether a ratio is as expected but for the share `BYTES`.
fn near(found: f64, expected: f64) -> bool {
    (found / expected - 1.0).abs() <= BYTES
}

fn verdict(holds: bool) -> &'static str {
    if holds { "✓ holds" } else { "✗ DOES NOT HOLD" }
}

/// Whether the network decides how long a step takes, by its rate and its distance alone: packets lost at random follow no rule of bytes.
fn is_slow(case: &Case<'_>) -> bool {
    !case.traits.lossy && case.share_of(&NETWORK).is_some_and(|share| share.estimate > SLOW)
}

/// Bytes of the rank that sends most.
fn sent(case: &Case<'_>) -> Option<f64> {
    let most = |values: Vec<f64>| values.into_iter().max_by(f64::total_cmp);
    case.by_rank(|rank| rank.payload_bytes.map(|bytes| bytes as f64), most).filter(|bytes| *bytes > 0.0)
}

/// The first cell of a strategy whose bytes were counted, for each number of ranks, with the numerics of `like`.
fn counted<'a>(digest: &'a Digest<'a>, strategy: &str) -> Vec<(&'a Case<'a>, f64)> {
    let mut counted: Vec<(&Case<'_>, f64)> = Vec::new();
    let is_plain = |case: &&Case<'_>| case.cell.ranks > 1 && case.cell.compress.is_none();
    for case in digest.cases.iter().filter(|case| case.cell.strategy == strategy).filter(is_plain) {
        let Some(bytes) = sent(case) else { continue };
        let known = |(other, _): &(&Case<'_>, f64)| other.cell.ranks == case.cell.ranks;
        let like = counted.first().is_none_or(|(first, _)| same_numerics(first.cell, case.cell));
        if like && !counted.iter().any(known) {
            counted.push((case, bytes));
        }
    }
    counted.sort_by_key(|(case, _)| case.cell.ranks);
    counted
}

fn same_numerics(one: &Cell, other: &Cell) -> bool {
    let axes = [Axis::Preset, Axis::Precision, Axis::Wire, Axis::Accumulation];
    axes.into_iter().all(|axis| one.value(axis) == other.value(axis))
}

/// A strategy, what is said of it, and its bytes by ranks, but for a factor.
type Rule = (&'static str, &'static str, fn(f64) -> f64);

/// A server's bytes grow with the number of workers, a ring's approach a bound.
fn more_ranks(digest: &Digest<'_>) -> Vec<Check> {
    let server = |ranks: f64| ranks - 1.0;
    let ring = |ranks: f64| (ranks - 1.0) / ranks;
    let rules: [Rule; 3] = [
        ("ps", "one server sends N−1 times the parameters", server),
        ("sharded-ps", "with a shard on every rank each sends 2 S (N−1)/N", ring),
        ("ring", "on a ring each rank sends 2 S (N−1)/N", ring),
    ];
    let mut checks = Vec::new();
    for (strategy, what, rule) in rules {
        let counted = counted(digest, strategy);
        for pair in counted.windows(2) {
            let [(few, less), (many, more)] = pair else { continue };
            let (found, expected) = (more / less, rule(many.cell.ranks as f64) / rule(few.cell.ranks as f64));
            checks.push(Check {
                what,
                cells: format!("{strategy}, {} and {} ranks", few.cell.ranks, many.cell.ranks),
                found: format!("{}× ({} and {})", figure(found), bytes(*less), bytes(*more)),
                expected: format!("{}× ± {}", figure(expected), share(BYTES)),
                verdict: verdict(near(found, expected)),
            });
        }
    }
    checks
}

/// Sharded parameters are gathered twice.
fn fsdp(digest: &Digest<'_>) -> Vec<Check> {
    let ddp = counted(digest, "ddp");
    let mut checks = Vec::new();
    for (case, moved) in counted(digest, "fsdp") {
        let there =
            ddp.iter().find(|(other, _)| other.cell.ranks == case.cell.ranks && same_numerics(other.cell, case.cell));
        let Some((other, all)) = there else { continue };
        if case.cell.precision != case.cell.wire || case.cell.accumulation != 1 {
            continue;
        }
        let most = |values: Vec<f64>| values.into_iter().max_by(f64::total_cmp);
        let by_formula = |case: &Case<'_>| case.by_rank(|rank| Some(rank.payload_expected as f64), most);
        let Some((up, down)) = by_formula(case).zip(by_formula(other)).filter(|(_, down)| *down > 0.0) else {
            continue;
        };
        let (found, formula) = (moved / all, up / down);
        // The embedding is gathered once a step: found = (3 − share) / 2.
        let embedding = 3.0 - 2.0 * found;
        checks.push(Check {
            what: "fsdp moves (3 − S_emb/S)/2 times what ddp moves",
            cells: format!("{} ranks", case.cell.ranks),
            found: format!("{}×, so that the embedding is {} of all", figure(found), share(embedding)),
            expected: format!("{}× ± {} by the formulas, within 1× to 1.5×", figure(formula), share(BYTES)),
            verdict: verdict(near(found, formula) && (0.0..=1.0).contains(&embedding)),
        });
    }
    checks
}

/// A ring's messages pass through 2 (N−1) hops.
fn latency(digest: &Digest<'_>) -> Vec<Check> {
    let mut checks = Vec::new();
    for Grouped { label, cases, .. } in digest.groups(&[Axis::Ranks]) {
        let mut ring: Vec<(&Case<'_>, f64)> = cases
            .iter()
            .filter(|case| case.cell.strategy == "ring" && case.traits.rtt.is_some() && case.cell.ranks > 1)
            .filter(|case| is_slow(case))
            .filter_map(|case| Some((*case, case.mean("communication").filter(|ms| *ms > 0.0)?)))
            .collect();
        ring.sort_by_key(|(case, _)| case.cell.ranks);
        for pair in ring.windows(2) {
            let [(few, less), (many, more)] = pair else { continue };
            let (a, b) = (few.cell.ranks as f64, many.cell.ranks as f64);
            let (hops, volume) = ((b - 1.0) / (a - 1.0), (1.0 - 1.0 / b) / (1.0 - 1.0 / a));
            let found = more / less;
            let (expected, verdict) = within(found, 0.9 * volume, 1.1 * hops);
            checks.push(Check {
                what: "a ring's time grows between its bytes (no latency) and its hops (nothing but latency)",
                cells: format!("{label}, {a} and {b} ranks"),
                found: format!("{}× ({} and {} ms)", figure(found), figure(*less), figure(*more)),
                expected: format!("{expected} (bytes {}×, hops {}×, ± 10 %)", figure(volume), figure(hops)),
                verdict,
            });
        }
    }
    checks
}

/// What hides behind the backward pass cannot take longer than it.
fn overlap(digest: &Digest<'_>) -> Vec<Check> {
    let hidden =
        digest.cases.iter().filter(|case| case.cell.strategy == "ddp" && case.cell.overlap && !case.traits.lossy);
    let share_of_compute = |case: &'_ Case<'_>| {
        let (hidden, compute) = (case.mean("hidden")?, case.mean("compute").filter(|ms| *ms > 0.0)?);
        Some((hidden / compute, hidden, compute))
    };
    let all = hidden.filter_map(|case| Some((share_of_compute(case)?, digest.label(case.cell))));
    let Some(((most, hidden, compute), cell)) = all.max_by(|a, b| a.0.0.total_cmp(&b.0.0)) else { return Vec::new() };
    vec![Check {
        what: "ddp hides at most the backward pass, about two thirds of the computation",
        cells: format!("most of all: {cell}"),
        found: format!("{} ({} of {} ms)", share(most), figure(hidden), figure(compute)),
        expected: format!("at most {}", share(BACKWARD)),
        verdict: if most <= BACKWARD { "✓ holds" } else { "✗ more than that" },
    }]
}

/// Half the bytes take half the time where the link is slow.
fn wire(digest: &Digest<'_>) -> Vec<Check> {
    let mut checks = Vec::new();
    let slow = |case: &&Case<'_>| {
        case.cell.wire == "f32" && matches!(case.cell.strategy.as_str(), "ring" | "ddp") && is_slow(case)
    };
    for case in digest.cases.iter().filter(slow) {
        for wire in ["bf16", "f16"] {
            let half = digest.case(&Cell { wire: wire.into(), ..case.cell.clone() });
            let both = half.and_then(|half| Some((half.mean("communication")?, case.mean("communication")?)));
            let Some((less, all)) = both.filter(|(_, all)| *all > 0.0) else { continue };
            let (expected, verdict) = within(less / all, 0.45, 0.6);
            checks.push(Check {
                what: "half the bytes on a slow link take half the time",
                cells: format!("{}, {wire} instead of f32", digest.label_without(case.cell, &[Axis::Wire])),
                found: format!("{}× ({} and {} ms)", figure(less / all), figure(less), figure(all)),
                expected,
                verdict,
            });
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_holds_is_within_the_range_that_is_printed() {
        assert_eq!(within(1.35, 0.9 * 1.5, 3.3), ("1.35× to 3.30×".into(), "✓ holds"));
        assert_eq!(within(1.33, 0.9 * 1.5, 3.3).1, "✗ DOES NOT HOLD");
        assert_eq!(within(0.62, 0.45, 0.6).1, "✗ DOES NOT HOLD");
        assert_eq!(within(f64::NAN, 0.45, 0.6).1, "✗ DOES NOT HOLD");
        assert!(near(2.01, 2.0) && !near(2.03, 2.0));
    }
}
