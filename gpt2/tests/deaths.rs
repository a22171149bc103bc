//! A rank that is killed: every survivor names it, soon, and nothing is left.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

const RANKS: usize = 3;

/// A survivor must have named the lost rank by then.
const REPORT: Duration = Duration::from_secs(1);

/// The launcher must have ended by then.
const END: Duration = Duration::from_secs(5);

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

fn kill_each(strategy: &str, transport: &str) {
    for victim in 0..RANKS {
        kill_one(strategy, transport, victim);
    }
}

fn kill_one(strategy: &str, transport: &str, victim: usize) {
    let what = format!("rank {victim} of {strategy} over {transport}");
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("text.txt");
    fs::write(&data, "Whoever is left must say who is missing. ".repeat(300)).unwrap();
    let mut job = start(strategy, transport, &data, folder.path());
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

fn start(strategy: &str, transport: &str, data: &Path, folder: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_gpt2"))
        .args(["train", "--strategy", strategy, "--transport", transport, "--nproc", &RANKS.to_string()])
        .args(["--preset", "micro", "--tokenizer", "bytes", "--batch", "3", "--steps", "1000000", "--eval-every", "0"])
        .args(["--log-every", "1", "--data"])
        .arg(data)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Both streams, line by line, with the time of arrival.
fn lines(job: &mut Child) -> mpsc::Receiver<(Instant, String)> {
    let (sender, receiver) = mpsc::channel();
    let streams: [Box<dyn Read + Send>; 2] =
        [Box::new(job.stdout.take().unwrap()), Box::new(job.stderr.take().unwrap())];
    for stream in streams {
        let sender = sender.clone();
        thread::spawn(move || {
            for line in BufReader::new(stream).lines().map_while(Result::ok) {
                let _ = sender.send((Instant::now(), line));
            }
        });
    }
    receiver
}

fn wait_for(lines: &mpsc::Receiver<(Instant, String)>, what: &str, timeout: Duration) -> Option<()> {
    let start = Instant::now();
    while let Ok((_, line)) = lines.recv_timeout(timeout.saturating_sub(start.elapsed())) {
        if line.contains(what) {
            return Some(());
        }
    }
    None
}

/// The children of `launcher` in order of rank.
fn ranks_of(launcher: u32) -> Vec<u32> {
    let mut ranks: Vec<(String, u32)> = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let status = fs::read_to_string(entry.path().join("status")).ok()?;
            let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse::<u32>().ok()?;
            let environment = fs::read(entry.path().join("environ")).ok()?;
            let rank =
                environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"COMM_RANK="))?;
            (parent == launcher).then(|| (String::from_utf8_lossy(rank).into_owned(), pid))
        })
        .collect();
    ranks.sort();
    ranks.into_iter().map(|(_, pid)| pid).collect()
}

fn wait(job: &mut Child, timeout: Duration) -> Option<Option<i32>> {
    let start = Instant::now();
    loop {
        if let Some(status) = job.try_wait().unwrap() {
            return Some(status.code());
        }
        if start.elapsed() >= timeout {
            let _ = job.kill();
            let _ = job.wait();
            return None;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn is_running(pid: u32) -> bool {
    PathBuf::from(format!("/proc/{pid}")).exists()
}
