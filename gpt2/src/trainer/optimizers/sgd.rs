//! Plain SGD on the device.

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::Device;

use super::super::save::Means;
use super::{AddUp, MasterOptimizer, squares_on_device};
use crate::error::TrainError;
use crate::flat::Flat;
use crate::optim::{DeviceSgd, OptimError, OptimizerConfig};
use crate::segments::SegmentInfo;

/// One for the owned range of each segment.
#[derive(Default)]
pub(super) struct SgdOnDevice(Vec<DeviceSgd>);

impl MasterOptimizer for SgdOnDevice {
    fn push(&mut self, config: OptimizerConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<(), OptimError> {
        config.validate()?;
        self.0.push(DeviceSgd::new(config.weight_decay, segment, range)?);
        Ok(())
    }

    fn steps(&self) -> Vec<u64> {
        self.0.iter().map(DeviceSgd::steps).collect()
    }

    fn state(&self, _segment: usize) -> Result<Means<'_>, TrainError> {
        Ok([Cow::Borrowed(&[]), Cow::Borrowed(&[])])
    }

    fn restore(&mut self, segment: usize, means: [Vec<f32>; 2], steps: u64, _: &Device) -> Result<(), TrainError> {
        let [mean, square] = &means;
        Ok(self.0[segment].restore(mean, square, steps)?)
    }

    fn sum_of_squares(&self, grads: &[Flat], unscale: f32) -> Result<f64, TrainError> {
        squares_on_device(grads, unscale)
    }

    fn step(
        &mut self,
        segments: &[usize],
        masters: &mut [Flat],
        grads: Vec<Flat>,
        (learning_rate, factor): (f64, f32),
        _add_up: AddUp<'_>,
    ) -> Result<(), TrainError> {
        for (segment, grads) in segments.iter().zip(grads) {
            let params = std::mem::take(&mut masters[*segment]).into_tensor()?;
            let updated = self.0[*segment].step(params, grads.pieces()?, learning_rate, factor)?;
            masters[*segment] = Flat::Device(updated.into_iter().collect());
        }
        Ok(())
    }
}
