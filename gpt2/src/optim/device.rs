//! AdamW and gradient norms as tensor operations, for parameters that never leave their device.

use std::ops::Range;

use burn::tensor::{FloatDType, Tensor};

use super::adamw::{Scalars, runs};
use super::{AdamWConfig, OptimError, check_range};
use crate::segments::SegmentInfo;

/// [`AdamW`](super::AdamW) for one contiguous range of a segment, with its state on the device of the parameters: the same operations
/// on the same scalars in the same order, so it differs by the device's rounding alone.
#[derive(Debug)]
pub struct DeviceAdamW {
    config: AdamWConfig,
    segment: String,
    len: usize,
    /// Runs of equal treatment that tile the shard: (elements, counted from its start; whether they decay).
    runs: Vec<(Range<usize>, bool)>,
    /// The running means of gradients and of their squares; `None` before the first step, which takes them for zeros.
    moments: Option<[Tensor<1>; 2]>,
    steps: u64,
}

impl DeviceAdamW {
    /// An optimizer for the elements `range` of `segment` (the whole of it: `0..segment.len`; an empty range is fine).
    ///
    /// # Errors
    /// [`OptimError::RangeOutsideSegment`].
    pub fn new(config: AdamWConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<Self, OptimError> {
        check_range(segment, &range)?;
        let runs = runs(segment, &range);
        Ok(Self { config, segment: segment.name.clone(), len: range.len(), runs, moments: None, steps: 0 })
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// One step on the shard: see [`AdamW::step`](super::AdamW::step). `params` and `grads` are its elements in f32 on one device, or
    /// `None` where there are none; returns the new parameters. What the device cannot compute is reported when a result is read.
    ///
    /// # Errors
    /// [`OptimError::Length`] if a tensor does not have the shard's length; nothing has changed then.
    pub fn step(
        &mut self,
        params: Option<Tensor<1>>,
        grads: Option<Tensor<1>>,
        learning_rate: f64,
        grad_factor: f32,
    ) -> Result<Option<Tensor<1>>, OptimError> {
        self.check("the parameter tensor", params.as_ref())?;
        self.check("the gradient tensor", grads.as_ref())?;
        self.steps += 1;
        let Some((params, grads)) = params.zip(grads) else { return Ok(None) };
        let scalars = Scalars::of(&self.config, self.steps, learning_rate, grad_factor);
        let [mean, square] = self.moments.take().unwrap_or_else(|| {
            let zeros = || Tensor::zeros([self.len], (&params.device(), FloatDType::F32.into()));
            [zeros(), zeros()]
        });

        let grads = grads.mul_scalar(scalars.grad_factor);
        let mean = mean.clone() + (grads.clone() - mean).mul_scalar(scalars.mean_weight);
        let square = square.mul_scalar(scalars.square_decay) + grads.clone().mul_scalar(scalars.square_weight) * grads;
        let denominator = square.clone().sqrt().div_scalar(scalars.root_correction).add_scalar(scalars.epsilon);
        let update = (mean.clone() / denominator).mul_scalar(scalars.step_size);
        self.moments = Some([mean, square]);
        Ok(Some(self.decayed(params, learning_rate) - update))
    }

    /// The parameters after weight decay, which only some of them are subject to.
    fn decayed(&self, params: Tensor<1>, learning_rate: f64) -> Tensor<1> {
        let keep = Scalars::keep(&self.config, learning_rate);
        match self.runs.as_slice() {
            _ if keep == 1.0 => params,
            [(_, decays)] => {
                if *decays {
                    params.mul_scalar(keep)
                } else {
                    params
                }
            }
            runs => {
                let device = params.device();
                let factors = runs.iter().map(|(run, decays)| {
                    Tensor::full([run.len()], if *decays { keep } else { 1.0 }, (&device, FloatDType::F32.into()))
                });
                let factors = Tensor::cat(factors.collect(), 0);
                params * factors
            }
        }
    }

    fn check(&self, what: &'static str, tensor: Option<&Tensor<1>>) -> Result<(), OptimError> {
        let len = tensor.map_or(0, |tensor| tensor.dims()[0]);
        if len == self.len {
            Ok(())
        } else {
            Err(OptimError::Length { segment: self.segment.clone(), what, len, expected: self.len })
        }
    }
}

/// Sum of squares of all elements of `grads`, tensors of any floating-point type on one device: a sum for each of them there, in f32, and
/// one transfer.
///
/// Elements are multiplied by `unscale` (the inverse of a loss scale, a power of two) before they are squared, so that f32 holds the
/// squares, and the sum is divided by its square: as [`sum_of_squares`](super::sum_of_squares) of the same elements, to f32's
/// precision. It is not finite where a value is not, nor where one is too large for f32 to hold its square. Not the same to the last bit
/// from run to run: a device adds in any order.
///
/// # Errors
/// [`OptimError::Device`].
pub fn sum_of_squares_on_device(grads: Vec<Tensor<1>>, unscale: f32) -> Result<f64, OptimError> {
    if grads.is_empty() {
        return Ok(0.0);
    }
    let squares = grads.into_iter().map(|grads| {
        let grads = grads.cast(FloatDType::F32).mul_scalar(unscale);
        (grads.clone() * grads).sum()
    });
    let sums = Tensor::cat(squares.collect(), 0)
        .try_into_vec_as::<f32>()
        .map_err(|error| OptimError::Device { detail: error.to_string() })?;
    Ok(sums.into_iter().map(f64::from).sum::<f64>() / f64::from(unscale).powi(2))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::config::Preset;
    use crate::init;
    use crate::optim::{AdamW, sum_of_squares};
    use crate::segments::layout;

    fn tensor(values: &[f32]) -> Option<Tensor<1>> {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        (!values.is_empty()).then(|| Tensor::from_data(data, &Device::flex()))
    }

    #[test]
    fn steps_on_a_device_are_those_of_the_host() {
        let segment = layout(&Preset::Micro.config(61)).unwrap().swap_remove(1);
        let n = segment.len;
        for range in [0..n, 5..n / 2 + 3, 7..7] {
            let start = init::normal(1, "params", range.len(), 0.5);
            let (mut host, mut device) = (start.clone(), tensor(&start));
            let mut on_host = AdamW::new(AdamWConfig::default(), &segment, range.clone()).unwrap();
            let mut on_device = DeviceAdamW::new(AdamWConfig::default(), &segment, range.clone()).unwrap();
            for step in 0..4 {
                let grads = init::normal(step, "grads", range.len(), 0.1);
                on_host.step(&mut host, &grads, 1e-2, 0.7).unwrap();
                device = on_device.step(device, tensor(&grads), 1e-2, 0.7).unwrap();
            }
            let found = device.map_or(Vec::new(), |device| device.try_into_vec_as::<f32>().unwrap());
            assert_eq!(found.len(), host.len());
            for (a, b) in found.iter().zip(&host) {
                assert!((a - b).abs() <= 2.0 * f32::EPSILON * b.abs().max(0.1), "{a} {b}");
            }
            assert_eq!(on_device.steps(), 4);
        }
    }

    #[test]
    fn wrong_lengths_change_nothing() {
        let segment = layout(&Preset::Micro.config(61)).unwrap().swap_remove(1);
        assert!(DeviceAdamW::new(AdamWConfig::default(), &segment, 0..segment.len + 1).is_err());
        let mut optimizer = DeviceAdamW::new(AdamWConfig::default(), &segment, 0..8).unwrap();
        let error = optimizer.step(tensor(&[0.0; 8]), tensor(&[0.0; 7]), 0.1, 1.0).unwrap_err();
        assert!(matches!(error, OptimError::Length { len: 7, expected: 8, .. }));
        assert!(optimizer.step(None, None, 0.1, 1.0).is_err());
        assert_eq!(optimizer.steps(), 0);
    }

    #[test]
    fn norms_on_a_device_are_those_of_the_host() {
        let values = init::normal(1, "grads", 100_003, 3.0);
        let scale = 65_536.0f32;
        let scaled: Vec<f32> = values.iter().map(|value| value * scale).collect();
        let parts = || [&scaled[..50_000], &scaled[50_000..]].into_iter().filter_map(tensor).collect::<Vec<_>>();
        let (found, expected) = (sum_of_squares_on_device(parts(), 1.0 / scale).unwrap(), sum_of_squares(&scaled));
        assert!((found / expected - 1.0).abs() < 1e-5, "{found} {expected}");
        assert_eq!(sum_of_squares_on_device(Vec::new(), 1.0).unwrap(), 0.0);
        for bad in [f32::NAN, f32::INFINITY] {
            let parts = vec![tensor(&[1.0, bad]).unwrap(), tensor(&[1.0]).unwrap()];
            assert!(!sum_of_squares_on_device(parts, 1.0).unwrap().is_finite());
        }
    }
}
