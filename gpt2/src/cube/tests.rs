//! Kernels on whatever wgpu reaches against tensor operations on the processor. Without an adapter the tests say that they are skipped.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use burn::module::Param;
use burn::tensor::{FloatDType, TensorData};

use super::*;
use crate::config::Preset;
use crate::devices::DeviceChoice;
use crate::dropout::{Dropout, Place};
use crate::fused;
use crate::init;
use crate::model::{Kernels, LayerNorm};
use crate::optim::{AdamW, AdamWConfig, DeviceAdamW, sum_of_squares, sum_of_squares_on_device};
use crate::segments::cross_entropy::{loss_and_gradient, mean_loss};
use crate::segments::{ModelError, SegmentedModel, TokenBatch, layout};

/// Differences relative to the largest value, or to 1, the size of what goes in, where results nearly cancel: sums of up to a few thousand
/// values in another order, in f32 whose unit roundoff is 6e-8, and exponentials that are off by a few units in the last place.
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

fn assert_close(what: &str, found: &[Vec<f32>], expected: &[Vec<f32>], bound: f32) {
    assert_eq!(found.len(), expected.len());
    for (part, (found, expected)) in found.iter().zip(expected).enumerate() {
        let size = expected.iter().fold(1.0f32, |most, value| most.max(value.abs()));
        let off = found.iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(found.len() == expected.len() && off <= bound * size, "{what}, part {part}: off by {off:e} of {size}");
    }
}

/// A view of `[b, t, c]` whose rows have gaps between them, as the backend leaves them on some devices.
fn with_gaps(flat: Tensor<1>, [b, t, c]: [usize; 3]) -> Tensor<3> {
    flat.reshape([b, t, GAP + c + GAP]).narrow(2, GAP, c)
}

/// In elements: views begin at multiples of 256 bytes.
const GAP: usize = 64;

fn assert_gaps(tensor: Tensor<3>) {
    let primitive = plain(tensor.inner());
    assert_eq!(pitch(&primitive), columns(&primitive) + 2 * GAP, "the backend has copied the view");
}

/// Runs `layer` on the device and on the processor.
fn compare(what: &str, device: &Device, bound: f32, run: impl Fn(&Device, bool) -> Vec<Vec<f32>>) {
    assert_close(what, &run(device, true), &run(&Device::flex(), false), bound);
}

#[test]
fn layer_norm_is_the_composed_one() {
    let Some(device) = device() else { return };
    // More rows than partial sums; fewer, as many, and more elements than units of a cube; more than a cube's memory holds.
    for shape in [[2, 3, 5], [1, 1, 1], [3, 500, 7], [2, 2, 128], [2, 5, 129], [1, 4, 768], [1, 3, HELD + 1]] {
        compare(&format!("layer norm {shape:?}"), &device, BOUND, |device, generated| {
            let c = shape[2];
            let x = leaf([shape[0] * shape[1] * (c + 2 * GAP)], 1, device);
            let (weight, bias) = (leaf([c], 2, device), leaf([c], 3, device));
            let layer =
                LayerNorm { weight: Param::from_tensor(weight.clone()), bias: Param::from_tensor(bias.clone()) };
            let input = with_gaps(x.clone(), shape);
            if generated && shape[0] * shape[1] > 1 {
                assert_gaps(input.clone());
            }
            let y = layer.forward(input, if generated { Kernels::Generated } else { Kernels::Composed });
            passes(&[x, weight, bias], y)
        });
    }
}

#[test]
fn gelu_is_the_processors() {
    let Some(device) = device() else { return };
    for shape in [[1, 1, 1], [2, 3, 5], [1, 2, 128], [3, 4, 257]] {
        compare(&format!("gelu {shape:?}"), &device, BOUND, |device, generated| {
            let x = leaf([shape[0] * shape[1] * (shape[2] + 2 * GAP)], 4, device);
            let input = with_gaps(x.clone() * 2.5, shape);
            passes(std::slice::from_ref(&x), if generated { gelu(input) } else { fused::gelu(input) })
        });
    }
}

