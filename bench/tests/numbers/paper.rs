//! `bench paper` as a user meets it, on a model that trains in seconds.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Lines that repeat themselves enough to be learnt.
fn text(folder: &Path) -> String {
    let path = folder.join("text.txt");
    let line = |n: u32| format!("{n:04}: the rank that waits has nothing to lose but its time.\n");
    fs::write(&path, (0..400).map(line).collect::<String>()).unwrap();
    path.display().to_string()
}

fn bench(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bench")).args(arguments).current_dir(folder).output().unwrap()
}

fn rows(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// What must hold for every row that ran, and for the record of its run.
fn assert_sound(row: &Value, record: &Value, steps: u64) {
    let name = &row["name"];
    assert_eq!(row["status"], "ok", "{name}");
    assert_eq!(row["problems"].as_array().unwrap().len(), 0, "{name}");
    let measured = &record["measured"];
    assert_eq!(measured["losses"].as_array().unwrap().len() as u64, steps, "{name}");
    let skipped = measured["trained"]["skipped_steps"].as_u64().unwrap();
    for rank in measured["ranks"].as_array().unwrap() {
        let trained = &rank["trained"];
        assert_eq!(trained["operations"], trained["operations_expected"], "{name}");
        assert_eq!(rank["payload_bytes"].as_u64().unwrap_or(0), rank["payload_expected"].as_u64().unwrap(), "{name}");
        assert_eq!(trained["optimizer_steps"], serde_json::json!([steps - skipped, steps - skipped]), "{name}");
        assert!(trained["memory"]["total"]["peak"].as_u64().unwrap() > 0, "{name}");
        assert!(trained["cpu_utilization"].as_f64().is_some(), "{name}");
    }
}

/// The record of each row's run, in the order of the rows.
fn records_of(rows: &[Value], out: &Path) -> Vec<Value> {
    let all = self::rows(&out.join("results.jsonl"));
    assert_eq!(all.len(), rows.len());
    let of = |row: &Value| {
        let config = &row["config"];
        let is = |record: &&Value| {
            let cell = &record["cell"];
            let dedicated = cell["dedicated_server"].as_bool().unwrap_or(false);
            (&cell["strategy"], &cell["precision"]) == (&config["strategy"], &config["precision"])
                && config["options"]["dedicated_server"] == dedicated
        };
        all.iter().find(is).unwrap().clone()
    };
    rows.iter().map(of).collect()
}

fn assert_pictures(out: &Path, names: &[&str], words: &[&str]) {
    for name in names {
        let svg = fs::read_to_string(out.join(name)).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"), "{name}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{name}");
        for word in words {
            assert!(svg.contains(word), "{name} does not say {word}");
        }
    }
    let unfinished =
        fs::read_dir(out).unwrap().filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|e| e == "tmp"));
    assert_eq!(unfinished.count(), 0);
}

#[test]
fn bai_runs_every_strategy_under_equal_conditions() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments = [
        "paper",
        "bai",
        "--allow-debug",
        "--preset",
        "micro",
        "--steps",
        "6",
        "--batch",
        "4",
        "--data",
        &data,
        "--out",
        "out",
        "--mixed",
        "f16",
    ];
    let output = bench(&arguments, folder.path());
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    let out = folder.path().join("out");
    let rows = rows(&out.join("rows.jsonl"));
    let records = records_of(&rows, &out);
    let names: Vec<&str> = rows.iter().map(|row| row["name"].as_str().unwrap()).collect();
    let expected =
        ["single", "ps", "ps, dedicated", "sharded-ps", "ddp", "ring", "sharded-ps, f16", "ddp, f16", "ring, f16"];
    assert_eq!(names, expected);
    for (row, record) in rows.iter().zip(&records) {
        assert_sound(row, record, 6);
    }
    // Two ranks compute; a server that does not is a third.
    assert_eq!(rows[2]["ranks"], 3);
    assert_eq!(records[2]["measured"]["ranks"][0]["trained"]["computes"], false);
    assert_eq!(rows[1]["parameter_servers"], 1);
    assert_eq!(rows[3]["parameter_servers"], 2);
    // In f32 all learn the same from the same data.
    for row in &rows[1..6] {
        assert!(row["loss_difference"].as_f64().unwrap() < 1e-4, "{}", row["name"]);
    }
    for part in [
        "operations/step",
        "CPU %",
        "optimizer steps",
        "Horovod",
        "over ps (single parameter server)",
        "all checks hold",
    ] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    let pictures = ["loss-against-time.svg", "throughput.svg", "utilisation.svg", "memory.svg", "operations.svg"];
    assert_pictures(&out, &pictures, &["sharded-ps, f16", "ps, dedicated"]);
    assert_pictures(&out, &["parameter-servers.svg"], &["1 server(s), dedicated", "2 server(s)"]);

    // Rows of an earlier run are somebody's time.
    let again = bench(&arguments, folder.path());
    assert!(!again.status.success());
    assert!(said(&again).contains("holds an earlier run"), "{}", said(&again));
}

