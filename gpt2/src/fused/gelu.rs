//! GELU in its tanh form and its slope, element by element.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex, TensorMetadata};
use burn::tensor::Tensor;
use comm_core::{Kernel, vectorised};
use rayon::prelude::*;

use super::{contiguous, narrow_flex, plain, tensor, tracked, values, values_mut, wide_flex};
use crate::math;

/// GELU in its tanh form; host tensors only.
pub(crate) fn gelu(x: Tensor<3>) -> Tensor<3> {
    let dtype = x.dtype();
    if !x.is_autodiff() {
        return Tensor::from_primitive::<Flex>(narrow_flex(forward(&wide_flex(plain(x))), dtype));
    }
    let (x, node) = tracked(x);
    let y = narrow_flex(forward(&wide_flex(x.clone())), dtype);
    let y = match GeluBackward.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(x, y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(y)
}

#[derive(Debug)]
struct GeluBackward;

impl Backward<Flex, 1> for GeluBackward {
    type State = FlexTensor;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let x = ops.state;
        unary::<Flex, _>(ops.parents, ops.node, grads, |dy| {
            let dtype = dy.dtype();
            narrow_flex(backward(&wide_flex(x), wide_flex(contiguous(dy))), dtype)
        });
    }
}

/// √(2/π) of the tanh form, doubled: x·(1 + tanh u)/2 = x / (1 + e^−2u).
const TWICE_ROOT: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;
/// Elements a task.
const ELEMENTS: usize = 1 << 14;

fn forward(x: &FlexTensor) -> FlexTensor {
    let xs = values(x);
    let mut ys = vec![0.0; xs.len()];
    ys.par_chunks_mut(ELEMENTS).zip(xs.par_chunks(ELEMENTS)).for_each(|(ys, xs)| vectorised(Forward { ys, xs }));
    tensor(ys, x.shape())
}

fn backward(x: &FlexTensor, mut dy: FlexTensor) -> FlexTensor {
    values_mut(&mut dy)
        .par_chunks_mut(ELEMENTS)
        .zip(values(x).par_chunks(ELEMENTS))
        .for_each(|(grads, xs)| vectorised(Backwards { grads, xs }));
    dy
}

struct Forward<'a> {
    ys: &'a mut [f32],
    xs: &'a [f32],
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (y, x) in self.ys.iter_mut().zip(self.xs) {
            *y = x * gate(*x);
        }
    }
}

/// Multiplies each gradient by the slope at its x.
struct Backwards<'a> {
    grads: &'a mut [f32],
    xs: &'a [f32],
}

impl Kernel for Backwards<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        for (grad, x) in self.grads.iter_mut().zip(self.xs) {
            let gate = gate(*x);
            let slope = TWICE_ROOT * (1.0 + 3.0 * CUBIC * x * x);
            *grad *= gate + x * gate * (1.0 - gate) * slope;
        }
    }
}

#[inline(always)]
fn gate(x: f32) -> f32 {
    1.0 / (1.0 + math::exp(-TWICE_ROOT * x * (1.0 + CUBIC * x * x)))
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::fused::checks::{assert_close, gradient, on_threads, pseudo};

    fn run(x: &[f32], dy: &[f32]) -> [Vec<f32>; 2] {
        let x = Tensor::<3>::from_data(TensorData::new(x.to_vec(), [1, 1, x.len()]), &Device::flex());
        let x = x.autodiff().require_grad();
        gradient(&x, gelu(x.clone()), dy)
    }

    #[test]
    fn values_and_slopes_are_those_of_the_definition() {
        for count in [100, 40_000] {
            let (x, dy) = (pseudo(count, 1, 6.0), pseudo(count, 2, 1.0));
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let tanh = |x: f64| (root * (x + 0.044_715 * x.powi(3))).tanh();
            let slope = |x: f64| {
                let tanh = tanh(x);
                0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * root * (1.0 + 3.0 * 0.044_715 * x * x)
            };
            let expected = [
                x.iter().map(|x| f64::from(*x)).map(|x| 0.5 * x * (1.0 + tanh(x))).collect::<Vec<f64>>(),
                x.iter().zip(&dy).map(|(x, dy)| slope(f64::from(*x)) * f64::from(*dy)).collect(),
            ];
            for (found, expected) in run(&x, &dy).iter().zip(&expected) {
                assert_close(&format!("gelu of {count}"), found, expected, 4e-6);
            }
            on_threads(|| run(&x, &dy).concat());
        }
    }

    #[test]
    fn no_bit_depends_on_the_width_of_vectors() {
        let xs = pseudo(1003, 1, 6.0);
        let [wide, narrow] = [true, false].map(|wide| {
            let (mut ys, mut grads) = (vec![0.0; xs.len()], pseudo(xs.len(), 2, 1.0));
            let forward = Forward { ys: &mut ys, xs: &xs };
            if wide {
                vectorised(forward)
            } else {
                forward.run()
            }
            let backward = Backwards { grads: &mut grads, xs: &xs };
            if wide {
                vectorised(backward)
            } else {
                backward.run()
            }
            [ys, grads].concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        assert_eq!(wide, narrow);
    }
}
