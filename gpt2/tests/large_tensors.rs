//! The largest tensors that a training step could have, and does not: squares of positions, and all logits.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Mutex, PoisonError};

use burn::tensor::Device;
use gpt2::config::ModelConfig;
use gpt2::memory::{self, CountingAllocator};
use gpt2::segments::{ModelError, SegmentedModel, TokenBatch};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// The figures are the process's, so that one test at a time may run.
static ALONE: Mutex<()> = Mutex::new(());

fn total() -> memory::Bytes {
    memory::usage().unwrap().total
}

/// Bytes by which the process grew at most in each: a training step, and the loss alone.
fn growth(config: ModelConfig, rows: usize, cols: usize) -> [u64; 2] {
    let _lock = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let vocabulary = config.vocab_size;
    let mut model = SegmentedModel::new(config, 1, &Device::flex()).unwrap();
    let tokens: Vec<i32> = (0..=rows * cols).map(|i| ((i * i * 31 + i * 7) % vocabulary) as i32).collect();
    let batch = TokenBatch { inputs: tokens[..rows * cols].to_vec(), targets: tokens[1..].to_vec(), rows, cols };
    let mut train = || {
        model
            .forward_backward(&batch, 1.0, &mut |_, grads| grads.into_flat().map(drop) as Result<(), ModelError>)
            .unwrap();
    };
    // What threads and libraries keep for later steps.
    train();
    let grown = |work: &mut dyn FnMut()| {
        let before = total().current;
        memory::reset_peaks();
        work();
        total().peak - before
    };
    let trained = grown(&mut train);
    [trained, grown(&mut || assert!(model.loss(&batch).unwrap().is_finite()))]
}

#[test]
fn no_square_of_positions() {
    let positions = 4096;
    let config = ModelConfig { n_layer: 2, n_head: 2, n_embd: 16, block_size: positions, vocab_size: 61 };
    // One head's alone.
    let square = (positions * positions * 4) as u64;
    for growth in growth(config, 1, positions) {
        assert!(growth < square / 2, "{growth} bytes, and a square has {square}");
    }
}

#[test]
fn no_tensor_of_all_logits() {
    let (rows, cols, vocabulary) = (4, 512, 10_000);
    let config = ModelConfig { n_layer: 1, n_head: 2, n_embd: 16, block_size: cols, vocab_size: vocabulary };
    let logits = (rows * cols * vocabulary * 4) as u64;
    for growth in growth(config, rows, cols) {
        assert!(growth < logits / 2, "{growth} bytes, and all logits have {logits}");
    }
}
