//! Layer norm, GELU, attention's softmax and cross entropy as single kernels of the devices for which kernels are generated: CUDA, and what
//! wgpu reaches.
//!
//! Composed of tensor operations each is half a dozen kernels and more, forward, and twice that backward, and every one of them reads
//! and writes the whole tensor. Such operations are bound by memory, and the largest tensors of a step are theirs: the attention
//! scores and the logits. Here each is one kernel, which takes a row while it is in cache. It also leaves fewer kernels to compile before
//! the first step. Products of matrices stay the backend's.
//!
//! With the feature `fusion` the backend joins the composed operations by itself, and these are not used.

mod kernels;
pub(crate) mod optim;
#[cfg(all(test, feature = "wgpu"))]
mod tests;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads as autodiff;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind, unary};
use burn::tensor::{DType, Device, Gradients, Int, Shape, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::ir::ElemType;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use crate::config::LAYER_NORM_EPSILON;
use crate::dropout::Site;
use kernels::{DropoutScalarsLaunch, UNITS};

/// Most partial sums over rows that a backward pass of layer norm leaves. Part of the result.
const PARTS: usize = 1024;

/// Widest layer norm whose partial sums fit into what every device lets a cube share, 16 KiB, beside the kernel's own.
const HELD: usize = 1984;

/// Whether these operations are for the tensors of `device`.
pub(crate) fn serves(device: &Device) -> bool {
    device.clone().without_autodiff() != Device::flex()
}

/// Layer norm of the last axis.
pub(crate) fn layer_norm(x_btc: Tensor<3>, weight_c: Tensor<1>, bias_c: Tensor<1>) -> Tensor<3> {
    if !x_btc.is_autodiff() {
        let (y, _) = layer_norm_forward(&plain(x_btc), &plain(weight_c), &plain(bias_c));
        return tensor(y);
    }
    let ((x, x_node), (weight, weight_node), (bias, bias_node)) = (tracked(x_btc), tracked(weight_c), tracked(bias_c));
    let (y, stats) = layer_norm_forward(&x, &weight, &bias);
    let nodes = [x_node, weight_node, bias_node];
    let y = match LayerNormBackward.prepare::<NoCheckpointing>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((x, weight, stats), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Autodiff<CubeBackend>>(y)
}

/// GELU in its tanh form.
pub(crate) fn gelu(x: Tensor<3>) -> Tensor<3> {
    if !x.is_autodiff() {
        return tensor(gelu_forward(&plain(x)));
    }
    let (x, node) = tracked(x);
    let y = gelu_forward(&x);
    let y = match GeluBackward.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(x, y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Autodiff<CubeBackend>>(y)
}

/// `[b, t, c]` with its elements times their factors.
pub(crate) fn dropout(x: Tensor<3>, site: Site) -> Tensor<3> {
    let [_, t, _] = x.dims();
    if !x.is_autodiff() {
        return tensor(scaled(plain(x), t, &site));
    }
    let (x, node) = tracked(x);
    let y = scaled(x, t, &site);
    let y = match DropoutBackward.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((t, site), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Autodiff<CubeBackend>>(y)
}

/// Causal attention from the joint projection `[b, t, 3c]` to the mixed values `[b, t, c]`, with weights dropped where there is a `site`.
pub(crate) fn attention(qkv: Tensor<3>, n_head: usize, site: Option<Site>) -> Tensor<3> {
    if !qkv.is_autodiff() {
        let (mixed_btc, _) = attention_forward(&heads(plain(qkv), n_head), site.as_ref());
        return mixed_btc;
    }
    let (qkv, node) = tracked(qkv);
    let heads = heads(qkv, n_head);
    let (mixed_btc, weights_bhtt) = attention_forward(&heads, site.as_ref());
    let mixed = plain(mixed_btc);
    let mixed = match AttentionBackward.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((heads, plain(weights_bhtt), site), mixed),
        OpsKind::UnTracked(prep) => prep.finish(mixed),
    };
    Tensor::from_primitive::<Autodiff<CubeBackend>>(mixed)
}

/// Starts the backward pass of `result`, whose gradient is `upstream`; a product and a sum that no kernel computes.
pub(crate) fn backward(result: Tensor<3>, upstream: Tensor<3>) -> Gradients {
    let (result, node) = tracked(result);
    let upstream = upstream.try_into_primitive::<CubeBackend>().expect("the gradient is on the device of its tensor");
    let root = empty(&result, Shape::new([1]), result.dtype);
    let root = match UpstreamBackward.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish(upstream, root),
        OpsKind::UnTracked(prep) => prep.finish(root),
    };
    Tensor::<1>::from_primitive::<Autodiff<CubeBackend>>(root).backward()
}

/// −ln softmax(logits)[target] of each row, in f32; and with `row_scale`, in place of the logits and in their type, the gradient of
/// `row_scale` times the sum of these. Targets lie in the vocabulary, the first `v` columns; the gradient of the others is zero.
pub(crate) fn cross_entropy(
    logits_nv: Tensor<2>,
    v: usize,
    targets_n: Tensor<1, Int>,
    row_scale: Option<f32>,
) -> (Tensor<1>, Tensor<2>) {
    let logits = plain(logits_nv);
    let logits = if row_scale.is_some() { to_write(logits) } else { logits };
    let targets = targets_n.try_into_primitive::<CubeBackend>().expect("targets lie on the device of the logits");
    let targets = into_contiguous(targets);
    let losses = empty(&logits, Shape::new([rows(&logits)]), DType::F32);
    launch(&logits, rows(&logits), &[&logits], |client, count, dim, address| {
        kernels::cross_entropy::launch(
            client,
            count,
            dim,
            address,
            by_rows(&logits),
            targets.clone().into_tensor_arg(),
            losses.clone().into_tensor_arg(),
            v,
            row_scale.unwrap_or_default(),
            row_scale.is_some(),
            [element(&logits), element(&targets)],
        );
    });
    (tensor(losses), tensor(logits))
}

#[derive(Debug)]
struct UpstreamBackward;

impl Backward<CubeBackend, 1> for UpstreamBackward {
    /// The gradient from above.
    type State = CubeTensor;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut autodiff::Gradients, _: &mut Checkpointer) {
        let upstream = ops.state;
        unary::<CubeBackend, _>(ops.parents, ops.node, grads, |_| upstream);
    }
}

#[derive(Debug)]
struct LayerNormBackward;

impl Backward<CubeBackend, 3> for LayerNormBackward {
    /// Input, gain, and each row's mean and inverse standard deviation.
    type State = (CubeTensor, CubeTensor, CubeTensor);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut autodiff::Gradients, _: &mut Checkpointer) {
        let dy = grads.consume::<CubeBackend>(&ops.node);
        let (x, weight, stats) = ops.state;
        let [dx, dweight, dbias] = layer_norm_backward(dy, &x, &weight, &stats);
        for (parent, grad) in ops.parents.into_iter().zip([dx, dweight, dbias]) {
            if let Some(parent) = parent {
                grads.register::<CubeBackend>(parent.id, grad);
            }
        }
    }
}

