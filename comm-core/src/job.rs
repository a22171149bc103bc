//! The job of this process: its rank, the number of ranks, the address where they meet, and their secret.
//!
//! This is the only module that reads environment variables. A launcher sets them; these are understood. The first that is there decides
//! about rank and world size; one that contradicts it, and that it cannot have been started by, is an error that names both.
//!
//! | launcher | rank, world size | job id | epoch |
//! |---|---|---|---|
//! | [`Launch`](crate::launch::Launch), or by hand | `COMM_RANK`, `COMM_WORLD_SIZE` | `COMM_JOB_ID` | `COMM_EPOCH` |
//! | torchrun; Kubeflow's `PyTorchJob` | `RANK`, `WORLD_SIZE` | `TORCHELASTIC_RUN_ID` | `TORCHELASTIC_RESTART_COUNT` (of one agent), with Slurm's or the `JobSet`'s |
//! | Open MPI | `OMPI_COMM_WORLD_RANK`, `OMPI_COMM_WORLD_SIZE` | `PMIX_NAMESPACE` | |
//! | MPICH, Intel MPI and others that speak PMI | `PMI_RANK`, `PMI_SIZE` | `SLURM_JOB_ID`, hydra's process (on one machine) | |
//! | Slurm's `srun` | `SLURM_PROCID`, `SLURM_NTASKS` | `SLURM_JOB_ID.SLURM_STEP_ID` | `SLURM_RESTART_COUNT` |
//! | others that speak PMIx | `PMIX_RANK`, `COMM_WORLD_SIZE` | `PMIX_NAMESPACE` | |
//! | `LeaderWorkerSet` | `LWS_WORKER_INDEX`, `LWS_GROUP_SIZE` | `LWS_LEADER_ADDRESS` | |
//! | Kubeflow's trainer | `PET_NODE_RANK`, `PET_NNODES` | `PET_MASTER_ADDR` | `JOBSET_RESTART_ATTEMPT` |
//! | indexed job, `JobSet` | `JOB_COMPLETION_INDEX`, `COMM_WORLD_SIZE` | `JOBSET_NAME` | `JOBSET_RESTART_ATTEMPT` |
//!
//! By hand, two ranks on one machine are started like this; `COMM_SECRET` has at least 16 bytes, the same for all ranks:
//!
//! ```sh
//! export COMM_WORLD_SIZE=2 COMM_ADDR=127.0.0.1:29400 COMM_SECRET="$(head -c 16 /dev/urandom | base64)"
//! COMM_RANK=0 ./program &
//! COMM_RANK=1 ./program
//! ```
//!
//! The job id of a job that is started by hand is empty, and its epoch 0, unless `COMM_JOB_ID` and `COMM_EPOCH` say otherwise.
//! These two win over the launcher's own. Slurm's variables count in a step that `srun` starts, and not in a batch script or
//! the shell of `salloc`, which have some of them too; where `srun` also speaks PMI, they count. `PMIX_RANK` of Slurm's without a world size
//! does not count outside a step. A `LeaderWorkerSet` and Kubeflow's trainer count from two pods on: a single pod is a machine without a launcher.
//! Ranks of another epoch are refused.
//!
//! Two runs of `mpiexec` over several machines in one allocation of Slurm have the same id, for hydra tells its ranks none, and so meet at the
//! same port: give each its own `COMM_JOB_ID`. A `JobSet` sets none of its variables itself: `JOBSET_NAME`, `REPLICATED_JOB_NAME`, `JOB_INDEX` and
//! `JOBSET_RESTART_ATTEMPT` are entries of `env` in its template that take the pod's labels `jobset.sigs.k8s.io/jobset-name`, `replicatedjob-name`,
//! `job-index` and `restart-attempt`.
//!
//! Where to meet, the first that is there:
//! 1. `COMM_ADDR` (`host:port`, or `file:/path` for ranks of one machine);
//! 2. `MASTER_ADDR` with `COMM_PORT`, or with `MASTER_PORT` + 1 when `TORCHELASTIC_USE_AGENT_STORE=True` (torchrun's own store then listens
//!    on `MASTER_PORT`), or with `MASTER_PORT`; for Kubeflow's trainer also `PET_MASTER_ADDR` and `PET_MASTER_PORT`;
//! 3. loopback, where the launcher says that all ranks are on this machine (`OMPI_COMM_WORLD_LOCAL_SIZE`, `MPI_LOCALNRANKS`,
//!    `SLURM_STEP_TASKS_PER_NODE`, `LOCAL_WORLD_SIZE`);
//! 4. the first host of `SLURM_STEP_NODELIST`, or of `SLURM_JOB_NODELIST`, also for `mpirun` and `mpiexec` in an allocation of Slurm, with its
//!    address in `SLURM_NODE_ALIASES` if that has it;
//!    `LWS_LEADER_ADDRESS`; `JOBSET_COORDINATOR`, or pod 0 of job 0 of `REPLICATED_JOB_NAME` in `JOBSET_NAME`.
//!
//! For 3 and 4 the port is `COMM_PORT`, or one from 20000 to 28999 (or of `COMM_PORT_RANGE`) that follows from the job id, so that all ranks
//! know it. With Slurm neighbouring jobs and steps have different ones, unless the number of ports is a multiple of 31; in a small range two jobs
//! easily have the same. A port that another process has is an error that names it. A step of several components of a heterogeneous
//! job of Slurm (`SLURM_HET_SIZE`) knows the machines of one of them alone, and is refused without `COMM_ADDR` or `MASTER_ADDR`.
//!
//! What to trust: `COMM_SECRET_FILE` (a file that only its owner can read) or `COMM_SECRET`; else the user's own secret, in
//! `$XDG_CONFIG_HOME/isocomm/secret` or `~/.config/isocomm/secret`, of mode 600. Where all ranks are on one machine, and under Slurm and MPI, where
//! machines usually share the home folder, that file is made with random text when it is not there; it is the same for all jobs of the user,
//! whose keys differ by their ids. Where neither is to be had a job of more than one rank is refused, on loopback too, where every user
//! of the machine can connect; `COMM_INSECURE=1`, or the program by [`from_env_with`](Job::from_env_with), runs it nevertheless, with a
//! key that anyone who knows the job id can compute. A secret is never an argument of a command: every user of the machine can read those.
//!
//! Which addresses and ports listeners take: `COMM_IFNAME` names interfaces or an address ([`Bind`](crate::interfaces::Bind)),
//! `COMM_PORT_RANGE` ports, such as `20000-20100`.
//!
//! How a rank ends, for who started it. Each rank has its own code; `srun` ends with the highest of them, which need not be that of the cause:
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | it has failed by itself, or with ranks that do not agree; or something is in its way that passes: a folder or port that an earlier start still has, a full disk |
//! | 2 ([`EXIT_CONFIGURATION`]) | it was asked for what cannot be: options, variables, what this build or machine lacks; starting it again does not help |
//! | 75 ([`EXIT_ECHO`]) | another rank was lost, has failed or did not come; that one has the cause |
//! | 85 ([`EXIT_STOPPED`]) | it was asked to leave (SIGTERM, SIGUSR1), has saved its state and can go on later |
//! | 128 + n | signal n has ended it |

