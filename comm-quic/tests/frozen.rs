//! Ranks that are stopped together for longer than QUIC's idle timeout, and their operations' deadlines.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../comm-core/tests/common/frozen.rs"]
mod ranks;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use comm_core::{Deadline, Mesh, MeshOptions};
use comm_quic::{QuicOptions, QuicTransport};

use ranks::{Frozen, Terms};

const SHORT: Duration = Duration::from_secs(3);

#[test]
#[ignore = "a rank of the other test"]
fn rank_of_a_job() {
    ranks::serve(|_, control| {
        let options = QuicOptions { idle_timeout: SHORT, keep_alive: SHORT / 10, ..QuicOptions::default() };
        let transport = QuicTransport::connect(&*control, &options, Deadline::after(Duration::from_secs(60))).unwrap();
        Arc::new(Mesh::new(transport, control, MeshOptions::default()).unwrap())
    });
}

#[test]
fn all_ranks_together_for_longer_than_the_idle_timeout() {
    let job = Frozen::start(Terms { ranks: 3, liveness: SHORT, timeout: SHORT }, "quic");
    for _ in 0..2 {
        job.signal("-STOP", &[0, 1, 2]);
        thread::sleep(SHORT * 3 / 2);
        job.signal("-CONT", &[0, 1, 2]);
        job.all_go_on();
    }
    job.end();
}
