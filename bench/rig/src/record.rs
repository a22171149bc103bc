//! What a sweep leaves behind: one line of JSON for each run of each cell, complete enough to be read alone.
//!
//! Times are milliseconds and sizes bytes unless a name says otherwise. Numbers that are not finite are `null`.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::environment::Environment;
use crate::flag::Flag;
use crate::link::Pipe;
use crate::why::Network;

/// Version of these lines; raised when their meaning changes.
pub const SCHEMA: u32 = 1;

/// The transport of a single rank, which talks to nobody.
pub const NOBODY: &str = "none";

/// What a run on one machine without namespaces goes over.
pub const LOOPBACK: &str = "loopback";

/// Leaves a setting to the kernel or the transport.
pub const DEFAULT: &str = "default";

/// One run of one cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub schema: u32,
    /// Name of the plan.
    pub plan: String,
    pub cell: Cell,
    /// Which repetition, from 1. Cells of one round ran one after the other, so they are compared in pairs.
    pub round: u32,
    /// Place in the order of execution over the whole sweep, from 0.
    pub position: u64,
    /// Start, in seconds since 1970.
    pub started_unix_s: f64,
    /// From the start of the processes to their end.
    pub wall_s: f64,
    pub status: Status,
    /// Why its figures are doubtful: the payload is off the formula, the machine was busy, its clock moved, …
    pub flags: Vec<Flag>,
    /// What was measured, where it ran.
    pub measured: Option<Measured>,
    pub environment: Environment,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "why", rename_all = "kebab-case")]
pub enum Status {
    Ok,
    /// It ended with an error, in one line.
    Failed(String),
    /// It did not end in time.
    TimedOut(String),
    /// This machine or build cannot run it.
    NotAvailable(String),
}

/// The values of all axes, which together are what is to be compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Cell {
    pub strategy: String,
    /// A rung of the ladder of transports: `null`, `shm`, `tcp-raw`, `tcp`, `tcp-no-gate`, `tcp-ipc`, `quic`, `quic-unprotected`, …
    pub transport: String,
    /// Name of the profile of the link.
    pub link: String,
    pub ranks: usize,
    pub precision: String,
    pub wire: String,
    pub bucket_bytes: usize,
    pub overlap: bool,
    pub lanes: usize,
    /// Congestion control, of TCP and QUIC alike; `default` for the kernel's and the transport's own.
    pub congestion: String,
    /// Largest UDP payload of QUIC; `None` for what the transport finds.
    pub quic_mtu: Option<u16>,
    pub seed: u64,
    pub preset: String,
    /// Sequences a step over all ranks.
    pub batch: usize,
    pub accumulation: usize,
    /// Whether the backward pass computes a block's forward pass again instead of keeping it in memory.
    #[serde(default)]
    pub recompute: bool,
    pub steps: u64,
    /// Threads that compute, in each rank.
    pub threads: usize,
    /// A delay that was put in on purpose, to see whether it is found.
    pub planted: Option<Planted>,
    /// Sets cells apart that are otherwise the same, for A/A comparisons; empty for all others.
    pub variant: String,
}

/// A delay put into every step, where the batch is read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Planted {
    pub microseconds: u64,
    /// `None` for all ranks.
    pub rank: Option<usize>,
}

/// An axis of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Axis {
    Strategy,
    Transport,
    Link,
    Ranks,
    Precision,
    Wire,
    Bucket,
    Overlap,
    Lanes,
    Congestion,
    QuicMtu,
    Seed,
    Preset,
    Batch,
    Accumulation,
    Recompute,
    Steps,
    Threads,
    Planted,
    Variant,
}

