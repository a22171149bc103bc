//! One run of one cell: its processes, and what becomes of what they leave.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gpt2::config::{ConfigError, ModelConfig, Preset};
use gpt2::optim::{LearningRate, LossScaling, OptimizerConfig, OptimizerKind};
use gpt2::strategy::{Compression, LocalOptions, StrategyKind, StrategyOptions};
use gpt2::trainer::{RankReport, Summary, TrainConfig};
use isocomm::{Rung, TransportKind, TransportOptions};

use super::job::Training;
use super::launched::{LaunchedRanks, Ran};
use super::schedule::schedule;
use super::skew;
use super::task::RankOutput;
use super::text::TextSource;
use super::trace::trace;
use crate::environment::Environment;
use crate::flag::{Flag, FlagKind};
use crate::formula::off_the_formula;
use crate::link::TestNetwork;
use crate::machine::{self, Watch};
use crate::outcome::RunError;
use crate::record::{Cell, DEFAULT, Link, Measured, Rank, Record, SCHEMA, Status, Trained, TrainedRank};
use crate::signal::{Interrupted, Signals};

/// Everything about a run that its cell does not say.
pub struct CellRun<'a> {
    pub plan: &'a str,
    pub round: u32,
    pub position: u64,
    pub timeout: Duration,
    /// Whether each rank keeps what every step did, which takes memory. Without it the record has what the trainer itself says.
    pub watched: bool,
    pub text: &'a TextSource,
    pub environment: &'a Environment,
    /// Where runs have their own folders while they last.
    pub out: &'a Path,
    pub signals: &'a Signals,
    /// The ranks of a launcher, of which this process is rank 0, where they run it.
    pub launched: Option<&'a LaunchedRanks>,
    /// Where to write a trace, if at all.
    pub trace: Option<PathBuf>,
}

/// What a run's processes came to, with doubts about it, or how they ended instead.
pub type CellOutcome = Result<(Measured, Vec<Flag>), Status>;

/// How a run ended that this error ended.
///
/// # Errors
/// [`Interrupted`] when a signal came.
pub fn status(error: RunError) -> Result<Status, Interrupted> {
    match error {
        RunError::Failed(why) => Ok(Status::Failed(why)),
        RunError::TimedOut(why) => Ok(Status::TimedOut(why)),
        RunError::Interrupted(interrupted) => Err(interrupted),
    }
}

