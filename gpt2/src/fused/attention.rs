//! Causal attention by blocks of queries: the scores of a block against all keys that it may look at are all that is ever held of the
//! square of positions, and are computed again for the backward pass. What stays of a row between the passes is its maximum and the
//! inverse of its sum.
//!
//! Each head of each sequence is one task, which computes in one thread with buffers of its own, so no bit depends on the number of
//! threads. 16-bit values are widened first; everything up to the result is in f32.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex, TensorMetadata};
use burn::tensor::Tensor;
use comm_core::{Kernel, vectorised};
use rayon::prelude::*;

use super::lanes::{self, LANES};
use super::sys::{Matrix, MatrixMut, Threads};
use super::{contiguous, narrow_flex, plain, tensor, tracked, values, wide_flex};
use crate::dropout::Site;
use crate::math;

/// Queries a block. Part of the result: gradients of keys and values are summed block by block.
const QUERIES: usize = 64;

/// Causal attention from the joint projection `[b, t, 3c]` to the mixed values `[b, t, c]`, with weights dropped where there is a `site`; host
/// tensors only.
pub(crate) fn attention(qkv: Tensor<3>, n_head: usize, site: Option<Site>) -> Tensor<3> {
    let dtype = qkv.dtype();
    if !qkv.is_autodiff() {
        let (mixed, _) = forward(&wide_flex(plain(qkv)), n_head, site.as_ref());
        return Tensor::from_primitive::<Flex>(narrow_flex(mixed, dtype));
    }
    let (qkv, node) = tracked(qkv);
    let (mixed, stats) = forward(&wide_flex(qkv.clone()), n_head, site.as_ref());
    let mixed = narrow_flex(mixed, dtype);
    let mixed = match AttentionBackward.prepare::<NoCheckpointing>([node]).compute_bound().stateful() {
        OpsKind::Tracked(prep) => prep.finish((qkv, stats, n_head, site), mixed),
        OpsKind::UnTracked(prep) => prep.finish(mixed),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(mixed)
}

#[derive(Debug)]
struct AttentionBackward;

impl Backward<Flex, 1> for AttentionBackward {
    /// Joint projection, what is kept of each row (see [`Stat`]), number of heads, and by what weights are dropped.
    type State = (FlexTensor, Vec<Stat>, usize, Option<Site>);

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let (qkv, stats, n_head, site) = ops.state;
        unary::<Flex, _>(ops.parents, ops.node, grads, |dmixed| {
            let dtype = dmixed.dtype();
            let dmixed = wide_flex(contiguous(dmixed));
            narrow_flex(backward(&wide_flex(qkv), &stats, &dmixed, n_head, site.as_ref()), dtype)
        });
    }
}

/// The largest scaled score of a row, and the inverse of the sum of its exponentials, by which the row's weights can be computed again.
type Stat = [f32; 2];

/// Mixed values `[b, t, c]`, and what is kept of each row, `[b, h, t]`.
fn forward(qkv: &FlexTensor, n_head: usize, site: Option<&Site>) -> (FlexTensor, Vec<Stat>) {
    let sizes = Sizes::of(qkv, n_head);
    let Sizes { b, t, c, q, .. } = sizes;
    let qkv_values = values(qkv);
    let mut mixed = vec![0.0; b * t * c];
    let mut stats = vec![[0.0; 2]; b * n_head * t];
    let heads: Vec<MatrixMut<'_>> =
        mixed.chunks_mut(t * c).flat_map(|row| MatrixMut::new(row, t, c).column_groups(q)).collect();
    heads.into_par_iter().zip(stats.par_chunks_mut(t)).enumerate().for_each_init(
        || Buffers::new(&sizes, 1, site.is_some()),
        |buffers, (index, (mut mixed, stats))| {
            let dropped = site.map(|site| sizes.dropped(site, index));
            sizes.head(qkv_values, index).forward(&mut mixed, stats, buffers, dropped);
        },
    );
    let mut shape = qkv.shape();
    shape[2] = c;
    (tensor(mixed, shape), stats)
}

