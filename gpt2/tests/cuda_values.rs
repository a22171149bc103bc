//! Training on CUDA with its values, without a GPU: the kernels that the backend generates for CUDA are compiled for the processor and run
//! there, thread by thread, and driver and NCCL are stand-ins (`gpu`). What comes out is compared with the processor's own backend.
//!
//! The stand-ins do what is put into a stream as late as they may, so that what does not wait for it comes too early, and they run the
//! threads of blocks forwards and backwards by turns, so that what lacks a barrier comes out wrong; fresh and freed memory holds no numbers.
//!
//! Needs a C++ compiler; without one the tests say that they are skipped, or fail with `TEST_NEEDS_CXX` set.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod gpu;

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use gpt2::checkpoint::Checkpoint;
use gpu::Machine;

/// Bounds on what differs from the processor: losses and norms relative, weights relative to the way that training took them, in Euclidean
/// norm.
struct Bounds {
    losses: f64,
    norms: f64,
    weights: f64,
}

/// As on a wgpu device, whose kernels are the same: sums in another order, through about 20 layers.
const F32: Bounds = Bounds { losses: 1e-6, norms: 1e-5, weights: 1e-4 };

/// Where every operation rounds to `roundoff`, and which way depends on the order of sums: a loss is the mean over 256 tokens and the logits
/// of each, whose roundings cancel; a norm is carried by few large gradients. AdamW's first steps are about the sign of each gradient.
const fn rounded(roundoff: f64) -> Bounds {
    Bounds { losses: roundoff / 100.0, norms: roundoff / 2.0, weights: 20.0 * roundoff }
}

const BF16: Bounds = rounded(1.0 / 256.0);
const F16: Bounds = rounded(1.0 / 2048.0);

/// Factors are rounded to 10 bits of fraction and summed in f32.
const TF32: Bounds = rounded(1.0 / 2048.0);

struct Run {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<f32>,
    counts: serde_json::Value,
}

/// Training of the smallest model for three steps. `devices` of 0 is the processor.
fn training(machine: &Machine, (devices, when): (usize, &str), arguments: &[&str], out: &Path) -> Command {
    let mut command = machine.gpt2(devices, when);
    command
        .args(["train", "--preset", "micro", "--tokenizer", "bytes", "--batch", "8"])
        .args(["--steps", "3", "--eval-every", "0", "--seed", "7"])
        .args(["--device", if devices == 0 { "cpu" } else { "cuda" }])
        .args(arguments)
        .arg("--out")
        .arg(out);
    command
}

fn train(
    machine: &Machine,
    (devices, when): (usize, &str),
    arguments: &[&str],
    change: impl FnOnce(&mut Command),
) -> Run {
    let out = tempfile::tempdir_in(machine.path()).unwrap();
    let counts = out.path().join("counts.json");
    let mut command = training(machine, (devices, when), arguments, out.path());
    command.env("STAND_IN_COUNTS", &counts);
    change(&mut command);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{arguments:?}, {when}: {}", said(&output));
    let steps = fs::read_to_string(out.path().join("steps.jsonl")).unwrap();
    let steps: Vec<serde_json::Value> = steps.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let column = |name: &str| steps.iter().map(|step| step[name].as_f64().unwrap()).collect::<Vec<f64>>();
    let run = Run {
        losses: column("loss"),
        norms: column("grad_norm"),
        weights: Checkpoint::load(&out.path().join("model.safetensors")).unwrap().weights.concat(),
        counts: fs::read(&counts).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default(),
    };
    assert_eq!(run.losses.len(), 3);
    run
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn largest(values: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(values.len(), expected.len());
    let off = values.iter().zip(expected).map(|(value, expected)| ((value - expected) / expected).abs());
    // What is no number is the largest.
    off.max_by(f64::total_cmp).unwrap()
}

/// Euclidean norm of the difference.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
}

/// What the processor does in `arguments`, and the weights that it began with.
struct Expected {
    run: Run,
    first: Vec<f32>,
}

