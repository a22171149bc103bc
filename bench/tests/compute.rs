//! `bench compute` as a user meets it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const SMALL: &str = "compute --allow-debug --cases micro:8x2,micro:16x1 --threads 1 --steps 3 --rounds 2 --out out";

fn compute(arguments: &[&str], folder: &Path) -> (Output, Vec<Value>) {
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(SMALL.split_whitespace())
        .args(arguments)
        .current_dir(folder)
        .output()
        .unwrap();
    let text = fs::read_to_string(folder.join("out/compute.jsonl")).unwrap_or_default();
    (output, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn of<'a>(rows: &'a [Value], kind: &str) -> Vec<&'a Value> {
    rows.iter().filter(|row| row["kind"] == kind).collect()
}

#[test]
fn steps_and_layers_are_measured_and_held_against_the_peaks() {
    let folder = tempfile::tempdir().unwrap();
    let (output, rows) = compute(&[], folder.path());
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    let steps = of(&rows, "step");
    assert_eq!(steps.len(), 2 * 2, "{text}");
    for row in &steps {
        let number = |name: &str| row[name].as_f64().unwrap();
        assert_eq!((row["status"].as_str(), row["program"].as_str()), (Some("ok"), Some("ours")), "{row}");
        // 16 tokens a step, in both cases.
        assert!((number("tokens_per_s") * number("step_ms") / 1e3 - 16.0).abs() < 8.0, "{row}");
        // 6N without positions, and 12·L·C·T.
        let tokens = 50257.0 * 32.0 + 2.0 * (12.0 * 32.0 * 32.0 + 13.0 * 32.0) + 64.0;
        let flop = 6.0 * tokens + 12.0 * 2.0 * 32.0 * number("cols");
        assert!((number("gflop_per_s") / (number("tokens_per_s") * flop / 1e9) - 1.0).abs() < 1e-9, "{row}");
        assert!(number("matrix_share") > 0.0 && number("peak_rss_bytes") > 1e6, "{row}");
        assert!(row["allocations"]["count"].as_u64().unwrap() > 0, "{row}");
        // Of one device nothing is copied between backward pass, optimizer and model.
        assert_eq!((row["copies"]["copied"].as_u64(), row["copies"]["zeroed"].as_u64()), (Some(0), Some(0)), "{row}");
        // Masters, moments and gradients of 1.6 million parameters.
        assert!(number("peak_allocated_bytes") > 4.0 * 4.0 * tokens, "{row}");
    }
    let layers = of(&rows, "layer");
    assert_eq!(layers.len(), 2 * 2 * 9, "{text}");
    for row in &layers {
        assert!(row["ms"].as_f64().unwrap() > 0.0 && row["pytorch_ms"].is_null(), "{row}");
    }
    for part in
        ["matrix peak: ", "theoretical peak: ", "micro:8x2", "micro:16x1", "head and loss", "optimizer", "rows: "]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("peer:"), "{text}");
    // The records of the steps are those of a sweep.
    let report = Command::new(env!("CARGO_BIN_EXE_bench")).args(["report", "out"]).current_dir(folder.path()).output();
    assert!(report.unwrap().status.success());
    assert!(folder.path().join("out/report.html").is_file());
}

#[test]
fn a_python_that_plays_pytorch_is_compared_round_by_round() {
    // The real one is large and not everywhere: here the protocol is tried, with a program in its place.
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python");
    let script = "#!/bin/sh\ncase \"$2\" in\nprobe) echo '{\"torch\": \"0.0\"}'; exit;;\n\
                  layers) echo '{\"layers\": {\"qkv\": 1000000.0, \"mlp\": 1000000.0}}'; exit;;\nesac\n\
                  case \"$*\" in *--compile*) echo 'error: no compiler' >&2; exit 1;; esac\n\
                  case \"$*\" in *'--block 8 '*) block=8;; *) block=16;; esac\n\
                  echo \"{\\\"step_ms\\\": 1000000.0, \\\"losses\\\": [10.8, 10.7], \\\"peak_rss_bytes\\\": 7000000, \
                  \\\"parameters\\\": $(((50257 + block) * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 64))}\"\n";
    fs::write(&python, script).unwrap();
    assert!(Command::new("chmod").arg("755").arg(&python).status().unwrap().success());
    let (output, rows) = compute(&["--peers", "--peer-python", python.to_str().unwrap()], folder.path());
    let text = said(&output);
    assert!(!output.status.success(), "what was to be compiled has failed: {text}");
    assert!(
        text.contains("peer: PyTorch 0.0") && text.contains("by compiled: failed: ") && text.contains("no compiler"),
        "{text}"
    );
    let by = |program: &str| of(&rows, "step").into_iter().filter(|row| row["program"] == program).collect::<Vec<_>>();
    assert_eq!((by("ours").len(), by("pytorch").len(), by("pytorch-compiled").len()), (4, 4, 4), "{text}");
    for row in by("pytorch") {
        assert_eq!((row["step_ms"].as_f64(), row["peak_rss_bytes"].as_u64()), (Some(1e6), Some(7_000_000)), "{row}");
    }
    let layers = of(&rows, "layer");
    let compared = layers.iter().filter(|row| row["pytorch_ms"].as_f64() == Some(1e6)).count();
    assert_eq!(compared, 2 * 2 * 2, "{text}");
}

#[test]
fn without_pytorch_ours_are_measured_and_what_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (output, rows) =
        compute(&["--no-layers", "--peers", "eager", "--peer-python", "/nowhere/python"], folder.path());
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("PyTorch is left out") && text.contains("/nowhere/python"), "{text}");
    assert_eq!((of(&rows, "step").len(), of(&rows, "layer").len()), (4, 0), "{text}");
}

#[test]
fn wrong_options_are_refused_by_name_before_anything_runs() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, part) in
        [(&["--cases", "tiny:4096x1"][..], "--cases tiny:4096x1"), (&["--threads", "0"], "--threads 0")]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_bench"))
            .args(["compute", "--allow-debug"])
            .args(arguments)
            .current_dir(folder.path())
            .output()
            .unwrap();
        let text = said(&output);
        assert!(!output.status.success() && text.contains(part), "{text}");
    }
    assert!(!folder.path().join("bench-results").exists());
}
