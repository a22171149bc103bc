//! `bench overlap`: how much of the communication hides behind the backward pass, over a link that is slow enough to show it.
//!
//! The same model trains by `ddp`, by `ddp` whose communication starts after the backward pass, and by `ring`, over each
//! transport, in processes that live in two network namespaces with a rate-limited link between them.

mod options;
mod report;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use gpt2::cli::say;
use gpt2::corpus::{Corpus, CorpusSource};
use gpt2::env::default_cargo_home;
use gpt2::optim::LearningRate;
use gpt2::strategy::StrategyOptions;
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::TrainConfig;
use isocomm::TransportKind;

pub(crate) use options::OverlapArgs;

use crate::BenchError;
use crate::chaos::interrupted;
use crate::environment::Environment;
use crate::folder::results_folder;
use crate::link::{Probe, Training, World, gain_namespaces};
use crate::matrix::{Lines, bar};
use crate::runner::{Interrupted, RunError};
use options::{Settings, Variant};
use report::{Row, Table};

/// Runs the benchmark; fails when a job that should have run did not, or transports came to different weights.
pub(crate) fn run(args: &OverlapArgs) -> Result<ExitCode, BenchError> {
    if cfg!(debug_assertions) {
        if !args.allow_debug {
            return Err(
                "this is a debug build, whose timings mean nothing; build with --release, or pass --allow-debug".into(),
            );
        }
        say(format_args!("DEBUG BUILD: the timings below mean nothing"));
    }
    let settings = args.check()?;
    if settings.link.is_some() {
        gain_namespaces();
    }
    // Before the link: from here on a signal ends this program in good order.
    let signal = interrupted()?;
    let corpus = Corpus::load(&CorpusSource::from_path(settings.data.clone(), default_cargo_home()), TOKENIZER)?;
    let out = results_folder(settings.out.clone(), "overlap")?;
    let mut file = Lines::create(&out.join("overlap.jsonl"))?;
    let place = World::of(settings.link.as_ref())?;
    let probe = Probe::of(&place).map_err(ended)?;
    let bench =
        Bench { settings, vocabulary: corpus.vocab_size(), place, probe, environment: Environment::read(), signal };
    bench.introduce(&corpus);
    let table = bench.measure(&mut file)?;
    say(format_args!("{}", table.render(&bench.place)));
    say(format_args!("rows: {}", out.join("overlap.jsonl").display()));
    Ok(if table.is_sound() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

const TOKENIZER: TokenizerKind = TokenizerKind::Bytes;

struct Bench {
    settings: Settings,
    vocabulary: usize,
    place: World,
    probe: Option<Probe>,
    environment: Environment,
    signal: Arc<AtomicUsize>,
}

/// A strategy over a transport.
type Cell = (TransportKind, Variant);

impl Bench {
    fn introduce(&self, corpus: &Corpus) {
        let Settings { preset, ranks, threads, batch, steps, rounds, wire, .. } = &self.settings;
        let model = preset.config(self.vocabulary);
        say(format_args!("text: {}", corpus.describe()));
        say(format_args!("machine: {}", self.environment.one_line()));
        let measured = self.probe.map_or(String::new(), |probe| {
            format!("; measured {:.0} Mbit/s, round trip {:.0} µs", probe.mbit_per_s, probe.round_trip_us)
        });
        say(format_args!("network: {}{measured}", self.place.describe()));
        say(format_args!(
            "{preset} ({:.2} M parameters, bytes), {ranks} ranks × {threads} thread(s), {batch} sequences of {} tokens a step, \
             {steps} steps, {rounds} rounds, wire {wire}",
            model.parameter_count() as f64 / 1e6,
            model.block_size,
        ));
    }

    /// All cells, round by round; each round begins with another one.
    fn measure(&self, file: &mut Lines) -> Result<Table, BenchError> {
        let mut cells = self.cells();
        let mut table = Table::new(&cells);
        let bar = bar(cells.len() * self.settings.rounds);
        for round in 1..=self.settings.rounds {
            for (transport, variant) in &cells {
                self.go_on()?;
                bar.set_message(format!("round {round}: {variant} over {transport}"));
                let row = self.row(round, *transport, *variant)?;
                file.write(&row)?;
                table.add(row);
                bar.inc(1);
            }
            cells.rotate_left(1);
        }
        bar.finish_and_clear();
        Ok(table)
    }

    /// Strategies of one transport beside one another.
    fn cells(&self) -> Vec<Cell> {
        let Settings { transports, variants, .. } = &self.settings;
        transports.iter().flat_map(|transport| variants.iter().map(|variant| (*transport, *variant))).collect()
    }

    fn row(&self, round: usize, transport: TransportKind, variant: Variant) -> Result<Row, BenchError> {
        let outcome = match transport.missing() {
            Some(why) => Err(format!("not available: {why}")),
            None => match self.training(transport, variant).run(&self.place) {
                Ok(figures) => Ok(figures),
                Err(RunError::Failed(why) | RunError::TimedOut(why)) => Err(format!("failed: {why}")),
                Err(RunError::Interrupted(interrupted)) => return Err(interrupted.into()),
            },
        };
        let Settings { preset, ranks, threads, batch, steps, bucket_bytes, wire, seed, .. } = &self.settings;
        let link = self.settings.link.as_ref();
        Ok(Row {
            round,
            strategy: variant,
            transport,
            network: self.place.describe(),
            rate: link.and_then(|link| link.rate),
            mtu: link.map(|link| link.mtu),
            probe: self.probe,
            ranks: *ranks,
            threads_per_rank: *threads,
            model: preset.config(self.vocabulary),
            global_batch: *batch,
            steps: *steps,
            bucket_bytes: bucket_bytes.unwrap_or(StrategyOptions::default().bucket_bytes),
            wire: wire.to_string(),
            seed: *seed,
            status: outcome.as_ref().err().cloned().unwrap_or_else(|| "ok".into()),
            figures: outcome.ok(),
            environment: self.environment.clone(),
        })
    }

    fn training(&self, transport: TransportKind, variant: Variant) -> Training {
        let settings = &self.settings;
        // A node at each end of the link.
        let ranks_per_node = settings.ranks.div_ceil(2);
        let mut options = StrategyOptions {
            wire: settings.wire,
            overlap: variant.overlap,
            ranks_per_node,
            ..StrategyOptions::default()
        };
        if let Some(bytes) = settings.bucket_bytes {
            options.bucket_bytes = bytes;
            options.first_bucket_bytes = options.first_bucket_bytes.min(bytes);
        }
        let config = TrainConfig {
            options,
            seed: settings.seed,
            steps: settings.steps,
            global_batch: settings.batch,
            learning_rate: LearningRate::Constant { rate: 3e-4 },
            ..TrainConfig::of(settings.preset.config(self.vocabulary), variant.strategy)
        };
        Training {
            source: settings.data.clone(),
            tokenizer: TOKENIZER,
            ..Training::new(config, Some(transport), settings.ranks, settings.threads, settings.cell_timeout)
        }
    }

    /// Whether the user still wants the results.
    fn go_on(&self) -> Result<(), BenchError> {
        go_on(&self.signal)
    }
}

/// Whether no signal has come.
pub(crate) fn go_on(signal: &AtomicUsize) -> Result<(), BenchError> {
    match signal.load(Ordering::Relaxed) {
        0 => Ok(()),
        signal => Err(Interrupted { signal: i32::try_from(signal).unwrap_or(2) }.into()),
    }
}

/// For what cannot be a row.
pub(crate) fn ended(error: RunError) -> BenchError {
    match error {
        RunError::Failed(why) | RunError::TimedOut(why) => why.into(),
        // By itself, so that the program ends as a signal ends it.
        RunError::Interrupted(interrupted) => interrupted.into(),
    }
}