impl CellRun<'_> {
    /// Trains as the cell says, over `network`. A run that fails is a record that says why.
    ///
    /// # Errors
    /// [`Interrupted`] when the user interrupts it.
    pub fn run(&self, cell: &Cell, network: Result<&TestNetwork, Status>) -> Result<Record, Interrupted> {
        self.run_by(cell, network, |network| self.train(cell, network))
    }

    /// The record of what `train` does over `network`.
    ///
    /// # Errors
    /// As [`run`](CellRun::run).
    pub fn run_by(
        &self,
        cell: &Cell,
        network: Result<&TestNetwork, Status>,
        train: impl FnOnce(&TestNetwork) -> Result<CellOutcome, Interrupted>,
    ) -> Result<Record, Interrupted> {
        let started_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let began = Instant::now();
        let player = network.as_ref().ok().and_then(|network| network.process());
        let others = self.launched.map(LaunchedRanks::beside).unwrap_or_default();
        let watch = network.is_ok().then(|| Watch::start(player.into_iter().chain(others).collect()));
        let ended = match &network {
            Ok(network) => train(network)?,
            Err(status) => Err(status.clone()),
        };
        let wall_s = began.elapsed().as_secs_f64();
        let mut flags = watch.map(Watch::finish).unwrap_or_default();
        let shared = match self.launched {
            Some(launched) => launched.shared_cores(cell.threads),
            None => machine::shared_cores(cell.ranks, cell.threads),
        };
        flags.extend(shared.filter(|_| ended.is_ok()));
        let outcome = ended.and_then(|(measured, doubts)| {
            flags.extend(doubts);
            let link = match self.launched {
                Some(launched) => Ok(Link { description: launched.describe(), ..Link::default() }),
                None => network.map_or_else(|_| Ok(Link::default()), |network| link(network, &mut flags)),
            };
            Ok(Measured { link: link.map_err(Status::Failed)?, ..measured })
        });
        let (status, measured) = match outcome {
            Ok(measured) => (Status::Ok, Some(measured)),
            Err(status) => (status, None),
        };
        Ok(Record {
            schema: SCHEMA,
            plan: self.plan.to_string(),
            cell: cell.clone(),
            round: self.round,
            position: self.position,
            started_unix_s,
            wall_s,
            status,
            flags,
            measured,
            environment: self.environment.clone(),
        })
    }

    fn train(&self, cell: &Cell, network: &TestNetwork) -> Result<CellOutcome, Interrupted> {
        let failed = |why: String| Ok(Err(Status::Failed(why)));
        // Who is alone has nobody to talk to.
        let rung: Option<Rung> = match cell.strategy.as_str() {
            "single" => None,
            _ if cell.ranks == 1 => None,
            _ => match cell.transport.parse() {
                Ok(rung) => Some(rung),
                Err(why) => return failed(why),
            },
        };
        let has_nodes = cell.strategy.parse::<StrategyKind>().is_ok_and(|kind| kind.spec().tells_nodes_apart);
        let no_nodes = rung.is_some_and(Rung::is_timing_only) && has_nodes;
        let no_nodes = no_nodes.then(|| format!("{} does not support nodes", cell.transport));
        if let Some(why) = rung.and_then(Rung::missing).or(no_nodes) {
            return Ok(Err(Status::NotAvailable(why)));
        }
        let training = match self.training(cell, rung) {
            Ok(training) => training,
            Err(why) => return failed(why),
        };
        self.signals.check()?;
        let here = |outputs| Ran { outputs, hosts: Vec::new(), doubts: Vec::new() };
        let ran = match self.launched {
            Some(launched) => launched.run(&training),
            None => training.run(network).map(here),
        };
        match ran {
            Ok(Ran { outputs, hosts, doubts }) => Ok(self
                .measured(cell, outputs)
                .map(|(measured, flags)| (Measured { hosts, ..measured }, [flags, doubts].concat()))
                .map_err(Status::Failed)),
            Err(error) => Ok(Err(status(error)?)),
        }
    }

    fn training(&self, cell: &Cell, rung: Option<Rung>) -> Result<Training, String> {
        let kind: StrategyKind = cell.strategy.parse()?;
        let congestion = (cell.congestion != DEFAULT).then(|| cell.congestion.clone());
        let options = TransportOptions {
            lanes: cell.lanes,
            timeout: self.timeout / 2,
            congestion,
            mtu: cell.quic_mtu,
            ..TransportOptions::default()
        };
        let of_its_own = kind.spec().tells_nodes_apart && !cell.one_transport;
        let of_memory = if rung.is_some_and(Rung::is_threads) { TransportKind::LOCAL } else { TransportKind::SHM };
        let node_transport = of_its_own.then_some(of_memory);
        let training = Training::new(config(cell, self.text.vocabulary)?, None, cell.ranks, cell.threads, self.timeout);
        Ok(Training {
            rung,
            options,
            node_transport,
            source: self.text.source.clone(),
            tokenizer: self.text.tokenizer,
            watched: self.watched,
            planted: cell.planted.clone(),
            within: Some(self.out.to_owned()),
            ..training
        })
    }

    /// What the ranks' figures say together. A trace is written on the way.
    fn measured(&self, cell: &Cell, outputs: Vec<RankOutput>) -> Result<(Measured, Vec<Flag>), String> {
        let mut summaries = Vec::new();
        let mut networks = Vec::new();
        let mut steps = Vec::new();
        for process in outputs {
            networks.push(process.network);
            steps.extend(process.steps);
            summaries.extend(process.summary);
        }
        let reports: Vec<&RankReport> = summaries.iter().flat_map(|summary| &summary.ranks).collect();
        let mut ranks = if self.watched { skew::ranks(&steps) } else { unwatched(&reports) };
        for (rank, report) in ranks.iter_mut().zip(&reports) {
            rank.payload_bytes = report.bytes_counted;
            rank.payload_expected = report.bytes_expected;
            rank.messages = report.messages;
            rank.messages_expected = report.expected.messages;
            rank.scalar_bytes = report.scalar_bytes;
            rank.framing_bytes = report.framing_bytes;
            rank.staleness = report.staleness;
            rank.peak_rss_bytes = report.peak_rss_bytes;
        }
        for (rank, network) in ranks.iter_mut().zip(networks) {
            rank.network = network;
        }
        // Nothing arrives over `null`, and nothing is counted.
        let timing_only = cell.transport.parse().is_ok_and(Rung::is_timing_only);
        let off = reports.iter().find_map(|report| off_the_formula(report)).filter(|_| !timing_only);
        let flags = off.map(|what| Flag { kind: FlagKind::OffTheFormula, what }).into_iter().collect();
        if let Some(path) = &self.trace
            && let Err(why) = write_trace(path, cell, &steps)
        {
            // The figures are what counts.
            eprintln!("warning: the trace of a run could not be written: {why}");
        }
        let trained = (!self.watched).then(|| trained(&summaries));
        let summary = summaries.into_iter().next().ok_or("rank 0 has left no summary")?;
        Ok((Measured { trained, ..measured(cell, self.text, ranks, summary) }, flags))
    }
}

