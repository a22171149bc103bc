//! Where the ranks of a job meet, and on how many machines they are, as far as launchers say.

use std::net::IpAddr;

use sha2::{Digest, Sha256};

use super::address::Address;
use super::hostlist::HostList;
use super::launchers::{Launcher, Source, Vars, tasks_of_node, vars};
use crate::addresses::{PortRange, loopback};
use crate::error::{Error, Result};

/// Ports of rank 0 that follow from a job's id where `COMM_PORT_RANGE` names none: below those that systems give to outgoing connections.
const PORTS: (u16, u16) = (20_000, 28_999);

/// The number of components of a heterogeneous job of Slurm.
const HET_SIZE: &str = "SLURM_HET_SIZE";

/// On how many machines a job's ranks are, with the variable that says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hosts {
    One(&'static str),
    Several(&'static str),
    Unknown,
}

/// Where ranks meet, and what says so.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Meeting {
    pub(super) address: Address,
    pub(super) by: String,
}

impl Hosts {
    /// Of the `world_size` ranks that `launcher` has started.
    pub(super) fn of(vars: Vars<'_>, launcher: &Launcher, world_size: usize) -> Hosts {
        if launcher.has_a_rank_a_pod() {
            return Hosts::Several(launcher.rank);
        }
        let Some(name) = launcher.local_size.first().copied() else { return Hosts::Unknown };
        let node = vars.text("SLURM_NODEID").and_then(|node| node.parse().ok()).unwrap_or(0);
        match vars.text(name).and_then(|text| tasks_of_node(&text, node)) {
            Some(here) if here == world_size => Hosts::One(name),
            Some(here) if (1..world_size).contains(&here) => Hosts::Several(name),
            _ => Hosts::Unknown,
        }
    }
}

impl Meeting {
    /// Of the job with the id `id`, whose rank 0 takes one of `ports` where it may choose; `None` where nothing says.
    pub(super) fn find(
        vars: Vars<'_>,
        launcher: &Launcher,
        id: &str,
        ports: Option<PortRange>,
        hosts: Hosts,
    ) -> Result<Option<Meeting>> {
        let found = match vars.text(vars::ADDR) {
            Some(text) => Some(Meeting { address: Address::parse(&text)?, by: vars::ADDR.into() }),
            None => match Self::by_master(vars, launcher, id, ports)? {
                Some(meeting) => Some(meeting),
                None => Self::by_launcher(vars, launcher, id, ports, hosts)?,
            },
        };
        if let (Some(Meeting { address: address @ Address::Tcp { host, .. }, by }), Hosts::Several(who)) =
            (&found, hosts)
            && !matches!(launcher.source, Source::Hand | Source::Torchrun)
            && (host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback()))
        {
            return Err(Error::invalid(format!(
                "ranks cannot meet at {address} (by {by}), because {who} says that they are on several machines, and each machine has this \
                 address for itself; set COMM_ADDR to an address of rank 0's machine that the others can reach, or unset {by}"
            )));
        }
        Ok(found)
    }

    /// By `MASTER_ADDR`, or what Kubeflow calls so.
    fn by_master(vars: Vars<'_>, launcher: &Launcher, id: &str, ports: Option<PortRange>) -> Result<Option<Meeting>> {
        let names = [("MASTER_ADDR", "MASTER_PORT"), ("PET_MASTER_ADDR", "PET_MASTER_PORT")];
        let mut names = names.iter().take(if launcher.source == Source::Kubeflow { 2 } else { 1 });
        let Some((host, (name, port_name))) = names.find_map(|names| Some((vars.text(names.0)?, names))) else {
            return Ok(None);
        };
        let given = vars.number::<u16>(port_name)?;
        let (port, by) = match (vars.number::<u16>("COMM_PORT")?, given) {
            (Some(port), _) => (port, "COMM_PORT".into()),
            (None, Some(port)) if vars.text("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True") => {
                let next = port.checked_add(1);
                let next = next.ok_or_else(|| {
                    Error::invalid(format!("{port_name} is 65535, so there is no port after it: set COMM_PORT"))
                })?;
                (next, format!("{port_name} + 1"))
            }
            (None, Some(port)) => (port, (*port_name).to_string()),
            (None, None) => match port_of_job(vars, launcher, id, ports)? {
                Some(found) => found,
                None => {
                    return Err(Error::invalid(format!("{name} is set but neither COMM_PORT nor {port_name} is")));
                }
            },
        };
        if port == 0 {
            return Err(Error::invalid("ranks cannot meet at port 0; set COMM_PORT"));
        }
        Ok(Some(Meeting { address: Address::tcp(&host, port)?, by: format!("{name} and {by}") }))
    }

    /// By what a launcher says of the machines.
    fn by_launcher(
        vars: Vars<'_>,
        launcher: &Launcher,
        id: &str,
        ports: Option<PortRange>,
        hosts: Hosts,
    ) -> Result<Option<Meeting>> {
        if launcher.source == Source::Slurm
            && let Some(components) = vars.number::<u32>(HET_SIZE)?.filter(|components| *components > 1)
        {
            return Err(Error::invalid(format!(
                "{HET_SIZE} is {components}: in a heterogeneous job Slurm names only the machines of one component, so ranks of different \
                 components would not find one another; set COMM_ADDR=host:port to an address of rank 0's machine"
            )));
        }
        let Some((port, port_by)) = port_of_job(vars, launcher, id, ports)? else { return Ok(None) };
        let host = match hosts {
            Hosts::One(name) => Some((loopback().to_string(), format!("{name}, all ranks being on this machine,"))),
            _ => host_of_rank_0(vars, launcher)?,
        };
        let Some((host, by)) = host else { return Ok(None) };
        Ok(Some(Meeting { address: Address::tcp(&host, port)?, by: format!("{by} and {port_by}") }))
    }
}

