//! Plain SGD over flat host vectors.

use std::ops::Range;

use rayon::prelude::*;

use super::adamw::runs;
use super::{OptimError, TASK, check_range};
use crate::segments::SegmentInfo;

/// SGD without momentum for one contiguous range of a segment's flat vector. It has no state but the number of its steps.
#[derive(Clone, Debug)]
pub struct Sgd {
    segment: String,
    weight_decay: f64,
    /// Runs of equal treatment that tile the shard: (elements, counted from its start; whether they decay).
    runs: Vec<(Range<usize>, bool)>,
    len: usize,
    steps: u64,
}

impl Sgd {
    /// An optimizer for the elements `range` of `segment` (the whole of it: `0..segment.len`; an empty range is fine), whose tensors of two
    /// dimensions decay by `weight_decay`.
    ///
    /// # Errors
    /// [`OptimError::RangeOutsideSegment`].
    pub fn new(weight_decay: f64, segment: &SegmentInfo, range: Range<usize>) -> Result<Self, OptimError> {
        check_range(segment, &range)?;
        let runs = runs(segment, &range);
        Ok(Self { segment: segment.name.clone(), weight_decay, runs, len: range.len(), steps: 0 })
    }

    /// Number of elements of the shard.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the shard is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// One step on the shard: p ← p·(1 − lr·λ) where decay applies; p ← p − lr·g. `params` and `grads` are the shard's elements; each gradient
    /// is first multiplied by `grad_factor`.
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
        let rate = learning_rate as f32;
        for (run, keep) in self.factors(learning_rate) {
            let pairs = params[run.clone()].par_chunks_mut(TASK).zip(grads[run].par_chunks(TASK));
            pairs.for_each(|(params, grads)| apply(params, grads, keep, rate, grad_factor));
        }
        Ok(())
    }

    /// Continues after so many steps. `mean` and `square` are those of other optimizers: this one keeps none.
    ///
    /// # Errors
    /// [`OptimError::Length`] where there is something in them.
    pub(in crate::optim) fn restore(&mut self, mean: &[f32], square: &[f32], steps: u64) -> Result<(), OptimError> {
        for (what, saved) in [("the saved first moment", mean), ("the saved second moment", square)] {
            if !saved.is_empty() {
                return Err(OptimError::Length { segment: self.segment.clone(), what, len: saved.len(), expected: 0 });
            }
        }
        self.steps = steps;
        Ok(())
    }

    /// The shard's runs, and what is left of their elements by decay at a step of this learning rate.
    pub(super) fn factors(&self, learning_rate: f64) -> impl Iterator<Item = (Range<usize>, f32)> {
        let kept = (1.0 - learning_rate * self.weight_decay) as f32;
        self.runs.iter().map(move |(run, decays)| (run.clone(), if *decays { kept } else { 1.0 }))
    }

    /// Counts a step that is taken elsewhere.
    pub(super) fn count(&mut self) {
        self.steps += 1;
    }

    pub(super) fn check(&self, what: &'static str, len: usize) -> Result<(), OptimError> {
        if len == self.len {
            Ok(())
        } else {
            Err(OptimError::Length { segment: self.segment.clone(), what, len, expected: self.len })
        }
    }

    pub(super) fn segment(&self) -> &str {
        &self.segment
    }
}

/// Never inlined: only as arguments are the slices known not to overlap.
#[inline(never)]
fn apply(params: &mut [f32], grads: &[f32], keep: f32, rate: f32, grad_factor: f32) {
    for (p, g) in params.iter_mut().zip(grads) {
        *p = *p * keep - rate * (*g * grad_factor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;
    use crate::segments::layout;

    #[test]
    fn a_step_is_the_rate_times_the_gradient_and_matrices_decay() {
        let segment = layout(&Preset::Micro.config(61)).unwrap().swap_remove(1);
        let mut params = vec![1.0; segment.len];
        let grads = vec![2.0; segment.len];
        let mut sgd = Sgd::new(0.5, &segment, 0..segment.len).unwrap();
        sgd.step(&mut params, &grads, 0.25, 0.5).unwrap();
        for info in &segment.params {
            let expected = if info.shape.len() == 2 { 0.875 - 0.25 } else { 0.75 };
            assert!(params[info.offset..info.offset + info.len].iter().all(|p| *p == expected), "{}", info.path);
        }
        assert_eq!((sgd.steps(), sgd.len(), sgd.is_empty()), (1, segment.len, false));
        assert!(sgd.step(&mut params, &grads[1..], 0.1, 1.0).is_err());
        assert_eq!(sgd.steps(), 1);
    }
}
