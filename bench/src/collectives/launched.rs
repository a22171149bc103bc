//! Ranks of a job that a launcher has started, on one machine or several: every process is a rank, and rank 0 is the program, too.
//!
//! What ranks and program say to each other goes over the job's control plane. Times are those of single ranks, so that clocks need not agree.

use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use comm_core::control::{ControlExt, TcpControl};
use comm_core::job::{self, Address, Job};
use comm_core::{Control, Deadline, Error};
use isocomm::Rung;
use rig::BenchError;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::options::{Settings, options_of};
use super::protocol::{Command, OpenedTransport, Reply};
use super::rank::Members;

/// This process's rank.
pub(crate) struct LaunchedRank {
    control: Arc<TcpControl>,
    members: Members,
    timeout: Duration,
    machines: Vec<Machine>,
}

/// A machine of the job.
#[derive(Clone, Debug, PartialEq)]
struct Machine {
    name: String,
    id: String,
    ranks: usize,
}

/// How long ranks wait for each other at the start, which a launcher may spread over a while.
const START: Duration = Duration::from_secs(120);

/// How much longer than an operation may take the next command is waited for: rank 0 also writes and prints.
const BETWEEN: Duration = Duration::from_secs(60);

impl LaunchedRank {
    /// Meets the other ranks of `job`, and opens all transports with them.
    ///
    /// # Errors
    /// The ranks do not meet, or do not agree on what is measured. A transport that cannot be opened is described as such.
    pub(crate) fn meet(job: &Job, settings: &Settings) -> Result<Self, Error> {
        let timeout = settings.options.timeout;
        let names: Vec<String> = settings.transports.iter().map(ToString::to_string).collect();
        let agreement = [
            ("program", format!("bench {}", env!("CARGO_PKG_VERSION"))),
            ("transports (--transports)", names.join(",")),
            ("options of the transports", format!("{:?} {:?}", settings.options, settings.quic_congestion)),
        ];
        let control =
            TcpControl::connect_with(job, &agreement, settings.options.control(), Deadline::after(timeout.max(START)))?;
        let place = (name_of_machine(), job::machine());
        let places = control.gather("machines", &place, Deadline::after(timeout))?;
        let addresses = addresses(job, &settings.transports, &*control, timeout)?;
        let options = |kind: Rung| options_of(kind, &settings.options, settings.quic_congestion.as_ref());
        let transports = settings.transports.iter().zip(addresses);
        let members = Members::open(job, transports.map(|(kind, address)| (*kind, address, options(*kind))));
        Ok(LaunchedRank { control, members, timeout, machines: machines(places) })
    }

    /// What each rank can be measured on.
    ///
    /// # Errors
    /// Those of the control plane.
    pub(crate) fn describe(&self) -> Result<Vec<Vec<OpenedTransport>>, Error> {
        exchange(&*self.control, "transports", &self.members.describe(), Deadline::after(self.timeout))
    }

    /// Number of machines.
    pub(crate) fn machine_count(&self) -> usize {
        self.machines.len()
    }

    /// The most ranks of one machine.
    pub(crate) fn ranks_of_a_machine(&self) -> usize {
        self.machines.iter().map(|machine| machine.ranks).max().unwrap_or(1)
    }

    /// The machines, for people: their names, with the ranks of each.
    pub(crate) fn machines(&self) -> String {
        let each = self.machines.iter().map(|machine| format!("{} ({} rank(s))", machine.name, machine.ranks));
        each.collect::<Vec<_>>().join(", ")
    }

    /// On rank 0: has all do `command`; what they say, by rank.
    ///
    /// # Errors
    /// Those of the control plane.
    pub(super) fn ask(&mut self, command: &Command, deadline: Deadline) -> Result<Vec<Reply>, Error> {
        exchange::<_, Option<Command>>(&*self.control, "command", &Some(command), deadline)?;
        match command {
            Command::Measure(request) => exchange(&*self.control, "reply", &self.members.answer(request), deadline),
            Command::Quit => Ok(Vec::new()),
        }
    }

    /// On rank 0: the end of all.
    pub(super) fn quit(mut self) {
        // Whoever is gone has ended already.
        let _ = self.ask(&Command::Quit, Deadline::after(self.timeout));
        self.leave();
    }

