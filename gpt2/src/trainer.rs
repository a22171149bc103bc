//! The training loop: one for every strategy, transport and device.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::counted::{Counters, Traffic};
use comm_core::{Communicator, CommunicatorExt, Control, Deadline, ReduceOp};
use serde::{Deserialize, Serialize};

use crate::batches::{BatchError, Batches, Share};
use crate::checkpoint::{Checkpoint, CheckpointError, weights_hash};
use crate::config::ModelConfig;
use crate::corpus::Corpus;
use crate::optim::{AdamW, AdamWConfig, LearningRate, OptimError, clip_factor, sum_of_squares};
use crate::segments::{ModelError, SegmentedModel, TokenBatch};
use crate::strategy::{self, Clock, Layout, Strategy, StrategyKind, StrategyOptions, formula};
use crate::{memory, peak};

/// Everything that determines a run, apart from the corpus and the transport. Equal on all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainConfig {
    /// The model's shape.
    pub model: ModelConfig,
    /// Who averages and updates what.
    pub strategy: StrategyKind,
    /// Options of the strategy.
    pub options: StrategyOptions,
    /// Seed of weights and data order.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Sequences a step, over all ranks and micro-steps.
    pub global_batch: usize,
    /// Micro-steps a step: gradients are summed over them, and only then communicated.
    pub accumulation: usize,
    /// Learning rate by step.
    pub learning_rate: LearningRate,
    /// Optimizer constants.
    pub adamw: AdamWConfig,
    /// Largest global gradient norm, after synchronisation; 0 turns clipping off.
    pub clip: f64,
    /// Validation every so many steps and at the end; 0 for never.
    pub eval_every: u64,
    /// Validation batches of `global_batch` sequences, at most.
    pub eval_batches: usize,
}

/// What connects a rank to the others.
pub struct Session {
    /// The job's communicator.
    pub comm: Arc<dyn Communicator>,
    /// Its control plane.
    pub control: Arc<dyn Control>,
    /// Counts what passes, where the transport is one of ours.
    pub counters: Option<Arc<Counters>>,
    /// The transport's settings, as (name, value).
    pub facts: Vec<(String, String)>,
    /// How long to wait for the others at the end.
    pub timeout: Duration,
    /// Ranks that share this process, for figures that are the process's.
    pub ranks_in_process: usize,
}

/// One step, as this rank saw it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StepReport {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean training loss over the global batch, in nats a token, before the update.
    pub loss: f64,
    /// Global norm of the averaged gradient, before clipping.
    pub grad_norm: f64,
    /// Learning rate of the update.
    pub learning_rate: f64,
    /// Wall time of the step.
    pub ms: f64,
    /// Tokens of all ranks a second.
    pub tokens_per_s: f64,
    /// Model FLOP/s utilisation: see [`Summary::mfu_formula`].
    pub mfu: f64,
    /// The step's parts, in milliseconds.
    pub parts: Parts,
    /// Payload bytes that this rank sent for gradients and parameters.
    pub bytes_sent: Option<u64>,
}

/// Where a step's time went on one rank, in milliseconds. The parts follow one another and leave out little.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Parts {
    /// Reading the batch.
    pub data: f64,
    /// Forward and backward pass.
    pub compute: f64,
    /// Reading gradients back, casting and concatenating them.
    pub pack: f64,
    /// Waiting for gradients and parameters of other ranks.
    pub exposed: f64,
    /// Waiting for the other ranks' loss and gradient norm; with a parameter server that is where its workers wait for it to receive
    /// everyone's gradients.
    pub scalars: f64,
    /// Cutting, casting and uploading what arrived.
    pub unpack: f64,
    /// Gradient norm and optimizer.
    pub optimizer: f64,
    /// Not a part of the sum: how long at least one operation on gradients or parameters was under way. What exceeds `exposed` was
    /// hidden behind other work.
    pub communication: f64,
}

