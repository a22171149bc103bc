//! Computation in 16 bits, scaling of the loss, and steps that overflow.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use comm_core::{BorrowedCall, Buffer, Call, Communicator, DType, Handle, HostBuffer, Op, ReduceOp};
use gpt2::optim::{LearningRate, LossScaling, OptimizerConfig, Overflow, ScalingError};
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use gpt2::trainer::{Observer, Session, StepReport, TrainConfig, TrainError, train};
use isocomm::TransportOptions;

use crate::local::{TOLERANCE, VARIANTS, assert_close, assert_counts, corpus, ranks_for, run, run_with, single, with};

/// A power of two at which no gradient of the small model overflows f16.
const SCALED: LossScaling = LossScaling::Fixed { scale: 1024.0 };

#[test]
fn sixteen_bits_train_close_to_f32() {
    let corpus = corpus(20_000);
    let wide = run(&single(6), &corpus, 1);
    // Ten times what one value is rounded by: half a unit of the last of 8 or 11 bits.
    for (precision, tolerance) in [(Precision::Bf16, 10.0 / 256.0), (Precision::F16, 10.0 / 2048.0)] {
        let loss_scaling = if precision == Precision::F16 { SCALED } else { LossScaling::Off };
        let narrow = TrainConfig { precision, loss_scaling, ..single(6) };
        let alone = run(&narrow, &corpus, 1);
        assert_close(&alone, &wide, tolerance, &format!("single in {precision}"));
        assert_ne!(alone.weights_hash, wide.weights_hash, "{precision} is f32");
        for strategy in [StrategyKind::ShardedPs, StrategyKind::Ddp, StrategyKind::Zero2, StrategyKind::Fsdp] {
            let summary = run(&with(&narrow, (strategy, false), 3), &corpus, 3);
            let what = format!("{strategy} in {precision}");
            assert_close(&summary, &wide, tolerance, &what);
            assert_counts(&summary, &what);
            assert_eq!(summary.skipped_steps, 0, "{what}");
        }
    }
}

/// With a loss of a millionth, gradients in f16 are zeros unless they are scaled; those in f32 are not.
#[test]
fn small_gradients_vanish_in_f16_and_loss_scaling_keeps_them() {
    let corpus = corpus(20_000);
    let tiny = TrainConfig {
        loss_factor: 1.0 / f64::from(1 << 20),
        // Without an epsilon to speak of, AdamW takes the same steps whatever the loss is multiplied by.
        optimizer: OptimizerConfig { epsilon: 1e-16, ..OptimizerConfig::default() },
        learning_rate: LearningRate::Constant { rate: 3e-3 },
        clip: 0.0,
        ..single(15)
    };
    let f16 = TrainConfig { precision: Precision::F16, ..tiny.clone() };
    let fall = |losses: &[f64]| losses[0] - losses[losses.len() - 1];
    let wide = run(&tiny, &corpus, 1);
    let unscaled = run(&f16, &corpus, 1);
    let scaled = run(&TrainConfig { loss_scaling: LossScaling::DYNAMIC, ..f16.clone() }, &corpus, 1);
    assert!(fall(&wide.losses) > 0.5, "{:?}", wide.losses);
    assert!(fall(&unscaled.losses).abs() < 0.1 * fall(&wide.losses), "{:?}", unscaled.losses);
    assert!(unscaled.grad_norms.iter().all(|norm| *norm < 1e-3 * wide.grad_norms[0]), "{:?}", unscaled.grad_norms);
    assert_eq!(scaled.skipped_steps, 0);
    for (scaled, wide) in scaled.losses.iter().zip(&wide.losses) {
        assert!(((scaled - wide) / wide).abs() < 10.0 / 2048.0, "{scaled} {wide}");
    }
    // The same where ranks share the work.
    let sharded = TrainConfig { loss_scaling: LossScaling::DYNAMIC, ..with(&f16, (StrategyKind::Fsdp, false), 3) };
    assert_close(&run(&sharded, &corpus, 3), &scaled, 10.0 / 2048.0, "fsdp in f16, scaled");
}

