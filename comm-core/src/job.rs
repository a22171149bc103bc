//! What this process is part of: its rank, the number of ranks, where they meet and what they trust each other by.
//!
//! This is the only module that reads environment variables. A launcher sets them; these are understood, the first that is there
//! decides about rank and world size:
//!
//! | launcher | rank, world size | job id | epoch |
//! |---|---|---|---|
//! | [`Launch`](crate::launch::Launch), or by hand | `COMM_RANK`, `COMM_WORLD_SIZE` | `COMM_JOB_ID` | `COMM_EPOCH` |
//! | torchrun | `RANK`, `WORLD_SIZE` | `TORCHELASTIC_RUN_ID` | `TORCHELASTIC_RESTART_COUNT` |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `PMIX_NAMESPACE` | |
//! | MPICH and others | `PMI_RANK`, `PMI_SIZE` | | |
//! | Slurm's `srun` | `SLURM_PROCID`, `SLURM_NTASKS` | `SLURM_JOB_ID.SLURM_STEP_ID` | `SLURM_RESTART_COUNT` |
//!
//! `COMM_JOB_ID` and `COMM_EPOCH` win over the launcher's own. Slurm's variables count in a step that `srun` starts, and not in a batch script or
//! the shell of `salloc`, which have some of them too.
//!
//! Where to meet: `COMM_ADDR` (`host:port`, or `file:/path` for ranks of one machine), else `MASTER_ADDR` with `COMM_PORT`, or
//! with `MASTER_PORT` + 1 when `TORCHELASTIC_USE_AGENT_STORE=True` (torchrun's own store then listens on `MASTER_PORT`), or with
//! `MASTER_PORT`.
//!
//! What to trust: `COMM_SECRET_FILE` (a file that only its owner can read) or `COMM_SECRET`. A job of more than one rank
//! without a secret is refused, on loopback too, where every user of the machine can connect; `COMM_INSECURE=1`, or the program by
//! [`from_env_with`](Job::from_env_with), runs it nevertheless, with a key that anyone who knows the job id can compute. A secret
//! is never an argument of a command: every user of the machine can read those.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::addresses::check_address;
use crate::error::{Error, Result};
use crate::{hex, process, sys};

/// Names of the variables that [`Launch`](crate::launch::Launch) sets.
pub(crate) mod vars {
    pub(crate) const RANK: &str = "COMM_RANK";
    pub(crate) const WORLD_SIZE: &str = "COMM_WORLD_SIZE";
    pub(crate) const ADDR: &str = "COMM_ADDR";
    pub(crate) const SECRET_FILE: &str = "COMM_SECRET_FILE";
    pub(crate) const SECRET: &str = "COMM_SECRET";
    pub(crate) const INSECURE: &str = "COMM_INSECURE";
    pub(crate) const JOB_ID: &str = "COMM_JOB_ID";
    pub(crate) const EPOCH: &str = "COMM_EPOCH";
    pub(crate) const LAUNCHER_PID: &str = "COMM_LAUNCHER_PID";
}

/// Most bytes of a job id.
pub const MAX_JOB_ID: usize = 200;

/// The exit code by which a rank says that it has failed because of another one. A launcher looks for the cause elsewhere.
/// (It is `EX_TEMPFAIL` of `sysexits.h`: nothing is wrong here, try again.)
pub const EXIT_ECHO: i32 = 75;

/// Most ranks of a job.
pub const MAX_WORLD_SIZE: usize = 1 << 16;

/// One rank's place in a job.
#[derive(Clone, Debug)]
pub struct Job {
    /// This rank, below [`world_size`](Job::world_size).
    pub rank: usize,
    /// Number of ranks, at least 1.
    pub world_size: usize,
    /// Where rank 0 listens.
    pub address: Address,
    /// What the ranks know and strangers do not.
    pub secret: Secret,
    /// Name of the job, at most [`MAX_JOB_ID`] bytes. Ranks of different jobs refuse each other.
    pub id: String,
    /// Which start of the job this is: ranks left over from an earlier one are refused.
    pub epoch: u64,
    /// Who says which rank this is, and of how many.
    pub source: Source,
}

/// Who says which rank a process is, and of how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The program itself, by [`Job::new`].
    Program,
    /// [`Launch`](crate::launch::Launch), by `COMM_RANK` and `COMM_WORLD_SIZE`.
    Launch,
    /// Whoever has set `COMM_RANK` and `COMM_WORLD_SIZE`.
    Hand,
    /// torchrun, or whoever else has set `RANK` and `WORLD_SIZE`.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH's `mpiexec`, and others that speak its protocol.
    Mpich,
    /// Slurm's `srun`.
    Slurm,
}

impl Source {
    /// The variables that hold rank and world size; `None` for [`Program`](Source::Program).
    pub fn variables(self) -> Option<(&'static str, &'static str)> {
        match self {
            Source::Program => None,
            Source::Launch => Some((vars::RANK, vars::WORLD_SIZE)),
            _ => LAUNCHERS.iter().find(|l| l.source == self).map(|l| (l.rank, l.world_size)),
        }
    }

