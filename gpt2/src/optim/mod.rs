//! Optimizers over flat vectors, gradient norms, learning-rate schedules and loss scaling.
//!
//! An optimizer owns one contiguous range of one segment, with state for that range alone. Scalars follow PyTorch: computed in f64,
//! applied in f32. [`AdamW`] is element-wise with a fixed order of operations, so a step over a whole segment and steps over its
//! shards give the same bits. [`Lamb`] needs norms of whole tensors, so its steps have two phases between which shards add theirs.
//! [`Sgd`] is plain. All exist a second time, as tensor operations for parameters on a device: [`DeviceAdamW`], [`DeviceLamb`], [`DeviceSgd`].

mod adamw;
mod device;
mod lamb;
mod moments;
mod norm;
mod scaler;
mod schedule;
mod sgd;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::segments::SegmentInfo;
pub(crate) use moments::Decay;
use moments::Moments;

pub use adamw::{AdamW, AdamWConfig};
pub use device::{DeviceAdamW, DeviceLamb, DeviceNorms, DeviceSgd, sum_of_squares_on_device};
pub use lamb::{Lamb, trust_ratio};
pub use norm::{clip_factor, sum_of_squares};
pub use scaler::{LossScaler, LossScaling, Overflow, ScalerState, ScalingError};
pub use schedule::{LearningRate, ScheduleKind};
pub use sgd::Sgd;

/// Which optimizer; written as in [`OptimizerKind::name`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerKind {
    /// [`AdamW`].
    #[default]
    #[serde(rename = "adamw")]
    AdamW,
    /// [`Lamb`].
    Lamb,
    /// [`Sgd`].
    Sgd,
}

impl OptimizerKind {
    /// Whether a step needs the norms of whole tensors, and so two halves.
    pub const fn needs_norms(self) -> bool {
        matches!(self, Self::Lamb)
    }

    /// Whether it keeps running means of gradients and of their squares, and so has use for their decay and for epsilon.
    pub const fn has_moments(self) -> bool {
        !matches!(self, Self::Sgd)
    }
}

comm_core::names!(pub OptimizerKind, "optimizer": AdamW = "adamw", Lamb = "lamb", Sgd = "sgd");

/// An optimizer and its constants.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerConfig {
    /// Which one.
    pub kind: OptimizerKind,
    /// Decay of the mean of gradients, in [0, 1).
    pub beta1: f64,
    /// Decay of the mean of squared gradients, in [0, 1).
    pub beta2: f64,
    /// Added to the root of the second moment; positive in f32.
    pub epsilon: f64,
    /// Decoupled weight decay, applied to tensors of two dimensions only; at least 0.
    pub weight_decay: f64,
}

impl OptimizerConfig {
    /// The usual constants of `kind`: for AdamW those of [`AdamWConfig::default`]; for LAMB betas 0.9 and 0.999, epsilon 1e-6 and weight
    /// decay 0.01, those that its paper trains BERT with; for SGD, which has no use for betas and epsilon, no weight decay.
    pub fn of(kind: OptimizerKind) -> Self {
        match kind {
            OptimizerKind::AdamW => AdamWConfig::default().into(),
            OptimizerKind::Lamb => Self { kind, beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 },
            OptimizerKind::Sgd => Self { kind, beta1: 0.0, beta2: 0.0, epsilon: 1e-8, weight_decay: 0.0 },
        }
    }

    /// Whether every constant is one that the optimizer can work with.
    ///
    /// # Errors
    /// [`OptimError::Constant`].
    pub fn validate(&self) -> Result<(), OptimError> {
        let beta = |beta: f64| (0.0..1.0).contains(&beta);
        let epsilon = self.epsilon as f32;
        let checks = [
            ("beta1", self.beta1, "be in [0, 1)", beta(self.beta1)),
            ("beta2", self.beta2, "be in [0, 1)", beta(self.beta2)),
            ("epsilon", self.epsilon, "be a positive f32", epsilon > 0.0 && epsilon.is_finite()),
            (
                "weight decay",
                self.weight_decay,
                "be at least 0 and finite",
                self.weight_decay >= 0.0 && self.weight_decay.is_finite(),
            ),
        ];
        match checks.into_iter().find(|(.., holds)| !holds) {
            Some((what, value, rule, _)) => Err(OptimError::Constant { what, value, rule }),
            None => Ok(()),
        }
    }

