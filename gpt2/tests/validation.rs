//! Validation: one loss over the same windows, however many ranks share them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use gpt2::optim::LearningRate;
use gpt2::strategy::StrategyKind;
use gpt2::trainer::{Summary, TrainConfig};

use crate::local::{TOLERANCE, VARIANTS, corpus, run, single, with};

/// Bytes of which 260 are held out: 8 windows of 32, which 3 and 6 ranks cannot share evenly, and fewer than one batch of 12.
const BYTES: usize = 2_600;

/// Each row's loss is computed in f32 in a batch of another size, and the sums in f64 run in another order.
const ROUNDING: f64 = 1e-6;

fn config() -> TrainConfig {
    TrainConfig { eval_every: 1, eval_batches: 3, ..single(2) }
}

/// Each strategy on so many workers, with its ranks and its name.
fn variants(config: &TrainConfig, workers: &'static [usize]) -> impl Iterator<Item = (TrainConfig, usize, String)> {
    VARIANTS.into_iter().flat_map(move |variant| {
        workers.iter().map(move |workers| {
            let ranks = workers + usize::from(variant.1);
            (with(config, variant, ranks), ranks, format!("{variant:?} on {ranks} ranks"))
        })
    })
}

fn assert_equal_validations(summary: &Summary, reference: &Summary, tolerance: f64, what: &str) {
    assert_eq!(summary.validations.len(), reference.validations.len());
    for ((step, loss), (_, expected)) in summary.validations.iter().zip(&reference.validations) {
        let difference = (loss / expected - 1.0).abs();
        assert!(difference <= tolerance, "{what}: after step {step} {loss}, one device has {expected}");
    }
}

#[test]
fn the_validation_loss_is_the_same_for_every_number_of_ranks() {
    let corpus = corpus(BYTES);
    assert_eq!(corpus.validation().len(), 260);
    // At a rate of zero the weights stay, equal to the bit, and validation alone is compared.
    let still = TrainConfig { learning_rate: LearningRate::Constant { rate: 0.0 }, ..config() };
    let reference = run(&still, &corpus, 1);
    assert_eq!(reference.validations[0].1, reference.validations[1].1);
    for (config, ranks, what) in variants(&still, &[1, 2, 3, 4, 6]) {
        assert_equal_validations(&run(&config, &corpus, ranks), &reference, ROUNDING, &what);
    }
}

#[test]
fn validation_between_steps_of_training_is_that_of_one_device() {
    let corpus = corpus(BYTES);
    let reference = run(&config(), &corpus, 1);
    assert!(reference.validations[1].1 < reference.validations[0].1);
    for (config, ranks, what) in variants(&config(), &[3, 6]) {
        let summary = run(&config, &corpus, ranks);
        assert_equal_validations(&summary, &reference, TOLERANCE, &what);
        crate::local::assert_close(&summary, &reference, TOLERANCE, &what);
        crate::local::assert_counts(&summary, &what);
    }
}

#[test]
fn ranks_without_a_single_window_take_part_all_the_same() {
    // 100 bytes are held out: one window of 64, so that most ranks have none.
    let corpus = corpus(1_000);
    let config = TrainConfig { model: gpt2::config::ModelConfig { block_size: 64, ..single(2).model }, ..config() };
    let reference = run(&config, &corpus, 1);
    for variant in [(StrategyKind::Fsdp, false), (StrategyKind::Ps, true), (StrategyKind::Ddp, false)] {
        let summary = run(&with(&config, variant, 4), &corpus, 4);
        assert_equal_validations(&summary, &reference, TOLERANCE, &format!("{variant:?}"));
    }
}
