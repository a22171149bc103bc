//! Gradients that stay on a device: packed there for transports that move bytes, and never read back for a communicator that works on the
//! device's own memory. The device is the CPU's backend, and what stands for its memory is a host vector that only the test's own
//! communicator takes.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::tensor::{Device, Tensor, TensorData};
use gpt2::batches::LastBatch;
use gpt2::config::{ModelConfig, Preset};
use gpt2::flat::{Flat, Weights};
use gpt2::optim::{LossScaling, OptimizerConfig, OptimizerKind};
use gpt2::precision::Precision;
use gpt2::record::{Activity, Operation, Span, record};
use gpt2::segments::{SegmentInfo, layout};
use gpt2::strategy::{
    self, Built, Channels, CheckedGradients, Comms, DuringPass, LocalOptions, LocalStep, Ranks, Setup, StrategyKind,
    StrategyOptions,
};
use gpt2::trainer::{Observer, Parts, Session, StepReport, Summary, TrainConfig, TrainError, train};
use isocomm::{Nodes, TransportOptions};

use crate::local::{TOLERANCE, VARIANTS, assert_close, corpus, run, single, with};
use crate::native::{Equipped, Lender};

#[derive(Default)]
struct Seen {
    warnings: Vec<String>,
    reports: Vec<StepReport>,
}

impl Observer for Seen {
    fn warning(&mut self, text: &str) {
        self.warnings.push(text.into());
    }

    fn step(&mut self, report: &StepReport) {
        self.reports.push(report.clone());
    }
}

/// A run of one rank.
struct Outcome {
    summary: Summary,
    /// Buffers lent.
    lent: u64,
    /// Buffers of the host's that were communicated.
    detours: u64,
    warnings: Vec<String>,
    reports: Vec<StepReport>,
}

/// Trains on ranks whose communicator works on a device's memory. All must agree on the result.
fn native(config: &TrainConfig, ranks: usize) -> Outcome {
    train_all(config, Session::threads(ranks, &options()).unwrap(), (true, false), &Lender::new)
}

/// Two nodes of two.
fn in_nodes() -> Vec<Session> {
    Session::threads_in_nodes(&Nodes::of_size(4, 2), &options()).unwrap()
}

fn options() -> TransportOptions {
    TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() }
}

