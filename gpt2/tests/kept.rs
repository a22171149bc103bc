//! Checkpoints of what strategies keep from step to step: ranks' own values, outer optimizers, averages under way, what compression has left.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::process::StopRequest;
use gpt2::batches::{Batches, Share};
use gpt2::checkpoint::sharded::{Kept, Kind, Reader, Saved, Store, Whose};
use gpt2::optim::{OptimizerConfig, OptimizerKind};
use gpt2::precision::Precision;
use gpt2::run::{RankOptions, run_threads};
use gpt2::segments::{SegmentInfo, SegmentedModel, layout};
use gpt2::strategy::{LocalOptions, StrategyKind, StrategyOptions};
use gpt2::trainer::{
    Checkpoints, Keep, Observer, Session, StepReport, Summary, TrainConfig, TrainError, train_keeping,
};
use isocomm::{TransportKind, TransportOptions};

use crate::local::{assert_counts, corpus, single, with};

const RANKS: usize = 3;

/// Steps of a run, and those after which it is saved.
const STEPS: u64 = 6;
const SAVED: u64 = 3;

/// A run that keeps something, and the values that all of its ranks write together, with S those of the model: how many times S, and the rest.
struct Case {
    config: TrainConfig,
    copies: usize,
    rest: usize,
}

impl Case {
    fn new(strategy: StrategyKind, local: LocalOptions, copies: usize) -> Self {
        let config = with(&single(STEPS), (strategy, false), RANKS);
        let options = StrategyOptions { local, ..config.options };
        Case { config: TrainConfig { options, global_batch: 6, ..config }, copies, rest: 0 }
    }

    fn compressed(strategy: StrategyKind, compress: &str, copies: usize) -> Self {
        let mut case = Case::new(strategy, LocalOptions::default(), copies);
        case.config.options.compress = compress.parse().unwrap();
        case
    }

    /// The server only serves.
    fn dedicated(mut self) -> Self {
        self.config.options.dedicated_server = true;
        self
    }

    fn wire(mut self, wire: Precision) -> Self {
        self.config.options.wire = wire;
        self
    }
}

/// The matrices of a model that `powersgd` sends as factors of so many columns: rows and columns.
fn factored(segments: &[SegmentInfo], rank: usize) -> Vec<(usize, usize)> {
    let shapes = segments.iter().flat_map(|segment| &segment.params).filter_map(|param| match param.shape[..] {
        [rows, cols] => Some((rows, cols)),
        _ => None,
    });
    shapes.filter(|(rows, cols)| (rows + cols) * rank < rows * cols).collect()
}

/// A run in which some ranks overflow before the checkpoint and one does not, each by itself: between factors of 1.08 and 1.34.
fn scaled_apart() -> TrainConfig {
    let local = LocalOptions { sync_every: 2, sparta_share: 0.2, ..LocalOptions::default() };
    let Case { mut config, .. } = Case::new(StrategyKind::Sparta, local, 0).wire(Precision::Bf16);
    config.precision = Precision::F16;
    config.loss_scaling = "dynamic:initial=2097152,interval=2".parse().unwrap();
    config.loss_factor = 1.2;
    config
}

