//! Affine maps, layer norm, GELU and causal attention as single operations of the CPU backend, with their own backward passes.
//!
//! Automatic differentiation composes each from half a dozen element-wise operations, and each of those reads and writes a whole tensor
//! and keeps it for the backward pass: on a CPU that, not the products of matrices, is what a small model's step costs. Here a pass
//! over a row does all of it while the row is in cache. Other devices run the composed forms in [`model`](crate::model).
//!
//! Weights are looked up in a [`Resident`] at the moment of use, forward and backward, and are not kept by the graph of operations. So
//! they can leave memory in between, while what the graph tracks are [`empty_leaf`] leaves without contents.
//!
//! Tensors may be of a 16-bit type. Products of matrices run in it; layer norm, softmax and GELU run in f32, and so do sums over rows.
//!
//! Work is cut into tasks of fixed size and partial sums are added in order, so no bit depends on the number of threads.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind, unary};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex, TensorMetadata};
use burn::tensor::{DType, Device, FloatDType, Shape, Tensor, TensorData};
use rayon::prelude::*;

use crate::config::LAYER_NORM_EPSILON;
use crate::math;

/// Rows a task. Part of the result: partial sums over rows are cut here.
const ROWS: usize = 32;
/// Partial sums within a row, so that the loop becomes vector code. Part of the result, too.
const LANES: usize = 16;

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

/// Layer norm of the last axis of `x_btc`, both weights by their leaves in `resident`; host tensors only.
pub(crate) fn layer_norm(
    x_btc: Tensor<3>,
    weight_c: Tensor<1>,
    bias_c: Tensor<1>,
    resident: Option<&Arc<Resident>>,
) -> Tensor<3> {
    let dtype = x_btc.dtype();
    let Some(resident) = resident else {
        let (y, _) = layer_norm_forward(&plain(wide(x_btc)), &plain(wide(weight_c)), &plain(wide(bias_c)));
        return narrow(Tensor::from_primitive::<Flex>(y), dtype);
    };
    let (x, x_node) = tracked(x_btc);
    let (_, weight_node) = tracked(weight_c);
    let (_, bias_node) = tracked(bias_c);
    let (weight, bias) = (wide_flex::<1>(resident.get(weight_node.id())), wide_flex::<1>(resident.get(bias_node.id())));
    let (y, stats) = layer_norm_forward(&wide_flex::<3>(x.clone()), &weight, &bias);
    let y = narrow_flex::<3>(y, dtype);
    let weight_ref = (resident.clone(), weight_node.id());
    let nodes = [x_node, weight_node, bias_node];
    let y = match LayerNormBackward.prepare::<NoCheckpointing>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((x, weight_ref, stats), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(y)
}

/// GELU in its tanh form; host tensors only.
pub(crate) fn gelu(x: Tensor<3>) -> Tensor<3> {
    let dtype = x.dtype();
    if !x.is_autodiff() {
        return narrow(Tensor::from_primitive::<Flex>(gelu_forward(&plain(wide(x)))), dtype);
    }
    let (x, node) = tracked(x);
    let y = narrow_flex::<3>(gelu_forward(&wide_flex::<3>(x.clone())), dtype);
    let y = match GeluBackward.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(x, y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(y)
}

/// Causal attention from the joint projection `[b, t, 3c]` to the mixed values `[b, t, c]`; host tensors only.
pub(crate) fn attention(qkv: Tensor<3>, n_head: usize) -> Tensor<3> {
    if !qkv.is_autodiff() {
        return attention_forward(qkv, n_head).0;
    }
    let (qkv, node) = tracked(qkv);
    let (mixed_btc, probs) = attention_forward(Tensor::from_primitive::<Flex>(qkv.clone()), n_head);
    let mixed = plain(mixed_btc);
    let mixed = match AttentionBackward.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((qkv, plain(probs), n_head), mixed),
        OpsKind::UnTracked(prep) => prep.finish(mixed),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(mixed)
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

#[derive(Debug)]
struct LayerNormBackward;

impl Backward<Flex, 3> for LayerNormBackward {
    /// Input, gain, and each row's mean and inverse standard deviation.
    type State = (FlexTensor, WeightRef, Vec<[f32; 2]>);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = contiguous(grads.consume::<Flex>(&ops.node));
        let dtype = dy.dtype();
        let (x, (resident, weight), stats) = ops.state;
        let (dy, x, weight) = (wide_flex::<3>(dy), wide_flex::<3>(x), wide_flex::<1>(resident.get(weight)));
        let (dx, dweight, dbias) = layer_norm_backward(&dy, &x, &weight, &stats);
        register(
            grads,
            ops.parents.map(|parent| parent.map(|parent| parent.id)),
            [narrow_flex::<3>(dx, dtype), dweight, dbias],
        );
    }
}

#[derive(Debug)]
struct GeluBackward;

impl Backward<Flex, 1> for GeluBackward {
    type State = FlexTensor;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let x = ops.state;
        unary::<Flex, _>(ops.parents, ops.node, grads, |dy| {
            let dtype = dy.dtype();
            narrow_flex::<3>(gelu_backward(&wide_flex::<3>(x), wide_flex::<3>(dy)), dtype)
        });
    }
}

#[derive(Debug)]
struct AttentionBackward;

impl Backward<Flex, 1> for AttentionBackward {
    /// Joint projection, attention weights, number of heads.
    type State = (FlexTensor, FlexTensor, usize);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (qkv, probs, n_head) = ops.state;
        unary::<Flex, _>(ops.parents, ops.node, grads, |dmixed| attention_backward(qkv, probs, dmixed, n_head));
    }
}

