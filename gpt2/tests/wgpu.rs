//! The trainer on a wgpu device against the processor: the same losses, gradient norms and weights, within rounding.
//!
//! Any adapter will do. Where there is none the tests say that they are skipped, and why; with `GPT2_TEST_NEEDS_WGPU` set they fail.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod local;

use std::path::Path;

use burn::tensor::Device;
use gpt2::checkpoint::Checkpoint;
use gpt2::devices::DeviceChoice;
use gpt2::run::{RankOptions, run_threads};
use gpt2::segments::SegmentedModel;
use gpt2::strategy::StrategyKind;
use gpt2::trainer::{Keep, Summary, TrainConfig};
use isocomm::{TransportKind, TransportOptions};

const STEPS: u64 = 4;

/// Relative difference of losses. Both devices compute in f32, whose unit roundoff is 6e-8. Sums run over at most 256 values in
/// another order, and exponentials and roots may be off by a few units in the last place, through about 20 layers of operations; roundings
/// of either sign mostly cancel in the mean over 384 tokens. Software Vulkan stays below 1e-7.
const LOSS: f64 = 1e-6;

/// Relative difference of gradient norms: the backward pass doubles the depth, and the weights of later steps differ already.
const NORM: f64 = 1e-5;

/// Difference of the final weights relative to the way that training has taken them from the first weights, both in Euclidean norm. AdamW's
/// first steps are about the sign of each gradient, so where a gradient is nearly zero roundings count for much; there are few such places.
const WEIGHTS: f64 = 1e-4;

/// Trains on `ranks` threads; the result, and the weights that were saved.
fn run(config: &TrainConfig, ranks: usize, device: &Device, folder: &Path) -> (Summary, Vec<f32>) {
    let checkpoint = folder.join("model.safetensors");
    let options = RankOptions {
        transport: TransportKind::LOCAL,
        options: TransportOptions::default(),
        node_transport: None,
        threads: Some(1),
        keep: Keep { model: Some(checkpoint.clone()), ..Keep::default() },
    };
    let corpus = local::corpus(20_000);
    let summary = run_threads(config, &corpus, ranks, &options, device, &mut ()).unwrap();
    (summary, Checkpoint::load(&checkpoint).unwrap().weights.concat())
}

fn norm(values: impl Iterator<Item = f32>) -> f64 {
    values.map(|value| f64::from(value).powi(2)).sum::<f64>().sqrt()
}

fn largest_difference(values: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(values.len(), expected.len());
    let off = values.iter().zip(expected).map(|(value, expected)| ((value - expected) / expected).abs());
    // What is no number is the largest.
    off.max_by(f64::total_cmp).unwrap()
}

#[test]
fn trains_as_the_processor_does() {
    let device = match DeviceChoice::Wgpu(None).open() {
        Ok(opened) => opened.device,
        Err(reason) => {
            assert!(std::env::var_os("GPT2_TEST_NEEDS_WGPU").is_none(), "{reason}");
            println!("skipped: {reason}");
            return;
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let single = local::single(STEPS);
    let (expected, expected_weights) = run(&single, 1, &Device::flex(), folder.path());
    let first = Checkpoint::of(
        &SegmentedModel::new(single.model.clone(), single.seed, &Device::flex()).unwrap(),
        serde_json::Value::Null,
        0,
    );
    let first = first.unwrap().weights.concat();
    let way = norm(expected_weights.iter().zip(&first).map(|(last, first)| last - first));

    for (strategy, ranks) in [(StrategyKind::Single, 1), (StrategyKind::Ddp, 2)] {
        let config = local::with(&single, (strategy, false), ranks);
        let (summary, weights) = run(&config, ranks, &device, folder.path());
        assert_eq!(weights.len(), expected_weights.len());
        let losses = largest_difference(&summary.losses, &expected.losses);
        let norms = largest_difference(&summary.grad_norms, &expected.grad_norms);
        let off = norm(weights.iter().zip(&expected_weights).map(|(value, expected)| value - expected)) / way;
        println!("{strategy} on {ranks} rank(s): losses {losses:.1e}, gradient norms {norms:.1e}, weights {off:.1e}");
        assert!(losses <= LOSS, "{strategy}: losses {:?}, on the processor {:?}", summary.losses, expected.losses);
        assert!(
            norms <= NORM,
            "{strategy}: norms {:?}, on the processor {:?}",
            summary.grad_norms,
            expected.grad_norms
        );
        assert!(off <= WEIGHTS, "{strategy}: weights differ by {off:e} of the way that they went");
        local::assert_counts(&summary, strategy.name());
    }
}