mod address;
mod hostlist;
mod launchers;
mod meeting;
mod network;
mod proxy;
mod secret;

use std::fs;
use std::path::{Path, PathBuf};

pub use address::Address;
pub use hostlist::HostList;
#[cfg(feature = "fuzzing")]
pub(crate) use launchers::local_ranks;
pub use launchers::{Source, rank_on_this_machine, ranks_on_this_machine};
pub(crate) use launchers::{other_launchers_variables, vars};
pub use network::Network;
pub use secret::Secret;
pub(crate) use secret::fill_random;

use crate::error::{Error, Result};
use crate::{process, sys};
use launchers::{Launcher, Vars};
use meeting::{Hosts, Meeting};
use proxy::proxy_id;

/// Most bytes of a job id.
pub const MAX_JOB_ID: usize = 200;

/// The exit code by which a rank says that it has failed because of another one. A launcher looks for the cause elsewhere.
/// (It is `EX_TEMPFAIL` of `sysexits.h`: nothing is wrong here, try again.)
pub const EXIT_ECHO: i32 = 75;

/// The exit code by which a rank says that it has saved its state and left because it was asked to: see
/// [`StopRequest`](crate::process::StopRequest). (The code that HTCondor gives to a job which saves and leaves.)
pub const EXIT_STOPPED: i32 = 85;

