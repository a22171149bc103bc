//! Every strategy over every transport and link.

use std::collections::BTreeSet;
use std::process::ExitCode;

use gpt2::cli::say;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::TokenizerKind;
use isocomm::Medium;
use rig::BenchError;
use rig::record::{Cell, LOOPBACK, NOBODY};
use rig::results;
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
         {} round(s){}, wire {}; links: {}",
        setup.preset,
        model.parameter_count() as f64 / 1e6,
        setup.ranks,
        setup.threads,
        setup.batch,
        model.block_size,
        setup.steps,
        setup.rounds,
        setup.budget.map_or(String::new(), |budget| format!(" and more within {} s", budget.as_secs())),
        setup.wire,
        setup.links.join(", ")
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
        torch: Err("no cell was planned for it".into()),
        budget: setup.budget,
        launched: None,
    };
    let sound = sweep.run(&BTreeSet::new())? == ExitCode::SUCCESS;
    if setup.table {
        let results = results::read_records(&setup.out)?;
        say(format_args!("\n{}", table::render(&sweep.plan.cells, &results.records)));
        say(format_args!(
            "step and exposed: medians over steps and rounds. exposed: how long a step waits for communication, on the rank that waits \
             longest; this includes waiting for late ranks and for the scalars of loss and gradient norm"
        ));
    }
    let apart: Vec<&str> =
        setup.strategies.iter().filter(|kind| !kind.spec().is_one_device).map(|kind| kind.name()).collect();
    if !apart.is_empty() {
        say(format_args!(
            "{}: these do not compute what one device computes, because their ranks do not all average gradients in every step. Their \
             times are means over the steps between two synchronisations, their bytes means over the run. Their loss is that of rank 0's \
             part of the batch; with async-ps that of gradients which were computed on different parameters",
            apart.join(", ")
        ));
    }
    sweep.report()?;
    Ok(sound)
}

fn plan(setup: &Setup) -> Plan {
    let cell = |strategy: StrategyKind, transport: String, link: &str, ranks: usize| Cell {
        strategy: strategy.to_string(),
        transport,
        link: link.into(),
        ranks,
        wire: setup.wire.to_string(),
        seed: setup.seed,
        preset: setup.preset.to_string(),
        batch: setup.batch,
        steps: setup.steps,
        threads: setup.threads,
        lanes: strategy.lanes(ranks, Cell::default().lanes),
        ..Cell::default()
    };
    let mut cells = Vec::new();
    for strategy in &setup.strategies {
        let ranks = match strategy {
            StrategyKind::Single => {
                cells.push(cell(*strategy, NOBODY.into(), LOOPBACK, 1));
                continue;
            }
            // Two nodes of two ranks are the least that has two levels.
            kind if kind.spec().tells_nodes_apart && setup.batch.is_multiple_of(setup.ranks.max(4)) => {
                setup.ranks.max(4)
            }
            _ => setup.ranks,
        };
        for transport in &setup.transports {
            // Memory goes over no link, and neither do links between the GPUs of one machine.
            let over_links = matches!(transport.medium(), Medium::Tcp | Medium::Udp);
            // No node of hsdp, which needs several ranks in each and equally many, lies at both ends of a link.
            let over_links =
                over_links && !(*strategy == StrategyKind::Hsdp && (ranks < 4 || !ranks.is_multiple_of(2)));
            let links = setup.links.iter().filter(|link| *link == LOOPBACK || over_links);
            cells.extend(links.map(|link| cell(*strategy, transport.to_string(), link, ranks)));
        }
    }
    Plan {
        name: "matrix".into(),
        about: "every strategy over every transport of this machine".into(),
        rounds: setup.rounds,
        timeout: setup.cell_timeout,
        watched: true,
        probe: false,
        tokens: false,
        cells,
    }
}
