//! The distributed strategies, each written once against [`Channels`].
//!
//! All of them train on the same batches with the same arithmetic; they differ in who averages which gradients or parameters, who updates
//! which, where they lie, by which messages, and in which order that happens. The trainer keeps *masters*, the f32 parameters
//! that this rank's optimizer updates, apart from the model's own *weights*, which are in the type of computation;
//! where both are all of the model in f32 in host memory, they may be one, which the trainer [lends](LocalStep::lend) to the model between updates.
//!
//! A [`Strategy`] owns the order of its [`step`](Strategy::step). What it needs is handed to it: what this rank computes by itself, a
//! [`LocalStep`], and its channels. It returns a [`StepOutcome`]: what was to be sent, and whether the replicas are equal now. Those that
//! average gradients in every step share one order, [`synchronous`], and train as one device does.
//!
//! With the others each rank takes steps of its own, whose loss, gradient norm, clipping and overflow are of its own rows, and the ranks'
//! parameters differ until they are synchronised. After the last step of a run they are, so that all ranks end with one model. Before that,
//! the validation loss is the mean of what each rank's model makes of the rank's windows, and a checkpoint has the mean of all ranks' parameters.
//! With `async-ps`, whose workers are not all in the same step, it has the server's.

mod arrivals;
mod aside;
mod async_ps;
mod average;
mod buckets;
mod channels;
mod compress;
mod diloco;
pub mod formula;
mod fsdp;
mod hierarchical;
mod layout;
mod levels;
mod local;
mod local_sgd;
mod own_step;
mod ps;
mod settings;
mod sharded_ps;
mod single;
mod sparta;
mod synchronous;
mod zero;

use std::ops::Range;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use comm_core::{Communicator, Error};
use isocomm::Nodes;
use serde::{Deserialize, Serialize};

pub use async_ps::Staleness;
pub use channels::Channels;
pub use compress::Compression;
pub use layout::Layout;
pub use local::{
    CheckedGradients, DuringPass, KeptValues, KeptVector, LocalStep, Ranks, SavedKept, StepOutcome, Strategy,
};
pub use settings::{LocalOptions, Setting};
pub use synchronous::{Synchronous, put_own, synchronous};

use crate::flat::DeviceCollectives;
use crate::optim::LossScaling;
use crate::precision::Precision;
use crate::segments::SegmentInfo;
use formula::{Expected, Run};

/// Which strategy; written as in [`Spec::name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StrategyKind {
    /// One device, no communication.
    Single,
    /// Rank 0 serves: it averages everyone's gradients, updates the parameters and sends them to everyone. It also computes, unless it
    /// is dedicated.
    Ps,
    /// Every rank computes, and serves one shard of the parameters.
    ShardedPs,
    /// Horovod: fusion buffers of gradients, all-reduced around a ring while the backward pass goes on.
    Ring,
    /// PyTorch's DistributedDataParallel: buckets of gradients, all-reduced while the backward pass goes on.
    Ddp,
    /// ZeRO stage 1: every rank keeps optimizer state for a shard of the parameters.
    Zero1,
    /// ZeRO stage 2: and gradients of that shard only.
    Zero2,
    /// Fully sharded data parallel, ZeRO stage 3: and parameters of that shard only.
    Fsdp,
    /// Gradients are averaged inside each node first, then between nodes, shard by shard.
    Hierarchical,
    /// Hybrid sharded data parallel: fully sharded inside each node, with a replica in every node.
    Hsdp,
    /// Rank 0 serves: it applies each worker's gradients as they arrive, and nobody waits for others within a bound.
    AsyncPs,
    /// Every rank trains by itself, and parameters are averaged every few steps.
    LocalSgd,
    /// Every rank trains by itself, and an outer optimizer steps by the mean change of parameters every few steps.
    Diloco,
    /// The same by fragments of the model in turn, while training goes on.
    StreamingDiloco,
    /// Every rank trains by itself, and a few random parameters are averaged in every step.
    Sparta,
}

