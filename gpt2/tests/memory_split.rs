//! What ranks keep of parameters, gradients and optimizer together, by strategy.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod local;

use std::time::Duration;

use burn::tensor::Device;
use gpt2::config::{ModelConfig, Preset};
use gpt2::memory::{Counting, Usage};
use gpt2::run::{RankOptions, run_threads};
use gpt2::segments::layout;
use gpt2::strategy::StrategyKind;
use gpt2::transports::{TransportKind, TransportOptions};

use local::{corpus, single, with};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RANKS: usize = 4;

/// Bookkeeping: names, tables.
const SLACK: u64 = 150_000;

/// Peaks of a process whose threads are all ranks.
fn usage(model: &ModelConfig, strategy: StrategyKind) -> Usage {
    let mut config = with(&single(3), (strategy, false), RANKS);
    config.model = model.clone();
    let options = RankOptions {
        transport: TransportKind::Local,
        options: TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() },
        node_transport: None,
        threads: 1,
        checkpoint: None,
    };
    let summary = run_threads(&config, &corpus(20_000), RANKS, &options, &Device::flex(), &mut ()).unwrap();
    summary.ranks[0].memory.unwrap()
}

/// One test, since the figures are the process's.
#[test]
fn each_stage_shards_one_more_kind() {
    // Twelve blocks, so that two of them are little beside all.
    let model = ModelConfig { n_layer: 12, n_embd: 64, ..Preset::Micro.config(256) };
    let segments = layout(&model).unwrap();
    let bytes = |elements: usize| 4 * elements as u64;
    let all = bytes(segments.iter().map(|segment| segment.len).sum());
    let largest = bytes(segments.iter().map(|segment| segment.len).max().unwrap());
    let embedding = bytes(segments[0].len);
    let ranks = RANKS as u64;
    let within = |what: &str, peak: u64, least: u64, most: u64| {
        assert!((least..=most).contains(&peak), "{what}: {peak} is not in {least}..={most}, of {all} parameter bytes");
    };

    let ddp = usage(&model, StrategyKind::Ddp);
    within("weights of ddp", ddp.parameters.peak, ranks * all, ranks * (all + 2 * largest) + SLACK);
    within("optimizers of ddp", ddp.optimizer.peak, 3 * ranks * all, 3 * ranks * all + SLACK);
    within("gradients of ddp", ddp.gradients.peak, all, ranks * (all + 2 * largest) + SLACK);

    let zero1 = usage(&model, StrategyKind::Zero1);
    within("weights of zero1", zero1.parameters.peak, ranks * all, ranks * (all + 3 * largest) + SLACK);
    within("optimizers of zero1", zero1.optimizer.peak, 3 * all, 3 * all + SLACK);

    let zero2 = usage(&model, StrategyKind::Zero2);
    within("optimizers of zero2", zero2.optimizer.peak, 3 * all, 3 * all + SLACK);
    within("gradients of zero2", zero2.gradients.peak, all, all + 2 * ranks * largest + SLACK);

    let fsdp = usage(&model, StrategyKind::Fsdp);
    // Shards of the masters, two segments and the embedding.
    within("weights of fsdp", fsdp.parameters.peak, all, all + ranks * (2 * largest + embedding) + SLACK);
    within("optimizers of fsdp", fsdp.optimizer.peak, 2 * all, 2 * all + SLACK);
    within("gradients of fsdp", fsdp.gradients.peak, all, all + 2 * ranks * largest + SLACK);
}