    pub(crate) fn constants(&self) -> AdamWConfig {
        let Self { beta1, beta2, epsilon, weight_decay, .. } = *self;
        AdamWConfig { beta1, beta2, epsilon, weight_decay }
    }
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self::of(OptimizerKind::default())
    }
}

impl From<AdamWConfig> for OptimizerConfig {
    fn from(config: AdamWConfig) -> Self {
        let AdamWConfig { beta1, beta2, epsilon, weight_decay } = config;
        Self { kind: OptimizerKind::AdamW, beta1, beta2, epsilon, weight_decay }
    }
}

/// The optimizer of one contiguous range of a segment's flat vector, with state for that range only.
///
/// One step is either [`step`](Self::step) (AdamW and SGD; LAMB where the range cuts no tensor), or, where [`needs_norms`](Self::needs_norms):
/// [`prepare`](Self::prepare), the sum of what it returns over all ranks that hold a shard of the segment, and
/// [`apply`](Self::apply) with the sums. A strategy in which every rank holds whole segments must not add: each rank's norms are
/// complete. An error of any of them leaves parameters, state and the number of steps as they were.
#[derive(Clone, Debug)]
pub enum Optimizer {
    /// AdamW.
    AdamW(AdamW),
    /// LAMB.
    Lamb(Lamb),
    /// SGD.
    Sgd(Sgd),
}

