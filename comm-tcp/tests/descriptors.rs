//! What ranks say that may not have the file descriptors that they need.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

mod common;

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::{Control, Deadline, Result};
use comm_tcp::TcpOptions;

use common::{Kind, controls};

/// Which test this process is to be, alone.
const INSIDE: &str = "DESCRIPTORS_TEST";

/// Runs the test called `name` again in a process that may have `limit` descriptors. True inside of it: the test has to go on.
fn is_inside(name: &str, limit: usize) -> bool {
    if let Ok(inside) = std::env::var(INSIDE) {
        return inside == name;
    }
    let output = Command::new("sh")
        .args(["-c", &format!("ulimit -n {limit}; exec \"$@\""), "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, name)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

/// Connects all ranks of a job, as threads; what each of them says. Whoever fails tells the others, as programs do.
fn connect(kind: Kind, ranks: usize) -> Vec<Result<()>> {
    let controls = controls(ranks);
    let deadline = Deadline::after(Duration::from_secs(60));
    thread::scope(|scope| {
        let threads: Vec<_> = controls
            .iter()
            .map(|control| {
                scope.spawn(move || {
                    let connected = kind.connect(&**control, &TcpOptions::default(), deadline);
                    connected.map(drop).inspect_err(|error| control.poison(error))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn what_cannot_fit_is_refused_before_anything_is_opened() {
    if !is_inside("what_cannot_fit_is_refused_before_anything_is_opened", 64) {
        return;
    }
    for kind in [Kind::Raw, Kind::Zmq, Kind::ZmqWithoutGate, Kind::ZmqOverIpc] {
        let began = Instant::now();
        let errors: Vec<String> =
            connect(kind, 24).into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect();
        assert!(began.elapsed() < Duration::from_secs(20), "{kind:?}: {:?}", began.elapsed());
        for error in errors {
            let what = ["between 24 ranks with 2 lane(s)", "needs", "64 are allowed", "ulimit -n"];
            assert!(what.iter().all(|part| error.contains(part)), "{kind:?}: {error}");
        }
    }
}

#[test]
fn whoever_runs_out_while_connecting_says_so_at_once() {
    // Each rank alone would fit; they are threads of one process, and share its descriptors.
    if !is_inside("whoever_runs_out_while_connecting_says_so_at_once", 64) {
        return;
    }
    for kind in [Kind::Raw, Kind::Zmq] {
        let began = Instant::now();
        let outcomes = connect(kind, 5);
        assert!(began.elapsed() < Duration::from_secs(20), "{kind:?}: {:?}", began.elapsed());
        for outcome in outcomes {
            let error = outcome.unwrap_err().to_string();
            println!("{kind:?}: {error}");
            assert!(error.contains("ulimit -n") && error.contains("64 are allowed"), "{kind:?}: {error}");
        }
    }
}
