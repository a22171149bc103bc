//! Training jobs as processes, watched from outside.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]
#![allow(dead_code, unreachable_pub, reason = "every test program takes what it needs")]

#[path = "../../../comm-core/tests/ctrl_c/mod.rs"]
mod ctrl_c;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Number of ranks of a job.
pub const RANKS: usize = 3;

/// Starts training on [`RANKS`] processes of this machine, for `steps` steps of the smallest model.
pub fn start(strategy: &str, transport: &str, data: &Path, folder: &Path, steps: u64, more: &[&str]) -> Child {
    ctrl_c::heeded(&mut Command::new(env!("CARGO_BIN_EXE_gpt2")))
        .args(["train", "--strategy", strategy, "--transport", transport, "--nproc", &RANKS.to_string()])
        .args(["--preset", "micro", "--tokenizer", "bytes", "--batch", "6", "--eval-every", "0"])
        .args(["--steps", &steps.to_string()])
        .args(more)
        .args(["--log-every", "1", "--data"])
        .arg(data)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Both streams, line by line, with the time of arrival.
pub fn lines(job: &mut Child) -> mpsc::Receiver<(Instant, String)> {
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

pub fn wait_for(lines: &mpsc::Receiver<(Instant, String)>, what: &str, timeout: Duration) -> Option<()> {
    let start = Instant::now();
    while let Ok((_, line)) = lines.recv_timeout(timeout.saturating_sub(start.elapsed())) {
        if line.contains(what) {
            return Some(());
        }
    }
    None
}

/// The children of `launcher` in order of rank.
pub fn ranks_of(launcher: u32) -> Vec<u32> {
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

pub fn wait(job: &mut Child, timeout: Duration) -> Option<Option<i32>> {
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

pub fn is_running(pid: u32) -> bool {
    PathBuf::from(format!("/proc/{pid}")).exists()
}
