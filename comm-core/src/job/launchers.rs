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
    /// torchrun, or another launcher that sets `RANK` and `WORLD_SIZE`.
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

/// Variables of one launcher.
pub(super) struct Launcher {
    pub(super) rank: &'static str,
    pub(super) world_size: &'static str,
    job_id: &'static [&'static str],
    pub(super) epoch: &'static str,
    /// Variables that say how many ranks are on this machine, the surest first.
    local_size: &'static [&'static str],
    /// The variable that says which of them this is.
    local_rank: Option<&'static str>,
    pub(super) source: Source,
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

/// The variables by which launchers other than [`Launch`](crate::launch::Launch) tell a process its rank.
pub(crate) fn other_launchers_variables() -> impl Iterator<Item = &'static str> {
    let others = LAUNCHERS.iter().filter(|launcher| launcher.source != Source::Hand);
    others.flat_map(|l| [l.rank, l.world_size].into_iter().chain(l.local_size.iter().copied()).chain(l.local_rank))
}

impl Launcher {
    /// The first whose rank is set.
    pub(super) fn of(vars: Vars<'_>) -> Option<&'static Launcher> {
        LAUNCHERS.iter().find(|launcher| vars.text(launcher.rank).is_some() && launcher.is_there(vars))
    }

    /// A Slurm batch script itself has a rank and a number of tasks, but is none of them.
    fn is_there(&self, vars: Vars<'_>) -> bool {
        let is_step =
            || vars.text(SLURM_STEP)?.trim().parse::<u32>().ok().filter(|step| *step < SLURM_FIRST_SPECIAL_STEP);
        self.source != Source::Slurm || is_step().is_some()
    }

    pub(super) fn job_id(&self, vars: Vars<'_>) -> String {
        let parts: Vec<String> = self.job_id.iter().filter_map(|name| vars.text(name)).collect();
        parts.join(".")
    }
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