/// The whole run, equal on all ranks but for the parts that say otherwise.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// Optimizer steps taken.
    pub steps: u64,
    /// SHA-256 of all weights; equal on all ranks, which was checked.
    pub weights_hash: String,
    /// Loss of the last training step.
    pub final_loss: f64,
    /// Last validation loss.
    pub validation_loss: Option<f64>,
    /// Training loss of each step.
    pub losses: Vec<f64>,
    /// Global norm of the averaged gradient of each step, before clipping.
    pub grad_norms: Vec<f64>,
    /// Median tokens a second of all ranks, over the steps after the first two.
    pub tokens_per_s: f64,
    /// Median milliseconds a step, likewise.
    pub step_ms: f64,
    /// Median of each part, likewise; the largest exposed time over ranks is in `ranks`.
    pub parts: Parts,
    /// Each rank's own figures.
    pub ranks: Vec<RankReport>,
    /// Median model FLOP/s utilisation.
    pub mfu: f64,
    /// How `mfu` was computed.
    pub mfu_formula: String,
    /// Facts about the transport, from rank 0.
    pub transport: Vec<(String, String)>,
    /// Where the checkpoint is.
    pub checkpoint: Option<PathBuf>,
}

/// One rank's own figures.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankReport {
    /// The rank.
    pub rank: usize,
    /// Median payload bytes sent a step for gradients and parameters, as counted; `None` where nothing counts.
    pub bytes_counted: Option<u64>,
    /// The same by the formula of the strategy.
    pub bytes_expected: u64,
    /// Whether every step sent the same.
    pub bytes_steady: bool,
    /// Payload bytes of scalars (loss, norm) sent a step.
    pub scalar_bytes: Option<u64>,
    /// Header bytes sent a step.
    pub framing_bytes: Option<u64>,
    /// Messages sent a step for gradients and parameters.
    pub messages: Option<u64>,
    /// Median of the parts of a step.
    pub parts: Parts,
    /// Peak resident memory of the process, divided by the ranks that share it.
    pub peak_rss_bytes: u64,
    /// Hash of this rank's weights.
    pub weights_hash: String,
}

/// Receives what happens during a run, on one rank.
pub trait Observer {
    /// Before the first step.
    fn started(&mut self, _steps: u64) {}
    /// After each step.
    fn step(&mut self, _report: &StepReport) {}
    /// Something went wrong that does not end the run.
    fn warning(&mut self, _text: &str) {}
    /// After each validation.
    fn validation(&mut self, _step: u64, _loss: f64) {}
}

/// An observer that looks away.
impl Observer for () {}

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The transport or another rank.
    #[error(transparent)]
    Comm(#[from] comm_core::Error),
    /// The model or the device.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The batches.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The optimizer.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// The checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A loss or gradient that is not a number.
    #[error("step {step}: {what} is {value}; lower the learning rate, or clip gradients")]
    NotFinite {
        /// The step, from 1.
        step: u64,
        /// What is not finite.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// A bug in a strategy: ranks ended with different weights.
    #[error("the ranks ended with different weights: {0}")]
    Diverged(String),
}

/// Trains, and returns the summary, on every rank of the session. `checkpoint` is where rank 0 saves the result.
///
/// # Errors
/// See [`TrainError`]. After an error all ranks of the job fail.
pub fn train(
    config: &TrainConfig,
    corpus: &Corpus,
    session: &Session,
    device: &Device,
    checkpoint: Option<PathBuf>,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let result = run(config, corpus, session, device, checkpoint, observer);
    // The others would wait for this rank until their deadline. Where they know already, the first failure stays.
    match &result {
        Err(TrainError::Comm(error)) => session.control.poison(error),
        Err(error) => session.comm.abort(&error.to_string()),
        Ok(_) => {}
    }
    let summary = result?;
    session.comm.finish(session.timeout)?;
    Ok(summary)
}

fn run(
    config: &TrainConfig,
    corpus: &Corpus,
    session: &Session,
    device: &Device,
    checkpoint: Option<PathBuf>,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let mut trainer = Trainer::new(config, corpus, session, device)?;
    observer.started(config.steps);
    let mut reports = Vec::new();
    let mut validation_loss = None;
    for step in 0..config.steps {
        let report = trainer.step(step)?;
        observer.step(&report);
        reports.push(report);
        let is_last = step + 1 == config.steps;
        if config.eval_every > 0 && (is_last || (step + 1).is_multiple_of(config.eval_every)) {
            let loss = trainer.validate()?;
            observer.validation(step + 1, loss);
            validation_loss = Some(loss);
            if !is_last {
                // What a death or an impatient user would otherwise cost.
                if let Err(error) = trainer.save(corpus, step + 1, checkpoint.as_deref()) {
                    observer.warning(&format!("step {}: the run goes on without a new checkpoint: {error}", step + 1));
                }
            }
        }
    }
    trainer.summary(corpus, &reports, validation_loss, checkpoint)
}

/// One rank's state.
struct Trainer<'a> {
    config: &'a TrainConfig,
    session: &'a Session,
    /// For scalars, so that their bytes are counted apart.
    scalars: Arc<dyn Communicator>,
    model: SegmentedModel,
    batches: Batches,
    share: Share,
    strategy: Box<dyn Strategy>,
    /// The parameters in host memory, flat by segment.
    params: Vec<Vec<f32>>,
    optimizers: Vec<AdamW>,
    /// Whether each rank sees the whole averaged gradient, so that its norm needs no communication.
    owns_everything: bool,
    validation: Vec<TokenBatch>,
    flops_per_token: f64,
    /// FLOP/s of a large matrix product on this rank, times the ranks.
    peak_flops: f64,
    /// What each step sent and received.
    traffic: Vec<Traffic>,
}

