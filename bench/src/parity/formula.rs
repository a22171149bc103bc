//! Payload bytes and messages, counted and by the formula, over every transport.

use std::time::Duration;

use gpt2::trainer::{Summary, TrainConfig};
use rig::BenchError;
use rig::formula::off_the_formula;
use rig::outcome;
use rig::progress::bar;
use rig::text::columns;
use rig::training::Training;
use serde::Serialize;

use super::options::Settings;

/// Numbers of ranks that are counted.
pub(crate) const RANKS: [usize; 2] = [3, 4];

/// Steps of a run.
const STEPS: u64 = 3;

/// A run must end within this time.
const TIMEOUT: Duration = Duration::from_secs(60);

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

    /// Of what came of a run; `first` is the hash of the weights over the first transport, once there is one.
    pub(crate) fn of(
        strategy: String,
        transport: &str,
        ranks: usize,
        outcome: Result<&Summary, &String>,
        first: &mut Option<String>,
    ) -> Self {
        let count = Count { strategy, transport: transport.into(), ranks, ..Count::default() };
        let summary = match outcome {
            Ok(summary) => summary,
            Err(status) => return Count { status: status.clone(), ..count }.judged(),
        };
        let hash = summary.weights_hash.clone();
        let by = &summary.ranks;
        Count {
            bytes_by_rank: by.iter().map(|rank| rank.bytes_counted).collect(),
            bytes_expected_by_rank: by.iter().map(|rank| rank.bytes_expected).collect(),
            messages_by_rank: by.iter().map(|rank| rank.messages).collect(),
            messages_expected_by_rank: by.iter().map(|rank| rank.expected.messages).collect(),
            weights_identical: *first.get_or_insert_with(|| hash.clone()) == hash,
            weights_hash: Some(hash),
            status: by.iter().find_map(off_the_formula).unwrap_or_else(|| "ok".into()),
            ..count
        }
        .judged()
    }
}

/// Runs each variant on 3 and 4 ranks over each transport.
pub(super) fn count(settings: &Settings) -> Result<Vec<Count>, BenchError> {
    let bar = bar(RANKS.len() * settings.variants.len() * settings.transports.len());
    let mut counts = Vec::new();
    for ranks in RANKS {
        for variant in &settings.variants {
            let mut first = None;
            for transport in &settings.transports {
                bar.set_message(format!("{} over {transport} on {ranks} ranks", variant.name()));
                let config = TrainConfig { steps: STEPS, ..variant.config(settings.base, ranks) };
                let training = Training::new(config, Some(*transport), ranks, 1, TIMEOUT);
                let training = Training { source: settings.source.clone(), ..training };
                let outcome = outcome::settled(training.summary())?;
                counts.push(Count::of(variant.name(), transport.name(), ranks, outcome.as_ref(), &mut first));
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
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
         (fewest–most over ranks; the hash of the weights is one on all ranks, and on all transports of a line)\n\n{}\n\n\
         {} of {} runs as the formula, with the same weights as over the first transport",
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
