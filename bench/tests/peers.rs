//! `bench peers` as a user meets it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn peers(python: &Path, folder: &Path) -> (Output, Vec<Value>) {
    let arguments = "peers --allow-debug --layers 2 --heads 2 --width 16 --block 8 --batch 4 --steps 3 --rounds 1 --out out \
                     --transports shm,quic --peer-python";
    let output = Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(arguments.split_whitespace())
        .arg(python)
        .current_dir(folder)
        .output()
        .unwrap();
    let text = fs::read_to_string(folder.join("out/peers.jsonl")).unwrap();
    (output, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn without_pytorch_ours_are_measured_and_what_is_missing_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let (output, rows) = peers(Path::new("/nowhere/python"), folder.path());
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("PyTorch is left out") && text.contains("/nowhere/python"), "{text}");
    // Alone, and three strategies over two transports.
    assert_eq!(rows.len(), 1 + 3 * 2, "{text}");
    for row in &rows {
        assert_eq!(row["status"], "ok", "{row}");
        assert!(row["step_ms"].as_f64().unwrap() > 0.0, "{row}");
        // Random tokens of the whole vocabulary: nothing is known at the start.
        assert!((row["first_loss"].as_f64().unwrap() - 50257f64.ln()).abs() < 0.1, "{row}");
    }
    assert!(rows[0]["side"] == "alone" && rows[0]["strategy"].is_null(), "{}", rows[0]);
}

#[test]
fn a_python_that_plays_pytorch_gets_its_row_beside_ours() {
    // The real one is large and not everywhere: here the protocol is tried, with a program in its place.
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python");
    let parameters = (50257 + 8) * 16 + 2 * (12 * 16 * 16 + 13 * 16) + 2 * 16;
    let script = format!(
        "#!/bin/sh\nif [ \"$2\" = probe ]; then echo '{{\"torch\": \"0.0\"}}'; exit; fi\n\
         if [ \"$2\" = fsdp ]; then echo 'Traceback' >&2; echo 'error: no fully_shard' >&2; exit 1; fi\n\
         echo noise\necho '{{\"step_ms\": 1'$COMM_RANK'.5, \"losses\": [10.8, 10.7], \"parameters\": {parameters}}}'\n"
    );
    fs::write(&python, script).unwrap();
    assert!(Command::new("chmod").arg("755").arg(&python).status().unwrap().success());
    let (output, rows) = peers(&python, folder.path());
    let text = said(&output);
    assert!(!output.status.success(), "one of the rows has failed: {text}");
    assert!(
        text.contains("PyTorch 0.0") && text.contains("fsdp by PyTorch: failed") && text.contains("no fully_shard"),
        "{text}"
    );
    assert_eq!(rows.len(), 2 + 3 * 3, "{text}");
    for row in rows.iter().filter(|row| row["side"] == "torch") {
        if row["strategy"] == "fsdp" {
            assert!(row["status"].as_str().unwrap().contains("no fully_shard"), "{row}");
        } else {
            // The slowest rank decides.
            assert_eq!(row["step_ms"].as_f64(), Some(11.5), "{row}");
        }
    }
}