/// The gradient of the joint projection `[b, t, 3c]` from that of the mixed values.
fn backward(qkv: &FlexTensor, stats: &[Stat], dmixed: &FlexTensor, n_head: usize, site: Option<&Site>) -> FlexTensor {
    let sizes = Sizes::of(qkv, n_head);
    let Sizes { b, t, c, q, .. } = sizes;
    let (qkv_values, dmixed) = (values(qkv), values(dmixed));
    let mut dqkv = vec![0.0; b * t * 3 * c];
    let mut heads: Vec<HeadGrads<'_>> = Vec::with_capacity(b * n_head);
    for row in dqkv.chunks_mut(t * 3 * c) {
        let mut groups: Vec<_> = MatrixMut::new(row, t, 3 * c).column_groups(q).collect();
        let values = groups.split_off(2 * n_head);
        let keys = groups.split_off(n_head);
        let parts = groups.into_iter().zip(keys).zip(values);
        heads.extend(parts.map(|((query, key), value)| HeadGrads { query, key, value }));
    }
    heads.into_par_iter().zip(stats.par_chunks(t)).enumerate().for_each_init(
        || Buffers::new(&sizes, 2, site.is_some()),
        |buffers, (index, (mut grads, stats))| {
            let dmixed = Matrix::strided(&dmixed[sizes.start(index, c)..], t, q, c);
            let dropped = site.map(|site| sizes.dropped(site, index));
            sizes.head(qkv_values, index).backward(dmixed, stats, &mut grads, buffers, dropped);
        },
    );
    tensor(dqkv, qkv.shape())
}

/// Sequences, positions, heads, width of the residual stream and of a head, and what scores are multiplied by.
struct Sizes {
    b: usize,
    t: usize,
    h: usize,
    c: usize,
    q: usize,
    scale: f32,
}

impl Sizes {
    fn of(qkv: &FlexTensor, n_head: usize) -> Self {
        let shape = qkv.shape();
        let c = shape[2] / 3;
        let q = c / n_head;
        Self { b: shape[0], t: shape[1], h: n_head, c, q, scale: 1.0 / (q as f32).sqrt() }
    }

    /// Where head `index` (counted sequence by sequence) begins in a tensor `[b, t, width]`.
    fn start(&self, index: usize, width: usize) -> usize {
        index / self.h * self.t * width + index % self.h * self.q
    }

    fn head<'a>(&self, qkv: &'a [f32], index: usize) -> Head<'a> {
        let Self { t, c, q, scale, .. } = *self;
        let start = self.start(index, 3 * c);
        let [query, key, value] = [0, 1, 2].map(|part| Matrix::strided(&qkv[start + part * c..], t, q, 3 * c));
        Head { t, q, query, key, value, scale }
    }

    /// What is dropped in head `index`.
    fn dropped<'a>(&self, site: &'a Site, index: usize) -> Dropped<'a> {
        Dropped { site, row: index / self.h, first_line: index % self.h * self.t, width: self.t }
    }

    /// Elements from one row of a buffer to the next: whole vectors, and not a power of two, since lines that lie such a distance apart
    /// displace one another from the cache.
    fn stride(&self) -> usize {
        self.t.next_multiple_of(LANES) + LANES
    }
}

/// What a thread computes with.
struct Buffers {
    stride: usize,
    /// Keys and, backward, values: `[q, t]`, which products read in order.
    columns: [Vec<f32>; 2],
    /// Scores of a block, which become weights, and, backward, their gradients: `[queries, t]`.
    squares: [Vec<f32>; 2],
    /// By what the weights of a block are multiplied where some are dropped: `[queries, t]`.
    factors: Vec<f32>,
}

impl Buffers {
    /// With `count` of each, and factors if weights are dropped.
    fn new(sizes: &Sizes, count: usize, drops: bool) -> Self {
        let stride = sizes.stride();
        let buffers = |rows: usize| [0, 1].map(|index| vec![0.0; if index < count { rows * stride } else { 0 }]);
        let queries = QUERIES.min(sizes.t);
        let factors = vec![0.0; if drops { queries * stride } else { 0 }];
        Self { stride, columns: buffers(sizes.q), squares: buffers(queries), factors }
    }
}

/// The weights of a head that are dropped. Each query has a line of them, of `width` keys.
#[derive(Clone, Copy)]
struct Dropped<'a> {
    site: &'a Site,
    /// The sequence's place in the pass.
    row: usize,
    /// The line of the head's first query.
    first_line: usize,
    width: usize,
}

impl Dropped<'_> {
    /// The factors of the weights of a block of `count` queries from `first` on, for keys up to `end`.
    fn factors(&self, (first, count, end): (usize, usize, usize), factors: &mut [f32], stride: usize) {
        for (i, factors) in factors.chunks_exact_mut(stride).take(count).enumerate() {
            self.site.factors(self.row, self.first_line + first + i, self.width, &mut factors[..end]);
        }
    }
}

/// Multiplies the first `end` elements of each of `count` rows by theirs of `factors`.
fn scale_rows(rows: &mut [f32], factors: &[f32], (count, end): (usize, usize), stride: usize) {
    for (row, factors) in rows.chunks_exact_mut(stride).zip(factors.chunks_exact(stride)).take(count) {
        row[..end].iter_mut().zip(&factors[..end]).for_each(|(x, factor)| *x *= factor);
    }
}

