//! Training on CUDA as far as it goes without a GPU: every kernel of a step is generated, compiled by NVIDIA's compiler for an H100, and
//! found by the next run in the kernel cache. The driver is a stand-in whose kernels do nothing, so all results are zeros.
//!
//! Needs NVRTC and CUDA's headers, as Python's packages (`pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt
//! nvidia-cuda-cccl`); without them the test says that it is skipped, or fails with `GPT2_TEST_NEEDS_NVRTC` set.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod gpu;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use gpu::Gpus;

/// The folder that Python's packages of CUDA 13 fill.
fn toolkit() -> Option<PathBuf> {
    let packages = |root: PathBuf| fs::read_dir(root.join("lib")).into_iter().flatten().flatten();
    let folders = gpt2::env::python_roots().into_iter().flat_map(packages);
    folders
        .map(|python| python.path().join("site-packages/nvidia/cu13"))
        .find(|toolkit| toolkit.join("lib/libnvrtc.so.13").is_file() && toolkit.join("include/cuda_fp16.h").is_file())
}

/// Kernels that the trainer brings along, by the beginnings of their names.
const OWN: [&str; 9] = [
    "layer_norm",
    "layer_norm_backward",
    "gelu",
    "gelu_backward",
    "causal_softmax",
    "causal_softmax_backward",
    "cross_entropy",
    "adamw",
    "sum_of_squares",
];

/// What a run asked of driver and compiler.
struct Asked {
    counts: serde_json::Value,
    /// Seconds for each kernel that was compiled.
    compiled: Vec<f64>,
    seconds: f64,
}

impl Asked {
    fn count(&self, of: &str) -> u64 {
        self.counts[of].as_u64().unwrap()
    }
}

#[test]
fn every_kernel_of_a_step_compiles_and_is_kept() {
    let Some(toolkit) = toolkit() else {
        assert!(std::env::var_os("GPT2_TEST_NEEDS_NVRTC").is_none(), "no NVRTC among Python's packages");
        println!("skipped: no NVRTC and headers of CUDA 13 among Python's packages");
        return;
    };
    let Some(folder) = Gpus::new() else { return };
    folder.library("libnvrtc.so", &gpu::source("nvrtc.cpp"), &["-ldl"]);

    let train = |preset: &str, precision: &str, run: &str| {
        let (counts, compiled) = (folder.path().join("counts.json"), folder.path().join("compiled.txt"));
        for file in [&counts, &compiled] {
            fs::remove_file(file).ok();
        }
        let start = Instant::now();
        let output = Command::new(env!("CARGO_BIN_EXE_gpt2"))
            .args([
                "train",
                "--device",
                "cuda",
                "--steps",
                "2",
                "--batch",
                "8",
                "--preset",
                preset,
                "--precision",
                precision,
            ])
            .args(["--tokenizer", if preset == "micro" { "bytes" } else { "gpt2" }])
            .current_dir(folder.path())
            .env("LD_LIBRARY_PATH", std::env::join_paths([folder.path(), &toolkit.join("lib")]).unwrap())
            .env("CUDA_PATH", &toolkit)
            .env("XDG_CACHE_HOME", folder.path().join(preset).join(precision))
            .env("STAND_IN_COUNTS", &counts)
            .env("STAND_IN_NVRTC", toolkit.join("lib/libnvrtc.so.13"))
            .env("STAND_IN_COMPILED", &compiled)
            .output()
            .unwrap();
        assert!(output.status.success(), "{preset} in {precision}: {}", String::from_utf8_lossy(&output.stderr));
        let seconds = start.elapsed().as_secs_f64();
        let lines = fs::read_to_string(&compiled).unwrap_or_default();
        let line = |line: &str| {
            let (seconds, code) = line.split_once(' ').unwrap();
            assert_eq!(code, "0", "{preset} in {precision}: a kernel does not compile");
            seconds.parse::<f64>().unwrap()
        };
        let asked = Asked {
            counts: serde_json::from_str(&fs::read_to_string(&counts).unwrap()).unwrap(),
            compiled: lines.lines().map(line).collect(),
            seconds,
        };
        println!(
            "{preset} in {precision}, {run}: {} kernels compiled in {:.1} s of {:.1} s, {} loaded, {} launches",
            asked.compiled.len(),
            asked.compiled.iter().fold(0.0, |all, seconds| all + seconds),
            asked.seconds,
            asked.count("modules"),
            asked.count("launches")
        );
        asked
    };

    // The largest of these takes what it is used for: the backend chooses kernels by shape.
    for (preset, precision) in
        [("micro", "f32"), ("micro", "bf16"), ("micro", "f16"), ("124m", "f32"), ("124m", "bf16")]
    {
        let cold = train(preset, precision, "first run");
        let names: Vec<&str> =
            cold.counts["kernels"].as_array().unwrap().iter().filter_map(|name| name.as_str()).collect();
        assert_eq!(cold.compiled.len(), names.len());
        for kernel in OWN {
            let start = format!("{kernel}_f_{precision}_");
            assert!(names.iter().any(|name| name.starts_with(&start)), "{preset}: no {start} among {names:?}");
        }
        let warm = train(preset, precision, "second run");
        let again = warm.compiled.len();
        // Where the backend measures something first, it may come to another kernel.
        assert!(again * 10 <= names.len(), "{preset} in {precision}: {again} kernels were compiled again");
    }
}
