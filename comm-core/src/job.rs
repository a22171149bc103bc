//! The job of this process: its rank, the number of ranks, the address where they meet, and their secret.
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

mod address;
mod launchers;
mod secret;

use std::fs;
use std::path::Path;

pub use address::Address;
#[cfg(feature = "fuzzing")]
pub(crate) use launchers::local_ranks;
pub use launchers::{Source, rank_on_this_machine, ranks_on_this_machine};
pub(crate) use launchers::{other_launchers_variables, vars};
pub use secret::Secret;
pub(crate) use secret::fill_random;

use crate::error::{Error, Result};
use crate::{process, sys};
use launchers::{Launcher, Vars};

/// Most bytes of a job id.
pub const MAX_JOB_ID: usize = 200;

/// The exit code by which a rank says that it has failed because of another one. A launcher looks for the cause elsewhere.
/// (It is `EX_TEMPFAIL` of `sysexits.h`: nothing is wrong here, try again.)
pub const EXIT_ECHO: i32 = 75;

/// The exit code by which a rank says that it has saved its state and left because it was asked to: see
/// [`StopRequest`](crate::process::StopRequest). (The code that HTCondor gives to a job which saves and leaves.)
pub const EXIT_STOPPED: i32 = 85;

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
    /// The secret that authenticates the ranks.
    pub secret: Secret,
    /// Name of the job, at most [`MAX_JOB_ID`] bytes. Ranks of different jobs refuse each other.
    pub id: String,
    /// Which start of the job this is: ranks left over from an earlier one are refused.
    pub epoch: u64,
    /// Where rank and world size come from.
    pub source: Source,
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

    /// Whether its parts make sense, which are public.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    pub(crate) fn check(&self) -> Result<()> {
        check_ranks(self.rank, self.world_size, "rank", "world size")?;
        if self.id.len() > MAX_JOB_ID { Err(too_long(&self.id)) } else { Ok(()) }
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
            return Err(too_long(&id));
        }
        let epoch = match vars.number(vars::EPOCH)? {
            Some(epoch) => epoch,
            None => vars.number(launcher.epoch)?.unwrap_or(0),
        };
        let (address, secret) = match (vars.address()?, vars.secret(&id, insecure)?) {
            (Some(address), Some(secret)) => (address, secret),
            // A single rank has no others to meet.
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
                    "rank {rank} has no secret with which to authenticate the others at {address}: set COMM_SECRET_FILE to a file \
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

/// What tells this machine from the others of a job: this run of its kernel and, since containers of one machine may be nodes of their own, the
/// network that this process is in. Machines that do not say count as one.
pub fn machine() -> String {
    let network = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", kernel(), network.display())
}

/// What tells this machine from the others of a job, where its containers count as one: this run of its kernel. Machines that do not say count as
/// one.
pub fn kernel() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
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

impl Vars<'_> {
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
            return Err(Error::invalid("ranks cannot meet at port 0; set COMM_PORT"));
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

fn too_long(id: &str) -> Error {
    Error::invalid(format!("the job id has {} bytes; at most {MAX_JOB_ID} fit", id.len()))
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
mod tests;
