//! What launchers say: which rank a process is, of how many, and which of its machine.

use std::fmt;

use crate::error::{Error, Result};

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

/// Where a process's rank and world size come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The program itself, by [`Job::new`](super::Job::new).
    Program,
    /// [`Launch`](crate::launch::Launch), by `COMM_RANK` and `COMM_WORLD_SIZE`.
    Launch,
    /// `COMM_RANK` and `COMM_WORLD_SIZE`, set by the user or a launcher.
    Hand,
    /// torchrun, or another launcher that sets `RANK` and `WORLD_SIZE`, as Kubeflow's `PyTorchJob` does.
    Torchrun,
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// MPICH's and Intel MPI's `mpiexec`, and others that speak PMI.
    Mpich,
    /// Slurm's `srun`.
    Slurm,
    /// A launcher that speaks PMIx, which gives the rank; the world size is by hand.
    Pmix,
    /// A `LeaderWorkerSet` of Kubernetes.
    LeaderWorkerSet,
    /// Kubeflow's trainer, with a rank a pod.
    Kubeflow,
    /// An indexed job of Kubernetes, or a `JobSet` of one; the world size is by hand.
    Kubernetes,
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
            Source::Mpich => " (MPICH or Intel MPI)",
            Source::Slurm => " (Slurm)",
            Source::Pmix => " (PMIx)",
            Source::LeaderWorkerSet => " (LeaderWorkerSet)",
            Source::Kubeflow => " (Kubeflow)",
            Source::Kubernetes => " (Kubernetes)",
        };
        write!(f, "{rank} and {size}{whose}")
    }
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
pub(super) fn tasks_of_node(text: &str, node: usize) -> Option<usize> {
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

/// Variables of one launcher.
pub(super) struct Launcher {
    pub(super) rank: &'static str,
    pub(super) world_size: &'static str,
    job_id: &'static [&'static str],
    /// The variable that counts how often the job has been started again.
    pub(super) epoch: &'static str,
    /// Variables that say how many ranks are on this machine, the surest first.
    pub(super) local_size: &'static [&'static str],
    /// The variable that says which of them this is.
    local_rank: Option<&'static str>,
    pub(super) source: Source,
}

/// In the order in which they are looked for: one that may have been started by another one comes before it.
const LAUNCHERS: [Launcher; 9] = [
    Launcher {
        rank: vars::RANK,
        world_size: vars::WORLD_SIZE,
        job_id: &[],
        epoch: vars::EPOCH,
        local_size: &[],
        local_rank: None,
        source: Source::Hand,
    },
    Launcher {
        rank: "RANK",
        world_size: "WORLD_SIZE",
        job_id: &[TORCHRUN_ID],
        epoch: "TORCHELASTIC_RESTART_COUNT",
        local_size: &["LOCAL_WORLD_SIZE"],
        local_rank: Some("LOCAL_RANK"),
        source: Source::Torchrun,
    },
    Launcher {
        rank: "OMPI_COMM_WORLD_RANK",
        world_size: "OMPI_COMM_WORLD_SIZE",
        job_id: &[PMIX_NAMESPACE],
        epoch: vars::EPOCH,
        local_size: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        local_rank: Some("OMPI_COMM_WORLD_LOCAL_RANK"),
        source: Source::OpenMpi,
    },
    Launcher {
        rank: "PMI_RANK",
        world_size: "PMI_SIZE",
        job_id: &[SLURM_JOB],
        epoch: vars::EPOCH,
        local_size: &["MPI_LOCALNRANKS"],
        local_rank: Some("MPI_LOCALRANKID"),
        source: Source::Mpich,
    },
    Launcher {
        rank: "SLURM_PROCID",
        world_size: "SLURM_NTASKS",
        job_id: &[SLURM_JOB, SLURM_STEP],
        epoch: "SLURM_RESTART_COUNT",
        local_size: &["SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"],
        local_rank: Some("SLURM_LOCALID"),
        source: Source::Slurm,
    },
    Launcher {
        rank: PMIX_RANK,
        world_size: vars::WORLD_SIZE,
        job_id: &[PMIX_NAMESPACE],
        epoch: vars::EPOCH,
        local_size: &[],
        local_rank: None,
        source: Source::Pmix,
    },
    Launcher {
        rank: "LWS_WORKER_INDEX",
        world_size: "LWS_GROUP_SIZE",
        job_id: &["LWS_LEADER_ADDRESS"],
        epoch: vars::EPOCH,
        local_size: &[],
        local_rank: None,
        source: Source::LeaderWorkerSet,
    },
    Launcher {
        rank: "PET_NODE_RANK",
        world_size: "PET_NNODES",
        job_id: &["PET_MASTER_ADDR"],
        epoch: JOBSET_RESTARTS,
        local_size: &[],
        local_rank: None,
        source: Source::Kubeflow,
    },
    Launcher {
        rank: "JOB_COMPLETION_INDEX",
        world_size: vars::WORLD_SIZE,
        job_id: &["JOBSET_NAME"],
        epoch: JOBSET_RESTARTS,
        local_size: &[],
        local_rank: None,
        source: Source::Kubernetes,
    },
];

