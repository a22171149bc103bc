//! One run of one cell: its processes, and what becomes of what they leave.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use gpt2::config::{ConfigError, Preset};
use gpt2::optim::LearningRate;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::trainer::{Summary, TrainConfig};
use isocomm::{Rung, TransportKind, TransportOptions};

use super::job::Training;
use super::skew;
use super::task::RankOutput;
use super::text::TextSource;
use super::trace::trace;
use crate::environment::Environment;
use crate::flag::{Flag, FlagKind};
use crate::formula::off_the_formula;
use crate::link::World;
use crate::machine::{self, Watch};
use crate::outcome::RunError;
use crate::record::{Cell, DEFAULT, Link, Measured, Record, SCHEMA, Status};
use crate::signal::{Interrupted, Signals};

/// Everything about a run that its cell does not say.
pub struct CellRun<'a> {
    pub plan: &'a str,
    pub round: u32,
    pub position: u64,
    pub timeout: Duration,
    pub text: &'a TextSource,
    pub environment: &'a Environment,
    /// Where runs have their own folders while they last.
    pub out: &'a Path,
    pub signals: &'a Signals,
    /// Where to write a trace, if at all.
    pub trace: Option<PathBuf>,
}

/// How a run's processes ended.
enum Ended {
    Well(Vec<RankOutput>),
    Badly(Status),
}

