//! What a reader must know to compare results: the machine, its kernel, the code.

use std::fs;
use std::process::Command;

use serde::{Deserialize, Serialize};

/// The environment of a run, stored with every cell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Environment {
    machine: String,
    cores: usize,
    memory_bytes: u64,
    kernel: String,
    /// The kernel's default congestion control for TCP.
    congestion_control: String,
    /// The commit that the sources are at as this runs, `-dirty` if files differ from it; empty without git or a checkout.
    commit: String,
    version: String,
    debug_build: bool,
}

impl Environment {
    pub fn read() -> Self {
        let first = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_string()).unwrap_or_default();
        let field = |path: &str, name: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
            line.split_once(':').map_or(String::new(), |(_, value)| value.trim().to_string())
        };
        let memory = field("/proc/meminfo", "MemTotal");
        Environment {
            machine: field("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory.trim_end_matches(" kB").parse::<u64>().map_or(0, |kib| kib * 1024),
            kernel: first("/proc/sys/kernel/osrelease"),
            congestion_control: first("/proc/sys/net/ipv4/tcp_congestion_control"),
            commit: commit(),
            version: env!("CARGO_PKG_VERSION").into(),
            debug_build: cfg!(debug_assertions),
        }
    }

    /// The processor and its cores, with which [`one_line`](Self::one_line) begins.
    pub fn processor(&self) -> String {
        format!("{}, {} cores", self.machine, self.cores)
    }

    /// The kernel's default congestion control for TCP, by its name.
    pub fn congestion_control(&self) -> &str {
        &self.congestion_control
    }

    pub fn one_line(&self) -> String {
        format!(
            "{}, {:.0} GB, Linux {}, TCP {}, commit {}",
            self.processor(),
            self.memory_bytes as f64 / 1e9,
            self.kernel,
            self.congestion_control,
            if self.commit.is_empty() { "unknown" } else { &self.commit }
        )
    }
}

/// Asked of `git` in the folder of this crate's sources, if both are there.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(env!("CARGO_MANIFEST_DIR")).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let Some(commit) = git(&["rev-parse", "HEAD"]) else { return String::new() };
    match git(&["status", "--porcelain", "--untracked-files=no"]) {
        Some(changes) if !changes.is_empty() => commit + "-dirty",
        _ => commit,
    }
}
