//! One rank's training steps.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Device;
use comm_core::{Communicator, CommunicatorExt, ReduceOp};

use super::history::History;
use super::optimizers::{Optimizers, Places};
use super::traffic::Counted;
use super::update::Sums;
use super::{Observer, Parts, Session, StepReport, TrainConfig, TrainError, ms};
use crate::batches::{Batches, Share};
use crate::corpus::Corpus;
use crate::cross_entropy::Placement;
use crate::devices;
use crate::flat::{Flat, Weights};
use crate::memory::{self, Category, Usage};
use crate::optim::{LossScaler, LossScaling, Overflow, clip_factor};
use crate::peak;
use crate::segments::{Compute, Pass, PassHooks, SegmentGrads, SegmentedModel, TokenBatch, layout};
use crate::strategy::{self, Activity, Clock, Comms, Strategy};
use crate::utilization::Meter;

/// One rank's state.
pub(super) struct Trainer<'a> {
    pub(super) config: &'a TrainConfig,
    pub(super) session: &'a Session,
    /// For scalars, so that their bytes are counted apart.
    pub(super) scalars: Arc<dyn Communicator>,
    pub(super) model: SegmentedModel,
    batches: Batches,
    /// This rank's part of the data; `None` for one that only serves.
    share: Option<Share>,
    /// Ranks that have one.
    pub(super) workers: usize,
    pub(super) strategy: Box<dyn Strategy>,
    /// The f32 parameters that this rank's optimizers update: the owned range of each segment.
    pub(super) masters: Vec<Flat>,
    pub(super) optimizers: Optimizers,
    pub(super) places: Places,
    pub(super) scaler: LossScaler,
    /// Where each rank's owned range of each segment begins, and its length: `[rank][segment]`.
    pub(super) owned_by: Vec<Vec<(usize, usize)>>,
    validation: Vec<TokenBatch>,
    pub(super) flops_per_token: f64,
    /// FLOP/s of a large matrix product on this rank, times the ranks.
    pub(super) peak_flops: f64,
    meter: Meter,
    /// Memory peaks of the training so far, where they had to be put aside for something else.
    peaks: Option<Usage>,
    /// What is kept of the steps so far.
    pub(super) history: History,
    /// Where rank 0 saves.
    pub(super) checkpoint: Option<PathBuf>,
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
    ) -> Result<Self, TrainError> {
        let comm = &session.comm;
        let (rank, world) = (comm.rank(), comm.world_size());
        let infos = layout(&config.model)?;
        let lengths: Vec<usize> = infos.iter().map(|segment| segment.len).collect();
        let node = session.node.as_ref();
        let comms = Comms {
            world: comm.clone(),
            node: node.map(|node| node.comm.clone()),
            native: session.native.clone(),
            node_native: node.and_then(|node| node.native.clone()),
        };
        let places = Places::new(config, &comms, session, device)?;
        let strategy = strategy::build(config.strategy, &comms, &lengths, &config.options, config.precision)?;
        // A device's graphs keep the weights that they have used, and those are to go.
        let recompute = config.recompute || (strategy.brings_weights() && Placement::of(device) == Placement::Device);
        let compute = Compute { precision: config.precision, recompute };
        let absent = || SegmentedModel::absent(config.model.clone(), compute, device);
        let mut model = memory::within(Category::Parameters, absent)?;

        let workers = config.options.workers(config.strategy, world);
        let share = strategy.computes().then(|| Share {
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

        // A whole segment at a time, so that a sharded model is never whole in memory.
        let keeps_model = strategy.computes() && !strategy.brings_weights();
        let category = if strategy.brings_weights() { Category::Parameters } else { Category::Optimizer };
        let mut masters = Vec::with_capacity(infos.len());
        let mut optimizers = Optimizers::none(&places);
        for (segment, (info, range)) in infos.iter().zip(strategy.owned()).enumerate() {
            let initial = info.initial(&config.model, config.seed);
            masters.push(memory::within(category, || places.masters(&initial[range.clone()], model.device())));
            memory::within(Category::Optimizer, || optimizers.push(config.optimizer, info, range.clone()))?;
            if keeps_model {
                memory::within(Category::Parameters, || model.write_params(segment, &initial))?;
            }
        }

        // Where nothing is sent there is nothing to count apart, and nobody to split off with.
        let scalars = if session.properties.timing_only { Some(comm.clone()) } else { comm.split(Some(0), 0)? };
        let scalars = scalars
            .ok_or_else(|| comm_core::Error::InvalidArgument("the communicator of scalars has no ranks".into()))?;
        // Ranks measure at the same time, since that is how they will compute.
        scalars.barrier()?;
        let peak_flops = scalars.all_reduce_scalar(peak::flops(device, config.precision)?, ReduceOp::Sum)?;
        let owned_by = who_owns_what(&*scalars, strategy.owned())?;
        let saves = scalars.all_reduce_scalar(i64::from(checkpoint.is_some()), ReduceOp::Max)? == 1;
        let scaler = LossScaler::new(config.loss_scaling).map_err(|error| TrainError::Scaling { step: 0, error })?;
        memory::reset_peaks();
        Ok(Trainer {
            config,
            session,
            scalars,
            flops_per_token: config.model.flops_per_token(config.model.block_size),
            model,
            batches,
            share,
            workers,
            strategy,
            masters,
            optimizers,
            places,
            scaler,
            owned_by,
            validation,
            peak_flops,
            meter: devices::cuda_ordinal(device).map_or_else(Meter::start, Meter::start_with_cuda),
            peaks: None,
            history: memory::within(Category::Other, || History::of(config.steps)),
            checkpoint,
            saves,
            started: Instant::now(),
        })
    }

    pub(super) fn step(&mut self, step: u64, observer: &mut dyn Observer) -> Result<StepReport, TrainError> {
        if step == 0 {
            self.started = Instant::now();
        }
        // What was done since the last step is none of this one's.
        self.meter.lap();
        let before = Counted::now(self.session);
        let start = Instant::now();
        let mut clock = Clock::default();
        clock.spend(Activity::Data, || observer.reading(step + 1));

        // Gradients: summed over the micro-steps, handed to the strategy during the last one. Each micro-step's are weighed so that
        // the mean over ranks of the sums is the mean over the global batch, however its rows are spread.
        let loss_scale = f64::from(self.scaler.scale());
        let rows_in_step = self.batches.rows_in_step(step) as f64;
        let mut sums: Vec<Option<Flat>> = vec![None; self.masters.len()];
        let mut loss = 0.0;
        let accumulation = if self.share.is_some() { self.config.accumulation } else { 0 };
        for micro_step in 0..accumulation {
            let Some(share) = self.share else { break };
            let batches = &self.batches;
            let batch = clock
                .spend(Activity::Data, || memory::within(Category::Other, || batches.rows(step, micro_step, share)))?;
            let weight = (self.workers * batch.rows) as f64 / rows_in_step;
            self.strategy.begin(true);
            let mut hooks = Hooks {
                strategy: &mut *self.strategy,
                masters: &self.masters,
                clock: &mut clock,
                sums: &mut sums,
                is_last: micro_step + 1 == accumulation,
                on_device: self.places.gradients_on_device,
                pass: Pass::Forward,
                since: Instant::now(),
            };
            let scale = (weight * loss_scale * self.config.loss_factor) as f32;
            let mean = memory::within(Category::Activations, || {
                let mean = self.model.train::<TrainError>(&batch, scale, &mut hooks)?;
                if self.places.gradients_on_device {
                    // Else what comes next would wait for it, and be taken for slow.
                    self.model.wait()?;
                }
                hooks.stop_computing();
                Ok::<f64, TrainError>(mean)
            })?;
            loss += mean * batch.rows as f64 / rows_in_step;
        }
        let grads = self.strategy.synchronise(&mut clock)?;

        // Loss and norm over all ranks, in one small all-reduce that every strategy needs alike.
        let grads = self.optimizers.fetch(grads, &mut clock)?;
        let unscale = self.scaler.unscale();
        let squares = clock.spend(Activity::Optimizer, || self.optimizers.sum_of_squares(&grads, unscale))?;
        let overflows = f64::from(u8::from(!squares.is_finite()));
        let mut totals = [loss, self.sums().contribution(squares), overflows];
        clock.scalars("loss and gradient norm", || self.scalars.all_reduce(&mut totals, ReduceOp::Sum))?;
        let [loss, all_squares, overflows] = totals;
        let squares = if self.sums() == Sums::Known { squares } else { all_squares };
        let grad_norm = squares.sqrt() / loss_scale;
        if self.config.loss_scaling == LossScaling::Off {
            let values = [("the loss", loss), ("the gradient norm", grad_norm)];
            if let Some((what, value)) = values.into_iter().find(|(_, value)| !value.is_finite()) {
                return Err(TrainError::NotFinite { step: step + 1, what, value });
            }
        }
        // A rank's loss that is not finite makes the sum of all so.
        let overflow = match (loss.is_finite(), overflows > 0.0) {
            (false, _) => Some(Overflow::Loss),
            (true, true) => Some(Overflow::Gradient),
            (true, false) => None,
        };

        let learning_rate = self.config.learning_rate.at(step);
        let skipped = self.scaler.update(overflow).map_err(|error| TrainError::Scaling { step: step + 1, error })?;
        if !skipped {
            let clip = if self.config.clip > 0.0 { clip_factor(grad_norm, self.config.clip) } else { 1.0 };
            self.update(grads, learning_rate, clip * unscale, &mut clock)?;
            self.distribute(&mut clock)?;
        }

        let elapsed = start.elapsed();
        let seconds = self.started.elapsed().as_secs_f64();
        let sent = Counted::now(self.session).zip(before).map(|(now, before)| now.since(&before, &*self.scalars));
        let tokens_per_s = rows_in_step * self.config.model.block_size as f64 / elapsed.as_secs_f64();
        let ranks_here = self.session.ranks_in_process;
        let lap = self.meter.lap();
        let memory = self.memory();
        let parts = parts(&clock);
        let operations = clock.started;
        let (spans, communications) = clock.into_parts();
        let report = StepReport {
            step: step + 1,
            loss,
            grad_norm,
            skipped,
            loss_scale,
            epoch: step / self.batches.steps_per_epoch() as u64 + 1,
            learning_rate,
            ms: ms(elapsed),
            tokens_per_s,
            mfu: tokens_per_s * self.flops_per_token / self.peak_flops,
            parts,
            bytes_sent: sent.map(|sent| sent.payload),
            messages_sent: sent.map(|sent| sent.messages),
            operations,
            cpu_utilization: lap.cpu_utilization(rayon::current_num_threads() * ranks_here),
            gpu_utilization_percent: lap.gpu.as_ref().map(|gpu| gpu.utilization_percent),
            gpu_memory_bytes: lap.gpu.as_ref().map(|gpu| gpu.peak_memory_bytes),
            peak_memory_bytes: memory.map(|usage| usage.total.peak / ranks_here as u64),
            memory,
            spans,
            communications,
        };
        memory::within(Category::Other, || self.history.add(&report, seconds, sent));
        Ok(report)
    }

    /// Brings the model's weights up to date with all ranks' masters.
    fn distribute(&mut self, clock: &mut Clock) -> Result<(), TrainError> {
        let mut outcome = Ok(());
        let mut puts = Vec::new();
        let model = &mut self.model;
        let mut put = |segment: usize, weights: Weights| {
            let start = Instant::now();
            if outcome.is_ok() {
                outcome = memory::within(Category::Parameters, || model.put_weights(segment, weights));
            }
            puts.push((start, Instant::now()));
        };
        self.strategy.distribute(&self.masters, &mut put, clock)?;
        puts.into_iter().for_each(|(began, ended)| clock.span(Activity::Unpack, None, began, ended));
        Ok(outcome?)
    }

    /// Whether any step was not skipped, so that the weights are not those of the start.
    pub(super) fn has_stepped(&self) -> bool {
        self.scaler.finish(self.history.losses.len() as u64).is_ok()
    }

    /// Mean validation loss over all ranks. They pass through the model equally often, since weights may have to be gathered for it, and
    /// some without rows.
    pub(super) fn validate(&mut self) -> Result<f64, TrainError> {
        let mut sums = [0.0f64, 0.0];
        let mut clock = Clock::default();
        for batch in &self.validation {
            self.strategy.begin(false);
            let mut hooks = Hooks {
                strategy: &mut *self.strategy,
                masters: &self.masters,
                clock: &mut clock,
                sums: &mut [],
                is_last: false,
                on_device: self.places.gradients_on_device,
                pass: Pass::Forward,
                since: Instant::now(),
            };
            let loss = memory::within(Category::Activations, || self.model.evaluate::<TrainError>(batch, &mut hooks))?;
            sums[0] += loss * batch.rows as f64;
            sums[1] += batch.rows as f64;
        }
        self.scalars.all_reduce(&mut sums, ReduceOp::Sum)?;
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
            let _ = self.scalars.barrier();
        }
        let result = memory::within(Category::Other, || work(self));
        memory::reset_peaks();
        result
    }

    /// Why there are no figures of the GPU that computes, if one does.
    pub(super) fn no_gpu_figures(&self) -> Option<String> {
        devices::cuda_ordinal(self.model.device()).and(self.meter.no_gpu()).map(str::to_string)
    }

    /// Why gradients leave the device although the communicator works on its memory, if they do.
    pub(super) fn staged(&self) -> Option<&str> {
        self.places.staged.as_deref()
    }

    /// Whether every rank's optimizer updates every parameter.
    pub(super) fn owns_everything(&self) -> bool {
        let whole = |owned: &Vec<(usize, usize)>| {
            owned.iter().zip(self.model.segments()).all(|((_, len), info)| *len == info.len)
        };
        self.owned_by.iter().all(whole)
    }
}