/// Ranks with what the trainer says of them.
fn unwatched(reports: &[&RankReport]) -> Vec<Rank> {
    let one = |(rank, report): (usize, &&RankReport)| Rank {
        rank,
        trained: Some(TrainedRank {
            computes: report.computes,
            operations: report.operations,
            operations_expected: report.expected.operations,
            optimizer_steps: report.optimizer_steps,
            parts: report.parts,
            cpu_utilization: Some(report.cpu_utilization).filter(|share| share.is_finite()),
            gpu_utilization: report.gpu_utilization,
            memory: report.memory,
            allocations: report.allocations,
            copies: Some(report.copies),
        }),
        ..Rank::default()
    };
    reports.iter().enumerate().map(one).collect()
}

/// What the trainer says of a job, or of ranks that each trained by themselves.
fn trained(summaries: &[Summary]) -> Trained {
    let finite = |value: f64| Some(value).filter(|value| value.is_finite());
    let first = summaries.first();
    Trained {
        step_ms: finite(summaries.iter().map(|summary| summary.step_ms).fold(0.0, f64::max)),
        tokens_per_s: finite(summaries.iter().map(|summary| summary.tokens_per_s).sum()),
        epochs: first.map_or(Vec::new(), |summary| summary.epochs.clone()),
        validations: first.map_or(Vec::new(), |summary| {
            summary.validations.iter().map(|(step, loss)| (*step, finite(*loss))).collect()
        }),
        skipped_steps: summaries.iter().map(|summary| summary.skipped_steps).max().unwrap_or(0),
    }
}

/// What the link did, with a doubt where it was not itself.
fn link(network: &TestNetwork, flags: &mut Vec<Flag>) -> Result<Link, String> {
    flags.extend(network.bottleneck()?.map(|what| Flag { kind: FlagKind::EmulatorBehind, what }));
    Ok(Link { description: network.describe(), emulator: network.pipes()?, probe: None })
}

/// The last steps of a run, which are as steady as any.
const TRACED_STEPS: usize = 10;

fn write_trace(path: &Path, cell: &Cell, steps: &[Vec<skew::Step>]) -> Result<(), String> {
    let last: Vec<Vec<skew::Step>> =
        steps.iter().map(|steps| steps[steps.len().saturating_sub(TRACED_STEPS)..].to_vec()).collect();
    let name = format!("{} {} {} {} ranks", cell.strategy, cell.transport, cell.link, cell.ranks);
    let bytes = serde_json::to_vec(&trace(&name, &last)).map_err(|error| format!("a trace: {error}"))?;
    std::fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
}