const SLURM_STEP: &str = "SLURM_STEP_ID";
const SLURM_RESTARTS: &str = "SLURM_RESTART_COUNT";
const JOBSET_RESTARTS: &str = "JOBSET_RESTART_ATTEMPT";
const TORCHRUN_ID: &str = "TORCHELASTIC_RUN_ID";
const PMIX_RANK: &str = "PMIX_RANK";
const PMIX_NAMESPACE: &str = "PMIX_NAMESPACE";
const SLURM_JOB: &str = "SLURM_JOB_ID";

/// The variables by which launchers other than [`Launch`](crate::launch::Launch) tell a process its rank.
pub(crate) fn other_launchers_variables() -> impl Iterator<Item = &'static str> {
    let others = LAUNCHERS.iter().filter(|launcher| launcher.source != Source::Hand);
    let names =
        others.flat_map(|l| [l.rank, l.world_size].into_iter().chain(l.local_size.iter().copied()).chain(l.local_rank));
    names.filter(|name| *name != vars::WORLD_SIZE)
}

impl Launcher {
    /// The first that has left its variables.
    pub(super) fn of(vars: Vars<'_>) -> Option<&'static Launcher> {
        let first = LAUNCHERS.iter().find(|launcher| launcher.is_there(vars))?;
        // srun speaks PMI, too.
        let slurm = Self::by(Source::Slurm).filter(|slurm| first.source == Source::Mpich && slurm.is_there(vars));
        slurm.filter(|slurm| slurm.place(vars) == first.place(vars)).or(Some(first))
    }

    pub(super) fn by(source: Source) -> Option<&'static Launcher> {
        LAUNCHERS.iter().find(|launcher| launcher.source == source)
    }

    fn is_there(&self, vars: Vars<'_>) -> bool {
        let is_whole = match self.source {
            // A Slurm batch script itself has a rank and a number of tasks, but is none of them.
            Source::Slurm => in_slurm_step(vars),
            // An array of jobs that have nothing to do with each other has indices, too.
            Source::Kubernetes | Source::Pmix => vars.text(self.world_size).is_some(),
            // A single pod is a machine on which any number of ranks may be started.
            Source::LeaderWorkerSet | Source::Kubeflow => self.place(vars).1 != Some(1),
            _ => true,
        };
        is_whole && vars.text(self.rank).is_some()
    }

    /// Rank and world size, as far as they are numbers.
    fn place(&self, vars: Vars<'_>) -> (Option<usize>, Option<usize>) {
        let number = |name: &str| vars.text(name)?.trim().parse().ok();
        (number(self.rank), number(self.world_size))
    }

