//! `bench soak` as a user meets it, for some seconds.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::process::Command;

use serde_json::Value;

#[test]
fn a_job_lives_on_through_faults_without_a_wrong_element() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["soak", "--allow-debug", "--for", "10s", "--transports", "tcp,shm", "--fault-every", "300ms"])
        .args([
            "--faults",
            "kill,exit,abort,reset,late,restart",
            "--most-bytes",
            "65536",
            "--seed",
            "7",
            "--out",
            "out",
        ])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("0 wrong; 0 hangs; 0 complaints"), "{said}");
    let text = fs::read_to_string(folder.path().join("out/soak.jsonl")).unwrap();
    let epochs: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(epochs.len() > 2, "{said}");
    let checked: u64 = epochs.iter().map(|epoch| epoch["work"]["checked"].as_u64().unwrap()).sum();
    assert!(checked > 100_000, "{said}");
    // The rank that is never killed holds the same at the end as at the start.
    let threads = |epoch: &Value| epoch["holds"]["2"]["threads"].as_u64().unwrap();
    assert_eq!(threads(&epochs[0]), threads(&epochs[epochs.len() - 1]), "{said}");
}
