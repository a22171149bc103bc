//! One rank of a training run.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::{Buffer, Communicator, CommunicatorExt, ReduceOp};
use isocomm::Nodes;

use super::history::History;
use super::local::{Local, who_owns_what};
use super::optimizers::{self, MemoryPlacement};
use super::peaks::Peaks;
use super::save::{Keep, Start, restore_rest, restore_strategy};
use super::traffic::{StepTraffic, TrafficTotals};
use super::{Observer, Parts, Session, StepReport, TrainConfig, TrainError, ms};
use crate::batches::{Batches, Share};
use crate::checkpoint::sharded::{Best, Kind};
use crate::corpus::Corpus;
use crate::devices::{self, Placement};
use crate::flat::Flat;
use crate::memory::{self, Allocations, Category, Copies, Usage};
use crate::model::KernelChoice;
use crate::optim::LossScaler;
use crate::precision::Precision;
use crate::record::{self, Activity, Recording};
use crate::segments::{Compute, SegmentInfo, SegmentedModel, TokenBatch, layout};
use crate::strategy::formula::Expected;
use crate::strategy::{Built, Channels, Comms, Setup, StepOutcome, Strategy};
use crate::utilization::Meter;

/// Builds a strategy.
pub(super) type Build<'a> = &'a dyn Fn(&Setup<'_>) -> comm_core::Result<Built>;

/// One rank's state.
pub(super) struct Trainer<'a> {
    pub(super) config: &'a TrainConfig,
    pub(super) session: &'a Session,
    pub(super) strategy: Box<dyn Strategy>,
    channels: Channels,
    /// Whether ranks that have the same parameters have values of their own of them and of their moments.
    pub(super) own_values: bool,
    pub(super) local: Local<'a>,
    validation: Vec<TokenBatch>,
    pub(super) peaks_of_devices: Peaks,
    meter: Meter,
    nodes: Option<Nodes>,
    /// Memory peaks of the training so far, where they had to be put aside for something else.
    peaks: Option<Usage>,
    /// What is kept of the steps so far.
    pub(super) history: History,
    /// What was sent until the end of the last step, where something was still under way then.
    sent_before: Option<TrafficTotals>,
    /// Whether ranks that have the same parameters have the same values of them after the last step.
    pub(super) replicas_agree: bool,
    /// Whether all ranks have waited for each other in the last step.
    pub(super) have_met: bool,
    /// What is saved.
    pub(super) keep: &'a Keep,
    /// Whether what lies beside the saved weights, which stays the same, has been saved.
    pub(super) has_companions: bool,
    /// The best validation so far.
    pub(super) best: Option<Best>,
    /// Whether anyone saves weights: all ranks bring their masters for it.
    pub(super) saves: bool,
    started: Instant,
}

