//! Strategies whose ranks train by themselves for a time: what they are where they are something else, the bytes of their formulas, the same bits
//! on every transport.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::local;
use gpt2::checkpoint::Checkpoint;
use gpt2::corpus::Corpus;
use gpt2::flat::{Flat, Weights};
use gpt2::optim::{LearningRate, LossScaling, OptimizerConfig, OptimizerKind};
use gpt2::precision::Precision;
use gpt2::strategy::{
    Built, Channels, CheckedGradients, Comms, DuringPass, LocalOptions, LocalStep, Ranks, Setup, StrategyKind,
    StrategyOptions, build,
};
use gpt2::trainer::{Observer, Session, StepReport, Summary, TrainConfig, TrainError, train};
use isocomm::{Nodes, TransportKind, TransportOptions};

use crate::local::{assert_counts, corpus, single, with};

/// Rounding, of weights that are averaged after a step instead of gradients before it.
const TOLERANCE: f64 = 1e-5;

/// Training by plain SGD, without clipping, which each rank would do for itself.
fn sgd(strategy: StrategyKind, ranks: usize, local: LocalOptions) -> TrainConfig {
    let base = TrainConfig {
        optimizer: OptimizerConfig::of(OptimizerKind::Sgd),
        learning_rate: LearningRate::Constant { rate: 0.1 },
        clip: 0.0,
        eval_every: 1,
        ..single(4)
    };
    local_of(&with(&base, (strategy, false), ranks), local)
}

fn local_of(config: &TrainConfig, local: LocalOptions) -> TrainConfig {
    TrainConfig { options: StrategyOptions { local, ..config.options.clone() }, ..config.clone() }
}

