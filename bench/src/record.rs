//! What a sweep leaves behind: one line of JSON for each run of each cell, complete enough to be read alone.
//!
//! Times are milliseconds and sizes bytes unless a name says otherwise. Numbers that are not finite are `null`.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::environment::Environment;

/// Version of these lines; raised when their meaning changes.
pub(crate) const SCHEMA: u32 = 1;

/// One run of one cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) schema: u32,
    /// Name of the plan.
    pub(crate) plan: String,
    pub(crate) cell: Cell,
    /// Which repetition, from 1. Cells of one round ran one after the other, so they are compared in pairs.
    pub(crate) round: u32,
    /// Place in the order of execution over the whole sweep, from 0.
    pub(crate) position: u64,
    /// Start, in seconds since 1970.
    pub(crate) started_unix_s: f64,
    /// From the start of the processes to their end.
    pub(crate) wall_s: f64,
    pub(crate) status: Status,
    /// Why its figures are doubtful: the payload is off the formula, the machine was busy, its clock moved, …
    pub(crate) flags: Vec<Flag>,
    /// What was measured, where it ran.
    pub(crate) measured: Option<Measured>,
    pub(crate) environment: Environment,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "why", rename_all = "kebab-case")]
pub(crate) enum Status {
    Ok,
    /// It ended with an error, in one line.
    Failed(String),
    /// It did not end in time.
    TimedOut(String),
    /// This machine or build cannot run it.
    NotAvailable(String),
}

/// A doubt about a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Flag {
    pub(crate) kind: FlagKind,
    /// What was seen, with figures.
    pub(crate) what: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum FlagKind {
    /// Bytes, messages or operations are not what the strategy's formula says.
    OffTheFormula,
    /// Other processes, or other virtual machines, took processor time.
    MachineBusy,
    /// The processor ran faster or slower after the run than before it.
    ClockMoved,
    /// The emulator, not the link that it plays, was what held packets back.
    EmulatorBehind,
    /// More ranks than processor cores.
    SharedCores,
    /// Steps never settled.
    NoSteadyState,
}

/// The values of all axes, which together are what is to be compared.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Cell {
    pub(crate) strategy: String,
    /// A rung of the ladder of transports: `null`, `shm`, `tcp-raw`, `tcp`, `tcp-no-gate`, `tcp-ipc`, `quic`, `quic-unprotected`, …
    pub(crate) transport: String,
    /// Name of the profile of the link.
    pub(crate) link: String,
    pub(crate) ranks: usize,
    pub(crate) precision: String,
    pub(crate) wire: String,
    pub(crate) bucket_bytes: usize,
    pub(crate) overlap: bool,
    pub(crate) lanes: usize,
    /// Congestion control, of TCP and QUIC alike; `default` for the kernel's and the transport's own.
    pub(crate) congestion: String,
    /// Largest UDP payload of QUIC; `None` for what the transport finds.
    pub(crate) quic_mtu: Option<u16>,
    pub(crate) seed: u64,
    pub(crate) preset: String,
    /// Sequences a step over all ranks.
    pub(crate) batch: usize,
    pub(crate) accumulation: usize,
    /// Whether the backward pass computes a block's forward pass again instead of keeping it in memory.
    #[serde(default)]
    pub(crate) recompute: bool,
    pub(crate) steps: u64,
    /// Threads that compute, in each rank.
    pub(crate) threads: usize,
    /// A delay that was put in on purpose, to see whether it is found.
    pub(crate) planted: Option<Planted>,
    /// Sets cells apart that are otherwise the same, for A/A comparisons; empty for all others.
    pub(crate) variant: String,
}

/// A delay put into every step, where the batch is read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) struct Planted {
    pub(crate) microseconds: u64,
    /// `None` for all ranks.
    pub(crate) rank: Option<usize>,
}

/// An axis of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Axis {
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
pub(crate) struct Measured {
    pub(crate) tokens_per_step: u64,
    pub(crate) parameters: u64,
    /// Training loss of each step, in nats a token.
    pub(crate) losses: Vec<Option<f64>>,
    /// Global norm of each step's averaged gradient, before clipping. Empty in records of versions that did not keep it.
    #[serde(default)]
    pub(crate) grad_norms: Vec<Option<f64>>,
    /// Seconds from the first step to the end of each.
    pub(crate) seconds: Vec<f64>,
    pub(crate) weights_hash: String,
    /// One for each rank, in order.
    pub(crate) ranks: Vec<Rank>,
    /// Settings of the transport, as (name, value).
    pub(crate) transport_facts: Vec<(String, String)>,
    pub(crate) link: Link,
}

