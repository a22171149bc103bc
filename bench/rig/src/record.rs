//! What a sweep leaves behind: one line of JSON for each run of each cell, complete enough to be read alone.
//!
//! Times are milliseconds and sizes bytes unless a name says otherwise. Numbers that are not finite are `null`.

use std::fmt;

use gpt2::batches::ShortSequences;
use gpt2::memory::{Allocations, Copies, Usage};
use gpt2::model::KernelChoice;
use gpt2::strategy::{LocalOptions, Setting, Staleness, StrategyKind, StrategyOptions};
use gpt2::trainer::Parts;
use isocomm::TransportOptions;
use serde::{Deserialize, Serialize};

use crate::environment::Environment;
use crate::flag::Flag;
use crate::link::{Pipe, Probe};
use crate::why::Network;

/// Version of these lines; raised when their meaning changes.
pub const SCHEMA: u32 = 1;

/// The transport of a single rank, which talks to nobody.
pub const NOBODY: &str = "none";

/// What a run on one machine without namespaces goes over.
pub const LOOPBACK: &str = "loopback";

/// What a run on the machines of a launcher's job goes over: the network between them.
pub const NETWORK: &str = "network";

/// Leaves a setting to the kernel or the transport.
pub const DEFAULT: &str = "default";

/// What PyTorch's ranks talk through.
pub const GLOO: &str = "gloo";

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
    /// By which kernels layers and loss are computed: `fused` or `composed`.
    #[serde(default = "fused")]
    pub kernels: String,
    pub steps: u64,
    /// Threads that compute, in each rank.
    pub threads: usize,
    /// A delay that was put in on purpose, to see whether it is found.
    pub planted: Option<InjectedDelay>,
    /// Sets cells apart that are otherwise the same, for A/A comparisons; empty for all others.
    pub variant: String,
    /// Who trains.
    #[serde(default, skip_serializing_if = "is_default")]
    pub program: Trainer,
    /// With `single`: every rank trains by itself on its share of the batch, all at the same time.
    #[serde(default, skip_serializing_if = "is_default")]
    pub alone: bool,
    /// What differs from the preset's model.
    #[serde(default, skip_serializing_if = "is_default")]
    pub model: Shape,
    /// Bytes of the first bucket; `None` for training's own, or those of the others where these are fewer.
    #[serde(default, skip_serializing_if = "is_default")]
    pub first_bucket_bytes: Option<usize>,
    /// Bytes of the fusion buffer of `ring`; `None` for training's own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fusion_bytes: Option<usize>,
    /// Whether the server of `ps` only serves.
    #[serde(default, skip_serializing_if = "is_default")]
    pub dedicated_server: bool,
    /// Ranks of a node of `hierarchical` and `hsdp`; `None` for those of an end of the link.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ranks_per_node: Option<usize>,
    /// How gradients are compressed, as the trainer writes it; `None` for not at all.
    #[serde(default, skip_serializing_if = "is_default")]
    pub compress: Option<String>,
    /// Steps between two synchronisations, of strategies whose ranks train by themselves for a time; `None` for training's own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub sync_every: Option<u64>,
    /// Steps by which a worker of `async-ps` may be ahead of the slowest; `None` for training's own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub staleness: Option<u64>,
    /// Whether the ranks of a node of `hierarchical` and `hsdp` talk through the same transport as all ranks, not through shared memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub one_transport: bool,
    /// Ends of the link, which the ranks share evenly; `None` for one end for each node.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ends: Option<usize>,
    /// Learning rate by step: see [`training::schedule`](fn@crate::training::schedule); `None` for that of sweeps.
    #[serde(default, skip_serializing_if = "is_default")]
    pub schedule: Option<String>,
    /// Largest global gradient norm, as a number; `None` for 1.
    #[serde(default, skip_serializing_if = "is_default")]
    pub clip: Option<String>,
    /// The optimizer, with its usual constants; `None` for training's own, AdamW.
    #[serde(default, skip_serializing_if = "is_default")]
    pub optimizer: Option<String>,
    /// First steps with shorter sequences; `None` where there are none.
    #[serde(default, skip_serializing_if = "is_default")]
    pub short_sequences: Option<ShortSequences>,
    /// How gradients are kept from vanishing, as the trainer writes it; `None` for nothing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub loss_scaling: Option<String>,
    /// When the trainer validates; `None` for never.
    #[serde(default, skip_serializing_if = "is_default")]
    pub validation: Option<Validation>,
}

