//! The training loop: one for every strategy, transport and device.

mod finish;
mod history;
mod local;
mod number;
mod optimizers;
mod peaks;
mod rank;
mod save;
#[cfg(test)]
mod tests;
mod traffic;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::control::ControlExt;
use comm_core::{Communicator, Control, Deadline, Error};
use isocomm::{Connected, Counters, Medium, Nodes, Properties, TransportOptions, threads, threads_in_nodes};
use serde::{Deserialize, Serialize};

use crate::batches::{LastBatch, ShortSequences};
use crate::checkpoint::InitialWeights;
use crate::checkpoint::sharded::Best;
use crate::config::ModelConfig;
use crate::corpus::Corpus;
pub use crate::error::TrainError;
use crate::flat::DeviceCollectives;
use crate::memory;
use crate::model::KernelChoice;
use crate::optim::{LearningRate, LossScaling, OptimizerConfig};
use crate::precision::Precision;
use crate::record::{Operation, Span};
use crate::strategy::formula::Expected;
use crate::strategy::{self, Staleness, StrategyKind, StrategyOptions};
use rank::{Build, Trainer};
pub use save::{Checkpoints, Keep, Restarts, SaveReport, writing_time};

/// Everything that determines a run, apart from the corpus and the transport. Equal on all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainConfig {
    /// The model's shape.
    pub model: ModelConfig,
    /// Who averages and updates what.
    pub strategy: StrategyKind,
    /// Options of the strategy.
    pub options: StrategyOptions,
    /// Type of weights, activations and products of matrices. Masters and optimizer are f32 always.
    pub precision: Precision,
    /// Whether activations are computed again in the backward pass instead of being kept.
    pub recompute: bool,
    /// By which kernels layers and loss are computed.
    pub kernels: KernelChoice,
    /// How gradients are kept from vanishing in a 16-bit type.
    pub loss_scaling: LossScaling,
    /// Multiplies the loss that is differentiated, not the one that is reported: 1, except to study what small gradients do.
    pub loss_factor: f64,
    /// Seed of weights, data order and dropout.
    pub seed: u64,
    /// Share of elements that training drops, at GPT-2's three places: what embeddings add up to, attention weights, and what a block adds to the
    /// residual stream.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub dropout: f64,
    /// Weights to start from, instead of those that the seed gives. A run that goes on from a checkpoint of its whole state has that one's.
    #[serde(default)]
    pub initial: Option<InitialWeights>,
    /// Optimizer steps.
    pub steps: u64,
    /// Sequences a step, over all ranks and micro-steps.
    pub global_batch: usize,
    /// Micro-steps a step: gradients are summed over them, and only then communicated.
    pub accumulation: usize,
    /// What becomes of the rows at the end of an epoch that do not fill a step.
    pub last_batch: LastBatch,
    /// First steps with shorter sequences, where there are such.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub short_sequences: Option<ShortSequences>,
    /// Learning rate by step.
    pub learning_rate: LearningRate,
    /// Optimizer and its constants.
    pub optimizer: OptimizerConfig,
    /// Largest global gradient norm, after synchronisation; 0 turns clipping off.
    pub clip: f64,
    /// Validation every so many steps and at the end; 0 for never.
    pub eval_every: u64,
    /// Validation batches of `global_batch` sequences, at most.
    pub eval_batches: usize,
}

impl TrainConfig {
    /// Ten steps of 12 sequences in f32 at a learning rate of 1e-3, with gradients clipped to a norm of 1, and nothing else.
    pub fn of(model: ModelConfig, strategy: StrategyKind) -> Self {
        TrainConfig {
            model,
            strategy,
            options: StrategyOptions::default(),
            precision: Precision::F32,
            recompute: false,
            kernels: KernelChoice::default(),
            loss_scaling: LossScaling::Off,
            loss_factor: 1.0,
            seed: 1337,
            dropout: 0.0,
            initial: None,
            steps: 10,
            global_batch: 12,
            accumulation: 1,
            last_batch: LastBatch::Drop,
            short_sequences: None,
            learning_rate: LearningRate::Constant { rate: 1e-3 },
            optimizer: OptimizerConfig::default(),
            clip: 1.0,
            eval_every: 0,
            eval_batches: 1,
        }
    }

    /// Pieces into which each row of step `step`, counted from 0, is cut.
    pub(crate) fn pieces(&self, step: u64) -> usize {
        self.short_sequences.map_or(1, |short| short.pieces(self.model.block_size, step))
    }
}