#[derive(Debug)]
struct GeluBackward;

impl Backward<CubeBackend, 1> for GeluBackward {
    type State = CubeTensor;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut autodiff::Gradients, _: &mut Checkpointer) {
        let x = ops.state;
        unary::<CubeBackend, _>(ops.parents, ops.node, grads, |dy| {
            debug_assert_eq!(dy.dtype, x.dtype, "a kernel reads them as one type");
            let gradients = to_write(dy);
            launch(&gradients, rows(&gradients), &[&gradients, &x], |client, count, dim, address| {
                kernels::gelu_backward::launch(
                    client,
                    count,
                    dim,
                    address,
                    by_rows(&gradients),
                    by_rows(&x),
                    element(&gradients),
                );
            });
            gradients
        });
    }
}

#[derive(Debug)]
struct DropoutBackward;

impl Backward<CubeBackend, 1> for DropoutBackward {
    /// Lines of a sequence, and what is dropped.
    type State = (usize, Site);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut autodiff::Gradients, _: &mut Checkpointer) {
        let (lines, site) = ops.state;
        unary::<CubeBackend, _>(ops.parents, ops.node, grads, |dy| scaled(dy, lines, &site));
    }
}

#[derive(Debug)]
struct AttentionBackward;

impl Backward<CubeBackend, 1> for AttentionBackward {
    /// What [`heads`] gave, the attention weights before any is dropped, and by what some are.
    type State = (CubeTensor, CubeTensor, Option<Site>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut autodiff::Gradients, _: &mut Checkpointer) {
        let (heads, weights, site) = ops.state;
        unary::<CubeBackend, _>(ops.parents, ops.node, grads, |dmixed| {
            plain(attention_backward(&heads, weights, tensor(dmixed), site.as_ref()))
        });
    }
}

