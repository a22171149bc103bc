//! Affine maps, layer norm, GELU, causal attention and the head as single operations of the CPU backend, with their own backward passes.
//!
//! Automatic differentiation composes each from half a dozen element-wise operations, and each of those reads and writes a whole tensor
//! and keeps it for the backward pass: on a CPU that, not the products of matrices, is what a small model's step costs. Here a pass
//! over a row does all of it while the row is in cache. Other devices run the composed forms in [`model`](crate::model).
//!
//! Weights are looked up in a [`Resident`] at the moment of use, forward and backward, and are not kept by the graph of operations. So
//! they can leave memory in between, while what the graph tracks are [`empty_leaf`] leaves without contents.
//!
//! Tensors may be of a 16-bit type. The products of affine maps run in it; layer norm, GELU, attention and the head run in f32 and round
//! their results, and so do sums over rows.
//!
//! Work is cut into tasks of fixed size and partial sums are added in order, so no bit depends on the number of threads. Loops are
//! [`Kernel`](comm_core::Kernel)s, compiled for the widest vectors that the machine has; their bits do not depend on that either.

mod attention;
#[cfg(test)]
mod checks;
mod gelu;
mod head;
mod lanes;
mod layer_norm;
mod sys;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex, TensorMetadata};
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor, TensorData};
use comm_core::{Float16, bf16, f16};
use rayon::prelude::*;

pub(crate) use attention::attention;
pub(crate) use gelu::gelu;
pub(crate) use head::{HeadGrads, head_gradients, head_loss};
pub(crate) use layer_norm::layer_norm;

/// The weights of one segment while they are in memory, by the leaf that stands for them in a graph.
#[derive(Debug, Default)]
pub(crate) struct Resident(Mutex<HashMap<NodeId, FlexTensor>>);

impl Resident {
    /// Puts `weight` where operations on `leaf` will look for it.
    pub(crate) fn insert<const D: usize>(&self, leaf: NodeId, weight: Tensor<D>) {
        self.lock().insert(leaf, plain(weight));
    }

    /// Lets go of all weights.
    pub(crate) fn clear(&self) {
        self.lock().clear();
    }

    fn get(&self, leaf: NodeId) -> FlexTensor {
        self.lock().get(&leaf).cloned().expect("a segment's weights are in memory while its pass runs")
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<NodeId, FlexTensor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A leaf without contents that collects the gradient of a weight.
pub(crate) fn empty_leaf<const D: usize>(device: &Device) -> Tensor<D> {
    Tensor::zeros([1; D], device).autodiff().require_grad()
}

/// What a leaf is known by.
pub(crate) fn leaf_id<const D: usize>(leaf: Tensor<D>) -> NodeId {
    leaf.try_into_primitive::<Autodiff<Flex>>().expect("leaves are tracked host tensors").id()
}

/// `x_bti · weight_io + bias_o`, both weights by their leaves in `resident`; host tensors only.
pub(crate) fn linear(
    x_bti: Tensor<3>,
    weight_io: Tensor<2>,
    bias_o: Tensor<1>,
    resident: Option<&Arc<Resident>>,
) -> Tensor<3> {
    let Some(resident) = resident else {
        return burn::tensor::module::linear(x_bti, weight_io, Some(bias_o));
    };
    let (x, x_node) = tracked(x_bti);
    let (_, weight_node) = tracked(weight_io);
    let (_, bias_node) = tracked(bias_o);
    let (weight, bias) = (resident.get(weight_node.id()), resident.get(bias_node.id()));
    let y = burn::tensor::module::linear(
        Tensor::<3>::from_primitive::<Flex>(x.clone()),
        Tensor::from_primitive::<Flex>(weight),
        Some(Tensor::from_primitive::<Flex>(bias)),
    );
    let weight_ref = (resident.clone(), weight_node.id());
    let y = match LinearBackward.prepare::<NoCheckpointing>([x_node, weight_node, bias_node]).compute_bound().stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((x, weight_ref), plain(y)),
        OpsKind::UnTracked(prep) => prep.finish(plain(y)),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(y)
}

/// Where a backward pass finds a weight: the resident weights, and its key there.
type WeightRef = (Arc<Resident>, NodeId);

#[derive(Debug)]
struct LinearBackward;

impl Backward<Flex, 3> for LinearBackward {
    /// Input, and the weight.
    type State = (FlexTensor, WeightRef);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy: Tensor<3> = Tensor::from_primitive::<Flex>(contiguous(grads.consume::<Flex>(&ops.node)));
        let (x, (resident, weight)) = ops.state;
        let weight_io: Tensor<2> = Tensor::from_primitive::<Flex>(resident.get(weight));
        let x: Tensor<3> = Tensor::from_primitive::<Flex>(x);
        let [b, t, o] = dy.dims();
        let i = x.dims()[2];
        let (dy_no, x_ni): (Tensor<2>, Tensor<2>) = (dy.reshape([b * t, o]), x.reshape([b * t, i]));
        let dx_bti: Tensor<3> = dy_no.clone().matmul(weight_io.transpose()).reshape([b, t, i]);
        let dweight_io = x_ni.transpose().matmul(dy_no.clone());
        let dbias_o: Tensor<1> = wide(dy_no).sum_dim(0).reshape([o]);
        register(
            grads,
            ops.parents.map(|parent| parent.map(|parent| parent.id)),
            [plain(dx_bti), plain(dweight_io), plain(dbias_o)],
        );
    }
}

/// The tensor in f32.
fn wide<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    narrow(tensor, DType::F32)
}