/// Whether nothing is dropped, which is what a configuration without the setting means.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(share: &f64) -> bool {
    *share == 0.0
}

/// What connects a rank to the others.
pub struct Session {
    /// The job's communicator.
    pub comm: Arc<dyn Communicator>,
    /// Its control plane.
    pub control: Arc<dyn Control>,
    /// Counts what passes, where the transport is one of ours.
    pub counters: Option<Arc<Counters>>,
    /// What is known of the transport.
    pub properties: Properties,
    /// How long to wait for the others at the end.
    pub timeout: Duration,
    /// Ranks that share this process, for figures that are the process's.
    pub ranks_in_process: usize,
    /// Lends the memory of the device that computes, where `comm` works on that instead of on bytes in host memory.
    pub native: Option<Arc<dyn DeviceCollectives>>,
    /// Who shares a node, for strategies that tell nodes apart; `None` for nodes of [`StrategyOptions::ranks_per_node`] ranks that follow one another.
    pub nodes: Option<Nodes>,
    /// A second communicator among the ranks of this rank's node, for strategies that tell nodes apart.
    pub node: Option<Node>,
    /// Whether ranks compare their calls before every operation, which takes messages of its own.
    pub checked: bool,
}

/// What connects the ranks of a node.
pub struct Node {
    /// Its communicator, in the order of the job.
    pub comm: Arc<dyn Communicator>,
    /// Counts what passes inside the node.
    pub counters: Option<Arc<Counters>>,
    /// What is known of its transport.
    pub properties: Properties,
    /// Number of ranks of the node.
    pub size: usize,
    /// Lends the memory of the device that computes, where `comm` works on that instead of on bytes in host memory.
    pub native: Option<Arc<dyn DeviceCollectives>>,
}

impl From<isocomm::Node> for Node {
    fn from(isocomm::Node { comm, counters, properties, size, .. }: isocomm::Node) -> Self {
        Node { comm, counters, properties, size, native: None }
    }
}

impl Session {
    /// That of a rank that was connected with `options`.
    pub fn new(connected: Connected, options: &TransportOptions) -> Self {
        let Connected { comm, control, counters, properties, .. } = connected;
        let are_threads = properties.transport.medium() == Medium::Threads;
        Session {
            ranks_in_process: if are_threads { comm.world_size() } else { 1 },
            comm,
            control,
            counters,
            properties,
            timeout: options.timeout,
            native: None,
            nodes: None,
            node: None,
            checked: options.checked,
        }
    }

    /// Those of a job whose ranks are threads of this process, in rank order.
    ///
    /// # Errors
    /// Those of [`isocomm::threads`].
    pub fn threads(ranks: usize, options: &TransportOptions) -> Result<Vec<Session>, Error> {
        Ok(threads(ranks, options)?.into_iter().map(|connected| Session::new(connected, options)).collect())
    }

    /// As [`threads`](Session::threads), in nodes.
    ///
    /// # Errors
    /// Those of [`isocomm::threads_in_nodes`].
    pub fn threads_in_nodes(nodes: &Nodes, options: &TransportOptions) -> Result<Vec<Session>, Error> {
        let ranks = threads_in_nodes(nodes, options)?.into_iter();
        let session = |(connected, node): (Connected, isocomm::Node)| Session {
            nodes: Some(nodes.clone()),
            node: Some(node.into()),
            ..Session::new(connected, options)
        };
        Ok(ranks.map(session).collect())
    }

    /// Whether the job's transport counts and that of the node, NCCL, does not: then counts are of what is sent between nodes.
    pub(crate) fn counts_between_nodes(&self) -> bool {
        self.counters.is_some() && self.node.as_ref().is_some_and(|node| node.counters.is_none())
    }
}