/// The machine of rank 0, and the variables that say so.
fn host_of_rank_0(vars: Vars<'_>, launcher: &Launcher) -> Result<Option<(String, String)>> {
    let text = |name: &'static str| Some((vars.text(name)?, name.to_string()));
    Ok(match launcher.source {
        Source::Slurm => first_host(vars, &["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"])?,
        // A step of theirs holds daemons of the launcher, which need not be on the first machine.
        Source::OpenMpi | Source::Mpich | Source::Pmix => first_host(vars, &["SLURM_JOB_NODELIST"])?,
        Source::LeaderWorkerSet => text("LWS_LEADER_ADDRESS"),
        Source::Kubernetes => match (text("JOBSET_COORDINATOR"), vars.text("JOBSET_NAME")) {
            (Some(found), _) => Some(found),
            (None, Some(set)) => {
                let job = vars.text("REPLICATED_JOB_NAME").ok_or_else(|| {
                    Error::invalid("JOBSET_NAME is set, but REPLICATED_JOB_NAME, which is part of the name of rank 0's pod, is not")
                })?;
                Some((format!("{set}-{job}-0-0.{set}"), "JOBSET_NAME and REPLICATED_JOB_NAME".into()))
            }
            (None, None) => None,
        },
        Source::Program | Source::Launch | Source::Hand | Source::Torchrun | Source::Kubeflow => None,
    })
}

/// The first host of the first of these lists that is there.
fn first_host(vars: Vars<'_>, names: &[&'static str]) -> Result<Option<(String, String)>> {
    let Some((list, name)) = names.iter().find_map(|name| Some((vars.text(name)?, *name))) else { return Ok(None) };
    let hosts: HostList = list.parse().map_err(|error| Error::invalid(format!("{name}: {error}; set COMM_ADDR")))?;
    let Some(host) = hosts.hosts().next() else { return Ok(None) };
    Ok(Some(match address_of_node(vars, &host) {
        Some(address) => (address, format!("{name} and {NODE_ALIASES}")),
        None => (host, name.to_string()),
    }))
}

