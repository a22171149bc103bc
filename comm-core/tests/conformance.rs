//! The conformance suite on the in-process transport, alone and inside each decorator, and on plain sockets, where ranks are
//! threads or processes.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

#[path = "common/sockets.rs"]
mod sockets;

use std::process::ExitCode;
use std::sync::Arc;

use comm_core::conformance::{Connector, Suite, main_of};
use comm_core::local::{self, LocalTransport};
use comm_core::{Communicator, Counted, Fault, FaultKind, Faulty, Mesh, MeshOptions, Transport};

use sockets::Sockets;

fn main() -> ExitCode {
    // A fault that is never reached.
    let never = Fault { at_message: u64::MAX, peer: None, lane: None, kind: FaultKind::Cut };
    main_of(vec![
        suite("local", |transport| transport),
        suite("counted-local", |transport| Counted::new(transport).0),
        suite("faulty-local", move |transport| Faulty::new(transport, Some(never))),
        Suite::new("sockets", |control, lanes| {
            let transport = Sockets::connect(&control, lanes)?;
            Ok(Arc::new(Mesh::new(transport, control, MeshOptions::default())))
        }),
    ])
}

fn suite<T: Transport>(name: &str, wrap: impl Fn(LocalTransport) -> T + Copy + Send + Sync + 'static) -> Suite {
    Suite::of_threads(name, move |ranks| {
        let connector = |rank: local::LocalRank| -> Connector {
            Box::new(move || {
                let mesh = Mesh::new(wrap(rank.transport), rank.control, MeshOptions::default());
                Ok(Arc::new(mesh) as Arc<dyn Communicator>)
            })
        };
        Ok(local::group(ranks, 3).into_iter().map(connector).collect())
    })
}