/// The tensor in `dtype`; itself where it is in that already.
fn narrow<const D: usize>(tensor: Tensor<D>, dtype: DType) -> Tensor<D> {
    if tensor.dtype() == dtype { tensor } else { tensor.cast(FloatDType::from(dtype)) }
}

/// The values in f32.
fn wide_flex(tensor: FlexTensor) -> FlexTensor {
    match tensor.dtype() {
        DType::BF16 => widened::<bf16>(&contiguous(tensor)),
        DType::F16 => widened::<f16>(&contiguous(tensor)),
        _ => tensor,
    }
}

/// Values of f32 in `dtype`.
fn narrow_flex(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    match dtype {
        DType::BF16 => narrowed::<bf16>(&contiguous(tensor)),
        DType::F16 => narrowed::<f16>(&contiguous(tensor)),
        _ => tensor,
    }
}

fn register(grads: &mut Gradients, parents: [Option<NodeId>; 3], values: [FlexTensor; 3]) {
    for (parent, grad) in parents.into_iter().zip(values) {
        if let Some(parent) = parent {
            grads.register::<Flex>(parent, grad);
        }
    }
}

fn plain<const D: usize>(tensor: Tensor<D>) -> FlexTensor {
    let tensor = tensor.try_into_primitive::<Flex>().expect("fused operations are called for host tensors only");
    contiguous(tensor)
}

fn tracked<const D: usize>(tensor: Tensor<D>) -> (FlexTensor, NodeGuard) {
    let tensor =
        tensor.try_into_primitive::<Autodiff<Flex>>().expect("all inputs of a fused operation are tracked, or none");
    let (tensor, node) = tensor.into_parts();
    (contiguous(tensor), node)
}

fn contiguous(tensor: FlexTensor) -> FlexTensor {
    // Without a copy where it already is.
    tensor.to_contiguous()
}

fn values(tensor: &FlexTensor) -> &[f32] {
    &tensor.storage::<f32>()[..tensor.shape().num_elements()]
}

/// To be changed in place, or in a copy where others share them.
fn values_mut(tensor: &mut FlexTensor) -> &mut [f32] {
    let count = tensor.shape().num_elements();
    &mut tensor.storage_mut::<f32>()[..count]
}

fn tensor(values: Vec<f32>, shape: Shape) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}

/// Values that are converted in one task.
const CONVERTED: usize = 1 << 14;

fn widened<T: Float16 + burn::tensor::Element>(narrow: &FlexTensor) -> FlexTensor {
    let shape = narrow.shape();
    let narrow = &narrow.storage::<T>()[..shape.num_elements()];
    let mut wide = vec![0.0; narrow.len()];
    let tasks = wide.par_chunks_mut(CONVERTED).zip(narrow.par_chunks(CONVERTED));
    tasks.for_each(|(wide, narrow)| T::widen(narrow, wide));
    tensor(wide, shape)
}

fn narrowed<T: Float16 + burn::tensor::Element>(wide: &FlexTensor) -> FlexTensor {
    let wide_values = values(wide);
    let mut narrow = vec![T::zeroed(); wide_values.len()];
    let tasks = narrow.par_chunks_mut(CONVERTED).zip(wide_values.par_chunks(CONVERTED));
    tasks.for_each(|(narrow, wide)| T::narrow(wide, narrow));
    FlexTensor::from_data(TensorData::new(narrow, wide.shape()))
}