impl CellRun<'_> {
    /// Runs the cell over `world`. A run that fails is a record that says why.
    ///
    /// # Errors
    /// [`Interrupted`] when the user interrupts it.
    pub fn run(&self, cell: &Cell, world: Result<&World, Status>) -> Result<Record, Interrupted> {
        let started_unix_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let began = Instant::now();
        let player = world.as_ref().ok().and_then(|world| world.process());
        let watch = Watch::start(player.into_iter().collect());
        let ended = match &world {
            Ok(world) => self.processes(cell, world)?,
            Err(status) => Ended::Badly(status.clone()),
        };
        let wall_s = began.elapsed().as_secs_f64();
        let mut flags = watch.finish();
        flags.extend(machine::shared_cores(cell.ranks, cell.threads).filter(|_| matches!(ended, Ended::Well(_))));
        let (status, measured) = match ended {
            Ended::Badly(status) => (status, None),
            Ended::Well(outputs) => match self.measured(cell, outputs, &mut flags) {
                Ok(measured) => {
                    let link = world.map_or_else(|_| Ok(Link::default()), |world| link(world, &mut flags));
                    match link {
                        Ok(link) => (Status::Ok, Some(Measured { link, ..measured })),
                        Err(why) => (Status::Failed(why), None),
                    }
                }
                Err(why) => (Status::Failed(why), None),
            },
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

    fn processes(&self, cell: &Cell, world: &World) -> Result<Ended, Interrupted> {
        let failed = |why: String| Ok(Ended::Badly(Status::Failed(why)));
        let rung: Option<Rung> = match cell.strategy.as_str() {
            "single" => None,
            _ => match cell.transport.parse() {
                Ok(rung) => Some(rung),
                Err(why) => return failed(why),
            },
        };
        let no_nodes = rung.is_some_and(Rung::is_timing_only) && cell.strategy == "hierarchical";
        let no_nodes = no_nodes.then(|| format!("{} does not support nodes", cell.transport));
        if let Some(why) = rung.and_then(Rung::missing).or(no_nodes) {
            return Ok(Ended::Badly(Status::NotAvailable(why)));
        }
        let training = match self.training(cell, rung) {
            Ok(training) => training,
            Err(why) => return failed(why),
        };
        self.signals.check()?;
        match training.run(world) {
            Ok(outputs) => Ok(Ended::Well(outputs)),
            Err(RunError::TimedOut(why)) => Ok(Ended::Badly(Status::TimedOut(why))),
            Err(RunError::Failed(why)) => failed(why),
            Err(RunError::Interrupted(interrupted)) => Err(interrupted),
        }
    }

    fn training(&self, cell: &Cell, rung: Option<Rung>) -> Result<Training, String> {
        let congestion = (cell.congestion != DEFAULT).then(|| cell.congestion.clone());
        let options = TransportOptions {
            lanes: cell.lanes,
            timeout: self.timeout / 2,
            congestion,
            mtu: cell.quic_mtu,
            ..TransportOptions::default()
        };
        let node_transport = match cell.strategy.parse()? {
            StrategyKind::Hierarchical if rung.is_some_and(Rung::is_threads) => Some(TransportKind::LOCAL),
            StrategyKind::Hierarchical => Some(TransportKind::SHM),
            _ => None,
        };
        let training = Training::new(config(cell, self.text)?, None, cell.ranks, cell.threads, self.timeout);
        Ok(Training {
            rung,
            options,
            node_transport,
            source: self.text.source.clone(),
            tokenizer: self.text.tokenizer,
            watched: true,
            planted: cell.planted.clone(),
            within: Some(self.out.to_owned()),
            ..training
        })
    }

    /// What the ranks' figures say together. A trace is written on the way.
    fn measured(&self, cell: &Cell, outputs: Vec<RankOutput>, flags: &mut Vec<Flag>) -> Result<Measured, String> {
        let mut summary = None;
        let mut networks = Vec::new();
        let mut steps = Vec::new();
        for process in outputs {
            networks.push(process.network);
            steps.extend(process.steps);
            summary = summary.or(process.summary);
        }
        let summary = summary.ok_or("rank 0 has left no summary")?;
        let mut ranks = skew::ranks(&steps);
        for (rank, report) in ranks.iter_mut().zip(&summary.ranks) {
            rank.payload_bytes = report.bytes_counted;
            rank.payload_expected = report.bytes_expected;
            rank.messages = report.messages;
            rank.messages_expected = report.expected.messages;
            rank.scalar_bytes = report.scalar_bytes;
            rank.framing_bytes = report.framing_bytes;
            rank.peak_rss_bytes = report.peak_rss_bytes;
        }
        for (rank, network) in ranks.iter_mut().zip(networks) {
            rank.network = network;
        }
        // Nothing arrives over `null`, and nothing is counted.
        let timing_only = cell.transport.parse().is_ok_and(Rung::is_timing_only);
        let off = summary.ranks.iter().find_map(off_the_formula);
        if let Some(what) = off.filter(|_| !timing_only) {
            flags.push(Flag { kind: FlagKind::OffTheFormula, what });
        }
        if let Some(path) = &self.trace
            && let Err(why) = write_trace(path, cell, &steps)
        {
            // The figures are what counts.
            eprintln!("warning: no trace of a run: {why}");
        }
        Ok(measured(cell, self.text, ranks, summary))
    }
}

/// What the link did, with a doubt where it was not itself.
fn link(world: &World, flags: &mut Vec<Flag>) -> Result<Link, String> {
    flags.extend(world.bottleneck()?.map(|what| Flag { kind: FlagKind::EmulatorBehind, what }));
    Ok(Link { description: world.describe(), emulator: world.pipes()? })
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

fn measured(cell: &Cell, text: &TextSource, ranks: Vec<crate::record::Rank>, summary: Summary) -> Measured {
    let model = cell.preset.parse::<Preset>().map(|preset| preset.config(text.vocabulary)).ok();
    Measured {
        tokens_per_step: model.as_ref().map_or(0, |model| (cell.batch * model.block_size) as u64),
        parameters: model.map_or(0, |model| model.parameter_count() as u64),
        losses: finite(&summary.losses),
        grad_norms: finite(&summary.grad_norms),
        seconds: summary.seconds,
        weights_hash: summary.weights_hash,
        ranks,
        transport_facts: summary.transport,
        link: Link::default(),
    }
}

fn finite(values: &[f64]) -> Vec<Option<f64>> {
    values.iter().map(|value| Some(*value).filter(|value| value.is_finite())).collect()
}

/// The training that a cell means.
fn config(cell: &Cell, text: &TextSource) -> Result<TrainConfig, String> {
    let preset: Preset = cell.preset.parse().map_err(|why: ConfigError| why.to_string())?;
    let defaults = StrategyOptions::default();
    let options = StrategyOptions {
        wire: cell.wire.parse()?,
        bucket_bytes: cell.bucket_bytes,
        first_bucket_bytes: defaults.first_bucket_bytes.min(cell.bucket_bytes),
        overlap: cell.overlap,
        ranks_per_node: cell.ranks_per_end(),
        ..defaults
    };
    Ok(TrainConfig {
        options,
        precision: cell.precision.parse()?,
        seed: cell.seed,
        steps: cell.steps,
        global_batch: cell.batch,
        accumulation: cell.accumulation,
        recompute: cell.recompute,
        learning_rate: LearningRate::WarmupCosine { peak: 1e-3, floor: 1e-4, warmup: 5, total: cell.steps.max(10) },
        ..TrainConfig::of(preset.config(text.vocabulary), cell.strategy.parse()?)
    })
}