/// The owned range of each segment of each rank.
fn who_owns_what(scalars: &dyn Communicator, owned: &[Range<usize>]) -> Result<Vec<Vec<(usize, usize)>>, TrainError> {
    let mine: Vec<u64> = owned.iter().flat_map(|range| [range.start as u64, range.len() as u64]).collect();
    let all = scalars.all_gather(&mine, mine.len() * scalars.world_size())?;
    let pairs = |of_rank: &[u64]| of_rank.chunks_exact(2).map(|pair| (pair[0] as usize, pair[1] as usize)).collect();
    Ok(all.chunks_exact(mine.len()).map(pairs).collect())
}

/// A strategy's part in a pass over the model.
struct Hooks<'a> {
    strategy: &'a mut dyn Strategy,
    masters: &'a [Flat],
    clock: &'a mut Clock,
    /// Gradients of earlier micro-steps.
    sums: &'a mut [Option<Flat>],
    /// Whether this is the micro-step after which gradients are communicated.
    is_last: bool,
    /// Whether gradients stay on the device.
    on_device: bool,
    /// What is being computed, and since when.
    pass: Pass,
    since: Instant,
}

impl Hooks<'_> {
    /// What the pass has computed up to now, it has computed.
    fn stop_computing(&mut self) {
        let activity = match self.pass {
            Pass::Forward => Activity::Forward,
            Pass::Backward => Activity::Backward,
        };
        let now = Instant::now();
        self.clock.span(activity, None, self.since, now);
        self.since = now;
    }

    /// The pass goes on with its computation.
    fn compute(&mut self) {
        self.since = Instant::now();
    }
}