/// The exit code by which a rank says that it was asked for what cannot be: options or variables that make no sense, or what this build or
/// machine does not have. Starting it again as it is will not help. (The code that programs give to options that they do not know.)
pub const EXIT_CONFIGURATION: i32 = 2;

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
    /// Which start of the job this is: ranks left over from an earlier one are refused. That is not so where the launcher does not count its
    /// starts, so that all are epoch 0 unless `COMM_EPOCH` is set: Open MPI, MPICH and others that speak PMI or PMIx, `LeaderWorkerSet`, Kubeflow's
    /// `PyTorchJob`. Several agents of torchrun count only the restarts of Slurm or the `JobSet` around them.
    pub epoch: u64,
    /// Where rank and world size come from.
    pub source: Source,
    /// Which addresses and ports listeners take.
    pub network: Network,
    /// Where address and secret come from.
    pub found: Found,
}

/// Where parts of a job come from, for people; empty where the program itself has given them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// What says where to meet.
    pub address: String,
    /// What says the secret.
    pub secret: String,
}

impl Job {
    /// A job with an empty id at epoch 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when `rank` is not below `world_size`, or there are no ranks or too many.
    pub fn new(rank: usize, world_size: usize, address: Address, secret: Secret) -> Result<Self> {
        check_ranks(rank, world_size, "rank", "world size")?;
        Ok(Job {
            rank,
            world_size,
            address,
            secret,
            id: String::new(),
            epoch: 0,
            source: Source::Program,
            network: Network::default(),
            found: Found::default(),
        })
    }

    /// Whether its parts make sense, which are public.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`].
    pub(crate) fn check(&self) -> Result<()> {
        check_ranks(self.rank, self.world_size, "rank", "world size")?;
        if self.id.len() > MAX_JOB_ID { Err(too_long(&self.id)) } else { Ok(()) }
    }

    /// Reads this process's environment; `None` when no launcher has left its variables there. In both cases it first readies this process
    /// for a job, as [`process::prepare`] does, which then need not be called: the limit of open files is raised, and a write beyond the
    /// largest file that this process may have becomes an error instead of the process's end.
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
            if let Some(error) = launchers::lone_rank(vars) {
                return Err(error);
            }
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
        launcher.check(vars, rank, world_size)?;
        let source = match launcher.source {
            Source::Hand if vars.text(vars::LAUNCHER_PID).is_some() => Source::Launch,
            source => source,
        };
        let hosts = Hosts::of(vars, launcher, world_size);
        let on_one_machine = matches!(hosts, Hosts::One(_));
        let id = vars
            .text(vars::JOB_ID)
            .unwrap_or_else(|| launcher.job_id(vars, || on_one_machine.then(proxy_id).flatten()));
        if id.len() > MAX_JOB_ID {
            return Err(too_long(&id));
        }
        let epoch = launcher.epoch(vars)?;
        // torchrun's number is of one agent, and several may be on a machine.
        let across_hosts = matches!(hosts, Hosts::Several(_)) && launcher.source != Source::Torchrun;
        let network = Network::of(vars, across_hosts)?;
        if world_size == 1 {
            // A single rank has no others to meet.
            let address = Address::Tcp { host: "127.0.0.1".into(), port: 0 };
            let (secret, found) = (Secret::random()?, Found::default());
            return Ok(Some(Job { rank, world_size, address, secret, id, epoch, source, network, found }));
        }
        let Some(Meeting { address, by }) = Meeting::find(vars, launcher, &id, network.ports, hosts)? else {
            return Err(Error::invalid(format!(
                "rank {rank} of {world_size} (by {}) does not know where to meet the others: set COMM_ADDR=host:port, \
                 or MASTER_ADDR and MASTER_PORT, to an address of rank 0's machine",
                launcher.rank
            )));
        };
        // The user's own secret can be made where all ranks find the same.
        let may_make = on_one_machine || launcher.shares_home();
        let Some((secret, secret_by)) = vars.secret(&id, insecure, may_make)? else {
            return Err(Error::invalid(format!(
                "rank {rank} has no secret with which to authenticate the others at {address}: set COMM_SECRET_FILE to a file (mode 600) \
                 with the same random text for all ranks, or COMM_SECRET to that text, or put it into ~/.config/isocomm/secret (mode 600) \
                 on every machine; with --insecure or COMM_INSECURE=1 ranks need no secret, but then anyone who can connect to that \
                 address can join or end the job"
            )));
        };
        let found = Found { address: by, secret: secret_by };
        Ok(Some(Job { rank, world_size, address, secret, id, epoch, source, network, found }))
    }

    /// What this rank is of which job, where it meets the others, and what says so.
    pub fn describe(&self) -> String {
        let Job { rank, world_size, address, source, found, epoch, .. } = self;
        let mut text = format!("rank {rank} of {world_size} by {source}");
        if *world_size == 1 {
            return text;
        }
        text += &format!("; rank 0 at {address}");
        for (what, by) in [(" by ", &found.address), ("; secret by ", &found.secret)] {
            if !by.is_empty() {
                text += what;
                text += by;
            }
        }
        if *epoch > 0 {
            text += &format!("; epoch {epoch}");
        }
        let Network { bind, ports, .. } = &self.network;
        if let Some(bind) = bind {
            text += &format!("; listening at {bind} by COMM_IFNAME");
        }
        if let Some(ports) = ports {
            text += &format!("; ports {ports} by COMM_PORT_RANGE");
        }
        text
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
        Some(parent) => sys::die_with_parent(parent).map_err(|e| {
            Error::io(format!("arranging that this process ends with its launcher (process {parent})"), e)
        }),
    }
}