/// Trains on ranks whose communicator, or that of their node, or both, works on a device's memory.
fn train_all(
    config: &TrainConfig,
    sessions: Vec<Session>,
    lends: (bool, bool),
    lender: &(impl Fn() -> Arc<Lender> + Sync),
) -> Outcome {
    let corpus = corpus(20_000);
    let train = |mut session: Session| {
        let equipped = Equipped::new(&mut session, lends, lender());
        let mut seen = Seen::default();
        let summary = train(config, &corpus, &session, &Device::flex(), None, &mut seen).unwrap();
        let (lent, detours) = (equipped.lent(), equipped.detours());
        Outcome { summary, lent, detours, warnings: seen.warnings, reports: seen.reports }
    };
    let outcomes: Vec<Outcome> = thread::scope(|scope| {
        let threads: Vec<_> = sessions.into_iter().map(|session| scope.spawn(|| train(session))).collect();
        threads.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for outcome in &outcomes {
        assert_eq!(outcome.summary.weights_hash, outcomes[0].summary.weights_hash);
        if config.strategy.spec().is_one_device {
            assert_eq!(outcome.summary.losses, outcomes[0].summary.losses);
        }
    }
    outcomes.into_iter().next().unwrap()
}

fn config(strategy: StrategyKind, ranks: usize) -> TrainConfig {
    TrainConfig { eval_every: 2, ..with(&single(4), (strategy, false), ranks) }
}

/// Ranks to try a strategy on; two nodes of two for those that tell nodes apart.
fn sizes(strategy: StrategyKind) -> [usize; 2] {
    if strategy.spec().tells_nodes_apart { [3, 4] } else { [2, 3] }
}

/// Two ranks; two nodes of two for the strategies that tell nodes apart.
fn two_or_nodes(strategy: StrategyKind) -> usize {
    if strategy.spec().tells_nodes_apart { 4 } else { 2 }
}

/// Trains in device memory, which nothing leaves, as in host memory.
fn prove(config: &TrainConfig, ranks: usize, what: &str) {
    let Outcome { summary, lent, detours, warnings, .. } = native(config, ranks);
    let host = run(config, &corpus(20_000), ranks);
    assert_close(&summary, &host, TOLERANCE, what);
    let (found, expected) = (summary.validation_loss.unwrap(), host.validation_loss.unwrap());
    assert!((found / expected - 1.0).abs() < TOLERANCE, "{what}: {found} {expected}");
    assert_eq!(summary.ranks[0].operations, summary.ranks[0].expected.operations, "{what}");
    // Everything that was communicated was lent.
    assert_eq!(detours, 0, "{what}");
    assert!(lent >= config.steps * summary.ranks[0].operations, "{what}: {lent}");
    assert!(warnings.is_empty(), "{what}: {warnings:?}");
    assert_eq!(summary.ranks[0].optimizer_steps, (config.steps, config.steps), "{what}");
}

#[test]
fn training_in_device_memory_is_training_in_host_memory() {
    for variant in VARIANTS {
        for ranks in sizes(variant.0) {
            let config = TrainConfig { eval_every: 2, ..with(&single(4), variant, ranks) };
            prove(&config, ranks, &format!("{variant:?} on {ranks} ranks"));
        }
    }
}

#[test]
fn lamb_in_device_memory_is_lamb_in_host_memory() {
    let lamb = TrainConfig { optimizer: OptimizerConfig::of(OptimizerKind::Lamb), eval_every: 2, ..single(4) };
    prove(&lamb, 1, "lamb alone");
    for variant in VARIANTS {
        for ranks in sizes(variant.0) {
            prove(&with(&lamb, variant, ranks), ranks, &format!("lamb, {variant:?} on {ranks} ranks"));
        }
    }
}

#[test]
fn ranks_that_train_by_themselves_do_so_in_device_memory_as_in_host_memory() {
    let local = LocalOptions { sync_every: 4, overlap_steps: 1, sparta_share: 0.1, ..LocalOptions::default() };
    for strategy in StrategyKind::ALL.into_iter().filter(|kind| !kind.spec().is_one_device) {
        // Its server works in host memory.
        if strategy == StrategyKind::AsyncPs {
            continue;
        }
        for (optimizer, wire) in [(OptimizerKind::Sgd, Precision::Bf16), (OptimizerKind::AdamW, Precision::F32)] {
            let config = with(&single(6), (strategy, false), 2);
            let options = StrategyOptions { local: local.clone(), wire, ..config.options.clone() };
            let optimizer = OptimizerConfig::of(optimizer);
            prove(&TrainConfig { options, optimizer, eval_every: 3, ..config }, 2, &format!("{strategy}, {wire}"));
        }
    }
}

#[test]
fn one_device_trains_alone() {
    let config = single(6);
    let Outcome { summary, lent, detours, .. } = native(&config, 1);
    assert_eq!((lent, detours), (0, 0));
    assert_close(&summary, &run(&config, &corpus(20_000), 1), TOLERANCE, "single");
}

#[test]
fn sixteen_bits_scaling_and_accumulation_work_in_device_memory() {
    for strategy in [
        StrategyKind::Ddp,
        StrategyKind::Zero2,
        StrategyKind::Fsdp,
        StrategyKind::ShardedPs,
        StrategyKind::Hierarchical,
    ] {
        let ranks = two_or_nodes(strategy);
        // Whole rows for each rank's micro-steps.
        let config = TrainConfig { global_batch: 6 * ranks, ..config(strategy, ranks) };
        let narrow = StrategyOptions { wire: Precision::Bf16, ..config.options.clone() };
        let late = StrategyOptions { overlap: false, ..config.options.clone() };
        let scaling = LossScaling::Fixed { scale: 1024.0 };
        let varied = [
            TrainConfig { options: narrow.clone(), ..config.clone() },
            TrainConfig { precision: Precision::Bf16, loss_scaling: scaling, options: narrow, ..config.clone() },
            TrainConfig { accumulation: 3, loss_scaling: scaling, ..config.clone() },
            TrainConfig { accumulation: 2, options: late, ..config },
        ];
        for config in varied {
            let Outcome { summary, detours, .. } = native(&config, ranks);
            let host = run(&config, &corpus(20_000), ranks);
            let tolerance = if config.precision == Precision::Bf16 { 1e-2 } else { TOLERANCE };
            let what = format!("{strategy}, {}, {}, {}", config.precision, config.options.wire, config.accumulation);
            assert_close(&summary, &host, tolerance, &what);
            assert_eq!(detours, 0, "{what}");
        }
    }
}

#[test]
fn an_overflow_is_skipped_in_device_memory_too() {
    let loss_scaling =
        LossScaling::Dynamic { initial: 1_073_741_824.0, growth: 2.0, backoff: 2f32.powi(-20), interval: 100 };
    let config = TrainConfig { precision: Precision::F16, loss_scaling, ..config(StrategyKind::Ddp, 2) };
    let summary = native(&config, 2).summary;
    assert_eq!((summary.skipped_steps, summary.ranks[0].optimizer_steps), (1, (config.steps - 1, config.steps - 1)));
}

#[test]
fn lamb_skips_and_accumulates_in_device_memory_as_in_host_memory() {
    let lamb = TrainConfig { optimizer: OptimizerConfig::of(OptimizerKind::Lamb), ..single(8) };
    // The first steps overflow, until the scale fits.
    let shrinking = LossScaling::Dynamic { initial: 1_073_741_824.0, growth: 2.0, backoff: 1.0 / 64.0, interval: 100 };
    for strategy in [StrategyKind::Ddp, StrategyKind::Zero1, StrategyKind::Fsdp, StrategyKind::Hierarchical] {
        let ranks = two_or_nodes(strategy);
        let config = TrainConfig { global_batch: 6 * ranks, ..with(&lamb, (strategy, false), ranks) };
        let varied = [
            (TrainConfig { accumulation: 3, ..config.clone() }, TOLERANCE),
            (TrainConfig { precision: Precision::F16, loss_scaling: shrinking, accumulation: 2, ..config }, 1e-2),
        ];
        for (config, tolerance) in varied {
            let what = format!("lamb, {strategy}, {}", config.precision);
            let Outcome { summary, detours, .. } = native(&config, ranks);
            let host = run(&config, &corpus(20_000), ranks);
            assert_close(&summary, &host, tolerance, &what);
            assert_eq!((summary.skipped_steps, detours), (host.skipped_steps, 0), "{what}");
            let overflows = config.precision == Precision::F16;
            let skipped = if overflows { 1..=config.steps - 3 } else { 0..=0 };
            assert!(skipped.contains(&summary.skipped_steps), "{what}: {} skipped", summary.skipped_steps);
            let steps = config.steps - summary.skipped_steps;
            assert!(summary.ranks.iter().all(|rank| rank.optimizer_steps == (steps, steps)), "{what}");
        }
    }
}

#[test]
fn norms_of_tensors_are_communicated_where_they_come_from_a_device() {
    let lamb = TrainConfig { optimizer: OptimizerConfig::of(OptimizerKind::Lamb), ..config(StrategyKind::Ddp, 2) };
    for (on_device, expected) in [(true, 1), (false, 0)] {
        let outcome = train_all(&lamb, Session::threads(2, &options()).unwrap(), (on_device, false), &Lender::new);
        for report in &outcome.reports {
            let norms = report.communications.iter().filter(|operation| operation.label == "norms of tensors");
            assert_eq!(norms.count(), expected, "on a device: {on_device}: {:?}", report.communications);
        }
        assert_eq!(outcome.reports.len() as u64, lamb.steps);
    }
}

#[test]
fn rows_that_do_not_fill_a_step_leave_ranks_without_data() {
    let config = TrainConfig {
        last_batch: LastBatch::Join,
        global_batch: 6,
        accumulation: 2,
        steps: 24,
        model: ModelConfig { block_size: 128, ..Preset::Micro.config(256) },
        ..config(StrategyKind::Ddp, 3)
    };
    let Outcome { summary, .. } = native(&config, 3);
    assert_close(&summary, &run(&config, &corpus(20_000), 3), 10.0 * TOLERANCE, "ddp with ranks without data");
}

#[test]
fn a_level_that_moves_bytes_is_the_only_one_in_host_memory() {
    let ranks = 4;
    let staged = "a shard of each bucket is uploaded and read back again";
    for strategy in [StrategyKind::Hierarchical, StrategyKind::Hsdp] {
        let config = TrainConfig { eval_every: 0, ..config(strategy, ranks) };
        let host = run(&config, &corpus(20_000), ranks);
        // What of each step's operations is between nodes, and inside.
        let operations = host.ranks[0].operations;
        let (between, inside) = match strategy {
            StrategyKind::Hierarchical => (operations / 3, 2 * operations / 3),
            // A segment's gradients go both ways, and all weights but those of the embedding come twice.
            _ => (operations.div_ceil(4), operations - operations.div_ceil(4)),
        };
        // Who lends, buffers lent in a step, and what is warned of.
        let levels = [
            ((true, false), between, Some(staged)),
            ((false, true), inside, None),
            ((true, true), between + inside, None),
            ((false, false), 0, None),
        ];
        for (lends, lent_in_step, warning) in levels {
            let Outcome { summary, lent, detours, warnings, .. } = train_all(&config, in_nodes(), lends, &Lender::new);
            let what = format!("{strategy}, world and node lend: {lends:?}");
            assert_close(&summary, &host, TOLERANCE, &what);
            assert_eq!(detours, 0, "{what}");
            assert_eq!(lent, config.steps * lent_in_step, "{what}");
            assert_eq!(warnings.len(), usize::from(warning.is_some()), "{what}: {warnings:?}");
            assert!(warning.is_none_or(|warning| warnings[0].contains(warning)), "{what}: {warnings:?}");
        }
    }
}

#[test]
fn waiting_for_the_device_is_computing_and_not_packing() {
    let busy = Duration::from_millis(5);
    for strategy in [StrategyKind::Ddp, StrategyKind::Ps, StrategyKind::ShardedPs, StrategyKind::Fsdp] {
        let config = TrainConfig { eval_every: 0, ..config(strategy, 2) };
        let outcome =
            train_all(&config, Session::threads(2, &options()).unwrap(), (true, false), &|| Lender::slow(busy));
        let mut waits = 0;
        for report in &outcome.reports {
            let spans = |activity: Activity| report.spans.iter().filter(move |span| span.activity == activity);
            let ms = |span: &Span| (span.ended - span.began) as f64 / 1e6;
            waits += spans(Activity::Device).count() as u64;
            let device: f64 = spans(Activity::Device).map(ms).sum();
            assert!(spans(Activity::Device).all(|span| ms(span) >= 5.0), "{strategy}: {:?}", report.spans);
            assert!(report.parts.compute >= device, "{strategy}: {:?}", report.parts);
            let Parts { data, compute, pack, exposed, scalars, unpack, optimizer, .. } = report.parts;
            let parts = data + compute + pack + exposed + scalars + unpack + optimizer;
            let all: f64 = report.spans.iter().map(ms).sum();
            assert!((parts - all).abs() < 1e-3 && parts <= report.ms, "{strategy}: {parts} {all} {}", report.ms);
        }
        assert_eq!(waits, outcome.lent, "{strategy}");
    }
}

/// One step's gradients, from the device or from host memory, through a strategy.
fn averaged(
    of: (StrategyKind, Precision),
    sessions: Vec<Session>,
    on_device: bool,
    lends: (bool, bool),
) -> Vec<Vec<Vec<f32>>> {
    timed(of, sessions, on_device, lends).into_iter().map(|rank| rank.grads).collect()
}

/// What came of it on one rank, and what its thread did meanwhile.
struct Passed {
    grads: Vec<Vec<f32>>,
    spans: Vec<Span>,
    operations: Vec<Operation>,
}

/// A rank that computes nothing: its gradients are given, and what a strategy makes of them is kept and not applied.
struct Given<'a> {
    segments: &'a [SegmentInfo],
    rank: usize,
    on_device: bool,
    averaged: Vec<Flat>,
}

impl LocalStep for Given<'_> {
    fn backward(&mut self, strategy: &mut dyn DuringPass, channels: &mut Channels) -> Result<f64, TrainError> {
        strategy.begin(true);
        for (segment, info) in self.segments.iter().enumerate().rev() {
            let value = |i: usize| ((i * 31 + segment * 7 + self.rank * 1013) % 2003) as f32 / 999.0 - 1.0;
            let whole: Vec<f32> = (0..info.len).map(value).collect();
            let tensor = |range: std::ops::Range<usize>| {
                let data = TensorData::new(whole[range.clone()].to_vec(), [range.len()]);
                Tensor::<1>::from_data(data, &Device::flex())
            };
            let parts = info.params.iter().map(|param| tensor(param.offset..param.offset + param.len));
            let flat = if self.on_device { Flat::Device(parts.collect()) } else { Flat::Host(whole.clone()) };
            strategy.gradient(segment, flat.into(), channels)?;
        }
        Ok(0.0)
    }

    fn check(&mut self, loss: f64, grads: Vec<Flat>, ranks: Ranks) -> Result<CheckedGradients, TrainError> {
        self.averaged = grads;
        Ok(CheckedGradients {
            loss,
            grad_norm: 0.0,
            skip: true,
            grads: Vec::new(),
            factor: 1.0,
            part_of_rate: 1.0,
            ranks,
        })
    }

    fn update_some(&mut self, _checked: &mut CheckedGradients, _segments: &[usize]) -> Result<(), TrainError> {
        panic!("the step is skipped")
    }

    fn masters(&self) -> &[Flat] {
        &[]
    }

    fn masters_mut(&mut self) -> &mut [Flat] {
        &mut []
    }

    fn is_last(&self) -> bool {
        true
    }

    fn put(&mut self, _segment: usize, _weights: Weights) -> Result<(), TrainError> {
        panic!("the step is skipped")
    }
}

