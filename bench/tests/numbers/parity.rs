//! `bench parity` as a user meets it, with two strategies and few steps.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(arguments: &[&str], folder: &Path) -> Output {
    let text = folder.join("text.txt");
    fs::write(&text, "How vexingly quick daft zebras jump! ".repeat(600)).unwrap();
    Command::new(env!("CARGO_BIN_EXE_bench"))
        .arg("parity")
        .args(arguments)
        .arg("--data")
        .arg(&text)
        .current_dir(folder)
        .output()
        .unwrap()
}

#[test]
fn strategies_are_one_device_and_faults_are_noticed() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--strategies", "ps,fsdp", "--ranks", "2,3", "--steps", "3"];
    let more = ["--transports", "local,shm", "--out", "out", "--allow-debug"];
    let output = bench(&[&arguments[..], &more[..]].concat(), folder.path());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(folder.path().join("out/parity.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |kind: &str| rows.iter().filter(|row| row["kind"] == kind).collect::<Vec<_>>();
    // ps, ps with a dedicated server, and fsdp.
    let (compared, planted, counted) = (of("parity"), of("fault"), of("formula"));
    assert_eq!((compared.len(), planted.len(), counted.len()), (3 * 2 * 7, 3 * 2, 3 * 2 * 2), "{said}");
    for row in compared {
        assert_eq!(row["within"], true, "{row}");
        assert!(row["norm_difference"].as_f64().unwrap() <= row["bound"].as_f64().unwrap(), "{row}");
    }
    for row in planted {
        assert_eq!(row["noticed"], true, "{row}");
        assert!(row["norm_difference"].as_f64().unwrap() > 100.0 * row["bound"].as_f64().unwrap(), "{row}");
    }
    for row in counted {
        assert_eq!(row["holds"], true, "{row}");
        assert!(row["bytes_expected_by_rank"][1].as_u64().unwrap() > 0, "{row}");
    }
}

#[test]
fn wrong_arguments_are_one_clear_error_each() {
    let folder = tempfile::tempdir().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["--ranks", "5"], "--ranks 5"),
        (&["--ranks", "0"], "--ranks 0"),
        (&["--steps", "0"], "--steps"),
        (&["--strategies", "single"], "--strategies"),
        (&["--strategies", "telepathy"], "telepathy"),
    ];
    for (arguments, expected) in cases {
        let output = bench(&[*arguments, &["--allow-debug"]].concat(), folder.path());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} was accepted");
        assert!(said.contains(expected) && !said.contains("panicked"), "{arguments:?}: {said}");
    }
}