/// Of each strategy that keeps something one run, in which the checkpoint comes where most is kept: between two synchronisations, or with a
/// fragment's average under way.
fn cases() -> Vec<Case> {
    let local = LocalOptions { sync_every: 2, sparta_share: 0.2, ..LocalOptions::default() };
    let streaming = LocalOptions { sync_every: 4, ..local.clone() };
    let waits = LocalOptions { staleness: 0, ..local.clone() };
    let (own, n) = (3 * RANKS, RANKS);
    let config = Case::new(StrategyKind::Ddp, LocalOptions::default(), 0).config;
    let segments = layout(&config.model).unwrap();
    let matrices = factored(&segments, 2);
    let left: usize = matrices.iter().map(|(rows, cols)| rows * cols).sum();
    let factors: usize = matrices.iter().map(|(_, cols)| 2 * cols).sum();
    let scaled = Case { config: scaled_apart(), copies: own, rest: 0 };
    let mut plain = Case::new(StrategyKind::LocalSgd, local.clone(), RANKS);
    plain.config.optimizer = OptimizerConfig::of(OptimizerKind::Sgd);
    vec![
        Case::new(StrategyKind::LocalSgd, local.clone(), own + 1).wire(Precision::Bf16),
        plain,
        Case::new(StrategyKind::Diloco, local.clone(), own + 2),
        // Momentum of the first fragment, and the mean of the second under way.
        Case::new(StrategyKind::StreamingDiloco, streaming, own + 2),
        scaled,
        Case::new(StrategyKind::AsyncPs, waits, 3),
        // What is left of the mean, too.
        Case::compressed(StrategyKind::Ddp, "int8", 3 + n + 1),
        Case::compressed(StrategyKind::Ddp, "sign", 3 + n + 1),
        Case::compressed(StrategyKind::Ring, "topk:0.1", 3 + n),
        // Of workers.
        Case::compressed(StrategyKind::Ps, "int8", 3 + n - 1),
        Case::compressed(StrategyKind::Ps, "sign", 3 + n - 1).dedicated(),
        Case::compressed(StrategyKind::Ps, "topk:0.1", 3 + n - 1),
        Case { rest: n * left + factors, ..Case::compressed(StrategyKind::Ddp, "powersgd:2", 3) },
    ]
}

fn options(folder: &Path, resume: Option<&Path>) -> RankOptions {
    let options = TransportOptions { timeout: Duration::from_secs(60), lanes: RANKS, ..TransportOptions::default() };
    let checkpoints = Some(Checkpoints { store: Store::new(folder), every: SAVED, keep: 1 });
    let resume = resume.map(|path| Arc::new(Saved::open(path).unwrap()));
    let keep = Keep { checkpoints, resume, ..Keep::default() };
    RankOptions { transport: TransportKind::LOCAL, options, node_transport: None, threads: Some(1), keep }
}

fn run(config: &TrainConfig, ranks: usize, folder: &Path, resume: Option<&Path>) -> Summary {
    run_threads(config, &corpus(20_000), ranks, &options(folder, resume), &Device::flex(), &mut ()).unwrap()
}

#[test]
fn a_run_that_goes_on_ends_where_an_undisturbed_one_does_and_saves_what_the_formula_says() {
    for Case { config, copies, rest } in cases() {
        let what = format!("{} {} {}", config.strategy, config.options.compress, config.options.wire);
        let folder = tempfile::tempdir().unwrap();
        let whole = run(&config, RANKS, folder.path(), None);
        let path = Store::new(folder.path()).path(SAVED);
        let saved = Saved::open(&path).unwrap();
        // In a checkpoint of its own the second run saves nothing: its next would be after the last step.
        let elsewhere = tempfile::tempdir().unwrap();
        let on = run(&config, RANKS, elsewhere.path(), Some(&path));
        assert_eq!(on.weights_hash, whole.weights_hash, "{what}");
        assert_eq!(on.losses, whole.losses[SAVED as usize..], "{what}");
        assert_eq!(whole.skipped_steps > 0, config.precision == Precision::F16, "{what}");
        assert_counts(&whole, &what);
        for rank in &on.ranks {
            assert!(rank.bytes_steady, "{what}: rank {} sent another number of bytes in some step", rank.rank);
        }
        assert!(saved.state().changes(&serde_json::to_value(&config).unwrap(), RANKS).is_empty());
        // Each rank has a scale of its own.
        let scales: Vec<f32> = saved.state().scalers.iter().map(|scaler| scaler.scale).collect();
        assert_eq!(
            scales.iter().any(|scale| *scale != scales[0]),
            config.precision == Precision::F16,
            "{what}: {scales:?}"
        );
        let files = &saved.state().files;
        let kinds = Kind::of(config.optimizer.kind).len();
        let values = |file: &gpt2::checkpoint::sharded::PartFile| {
            let pieces = kinds * file.pieces.iter().map(|piece| piece.len).sum::<usize>();
            pieces + file.kept.iter().map(|piece| piece.len).sum::<usize>()
        };
        let all: usize = layout(&config.model).unwrap().iter().map(|segment| segment.len).sum();
        let written: Vec<usize> = files.iter().map(values).collect();
        assert_eq!(written.iter().sum::<usize>(), copies * all + rest, "{what}: {written:?}");
        for (file, written) in files.iter().zip(&written) {
            let mut header = [0; 8];
            header.copy_from_slice(&fs::read(path.join(&file.name)).unwrap()[..8]);
            assert_eq!(file.bytes, 8 + u64::from_le_bytes(header) + 4 * *written as u64, "{what}");
        }
        // The ranks share the work; servers have all of it but what is a worker's own.
        let (least, most) = (written.iter().min().unwrap(), written.iter().max().unwrap());
        let is_shared = match config.strategy {
            StrategyKind::AsyncPs => written == [3 * all],
            StrategyKind::Ps => written == [3 * all, all, all],
            _ => files.len() == RANKS && most - least <= 40 * RANKS,
        };
        assert!(is_shared, "{what}: {written:?}");
    }
}