/// Who trains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Trainer {
    #[default]
    Ours,
    /// PyTorch over Gloo, with the same model and text.
    Pytorch,
    /// The same on one device, with the model compiled by `torch.compile`.
    PytorchCompiled,
}

impl Trainer {
    /// Whether it is PyTorch, in whatever form.
    pub fn is_pytorch(self) -> bool {
        self != Trainer::Ours
    }
}

/// What replaces a preset's values of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Shape {
    #[serde(default, skip_serializing_if = "is_default")]
    pub layers: Option<usize>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub heads: Option<usize>,
    /// Of the residual stream.
    #[serde(default, skip_serializing_if = "is_default")]
    pub width: Option<usize>,
    /// Tokens of a sequence.
    #[serde(default, skip_serializing_if = "is_default")]
    pub block: Option<usize>,
}

/// When the trainer validates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Validation {
    /// Every so many steps, and at the end.
    pub every: u64,
    /// Batches, at most.
    pub batches: usize,
}

/// In records of versions that had no others.
fn fused() -> String {
    KernelChoice::Fused.to_string()
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A delay put into every step, where the batch is read.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct InjectedDelay {
    pub microseconds: u64,
    /// `None` for all ranks.
    pub rank: Option<usize>,
}

macro_rules! axes {
    ($($axis:ident = $name:literal),* $(,)?) => {
        /// An axis of a plan.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Axis {
            $(#[serde(rename = $name)] $axis,)*
        }

        impl Axis {
            pub const ALL: [Axis; [$($name),*].len()] = [$(Axis::$axis),*];
        }

        impl fmt::Display for Axis {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(match self {
                    $(Axis::$axis => $name,)*
                })
            }
        }
    };
}

axes! {
    Strategy = "strategy",
    Transport = "transport",
    Link = "link",
    Ranks = "ranks",
    Precision = "precision",
    Wire = "wire",
    Bucket = "bucket",
    Overlap = "overlap",
    Lanes = "lanes",
    Congestion = "congestion",
    QuicMtu = "quic-mtu",
    Seed = "seed",
    Preset = "preset",
    Batch = "batch",
    Accumulation = "accumulation",
    Recompute = "recompute",
    Kernels = "kernels",
    Steps = "steps",
    Threads = "threads",
    Planted = "planted",
    Variant = "variant",
    Program = "program",
    Alone = "alone",
    Layers = "layers",
    Heads = "heads",
    Width = "width",
    Block = "block",
    FirstBucket = "first-bucket",
    Fusion = "fusion",
    DedicatedServer = "dedicated-server",
    RanksPerNode = "ranks-per-node",
    OneTransport = "one-transport",
    Compress = "compress",
    SyncEvery = "sync-every",
    Staleness = "staleness",
    Ends = "ends",
    Schedule = "schedule",
    Clip = "clip",
    Optimizer = "optimizer",
    ShortSequences = "short-sequences",
    LossScaling = "loss-scaling",
    ValidateEvery = "validate-every",
    ValidationBatches = "validation-batches",
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
    /// The machines of a job that a launcher has started; none where the ranks were started here.
    #[serde(default, skip_serializing_if = "is_default")]
    pub hosts: Vec<Host>,
    /// What the trainer itself says at the end, where nobody watched the steps.
    #[serde(default, skip_serializing_if = "is_default")]
    pub trained: Option<Trained>,
}

/// What the trainer says of a run at its end. Medians are those over steps that it takes itself, without the first two.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Trained {
    /// Median step; of the slowest rank, where each trained by itself.
    pub step_ms: Option<f64>,
    /// Of all ranks together.
    pub tokens_per_s: Option<f64>,
    /// Epoch of each step, from 1.
    pub epochs: Vec<u64>,
    /// Validation loss after so many steps.
    pub validations: Vec<(u64, Option<f64>)>,
    /// Steps without an update, because gradients had overflowed.
    pub skipped_steps: u64,
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
    /// Of the gradients that it has applied as a server that does not wait for all workers'.
    #[serde(default, skip_serializing_if = "is_default")]
    pub staleness: Option<Staleness>,
    pub peak_rss_bytes: u64,
    pub network: Network,
    /// What the trainer itself says of the rank at the end, where nobody watched the steps.
    #[serde(default, skip_serializing_if = "is_default")]
    pub trained: Option<TrainedRank>,
}