    /// Whether each rank is in a pod of its own.
    pub(super) fn has_a_rank_a_pod(&self) -> bool {
        matches!(self.source, Source::LeaderWorkerSet | Source::Kubeflow | Source::Kubernetes)
    }

    /// Whether its ranks are on machines on which a user's home folder is usually the same.
    pub(super) fn shares_home(&self) -> bool {
        matches!(self.source, Source::Slurm | Source::OpenMpi | Source::Mpich | Source::Pmix)
    }

    /// The job's id, of which all ranks have the same; empty where the launcher gives none. `proxy` names the process by which an `mpiexec` has
    /// started all of them, where it is the same for all: an allocation of Slurm may have several such runs at once.
    pub(super) fn job_id(&self, vars: Vars<'_>, proxy: impl FnOnce() -> Option<String>) -> String {
        let mut parts: Vec<String> = self.job_id.iter().filter_map(|name| vars.text(name)).collect();
        if self.source == Source::Mpich {
            parts.extend(proxy());
        }
        parts.join(".")
    }

    /// How often the job has been started again, by all who count that: what runs under Slurm or in a `JobSet` may be started again by these,
    /// too, and then counts from 0.
    ///
    /// Several agents of torchrun count each for itself, so that their numbers need not be equal; then these are left out.
    pub(super) fn epoch(&self, vars: Vars<'_>) -> Result<u64> {
        if let Some(epoch) = vars.number(vars::EPOCH)? {
            return Ok(epoch);
        }
        let is_torchrun = self.source == Source::Torchrun;
        let agents = vars.text("GROUP_WORLD_SIZE").filter(|_| is_torchrun);
        let inner: u32 = match agents.is_some_and(|agents| agents.trim() != "1") {
            true => 0,
            false => vars.number(self.epoch)?.unwrap_or(0),
        };
        let outer = match is_torchrun {
            true => [SLURM_RESTARTS, JOBSET_RESTARTS].iter().find(|name| vars.text(name).is_some()),
            false => None,
        };
        let outer: u32 = outer.map(|name| vars.number(name)).transpose()?.flatten().unwrap_or(0);
        Ok(u64::from(outer) << 32 | u64::from(inner))
    }

    /// Refuses what this process cannot be a rank of, and other launchers that contradict this one.
    pub(super) fn check(&self, vars: Vars<'_>, rank: usize, world_size: usize) -> Result<()> {
        if self.source == Source::Kubeflow
            && let Some(processes) = vars.text("PET_NPROC_PER_NODE").filter(|processes| processes.trim() != "1")
        {
            return Err(Error::invalid(format!(
                "PET_NPROC_PER_NODE is {processes}: in a pod with several ranks torchrun must start them (torchrun --no-python, then this \
                 command); for one rank in each pod set numProcPerNode to 1"
            )));
        }
        if self.source == Source::Kubernetes
            && let Some(index) = vars.text("JOB_INDEX").filter(|index| index.trim() != "0")
        {
            return Err(Error::invalid(format!(
                "JOB_INDEX is {index}, but all ranks of a JobSet must be in one job: give its replicated job 1 replica with a completion \
                 for each rank, or set COMM_RANK"
            )));
        }
        if vars.text(vars::LAUNCHER_PID).is_some() {
            // What others have said has been taken away.
            return Ok(());
        }
        let others = LAUNCHERS.iter().filter(|other| other.source != self.source && other.is_there(vars));
        for other in others {
            let (Some(other_rank), Some(other_size)) = other.place(vars) else { continue };
            let differs = (other_rank, other_size) != (rank, world_size);
            if differs && !self.may_run_under(other, vars, (world_size, other_size)) {
                return Err(Error::invalid(format!(
                    "{} is {rank} and {} is {world_size}, but {} is {other_rank} and {} is {other_size}: unset the pair that should not be \
                     used (env -u {} or env -u {})",
                    self.rank, self.world_size, other.rank, other.world_size, self.rank, other.rank
                )));
            }
        }
        Ok(())
    }