/// What tells this machine from the others of a job: this run of its kernel and, since containers of one machine may be nodes of their own, the
/// network that this process is in. Machines that do not identify themselves (whose `/proc` cannot be read) count as one.
pub fn machine() -> String {
    let network = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", kernel(), network.display())
}

/// What tells this machine from the others of a job, where its containers count as one: this run of its kernel. Machines that do not identify
/// themselves (whose `/proc` cannot be read) count as one.
pub fn kernel() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The exit code of `rank` after `error`: [`EXIT_ECHO`] when another rank is the cause of it, [`EXIT_CONFIGURATION`] when this one was asked
/// for what cannot be, else 1.
pub fn exit_code(error: &Error, rank: usize) -> i32 {
    let is_echo = match error {
        // Who gave up waiting is no cause, if it says for whom.
        Error::Timeout { rank: by, waiting_for, .. } if waiting_for.is_empty() => *by != rank,
        Error::Timeout { waiting_for, .. } => !waiting_for.contains(&rank),
        Error::Mismatch { rank: one, peer: other, .. } => *one != rank && *other != rank,
        other => other.culprit().is_some_and(|culprit| culprit != rank),
    };
    match error {
        _ if is_echo => EXIT_ECHO,
        Error::InvalidArgument(_) | Error::Unsupported { .. } => EXIT_CONFIGURATION,
        _ => 1,
    }
}

impl Vars<'_> {
    /// The secret, and what says it. The user's own is made where it `may` be and is not there yet.
    fn secret(self, job_id: &str, insecure: bool, may_make: bool) -> Result<Option<(Secret, String)>> {
        if let Some(path) = self.text(vars::SECRET_FILE) {
            return Secret::read(Path::new(&path)).map(|secret| Some((secret, vars::SECRET_FILE.into())));
        }
        if let Some(text) = self.text(vars::SECRET) {
            return Secret::new(text.trim()).map(|secret| Some((secret, vars::SECRET.into())));
        }
        if insecure || self.text(vars::INSECURE).as_deref() == Some("1") {
            let secret = Secret::new(format!("anyone may join job {job_id}"))?;
            return Ok(Some((secret, "nothing: it is open to anyone who can connect".into())));
        }
        let Some(path) = self.user_secret_file() else { return Ok(None) };
        if may_make {
            secret::make(&path)?;
        } else if !path.exists() {
            return Ok(None);
        }
        Secret::read(&path).map(|secret| Some((secret, path.display().to_string())))
    }

    /// Where a user's own secret is: in `$XDG_CONFIG_HOME/isocomm`, or below `~/.config`.
    fn user_secret_file(self) -> Option<PathBuf> {
        let folder = |name: &str| self.text(name).map(PathBuf::from).filter(|folder| folder.is_absolute());
        let config = folder("XDG_CONFIG_HOME").or_else(|| folder("HOME").map(|home| home.join(".config")))?;
        Some(config.join("isocomm").join("secret"))
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