/// One head of one sequence: `[t, q]` each.
struct Head<'a> {
    t: usize,
    q: usize,
    query: Matrix<'a>,
    key: Matrix<'a>,
    value: Matrix<'a>,
    scale: f32,
}

/// The gradients of a head's queries, keys and values.
struct HeadGrads<'a> {
    query: MatrixMut<'a>,
    key: MatrixMut<'a>,
    value: MatrixMut<'a>,
}

impl Head<'_> {
    fn forward(
        &self,
        mixed: &mut MatrixMut<'_>,
        stats: &mut [Stat],
        buffers: &mut Buffers,
        dropped: Option<Dropped<'_>>,
    ) {
        let Buffers { stride, columns: [keys, _], squares: [scores, _], factors } = buffers;
        let stride = *stride;
        transpose(self.key, self.t, keys, stride);
        for (block, stats) in stats.chunks_mut(QUERIES).enumerate() {
            let (first, count) = (block * QUERIES, stats.len());
            let end = first + count;
            let keys = Matrix::strided(keys, self.q, end, stride);
            let mut block = MatrixMut::strided(scores, count, end, stride);
            block.set_product(self.query.rows(first..end), keys, Threads::One);
            vectorised(Softmax { scores, stride, first, scale: self.scale, stats });
            if let Some(dropped) = &dropped {
                dropped.factors((first, count, end), factors, stride);
                scale_rows(scores, factors, (count, end), stride);
            }
            let weights = Matrix::strided(scores, count, end, stride);
            let mut mixed = mixed.rows(first..end);
            mixed.set_product(weights, self.value.rows(0..end), Threads::One);
            for (i, [_, inverse]) in stats.iter().enumerate() {
                mixed.row(i).iter_mut().for_each(|x| *x *= inverse);
            }
        }
    }

    fn backward(
        &self,
        dmixed: Matrix<'_>,
        stats: &[Stat],
        grads: &mut HeadGrads<'_>,
        buffers: &mut Buffers,
        dropped: Option<Dropped<'_>>,
    ) {
        let Buffers { stride, columns: [keys, values], squares: [scores, dscores], factors } = buffers;
        let stride = *stride;
        transpose(self.key, self.t, keys, stride);
        transpose(self.value, self.t, values, stride);
        for (block, stats) in stats.chunks(QUERIES).enumerate() {
            let (first, count) = (block * QUERIES, stats.len());
            let end = first + count;
            let (query, dmixed) = (self.query.rows(first..end), dmixed.rows(first..end));
            for (out, rows, columns) in [(&mut *scores, query, &*keys), (&mut *dscores, dmixed, &*values)] {
                let columns = Matrix::strided(columns, self.q, end, stride);
                MatrixMut::strided(out, count, end, stride).set_product(rows, columns, Threads::One);
            }
            if let Some(dropped) = &dropped {
                dropped.factors((first, count, end), factors, stride);
                scale_rows(dscores, factors, (count, end), stride);
            }
            vectorised(SoftmaxBackward { scores, dscores, stride, first, scale: self.scale, stats });
            if dropped.is_some() {
                // The softmax has no part in it: what is multiplied with values are the weights that are left.
                scale_rows(scores, factors, (count, end), stride);
            }
            let weights = Matrix::strided(scores, count, end, stride);
            let dscores = Matrix::strided(dscores, count, end, stride);
            grads.value.rows(0..end).add_product(weights.transposed(), dmixed, Threads::One);
            grads.query.rows(first..end).set_product(dscores, self.key.rows(0..end), Threads::One);
            grads.key.rows(0..end).add_product(dscores.transposed(), query, Threads::One);
        }
    }
}

/// Writes `rows`, `[t, q]`, as `[q, t]` with rows every `stride` elements.
fn transpose(rows: Matrix<'_>, t: usize, columns: &mut [f32], stride: usize) {
    for start in (0..t).step_by(LANES) {
        let count = LANES.min(t - start);
        let block: [&[f32]; LANES] = std::array::from_fn(|i| rows.row(start + i.min(count - 1)));
        for (j, column) in columns.chunks_exact_mut(stride).enumerate() {
            for (x, row) in column[start..start + count].iter_mut().zip(&block) {
                *x = row[j];
            }
        }
    }
}