    /// The variable by which this launcher says how many ranks are on a machine; `None` where it has none.
    pub fn local_size_variable(self) -> Option<&'static str> {
        LAUNCHERS.iter().find(|l| l.source == self)?.local_size.first().copied()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((rank, size)) = self.variables() else { return f.write_str("the program") };
        let whose = match self {
            Source::Program | Source::Hand => "",
            Source::Launch => " of this program's own launcher",
            Source::Torchrun => " (torchrun)",
            Source::OpenMpi => " (Open MPI)",
            Source::Mpich => " (MPICH)",
            Source::Slurm => " (Slurm)",
        };
        write!(f, "{rank} and {size}{whose}")
    }
}

impl Job {
    /// A job with an empty id at epoch 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `rank` is not below `world_size`, or there are no ranks or too many.
    pub fn new(rank: usize, world_size: usize, address: Address, secret: Secret) -> Result<Self> {
        check_ranks(rank, world_size, "rank", "world size")?;
        Ok(Job { rank, world_size, address, secret, id: String::new(), epoch: 0, source: Source::Program })
    }

    /// Reads this process's environment; `None` when no launcher has left its variables there. Readies this process for a job
    /// ([`process::prepare`]).
    ///
    /// # Errors
    /// As [`from_vars`](Job::from_vars).
    pub fn from_env() -> Result<Option<Self>> {
        Self::from_env_with(false)
    }

    /// As [`from_env`](Job::from_env). With `insecure`, for which a user must have asked (a program's `--insecure`), a job without a
    /// secret is not refused: anyone who can connect can then join or end it.
    ///
    /// # Errors
    /// As [`from_vars`](Job::from_vars).
    pub fn from_env_with(insecure: bool) -> Result<Option<Self>> {
        process::prepare();
        // Bytes that are no text stay visible as such, and are refused where they are parsed.
        let vars = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Self::from_vars_with(&vars, insecure)
    }

    /// As [`from_env`](Job::from_env), from `vars`. The file that `COMM_SECRET_FILE` names is read.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the variable that is missing or makes no sense, [`Error::Io`] when the secret file
    /// cannot be read.
    pub fn from_vars(vars: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        Self::from_vars_with(vars, false)
    }

    fn from_vars_with(vars: &dyn Fn(&str) -> Option<String>, insecure: bool) -> Result<Option<Self>> {
        let vars = Vars(vars);
        let Some(launcher) = Launcher::of(vars) else {
            if let Some(size) = vars.text(vars::WORLD_SIZE) {
                return Err(Error::invalid(format!(
                    "{} is {size}, but {} is not set; set both, or neither",
                    vars::WORLD_SIZE,
                    vars::RANK
                )));
            }
            return Ok(None);
        };
        let rank = vars.required(launcher.rank, launcher.rank)?;
        let world_size = vars.required(launcher.world_size, launcher.rank)?;
        check_ranks(rank, world_size, launcher.rank, launcher.world_size)?;

        let id = vars.text(vars::JOB_ID).unwrap_or_else(|| launcher.job_id(vars));
        if id.len() > MAX_JOB_ID {
            return Err(Error::invalid(format!("the job id has {} bytes; at most {MAX_JOB_ID} fit", id.len())));
        }
        let epoch = match vars.number(vars::EPOCH)? {
            Some(epoch) => epoch,
            None => vars.number(launcher.epoch)?.unwrap_or(0),
        };
        let (address, secret) = match (vars.address()?, vars.secret(&id, insecure)?) {
            (Some(address), Some(secret)) => (address, secret),
            // A single rank meets nobody.
            (address, secret) if world_size == 1 => (
                address.unwrap_or_else(|| Address::Tcp { host: "127.0.0.1".into(), port: 0 }),
                match secret {
                    Some(secret) => secret,
                    None => Secret::random()?,
                },
            ),
            (None, _) => {
                return Err(Error::invalid(format!(
                    "rank {rank} of {world_size} (by {}) does not know where to meet the others: set COMM_ADDR=host:port, \
                     or MASTER_ADDR and MASTER_PORT, to an address of rank 0's machine",
                    launcher.rank
                )));
            }
            (Some(address), None) => {
                return Err(Error::invalid(format!(
                    "rank {rank} has no secret by which to know the others at {address}: set COMM_SECRET_FILE to a file \
                     (mode 600) with the same random text for all ranks, or COMM_SECRET to that text; --insecure or \
                     COMM_INSECURE=1 goes without, and then anyone who can connect to that address can join or end the job"
                )));
            }
        };
        let source = match launcher.source {
            Source::Hand if vars.text(vars::LAUNCHER_PID).is_some() => Source::Launch,
            source => source,
        };
        Ok(Some(Job { rank, world_size, address, secret, id, epoch, source }))
    }
}

/// Where rank 0 listens and the others dial.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// An address or name of rank 0's machine. Rank 0 binds exactly this, not every interface: of a name all addresses that are
    /// its machine's, those of loopback only where there are no others.
    Tcp {
        /// An address, or a name that all ranks resolve to an address of rank 0's machine.
        host: String,
        /// The port.
        port: u16,
    },
    /// For ranks of one machine: rank 0 binds a free port of 127.0.0.1, or of ::1 where that is not there, and writes it into this
    /// file.
    File(PathBuf),
}