/// The elements of a segment that are written, of a rank's own or of the mean.
fn masters(saved: &Saved, whose: Whose, segment: usize, len: usize) -> Vec<f32> {
    Reader::new(saved, whose).read(segment, Kind::Master, 0..len).unwrap()
}

/// The loss of a model with these weights on what rank 0 of `ranks` reads in the first step after the checkpoint.
fn first_loss(config: &TrainConfig, weights: &[Vec<f32>], ranks: usize) -> f64 {
    let mut model = SegmentedModel::zeros(config.model.clone(), &Device::flex()).unwrap();
    weights.iter().enumerate().for_each(|(segment, weights)| model.write_params(segment, weights).unwrap());
    let TrainConfig { global_batch, seed, .. } = *config;
    let batches = Batches::new(&corpus(20_000), config.model.block_size, global_batch, seed).unwrap();
    model.loss(&batches.rows(SAVED, 0, Share { rank: 0, world: ranks, accumulation: 1 }).unwrap()).unwrap()
}

#[test]
fn on_other_ranks_all_go_on_with_the_mean() {
    let local = LocalOptions { sync_every: 4, ..LocalOptions::default() };
    let Case { config, .. } = Case::new(StrategyKind::Diloco, local, 0);
    let folder = tempfile::tempdir().unwrap();
    run(&config, 2, folder.path(), None);
    let path = Store::new(folder.path()).path(SAVED);
    let saved = Saved::open(&path).unwrap();
    let segments = layout(&config.model).unwrap();
    for (segment, info) in segments.iter().enumerate() {
        let of = |whose| masters(&saved, whose, segment, info.len);
        let (one, other, mean) = (of(Whose::Rank(0)), of(Whose::Rank(1)), of(Whose::Mean));
        assert_ne!(one, other, "{}", info.name);
        assert!(mean.iter().zip(one.iter().zip(&other)).all(|(mean, (a, b))| *mean == (a + b) / 2.0));
        let anchor = |whose| Reader::new(&saved, whose).kept(segment, Kept::Anchor, 0..info.len).unwrap().unwrap();
        assert_eq!(anchor(Whose::Rank(1)), anchor(Whose::Mean));
    }
    assert!(Reader::new(&saved, Whose::Rank(2)).read(0, Kind::Master, 0..1).is_err());
    let weights = |whose| -> Vec<Vec<f32>> {
        segments.iter().enumerate().map(|(segment, info)| masters(&saved, whose, segment, info.len)).collect()
    };
    let (mean, own) = (weights(Whose::Mean), weights(Whose::Rank(0)));
    let other = serde_json::to_value(TrainConfig { seed: 8, ..config.clone() }).unwrap();
    let error = saved.check(&other, &saved.state().text_sha256).unwrap_err().to_string();
    assert!(error.contains("other settings: --seed: was 7 and is 8 now; give the settings"), "{error}");
    for (strategy, ranks, told) in [
        (StrategyKind::Diloco, 3, "each rank had parameters of its own, and all continue with their mean"),
        (StrategyKind::Ddp, 2, "--strategy: was \"diloco\" and is \"ddp\" now"),
        (StrategyKind::StreamingDiloco, 2, "their mean"),
    ] {
        let other = TrainConfig { strategy, ..config.clone() };
        let changes = saved.state().changes(&serde_json::to_value(&other).unwrap(), ranks);
        assert!(changes.iter().any(|change| change.contains(told)), "{changes:?}");
        let elsewhere = tempfile::tempdir().unwrap();
        let on = run(&other, ranks, elsewhere.path(), Some(&path));
        assert_eq!(on.losses.len() as u64, STEPS - SAVED);
        // Ranks that step together report the loss of the whole batch, others their own.
        let [expected, other] = [&mean, &own]
            .map(|weights| first_loss(&other, weights, if strategy == StrategyKind::Ddp { 1 } else { ranks }));
        let off = (on.losses[0] - expected).abs();
        assert!(off < 1e-5 && (other - expected).abs() > 1e-4, "{strategy}: {:?}, {expected}, {other}", on.losses);
    }
}

