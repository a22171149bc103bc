//! A process at one end of a link that is measured.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::job::Job;
use rig::BenchError;
use rig::link::Ends;
use rig::rank::{Program, of_a_job};
use serde::{Deserialize, Serialize};

use super::flow;
use super::transport;
use super::udp::{self, Sender};

/// What all processes of a measurement are told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(super) work: Work,
    /// `None` on loopback.
    pub(super) ends: Option<Ends>,
    pub(super) interface: String,
    /// Bytes of each packet that the interface counts and that are not of its IP packet.
    pub(super) header: u64,
    pub(super) length: Duration,
    /// Nothing comes any more when nothing came for so long.
    pub(super) quiet: Duration,
    /// Where they leave signs for each other, so that the link stays idle.
    pub(super) folder: PathBuf,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Work {
    Datagrams { senders: Vec<Sender>, to: usize, payload: usize },
    RoundTrip { from: usize, to: usize, packets_per_s: f64 },
    Tcp { from: usize, to: usize },
    Quic { from: usize, to: usize },
}

/// What a process knows of its end and of the measurement.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) own: IpAddr,
    pub(super) interface: String,
    pub(super) header: u64,
    pub(super) length: Duration,
    pub(super) quiet: Duration,
    pub(super) folder: PathBuf,
}

/// The part of a measurement at its start that does not count: queues fill, and congestion control finds its rate.
const SETTLING: f64 = 0.3;

/// Longest wait for the other ends, beyond the measurement itself.
const PATIENCE: Duration = Duration::from_secs(20);

/// How often signs are looked for.
const LOOK: Duration = Duration::from_millis(2);

impl Place {
    /// Says something to the other processes.
    pub(super) fn signal(&self, name: &str) -> io::Result<()> {
        fs::write(self.folder.join(name), b"")
    }

    pub(super) fn has_signal(&self, name: &str) -> bool {
        self.folder.join(name).exists()
    }

    /// # Errors
    /// It does not come.
    pub(super) fn wait_for(&self, name: &str) -> io::Result<()> {
        let began = Instant::now();
        while !self.has_signal(name) {
            if began.elapsed() > PATIENCE {
                let text = format!("no other end of the link was {name} within {PATIENCE:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// How long everything may take.
    pub(super) fn patience(&self) -> Duration {
        self.length + PATIENCE
    }

    /// The part of a measurement that counts, where the first packet came at `first`.
    pub(super) fn steady(&self, first: Instant) -> (Instant, Instant) {
        (first + self.length.mul_f64(SETTLING), first + self.length)
    }
}

impl Task {
    /// The longest that all of it can take.
    pub(super) fn timeout(&self) -> Duration {
        self.length + 3 * PATIENCE
    }

    /// Number of processes: the first ones of the world that take part.
    pub(super) fn ranks(&self) -> usize {
        let last = match &self.work {
            Work::Datagrams { senders, to, .. } => senders.iter().map(|sender| sender.rank).max().unwrap_or(0).max(*to),
            Work::RoundTrip { from, to, .. } | Work::Tcp { from, to } | Work::Quic { from, to } => *from.max(to),
        };
        last + 1
    }

    fn address(&self, rank: usize) -> IpAddr {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        self.ends.as_ref().map_or(loopback, |ends| ends.own(rank, self.ranks()))
    }
}

impl Program for Task {
    const COMMAND: &'static str = "links-rank";

    /// The process of one rank; what it has measured is its standard output.
    fn run(&self, job: Option<&Job>) -> Result<(), BenchError> {
        let job = of_a_job(job)?;
        let rank = job.rank;
        let place = Place {
            own: self.address(rank),
            interface: self.interface.clone(),
            header: self.header,
            length: self.length,
            quiet: self.quiet,
            folder: self.folder.clone(),
        };
        match &self.work {
            Work::Datagrams { senders, to, payload } => {
                if rank == *to {
                    say(&udp::listen(&place, senders)?)?;
                } else if let Some(sender) = senders.iter().find(|sender| sender.rank == rank) {
                    say(&udp::send(&place, self.address(*to), *sender, *payload)?)?;
                }
            }
            Work::RoundTrip { from, to, packets_per_s } => {
                if rank == *to {
                    udp::answer(&place)?;
                } else if rank == *from {
                    say(&udp::ask(&place, self.address(*to), *packets_per_s)?)?;
                }
            }
            Work::Tcp { from, to } => {
                if rank == *to {
                    say(&flow::listen(&place)?)?;
                } else if rank == *from {
                    say(&flow::send(&place, self.address(*to))?)?;
                }
            }
            Work::Quic { from, to } => say(&transport::quic(&place, job, self.ends.as_ref(), *from, *to)?)?,
        }
        Ok(())
    }
}

fn say(what: &impl Serialize) -> Result<(), BenchError> {
    println!("{}", serde_json::to_string(what)?);
    Ok(())
}
