//! The distributed strategies, each written once against `dyn Communicator`.
//!
//! All of them train on the same batches with the same arithmetic; they differ in who averages which gradients, who updates which
//! parameters, where parameters lie, and by which messages. The trainer keeps *masters*, the f32 parameters that this rank's optimizer
//! updates, apart from the model's own *weights*, which are in the type of computation. A step goes through a [`Strategy`] like this:
//!
//! 1. [`begin`](Strategy::begin), then for each micro-step a pass over the model, which a strategy that keeps no whole model feeds with
//!    [`weights`](Strategy::weights) segment by segment;
//! 2. in the last micro-step [`gradient`](Strategy::gradient) for each segment, in the order in which the backward pass ends them;
//! 3. [`synchronise`](Strategy::synchronise): the averaged gradients of the elements that this rank updates;
//! 4. the trainer clips them and runs the optimizer on the masters, which are [`owned`](Strategy::owned);
//! 5. [`distribute`](Strategy::distribute): the weights that follow from the masters of all ranks.

mod buckets;
mod clock;
pub mod formula;
mod fsdp;
mod hierarchical;
mod layout;
mod ps;
mod sharded_ps;
mod single;
mod zero;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

use comm_core::{Communicator, Error};
use serde::{Deserialize, Serialize};

pub(crate) use clock::Waits;
pub use clock::{Activity, Clock, Operation, Partner, Span};
pub use layout::Layout;

use crate::flat::{DeviceCollectives, Flat, Packer, Weights};
use crate::memory::{self, Category};
use crate::precision::Precision;

/// Which strategy; written as in [`StrategyKind::name`].
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
    /// Horovod: gradients in a fusion buffer, ring all-reduces after the backward pass.
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
}

impl StrategyKind {
    /// Every strategy.
    pub const ALL: [StrategyKind; 9] = [
        StrategyKind::Single,
        StrategyKind::Ps,
        StrategyKind::ShardedPs,
        StrategyKind::Ring,
        StrategyKind::Ddp,
        StrategyKind::Zero1,
        StrategyKind::Zero2,
        StrategyKind::Fsdp,
        StrategyKind::Hierarchical,
    ];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            StrategyKind::Single => "single",
            StrategyKind::Ps => "ps",
            StrategyKind::ShardedPs => "sharded-ps",
            StrategyKind::Ring => "ring",
            StrategyKind::Ddp => "ddp",
            StrategyKind::Zero1 => "zero1",
            StrategyKind::Zero2 => "zero2",
            StrategyKind::Fsdp => "fsdp",
            StrategyKind::Hierarchical => "hierarchical",
        }
    }
}

impl fmt::Display for StrategyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for StrategyKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        StrategyKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = StrategyKind::ALL.map(StrategyKind::name).join(", ");
            format!("`{name}` is no strategy; choose one of {names}")
        })
    }
}

/// Options of the strategies; each takes those that concern it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StrategyOptions {
    /// The type in which gradients travel. Parameters travel in the type of computation.
    pub wire: Precision,
    /// The first bucket of `ddp`, `zero1`, `zero2` and `hierarchical` is closed once it holds this many bytes of f32 gradients. Smaller
    /// than the others, so that communication begins early.
    pub first_bucket_bytes: usize,
    /// Any further bucket is closed once it holds this many.
    pub bucket_bytes: usize,
    /// The fusion buffer of `ring` leaves once it holds this many bytes of f32 gradients (Horovod's fusion threshold).
    pub fusion_bytes: usize,
    /// Whether a bucket leaves while the backward pass goes on, and parameters come before they are needed.
    pub overlap: bool,
    /// Whether the server of `ps` only serves: the others then share the global batch.
    pub dedicated_server: bool,
    /// Ranks of a node, for `hierarchical`; they follow one another. 0: as many as the session's nodes have.
    pub ranks_per_node: usize,
}

impl Default for StrategyOptions {
    fn default() -> Self {
        // PyTorch's 1 MiB and 25 MiB would be one bucket for every model that a CPU trains in minutes.
        StrategyOptions {
            wire: Precision::F32,
            first_bucket_bytes: 256 << 10,
            bucket_bytes: 1 << 20,
            fusion_bytes: 64 << 20,
            overlap: true,
            dedicated_server: false,
            ranks_per_node: 0,
        }
    }
}

impl StrategyOptions {
    /// Ranks that take part of the data, of `ranks`.
    pub fn workers(&self, kind: StrategyKind, ranks: usize) -> usize {
        if self.serves_only(kind, ranks, 0) { ranks - 1 } else { ranks }
    }

    /// Whether `rank` is a server that does not compute.
    pub fn serves_only(&self, kind: StrategyKind, ranks: usize, rank: usize) -> bool {
        kind == StrategyKind::Ps && self.dedicated_server && ranks > 1 && rank == 0
    }
}

/// What a strategy communicates with.
#[derive(Clone)]
pub struct Comms {
    /// All ranks of the job.
    pub world: Arc<dyn Communicator>,
    /// The ranks of this rank's node over a transport of their own, where the session has one.
    pub node: Option<Arc<dyn Communicator>>,
    /// Lends the memory of the device that computes, where `world` works on that.
    pub native: Option<Arc<dyn DeviceCollectives>>,
    /// The same for `node`.
    pub node_native: Option<Arc<dyn DeviceCollectives>>,
}

