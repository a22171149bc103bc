//! One rank of a training run.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::{Buffer, Communicator, CommunicatorExt, ReduceOp};

use super::history::History;
use super::local::{Local, who_owns_what};
use super::optimizers::{self, MemoryPlacement};
use super::peaks::Peaks;
use super::traffic::{StepTraffic, TrafficTotals};
use super::{Observer, Parts, Session, StepReport, TrainConfig, TrainError, ms};
use crate::batches::{Batches, Share};
use crate::checkpoint::{InitialWeights, StoredWeights};
use crate::corpus::Corpus;
use crate::devices::{self, Placement};
use crate::flat::Flat;
use crate::memory::{self, Allocations, Category, Usage};
use crate::model::KernelChoice;
use crate::optim::LossScaler;
use crate::precision::Precision;
use crate::record::{self, Activity, Recording};
use crate::segments::{Compute, SegmentInfo, SegmentedModel, TokenBatch, layout};
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
    pub(super) local: Local<'a>,
    validation: Vec<TokenBatch>,
    pub(super) peaks_of_devices: Peaks,
    meter: Meter,
    /// Memory peaks of the training so far, where they had to be put aside for something else.
    peaks: Option<Usage>,
    /// What is kept of the steps so far.
    pub(super) history: History,
    /// Whether ranks that have the same parameters have the same values of them after the last step.
    pub(super) replicas_agree: bool,
    /// Where rank 0 saves.
    pub(super) checkpoint: Option<PathBuf>,
    /// Whether what lies beside the checkpoint, which stays the same, has been saved.
    pub(super) has_companions: bool,
    /// Whether anyone saves: all ranks bring their masters for it.
    pub(super) saves: bool,
    started: Instant,
}

impl<'a> Trainer<'a> {
    pub(super) fn new(
        config: &'a TrainConfig,
        corpus: &Corpus,
        session: &'a Session,
        device: &Device,
        checkpoint: Option<PathBuf>,
        build: Build<'_>,
    ) -> Result<Self, TrainError> {
        let comms = comms(session);
        let places = MemoryPlacement::new(config, &comms, session, device)?;
        let lengths: Vec<usize> = layout(&config.model)?.iter().map(|segment| segment.len).collect();
        let TrainConfig { precision, accumulation, .. } = *config;
        let (options, checked) = (&config.options, session.checked);
        let built = build(&Setup { comms: &comms, segments: &lengths, options, precision, accumulation, checked })?;
        let (local, validation) = local(config, corpus, session, device, &built, places)?;
        let flops_per_token = config.model.flops_per_token(config.model.block_size);
        let all = (session, &*local.scalars);
        let peaks_of_devices = Peaks::measure(flops_per_token, built.computes, device, precision, all)?;
        let owned_by = who_owns_what(&*local.scalars, &built.owned)?;
        let saves = local.scalars.all_reduce_scalar(i64::from(checkpoint.is_some()), ReduceOp::Max)? == 1;
        memory::reset_peaks();
        Ok(Trainer {
            config,
            session,
            strategy: built.strategy,
            channels: built.channels,
            local: Local { owned_by, ..local },
            validation,
            peaks_of_devices,
            meter: devices::cuda_ordinal(device).map_or_else(Meter::start, Meter::start_with_cuda),
            peaks: None,
            history: memory::within(Category::Other, || History::of(config.steps)),
            replicas_agree: true,
            checkpoint,
            has_companions: false,
            saves,
            started: Instant::now(),
        })
    }

    /// One step: what it does and in which order is the strategy's.
    pub(super) fn step(&mut self, step: u64, observer: &mut dyn Observer) -> Result<StepReport, TrainError> {
        if step == 0 {
            self.started = Instant::now();
        }
        // What was done since the last step is none of this one's.
        self.meter.lap();
        let before = TrafficTotals::now(self.session);
        let asked_before = memory::allocations();
        let loss_scale = f64::from(self.local.scaler.scale());
        let start = Instant::now();
        let (outcome, recording) = record::record(|| {
            record::span(Activity::Data, || observer.reading(step + 1));
            self.local.step = step;
            self.strategy.step(step, &mut self.local, &mut self.channels)
        });
        let elapsed = start.elapsed();
        let allocations = memory::allocations().zip(asked_before).map(|(now, before)| now.since(before));
        let mut outcome = outcome?;
        if self.session.counts_between_nodes() {
            outcome.expected = outcome.expected.between_nodes();
        }
        let sent = TrafficTotals::now(self.session).zip(before);
        let sent = sent.map(|(now, before)| now.since(&before, &*self.local.scalars));
        let report = self.report(&outcome, StepMeasurements { loss_scale, elapsed, sent, allocations, recording });
        self.replicas_agree = outcome.replicas_agree;
        let seconds = self.started.elapsed().as_secs_f64();
        memory::within(Category::Other, || self.history.add(&report, seconds, &outcome, sent));
        Ok(report)
    }

