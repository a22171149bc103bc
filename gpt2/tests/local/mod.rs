//! Training jobs as threads of this process, for tests that compare strategies.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]
#![allow(dead_code, unreachable_pub, reason = "every test program takes what it needs")]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::Communicator;
use gpt2::config::Preset;
use gpt2::corpus::{Corpus, CorpusSource};
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{Observer, Session, Summary, TrainConfig, train};
use isocomm::TransportOptions;

/// Rounding: the ranks' sums run in another order than one device's.
pub const TOLERANCE: f64 = 1e-5;

/// A strategy that communicates, and whether its server is dedicated.
pub const VARIANTS: [(StrategyKind, bool); 10] = [
    (StrategyKind::Ps, false),
    (StrategyKind::Ps, true),
    (StrategyKind::ShardedPs, false),
    (StrategyKind::Ring, false),
    (StrategyKind::Ddp, false),
    (StrategyKind::Zero1, false),
    (StrategyKind::Zero2, false),
    (StrategyKind::Fsdp, false),
    (StrategyKind::Hierarchical, false),
    (StrategyKind::Hsdp, false),
];

pub fn corpus(bytes: usize) -> Corpus {
    Corpus::load(&CorpusSource::Synthetic { seed: 1, bytes }, TokenizerKind::Bytes).unwrap()
}

/// One rank of the smallest model.
pub fn single(steps: u64) -> TrainConfig {
    TrainConfig { seed: 7, steps, clip: 0.5, ..TrainConfig::of(Preset::Micro.config(256), StrategyKind::Single) }
}

/// `config` with a strategy on `ranks` ranks: several buckets, and two nodes, of which the first has one rank more where their number is odd.
pub fn with(config: &TrainConfig, (strategy, dedicated_server): (StrategyKind, bool), ranks: usize) -> TrainConfig {
    let options = StrategyOptions {
        first_bucket_bytes: 20_000,
        bucket_bytes: 20_000,
        fusion_bytes: 20_000,
        dedicated_server,
        // Those of one strategy are to have one size, and several ranks.
        ranks_per_node: if strategy == StrategyKind::Hsdp && (ranks < 4 || !ranks.is_multiple_of(2)) {
            ranks
        } else {
            ranks.div_ceil(2)
        },
        ..config.options.clone()
    };
    TrainConfig { strategy, options, ..config.clone() }
}

/// Two nodes of two for the strategies that tell nodes apart, three ranks for the others.
pub fn ranks_for(strategy: StrategyKind) -> usize {
    if strategy.spec().tells_nodes_apart { 4 } else { 3 }
}

pub fn run(config: &TrainConfig, corpus: &Corpus, ranks: usize) -> Summary {
    run_with(config, corpus, ranks, |_, comm| (comm, ()))
}

/// Trains on threads; all ranks must agree on the result. `equip` gives each rank its communicator and its observer.
pub fn run_with<O: Observer + Send>(
    config: &TrainConfig,
    corpus: &Corpus,
    ranks: usize,
    equip: impl Fn(usize, Arc<dyn Communicator>) -> (Arc<dyn Communicator>, O),
) -> Summary {
    let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
    let summaries: Vec<Summary> = thread::scope(|scope| {
        let threads: Vec<_> = Session::threads(ranks, &options)
            .unwrap()
            .into_iter()
            .enumerate()
            .map(|(rank, session)| {
                let (comm, mut observer) = equip(rank, session.comm.clone());
                let session = Session { comm, ..session };
                scope.spawn(move || train(config, corpus, &session, &Device::flex(), None, &mut observer).unwrap())
            })
            .collect();
        threads.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for summary in &summaries {
        assert_eq!(summary.weights_hash, summaries[0].weights_hash);
        if config.strategy.spec().is_one_device {
            assert_eq!(summary.losses, summaries[0].losses);
            assert_eq!(summary.skipped_steps, summaries[0].skipped_steps);
        }
        assert_eq!(summary.validations, summaries[0].validations);
    }
    summaries.into_iter().next().unwrap()
}

/// The largest relative difference of any loss or gradient norm, of steps that were not skipped; no number where one of them is none.
pub fn difference(summary: &Summary, reference: &Summary) -> f64 {
    let largest = |values: &[f64], others: &[f64]| {
        assert_eq!(values.len(), others.len());
        let pairs = values.iter().zip(others).filter(|(a, b)| a.is_finite() || b.is_finite());
        pairs.map(|(a, b)| ((a - b) / b).abs()).max_by(f64::total_cmp).unwrap_or_default()
    };
    let both = [largest(&summary.losses, &reference.losses), largest(&summary.grad_norms, &reference.grad_norms)];
    both.into_iter().max_by(f64::total_cmp).unwrap_or_default()
}

pub fn assert_close(summary: &Summary, reference: &Summary, tolerance: f64, what: &str) {
    let difference = difference(summary, reference);
    assert!(difference <= tolerance, "{what}: {difference:e}\n{:?}\n{:?}", summary.losses, reference.losses);
}

/// Each rank sent in every step what the formula says.
pub fn assert_counts(summary: &Summary, what: &str) {
    for rank in &summary.ranks {
        assert_eq!(rank.bytes_counted, Some(rank.expected.payload), "{what}: payload of rank {}", rank.rank);
        assert_eq!(rank.messages, Some(rank.expected.messages), "{what}: messages of rank {}", rank.rank);
        assert_eq!(rank.operations, rank.expected.operations, "{what}: operations of rank {}", rank.rank);
        assert!(rank.bytes_steady, "{what}: rank {} sent another number of bytes in some step", rank.rank);
    }
}
