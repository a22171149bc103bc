//! The affine map: one product for all rows of a batch, forward, and two backward.

use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::flex::FlexTensor;
use burn::backend::{Autodiff, Flex, TensorMetadata};
use burn::tensor::{DType, Shape, Tensor};
use rayon::prelude::*;

use super::lanes::add;
use super::sys::{Matrix, PartSums, Threads, product_into, product_plus_row};
use super::{Resident, WeightRef, contiguous, plain, tensor, tracked, values, wide, wide_flex};

/// `x_bti · weight_io + bias_o`, both weights by their leaves in `resident`; host tensors only.
pub(crate) fn linear(
    x_bti: Tensor<3>,
    weight_io: Tensor<2>,
    bias_o: Tensor<1>,
    resident: Option<&Arc<Resident>>,
) -> Tensor<3> {
    let Some(resident) = resident else {
        return Tensor::from_primitive::<Flex>(forward(&plain(x_bti), plain(weight_io), plain(bias_o)));
    };
    let (x, x_node) = tracked(x_bti);
    let (_, weight_node) = tracked(weight_io);
    let (_, bias_node) = tracked(bias_o);
    let y = forward(&x, resident.get(weight_node.id()), resident.get(bias_node.id()));
    let weight_ref = (resident.clone(), weight_node.id());
    let y = match LinearBackward.prepare::<NoCheckpointing>([x_node, weight_node, bias_node]).compute_bound().stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((x, weight_ref), y),
        OpsKind::UnTracked(prep) => prep.finish(y),
    };
    Tensor::from_primitive::<Autodiff<Flex>>(y)
}

#[derive(Debug)]
struct LinearBackward;

impl Backward<Flex, 3> for LinearBackward {
    /// Input, and the weight.
    type State = (FlexTensor, WeightRef);

    fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dy = contiguous(grads.consume::<Flex>(&ops.node));
        let (x, (resident, weight)) = ops.state;
        let weight = resident.get(weight);
        let [x_node, weight_node, bias_node] = ops.parents.map(|parent| parent.map(|parent| parent.id));
        if let Some(leaf) = weight_node {
            resident.add_gradient(leaf, |gradients, part| add_weight_gradient(gradients, part, &dy, &x));
        }
        if let Some(leaf) = bias_node {
            let dbias = column_sums(values(&wide_flex(dy.clone())), weight.shape()[1]);
            resident.add_gradient(leaf, |gradients, part| gradients.add(part, &dbias));
        }
        if let Some(x) = x_node {
            grads.register::<Flex>(x, input_gradient(dy, weight));
        }
    }
}

fn forward(x: &FlexTensor, weight: FlexTensor, bias: FlexTensor) -> FlexTensor {
    let ([b, t, i], [_, o]) = (x.shape().dims(), weight.shape().dims());
    if x.dtype() == DType::F32 {
        let (x_ni, weight_io) = (Matrix::new(values(x), b * t, i), Matrix::new(values(&weight), i, o));
        return tensor(product_plus_row(x_ni, weight_io, values(&bias)), Shape::new([b, t, o]));
    }
    let (weight, bias) = (Tensor::from_primitive::<Flex>(weight), Tensor::from_primitive::<Flex>(bias));
    let y_no = burn::tensor::module::linear(rows(x.clone()), weight, Some(bias));
    plain::<3>(y_no.reshape([b, t, o]))
}

fn input_gradient(dy: FlexTensor, weight: FlexTensor) -> FlexTensor {
    let ([b, t, o], [i, _]) = (dy.shape().dims(), weight.shape().dims());
    if dy.dtype() == DType::F32 {
        let (dy_no, weight_io) = (Matrix::new(values(&dy), b * t, o), Matrix::new(values(&weight), i, o));
        let mut dx = Vec::new();
        product_into(&mut dx, dy_no, weight_io.transposed(), Threads::Pool);
        return tensor(dx, Shape::new([b, t, i]));
    }
    let weight_io: Tensor<2> = Tensor::from_primitive::<Flex>(weight);
    plain::<3>(rows(dy).matmul(weight_io.transpose()).reshape([b, t, i]))
}

fn add_weight_gradient(gradients: &mut PartSums, part: usize, dy: &FlexTensor, x: &FlexTensor) {
    let ([b, t, o], [.., i]) = (dy.shape().dims(), x.shape().dims::<3>());
    if dy.dtype() == DType::F32 {
        let (dy_no, x_ni) = (Matrix::new(values(dy), b * t, o), Matrix::new(values(x), b * t, i));
        return gradients.add_product(part, x_ni.transposed(), dy_no);
    }
    let dweight_io = rows(x.clone()).transpose().matmul(rows(dy.clone()));
    gradients.add(part, values(&plain(wide(dweight_io))));
}