/// What a run measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    pub tokens_per_step: u64,
    pub parameters: u64,
    /// Training loss of each step, in nats a token.
    pub losses: Vec<Option<f64>>,
    /// Global norm of each step's averaged gradient, before clipping. Empty in records of versions that did not keep it.
    #[serde(default)]
    pub grad_norms: Vec<Option<f64>>,
    /// Seconds from the first step to the end of each.
    pub seconds: Vec<f64>,
    pub weights_hash: String,
    /// One for each rank, in order.
    pub ranks: Vec<Rank>,
    /// Settings of the transport, as (name, value).
    pub transport_facts: Vec<(String, String)>,
    pub link: Link,
}

/// One rank's figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rank {
    pub rank: usize,
    pub steps: Steps,
    /// Where it waited, by operation, in the order in which they start.
    pub operations: Vec<Operation>,
    /// How long a step it waited for each rank of the job that had not begun, in rank order: medians over steps, whose sum is about the
    /// median of `skew`.
    pub waited_for: Vec<f64>,
    /// Payload bytes of gradients and parameters sent a step, as counted and by formula; `None` where nothing counts.
    pub payload_bytes: Option<u64>,
    pub payload_expected: u64,
    pub messages: Option<u64>,
    pub messages_expected: u64,
    /// Payload of scalars, and bytes of headers, sent a step.
    pub scalar_bytes: Option<u64>,
    pub framing_bytes: Option<u64>,
    pub peak_rss_bytes: u64,
    pub network: Network,
}

/// Each step's parts on one rank, a column for each: all have one entry a step. The parts from `data` to `other` follow one another, were
/// each measured by themselves, and add up to `total`, but for `other`, which is what is left over: time that nothing accounts for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Steps {
    pub total: Vec<f64>,
    pub data: Vec<f64>,
    /// With waiting for a device that computes the passes by itself. Waiting for the optimizer's kernels is in `optimizer`.
    pub compute: Vec<f64>,
    pub pack: Vec<f64>,
    /// Waiting for gradients and parameters while all ranks take part.
    pub exposed: Vec<f64>,
    /// Waiting for loss and norm while all ranks take part.
    pub scalars: Vec<f64>,
    /// Waiting, of either kind, for ranks that had not begun.
    pub skew: Vec<f64>,
    pub unpack: Vec<f64>,
    pub optimizer: Vec<f64>,
    pub other: Vec<f64>,
    /// Not a part of the sum: how long at least one operation on gradients or parameters was under way.
    pub communication: Vec<f64>,
    /// Not a part of the sum: how much of that was behind other work.
    pub hidden: Vec<f64>,
}

/// One operation of a step: medians over steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Operation {
    /// As it is called in error messages: `gradients, bucket 0: head`.
    pub label: String,
    /// How long it was under way.
    pub communication: f64,
    pub exposed: f64,
    pub hidden: f64,
    pub skew: f64,
}

/// The link that a run went over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// One line about it.
    pub description: String,
    /// Counters of the emulator, for each rank's two directions, where there was one.
    pub emulator: Vec<Pipe>,
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Axis::Strategy => "strategy",
            Axis::Transport => "transport",
            Axis::Link => "link",
            Axis::Ranks => "ranks",
            Axis::Precision => "precision",
            Axis::Wire => "wire",
            Axis::Bucket => "bucket",
            Axis::Overlap => "overlap",
            Axis::Lanes => "lanes",
            Axis::Congestion => "congestion",
            Axis::QuicMtu => "quic-mtu",
            Axis::Seed => "seed",
            Axis::Preset => "preset",
            Axis::Batch => "batch",
            Axis::Accumulation => "accumulation",
            Axis::Recompute => "recompute",
            Axis::Steps => "steps",
            Axis::Threads => "threads",
            Axis::Planted => "planted",
            Axis::Variant => "variant",
        })
    }
}

impl Axis {
    pub const ALL: [Axis; 20] = [
        Axis::Strategy,
        Axis::Transport,
        Axis::Link,
        Axis::Ranks,
        Axis::Precision,
        Axis::Wire,
        Axis::Bucket,
        Axis::Overlap,
        Axis::Lanes,
        Axis::Congestion,
        Axis::QuicMtu,
        Axis::Seed,
        Axis::Preset,
        Axis::Batch,
        Axis::Accumulation,
        Axis::Recompute,
        Axis::Steps,
        Axis::Threads,
        Axis::Planted,
        Axis::Variant,
    ];
}