    /// On all other ranks: does what rank 0 says, until the end.
    ///
    /// # Errors
    /// Those of the control plane.
    fn serve(mut self) -> Result<(), Error> {
        self.describe()?;
        let wait = self.timeout.saturating_add(BETWEEN);
        loop {
            let told: Vec<Option<Command>> =
                exchange(&*self.control, "command", &None::<Command>, Deadline::after(wait))?;
            match told.into_iter().next().flatten() {
                Some(Command::Measure(request)) => {
                    let reply = self.members.answer(&request);
                    exchange::<_, Reply>(&*self.control, "reply", &reply, Deadline::after(wait))?;
                }
                Some(Command::Quit) | None => break,
            }
        }
        self.leave();
        Ok(())
    }

    fn leave(&self) {
        self.members.finish(self.timeout);
        let _ = self.control.leave(Deadline::after(self.timeout));
    }
}

/// The process of a rank other than 0, to its end.
///
/// # Errors
/// Those of the control plane.
pub(crate) fn serve(job: &Job, settings: &Settings) -> Result<ExitCode, BenchError> {
    LaunchedRank::meet(job, settings)?.serve()?;
    Ok(ExitCode::SUCCESS)
}

/// As [`ControlExt::gather`], of values that only JSON has a form for.
fn exchange<S: Serialize, R: DeserializeOwned>(
    control: &dyn Control,
    label: &str,
    value: &S,
    deadline: Deadline,
) -> Result<Vec<R>, Error> {
    let internal = |error: serde_json::Error| Error::Internal(format!("{label}: {error}"));
    let blobs = control.all_gather(label, &serde_json::to_vec(value).map_err(internal)?, deadline)?;
    let read = |(rank, blob): (usize, &Vec<u8>)| {
        serde_json::from_slice(blob)
            .map_err(|why| Error::Protocol { who: format!("rank {rank}"), what: format!("{label}: {why}") })
    };
    blobs.iter().enumerate().map(read).collect()
}

/// Where the ranks meet for each of the transports: at the job's own host, at ports that are free on rank 0.
fn addresses(job: &Job, transports: &[Rung], control: &dyn Control, timeout: Duration) -> Result<Vec<Address>, Error> {
    let host = match &job.address {
        Address::File(path) => {
            let of = |kind: &Rung| Address::File(path.with_file_name(format!("address-{kind}")));
            return Ok(transports.iter().map(of).collect());
        }
        Address::Tcp { host, .. } => host,
    };
    let mine = if job.rank == 0 { free_ports(transports.len())? } else { Vec::new() };
    let told = control.gather("ports", &mine, Deadline::after(timeout))?;
    let ports = told.into_iter().next().filter(|ports| ports.len() == transports.len());
    let ports =
        ports.ok_or_else(|| Error::Rendezvous("rank 0 has told other ports than there are transports".into()))?;
    Ok(ports.into_iter().map(|port| Address::Tcp { host: host.clone(), port }).collect())
}

fn free_ports(count: usize) -> Result<Vec<u16>, Error> {
    // All at the same time, so that they differ.
    let listen =
        || TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)));
    let found: std::io::Result<Vec<TcpListener>> = (0..count).map(|_| listen()).collect();
    let ports = found.and_then(|listeners| listeners.iter().map(|l| Ok(l.local_addr()?.port())).collect());
    ports.map_err(|error| Error::io("looking for free ports", error))
}

fn name_of_machine() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").map_or_else(|_| "?".into(), |name| name.trim().to_owned())
}

/// The machines of the ranks, given as (name, id), in the order of their first ranks.
fn machines(places: Vec<(String, String)>) -> Vec<Machine> {
    let mut machines: Vec<Machine> = Vec::new();
    for (name, id) in places {
        match machines.iter_mut().find(|machine| machine.id == id) {
            Some(machine) => machine.ranks += 1,
            None => machines.push(Machine { name, id, ranks: 1 }),
        }
    }
    machines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_told_apart_by_what_they_are_not_by_their_names() {
        let place = |name: &str, id: &str| (name.to_owned(), id.to_owned());
        let found = machines(vec![place("a", "1"), place("a", "2"), place("a", "1")]);
        let ranks: Vec<usize> = found.iter().map(|machine| machine.ranks).collect();
        assert_eq!(ranks, [2, 1]);
    }

    #[test]
    fn free_ports_differ() {
        let ports = free_ports(5).unwrap();
        assert!(ports.iter().all(|port| ports.iter().filter(|other| *other == port).count() == 1), "{ports:?}");
    }
}
