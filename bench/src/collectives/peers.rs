//! What a user would pick instead, measured beside our transports: Gloo (through PyTorch) and Open MPI (through mpi4py).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::group::{Group, GroupListener};

/// A rank of any peer, in Python. Part of this program, so that the program can be moved.
const RANK: &str = include_str!("../../peers/rank.py");

/// A library and how it is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    /// Gloo over TCP.
    Gloo,
    /// Open MPI through shared memory.
    MpiShm,
    /// Open MPI over TCP.
    MpiTcp,
}

/// What all peers are started with.
#[derive(Clone, Debug)]
pub(crate) struct PeerSettings {
    /// The Python that has the libraries.
    pub(crate) python: PathBuf,
    pub(crate) ranks: usize,
    pub(crate) timeout: Duration,
}

impl Peer {
    pub(crate) const ALL: [Peer; 3] = [Peer::Gloo, Peer::MpiShm, Peer::MpiTcp];

    /// Its name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Peer::Gloo => "gloo",
            Peer::MpiShm => "mpi-shm",
            Peer::MpiTcp => "mpi-tcp",
        }
    }

    /// Starts its ranks.
    ///
    /// # Errors
    /// What is missing, for the user.
    pub(crate) fn start(self, settings: &PeerSettings) -> Result<Group, String> {
        let listener = GroupListener::new()?;
        let script = listener.folder().join("rank.py");
        let complaints = listener.folder().join("stderr");
        let file = fs::write(&script, RANK).and_then(|()| File::create(&complaints));
        let file = file.map_err(|error| format!("{}: {error}", listener.folder().display()))?;
        let mut children = Children(Vec::new());
        let ranks = settings.ranks.to_string();
        match self {
            Peer::Gloo => {
                for rank in 0..settings.ranks {
                    let mut command = Command::new(&settings.python);
                    command.arg(&script).args(["gloo", "--rank", &rank.to_string(), "--world", &ranks]);
                    command.arg("--rendezvous").arg(listener.folder().join("rendezvous"));
                    command.args(["--timeout", &settings.timeout.as_secs_f64().to_string()]);
                    command.arg(listener.socket());
                    children.0.push(spawn(command, &file, &settings.python)?);
                }
            }
            Peer::MpiShm | Peer::MpiTcp => {
                // Inside mpirun a missing interpreter reads like a failure of MPI.
                find(&settings.python)?;
                let mut command = Command::new("mpirun");
                command.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", &ranks]);
                command.args(["--mca", "pml", "ob1", "--mca", "btl"]);
                if self == Peer::MpiShm {
                    command.arg("vader,self");
                } else {
                    command.args(["tcp,self", "--mca", "btl_tcp_if_include", "lo"]);
                }
                command.arg(&settings.python).arg(&script).arg("mpi").arg(listener.socket());
                children.0.push(spawn(command, &file, Path::new("mpirun"))?);
            }
        }
        let children = std::mem::take(&mut children.0);
        listener.programs(self.name(), children, complaints, settings.ranks, settings.timeout)
    }
}

/// Processes that are ended with an error between two starts.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn spawn(mut command: Command, complaints: &File, program: &Path) -> Result<Child, String> {
    let stderr = complaints.try_clone().map_err(|error| format!("the file for a program's error output: {error}"))?;
    command
        .env("OMP_NUM_THREADS", "1")
        .env("GLOO_SOCKET_IFNAME", "lo")
        // Settings that some images make for another library's threads and caches.
        .env_remove("OPENBLAS_CORETYPE")
        .env_remove("OPENBLAS_L2_SIZE")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr)
        .process_group(0);
    command.spawn().map_err(|error| not_started(program.as_os_str(), &error))
}

/// Whether a program can be started at all.
fn find(program: &Path) -> Result<(), String> {
    let status = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.map(drop).map_err(|error| not_started(program.as_os_str(), &error))
}

fn not_started(program: &OsStr, error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::NotFound {
        format!("program `{}` not found", program.display())
    } else {
        format!("`{}` does not start: {error}", program.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let settings = PeerSettings { python: "/nowhere/python".into(), ranks: 2, timeout: Duration::from_secs(5) };
        for peer in Peer::ALL {
            let why = peer.start(&settings).err().unwrap();
            assert!(why.contains("/nowhere/python"), "{}: {why}", peer.name());
        }
        // Starts, but is no Python.
        let settings = PeerSettings { python: "/bin/false".into(), ..settings };
        let why = Peer::Gloo.start(&settings).err().unwrap();
        assert!(why.contains("exit status: 1"), "{why}");
    }
}
