//! Ranks that are stopped together for longer than their operations' deadlines.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../comm-core/tests/common/frozen.rs"]
mod ranks;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use comm_core::{Deadline, Mesh, MeshOptions};
use comm_tcp::{RawTcpTransport, TcpOptions, ZmqTransport};

use ranks::{Frozen, Terms};

const SHORT: Duration = Duration::from_secs(3);

#[test]
#[ignore = "a rank of the other test"]
fn rank_of_a_job() {
    ranks::serve(|transport, control| {
        let (deadline, options) = (Deadline::after(Duration::from_secs(60)), MeshOptions::default());
        match transport {
            "tcp" => {
                let transport = ZmqTransport::connect(&*control, &TcpOptions::default(), deadline).unwrap();
                Arc::new(Mesh::new(transport, control, options).unwrap())
            }
            _ => {
                let transport = RawTcpTransport::connect(&*control, &TcpOptions::default(), deadline).unwrap();
                Arc::new(Mesh::new(transport, control, options).unwrap())
            }
        }
    });
}

#[test]
fn all_ranks_together_for_longer_than_deadlines() {
    for transport in ["tcp", "tcp-raw"] {
        let job = Frozen::start(Terms { ranks: 3, liveness: SHORT, timeout: SHORT }, transport);
        job.signal("-STOP", &[0, 1, 2]);
        thread::sleep(SHORT * 3 / 2);
        job.signal("-CONT", &[0, 1, 2]);
        job.all_go_on();
        job.end();
    }
}
