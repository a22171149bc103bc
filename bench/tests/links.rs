//! `bench links` as a user meets it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../comm-core/tests/ctrl_c/mod.rs"]
mod ctrl_c;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A profile of the kernel's own means, and one of the emulator's, both small enough for any machine.
const VETH: &str = "carrier = \"veth\"\n[up]\nrate = \"100mbit\"\n[down]\nrate = \"150mbit\"\n";
const EMULATED: &str = "carrier = \"emulated\"\n[up]\nrate = \"100mbit\"\ndelay = \"5ms\"\nloss = \"1%\"\n";

fn command(arguments: &[&str], folder: &Path) -> Command {
    fs::write(folder.join("veth.toml"), VETH).unwrap();
    fs::write(folder.join("emulated.toml"), EMULATED).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(["links", "--allow-debug"]).args(arguments).current_dir(folder);
    if !arguments.contains(&"--seconds") {
        command.args(["--seconds", "0.5"]);
    }
    command
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Why this machine or this user can have no link, if so: tests that need one are skipped then.
fn no_link(text: &str) -> bool {
    let no = ["network namespaces need root", "install iproute2", "sch_tbf", "/dev/net/tun", "Operation not permitted"];
    let no = no.iter().any(|part| text.contains(part));
    if no {
        eprintln!("skipped: {text}");
    }
    no
}

/// Namespaces that the process has made, where it keeps them: its own place, if it is not root.
fn namespaces_of(process: u32) -> Vec<PathBuf> {
    let start = format!("bench-link-{process}-");
    let places = [PathBuf::from("/var/run/netns"), PathBuf::from(format!("/proc/{process}/root/run/netns"))];
    let entries = places.iter().flat_map(|place| fs::read_dir(place).into_iter().flatten().flatten());
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&start)).map(|entry| entry.path()).collect()
}

/// Processes that `parent` has started and that are still there.
fn children_of(parent: u32) -> Vec<u32> {
    let processes =
        fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let has_parent = |process: &u32| {
        let text = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let fields = text.rsplit_once(')').map_or("", |(_, fields)| fields);
        fields.split_whitespace().nth(1) == Some(parent.to_string().as_str())
    };
    processes.filter(has_parent).collect()
}

/// Waits until the process has made its namespaces and started what runs in them; `None` where it cannot.
fn at_work(mut child: Child, namespaces: usize) -> Option<Child> {
    let deadline = Instant::now() + Duration::from_secs(30);
    while namespaces_of(child.id()).len() < namespaces || children_of(child.id()).len() < 2 {
        if child.try_wait().unwrap().is_some() {
            let text = said(&child.wait_with_output().unwrap());
            assert!(no_link(&text), "{text}");
            return None;
        }
        assert!(Instant::now() < deadline, "no link was made");
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(child)
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn loopback_is_told_of_without_a_judgement() {
    let folder = tempfile::tempdir().unwrap();
    let output = command(&["loopback", "--json", "--out", "out"], folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let rows = fs::read_to_string(folder.path().join("out/links.jsonl")).unwrap();
    assert_eq!(rows, String::from_utf8_lossy(&output.stdout), "the same lines in both places");
    let rows: Vec<Value> = rows.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for by in ["udp", "tcp", "quic"] {
        let row = rows.iter().find(|row| row["by"] == by).unwrap();
        assert!(row["measured"].as_f64().unwrap() > 0.0 && row["verdict"] == "told", "{row}");
    }
    let again = command(&["loopback", "--out", "out"], folder.path()).output().unwrap();
    assert!(!again.status.success() && said(&again).contains("another folder"), "{}", said(&again));
}

/// Measures a profile, and looks whether all is there and nothing is left.
fn measure(file: &str, arguments: &[&str], kinds: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = command(&[&[file, "--json"], arguments].concat(), folder.path());
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let process = child.id();
    let output = child.wait_with_output().unwrap();
    assert!(namespaces_of(process).is_empty(), "namespaces are left");
    let text = said(&output);
    if no_link(&text) {
        return;
    }
    let lines = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect(&text)).collect();
    for kind in kinds {
        assert!(rows.iter().any(|row| row["what"] == *kind), "{kind}: {text}");
    }
    // Whether each is right is for an idle machine to say; that something like it was measured, for any.
    let rate = rows.iter().find(|row| row["what"] == "rate").unwrap()["measured"].as_f64().unwrap();
    assert!((20.0..120.0).contains(&rate), "{text}");
    let out = rows.iter().any(|row| row["verdict"] == "out");
    assert_eq!(output.status.success(), !out, "{text}");
}

#[test]
fn links_of_the_kernel_are_measured_and_nothing_is_left() {
    measure("./veth.toml", &[], &["rate", "delay", "round trip", "flow"]);
}

#[test]
fn emulated_links_are_measured_and_nothing_is_left() {
    measure("./emulated.toml", &["--no-flows"], &["rate", "delay", "round trip", "loss"]);
}

#[test]
fn ctrl_c_takes_the_link_and_its_emulator_away() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = command(&["./emulated.toml", "--seconds", "20"], folder.path());
    let child = ctrl_c::heeded(&mut command).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let Some(mut child) = at_work(child, 2) else { return };
    let children = children_of(child.id());
    assert_eq!(ctrl_c::press(&mut child).code(), Some(128 + 2));
    assert!(namespaces_of(child.id()).is_empty(), "namespaces are left");
    wait_for("processes are left", || children.iter().all(|process| !is_ours(*process)));
}

#[test]
fn what_a_killed_run_has_left_the_next_one_takes_away() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = command(&["./emulated.toml", "--seconds", "20"], folder.path());
    let child = first.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let Some(mut child) = at_work(child, 2) else { return };
    let children = children_of(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for("the emulator and the ranks outlive their program", || children.iter().all(|process| !is_ours(*process)));
    let output = command(&["./veth.toml", "--no-flows"], folder.path()).output().unwrap();
    assert!(namespaces_of(child.id()).is_empty(), "{}", said(&output));
}

/// Whether there is such a process of this program: the number may be another's by now.
fn is_ours(process: u32) -> bool {
    fs::read_link(format!("/proc/{process}/exe")).is_ok_and(|exe| exe == Path::new(env!("CARGO_BIN_EXE_bench")))
}

#[test]
fn mistakes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("bad.toml"), "carrier = \"veth\"\n[up]\nrate = \"1gbit\"\nloss = \"1%\"\n").unwrap();
    for (arguments, parts) in [
        (&["pigeon"][..], &["pigeon", "wan-lossy"][..]),
        (&["./bad.toml"], &["./bad.toml", "up.loss", "emulated"]),
        (&["./none.toml"], &["./none.toml"]),
    ] {
        let output = command(arguments, folder.path()).output().unwrap();
        let text = said(&output);
        assert!(!output.status.success() && parts.iter().all(|part| text.contains(part)), "{arguments:?}: {text}");
    }
}
