//! Ranks of a job that a launcher has started: what they say to each other over its control plane, where they are, and how their clocks differ.

mod clocks;

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use comm_core::addresses::PortRange;
use comm_core::control::{ControlExt, MAX_BLOB};
use comm_core::job::{self, Address, Job};
use comm_core::{Control, Deadline, Error};
use gpt2::cores;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use clocks::{ClockReading, between, compare};

/// How long ranks wait for each other at the start, which a launcher may spread over a while.
pub const START: Duration = Duration::from_secs(120);

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// The machine's name.
    pub name: String,
    /// What tells it from the others of the job.
    pub id: String,
    pub process: u32,
    /// The cores that the process may use, by number.
    pub cores: Vec<usize>,
}

/// A machine of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    pub name: String,
    /// In order.
    pub ranks: Vec<usize>,
    /// Processes of its ranks, in their order.
    pub processes: Vec<u32>,
    /// How many its ranks may use together.
    pub cores: usize,
}

impl Place {
    /// Of this process.
    pub fn here() -> Self {
        let name = fs::read_to_string("/proc/sys/kernel/hostname");
        Place {
            name: name.map_or_else(|_| "?".into(), |name| name.trim().to_owned()),
            id: job::machine(),
            process: std::process::id(),
            cores: cores::allowed(),
        }
    }
}

/// The machines of all ranks of a job, in the order of their first ranks. All ranks call it together.
///
/// # Errors
/// Those of the control plane.
pub fn machines(control: &dyn Control, deadline: Deadline) -> Result<Vec<Machine>, Error> {
    Ok(machines_of(&control.gather("machines", &Place::here(), deadline)?))
}

fn machines_of(places: &[Place]) -> Vec<Machine> {
    let mut machines: Vec<(&str, Machine, Vec<usize>)> = Vec::new();
    for (rank, Place { name, id, process, cores }) in places.iter().enumerate() {
        let known = machines.iter().position(|(other, ..)| other == id).unwrap_or_else(|| {
            let new = Machine { name: name.clone(), ranks: Vec::new(), processes: Vec::new(), cores: 0 };
            machines.push((id, new, Vec::new()));
            machines.len() - 1
        });
        let (_, machine, all) = &mut machines[known];
        machine.ranks.push(rank);
        machine.processes.push(*process);
        all.extend(cores);
        all.sort_unstable();
        all.dedup();
        machine.cores = all.len();
    }
    machines.into_iter().map(|(_, machine, _)| machine).collect()
}

/// The machines, for people: their names, with the number of ranks of each.
pub fn describe(machines: &[Machine]) -> String {
    let each = machines.iter().map(|machine| format!("{} ({} rank(s))", machine.name, machine.ranks.len()));
    each.collect::<Vec<_>>().join(", ")
}

/// As [`ControlExt::gather`], of values that only JSON has a form for.
///
/// # Errors
/// As there.
pub fn exchange<S: Serialize, R: DeserializeOwned>(
    control: &dyn Control,
    label: &str,
    value: &S,
    deadline: Deadline,
) -> Result<Vec<R>, Error> {
    read(label, &control.all_gather(label, &json(label, value)?, deadline)?)
}

/// Bytes of a rank in a gather of a value that may be long.
const PIECE: usize = MAX_BLOB;

/// As [`exchange`], of values that may be too long for one gather, for rank 0 alone: the others get none. `deadline` is for the first gather,
/// which waits until all ranks have a value; then each has `piece`.
///
/// # Errors
/// As there.
pub fn exchange_long<S: Serialize, R: DeserializeOwned>(
    control: &dyn Control,
    label: &str,
    value: &S,
    deadline: Deadline,
    piece: Duration,
) -> Result<Vec<R>, Error> {
    let mine = json(label, value)?;
    let lengths = control.gather(&format!("{label}: lengths"), &(mine.len() as u64), deadline)?;
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut all: Vec<Vec<u8>> = vec![Vec::new(); lengths.len()];
    let mut pieces = mine.chunks(PIECE);
    for _ in 0..longest.div_ceil(PIECE as u64) {
        let told = control.gather_at_0(label, pieces.next().unwrap_or_default(), Deadline::after(piece))?;
        all.iter_mut().zip(told).for_each(|(all, piece)| all.extend(piece));
    }
    if control.rank() == 0 { read(label, &all) } else { Ok(Vec::new()) }
}

