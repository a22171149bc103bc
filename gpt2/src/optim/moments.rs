//! The running means that both optimizers keep, in host memory.

use std::ops::Range;

use super::{AdamWConfig, OptimError, check_range};
use crate::segments::SegmentInfo;

/// How gradients enter the moments, in the type it is computed in.
#[derive(Clone, Copy)]
pub(crate) struct Decay {
    pub(crate) grad_factor: f32,
    pub(crate) mean_weight: f32,
    pub(crate) square_decay: f32,
    pub(crate) square_weight: f32,
}

impl Decay {
    pub(super) fn of(config: &AdamWConfig, grad_factor: f32) -> Self {
        Decay {
            grad_factor,
            mean_weight: (1.0 - config.beta1) as f32,
            square_decay: config.beta2 as f32,
            square_weight: (1.0 - config.beta2) as f32,
        }
    }

    #[inline(always)]
    pub(super) fn advance_one(&self, grad: f32, mean: &mut f32, square: &mut f32) {
        let grad = grad * self.grad_factor;
        *mean += self.mean_weight * (grad - *mean);
        *square = *square * self.square_decay + self.square_weight * grad * grad;
    }
}

/// The running means of gradients and of their squares for a shard, and how many steps went into them.
#[derive(Clone, Debug)]
pub(super) struct Moments {
    pub(super) segment: String,
    pub(super) mean: Vec<f32>,
    pub(super) square: Vec<f32>,
    pub(super) steps: u64,
}

impl Moments {
    pub(super) fn new(segment: &SegmentInfo, range: &Range<usize>) -> Result<Self, OptimError> {
        check_range(segment, range)?;
        let zeros = || vec![0.0; range.len()];
        Ok(Self { segment: segment.name.clone(), mean: zeros(), square: zeros(), steps: 0 })
    }

    pub(super) fn len(&self) -> usize {
        self.mean.len()
    }

    pub(super) fn state(&self) -> (&[f32], &[f32], u64) {
        (&self.mean, &self.square, self.steps)
    }

    pub(super) fn restore(&mut self, mean: Vec<f32>, square: Vec<f32>, steps: u64) -> Result<(), OptimError> {
        self.check("the saved first moment", mean.len())?;
        self.check("the saved second moment", square.len())?;
        (self.mean, self.square, self.steps) = (mean, square, steps);
        Ok(())
    }

    pub(super) fn check(&self, what: &'static str, len: usize) -> Result<(), OptimError> {
        let expected = self.len();
        if len == expected {
            Ok(())
        } else {
            Err(OptimError::Length { segment: self.segment.clone(), what, len, expected })
        }
    }
}
