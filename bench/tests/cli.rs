//! The benchmark as a user meets it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use gpt2::strategy::StrategyKind;
use isocomm::TransportKind;
use serde_json::Value;

fn bench(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_bench")).args(arguments).current_dir(folder).output().unwrap()
}

fn text(folder: &Path) -> String {
    let path = folder.join("text.txt");
    fs::write(&path, "Sphinx of black quartz, judge my vow. ".repeat(400)).unwrap();
    path.to_str().unwrap().to_string()
}

fn rows(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
#[cfg(debug_assertions)]
fn a_debug_build_is_refused_unless_allowed() {
    let folder = tempfile::tempdir().unwrap();
    let output = bench(&[], folder.path());
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("--allow-debug"));
}

#[test]
fn every_strategy_over_every_transport_gives_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments = [
        "--allow-debug",
        "--skip-proof",
        "--links",
        "loopback",
        "--preset",
        "micro",
        "--rounds",
        "1",
        "--steps",
        "5",
        "--batch",
        "4",
        "--data",
        &data,
        "--out",
        "results",
    ];
    let output = bench(&arguments, folder.path());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let rows = rows(&folder.path().join("results/results.jsonl"));
    // `single` once, every other strategy over every transport.
    let (strategies, transports) = (StrategyKind::of_one_device().count() - 1, TransportKind::all().len());
    assert_eq!(rows.len(), 1 + strategies * transports, "{said}");
    for row in &rows {
        let name = format!("{} over {}", row["cell"]["strategy"], row["cell"]["transport"]);
        let status = &row["status"]["kind"];
        if row["cell"]["transport"] == "nccl" {
            assert_eq!(status, "not-available", "{name}: {}", row["status"]);
            continue;
        }
        assert_eq!(status, "ok", "{name}");
        let measured = &row["measured"];
        assert_eq!(measured["losses"].as_array().unwrap().len(), 5, "{name}");
        let ranks = measured["ranks"].as_array().unwrap();
        assert_eq!(ranks.len() as u64, row["cell"]["ranks"].as_u64().unwrap(), "{name}");
        for rank in ranks {
            assert_eq!(rank["payload_bytes"], rank["payload_expected"], "{name}");
            assert!(rank["peak_rss_bytes"].as_u64().unwrap() > 0, "{name}");
            let steps = rank["steps"]["total"].as_array().unwrap();
            assert!(steps.len() == 5 && steps.iter().all(|ms| ms.as_f64().unwrap() > 0.0), "{name}: {steps:?}");
            assert_eq!(rank["steps"]["exposed"].as_array().unwrap().len(), 5, "{name}");
        }
        assert!(row["environment"]["kernel"].as_str().is_some(), "{name}");
    }
    assert!(folder.path().join("results/report.html").exists());
    for strategy in ["ps", "sharded-ps", "ring", "ddp", "zero1", "zero2", "fsdp", "hierarchical"] {
        let hashes: Vec<&Value> = rows
            .iter()
            .filter(|row| row["cell"]["strategy"] == strategy && row["cell"]["transport"] != "nccl")
            .map(|row| &row["measured"]["weights_hash"])
            .collect();
        assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{strategy}: {hashes:?}");
    }
}

#[test]
fn links_are_measured_where_there_can_be_some_and_the_answer_fits_the_screen() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments = [
        "--allow-debug",
        "--skip-proof",
        "--preset",
        "micro",
        "--steps",
        "6",
        "--batch",
        "4",
        "--data",
        &data,
        "--out",
        "results",
        "--links",
        "loopback,lan-1g",
        "--strategies",
        "ddp,ring",
        "--transports",
        "shm,tcp-raw",
        "--budget",
        "0s",
    ];
    let output = bench(&arguments, folder.path());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let rows = rows(&folder.path().join("results/results.jsonl"));
    let alone = said.contains("lan-1g: nothing is measured over this link, because");
    // Memory goes over no link, and without time there is one round.
    assert_eq!(rows.len(), if alone { 4 } else { 6 }, "{said}");
    assert!(rows.iter().all(|row| row["round"] == 1 && row["status"]["kind"] == "ok"), "{said}");
    let answer = &said[said.find("On loopback").unwrap()..said.find("\nrows: ").unwrap()];
    assert!(answer.lines().all(|line| line.chars().count() <= 80), "{answer}");
    let flat = answer.replace('\n', " ");
    assert!(flat.contains("the shortest step is") && flat.contains("3 rounds are needed"), "{answer}");
    assert_eq!(answer.contains("On lan-1g (1 Gbit/s"), !alone, "{answer}");
    for name in ["\nddp ", "\nring "] {
        assert!(answer.contains(name), "{answer}");
    }
}

#[test]
fn the_proof_is_written_and_holds() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    let arguments = [
        "--allow-debug",
        "--preset",
        "micro",
        "--rounds",
        "1",
        "--steps",
        "2",
        "--batch",
        "4",
        "--data",
        &data,
        "--out",
        "results",
        "--links",
        "loopback",
        "--strategies",
        "single,ring",
        "--transports",
        "local,tcp-raw",
    ];
    let output = bench(&arguments, folder.path());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let proofs = rows(&folder.path().join("results/proof.jsonl"));
    assert_eq!(proofs.len(), 4);
    for proof in proofs {
        assert_eq!(proof["weights_identical"], true, "{proof}");
        assert_eq!(proof["bytes_equal_formula"], true, "{proof}");
        for difference in ["loss_difference", "norm_difference"] {
            assert!(proof[difference].as_f64().unwrap() <= proof["tolerance"].as_f64().unwrap(), "{proof}");
        }
    }
}

#[test]
fn wrong_arguments_are_one_clear_error_each() {
    let folder = tempfile::tempdir().unwrap();
    let data = text(folder.path());
    fs::write(folder.path().join("taken"), "").unwrap();
    fs::create_dir(folder.path().join("earlier")).unwrap();
    fs::write(folder.path().join("earlier/results.jsonl"), "{}\n").unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["--no-such-flag"], "--no-such-flag"),
        (&["--links", "moon"], "moon"),
        (&["--budget", "soon"], "90s or 5m"),
        (&["--budget", "5m", "--rounds", "3"], "--rounds"),
        (&["--strategies", "telepathy"], "telepathy"),
        (&["--transports", "pigeon"], "pigeon"),
        (&["--ranks", "0"], "--ranks 0"),
        (&["--ranks", "5"], "--batch 12"),
        (&["--steps", "0"], "--steps"),
        (&["--rounds", "0"], "--rounds"),
        (&["--data", "/nowhere"], "/nowhere"),
        (&["--out", "taken/results"], "taken/results"),
        (&["--out", "earlier"], "earlier/results.jsonl"),
        (&["--threads", "5000"], "--threads"),
        (&["--ranks", "100000", "--batch", "100000"], "--ranks"),
    ];
    for (arguments, expected) in cases {
        let mut all = vec!["--allow-debug"];
        if !arguments.contains(&"--data") {
            all.extend(["--data", &data]);
        }
        all.extend(*arguments);
        let output = bench(&all, folder.path());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} was accepted");
        assert!(said.contains(expected) && !said.contains("panicked"), "{arguments:?}: {said}");
    }
}
