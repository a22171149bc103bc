//! Plain SGD on a device.

use std::ops::Range;

use burn::tensor::Tensor;

use super::super::sgd::Sgd;
use super::scaled;
use crate::flat::joined;
use crate::optim::OptimError;
use crate::precision::Precision;
use crate::segments::SegmentInfo;

/// [`Sgd`] for one contiguous range of a segment whose parameters are on a device: the same operations in the same order.
#[derive(Debug)]
pub struct DeviceSgd(Sgd);

impl DeviceSgd {
    /// As [`Sgd::new`].
    ///
    /// # Errors
    /// [`OptimError::RangeOutsideSegment`].
    pub fn new(weight_decay: f64, segment: &SegmentInfo, range: Range<usize>) -> Result<Self, OptimError> {
        Sgd::new(weight_decay, segment, range).map(Self)
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.0.steps()
    }

    /// As [`Optimizer::restore`](crate::optim::Optimizer::restore).
    ///
    /// # Errors
    /// [`OptimError::Length`] where there is something in the moments, of which it has none.
    pub fn restore(&mut self, mean: &[f32], square: &[f32], steps: u64) -> Result<(), OptimError> {
        self.0.restore(mean, square, steps)
    }

    /// One step on the shard: see [`Sgd::step`]. `params` are its elements in f32, or `None` where there are none; returns the new ones.
    /// `grads` follow one another, each of any floating-point type, on the same device.
    ///
    /// # Errors
    /// [`OptimError::Length`] if parameters or gradients do not have the shard's length; nothing has changed then.
    pub fn step(
        &mut self,
        params: Option<Tensor<1>>,
        grads: Vec<Tensor<1>>,
        learning_rate: f64,
        grad_factor: f32,
    ) -> Result<Option<Tensor<1>>, OptimError> {
        self.0.check("the parameter tensor", params.as_ref().map_or(0, |params| params.dims()[0]))?;
        self.0.check("the gradients", grads.iter().map(|piece| piece.dims()[0]).sum())?;
        self.0.count();
        let (Some(params), Some(grads)) = (params, joined(grads, Precision::F32)) else { return Ok(None) };
        let kept = scaled(params, self.0.factors(learning_rate).map(|(run, keep)| (run.len(), keep)));
        Ok(Some(kept - grads.mul_scalar(grad_factor).mul_scalar(learning_rate as f32)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::tensor;
    use super::*;
    use crate::config::Preset;
    use crate::init;
    use crate::segments::layout;

    #[test]
    fn steps_on_a_device_are_those_of_the_host() {
        let segment = layout(&Preset::Micro.config(61)).unwrap().swap_remove(1);
        for range in [0..segment.len, 5..segment.len / 2 + 3, 7..7] {
            let mut host = init::normal(1, "params", range.len(), 0.5);
            let mut device = tensor(&host);
            let mut on_host = Sgd::new(0.1, &segment, range.clone()).unwrap();
            let mut on_device = DeviceSgd::new(0.1, &segment, range.clone()).unwrap();
            for step in 0..3 {
                let grads = init::normal(step, "grads", range.len(), 0.1);
                on_host.step(&mut host, &grads, 1e-2, 0.7).unwrap();
                device = on_device.step(device, tensor(&grads).into_iter().collect(), 1e-2, 0.7).unwrap();
            }
            let found = device.map_or(Vec::new(), |device| device.try_into_vec_as::<f32>().unwrap());
            assert_eq!(found, host);
            assert_eq!(on_device.steps(), 3);
            assert!(on_device.step(tensor(&[0.0; 3]), Vec::new(), 0.1, 1.0).is_err());
        }
    }
}