/// A scale that is too large is found out, halved, and lost steps are all that it costs.
#[test]
fn a_dynamic_scale_finds_its_way_down() {
    let corpus = corpus(20_000);
    let scaling = LossScaling::Dynamic { initial: 2f32.powi(24), growth: 2.0, backoff: 0.5, interval: 2_000 };
    let config = TrainConfig { precision: Precision::F16, loss_scaling: scaling, ..single(14) };
    for (strategy, ranks) in [(StrategyKind::Single, 1), (StrategyKind::Zero2, 3)] {
        let summary = run(&with(&config, (strategy, false), ranks), &corpus, ranks);
        let skipped = summary.skipped_steps;
        assert!((1..12).contains(&skipped), "{strategy}: {skipped} of 14 steps skipped");
        assert!(summary.final_loss < summary.losses[0], "{strategy}: {:?}", summary.losses);
        let overflowed = summary.grad_norms.iter().filter(|norm| !norm.is_finite()).count();
        assert_eq!(overflowed as u64, skipped, "{strategy}: {:?}", summary.grad_norms);
    }
}

/// Puts an infinity into the first gradients, or the first loss, that this rank communicates while it is armed.
struct Overflowing {
    inner: Arc<dyn Communicator>,
    what: Overflow,
    armed: Arc<AtomicBool>,
}

#[deny(clippy::missing_trait_methods)]
impl Communicator for Overflowing {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn lanes(&self) -> usize {
        self.inner.lanes()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn start(&self, mut call: Call) -> Handle {
        let of_gradients = call.label.as_ref().is_some_and(|label| label.contains("gradients"));
        let of_gradients = of_gradients && self.what == Overflow::Gradient;
        if of_gradients && !matches!(call.op, Op::Recv { .. }) && self.armed.swap(false, Ordering::Relaxed) {
            let Buffer::Host(HostBuffer::F32(values)) = &mut call.buffer else { panic!("{call:?}") };
            values[0] = f32::INFINITY;
        }
        self.inner.start(call)
    }

    fn run_borrowed(&self, mut call: BorrowedCall<'_>) -> comm_core::Result<()> {
        // Loss, squares of the gradient, ranks that overflowed.
        let of_loss =
            call.op == Op::AllReduce(ReduceOp::Sum) && call.buffer.dtype() == DType::F64 && call.buffer.count() == 3;
        if of_loss && self.what == Overflow::Loss && self.armed.swap(false, Ordering::Relaxed) {
            call.buffer.bytes_mut()[..8].copy_from_slice(&f64::INFINITY.to_ne_bytes());
        }
        self.inner.run_borrowed(call)
    }