/// Makes a block's scores exponentials, to be divided by their sums, and finds its statistics. Row i looks at the first `first` + i + 1 keys;
/// the others' weights are zero.
struct Softmax<'a> {
    scores: &'a mut [f32],
    stride: usize,
    first: usize,
    scale: f32,
    stats: &'a mut [Stat],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { scores, stride, first, scale, stats } = self;
        let end = first + stats.len();
        for (i, (row, stat)) in scores.chunks_exact_mut(stride).zip(stats).enumerate() {
            let seen = first + i + 1;
            // Whole vectors: what is hidden in the last becomes too little to change a sum, which is at least 1.
            let padded = seen.next_multiple_of(LANES);
            row[seen..padded].fill(f32::NEG_INFINITY);
            let max = lanes::max(&row[..padded]) * scale;
            let sum = lanes::map_and_sum(&mut row[..padded], |score| math::exp(score * scale - max));
            row[seen..padded.max(end)].fill(0.0);
            *stat = [max, 1.0 / sum];
        }
    }
}

/// Makes a block's scores its weights, and the gradients of the weights those of the scores: with w the weights, w · (g − Σ w·g) · scale.
struct SoftmaxBackward<'a> {
    scores: &'a mut [f32],
    dscores: &'a mut [f32],
    stride: usize,
    first: usize,
    scale: f32,
    stats: &'a [Stat],
}

