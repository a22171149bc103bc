//! Mean cross entropy of logits and its gradient, in as few passes over the logits as there can be: they are the largest tensor of a
//! training step.
//!
//! In host memory both come from two passes over each row while it is in cache, and the gradient takes the logits' place. On other devices
//! one kernel does the same, or else the same formulas run as tensor operations.
//!
//! Logits may be of a 16-bit type; sums and exponentials are in f32.

use burn::tensor::{Device, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData};
use rayon::prelude::*;

use super::error::ModelError;
#[cfg(all(feature = "cube", not(feature = "fusion")))]
use crate::cube;
use crate::devices::{self, Placement};
use crate::math;

/// A mean loss, in nats.
pub(crate) enum Loss {
    /// Its value.
    Known(f64),
    /// Each row's loss, on a device that may still be computing it.
    OfRows(Box<Tensor<1>>),
}

impl Loss {
    /// The value, waiting for it.
    pub(crate) fn read(self) -> Result<f64, ModelError> {
        match self {
            Loss::Known(loss) => Ok(loss),
            Loss::OfRows(losses) => {
                let losses = losses.try_into_vec_as::<f32>().map_err(failed)?;
                Ok(losses.iter().map(|x| f64::from(*x)).sum::<f64>() / losses.len() as f64)
            }
        }
    }
}

/// Mean over rows of −ln softmax(logits)[target], in nats. The caller has checked that `targets` lie in the vocabulary and match the
/// rows.
pub(crate) fn mean_loss(logits_nv: Tensor<2>, targets: &[i32], placement: Placement) -> Result<f64, ModelError> {
    match placement {
        Placement::Host => {
            let [n, v] = logits_nv.dims();
            let logits = host_data(wide(logits_nv))?;
            let rows = logits.as_slice::<f32>().map_err(failed)?;
            let losses: Vec<f64> = rows
                .par_chunks(v)
                .zip(targets)
                .map(|(row, target)| {
                    let max = row_max(row);
                    row_loss(sum_of_exp(row, max), max, row[*target as usize])
                })
                .collect();
            Ok(losses.iter().sum::<f64>() / n as f64)
        }
        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        Placement::Device if cube::serves(&logits_nv.device()) => {
            let targets_n = targets_on(&logits_nv.device(), targets);
            Loss::OfRows(Box::new(cube::cross_entropy(logits_nv, targets_n, None).0)).read()
        }
        Placement::Device => device_parts(wide(logits_nv), targets).loss.read(),
    }
}

/// The mean loss, as [`mean_loss`], and the gradient of `scale` times it with respect to the logits:
/// `(softmax − one-hot) · scale / rows`. The gradient is in f32 or in the logits' type.
pub(crate) fn loss_and_gradient(
    logits_nv: Tensor<2>,
    targets: &[i32],
    scale: f32,
    placement: Placement,
) -> Result<(Loss, Tensor<2>), ModelError> {
    let [n, v] = logits_nv.dims();
    let row_scale = scale / n as f32;
    match placement {
        Placement::Host => {
            let device = logits_nv.device();
            let mut logits = host_data(wide(logits_nv))?;
            let rows = logits.as_mut_slice::<f32>().map_err(failed)?;
            let losses: Vec<f64> = rows
                .par_chunks_mut(v)
                .zip(targets)
                .map(|(row, target)| {
                    let max = row_max(row);
                    let picked = row[*target as usize];
                    let sum = exp_in_place(row, max);
                    let factor = row_scale / sum;
                    row.iter_mut().for_each(|x| *x *= factor);
                    row[*target as usize] -= row_scale;
                    row_loss(sum, max, picked)
                })
                .collect();
            // Summed in row order, whichever thread did which row.
            let loss = losses.iter().sum::<f64>() / n as f64;
            Ok((Loss::Known(loss), Tensor::from_data(logits, &device)))
        }
        #[cfg(all(feature = "cube", not(feature = "fusion")))]
        Placement::Device if cube::serves(&logits_nv.device()) => {
            let targets_n = targets_on(&logits_nv.device(), targets);
            let (losses, gradient_nv) = cube::cross_entropy(logits_nv, targets_n, Some(row_scale));
            Ok((Loss::OfRows(Box::new(losses)), gradient_nv))
        }
        Placement::Device => {
            let DeviceParts { loss, exp_nv, sum_n1, targets_n1 } = device_parts(wide(logits_nv), targets);
            let one_hot_n1 = Tensor::full([n, 1], -row_scale, &exp_nv.device());
            let gradient_nv =
                (exp_nv * (sum_n1.recip() * row_scale)).scatter(1, targets_n1, one_hot_n1, IndexingUpdateOp::Add);
            Ok((loss, gradient_nv))
        }
    }
}

