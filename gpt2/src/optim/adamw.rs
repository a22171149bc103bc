//! AdamW over flat host vectors.

use std::ops::Range;

use comm_core::{Kernel, vectorised};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use super::{Decay, Moments, OptimError, TASK, integer_power, tiles};
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

/// AdamW for one contiguous range of a segment's flat vector, with state for that range only.
#[derive(Clone, Debug)]
pub struct AdamW {
    config: AdamWConfig,
    /// Runs of equal treatment that tile the shard: (elements, counted from its start; whether they decay).
    runs: Vec<(Range<usize>, bool)>,
    moments: Moments,
}

impl AdamW {
    /// An optimizer for the elements `range` of `segment` (the whole of it: `0..segment.len`; an empty range is fine).
    ///
    /// # Errors
    /// [`OptimError::RangeOutsideSegment`].
    pub fn new(config: AdamWConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<Self, OptimError> {
        let moments = Moments::new(segment, &range)?;
        Ok(Self { config, runs: runs(segment, &range), moments })
    }

    /// Number of elements of the shard.
    pub fn len(&self) -> usize {
        self.moments.len()
    }

    /// Whether the shard is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.moments.steps
    }

    /// The state for a checkpoint: first and second moments and the number of steps.
    pub fn state(&self) -> (&[f32], &[f32], u64) {
        self.moments.state()
    }

    /// Continues from a saved [`state`](Self::state).
    ///
    /// # Errors
    /// [`OptimError::Length`] if a moment does not have the shard's length.
    pub fn restore(&mut self, mean: Vec<f32>, square: Vec<f32>, steps: u64) -> Result<(), OptimError> {
        self.moments.restore(mean, square, steps)
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
        self.moments.check("the parameter slice", params.len())?;
        self.moments.check("the gradient slice", grads.len())?;
        self.moments.steps += 1;
        let scalars = Scalars::of(&self.config, self.moments.steps, learning_rate, grad_factor);
        let kept = Scalars::keep(&self.config, learning_rate);
        for (run, decay) in &self.runs {
            let scalars = Scalars { keep: if *decay { kept } else { 1.0 }, ..scalars };
            params[run.clone()]
                .par_chunks_mut(TASK)
                .zip(grads[run.clone()].par_chunks(TASK))
                .zip(self.moments.mean[run.clone()].par_chunks_mut(TASK))
                .zip(self.moments.square[run.clone()].par_chunks_mut(TASK))
                .for_each(|(((p, g), m), v)| scalars.apply(p, g, m, v));
        }
        Ok(())
    }

    pub(super) fn moments(&self) -> &Moments {
        &self.moments
    }
}

/// Runs of equal treatment that tile the elements `range` of `segment`: (elements, counted from the range's start; whether they decay).
pub(super) fn runs(segment: &SegmentInfo, range: &Range<usize>) -> Vec<(Range<usize>, bool)> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    for (index, part) in tiles(segment, range) {
        let decays = segment.params[index].decay;
        match runs.last_mut() {
            Some((run, decay)) if *decay == decays => run.end = part.end,
            _ => runs.push((part, decays)),
        }
    }
    runs
}

/// One step's scalars, in the type they are applied in.
#[derive(Clone, Copy)]
pub(super) struct Scalars {
    pub(super) decay: Decay,
    pub(super) root_correction: f32,
    pub(super) epsilon: f32,
    pub(super) step_size: f32,
    keep: f32,
}

impl Scalars {
    /// Those of step `t`, counted from 1, for elements that do not decay.
    pub(super) fn of(config: &AdamWConfig, t: u64, learning_rate: f64, grad_factor: f32) -> Self {
        let AdamWConfig { beta1, beta2, epsilon, .. } = *config;
        Scalars {
            decay: Decay::of(config, grad_factor),
            root_correction: (1.0 - integer_power(beta2, t)).sqrt() as f32,
            epsilon: epsilon as f32,
            step_size: (learning_rate / (1.0 - integer_power(beta1, t))) as f32,
            keep: 1.0,
        }
    }

    /// What is left of an element that decays.
    pub(super) fn keep(config: &AdamWConfig, learning_rate: f64) -> f32 {
        (1.0 - learning_rate * config.weight_decay) as f32
    }

    fn apply(self, params: &mut [f32], grads: &[f32], mean: &mut [f32], square: &mut [f32]) {
        vectorised(Step { scalars: self, params, grads, mean, square });
    }
}

/// The one pass of a step over some elements.
struct Step<'a> {
    scalars: Scalars,
    params: &'a mut [f32],
    grads: &'a [f32],
    mean: &'a mut [f32],
    square: &'a mut [f32],
}

impl Kernel for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { scalars, params, grads, mean, square } = self;
        for (((p, g), m), v) in params.iter_mut().zip(grads).zip(mean).zip(square) {
            scalars.decay.advance_one(*g, m, v);
            let denominator = v.sqrt() / scalars.root_correction + scalars.epsilon;
            *p = *p * scalars.keep - scalars.step_size * (*m / denominator);
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn the_bits_of_three_steps_are_pinned() {
        let segment = block();
        let mut params = init::normal(1, "params", segment.len, 0.5);
        let mut optimizer = AdamW::new(AdamWConfig::default(), &segment, 0..segment.len).unwrap();
        for step in 0..3 {
            let grads = init::normal(step, "grads", segment.len, 0.1);
            optimizer.step(&mut params, &grads, 1e-2, 0.7).unwrap();
        }
        let fold =
            |values: &[f32]| values.iter().fold(0u64, |hash, value| hash.rotate_left(5) ^ u64::from(value.to_bits()));
        let (mean, square, _) = optimizer.state();
        // A change of these numbers changes what every run trains to.
        assert_eq!([fold(&params), fold(mean), fold(square)], PINNED);
    }

    const PINNED: [u64; 3] = [9_067_793_502_461_758_290, 17_940_642_471_055_904_703, 13_051_679_380_133_498_469];
}
