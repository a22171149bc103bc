//! A rank that is killed: every survivor names it, soon, and nothing is left.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{RANKS, is_running, lines, ranks_of, start, wait, wait_for};

/// A survivor must have named the lost rank by then: long before silence alone would tell it (`--liveness`, 30 s).
const REPORT: Duration = Duration::from_secs(10);

/// The launcher must have ended by then.
const END: Duration = Duration::from_secs(20);

#[test]
fn of_ps_over_tcp() {
    kill_each("ps", "tcp");
}

#[test]
fn of_ps_over_quic() {
    kill_each("ps", "quic");
}

#[test]
fn of_sharded_ps_over_tcp() {
    kill_each("sharded-ps", "tcp");
}

#[test]
fn of_sharded_ps_over_quic() {
    kill_each("sharded-ps", "quic");
}

#[test]
fn of_ring_over_tcp() {
    kill_each("ring", "tcp");
}

#[test]
fn of_ring_over_quic() {
    kill_each("ring", "quic");
}

#[test]
fn of_ddp_over_tcp() {
    kill_each("ddp", "tcp");
}

#[test]
fn of_ddp_over_quic() {
    kill_each("ddp", "quic");
}

#[test]
fn of_zero1_over_tcp() {
    kill_each("zero1", "tcp");
}

#[test]
fn of_zero2_over_quic() {
    kill_each("zero2", "quic");
}

#[test]
fn of_fsdp_over_tcp() {
    kill_each("fsdp", "tcp");
}

#[test]
fn of_fsdp_over_quic() {
    kill_each("fsdp", "quic");
}

#[test]
fn of_hierarchical_over_shared_memory_and_quic() {
    for victim in 0..RANKS {
        kill_one("hierarchical", "quic", victim, &["--node-transport", "shm"]);
    }
}

#[test]
fn of_hsdp_over_shared_memory_and_tcp() {
    kill_one("hsdp", "tcp", 1, &["--node-transport", "shm"]);
}

#[test]
fn of_local_sgd_over_tcp() {
    kill_one("local-sgd", "tcp", 1, &["--sync-every", "3"]);
}

#[test]
fn of_streaming_diloco_over_quic() {
    kill_one("streaming-diloco", "quic", 2, &["--sync-every", "4"]);
}

#[test]
fn of_async_ps_over_tcp_and_quic() {
    kill_one("async-ps", "tcp", 0, &[]);
    kill_one("async-ps", "quic", 2, &["--staleness", "0"]);
}

#[test]
fn of_ddp_with_compressed_gradients_over_tcp() {
    kill_one("ddp", "tcp", 2, &["--compress", "powersgd:1"]);
}

fn kill_each(strategy: &str, transport: &str) {
    for victim in 0..RANKS {
        kill_one(strategy, transport, victim, &[]);
    }
}

fn kill_one(strategy: &str, transport: &str, victim: usize, more: &[&str]) {
    let what = format!("rank {victim} of {strategy} over {transport}");
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("text.txt");
    fs::write(&data, "Whoever is left must say who is missing. ".repeat(300)).unwrap();
    let mut job = start(strategy, transport, &data, folder.path(), 1_000_000, more);
    let lines = lines(&mut job);

    wait_for(&lines, "] step ", Duration::from_secs(60)).unwrap_or_else(|| panic!("{what}: training did not start"));
    let ranks = ranks_of(job.id());
    assert_eq!(ranks.len(), RANKS, "{what}: {ranks:?}");
    let status = Command::new("kill").args(["-KILL", &ranks[victim].to_string()]).status().unwrap();
    assert!(status.success(), "{what}");
    let killed = Instant::now();

    let mut reports = [None; RANKS];
    let mut said = Vec::new();
    while let Ok((at, line)) = lines.recv_timeout(END.saturating_sub(killed.elapsed())) {
        for (rank, report) in reports.iter_mut().enumerate() {
            if line.starts_with(&format!("[rank {rank}] error:")) && line.contains(&format!("rank {victim} was lost")) {
                report.get_or_insert(at - killed);
            }
        }
        said.push(line);
    }
    let status = wait(&mut job, END.saturating_sub(killed.elapsed()));
    let ended = killed.elapsed();
    let all = said.join("\n");
    let code = status.unwrap_or_else(|| panic!("{what}: the launcher is still there after {ended:?}: {all}"));
    assert_eq!(code, Some(128 + 9), "{what}: {all}");
    for (rank, report) in reports.iter().enumerate().filter(|(rank, _)| *rank != victim) {
        let report = report.unwrap_or_else(|| panic!("{what}: rank {rank} did not name it: {all}"));
        assert!(report < REPORT, "{what}: rank {rank} took {report:?}: {all}");
    }
    for pid in ranks {
        assert!(!is_running(pid), "{what}: process {pid} is left");
    }
    println!("{what}: reported within {:?}, launcher ended after {ended:?}", reports.iter().flatten().max());
}
