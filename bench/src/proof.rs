//! That the matrix compares like with like: the same weights on every transport, the bytes of the formula, and the losses of one device, where
//! ranks average gradients in every step.

use gpt2::cli::say;
use gpt2::strategy::StrategyKind;
use rig::BenchError;
use rig::flag::FlagKind;
use rig::lines::Lines;
use rig::record::{Axis, Measured, Record, numbers};
use rig::stats::difference;
use rig::training::{TextSource, outcome};
use serde::Serialize;

use crate::parity::formula::{self, Count};
use crate::plan::{Draft, default};
use crate::setup::Setup;
use crate::sweep::Job;

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
    /// Whether the strategy computes what one device computes.
    is_one_device: bool,
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
        say("proof: left out, because it needs at least two transports and a strategy that communicates");
        return Ok(true);
    }
    let mut file = Lines::create(&setup.out.join("proof.jsonl"))?;
    let mut draft = Draft::ready("proof")?;
    draft.timeout_s = setup.cell_timeout.as_secs();
    draft
        .set(Axis::Strategy, &strategies)
        .set(Axis::Transport, &transports)
        .set(Axis::Wire, &[setup.wire])
        .set(Axis::Seed, &[setup.seed]);
    let job = Job {
        draft: &draft,
        out: None,
        text: TextSource::bytes(setup.source.clone())?,
        signals: setup.signals.clone(),
        torch: Err("not asked for".into()),
    };
    let records = job.records()?;
    let (alone, others): (Vec<&Record>, Vec<&Record>) =
        records.iter().partition(|record| record.cell.strategy == "single");
    let single = alone.first().ok_or("the proof's plan has no single")?;
    let off = single.flags.iter().find(|flag| flag.kind == FlagKind::OffTheFormula).map(|off| off.what.clone());
    let single = outcome(single)
        .and_then(|measured| off.map_or(Ok(measured), Err))
        .map_err(|why| format!("the proof's baseline, single on one rank: {why}"))?;
    let tolerance = if setup.wire == gpt2::precision::Precision::F32 { TOLERANCE } else { TOLERANCE_16_BIT };
    let order = |name: &str| strategies.iter().position(|strategy| strategy.name() == name);
    let counts = formula::counts(&others, order)?;
    let mut proofs = Vec::new();
    for (count, record) in &counts {
        let proof = Proof::new(count, record, single, tolerance)?;
        file.write(&proof)?;
        proofs.push(proof);
    }
    let counts: Vec<Count> = counts.into_iter().map(|(count, _)| count).collect();
    say(format_args!("\n{}", formula::table(&counts)));
    Ok(report(&proofs, setup))
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
    let near = proofs.iter().filter(|proof| proof.is_one_device).map(Proof::difference);
    let largest = near.fold(0.0, f64::max);
    let others = match proofs.iter().all(|proof| proof.is_one_device) {
        true => "",
        false => ", without strategies whose ranks train by themselves for a time",
    };
    say(format_args!(
        "proof: {} of {} runs (micro, {} steps, 3 and 4 ranks) gave bit-identical weights on all ranks and transports, payload equal \
         to the formula and losses and gradient norms within {:.0e} of single's (largest difference {largest:.1e}{others}): {}",
        proofs.len() - wrong.len(),
        proofs.len(),
        default("proof", Axis::Steps),
        proofs.first().map_or(TOLERANCE, |proof| proof.tolerance),
        setup.out.join("proof.jsonl").display()
    ));
    wrong.is_empty()
}

impl Proof {
    /// Of a run whose bytes are counted in `count`, beside `single`'s.
    ///
    /// # Errors
    /// Its cell names what there is not.
    fn new(count: &Count, record: &Record, single: &Measured, tolerance: f64) -> Result<Self, String> {
        let measured = outcome(record).ok();
        let strategy: StrategyKind = record.cell.strategy.parse()?;
        let expected: Vec<Option<u64>> = count.bytes_expected_by_rank.iter().copied().map(Some).collect();
        let apart = |of: fn(&Measured) -> &[Option<f64>]| {
            difference(&numbers(measured.map(of).unwrap_or_default()), &numbers(of(single)))
        };
        Ok(Proof {
            strategy: count.strategy.clone(),
            transport: count.transport.clone(),
            ranks: count.ranks,
            weights_hash: count.weights_hash.clone(),
            weights_identical: count.weights_identical,
            bytes_by_rank: count.bytes_by_rank.clone(),
            bytes_equal_formula: !expected.is_empty() && count.bytes_by_rank == expected && count.status == "ok",
            bytes_expected_by_rank: count.bytes_expected_by_rank.clone(),
            is_one_device: strategy.spec().is_one_device && record.cell.compress.is_none(),
            loss_difference: apart(|measured| &measured.losses),
            norm_difference: apart(|measured| &measured.grad_norms),
            tolerance,
            status: count.status.clone(),
        })
    }

    /// The larger of the two differences to `single`.
    fn difference(&self) -> f64 {
        self.loss_difference.max(self.norm_difference)
    }

    fn holds(&self) -> bool {
        let is_near = !self.is_one_device || self.difference() <= self.tolerance;
        self.weights_identical && self.bytes_equal_formula && is_near
    }
}
