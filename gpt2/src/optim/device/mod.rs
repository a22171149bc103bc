//! Optimizers and gradient norms as tensor operations, for parameters that never leave their device.

mod adamw;
mod lamb;
mod sgd;

use std::ops::Range;

use burn::tensor::{Device, FloatDType, Tensor, TensorData};

use super::moments::Decay;
use super::{OptimError, check_range};
#[cfg(all(feature = "cube", not(feature = "fusion")))]
use crate::cube;
use crate::devices;
use crate::segments::SegmentInfo;

pub use adamw::DeviceAdamW;
pub use lamb::{DeviceLamb, DeviceNorms};
pub use sgd::DeviceSgd;

/// Sum of squares of all elements of `grads`, tensors of any floating-point type on one device: sums over parts there, in f32, and one
/// transfer.
///
/// Elements are multiplied by `unscale` (the inverse of a loss scale, a power of two) before they are squared, so that f32 holds the
/// squares, and the sum is divided by its square: as [`sum_of_squares`](super::sum_of_squares) of the same elements, to f32's
/// precision. It is not finite where a value is not, nor where one is too large for f32 to hold its square. Not the same to the last bit
/// on all devices, nor everywhere from run to run: each adds in an order of its own.
///
/// # Errors
/// [`OptimError::Device`].
pub fn sum_of_squares_on_device(grads: Vec<Tensor<1>>, unscale: f32) -> Result<f64, OptimError> {
    if grads.is_empty() {
        return Ok(0.0);
    }
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    if cube::serves(&grads[0].device()) {
        let Some(sums) = cube::optim::sums_of_squares(grads, unscale) else { return Ok(0.0) };
        return Ok(read(vec![sums])?.into_iter().sum::<f64>() / f64::from(unscale).powi(2));
    }
    let squares = grads.into_iter().map(|grads| {
        let grads = grads.cast(FloatDType::F32).mul_scalar(unscale);
        (grads.clone() * grads).sum()
    });
    Ok(read(squares.collect())?.into_iter().sum::<f64>() / f64::from(unscale).powi(2))
}

/// Sums that a device holds, one after another, in one transfer; of at least one tensor.
fn read(sums: Vec<Tensor<1>>) -> Result<Vec<f64>, OptimError> {
    let sums = Tensor::cat(sums, 0).try_into_vec_as::<f32>();
    Ok(sums
        .map_err(|error| OptimError::Device { detail: devices::reason(error) })?
        .into_iter()
        .map(f64::from)
        .collect())
}

/// The running means of gradients and of their squares for a shard, on its device, and how many steps went into them.
#[derive(Debug)]
struct DeviceMoments {
    segment: String,
    len: usize,
    /// `None` before the first gradients, which take them for zeros.
    means: Option<[Tensor<1>; 2]>,
    steps: u64,
}

impl DeviceMoments {
    fn new(segment: &SegmentInfo, range: &Range<usize>) -> Result<Self, OptimError> {
        check_range(segment, range)?;
        Ok(Self { segment: segment.name.clone(), len: range.len(), means: None, steps: 0 })
    }

    /// Takes gradients in, and returns the means.
    fn advance(&mut self, grads: Tensor<1>, decay: Decay) -> [Tensor<1>; 2] {
        let [mean, square] = self.take(&grads);
        let grads = grads.mul_scalar(decay.grad_factor);
        let mean = mean.clone() + (grads.clone() - mean).mul_scalar(decay.mean_weight);
        let square = square.mul_scalar(decay.square_decay) + grads.clone().mul_scalar(decay.square_weight) * grads;
        self.means.insert([mean, square]).clone()
    }

    /// The means, to be replaced by new ones, on the device of `beside`.
    fn take(&mut self, beside: &Tensor<1>) -> [Tensor<1>; 2] {
        self.means.take().unwrap_or_else(|| {
            let zeros = || Tensor::zeros([self.len], (&beside.device(), FloatDType::F32.into()));
            [zeros(), zeros()]
        })
    }

    /// Both means in host memory, and the number of steps.
    fn state(&self) -> Result<([Vec<f32>; 2], u64), OptimError> {
        let host = |tensor: &Tensor<1>| {
            let values = tensor.clone().try_into_vec_as::<f32>();
            values.map_err(|error| OptimError::Device { detail: devices::reason(error) })
        };
        let means = match &self.means {
            Some([mean, square]) => [host(mean)?, host(square)?],
            None => [vec![0.0; self.len], vec![0.0; self.len]],
        };
        Ok((means, self.steps))
    }

    /// Continues from a saved [`state`](Self::state), on `device`.
    fn restore(&mut self, means: [Vec<f32>; 2], steps: u64, device: &Device) -> Result<(), OptimError> {
        for (what, values) in [("the saved first moment", &means[0]), ("the saved second moment", &means[1])] {
            self.check_len(what, values.len())?;
        }
        let tensor = |values: Vec<f32>| {
            let data = TensorData::new(values, [self.len]);
            Tensor::from_data(data, (device, FloatDType::F32.into()))
        };
        self.means = (self.len > 0).then(|| means.map(tensor));
        self.steps = steps;
        Ok(())
    }

    fn check(&self, what: &'static str, tensor: Option<&Tensor<1>>) -> Result<(), OptimError> {
        self.check_len(what, tensor.map_or(0, |tensor| tensor.dims()[0]))
    }

    fn check_len(&self, what: &'static str, len: usize) -> Result<(), OptimError> {
        if len == self.len {
            Ok(())
        } else {
            Err(OptimError::Length { segment: self.segment.clone(), what, len, expected: self.len })
        }
    }
}

/// `tensor`, whose elements these runs tile (number of elements, factor), with each run multiplied by its factor.
fn scaled(tensor: Tensor<1>, runs: impl Iterator<Item = (usize, f32)>) -> Tensor<1> {
    let mut merged: Vec<(usize, f32)> = Vec::new();
    for (len, factor) in runs {
        match merged.last_mut() {
            Some((run, same)) if *same == factor => *run += len,
            _ => merged.push((len, factor)),
        }
    }
    match merged.as_slice() {
        [] => tensor,
        [(_, factor)] if *factor == 1.0 => tensor,
        [(_, factor)] => tensor.mul_scalar(*factor),
        runs => {
            let device = tensor.device();
            let full = |(len, factor): &(usize, f32)| Tensor::full([*len], *factor, (&device, FloatDType::F32.into()));
            let factors = Tensor::cat(runs.iter().map(full).collect(), 0);
            tensor * factors
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::init;
    use crate::optim::sum_of_squares;

    /// A tensor of the CPU; `None` of no values.
    pub(super) fn tensor(values: &[f32]) -> Option<Tensor<1>> {
        let data = TensorData::new(values.to_vec(), [values.len()]);
        (!values.is_empty()).then(|| Tensor::from_data(data, &Device::flex()))
    }

    #[test]
    fn runs_are_multiplied_each_by_its_factor() {
        let scale = |runs: &[(usize, f32)]| {
            let scaled = scaled(tensor(&[1.0, 2.0, 3.0, 4.0]).unwrap(), runs.iter().copied());
            scaled.try_into_vec_as::<f32>().unwrap()
        };
        assert_eq!(scale(&[(4, 1.0)]), [1.0, 2.0, 3.0, 4.0]);
        assert_eq!(scale(&[(1, 3.0), (3, 3.0)]), [3.0, 6.0, 9.0, 12.0]);
        assert_eq!(scale(&[(1, 1.0), (2, 0.0), (1, 0.5)]), [1.0, 0.0, 0.0, 2.0]);
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