impl Optimizer {
    /// An optimizer for the elements `range` of `segment` (the whole of it: `0..segment.len`; an empty range is fine).
    ///
    /// # Errors
    /// [`OptimError::Constant`] and [`OptimError::RangeOutsideSegment`].
    pub fn new(config: OptimizerConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<Self, OptimError> {
        config.validate()?;
        match config.kind {
            OptimizerKind::AdamW => AdamW::new(config.constants(), segment, range).map(Self::AdamW),
            OptimizerKind::Lamb => Lamb::new(config.constants(), segment, range).map(Self::Lamb),
            OptimizerKind::Sgd => Sgd::new(config.weight_decay, segment, range).map(Self::Sgd),
        }
    }

    /// Number of elements of the shard.
    pub fn len(&self) -> usize {
        match self {
            Self::AdamW(adamw) => adamw.len(),
            Self::Lamb(lamb) => lamb.moments().len(),
            Self::Sgd(sgd) => sgd.len(),
        }
    }

    /// Whether the shard is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Steps taken so far; a step counts from its [`prepare`](Self::prepare) on.
    pub fn steps(&self) -> u64 {
        match self {
            Self::AdamW(adamw) => adamw.steps(),
            Self::Lamb(lamb) => lamb.moments().steps,
            Self::Sgd(sgd) => sgd.steps(),
        }
    }

    /// The state for a checkpoint: first and second moments, of SGD empty, and the number of steps. To be taken between steps, not between
    /// [`prepare`](Self::prepare) and [`apply`](Self::apply).
    pub fn state(&self) -> (&[f32], &[f32], u64) {
        match self {
            Self::AdamW(adamw) => adamw.state(),
            Self::Lamb(lamb) => lamb.moments().state(),
            Self::Sgd(sgd) => (&[], &[], sgd.steps()),
        }
    }

    /// Continues from a saved [`state`](Self::state), of a shard of the same range.
    ///
    /// # Errors
    /// [`OptimError::Length`] if a moment does not have the shard's length.
    pub fn restore(&mut self, mean: Vec<f32>, square: Vec<f32>, steps: u64) -> Result<(), OptimError> {
        match self {
            Self::AdamW(adamw) => adamw.restore(mean, square, steps),
            Self::Lamb(lamb) => lamb.restore(mean, square, steps),
            Self::Sgd(sgd) => sgd.restore(&mean, &square, steps),
        }
    }

    /// Whether a step needs the norms of whole tensors, and so [`prepare`](Self::prepare) and [`apply`](Self::apply).
    pub fn needs_norms(&self) -> bool {
        matches!(self, Self::Lamb(_))
    }

    /// A whole step without other ranks: [`AdamW::step`], [`Lamb::step`] or [`Sgd::step`], with their arguments.
    ///
    /// # Errors
    /// [`OptimError::Length`]; for LAMB also those of [`Lamb::step`].
    pub fn step(
        &mut self,
        params: &mut [f32],
        grads: &[f32],
        learning_rate: f64,
        grad_factor: f32,
    ) -> Result<(), OptimError> {
        match self {
            Self::AdamW(adamw) => adamw.step(params, grads, learning_rate, grad_factor),
            Self::Lamb(lamb) => lamb.step(params, grads, learning_rate, grad_factor),
            Self::Sgd(sgd) => sgd.step(params, grads, learning_rate, grad_factor),
        }
    }

    /// The first half of a step that [`needs_norms`](Self::needs_norms): see [`Lamb::prepare`]. For the others `None`, and nothing is done:
    /// call [`step`](Self::step).
    ///
    /// # Errors
    /// Those of [`Lamb::prepare`].
    pub fn prepare(
        &mut self,
        params: &[f32],
        grads: &[f32],
        grad_factor: f32,
    ) -> Result<Option<Vec<[f64; 2]>>, OptimError> {
        match self {
            Self::AdamW(_) | Self::Sgd(_) => Ok(None),
            Self::Lamb(lamb) => lamb.prepare(params, grads, grad_factor).map(Some),
        }
    }

    /// The second half of a step that was prepared: see [`Lamb::apply`].
    ///
    /// # Errors
    /// Those of [`Lamb::apply`]; [`OptimError::NotPrepared`] for the others.
    pub fn apply(&mut self, params: &mut [f32], learning_rate: f64, norms: &[[f64; 2]]) -> Result<(), OptimError> {
        match self {
            Self::AdamW(adamw) => Err(OptimError::NotPrepared { segment: adamw.moments().segment.clone() }),
            Self::Lamb(lamb) => lamb.apply(params, learning_rate, norms),
            Self::Sgd(sgd) => Err(OptimError::NotPrepared { segment: sgd.segment().to_owned() }),
        }
    }
}

/// Why the optimizer refuses what it is given.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OptimError {
    /// A constant that makes no step.
    #[error("the optimizer's {what} is {value}; it must {rule}")]
    Constant {
        /// Which constant.
        what: &'static str,
        /// Its value.
        value: f64,
        /// What it must do.
        rule: &'static str,
    },
    /// The shard does not lie in its segment.
    #[error("optimizer of segment {segment}: elements {start}..{end} are not within its {len} elements")]
    RangeOutsideSegment {
        /// The segment's name.
        segment: String,
        /// First element of the shard.
        start: usize,
        /// End of the shard.
        end: usize,
        /// Elements of the segment.
        len: usize,
    },
    /// A vector does not have the shard's length, or the norms are not one pair a tensor of the segment.
    #[error("optimizer of segment {segment}: {what} has {len} elements, not {expected}")]
    Length {
        /// The segment's name.
        segment: String,
        /// Which vector.
        what: &'static str,
        /// Elements given.
        len: usize,
        /// Elements expected.
        expected: usize,
    },
    /// `prepare` came twice.
    #[error("optimizer of segment {segment}: a step is prepared already; apply it before the next")]
    AlreadyPrepared {
        /// The segment's name.
        segment: String,
    },
    /// `apply` came without `prepare`.
    #[error("optimizer of segment {segment}: no step has been prepared; prepare one first, or call the whole step")]
    NotPrepared {
        /// The segment's name.
        segment: String,
    },
    /// A whole step was asked of a shard that ends within a tensor whose norm it needs.
    #[error(
        "optimizer of segment {segment}: the shard holds a part of {tensor}, whose norm is spread over ranks; prepare the step, \
         add the norms of all shards and apply it"
    )]
    Partial {
        /// The segment's name.
        segment: String,
        /// The path of the tensor.
        tensor: String,
    },
    /// Sums of squares could not be computed.
    #[error("sums of squares failed on the device: {detail}")]
    Device {
        /// The device's message.
        detail: String,
    },
    /// A sum of squares that cannot be one.
    #[error(
        "optimizer of segment {segment}: the sum of squares of the {what} of {tensor} is {value}; lower the learning rate, or check \
         that gradients are finite before a step"
    )]
    Norm {
        /// The segment's name.
        segment: String,
        /// The path of the tensor.
        tensor: String,
        /// `parameters` or `update`.
        what: &'static str,
        /// The value given.
        value: f64,
    },
}

/// Elements of one task of a parallel loop: four streams of this length stay in a core's cache. No result depends on it, except
/// that sums are taken task by task.
const TASK: usize = 1 << 16;

fn check_range(segment: &SegmentInfo, range: &Range<usize>) -> Result<(), OptimError> {
    if range.start > range.end || range.end > segment.len {
        return Err(OptimError::RangeOutsideSegment {
            segment: segment.name.clone(),
            start: range.start,
            end: range.end,
            len: segment.len,
        });
    }
    Ok(())
}