fn layer_norm_forward(x: &FlexTensor, weight: &FlexTensor, bias: &FlexTensor) -> (FlexTensor, Vec<[f32; 2]>) {
    let (xs, w, b) = (values(x), values(weight), values(bias));
    let c = w.len();
    let mut ys = vec![0.0; xs.len()];
    let mut stats = vec![[0.0; 2]; xs.len() / c];
    ys.par_chunks_mut(ROWS * c).zip(xs.par_chunks(ROWS * c)).zip(stats.par_chunks_mut(ROWS)).for_each(
        |((ys, xs), stats)| {
            for ((y, x), stat) in ys.chunks_exact_mut(c).zip(xs.chunks_exact(c)).zip(stats) {
                let mean = sum(x, |v| v) / c as f32;
                let variance = sum(x, |v| (v - mean) * (v - mean)) / c as f32;
                let inverse = 1.0 / (variance + LAYER_NORM_EPSILON as f32).sqrt();
                *stat = [mean, inverse];
                for (((y, x), w), b) in y.iter_mut().zip(x).zip(w).zip(b) {
                    *y = (x - mean) * inverse * w + b;
                }
            }
        },
    );
    (tensor(ys, x.shape()), stats)
}

/// With x̂ the normalised row and ĝ = dy·w: dx = (ĝ − mean(ĝ) − x̂·mean(ĝ·x̂)) / σ, dw = Σ dy·x̂, db = Σ dy over rows.
fn layer_norm_backward(
    dy: &FlexTensor,
    x: &FlexTensor,
    weight: &FlexTensor,
    stats: &[[f32; 2]],
) -> (FlexTensor, FlexTensor, FlexTensor) {
    let (dys, xs, w) = (values(dy), values(x), values(weight));
    let c = w.len();
    let mut dxs = vec![0.0; xs.len()];
    let partial: Vec<(Vec<f32>, Vec<f32>)> = dxs
        .par_chunks_mut(ROWS * c)
        .zip(dys.par_chunks(ROWS * c))
        .zip(xs.par_chunks(ROWS * c))
        .zip(stats.par_chunks(ROWS))
        .map(|(((dxs, dys), xs), stats)| {
            let (mut dw, mut db) = (vec![0.0; c], vec![0.0; c]);
            let rows = dxs.chunks_exact_mut(c).zip(dys.chunks_exact(c)).zip(xs.chunks_exact(c));
            for (((dx, dy), x), [mean, inverse]) in rows.zip(stats) {
                // dx holds x̂ until it is overwritten.
                for ((h, x), ((dy, dw), db)) in dx.iter_mut().zip(x).zip(dy.iter().zip(&mut dw).zip(&mut db)) {
                    *h = (x - mean) * inverse;
                    *dw += dy * *h;
                    *db += dy;
                }
                let (along, across) = two_sums(dy, w, dx);
                let (along, across) = (along / c as f32, across / c as f32);
                for ((h, dy), w) in dx.iter_mut().zip(dy).zip(w) {
                    *h = (dy * w - along - *h * across) * inverse;
                }
            }
            (dw, db)
        })
        .collect();
    let (mut dw, mut db) = (vec![0.0; c], vec![0.0; c]);
    for (task_dw, task_db) in &partial {
        add(&mut dw, task_dw);
        add(&mut db, task_db);
    }
    (tensor(dxs, x.shape()), tensor(dw, Shape::new([c])), tensor(db, Shape::new([c])))
}