/// What the trainer says of a rank at the end of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainedRank {
    /// Whether it computes; a dedicated server does not.
    pub computes: bool,
    /// Operations on gradients and parameters a step, as counted and by formula.
    pub operations: u64,
    pub operations_expected: u64,
    /// Steps that its optimizers took: the fewest and the most over segments.
    pub optimizer_steps: (u64, u64),
    /// Medians over steps.
    pub parts: Parts,
    /// Processor time over wall time and threads.
    pub cpu_utilization: Option<f64>,
    /// In percent.
    pub gpu_utilization: Option<f64>,
    /// From the first step to the last, by what it is for, of the whole process; `None` where nothing counts.
    pub memory: Option<Usage>,
    /// What the whole process asks for in a step; `None` where nothing counts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub allocations: Option<Allocations>,
    /// What it copies and fills with zeros of gradients and parameters in a step; `None` in records of versions that did not count.
    #[serde(default, skip_serializing_if = "is_default")]
    pub copies: Option<Copies>,
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

/// A machine of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    pub name: String,
    /// Its ranks, in order.
    pub ranks: Vec<usize>,
    /// How its clock differs from that of rank 0's machine; `None` for that machine.
    pub clock: Option<ClockOffset>,
}

/// How a machine's monotonic clock, in which spans and operations are measured, differed from that of rank 0's machine during a run. Waits for
/// late ranks and traces are computed with the offset taken off, and are uncertain by its error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClockOffset {
    /// By how much it was ahead. Monotonic clocks begin when machines do, so that this may be days.
    pub offset_ms: f64,
    /// By how much that may be off: half of the round trip, and the drift.
    pub error_ms: f64,
    /// The shortest round trip to rank 0, before the run or after it, whichever was longer.
    pub round_trip_ms: f64,
    /// By how much it was further ahead after the run than before it.
    pub drift_ms: f64,
}

/// The link that a run went over.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// One line about it.
    pub description: String,
    /// Counters of the emulator, for each rank's two directions, where there was one.
    pub emulator: Vec<Pipe>,
    /// What one connection saw of it before the first run, where the plan asks for that.
    #[serde(default, skip_serializing_if = "is_default")]
    pub probe: Option<Probe>,
}

impl Default for Cell {
    /// What a plan leaves out.
    fn default() -> Self {
        Cell {
            strategy: "ddp".into(),
            transport: "tcp".into(),
            link: LOOPBACK.into(),
            ranks: 2,
            precision: "f32".into(),
            wire: "f32".into(),
            bucket_bytes: StrategyOptions::default().bucket_bytes,
            overlap: true,
            lanes: TransportOptions::default().lanes,
            congestion: DEFAULT.into(),
            quic_mtu: None,
            seed: 1337,
            preset: "tiny".into(),
            batch: 12,
            accumulation: 1,
            recompute: false,
            kernels: fused(),
            steps: 20,
            threads: 1,
            planted: None,
            variant: String::new(),
            program: Trainer::Ours,
            alone: false,
            model: Shape::default(),
            first_bucket_bytes: None,
            fusion_bytes: None,
            dedicated_server: false,
            ranks_per_node: None,
            one_transport: false,
            compress: None,
            sync_every: None,
            staleness: None,
            ends: None,
            schedule: None,
            clip: None,
            optimizer: None,
            short_sequences: None,
            loss_scaling: None,
            validation: None,
        }
    }
}

impl Cell {
    /// Ends of the link; as many as nodes, of which there are two where the strategy tells nodes apart.
    pub fn ends(&self) -> usize {
        self.ends.unwrap_or_else(|| self.ranks.div_ceil(self.ranks_per_end()))
    }

    /// Ranks of a node, where the strategy tells nodes apart.
    pub fn ranks_per_node(&self) -> usize {
        self.ranks_per_node.unwrap_or_else(|| match self.ranks_per_end() {
            // Its nodes are of one size, and of several ranks.
            1 if self.strategy == StrategyKind::Hsdp.name() => self.ranks,
            size => size,
        })
    }

    fn ranks_per_end(&self) -> usize {
        let has_nodes = self.strategy.parse::<StrategyKind>().is_ok_and(|kind| kind.spec().tells_nodes_apart);
        if has_nodes && self.ranks.is_multiple_of(2) { self.ranks / 2 } else { 1 }
    }