impl Address {
    /// Parses `host:port`, `[v6]:port` or `file:/path`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    pub fn parse(text: &str) -> Result<Self> {
        if let Some(path) = text.strip_prefix("file:") {
            if path.is_empty() {
                return Err(Error::invalid("the address \"file:\" names no file"));
            }
            return Ok(Address::File(path.into()));
        }
        let understood = text.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
        match understood {
            Some((host, port)) if port != 0 => Self::tcp(host, port),
            _ => Err(Error::invalid(format!("{text:?} is not an address: host:port or file:/path is expected"))),
        }
    }

    /// `host` may be an IPv6 address in brackets.
    fn tcp(host: &str, port: u16) -> Result<Self> {
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() || host.contains(['[', ']']) {
            return Err(Error::invalid(format!("{host:?} is not an address or a name of a machine")));
        }
        host.parse().map_or(Ok(()), check_address)?;
        Ok(Address::Tcp { host: host.into(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

/// What the ranks of a job know and strangers do not. Its text form tells nothing of it.
#[derive(Clone)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Fewest bytes of a secret: a peer that is not one of ours gets to see what an off-line guess can be checked against, so
    /// it must not be guessable.
    pub const MIN_LEN: usize = 16;

    const MAX_LEN: usize = 4096;

    /// A secret of the given bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when there are fewer than [`MIN_LEN`](Secret::MIN_LEN).
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.len() < Self::MIN_LEN || bytes.len() > Self::MAX_LEN {
            return Err(Error::invalid(format!(
                "a secret needs {} to {} bytes, this one has {}; use for instance 32 random bytes in hexadecimal",
                Self::MIN_LEN,
                Self::MAX_LEN,
                bytes.len()
            )));
        }
        Ok(Secret(bytes))
    }

    /// 64 random hexadecimal digits.
    ///
    /// # Errors
    /// [`Error::Io`] when the system has no randomness.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 32];
        fill_random(&mut bytes)?;
        Ok(Secret(hex(&bytes).into_bytes()))
    }

    /// Reads a secret from a file; white space around it is not part of it. Never waits, whatever is there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the file belongs to another user than this one and root (unless this one is root), when others than
    /// the owner may read it, when it is no ordinary file, or when what it holds is no text of fitting length; [`Error::Io`].
    pub fn read(path: &Path) -> Result<Self> {
        // Owner and mode are looked at in the file that was opened, not in one that has taken its place since.
        let (bytes, metadata) = read_small(path, Self::MAX_LEN as u64, "the file of the secret")?;
        let (owner, user, mode) = (metadata.uid(), rustix::process::geteuid().as_raw(), metadata.mode());
        if !is_trusted(owner, user) {
            return Err(refused_owner(path, owner, user));
        }
        if mode & 0o077 != 0 {
            return Err(Error::invalid(format!(
                "{} may be read by others (mode {:o}), so it is no secret: chmod 600 it",
                path.display(),
                mode & 0o777
            )));
        }
        let text = str::from_utf8(&bytes).ok().map(str::trim_ascii);
        let Some(text) = text.filter(|text| !text.chars().any(char::is_control)) else {
            return Err(Error::invalid(format!(
                "the secret in {} is no line of text; use for instance 32 random bytes in hexadecimal",
                path.display()
            )));
        };
        Self::new(text).map_err(|error| Error::invalid(format!("{}: {error}", path.display())))
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Whether a process of `user` believes that nobody else knows what is in a file of `owner`. Root can read everyone's, and reads what it is told to.
fn is_trusted(owner: u32, user: u32) -> bool {
    owner == user || owner == 0 || user == 0
}

fn refused_owner(path: &Path, owner: u32, user: u32) -> Error {
    Error::invalid(format!(
        "{} belongs to user {owner}, who knows what is in it, and this process runs as user {user}: name a file that belongs to user {user} \
         or to root, or chown it",
        path.display()
    ))
}

/// How many ranks of this job share this machine, as far as its launcher says: `LOCAL_WORLD_SIZE` (torchrun),
/// `OMPI_COMM_WORLD_LOCAL_SIZE` (Open MPI), `MPI_LOCALNRANKS` (MPICH), the number for this node in `SLURM_STEP_TASKS_PER_NODE`, or
/// `SLURM_NTASKS_PER_NODE` (Slurm); under [`Launch`](crate::launch::Launch) all of them. The launcher that says which rank this is
/// is asked first.
pub fn ranks_on_this_machine() -> Option<usize> {
    local_ranks(&|name| std::env::var(name).ok())
}

pub(crate) fn local_ranks(vars: &dyn Fn(&str) -> Option<String>) -> Option<usize> {
    let vars = Vars(vars);
    // Our own launcher may itself run under another one, which knows nothing of its ranks.
    let own = vars.text(vars::LAUNCHER_PID).and_then(|_| vars.text(vars::WORLD_SIZE));
    if let Some(size) = own {
        return size.trim().parse().ok().filter(|ranks| *ranks > 0);
    }
    let first = Launcher::of(vars).map_or(&[][..], |launcher| launcher.local_size);
    let others = LAUNCHERS.iter().flat_map(|launcher| launcher.local_size);
    first.iter().chain(others).find_map(|name| {
        let text = vars.text(name)?;
        let node = vars.text("SLURM_NODEID").and_then(|node| node.parse().ok()).unwrap_or(0);
        tasks_of_node(&text, node).filter(|ranks| *ranks > 0)
    })
}

/// Slurm writes "2(x3),1": two tasks on each of three nodes, then one. Others write a number.
fn tasks_of_node(text: &str, node: usize) -> Option<usize> {
    let mut before = 0usize;
    let mut first = None;
    for part in text.split(',') {
        let (tasks, nodes) = match part.split_once("(x") {
            Some((tasks, nodes)) => (tasks, nodes.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        let tasks = tasks.trim().parse().ok()?;
        first = first.or(Some(tasks));
        before = before.saturating_add(nodes);
        if node < before {
            return Some(tasks);
        }
    }
    // Of a node that is not in the list: as if it were the first.
    first
}

/// The place of this rank among those of this machine, from 0, as far as its launcher says: `LOCAL_RANK` (torchrun),
/// `OMPI_COMM_WORLD_LOCAL_RANK` (Open MPI), `MPI_LOCALRANKID` (MPICH), `SLURM_LOCALID` (Slurm); under [`Launch`](crate::launch::Launch)
/// its rank.
pub fn rank_on_this_machine() -> Option<usize> {
    local_rank(&|name| std::env::var(name).ok())
}

fn local_rank(vars: &dyn Fn(&str) -> Option<String>) -> Option<usize> {
    // Those of our own launcher first: it may itself run under another one.
    let own = vars(vars::LAUNCHER_PID).and_then(|_| vars(vars::RANK));
    let first = Launcher::of(Vars(vars)).and_then(|launcher| launcher.local_rank);
    let mut names = first.into_iter().chain(LAUNCHERS.iter().filter_map(|launcher| launcher.local_rank));
    own.or_else(|| names.find_map(vars))?.trim().parse().ok()
}

/// Ends this process, by SIGKILL, when the process that launched it is gone, however that ends.
///
/// [`Launch`](crate::launch::Launch) arranges this by itself before the program starts; a program calls it first thing to have it
/// under a parent of its own that sets `COMM_LAUNCHER_PID` to its process id. Without that variable nothing happens. Call it
/// in a process whose parent's starting thread lives on: to the kernel that thread is the parent.
///
/// # Errors
/// [`Error::Io`] when the launcher is gone already, or the kernel refuses.
pub fn die_with_parent() -> Result<()> {
    let vars = |name: &str| std::env::var(name).ok();
    let parent: Option<u32> = Vars(&vars).number(vars::LAUNCHER_PID)?;
    match parent {
        None => Ok(()),
        Some(parent) => sys::die_with_parent(parent)
            .map_err(|e| Error::io(format!("binding this process's life to its launcher's (process {parent})"), e)),
    }
}

/// Reads a file of at most `most` bytes that should be an ordinary one. Never waits, whatever is there: a FIFO, a device.
///
/// # Errors
/// [`Error::InvalidArgument`] when it is something else or has more bytes, [`Error::Io`].
pub(crate) fn read_small_file(path: &Path, most: u64, what: &str) -> Result<Vec<u8>> {
    read_small(path, most, what).map(|(bytes, _)| bytes)
}

/// The bytes, and what the system says of the file.
fn read_small(path: &Path, most: u64, what: &str) -> Result<(Vec<u8>, fs::Metadata)> {
    let failed = |e| Error::io(format!("reading {what}, {}", path.display()), e);
    let no_blocking = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = fs::OpenOptions::new().read(true).custom_flags(no_blocking).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        let kind = metadata.file_type();
        let kind = match () {
            () if kind.is_dir() => "a directory",
            () if kind.is_fifo() => "a FIFO",
            () if kind.is_socket() => "a socket",
            () => "a device",
        };
        return Err(Error::invalid(format!("{what}, {}, is {kind}; name an ordinary file", path.display())));
    }
    let mut bytes = Vec::new();
    // A file may grow, and not all tell their length.
    file.take(most + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > most {
        let size = metadata.len().max(most + 1);
        return Err(Error::invalid(format!("{what}, {}, has {size} bytes; at most {most} fit", path.display())));
    }
    Ok((bytes, metadata))
}

/// The exit code of `rank` after `error`: [`EXIT_ECHO`] when another rank is the cause of it, else 1.
pub fn exit_code(error: &Error, rank: usize) -> i32 {
    let is_echo = match error {
        // Who gave up waiting is no cause, if it says for whom.
        Error::Timeout { rank: by, waiting_for, .. } if waiting_for.is_empty() => *by != rank,
        Error::Timeout { waiting_for, .. } => !waiting_for.contains(&rank),
        Error::Mismatch { rank: one, peer: other, .. } => *one != rank && *other != rank,
        other => other.culprit().is_some_and(|culprit| culprit != rank),
    };
    if is_echo { EXIT_ECHO } else { 1 }
}

/// Fills `bytes` with randomness of the system.
pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    getrandom::fill(bytes).map_err(|e| Error::io("getting random bytes", io::Error::other(e.to_string())))
}

/// Variables of one launcher.
struct Launcher {
    rank: &'static str,
    world_size: &'static str,
    job_id: &'static [&'static str],
    epoch: &'static str,
    /// Variables that say how many ranks are on this machine, the surest first.
    local_size: &'static [&'static str],
    /// The variable that says which of them this is.
    local_rank: Option<&'static str>,
    source: Source,
}

const LAUNCHERS: [Launcher; 5] = [
    Launcher {
        rank: vars::RANK,
        world_size: vars::WORLD_SIZE,
        job_id: &[vars::JOB_ID],
        epoch: vars::EPOCH,
        local_size: &[],
        local_rank: None,
        source: Source::Hand,
    },
    Launcher {
        rank: "RANK",
        world_size: "WORLD_SIZE",
        job_id: &["TORCHELASTIC_RUN_ID"],
        epoch: "TORCHELASTIC_RESTART_COUNT",
        local_size: &["LOCAL_WORLD_SIZE"],
        local_rank: Some("LOCAL_RANK"),
        source: Source::Torchrun,
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        job_id: &["PMIX_NAMESPACE"],
        epoch: vars::EPOCH,
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        local_rank: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
        source: Source::OpenMpi,
    },
    Launcher {
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        job_id: &[],
        epoch: vars::EPOCH,
        local_size: &["MPI_LOCALNRANKS"],
        local_rank: Some("MPI_LOCALRANKID"),
        source: Source::Mpich,
    },
    Launcher {
        rank: "SLURM_PROCID",
        world_size: "SLURM_NTASKS",
        job_id: &["SLURM_JOB_ID", SLURM_STEP],
        epoch: "SLURM_RESTART_COUNT",
        local_size: &["SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"],
        local_rank: Some("SLURM_LOCALID"),
        source: Source::Slurm,
    },
];

const SLURM_STEP: &str = "SLURM_STEP_ID";

/// Steps of Slurm from this number on are none that `srun` starts tasks in: the batch script, the shell of `salloc`, what is adopted by `ssh`.
const SLURM_FIRST_SPECIAL_STEP: u32 = 0xffff_fff0;

/// What launchers other than [`Launch`](crate::launch::Launch) tell a process about its rank.
pub(crate) fn other_launchers_variables() -> impl Iterator<Item = &'static str> {
    let others = LAUNCHERS.iter().filter(|launcher| launcher.source != Source::Hand);
    others.flat_map(|l| [l.rank, l.world_size].into_iter().chain(l.local_size.iter().copied()).chain(l.local_rank))
}

impl Launcher {
    /// The first whose rank is set.
    fn of(vars: Vars<'_>) -> Option<&'static Launcher> {
        LAUNCHERS.iter().find(|launcher| vars.text(launcher.rank).is_some() && launcher.is_there(vars))
    }

    /// A Slurm batch script itself has a rank and a number of tasks, but is none of them.
    fn is_there(&self, vars: Vars<'_>) -> bool {
        let is_step =
            || vars.text(SLURM_STEP)?.trim().parse::<u32>().ok().filter(|step| *step < SLURM_FIRST_SPECIAL_STEP);
        self.source != Source::Slurm || is_step().is_some()
    }

    fn job_id(&self, vars: Vars<'_>) -> String {
        let parts: Vec<String> = self.job_id.iter().filter_map(|name| vars.text(name)).collect();
        parts.join(".")
    }
}

#[derive(Clone, Copy)]
struct Vars<'a>(&'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    /// The value, unless missing or empty.
    fn text(self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn number<T: std::str::FromStr>(self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(Error::invalid(format!("{name}={text} is not a number that fits"))),
        }
    }

    fn required(self, name: &str, because: &str) -> Result<usize> {
        self.number(name)?.ok_or_else(|| Error::invalid(format!("{because} is set but {name} is not")))
    }

    fn address(self) -> Result<Option<Address>> {
        if let Some(text) = self.text(vars::ADDR) {
            return Address::parse(&text).map(Some);
        }
        let Some(host) = self.text("MASTER_ADDR") else { return Ok(None) };
        let port = match (self.number::<u16>("COMM_PORT")?, self.number::<u16>("MASTER_PORT")?) {
            (Some(port), _) => port,
            (None, Some(port)) if self.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True") => port
                .checked_add(1)
                .ok_or_else(|| Error::invalid("MASTER_PORT is 65535, so there is no port after it: set COMM_PORT"))?,
            (None, Some(port)) => port,
            (None, None) => return Err(Error::invalid("MASTER_ADDR is set but neither COMM_PORT nor MASTER_PORT is")),
        };
        if port == 0 {
            return Err(Error::invalid("port 0 is no port at which ranks could meet; set COMM_PORT"));
        }
        Address::tcp(&host, port).map(Some)
    }

    fn secret(self, job_id: &str, insecure: bool) -> Result<Option<Secret>> {
        if let Some(path) = self.text(vars::SECRET_FILE) {
            return Secret::read(Path::new(&path)).map(Some);
        }
        if let Some(text) = self.text(vars::SECRET) {
            return Secret::new(text.trim()).map(Some);
        }
        if insecure || self.text(vars::INSECURE).as_deref() == Some("1") {
            return Secret::new(format!("anyone may join job {job_id}")).map(Some);
        }
        Ok(None)
    }
}

fn check_ranks(rank: usize, world_size: usize, rank_name: &str, world_name: &str) -> Result<()> {
    if world_size == 0 || world_size > MAX_WORLD_SIZE {
        return Err(Error::invalid(format!("{world_name} is {world_size}; a job has 1 to {MAX_WORLD_SIZE} ranks")));
    }
    if rank >= world_size {
        return Err(Error::invalid(format!(
            "{rank_name} is {rank} and {world_name} is {world_size}; ranks count from 0, so it must be smaller"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn ranks_of_a_machine_are_read_from_every_launcher() {
        let of = |name: &'static str, value: &'static str| {
            local_ranks(&move |asked| (asked == name).then(|| value.to_string()))
        };
        assert_eq!(of("LOCAL_WORLD_SIZE", "4"), Some(4));
        assert_eq!(of("OMPI_COMM_WORLD_LOCAL_SIZE", "3"), Some(3));
        assert_eq!(of("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"), Some(2));
        assert_eq!(of("SLURM_NTASKS_PER_NODE", "many"), None);
        assert_eq!(of("LOCAL_WORLD_SIZE", "0"), None);
    }

    #[test]
    fn ranks_of_a_machine_are_those_of_the_launcher_that_counts_them() {
        let of = |set: &[(&str, &str)]| {
            local_ranks(&|asked| set.iter().find(|(name, _)| *name == asked).map(|(_, value)| value.to_string()))
        };
        // A batch script for one task a node starts eight ranks by our own launcher.
        let slurm = [("SLURM_NTASKS_PER_NODE", "1"), ("SLURM_STEP_TASKS_PER_NODE", "1")];
        let own = [("COMM_LAUNCHER_PID", "77"), ("COMM_RANK", "2"), ("COMM_WORLD_SIZE", "8")];
        assert_eq!(of(&[&slurm[..], &own].concat()), Some(8));
        let torchrun = [("RANK", "0"), ("WORLD_SIZE", "8"), ("LOCAL_WORLD_SIZE", "4")];
        assert_eq!(of(&[&slurm[..], &torchrun].concat()), Some(4));
        let step = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "6"), ("SLURM_STEP_ID", "0"), ("LOCAL_WORLD_SIZE", "3")];
        assert_eq!(of(&[&step[..], &[("SLURM_STEP_TASKS_PER_NODE", "2")], &slurm[..1]].concat()), Some(2));
        // srun speaks MPICH's protocol too.
        assert_eq!(of(&[("PMI_RANK", "0"), ("PMI_SIZE", "8"), ("SLURM_STEP_TASKS_PER_NODE", "4(x2)")]), Some(4));
        for (node, tasks) in [("0", 2), ("2", 2), ("3", 1), ("9", 2)] {
            assert_eq!(of(&[("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"), ("SLURM_NODEID", node)]), Some(tasks), "{node}");
        }
        for nonsense in ["2(x3", "(x3)", "2(x)", ",", "2(x3),(x"] {
            let here = of(&[("SLURM_STEP_TASKS_PER_NODE", nonsense), ("SLURM_NODEID", "3")]);
            assert_eq!(here, None, "{nonsense}");
        }
    }

    #[test]
    fn the_source_of_rank_and_world_size_is_known() {
        for (rank, size, more, source, said) in [
            ("COMM_RANK", "COMM_WORLD_SIZE", None, Source::Hand, "COMM_RANK and COMM_WORLD_SIZE"),
            (
                "COMM_RANK",
                "COMM_WORLD_SIZE",
                Some(("COMM_LAUNCHER_PID", "1")),
                Source::Launch,
                "COMM_RANK and COMM_WORLD_SIZE of this program's own launcher",
            ),
            ("RANK", "WORLD_SIZE", None, Source::Torchrun, "RANK and WORLD_SIZE (torchrun)"),
            (
                "OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE",
                None,
                Source::OpenMpi,
                "OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE (Open MPI)",
            ),
            ("PMI_RANK", "PMI_SIZE", None, Source::Mpich, "PMI_RANK and PMI_SIZE (MPICH)"),
            (
                "SLURM_PROCID",
                "SLURM_NTASKS",
                Some(("SLURM_STEP_ID", "0")),
                Source::Slurm,
                "SLURM_PROCID and SLURM_NTASKS (Slurm)",
            ),
        ] {
            let vars: Vec<(&str, &str)> = [(rank, "0"), (size, "1")].into_iter().chain(more).collect();
            let job = found(&vars);
            assert_eq!((job.source, job.source.to_string().as_str()), (source, said));
            assert_eq!(source.variables(), Some((rank, size)));
        }
        let secret = Secret::new("0123456789abcdef").unwrap();
        assert_eq!(Job::new(0, 1, tcp("h", 1), secret).unwrap().source, Source::Program);
    }

    #[test]
    fn our_launcher_takes_away_what_others_say() {
        let others: Vec<&str> = other_launchers_variables().collect();
        for name in
            ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID", "SLURM_LOCALID"]
        {
            assert!(others.contains(&name), "{name}");
        }
        assert!(others.iter().all(|name| !name.starts_with("COMM_")), "{others:?}");
    }

    const SECRET: (&str, &str) = ("COMM_SECRET", "0123456789abcdef");

    fn job(vars: &[(&str, &str)]) -> Result<Option<Job>> {
        Job::from_vars(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_string()))
    }

    fn found(vars: &[(&str, &str)]) -> Job {
        job(vars).unwrap().unwrap()
    }

    fn error(vars: &[(&str, &str)]) -> String {
        job(vars).unwrap_err().to_string()
    }

    fn tcp(host: &str, port: u16) -> Address {
        Address::Tcp { host: host.into(), port }
    }

    #[test]
    fn no_launcher_is_no_job() {
        assert!(job(&[]).unwrap().is_none());
        assert!(job(&[("MASTER_ADDR", "host"), SECRET]).unwrap().is_none());
    }

    #[test]
    fn own_variables_win() {
        let vars = [
            ("RANK", "0"),
            ("WORLD_SIZE", "9"),
            ("COMM_RANK", "2"),
            ("COMM_WORLD_SIZE", "4"),
            ("COMM_ADDR", "[::1]:4000"),
            ("COMM_JOB_ID", "x"),
            ("COMM_EPOCH", "7"),
            SECRET,
        ];
        let job = found(&vars);
        assert_eq!((job.rank, job.world_size, job.id.as_str(), job.epoch), (2, 4, "x", 7));
        assert_eq!(job.address, tcp("::1", 4000));
        assert_eq!(job.address.to_string(), "[::1]:4000");
    }

    #[test]
    fn torchrun_keeps_its_store_on_the_master_port() {
        let base = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "29500"), SECRET];
        assert_eq!(found(&base).address, tcp("h", 29500));
        let agent = ("TORCHELASTIC_USE_AGENT_STORE", "True");
        assert_eq!(found(&[&base[..], &[agent]].concat()).address, tcp("h", 29501));
        let port = ("COMM_PORT", "5000");
        assert_eq!(found(&[&base[..], &[agent, port]].concat()).address, tcp("h", 5000));
        let restart = [("TORCHELASTIC_RUN_ID", "run"), ("TORCHELASTIC_RESTART_COUNT", "3")];
        let job = found(&[&base[..], &restart].concat());
        assert_eq!((job.id.as_str(), job.epoch), ("run", 3));
    }

    #[test]
    fn mpi_and_slurm() {
        let address = ("COMM_ADDR", "file:/tmp/a");
        let job1 = found(&[("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "3"), address, SECRET]);
        assert_eq!((job1.rank, job1.world_size), (1, 3));
        assert_eq!(job1.address, Address::File("/tmp/a".into()));
        assert_eq!(found(&[("PMI_RANK", "1"), ("PMI_SIZE", "2"), address, SECRET]).rank, 1);
        let batch = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "12"), address, SECRET];
        assert!(job(&batch).unwrap().is_none(), "a batch script is not a rank");
        let step = found(&[&batch[..], &[("SLURM_STEP_ID", "0")]].concat());
        assert_eq!((step.world_size, step.id.as_str()), (4, "12.0"));
        // The batch script, the shell of salloc, and what no number is.
        for step in ["4294967291", "4294967290", "4294967294", "batch", "interactive"] {
            assert!(job(&[&batch[..], &[("SLURM_STEP_ID", step)]].concat()).unwrap().is_none(), "{step}");
        }
    }

    #[test]
    fn nonsense_is_named() {
        let address = ("COMM_ADDR", "127.0.0.1:4000");
        let at = |rank, world| error(&[("COMM_RANK", rank), ("COMM_WORLD_SIZE", world), address, SECRET]);
        assert!(at("4", "4").contains("COMM_RANK is 4 and COMM_WORLD_SIZE is 4"));
        assert!(at("0", "0").contains("COMM_WORLD_SIZE is 0"));
        assert!(at("-1", "2").contains("COMM_RANK=-1"));
        assert!(at("0", "many").contains("COMM_WORLD_SIZE=many"));
        assert!(error(&[("COMM_RANK", "0")]).contains("COMM_WORLD_SIZE is not"));
        let two = [("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "2")];
        assert!(error(&[&two[..], &[SECRET]].concat()).contains("COMM_ADDR"));
        assert!(error(&[&two[..], &[address]].concat()).contains("COMM_SECRET_FILE"));
        assert!(error(&[&two[..], &[address, ("COMM_SECRET", "short")]].concat()).contains("16"));
        for text in ["host", "host:", ":80", "host:0", "host:99999", "file:"] {
            assert!(error(&[&two[..], &[("COMM_ADDR", text), SECRET]].concat()).contains("address"), "{text}");
        }
    }

    #[test]
    fn an_address_is_written_as_it_is_read() {
        for text in ["[[::1]]:80", "[[x]]:80", "x]:80", "[:80"] {
            assert!(Address::parse(text).is_err(), "{text}");
        }
        let vars = |host| [("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MASTER_ADDR", host), ("COMM_PORT", "80"), SECRET];
        assert_eq!(found(&vars("[::1]")).address, tcp("::1", 80));
        for host in ["0.0.0.0", "[::]", "::", "[]", "]"] {
            assert!(error(&vars(host)).contains("address"), "{host}");
        }
    }

    #[test]
    fn insecure_has_to_be_asked_for() {
        let vars = [("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "2"), ("COMM_ADDR", "127.0.0.1:4000")];
        assert!(job(&vars).is_err());
        assert!(job(&[&vars[..], &[("COMM_INSECURE", "1")]].concat()).unwrap().is_some());
    }

    #[test]
    fn a_program_can_ask_for_insecure_too_and_a_secret_still_wins() {
        let vars = [("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "2"), ("COMM_ADDR", "10.0.0.1:4000")];
        let with = |vars: &[(&str, &str)], insecure| {
            Job::from_vars_with(&|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_string()), insecure)
        };
        let error = with(&vars, false).unwrap_err().to_string();
        assert!(error.contains("--insecure") && error.contains("COMM_INSECURE=1"), "{error}");
        let open = with(&vars, true).unwrap().unwrap().secret;
        let by_variable = with(&[&vars[..], &[("COMM_INSECURE", "1")]].concat(), false).unwrap().unwrap().secret;
        assert_eq!(open.bytes(), by_variable.bytes());
        let secret = with(&[&vars[..], &[SECRET]].concat(), true).unwrap().unwrap().secret;
        assert_eq!(secret.bytes(), SECRET.1.as_bytes());
        assert!(with(&[&vars[..], &[("COMM_INSECURE", "yes")]].concat(), false).is_err(), "only 1 means it");
    }

    #[test]
    fn addresses_of_everybody_are_no_place_to_meet() {
        for host in ["0.0.0.0", "[::]", "255.255.255.255", "[ff02::1]"] {
            let vars = [("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "2"), SECRET];
            let error = error(&[&vars[..], &[("COMM_ADDR", &format!("{host}:4000"))]].concat());
            assert!(error.contains("name the one address of this machine"), "{error}");
        }
    }

    #[test]
    fn exit_codes_tell_an_echo_from_a_cause() {
        let lost = |rank| Error::PeerLost { rank, operation: String::new(), detail: "gone".into() };
        let timeout = |rank, waiting_for: &[usize]| {
            let waited = std::time::Duration::from_secs(1);
            Error::Timeout { rank, operation: "x".into(), waited, waiting_for: waiting_for.to_vec() }
        };
        let mismatch = |rank, peer| Error::Mismatch { rank, ours: "a".into(), peer, theirs: "b".into() };
        for (error, code) in [
            (lost(2), EXIT_ECHO),
            (lost(1), 1),
            (Error::Aborted { by: 0, reason: "enough".into() }, EXIT_ECHO),
            (Error::Aborted { by: 1, reason: "enough".into() }, 1),
            (timeout(0, &[2]), EXIT_ECHO),
            (timeout(0, &[1]), 1),
            (timeout(1, &[2]), EXIT_ECHO),
            (timeout(1, &[]), 1),
            (mismatch(0, 2), EXIT_ECHO),
            (mismatch(0, 1), 1),
            (Error::invalid("x"), 1),
        ] {
            assert_eq!(exit_code(&error, 1), code, "{error}");
        }
    }

    #[test]
    fn one_rank_needs_neither_address_nor_secret() {
        assert_eq!(found(&[("COMM_RANK", "0"), ("COMM_WORLD_SIZE", "1")]).world_size, 1);
    }

    #[test]
    fn a_secret_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        fs::write(&path, "0123456789abcdef\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(Secret::read(&path).unwrap_err().to_string().contains("chmod 600"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let secret = Secret::read(&path).unwrap();
        assert_eq!(secret.bytes(), b"0123456789abcdef");
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        assert!(Secret::read(&dir.path().join("none")).unwrap_err().to_string().contains("none"));
    }

    #[test]
    fn a_secret_file_of_another_user_is_refused() {
        assert!(is_trusted(1000, 1000) && is_trusted(0, 1000) && is_trusted(1000, 0));
        assert!(!is_trusted(1000, 1001));
        let (error, path) = (refused_owner(Path::new("/there/secret"), 1000, 1001).to_string(), "/there/secret");
        assert!(error.contains("belongs to user 1000") && error.contains(path), "{error}");
    }

    #[test]
    fn a_secret_file_of_any_other_kind_is_an_error_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let file = |name: &str, bytes: &[u8]| {
            fs::write(path(name), bytes).unwrap();
            fs::set_permissions(path(name), fs::Permissions::from_mode(0o600)).unwrap();
            path(name)
        };
        assert!(std::process::Command::new("mkfifo").arg(path("fifo")).status().unwrap().success());
        std::os::unix::fs::symlink(path("nothing"), path("dangling")).unwrap();
        let socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        let start = std::time::Instant::now();
        for (path, what) in [
            (path("fifo"), "is a FIFO"),
            (dir.path().to_path_buf(), "is a directory"),
            ("/dev/zero".into(), "is a device"),
            ("/dev/null".into(), "is a device"),
            (path("socket"), "No such device"),
            (path("dangling"), "No such file"),
            (file("empty", b""), "has 0"),
            (file("blank", b" \n\n"), "has 0"),
            (file("short", b"short\n"), "has 5"),
            (file("huge", &vec![b'a'; 1 << 20]), "has 1048576 bytes"),
            (file("binary", &[0xff; 32]), "is no line of text"),
            (file("two lines", b"0123456789abcdef\n0123456789abcdef"), "is no line of text"),
        ] {
            let error = Secret::read(&path).unwrap_err().to_string();
            assert!(error.contains(what) && error.contains(&path.display().to_string()), "{what}: {error}");
        }
        assert!(start.elapsed() < std::time::Duration::from_secs(20), "it waited for something");
        drop(socket);
        // What makes a file unreadable does not stop root.
        let closed = file("closed", b"0123456789abcdef");
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
        if let Err(error) = Secret::read(&closed) {
            assert!(error.to_string().contains("Permission denied"), "{error}");
        }
    }

    #[test]
    fn launchers_tell_the_place_on_the_machine() {
        let of = |set: &[(&str, &str)]| {
            local_rank(&|asked| set.iter().find(|(name, _)| *name == asked).map(|(_, value)| value.to_string()))
        };
        assert_eq!(of(&[("LOCAL_RANK", "3")]), Some(3));
        assert_eq!(of(&[("SLURM_LOCALID", "1"), ("SLURM_PROCID", "9")]), Some(1));
        assert_eq!(of(&[("COMM_LAUNCHER_PID", "77"), ("COMM_RANK", "2"), ("SLURM_LOCALID", "0")]), Some(2));
        // Without our launcher its rank is one of the whole job.
        assert_eq!(of(&[("COMM_RANK", "2")]), None);
        assert_eq!(of(&[("LOCAL_RANK", "many")]), None);
    }
}