/// Mixed values `[b, t, c]`, and attention weights `[b, h, t, t]` before any is dropped.
fn attention_forward(heads: &CubeTensor, site: Option<&Site>) -> (Tensor<3>, Tensor<4>) {
    let [query, key, value] = parts(heads);
    let [b, n_head, t, q] = query.dims();
    let weights_bhtt: Tensor<4> = tensor(causal_softmax(plain(query.matmul(key.transpose())), scale(q)));
    let mixed_bhtq = weights_left(weights_bhtt.clone(), site).matmul(value);
    (mixed_bhtq.swap_dims(1, 2).reshape([b, t, n_head * q]), weights_bhtt)
}

/// The gradient with respect to the joint projection.
fn attention_backward(
    heads: &CubeTensor,
    weights: CubeTensor,
    dmixed_btc: Tensor<3>,
    site: Option<&Site>,
) -> Tensor<3> {
    let [query, key, value] = parts(heads);
    let [b, n_head, t, q] = query.dims();
    let dmixed_bhtq: Tensor<4> = tensor(plain(dmixed_btc.reshape([b, t, n_head, q]).swap_dims(1, 2)));
    let dweights = plain(weights_left(dmixed_bhtq.clone().matmul(value.transpose()), site));
    let dscores_bhtt: Tensor<4> = tensor(causal_softmax_backward(dweights, &weights, scale(q)));
    let weights_bhtt = weights_left(tensor(weights), site);
    let parts = [
        dscores_bhtt.clone().matmul(key),
        dscores_bhtt.transpose().matmul(query),
        weights_bhtt.transpose().matmul(dmixed_bhtq),
    ];
    let parts_bt1hq = parts.map(|part_bhtq| part_bhtq.swap_dims(1, 2).unsqueeze_dim::<5>(2));
    Tensor::cat(parts_bt1hq.into(), 2).reshape([b, t, 3 * n_head * q])
}

/// Attention weights, or their gradients, without those that are dropped.
fn weights_left(weights_bhtt: Tensor<4>, site: Option<&Site>) -> Tensor<4> {
    let Some(site) = site else { return weights_bhtt };
    let [_, n_head, t, _] = weights_bhtt.dims();
    tensor(scaled(plain(weights_bhtt), n_head * t, site))
}

/// The elements times their factors; a sequence has so many `lines`.
fn scaled(values: CubeTensor, lines: usize, site: &Site) -> CubeTensor {
    let values = to_write(values);
    let (dropout, layer) = (site.dropout, site.layer);
    launch(&values, rows(&values), &[&values], |client, count, dim, address| {
        kernels::dropout::launch(
            client,
            count,
            dim,
            address,
            by_rows(&values),
            lines,
            DropoutScalarsLaunch::new(
                dropout.key[0],
                dropout.key[1],
                dropout.first,
                layer,
                dropout.step,
                dropout.threshold,
                dropout.factor,
            ),
            element(&values),
        );
    });
    values
}

/// Queries, keys and values, `[3, b, h, t, q]`. One copy: of views with permuted axes each product would make its own.
fn heads(qkv: CubeTensor, n_head: usize) -> CubeTensor {
    let qkv: Tensor<3> = tensor(qkv);
    let [b, t, c3] = qkv.dims();
    plain(qkv.reshape([b, t, 3, n_head, c3 / 3 / n_head]).permute([2, 0, 3, 1, 4]))
}