impl<'a> Trainer<'a> {
    fn new(
        config: &'a TrainConfig,
        corpus: &Corpus,
        session: &'a Session,
        device: &Device,
    ) -> Result<Self, TrainError> {
        let comm = &session.comm;
        let share = Share { rank: comm.rank(), world: comm.world_size(), accumulation: config.accumulation };
        let batches = Batches::new(corpus, config.model.block_size, config.global_batch, config.seed)?;
        batches.rows_per_micro_step(share)?;
        let validation =
            if config.eval_every > 0 { batches.validation(config.eval_batches, share)? } else { Vec::new() };
        let model = SegmentedModel::new(config.model.clone(), config.seed, device)?;
        let lengths: Vec<usize> = model.segments().iter().map(|segment| segment.len).collect();
        let strategy = strategy::build(config.strategy, comm.clone(), &lengths, &config.options)?;
        let optimizers = model
            .segments()
            .iter()
            .zip(strategy.owned())
            .map(|(segment, range)| AdamW::new(config.adamw, segment, range.clone()))
            .collect::<Result<Vec<_>, _>>()?;
        let params = (0..lengths.len()).map(|segment| model.read_params(segment)).collect::<Result<Vec<_>, _>>()?;
        let scalars = comm
            .split(Some(0), 0)?
            .ok_or_else(|| comm_core::Error::InvalidArgument("the communicator of scalars has no ranks".into()))?;
        // Ranks measure at the same time, since that is how they will compute.
        scalars.barrier()?;
        let peak_flops = scalars.all_reduce_scalar(peak::flops(device), ReduceOp::Sum)?;
        let mine: usize = strategy.owned().iter().map(ExactSizeIterator::len).sum();
        let whole = usize::from(mine == lengths.iter().sum::<usize>()) as i64;
        let owns_everything = scalars.all_reduce_scalar(whole, ReduceOp::Min)? == 1;
        Ok(Trainer {
            config,
            session,
            scalars,
            flops_per_token: config.model.flops_per_token(config.model.block_size),
            model,
            batches,
            share,
            strategy,
            params,
            optimizers,
            owns_everything,
            validation,
            peak_flops,
            traffic: Vec::new(),
        })
    }

