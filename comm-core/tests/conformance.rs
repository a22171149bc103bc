//! The conformance suite on the in-process transport, alone and inside each decorator, and on plain sockets, where ranks are
//! threads or processes.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

#[path = "../examples/own_transport.rs"]
#[allow(dead_code, reason = "its main function is the example's")]
mod own_transport;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use comm_core::conformance::{Connector, Suite, main_of};
use comm_core::local::{self, LocalRank, LocalTransport};
use comm_core::shm::{ShmOptions, ShmTransport};
use comm_core::{
    Communicator, Control, CountingTransport, Deadline, Fault, FaultKind, Faulty, Mesh, MeshOptions, Transport, Waiting,
};

fn main() -> ExitCode {
    // A fault that is never reached.
    let never = Fault { at_message: u64::MAX, peer: None, lane: None, kind: FaultKind::Cut };
    main_of(vec![
        suite("local", |transport| transport),
        suite("counted-local", |transport| CountingTransport::new(transport).0)
            .with_ranks(&[1, 3], &[])
            .with_one_type(),
        suite("faulty-local", move |transport| Faulty::new(transport, Some(never)))
            .with_ranks(&[1, 3], &[])
            .with_one_type(),
        shared_memory("shm", |_| ShmOptions::default()),
        // Nearly every message is longer than the ring; ranks that always sleep beside some that never do.
        shared_memory("shm-small", |rank| {
            let waiting = if rank % 2 == 0 { Waiting::Park } else { Waiting::Busy };
            ShmOptions { ring_bytes: 4 << 10, single_copy: false, waiting, ..ShmOptions::default() }
        })
        .with_ranks(&[3], &[2])
        .with_one_type()
        .without("root_of_broadcast", "two roots fill a ring each and only give up at the deadline"),
        // Nearly every message is read out of its sender's memory.
        shared_memory("shm-lent", |_| ShmOptions { ring_bytes: 4 << 10, ..ShmOptions::default() })
            .with_ranks(&[3], &[2])
            .without("root_of_broadcast", "two roots lend a message each and only give up at the deadline"),
        Suite::of_threads("checked-local", |ranks| {
            let options = MeshOptions::default().with_checked(true).with_check_finite(true);
            let connector = |rank: local::LocalRank| -> Connector {
                let options = options.clone();
                Box::new(move || {
                    Ok(Arc::new(Mesh::new(rank.transport, rank.control, options)?) as Arc<dyn Communicator>)
                })
            };
            Ok(local::group(ranks, 3).into_iter().map(connector).collect())
        })
        // Two ranks that wait for each other's message, as some cases have them, are a mismatch here.
        .with_ranks(&[3], &[])
        .without("nan/", "its operands are what the check refuses"),
        own_transport::suite().with_ranks(&[3], &[2]).with_one_type(),
    ])
}

/// `options` gives those of a rank; the lanes are the suite's.
fn shared_memory(name: &str, options: fn(usize) -> ShmOptions) -> Suite {
    Suite::new(name, move |control, lanes| {
        let options = ShmOptions { lanes, ..options(control.rank()) };
        let transport = ShmTransport::connect(&*control, &options, Deadline::after(Duration::from_secs(30)))?;
        Ok(Arc::new(Mesh::new(transport, control, MeshOptions::default())?))
    })
    .with_transport(move |LocalRank { control, .. }, lanes| {
        let options = ShmOptions { lanes, ..options(control.rank()) };
        Ok(Arc::new(ShmTransport::connect(&*control, &options, Deadline::after(Duration::from_secs(30)))?))
    })
}

fn suite<T: Transport>(name: &str, wrap: impl Fn(LocalTransport) -> T + Copy + Send + Sync + 'static) -> Suite {
    Suite::of_threads(name, move |ranks| {
        let connector = |rank: local::LocalRank| -> Connector {
            Box::new(move || {
                let mesh = Mesh::new(wrap(rank.transport), rank.control, MeshOptions::default())?;
                Ok(Arc::new(mesh) as Arc<dyn Communicator>)
            })
        };
        Ok(local::group(ranks, 3).into_iter().map(connector).collect())
    })
    .with_transport(move |rank, _| Ok(Arc::new(wrap(rank.transport))))
}