struct DeviceParts {
    loss: Loss,
    exp_nv: Tensor<2>,
    sum_n1: Tensor<2>,
    targets_n1: Tensor<2, Int>,
}

fn device_parts(logits_nv: Tensor<2>, targets: &[i32]) -> DeviceParts {
    let targets_n1: Tensor<2, Int> = targets_on(&logits_nv.device(), targets).unsqueeze_dim(1);
    let shifted_nv = logits_nv.clone() - logits_nv.max_dim(1);
    let picked_n1 = shifted_nv.clone().gather(1, targets_n1.clone());
    let exp_nv = shifted_nv.exp();
    let sum_n1 = exp_nv.clone().sum_dim(1);
    let losses_n1 = sum_n1.clone().log() - picked_n1;
    DeviceParts { loss: Loss::OfRows(Box::new(losses_n1.squeeze_dim(1))), exp_nv, sum_n1, targets_n1 }
}

fn targets_on(device: &Device, targets: &[i32]) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(targets.to_vec(), [targets.len()]), device)
}

fn wide(logits_nv: Tensor<2>) -> Tensor<2> {
    logits_nv.cast(FloatDType::F32)
}

/// Number of partial results a row's sum or maximum is kept in, so that the loop becomes vector code. Fixed, because the order of
/// additions decides the last bit.
const LANES: usize = 16;

fn row_max(row: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |a, b| a.max(*b))
}

fn sum_of_exp(row: &[f32], max: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += math::exp(*x - max);
        }
    }
    let tail = rest.iter().map(|x| math::exp(*x - max)).sum::<f32>();
    lanes.iter().sum::<f32>() + tail
}

fn exp_in_place(row: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = math::exp(*x - max);
            *lane += *x;
        }
    }
    let mut tail = 0.0;
    for x in rest {
        *x = math::exp(*x - max);
        tail += *x;
    }
    lanes.iter().sum::<f32>() + tail
}

fn row_loss(sum: f32, max: f32, picked: f32) -> f64 {
    // A diverged model's sum is not a number; neither is its loss.
    if sum.is_finite() { math::ln(f64::from(sum)) + f64::from(max) - f64::from(picked) } else { f64::NAN }
}

fn host_data(logits_nv: Tensor<2>) -> Result<TensorData, ModelError> {
    logits_nv.try_into_data().map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> ModelError {
    ModelError::Head { detail: devices::reason(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(v: usize) -> (Tensor<2>, Vec<i32>) {
        let n = 5;
        let logits: Vec<f32> = (0..n * v).map(|i| ((i * 7919 % 1013) as f32 / 50.0 - 10.0) * 3.0).collect();
        let targets = (0..n).map(|i| (i * 11 % v) as i32).collect();
        let tensor = Tensor::from_data(TensorData::new(logits, [n, v]), &Device::flex());
        (tensor, targets)
    }

    #[test]
    fn host_and_tensor_formulas_agree() {
        for v in [1, 15, 16, 61] {
            let (logits, targets) = case(v);
            let run = |placement| {
                let (loss, gradient) = loss_and_gradient(logits.clone(), &targets, 3.0, placement).unwrap();
                let loss = loss.read().unwrap();
                let alone = mean_loss(logits.clone(), &targets, placement).unwrap();
                assert!((alone - loss).abs() <= 1e-6 * loss.abs().max(1.0));
                (loss, gradient.into_data().try_into_vec::<f32>().unwrap())
            };
            let (loss, gradient) = run(Placement::Host);
            let (expected_loss, expected) = run(Placement::Device);
            assert!((loss - expected_loss).abs() < 1e-5, "{loss} {expected_loss}");
            for (a, b) in gradient.iter().zip(&expected) {
                assert!((a - b).abs() < 1e-6, "{a} {b}");
            }
        }
    }

    #[test]
    fn the_gradient_of_each_row_sums_to_zero_and_the_caller_keeps_its_logits() {
        let (logits, targets) = case(61);
        let before = logits.to_data();
        let (_, gradient) = loss_and_gradient(logits.clone(), &targets, 1.0, Placement::Host).unwrap();
        logits.to_data().assert_eq(&before, true);
        let gradient: Vec<f32> = gradient.into_data().try_into_vec().unwrap();
        for row in gradient.chunks(61) {
            assert!(row.iter().sum::<f32>().abs() < 1e-6);
        }
    }

    #[test]
    fn a_diverged_model_has_no_finite_loss() {
        let logits = Tensor::from_data(TensorData::new(vec![f32::NAN, 1.0, 2.0], [1, 3]), &Device::flex());
        let loss = mean_loss(logits, &[1], Placement::Host).unwrap();
        assert!(!loss.is_finite(), "{loss}");
    }
}
