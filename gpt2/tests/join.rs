//! An epoch that does not end with a full step: ranks have different numbers of rows, or none, and all take part.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use gpt2::batches::{Batches, LastBatch, Share};
use gpt2::corpus::Corpus;
use gpt2::trainer::TrainConfig;

use crate::local::{TOLERANCE, VARIANTS, assert_close, assert_counts, corpus, ranks_for, run, single, with};

/// Bytes whose training part has 26 windows of 32 tokens: steps of 12, 12 and 2 rows.
const BYTES: usize = 970;

/// Two epochs, and a step.
const STEPS: u64 = 7;

fn config() -> TrainConfig {
    TrainConfig { last_batch: LastBatch::Join, ..single(STEPS) }
}

fn batches(corpus: &Corpus, config: &TrainConfig) -> Batches {
    let TrainConfig { global_batch, seed, last_batch, .. } = *config;
    Batches::with_last_batch(corpus, config.model.block_size, global_batch, seed, last_batch).unwrap()
}

#[test]
fn the_last_step_leaves_ranks_without_rows() {
    let corpus = corpus(BYTES);
    let batches = batches(&corpus, &config());
    assert_eq!((0..4).map(|step| batches.rows_in_step(step)).collect::<Vec<_>>(), [12, 12, 2, 12]);
    let rows = |rank| batches.rows(2, 0, Share { rank, world: 3, accumulation: 1 }).unwrap().rows;
    assert_eq!([rows(0), rows(1), rows(2)], [1, 1, 0]);
}

#[test]
fn every_strategy_is_one_device_though_ranks_run_out_of_rows() {
    let corpus = corpus(BYTES);
    let reference = run(&config(), &corpus, 1);
    assert_eq!(reference.epochs, [1, 1, 1, 2, 2, 2, 3]);
    let dropped = run(&single(STEPS), &corpus, 1);
    assert_eq!(dropped.losses[..2], reference.losses[..2]);
    assert_ne!(dropped.losses[2], reference.losses[2]);
    for variant in VARIANTS {
        // Two rows, for three ranks or more.
        let ranks = ranks_for(variant.0) + usize::from(variant.1);
        let summary = run(&with(&config(), variant, ranks), &corpus, ranks);
        assert_close(&summary, &reference, TOLERANCE, &format!("{variant:?} on {ranks} ranks"));
        assert_counts(&summary, &format!("{variant:?}"));
        assert_eq!(summary.epochs, reference.epochs);
    }
}

#[test]
fn micro_steps_without_rows_change_nothing() {
    let corpus = corpus(BYTES);
    let reference = run(&config(), &corpus, 1);
    let config = TrainConfig { accumulation: 2, recompute: true, ..config() };
    for variant in VARIANTS {
        let ranks = if variant.1 { 3 } else { 2 };
        let summary = run(&with(&config, variant, ranks), &corpus, ranks);
        assert_close(&summary, &reference, TOLERANCE, &format!("{variant:?} on {ranks} ranks"));
        assert_counts(&summary, &format!("{variant:?}"));
    }
}
