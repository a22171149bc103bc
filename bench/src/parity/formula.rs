//! Payload bytes and messages, counted and by the formula, over every transport.

use rig::flag::FlagKind;
use rig::record::{Rank, Record};
use rig::text::columns;
use rig::training::outcome;
use serde::Serialize;

use super::plan::Variant;

/// What a strategy's ranks sent in a step over a transport.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Count {
    pub(crate) kind: &'static str,
    pub(crate) strategy: String,
    pub(crate) transport: String,
    pub(crate) ranks: usize,
    pub(crate) bytes_by_rank: Vec<Option<u64>>,
    pub(crate) bytes_expected_by_rank: Vec<u64>,
    pub(crate) messages_by_rank: Vec<Option<u64>>,
    pub(crate) messages_expected_by_rank: Vec<u64>,
    /// Equal on all ranks, or there would be a failure instead.
    pub(crate) weights_hash: Option<String>,
    /// Equal to the same strategy's on the first transport that ran.
    pub(crate) weights_identical: bool,
    /// Whether every figure is as it should be.
    pub(crate) holds: bool,
    pub(crate) status: String,
}

impl Count {
    /// A count, with what is to be compared filled in; [`holds`](Count::holds) follows.
    fn judged(self) -> Self {
        let equal = |counted: &[Option<u64>], expected: &[u64]| {
            !expected.is_empty() && counted.iter().copied().eq(expected.iter().copied().map(Some))
        };
        let holds = self.status == "ok"
            && self.weights_identical
            && equal(&self.bytes_by_rank, &self.bytes_expected_by_rank)
            && equal(&self.messages_by_rank, &self.messages_expected_by_rank);
        Count { kind: "formula", holds, ..self }
    }

    /// Of a run; `first` is the hash of the weights over the first transport, once there is one.
    ///
    /// # Errors
    /// Its cell names what there is not.
    fn of(record: &Record, first: &mut Option<String>) -> Result<Self, String> {
        let cell = &record.cell;
        let count = Count {
            strategy: Variant::in_cell(cell)?.name(),
            transport: cell.transport.clone(),
            ranks: cell.ranks,
            ..Count::default()
        };
        let measured = match outcome(record) {
            Ok(measured) => measured,
            Err(status) => return Ok(Count { status, ..count }.judged()),
        };
        let hash = measured.weights_hash.clone();
        let off = record.flags.iter().find(|flag| flag.kind == FlagKind::OffTheFormula);
        fn by<T>(ranks: &[Rank], of: fn(&Rank) -> T) -> Vec<T> {
            ranks.iter().map(of).collect()
        }
        Ok(Count {
            bytes_by_rank: by(&measured.ranks, |rank| rank.payload_bytes),
            bytes_expected_by_rank: by(&measured.ranks, |rank| rank.payload_expected),
            messages_by_rank: by(&measured.ranks, |rank| rank.messages),
            messages_expected_by_rank: by(&measured.ranks, |rank| rank.messages_expected),
            weights_identical: *first.get_or_insert_with(|| hash.clone()) == hash,
            weights_hash: Some(hash),
            status: off.map_or("ok".into(), |off| off.what.clone()),
            ..count
        }
        .judged())
    }
}

/// Counts of runs, sorted so that those of one strategy on as many ranks follow one another, in the order of `order`: what has one place there
/// and one number of ranks has the same weights over every transport.
///
/// # Errors
/// As [`Count::of`].
pub(crate) fn counts<'a>(
    records: &[&'a Record],
    order: impl Fn(&str) -> Option<usize>,
) -> Result<Vec<(Count, &'a Record)>, String> {
    let mut sorted: Vec<(&Record, String)> = Vec::new();
    for record in records {
        sorted.push((record, Variant::in_cell(&record.cell)?.name()));
    }
    sorted.sort_by_key(|(record, name)| (record.cell.ranks, order(name)));
    let mut first = None;
    let mut last: Option<(usize, &str)> = None;
    let mut counts = Vec::new();
    for (record, name) in &sorted {
        let key = Some((record.cell.ranks, name.as_str()));
        if key != last {
            (first, last) = (None, key);
        }
        counts.push((Count::of(record, &mut first)?, *record));
    }
    Ok(counts)
}

/// Strategy × ranks: the formula, and what was counted over each transport, where it differs.
pub(crate) fn table(counts: &[Count]) -> String {
    const HEADER: [&str; 9] =
        ["strategy", "ranks", "transports", "bytes counted", "formula", "messages counted", "formula", "weights", ""];
    let mut lines: Vec<[String; 9]> = Vec::new();
    let mut rest = counts;
    while let Some(first) = rest.first() {
        // One line for all transports that say the same.
        let same = |other: &Count| {
            let of = |count: &Count| (count.ranks, count.strategy.clone(), count.holds, count.bytes_by_rank.clone());
            of(first) == of(other) && first.messages_by_rank == other.messages_by_rank && first.status == other.status
        };
        let group = rest.iter().take_while(|other| same(other)).count().max(1);
        let transports: Vec<&str> = rest[..group].iter().map(|count| count.transport.as_str()).collect();
        let counted = |by_rank: &[Option<u64>]| spread(&by_rank.iter().copied().flatten().collect::<Vec<_>>());
        let weights = match (&first.weights_hash, first.weights_identical) {
            (Some(hash), true) => format!("{hash:.8}"),
            (Some(hash), false) => format!("{hash:.8} DIFFER"),
            (None, _) => "-".into(),
        };
        lines.push([
            first.strategy.clone(),
            first.ranks.to_string(),
            transports.join(" "),
            counted(&first.bytes_by_rank),
            spread(&first.bytes_expected_by_rank),
            counted(&first.messages_by_rank),
            spread(&first.messages_expected_by_rank),
            weights,
            if first.holds { String::new() } else { format!("! {}", first.status) },
        ]);
        rest = &rest[group..];
    }
    format!(
        "payload bytes and messages that a rank sends in a step for gradients and parameters, counted and by the strategy's formula\n\
         (fewest–most over ranks; the hash of the weights is the same on all ranks, and over all transports of a line)\n\
         \n\
         {}\n\
         \n\
         {} of {} runs have the counts of the formula, and the same weights as over the first transport",
        columns(&HEADER, &lines, 3),
        counts.iter().filter(|count| count.holds).count(),
        counts.len()
    )
}

/// The smallest and the largest.
fn spread(values: &[u64]) -> String {
    match (values.iter().min(), values.iter().max()) {
        (Some(least), Some(most)) if least == most => least.to_string(),
        (Some(least), Some(most)) => format!("{least}–{most}"),
        _ => "-".into(),
    }
}
