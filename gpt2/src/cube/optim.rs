//! The optimizer's passes over all elements as one kernel each.

use std::ops::Range;

use burn::tensor::{FloatDType, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use super::kernels::{self, AdamWScalarsLaunch, UNITS};
use super::{element, tensor};
use crate::optim::Decay;

/// Elements that one unit of a kernel takes, until there are [`CUBES`].
const EACH: usize = 4;
/// Most cubes of a kernel: enough to fill any device. Part of the result of sums.
const CUBES: usize = 1024;

/// What a step of AdamW does: see [`AdamW`](crate::optim::AdamW).
pub(crate) struct AdamWStep {
    pub(crate) decay: Decay,
    pub(crate) root_correction: f32,
    pub(crate) epsilon: f32,
    pub(crate) step_size: f32,
    /// Runs that tile the parameters, and what the step leaves of an element of each before its update.
    pub(crate) keep: Vec<(Range<usize>, f32)>,
}

/// Parameters, and the running means of gradients and of their squares.
pub(crate) type State = [Tensor<1>; 3];

/// One step of AdamW. `grads` follow one another and are as long as the parameters together, in any floating-point type.
pub(crate) fn adamw(state: State, grads: Vec<Tensor<1>>, step: &AdamWStep) -> State {
    let [params, means, squares] = state.map(vector);
    let (means, squares) = (super::to_write(means), super::to_write(squares));
    let updated = super::empty(&params, params.meta.shape().clone(), params.dtype);
    let mut start = 0;
    for grads in grads {
        let grads = vector(grads);
        let own = start..start + grads.meta.num_elements();
        for (run, keep) in &step.keep {
            let (begin, end) = (run.start.max(own.start), run.end.min(own.end));
            if begin >= end {
                continue;
            }
            kernels::adamw::launch(
                &params.client,
                cubes(end - begin),
                CubeDim::new_1d(UNITS as u32),
                params.required_address_type().max(grads.required_address_type()),
                params.clone().into_tensor_arg(),
                updated.clone().into_tensor_arg(),
                means.clone().into_tensor_arg(),
                squares.clone().into_tensor_arg(),
                grads.clone().into_tensor_arg(),
                begin,
                begin - own.start,
                end - begin,
                AdamWScalarsLaunch::new(
                    step.decay.grad_factor,
                    step.decay.mean_weight,
                    step.decay.square_decay,
                    step.decay.square_weight,
                    step.root_correction,
                    step.epsilon,
                    step.step_size,
                    *keep,
                ),
                element(&grads),
            );
        }
        start = own.end;
    }
    [updated, means, squares].map(tensor)
}

/// Numbers whose sum is Σ (`unscale` · v)² over all values of `pieces`, in f32; `None` of no values. The same from run to run.
pub(crate) fn sums_of_squares(pieces: Vec<Tensor<1>>, unscale: f32) -> Option<Tensor<1>> {
    let pieces: Vec<CubeTensor> = pieces.into_iter().filter(|piece| piece.dims()[0] > 0).map(vector).collect();
    let counts: Vec<usize> = pieces.iter().map(|piece| cube_count(piece.meta.num_elements())).collect();
    let first = pieces.first()?;
    let sums = super::empty(first, [counts.iter().sum::<usize>()].into(), FloatDType::F32.into());
    let mut slot = 0;
    for (piece, count) in pieces.iter().zip(counts) {
        kernels::sum_of_squares::launch(
            &piece.client,
            CubeCount::Static(count as u32, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            piece.required_address_type(),
            piece.clone().into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            slot,
            unscale,
            element(piece),
        );
        slot += count;
    }
    Some(tensor(sums))
}

fn cube_count(elements: usize) -> usize {
    elements.div_ceil(UNITS * EACH).min(CUBES)
}

fn cubes(elements: usize) -> CubeCount {
    CubeCount::Static(cube_count(elements) as u32, 1, 1)
}

fn vector(tensor: Tensor<1>) -> CubeTensor {
    let tensor = tensor.try_into_primitive::<CubeBackend>();
    into_contiguous(tensor.expect("called for devices that these operations serve only"))
}