    /// Steps of which any that follow one another do the same together, whichever is the first.
    pub fn period(&self) -> usize {
        let kind = self.strategy.parse::<StrategyKind>().ok().filter(|kind| kind.has(Setting::SyncEvery));
        let steps = kind.map_or(1, |_| self.sync_every.unwrap_or(LocalOptions::default().sync_every));
        usize::try_from(steps).unwrap_or(usize::MAX)
    }

    /// Ranks that take part of the batch.
    pub fn workers(&self) -> usize {
        let serves = self.dedicated_server || self.strategy == StrategyKind::AsyncPs.name();
        if serves && self.ranks > 1 { self.ranks - 1 } else { self.ranks }
    }

    /// Whether every run of it computes the same.
    pub fn is_repeatable(&self) -> bool {
        let staleness = self.staleness.unwrap_or(LocalOptions::default().staleness);
        // So is one of a strategy that this build does not know, as far as it knows.
        self.strategy.parse::<StrategyKind>().ok().is_none_or(|kind| kind.is_repeatable(staleness))
    }

    /// The value of an axis, as a plan writes it.
    pub fn value(&self, axis: Axis) -> String {
        let number = |value: Option<usize>| value.map_or(DEFAULT.into(), |value| value.to_string());
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| DEFAULT.into());
        let switch = |on: bool| if on { "on" } else { "off" }.to_string();
        match axis {
            Axis::Strategy => self.strategy.clone(),
            Axis::Transport => self.transport.clone(),
            Axis::Link => self.link.clone(),
            Axis::Ranks => self.ranks.to_string(),
            Axis::Precision => self.precision.clone(),
            Axis::Wire => self.wire.clone(),
            Axis::Bucket => self.bucket_bytes.to_string(),
            Axis::Overlap => switch(self.overlap),
            Axis::Lanes => self.lanes.to_string(),
            Axis::Congestion => self.congestion.clone(),
            Axis::QuicMtu => self.quic_mtu.map_or("default".into(), |mtu| mtu.to_string()),
            Axis::Seed => self.seed.to_string(),
            Axis::Preset => self.preset.clone(),
            Axis::Batch => self.batch.to_string(),
            Axis::Accumulation => self.accumulation.to_string(),
            Axis::Recompute => switch(self.recompute),
            Axis::Kernels => self.kernels.clone(),
            Axis::Steps => self.steps.to_string(),
            Axis::Threads => self.threads.to_string(),
            Axis::Planted => self.planted.as_ref().map_or("none".into(), |planted| {
                let ms = planted.microseconds as f64 / 1e3;
                planted.rank.map_or(format!("{ms} ms"), |rank| format!("{ms} ms on rank {rank}"))
            }),
            Axis::Variant => self.variant.clone(),
            Axis::Program => match self.program {
                Trainer::Ours => "ours",
                Trainer::Pytorch => "pytorch",
                Trainer::PytorchCompiled => "pytorch-compiled",
            }
            .into(),
            Axis::Alone => switch(self.alone),
            Axis::Layers => number(self.model.layers),
            Axis::Heads => number(self.model.heads),
            Axis::Width => number(self.model.width),
            Axis::Block => number(self.model.block),
            Axis::FirstBucket => number(self.first_bucket_bytes),
            Axis::Fusion => number(self.fusion_bytes),
            Axis::DedicatedServer => switch(self.dedicated_server),
            Axis::RanksPerNode => number(self.ranks_per_node),
            Axis::OneTransport => switch(self.one_transport),
            Axis::Compress => self.compress.clone().unwrap_or_else(|| "none".into()),
            Axis::SyncEvery => self.sync_every.map_or(DEFAULT.into(), |steps| steps.to_string()),
            Axis::Staleness => self.staleness.map_or(DEFAULT.into(), |steps| steps.to_string()),
            Axis::Ends => number(self.ends),
            Axis::Schedule => text(&self.schedule),
            Axis::Clip => text(&self.clip),
            Axis::Optimizer => text(&self.optimizer),
            Axis::ShortSequences => self.short_sequences.map_or("none".into(), |short| short.to_string()),
            Axis::LossScaling => text(&self.loss_scaling),
            Axis::ValidateEvery => self.validation.map_or("never".into(), |validation| validation.every.to_string()),
            Axis::ValidationBatches => number(self.validation.map(|validation| validation.batches)),
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

/// Values that were no finite numbers as what is none.
pub fn numbers(values: &[Option<f64>]) -> Vec<f64> {
    values.iter().map(|value| value.unwrap_or(f64::NAN)).collect()
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