/// A strategy's entry: what names it, describes it, builds it, and says what it sends. Command lines, help texts and tables read it.
#[derive(Debug)]
pub struct Spec {
    /// Its name on the command line.
    pub name: &'static str,
    /// What it is, in a few words.
    pub about: &'static str,
    /// Whether ranks average gradients in every step, and so compute what one device computes on the global batch, but for rounding; see
    /// [`StrategyOptions::is_one_device`].
    pub is_one_device: bool,
    /// Whether the ranks of a node may have a communicator of their own.
    pub tells_nodes_apart: bool,
    /// Whether gradients or parameters leave in buckets of [`StrategyOptions::bucket_bytes`].
    pub in_buckets: bool,
    /// Whether communication runs beside the backward pass, unless [`StrategyOptions::overlap`] is off.
    pub overlaps: bool,
    /// Which of [`StrategyOptions::local`] it takes.
    pub settings: &'static [Setting],
    /// Builds it. All ranks call this together.
    build: fn(&Setup<'_>) -> comm_core::Result<Built>,
    /// What a rank sends in one step; where that differs from step to step, in one that synchronises all parameters.
    expected: fn(&Run<'_>, &Layout, usize) -> Expected,
}

/// A strategy of one rank, and what belongs to it.
pub struct Built {
    /// The strategy.
    pub strategy: Box<dyn Strategy>,
    /// What it communicates through.
    pub channels: Channels,
    /// The elements of each segment, in forward order, that this rank's optimizer updates; together the ranks' ranges cover every element,
    /// and where they overlap, all ranks that have it compute the same by the time that [`StepOutcome::replicas_agree`].
    pub owned: Vec<Range<usize>>,
    /// Whether this rank computes gradients and keeps a model. One that does not is not given any data.
    pub computes: bool,
    /// Whether the ranks, which all update every parameter, have values of their own of parameters and moments between two synchronisations.
    pub own_values: bool,
}

impl Built {
    /// Of a rank that computes, and updates as others do what they update, too.
    pub fn new(strategy: impl Strategy + 'static, channels: Channels, owned: Vec<Range<usize>>) -> Self {
        Built { strategy: Box::new(strategy), channels, owned, computes: true, own_values: false }
    }

    /// Of a rank that trains by itself for a time.
    pub fn alone(strategy: impl Strategy + 'static, channels: Channels, layout: &Layout) -> Self {
        Built { own_values: true, ..Built::new(strategy, channels, layout.everything()) }
    }
}

comm_core::names!(
    pub StrategyKind, "strategy" by StrategyKind::spec_name:
    Single, Ps, ShardedPs, Ring, Ddp, Zero1, Zero2, Fsdp, Hierarchical, Hsdp, AsyncPs, LocalSgd, Diloco, StreamingDiloco,
    Sparta,
);

impl StrategyKind {
    /// Its entry.
    pub const fn spec(self) -> &'static Spec {
        match self {
            StrategyKind::Single => &single::SPEC,
            StrategyKind::Ps => &ps::SPEC,
            StrategyKind::ShardedPs => &sharded_ps::SPEC,
            StrategyKind::Ring => &buckets::RING,
            StrategyKind::Ddp => &buckets::DDP,
            StrategyKind::Zero1 => &zero::ZERO1,
            StrategyKind::Zero2 => &zero::ZERO2,
            StrategyKind::Fsdp => &fsdp::FSDP,
            StrategyKind::Hierarchical => &hierarchical::SPEC,
            StrategyKind::Hsdp => &fsdp::HSDP,
            StrategyKind::AsyncPs => &async_ps::SPEC,
            StrategyKind::LocalSgd => &local_sgd::SPEC,
            StrategyKind::Diloco => &diloco::DILOCO,
            StrategyKind::StreamingDiloco => &diloco::STREAMING,
            StrategyKind::Sparta => &sparta::SPEC,
        }
    }

    const fn spec_name(self) -> &'static str {
        self.spec().name
    }

    /// The names of all strategies, with `separator` between them.
    pub fn names(separator: &str) -> String {
        StrategyKind::ALL.map(StrategyKind::name).join(separator)
    }

    /// Those that compute what one device computes.
    pub fn of_one_device() -> impl Iterator<Item = Self> {
        StrategyKind::ALL.into_iter().filter(|kind| kind.spec().is_one_device)
    }