impl<'a> Trainer<'a> {
    pub(super) fn new(
        config: &'a TrainConfig,
        corpus: &Corpus,
        session: &'a Session,
        device: &Device,
        keep: &'a Keep,
        build: Build<'_>,
    ) -> Result<Self, TrainError> {
        config.options.check_scaling(config.strategy, config.loss_scaling).map_err(refused)?;
        if let Some(short) = config.short_sequences {
            short.check(config.model.block_size).map_err(|why| refused(comm_core::Error::invalid(why)))?;
        }
        let comms = comms(session, config.options.ranks_per_node);
        let places = MemoryPlacement::new(config, &comms, session, device)?;
        let tensors = layout(&config.model)?;
        let lengths: Vec<usize> = tensors.iter().map(|segment| segment.len).collect();
        let TrainConfig { precision, accumulation, seed, .. } = *config;
        let (options, checked) = (&config.options, session.checked);
        let setup = Setup {
            comms: &comms,
            segments: &lengths,
            tensors: &tensors,
            options,
            precision,
            accumulation,
            seed,
            first_step: keep.resume.as_ref().map_or(0, |saved| saved.state().step),
            checked,
        };
        let mut built = build(&setup).map_err(refused)?;
        if let Some(saved) = &keep.resume {
            saved.verify(comms.world.rank(), comms.world.world_size())?;
        }
        let (local, validation) = local((config, keep), corpus, session, device, &built, places)?;
        if let Some(saved) = &keep.resume {
            restore_strategy(&mut *built.strategy, &local, saved)?;
        }
        let flops_per_token = config.model.flops_per_token(config.model.block_size);
        let all = (session, &*local.scalars);
        let peaks_of_devices = Peaks::measure(flops_per_token, built.computes, device, precision, all)?;
        let owned_by = who_owns_what(&*local.scalars, &built.owned)?;
        let saves = local.scalars.all_reduce_scalar(i64::from(keep.model.is_some()), ReduceOp::Max)? == 1;
        memory::reset_peaks();
        Ok(Trainer {
            config,
            session,
            strategy: built.strategy,
            channels: built.channels,
            own_values: built.own_values,
            local: Local { owned_by, ..local },
            nodes: config.strategy.spec().tells_nodes_apart.then_some(comms.nodes),
            validation,
            peaks_of_devices,
            meter: devices::cuda_ordinal(device).map_or_else(Meter::start, Meter::start_with_cuda),
            peaks: None,
            history: memory::within(Category::Other, || {
                History::of(config.steps).where_steps_differ(!config.strategy.spec().is_one_device)
            }),
            sent_before: None,
            // All begin with the same.
            replicas_agree: true,
            have_met: false,
            best: keep.resume.as_ref().and_then(|saved| saved.state().best),
            keep,
            has_companions: false,
            saves,
            started: Instant::now(),
        })
    }

    /// One step: what it does and in which order is the strategy's.
    pub(super) fn step(&mut self, step: u64, observer: &mut dyn Observer) -> Result<StepReport, TrainError> {
        if step == self.first_step() {
            self.started = Instant::now();
        }
        // What was done since the last step is none of this one's.
        self.meter.lap();
        let before = self.sent_before.take().or_else(|| TrafficTotals::now(self.session));
        let (asked_before, copied_before) = (memory::allocations(), memory::copies());
        let loss_scale = f64::from(self.local.scaler.scale());
        let start = Instant::now();
        let (outcome, recording) = record::record(|| {
            record::span(Activity::Data, || observer.reading(step + 1));
            self.local.step = step;
            self.strategy.step(step, &mut self.local, &mut self.channels)
        });
        let elapsed = start.elapsed();
        let allocations = memory::allocations().zip(asked_before).map(|(now, before)| now.since(before));
        let copies = memory::copies().since(copied_before);
        let mut outcome = outcome?;
        if self.session.counts_between_nodes() {
            outcome.expected = outcome.expected.map(Expected::between_nodes);
        }
        let now = TrafficTotals::now(self.session);
        let sent = now.as_ref().zip(before).map(|(now, before)| now.since(&before, &*self.local.scalars));
        self.sent_before = now.filter(|_| outcome.under_way);
        let measured = StepMeasurements { loss_scale, elapsed, sent, allocations, copies, recording };
        let report = self.report(&outcome, measured);
        (self.replicas_agree, self.have_met) = (outcome.replicas_agree, outcome.have_met);
        let seconds = self.started.elapsed().as_secs_f64();
        memory::within(Category::Other, || self.history.add(&report, seconds, &outcome, sent));
        Ok(report)
    }

    /// Steps that were taken before this run: its first one, counted from 0.
    pub(super) fn first_step(&self) -> u64 {
        self.keep.resume.as_ref().map_or(0, |saved| saved.state().step)
    }