fn expected(machine: &Machine, arguments: &[&str]) -> Expected {
    let none = |_: &mut Command| {};
    // With next to no learning rate weights stay what they were.
    let still = ["--lr", "1e-30", "--min-lr", "1e-30", "--weight-decay", "0"];
    Expected {
        run: train(machine, (0, "late"), arguments, none),
        first: train(machine, (0, "late"), &still, none).weights,
    }
}

fn compare(what: &str, run: &Run, expected: &Expected, bounds: &Bounds) {
    let way = distance(&expected.run.weights, &expected.first);
    let losses = largest(&run.losses, &expected.run.losses);
    let norms = largest(&run.norms, &expected.run.norms);
    let weights = distance(&run.weights, &expected.run.weights) / way;
    println!("{what}: losses {losses:.1e}, gradient norms {norms:.1e}, weights {weights:.1e}");
    assert!(losses <= bounds.losses, "{what}: losses {:?}, on the processor {:?}", run.losses, expected.run.losses);
    assert!(norms <= bounds.norms, "{what}: norms {:?}, on the processor {:?}", run.norms, expected.run.norms);
    assert!(weights <= bounds.weights, "{what}: weights are off by {weights:e} of the way that they went");
}

#[test]
fn one_device_computes_what_the_processor_does_in_every_type() {
    let Some(machine) = Machine::new() else { return };
    for (precision, bounds) in [("f32", F32), ("bf16", BF16), ("f16", F16)] {
        let arguments = ["--precision", precision];
        let expected = expected(&machine, &arguments);
        let run = train(&machine, (1, "late"), &arguments, |_| {});
        compare(precision, &run, &expected, &bounds);
        // It was computed there, and everything of it but the peak that utilisation is a share of.
        let count = |of: &str| run.counts[of].as_u64().unwrap();
        assert!(count("launches") - count("skipped") > 500, "{:?}", run.counts);
        let skipped = run.counts["skipped_kernels"].as_array().unwrap();
        let of_peak = |name: &&str| ["full_", "cast_element_", "matmul_"].iter().any(|kind| name.starts_with(kind));
        let of_peak = skipped.iter().filter_map(|name| name.as_str()).filter(of_peak).count();
        assert!(of_peak == skipped.len() && skipped.len() <= 4, "{skipped:?}");
        let at_once = train(&machine, (1, "at-once"), &arguments, |_| {});
        assert_eq!(
            run.weights, at_once.weights,
            "{precision}: it matters when the device does what it is told, or in which order"
        );
        if precision == "f32" {
            let rounded = train(&machine, (1, "late"), &arguments, |command| {
                command.env("STAND_IN_TF32", "1");
            });
            assert_ne!(rounded.losses, run.losses, "products are not made of TF32");
            compare("TF32", &rounded, &expected, &TF32);
        }
    }
}

/// A strategy, its number of ranks, and what else it is told.
const STRATEGIES: [(&str, usize, &[&str]); 10] = [
    ("ps", 2, &[]),
    ("ps", 3, &["--dedicated-server"]),
    ("sharded-ps", 2, &[]),
    ("ring", 2, &[]),
    ("ddp", 2, &[]),
    ("zero1", 2, &[]),
    ("zero2", 2, &[]),
    ("fsdp", 2, &[]),
    ("hierarchical", 4, &["--ranks-per-node", "2"]),
    ("hsdp", 4, &["--ranks-per-node", "2"]),
];

/// Every strategy with NCCL, in `arguments`, against one rank on the processor.
fn every_strategy(arguments: &[&str], bounds: &Bounds) {
    let Some(machine) = Machine::new() else { return };
    let expected = expected(&machine, arguments);
    for (strategy, ranks, more) in STRATEGIES {
        let nproc = ranks.to_string();
        let told = ["--strategy", strategy, "--nproc", &nproc, "--transport", "nccl"];
        // Several buckets.
        let small = ["--first-bucket-bytes", "20000", "--bucket-bytes", "20000", "--fusion-bytes", "20000"];
        let told = [&told, &small, more, arguments].concat();
        let run = train(&machine, (4, "late"), &told, |_| {});
        compare(&format!("{strategy} {more:?} on {ranks} ranks"), &run, &expected, bounds);
    }
    let left = fs::read_dir(machine.path().join("messages")).unwrap().count();
    assert_eq!(left, 0, "messages are left that nobody took");
}