/// The gradient that comes in is not only this operation's.
#[test]
fn a_residual_keeps_its_own_gradient() {
    let Some(device) = device() else { return };
    compare("residual", &device, BOUND, |device, generated| {
        let x = leaf([2 * 3 * 70], 4, device);
        let input: Tensor<3> = x.clone().reshape([2, 3, 70]);
        let gelu = if generated { gelu } else { fused::gelu };
        passes(std::slice::from_ref(&x), input.clone() + gelu(input.clone()) + input)
    });
}

#[test]
fn attention_is_the_processors() {
    let Some(device) = device() else { return };
    // More rows than cubes along one axis, one position, and rows longer than a cube.
    for (b, t, n_head, q) in [(1, 1, 1, 1), (3, 1, 2, 4), (2, 3, 2, 5), (400, 7, 12, 2), (1, 128, 2, 8), (2, 131, 3, 4)]
    {
        compare(&format!("attention {b}x{t}, {n_head} x {q}"), &device, BOUND, |device, generated| {
            let c3 = 3 * n_head * q;
            let qkv = leaf([b * t * (c3 + 2 * GAP)], 5, device);
            let input = with_gaps(qkv.clone(), [b, t, c3]);
            let attention = if generated { attention } else { fused::attention };
            passes(std::slice::from_ref(&qkv), attention(input, n_head, None))
        });
        let site = Dropout::new(0.2, 1, 2, 3).map(|dropout| dropout.at(4, Place::Attention));
        compare(&format!("attention with dropout {b}x{t}, {n_head} x {q}"), &device, BOUND, |device, generated| {
            let c3 = 3 * n_head * q;
            let qkv = leaf([b * t * (c3 + 2 * GAP)], 5, device);
            let input = with_gaps(qkv.clone(), [b, t, c3]);
            let attention = if generated { attention } else { fused::attention };
            passes(std::slice::from_ref(&qkv), attention(input, n_head, site))
        });
    }
}

#[test]
fn dropout_is_the_processors() {
    let Some(device) = device() else { return };
    let site = Dropout::new(0.3, 1, 2, 3).unwrap().at(4, Place::MlpOutput);
    for shape in [[1, 1, 1], [2, 3, 5], [1, 2, 128], [3, 4, 1030]] {
        // No sums: the same bits.
        compare(&format!("dropout {shape:?}"), &device, 0.0, |device, generated| {
            let x = leaf([shape[0] * shape[1] * (shape[2] + 2 * GAP)], 4, device);
            let input = with_gaps(x.clone(), shape);
            passes(std::slice::from_ref(&x), if generated { dropout(input, site) } else { fused::dropout(input, site) })
        });
    }
}

#[test]
fn what_is_dropped_of_infinities_and_nan_is_the_processors() {
    let Some(device) = device() else { return };
    let site = Dropout::new(0.3, 1, 2, 3).unwrap().at(4, Place::MlpOutput);
    let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.0];
    let values: Vec<f32> = special.into_iter().cycle().take(3 * 5 * 64).collect();
    let input = |device: &Device| {
        Tensor::<3>::from_data(TensorData::new(values.clone(), [3, 5, 64]), (device, FloatDType::F32.into()))
    };
    let read = |tensor: Tensor<3>| tensor.into_data().try_into_vec_as::<f32>().unwrap();
    let found = read(dropout(input(&device), site));
    let expected = read(fused::dropout(input(&Device::flex()), site));
    assert!(expected.contains(&f32::INFINITY) && expected.contains(&0.0), "some are kept, and some are dropped");
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!(found == expected || (found.is_nan() && expected.is_nan()), "{index}: {found}, and not {expected}");
    }
}

#[test]
fn cross_entropy_is_the_processors() {
    let Some(device) = device() else { return };
    for (n, v) in [(1, 1), (5, 61), (3, 128), (2, 1001), (40_000, 3)] {
        let targets: Vec<i32> = (0..n).map(|row| (row * 11 % v) as i32).collect();
        compare(&format!("cross entropy {n}x{v}"), &device, BOUND, |device, _| {
            let logits =
                || with_gaps(leaf([n * (v + 2 * GAP)], 6, device).inner() * 4.0, [1, n, v]).squeeze_dim::<2>(0);
            let kept = logits();
            let alone = mean_loss(kept.clone(), v, &targets).unwrap() as f32;
            // Once somebody else has the logits, which stay as they are, and once nobody.
            let (loss, gradient) = loss_and_gradient(kept.clone(), v, &targets, n as f32);
            let (again, in_place) = loss_and_gradient(logits(), v, &targets, n as f32);
            let read = |tensor: Tensor<2>| tensor.into_data().try_into_vec_as::<f32>().unwrap();
            let losses = vec![alone, loss.read().unwrap() as f32, again.read().unwrap() as f32];
            vec![losses, read(gradient), read(in_place), read(kept)]
        });
    }
}

