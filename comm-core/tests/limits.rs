//! What a process does that the system gives less than it needs. Limits are a process's own, so each test runs again in one of its own.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use comm_core::process::raise_descriptor_limit;
use comm_core::{Buffer, Call, Communicator, Mesh, MeshOptions, Op, ReduceOp, local};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Which test this process is to be, alone.
const INSIDE: &str = "LIMITS_TEST";

/// Runs the test called `name` again in a process of its own. True inside of it: the test has to go on.
fn is_inside(name: &str) -> bool {
    if std::env::var(INSIDE).is_ok_and(|inside| inside == name) {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("limits::{name}"), "--nocapture"])
        .env(INSIDE, name)
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
    false
}

/// Lets this process have so much of something from now on.
fn limit(resource: Resource, soft: u64) {
    let limits = Rlimit { current: Some(soft), maximum: getrlimit(resource).maximum };
    setrlimit(resource, limits).unwrap();
}

#[test]
fn an_operation_whose_lane_gets_no_thread_says_so() {
    if !is_inside("an_operation_whose_lane_gets_no_thread_says_so") {
        return;
    }
    let rank = local::group(1, 2).pop().unwrap();
    let mesh = Mesh::new(rank.transport, rank.control, MeshOptions::default()).unwrap();
    // A thread needs 2 MiB for its stack, and the rest of this less.
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.strip_suffix("kB")).unwrap();
    let kibibytes: u64 = size.trim().parse().unwrap();
    limit(Resource::As, (kibibytes + 1024) << 10);
    let began = Instant::now();
    let call = Call::background(Op::AllReduce(ReduceOp::Sum), Buffer::from_vec(vec![1f32; 10]), 1);
    let error = mesh.start(call.with_timeout(Duration::from_secs(60))).wait().unwrap_err().error.to_string();
    for part in ["rank 0, all-reduce sum of 10 f32", "starting the thread of lane 1"] {
        assert!(error.contains(part), "{part:?} in {error}");
    }
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
}

#[test]
fn the_limit_of_descriptors_is_raised_and_no_further_than_needed() {
    if !is_inside("the_limit_of_descriptors_is_raised_and_no_further_than_needed") {
        return;
    }
    let hard = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    limit(Resource::Nofile, hard.min(64));
    let raised = raise_descriptor_limit();
    assert_eq!(getrlimit(Resource::Nofile).current, Some(raised));
    assert_eq!(raised, hard.min(1 << 20), "of {hard}");
    // One that is higher already stays.
    if hard > raised {
        limit(Resource::Nofile, raised + 1);
        assert_eq!(raise_descriptor_limit(), raised + 1);
    }
}
