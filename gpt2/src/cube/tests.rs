//! Kernels on whatever wgpu reaches against tensor operations on the processor. Without an adapter the tests say that they are skipped.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use burn::module::Param;
use burn::tensor::{FloatDType, TensorData};

use super::*;
use crate::config::Preset;
use crate::cross_entropy::{Placement, loss_and_gradient, mean_loss};
use crate::devices::DeviceChoice;
use crate::fused;
use crate::init;
use crate::model::{Kernels, LayerNorm};
use crate::optim::{AdamW, AdamWConfig, DeviceAdamW, sum_of_squares, sum_of_squares_on_device};
use crate::segments::layout;

/// Differences relative to the largest value: sums of up to a few thousand values in another order, in f32 whose unit roundoff is 6e-8, and
/// exponentials that are off by a few units in the last place.
const BOUND: f32 = 1e-5;

fn device() -> Option<Device> {
    match DeviceChoice::Wgpu(None).open() {
        Ok(opened) => Some(opened.device),
        Err(reason) => {
            assert!(std::env::var_os("GPT2_TEST_NEEDS_WGPU").is_none(), "{reason}");
            println!("skipped: {reason}");
            None
        }
    }
}

/// Values in −2..2, the same for each call with the same arguments.
fn values(count: usize, salt: usize) -> Vec<f32> {
    let at = |i: usize| ((i * 7919 + salt * 104_729) % 4001) as f32 / 1000.25 - 2.0;
    (0..count).map(at).collect()
}

fn leaf<const D: usize>(shape: [usize; D], salt: usize, device: &Device) -> Tensor<D> {
    let data = TensorData::new(values(shape.iter().product(), salt), shape);
    Tensor::from_data(data, (device, FloatDType::F32.into())).autodiff().require_grad()
}

/// What `layer` makes of its leaves, and the gradients of these when each element of the result has its own weight.
fn passes<const D: usize>(leaves: &[Tensor<1>], result: Tensor<D>) -> Vec<Vec<f32>> {
    let upstream = leaf(result.dims(), 17, &result.device()).inner();
    let forward = result.clone().inner();
    let mut grads = (result * upstream.autodiff()).sum().backward();
    let gradients = leaves.iter().map(|leaf| leaf.grad_remove(&mut grads).expect("each leaf has a gradient"));
    let mut all = vec![forward.into_data().try_into_vec_as::<f32>().unwrap()];
    all.extend(gradients.map(|gradient| gradient.into_data().try_into_vec_as::<f32>().unwrap()));
    all
}

fn assert_close(what: &str, found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len());
    for (part, (found, expected)) in found.iter().zip(expected).enumerate() {
        let size = expected.iter().fold(1e-3f32, |most, value| most.max(value.abs()));
        let off = found.iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(found.len() == expected.len() && off <= BOUND * size, "{what}, part {part}: off by {off:e} of {size}");
    }
}

#[test]
fn layer_norm_is_the_composed_one() {
    let Some(device) = device() else { return };
    // More rows than partial sums; one, odd and even numbers of elements for each unit of a cube.
    for shape in [[2, 3, 5], [1, 1, 1], [3, 500, 7], [2, 2, 128], [2, 5, 129], [1, 4, 768]] {
        let run = |device: &Device, kernels: Kernels<'_>| {
            let c = shape[2];
            let (x, weight, bias) =
                (leaf([shape.iter().product()], 1, device), leaf([c], 2, device), leaf([c], 3, device));
            let layer =
                LayerNorm { weight: Param::from_tensor(weight.clone()), bias: Param::from_tensor(bias.clone()) };
            let y = layer.forward(x.clone().reshape(shape), kernels);
            passes(&[x, weight, bias], y)
        };
        let expected = run(&Device::flex(), Kernels::Composed);
        assert_close(&format!("layer norm {shape:?}"), &run(&device, Kernels::Generated), &expected);
    }
}

#[test]
fn gelu_is_the_processors() {
    let Some(device) = device() else { return };
    for shape in [[1, 1, 1], [2, 3, 5], [1, 2, 128], [3, 4, 257]] {
        let run = |device: &Device, gelu: fn(Tensor<3>) -> Tensor<3>| {
            let x = leaf([shape.iter().product()], 4, device);
            passes(std::slice::from_ref(&x), gelu(x.clone().reshape(shape) * 2.5))
        };
        let expected = run(&Device::flex(), fused::gelu);
        assert_close(&format!("gelu {shape:?}"), &run(&device, gelu), &expected);
    }
}

#[test]
fn attention_is_the_processors() {
    let Some(device) = device() else { return };
    // More rows than cubes along one axis, one position, and rows longer than a cube.
    for (b, t, n_head, q) in [(1, 1, 1, 1), (2, 3, 2, 5), (400, 7, 12, 2), (1, 128, 2, 8), (2, 131, 3, 4)] {
        let run = |device: &Device, attention: fn(Tensor<3>, usize) -> Tensor<3>| {
            let qkv = leaf([b * t * 3 * n_head * q], 5, device);
            passes(std::slice::from_ref(&qkv), attention(qkv.clone().reshape([b, t, 3 * n_head * q]), n_head))
        };
        let expected = run(&Device::flex(), fused::attention);
        assert_close(&format!("attention {b}x{t}, {n_head} x {q}"), &run(&device, attention), &expected);
    }
}