#[test]
fn ranks_that_step_together_go_on_with_one_loss_scale() {
    let config = scaled_apart();
    let folder = tempfile::tempdir().unwrap();
    run(&config, RANKS, folder.path(), None);
    let path = Store::new(folder.path()).path(SAVED);
    let scalers = &Saved::open(&path).unwrap().state().scalers.clone();
    assert!(scalers.iter().any(|scaler| scaler.scale != scalers[0].scale), "{scalers:?}");
    // With scales that differ they would end with different weights, which is an error.
    let together = TrainConfig { strategy: StrategyKind::Ddp, ..config };
    let on = run(&together, RANKS, tempfile::tempdir().unwrap().path(), Some(&path));
    assert_eq!(on.losses.len() as u64, STEPS - SAVED);
}

#[test]
fn what_compression_has_left_is_shared_where_ranks_are_others_and_dropped_where_nothing_is_compressed() {
    let Case { config, .. } = Case::compressed(StrategyKind::Ddp, "int8", 0);
    let folder = tempfile::tempdir().unwrap();
    run(&config, 2, folder.path(), None);
    let path = Store::new(folder.path()).path(SAVED);
    let saved = Saved::open(&path).unwrap();
    let len = layout(&config.model).unwrap()[1].len;
    let left = |whose, what| Reader::new(&saved, whose).kept(1, what, 0..len).unwrap();
    let [one, other] = [0, 1].map(|rank| left(Whose::Rank(rank), Kept::Left).unwrap());
    let of_mean = left(Whose::Rank(0), Kept::LeftOfMean).unwrap();
    assert!(one != other && of_mean.iter().any(|left| *left != 0.0));
    let shared = left(Whose::Mean, Kept::Left).unwrap();
    let expected = one.iter().zip(&other).zip(&of_mean).map(|((one, other), of_mean)| (one + other) / 2.0 + of_mean);
    assert!(shared.iter().copied().eq(expected));
    assert_eq!(left(Whose::Mean, Kept::LeftOfMean), None);
    for (compress, told) in [("topk:0.1", "is divided among the ranks"), ("none", "is dropped")] {
        let mut other = config.clone();
        other.options.compress = compress.parse().unwrap();
        let changes = saved.state().changes(&serde_json::to_value(&other).unwrap(), 2);
        assert!(changes.iter().any(|change| change.contains(told)), "{changes:?}");
        let elsewhere = tempfile::tempdir().unwrap();
        let on = run(&other, RANKS, elsewhere.path(), Some(&path));
        assert_eq!(on.losses.len() as u64, STEPS - SAVED);
        assert_counts(&on, compress);
    }
}