/// All rows of a batch, `[n, c]`.
fn rows(tensor: FlexTensor) -> Tensor<2> {
    let [b, t, c] = tensor.shape().dims();
    Tensor::<3>::from_primitive::<Flex>(tensor).reshape([b * t, c])
}

/// Rows that are added up before their sum is. Part of the result.
const ROWS: usize = 32;
/// Columns a task, and so a few cache lines of each row.
const COLUMNS: usize = 256;

/// The sum of all rows of `columns` elements. Groups of rows are added up first: a long sum loses less that way.
fn column_sums(values: &[f32], columns: usize) -> Vec<f32> {
    let mut sums = vec![0.0; columns];
    sums.par_chunks_mut(COLUMNS).enumerate().for_each(|(task, sums)| {
        let first = task * COLUMNS;
        for rows in values.chunks(ROWS * columns) {
            let mut group = [0.0; COLUMNS];
            for row in rows.chunks_exact(columns) {
                add(&mut group[..sums.len()], &row[first..first + sums.len()]);
            }
            add(sums, &group[..sums.len()]);
        }
    });
    sums
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::fused::checks::{assert_close, gradient, on_threads, pseudo};
    use crate::fused::{empty_leaf, leaf_id};

    /// A leaf that stands for a weight in `resident`.
    fn leaf<const D: usize>(values: &[f32], shape: [usize; D], resident: &Resident) -> Tensor<D> {
        let leaf = empty_leaf(&Device::flex());
        resident.insert(leaf_id(leaf.clone()), of::<D>(values, shape));
        leaf
    }

    fn of<const D: usize>(values: &[f32], shape: [usize; D]) -> Tensor<D> {
        Tensor::from_data(TensorData::new(values.to_vec(), shape), &Device::flex())
    }

    /// Values of input, weight, bias, and of the gradient from above.
    fn inputs([b, t, i, o]: [usize; 4]) -> [Vec<f32>; 4] {
        let n = b * t;
        [pseudo(n * i, 1, 2.0), pseudo(i * o, 2, 1.0), pseudo(o, 3, 1.0), pseudo(n * o, 4, 1.0)]
    }

    /// Result, and gradients of input, weight and bias.
    fn run(sizes: [usize; 4]) -> [Vec<f32>; 4] {
        let ([b, t, i, o], [x, weight, bias, dy]) = (sizes, inputs(sizes));
        let resident = Arc::new(Resident::default());
        let leaves = (leaf(&weight, [i, o], &resident), leaf(&bias, [o], &resident));
        resident.collect_in(PartSums::behind(Vec::new(), resident.lengths()));
        let x_leaf = of(&x, [b, t, i]).autodiff().require_grad();
        let y = linear(x_leaf.clone(), leaves.0, leaves.1, Some(&resident));
        let [y, dx] = gradient(&x_leaf, y, &dy);
        let mut dweight = resident.collected().unwrap();
        let dbias = dweight.split_off(i * o);
        let without = linear(of(&x, [b, t, i]), of(&weight, [i, o]), of(&bias, [o]), None);
        assert_eq!(without.into_data().try_into_vec::<f32>().unwrap(), y);
        [y, dx, dweight, dbias]
    }

    /// The same by the definition, in f64.
    fn expected(sizes: [usize; 4]) -> [Vec<f64>; 4] {
        let ([b, t, i, o], inputs) = (sizes, inputs(sizes));
        let [x, weight, bias, dy] = inputs.map(|values| values.into_iter().map(f64::from).collect::<Vec<f64>>());
        let (mut dx, mut dweight, mut dbias) = (vec![0.0; b * t * i], vec![0.0; i * o], vec![0.0; o]);
        let mut y = Vec::new();
        for row in 0..b * t {
            for column in 0..o {
                let upstream = dy[row * o + column];
                y.push((0..i).map(|k| x[row * i + k] * weight[k * o + column]).sum::<f64>() + bias[column]);
                dbias[column] += upstream;
                for k in 0..i {
                    dx[row * i + k] += upstream * weight[k * o + column];
                    dweight[k * o + column] += upstream * x[row * i + k];
                }
            }
        }
        [y, dx, dweight, dbias]
    }

    #[test]
    fn values_and_gradients_are_those_of_the_definition() {
        // One row; tokens that are no multiple of a group; one output; more than a task of columns; sums beyond a product's block.
        for sizes in [[1, 1, 3, 2], [3, 7, 5, 1], [2, 33, 20, 300], [2, 300, 40, 24], [1, 4, 700, 6]] {
            let parts = ["y", "dx", "dweight", "dbias"];
            for (part, (found, expected)) in parts.iter().zip(run(sizes).iter().zip(&expected(sizes))) {
                assert_close(&format!("{part} of {sizes:?}"), found, expected, 2e-6);
            }
        }
    }

    #[test]
    fn no_bit_depends_on_the_number_of_threads() {
        on_threads(|| run([2, 300, 130, 260]).concat());
    }
}
