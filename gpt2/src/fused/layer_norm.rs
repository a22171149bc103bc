//! Layer norm and its backward pass, each in one pass over a row while it is in cache.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex, TensorMetadata};
use burn::tensor::Tensor;
use comm_core::{Kernel, vectorised};
use rayon::prelude::*;

use super::lanes::{add, sum, two_sums};
use super::{Resident, WeightRef, contiguous, narrow_flex, plain, tensor, tracked, values, wide_flex};
use crate::config::LAYER_NORM_EPSILON;

/// Rows a task. Part of the result: partial sums over rows are cut here.
const ROWS: usize = 32;

/// Layer norm of the last axis of `x_btc`, both weights by their leaves in `resident`; host tensors only.
pub(crate) fn layer_norm(
    x_btc: Tensor<3>,
    weight_c: Tensor<1>,
    bias_c: Tensor<1>,
    resident: Option<&Arc<Resident>>,
) -> Tensor<3> {
    let dtype = x_btc.dtype();
    let Some(resident) = resident else {
        let (weight, bias) = (wide_flex(plain(weight_c)), wide_flex(plain(bias_c)));
        let (y, _) = forward(&wide_flex(plain(x_btc)), &weight, &bias);
        return Tensor::from_primitive::<Flex>(narrow_flex(y, dtype));
    };
    let (x, x_node) = tracked(x_btc);
    let (_, weight_node) = tracked(weight_c);
    let (_, bias_node) = tracked(bias_c);
    let (weight, bias) = (wide_flex(resident.get(weight_node.id())), wide_flex(resident.get(bias_node.id())));
    let (y, stats) = forward(&wide_flex(x.clone()), &weight, &bias);
    let y = narrow_flex(y, dtype);
    let weight_ref = (resident.clone(), weight_node.id());
    let nodes = [x_node, weight_node, bias_node];
    let y = match LayerNormBackward.prepare::<NoCheckpointing>(nodes).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((x, weight_ref, stats), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(y)
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
        let (dy, x, weight) = (wide_flex(dy), wide_flex(x), wide_flex(resident.get(weight)));
        let (dx, dweight, dbias) = backward(&dy, &x, &weight, &stats);
        let [input, weight, bias] = ops.parents.map(|parent| parent.map(|parent| parent.id));
        for (leaf, gradient) in weight.zip(Some(&dweight)).into_iter().chain(bias.zip(Some(&dbias))) {
            resident.add_gradient(leaf, |gradients, part| gradients.add(part, gradient));
        }
        if let Some(input) = input {
            grads.register::<Flex>(input, narrow_flex(dx, dtype));
        }
    }
}

fn forward(x: &FlexTensor, weight: &FlexTensor, bias: &FlexTensor) -> (FlexTensor, Vec<[f32; 2]>) {
    let (xs, w, b) = (values(x), values(weight), values(bias));
    let c = w.len();
    let mut ys = vec![0.0; xs.len()];
    let mut stats = vec![[0.0; 2]; xs.len() / c];
    ys.par_chunks_mut(ROWS * c)
        .zip(xs.par_chunks(ROWS * c))
        .zip(stats.par_chunks_mut(ROWS))
        .for_each(|((ys, xs), stats)| vectorised(Forward { ys, xs, w, b, stats }));
    (tensor(ys, x.shape()), stats)
}

struct Forward<'a> {
    ys: &'a mut [f32],
    xs: &'a [f32],
    w: &'a [f32],
    b: &'a [f32],
    stats: &'a mut [[f32; 2]],
}

impl Kernel for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { ys, xs, w, b, stats } = self;
        let c = w.len();
        for ((y, x), stat) in ys.chunks_exact_mut(c).zip(xs.chunks_exact(c)).zip(stats) {
            let mean = sum(x, |v| v) / c as f32;
            let variance = sum(x, |v| (v - mean) * (v - mean)) / c as f32;
            let inverse = 1.0 / (variance + LAYER_NORM_EPSILON as f32).sqrt();
            *stat = [mean, inverse];
            for (((y, x), w), b) in y.iter_mut().zip(x).zip(w).zip(b) {
                *y = (x - mean) * inverse * w + b;
            }
        }
    }
}

/// With x̂ the normalised row and ĝ = dy·w: dx = (ĝ − mean(ĝ) − x̂·mean(ĝ·x̂)) / σ, dw = Σ dy·x̂, db = Σ dy over rows.
fn backward(
    dy: &FlexTensor,
    x: &FlexTensor,
    weight: &FlexTensor,
    stats: &[[f32; 2]],
) -> (FlexTensor, Vec<f32>, Vec<f32>) {
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
            vectorised(Backwards { dxs, dys, xs, w, stats, dw: &mut dw, db: &mut db });
            (dw, db)
        })
        .collect();
    let (mut dw, mut db) = (vec![0.0; c], vec![0.0; c]);
    for (task_dw, task_db) in &partial {
        add(&mut dw, task_dw);
        add(&mut db, task_db);
    }
    (tensor(dxs, x.shape()), dw, db)
}