/// √(2/π) of the tanh form, doubled: x·(1 + tanh u)/2 = x / (1 + e^−2u).
const TWICE_ROOT: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;
/// Elements a task of element-wise work.
const ELEMENTS: usize = 1 << 14;

fn gelu_forward(x: &FlexTensor) -> FlexTensor {
    let xs = values(x);
    let mut ys = vec![0.0; xs.len()];
    ys.par_chunks_mut(ELEMENTS).zip(xs.par_chunks(ELEMENTS)).for_each(|(ys, xs)| {
        for (y, x) in ys.iter_mut().zip(xs) {
            *y = x * gelu_gate(*x);
        }
    });
    tensor(ys, x.shape())
}

fn gelu_backward(x: &FlexTensor, dy: FlexTensor) -> FlexTensor {
    let shape = x.shape();
    let mut grads = into_values(dy);
    grads.par_chunks_mut(ELEMENTS).zip(values(x).par_chunks(ELEMENTS)).for_each(|(grads, xs)| {
        for (grad, x) in grads.iter_mut().zip(xs) {
            let gate = gelu_gate(*x);
            let slope = TWICE_ROOT * (1.0 + 3.0 * CUBIC * x * x);
            *grad *= gate + x * gate * (1.0 - gate) * slope;
        }
    });
    tensor(grads, shape)
}

#[inline(always)]
fn gelu_gate(x: f32) -> f32 {
    1.0 / (1.0 + math::exp(-TWICE_ROOT * x * (1.0 + CUBIC * x * x)))
}

/// Mixed values `[b, t, c]` and attention weights `[1, b, h, t, t]`.
fn attention_forward(qkv: Tensor<3>, n_head: usize) -> (Tensor<3>, Tensor<5>) {
    let ([b, t, c3], dtype) = (qkv.dims(), qkv.dtype());
    let scale = ((n_head as f32) / (c3 / 3) as f32).sqrt();
    let [query, key, value] = heads(qkv, n_head);
    let mut scores = into_values(plain(wide(query.matmul(key.transpose()))));
    each_square(&mut scores, t, |square| {
        for (i, row) in square.chunks_exact_mut(t).enumerate() {
            let (seen, hidden) = row.split_at_mut(i + 1);
            let max = seen.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b)) * scale;
            seen.iter_mut().for_each(|s| *s = math::exp(*s * scale - max));
            let factor = 1.0 / sum(seen, |v| v);
            seen.iter_mut().for_each(|s| *s *= factor);
            hidden.fill(0.0);
        }
    });
    let probs: Tensor<5> = Tensor::from_primitive::<Flex>(tensor(scores, Shape::new([1, b, n_head, t, t])));
    let probs = narrow(probs, dtype);
    let mixed = probs.clone().matmul(value).swap_dims(2, 3).reshape([b, t, c3 / 3]);
    (mixed, probs)
}