impl PassHooks<TrainError> for Hooks<'_> {
    fn enter(&mut self, model: &mut SegmentedModel, pass: Pass, segment: usize) -> Result<(), TrainError> {
        self.stop_computing();
        self.pass = pass;
        // The embedding stays from the forward pass on.
        if !self.strategy.brings_weights() || (pass, segment) == (Pass::Backward, 0) {
            return Ok(());
        }
        let weights = self.strategy.weights(segment, self.masters, self.clock)?;
        self.clock.unpack(|| memory::within(Category::Parameters, || model.put_weights(segment, weights)))?;
        self.strategy.prefetch(self.masters, self.clock)?;
        self.compute();
        Ok(())
    }

    fn leave(&mut self, model: &mut SegmentedModel, _pass: Pass, segment: usize) -> Result<(), TrainError> {
        if self.strategy.brings_weights() {
            self.stop_computing();
            // What stands for weights that are gone takes memory as well.
            self.clock.unpack(|| memory::within(Category::Parameters, || model.release_params(segment)))?;
            self.compute();
        }
        Ok(())
    }

    fn gradients(&mut self, grads: SegmentGrads) -> Result<(), TrainError> {
        self.stop_computing();
        let segment = grads.segment();
        let sum = &mut self.sums[segment];
        let on_device = self.on_device;
        let flat = self.clock.pack(|_| -> Result<Flat, TrainError> {
            let flat = if on_device { Flat::Device(grads.into_parts()) } else { Flat::Host(grads.into_flat()?) };
            Ok(match sum.take() {
                Some(sum) => sum.plus(flat)?,
                None => flat,
            })
        })?;
        if self.is_last {
            self.strategy.gradient(segment, flat, self.clock)?;
        } else {
            *sum = Some(flat);
        }
        self.compute();
        Ok(())
    }
}

/// A step's parts.
fn parts(clock: &Clock) -> Parts {
    let of = |activity: Activity| ms(clock.total(activity));
    Parts {
        data: of(Activity::Data),
        compute: of(Activity::Forward) + of(Activity::Backward) + of(Activity::Device),
        pack: of(Activity::Pack),
        exposed: of(Activity::Exposed),
        scalars: of(Activity::Scalars),
        unpack: of(Activity::Unpack),
        optimizer: of(Activity::Optimizer),
        communication: ms(clock.communication()),
        hidden: ms(clock.hidden()),
    }
}
