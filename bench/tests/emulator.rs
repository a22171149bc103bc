//! The emulator's process as its parent meets it: what it says, and what it leaves behind.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

fn emulator() -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.arg("link-emulate").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// What it complains about when it is told `line` and no more.
fn complaint(line: &str) -> String {
    let mut child = emulator();
    // It may have ended already.
    let _ = child.stdin.take().unwrap().write_all(line.as_bytes());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(1), &b""[..]));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

fn spec(namespaces: &[String]) -> String {
    let ends = namespaces.iter().enumerate().map(|(number, namespace)| {
        let address = format!("10.77.0.{}", number + 1);
        json!({ "namespace": namespace, "device": "link0", "address": address, "prefix": 24, "up": {}, "down": {} })
    });
    format!("{}\n", json!({ "seed": 1, "mtu": 1500, "ends": ends.collect::<Vec<_>>() }))
}

#[test]
fn what_cannot_be_is_one_line() {
    assert!(complaint("").contains("internal command"));
    assert!(complaint("{}\n").contains("cannot be decoded"));
    assert!(complaint(&spec(&["a".into(), "a".into()])).contains("device of another end"));
    let nowhere = spec(&["bench-link-none-0".into(), "bench-link-none-1".into()]);
    assert!(complaint(&nowhere).contains("/var/run/netns/bench-link-none-0"));
}

/// Network namespaces, named so that later runs clear them away if this one is killed.
struct Namespaces(Vec<String>);

impl Namespaces {
    fn new(count: usize) -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").unwrap();
        let began = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
        let mut made = Namespaces(Vec::new());
        for number in 0..count {
            let name = format!("bench-link-{}-{began}-{number}", std::process::id());
            if !Command::new("ip").args(["netns", "add", &name]).output().ok()?.status.success() {
                return None;
            }
            made.0.push(name);
        }
        Some(made)
    }

    fn device_of(&self, number: usize) -> String {
        let shown = Command::new("ip").args(["-netns", &self.0[number], "address", "show", "link0"]).output().unwrap();
        String::from_utf8(shown.stdout).unwrap()
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "delete", name]).status();
        }
    }
}

#[test]
fn devices_are_there_as_long_as_the_emulator() {
    let (Some(namespaces), true) = (Namespaces::new(3), fs::exists("/dev/net/tun").unwrap()) else {
        eprintln!("skipped: network namespaces and TUN devices take root, iproute2 and /dev/net/tun");
        return;
    };
    let mut child = emulator();
    let (mut input, mut output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let mut ask = |line: &str| {
        input.write_all(line.as_bytes()).unwrap();
        let mut said = String::new();
        output.read_line(&mut said).unwrap();
        if said.is_empty() {
            child.stderr.as_mut().unwrap().read_to_string(&mut said).unwrap();
        }
        said
    };
    assert_eq!(ask(&spec(&namespaces.0)), "ready\n");
    for number in 0..3 {
        let device = namespaces.device_of(number);
        assert!(device.contains(&format!("10.77.0.{}/24", number + 1)) && device.contains("mtu 1500"), "{device}");
        assert!(device.contains("UP") && device.contains("qlen 10000"), "{device}");
    }
    let counters: Value = serde_json::from_str(&ask("counters\n")).unwrap();
    assert_eq!(counters["ends"].as_array().unwrap().len(), 3);
    assert!(counters["ends"][2]["down"]["packets"].is_u64() && counters["cpu_s"].is_f64(), "{counters}");
    assert_eq!(ask("reset\n"), "done\n");
    drop(input);
    assert!(child.wait().unwrap().success());
    assert!((0..3).all(|number| namespaces.device_of(number).is_empty()));
}
