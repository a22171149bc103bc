//! AdamW as tensor operations.

use std::ops::Range;

use burn::tensor::Tensor;

use super::super::adamw::{Scalars, runs};
use super::{DeviceMoments, scaled};
use crate::optim::{AdamWConfig, OptimError};
use crate::segments::SegmentInfo;

/// [`AdamW`](super::super::AdamW) for one contiguous range of a segment, with its state on the device of the parameters: the same
/// operations on the same scalars in the same order, so it differs by the device's rounding alone.
#[derive(Debug)]
pub struct DeviceAdamW {
    config: AdamWConfig,
    /// Runs of equal treatment that tile the shard: (elements, counted from its start; whether they decay).
    runs: Vec<(Range<usize>, bool)>,
    moments: DeviceMoments,
}

impl DeviceAdamW {
    /// An optimizer for the elements `range` of `segment` (the whole of it: `0..segment.len`; an empty range is fine).
    ///
    /// # Errors
    /// [`OptimError::RangeOutsideSegment`].
    pub fn new(config: AdamWConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<Self, OptimError> {
        let moments = DeviceMoments::new(segment, &range)?;
        Ok(Self { config, runs: runs(segment, &range), moments })
    }

    /// Steps taken so far.
    pub fn steps(&self) -> u64 {
        self.moments.steps
    }

    /// One step on the shard: see [`AdamW::step`](super::super::AdamW::step). `params` and `grads` are its elements in f32 on one device,
    /// or `None` where there are none; returns the new parameters. What the device cannot compute is reported when a result is read.
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
        self.moments.check("the parameter tensor", params.as_ref())?;
        self.moments.check("the gradient tensor", grads.as_ref())?;
        self.moments.steps += 1;
        let Some((params, grads)) = params.zip(grads) else { return Ok(None) };
        let scalars = Scalars::of(&self.config, self.moments.steps, learning_rate, grad_factor);
        let kept = Scalars::keep(&self.config, learning_rate);
        let [mean, square] = self.moments.advance(grads, scalars.decay);
        let denominator = square.sqrt().div_scalar(scalars.root_correction).add_scalar(scalars.epsilon);
        let update = (mean / denominator).mul_scalar(scalars.step_size);
        let keep = |(run, decays): &(Range<usize>, bool)| (run.len(), if *decays { kept } else { 1.0 });
        Ok(Some(scaled(params, self.runs.iter().map(keep)) - update))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::tensor;
    use super::*;
    use crate::config::Preset;
    use crate::init;
    use crate::optim::AdamW;
    use crate::segments::layout;

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
}
