//! The model and its optimizer against PyTorch, tensor by tensor: `reference/make_reference.py` wrote what is compared with.

#![allow(clippy::unwrap_used, reason = "a test may fail")]

use std::collections::HashMap;
use std::path::Path;

use burn::tensor::Device;
use gpt2::config::ModelConfig;
use gpt2::optim::{AdamW, AdamWConfig, clip_factor, sum_of_squares};
use gpt2::segments::{ModelError, SegmentedModel, TokenBatch};
use safetensors::SafeTensors;

struct Reference {
    settings: HashMap<String, String>,
    tensors: HashMap<String, Vec<f32>>,
    config: ModelConfig,
    batch: TokenBatch,
}

impl Reference {
    fn load() -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("reference/tiny_gpt2.safetensors");
        let bytes = std::fs::read(path).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let settings = header.metadata().clone().unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Vec<[u8; 4]> { file.tensor(name).unwrap().data().as_chunks().0.to_vec() };
        let tokens = |name: &str| words(name).into_iter().map(i32::from_le_bytes).collect();
        let size = |name: &str| settings[name].parse().unwrap();
        let config = ModelConfig {
            n_layer: size("n_layer"),
            n_head: size("n_head"),
            n_embd: size("n_embd"),
            block_size: size("block_size"),
            vocab_size: size("vocab_size"),
        };
        let batch =
            TokenBatch { inputs: tokens("inputs"), targets: tokens("targets"), rows: size("rows"), cols: size("cols") };
        let tensors = file
            .names()
            .into_iter()
            .filter(|name| !["inputs", "targets"].contains(name))
            .map(|name| {
                let values = words(name).into_iter().map(f32::from_le_bytes).collect();
                (name.to_owned(), values)
            })
            .collect();
        Self { settings, tensors, config, batch }
    }

    fn number(&self, name: &str) -> f64 {
        self.settings[name].parse().unwrap()
    }

    fn model(&self) -> SegmentedModel {
        let mut model = SegmentedModel::zeros(self.config.clone(), &Device::flex()).unwrap();
        for segment in 0..model.segments().len() {
            let flat: Vec<f32> =
                model.segments()[segment].params.iter().flat_map(|param| self.tensors[&param.path].clone()).collect();
            model.write_params(segment, &flat).unwrap();
        }
        model
    }

    /// Compares a segment's flat vector with the tensors named `prefix` + path, each relative to its own largest value.
    fn compare(&self, model: &SegmentedModel, segment: usize, flat: &[f32], prefix: &str, bound: f32) {
        for param in &model.segments()[segment].params {
            let name = format!("{prefix}{}", param.path);
            let values = &flat[param.offset..param.offset + param.len];
            let expected = &self.tensors[&name];
            if prefix != "grad." && param.path.ends_with("c_attn.bias") {
                // Softmax does not see the keys' bias: its gradient is zero but for rounding, which Adam blows up to whole steps.
                let c = self.config.n_embd;
                assert_close(&name, &values[..c], &expected[..c], bound);
                assert_close(&name, &values[2 * c..], &expected[2 * c..], bound);
            } else {
                assert_close(&name, values, expected, bound);
            }
        }
    }
}

/// Every element within `bound` times the largest magnitude of the expected tensor.
fn assert_close(name: &str, values: &[f32], expected: &[f32], bound: f32) {
    assert_eq!(values.len(), expected.len(), "{name}");
    let scale = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
    let worst = values
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0f32, |a, b| if b > a || b.is_nan() { b } else { a });
    assert!(
        worst <= bound * scale,
        "{name}: off by {worst}, {:.1e} of its largest value {scale}; allowed {bound:.1e}",
        worst / scale
    );
}

fn gradients(model: &mut SegmentedModel, batch: &TokenBatch) -> (f64, Vec<Vec<f32>>) {
    let mut all = vec![Vec::new(); model.segments().len()];
    let loss = model
        .forward_backward(batch, 1.0, &mut |segment, grads| {
            all[segment] = grads.into_flat()?;
            Ok::<_, ModelError>(())
        })
        .unwrap();
    (loss, all)
}

#[test]
fn logits_and_loss_match() {
    let reference = Reference::load();
    let model = reference.model();
    let batch = &reference.batch;
    let logits = model.logits(&batch.inputs, batch.rows, batch.cols).unwrap();
    assert_close("logits", &logits, &reference.tensors["logits"], 2e-6);
    let loss = model.loss(batch).unwrap();
    assert_close("loss", &[loss as f32], &reference.tensors["loss"], 1e-6);
}

#[test]
fn every_gradient_matches() {
    let reference = Reference::load();
    let mut model = reference.model();
    let (loss, all) = gradients(&mut model, &reference.batch);
    assert_close("loss", &[loss as f32], &reference.tensors["loss"], 1e-6);
    for (segment, flat) in all.iter().enumerate() {
        reference.compare(&model, segment, flat, "grad.", 1e-5);
    }
    let norm = all.iter().map(|flat| sum_of_squares(flat)).sum::<f64>().sqrt();
    assert_close("norm", &[norm as f32], &reference.tensors["grad_norm"], 1e-6);
}

#[test]
fn weights_after_ten_steps_match() {
    let reference = Reference::load();
    let model = train(&reference, None);
    for segment in 0..model.segments().len() {
        let flat = model.read_params(segment).unwrap();
        reference.compare(&model, segment, &flat, "ten_steps.", TRAINED);
    }
    let loss = model.loss(&reference.batch).unwrap();
    assert_close("loss", &[loss as f32], &reference.tensors["ten_steps_loss"], 1e-5);
}

#[test]
fn weights_after_ten_clipped_steps_match() {
    let reference = Reference::load();
    let clip = reference.number("clip");
    let norm = f64::from(reference.tensors["grad_norm"][0]);
    assert!(norm > clip, "the reference must clip");
    let model = train(&reference, Some(clip));
    for segment in 0..model.segments().len() {
        let flat = model.read_params(segment).unwrap();
        reference.compare(&model, segment, &flat, "clipped.", TRAINED);
    }
    // The two references differ by far more than the tolerance, or this test would say nothing about clipping.
    let (clipped, free) = ("clipped.wte.weight", "ten_steps.wte.weight");
    let pairs = reference.tensors[clipped].iter().zip(&reference.tensors[free]);
    let apart = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart > 20.0 * TRAINED, "{apart}");
}

/// Tolerance of trained weights, relative to the largest of a tensor. Adam divides by the root of second moments: where a gradient is
/// almost zero, its rounding turns part of a step (of 1e-2 here).
const TRAINED: f32 = 5e-4;

fn train(reference: &Reference, clip: Option<f64>) -> SegmentedModel {
    let mut model = reference.model();
    let config = AdamWConfig {
        beta1: reference.number("beta1"),
        beta2: reference.number("beta2"),
        epsilon: reference.number("epsilon"),
        weight_decay: reference.number("weight_decay"),
    };
    let mut optimizers: Vec<AdamW> =
        model.segments().iter().map(|segment| AdamW::new(config, segment, 0..segment.len).unwrap()).collect();
    for _ in 0..reference.number("steps") as usize {
        let (_, all) = gradients(&mut model, &reference.batch);
        let norm = all.iter().map(|flat| sum_of_squares(flat)).sum::<f64>().sqrt();
        let factor = clip.map_or(1.0, |max| clip_factor(norm, max));
        for (segment, grads) in all.iter().enumerate() {
            let mut params = model.read_params(segment).unwrap();
            optimizers[segment].step(&mut params, grads, reference.number("learning_rate"), factor).unwrap();
            model.write_params(segment, &params).unwrap();
        }
    }
    model
}