/// One step, as this rank saw it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean training loss over the global batch, in nats a token, before the update; a skipped step's may not be finite. Of this rank's rows
    /// where each rank takes steps of its own.
    #[serde(with = "number")]
    pub loss: f64,
    /// Global norm of the averaged gradient, or of this rank's own, before clipping; not finite in a skipped step.
    #[serde(with = "number")]
    pub grad_norm: f64,
    /// Whether all ranks skipped the update, or this one its own, because gradients or the loss had overflowed.
    pub skipped: bool,
    /// What the loss was multiplied by before the backward pass.
    pub loss_scale: f64,
    /// Epoch that the step belongs to, from 1.
    pub epoch: u64,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Wall time of the step.
    pub ms: f64,
    /// Tokens of all ranks a second.
    pub tokens_per_s: f64,
    /// FLOP/s as a share of what the ranks' matrix products reach by themselves: see [`Summary::matrix_formula`].
    pub matrix_share: f64,
    /// Model FLOP/s utilisation, a share of what the devices can do on paper: see [`Summary::mfu_formula`]; `None` where that is not known.
    pub mfu: Option<f64>,
    /// The step's parts, in milliseconds.
    pub parts: Parts,
    /// Payload bytes that this rank sent for gradients and parameters; what it leaves out: see [`RankReport::between_nodes`].
    pub bytes_sent: Option<u64>,
    /// Messages that this rank sent for them.
    pub messages_sent: Option<u64>,
    /// Operations on gradients and parameters that this rank took part in.
    pub operations: u64,
    /// Processor time of this process over wall time and the threads that may compute, of all ranks in it; 1 is full use.
    pub cpu_utilization: f64,
    /// Mean utilisation of the GPU in percent, where one computes and tells.
    pub gpu_utilization_percent: Option<f64>,
    /// The most memory in use on it during the step, by whomever.
    pub gpu_memory_bytes: Option<u64>,
    /// The most memory allocated so far in the run, by this process over the ranks in it; `None` without the counting allocator.
    pub peak_memory_bytes: Option<u64>,
    /// The same by what it is for, of the whole process, with what is allocated now.
    pub memory: Option<memory::Usage>,
    /// Memory that the whole process asked for during the step; `None` without the counting allocator.
    pub allocations: Option<memory::Allocations>,
    /// What this rank copied and filled with zeros of gradients and parameters in host memory.
    #[serde(default)]
    pub copies: memory::Copies,
    /// What the training thread did, in order. Not written out.
    #[serde(skip)]
    pub spans: Vec<Span>,
    /// What was communicated meanwhile, in the order in which it was started. Not written out.
    #[serde(skip)]
    pub communications: Vec<Operation>,
}

/// Where a step's time went on one rank, in milliseconds. The parts follow one another, each was measured by itself, and they leave out
/// little.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Parts {
    /// Reading the batch.
    #[serde(with = "number")]
    pub data: f64,
    /// Forward and backward pass, and waiting for a device that computes them by itself: see [`Activity`](crate::record::Activity).
    #[serde(with = "number")]
    pub compute: f64,
    /// Casting and concatenating gradients, and reading them back or lending them to the communicator.
    #[serde(with = "number")]
    pub pack: f64,
    /// Waiting for gradients and parameters of other ranks.
    #[serde(with = "number")]
    pub exposed: f64,
    /// Waiting for the other ranks' loss and gradient norm; with a parameter server that is where its workers wait for it to receive
    /// everyone's gradients.
    #[serde(with = "number")]
    pub scalars: f64,
    /// Cutting, casting and uploading what arrived.
    #[serde(with = "number")]
    pub unpack: f64,
    /// Gradient norm and optimizer, and waiting for a device that computes them by itself.
    #[serde(with = "number")]
    pub optimizer: f64,
    /// Not a part of the sum: how long at least one operation on gradients or parameters was under way.
    #[serde(with = "number")]
    pub communication: f64,
    /// Not a part of the sum: how much of `communication` was hidden behind other work.
    #[serde(with = "number")]
    pub hidden: f64,
}