#[test]
fn what_compression_has_left_of_workers_is_shared_by_those_whose_gradients_are_averaged() {
    for (dedicated, averaged) in [(false, RANKS), (true, RANKS - 1)] {
        let Case { mut config, .. } = Case::compressed(StrategyKind::Ps, "sign", 0);
        config.options.dedicated_server = dedicated;
        let folder = tempfile::tempdir().unwrap();
        run(&config, RANKS, folder.path(), None);
        let path = Store::new(folder.path()).path(SAVED);
        let saved = Saved::open(&path).unwrap();
        let len = layout(&config.model).unwrap()[1].len;
        let left = |whose| Reader::new(&saved, whose).kept(1, Kept::Left, 0..len).unwrap();
        let [server, one, other] = [0, 1, 2].map(|rank| left(Whose::Rank(rank)));
        let (one, other) = (one.unwrap(), other.unwrap());
        assert!(server.is_none() && one != other);
        let expected = one.iter().zip(&other).map(|(one, other)| (one + other) / averaged as f32);
        assert!(left(Whose::Mean).unwrap().iter().copied().eq(expected), "of {averaged}");
        for (strategy, ranks) in [(StrategyKind::Ps, 2), (StrategyKind::Ddp, RANKS)] {
            let mut other = TrainConfig { strategy, ..config.clone() };
            other.options.dedicated_server = false;
            let on = run(&other, ranks, tempfile::tempdir().unwrap().path(), Some(&path));
            assert_eq!(on.losses.len() as u64, STEPS - SAVED);
            assert_counts(&on, strategy.name());
        }
    }
}

/// The gradient's norm and the loss of each step of a run that goes on from `path`.
fn went_on(config: &TrainConfig, ranks: usize, path: &Path) -> Vec<(f64, f64)> {
    struct Said(Vec<(f64, f64)>);
    impl Observer for Said {
        fn step(&mut self, report: &StepReport) {
            self.0.push((report.grad_norm, report.loss));
        }
    }
    let (mut said, elsewhere) = (Said(Vec::new()), tempfile::tempdir().unwrap());
    let on = options(elsewhere.path(), Some(path));
    run_threads(config, &corpus(20_000), ranks, &on, &Device::flex(), &mut said).unwrap();
    said.0
}

#[test]
fn as_much_of_what_compression_has_left_arrives_whoever_goes_on() {
    let from = [
        Case::compressed(StrategyKind::Ddp, "topk:0.1", 0),
        Case::compressed(StrategyKind::Ddp, "sign", 0),
        Case::compressed(StrategyKind::Ps, "topk:0.1", 0),
        Case::compressed(StrategyKind::Ps, "topk:0.1", 0).dedicated(),
    ];
    for Case { config, .. } in from {
        let what = format!("{} {}", config.strategy, config.options.compress);
        let folder = tempfile::tempdir().unwrap();
        run(&config, RANKS, folder.path(), None);
        let path = Store::new(folder.path()).path(SAVED);
        let with = |strategy, compress: &str, dedicated_server| {
            let mut config = TrainConfig { strategy, ..config.clone() };
            config.options.compress = compress.parse().unwrap();
            config.options.dedicated_server = dedicated_server;
            config
        };
        // All that is left leaves in the first step, so that its mean gradient has to be the same whoever averages it.
        let first = went_on(&with(StrategyKind::Ddp, "topk:1", false), 2, &path);
        for (strategy, dedicated, ranks) in [
            (StrategyKind::Ring, false, 2),
            (StrategyKind::Ddp, false, 6),
            (StrategyKind::Ps, false, 2),
            (StrategyKind::Ps, false, 6),
            (StrategyKind::Ps, true, 4),
        ] {
            let other = went_on(&with(strategy, "topk:1", dedicated), ranks, &path);
            let near = |(one, other): (&(f64, f64), &(f64, f64))| {
                (one.0 / other.0 - 1.0).abs() < 1e-3 && (one.1 - other.1).abs() < 1e-3
            };
            assert!(
                first.iter().zip(&other).all(near),
                "{what} on {ranks} ranks of {strategy}: {other:?}, not {first:?}"
            );
        }
        let dropped = went_on(&with(StrategyKind::Ddp, "none", false), 2, &path);
        assert_eq!(dropped[0].1, first[0].1, "{what}: the weights are the same");
        let share = (dropped[0].0 / first[0].0 - 1.0).abs();
        assert!(share > 0.05, "{what}: what was left is too little to be seen: {dropped:?}, {first:?}");
    }
}

/// Asks to leave before a step.
struct Asks {
    before: u64,
    stop: StopRequest,
}

impl Observer for Asks {
    fn reading(&mut self, step: u64) {
        if step == self.before {
            self.stop.ask();
        }
    }
}