#[test]
fn patwardhan_counts_epochs() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments = [
        "paper",
        "patwardhan",
        "--allow-debug",
        "--preset",
        "micro",
        "--epochs",
        "2",
        "--steps",
        "12",
        "--batch",
        "4",
        "--data",
        &data,
        "--out",
        "out",
        "--transport",
        "shm",
    ];
    let output = bench(&arguments, folder.path());
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    let out = folder.path().join("out");
    let measured = rows(&out.join("rows.jsonl"));
    let records = records_of(&measured, &out);
    let names: Vec<&str> = measured.iter().map(|row| row["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["single", "ddp", "fsdp"]);
    for (row, record) in measured.iter().zip(&records) {
        assert_sound(row, record, 24);
        assert_eq!(row["transport"], if row["name"] == "single" { "none" } else { "shm" });
        assert_eq!(record["measured"]["trained"]["validations"].as_array().unwrap().len(), 2);
    }
    let epochs = rows(&out.join("epochs.jsonl"));
    assert_eq!(epochs.len(), 3 * 2);
    for epoch in &epochs {
        assert_eq!(epoch["steps"], 12, "{epoch}");
        for figure in ["seconds", "tokens_per_s", "training_loss", "validation_loss", "gradient_norm"] {
            assert!(epoch[figure].as_f64().is_some_and(|value| value > 0.0), "{figure}: {epoch}");
        }
    }
    // Each rank keeps the parameters' masters and moments of half the model.
    let optimizer =
        |record: &Value| record["measured"]["ranks"][0]["trained"]["memory"]["optimizer"]["peak"].as_u64().unwrap();
    assert!(optimizer(&records[2]) < optimizer(&records[1]), "fsdp keeps as much as ddp");
    for part in ["epoch by epoch", "mean norm", "val. loss", "all checks hold"] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    assert_pictures(
        &out,
        &["throughput.svg", "gradient-norm.svg", "time.svg", "loss.svg", "memory.svg"],
        &["single", "ddp", "fsdp"],
    );
}

#[test]
fn lin_switches_on_one_thing_after_the_other() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments = [
        "paper",
        "lin",
        "--allow-debug",
        "--preset",
        "micro",
        "--steps",
        "6",
        "--batch",
        "8",
        "--accumulation",
        "2",
        "--scale-ranks",
        "2",
        "--links",
        "loopback",
        "--transport",
        "local",
        "--data",
        &data,
        "--out",
        "out",
    ];
    let output = bench(&arguments, folder.path());
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    let out = folder.path().join("out");
    let rows = rows(&out.join("rows.jsonl"));
    let names: Vec<&str> =
        rows.iter().map(|row| row["name"].as_str().unwrap().strip_suffix(", loopback").unwrap()).collect();
    let expected = [
        "one device",
        "+ data sharding",
        "+ mixed precision (bf16)",
        "+ fused operations",
        "+ accumulation (2 micro-steps)",
        "+ overlap",
        "+ 2 times the batch",
        "one device, all optimizations",
        "one device, all optimizations",
        "all optimizations, in two phases",
    ];
    assert_eq!(names, expected);
    for row in &rows {
        assert_eq!((&row["status"], &row["config"]["optimizer"]["kind"]), (&"ok".into(), &"lamb".into()), "{row}");
    }
    // What was switched on stays on, and changes nothing of what is learnt.
    let options = |row: &Value| {
        let config = &row["config"];
        let text = |value: &Value| value.as_str().unwrap().to_string();
        (text(&config["kernels"]), config["accumulation"].clone(), config["options"]["overlap"].clone())
    };
    assert_eq!(options(&rows[3]), ("fused".into(), 1.into(), false.into()));
    assert_eq!(options(&rows[5]), ("fused".into(), 2.into(), true.into()));
    for row in &rows[1..6] {
        assert!(row["loss_difference"].as_f64().unwrap() < 2e-2, "{}", row["name"]);
    }
    for part in [
        "of the row before",
        "efficiency",
        "two phases",
        "What BERT has and this run does not",
        "an ordinary network is enough",
    ] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    let pictures = ["throughput.svg", "exposed.svg", "scaling.svg", "loss-against-time.svg"];
    assert_pictures(&out, &pictures[..2], &["data sharding", "accumulation"]);
    assert_pictures(&out, &pictures[2..], &["loopback"]);
}