fn attention_backward(qkv: FlexTensor, probs: FlexTensor, dmixed: FlexTensor, n_head: usize) -> FlexTensor {
    let qkv: Tensor<3> = Tensor::from_primitive::<Flex>(qkv);
    let ([b, t, c3], dtype) = (qkv.dims(), qkv.dtype());
    let q = c3 / 3 / n_head;
    let scale = 1.0 / (q as f32).sqrt();
    let [query, key, value] = heads(qkv, n_head);
    let dmixed: Tensor<3> = Tensor::from_primitive::<Flex>(contiguous(dmixed));
    let dmixed = dmixed.reshape([1, b, t, n_head, q]).swap_dims(2, 3);
    let mut dscores = into_values(plain(wide(dmixed.clone().matmul(value.transpose()))));
    let wide_probs = wide_flex::<5>(probs.clone());
    let weights = values(&wide_probs);
    dscores.par_chunks_mut(t * t).zip(weights.par_chunks(t * t)).for_each(|(grads, weights)| {
        for (i, (grad, weight)) in grads.chunks_exact_mut(t).zip(weights.chunks_exact(t)).enumerate() {
            let (seen, hidden) = grad.split_at_mut(i + 1);
            let weight = &weight[..i + 1];
            let mean = dot(seen, weight);
            for (g, w) in seen.iter_mut().zip(weight) {
                *g = w * (*g - mean) * scale;
            }
            hidden.fill(0.0);
        }
    });
    drop(wide_probs);
    let dscores: Tensor<5> = Tensor::from_primitive::<Flex>(tensor(dscores, Shape::new([1, b, n_head, t, t])));
    let dscores = narrow(dscores, dtype);
    let probs: Tensor<5> = Tensor::from_primitive::<Flex>(probs);
    let parts = [dscores.clone().matmul(key), dscores.transpose().matmul(query), probs.transpose().matmul(dmixed)]
        .map(|part| plain(wide(part)));
    let parts = [values(&parts[0]), values(&parts[1]), values(&parts[2])];
    // Each is [b, h, t, q]; a row of the result holds (part, h, q).
    let mut dqkv = vec![0.0; b * t * c3];
    dqkv.par_chunks_mut(c3).enumerate().for_each(|(row, out)| {
        let (row_b, row_t) = (row / t, row % t);
        for (slot, out) in out.chunks_exact_mut(q).enumerate() {
            let start = ((row_b * n_head + slot % n_head) * t + row_t) * q;
            out.copy_from_slice(&parts[slot / n_head][start..start + q]);
        }
    });
    narrow_flex::<3>(tensor(dqkv, Shape::new([b, t, c3])), dtype)
}

/// Queries, keys and values as views `[1, b, h, t, q]`: products take strides, so nothing is copied.
fn heads(qkv: Tensor<3>, n_head: usize) -> [Tensor<5>; 3] {
    let [b, t, c3] = qkv.dims();
    let all: Tensor<5> = qkv.reshape([b, t, 3, n_head, c3 / 3 / n_head]).permute([2, 0, 3, 1, 4]);
    [0, 1, 2].map(|part| all.clone().narrow(0, part, 1))
}

fn each_square(values: &mut [f32], t: usize, work: impl Fn(&mut [f32]) + Sync + Send) {
    values.par_chunks_mut(t * t).for_each(work);
}

#[inline(always)]
fn sum(row: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane += term(*x);
        }
    }
    lanes.iter().sum::<f32>() + rest.iter().map(|x| term(*x)).sum::<f32>()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    lanes.iter().sum::<f32>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f32>()
}

/// Σ a·b and Σ a·b·c.
fn two_sums(a: &[f32], b: &[f32], c: &[f32]) -> (f32, f32) {
    let (mut first, mut second) = ([0.0f32; LANES], [0.0f32; LANES]);
    let (a, a_rest) = a.as_chunks::<LANES>();
    let (b, b_rest) = b.as_chunks::<LANES>();
    let (c, c_rest) = c.as_chunks::<LANES>();
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for lane in 0..LANES {
            let product = a[lane] * b[lane];
            first[lane] += product;
            second[lane] += product * c[lane];
        }
    }
    let (mut one, mut two) = (first.iter().sum::<f32>(), second.iter().sum::<f32>());
    for ((a, b), c) in a_rest.iter().zip(b_rest).zip(c_rest) {
        one += a * b;
        two += a * b * c;
    }
    (one, two)
}

fn add(total: &mut [f32], part: &[f32]) {
    for (total, part) in total.iter_mut().zip(part) {
        *total += part;
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

fn wide_flex<const D: usize>(tensor: FlexTensor) -> FlexTensor {
    narrow_flex::<D>(tensor, DType::F32)
}

fn narrow_flex<const D: usize>(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    if tensor.dtype() == dtype { tensor } else { plain(narrow(Tensor::<D>::from_primitive::<Flex>(tensor), dtype)) }
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

fn into_values(tensor: FlexTensor) -> Vec<f32> {
    tensor.into_data().try_into_vec::<f32>().expect("element-wise work runs in f32")
}

fn tensor(values: Vec<f32>, shape: Shape) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, shape))
}