    /// Whether this launcher, with `sizes.0` ranks, may have been started as one of the `sizes.1` ranks of the `outer` one.
    fn may_run_under(&self, outer: &Launcher, vars: Vars<'_>, sizes: (usize, usize)) -> bool {
        match self.source {
            // Who sets these means them, unless they look like a mistake.
            Source::Hand => sizes.0 != sizes.1 || outer.world_size == vars::WORLD_SIZE,
            // Without torchrun's own variable somebody has set them by hand, perhaps for all processes of another launcher.
            // What they would be alone, or in the same number of ranks, they are by mistake; other launchers than torchrun set them, too.
            Source::Torchrun => {
                let is_torchrun = vars.text(TORCHRUN_ID).is_some();
                is_torchrun || outer.has_a_rank_a_pod() || (sizes.0 != 1 && sizes.0 != sizes.1)
            }
            Source::OpenMpi | Source::Mpich => outer.source == Source::Slurm || outer.has_a_rank_a_pod(),
            // Kubeflow's trainer makes a `JobSet`.
            _ => outer.has_a_rank_a_pod(),
        }
    }
}

/// That a rank is known and the world size is not, of launchers that leave it to the user.
pub(super) fn lone_rank(vars: Vars<'_>) -> Option<Error> {
    let rank = vars.text(PMIX_RANK).filter(|_| !in_slurm_step(vars))?;
    // The shell of `salloc` may have Slurm's; what `mpirun` starts there has a namespace of another name.
    let is_slurms = vars.text(PMIX_NAMESPACE).is_none_or(|namespace| namespace.starts_with("slurm."));
    if vars.text(SLURM_JOB).is_some() && is_slurms {
        return None;
    }
    Some(Error::invalid(format!(
        "{PMIX_RANK} is {rank}, but PMIx does not set the number of ranks in the environment: set {} to that number, or unset {PMIX_RANK}",
        vars::WORLD_SIZE
    )))
}

/// Whether this process is in a step that `srun` has started.
fn in_slurm_step(vars: Vars<'_>) -> bool {
    /// Steps from this number on are none that `srun` starts tasks in: the batch script, the shell of `salloc`, what is adopted by `ssh`.
    const FIRST_SPECIAL: u32 = 0xffff_fff0;
    let step = vars.text(SLURM_STEP).and_then(|step| step.trim().parse::<u32>().ok());
    step.is_some_and(|step| step < FIRST_SPECIAL)
}

/// Variables, by name.
#[derive(Clone, Copy)]
pub(super) struct Vars<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Vars<'_> {
    /// The value, unless missing or empty.
    pub(super) fn text(self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    pub(super) fn number<T: std::str::FromStr>(self, name: &str) -> Result<Option<T>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(Error::invalid(format!("{name}={text} is not a number that fits"))),
        }
    }

    pub(super) fn required(self, name: &str, because: &str) -> Result<usize> {
        self.number(name)?.ok_or_else(|| Error::invalid(format!("{because} is set but {name} is not")))
    }
}

#[cfg(test)]
mod tests {
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
    fn every_run_of_mpiexec_in_an_allocation_has_an_id_of_its_own() {
        let in_slurm = |name: &str| (name == SLURM_JOB).then(|| "12".to_string());
        let of = |source, vars: &dyn Fn(&str) -> Option<String>, proxy: Option<&str>| {
            Launcher::by(source).unwrap().job_id(Vars(vars), || proxy.map(str::to_owned))
        };
        assert_eq!(of(Source::Mpich, &in_slurm, Some("hydra-7-9")), "12.hydra-7-9");
        assert_eq!(of(Source::Mpich, &in_slurm, None), "12");
        assert_eq!(of(Source::Mpich, &|_| None, Some("hydra-7-9")), "hydra-7-9");
        assert_eq!(of(Source::Slurm, &in_slurm, Some("hydra-7-9")), "12");
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