#[test]
fn a_row_that_cannot_run_is_told_and_fails_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments = [
        "paper",
        "patwardhan",
        "--allow-debug",
        "--preset",
        "mini",
        "--epochs",
        "3",
        "--steps",
        "400",
        "--batch",
        "8",
        "--data",
        &data,
        "--out",
        "out",
        "--row-timeout",
        "1",
    ];
    let output = bench(&arguments, folder.path());
    let text = said(&output);
    assert!(!output.status.success(), "{text}");
    assert!(text.contains("ROW FAILED") && !text.contains("all checks hold") && !text.contains("panicked"), "{text}");
}

#[test]
fn wrong_arguments_are_one_clear_error_each() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let cases: &[(&[&str], &str)] = &[
        (&[], "Usage"),
        (&["bai", "--data", "/nowhere"], "/nowhere"),
        (&["bai", "--ranks", "1"], "--ranks 1"),
        (&["bai", "--ranks", "5"], "--batch 12"),
        (&["bai", "--steps", "0"], "--steps"),
        (&["bai", "--mixed", "f8"], "f8"),
        (&["bai", "--transport", "pigeon"], "pigeon"),
        (&["bai", "--threads", "0"], "--threads"),
        (&["patwardhan", "--epochs", "0"], "--epochs"),
        (&["patwardhan", "--row-timeout", "0"], "--row-timeout"),
        (&["patwardhan", "--batch", "4000"], "enough for "),
        (&["bai", "--out", "text.txt/results"], "text.txt/results"),
        (&["lin", "--links", "moon"], "--links"),
        (&["lin", "--links", "loopback", "--batch", "12"], "a multiple of 16"),
        (&["lin", "--links", "loopback", "--optimizer", "adam"], "adamw, lamb, sgd"),
    ];
    for (arguments, expected) in cases {
        let mut all = vec!["paper"];
        all.extend(*arguments);
        if !arguments.is_empty() {
            all.push("--allow-debug");
            if !arguments.contains(&"--data") {
                all.extend(["--data", &data]);
            }
        }
        let output = bench(&all, folder.path());
        assert!(!output.status.success(), "{arguments:?} was accepted");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains(expected) && !told.contains("panicked"), "{arguments:?}: {told}");
    }
    if cfg!(debug_assertions) {
        let output = bench(&["paper", "bai", "--data", &data], folder.path());
        assert!(!output.status.success());
        assert!(said(&output).contains("--allow-debug"));
    }
}
