//! AdamW on a device: one kernel where there is one for it, else tensor operations.

use std::ops::Range;

use burn::tensor::{Device, Tensor};

use super::super::adamw::{Scalars, runs};
use super::{DeviceMoments, scaled};
#[cfg(all(feature = "cube", not(feature = "fusion")))]
use crate::cube;
use crate::flat::joined;
use crate::optim::{AdamWConfig, OptimError};
use crate::precision::Precision;
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

    /// The state for a checkpoint, in host memory: first and second moments and the number of steps. To be taken between steps.
    ///
    /// # Errors
    /// [`OptimError::Device`].
    pub fn state(&self) -> Result<([Vec<f32>; 2], u64), OptimError> {
        self.moments.state()
    }

    /// Continues from a saved [`state`](Self::state), of a shard of the same range, on `device`.
    ///
    /// # Errors
    /// [`OptimError::Length`] if a moment does not have the shard's length; nothing has changed then.
    pub fn restore(&mut self, means: [Vec<f32>; 2], steps: u64, device: &Device) -> Result<(), OptimError> {
        self.moments.restore(means, steps, device)
    }

    /// One step on the shard: see [`AdamW::step`](super::super::AdamW::step). `params` are its elements in f32, or `None` where there are
    /// none; returns the new ones. `grads` follow one another, each of any floating-point type, on the same device. What the device cannot
    /// compute is reported when a result is read.
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
        self.moments.check("the parameter tensor", params.as_ref())?;
        self.moments.check_len("the gradients", grads.iter().map(|piece| piece.dims()[0]).sum())?;
        self.moments.steps += 1;
        let Some(params) = params else { return Ok(None) };
        let scalars = Scalars::of(&self.config, self.moments.steps, learning_rate, grad_factor);
        let kept = Scalars::keep(&self.config, learning_rate);
        let runs = self.runs.iter().map(|(run, decays)| (run.clone(), if *decays { kept } else { 1.0 }));
        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        if cube::serves(&params.device()) {
            let [mean, square] = self.moments.take(&params);
            let step = cube::optim::AdamWStep {
                decay: scalars.decay,
                root_correction: scalars.root_correction,
                epsilon: scalars.epsilon,
                step_size: scalars.step_size,
                keep: runs.collect(),
            };
            let [params, mean, square] = cube::optim::adamw([params, mean, square], grads, &step);
            self.moments.means = Some([mean, square]);
            return Ok(Some(params));
        }
        let Some(grads) = joined(grads, Precision::F32) else { return Ok(Some(params)) };
        let [mean, square] = self.moments.advance(grads, scalars.decay);
        let denominator = square.sqrt().div_scalar(scalars.root_correction).add_scalar(scalars.epsilon);
        let update = (mean / denominator).mul_scalar(scalars.step_size);
        Ok(Some(scaled(params, runs.map(|(run, keep)| (run.len(), keep))) - update))
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
                device = on_device.step(device, tensor(&grads).into_iter().collect(), 1e-2, 0.7).unwrap();
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
    fn state_can_be_saved_and_restored() {
        let segment = layout(&Preset::Micro.config(61)).unwrap().swap_remove(1);
        let new = || DeviceAdamW::new(AdamWConfig::default(), &segment, 5..69).unwrap();
        let (start, grads) = (init::normal(1, "params", 64, 0.5), init::normal(2, "grads", 64, 0.1));
        let step = |optimizer: &mut DeviceAdamW, params: &[f32]| {
            let grads = tensor(&grads).into_iter().collect();
            let params = optimizer.step(tensor(params), grads, 1e-2, 0.7).unwrap().unwrap();
            params.try_into_vec_as::<f32>().unwrap()
        };
        let (mut one, mut two) = (new(), new());
        assert_eq!(one.state().unwrap(), ([vec![0.0; 64], vec![0.0; 64]], 0));
        let params = step(&mut one, &start);
        let (means, steps) = one.state().unwrap();
        assert!(two.restore([means[0].clone(), vec![0.0; 63]], steps, &Device::flex()).is_err());
        two.restore(means, steps, &Device::flex()).unwrap();
        assert_eq!(step(&mut one, &params), step(&mut two, &params));
        assert_eq!((one.steps(), two.steps()), (2, 2));
    }

    #[test]
    fn wrong_lengths_change_nothing() {
        let segment = layout(&Preset::Micro.config(61)).unwrap().swap_remove(1);
        assert!(DeviceAdamW::new(AdamWConfig::default(), &segment, 0..segment.len + 1).is_err());
        let mut optimizer = DeviceAdamW::new(AdamWConfig::default(), &segment, 0..8).unwrap();
        let error = optimizer.step(tensor(&[0.0; 8]), vec![tensor(&[0.0; 7]).unwrap()], 0.1, 1.0).unwrap_err();
        assert!(matches!(error, OptimError::Length { len: 7, expected: 8, .. }));
        assert!(optimizer.step(None, Vec::new(), 0.1, 1.0).is_err());
        assert_eq!(optimizer.steps(), 0);
    }
}