    /// The names of those that compute what one device computes, as a command line takes them.
    pub fn list_of_one_device() -> &'static str {
        static LIST: LazyLock<String> =
            LazyLock::new(|| StrategyKind::of_one_device().map(StrategyKind::name).collect::<Vec<_>>().join(","));
        &LIST
    }

    /// Whether it takes this setting.
    pub fn has(self, setting: Setting) -> bool {
        self.spec().settings.contains(&setting)
    }
}

/// Options of the strategies; each takes those that concern it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StrategyOptions {
    /// The type in which gradients travel, and parameters that are averaged. Others travel in the type of computation.
    pub wire: Precision,
    /// The first bucket of strategies [with buckets](Spec::in_buckets) is closed once it holds this many bytes of f32. Smaller
    /// than the others, so that communication begins early.
    pub first_bucket_bytes: usize,
    /// Any further bucket is closed once it holds this many.
    pub bucket_bytes: usize,
    /// A fusion buffer of `ring` leaves once it holds this many bytes of f32 gradients (Horovod's fusion threshold).
    pub fusion_bytes: usize,
    /// Whether a bucket leaves while the backward pass goes on, and parameters come before they are needed.
    pub overlap: bool,
    /// Whether the server of `ps` only serves: the others then share the global batch.
    pub dedicated_server: bool,
    /// Ranks of a node, for `hierarchical` and `hsdp`: those of a machine in rank order, the last node of each perhaps with fewer. 0: as many as its
    /// launcher has started there, or all.
    pub ranks_per_node: usize,
    /// How gradients are compressed on their way, by the strategies that [can](Compression::suits).
    pub compress: Compression,
    /// Settings of strategies whose ranks do not all average gradients in every step.
    pub local: LocalOptions,
}

impl Default for StrategyOptions {
    fn default() -> Self {
        // PyTorch's 1 MiB and 25 MiB would be one bucket for every model that a CPU trains in minutes, and so would Horovod's 64 MiB.
        StrategyOptions {
            wire: Precision::F32,
            first_bucket_bytes: 256 << 10,
            bucket_bytes: 1 << 20,
            fusion_bytes: 1 << 20,
            overlap: true,
            dedicated_server: false,
            ranks_per_node: 0,
            compress: Compression::None,
            local: LocalOptions::default(),
        }
    }
}

impl StrategyOptions {
    /// Whether a run of `kind` computes what one device computes on the global batch, but for rounding; compressed gradients are others.
    pub fn is_one_device(&self, kind: StrategyKind) -> bool {
        kind.spec().is_one_device && !self.compress.is_on()
    }

    /// Whether a run of `kind` may scale its loss like this.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the options as a user types them, where gradients of several scales would meet.
    pub fn check_scaling(&self, kind: StrategyKind, scaling: LossScaling) -> comm_core::Result<()> {
        let why = match kind {
            _ if scaling == LossScaling::Off => return Ok(()),
            _ if self.compress.is_on() => {
                format!(
                    "--compress {}, which carries gradients over to the next step, where the scale may differ",
                    self.compress
                )
            }
            StrategyKind::AsyncPs => format!("--strategy {kind}, in which each rank would have a scale of its own"),
            _ => return Ok(()),
        };
        Err(Error::invalid(format!("--loss-scale {scaling} cannot be combined with {why}; give --loss-scale off")))
    }

    /// Ranks that take part of the data, of `ranks`.
    pub fn workers(&self, kind: StrategyKind, ranks: usize) -> usize {
        if self.serves_only(kind, ranks, 0) { ranks - 1 } else { ranks }
    }

    /// Whether `rank` is a server that does not compute.
    pub fn serves_only(&self, kind: StrategyKind, ranks: usize, rank: usize) -> bool {
        let serves = kind == StrategyKind::AsyncPs || (kind == StrategyKind::Ps && self.dedicated_server);
        serves && ranks > 1 && rank == 0
    }
}

/// What a strategy communicates with.
#[derive(Clone)]
pub struct Comms {
    /// All ranks of the job.
    pub world: Arc<dyn Communicator>,
    /// Who shares a node.
    pub nodes: Nodes,
    /// The ranks of this rank's node over a transport of their own, where the session has one.
    pub node: Option<Arc<dyn Communicator>>,
    /// Lends the memory of the device that computes, where `world` works on that.
    pub native: Option<Arc<dyn DeviceCollectives>>,
    /// The same for `node`.
    pub node_native: Option<Arc<dyn DeviceCollectives>>,
    /// How long an operation may take.
    pub timeout: Duration,
}