/// Trains on threads over `transport`: what each rank says in the end. All have one model then.
fn run(config: &TrainConfig, corpus: &Corpus, transport: TransportKind, ranks: usize) -> Vec<Summary> {
    let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
    let sessions = if transport == TransportKind::LOCAL {
        Session::threads(ranks, &options).unwrap()
    } else {
        let options = &options;
        thread::scope(|scope| {
            let connect = |control| Session::new(transport.connect(control, options).unwrap(), options);
            let ranks: Vec<_> =
                local::group(ranks, 1).into_iter().map(|rank| scope.spawn(move || connect(rank.control))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    };
    let summaries: Vec<Summary> = thread::scope(|scope| {
        let train = |session: Session| train(config, corpus, &session, &Device::flex(), None, &mut ()).unwrap();
        let ranks: Vec<_> = sessions.into_iter().map(|session| scope.spawn(move || train(session))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for summary in &summaries {
        assert_eq!(summary.weights_hash, summaries[0].weights_hash, "{}", config.strategy);
        assert_eq!(summary.validations, summaries[0].validations, "{}", config.strategy);
    }
    summaries
}

/// The largest relative difference of validation losses, which are of all rows of all ranks.
fn difference(summary: &Summary, reference: &Summary) -> f64 {
    assert_eq!(summary.validations.len(), reference.validations.len());
    let pairs = summary.validations.iter().zip(&reference.validations);
    pairs.map(|((_, a), (_, b))| ((a - b) / b).abs()).max_by(f64::total_cmp).unwrap()
}

/// That `strategy`, told this, is `ddp` by plain SGD; and that the comparison would notice other data.
fn is_ddp(strategy: StrategyKind, local: &LocalOptions) {
    let corpus = corpus(20_000);
    for ranks in [2, 3] {
        let ddp = run(&sgd(StrategyKind::Ddp, ranks, local.clone()), &corpus, TransportKind::LOCAL, ranks).remove(0);
        let config = sgd(strategy, ranks, local.clone());
        let summary = run(&config, &corpus, TransportKind::LOCAL, ranks).remove(0);
        let off = difference(&summary, &ddp);
        assert!(off <= TOLERANCE, "{strategy} on {ranks} ranks: {off:e}");
        assert_counts(&summary, &format!("{strategy} on {ranks} ranks"));
        let other = TrainConfig { seed: config.seed + 1, ..config };
        let off = difference(&run(&other, &corpus, TransportKind::LOCAL, ranks).remove(0), &ddp);
        assert!(
            off > 100.0 * TOLERANCE,
            "{strategy} on {ranks} ranks: other data in another order differs by {off:e} only"
        );
    }
}

/// The usual optimizer in seven steps, synchronised in the third, the sixth and the last: the same bits over every transport, the bytes of the
/// formula, whichever the wire type.
fn is_one_on_every_transport(strategy: StrategyKind, local: LocalOptions) {
    let corpus = corpus(20_000);
    let usual = local_of(&with(&TrainConfig { eval_every: 2, ..single(7) }, (strategy, false), 3), local);
    for wire in [Precision::F32, Precision::Bf16] {
        let config = TrainConfig { options: StrategyOptions { wire, ..usual.options.clone() }, ..usual.clone() };
        let mut first: Option<Summary> = None;
        let all = [TransportKind::LOCAL, TransportKind::TCP_RAW, TransportKind::TCP, TransportKind::QUIC];
        for transport in &all[..if wire == Precision::F32 { 4 } else { 2 }] {
            let what = format!("{strategy} over {transport}, wire {wire}");
            let ranks = run(&config, &corpus, *transport, 3);
            assert_ne!(ranks[0].losses, ranks[1].losses, "{what}: each rank looks at its own");
            ranks.iter().for_each(|summary| assert_counts(summary, &what));
            let first = first.get_or_insert_with(|| ranks[0].clone());
            assert_eq!(ranks[0].weights_hash, first.weights_hash, "{what}");
            assert_eq!(ranks[0].ranks[0].bytes_counted, first.ranks[0].bytes_counted, "{what}");
        }
    }
}

#[test]
fn local_sgd_after_every_step_is_ddp() {
    is_ddp(StrategyKind::LocalSgd, &LocalOptions { sync_every: 1, ..LocalOptions::default() });
}

#[test]
fn local_sgd_is_one_on_every_transport() {
    is_one_on_every_transport(StrategyKind::LocalSgd, LocalOptions { sync_every: 3, ..LocalOptions::default() });
}

#[test]
fn diloco_after_every_step_with_an_outer_rate_of_one_and_no_momentum_is_ddp() {
    let local = LocalOptions { sync_every: 1, outer_rate: 1.0, outer_momentum: 0.0, ..LocalOptions::default() };
    is_ddp(StrategyKind::Diloco, &local);
}

#[test]
fn diloco_is_one_on_every_transport() {
    is_one_on_every_transport(StrategyKind::Diloco, LocalOptions { sync_every: 3, ..LocalOptions::default() });
}

#[test]
fn an_outer_rate_of_one_without_momentum_is_local_sgd() {
    let corpus = corpus(20_000);
    let local = LocalOptions { sync_every: 3, outer_rate: 1.0, outer_momentum: 0.0, ..LocalOptions::default() };
    let of = |strategy, local: &LocalOptions| {
        let config = local_of(&with(&TrainConfig { eval_every: 1, ..single(7) }, (strategy, false), 2), local.clone());
        run(&config, &corpus, TransportKind::LOCAL, 2).remove(0)
    };
    let averaged = of(StrategyKind::LocalSgd, &local);
    let off = difference(&of(StrategyKind::Diloco, &local), &averaged);
    assert!(off <= TOLERANCE, "{off:e}");
    for other in [LocalOptions { outer_rate: 0.7, ..local.clone() }, LocalOptions { outer_momentum: 0.9, ..local }] {
        let off = difference(&of(StrategyKind::Diloco, &other), &averaged);
        assert!(off > 100.0 * TOLERANCE, "{other:?} differs by {off:e} only");
    }
}

#[test]
fn streaming_diloco_is_one_on_every_transport() {
    is_one_on_every_transport(StrategyKind::StreamingDiloco, LocalOptions { sync_every: 4, ..LocalOptions::default() });
}

#[test]
fn one_fragment_that_neither_overlaps_nor_is_mixed_is_diloco() {
    let corpus = corpus(20_000);
    let local = LocalOptions { sync_every: 3, fragments: 1, overlap_steps: 0, mixing: 0.0, ..LocalOptions::default() };
    let of = |strategy, local: &LocalOptions| {
        let config = local_of(&with(&TrainConfig { eval_every: 1, ..single(7) }, (strategy, false), 3), local.clone());
        run(&config, &corpus, TransportKind::LOCAL, 3).remove(0)
    };
    let diloco = of(StrategyKind::Diloco, &local);
    assert_eq!(of(StrategyKind::StreamingDiloco, &local).weights_hash, diloco.weights_hash);
    let others = [
        LocalOptions { fragments: 3, ..local.clone() },
        LocalOptions { overlap_steps: 1, ..local.clone() },
        LocalOptions { mixing: 0.5, ..local },
    ];
    for other in others {
        assert_ne!(of(StrategyKind::StreamingDiloco, &other).weights_hash, diloco.weights_hash, "{other:?}");
    }
}

/// A rank whose model is two numbers, each a segment, with a gradient of 2 in every step and a learning rate of 1.
struct TwoNumbers(Vec<Flat>);

impl LocalStep for TwoNumbers {
    fn backward(&mut self, strategy: &mut dyn DuringPass, channels: &mut Channels) -> Result<f64, TrainError> {
        strategy.begin(true);
        for segment in [1, 0] {
            strategy.gradient(segment, Flat::Host(vec![2.0]).into(), channels)?;
        }
        Ok(0.0)
    }

    fn check(&mut self, loss: f64, grads: Vec<Flat>, ranks: Ranks) -> Result<CheckedGradients, TrainError> {
        assert_eq!(ranks, Ranks::This);
        Ok(CheckedGradients { loss, grad_norm: 0.0, skip: false, grads, factor: 1.0, part_of_rate: 1.0, ranks })
    }

    fn update_some(&mut self, checked: &mut CheckedGradients, segments: &[usize]) -> Result<(), TrainError> {
        for segment in segments {
            let (Flat::Host(master), Flat::Host(gradient)) = (&mut self.0[*segment], &checked.grads[*segment]) else {
                panic!("nothing is on a device")
            };
            master[0] -= gradient[0];
        }
        Ok(())
    }

    fn masters(&self) -> &[Flat] {
        &self.0
    }

    fn masters_mut(&mut self) -> &mut [Flat] {
        &mut self.0
    }

    fn is_last(&self) -> bool {
        false
    }

    fn put(&mut self, _segment: usize, _weights: Weights) -> Result<(), TrainError> {
        Ok(())
    }
}

/// Of each of two ranks the two numbers before every step.
fn two_numbers(overlap_steps: u64, mixing: f64, steps: usize) -> Vec<[Vec<f32>; 2]> {
    let local = LocalOptions {
        sync_every: 6,
        outer_rate: 2.0,
        outer_momentum: 0.0,
        fragments: 2,
        overlap_steps,
        mixing,
        ..LocalOptions::default()
    };
    let options = StrategyOptions { local, ..StrategyOptions::default() };
    let rank = |session: Session| {
        let nodes = Nodes::of_size(session.comm.world_size(), 0);
        let (world, timeout) = (session.comm.clone(), session.timeout);
        let comms = Comms { world, nodes, node: None, native: None, node_native: None, timeout };
        let (segments, precision) = (&[1, 1][..], Precision::F32);
        let setup = Setup {
            comms: &comms,
            segments,
            tensors: &[],
            options: &options,
            precision,
            accumulation: 1,
            seed: 1,
            first_step: 0,
            checked: false,
        };
        let Built { mut strategy, mut channels, .. } = build(StrategyKind::StreamingDiloco, &setup).unwrap();
        let mut train = TwoNumbers(vec![Flat::Host(vec![1.0]); 2]);
        let mut seen = [Vec::new(), Vec::new()];
        for step in 0..steps {
            for (seen, master) in seen.iter_mut().zip(&train.0) {
                seen.push(master.clone().into_host().unwrap()[0]);
            }
            strategy.step(step as u64, &mut train, &mut channels).unwrap();
        }
        session.comm.finish(Duration::from_secs(60)).unwrap();
        seen
    };
    let sessions = Session::threads(2, &TransportOptions::default()).unwrap();
    thread::scope(|scope| {
        let ranks: Vec<_> = sessions.into_iter().map(|session| scope.spawn(|| rank(session))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The numbers of torchft (github.com/meta-pytorch/torchft, April 2026), which `diloco_mocked_updates_0` to `_5` in its folder `test_fixtures` have
/// for both replicas: weights of 1, a gradient of 2, inner and outer rates of 1 and 2, two fragments, each synchronised every 6 steps. Steps of
/// overlap, share of the replica's own parameters, and the two weights before each step.
const TORCHFT: [(u64, f64, [[f32; 16]; 2]); 6] = [
    (
        0,
        0.0,
        [
            [
                1.0, -1.0, -3.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -35.0, -37.0, -39.0, -41.0, -43.0, -45.0,
                -59.0,
            ],
            [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -23.0, -25.0, -27.0, -29.0, -31.0, -33.0, -47.0, -49.0, -51.0, -53.0],
        ],
    ),
    (
        0,
        0.5,
        [
            [
                1.0, -1.0, -3.0, -8.0, -10.0, -12.0, -14.0, -16.0, -18.0, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5,
                -40.25,
            ],
            [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -17.0, -19.0, -21.0, -23.0, -25.0, -27.0, -32.0, -34.0, -36.0, -38.0],
        ],
    ),
    (
        0,
        1.0,
        [
            [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -23.0, -25.0, -27.0, -29.0],
            [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -23.0, -25.0, -27.0, -29.0],
        ],
    ),
    (
        1,
        0.0,
        [
            [1.0, -1.0, -3.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -27.0, -29.0, -31.0, -33.0, -35.0, -37.0, -47.0],
            [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -19.0, -21.0, -23.0, -25.0, -27.0, -29.0, -39.0, -41.0, -43.0, -45.0],
        ],
    ),
    (
        1,
        0.5,
        [
            [1.0, -1.0, -3.0, -6.0, -8.0, -10.0, -12.0, -14.0, -16.0, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
            [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -15.0, -17.0, -19.0, -21.0, -23.0, -25.0, -29.0, -31.0, -33.0, -35.0],
        ],
    ),
    (
        1,
        1.0,
        [
            [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -23.0, -25.0, -27.0, -29.0],
            [1.0, -1.0, -3.0, -5.0, -7.0, -9.0, -11.0, -13.0, -15.0, -17.0, -19.0, -21.0, -23.0, -25.0, -27.0, -29.0],
        ],
    ),
];

/// What its `diloco_mocked_failure_recovery_0` has of the replica that does not fail, from step 16 on; until then it is the first of the above.
const TORCHFT_LATER: [[f32; 6]; 2] =
    [[-61.0, -63.0, -65.0, -67.0, -69.0, -83.0], [-55.0, -57.0, -71.0, -73.0, -75.0, -77.0]];

#[test]
fn streaming_diloco_has_the_numbers_of_torchft() {
    for (overlap_steps, mixing, expected) in TORCHFT {
        for (rank, seen) in two_numbers(overlap_steps, mixing, 16).iter().enumerate() {
            assert_eq!(
                *seen,
                expected.map(Vec::from),
                "rank {rank}, {overlap_steps} steps of overlap, mixed by {mixing}"
            );
        }
    }
    let expected = [0, 1].map(|segment| [&TORCHFT[0].2[segment][..], &TORCHFT_LATER[segment]].concat());
    assert!(two_numbers(0, 0.0, 22).iter().all(|seen| *seen == expected));
}

#[test]
fn sparta_is_one_on_every_transport() {
    is_one_on_every_transport(StrategyKind::Sparta, LocalOptions { sparta_share: 0.02, ..LocalOptions::default() });
}

#[test]
fn sparta_of_all_parameters_averages_after_every_step() {
    let corpus = corpus(20_000);
    let local = LocalOptions { sync_every: 1, sparta_share: 1.0, ..LocalOptions::default() };
    let of = |strategy, ranks, local: &LocalOptions| {
        let config =
            local_of(&with(&TrainConfig { eval_every: 1, ..single(4) }, (strategy, false), ranks), local.clone());
        run(&config, &corpus, TransportKind::LOCAL, ranks).remove(0)
    };
    for ranks in [2, 3] {
        let averaged = of(StrategyKind::LocalSgd, ranks, &local);
        let sparta = of(StrategyKind::Sparta, ranks, &local);
        if ranks == 2 {
            // Two values have one sum.
            assert_eq!(sparta.weights_hash, averaged.weights_hash);
        }
        let off = difference(&sparta, &averaged);
        assert!(off <= TOLERANCE, "{ranks} ranks: {off:e}");
        let half = of(StrategyKind::Sparta, ranks, &LocalOptions { sparta_share: 0.5, ..local.clone() });
        assert_ne!(half.weights_hash, averaged.weights_hash);
    }
}

#[test]
fn alone_local_sgd_and_sparta_are_single() {
    let corpus = corpus(20_000);
    let alone = run(&single(4), &corpus, TransportKind::LOCAL, 1).remove(0);
    for strategy in [StrategyKind::LocalSgd, StrategyKind::Sparta] {
        let config = with(&single(4), (strategy, false), 1);
        assert_eq!(run(&config, &corpus, TransportKind::LOCAL, 1)[0].weights_hash, alone.weights_hash, "{strategy}");
    }
}

/// Looks at the checkpoint after a step.
struct Look<'a> {
    path: &'a Path,
    after: u64,
    seen: Option<Checkpoint>,
}

impl Observer for Look<'_> {
    fn step(&mut self, report: &StepReport) {
        if report.step == self.after {
            self.seen = Some(Checkpoint::load(self.path).unwrap());
        }
    }
}

#[test]
fn a_checkpoint_between_synchronisations_is_what_synchronising_there_would_give() {
    let corpus = corpus(20_000);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let local = LocalOptions { sync_every: 100, ..LocalOptions::default() };
    let train = |steps: u64, after: u64| {
        let base = TrainConfig { eval_every: 2, ..single(steps) };
        let config = local_of(&with(&base, (StrategyKind::LocalSgd, false), 2), local.clone());
        let sessions = Session::threads(2, &TransportOptions::default()).unwrap();
        let rank = |rank: usize, session: &Session| {
            let mut look = Look { path: &path, after: if rank == 0 { after } else { u64::MAX }, seen: None };
            let saves = (rank == 0).then(|| path.clone());
            train(&config, &corpus, session, &Device::flex(), saves, &mut look).unwrap();
            look.seen
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| rank(1, &sessions[1]));
            let seen = rank(0, &sessions[0]);
            other.join().unwrap();
            seen
        })
    };
    let midway = train(4, 3).unwrap();
    assert_eq!(midway.step, 2);
    assert!(train(2, u64::MAX).is_none());
    assert_eq!(midway.weights, Checkpoint::load(&path).unwrap().weights);
}

#[test]
fn a_rank_that_skips_a_step_alone_synchronises_with_the_others() {
    let corpus = corpus(20_000);
    // No gradient fits at first, and ranks come down to what fits each for itself.
    let loss_scaling =
        LossScaling::Dynamic { initial: 1_073_741_824.0, growth: 2.0, backoff: 1.0 / 64.0, interval: 100 };
    for (strategy, overlap_steps) in [
        (StrategyKind::LocalSgd, 0),
        (StrategyKind::Diloco, 0),
        (StrategyKind::StreamingDiloco, 1),
        (StrategyKind::Sparta, 0),
    ] {
        let local = LocalOptions { sync_every: 4, overlap_steps, ..LocalOptions::default() };
        let base = TrainConfig { precision: Precision::F16, loss_scaling, eval_every: 2, ..single(7) };
        let config = local_of(&with(&base, (strategy, false), 3), local);
        for summary in run(&config, &corpus, TransportKind::LOCAL, 3) {
            assert!((1..7).contains(&summary.skipped_steps), "{strategy}: {}", summary.skipped_steps);
            assert_counts(&summary, &format!("{strategy} with skipped steps"));
        }
    }
}