    fn step(&mut self, step: u64) -> Result<StepReport, TrainError> {
        let before = self.counted();
        let start = Instant::now();
        let mut clock = Clock::default();
        let mut data = Duration::ZERO;
        let mut compute = Duration::ZERO;

        // Gradients: summed over the micro-steps, handed to the strategy during the last one.
        let accumulation = self.config.accumulation;
        let mut sums: Vec<Vec<f32>> = vec![Vec::new(); self.params.len()];
        let mut loss = 0.0;
        for micro_step in 0..accumulation {
            let reading = Instant::now();
            let batch = self.batches.rows(step, micro_step, self.share)?;
            data += reading.elapsed();
            let is_last = micro_step + 1 == accumulation;
            let passing = Instant::now();
            let mut elsewhere = Duration::ZERO;
            let strategy = &mut self.strategy;
            let mean = self.model.forward_backward::<TrainError>(
                &batch,
                1.0 / accumulation as f32,
                &mut |segment, grads| {
                    let leaving = Instant::now();
                    let flat = clock.pack(|| -> Result<Vec<f32>, ModelError> {
                        let flat = grads.into_flat()?;
                        let sum = &mut sums[segment];
                        if sum.is_empty() {
                            return Ok(flat);
                        }
                        sum.iter_mut().zip(&flat).for_each(|(sum, value)| *sum += value);
                        Ok(std::mem::take(sum))
                    })?;
                    if is_last {
                        strategy.gradient(segment, flat, &mut clock)?;
                    } else {
                        sums[segment] = flat;
                    }
                    elsewhere += leaving.elapsed();
                    Ok(())
                },
            )?;
            compute += passing.elapsed() - elsewhere;
            loss += mean / accumulation as f64;
        }
        let grads = self.strategy.synchronise(&mut clock)?;

        // Loss and norm over all ranks, in one small all-reduce that every strategy needs alike.
        let norming = Instant::now();
        let squares: f64 = grads.iter().map(|grads| sum_of_squares(grads)).sum();
        let mut optimizer = norming.elapsed();
        let talking = Instant::now();
        let mut sums = [loss, squares];
        self.scalars.all_reduce(&mut sums, ReduceOp::Sum)?;
        let scalars = talking.elapsed();
        let loss = sums[0] / self.share.world as f64;
        let grad_norm = if self.owns_everything { squares } else { sums[1] }.sqrt();
        for (what, value) in [("the loss", loss), ("the gradient norm", grad_norm)] {
            if !value.is_finite() {
                return Err(TrainError::NotFinite { step: step + 1, what, value });
            }
        }

        let updating = Instant::now();
        let learning_rate = self.config.learning_rate.at(step);
        let factor = if self.config.clip > 0.0 { clip_factor(grad_norm, self.config.clip) } else { 1.0 };
        let owned = self.strategy.owned();
        for (((optimizer, params), range), grads) in
            self.optimizers.iter_mut().zip(&mut self.params).zip(owned).zip(&grads)
        {
            optimizer.step(&mut params[range.clone()], grads, learning_rate, factor)?;
        }
        optimizer += updating.elapsed();
        drop(grads);

        self.strategy.distribute(&mut self.params, &mut clock)?;
        clock.unpack(|| -> Result<(), ModelError> {
            for (segment, params) in self.params.iter().enumerate() {
                self.model.write_params(segment, params)?;
            }
            Ok(())
        })?;

        let elapsed = start.elapsed();
        let traffic = self.counted().zip(before).map(|(after, before)| after.since(&before));
        let bytes_sent = traffic.as_ref().map(|traffic| traffic.payload_sent(Some(self.session.comm.id())));
        self.traffic.extend(traffic);
        let tokens_per_s = self.batches.tokens_per_step() as f64 / elapsed.as_secs_f64();
        Ok(StepReport {
            step: step + 1,
            loss,
            grad_norm,
            learning_rate,
            ms: ms(elapsed),
            tokens_per_s,
            mfu: tokens_per_s * self.flops_per_token / self.peak_flops,
            parts: Parts {
                data: ms(data),
                compute: ms(compute),
                pack: ms(clock.pack),
                exposed: ms(clock.exposed),
                scalars: ms(scalars),
                unpack: ms(clock.unpack),
                optimizer: ms(optimizer),
                communication: ms(clock.communication()),
            },
            bytes_sent,
        })
    }

    /// Mean validation loss over all ranks.
    fn validate(&mut self) -> Result<f64, TrainError> {
        let mut sums = [0.0f64, 0.0];
        for batch in &self.validation {
            sums[0] += self.model.loss(batch)? * batch.rows as f64;
            sums[1] += batch.rows as f64;
        }
        self.scalars.all_reduce(&mut sums, ReduceOp::Sum)?;
        Ok(sums[0] / sums[1])
    }