impl Cell {
    /// Ranks that share an end of the link: a node, where the strategy tells nodes apart, of which there are then two.
    pub fn ranks_per_end(&self) -> usize {
        if self.strategy == "hierarchical" && self.ranks.is_multiple_of(2) { self.ranks / 2 } else { 1 }
    }

    /// The value of an axis, as a plan writes it.
    pub fn value(&self, axis: Axis) -> String {
        match axis {
            Axis::Strategy => self.strategy.clone(),
            Axis::Transport => self.transport.clone(),
            Axis::Link => self.link.clone(),
            Axis::Ranks => self.ranks.to_string(),
            Axis::Precision => self.precision.clone(),
            Axis::Wire => self.wire.clone(),
            Axis::Bucket => self.bucket_bytes.to_string(),
            Axis::Overlap => if self.overlap { "on" } else { "off" }.into(),
            Axis::Lanes => self.lanes.to_string(),
            Axis::Congestion => self.congestion.clone(),
            Axis::QuicMtu => self.quic_mtu.map_or("default".into(), |mtu| mtu.to_string()),
            Axis::Seed => self.seed.to_string(),
            Axis::Preset => self.preset.clone(),
            Axis::Batch => self.batch.to_string(),
            Axis::Accumulation => self.accumulation.to_string(),
            Axis::Recompute => if self.recompute { "on" } else { "off" }.into(),
            Axis::Steps => self.steps.to_string(),
            Axis::Threads => self.threads.to_string(),
            Axis::Planted => self.planted.as_ref().map_or("none".into(), |planted| {
                let ms = planted.microseconds as f64 / 1e3;
                planted.rank.map_or(format!("{ms} ms"), |rank| format!("{ms} ms on rank {rank}"))
            }),
            Axis::Variant => self.variant.clone(),
        }
    }

    /// The cell in words, by the values of `axes`: `ddp tcp wan`; `ranks 4` and the like where a value alone says too little.
    pub fn label(&self, axes: &[Axis]) -> String {
        let one = |axis: &Axis| {
            let value = self.value(*axis);
            match axis {
                Axis::Strategy | Axis::Transport | Axis::Link | Axis::Preset => value,
                Axis::Variant if value.is_empty() => String::new(),
                _ => format!("{axis} {value}"),
            }
        };
        axes.iter().map(one).filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
    }

    /// The axes whose values differ between cells.
    pub fn varied<'a>(cells: impl Iterator<Item = &'a Cell> + Clone) -> Vec<Axis> {
        let differs = |axis: &Axis| {
            let mut values = cells.clone().map(|cell| cell.value(*axis));
            let first = values.next();
            values.any(|value| Some(value) != first)
        };
        Axis::ALL.into_iter().filter(differs).collect()
    }
}

impl Record {
    /// The wall time of each step: of the rank that took longest.
    pub fn step_ms(&self) -> Vec<f64> {
        let ranks = self.measured.iter().flat_map(|measured| &measured.ranks);
        ranks.fold(Vec::new(), |mut longest, rank| {
            longest.resize(longest.len().max(rank.steps.total.len()), 0.0);
            longest.iter_mut().zip(&rank.steps.total).for_each(|(most, ms)| *most = ms.max(*most));
            longest
        })
    }
}

impl Steps {
    /// The parts that add up to the total, by name, in the order in which a step goes through them.
    pub fn parts(&self) -> [(&'static str, &[f64]); 9] {
        [
            ("data", &self.data),
            ("compute", &self.compute),
            ("pack", &self.pack),
            ("exposed", &self.exposed),
            ("scalars", &self.scalars),
            ("skew", &self.skew),
            ("unpack", &self.unpack),
            ("optimizer", &self.optimizer),
            ("other", &self.other),
        ]
    }
}
