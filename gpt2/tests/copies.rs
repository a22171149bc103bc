//! What each strategy copies of gradients and parameters, and fills with zeros, in a step.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use comm_core::shard_range;
use gpt2::memory::Copies;
use gpt2::precision::Precision;
use gpt2::segments::layout;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::trainer::TrainConfig;

use crate::local::{corpus, run, single, with};

/// Elements of segments, or of buckets of them.
struct Sizes {
    segments: Vec<usize>,
    buckets: Vec<usize>,
    ranks: usize,
    rank: usize,
}

impl Sizes {
    fn all(&self) -> usize {
        self.segments.iter().sum()
    }

    /// A rank's shards of these.
    fn shards(&self, of: &[usize], ranks: usize, rank: usize) -> usize {
        of.iter().map(|len| shard_range(*len, ranks, rank).len()).sum()
    }

    /// This rank's shards of the buckets.
    fn of_buckets(&self) -> usize {
        self.shards(&self.buckets, self.ranks, self.rank)
    }

    /// Its shards of the segments.
    fn of_segments(&self, segments: &[usize]) -> usize {
        self.shards(segments, self.ranks, self.rank)
    }
}

/// What is copied and what is filled with zeros, in elements, with weights and wire in f32.
fn formula(strategy: StrategyKind, sizes: &Sizes) -> (usize, usize) {
    let Sizes { segments, buckets, .. } = sizes;
    let is_one_bucket = buckets.len() == 1;
    // The gradient of the embedding begins first, with the head's, and ends last: it is computed apart from what else is in its bucket.
    let embedding = if is_one_bucket { segments[0] } else { 0 };
    // Weights that are gathered together are cut apart, but for the first of them, the final norm's.
    let cut = if is_one_bucket { sizes.all() - segments[segments.len() - 1] } else { 0 };
    let gathered = sizes.of_buckets() + cut;
    match strategy {
        StrategyKind::Single => (0, 0),
        StrategyKind::Zero1 => (gathered + embedding, sizes.all() - sizes.of_buckets()),
        // And gradients, so that the others' can go.
        StrategyKind::Zero2 => (gathered + sizes.of_buckets() + embedding, sizes.all() - sizes.of_buckets()),
        // Masters are gathered twice, but for the embedding's, into memory that weights were in before.
        StrategyKind::Fsdp => (2 * sizes.of_segments(segments) + sizes.of_segments(&segments[1..]), 0),
        _ => (embedding, 0),
    }
}

#[test]
fn a_step_copies_what_the_formula_says() {
    let corpus = corpus(20_000);
    let segments: Vec<usize> = layout(&single(1).model).unwrap().iter().map(|segment| segment.len).collect();
    for strategy in [
        StrategyKind::Single,
        StrategyKind::Ddp,
        StrategyKind::Ring,
        StrategyKind::Zero1,
        StrategyKind::Zero2,
        StrategyKind::Fsdp,
    ] {
        let ranks = if strategy == StrategyKind::Single { 1 } else { 3 };
        // Each segment by itself, and all in one.
        for bytes in [1, usize::MAX] {
            let mut config = with(&single(7), (strategy, false), ranks);
            config.options = StrategyOptions {
                first_bucket_bytes: bytes,
                bucket_bytes: bytes,
                fusion_bytes: bytes,
                ..config.options
            };
            let buckets = if bytes == 1 { segments.clone() } else { vec![segments.iter().sum()] };
            for rank in run(&config, &corpus, ranks).ranks {
                let sizes = Sizes { segments: segments.clone(), buckets: buckets.clone(), ranks, rank: rank.rank };
                let (copied, zeroed) = formula(strategy, &sizes);
                let expected = Copies { copied: 4 * copied as u64, zeroed: 4 * zeroed as u64 };
                assert_eq!(rank.copies, expected, "{strategy}, rank {}", rank.rank);
            }
        }
    }
}

#[test]
fn values_that_are_rounded_on_the_way_are_counted() {
    let all: usize = layout(&single(1).model).unwrap().iter().map(|segment| segment.len).sum();
    let config = with(&single(7), (StrategyKind::Ddp, false), 2);
    let options = StrategyOptions { wire: Precision::Bf16, ..config.options.clone() };
    for rank in run(&TrainConfig { options, ..config }, &corpus(20_000), 2).ranks {
        // To two bytes and back to four, in memory that is filled with zeros first.
        let bytes = (2 + 4) * all as u64;
        assert_eq!(rank.copies, Copies { copied: bytes, zeroed: bytes }, "rank {}", rank.rank);
    }
}
