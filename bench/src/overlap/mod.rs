//! `bench overlap`: how much of the communication hides behind the backward pass, over a link that is slow enough to show it.
//!
//! The same model trains by `ddp`, by `ddp` whose communication starts after the backward pass, and by `ring`, over each
//! transport, in processes that live in two network namespaces with a rate-limited link between them.

mod options;
mod report;

use std::process::ExitCode;

use gpt2::cli::say;
use gpt2::corpus::Corpus;
use gpt2::optim::LearningRate;
use gpt2::strategy::StrategyOptions;
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::TrainConfig;
use isocomm::TransportKind;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::folder::results_folder;
use rig::lines::Lines;
use rig::link::{Probe, World, gain_namespaces};
use rig::outcome::{self, RunError};
use rig::rank::load_text;
use rig::signal::Signals;
use rig::training::{Figures, Training};

pub(crate) use options::OverlapArgs;

use crate::rounds::in_rounds;
use options::{Settings, Variant};
use report::{Cell, Row, Table};

/// Runs the benchmark; fails when a job that should have run did not, or transports came to different weights.
pub(crate) fn run(args: &OverlapArgs) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    let settings = args.check()?;
    if settings.link.is_some() {
        gain_namespaces();
    }
    // Before the link: from here on a signal ends this program in good order.
    let signals = Signals::catch()?;
    let corpus = load_text(settings.data.as_deref(), TOKENIZER)?;
    let out = results_folder(settings.out.clone(), "overlap")?;
    let mut file = Lines::create(&out.join("overlap.jsonl"))?;
    let place = World::of(settings.link.as_ref())?;
    let probe = Probe::of(&place)?;
    let bench =
        Bench { settings, vocabulary: corpus.vocab_size(), place, probe, environment: Environment::read(), signals };
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
    signals: Signals,
}

impl Bench {
    fn introduce(&self, corpus: &Corpus) {
        let Settings { preset, ranks, threads, batch, steps, rounds, wire, .. } = &self.settings;
        let model = preset.config(self.vocabulary);
        say(format_args!("text: {}", corpus.describe()));
        say(format_args!("machine: {}", self.environment.one_line()));
        let measured = self.probe.map_or(String::new(), |probe| format!("; measured {probe}"));
        say(format_args!("network: {}{measured}", self.place.describe()));
        say(format_args!(
            "{preset} ({:.2} M parameters, bytes), {ranks} ranks × {threads} thread(s), {batch} sequences of {} tokens a step, \
             {steps} steps, {rounds} rounds, wire {wire}",
            model.parameter_count() as f64 / 1e6,
            model.block_size,
        ));
    }

    fn measure(&self, file: &mut Lines) -> Result<Table, BenchError> {
        let cells = self.cells();
        let name = |(transport, variant): &Cell| format!("{variant} over {transport}");
        let row = |round, (transport, variant): &Cell| self.row(round, *transport, *variant);
        let rows = in_rounds((&cells, self.settings.rounds), &self.signals, file, name, row)?;
        let mut table = Table::new(&cells);
        rows.into_iter().for_each(|row| table.add(row));
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
            None => outcome::settled(self.figures(transport, variant))?.map_err(|why| format!("failed: {why}")),
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

    fn figures(&self, transport: TransportKind, variant: Variant) -> Result<Figures, RunError> {
        Ok(Figures::of(&self.training(transport, variant).run(&self.place)?)?)
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
            node_transport: self.settings.link.is_some().then_some(TransportKind::SHM),
            ..Training::new(config, Some(transport), settings.ranks, settings.threads, settings.cell_timeout)
        }
    }
}