/// The whole run, equal on all ranks but for the parts that say otherwise; where each rank takes steps of its own, so do loss, gradient norm
/// and skipped steps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// Optimizer steps taken.
    pub steps: u64,
    /// SHA-256 of all masters; equal on all ranks wherever the strategy has the replicas equal after the last step, and the weights of each
    /// rank's model are these in the type of computation, which was checked.
    pub weights_hash: String,
    /// Loss of the last training step whose loss is finite, as that of every step is but of some that were skipped.
    #[serde(with = "number")]
    pub final_loss: f64,
    /// Last validation loss.
    pub validation_loss: Option<f64>,
    /// Validation loss after so many steps.
    #[serde(with = "number::pairs")]
    pub validations: Vec<(u64, f64)>,
    /// Training loss of each step.
    #[serde(with = "number::list")]
    pub losses: Vec<f64>,
    /// Global norm of the averaged gradient of each step, before clipping.
    #[serde(with = "number::list")]
    pub grad_norms: Vec<f64>,
    /// Epoch of each step, from 1.
    pub epochs: Vec<u64>,
    /// Seconds from the first step to the end of each.
    #[serde(with = "number::list")]
    pub seconds: Vec<f64>,
    /// Steps skipped because gradients or the loss had overflowed.
    pub skipped_steps: u64,
    /// Median tokens a second of all ranks, over the steps that were not skipped, without the first two where there are more than four.
    /// Where each rank takes steps of its own and only some synchronise, this and all other medians are means.
    /// Of a run of more than 16,384 steps this and all other medians of times are those of at least half as many, evenly spread over it.
    #[serde(with = "number")]
    pub tokens_per_s: f64,
    /// Median milliseconds a step, likewise.
    #[serde(with = "number")]
    pub step_ms: f64,
    /// Median of each part, likewise; the largest exposed time over ranks is in `ranks`.
    pub parts: Parts,
    /// Each rank's own figures.
    pub ranks: Vec<RankReport>,
    /// Median FLOP/s as a share of what the ranks' matrix products reach by themselves.
    #[serde(with = "number")]
    pub matrix_share: f64,
    /// How `matrix_share` was computed.
    pub matrix_formula: String,
    /// Median model FLOP/s utilisation, a share of what the devices can do on paper; `None` where that is not known.
    pub mfu: Option<f64>,
    /// How `mfu` was computed, or why it is not known.
    pub mfu_formula: String,
    /// Facts about the transport, from rank 0, and under [`NODES`] who shares a node.
    pub transport: Vec<(String, String)>,
    /// Where the checkpoint is; `None` where none was to be saved, or could be.
    pub checkpoint: Option<PathBuf>,
    /// Steps that an earlier run had taken, from whose checkpoint this one went on. Lists of steps and all figures are of the others.
    pub resumed_at: Option<u64>,
    /// How often the ranks were started again before this run came to its end.
    pub restarts: Restarts,
}

/// The name of the fact that says which nodes a strategy has told apart.
pub const NODES: &str = "nodes";

/// One rank's own figures.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Whether it computes; a dedicated parameter server does not.
    pub computes: bool,
    /// Mean payload bytes sent a step for gradients and parameters, as counted, without fraction; `None` where nothing counts.
    pub bytes_counted: Option<u64>,
    /// The same as the strategy expected it, by its formula.
    pub bytes_expected: u64,
    /// Whether every step sent what its strategy expected of it: the same in each, or whatever it does in which. Skipped steps, which end
    /// early, are left out of this and all other figures, unless they sent all the same.
    pub bytes_steady: bool,
    /// Payload bytes of scalars (loss, norms) sent a step.
    pub scalar_bytes: Option<u64>,
    /// Header bytes sent a step.
    pub framing_bytes: Option<u64>,
    /// Messages sent a step for gradients and parameters, as counted.
    pub messages: Option<u64>,
    /// The same by the formula, with what is sent inside a node apart.
    pub expected: Expected,
    /// Payload bytes and messages of them sent inside the node, as counted, where it has a transport of its own that counts.
    pub node_sent: Option<(u64, u64)>,
    /// Whether bytes and messages, as counted and by the formula, are those sent between nodes only, because the node's own transport,
    /// NCCL, counts nothing.
    pub between_nodes: bool,
    /// Mean operations on gradients and parameters a step; by the formula in [`expected`](Self::expected).
    pub operations: u64,
    /// Steps that this rank's optimizers took in the whole run, by their own count: the fewest and the most over segments. Both are the
    /// steps of the run, less those that were skipped; on the server of `async-ps`, which takes one for each worker's gradients unless its bound of
    /// staleness is 0, as many times that as there are workers.
    pub optimizer_steps: (u64, u64),
    /// Median of the parts of a step.
    pub parts: Parts,
    /// Median utilisation of the processor: see [`StepReport::cpu_utilization`].
    #[serde(with = "number")]
    pub cpu_utilization: f64,
    /// Median utilisation of the GPU, in percent.
    pub gpu_utilization: Option<f64>,
    /// Peak resident memory of the process, divided by the ranks that share it.
    pub peak_rss_bytes: u64,
    /// Memory of this process from the first step to the last, by what it is for; all ranks in it together. `None` without the counting
    /// allocator.
    pub memory: Option<memory::Usage>,
    /// Memory that this process asked for in a step, all ranks in it together: medians of each figure. `None` without the counting allocator.
    pub allocations: Option<memory::Allocations>,
    /// Of the gradients that this rank has applied as a server that does not wait for all workers'; `None` on all other ranks.
    #[serde(default)]
    pub staleness: Option<Staleness>,
    /// What this rank copied and filled with zeros of gradients and parameters in a step: medians of each figure.
    #[serde(default)]
    pub copies: memory::Copies,
    /// Hash of this rank's masters, all put together.
    pub weights_hash: String,
}