fn json(label: &str, value: &impl Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(value).map_err(|error| Error::Internal(format!("{label}: {error}")))
}

fn read<R: DeserializeOwned>(label: &str, blobs: &[Vec<u8>]) -> Result<Vec<R>, Error> {
    let read = |(rank, blob): (usize, &Vec<u8>)| {
        serde_json::from_slice(blob)
            .map_err(|why| Error::Protocol { who: format!("rank {rank}"), what: format!("{label}: {why}") })
    };
    blobs.iter().enumerate().map(read).collect()
}

/// Where the ranks of `job` meet for other jobs of the same ranks, one for each name: at the job's own host, at ports that are free on rank 0
/// (of `COMM_PORT_RANGE`, where it is set). All ranks call it together.
///
/// # Errors
/// Those of the control plane; rank 0 has no free ports.
pub fn addresses(job: &Job, names: &[String], control: &dyn Control, timeout: Duration) -> Result<Vec<Address>, Error> {
    let host = match &job.address {
        Address::File(path) => {
            let of = |name: &String| Address::File(path.with_file_name(format!("address-{name}")));
            return Ok(names.iter().map(of).collect());
        }
        Address::Tcp { host, .. } => host,
    };
    let mine = if job.rank == 0 { free_ports(names.len(), job.network.ports)? } else { Vec::new() };
    let told = control.gather("ports", &mine, Deadline::after(timeout))?;
    let ports = told.into_iter().next().filter(|ports| ports.len() == names.len());
    let ports =
        ports.ok_or_else(|| Error::Rendezvous("rank 0 named another number of ports than there are jobs".into()))?;
    Ok(ports.into_iter().map(|port| Address::Tcp { host: host.clone(), port }).collect())
}

fn free_ports(count: usize, ports: Option<PortRange>) -> Result<Vec<u16>, Error> {
    // All at the same time, so that they differ.
    let listen = |address: SocketAddr| PortRange::bind(ports, address, TcpListener::bind);
    let any = || listen((Ipv6Addr::UNSPECIFIED, 0).into()).or_else(|_| listen((Ipv4Addr::UNSPECIFIED, 0).into()));
    let found: std::io::Result<Vec<TcpListener>> = (0..count).map(|_| any()).collect();
    let ports = found.and_then(|listeners| listeners.iter().map(|l| Ok(l.local_addr()?.port())).collect());
    ports.map_err(|error| Error::io("looking for free ports", error))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use comm_core::local;

    use super::*;

    #[test]
    fn machines_are_told_apart_by_what_they_are_not_by_their_names() {
        let place =
            |id: &str, cores: &[usize]| Place { name: "a".into(), id: id.into(), process: 7, cores: cores.into() };
        let found = machines_of(&[place("1", &[0]), place("2", &[0, 1]), place("1", &[1]), place("1", &[1])]);
        let ranks: Vec<&[usize]> = found.iter().map(|machine| &machine.ranks[..]).collect();
        assert_eq!(ranks, [&[0, 2, 3][..], &[1]]);
        assert_eq!((found[0].cores, found[1].cores, &found[0].processes[..]), (2, 2, &[7, 7, 7][..]));
        assert_eq!(describe(&found), "a (3 rank(s)), a (1 rank(s))");
    }

    #[test]
    fn free_ports_differ() {
        let ports = free_ports(5, None).unwrap();
        assert!(ports.iter().all(|port| ports.iter().filter(|other| *other == port).count() == 1), "{ports:?}");
        let range = PortRange::new(42_100, 42_300).unwrap();
        assert!(free_ports(3, Some(range)).unwrap().iter().all(|port| (42_100..=42_300).contains(port)));
    }

    #[test]
    fn long_values_of_different_lengths_arrive_whole() {
        let ranks = local::group(3, 1);
        let lengths = [3 * PIECE + 1, 0, PIECE];
        thread::scope(|scope| {
            for (rank, length) in ranks.iter().zip(lengths) {
                scope.spawn(move || {
                    let mine = "x".repeat(length);
                    let deadline = Deadline::after(Duration::from_secs(30));
                    let all: Vec<String> =
                        exchange_long(&*rank.control, "texts", &mine, deadline, Duration::from_secs(30)).unwrap();
                    let expected = if rank.control.rank() == 0 { &lengths[..] } else { &[] };
                    assert_eq!(all.iter().map(String::len).collect::<Vec<_>>(), expected);
                });
            }
        });
    }
}
