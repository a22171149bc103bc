//! That the matrix compares like with like: the same weights on every transport, the bytes of the formula, the losses of one device.

use gpt2::cli::say;
use gpt2::config::Preset;
use gpt2::optim::LearningRate;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::trainer::{Summary, TrainConfig};
use isocomm::TransportKind;
use rig::BenchError;
use rig::formula::off_the_formula;
use rig::lines::Lines;
use rig::outcome;
use rig::progress::bar;
use rig::signal::Interrupted;
use rig::stats::difference;
use rig::training::Training;
use serde::Serialize;

use crate::parity::formula::{self, Count};
use crate::setup::Setup;

/// Steps of a run.
const STEPS: u64 = 4;

/// Sequences a step, over all ranks.
const BATCH: usize = 12;

/// Largest relative difference between a loss and `single`'s. The sums run in another order, each within f32's rounding (6e-8).
pub(crate) const TOLERANCE: f64 = 1e-5;

/// With a 16-bit wire each gradient is rounded to 8 or 11 bits.
const TOLERANCE_16_BIT: f64 = 1e-2;

#[derive(Debug, Serialize)]
struct Proof {
    strategy: String,
    transport: String,
    ranks: usize,
    weights_hash: Option<String>,
    /// Equal to the same strategy's on the first transport that ran.
    weights_identical: bool,
    bytes_by_rank: Vec<Option<u64>>,
    bytes_expected_by_rank: Vec<u64>,
    bytes_equal_formula: bool,
    /// Largest relative difference between this run's training losses and `single`'s.
    loss_difference: f64,
    /// The same of the gradient norms, which show a wrong scale that AdamW would hide.
    norm_difference: f64,
    tolerance: f64,
    status: String,
}

/// Runs each strategy on 3 and 4 ranks over each transport; true if all holds.
pub(crate) fn run(setup: &Setup) -> Result<bool, BenchError> {
    let strategies: Vec<StrategyKind> =
        setup.strategies.iter().copied().filter(|strategy| *strategy != StrategyKind::Single).collect();
    let transports: Vec<_> = setup.transports.iter().copied().filter(|kind| kind.missing().is_none()).collect();
    if strategies.is_empty() || transports.len() < 2 {
        say("proof: left out, since fewer than two transports or no strategy that communicates were asked for");
        return Ok(true);
    }
    let mut file = Lines::create(&setup.out.join("proof.jsonl"))?;
    let bar = bar(1 + formula::RANKS.len() * strategies.len() * transports.len());
    bar.set_message("proof");
    let single = train(setup, StrategyKind::Single, None, 1)?
        .and_then(|single| single.ranks.iter().find_map(off_the_formula).map_or(Ok(single), Err))
        .map_err(|why| format!("the proof's yardstick, single on one rank: {why}"))?;
    bar.inc(1);
    let tolerance = if setup.wire == gpt2::precision::Precision::F32 { TOLERANCE } else { TOLERANCE_16_BIT };
    let mut proofs = Vec::new();
    let mut counts = Vec::new();
    for ranks in formula::RANKS {
        for strategy in &strategies {
            let mut first: Option<String> = None;
            for transport in &transports {
                setup.signals.check()?;
                let outcome = train(setup, *strategy, Some(*transport), ranks)?;
                let count = Count::of(strategy.to_string(), transport.name(), ranks, outcome.as_ref(), &mut first);
                let proof = Proof::new(&count, outcome.as_ref().ok(), &single, tolerance);
                counts.push(count);
                file.write(&proof)?;
                proofs.push(proof);
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    say(format_args!("\n{}", formula::table(&counts)));
    Ok(report(&proofs, setup))
}

/// A run of the smallest model, or why there is none.
fn train(
    setup: &Setup,
    strategy: StrategyKind,
    transport: Option<TransportKind>,
    ranks: usize,
) -> Result<Result<Summary, String>, Interrupted> {
    // Two nodes, where the ranks can be divided so.
    let ranks_per_node = if ranks.is_multiple_of(2) { ranks / 2 } else { ranks };
    let config = TrainConfig {
        options: StrategyOptions { wire: setup.wire, ranks_per_node, ..StrategyOptions::default() },
        seed: setup.seed,
        steps: STEPS,
        global_batch: BATCH,
        learning_rate: LearningRate::WarmupCosine { peak: 1e-3, floor: 1e-4, warmup: 5, total: STEPS.max(10) },
        ..TrainConfig::of(Preset::Micro.config(setup.corpus.vocab_size()), strategy)
    };
    let training = Training::new(config, transport, ranks, 1, setup.cell_timeout);
    let outcome = Training { source: setup.source.clone(), ..training }.summary();
    Ok(outcome::settled(outcome)?.map_err(|why| format!("failed: {why}")))
}

fn report(proofs: &[Proof], setup: &Setup) -> bool {
    let wrong: Vec<&Proof> = proofs.iter().filter(|proof| !proof.holds()).collect();
    for proof in &wrong {
        say(format_args!(
            "PROOF FAILED: {} over {} on {} ranks: weights {}, bytes {}, loss or gradient norm differs by {:.1e} ({})",
            proof.strategy,
            proof.transport,
            proof.ranks,
            if proof.weights_identical { "identical" } else { "differ" },
            if proof.bytes_equal_formula { "as the formula" } else { "off the formula" },
            proof.difference(),
            proof.status
        ));
    }
    let largest = proofs.iter().map(Proof::difference).fold(0.0, f64::max);
    say(format_args!(
        "proof: {} of {} runs (micro, {STEPS} steps, 3 and 4 ranks) gave bit-identical weights on all ranks and transports, payload equal \
         to the formula and losses and gradient norms within {:.0e} of single's (largest difference {largest:.1e}): {}",
        proofs.len() - wrong.len(),
        proofs.len(),
        proofs.first().map_or(TOLERANCE, |proof| proof.tolerance),
        setup.out.join("proof.jsonl").display()
    ));
    wrong.is_empty()
}

impl Proof {
    /// Of a run whose bytes are counted in `count` and that left `summary`, beside `single`'s.
    fn new(count: &Count, summary: Option<&Summary>, single: &Summary, tolerance: f64) -> Self {
        let expected: Vec<Option<u64>> = count.bytes_expected_by_rank.iter().copied().map(Some).collect();
        let apart = |of: fn(&Summary) -> &[f64]| difference(summary.map(of).unwrap_or_default(), of(single));
        Proof {
            strategy: count.strategy.clone(),
            transport: count.transport.clone(),
            ranks: count.ranks,
            weights_hash: count.weights_hash.clone(),
            weights_identical: count.weights_identical,
            bytes_by_rank: count.bytes_by_rank.clone(),
            bytes_equal_formula: !expected.is_empty() && count.bytes_by_rank == expected && count.status == "ok",
            bytes_expected_by_rank: count.bytes_expected_by_rank.clone(),
            loss_difference: apart(|summary| &summary.losses),
            norm_difference: apart(|summary| &summary.grad_norms),
            tolerance,
            status: count.status.clone(),
        }
    }

    /// The larger of the two differences to `single`.
    fn difference(&self) -> f64 {
        self.loss_difference.max(self.norm_difference)
    }

    fn holds(&self) -> bool {
        self.weights_identical && self.bytes_equal_formula && self.difference() <= self.tolerance
    }
}
