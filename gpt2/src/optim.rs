//! AdamW over flat host vectors, gradient norms and learning-rate schedules.
//!
//! Everything is element-wise with a fixed order of operations, so a step over a whole segment and steps over its shards give
//! the same bits. Scalars follow PyTorch: computed in f64, applied in f32.

use std::ops::Range;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::math;
use crate::segments::SegmentInfo;

/// AdamW's constants (Loshchilov and Hutter 2019).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamWConfig {
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay, applied to tensors of two dimensions only.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    /// nanoGPT's: betas 0.9 and 0.95, epsilon 1e-8, weight decay 0.1.
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 }
    }
}

/// Why the optimizer refuses what it is given.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OptimError {
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
    /// A vector does not have the shard's length.
    #[error("optimizer of segment {segment}: {what} has {len} elements, its shard has {expected}")]
    Length {
        /// The segment's name.
        segment: String,
        /// Which vector.
        what: &'static str,
        /// Elements given.
        len: usize,
        /// Elements of the shard.
        expected: usize,
    },
}

/// AdamW for one contiguous range of a segment's flat vector, with state for that range only.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: AdamWConfig,
    segment: String,
    /// Runs of equal treatment that tile the shard: (elements, counted from its start; whether they decay).
    runs: Vec<(Range<usize>, bool)>,
    mean: Vec<f32>,
    square: Vec<f32>,
    steps: u64,
}

impl AdamW {
    /// An optimizer for the elements `range` of `segment` (the whole of it: `0..segment.len`; an empty range is fine).
    ///
    /// # Errors
    /// [`OptimError::RangeOutsideSegment`].
    pub fn new(config: AdamWConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<Self, OptimError> {
        if range.start > range.end || range.end > segment.len {
            return Err(OptimError::RangeOutsideSegment {
                segment: segment.name.clone(),
                start: range.start,
                end: range.end,
                len: segment.len,
            });
        }
        let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
        for param in &segment.params {
            let start = param.offset.max(range.start);
            let end = (param.offset + param.len).min(range.end);
            if start >= end {
                continue;
            }
            let part = start - range.start..end - range.start;
            match runs.last_mut() {
                Some((run, decay)) if *decay == param.decay => run.end = part.end,
                _ => runs.push((part, param.decay)),
            }
        }
        Ok(Self {
            config,
            segment: segment.name.clone(),
            runs,
            mean: vec![0.0; range.len()],
            square: vec![0.0; range.len()],
            steps: 0,
        })
    }

    /// Number of elements of the shard.
    pub fn len(&self) -> usize {
        self.mean.len()
    }

    /// Whether the shard is empty.
    pub fn is_empty(&self) -> bool {
        self.mean.is_empty()
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The state for a checkpoint: first and second moments and the number of steps.
    pub fn state(&self) -> (&[f32], &[f32], u64) {
        (&self.mean, &self.square, self.steps)
    }

    /// Continues from a saved [`state`](Self::state).
    ///
    /// # Errors
    /// [`OptimError::Length`] if a moment does not have the shard's length.
    pub fn restore(&mut self, mean: Vec<f32>, square: Vec<f32>, steps: u64) -> Result<(), OptimError> {
        self.check("the saved first moment", mean.len())?;
        self.check("the saved second moment", square.len())?;
        (self.mean, self.square, self.steps) = (mean, square, steps);
        Ok(())
    }

    /// One step on the shard: `params` and `grads` are its elements; each gradient is first multiplied by `grad_factor` (a clip
    /// factor, the inverse of a loss scale, or 1).
    ///
    /// With g the gradient, t the number of this step (from 1), in this order as in PyTorch's `AdamW`:
    /// p ← p·(1 − lr·λ) where decay applies; m ← m + (1−β₁)(g − m); v ← β₂v + (1−β₂)g²;
    /// p ← p − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε).
    ///
    /// # Errors
    /// [`OptimError::Length`] if a slice does not have the shard's length; nothing has changed then.
    pub fn step(
        &mut self,
        params: &mut [f32],
        grads: &[f32],
        learning_rate: f64,
        grad_factor: f32,
    ) -> Result<(), OptimError> {
        self.check("the parameter slice", params.len())?;
        self.check("the gradient slice", grads.len())?;
        self.steps += 1;
        let AdamWConfig { beta1, beta2, epsilon, weight_decay } = self.config;
        let t = self.steps;
        let scalars = Scalars {
            grad_factor,
            mean_weight: (1.0 - beta1) as f32,
            square_decay: beta2 as f32,
            square_weight: (1.0 - beta2) as f32,
            root_correction: (1.0 - integer_power(beta2, t)).sqrt() as f32,
            epsilon: epsilon as f32,
            step_size: (learning_rate / (1.0 - integer_power(beta1, t))) as f32,
            keep: 1.0,
        };
        for (run, decay) in &self.runs {
            let scalars =
                Scalars { keep: if *decay { (1.0 - learning_rate * weight_decay) as f32 } else { 1.0 }, ..scalars };
            // Tasks of this size keep four streams in a core's cache; the result does not depend on it.
            const TASK: usize = 1 << 16;
            params[run.clone()]
                .par_chunks_mut(TASK)
                .zip(grads[run.clone()].par_chunks(TASK))
                .zip(self.mean[run.clone()].par_chunks_mut(TASK))
                .zip(self.square[run.clone()].par_chunks_mut(TASK))
                .for_each(|(((p, g), m), v)| scalars.apply(p, g, m, v));
        }
        Ok(())
    }

    fn check(&self, what: &'static str, len: usize) -> Result<(), OptimError> {
        let expected = self.len();
        if len == expected {
            Ok(())
        } else {
            Err(OptimError::Length { segment: self.segment.clone(), what, len, expected })
        }
    }
}

/// One step's scalars, in the type they are applied in.
#[derive(Clone, Copy)]
struct Scalars {
    grad_factor: f32,
    mean_weight: f32,
    square_decay: f32,
    square_weight: f32,
    root_correction: f32,
    epsilon: f32,
    step_size: f32,
    keep: f32,
}

impl Scalars {
    fn apply(&self, params: &mut [f32], grads: &[f32], mean: &mut [f32], square: &mut [f32]) {
        for (((p, g), m), v) in params.iter_mut().zip(grads).zip(mean).zip(square) {
            let g = *g * self.grad_factor;
            *m += self.mean_weight * (g - *m);
            *v = *v * self.square_decay + self.square_weight * g * g;
            let denominator = v.sqrt() / self.root_correction + self.epsilon;
            *p = *p * self.keep - self.step_size * (*m / denominator);
        }
    }
}

/// Sum of squares in f64, in an order that depends on the length alone. Sums of several pieces (segments, shards) are added in the
/// caller's order; a different cutting may differ in the last bits.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    const LANES: usize = 8;
    const TASK: usize = 1 << 16;
    let partial: Vec<f64> = values
        .par_chunks(TASK)
        .map(|task| {
            let mut lanes = [0.0f64; LANES];
            let (chunks, rest) = task.as_chunks::<LANES>();
            for chunk in chunks {
                for (lane, x) in lanes.iter_mut().zip(chunk) {
                    *lane += f64::from(*x) * f64::from(*x);
                }
            }
            let tail: f64 = rest.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            lanes.iter().sum::<f64>() + tail
        })
        .collect();
    partial.iter().sum()
}

/// What gradients of global norm `norm` are multiplied by so that it becomes at most `max`: `min(1, max / (norm + 1e-6))`, as PyTorch's
/// `clip_grad_norm_`. A norm that is not finite gives NaN or 0, never a silent 1: check the norm first.
pub fn clip_factor(norm: f64, max: f64) -> f32 {
    let factor = max / (norm + 1e-6);
    if factor > 1.0 { 1.0 } else { factor as f32 }
}

/// The learning rate as a function of the step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum LearningRate {
    /// The same at every step.
    Constant {
        /// The rate.
        rate: f64,
    },
    /// Linear warm-up from 0, then half a cosine down to a floor, then the floor (nanoGPT's schedule).
    WarmupCosine {
        /// The highest rate.
        peak: f64,
        /// The lowest rate, kept after the descent.
        floor: f64,
        /// Number of warm-up steps.
        warmup: u64,
        /// Step at which the floor is reached.
        total: u64,
    },
}

