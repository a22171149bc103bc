//! Every strategy over every transport.

use std::collections::BTreeSet;
use std::process::ExitCode;

use gpt2::cli::say;
use gpt2::precision::Precision;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::tokenizer::TokenizerKind;
use isocomm::{TransportKind, TransportOptions};
use rig::BenchError;
use rig::record::{Cell, DEFAULT, LOOPBACK, NOBODY};
use rig::results::{self, TRACES};
use rig::training::TextSource;

use crate::plan::Plan;
use crate::setup::Setup;
use crate::sweep::Sweep;
use crate::table;

/// Runs the matrix; true if every cell that this machine can run did, and sent what the formula says.
pub(crate) fn run(setup: &Setup) -> Result<bool, BenchError> {
    let model = setup.preset.config(setup.corpus.vocab_size());
    say(format_args!(
        "\nmatrix: {} ({:.2} M parameters, bytes), {} ranks × {} thread(s), {} sequences of {} tokens a step, {} steps, \
         {} round(s), wire {}",
        setup.preset,
        model.parameter_count() as f64 / 1e6,
        setup.ranks,
        setup.threads,
        setup.batch,
        model.block_size,
        setup.steps,
        setup.rounds,
        setup.wire
    ));
    let sweep = Sweep {
        plan: plan(setup),
        text: TextSource {
            source: setup.source.clone(),
            tokenizer: TokenizerKind::Bytes,
            vocabulary: setup.corpus.vocab_size(),
            description: setup.corpus.describe(),
        },
        out: setup.out.clone(),
        environment: setup.environment.clone(),
        signals: setup.signals.clone(),
    };
    std::fs::create_dir_all(setup.out.join(TRACES))
        .map_err(|error| format!("{}: {error}", setup.out.join(TRACES).display()))?;
    let sound = sweep.run(&BTreeSet::new())? == ExitCode::SUCCESS;
    let results = results::read_records(&setup.out)?;
    say(format_args!("{}", table::render(&sweep.plan.cells, &results.records)));
    say(format_args!(
        "step and exposed: medians over steps and rounds; exposed: how long a step waits for communication, late ranks and the scalars \
         of loss and norm included, on the rank where it is longest"
    ));
    sweep.report()?;
    Ok(sound)
}

fn plan(setup: &Setup) -> Plan {
    let transport = |transport: &TransportKind| transport.to_string();
    let cell = |strategy: StrategyKind, transport: String, ranks: usize| Cell {
        strategy: strategy.to_string(),
        transport,
        link: LOOPBACK.into(),
        ranks,
        precision: Precision::F32.to_string(),
        wire: setup.wire.to_string(),
        bucket_bytes: StrategyOptions::default().bucket_bytes,
        overlap: true,
        lanes: TransportOptions::default().lanes,
        congestion: DEFAULT.into(),
        quic_mtu: None,
        seed: setup.seed,
        preset: setup.preset.to_string(),
        batch: setup.batch,
        accumulation: 1,
        recompute: false,
        steps: setup.steps,
        threads: setup.threads,
        planted: None,
        variant: String::new(),
    };
    let mut cells = Vec::new();
    for strategy in &setup.strategies {
        let ranks = match strategy {
            StrategyKind::Single => {
                cells.push(cell(*strategy, NOBODY.into(), 1));
                continue;
            }
            // Two nodes of two ranks are the least that has two levels.
            StrategyKind::Hierarchical if setup.batch.is_multiple_of(setup.ranks.max(4)) => setup.ranks.max(4),
            _ => setup.ranks,
        };
        cells.extend(setup.transports.iter().map(transport).map(|transport| cell(*strategy, transport, ranks)));
    }
    Plan {
        name: "matrix".into(),
        about: "every strategy over every transport of this machine".into(),
        rounds: setup.rounds,
        timeout: setup.cell_timeout,
        cells,
    }
}