    fn split(&self, color: Option<u64>, key: i64) -> comm_core::Result<Option<Arc<dyn Communicator>>> {
        let part = self.inner.split(color, key)?;
        let (what, armed) = (self.what, self.armed.clone());
        Ok(part.map(|inner| Arc::new(Overflowing { inner, what, armed }) as Arc<dyn Communicator>))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn finish(&self, timeout: Duration) -> comm_core::Result<()> {
        self.inner.finish(timeout)
    }
}

/// Arms after a step.
struct Arming {
    after: u64,
    armed: Option<Arc<AtomicBool>>,
}

impl Observer for Arming {
    fn step(&mut self, report: &StepReport) {
        if let Some(armed) = self.armed.as_ref().filter(|_| report.step == self.after) {
            armed.store(true, Ordering::Relaxed);
        }
    }
}

#[test]
fn an_overflow_on_one_rank_makes_all_skip_that_step() {
    let corpus = corpus(20_000);
    let config = TrainConfig { loss_scaling: SCALED, ..single(5) };
    let undisturbed = run(&config, &corpus, 1);
    let mut first = None;
    for variant in VARIANTS {
        let ranks = ranks_for(variant.0);
        let armed = Arc::new(AtomicBool::new(false));
        let summary = run_with(&with(&config, variant, ranks), &corpus, ranks, |rank, inner| {
            // The last, which is a worker everywhere.
            let armed = (rank == ranks - 1).then(|| armed.clone());
            let comm = match &armed {
                Some(armed) => Arc::new(Overflowing { inner, what: Overflow::Gradient, armed: armed.clone() })
                    as Arc<dyn Communicator>,
                None => inner,
            };
            (comm, Arming { after: 2, armed })
        });
        assert_eq!(summary.skipped_steps, 1, "{variant:?}");
        assert!(!summary.grad_norms[2].is_finite(), "{variant:?}: {:?}", summary.grad_norms);
        // Up to the skipped step's own loss all is as without the overflow, and only so far.
        for step in 0..3 {
            let (loss, expected) = (summary.losses[step], undisturbed.losses[step]);
            assert!(((loss - expected) / expected).abs() < TOLERANCE, "{variant:?}: step {}: {loss}", step + 1);
        }
        assert!(((summary.losses[3] - undisturbed.losses[3]) / undisturbed.losses[3]).abs() > 10.0 * TOLERANCE);
        let first = first.get_or_insert_with(|| summary.clone());
        assert_close(&summary, first, TOLERANCE, &format!("{variant:?} after the overflow"));
        assert_counts(&summary, &format!("{variant:?}"));
    }
}

/// A loss that is not finite on one rank for once costs all that step, and halves the scale.
#[test]
fn a_loss_that_is_not_finite_is_skipped_under_scaling() {
    let corpus = corpus(20_000);
    let dynamic = TrainConfig { loss_scaling: LossScaling::DYNAMIC, ..single(5) };
    for (config, scale) in [(dynamic.clone(), 32_768.0), (TrainConfig { loss_scaling: SCALED, ..dynamic }, 1024.0)] {
        for variant in [(StrategyKind::Ddp, false), (StrategyKind::Ps, true), (StrategyKind::Fsdp, false)] {
            let seen = Mutex::new(Vec::new());
            let summary = run_with(&with(&config, variant, 3), &corpus, 3, |rank, inner| {
                let armed = (rank == 2).then(Arc::<AtomicBool>::default);
                let comm = match &armed {
                    Some(armed) => Arc::new(Overflowing { inner, what: Overflow::Loss, armed: armed.clone() })
                        as Arc<dyn Communicator>,
                    None => inner,
                };
                (comm, Watching { arming: Arming { after: 2, armed }, scales: (rank == 0).then_some(&seen) })
            });
            assert_eq!(summary.skipped_steps, 1, "{variant:?}");
            let not_finite: Vec<bool> = summary.losses.iter().map(|loss| !loss.is_finite()).collect();
            assert_eq!(not_finite, [false, false, true, false, false], "{variant:?}: {:?}", summary.losses);
            let first = config.loss_scaling.to_string();
            let before = if scale == 1024.0 { 1024.0 } else { 65_536.0 };
            assert_eq!(*seen.lock().unwrap(), [before, before, before, scale, scale], "{variant:?}, {first}");
            assert!(summary.ranks.iter().all(|rank| rank.optimizer_steps == (4, 4)), "{variant:?}");
            assert_eq!(summary.final_loss, summary.losses[4]);
        }
    }
}

/// Arms, and keeps the scale of each step.
struct Watching<'a> {
    arming: Arming,
    scales: Option<&'a Mutex<Vec<f64>>>,
}

impl Observer for Watching<'_> {
    fn step(&mut self, report: &StepReport) {
        self.arming.step(report);
        if let Some(scales) = self.scales {
            scales.lock().unwrap().push(report.loss_scale);
        }
    }
}