    /// What is reported of a step.
    fn report(&mut self, outcome: &StepOutcome, measured: StepMeasurements) -> StepReport {
        let StepOutcome { loss, grad_norm, skipped, .. } = *outcome;
        let StepMeasurements { loss_scale, elapsed, sent, allocations, copies, recording } = measured;
        let step = self.local.step;
        let batches = &self.local.batches;
        let tokens = batches.rows_in_step(step) as f64 * self.config.model.block_size as f64;
        let tokens_per_s = tokens / elapsed.as_secs_f64();
        // Attention over shorter sequences is less work.
        let sequence = self.config.model.block_size / self.config.pieces(step);
        let flops_per_s = tokens_per_s * self.config.model.flops_per_token(sequence);
        let matrix_share = self.peaks_of_devices.matrix_share(flops_per_s);
        let ranks_here = self.session.ranks_in_process;
        let interval = self.meter.lap();
        let memory = self.memory();
        let (parts, operations) = (parts(&recording), recording.started);
        let (spans, communications) = recording.into_parts();
        StepReport {
            step: step + 1,
            loss,
            grad_norm,
            skipped,
            loss_scale,
            epoch: step / self.local.batches.steps_per_epoch() as u64 + 1,
            learning_rate: self.local.learning_rate(),
            ms: ms(elapsed),
            tokens_per_s,
            matrix_share,
            mfu: self.peaks_of_devices.mfu(matrix_share),
            parts,
            bytes_sent: sent.map(|sent| sent.payload),
            messages_sent: sent.map(|sent| sent.messages),
            operations,
            cpu_utilization: interval.cpu_utilization(rayon::current_num_threads() * ranks_here),
            gpu_utilization_percent: interval.gpu.as_ref().map(|gpu| gpu.utilization_percent),
            gpu_memory_bytes: interval.gpu.as_ref().map(|gpu| gpu.peak_memory_bytes),
            peak_memory_bytes: memory.map(|usage| usage.total.peak / ranks_here as u64),
            memory,
            allocations,
            copies,
            spans,
            communications,
        }
    }

    /// Whether any step was not skipped, on any rank, so that the weights are not those of the start. All ranks call it together.
    pub(super) fn has_stepped(&self) -> comm_core::Result<bool> {
        let own = self.local.scaler.finish(self.local.step + 1).is_ok();
        if self.config.strategy.spec().is_one_device {
            return Ok(own);
        }
        // Each rank skips steps by itself.
        Ok(self.local.scalars.all_reduce_scalar(i64::from(own), ReduceOp::Max)? == 1)
    }

    /// Mean validation loss over all ranks. They pass through the model equally often, since weights may have to be gathered for it, and
    /// some without rows.
    pub(super) fn validate(&mut self) -> Result<f64, TrainError> {
        let mut sums = [0.0f64, 0.0];
        for batch in &self.validation {
            let loss = self.local.evaluate(batch, &mut *self.strategy, &mut self.channels)?;
            sums[0] += loss * batch.rows as f64;
            sums[1] += batch.rows as f64;
        }
        self.local.scalars.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok(sums[0] / sums[1])
    }

    /// Memory of the training so far.
    pub(super) fn memory(&self) -> Option<Usage> {
        let now = memory::usage()?;
        Some(self.peaks.map_or(now, |before| now.with_peaks_of(&before)))
    }

    /// Runs what is no training, so that its memory is not taken for the training's. All ranks call it together.
    pub(super) fn apart<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        self.peaks = self.memory();
        if self.session.ranks_in_process > 1 {
            // They share the peaks, which nobody may reset before all have read them. Where this fails, so does what follows.
            let _ = self.local.scalars.barrier();
        }
        let result = memory::within(Category::Other, || work(self));
        memory::reset_peaks();
        result
    }

    /// Why there are no figures of the GPU that computes, if one does.
    pub(super) fn no_gpu_figures(&self) -> Option<String> {
        devices::cuda_ordinal(self.local.model.device()).and(self.meter.no_gpu()).map(str::to_string)
    }

    /// Who shares a node, where the strategy tells nodes apart.
    pub(super) fn nodes(&self) -> Option<&Nodes> {
        self.nodes.as_ref()
    }

    /// That no node has as many ranks as it was to have, if so.
    pub(super) fn nodes_that_are_small(&self) -> Option<String> {
        let (nodes, asked) = (self.nodes()?, self.config.options.ranks_per_node);
        if asked == 0 || (0..nodes.count()).any(|node| nodes.size(node) >= asked) {
            return None;
        }
        Some(format!(
            "--ranks-per-node {asked}: no node has that many ranks; the job has {nodes}. A node cannot span machines, which are told apart \
             by their kernels; give at most the number of ranks on a machine"
        ))
    }

    /// Why gradients leave the device although the communicator works on its memory, if they do.
    pub(super) fn staged(&self) -> Option<&str> {
        self.local.places.staged.as_deref()
    }
}

