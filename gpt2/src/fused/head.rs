//! The head and its loss, a chunk of rows at a time: logits, loss, their gradient, and both products with that. No more than a chunk of the
//! logits, which are the largest tensor of a training step, ever exists.

use burn::backend::Flex;
use burn::tensor::{DType, Shape, Tensor};
use comm_core::{Float16, Kernel, bf16, f16, vectorised};
use rayon::prelude::*;

use super::lanes::{map_and_sum, max, sum};
use super::sys::{Matrix, MatrixMut, PartSums, Threads, product_into};
use super::{narrow_flex, plain, tensor, values, wide_flex};
use crate::math;

/// Rows a chunk. Part of the result: the gradient of the table is summed chunk by chunk.
const ROWS: usize = 256;

/// What comes of the head in a training pass.
pub(crate) struct HeadGrads {
    /// Mean over rows of −ln softmax(logits)[target], in nats.
    pub(crate) loss: f64,
    /// Gradient of what went into the head, in its type.
    pub(crate) dhidden_nc: Tensor<2>,
}

/// The mean loss of the logits `hidden_nc · wte_vcᵀ`, and the gradients of `scale` times it; host tensors only. That of the table is added
/// to the first part of `sums`. `targets` are as many as rows and lie in the vocabulary.
///
/// Logits are in f32 whatever the type of the tensors, and their gradient is rounded to it.
pub(crate) fn head_gradients(
    hidden_nc: Tensor<2>,
    wte_vc: Tensor<2>,
    targets: &[i32],
    scale: f32,
    sums: &mut PartSums,
) -> HeadGrads {
    let ([n, c], [v, _], dtype) = (hidden_nc.dims(), wte_vc.dims(), hidden_nc.dtype());
    let (hidden, wte) = (wide_flex(plain(hidden_nc)), wide_flex(plain(wte_vc)));
    let wte = Matrix::new(values(&wte), v, c);
    let row_scale = scale / n as f32;
    let (mut dhidden, mut logits) = (vec![0.0; n * c], Vec::new());
    let mut losses = Vec::with_capacity(n);
    let chunks = values(&hidden).chunks(ROWS * c).zip(dhidden.chunks_mut(ROWS * c)).zip(targets.chunks(ROWS));
    for ((hidden, dhidden), targets) in chunks {
        let rows = targets.len();
        let hidden = Matrix::new(hidden, rows, c);
        product_into(&mut logits, hidden, wte.transposed(), Threads::Pool);
        losses.par_extend(logits.par_chunks_mut(v).zip(targets).map(|(row, target)| {
            let loss = vectorised(GradientOfRow { row, target: *target as usize, row_scale });
            round(row, dtype);
            loss
        }));
        let dlogits = Matrix::new(&logits, rows, v);
        MatrixMut::new(dhidden, rows, c).set_product(dlogits, wte, Threads::Pool);
        sums.add_product(0, dlogits.transposed(), hidden);
    }
    HeadGrads {
        loss: mean(&losses),
        dhidden_nc: Tensor::from_primitive::<Flex>(narrow_flex(tensor(dhidden, Shape::new([n, c])), dtype)),
    }
}

/// The mean loss alone, as [`head_gradients`] has it.
pub(crate) fn head_loss(hidden_nc: Tensor<2>, wte_vc: Tensor<2>, targets: &[i32]) -> f64 {
    let ([n, c], [v, _]) = (hidden_nc.dims(), wte_vc.dims());
    let (hidden, wte) = (wide_flex(plain(hidden_nc)), wide_flex(plain(wte_vc)));
    let wte = Matrix::new(values(&wte), v, c);
    let (mut losses, mut logits) = (Vec::with_capacity(n), Vec::new());
    for (hidden, targets) in values(&hidden).chunks(ROWS * c).zip(targets.chunks(ROWS)) {
        product_into(&mut logits, Matrix::new(hidden, targets.len(), c), wte.transposed(), Threads::Pool);
        let rows = logits.par_chunks(v).zip(targets);
        losses.par_extend(rows.map(|(row, target)| vectorised(LossOfRow { row, target: *target as usize })));
    }
    mean(&losses)
}

/// In row order, whichever thread did which row.
fn mean(losses: &[f64]) -> f64 {
    losses.iter().sum::<f64>() / losses.len() as f64
}

struct LossOfRow<'a> {
    row: &'a [f32],
    target: usize,
}

impl Kernel for LossOfRow<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let Self { row, target } = self;
        let max = max(row);
        loss(sum(row, |x| math::exp(x - max)), max, row[target])
    }
}