fn measured(cell: &Cell, text: &TextSource, ranks: Vec<Rank>, summary: Summary) -> Measured {
    let model = model(cell, text.vocabulary).ok();
    Measured {
        tokens_per_step: model.as_ref().map_or(0, |model| (cell.batch * model.block_size) as u64),
        parameters: model.map_or(0, |model| model.parameter_count() as u64),
        losses: finite(&summary.losses),
        grad_norms: finite(&summary.grad_norms),
        seconds: summary.seconds,
        weights_hash: summary.weights_hash,
        ranks,
        transport_facts: summary.transport,
        ..Measured::default()
    }
}

fn finite(values: &[f64]) -> Vec<Option<f64>> {
    values.iter().map(|value| Some(*value).filter(|value| value.is_finite())).collect()
}

/// The model of a cell, for a text with so many tokens.
///
/// # Errors
/// There is no such preset, or no model of that shape.
pub fn model(cell: &Cell, vocabulary: usize) -> Result<ModelConfig, String> {
    let preset: Preset = cell.preset.parse().map_err(|why: ConfigError| why.to_string())?;
    let usual = preset.config(vocabulary);
    let model = ModelConfig {
        n_layer: cell.model.layers.unwrap_or(usual.n_layer),
        n_head: cell.model.heads.unwrap_or(usual.n_head),
        n_embd: cell.model.width.unwrap_or(usual.n_embd),
        block_size: cell.model.block.unwrap_or(usual.block_size),
        ..usual
    };
    model.validate().map_err(|why| why.to_string())?;
    Ok(model)
}

/// What a cell says of the strategies' own settings.
pub fn local_options(cell: &Cell) -> LocalOptions {
    let usual = LocalOptions::default();
    LocalOptions {
        sync_every: cell.sync_every.unwrap_or(usual.sync_every),
        staleness: cell.staleness.unwrap_or(usual.staleness),
        ..usual
    }
}

/// The training that a cell means.
///
/// # Errors
/// A value that means nothing.
pub fn config(cell: &Cell, vocabulary: usize) -> Result<TrainConfig, String> {
    let defaults = StrategyOptions::default();
    let options = StrategyOptions {
        wire: cell.wire.parse()?,
        bucket_bytes: cell.bucket_bytes,
        first_bucket_bytes: cell.first_bucket_bytes.unwrap_or(defaults.first_bucket_bytes.min(cell.bucket_bytes)),
        fusion_bytes: cell.fusion_bytes.unwrap_or(defaults.fusion_bytes),
        overlap: cell.overlap,
        dedicated_server: cell.dedicated_server,
        ranks_per_node: cell.ranks_per_node(),
        compress: cell.compress.as_deref().map_or(Ok(Compression::None), str::parse)?,
        local: local_options(cell),
    };
    let usual = TrainConfig::of(model(cell, vocabulary)?, cell.strategy.parse()?);
    let clip = cell.clip.as_ref().map(|clip| clip.parse().map_err(|_| format!("`{clip}` is not a norm")));
    let scaling = cell.loss_scaling.as_ref().map(|scaling| scaling.parse::<LossScaling>());
    let loss_scaling = scaling.transpose()?;
    Ok(TrainConfig {
        options,
        precision: cell.precision.parse()?,
        seed: cell.seed,
        steps: cell.steps,
        global_batch: if cell.alone { cell.batch / cell.ranks } else { cell.batch },
        accumulation: cell.accumulation,
        recompute: cell.recompute,
        kernels: cell.kernels.parse()?,
        learning_rate: match &cell.schedule {
            Some(text) => schedule(text)?,
            None => LearningRate::WarmupCosine { peak: 1e-3, floor: 1e-4, warmup: 5, total: cell.steps.max(10) },
        },
        clip: clip.transpose()?.unwrap_or(usual.clip),
        short_sequences: cell.short_sequences,
        optimizer: match &cell.optimizer {
            Some(name) => OptimizerConfig::of(name.parse::<OptimizerKind>()?),
            None => usual.optimizer,
        },
        loss_scaling: loss_scaling.unwrap_or(usual.loss_scaling),
        eval_every: cell.validation.map_or(0, |validation| validation.every),
        eval_batches: cell.validation.map_or(usual.eval_batches, |validation| validation.batches),
        ..usual
    })
}