/// What each rank ends with, where the last one is asked to leave before step 2, of a run that saves every so many steps.
fn one_is_asked(config: &TrainConfig, every: u64, folder: &Path) -> Vec<TrainError> {
    let RankOptions { options, keep, .. } = options(folder, None);
    let corpus = &corpus(20_000);
    thread::scope(|scope| {
        let train = |(rank, session): (usize, Session)| {
            let stop = StopRequest::default();
            let checkpoints = keep.checkpoints.clone().map(|checkpoints| Checkpoints { every, ..checkpoints });
            let keep = Keep { checkpoints, stop: stop.clone(), ..Keep::default() };
            let mut asks = Asks { before: if rank + 1 == RANKS { 2 } else { 0 }, stop };
            scope.spawn(move || {
                train_keeping(config, corpus, &session, &Device::flex(), &keep, &mut asks).map(drop).unwrap_err()
            })
        };
        let ranks: Vec<_> = Session::threads(RANKS, &options).unwrap().into_iter().enumerate().map(train).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_is_asked_to_leave_takes_the_others_along_where_they_meet() {
    let local = |sync_every, staleness| LocalOptions { sync_every, staleness, ..LocalOptions::default() };
    for (strategy, local, (validates, saves), steps) in [
        // When they synchronise.
        (StrategyKind::Diloco, local(4, 0), (0, 0), 4..=4),
        // Or else are together for a validation or a checkpoint.
        (StrategyKind::LocalSgd, local(50, 0), (3, 0), 3..=3),
        (StrategyKind::Diloco, local(50, 0), (0, 5), 5..=5),
        // When a fragment has come, of two.
        (StrategyKind::StreamingDiloco, local(4, 0), (0, 0), 2..=2),
        // Not in each step.
        (StrategyKind::Sparta, local(4, 0), (0, 0), 8..=8),
        // In the step behind the farthest worker's.
        (StrategyKind::AsyncPs, local(4, 0), (0, 0), 3..=3),
        (StrategyKind::AsyncPs, local(4, 2), (0, 0), 3..=6),
    ] {
        let Case { config, .. } = Case::new(strategy, local, 0);
        let config = TrainConfig { steps: 100, eval_every: validates, eval_batches: 1, ..config };
        let folder = tempfile::tempdir().unwrap();
        let ended = one_is_asked(&config, saves, folder.path());
        for error in &ended {
            let TrainError::Stopped { step, path } = error else { panic!("{strategy}: {error}") };
            assert!(steps.contains(step), "{strategy}: after step {step}");
            let saved = Saved::open(path).unwrap();
            assert_eq!(saved.state().step, *step);
        }
    }
}

#[test]
fn async_ps_goes_on_from_a_cut_without_staleness_within_its_bound() {
    let local = LocalOptions { staleness: 2, ..LocalOptions::default() };
    let Case { config, .. } = Case::new(StrategyKind::AsyncPs, local, 0);
    let folder = tempfile::tempdir().unwrap();
    run(&config, RANKS, folder.path(), None);
    let path = Store::new(folder.path()).path(SAVED);
    let saved = Saved::open(&path).unwrap();
    // All gradients of all workers are in it, and the server alone has written.
    let pieces = &saved.state().files[0].pieces;
    assert!(saved.state().files.len() == 1 && pieces.iter().all(|piece| piece.optimizer_steps == 2 * SAVED));
    struct Losses(Vec<f64>);
    impl Observer for Losses {
        fn step(&mut self, report: &StepReport) {
            self.0.push(report.loss);
        }
    }
    let mut losses = Losses(Vec::new());
    let elsewhere = tempfile::tempdir().unwrap();
    let on = options(elsewhere.path(), Some(&path));
    let on = run_threads(&config, &corpus(20_000), RANKS, &on, &Device::flex(), &mut losses).unwrap();
    let staleness = on.ranks[0].staleness.unwrap();
    assert_eq!((staleness.pushes, on.ranks[0].optimizer_steps), (2 * (STEPS - SAVED), (2 * STEPS, 2 * STEPS)));
    assert!(staleness.max <= 2 && losses.0.len() as u64 == STEPS - SAVED, "{staleness:?}");
    assert_counts(&on, "async-ps that goes on");
}
