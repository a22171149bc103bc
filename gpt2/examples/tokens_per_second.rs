//! How fast one rank computes: forward, backward and optimizer step, no communication.
//!
//! `cargo run --release -p gpt2 --example tokens_per_second [PRESET] [VOCAB] [ROWS] [COLS] [STEPS] [KERNELS]`, by default
//! `tiny 256 12 64 30 fused`; one line for 1 thread and one for 2, medians.

use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::Buffer;
use gpt2::config::{ModelConfig, Preset};
use gpt2::memory::{self, CountingAllocator};
use gpt2::model::KernelChoice;
use gpt2::optim::{AdamW, AdamWConfig, sum_of_squares};
use gpt2::segments::{Compute, ModelError, SegmentedModel, TokenBatch};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let kept = gpt2::sys::keep_freed_pages();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let preset: Preset = arguments.first().map_or("tiny", |s| s.as_str()).parse()?;
    let number = |index: usize, default: usize| arguments.get(index).map_or(Ok(default), |text| text.parse());
    let config = preset.config(number(1, 256)?);
    let (rows, cols, steps) = (number(2, 12)?, number(3, 64)?, number(4, 30)?);
    let kernels = arguments.get(5).map_or(Ok(KernelChoice::default()), |name| name.parse())?;
    if cfg!(debug_assertions) {
        println!("debug build: these figures say nothing");
    }
    println!("{preset}, vocabulary {}, B={rows} T={cols}, {kernels}, freed pages kept: {kept}", config.vocab_size);
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        pool.install(|| measure(&config, kernels, [rows, cols, steps], threads))?;
    }
    Ok(())
}

fn measure(
    config: &ModelConfig,
    kernels: KernelChoice,
    [rows, cols, steps]: [usize; 3],
    threads: usize,
) -> Result<(), Failure> {
    let compute = Compute { kernels, ..Compute::default() };
    let mut model = SegmentedModel::absent(config.clone(), compute, &Device::flex())?;
    let tokens: Vec<i32> =
        (0..rows * cols + 1).map(|i| (i * i * 31 + i * 7) as i32 % config.vocab_size as i32).collect();
    let batch = TokenBatch { inputs: tokens[..rows * cols].to_vec(), targets: tokens[1..].to_vec(), rows, cols };
    let segments = model.segments().to_vec();
    let mut optimizers = Vec::new();
    for (segment, info) in segments.iter().enumerate() {
        optimizers.push(AdamW::new(AdamWConfig::default(), info, 0..info.len)?);
        model.put_params(segment, Buffer::from_vec(info.initial(config, 1337)))?;
    }
    let (mut computing, mut updating, mut loss, mut norm) = (Vec::new(), Vec::new(), 0.0, 0.0);
    memory::reset_peaks();
    for _ in 0..steps + 3 {
        let start = Instant::now();
        let mut grads = vec![Vec::new(); segments.len()];
        loss = model.forward_backward(&batch, 1.0, &mut |segment, ready| {
            grads[segment] = ready.into_flat()?;
            Ok::<_, ModelError>(())
        })?;
        let computed = Instant::now();
        norm = grads.iter().map(|grads| sum_of_squares(grads)).sum::<f64>().sqrt();
        for (segment, grads) in grads.iter().enumerate() {
            let mut params = model.take_params(segment)?.ok_or("weights of a CPU's model are in host memory")?;
            optimizers[segment].step(&mut params, grads, 1e-3, 1.0)?;
            model.put_params(segment, Buffer::from_vec(params))?;
        }
        computing.push(computed - start);
        updating.push(computed.elapsed());
    }
    let (computing, updating) = (median(&computing[3..]), median(&updating[3..]));
    let step = (computing + updating).as_secs_f64();
    let tokens = (rows * cols) as f64;
    println!(
        "{threads} thread(s): {:.0} tokens/s, {:.1} GFLOP/s; forward+backward {:.1} ms, optimizer {:.1} ms, peak {:.0} MiB, loss {loss:.3}, \
         gradient norm {norm:.3}",
        tokens / step,
        tokens * config.flops_per_token(cols) / step / 1e9,
        computing.as_secs_f64() * 1e3,
        updating.as_secs_f64() * 1e3,
        memory::usage().map_or(f64::NAN, |usage| usage.total.peak as f64 / f64::from(1 << 20)),
    );
    Ok(())
}

fn median(times: &[Duration]) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}
