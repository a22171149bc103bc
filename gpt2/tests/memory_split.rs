//! What ranks keep of parameters, gradients and optimizer together, by strategy.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod local;

use std::time::Duration;

use burn::tensor::Device;
use gpt2::checkpoint::sharded::Store;
use gpt2::config::{ModelConfig, Preset};
use gpt2::memory::{self, Category, CountingAllocator, Usage};
use gpt2::run::{RankOptions, run_threads};
use gpt2::segments::{Compute, SegmentedModel, layout};
use gpt2::strategy::{Compression, StrategyKind};
use gpt2::trainer::{Checkpoints, Keep, Observer, SaveReport};
use isocomm::{TransportKind, TransportOptions};

use local::{corpus, single, with};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const RANKS: usize = 4;

/// Bookkeeping of the ranks together: names, tables.
const SLACK: u64 = RANKS as u64 * 10_000;

/// Bytes of parameters that `model` takes, with all that is not elements: names, and some hundred bytes a tensor.
fn held(model: impl FnOnce() -> SegmentedModel) -> u64 {
    let now = || memory::usage().unwrap().parameters.current;
    let model = memory::within(Category::Parameters, model);
    let with = now();
    drop(model);
    with - now()
}

/// Peaks of a process whose threads are all ranks.
fn usage(model: &ModelConfig, strategy: StrategyKind, compress: Compression) -> Usage {
    let mut config = with(&single(3), (strategy, false), RANKS);
    config.model = model.clone();
    config.options.compress = compress;
    let options = options(Keep::default());
    let summary = run_threads(&config, &corpus(20_000), RANKS, &options, &Device::flex(), &mut ()).unwrap();
    summary.ranks[0].memory.unwrap()
}

fn options(keep: Keep) -> RankOptions {
    RankOptions {
        transport: TransportKind::LOCAL,
        options: TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() },
        node_transport: None,
        threads: Some(1),
        keep,
    }
}