impl Comms {
    /// Lends memory to the communicator that gradients go through first and come from last with this strategy.
    pub(crate) fn lender(&self, kind: StrategyKind) -> Option<Arc<dyn DeviceCollectives>> {
        match &self.node {
            Some(_) if kind == StrategyKind::Hierarchical => self.node_native.clone(),
            _ => self.native.clone(),
        }
    }
}

/// Takes the weights of a segment, in the type of computation.
pub type Put<'a> = &'a mut dyn FnMut(usize, Weights);

/// How gradients become updated parameters on all ranks.
pub trait Strategy: Send {
    /// The elements of each segment, in forward order, that this rank's optimizer updates; together the ranks' ranges cover every
    /// element, and where they overlap all compute the same.
    fn owned(&self) -> &[Range<usize>];

    /// Whether this rank computes gradients and keeps a model. One that does not is not given any data.
    fn computes(&self) -> bool {
        true
    }

    /// Whether weights are in the model only while a segment uses them.
    fn brings_weights(&self) -> bool {
        false
    }

    /// A pass over the model begins, with gradients or without.
    fn begin(&mut self, training: bool) {
        let _ = training;
    }

    /// The weights of the next segment of the pass, where [`brings_weights`](Strategy::brings_weights): called for each segment that a pass
    /// enters (see [`PassHooks`](crate::segments::PassHooks)), except segment 0 backward. `masters` are this rank's.
    ///
    /// # Errors
    /// The communicator's.
    fn weights(&mut self, segment: usize, masters: &[Flat], clock: &mut Clock) -> comm_core::Result<Weights> {
        let _ = (segment, masters, clock);
        Err(Error::Internal("a strategy that keeps whole models was asked for weights".into()))
    }

    /// The weights that [`weights`](Strategy::weights) returned are in the model: the next ones may come.
    ///
    /// # Errors
    /// The communicator's.
    fn prefetch(&mut self, masters: &[Flat], clock: &mut Clock) -> comm_core::Result<()> {
        let _ = (masters, clock);
        Ok(())
    }

    /// Takes one segment's gradients (already weighed so that the mean over ranks is the global batch's): in f32 in host memory, or on
    /// the device in the type of computation. Segments come in the order in which the backward pass ends them: last to first.
    ///
    /// # Errors
    /// The communicator's.
    fn gradient(&mut self, segment: usize, grads: Flat, clock: &mut Clock) -> comm_core::Result<()>;

    /// Returns the gradients, averaged over all ranks that compute, of the owned range of each segment: in host memory where the
    /// communicator moved bytes. Called after every segment's gradients came.
    ///
    /// # Errors
    /// The communicator's.
    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Flat>>;

    /// Puts the weights that follow from all ranks' `masters` (the owned range of each segment) into the model, where it keeps any.
    ///
    /// # Errors
    /// The communicator's.
    fn distribute(&mut self, masters: &[Flat], put: Put<'_>, clock: &mut Clock) -> comm_core::Result<()>;
}

/// The strategy for `segments` (their lengths in elements, forward order) of a model that computes in `precision`.
///
/// # Errors
/// `InvalidArgument` for `single` on several ranks, for a dedicated server without workers, and for nodes that do not divide the ranks.
/// For `hierarchical` also those of [`Communicator::split`]: all ranks call this together.
pub fn build(
    kind: StrategyKind,
    comms: &Comms,
    segments: &[usize],
    options: &StrategyOptions,
    precision: Precision,
) -> comm_core::Result<Box<dyn Strategy>> {
    let layout = Layout::new(segments);
    let comm = comms.world.clone();
    let native = comms.lender(kind);
    let wire = Packer::new(options.wire, native.clone());
    let weights = Packer::new(precision, native);
    Ok(match kind {
        StrategyKind::Single => Box::new(single::Single::new(&*comm, layout, weights)?),
        StrategyKind::Ps => Box::new(ps::ParameterServer::new(comm, layout, options, wire, weights)?),
        StrategyKind::ShardedPs => Box::new(sharded_ps::ShardedServer::new(comm, layout, wire, weights)),
        StrategyKind::Ring => Box::new(buckets::Buckets::fused(comm, layout, options, wire, weights)),
        StrategyKind::Ddp => Box::new(buckets::Buckets::overlapped(comm, layout, options, wire, weights)),
        StrategyKind::Zero1 => Box::new(zero::Zero::new(comm, layout, options, (wire, weights), zero::Stage::One)),
        StrategyKind::Zero2 => Box::new(zero::Zero::new(comm, layout, options, (wire, weights), zero::Stage::Two)),
        StrategyKind::Fsdp => Box::new(fsdp::Fsdp::new(comm, layout, options, wire, weights)),
        StrategyKind::Hierarchical => Box::new(hierarchical::Hierarchical::new(comms, layout, options, wire, weights)?),
    })
}

/// Puts weights that this rank has the masters of.
fn put_own(masters: &[Flat], packer: &Packer, put: Put<'_>, clock: &mut Clock) {
    for (segment, values) in masters.iter().enumerate() {
        let weights = clock.unpack(|| memory::within(Category::Parameters, || packer.weights(values)));
        put(segment, weights);
    }
}
