//! `bench memory` as a user meets it, with a small model.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(arguments: &[&str], folder: &Path) -> Output {
    let text = folder.join("text.txt");
    fs::write(&text, "Pack my box with five dozen liquor jugs. ".repeat(300)).unwrap();
    Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["memory", "--allow-debug"])
        .args(arguments)
        .arg("--data")
        .arg(&text)
        .current_dir(folder)
        .output()
        .unwrap()
}

#[test]
fn every_stage_takes_what_it_should() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--preset", "tiny", "--ranks", "1,2", "--steps", "2", "--batch", "2", "--out", "out"];
    let output = bench(&arguments, folder.path());
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let text = fs::read_to_string(folder.path().join("out/memory.jsonl")).unwrap();
    let rows: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |kind: &str| rows.iter().filter(|row| row["kind"] == kind).collect::<Vec<_>>();
    // single on one rank, four strategies on two numbers of ranks; two of them recomputed and in bf16.
    assert_eq!((of("memory").len(), of("control").len(), of("effect").len()), (1 + 4 * 2 + 2 * 2, 3, 7), "{said}");
    for row in &rows {
        assert_eq!(row["holds"], true, "{row}");
    }
}

#[test]
fn a_model_that_is_mostly_embedding_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["--preset", "micro", "--layers", "1"], "the embedding has"),
        (&["--batch", "3"], "--batch 3"),
        (&["--strategies", "ring"], "--strategies ring"),
        (&["--steps", "0"], "--steps"),
    ];
    for (arguments, expected) in cases {
        let output = bench(arguments, folder.path());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?} was accepted");
        assert!(said.contains(expected) && !said.contains("panicked"), "{arguments:?}: {said}");
    }
}