/// Replaces a row of logits by its part of the gradient, (softmax − one-hot) · `row_scale`; the row's loss.
struct GradientOfRow<'a> {
    row: &'a mut [f32],
    target: usize,
    row_scale: f32,
}

impl Kernel for GradientOfRow<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let Self { row, target, row_scale } = self;
        let max = max(row);
        let picked = row[target];
        let sum = map_and_sum(row, |x| math::exp(x - max));
        let factor = row_scale / sum;
        row.iter_mut().for_each(|x| *x *= factor);
        row[target] -= row_scale;
        loss(sum, max, picked)
    }
}

#[inline(always)]
fn loss(sum: f32, max: f32, picked: f32) -> f64 {
    // A diverged model's sum is not a number; neither is its loss.
    if sum.is_finite() { math::ln(f64::from(sum)) + f64::from(max) - f64::from(picked) } else { f64::NAN }
}

/// Rounds each value to `dtype`.
fn round(row: &mut [f32], dtype: DType) {
    match dtype {
        DType::BF16 => round_to::<bf16>(row),
        DType::F16 => round_to::<f16>(row),
        _ => (),
    }
}

fn round_to<T: Float16>(row: &mut [f32]) {
    let mut narrow = [T::zeroed(); 256];
    for values in row.chunks_mut(narrow.len()) {
        let narrow = &mut narrow[..values.len()];
        T::narrow(values, narrow);
        T::widen(narrow, values);
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, FloatDType, TensorData};

    use super::*;
    use crate::fused::checks::{assert_close, on_threads, pseudo};
    use crate::segments::cross_entropy;

    fn tensor_of(values: &[f32], shape: [usize; 2]) -> Tensor<2> {
        Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex())
    }

    fn targets(n: usize, v: usize) -> Vec<i32> {
        (0..n).map(|row| (row * 11 % v) as i32).collect()
    }

    fn read(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().try_into_vec_as::<f32>().unwrap()
    }

    /// Loss and gradients by the definition, in f64.
    fn expected(hidden: &[f32], wte: &[f32], [n, c, v]: [usize; 3], scale: f64) -> (f64, Vec<f64>, Vec<f64>) {
        let (mut loss, mut dhidden, mut dwte) = (0.0, vec![0.0; n * c], vec![0.0; v * c]);
        for (row, target) in targets(n, v).into_iter().enumerate() {
            let hidden = &hidden[row * c..][..c];
            let product = |token: usize| -> f64 {
                hidden.iter().zip(&wte[token * c..][..c]).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let logits: Vec<f64> = (0..v).map(product).collect();
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
            loss += (sum.ln() + max - logits[target as usize]) / n as f64;
            for (token, logit) in logits.iter().enumerate() {
                let one_hot = f64::from(token == target as usize);
                let dlogit = ((logit - max).exp() / sum - one_hot) * scale / n as f64;
                for d in 0..c {
                    dhidden[row * c + d] += dlogit * f64::from(wte[token * c + d]);
                    dwte[token * c + d] += dlogit * f64::from(hidden[d]);
                }
            }
        }
        (loss, dhidden, dwte)
    }

    /// With the gradient of the table.
    fn gradients(hidden_nc: Tensor<2>, wte_vc: Tensor<2>, targets: &[i32], scale: f32) -> (HeadGrads, Vec<f32>) {
        let mut sums = PartSums::behind(Vec::new(), [wte_vc.shape().num_elements()].into_iter());
        let found = head_gradients(hidden_nc, wte_vc, targets, scale, &mut sums);
        (found, sums.finish().unwrap())
    }

    /// One row, one token; less than a chunk, a whole one, and more; vocabularies that end within a vector.
    const CASES: [[usize; 3]; 6] = [[1, 1, 1], [1, 4, 61], [5, 8, 16], [256, 4, 15], [257, 16, 33], [600, 3, 70]];

    #[test]
    fn loss_and_gradients_are_those_of_the_definition() {
        for sizes @ [n, c, v] in CASES {
            let (hidden, wte) = (pseudo(n * c, 1, 2.0), pseudo(v * c, 2, 2.0));
            let (found, dwte_found) =
                gradients(tensor_of(&hidden, [n, c]), tensor_of(&wte, [v, c]), &targets(n, v), 3.0);
            let (loss, dhidden, dwte) = expected(&hidden, &wte, sizes, 3.0);
            assert!((found.loss - loss).abs() <= 1e-6 * loss.max(1.0), "{sizes:?}: {} {loss}", found.loss);
            let alone = head_loss(tensor_of(&hidden, [n, c]), tensor_of(&wte, [v, c]), &targets(n, v));
            assert!((alone - loss).abs() <= 1e-6 * loss.max(1.0), "{sizes:?}: {alone} {loss}");
            // With one token all vanishes.
            if v > 1 {
                assert_close(&format!("dhidden of {sizes:?}"), &read(found.dhidden_nc), &dhidden, 4e-6);
                assert_close(&format!("dwte of {sizes:?}"), &dwte_found, &dwte, 4e-6);
            } else {
                assert_eq!([read(found.dhidden_nc), dwte_found].concat(), [0.0; 2]);
            }
        }
    }

    #[test]
    fn tensor_operations_and_chunks_agree() {
        for [n, c, v] in CASES {
            let (hidden, wte) = (tensor_of(&pseudo(n * c, 1, 2.0), [n, c]), tensor_of(&pseudo(v * c, 2, 2.0), [v, c]));
            let (found, dwte) = gradients(hidden.clone(), wte.clone(), &targets(n, v), 3.0);
            let logits = hidden.clone().matmul(wte.clone().transpose());
            let alone = cross_entropy::mean_loss(logits.clone(), v, &targets(n, v)).unwrap();
            let (loss, dlogits) = cross_entropy::loss_and_gradient(logits, v, &targets(n, v), 3.0);
            for loss in [alone, loss.read().unwrap()] {
                assert!((found.loss - loss).abs() < 1e-5, "{} {loss}", found.loss);
            }
            let pairs =
                [(read(found.dhidden_nc), dlogits.clone().matmul(wte)), (dwte, dlogits.transpose().matmul(hidden))];
            for (found, expected) in pairs.map(|(a, b)| (a, read(b))) {
                assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5), "{n} {c} {v}");
            }
        }
    }

    #[test]
    fn no_bit_depends_on_the_number_of_threads() {
        for [n, c, v] in [[257, 16, 33], [600, 3, 70], [300, 64, 500]] {
            let (hidden, wte) = (tensor_of(&pseudo(n * c, 1, 2.0), [n, c]), tensor_of(&pseudo(v * c, 2, 2.0), [v, c]));
            on_threads(|| {
                let (found, dwte) = gradients(hidden.clone(), wte.clone(), &targets(n, v), 1.0);
                let alone = head_loss(hidden.clone(), wte.clone(), &targets(n, v));
                let losses = [found.loss, alone].map(f64::to_bits).map(u64::to_ne_bytes).concat();
                let losses = losses.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
                [losses, read(found.dhidden_nc), dwte].concat()
            });
        }
    }

    #[test]
    fn no_bit_depends_on_the_width_of_vectors() {
        let row_scale = 0.1;
        let [wide, narrow] = [true, false].map(|wide| {
            let mut row = pseudo(1003, 1, 9.0);
            let kernel = LossOfRow { row: &row, target: 7 };
            let alone = if wide { vectorised(kernel) } else { kernel.run() };
            let kernel = GradientOfRow { row: &mut row, target: 7, row_scale };
            let loss = if wide { vectorised(kernel) } else { kernel.run() };
            (alone.to_bits(), loss.to_bits(), row.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        });
        assert_eq!(wide, narrow);
        assert_eq!(wide.0, wide.1);
    }

    /// In 16 bits the gradient of the logits is rounded as if it were a tensor: what is too small for the type is gone.
    #[test]
    fn gradients_too_small_for_the_type_vanish() {
        let (hidden, wte) = (tensor_of(&pseudo(16, 1, 2.0), [2, 8]), tensor_of(&pseudo(64, 2, 2.0), [8, 8]));
        let half = |tensor: &Tensor<2>| tensor.clone().cast(FloatDType::F16);
        let all = |scale| {
            let (HeadGrads { dhidden_nc, .. }, dwte) = gradients(half(&hidden), half(&wte), &[1, 2], scale);
            assert_eq!(dhidden_nc.dtype(), DType::F16);
            [read(dhidden_nc), dwte].concat()
        };
        assert!(all(1e-9).iter().all(|x| *x == 0.0));
        assert!(all(1.0).iter().any(|x| *x != 0.0));
    }

    #[test]
    fn a_diverged_model_has_no_finite_loss() {
        for bad in [f32::NAN, f32::INFINITY] {
            let (hidden, wte) = (tensor_of(&[bad, 1.0], [1, 2]), tensor_of(&pseudo(6, 2, 2.0), [3, 2]));
            let (found, dwte) = gradients(hidden.clone(), wte.clone(), &[1], 1.0);
            assert!(!found.loss.is_finite() && !head_loss(hidden, wte, &[1]).is_finite(), "{bad}");
            assert!(dwte.iter().any(|x| !x.is_finite()), "{bad}");
        }
    }
}