/// Receives what happens during a run, on one rank.
pub trait Observer {
    /// At which address of which interface this rank listens for the data of others, of a job that ranks on other machines may be part of.
    fn listening(&mut self, _address: IpAddr, _interface: &str) {}
    /// With how many threads each rank computes, in order, where that was not given.
    fn threads(&mut self, _of_ranks: &[usize]) {}
    /// Who shares a node, before the first step, of strategies that tell nodes apart.
    fn nodes(&mut self, _nodes: &Nodes) {}
    /// Before the first step.
    fn started(&mut self, _steps: u64) {}
    /// The batch of a step is about to be read; what this takes counts as reading. Steps are counted from 1.
    fn reading(&mut self, _step: u64) {}
    /// After each step.
    fn step(&mut self, _report: &StepReport) {}
    /// Something went wrong that does not end the run.
    fn warning(&mut self, _text: &str) {}
    /// After each validation.
    fn validation(&mut self, _step: u64, _loss: f64) {}
    /// The whole state was saved.
    fn saved(&mut self, _report: &SaveReport) {}
    /// After the last step and the last attempt to save: what the run came to, even where an error follows, because the weights could not be
    /// saved, or not all ranks came to the end.
    fn ended(&mut self, _summary: &Summary) {}
}

/// An observer that looks away.
impl Observer for () {}

/// Trains, and returns the summary, on every rank of the session. `checkpoint` is where rank 0 saves the result.
///
/// # Errors
/// See [`TrainError`]. After an error all ranks of the job fail. Where it came after the last step, the observer has got the summary.
pub fn train(
    config: &TrainConfig,
    corpus: &Corpus,
    session: &Session,
    device: &Device,
    checkpoint: Option<PathBuf>,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    train_keeping(config, corpus, session, device, &Keep { model: checkpoint, ..Keep::default() }, observer)
}

/// As [`train`], with all that can be saved, and from where an earlier run has come to.
///
/// # Errors
/// See [`TrainError`]: [`TrainError::Stopped`] on all ranks where the run was asked to leave, which is no failure.
pub fn train_keeping(
    config: &TrainConfig,
    corpus: &Corpus,
    session: &Session,
    device: &Device,
    keep: &Keep,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let build = |setup: &strategy::Setup<'_>| strategy::build(config.strategy, setup);
    train_by(&build, config, corpus, session, device, keep, observer)
}

/// As [`train`], by the strategy that `build` gives.
fn train_by(
    build: Build<'_>,
    config: &TrainConfig,
    corpus: &Corpus,
    session: &Session,
    device: &Device,
    keep: &Keep,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let trainer = || Trainer::new(config, corpus, session, device, keep, build);
    let mut result = trainer().and_then(|trainer| run(trainer, corpus, observer));
    // The others would wait for this rank until their deadline. Where they know already, the first failure stays.
    match &mut result {
        Err(TrainError::Comm(error)) => session.control.poison(error),
        Err(TrainError::Refused { error, is_said }) => *is_said = leave_together(session, error),
        // All leave together.
        Ok(_) | Err(TrainError::Stopped { .. }) => {}
        Err(error) => session.comm.abort(&error.to_string()),
    }
    let summary = match result {
        Err(error) if !matches!(error, TrainError::Stopped { .. }) => return Err(error),
        other => other,
    };
    if let Some(node) = &session.node {
        node.comm.finish(session.timeout)?;
    }
    session.comm.finish(session.timeout)?;
    summary
}

/// Waits until all ranks have found what is wrong with what they agree on: one that left before would be taken for lost by the others. Returns
/// whether rank 0 is another one and has found the same.
fn leave_together(session: &Session, error: &Error) -> bool {
    /// How far ranks may be apart that have connected to each other and begun no step.
    const APART: Duration = Duration::from_secs(10);
    let deadline = Deadline::after(session.timeout.min(APART));
    let own = error.to_string();
    match session.control.gather("what is refused", &own, deadline) {
        Ok(found) => session.comm.rank() > 0 && found.first() == Some(&own),
        Err(_) => {
            // Some rank found nothing wrong, or something else.
            session.control.poison(error);
            false
        }
    }
}

