//! Options that every strategy shares change what they should and nothing else.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use gpt2::batches::ShortSequences;
use gpt2::model::KernelChoice;
use gpt2::optim::{OptimizerConfig, OptimizerKind};
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use gpt2::trainer::TrainConfig;

use crate::local::{TOLERANCE, VARIANTS, assert_close, assert_counts, corpus, ranks_for, run, single, with};

#[test]
fn recomputation_changes_no_bit() {
    let corpus = corpus(20_000);
    for precision in [Precision::F32, Precision::Bf16] {
        for (strategy, ranks) in [(StrategyKind::Single, 1), (StrategyKind::Ddp, 2), (StrategyKind::Fsdp, 3)] {
            let kept = with(&TrainConfig { precision, ..single(3) }, (strategy, false), ranks);
            let recomputed = TrainConfig { recompute: true, ..kept.clone() };
            let (kept, recomputed) = (run(&kept, &corpus, ranks), run(&recomputed, &corpus, ranks));
            let what = format!("{strategy} in {precision}");
            assert_eq!(kept.losses, recomputed.losses, "{what}");
            assert_eq!(kept.grad_norms, recomputed.grad_norms, "{what}");
            assert_eq!(kept.weights_hash, recomputed.weights_hash, "{what}");
        }
    }
}

#[test]
fn kernels_change_last_bits_alone() {
    let corpus = corpus(20_000);
    for (strategy, ranks) in [(StrategyKind::Single, 1), (StrategyKind::Ddp, 2), (StrategyKind::Fsdp, 3)] {
        let fused = with(&single(4), (strategy, false), ranks);
        let composed = TrainConfig { kernels: KernelChoice::Composed, ..fused.clone() };
        let (fused, composed) = (run(&fused, &corpus, ranks), run(&composed, &corpus, ranks));
        assert_ne!(fused.weights_hash, composed.weights_hash, "{strategy}: one and the same kernels ran twice");
        assert_close(&composed, &fused, TOLERANCE, strategy.name());
        assert_counts(&composed, strategy.name());
    }
}

#[test]
fn lamb_is_one_device_with_every_strategy() {
    let corpus = corpus(20_000);
    let adamw = run(&single(4), &corpus, 1);
    let config = TrainConfig { optimizer: OptimizerConfig::of(OptimizerKind::Lamb), ..single(4) };
    let reference = run(&config, &corpus, 1);
    assert!(crate::local::difference(&reference, &adamw) > 100.0 * TOLERANCE, "LAMB takes the steps of AdamW");
    for variant in VARIANTS {
        let ranks = ranks_for(variant.0);
        let summary = run(&with(&config, variant, ranks), &corpus, ranks);
        assert_close(&summary, &reference, TOLERANCE, &format!("{variant:?} on {ranks} ranks"));
        assert_counts(&summary, &format!("{variant:?}"));
    }
}

#[test]
fn short_sequences_are_one_device_and_those_that_they_say() {
    let corpus = corpus(20_000);
    let whole = TrainConfig { dropout: 0.2, ..single(4) };
    let short = |steps| TrainConfig { short_sequences: Some(ShortSequences { tokens: 8, steps }), ..whole.clone() };
    let reference = run(&short(2), &corpus, 1);
    let (uncut, cut) = (run(&whole, &corpus, 1), run(&short(4), &corpus, 1));
    // The first two steps are those of the one, and the others differ from both.
    assert_eq!(reference.losses[..2], cut.losses[..2]);
    assert_ne!(reference.losses[0], uncut.losses[0], "nothing was cut");
    assert_ne!(reference.weights_hash, cut.weights_hash);
    for strategy in [StrategyKind::Ddp, StrategyKind::Fsdp] {
        let config = TrainConfig { accumulation: 2, ..with(&short(2), (strategy, false), 2) };
        let summary = run(&config, &corpus, 2);
        assert_close(&summary, &reference, TOLERANCE, strategy.name());
        assert_counts(&summary, strategy.name());
    }
}

#[test]
fn dropout_is_one_device_with_every_strategy() {
    let corpus = corpus(20_000);
    let config = TrainConfig { dropout: 0.2, eval_every: 4, ..single(4) };
    let reference = run(&config, &corpus, 1);
    let without = run(&TrainConfig { dropout: 0.0, ..config.clone() }, &corpus, 1);
    assert!(crate::local::difference(&reference, &without) > 100.0 * TOLERANCE, "nothing is dropped");
    // Micro-steps and ranks get the rows of the global batch in another cut.
    let config = TrainConfig { accumulation: 2, ..config };
    for variant in VARIANTS {
        let ranks = if variant.1 { 3 } else { 2 };
        let summary = run(&with(&config, variant, ranks), &corpus, ranks);
        assert_close(&summary, &reference, TOLERANCE, &format!("{variant:?} on {ranks} ranks"));
        assert_counts(&summary, &format!("{variant:?}"));
    }
}

#[test]
fn a_dedicated_server_computes_nothing_and_changes_nothing() {
    let corpus = corpus(20_000);
    let reference = run(&single(4), &corpus, 1);
    for ranks in [2, 3, 4] {
        let summary = run(&with(&single(4), (StrategyKind::Ps, true), ranks), &corpus, ranks);
        let what = format!("a dedicated server and {} workers", ranks - 1);
        assert_close(&summary, &reference, TOLERANCE, &what);
        assert_counts(&summary, &what);
        let computing: Vec<bool> = summary.ranks.iter().map(|rank| rank.computes).collect();
        assert!(!computing[0] && computing[1..].iter().all(|computes| *computes), "{what}: {computing:?}");
        assert_eq!(summary.ranks[0].parts.compute, 0.0, "{what}");
    }
}

#[test]
fn micro_steps_and_recomputation_together_are_one_device() {
    let corpus = corpus(20_000);
    let reference = run(&single(3), &corpus, 1);
    let config = TrainConfig { accumulation: 2, recompute: true, ..single(3) };
    for variant in VARIANTS {
        // Shares of 12 sequences, with one worker less too.
        let ranks = if variant.1 { 3 } else { 2 };
        let summary = run(&with(&config, variant, ranks), &corpus, ranks);
        assert_close(&summary, &reference, TOLERANCE, &format!("{variant:?} on {ranks} ranks"));
        assert_counts(&summary, &format!("{variant:?}"));
    }
}
