//! What one thing costs: neighbours on the ladder of transports, with the same strategy on the same link.

use rig::record::{Axis, Cell};
use rig::stats::{Metric, Verdict};

use super::super::case::ROUNDS;
use super::super::digest::Digest;
use super::super::html::Mark;
use super::statements::Statements;
use crate::prices::{Price, PriceList, price_list};

/// For each pair of neighbours in the data, by whatever else differs.
pub(super) fn prices(digest: &Digest<'_>) -> Statements {
    let PriceList { prices, unpriced, .. } = price_list(&digest.results.records, Metric::Step);
    let axes: Vec<Axis> = Cell::varied(prices.iter().map(|price| &price.pair.with))
        .into_iter()
        .filter(|axis| !matches!(axis, Axis::Transport | Axis::Congestion | Axis::QuicMtu))
        .collect();
    let mut said = Statements::new();
    let mut told: Vec<&str> = Vec::new();
    for Price { pair, .. } in &prices {
        if told.contains(&pair.what) {
            continue;
        }
        told.push(pair.what);
        let of_thing = prices.iter().filter(|price| price.pair.what == pair.what && price.comparison.rounds >= ROUNDS);
        // By the ratio, as everything on the page; figures without one are judged by their difference.
        let told_apart = |price: &&Price| match price.comparison.ratio {
            Some(ratio) => !ratio.contains(1.0),
            None => matches!(price.comparison.verdict, Verdict::Difference(_)),
        };
        let (clear, open): (Vec<&Price>, Vec<&Price>) = of_thing.partition(told_apart);
        let one = |price: &&Price| {
            let label = price.pair.with.label(&axes);
            let place =
                if label.is_empty() { price.pair.between() } else { format!("{label}, {}", price.pair.between()) };
            format!("{} ({place})", price.comparison.difference.text(Metric::Step.digits(price.with_it.estimate)))
        };
        let list = |prices: &[&Price]| prices.iter().map(one).collect::<Vec<_>>().join("; ");
        let mut parts = Vec::new();
        if !clear.is_empty() {
            parts.push(format!("a step changes by, in ms, {}", list(&clear)));
        }
        if !open.is_empty() {
            parts.push(format!("no significant difference: {}", list(&open)));
        }
        if !parts.is_empty() {
            let mark = if clear.is_empty() { Mark::Open } else { Mark::Found };
            said.push((mark, format!("The price of {}: {}.", pair.what, parts.join("; "))));
        }
    }
    // One reason is enough for each thing that has no price at all.
    for each in &unpriced {
        if !told.contains(&each.pair.what) {
            told.push(each.pair.what);
            said.push((Mark::Open, format!("No price of {} ({}): {}.", each.pair.what, each.pair.between(), each.why)));
        }
    }
    said.extend(not_measured(digest));
    said
}

/// Things of which a price is missed most, and the rungs that it takes.
const WANTED: [(&str, [&str; 2]); 3] = [
    ("the gate", ["tcp-no-gate", "tcp"]),
    ("ZeroMQ", ["tcp-raw", "tcp-no-gate"]),
    ("encryption", ["quic-unprotected", "quic"]),
];

/// What has no price because a rung was not run, where one of its two was.
fn not_measured(digest: &Digest<'_>) -> Option<(Mark, String)> {
    let has = |rung: &&&str| digest.cases.iter().any(|case| case.cell.transport == **rung && case.step.is_some());
    let missing = WANTED.iter().filter_map(|(what, rungs)| {
        let run = rungs.iter().filter(has).count();
        let missing: Vec<&str> = rungs.iter().filter(|rung| !has(rung)).copied().collect();
        (run == 1).then(|| format!("{what} (needs {})", missing.join(", ")))
    });
    let missing: Vec<String> = missing.collect();
    (!missing.is_empty()).then(|| (Mark::Open, format!("Not measured: {}.", missing.join(", "))))
}
