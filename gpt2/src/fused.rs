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
mod dropout;
mod gelu;
mod head;
mod lanes;
mod layer_norm;
mod linear;
mod sys;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::flex::{FlexTensor, Layout};
use burn::backend::{Autodiff, Flex, TensorMetadata};
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor, TensorData};
use comm_core::{Float16, bf16, f16};
use rayon::prelude::*;

pub(crate) use attention::attention;
pub(crate) use dropout::dropout;
pub(crate) use gelu::gelu;
pub(crate) use head::{HeadGrads, head_gradients, head_loss};
pub(crate) use layer_norm::layer_norm;
pub(crate) use linear::linear;
pub(crate) use sys::PartSums;

use lanes::add;

/// The weights of one segment while they are in memory, by the leaf that stands for them in a graph; and in a backward pass their gradients,
/// one after another in one vector, in the order in which the leaves came.
#[derive(Debug, Default)]
pub(crate) struct Resident(Mutex<Contents>);

#[derive(Debug, Default)]
struct Contents {
    leaves: HashMap<NodeId, Leaf>,
    /// Elements of each, in the order in which they came.
    lengths: Vec<usize>,
    gradients: Option<PartSums>,
}

#[derive(Debug)]
struct Leaf {
    /// Its part of the gradients.
    part: usize,
    /// `None` while it is not in memory.
    weight: Option<FlexTensor>,
}

impl Resident {
    /// Puts `weight` where operations on `leaf` will look for it.
    pub(crate) fn insert<const D: usize>(&self, leaf: NodeId, weight: Tensor<D>) {
        let (len, weight) = (weight.shape().num_elements(), Some(plain(weight)));
        let contents = &mut *self.lock();
        match contents.leaves.get_mut(&leaf) {
            Some(known) => known.weight = weight,
            None => {
                contents.leaves.insert(leaf, Leaf { part: contents.lengths.len(), weight });
                contents.lengths.push(len);
            }
        }
    }

    /// Lets go of all weights.
    pub(crate) fn clear(&self) {
        self.lock().leaves.values_mut().for_each(|leaf| leaf.weight = None);
    }

    /// Elements of each weight, in the order in which they came first.
    pub(crate) fn lengths(&self) -> std::vec::IntoIter<usize> {
        self.lock().lengths.clone().into_iter()
    }

    /// Has the backward pass add gradients to `gradients`, of which each leaf has a part.
    pub(crate) fn collect_in(&self, gradients: PartSums) {
        self.lock().gradients = Some(gradients);
    }

    /// The gradients; `None` where some did not come.
    pub(crate) fn collected(&self) -> Option<Vec<f32>> {
        self.lock().gradients.take()?.finish()
    }

    fn get(&self, leaf: NodeId) -> FlexTensor {
        let weight = self.lock().leaves.get(&leaf).and_then(|leaf| leaf.weight.clone());
        weight.expect("a segment's weights are in memory while its pass runs")
    }

    /// Has `add` add to a leaf's part of the gradients.
    fn add_gradient(&self, leaf: NodeId, add: impl FnOnce(&mut PartSums, usize)) {
        let taken = {
            let mut contents = self.lock();
            contents.leaves.get(&leaf).map(|leaf| leaf.part).zip(contents.gradients.take())
        };
        let (part, mut gradients) = taken.expect("a backward pass has a place for the gradients of its weights");
        // Not with the lock held: threads share the work.
        add(&mut gradients, part);
        self.lock().gradients = Some(gradients);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Contents> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A leaf without contents that stands for a weight.
pub(crate) fn empty_leaf<const D: usize>(device: &Device) -> Tensor<D> {
    Tensor::zeros([1; D], device).autodiff().require_grad()
}

/// What a leaf is known by.
pub(crate) fn leaf_id<const D: usize>(leaf: Tensor<D>) -> NodeId {
    leaf.try_into_primitive::<Autodiff<Flex>>().expect("leaves are tracked host tensors").id()
}

/// The elements of a tensor of this shape within a flat one of f32, without a copy.
pub(crate) fn view<const D: usize>(flat: &FlexTensor, shape: Shape, start: usize) -> Tensor<D> {
    let strides = Layout::contiguous(shape.clone()).strides().to_vec();
    let layout = Layout::new(shape, strides, start);
    Tensor::from_primitive::<Flex>(FlexTensor::from_arc(flat.data_arc(), layout, DType::F32))
}

/// The vectors of `tokens`, `[b, t]`, in the table `wte_vc`, and of their positions from `start` on in `wpe_tc`; host tensors of f32 only.
pub(crate) fn embedding(
    wte_vc: Tensor<2>,
    wpe_tc: Tensor<2>,
    tokens: &[i32],
    start: usize,
    [b, t]: [usize; 2],
) -> Tensor<3> {
    let (wte, wpe) = (plain(wte_vc), plain(wpe_tc));
    let c = wte.shape()[1];
    let (wte, wpe) = (values(&wte), values(&wpe));
    let mut out = Vec::with_capacity(b * t * c);
    for (index, token) in tokens.iter().enumerate() {
        let (token, position) = (&wte[*token as usize * c..][..c], &wpe[(start + index % t) * c..][..c]);
        out.extend(token.iter().zip(position).map(|(token, position)| token + position));
    }
    Tensor::from_primitive::<Flex>(tensor(out, Shape::new([b, t, c])))
}

/// Adds the gradient of the token table's lookup to the first part of `sums`, and that of the position table's to the second; `dx_btc` is a
/// host tensor in f32.
pub(crate) fn add_embedding_gradient(sums: &mut PartSums, tokens: &[i32], dx_btc: Tensor<3>) {
    let [_, t, c] = dx_btc.dims();
    let dx = plain(dx_btc);
    sums.add_by(0, |table| {
        for (token, row) in tokens.iter().zip(values(&dx).chunks_exact(c)) {
            let start = *token as usize * c;
            add(&mut table[start..start + c], row);
        }
    });
    sums.add_by(1, |table| values(&dx).chunks_exact(t * c).for_each(|rows| add(&mut table[..t * c], rows)));
}

/// Where a backward pass finds a weight: the resident weights, and its key there.
type WeightRef = (Arc<Resident>, NodeId);

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

/// Without a copy where it already is, wherever in its memory it begins.
fn contiguous(tensor: FlexTensor) -> FlexTensor {
    if tensor.is_contiguous() { tensor } else { tensor.to_contiguous() }
}

fn values(tensor: &FlexTensor) -> &[f32] {
    elements(tensor)
}

fn elements<T: burn::tensor::Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[T] {
    tensor.as_slice().expect("fused operations know the types of their tensors, which are in one piece")
}

/// To be changed in place, or in a copy where others share them.
fn values_mut(tensor: &mut FlexTensor) -> &mut [f32] {
    let (start, count) = (tensor.layout().start_offset(), tensor.shape().num_elements());
    &mut tensor.storage_mut::<f32>()[start..start + count]
}

fn tensor(values: Vec<f32>, shape: Shape) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}

/// Values that are converted in one task.
const CONVERTED: usize = 1 << 14;

fn widened<T: Float16 + burn::tensor::Element>(narrow: &FlexTensor) -> FlexTensor {
    let shape = narrow.shape();
    let narrow = elements::<T>(narrow);
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