impl LearningRate {
    /// The rate of step `step`, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        match *self {
            Self::Constant { rate } => rate,
            Self::WarmupCosine { peak, warmup, .. } if step < warmup => peak * (step + 1) as f64 / (warmup + 1) as f64,
            Self::WarmupCosine { floor, total, .. } if step >= total => floor,
            Self::WarmupCosine { peak, floor, warmup, total } => {
                let progress = (step - warmup) as f64 / (total - warmup) as f64;
                let (_, cos) = math::sin_cos_turns(0.5 * progress);
                floor + (peak - floor) * 0.5 * (1.0 + cos)
            }
        }
    }
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
    use std::f64::consts::PI;

    use super::*;
    use crate::config::Preset;
    use crate::init;
    use crate::segments::layout;

    fn block() -> SegmentInfo {
        layout(&Preset::Micro.config(61)).unwrap().swap_remove(1)
    }

    #[test]
    fn any_sharding_gives_the_same_bits() {
        let segment = block();
        let start = init::normal(1, "params", segment.len, 0.5);
        let grads: Vec<Vec<f32>> = (0..3).map(|step| init::normal(step, "grads", segment.len, 0.1)).collect();
        let run = |cuts: &[usize]| {
            let mut params = start.clone();
            for ends in cuts.windows(2) {
                let range = ends[0]..ends[1];
                let mut optimizer = AdamW::new(AdamWConfig::default(), &segment, range.clone()).unwrap();
                for grad in &grads {
                    optimizer.step(&mut params[range.clone()], &grad[range.clone()], 1e-2, 0.7).unwrap();
                }
            }
            params.iter().map(|p| p.to_bits()).collect::<Vec<_>>()
        };
        let n = segment.len;
        let whole = run(&[0, n]);
        assert_eq!(whole, run(&[0, 1, 1, 37, 1000, n / 2 + 3, n]));
        let unchanged: Vec<_> = start.iter().map(|p| p.to_bits()).collect();
        assert!(whole.iter().zip(&unchanged).all(|(a, b)| a != b));
    }

    #[test]
    fn only_matrices_decay() {
        let segment = block();
        let mut params = vec![1.0; segment.len];
        let zeros = vec![0.0; segment.len];
        let mut optimizer = AdamW::new(AdamWConfig::default(), &segment, 0..segment.len).unwrap();
        optimizer.step(&mut params, &zeros, 0.5, 1.0).unwrap();
        for info in &segment.params {
            let expected = if info.shape.len() == 2 { 0.95 } else { 1.0 };
            let tensor = &params[info.offset..info.offset + info.len];
            assert!(tensor.iter().all(|p| *p == expected), "{}", info.path);
        }
    }

    #[test]
    fn the_first_step_is_the_sign_of_the_gradient_times_the_rate() {
        let segment = block();
        let bias = segment.params.iter().find(|p| !p.decay).unwrap();
        let range = bias.offset..bias.offset + 2;
        let mut optimizer = AdamW::new(AdamWConfig::default(), &segment, range).unwrap();
        let mut params = [1.0, 1.0];
        optimizer.step(&mut params, &[3.0, -0.5], 0.1, 1.0).unwrap();
        assert!((params[0] - 0.9).abs() < 1e-6 && (params[1] - 1.1).abs() < 1e-6);
    }

    #[test]
    fn state_can_be_saved_and_restored() {
        let segment = block();
        let grads = init::normal(5, "grads", 64, 0.1);
        let mut params = vec![0.5; 64];
        let mut optimizer = AdamW::new(AdamWConfig::default(), &segment, 10..74).unwrap();
        optimizer.step(&mut params, &grads, 0.1, 1.0).unwrap();
        let (mean, square, steps) = optimizer.state();
        let mut copy = AdamW::new(AdamWConfig::default(), &segment, 10..74).unwrap();
        copy.restore(mean.to_vec(), square.to_vec(), steps).unwrap();
        let mut other = params.clone();
        optimizer.step(&mut params, &grads, 0.1, 1.0).unwrap();
        copy.step(&mut other, &grads, 0.1, 1.0).unwrap();
        assert_eq!(params, other);
        assert!(copy.restore(vec![], vec![], 0).is_err());
    }

    #[test]
    fn wrong_lengths_and_ranges_are_refused() {
        let segment = block();
        let config = AdamWConfig::default();
        assert!(AdamW::new(config, &segment, 0..segment.len + 1).is_err());
        #[expect(clippy::reversed_empty_ranges)]
        let reversed = 5..4;
        assert!(AdamW::new(config, &segment, reversed).is_err());
        let mut optimizer = AdamW::new(config, &segment, 0..8).unwrap();
        let error = optimizer.step(&mut [0.0; 8], &[0.0; 7], 0.1, 1.0);
        assert!(matches!(error, Err(OptimError::Length { len: 7, expected: 8, .. })));
        assert_eq!(optimizer.steps(), 0);
        let mut empty = AdamW::new(config, &segment, 3..3).unwrap();
        assert!(empty.is_empty());
        empty.step(&mut [], &[], 0.1, 1.0).unwrap();
    }

    #[test]
    fn norms_and_clipping() {
        let values = vec![0.5f32; 200_003];
        assert_eq!(sum_of_squares(&values), 200_003.0 * 0.25);
        assert_eq!(sum_of_squares(&[]), 0.0);
        assert_eq!(clip_factor(0.5, 1.0), 1.0);
        assert!((clip_factor(4.0, 1.0) - 0.25).abs() < 1e-6);
        assert!(clip_factor(f64::NAN, 1.0).is_nan());
    }

    #[test]
    fn the_schedule_rises_falls_and_stays() {
        let schedule = LearningRate::WarmupCosine { peak: 1.0, floor: 0.1, warmup: 9, total: 109 };
        assert!((schedule.at(0) - 0.1).abs() < 1e-12);
        assert!((schedule.at(8) - 0.9).abs() < 1e-12);
        assert!((schedule.at(9) - 1.0).abs() < 1e-12);
        assert!((schedule.at(59) - 0.55).abs() < 1e-12);
        for step in 10..200 {
            let reference = 0.1 + 0.45 * (1.0 + (PI * (step.min(109) - 9) as f64 / 100.0).cos());
            assert!((schedule.at(step) - reference).abs() < 1e-12, "{step}");
        }
        assert_eq!(schedule.at(1_000_000), 0.1);
        assert_eq!(LearningRate::Constant { rate: 0.3 }.at(77), 0.3);
        let only_warmup = LearningRate::WarmupCosine { peak: 1.0, floor: 0.1, warmup: 5, total: 5 };
        assert_eq!(only_warmup.at(5), 0.1);
    }

    #[test]
    fn powers_match_the_standard_library() {
        for exponent in [0u64, 1, 2, 10, 999] {
            let expected = 0.95f64.powi(exponent as i32);
            assert!((integer_power(0.95, exponent) / expected - 1.0).abs() < 1e-13);
        }
    }
}