/// One test, since the figures are the process's.
#[test]
fn each_stage_shards_one_more_kind() {
    // Twelve blocks, so that two of them are little beside all.
    let model = ModelConfig { n_layer: 12, n_embd: 64, ..Preset::Micro.config(256) };
    let segments = layout(&model).unwrap();
    let bytes = |elements: usize| 4 * elements as u64;
    let all = bytes(segments.iter().map(|segment| segment.len).sum());
    let block = bytes(segments[1].len);
    let (embedding, norm) = (bytes(segments[0].len), bytes(segments[13].len));
    assert!(embedding < block && norm < block);
    let ranks = RANKS as u64;
    // What the tensors of one rank's weights take beside their elements, and what those take that stand for absent weights.
    let handles = held(|| SegmentedModel::zeros(model.clone(), &Device::flex()).unwrap()) - all;
    let absent = held(|| SegmentedModel::absent(model.clone(), Compute::default(), &Device::flex()).unwrap());
    // Ranks may all be at their peaks at once, though they seldom are.
    let within = |what: &str, peak: u64, least: u64, most: u64| {
        let most = most + SLACK;
        assert!((least..=most).contains(&peak), "{what}: {peak} is not in {least}..={most}, of {all} parameter bytes");
    };

    let ddp = usage(&model, StrategyKind::Ddp, Compression::None);
    // The masters are the weights. What is beside the elements is there twice for the block that is being lent.
    within("weights of ddp", ddp.parameters.peak, ranks * all, ranks * (all + handles + handles / 12));
    within("optimizers of ddp", ddp.optimizer.peak, 2 * ranks * all, 2 * ranks * all);
    within("gradients of ddp", ddp.gradients.peak, all, ranks * (all + 2 * block));

    // Beside both moments what compression leaves of every gradient, and of integers what it leaves of the averages of a shard.
    let kept = usage(&model, StrategyKind::Ddp, Compression::TopK { fraction: 0.01 }).optimizer.peak;
    within("optimizers of ddp with the largest elements", kept, 3 * ranks * all, 3 * ranks * all);
    let kept = usage(&model, StrategyKind::Ddp, Compression::Int8).optimizer.peak;
    within("optimizers of ddp with integers", kept, (3 * ranks + 1) * all, (3 * ranks + 1) * all);
    // Moments on the server, and what is left on each worker.
    let kept = usage(&model, StrategyKind::Ps, Compression::Sign).optimizer.peak;
    within("optimizers of ps with signs", kept, (2 + ranks - 1) * all, (2 + ranks - 1) * all);

    // Whole buckets, each of a block, the first of the norm too: one on its way; and that one, with the block while it is cut off.
    let stage = ranks * (all + handles + block + (norm + block) + block);
    let zero1 = usage(&model, StrategyKind::Zero1, Compression::None);
    within("weights of zero1", zero1.parameters.peak, ranks * all, stage);
    within("optimizers of zero1", zero1.optimizer.peak, 3 * all, 3 * all);

    let zero2 = usage(&model, StrategyKind::Zero2, Compression::None);
    within("weights of zero2", zero2.parameters.peak, ranks * all, stage);
    within("optimizers of zero2", zero2.optimizer.peak, 3 * all, 3 * all);
    within("gradients of zero2", zero2.gradients.peak, all, all + 2 * ranks * block);

    let fsdp = usage(&model, StrategyKind::Fsdp, Compression::None);
    // Shards of the masters, two segments and the embedding, and what stands for the others.
    within("weights of fsdp", fsdp.parameters.peak, all, all + ranks * (2 * block + embedding + absent));
    within("optimizers of fsdp", fsdp.optimizer.peak, 2 * all, 2 * all);
    within("gradients of fsdp", fsdp.gradients.peak, all, all + 2 * ranks * block);

    // The same in two nodes of two, with a model in each.
    let hsdp = usage(&model, StrategyKind::Hsdp, Compression::None);
    within("weights of hsdp", hsdp.parameters.peak, 2 * all, 2 * all + ranks * (2 * block + embedding + absent));
    within("optimizers of hsdp", hsdp.optimizer.peak, 4 * all, 4 * all);
    within("gradients of hsdp", hsdp.gradients.peak, 2 * all, 2 * all + 2 * ranks * block);

    // Of the masters and both moments, which lie where they are written from, nothing is copied.
    for (strategy, copies, kept) in [
        (StrategyKind::Ddp, 3, 0),
        (StrategyKind::Zero2, 3, 0),
        (StrategyKind::Fsdp, 3, 0),
        // Each rank has its own, and all what they had at first, of which each writes a part.
        (StrategyKind::Diloco, 3 * ranks + 1, segments.len()),
    ] {
        let report = save(&model, strategy);
        assert!((0..2 * SLACK).contains(&(report.bytes - copies * all)), "{strategy}: {report:?}");
        let (took, most) = (report.extra_bytes.unwrap(), ranks * tables(segments.len(), 3, kept));
        assert!((1..=most).contains(&took), "saving with {strategy}: {took} is not in 1..={most}");
    }
}

/// What the tables of a rank take at most while it writes tensors of so many `kinds` of a part of each of so many segments, and `kept` others.
fn tables(segments: usize, kinds: usize, kept: usize) -> u64 {
    /// Its place and its description (104 bytes and the segment's name, which has 9; 56 more for one that is kept), in vectors that may have
    /// grown to twice their length.
    const PART: usize = 200;
    /// In the list of tensors, twice as long as it need be, 64 bytes, and its name, of up to 30 bytes in twice as many; 48 in the sorted one;
    /// and in the header 112 beside its name.
    const TENSOR: usize = 64 + 60 + 48 + 112 + 30;
    /// Paths, the file, what it is told by.
    const RANK: usize = 2000;
    (RANK + PART * (segments + kept) + TENSOR * (kinds * segments + kept)) as u64
}

/// What it took all ranks to save the whole state.
fn save(model: &ModelConfig, strategy: StrategyKind) -> SaveReport {
    #[derive(Default)]
    struct Kept(Option<SaveReport>);
    impl Observer for Kept {
        fn saved(&mut self, report: &SaveReport) {
            self.0 = Some(report.clone());
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let mut config = with(&single(3), (strategy, false), RANKS);
    config.model = model.clone();
    let checkpoints = Some(Checkpoints { store: Store::new(folder.path()), every: 2, keep: 1 });
    let options = options(Keep { checkpoints, ..Keep::default() });
    let mut kept = Kept::default();
    run_threads(&config, &corpus(20_000), RANKS, &options, &Device::flex(), &mut kept).unwrap();
    kept.0.unwrap()
}
