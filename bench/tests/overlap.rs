//! `bench overlap` and its link as a user meets them.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../comm-core/tests/ctrl_c/mod.rs"]
mod ctrl_c;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const SMALL: [&str; 13] = [
    "overlap",
    "--allow-debug",
    "--preset",
    "micro",
    "--batch",
    "4",
    "--steps",
    "5",
    "--rounds",
    "1",
    "--out",
    "out",
    "--data",
];

fn command(arguments: &[&str], folder: &Path) -> Command {
    let text = folder.join("text.txt");
    fs::write(&text, "Sphinx of black quartz, judge my vow. ".repeat(400)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(SMALL).arg(&text).args(arguments).current_dir(folder);
    command
}

fn rows(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("out/overlap.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Why this machine or this user can have no link, if so: tests that need one are skipped then.
fn no_link(text: &str) -> bool {
    let no = ["network namespaces need root", "install iproute2", "sch_tbf", "Operation not permitted"];
    let no = no.iter().any(|part| text.contains(part));
    if no {
        eprintln!("skipped: {text}");
    }
    no
}

/// Namespaces that the process has made.
fn namespaces_of(process: u32) -> Vec<PathBuf> {
    let start = format!("bench-link-{process}-");
    // Who is not root has a `/run` of their own for them.
    let own = format!("/proc/{process}/root/run/netns");
    let of = |folder: &str| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&start));
        named.map(|entry| entry.path()).collect()
    };
    Some(of("/var/run/netns")).filter(|found| !found.is_empty()).unwrap_or_else(|| of(&own))
}

#[test]
fn on_loopback_every_strategy_over_every_transport_gives_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let output = command(&["--loopback"], folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let rows = rows(folder.path());
    assert_eq!(rows.len(), 3 * (3 + 1), "{}", said(&output));
    // Over `null` nothing arrives: those are the measure of the passes.
    let (nothing, rows): (Vec<Value>, Vec<Value>) = rows.into_iter().partition(|row| row["transport"] == "null");
    assert_eq!(nothing.len(), 3, "{}", said(&output));
    assert!(nothing.iter().all(|row| row["compute_ms"].as_f64().unwrap() > 0.0), "{nothing:?}");
    for row in &rows {
        assert_eq!(row["status"], "ok", "{row}");
        let number = |name: &str| row[name].as_f64().unwrap();
        assert!(number("step_ms") > 0.0 && number("communication_ms") > 0.0 && number("hidden_ms") >= 0.0, "{row}");
        assert_eq!(row["network"], "loopback");
        if row["strategy"] != "ddp" {
            assert!(number("hidden_ms") < number("communication_ms"), "what is waited for is not hidden: {row}");
        }
    }
    // The same bits whatever the transport, and whenever the buckets leave.
    let hash = |strategy: &str| rows.iter().find(|row| row["strategy"] == strategy).unwrap()["weights_hash"].clone();
    for row in rows.iter().filter(|row| row["strategy"] != "ring") {
        assert_eq!(row["weights_hash"], hash("ddp"), "{row}");
    }
    let text = said(&output);
    assert!(
        text.contains("slowed ms") && text.contains("step / ring") && !text.contains("DIFFERENT WEIGHTS"),
        "{text}"
    );
}

#[test]
fn over_a_link_a_step_takes_what_the_rate_allows_and_nothing_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--rate", "4mbit", "--strategies", "ring", "--transports", "tcp-raw,quic"];
    let child = command(&arguments, folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let process = child.id();
    let output = child.wait_with_output().unwrap();
    assert!(namespaces_of(process).is_empty(), "namespaces are left");
    let text = said(&output);
    if no_link(&text) {
        return;
    }
    assert!(output.status.success(), "{text}");
    for row in rows(folder.path()).into_iter().filter(|row| row["transport"] != "null") {
        assert_eq!(row["status"], "ok", "{row}");
        let bits = row["payload_bytes"].as_f64().unwrap() * 8.0;
        // What a bucket of the filter lets through at once goes free.
        let least_ms = (bits / 4e6 * 1e3) * 0.6;
        assert!(row["exposed_ms"].as_f64().unwrap() > least_ms, "at least {least_ms} ms: {row}");
        let measured = row["probe"]["mbit_per_s"].as_f64().unwrap();
        assert!((2.0..6.0).contains(&measured), "{row}");
    }
}

#[test]
fn ctrl_c_takes_the_link_away() {
    let folder = tempfile::tempdir().unwrap();
    // Slow enough that it is still at it.
    let arguments = ["--rate", "64kbit", "--strategies", "ring", "--transports", "tcp-raw"];
    let mut command = command(&arguments, folder.path());
    let mut child = ctrl_c::heeded(&mut command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while namespaces_of(child.id()).len() < 2 {
        if child.try_wait().unwrap().is_some() {
            let text = said(&child.wait_with_output().unwrap());
            assert!(no_link(&text), "{text}");
            return;
        }
        assert!(Instant::now() < deadline, "no link was made");
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(ctrl_c::press(&mut child).code(), Some(128 + 2));
    assert!(namespaces_of(child.id()).is_empty(), "namespaces are left");
}

#[test]
fn what_a_killed_run_has_left_the_next_one_takes_away() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--rate", "64kbit", "--strategies", "ring", "--transports", "tcp-raw"];
    let mut child = command(&arguments, folder.path()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while namespaces_of(child.id()).len() < 2 {
        if child.try_wait().unwrap().is_some() {
            let text = said(&child.wait_with_output().unwrap());
            assert!(no_link(&text), "{text}");
            return;
        }
        assert!(Instant::now() < deadline, "no link was made");
        std::thread::sleep(Duration::from_millis(20));
    }
    let in_own_run = namespaces_of(child.id())[0].starts_with("/proc");
    child.kill().unwrap();
    child.wait().unwrap();
    // What lies in a user namespace goes with it.
    assert_eq!(namespaces_of(child.id()).is_empty(), in_own_run, "a killed process cannot clean up");
    let folder = tempfile::tempdir().unwrap();
    let arguments = ["--rate", "none", "--strategies", "ring", "--transports", "tcp-raw"];
    let output = command(&arguments, folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(namespaces_of(child.id()).is_empty(), "{}", said(&output));
}
