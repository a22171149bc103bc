//! One flow over our QUIC transport.

use std::time::{Duration, Instant};

use comm_core::CommunicatorExt;
use comm_core::job::{Address, Job};
use isocomm::{TransportKind, TransportOptions};
use rig::BenchError;
use rig::link::JobEndpoints;

use super::endpoint::ProcessSetup;
use super::flow::{Flow, Steady};
use super::interface::Sampler;

/// A message: that of a bucket of gradients, in parts.
const MESSAGE: usize = 1 << 18;

/// How a message says that it is the last one.
const LAST: u8 = 1;

/// How long what is under way at the end of the measurement may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// One of the ranks of a job of two or more, of which `from` sends to `to` for as long as the measurement takes.
///
/// # Errors
/// The transport's.
pub(super) fn quic(
    setup: &ProcessSetup,
    job: &Job,
    ends: Option<&JobEndpoints>,
    from: usize,
    to: usize,
) -> Result<Flow, BenchError> {
    let mut job = job.clone();
    let mut options = TransportOptions { timeout: setup.length + PATIENCE, ..TransportOptions::default() };
    if let Some(ends) = ends {
        let (host, port) = ends.meeting();
        job.address = Address::Tcp { host: host.to_string(), port };
        options.bind = Some(setup.own.into());
    }
    let session = isocomm::connect(TransportKind::QUIC.name(), &job, &options)?;
    let sampler = Sampler::start(&setup.interface)?;
    let mut message = vec![0_u8; MESSAGE];
    let mut steady = Steady::new(setup, Instant::now());
    if job.rank == from {
        let began = Instant::now();
        while message[0] != LAST {
            message[0] = if began.elapsed() < setup.length { 0 } else { LAST };
            session.comm.send(&message, to)?;
        }
    } else if job.rank == to {
        while message[0] != LAST {
            session.comm.recv_into(&mut message, from)?;
            steady.add(MESSAGE);
        }
    }
    // What QUIC declares lost it sends again.
    let paths = session.quic.map(|monitor| monitor.paths()).unwrap_or_default();
    let lost = paths.iter().map(|path| path.lost_packets).sum();
    session.comm.finish(options.timeout)?;
    Ok(Flow { sent_again: Some(lost), ..steady.flow(sampler, setup.header) })
}