/// What all ranks fail with.
fn failure(config: &TrainConfig, ranks: usize) -> TrainError {
    let corpus = corpus(20_000);
    let options = TransportOptions { timeout: Duration::from_secs(60), ..TransportOptions::default() };
    let mut errors: Vec<TrainError> = thread::scope(|scope| {
        let threads: Vec<_> = Session::threads(ranks, &options)
            .unwrap()
            .into_iter()
            .map(|session| {
                let corpus = &corpus;
                scope.spawn(move || {
                    train(config, corpus, &session, &Device::flex(), None, &mut ()).map(drop).unwrap_err()
                })
            })
            .collect();
        threads.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    // Whoever hears of it from another rank before he finds out himself says the same, and by whom.
    let first = errors.iter().position(|error| !matches!(error, TrainError::Comm(_))).unwrap();
    let said = errors[first].to_string();
    assert!(errors.iter().all(|error| error.to_string().contains(&said)), "{errors:?}");
    errors.swap_remove(first)
}

#[test]
fn a_run_that_takes_no_step_is_an_error_on_all_ranks() {
    let scaling = LossScaling::Fixed { scale: 1_073_741_824.0 };
    let overflowing = TrainConfig { precision: Precision::F16, loss_scaling: scaling, ..single(30) };
    for (strategy, ranks) in [(StrategyKind::Single, 1), (StrategyKind::Zero2, 3), (StrategyKind::Fsdp, 2)] {
        let error = failure(&with(&overflowing, (strategy, false), ranks), ranks);
        let TrainError::Scaling { step: 10, error: ScalingError::Fixed { what, scale, steps } } = error else {
            panic!("{error}")
        };
        assert_eq!((what, scale, steps), (Overflow::Gradient, 1_073_741_824.0, 10));
        let said = error.to_string();
        assert!(said.starts_with("step 10: ") && said.contains("1073741824") && said.contains("dynamic"), "{said}");
    }
    // Fewer steps than it takes to be sure.
    let short = TrainConfig { steps: 3, ..overflowing.clone() };
    let error = failure(&with(&short, (StrategyKind::Ddp, false), 2), 2);
    let expected = ScalingError::AllSkipped { steps: 3, scale: 1_073_741_824.0 };
    assert!(matches!(&error, TrainError::Scaling { step: 3, error } if *error == expected), "{error}");
    // A dynamic scale would have needed more of them.
    let scaling = LossScaling::Dynamic { initial: 2f32.powi(60), growth: 2.0, backoff: 0.5, interval: 100 };
    let error = failure(&TrainConfig { loss_scaling: scaling, ..short }, 1);
    let expected = ScalingError::AllSkipped { steps: 3, scale: 2f32.powi(57) };
    assert!(matches!(&error, TrainError::Scaling { step: 3, error } if *error == expected), "{error}");
}

#[test]
fn a_loss_that_stays_not_finite_ends_the_run_by_name() {
    // The first update makes the weights so large that no loss is finite any more.
    let scaling = LossScaling::Dynamic { initial: 8.0, growth: 2.0, backoff: 0.5, interval: 100 };
    let diverging = TrainConfig {
        loss_scaling: scaling,
        learning_rate: LearningRate::Constant { rate: 1e38 },
        clip: 0.0,
        ..single(20)
    };
    for (strategy, ranks) in [(StrategyKind::Single, 1), (StrategyKind::Ddp, 2)] {
        let config = with(&diverging, (strategy, false), ranks);
        let error = failure(&config, ranks);
        // 8, 4, 2, and not below 1.
        let expected = ScalingError::AtMinimum { what: Overflow::Loss };
        assert!(matches!(&error, TrainError::Scaling { step: 5, error } if *error == expected), "{error}");
        assert!(error.to_string().contains("the loss is not finite"), "{error}");
        let error = failure(&TrainConfig { loss_scaling: SCALED, ..config.clone() }, ranks);
        let expected = ScalingError::Fixed { what: Overflow::Loss, scale: 1024.0, steps: 10 };
        assert!(matches!(&error, TrainError::Scaling { step: 11, error } if *error == expected), "{error}");
        let error = failure(&TrainConfig { loss_scaling: LossScaling::Off, ..config }, ranks);
        assert!(matches!(&error, TrainError::NotFinite { step: 2, what: "the loss", .. }), "{error}");
    }
}