#[test]
fn cross_entropy_is_the_processors() {
    let Some(device) = device() else { return };
    for (n, v) in [(1, 1), (5, 61), (3, 128), (2, 1001), (40_000, 3)] {
        let targets: Vec<i32> = (0..n).map(|row| (row * 11 % v) as i32).collect();
        let run = |device: &Device, placement| {
            // Rows with gaps between them.
            let wide: Tensor<2> = leaf([n, v + 3], 6, device).inner() * 4.0;
            let logits = wide.narrow(1, 2, v);
            let alone = mean_loss(logits.clone(), &targets, placement).unwrap() as f32;
            let (loss, gradient) = loss_and_gradient(logits.clone(), &targets, n as f32, placement).unwrap();
            let read = |tensor: Tensor<2>| tensor.into_data().try_into_vec_as::<f32>().unwrap();
            // Somebody else has the logits, so they are as they were.
            [vec![alone, loss.read().unwrap() as f32], read(gradient), read(logits)]
        };
        let expected = run(&Device::flex(), Placement::Host);
        assert_close(&format!("cross entropy {n}x{v}"), &run(&device, Placement::Device), &expected);
    }
}

#[test]
fn a_diverged_model_has_no_finite_loss() {
    let Some(device) = device() else { return };
    for bad in [f32::NAN, f32::INFINITY] {
        let logits = Tensor::from_data(TensorData::new(vec![bad, 1.0, 2.0], [1, 3]), &device);
        let loss = mean_loss(logits, &[1], Placement::Device).unwrap();
        assert!(!loss.is_finite(), "{bad}: {loss}");
    }
}

#[test]
fn what_others_hold_is_not_written() {
    let Some(device) = device() else { return };
    let qkv = leaf([6 * 12], 8, &device).reshape([2, 3, 12]);
    let scores: Tensor<4> = leaf([36], 9, &device).inner().reshape([1, 2, 6, 3]).narrow(2, 0, 3);
    let before = scores.clone().into_data();
    let weights: Tensor<4> = tensor(causal_softmax(plain(scores.clone()), 0.5));
    scores.into_data().assert_eq(&before, true);
    let sums = weights.sum_dim(3).into_data().try_into_vec_as::<f32>().unwrap();
    assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-6), "{sums:?}");
    let before = qkv.clone().inner().into_data();
    attention(qkv.clone(), 2).sum().backward();
    qkv.inner().into_data().assert_eq(&before, true);
}

#[test]
fn steps_of_adamw_are_the_processors() {
    let Some(device) = device() else { return };
    let segment = layout(&Preset::Micro.config(61)).unwrap().swap_remove(1);
    let n = segment.len;
    for range in [0..n, 5..n / 2 + 3] {
        let vector = |values: &[f32]| {
            Tensor::<1>::from_data(TensorData::new(values.to_vec(), [values.len()]), (&device, FloatDType::F32.into()))
        };
        let start = init::normal(1, "params", range.len(), 0.5);
        let (mut host, mut params) = (start.clone(), vector(&start));
        let mut on_host = AdamW::new(AdamWConfig::default(), &segment, range.clone()).unwrap();
        let mut on_device = DeviceAdamW::new(AdamWConfig::default(), &segment, range.clone()).unwrap();
        for step in 0..4 {
            let grads = init::normal(step, "grads", range.len(), 0.1);
            // In pieces that do not end where decay does, and with somebody else who holds the parameters.
            let pieces = [&grads[..7], &grads[7..1000], &grads[1000..]].map(vector).into();
            let (model, before) = (params.clone(), host.clone());
            on_host.step(&mut host, &grads, 1e-2, 0.7).unwrap();
            params = on_device.step(Some(params), pieces, 1e-2, 0.7).unwrap().unwrap();
            assert_close("parameters that the model has", &[model.try_into_vec_as::<f32>().unwrap()], &[before]);
        }
        let found = params.try_into_vec_as::<f32>().unwrap();
        for (a, b) in found.iter().zip(&host) {
            assert!((a - b).abs() <= 4.0 * f32::EPSILON * b.abs().max(0.1), "{a} {b}");
        }
    }
}

#[test]
fn sums_of_squares_are_the_processors() {
    let Some(device) = device() else { return };
    let values = init::normal(1, "grads", 100_003, 3.0);
    let scale = 65_536.0f32;
    let scaled: Vec<f32> = values.iter().map(|value| value * scale).collect();
    let pieces = |values: &[f32], cut: usize| {
        let piece = |values: &[f32]| Tensor::<1>::from_data(TensorData::new(values.to_vec(), [values.len()]), &device);
        vec![piece(&values[..cut]), piece(&values[cut..])]
    };
    let (found, again, expected) = (
        sum_of_squares_on_device(pieces(&scaled, 99_999), 1.0 / scale).unwrap(),
        sum_of_squares_on_device(pieces(&scaled, 99_999), 1.0 / scale).unwrap(),
        sum_of_squares(&scaled),
    );
    assert!((found / expected - 1.0).abs() < 1e-5, "{found} {expected}");
    assert_eq!(found.to_bits(), again.to_bits());
    assert!(!sum_of_squares_on_device(pieces(&[1.0, f32::NAN], 1), 1.0).unwrap().is_finite());
}
