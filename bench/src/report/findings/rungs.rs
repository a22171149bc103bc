//! What one thing costs: neighbours on the ladder of transports, with the same strategy on the same link.

use super::super::digest::{Case, Comparison, Digest, Grouped, ROUNDS, is_in_memory};
use super::super::html::Mark;
use super::Statements;
use crate::record::{Axis, Cell};

/// A rung, the one that it is compared with, and what lies between.
const NEIGHBOURS: [(&str, &str, &str); 8] = [
    ("quic", "quic-unprotected", "QUIC's packet protection"),
    ("quic", "quic-no-gate", "QUIC's gate"),
    ("tcp", "tcp-no-gate", "the gate before ZeroMQ"),
    ("tcp-no-gate", "tcp-raw", "ZeroMQ (without its gate)"),
    ("tcp", "tcp-raw", "ZeroMQ and its gate"),
    ("tcp", "tcp-ipc", "the kernel's TCP instead of a Unix socket, below ZeroMQ"),
    ("tcp-raw", "shm", "the kernel's TCP instead of shared memory"),
    ("shm", "null", "moving and adding up in memory"),
];

/// For each pair of neighbours in the data, by link and whatever else differs.
pub(super) fn prices(digest: &Digest<'_>) -> Statements {
    let mut said = Statements::new();
    let ran = |transport: &str| digest.cases.iter().any(|case| case.cell.transport == transport && case.step.is_some());
    for (upper, lower, what) in NEIGHBOURS {
        // With the rung between them in the data, the two outer ones say nothing more.
        if (upper, lower) == ("tcp", "tcp-raw") && ran("tcp-no-gate") {
            continue;
        }
        // What goes through memory is in the groups of every link, and to be told once.
        let mut told: Vec<&Cell> = Vec::new();
        for Grouped { label, cases, .. } in digest.groups(&[Axis::Strategy, Axis::Transport]) {
            let mine = cases.into_iter().filter(|case| case.cell.transport == upper);
            let compared: Vec<(&Case<'_>, Comparison)> = mine
                .filter_map(|case| {
                    let there = digest.over(case.cell, lower).filter(|there| is_neighbour(case.cell, there.cell))?;
                    Some((case, case.against(there)?))
                })
                .filter(|(case, comparison)| comparison.rounds >= ROUNDS && !told.contains(&case.cell))
                .collect();
            told.extend(compared.iter().map(|(case, _)| case.cell));
            if !compared.is_empty() {
                let place = if is_in_memory(compared[0].0.cell) { String::new() } else { label };
                said.push(statement(what, &place, &compared));
            }
        }
    }
    said
}

/// Whether two cells go the same way but for the rung: over a slow link, its price would be the network's.
fn is_neighbour(upper: &Cell, lower: &Cell) -> bool {
    is_in_memory(upper) || upper.link == lower.link
}

fn statement(what: &str, place: &str, compared: &[(&Case<'_>, Comparison)]) -> (Mark, String) {
    let one = |(case, comparison): &(&Case<'_>, Comparison)| {
        let mtu = case.cell.quic_mtu.map_or(String::new(), |mtu| format!(" with MTU {mtu}"));
        format!("{} ({}{mtu})", comparison.change(), case.cell.strategy)
    };
    let (clear, equal): (Vec<_>, Vec<_>) = compared.iter().partition(|(_, comparison)| comparison.verdict != 0);
    let mark = if clear.is_empty() { Mark::Open } else { Mark::Found };
    let names = |some: Vec<&(&Case<'_>, Comparison)>| some.into_iter().map(one).collect::<Vec<_>>().join(", ");
    let mut parts = Vec::new();
    let place = if place.is_empty() { String::new() } else { format!(", {place}") };
    if !clear.is_empty() {
        parts.push(format!("a step changes by {}", names(clear)));
    }
    if !equal.is_empty() {
        parts.push(format!("no significant difference: {}", names(equal)));
    }
    (mark, format!("{what}{place}: {}.", parts.join("; ")))
}
