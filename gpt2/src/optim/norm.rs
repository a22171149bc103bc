//! Gradient norms and clipping.

use comm_core::{Kernel, vectorised};
use rayon::prelude::*;

/// Sum of squares in f64, in an order that depends on the length alone. Sums of several pieces (segments, shards) are added in the
/// caller's order; a different cutting may differ in the last bits.
///
/// The square of an f32 fits f64 by far, so the sum is finite exactly where every value is.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    const TASK: usize = 1 << 16;
    let partial: Vec<f64> = values.par_chunks(TASK).map(|task| vectorised(Squares(task))).collect();
    partial.iter().sum()
}

/// The sum of squares of one task.
struct Squares<'a>(&'a [f32]);

impl Kernel for Squares<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        /// Sums that are taken side by side: several vectors of them, since an addition waits for the one before.
        const LANES: usize = 32;
        let mut lanes = [0.0f64; LANES];
        let (chunks, rest) = self.0.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(*x) * f64::from(*x);
            }
        }
        let tail: f64 = rest.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        lanes.iter().sum::<f64>() + tail
    }
}

/// What gradients of global norm `norm` are multiplied by so that it becomes at most `max`: `min(1, max / (norm + 1e-6))`, as PyTorch's
/// `clip_grad_norm_`. A norm that is not finite gives NaN or 0, never a silent 1: check the norm first.
pub fn clip_factor(norm: f64, max: f64) -> f32 {
    let factor = max / (norm + 1e-6);
    if factor > 1.0 { 1.0 } else { factor as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn the_sum_is_finite_exactly_where_the_values_are() {
        let mut values = vec![f32::MAX; 70_000];
        assert!(sum_of_squares(&values).is_finite());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 65_535, 65_536, 69_999] {
                values[at] = bad;
                assert!(!sum_of_squares(&values).is_finite(), "{bad} at {at}");
                values[at] = 1.0;
            }
        }
    }
}