struct Backwards<'a> {
    dxs: &'a mut [f32],
    dys: &'a [f32],
    xs: &'a [f32],
    w: &'a [f32],
    stats: &'a [[f32; 2]],
    dw: &'a mut [f32],
    db: &'a mut [f32],
}

impl Kernel for Backwards<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { dxs, dys, xs, w, stats, dw, db } = self;
        let c = w.len();
        let rows = dxs.chunks_exact_mut(c).zip(dys.chunks_exact(c)).zip(xs.chunks_exact(c));
        for (((dx, dy), x), [mean, inverse]) in rows.zip(stats) {
            // dx holds x̂ until it is overwritten.
            for ((h, x), ((dy, dw), db)) in dx.iter_mut().zip(x).zip(dy.iter().zip(&mut *dw).zip(&mut *db)) {
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
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Shape;

    use super::*;
    use crate::fused::checks::{assert_close, on_threads, pseudo};

    /// Result, and gradients of input, gain and offset.
    fn run(n: usize, c: usize) -> [Vec<f32>; 4] {
        let of = |values: Vec<f32>, rows: usize| tensor(values, Shape::new([1, rows, c]));
        let (x, dy) = (of(pseudo(n * c, 1, 3.0), n), of(pseudo(n * c, 2, 1.0), n));
        let [weight, bias] = [3, 4].map(|salt| tensor(pseudo(c, salt, 1.0), Shape::new([c])));
        let (y, stats) = forward(&x, &weight, &bias);
        let (dx, dw, db) = backward(&dy, &x, &weight, &stats);
        let [y, dx] = [y, dx].map(|tensor| values(&tensor).to_vec());
        [y, dx, dw, db]
    }

    /// The same by the definition, in f64.
    fn expected(n: usize, c: usize) -> [Vec<f64>; 4] {
        let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
        let (x, dy) = (wide(pseudo(n * c, 1, 3.0)), wide(pseudo(n * c, 2, 1.0)));
        let (w, b) = (wide(pseudo(c, 3, 1.0)), wide(pseudo(c, 4, 1.0)));
        let (mut y, mut dx, mut dw, mut db) = (Vec::new(), Vec::new(), vec![0.0; c], vec![0.0; c]);
        for (x, dy) in x.chunks(c).zip(dy.chunks(c)) {
            let mean = x.iter().sum::<f64>() / c as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / c as f64;
            let inverse = 1.0 / (variance + LAYER_NORM_EPSILON).sqrt();
            let h: Vec<f64> = x.iter().map(|x| (x - mean) * inverse).collect();
            let g: Vec<f64> = dy.iter().zip(&w).map(|(dy, w)| dy * w).collect();
            let along = g.iter().sum::<f64>() / c as f64;
            let across = g.iter().zip(&h).map(|(g, h)| g * h).sum::<f64>() / c as f64;
            for j in 0..c {
                y.push(h[j] * w[j] + b[j]);
                dx.push((g[j] - along - h[j] * across) * inverse);
                dw[j] += dy[j] * h[j];
                db[j] += dy[j];
            }
        }
        [y, dx, dw, db]
    }

    #[test]
    fn values_and_gradients_are_those_of_the_definition() {
        for (n, c) in [(1, 8), (3, 17), (32, 16), (33, 64), (100, 5)] {
            for (part, (found, expected)) in ["y", "dx", "dw", "db"].iter().zip(run(n, c).iter().zip(&expected(n, c))) {
                assert_close(&format!("{part} of {n} × {c}"), found, expected, 2e-6);
            }
            on_threads(|| run(n, c).concat());
        }
    }

    #[test]
    fn no_bit_depends_on_the_width_of_vectors() {
        let (n, c) = (7, 77);
        let (xs, dys, w, b) = (pseudo(n * c, 1, 3.0), pseudo(n * c, 2, 1.0), pseudo(c, 3, 1.0), pseudo(c, 4, 1.0));
        let [wide, narrow] = [true, false].map(|wide| {
            let (mut ys, mut stats) = (vec![0.0; n * c], vec![[0.0; 2]; n]);
            let (mut dxs, mut dw, mut db) = (vec![0.0; n * c], vec![0.0; c], vec![0.0; c]);
            let forward = Forward { ys: &mut ys, xs: &xs, w: &w, b: &b, stats: &mut stats };
            if wide {
                vectorised(forward)
            } else {
                forward.run()
            }
            let backward =
                Backwards { dxs: &mut dxs, dys: &dys, xs: &xs, w: &w, stats: &stats, dw: &mut dw, db: &mut db };
            if wide {
                vectorised(backward)
            } else {
                backward.run()
            }
            [ys, dxs, dw, db].concat().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        assert_eq!(wide, narrow);
    }
}