/// One rank's figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Rank {
    pub(crate) rank: usize,
    pub(crate) steps: Steps,
    /// Where it waited, by operation, in the order in which they start.
    pub(crate) operations: Vec<Operation>,
    /// How long a step it waited for each rank of the job that had not begun, in rank order: medians over steps, whose sum is about the
    /// median of `skew`.
    pub(crate) waited_for: Vec<f64>,
    /// Payload bytes of gradients and parameters sent a step, as counted and by formula; `None` where nothing counts.
    pub(crate) payload_bytes: Option<u64>,
    pub(crate) payload_expected: u64,
    pub(crate) messages: Option<u64>,
    pub(crate) messages_expected: u64,
    /// Payload of scalars, and bytes of headers, sent a step.
    pub(crate) scalar_bytes: Option<u64>,
    pub(crate) framing_bytes: Option<u64>,
    pub(crate) peak_rss_bytes: u64,
    pub(crate) network: Network,
}

/// Each step's parts on one rank, a column for each: all have one entry a step. The parts from `data` to `other` follow one another, were
/// each measured by themselves, and add up to `total`, but for `other`, which is what is left over: time that nothing accounts for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Steps {
    pub(crate) total: Vec<f64>,
    pub(crate) data: Vec<f64>,
    /// With waiting for a device that computes the passes by itself. Waiting for the optimizer's kernels is in `optimizer`.
    pub(crate) compute: Vec<f64>,
    pub(crate) pack: Vec<f64>,
    /// Waiting for gradients and parameters while all ranks take part.
    pub(crate) exposed: Vec<f64>,
    /// Waiting for loss and norm while all ranks take part.
    pub(crate) scalars: Vec<f64>,
    /// Waiting, of either kind, for ranks that had not begun.
    pub(crate) skew: Vec<f64>,
    pub(crate) unpack: Vec<f64>,
    pub(crate) optimizer: Vec<f64>,
    pub(crate) other: Vec<f64>,
    /// Not a part of the sum: how long at least one operation on gradients or parameters was under way.
    pub(crate) communication: Vec<f64>,
    /// Not a part of the sum: how much of that was behind other work.
    pub(crate) hidden: Vec<f64>,
}

/// One operation of a step: medians over steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Operation {
    /// As it is called in error messages: `gradients, bucket 0: head`.
    pub(crate) label: String,
    /// How long it was under way.
    pub(crate) communication: f64,
    pub(crate) exposed: f64,
    pub(crate) hidden: f64,
    pub(crate) skew: f64,
}

/// What the network did meanwhile, on one rank, from the first step to the last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Network {
    /// Bytes and packets that the rank's network interface sent and received, headers included; `None` where ranks share one.
    pub(crate) interface: Option<Interface>,
    pub(crate) connections: Vec<Connection>,
    /// Processor seconds of the process, by group of threads: `training`, `compute`, `network`, `control`, `other`.
    pub(crate) cpu_s: BTreeMap<String, f64>,
    /// Why there are no figures of connections, where there are none.
    pub(crate) missing: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Interface {
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_received: u64,
    pub(crate) packets_sent: u64,
    pub(crate) packets_received: u64,
}

/// One connection of a transport, as its kernel or QUIC itself tells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Connection {
    /// `tcp` or `quic`.
    pub(crate) protocol: String,
    /// Address of the other end.
    pub(crate) peer: String,
    /// Name of the congestion control.
    pub(crate) congestion: String,
    /// Smoothed round-trip time at the end, and the smallest seen.
    pub(crate) rtt_ms: f64,
    pub(crate) min_rtt_ms: Option<f64>,
    /// At the end.
    pub(crate) congestion_window_bytes: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) packets_sent: u64,
    /// Packets sent again (TCP), or taken for lost (QUIC).
    pub(crate) retransmitted_packets: u64,
    pub(crate) retransmitted_bytes: u64,
}

/// The link that a run went over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Link {
    /// One line about it.
    pub(crate) description: String,
    /// Counters of the emulator, for each rank's two directions, where there was one.
    pub(crate) emulator: Vec<Pipe>,
}

/// One direction of one end of an emulated link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pipe {
    /// Number of the end (a namespace), from 0.
    pub(crate) end: usize,
    /// `up` for what the end sends, `down` for what it receives.
    pub(crate) direction: String,
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    /// Dropped at random.
    pub(crate) lost: u64,
    /// Dropped because the queue was full.
    pub(crate) overflowed: u64,
    pub(crate) reordered: u64,
    pub(crate) duplicated: u64,
    /// How much later than asked packets went out: median and 99th percentile, in microseconds.
    pub(crate) late_p50_us: f64,
    pub(crate) late_p99_us: f64,
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
    pub(crate) const ALL: [Axis; 20] = [
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
    /// The value of an axis, as a plan writes it.
    pub(crate) fn value(&self, axis: Axis) -> String {
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
    pub(crate) fn label(&self, axes: &[Axis]) -> String {
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
    pub(crate) fn varied<'a>(cells: impl Iterator<Item = &'a Cell> + Clone) -> Vec<Axis> {
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
    pub(crate) fn step_ms(&self) -> Vec<f64> {
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
    pub(crate) fn parts(&self) -> [(&'static str, &[f64]); 9] {
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
