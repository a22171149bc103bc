//! Dropout, whose factors are computed where they are needed, forward and backward, and never kept.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex, TensorMetadata};
use burn::tensor::Tensor;
use rayon::prelude::*;

use super::{contiguous, narrow_flex, plain, tracked, values_mut, wide_flex};
use crate::dropout::Site;

/// Lines of a task.
const LINES: usize = 16;

/// `[b, t, c]` with its elements times their factors; host tensors only.
pub(crate) fn dropout(x: Tensor<3>, site: Site) -> Tensor<3> {
    if !x.is_autodiff() {
        return Tensor::from_primitive::<Flex>(scaled(plain(x), &site));
    }
    let (x, node) = tracked(x);
    let y = scaled(x, &site);
    let y = match DropoutBackward.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(site, y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(y)
}

#[derive(Debug)]
struct DropoutBackward;

impl Backward<Flex, 1> for DropoutBackward {
    type State = Site;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let site = ops.state;
        unary::<Flex, _>(ops.parents, ops.node, grads, |dy| scaled(contiguous(dy), &site));
    }
}

/// In place where nobody else has the tensor.
fn scaled(x: FlexTensor, site: &Site) -> FlexTensor {
    let dtype = x.dtype();
    let [_, t, c] = x.shape().dims();
    let mut y = wide_flex(x);
    values_mut(&mut y).par_chunks_mut(LINES * c.max(1)).enumerate().for_each_init(
        || vec![0.0; c],
        |factors, (task, lines)| {
            for (index, line) in lines.chunks_mut(c.max(1)).enumerate() {
                let index = task * LINES + index;
                site.factors(index / t, index % t, c, factors);
                line.iter_mut().zip(&*factors).for_each(|(x, factor)| *x *= factor);
            }
        },
    );
    narrow_flex(y, dtype)
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, FloatDType, TensorData};

    use super::*;
    use crate::dropout::{self, Dropout, Place};
    use crate::fused::checks::{gradient, on_threads, pseudo};

    const SHAPE: [usize; 3] = [2, 37, 21];

    fn site() -> Site {
        Dropout::new(0.3, 1, 2, 3).unwrap().at(4, Place::MlpOutput)
    }

    fn run(drop: impl Fn(Tensor<3>) -> Tensor<3>, dtype: FloatDType) -> [Vec<f32>; 2] {
        let count = SHAPE.iter().product();
        let x = Tensor::<3>::from_data(TensorData::new(pseudo(count, 1, 2.0), SHAPE), &Device::flex()).cast(dtype);
        let untracked = drop(x.clone()).into_data();
        let x = x.autodiff().require_grad();
        let y = drop(x.clone());
        y.clone().inner().into_data().assert_eq(&untracked, true);
        gradient(&x, y, &pseudo(count, 2, 1.0))
    }

    #[test]
    fn both_passes_are_those_of_the_composed_operations_to_the_last_bit() {
        for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
            let fused = run(|x| dropout(x, site()), dtype);
            assert_eq!(fused, run(|x| dropout::composed(x, &site()), dtype), "{dtype:?}");
            assert!(fused.iter().all(|values| values.contains(&0.0)));
        }
        on_threads(|| run(|x| dropout(x, site()), FloatDType::F32).concat());
    }
}