/// All steps, validations and checkpoints.
fn run(mut trainer: Trainer<'_>, corpus: &Corpus, observer: &mut dyn Observer) -> Result<Summary, TrainError> {
    let config = trainer.config;
    if let Some(reason) = trainer.no_gpu_figures() {
        observer.warning(&format!("the GPU's utilisation is not known: {reason}"));
    }
    if let Some(reason) = trainer.staged() {
        observer.warning(reason);
    }
    if let Some(reason) = trainer.nodes_that_are_small() {
        observer.warning(&reason);
    }
    if let Some(nodes) = trainer.nodes() {
        observer.nodes(nodes);
    }
    if trainer.keep.checkpoints.is_some() {
        trainer.keep.stop.heed_signals()?;
    }
    observer.started(config.steps);
    // The best of an earlier run counts where its weights are here, and if it was measured alike.
    let is_here = trainer.keep.best.as_ref().is_none_or(|path| path.exists());
    let measured_by = trainer.keep.resume.as_ref().map(|saved| saved.state().config["eval_batches"].clone());
    let is_alike = measured_by.is_none_or(|batches| batches == config.eval_batches);
    trainer.best = trainer.best.filter(|_| is_here && is_alike);
    let (mut validations, mut best) = (Vec::new(), None);
    for step in trainer.first_step()..config.steps {
        let report = trainer.step(step, observer)?;
        observer.step(&report);
        // Its spans are not kept: a run may take any number of steps.
        drop(report);
        let is_last = step + 1 == config.steps;
        let is_due = |every: u64| every > 0 && (step + 1).is_multiple_of(every);
        let validates = config.eval_every > 0 && (is_last || is_due(config.eval_every));
        let saves = trainer.keep.checkpoints.as_ref().is_some_and(|checkpoints| is_due(checkpoints.every));
        if validates {
            let loss = trainer.validate()?;
            observer.validation(step + 1, loss);
            validations.push((step + 1, loss));
            best = trainer.if_best(step + 1, loss);
            if !is_last && trainer.has_stepped()? {
                save_weights(&mut trainer, corpus, (step + 1, best), observer)?;
            }
        }
        let leaves = trainer.leaves(validates || saves)?;
        let Some(checkpoints) = trainer.keep.checkpoints.as_ref().filter(|_| !is_last) else { continue };
        if leaves || saves {
            match trainer.save_state(checkpoints, corpus, step + 1) {
                Ok(report) => {
                    observer.saved(&report);
                    if leaves {
                        return Err(save::stopped(&report));
                    }
                }
                Err(error @ TrainError::Saved(_)) if !leaves => observer.warning(&format!(
                    "step {}: no checkpoint could be saved, and the run continues: {error}",
                    step + 1
                )),
                Err(error) => return Err(error),
            }
        }
    }
    let (summary, outcome) = trainer.summary(corpus, validations)?;
    if outcome.is_ok() {
        keep_best(&mut trainer, best, observer);
        trainer.remove_old(observer);
    }
    observer.ended(&summary);
    outcome.map(|()| summary)
}

/// Saves the weights after a validation: what a death or an impatient user would otherwise cost.
fn save_weights(
    trainer: &mut Trainer<'_>,
    corpus: &Corpus,
    (step, best): (u64, Option<Best>),
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    match trainer.save(corpus, step) {
        Err(error @ TrainError::Checkpoint(_)) => {
            observer.warning(&format!("step {step}: no checkpoint could be saved, and the run continues: {error}"));
        }
        Err(error) => return Err(error),
        Ok(()) => keep_best(trainer, best, observer),
    }
    Ok(())
}

/// Keeps the weights that were saved last as the best, if they are.
fn keep_best(trainer: &mut Trainer<'_>, best: Option<Best>, observer: &mut dyn Observer) {
    let Some(best) = best else { return };
    match trainer.keep_best() {
        Ok(()) => trainer.best = Some(best),
        Err(error) => observer.warning(&format!("step {}: the best weights could not be saved: {error}", best.step)),
    }
}

/// The median; NaN of nothing.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        len if len % 2 == 1 => values[len / 2],
        len => f64::midpoint(values[len / 2 - 1], values[len / 2]),
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