/// What was measured of a step.
struct StepMeasurements {
    /// What the loss was multiplied by.
    loss_scale: f64,
    elapsed: Duration,
    sent: Option<StepTraffic>,
    /// What this process asked for.
    allocations: Option<Allocations>,
    copies: Copies,
    recording: Recording,
}

/// An error of what all ranks were told alike.
fn refused(error: comm_core::Error) -> TrainError {
    match error {
        comm_core::Error::InvalidArgument(_) => TrainError::Refused { error, is_said: false },
        other => TrainError::Comm(other),
    }
}

/// What the strategy communicates with.
fn comms(session: &Session, ranks_per_node: usize) -> Comms {
    let node = session.node.as_ref();
    let in_order = || Nodes::of_size(session.comm.world_size(), ranks_per_node);
    Comms {
        world: session.comm.clone(),
        nodes: session.nodes.clone().unwrap_or_else(in_order),
        node: node.map(|node| node.comm.clone()),
        native: session.native.clone(),
        node_native: node.and_then(|node| node.native.clone()),
        timeout: session.timeout,
    }
}

/// The model, the data and the optimizer of this rank, and its batches for validation.
fn local<'a>(
    (config, keep): (&'a TrainConfig, &Keep),
    corpus: &Corpus,
    session: &Session,
    device: &Device,
    built: &Built,
    places: MemoryPlacement,
) -> Result<(Local<'a>, Vec<TokenBatch>), TrainError> {
    // Graphs of composed operations, and those of a device, keep the weights that they have used, and those are to go.
    let keeps = Placement::of(device) == Placement::Device || config.kernels == KernelChoice::Composed;
    let recompute = config.recompute || (built.strategy.brings_weights() && keeps);
    let compute = Compute { precision: config.precision, recompute, kernels: config.kernels };
    let absent = || SegmentedModel::absent(config.model.clone(), compute, device);
    let model = memory::within(Category::Parameters, absent)?;

    let (rank, world) = (session.comm.rank(), session.comm.world_size());
    let workers = config.options.workers(config.strategy, world);
    let share = built.computes.then(|| Share {
        rank: rank - (world - workers),
        world: workers,
        accumulation: config.accumulation,
    });
    let TrainConfig { global_batch, seed, last_batch, .. } = *config;
    let batches = Batches::with_last_batch(corpus, config.model.block_size, global_batch, seed, last_batch)?;
    let mut validation = Vec::new();
    if let Some(share) = share {
        batches.rows_per_micro_step(share)?;
        if config.eval_every > 0 {
            validation = batches.validation(config.eval_batches, share)?;
        }
    }

    let optimizer = optimizers::optimizer(config.optimizer.kind, &places);
    let scaler = LossScaler::new(config.loss_scaling).map_err(|error| TrainError::Scaling { step: 0, error })?;
    let scalars = scalars(session)?;
    let (masters, owned_by) = (Vec::new(), Vec::new());
    let is_whole = |(info, owned): (&SegmentInfo, &Range<usize>)| *owned == (0..info.len);
    // Ranks that train by themselves look at their masters between two updates.
    let lends_masters = config.strategy.spec().is_one_device
        && built.computes
        && !built.strategy.brings_weights()
        && !built.strategy.gathers_weights()
        && config.precision == Precision::F32
        && Placement::of(device) == Placement::Host
        && !places.masters_on_device
        && model.segments().iter().zip(&built.owned).all(is_whole);
    let mut local = Local {
        config,
        scalars,
        model,
        batches,
        share,
        workers,
        masters,
        lends_masters,
        optimizer,
        places,
        scaler,
        owned_by,
        step: 0,
        rows: 0,
        save_every: keep.checkpoints.as_ref().map_or(0, |checkpoints| checkpoints.every),
        stop: keep.stop.clone(),
        leaving: None,
    };
    initialise(&mut local, built, Start::of(keep.resume.as_deref(), config, (rank, world))?)?;
    if let Some(saved) = &keep.resume {
        restore_rest(&mut local, built.own_values, saved)?;
    }
    Ok((local, validation))
}

