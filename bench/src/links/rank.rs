//! A process at one end of a link that is measured.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use comm_core::job::Job;
use rig::BenchError;
use rig::link::JobEndpoints;
use rig::rank::{Program, of_a_job};
use serde::{Deserialize, Serialize};

use super::endpoint::{self, ProcessSetup};
use super::flow;
use super::transport;
use super::udp::{self, Sender};

/// What all processes of a measurement are told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(super) work: MeasureTask,
    /// `None` on loopback.
    pub(super) ends: Option<JobEndpoints>,
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
pub(super) enum MeasureTask {
    Datagrams { senders: Vec<Sender>, to: usize, payload: usize },
    RoundTrip { from: usize, to: usize, packets_per_s: f64 },
    Tcp { from: usize, to: usize },
    Quic { from: usize, to: usize },
}

impl Task {
    /// The longest that all of it can take.
    pub(super) fn timeout(&self) -> Duration {
        self.length + 3 * endpoint::PATIENCE
    }

    /// Number of processes: the first ones of the network that take part.
    pub(super) fn ranks(&self) -> usize {
        let last = match &self.work {
            MeasureTask::Datagrams { senders, to, .. } => {
                senders.iter().map(|sender| sender.rank).max().unwrap_or(0).max(*to)
            }
            MeasureTask::RoundTrip { from, to, .. }
            | MeasureTask::Tcp { from, to }
            | MeasureTask::Quic { from, to } => *from.max(to),
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
        let setup = ProcessSetup {
            own: self.address(rank),
            interface: self.interface.clone(),
            header: self.header,
            length: self.length,
            quiet: self.quiet,
            folder: self.folder.clone(),
        };
        match &self.work {
            MeasureTask::Datagrams { senders, to, payload } => {
                if rank == *to {
                    say(&udp::listen(&setup, senders)?)?;
                } else if let Some(sender) = senders.iter().find(|sender| sender.rank == rank) {
                    say(&udp::send(&setup, self.address(*to), *sender, *payload)?)?;
                }
            }
            MeasureTask::RoundTrip { from, to, packets_per_s } => {
                if rank == *to {
                    udp::answer(&setup)?;
                } else if rank == *from {
                    say(&udp::ask(&setup, self.address(*to), *packets_per_s)?)?;
                }
            }
            MeasureTask::Tcp { from, to } => {
                if rank == *to {
                    say(&flow::listen(&setup)?)?;
                } else if rank == *from {
                    say(&flow::send(&setup, self.address(*to))?)?;
                }
            }
            MeasureTask::Quic { from, to } => say(&transport::quic(&setup, job, self.ends.as_ref(), *from, *to)?)?,
        }
        Ok(())
    }
}

fn say(what: &impl Serialize) -> Result<(), BenchError> {
    println!("{}", serde_json::to_string(what)?);
    Ok(())
}