/// What [`heads`] gave, taken apart.
fn parts(heads: &CubeTensor) -> [Tensor<4>; 3] {
    let all: Tensor<5> = tensor(heads.clone());
    [0, 1, 2].map(|part| all.clone().narrow(0, part, 1).squeeze_dim::<4>(0))
}

fn scale(q: usize) -> f32 {
    1.0 / (q as f32).sqrt()
}

/// The normalised rows, and each row's mean and inverse standard deviation.
fn layer_norm_forward(x: &CubeTensor, weight: &CubeTensor, bias: &CubeTensor) -> (CubeTensor, CubeTensor) {
    debug_assert_eq!([weight.dtype, bias.dtype], [x.dtype; 2], "a kernel reads them as one type");
    let y = empty(x, x.meta.shape().clone(), x.dtype);
    let stats = empty(x, Shape::new([rows(x), 2]), DType::F32);
    launch(x, rows(x), &[x, &y], |client, count, dim, address| {
        kernels::layer_norm::launch(
            client,
            count,
            dim,
            address,
            by_rows(x),
            weight.clone().into_tensor_arg(),
            bias.clone().into_tensor_arg(),
            by_rows(&y),
            stats.clone().into_tensor_arg(),
            LAYER_NORM_EPSILON as f32,
            element(x),
        );
    });
    (y, stats)
}

/// The gradients of input, gain and offset; the last two in f32.
fn layer_norm_backward(dy: CubeTensor, x: &CubeTensor, weight: &CubeTensor, stats: &CubeTensor) -> [CubeTensor; 3] {
    debug_assert_eq!([weight.dtype, dy.dtype], [x.dtype; 2], "a kernel reads them as one type");
    let gradients = to_write(dy);
    let (parts, c) = (rows(x).min(PARTS), columns(x));
    let sums = empty(x, Shape::new([2 * parts, c]), DType::F32);
    launch(x, parts, &[&gradients, x], |client, count, dim, address| {
        kernels::layer_norm_backward::launch(
            client,
            count,
            dim,
            address,
            by_rows(&gradients),
            by_rows(x),
            weight.clone().into_tensor_arg(),
            stats.clone().into_tensor_arg(),
            sums.clone().into_tensor_arg(),
            if c <= HELD { c } else { 0 },
            element(x),
        );
    });
    let sums: Tensor<3> = tensor::<2>(sums).reshape([2, parts, c]).sum_dim(1);
    let sum = |part: usize| plain(sums.clone().narrow(0, part, 1).reshape([c]));
    [gradients, sum(0), sum(1)]
}

fn gelu_forward(x: &CubeTensor) -> CubeTensor {
    let y = empty(x, x.meta.shape().clone(), x.dtype);
    launch(x, rows(x), &[x, &y], |client, count, dim, address| {
        kernels::gelu::launch(client, count, dim, address, by_rows(x), by_rows(&y), element(x));
    });
    y
}

/// Softmax over the last axis of `scale` times the scores that position i may see, those of positions j ≤ i.
fn causal_softmax(scores: CubeTensor, scale: f32) -> CubeTensor {
    let scores = to_write(scores);
    launch(&scores, rows(&scores), &[&scores], |client, count, dim, address| {
        kernels::causal_softmax::launch(client, count, dim, address, by_rows(&scores), scale, element(&scores));
    });
    scores
}

/// The gradient with respect to the scores, from that with respect to the `weights` that [`causal_softmax`] made of them.
fn causal_softmax_backward(dweights: CubeTensor, weights: &CubeTensor, scale: f32) -> CubeTensor {
    debug_assert_eq!(dweights.dtype, weights.dtype, "a kernel reads them as one type");
    let gradients = to_write(dweights);
    launch(&gradients, rows(&gradients), &[&gradients, weights], |client, count, dim, address| {
        kernels::causal_softmax_backward::launch(
            client,
            count,
            dim,
            address,
            by_rows(&gradients),
            by_rows(weights),
            scale,
            element(&gradients),
        );
    });
    gradients
}