#[test]
fn what_is_behind_the_vocabulary_is_no_token() {
    let Some(device) = device() else { return };
    for (n, v, more) in [(5, 61, 3), (3, 128, 64), (2, 1001, 1)] {
        let targets: Vec<i32> = (0..n).map(|row| (row * 11 % v) as i32).collect();
        compare(&format!("cross entropy {n}x{v}+{more}"), &device, BOUND, |device, generated| {
            // Larger than all tokens'.
            let behind = Tensor::<2>::full([n, more], 50.0, device);
            let tokens: Tensor<2> = leaf([n * v], 6, device).inner().reshape([n, v]) * 4.0;
            let logits = if generated { Tensor::cat(vec![tokens, behind], 1) } else { tokens };
            let alone = mean_loss(logits.clone(), v, &targets).unwrap() as f32;
            let (loss, gradient) = loss_and_gradient(logits, v, &targets, n as f32);
            let read = |tensor: Tensor<2>| tensor.into_data().try_into_vec_as::<f32>().unwrap();
            if generated {
                assert_eq!(read(gradient.clone().narrow(1, v, more)), vec![0.0; n * more]);
            }
            vec![vec![alone, loss.read().unwrap() as f32], read(gradient.narrow(1, 0, v))]
        });
    }
}

#[test]
fn a_vocabulary_of_any_size_is_trained_as_on_the_processor() {
    let Some(device) = device() else { return };
    // A multiple of 64, none, and one for which there are too few positions behind it.
    for v in [320, 300, 257] {
        let config = Preset::Micro.config(v);
        let (rows, cols) = (2, 16);
        let ids: Vec<i32> = (0..rows * cols + 1).map(|at| (at * 7919 % v) as i32).collect();
        let batch = TokenBatch { inputs: ids[..rows * cols].to_vec(), targets: ids[1..].to_vec(), rows, cols };
        compare(&format!("{v} tokens"), &device, BOUND, |device, _| {
            let mut model = SegmentedModel::new(config.clone(), 1, device).unwrap();
            let mut found = vec![vec![model.loss(&batch).unwrap() as f32]];
            let loss = model.forward_backward(&batch, 1.0, &mut |_, grads| {
                found.push(grads.into_flat()?);
                Ok::<_, ModelError>(())
            });
            found.push(vec![loss.unwrap() as f32]);
            found.push(model.logits(&batch.inputs, rows, cols).unwrap());
            found
        });
    }
}

/// Sixteen bits hold 11 of mantissa; what is compared was computed in f32 from the same rounded values, and rounded once or twice.
#[test]
fn tensors_may_be_of_sixteen_bits() {
    let Some(device) = device() else { return };
    const F16_BOUND: f32 = 4e-3;
    let half = |tensor: Tensor<3>| tensor.cast(FloatDType::F16);
    let wide = |tensor: Tensor<3>| tensor.cast(FloatDType::F32);
    compare("gelu in f16", &device, F16_BOUND, |device, generated| {
        let x = leaf([2 * 3 * 70], 4, device);
        let gelu = if generated { gelu } else { fused::gelu };
        passes(std::slice::from_ref(&x), wide(gelu(half(x.clone().reshape([2, 3, 70])))))
    });
    compare("attention in f16", &device, F16_BOUND, |device, generated| {
        let qkv = leaf([2 * 33 * 24], 5, device);
        let attention = if generated { attention } else { fused::attention };
        passes(std::slice::from_ref(&qkv), wide(attention(half(qkv.clone().reshape([2, 33, 24])), 2, None)))
    });
    compare("layer norm in f16", &device, F16_BOUND, |device, generated| {
        let (x, weight, bias) = (leaf([2 * 3 * 70], 1, device), leaf([70], 2, device), leaf([70], 3, device));
        let param = |leaf: &Tensor<1>| Param::from_tensor(leaf.clone().inner().cast(FloatDType::F16).autodiff());
        let layer = LayerNorm { weight: param(&weight), bias: param(&bias) };
        let kernels = if generated { Kernels::Generated } else { Kernels::Composed };
        passes(std::slice::from_ref(&x), wide(layer.forward(half(x.clone().reshape([2, 3, 70])), kernels)))
    });
    compare("cross entropy in f16", &device, F16_BOUND, |device, _| {
        let logits = half(leaf([2 * 200], 6, device).inner().reshape([1, 2, 200])).squeeze_dim::<2>(0);
        let (loss, gradient) = loss_and_gradient(logits, 200, &[3, 199], 2.0);
        vec![vec![loss.read().unwrap() as f32], gradient.into_data().try_into_vec_as::<f32>().unwrap()]
    });
}

