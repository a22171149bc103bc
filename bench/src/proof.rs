//! That the matrix compares like with like: the same weights on every transport, the bytes of the formula, the losses of one device.

use gpt2::cli::say;
use gpt2::config::Preset;
use gpt2::strategy::StrategyKind;
use rig::BenchError;
use rig::lines::Lines;
use rig::progress::bar;
use rig::stats::difference;
use serde::Serialize;

use crate::cell::{Cell, Row};
use crate::parity::formula::{self, Count};
use crate::setup::Setup;

/// Steps of a proof cell.
const STEPS: u64 = 4;

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
    let cell = |strategy, transport, ranks| Cell {
        strategy,
        transport,
        ranks,
        preset: Preset::Micro,
        steps: STEPS,
        batch: 12,
        threads: 1,
        node_transport: None,
    };
    let bar = bar(1 + formula::RANKS.len() * strategies.len() * transports.len());
    bar.set_message("proof");
    let single = cell(StrategyKind::Single, None, 1).run(setup)?;
    bar.inc(1);
    if !single.is_sound() {
        return Err(format!("the proof's yardstick, single on one rank: {}", single.status).into());
    }
    let tolerance = if setup.wire == gpt2::precision::Precision::F32 { TOLERANCE } else { TOLERANCE_16_BIT };
    let mut proofs = Vec::new();
    let mut counts = Vec::new();
    for ranks in formula::RANKS {
        for strategy in &strategies {
            let mut first: Option<String> = None;
            for transport in &transports {
                setup.signals.check()?;
                let row = cell(*strategy, Some(*transport), ranks).run(setup)?;
                let hash = row.weights_hash.clone();
                let identical = hash.as_ref().is_some_and(|hash| hash == first.get_or_insert_with(|| hash.clone()));
                counts.push(count(&row, identical));
                let expected: Vec<Option<u64>> = row.bytes_expected_by_rank.iter().copied().map(Some).collect();
                let proof = Proof {
                    weights_identical: identical,
                    bytes_equal_formula: !expected.is_empty() && row.bytes_by_rank == expected && row.is_sound(),
                    loss_difference: difference(&row.losses, &single.losses),
                    norm_difference: difference(&row.grad_norms, &single.grad_norms),
                    tolerance,
                    strategy: row.strategy,
                    transport: row.transport,
                    ranks,
                    weights_hash: hash,
                    bytes_by_rank: row.bytes_by_rank,
                    bytes_expected_by_rank: row.bytes_expected_by_rank,
                    status: row.status,
                };
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

/// What the formula says of a row, and what was counted.
fn count(row: &Row, weights_identical: bool) -> Count {
    Count {
        strategy: row.strategy.clone(),
        transport: row.transport.clone(),
        ranks: row.ranks,
        bytes_by_rank: row.bytes_by_rank.clone(),
        bytes_expected_by_rank: row.bytes_expected_by_rank.clone(),
        messages_by_rank: row.messages_by_rank.clone(),
        messages_expected_by_rank: row.messages_expected_by_rank.clone(),
        weights_hash: row.weights_hash.clone(),
        weights_identical,
        status: row.status.clone(),
        ..Count::default()
    }
    .judged()
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
    /// The larger of the two differences to `single`.
    fn difference(&self) -> f64 {
        self.loss_difference.max(self.norm_difference)
    }

    fn holds(&self) -> bool {
        self.weights_identical && self.bytes_equal_formula && self.difference() <= self.tolerance
    }
}
