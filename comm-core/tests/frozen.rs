//! Ranks that are processes, and are stopped for a while (SIGSTOP) with the rest of the job or without it: who was asleep accuses
//! nobody, and who is stopped for too long is accused by the others, with one text.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "common/frozen.rs"]
mod ranks;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use comm_core::shm::{ShmOptions, ShmTransport};
use comm_core::{Deadline, Mesh, MeshOptions};

use ranks::{Frozen, Terms};

const SHORT: Duration = Duration::from_secs(3);
const LONG: Duration = Duration::from_secs(120);

#[test]
#[ignore = "a rank of the other tests"]
fn rank_of_a_job() {
    ranks::serve(|_, control| {
        let deadline = Deadline::after(Duration::from_secs(60));
        let transport = ShmTransport::connect(&*control, &ShmOptions::default(), deadline).unwrap();
        Arc::new(Mesh::new(transport, control, MeshOptions::default()).unwrap())
    });
}

#[test]
fn all_ranks_together_for_longer_than_liveness_and_deadlines() {
    let job = Frozen::start(Terms { ranks: 3, liveness: SHORT, timeout: SHORT }, "shm");
    for _ in 0..2 {
        job.signal("-STOP", &[0, 1, 2]);
        thread::sleep(SHORT * 3 / 2);
        job.signal("-CONT", &[0, 1, 2]);
        job.all_go_on();
    }
    job.end();
}

#[test]
fn any_one_rank_for_a_while() {
    let job = Frozen::start(Terms { ranks: 3, liveness: LONG, timeout: LONG }, "shm");
    for rank in 0..3 {
        job.signal("-STOP", &[rank]);
        thread::sleep(Duration::from_secs(1));
        job.signal("-CONT", &[rank]);
        job.all_go_on();
    }
    job.end();
}

#[test]
fn one_rank_for_longer_than_liveness() {
    for (rank, told) in
        [(0, "rank 0 was lost: it does not answer"), (2, "rank 2 was lost: it sent no heartbeat for 3.0 s")]
    {
        let job = Frozen::start(Terms { ranks: 3, liveness: SHORT, timeout: LONG }, "shm");
        all_blame(&job, rank, told);
    }
}

#[test]
fn rank_0_for_longer_than_deadlines() {
    // Each of the others sees something else: who waits for whom in the algorithm.
    let job = Frozen::start(Terms { ranks: 4, liveness: LONG, timeout: SHORT }, "shm");
    all_blame(&job, 0, "rank 0 was lost: it does not answer");
}

/// `rank` is stopped. The others say that they have lost it, in the same words; and so does it when it goes on.
fn all_blame(job: &Frozen, rank: usize, told: &str) {
    job.signal("-STOP", &[rank]);
    let others = (0..job.ranks()).filter(|other| *other != rank);
    let texts: Vec<String> = others.map(|other| job.failure(other)).collect();
    job.signal("-CONT", &[rank]);
    for text in texts.iter().chain([&job.failure(rank)]) {
        assert!(text.starts_with(told), "{text}");
        assert_eq!(*text, texts[0]);
    }
}