    /// What is reported of a step.
    fn report(&mut self, outcome: &StepOutcome, measured: StepMeasurements) -> StepReport {
        let StepOutcome { loss, grad_norm, skipped, .. } = *outcome;
        let StepMeasurements { loss_scale, elapsed, sent, allocations, recording } = measured;
        let step = self.local.step;
        let batches = &self.local.batches;
        let tokens = batches.rows_in_step(step) as f64 * self.config.model.block_size as f64;
        let tokens_per_s = tokens / elapsed.as_secs_f64();
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
            matrix_share: self.peaks_of_devices.matrix_share(tokens_per_s),
            mfu: self.peaks_of_devices.mfu(tokens_per_s),
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
            spans,
            communications,
        }
    }

    /// Whether any step was not skipped, so that the weights are not those of the start.
    pub(super) fn has_stepped(&self) -> bool {
        self.local.scaler.finish(self.history.losses.len() as u64).is_ok()
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
    recording: Recording,
}

/// What the strategy communicates with.
fn comms(session: &Session) -> Comms {
    let node = session.node.as_ref();
    Comms {
        world: session.comm.clone(),
        node: node.map(|node| node.comm.clone()),
        native: session.native.clone(),
        node_native: node.and_then(|node| node.native.clone()),
    }
}

/// The model, the data and the optimizer of this rank, and its batches for validation.
fn local<'a>(
    config: &'a TrainConfig,
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
    let lends_masters = built.computes
        && !built.strategy.brings_weights()
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
    };
    initialise(&mut local, built)?;
    Ok((local, validation))
}

/// A communicator of all ranks for scalars, so that their bytes are counted apart.
fn scalars(session: &Session) -> comm_core::Result<Arc<dyn Communicator>> {
    // Where nothing is sent there is nothing to count apart, and nobody to split off with.
    let part =
        if session.properties.timing_only { Some(session.comm.clone()) } else { session.comm.split(Some(0), 0)? };
    part.ok_or_else(|| comm_core::Error::InvalidArgument("the communicator of scalars has no ranks".into()))
}

/// Makes the initial weights and masters, and an optimizer for each segment. A whole segment at a time, so that a sharded model is never
/// whole in memory.
fn initialise(local: &mut Local<'_>, built: &Built) -> Result<(), TrainError> {
    let brings_weights = built.strategy.brings_weights();
    let keeps_model = built.computes && !brings_weights;
    let category = if brings_weights { Category::Parameters } else { Category::Optimizer };
    let Local { config, model, masters, lends_masters, optimizer, places, .. } = local;
    let infos = model.segments().to_vec();
    let stored = config.initial.as_ref().map(|initial| stored(config, initial)).transpose()?;
    masters.reserve_exact(infos.len());
    for (segment, (info, range)) in infos.iter().zip(&built.owned).enumerate() {
        let initial = match &stored {
            Some(stored) => stored.segment(segment)?,
            None => info.initial(&config.model, config.seed),
        };
        if *lends_masters {
            let weights = Buffer::from_vec(memory::recharge(initial, Category::Parameters));
            memory::within(Category::Parameters, || model.put_params(segment, weights))?;
            memory::within(Category::Optimizer, || optimizer.push(config.optimizer, info, range.clone()))?;
            masters.push(Flat::default());
            continue;
        }
        masters.push(memory::within(category, || places.masters(&initial[range.clone()], model.device())));
        memory::within(Category::Optimizer, || optimizer.push(config.optimizer, info, range.clone()))?;
        if keeps_model {
            memory::within(Category::Parameters, || model.write_params(segment, &initial))?;
        }
    }
    Ok(())
}

/// The weights to start from, which are to be of the run's model.
fn stored(config: &TrainConfig, initial: &InitialWeights) -> Result<StoredWeights, TrainError> {
    let stored = StoredWeights::open(&initial.path)?.with_block_size(config.model.block_size)?;
    if *stored.config() != config.model {
        return Err(comm_core::Error::invalid(format!(
            "the weights in {} are of a model of another shape: {:?} instead of {:?}",
            initial.path.display(),
            stored.config(),
            config.model
        ))
        .into());
    }
    Ok(stored)
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