impl Kernel for SoftmaxBackward<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { scores, dscores, stride, first, scale, stats } = self;
        let end = first + stats.len();
        let rows = scores.chunks_exact_mut(stride).zip(dscores.chunks_exact_mut(stride)).zip(stats);
        for (i, ((weights, grads), [max, inverse])) in rows.enumerate() {
            let seen = first + i + 1;
            let padded = seen.next_multiple_of(LANES);
            for weight in &mut weights[..padded] {
                *weight = math::exp(*weight * scale - max) * inverse;
            }
            weights[seen..padded.max(end)].fill(0.0);
            grads[seen..padded.max(end)].fill(0.0);
            let (weights, grads) = (&weights[..padded], &mut grads[..padded]);
            let mean = lanes::dot(weights, grads);
            for (grad, weight) in grads.iter_mut().zip(weights) {
                *grad = weight * (*grad - mean) * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, FloatDType, TensorData};

    use super::*;
    use crate::dropout::{Dropout, Place};
    use crate::fused::checks::{assert_close, gradient, on_threads, pseudo};

    /// Mixed values and the gradient of the joint projection, by the definition, in f64.
    fn expected(qkv: &[f32], dmixed: &[f32], [b, t, h, q]: [usize; 4], site: Option<Site>) -> [Vec<f64>; 2] {
        let c = h * q;
        let scale = 1.0 / (q as f64).sqrt();
        let (mut mixed, mut dqkv) = (vec![0.0; b * t * c], vec![0.0; b * t * 3 * c]);
        let at = |row: usize, part: usize, head: usize, d: usize| row * 3 * c + part * c + head * q + d;
        let get = |row, part, head, d| f64::from(qkv[at(row, part, head, d)]);
        for (row_b, head) in (0..b).flat_map(|row_b| (0..h).map(move |head| (row_b, head))) {
            for i in 0..t {
                let row = row_b * t + i;
                let score =
                    |j: usize| (0..q).map(|d| get(row, 0, head, d) * get(row_b * t + j, 1, head, d)).sum::<f64>();
                let scores: Vec<f64> = (0..=i).map(|j| score(j) * scale).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp() / sum).collect();
                let up = |d: usize| f64::from(dmixed[row * c + head * q + d]);
                let dweights: Vec<f64> =
                    (0..=i).map(|j| (0..q).map(|d| up(d) * get(row_b * t + j, 2, head, d)).sum()).collect();
                let mut factors = vec![1.0f32; t];
                if let Some(site) = site {
                    site.factors(row_b, head * t + i, t, &mut factors);
                }
                let left: Vec<f64> = weights.iter().zip(&factors).map(|(w, factor)| w * f64::from(*factor)).collect();
                let mean: f64 = left.iter().zip(&dweights).map(|(w, g)| w * g).sum();
                for (j, (whole, dweight)) in weights.iter().zip(&dweights).enumerate() {
                    let (other, weight) = (row_b * t + j, left[j]);
                    let dscore = (weight * dweight - whole * mean) * scale;
                    for d in 0..q {
                        mixed[row * c + head * q + d] += weight * get(other, 2, head, d);
                        dqkv[at(row, 0, head, d)] += dscore * get(other, 1, head, d);
                        dqkv[at(other, 1, head, d)] += dscore * get(row, 0, head, d);
                        dqkv[at(other, 2, head, d)] += weight * up(d);
                    }
                }
            }
        }
        [mixed, dqkv]
    }

    fn dropping() -> Site {
        Dropout::new(0.2, 1, 2, 3).unwrap().at(4, Place::Attention)
    }

    /// The same of the fused operation.
    fn run(
        qkv: &[f32],
        dmixed: &[f32],
        [b, t, h, q]: [usize; 4],
        dtype: FloatDType,
        site: Option<Site>,
    ) -> [Vec<f32>; 2] {
        let c = h * q;
        let qkv = Tensor::<3>::from_data(TensorData::new(qkv.to_vec(), [b, t, 3 * c]), &Device::flex()).cast(dtype);
        let untracked = attention(qkv.clone(), h, site).into_data();
        let qkv = qkv.autodiff().require_grad();
        let mixed = attention(qkv.clone(), h, site);
        mixed.clone().inner().into_data().assert_eq(&untracked, true);
        gradient(&qkv, mixed, dmixed)
    }

    /// One position; fewer than a vector; a whole block, and one more; several blocks; heads of several sizes; large scores.
    const CASES: [([usize; 4], f32); 9] = [
        ([1, 1, 1, 1], 1.0),
        ([2, 1, 3, 4], 1.0),
        ([2, 3, 2, 5], 1.0),
        ([1, 17, 1, 8], 1.0),
        ([2, 64, 2, 32], 1.0),
        ([1, 65, 3, 4], 1.0),
        ([1, 130, 1, 16], 1.0),
        ([2, 200, 2, 3], 1.0),
        ([1, 96, 2, 16], 12.0),
    ];

    #[test]
    fn values_and_gradients_are_those_of_the_definition() {
        for (sizes @ [b, t, h, q], size) in CASES {
            let (qkv, dmixed) = (pseudo(b * t * 3 * h * q, 1, size), pseudo(b * t * h * q, 2, 1.0));
            for site in [None, Some(dropping())] {
                let found = run(&qkv, &dmixed, sizes, FloatDType::F32, site);
                let expected = expected(&qkv, &dmixed, sizes, site);
                for (part, (found, expected)) in ["mixed", "dqkv"].iter().zip(found.iter().zip(&expected)) {
                    assert_close(&format!("{part} of {sizes:?}, {site:?}"), found, expected, 4e-6);
                }
            }
        }
    }

    #[test]
    fn sixteen_bit_values_are_rounded_once() {
        for (dtype, bound) in [(FloatDType::BF16, 1.0 / 256.0), (FloatDType::F16, 1.0 / 2048.0)] {
            let sizes @ [b, t, h, q] = [2, 70, 2, 8];
            let rounded = |values: Vec<f32>| {
                let count = values.len();
                Tensor::<1>::from_data(TensorData::new(values, [count]), &Device::flex())
                    .cast(dtype)
                    .try_into_vec_as::<f32>()
                    .unwrap()
            };
            let (qkv, dmixed) = (rounded(pseudo(b * t * 3 * h * q, 1, 1.0)), rounded(pseudo(b * t * h * q, 2, 1.0)));
            let found = run(&qkv, &dmixed, sizes, dtype, None);
            for (found, expected) in found.iter().zip(&expected(&qkv, &dmixed, sizes, None)) {
                assert_close(&format!("attention in {dtype:?}"), found, expected, bound);
            }
        }
    }

    #[test]
    fn no_bit_depends_on_the_number_of_threads() {
        for (sizes @ [b, t, h, q], size) in CASES {
            let (qkv, dmixed) = (pseudo(b * t * 3 * h * q, 1, size), pseudo(b * t * h * q, 2, 1.0));
            for site in [None, Some(dropping())] {
                on_threads(|| run(&qkv, &dmixed, sizes, FloatDType::F32, site).concat());
            }
        }
    }

    #[test]
    fn no_bit_depends_on_the_width_of_vectors() {
        let (t, stride, first, scale) = (50, 80, 14, 0.3);
        let count = t - first;
        let run = |wide: bool| {
            let (mut scores, mut dscores) = (pseudo(count * stride, 3, 9.0), pseudo(count * stride, 4, 3.0));
            let mut stats = vec![[0.0; 2]; count];
            let kernel = Softmax { scores: &mut scores, stride, first, scale, stats: &mut stats };
            if wide {
                vectorised(kernel)
            } else {
                kernel.run()
            }
            let (weights, mut scores) = (scores, pseudo(count * stride, 3, 9.0));
            let kernel =
                SoftmaxBackward { scores: &mut scores, dscores: &mut dscores, stride, first, scale, stats: &stats };
            if wide {
                vectorised(kernel)
            } else {
                kernel.run()
            }
            let all = [weights, scores, dscores, stats.concat()].concat();
            all.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        assert_eq!(run(true), run(false));
    }
}