/// A communicator of all ranks for scalars, so that their bytes are counted apart.
fn scalars(session: &Session) -> comm_core::Result<Arc<dyn Communicator>> {
    // Where nothing is sent there is nothing to count apart, and nobody to split off with.
    let part =
        if session.properties.timing_only { Some(session.comm.clone()) } else { session.comm.split(Some(0), 0)? };
    part.ok_or_else(|| comm_core::Error::InvalidArgument("the communicator of scalars has no ranks".into()))
}

/// Makes the weights and masters that the run begins with, and an optimizer for each segment. A whole segment at a time, so that a sharded
/// model is never whole in memory; of a checkpoint no more than is needed.
fn initialise(local: &mut Local<'_>, built: &Built, mut start: Start<'_>) -> Result<(), TrainError> {
    let brings_weights = built.strategy.brings_weights();
    let keeps_model = built.computes && !brings_weights;
    let category = if brings_weights { Category::Parameters } else { Category::Optimizer };
    let Local { config, model, masters, lends_masters, optimizer, places, .. } = local;
    let infos = model.segments().to_vec();
    masters.reserve_exact(infos.len());
    for (segment, (info, range)) in infos.iter().zip(&built.owned).enumerate() {
        let (mut values, own) = match &mut start {
            Start::Seed => (info.initial(&config.model, config.seed), range.clone()),
            Start::Weights(stored) => (stored.segment(segment)?, range.clone()),
            Start::Saved(reader) if keeps_model => (reader.read(segment, Kind::Master, 0..info.len)?, range.clone()),
            Start::Saved(reader) => (reader.read(segment, Kind::Master, range.clone())?, 0..range.len()),
        };
        memory::within(Category::Optimizer, || {
            optimizer.push(config.optimizer, info, range.clone())?;
            if let Start::Saved(reader) = &mut start {
                let mean = reader.read(segment, Kind::Mean, range.clone())?;
                let square = reader.read(segment, Kind::Square, range.clone())?;
                optimizer.restore(segment, [mean, square], reader.optimizer_steps(segment), model.device())?;
            }
            Ok::<(), TrainError>(())
        })?;
        if *lends_masters {
            // They stay for the whole run.
            values.shrink_to_fit();
            let weights = Buffer::from_vec(memory::recharge(values, Category::Parameters));
            memory::within(Category::Parameters, || model.put_params(segment, weights))?;
            masters.push(Flat::default());
            continue;
        }
        masters.push(memory::within(category, || places.masters(values[own].to_vec(), model.device())));
        if keeps_model {
            memory::within(Category::Parameters, || model.write_params(segment, &values))?;
        }
    }
    Ok(())
}

/// A step's parts.
fn parts(recording: &Recording) -> Parts {
    let of = |activity: Activity| ms(recording.total(activity));
    Parts {
        data: of(Activity::Data),
        compute: of(Activity::Forward) + of(Activity::Backward) + of(Activity::Device),
        pack: of(Activity::Pack),
        exposed: of(Activity::Exposed),
        scalars: of(Activity::Scalars),
        unpack: of(Activity::Unpack),
        optimizer: of(Activity::Optimizer),
        communication: ms(recording.communication()),
        hidden: ms(recording.hidden()),
    }
}
