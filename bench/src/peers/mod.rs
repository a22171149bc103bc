//! `bench peers`: the same training in PyTorch and here, side by side.
//!
//! A round runs PyTorch and ours once each: every strategy, ours over every transport, and on both sides ranks that train at the
//! same time without a word to each other. What a step takes beyond that is communication that shows, whoever measures it.

mod options;
mod python;
mod report;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use comm_core::splitmix::SplitMix64;
use gpt2::cli::say;
use gpt2::optim::LearningRate;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::tokenizer::{GPT2_VOCABULARY, TokenizerKind};
use gpt2::trainer::TrainConfig;
use isocomm::TransportKind;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::folder::results_folder;
use rig::lines::Lines;
use rig::link::{Probe, World, gain_namespaces};
use rig::outcome::{self, RunError};
use rig::signal::Signals;
use rig::training::{Figures, Training};

pub(crate) use options::PeersArgs;

use crate::rounds::in_rounds;
use options::{SKIPPED, Settings};
use python::{Mode, Torch, Work};
use report::{Cell, Outcome, Row, Side, Table};

/// Runs the benchmark; fails when something that should have run did not.
pub(crate) fn run(args: &PeersArgs) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    let settings = args.check()?;
    if settings.link.is_some() {
        gain_namespaces();
    }
    // Before the link: from here on a signal ends this program in good order.
    let signals = Signals::catch()?;
    let out = results_folder(settings.out.clone(), "peers")?;
    let mut file = Lines::create(&out.join("peers.jsonl"))?;
    let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
    let tokens = folder.path().join("tokens.bin");
    write_tokens(&tokens, &settings)?;
    let place = World::of(settings.link.as_ref())?;
    let probe = Probe::of(&place)?;
    let (torch, missing) = match &settings.python {
        None => (None, None),
        Some(python) => match outcome::settled(Torch::find(python))? {
            Ok(torch) => (Some(torch), None),
            Err(why) => (None, Some(why)),
        },
    };
    let bench = Bench { settings, place, probe, torch, missing, tokens, environment: Environment::read(), signals };
    bench.introduce();
    let table = bench.measure(&mut file)?;
    say(format_args!("{}", table.render()));
    say(format_args!("rows: {}", out.join("peers.jsonl").display()));
    Ok(if table.is_sound() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Bench {
    settings: Settings,
    place: World,
    probe: Option<Probe>,
    torch: Option<Torch>,
    /// Why there is no `torch`.
    missing: Option<String>,
    tokens: PathBuf,
    environment: Environment,
    signals: Signals,
}

impl Bench {
    fn introduce(&self) {
        let Settings { model, ranks, threads, batch, steps, rounds, .. } = &self.settings;
        say(format_args!("machine: {}", self.environment.one_line()));
        let measured = self.probe.map_or(String::new(), |probe| format!("; measured {probe}"));
        say(format_args!("network: {}{measured}", self.place.describe()));
        match (&self.torch, &self.missing) {
            (Some(torch), _) => say(format_args!("peer: PyTorch {} over Gloo", torch.version)),
            (None, Some(why)) => {
                say(format_args!("peer: PyTorch is left out: {why}; name a Python that has it with --peer-python"))
            }
            (None, None) => {}
        }
        say(format_args!(
            "model: {} layers, {} heads, {} wide, {} positions, {} tokens ({:.2} M parameters); {ranks} ranks × {threads} thread(s), \
             {batch} sequences a step, {} + {SKIPPED} steps, {rounds} rounds",
            model.n_layer,
            model.n_head,
            model.n_embd,
            model.block_size,
            model.vocab_size,
            model.parameter_count() as f64 / 1e6,
            steps - SKIPPED,
        ));
    }

    fn measure(&self, file: &mut Lines) -> Result<Table, BenchError> {
        let cells = self.cells();
        let name = |(side, strategy): &Cell| format!("{} by {side}", strategy.map_or("alone", StrategyKind::name));
        let row = |round, (side, strategy): &Cell| self.row(round, *side, *strategy);
        let rows = in_rounds((&cells, self.settings.rounds), &self.signals, file, name, row)?;
        let mut table = Table::new(&cells);
        rows.into_iter().for_each(|row| table.add(row));
        Ok(table)
    }

    /// First both sides without communication, then each strategy, PyTorch's beside ours.
    fn cells(&self) -> Vec<Cell> {
        let Settings { strategies, transports, .. } = &self.settings;
        let torch = self.torch.is_some();
        let mut cells: Vec<Cell> = torch.then_some((Side::Torch, None)).into_iter().collect();
        cells.push((Side::Alone, None));
        for strategy in strategies {
            if torch && Mode::of(*strategy).is_some() {
                cells.push((Side::Torch, Some(*strategy)));
            }
            cells.extend(transports.iter().map(|transport| (Side::Ours(*transport), Some(*strategy))));
        }
        cells
    }

    fn row(&self, round: usize, side: Side, strategy: Option<StrategyKind>) -> Result<Row, BenchError> {
        let outcome = outcome::settled(self.outcome(side, strategy))?;
        let settings = &self.settings;
        Ok(Row {
            round,
            side,
            strategy,
            torch: self.torch.as_ref().filter(|_| side == Side::Torch).map(|torch| torch.version.clone()),
            network: self.place.describe(),
            probe: self.probe,
            ranks: settings.ranks,
            threads_per_rank: settings.threads,
            model: settings.model.clone(),
            global_batch: settings.batch,
            steps: settings.steps,
            status: outcome.as_ref().err().cloned().unwrap_or_else(|| "ok".into()),
            outcome: outcome.ok(),
            environment: self.environment.clone(),
        })
    }

    fn outcome(&self, side: Side, strategy: Option<StrategyKind>) -> Result<Outcome, RunError> {
        let transport = match side {
            Side::Torch => {
                let torch = self.torch.as_ref().ok_or_else(|| "not available: no PyTorch".to_string())?;
                let mode = match strategy {
                    None => Mode::Alone,
                    Some(strategy) => {
                        Mode::of(strategy).ok_or_else(|| format!("not available: {strategy} in PyTorch"))?
                    }
                };
                return torch.train(mode, &self.work(), &self.place).map_err(failed);
            }
            Side::Alone => None,
            Side::Ours(transport) => Some(transport),
        };
        if let Some(why) = transport.and_then(TransportKind::missing) {
            return Err(format!("not available: {why}").into());
        }
        let figures = self.training(transport, strategy).run(&self.place);
        let figures = figures.and_then(|outputs| Ok(Figures::of(&outputs)?)).map_err(failed)?;
        Ok(Outcome {
            step_ms: figures.step_ms,
            tokens_per_s: figures.tokens_per_s,
            waiting_ms: transport.map(|_| figures.exposed_ms),
            scalars_ms: transport.map(|_| figures.scalars_ms),
            first_loss: figures.first_loss,
            final_loss: figures.final_loss,
            payload_bytes: figures.payload_bytes,
        })
    }

    fn work(&self) -> Work {
        let settings = &self.settings;
        Work {
            model: settings.model.clone(),
            ranks: settings.ranks,
            rows: settings.batch / settings.ranks,
            steps: settings.steps,
            skip: SKIPPED,
            threads: settings.threads,
            tokens: self.tokens.clone(),
            bucket_mb: settings.peer_bucket_mb,
            timeout: settings.cell_timeout,
        }
    }

    fn training(&self, transport: Option<TransportKind>, strategy: Option<StrategyKind>) -> Training {
        let settings = &self.settings;
        let mut options = StrategyOptions { ranks_per_node: settings.ranks.div_ceil(2), ..StrategyOptions::default() };
        if let Some(bytes) = settings.bucket_bytes {
            options.bucket_bytes = bytes;
            options.first_bucket_bytes = options.first_bucket_bytes.min(bytes);
        }
        // Who trains alone has only its own rows.
        let share = if strategy.is_some() { 1 } else { settings.ranks };
        let config = TrainConfig {
            options,
            seed: settings.seed,
            steps: settings.steps,
            global_batch: settings.batch / share,
            learning_rate: LearningRate::Constant { rate: 3e-4 },
            // As PyTorch's side does, with the same AdamW.
            clip: 0.0,
            ..TrainConfig::of(settings.model.clone(), strategy.unwrap_or(StrategyKind::Single))
        };
        Training {
            source: Some(self.tokens.clone()),
            tokenizer: TokenizerKind::Gpt2,
            // The ranks of one end of a link, which share a machine.
            node_transport: transport.and(self.settings.link.as_ref()).map(|_| TransportKind::SHM),
            ..Training::new(config, transport, settings.ranks, settings.threads, settings.cell_timeout)
        }
    }
}

/// A failure is told from something that this machine does not have.
fn failed(ended: RunError) -> RunError {
    match ended {
        RunError::Failed(why) => RunError::Failed(format!("failed: {why}")),
        over => over,
    }
}

/// Random tokens of the whole vocabulary, enough that nobody sees a sequence twice in a few dozen steps, in the layout that both sides
/// read: ids of 16 bits, little-endian.
fn write_tokens(path: &Path, settings: &Settings) -> Result<(), String> {
    const LEAST: usize = 1 << 18;
    const MOST: usize = 1 << 24;
    let sequence = settings.model.block_size + 1;
    // A tenth is kept for validation.
    let wanted = sequence.saturating_mul(settings.batch).saturating_mul(settings.steps as usize).saturating_mul(5) / 4;
    let least = sequence.saturating_mul(settings.batch).saturating_mul(2);
    let count = wanted.clamp(LEAST, MOST).max(least);
    let mut draw = SplitMix64::stream(settings.seed, &[2]);
    let mut bytes = Vec::with_capacity(2 * count);
    for _ in 0..count {
        let id = draw.next_u64() % GPT2_VOCABULARY as u64;
        bytes.extend_from_slice(&(id as u16).to_le_bytes());
    }
    fs::write(path, bytes).map_err(|error| format!("{}: {error}", path.display()))
}
