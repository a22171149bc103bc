//! `bench chaos` as a user meets it, on a small part of its table.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../comm-core/tests/ctrl_c/mod.rs"]
mod ctrl_c;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

fn chaos(arguments: &[&str], folder: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(["chaos", "--allow-debug"]).args(arguments).current_dir(folder).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn rows(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The table's rows, after a run in which every cell was as it should be.
fn all_well(arguments: &[&str], cells: usize) -> Vec<Value> {
    let folder = tempfile::tempdir().unwrap();
    let output = chaos(&[arguments, &["--out", "out"]].concat(), folder.path());
    let said = stdout(&output);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let rows = rows(&folder.path().join("out/chaos.jsonl"));
    assert_eq!(rows.len(), cells, "{said}");
    assert!(said.contains(&format!("{cells} cells: {cells} ok, 0 not ok; 0 hung")), "{said}");
    rows
}

#[test]
fn survivors_name_whom_they_lost() {
    let arguments =
        ["--faults", "kill,exit,panic,restart", "--transports", "shm,tcp-raw", "--when", "during", "--collectives"];
    // Two of the faults hit rank 0, too.
    for row in all_well(&[&arguments[..], &["all-reduce"]].concat(), 12) {
        let survivors = row["survivors"].as_array().unwrap();
        assert_eq!(survivors.len(), 2, "{row}");
        for survivor in survivors {
            assert_eq!(survivor["error"]["kind"], "peer-lost", "{row}");
            assert_eq!(survivor["error"]["culprit"], row["victim"], "{row}");
            assert!(survivor["checked"].as_u64().unwrap() > 0, "{row}");
        }
        let refused = row["refused"].as_array().unwrap().len();
        assert_eq!(refused, usize::from(row["fault"] == "restart"), "{row}");
    }
}

#[test]
fn who_is_stopped_silent_or_cut_off_is_named_in_time() {
    named_in_time("stop,silent", 4);
    let nothing = [socket2::SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0)];
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    if socket.attach_filter(&nothing).is_ok() {
        named_in_time("cut,half-open", 4);
    } else {
        eprintln!("cut and half-open skipped: this system lets only root put filters on sockets");
    }
}

fn named_in_time(faults: &str, cells: usize) {
    let arguments = [
        "--faults",
        faults,
        "--transports",
        "tcp,quic",
        "--when",
        "before",
        "--collectives",
        "all-to-all",
        "--liveness",
        "1s",
        "--timeout",
        "2s",
        "--victim",
        "1",
    ];
    for row in all_well(&arguments, cells) {
        for survivor in row["survivors"].as_array().unwrap() {
            let kind = survivor["error"]["kind"].as_str().unwrap();
            let expected = if row["fault"] == "stop" || row["fault"] == "cut" { "peer-lost" } else { "timeout" };
            assert_eq!(kind, expected, "{row}");
        }
        // The one that it happened to does not go on either.
        assert!(row["victim_error"]["text"].is_string(), "{row}");
    }
}

#[test]
fn who_comes_late_computes_long_or_leaves_harms_nobody() {
    let arguments =
        ["--faults", "late,busy,leave", "--transports", "tcp", "--collectives", "broadcast", "--liveness", "1s"];
    for row in all_well(&arguments, 3) {
        for survivor in row["survivors"].as_array().unwrap() {
            assert!(survivor["error"].is_null() && survivor["wrong_elements"] == 0, "{row}");
        }
        let refused: Vec<&str> =
            row["refused"].as_array().unwrap().iter().map(|told| told["text"].as_str().unwrap()).collect();
        if row["fault"] == "late" {
            assert!(refused[0].contains("epoch"), "{refused:?}");
            assert!(refused[1].contains("another"), "{refused:?}");
            assert!(refused[2].contains("secret"), "{refused:?}");
        }
    }
}

#[test]
fn a_table_without_a_cell_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--faults", "half-open", "--transports", "shm"];
    let output = chaos(&arguments, folder.path());
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("shared memory has no connections"));
}

#[test]
fn ctrl_c_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let mut table = ctrl_c::heeded(&mut Command::new(env!("CARGO_BIN_EXE_bench")))
        .args(["chaos", "--allow-debug", "--faults", "silent", "--transports", "tcp-raw", "--timeout", "60s"])
        .env("TMPDIR", folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while children(table.id()).len() < 3 {
        assert!(Instant::now() < deadline, "no rank was started");
        std::thread::sleep(Duration::from_millis(20));
    }
    let ranks = children(table.id());
    assert_eq!(ctrl_c::press(&mut table).code(), Some(128 + 2));
    for rank in ranks {
        assert!(!Path::new(&format!("/proc/{rank}")).exists(), "process {rank} is left");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "files are left");
}

/// The processes that process `parent` has started.
fn children(parent: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{parent}/task")).unwrap();
    let of = |task: fs::DirEntry| fs::read_to_string(task.path().join("children")).unwrap_or_default();
    tasks
        .flatten()
        .flat_map(|task| of(task).split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>())
        .collect()
}
