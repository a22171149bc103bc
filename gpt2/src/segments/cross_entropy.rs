//! Mean cross entropy of logits and its gradient. One kernel of our own does it where there is one, from two passes over each row; else the
//! same formulas run as tensor operations. The processor's fused form never has all logits at a time: see [`fused`](crate::fused).
//!
//! Logits may be of a 16-bit type; sums and exponentials are in f32. Rows may be longer than the vocabulary where kernels are generated: what is
//! behind it is no token's, and its gradient is zero.

use burn::tensor::{Device, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData};

use super::error::ModelError;
#[cfg(all(feature = "cube", not(feature = "fusion")))]
use crate::cube;
use crate::devices;

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

/// Mean over rows of −ln softmax(logits)[target], in nats, of `v` tokens. The caller has checked that `targets` lie in the vocabulary and match
/// the rows.
pub(crate) fn mean_loss(logits_nv: Tensor<2>, v: usize, targets: &[i32]) -> Result<f64, ModelError> {
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    if cube::serves(&logits_nv.device()) {
        let targets_n = targets_on(&logits_nv.device(), targets);
        return Loss::OfRows(Box::new(cube::cross_entropy(logits_nv, v, targets_n, None).0)).read();
    }
    composed(wide(logits_nv.narrow(1, 0, v)), targets).loss.read()
}

/// The mean loss, as [`mean_loss`], and the gradient of `scale` times it with respect to the logits:
/// `(softmax − one-hot) · scale / rows`. The gradient is in f32 or in the logits' type.
pub(crate) fn loss_and_gradient(logits_nv: Tensor<2>, v: usize, targets: &[i32], scale: f32) -> (Loss, Tensor<2>) {
    let [n, _] = logits_nv.dims();
    let row_scale = scale / n as f32;
    #[cfg(all(feature = "cube", not(feature = "fusion")))]
    if cube::serves(&logits_nv.device()) {
        let targets_n = targets_on(&logits_nv.device(), targets);
        let (losses, gradient_nv) = cube::cross_entropy(logits_nv, v, targets_n, Some(row_scale));
        return (Loss::OfRows(Box::new(losses)), gradient_nv);
    }
    let Composed { loss, exp_nv, sum_n1, targets_n1 } = composed(wide(logits_nv.narrow(1, 0, v)), targets);
    let one_hot_n1 = Tensor::full([n, 1], -row_scale, &exp_nv.device());
    let gradient_nv = (exp_nv * (sum_n1.recip() * row_scale)).scatter(1, targets_n1, one_hot_n1, IndexingUpdateOp::Add);
    (loss, gradient_nv)
}

struct Composed {
    loss: Loss,
    exp_nv: Tensor<2>,
    sum_n1: Tensor<2>,
    targets_n1: Tensor<2, Int>,
}

fn composed(logits_nv: Tensor<2>, targets: &[i32]) -> Composed {
    let targets_n1: Tensor<2, Int> = targets_on(&logits_nv.device(), targets).unsqueeze_dim(1);
    let shifted_nv = logits_nv.clone() - logits_nv.max_dim(1);
    let picked_n1 = shifted_nv.clone().gather(1, targets_n1.clone());
    let exp_nv = shifted_nv.exp();
    let sum_n1 = exp_nv.clone().sum_dim(1);
    let losses_n1 = sum_n1.clone().log() - picked_n1;
    Composed { loss: Loss::OfRows(Box::new(losses_n1.squeeze_dim(1))), exp_nv, sum_n1, targets_n1 }
}

fn targets_on(device: &Device, targets: &[i32]) -> Tensor<1, Int> {
    Tensor::from_data(TensorData::new(targets.to_vec(), [targets.len()]), device)
}

fn wide(logits_nv: Tensor<2>) -> Tensor<2> {
    logits_nv.cast(FloatDType::F32)
}

fn failed(error: impl std::fmt::Display) -> ModelError {
    ModelError::Head { detail: devices::reason(error) }
}