#[test]
fn a_diverged_model_has_no_finite_loss() {
    let Some(device) = device() else { return };
    for bad in [f32::NAN, f32::INFINITY] {
        for at in [0, 1, 300] {
            let mut values = vec![1.0; 301];
            values[at] = bad;
            let logits: Tensor<2> = Tensor::from_data(TensorData::new(values, [1, 301]), &device);
            let alone = mean_loss(logits.clone(), 301, &[1]).unwrap();
            let (loss, gradient) = loss_and_gradient(logits, 301, &[1], 1.0);
            let gradient = gradient.into_data().try_into_vec_as::<f32>().unwrap();
            assert!(!alone.is_finite() && !loss.read().unwrap().is_finite(), "{bad} at {at}");
            assert!(gradient.iter().any(|value| !value.is_finite()), "{bad} at {at}");
        }
    }
}

#[test]
fn what_others_hold_is_not_written() {
    let Some(device) = device() else { return };
    let qkv = leaf([6 * 12], 8, &device).reshape([2, 3, 12]);
    let scores: Tensor<4> = leaf([18], 9, &device).inner().reshape([1, 2, 3, 3]);
    let before = scores.clone().into_data();
    let weights: Tensor<4> = tensor(causal_softmax(plain(scores.clone()), 0.5));
    scores.into_data().assert_eq(&before, true);
    let sums = weights.sum_dim(3).into_data().try_into_vec_as::<f32>().unwrap();
    assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-6), "{sums:?}");
    let before = qkv.clone().inner().into_data();
    attention(qkv.clone(), 2, None).sum().backward();
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
            // In pieces that do not end where decay does, one of another type, and with somebody else who holds the parameters.
            let mut pieces = [&grads[..7], &grads[7..1000], &grads[1000..]].map(vector);
            let rounded = pieces[1].clone().cast(FloatDType::F16);
            let grads = [&grads[..7], &rounded.clone().try_into_vec_as::<f32>().unwrap(), &grads[1000..]].concat();
            pieces[1] = rounded;
            let (model, before) = (params.clone(), host.clone());
            on_host.step(&mut host, &grads, 1e-2, 0.7).unwrap();
            params = on_device.step(Some(params), pieces.into(), 1e-2, 0.7).unwrap().unwrap();
            assert_close("parameters that the model has", &[model.try_into_vec_as::<f32>().unwrap()], &[before], BOUND);
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

/// Axes of length 1 have strides that say nothing.
#[test]
fn rows_are_found_whatever_the_strides_of_single_positions() {
    let Some(device) = device() else { return };
    let x: Tensor<3> = leaf([2 * 130], 3, &device).inner().reshape([1, 2, 130]).swap_dims(0, 1);
    let y = gelu(x.clone()).into_data().try_into_vec_as::<f32>().unwrap();
    let flat: Tensor<3> = leaf([2 * 130], 3, &Device::flex()).inner().reshape([2, 1, 130]);
    assert_close("gelu", &[y], &[fused::gelu(flat).into_data().try_into_vec_as::<f32>().unwrap()], BOUND);
}
