//! Strangers against a job of real processes.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../comm-core/tests/ctrl_c/mod.rs"]
mod ctrl_c;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn text(folder: &Path) -> String {
    let path = folder.join("text.txt");
    fs::write(&path, "Pack my box with five dozen liquor jugs. ".repeat(400)).unwrap();
    path.to_str().unwrap().to_string()
}

fn hostile(arguments: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(["hostile", "--data", &text(folder)]).args(arguments).current_dir(folder);
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn attacked_jobs_end_with_the_right_weights() {
    let folder = tempfile::tempdir().unwrap();
    let transports = ["tcp-raw", "tcp", "quic"];
    let list = transports.join(",");
    let arguments = ["--quick", "--allow-debug", "--inputs", "300", "--out", "results", "--transports", &list];
    let output = hostile(&arguments, folder.path()).output().unwrap();
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    let rows = fs::read_to_string(folder.path().join("results/hostile.jsonl")).unwrap();
    let rows: Vec<Value> = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let verdicts: Vec<&Value> = rows.iter().filter(|row| row.get("weights_equal").is_some()).collect();
    assert_eq!(verdicts.len(), transports.len(), "{text}");
    for (verdict, transport) in verdicts.iter().zip(transports) {
        assert_eq!(verdict["transport"], transport);
        assert_eq!(verdict["weights_equal"], true, "{text}");
        assert_eq!(verdict["weights_attacked"].as_str().unwrap().len(), 64, "{text}");
        assert!(verdict["live_inputs"].as_u64().unwrap() >= 100, "{text}");
        // The control plane of rank 0 listens to the end, and for QUIC one UDP port a rank is bound.
        let stays = |protocol: &str| {
            let ports = verdict["ports"].as_array().unwrap().iter();
            ports.filter(|port| port["stays_open"] == true && port["protocol"] == protocol).count()
        };
        assert_eq!((stays("tcp"), stays("udp")), (1, if transport == "quic" { 3 } else { 0 }), "{text}");
    }
    // All byte transports give the same weights.
    assert!(verdicts.iter().all(|verdict| verdict["weights_attacked"] == verdicts[0]["weights_attacked"]), "{text}");
    let of = |kind: &str| rows.iter().find(|row| row["kind"] == kind && row["phase"] == "training").unwrap();
    for kind in ["right secret, old epoch", "right secret, rank that exists", "control handshake, wrong secret"] {
        let row = of(kind);
        assert!(row["refused"].as_u64().unwrap() > 0, "{kind}: {row}");
        assert_eq!(row["let_in"], 0, "{kind}: {row}");
    }
}

#[test]
fn what_cannot_be_attacked_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, expected) in [
        (&["--transports", "local"][..], "no ports"),
        (&["--transports", "nccl"], "no ports"),
        (&["--seconds", "0"], "--seconds"),
        (&["--inputs", "0"], "--inputs"),
    ] {
        let output = hostile(arguments, folder.path()).arg("--allow-debug").output().unwrap();
        let text = said(&output);
        assert!(!output.status.success() && text.contains(expected) && !text.contains("panicked"), "{text}");
    }
}

#[test]
fn an_interrupted_run_leaves_no_process_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut bench = ctrl_c::heeded(&mut hostile(&["--quick", "--allow-debug", "--seconds", "20"], folder.path()))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let ranks = || -> Vec<String> {
        let of_bench = |process: &String| {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_ascii_whitespace().nth(1));
            parent == Some(bench.id().to_string().as_str())
        };
        let names = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())).filter(of_bench).collect()
    };
    let limit = Instant::now() + Duration::from_secs(60);
    let mut started = Vec::new();
    while started.len() < 3 && Instant::now() < limit {
        started = ranks();
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(started.len(), 3, "no ranks were started");
    let status = ctrl_c::press(&mut bench);
    assert_eq!(status.code(), Some(130), "{status}");
    let alive = |process: &&String| Path::new(&format!("/proc/{process}")).exists();
    assert_eq!(started.iter().filter(alive).count(), 0, "{started:?}");
}