/// Starts a kernel with a cube for each of `cubes`, on the device of `on`; `largest` are the tensors that decide how wide addresses are.
fn launch(
    on: &CubeTensor,
    cubes: usize,
    largest: &[&CubeTensor],
    kernel: impl FnOnce(&Client, CubeCount, CubeDim, AddressType),
) {
    // What every device takes along one axis.
    const ALONG: usize = 1 << 15;
    if on.meta.num_elements() == 0 {
        return;
    }
    let count = CubeCount::Static(cubes.min(ALONG) as u32, cubes.div_ceil(ALONG) as u32, 1);
    let address = largest.iter().map(|tensor| tensor.required_address_type()).max().unwrap_or_default();
    kernel(&on.client, count, CubeDim::new_1d(UNITS as u32), address);
}

fn empty(like: &CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape, dtype)
}

fn columns(tensor: &CubeTensor) -> usize {
    tensor.meta.shape().iter().last().copied().unwrap_or(1)
}

fn rows(tensor: &CubeTensor) -> usize {
    tensor.meta.num_elements() / columns(tensor).max(1)
}

/// Lengths and strides of all axes but the last, without those of length 1, whose strides mean nothing.
fn outer_axes(tensor: &CubeTensor) -> Vec<(usize, usize)> {
    let (shape, strides) = (tensor.meta.shape(), tensor.meta.strides());
    let outer = shape.len().saturating_sub(1);
    shape.iter().copied().zip(strides.iter().copied()).take(outer).filter(|(len, _)| *len != 1).collect()
}

/// From one row to the next, in elements.
fn pitch(tensor: &CubeTensor) -> usize {
    outer_axes(tensor).last().map_or(columns(tensor), |(_, stride)| *stride)
}

/// As a kernel's argument `[rows, columns]`.
fn by_rows(tensor: &CubeTensor) -> TensorArg {
    let mut binding = tensor.clone().binding();
    binding.shape = Shape::new([rows(tensor), columns(tensor)]);
    binding.strides = [pitch(tensor), 1].into();
    binding.into_tensor_arg()
}

/// Whether elements of a row are neighbours, and all rows equally far apart. The backend may leave gaps between rows.
fn in_rows(tensor: &CubeTensor) -> bool {
    let along = columns(tensor) == 1 || tensor.meta.strides().iter().last() == Some(&1);
    let apart = outer_axes(tensor).windows(2).all(|axes| axes[0].1 == axes[1].0 * axes[1].1);
    along && apart && pitch(tensor) >= columns(tensor) && !tensor.meta.is_tiled()
}

fn by_row(tensor: CubeTensor) -> CubeTensor {
    if in_rows(&tensor) { tensor } else { into_contiguous(tensor) }
}

/// The tensor itself if nobody else has it, else a copy.
fn to_write(tensor: CubeTensor) -> CubeTensor {
    let tensor = by_row(tensor);
    if tensor.can_mut() { tensor } else { by_row(tensor.copy()) }
}

fn element(tensor: &CubeTensor) -> ElemType {
    match tensor.dtype {
        DType::BF16 => half::bf16::elem_type_native(),
        DType::F16 => half::f16::elem_type_native(),
        DType::I32 => i32::elem_type_native(),
        DType::I64 => i64::elem_type_native(),
        DType::F32 => f32::elem_type_native(),
        other => unreachable!("no type of computation is {other:?}"),
    }
}

fn tensor<const D: usize>(primitive: CubeTensor) -> Tensor<D> {
    Tensor::from_primitive::<CubeBackend>(primitive)
}

fn plain<const D: usize>(tensor: Tensor<D>) -> CubeTensor {
    by_row(tensor.try_into_primitive::<CubeBackend>().expect("called for devices that these operations serve only"))
}

fn tracked<const D: usize>(tensor: Tensor<D>) -> (CubeTensor, NodeGuard) {
    let tensor = tensor
        .try_into_primitive::<Autodiff<CubeBackend>>()
        .expect("all inputs of a fused operation are tracked, or none");
    let (tensor, node) = tensor.into_parts();
    (by_row(tensor), node)
}