/// The same, with the time that it took.
fn timed(
    (kind, wire): (StrategyKind, Precision),
    sessions: Vec<Session>,
    on_device: bool,
    lends: (bool, bool),
) -> Vec<Passed> {
    let segments = layout(&Preset::Micro.config(64)).unwrap();
    let lengths: Vec<usize> = segments.iter().map(|segment| segment.len).collect();
    let base = with(&single(1), (kind, false), sessions.len()).options;
    let options = StrategyOptions { wire, ..base };
    let average = |mut session: Session| {
        let _equipped = Equipped::new(&mut session, lends, Lender::new());
        let node = session.node.as_ref();
        let comms = Comms {
            world: session.comm.clone(),
            nodes: Nodes::of_size(session.comm.world_size(), options.ranks_per_node),
            node: node.map(|node| node.comm.clone()),
            native: session.native.clone(),
            node_native: node.and_then(|node| node.native.clone()),
            timeout: session.timeout,
        };
        let (options, precision) = (&options, Precision::F32);
        let setup = Setup {
            comms: &comms,
            segments: &lengths,
            tensors: &segments,
            options,
            precision,
            accumulation: 1,
            seed: 1,
            first_step: 0,
            checked: false,
        };
        let Built { mut strategy, mut channels, .. } = strategy::build(kind, &setup).unwrap();
        let rank = session.comm.rank();
        let mut given = Given { segments: &segments, rank, on_device, averaged: Vec::new() };
        let (outcome, recording) = record(|| strategy.step(0, &mut given, &mut channels));
        assert!(outcome.unwrap().skipped);
        let grads = given.averaged;
        let come_lent = if node.is_some() { lends.1 } else { lends.0 };
        assert!(grads.iter().all(|grads| matches!(grads, Flat::Device(_)) == come_lent), "{kind}");
        if let Some(node) = node {
            node.comm.finish(Duration::from_secs(60)).unwrap();
        }
        session.comm.finish(Duration::from_secs(60)).unwrap();
        let grads = grads.into_iter().map(|grads| grads.into_host().unwrap()).collect();
        let (spans, operations) = recording.into_parts();
        Passed { grads, spans, operations }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = sessions.into_iter().map(|session| scope.spawn(|| average(session))).collect();
        threads.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn packing_on_the_device_for_a_byte_transport_changes_no_bit() {
    for kind in StrategyKind::of_one_device().filter(|kind| *kind != StrategyKind::Single) {
        for wire in Precision::ALL {
            let from =
                |on_device| averaged((kind, wire), Session::threads(2, &options()).unwrap(), on_device, (false, false));
            assert_eq!(from(true), from(false), "{kind}, {wire}");
        }
    }
}

#[test]
fn a_device_is_waited_for_once_a_bucket_before_its_bytes_are_sent() {
    // What one bucket takes, with zero's parameters not yet sent.
    let kinds = [
        (StrategyKind::Ddp, 1),
        (StrategyKind::Zero1, 1),
        (StrategyKind::Zero2, 1),
        (StrategyKind::Ring, 1),
        (StrategyKind::Hierarchical, 3),
    ];
    for (kind, each) in kinds {
        let ranks = two_or_nodes(kind);
        for on_device in [true, false] {
            let of = (kind, Precision::F32);
            for rank in timed(of, Session::threads(ranks, &options()).unwrap(), on_device, (false, false)) {
                let Passed { spans, operations, .. } = rank;
                let buckets = operations.len() / each;
                assert!(buckets > 1, "{kind}: {operations:?}");
                let waits: Vec<usize> = (0..spans.len()).filter(|at| spans[*at].activity == Activity::Device).collect();
                assert_eq!(waits.len(), if on_device { buckets } else { 0 }, "{kind}: {spans:?}");
                // Asking, waiting, reading back; only then does the bucket leave.
                for at in waits {
                    let around = [spans[at - 1].activity, spans[at + 1].activity];
                    assert_eq!(around, [Activity::Pack; 2], "{kind}: {spans:?}");
                    // What has several stages leaves beside this thread.
                    assert!(each > 1 || spans[at + 2].operation.is_some(), "{kind}: {spans:?}");
                }
            }
        }
    }
}

#[test]
fn wherever_a_level_works_no_bit_changes() {
    let kinds = [StrategyKind::Hierarchical, StrategyKind::Hsdp];
    for (kind, wire) in kinds.into_iter().flat_map(|kind| Precision::ALL.map(|wire| (kind, wire))) {
        let host = averaged((kind, wire), in_nodes(), false, (false, false));
        for lends in [(true, true), (true, false), (false, true), (false, false)] {
            assert_eq!(averaged((kind, wire), in_nodes(), true, lends), host, "{kind}, {wire}, {lends:?}");
        }
        // Both levels are parts of one communicator.
        assert_eq!(
            averaged((kind, wire), Session::threads(4, &options()).unwrap(), true, (true, false)),
            host,
            "{kind}, {wire}"
        );
    }
}