    fn summary(
        &mut self,
        corpus: &Corpus,
        reports: &[StepReport],
        validation_loss: Option<f64>,
        checkpoint: Option<PathBuf>,
    ) -> Result<Summary, TrainError> {
        let config = self.config;
        let hash = weights_hash(&self.model)?;
        let steady: Vec<&StepReport> = reports.iter().skip(if reports.len() > 4 { 2 } else { 0 }).collect();
        let parts = median_parts(&steady);
        let mine = self.rank_report(hash.clone(), parts);
        let blob = serde_json::to_vec(&mine)
            .map_err(|error| comm_core::Error::InvalidArgument(format!("a rank's report: {error}")))?;
        let ranks = self
            .session
            .control
            .all_gather("rank reports", &blob, Deadline::after(self.session.timeout))?
            .iter()
            .map(|blob| serde_json::from_slice(blob))
            .collect::<Result<Vec<RankReport>, _>>()
            .map_err(|error| comm_core::Error::Protocol {
                who: "a rank".into(),
                what: format!("its report: {error}"),
            })?;
        if ranks.iter().any(|rank| rank.weights_hash != hash) {
            let hashes: Vec<String> =
                ranks.iter().map(|rank| format!("rank {}: {:.12}", rank.rank, rank.weights_hash)).collect();
            return Err(TrainError::Diverged(hashes.join(", ")));
        }
        self.save(corpus, config.steps, checkpoint.as_deref())?;
        Ok(Summary {
            steps: config.steps,
            weights_hash: hash,
            final_loss: reports.last().map_or(f64::NAN, |report| report.loss),
            validation_loss,
            losses: reports.iter().map(|report| report.loss).collect(),
            grad_norms: reports.iter().map(|report| report.grad_norm).collect(),
            tokens_per_s: median(steady.iter().map(|report| report.tokens_per_s)),
            step_ms: median(steady.iter().map(|report| report.ms)),
            parts,
            ranks,
            mfu: median(steady.iter().map(|report| report.mfu)),
            mfu_formula: format!(
                "tokens/s × {:.1} MFLOP a token (6N + 12·L·H·Q·T, N without positions) over {:.1} GFLOP/s, what the {} rank(s) \
                 reached together in f32 matrix products before the run",
                self.flops_per_token / 1e6,
                self.peak_flops / 1e9,
                self.share.world
            ),
            transport: self.session.facts.clone(),
            checkpoint,
        })
    }

    /// Saves the model, on rank 0.
    fn save(&self, corpus: &Corpus, step: u64, path: Option<&Path>) -> Result<(), TrainError> {
        let Some(path) = path.filter(|_| self.share.rank == 0) else { return Ok(()) };
        let tokenizer = serde_json::to_value(corpus.tokenizer())
            .map_err(|error| comm_core::Error::Internal(format!("the tokenizer's description: {error}")))?;
        Ok(Checkpoint::of(&self.model, tokenizer, step)?.save(path)?)
    }

    fn rank_report(&self, weights_hash: String, parts: Parts) -> RankReport {
        let Share { rank, world, .. } = self.share;
        let lengths: Vec<usize> = self.params.iter().map(Vec::len).collect();
        let expected =
            formula::payload_sent(self.config.strategy, &Layout::new(&lengths), &self.config.options, world, rank);
        let (work, scalars) = (Some(self.session.comm.id()), Some(self.scalars.id()));
        let counted = |count: &dyn Fn(&Traffic) -> u64| -> Option<u64> {
            let mut all: Vec<u64> = self.traffic.iter().map(count).collect();
            all.sort_unstable();
            all.get(all.len() / 2).copied()
        };
        RankReport {
            rank,
            bytes_counted: counted(&|traffic| traffic.payload_sent(work)),
            bytes_expected: expected,
            bytes_steady: self.traffic.windows(2).all(|pair| pair[0].payload_sent(work) == pair[1].payload_sent(work)),
            scalar_bytes: counted(&|traffic| traffic.payload_sent(scalars)),
            framing_bytes: counted(&|traffic| traffic.flows.values().map(|flow| flow.sent.header_bytes()).sum()),
            messages: counted(&|traffic| traffic.messages_sent(work)),
            parts,
            peak_rss_bytes: memory::peak_rss_bytes() / self.session.ranks_in_process as u64,
            weights_hash,
        }
    }

    /// Traffic so far.
    fn counted(&self) -> Option<Traffic> {
        self.session.counters.as_ref().map(|counters| counters.snapshot())
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

fn median_parts(reports: &[&StepReport]) -> Parts {
    let of = |part: fn(&Parts) -> f64| median(reports.iter().map(|report| part(&report.parts)));
    Parts {
        data: of(|parts| parts.data),
        compute: of(|parts| parts.compute),
        pack: of(|parts| parts.pack),
        exposed: of(|parts| parts.exposed),
        scalars: of(|parts| parts.scalars),
        unpack: of(|parts| parts.unpack),
        optimizer: of(|parts| parts.optimizer),
        communication: of(|parts| parts.communication),
    }
}

fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