#[test]
fn every_strategy_over_nccl_trains_as_one_rank_on_the_processor() {
    // All drop the same.
    every_strategy(&["--dropout", "0.1"], &F32);
}

#[test]
fn every_strategy_over_nccl_trains_in_bf16() {
    every_strategy(&["--precision", "bf16", "--wire", "bf16"], &BF16);
}

#[test]
fn every_strategy_over_nccl_trains_in_f16_with_lamb() {
    every_strategy(&["--precision", "f16", "--optimizer", "lamb"], &F16);
}

/// Buckets are read back for transports that move bytes, and both kinds meet inside and between nodes.
#[test]
fn other_transports_get_what_the_device_computed() {
    let Some(machine) = Machine::new() else { return };
    let expected = expected(&machine, &[]);
    let small = ["--first-bucket-bytes", "20000", "--bucket-bytes", "20000"];
    let nodes = ["--strategy", "hierarchical", "--nproc", "4", "--ranks-per-node", "2"];
    let sharded = ["--strategy", "hsdp", "--nproc", "4", "--ranks-per-node", "2"];
    for told in [
        [&["--strategy", "ddp", "--nproc", "2", "--transport", "tcp"], &small[..]].concat(),
        [&["--strategy", "fsdp", "--nproc", "2", "--transport", "quic"], &small[..]].concat(),
        [&nodes[..], &["--node-transport", "nccl", "--transport", "tcp"], &small].concat(),
        [&sharded[..], &["--node-transport", "nccl", "--transport", "tcp"], &small].concat(),
        [&sharded[..], &["--node-transport", "shm", "--transport", "nccl"], &small].concat(),
        [&nodes[..], &["--node-transport", "shm", "--transport", "nccl"], &small].concat(),
    ] {
        let run = train(&machine, (4, "late"), &told, |_| {});
        compare(&told.join(" "), &run, &expected, &F32);
    }
}

/// What users meet most on a GPU, wherever in a step it comes: one line each, and nobody waits for the rank that ended.
#[test]
fn too_little_memory_and_a_lost_device_are_one_clear_error_on_every_rank() {
    let Some(machine) = Machine::new() else { return };
    let ddp = |transport| ["--strategy", "ddp", "--nproc", "2", "--transport", transport];
    for arguments in [&[][..], &ddp("nccl"), &ddp("tcp")] {
        // What is found when the device is opened ends with the code of a configuration.
        for (fault, value, code, cause) in [
            ("STAND_IN_MEMORY", "3000000", 1, "out of device memory"),
            ("STAND_IN_CONTEXT", "2", 2, "which processes use its memory"),
            ("STAND_IN_CONTEXT", "46", 2, "another process may use it exclusively"),
            ("STAND_IN_LOST_AT", "0", 2, "may bring the GPU back"),
            ("STAND_IN_LOST_AT", "10", 1, "this process can no longer use the GPU"),
            ("STAND_IN_LOST_AT", "300", 1, "this process can no longer use the GPU"),
        ] {
            let out = tempfile::tempdir_in(machine.path()).unwrap();
            let mut command = training(&machine, (4, "late"), arguments, out.path());
            let output = command.env(fault, value).output().unwrap();
            let text = said(&output);
            assert_eq!(output.status.code(), Some(code), "{arguments:?} with {fault}={value}: {text}");
            assert!(text.contains(cause), "{arguments:?} with {fault}={value}: {text}");
            for sign in ["panicked", "Caused by", "acktrace"] {
                assert!(!text.contains(sign), "{arguments:?} with {fault}={value}: {text}");
            }
        }
    }
}