impl Comms {
    /// Lends memory to the communicator that gradients go through first and come from last with this strategy.
    pub(crate) fn lender(&self, kind: StrategyKind) -> Option<Arc<dyn DeviceCollectives>> {
        match &self.node {
            Some(_) if kind.spec().tells_nodes_apart => self.node_native.clone(),
            _ => self.native.clone(),
        }
    }
}

/// What a strategy is built for.
#[derive(Clone, Copy)]
pub struct Setup<'a> {
    /// What it communicates with.
    pub comms: &'a Comms,
    /// Elements of each segment of the model, in forward order.
    pub segments: &'a [usize],
    /// What tensors they consist of; empty where nothing is compressed as a matrix.
    pub tensors: &'a [SegmentInfo],
    /// Its options.
    pub options: &'a StrategyOptions,
    /// Type of computation.
    pub precision: Precision,
    /// Micro-steps a step.
    pub accumulation: usize,
    /// Seed of whatever is random, the same on all ranks.
    pub seed: u64,
    /// The first step of this run, from 0: another one where it goes on from a checkpoint.
    pub first_step: u64,
    /// Whether ranks compare their calls before every operation.
    pub checked: bool,
}

impl Setup<'_> {
    fn layout(&self) -> Layout {
        Layout::new(self.segments)
    }

    /// Channels among all ranks.
    fn channels(&self) -> Channels {
        Channels::among_all(self.comms, self.options, self.precision)
    }

    /// What this rank sends in a step of `kind`.
    pub(crate) fn expected(&self, kind: StrategyKind) -> Expected {
        self.expected_by(kind.spec().expected)
    }

    /// What it sends for what a formula is of.
    fn expected_by(&self, formula: impl Fn(&Run<'_>, &Layout, usize) -> Expected) -> Expected {
        let Setup { comms, tensors, options, precision, accumulation, checked, .. } = *self;
        let (ranks, nodes) = (comms.world.world_size(), &comms.nodes);
        let run = Run { options, tensors, precision, accumulation, ranks, nodes, checked };
        formula(&run, &self.layout(), comms.world.rank())
    }
}

/// The strategy and its channels.
///
/// # Errors
/// `InvalidArgument` for `single` on several ranks, for a dedicated server without workers, for `hsdp` in nodes of unequal sizes or of one rank each, for a node's
/// communicator that has other ranks than the node, and those of [`LocalOptions::check`] and [`Compression::check`].
/// Where nodes are told apart also those of [`Communicator::split`]: all ranks call this together.
pub fn build(kind: StrategyKind, setup: &Setup<'_>) -> comm_core::Result<Built> {
    setup.options.local.check(kind)?;
    setup.options.compress.check(kind, setup.options, setup.comms.world.world_size())?;
    (kind.spec().build)(setup)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strategy_has_one_name_everywhere() {
        for kind in StrategyKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        let error = "sgd".parse::<StrategyKind>().unwrap_err().to_string();
        assert!(error.contains("single, ps, ") && error.contains("'sgd'"), "{error}");
    }

    #[test]
    fn the_tables_for_users_are_those_of_the_entries() {
        let read = |name: &str| std::fs::read_to_string(format!("{}/../{name}", env!("CARGO_MANIFEST_DIR"))).unwrap();
        let of_page = |page: &str| {
            let rows = page.lines().skip_while(|line| !line.starts_with("| strategy |")).skip(2);
            rows.take_while(|line| line.starts_with('|')).map(String::from).collect::<Vec<String>>()
        };
        let book = [of_page(&read("docs/src/strategies.md")), of_page(&read("docs/src/slow-networks.md"))].concat();
        for rows in [of_page(&read("README.md")), book] {
            assert_eq!(rows.len(), StrategyKind::ALL.len(), "{rows:#?}");
            for (kind, row) in StrategyKind::ALL.into_iter().zip(rows) {
                let start = format!("| `{kind}` | {}", kind.spec().about);
                assert!(row.starts_with(&start), "the row of `{kind}` is to start with {start:?}: {row}");
            }
        }
    }
}