/// The tensors of `segment` that meet `range`: (index, elements counted from the range's start).
fn tiles<'a>(segment: &'a SegmentInfo, range: &Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
    let range = range.clone();
    segment.params.iter().enumerate().filter_map(move |(index, param)| {
        let start = param.offset.max(range.start);
        let end = (param.offset + param.len).min(range.end);
        (start < end).then(|| (index, start - range.start..end - range.start))
    })
}

/// `base^exponent` by repeated squaring: the same bits on every machine, unlike the C library's `pow`.
fn integer_power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;
    use crate::segments::layout;

    #[test]
    fn powers_match_the_standard_library() {
        for exponent in [0u64, 1, 2, 10, 999] {
            let expected = 0.95f64.powi(exponent as i32);
            assert!((integer_power(0.95, exponent) / expected - 1.0).abs() < 1e-13);
        }
    }

    #[test]
    fn kinds_and_configs_are_read_as_they_are_written() {
        for kind in OptimizerKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            let config = OptimizerConfig::of(kind);
            let text = serde_json::to_string(&config).unwrap();
            assert!(text.contains(&format!("\"kind\":\"{kind}\"")), "{text}");
            assert_eq!(serde_json::from_str::<OptimizerConfig>(&text).unwrap(), config);
            assert_eq!(config.validate(), Ok(()));
        }
        let error = "adam".parse::<OptimizerKind>().unwrap_err().to_string();
        assert!(error.contains("adamw, lamb, sgd"), "{error}");
        assert_eq!(OptimizerConfig::default().constants(), AdamWConfig::default());
    }

    #[test]
    fn constants_that_make_no_step_are_refused() {
        let segment = layout(&Preset::Micro.config(61)).unwrap().swap_remove(1);
        let good = OptimizerConfig::default();
        for (bad, what) in [
            (OptimizerConfig { beta1: 1.0, ..good }, "beta1"),
            (OptimizerConfig { beta1: -0.1, ..good }, "beta1"),
            (OptimizerConfig { beta2: f64::NAN, ..good }, "beta2"),
            (OptimizerConfig { epsilon: 0.0, ..good }, "epsilon"),
            (OptimizerConfig { epsilon: 1e-60, ..good }, "epsilon"),
            (OptimizerConfig { epsilon: f64::INFINITY, ..good }, "epsilon"),
            (OptimizerConfig { weight_decay: -1e-9, ..good }, "weight decay"),
            (OptimizerConfig { weight_decay: f64::NAN, ..good }, "weight decay"),
        ] {
            let error = Optimizer::new(bad, &segment, 0..1).unwrap_err();
            assert!(matches!(error, OptimError::Constant { what: named, .. } if named == what), "{error}");
        }
    }

    #[test]
    fn all_kinds_step_save_and_restore_behind_one_type() {
        let segment = layout(&Preset::Micro.config(61)).unwrap().swap_remove(1);
        let grads = crate::init::normal(2, "grads", segment.len, 0.1);
        for kind in OptimizerKind::ALL {
            let config = OptimizerConfig::of(kind);
            let new = || Optimizer::new(config, &segment, 0..segment.len).unwrap();
            let step =
                |optimizer: &mut Optimizer, params: &mut [f32]| match optimizer.prepare(params, &grads, 0.5).unwrap() {
                    Some(norms) => optimizer.apply(params, 0.01, &norms).unwrap(),
                    None => optimizer.step(params, &grads, 0.01, 0.5).unwrap(),
                };
            let mut one = new();
            assert_eq!(
                (one.len(), one.is_empty(), one.needs_norms()),
                (segment.len, false, kind == OptimizerKind::Lamb)
            );
            let mut params = vec![0.5; segment.len];
            step(&mut one, &mut params);
            let (mean, square, steps) = one.state();
            assert_eq!(steps, 1);
            let mut two = new();
            two.restore(mean.to_vec(), square.to_vec(), steps).unwrap();
            let mut other = params.clone();
            step(&mut one, &mut params);
            two.step(&mut other, &grads, 0.01, 0.5).unwrap();
            assert_eq!(params, other, "{kind}");
            assert_eq!((one.steps(), two.steps()), (2, 2));
            let norms = vec![[1.0; 2]; segment.params.len()];
            assert!(matches!(one.apply(&mut params, 0.01, &norms), Err(OptimError::NotPrepared { .. })));
            assert_eq!(params, other);
        }
    }
}