/// What Slurm says of nodes that it has made in a cloud, whose names need not be known there: `name:address:hostname`, separated by commas, an
/// IPv6 address in brackets.
const NODE_ALIASES: &str = "SLURM_NODE_ALIASES";

fn address_of_node(vars: Vars<'_>, node: &str) -> Option<String> {
    let aliases = vars.text(NODE_ALIASES)?;
    let of_node = |alias: &str| {
        let address = alias.strip_prefix(node)?.strip_prefix(':')?.rsplit_once(':')?.0;
        Some(address.trim_start_matches('[').trim_end_matches(']').to_string())
    };
    aliases.split(',').find_map(of_node).filter(|address| !address.is_empty())
}

/// How many ports apart those of neighbouring jobs of Slurm are: as many steps of a job have ports of its own. A prime number.
const STEPS_APART: u64 = 31;

/// The port at which rank 0 of the job listens where nobody names one, and what it follows from; `None` where the job has no name of its
/// own. Jobs of Slurm with neighbouring numbers, and their steps, have different ones, unless the number of ports is a multiple of
/// [`STEPS_APART`].
fn port_of_job(
    vars: Vars<'_>,
    launcher: &Launcher,
    id: &str,
    ports: Option<PortRange>,
) -> Result<Option<(u16, String)>> {
    if let Some(port) = vars.number::<u16>("COMM_PORT")? {
        return match port {
            0 => Err(Error::invalid("ranks cannot meet at port 0; set COMM_PORT to another one")),
            port => Ok(Some((port, "COMM_PORT".into()))),
        };
    }
    if id.is_empty() || launcher.source == Source::Hand {
        return Ok(None);
    }
    let range = match ports {
        Some(ports) => ports,
        None => PortRange::new(PORTS.0, PORTS.1)?,
    };
    let number = |text: &str| text.parse::<u32>().ok().map(u64::from);
    let of_slurm = id.split_once('.').and_then(|(job, step)| Some((number(job)?, number(step)?)));
    let place = match of_slurm {
        // Of a multiple most jobs would leave out most ports.
        Some((job, step)) if !(range.count() as u64).is_multiple_of(STEPS_APART) => job * STEPS_APART + step,
        _ => {
            let [a, b, c, d, ..] = <[u8; 32]>::from(Sha256::digest(id));
            u64::from(u32::from_le_bytes([a, b, c, d]))
        }
    };
    Ok(Some((range.at(place), format!("the job id {id} (one of the ports {range})"))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_jobs_and_steps_meet_at_different_ports() {
        let none = |_: &str| None;
        let launcher = Launcher::by(Source::Slurm).unwrap();
        let mut seen = std::collections::HashSet::new();
        for job in 4_294_960_000u64..4_294_960_290 {
            for step in 0..31 {
                let (port, _) = port_of_job(Vars(&none), launcher, &format!("{job}.{step}"), None).unwrap().unwrap();
                assert!((PORTS.0..=PORTS.1).contains(&port) && seen.insert(port), "{job}.{step}: {port}");
            }
        }
        let few = Some(PortRange::new(500, 501).unwrap());
        for id in ["prterun-host-77@1", "12.x", "a.b.c"] {
            let (port, by) = port_of_job(Vars(&none), launcher, id, few).unwrap().unwrap();
            assert!([500, 501].contains(&port) && by.contains(id) && by.contains("500-501"), "{by}");
        }
        assert_eq!(port_of_job(Vars(&none), launcher, "", None).unwrap(), None);
        // 62 jobs at 62 ports, which would else have two ports.
        let multiple = Some(PortRange::new(500, 561).unwrap());
        let port = |job: u32| port_of_job(Vars(&none), launcher, &format!("{job}.0"), multiple).unwrap().unwrap().0;
        let seen: std::collections::HashSet<u16> = (100..162).map(port).collect();
        assert!(seen.len() > 25 && seen.iter().all(|port| (500..=561).contains(port)), "{seen:?}");
    }
}
