//! What goes wrong ends in an error that names who and why, in time.

#![allow(clippy::unwrap_used, reason = "a test that panics has failed")]

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::conformance::Barrier;
use comm_core::local::group;
use comm_core::{
    Communicator, CommunicatorExt, Control, Deadline, Error, Header, Incoming, Mesh, MeshOptions, ReduceOp, Result,
    Sink, Transport,
};
use comm_quic::{Congestion, QuicOptions, QuicTransport};

use crate::common::{job, pattern, receive, send, soon, swap_with_all};

/// What comes at once has come by then on a busy machine too; the deadline that would otherwise end a wait is a minute away.
const PROMPT: Duration = Duration::from_secs(10);

#[test]
fn a_deadline_ends_an_exchange_on_time() {
    let barrier = Barrier::new(2);
    job(2, &QuicOptions::default(), |transport, _control| {
        if transport.rank() == 0 {
            let began = Instant::now();
            let error = receive(&transport, 0, 1, Deadline::after(Duration::from_millis(300))).unwrap_err();
            let took = began.elapsed();
            assert!(matches!(&error, Error::Timeout { rank: 0, waiting_for, .. } if waiting_for == &[1]), "{error}");
            assert!((Duration::from_millis(300)..PROMPT).contains(&took), "{took:?}");
            // What comes next on that lane would be the rest of what was given up.
            assert!(matches!(receive(&transport, 0, 1, soon()), Err(Error::Timeout { .. })));
        }
        barrier.wait();
    });
}

#[test]
fn a_deadline_ends_a_send_that_nobody_takes() {
    let barrier = Barrier::new(2);
    job(2, &QuicOptions::default(), |transport, _control| {
        if transport.rank() == 0 {
            let payload = vec![0; 100 << 20];
            let outgoing =
                [comm_core::Outgoing { peer: 1, header: crate::common::header(payload.len(), 0), payload: &payload }];
            let error =
                transport.exchange(0, &outgoing, &mut [], Deadline::after(Duration::from_millis(700))).unwrap_err();
            assert!(matches!(&error, Error::Timeout { waiting_for, .. } if waiting_for == &[1]), "{error}");
        }
        barrier.wait();
    });
}

#[test]
fn abort_ends_a_blocked_exchange_and_all_later_ones() {
    let barrier = Barrier::new(2);
    job(2, &QuicOptions::default(), |transport, _control| {
        if transport.rank() == 0 {
            let first = Error::Aborted { by: 1, reason: "the loss is not a number".into() };
            let (sender, receiver) = channel();
            thread::scope(|scope| {
                let blocked = scope.spawn(|| {
                    let outcome = receive(&transport, 0, 1, soon());
                    sender.send(Instant::now()).unwrap();
                    outcome
                });
                thread::sleep(Duration::from_millis(100));
                let called = Instant::now();
                transport.abort(&first);
                transport.abort(&Error::invalid("a second reason"));
                let woke = receiver.recv_timeout(PROMPT).unwrap() - called;
                assert!(woke < PROMPT, "{woke:?}");
                assert_eq!(blocked.join().unwrap().unwrap_err().to_string(), first.to_string());
            });
            assert_eq!(send(&transport, 1, 1, b"late").unwrap_err().to_string(), first.to_string());
            assert_eq!(transport.close(soon()).unwrap_err().to_string(), first.to_string());
        }
        barrier.wait();
    });
}

#[test]
fn a_peer_that_drops_its_transport_is_lost_at_once() {
    let barrier = Barrier::new(3);
    job(3, &QuicOptions::default(), |transport, _control| {
        swap_with_all(&transport, 0, 100);
        // Dropping discards what the others do not have yet.
        barrier.wait();
        if transport.rank() == 2 {
            return;
        }
        let began = Instant::now();
        let error = receive(&transport, 1, 2, soon()).unwrap_err();
        assert!(matches!(error, Error::PeerLost { rank: 2, .. }), "{error}");
        assert!(error.to_string().contains("dropped its transport"), "{error}");
        assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
        assert!(matches!(transport.close(soon()), Err(Error::PeerLost { rank: 2, .. })));
    });
}

#[test]
fn a_peer_that_drops_its_transport_in_the_middle_of_a_message_is_lost_at_once() {
    // Whether the last packet finds the congestion window full is a matter of luck.
    for congestion in [Congestion::Cubic, Congestion::FixedWindow(64 << 10)].repeat(6) {
        let options = QuicOptions { congestion, mtu: Some(1200), ..QuicOptions::default() };
        job(2, &options, |transport, _control| {
            if transport.rank() == 0 {
                // Much of it waits for the congestion window when the call returns.
                send(&transport, 0, 1, &pattern(0, 1, 0, 4 << 20)).unwrap();
                return;
            }
            let began = Instant::now();
            let error = receive(&transport, 1, 0, soon()).unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{error}");
            assert!(began.elapsed() < PROMPT, "{:?}", began.elapsed());
        });
    }
}

#[test]
fn a_peer_that_closes_while_more_is_expected_is_lost() {
    let barrier = Barrier::new(2);
    job(2, &QuicOptions::default(), |transport, _control| {
        if transport.rank() == 0 {
            assert!(matches!(transport.close(Deadline::after(Duration::from_secs(1))), Err(Error::Timeout { .. })));
        } else {
            let error = receive(&transport, 0, 0, soon()).unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{error}");
        }
        barrier.wait();
    });
}

#[test]
fn a_sink_can_refuse() {
    struct Refuse;
    impl Sink for Refuse {
        fn begin(&mut self, header: &Header) -> Result<()> {
            Err(Error::invalid(format!("{} B are too many", header.payload_len)))
        }
        fn piece(&mut self, _bytes: &[u8]) -> Result<()> {
            panic!("after a refusal nothing is handed on")
        }
    }
    let barrier = Barrier::new(2);
    job(2, &QuicOptions::default(), |transport, _control| {
        if transport.rank() == 0 {
            send(&transport, 0, 1, &pattern(0, 1, 0, 1000)).unwrap();
        } else {
            let mut sink = Refuse;
            let error = transport.exchange(0, &[], &mut [Incoming { peer: 0, sink: &mut sink }], soon()).unwrap_err();
            assert_eq!(error.to_string(), "1000 B are too many");
        }
        barrier.wait();
    });
}

#[test]
fn calls_that_make_no_sense_are_refused_and_harmless() {
    job(2, &QuicOptions::default(), |transport, _control| {
        let refused = |outcome: Result<()>| assert!(matches!(outcome, Err(Error::InvalidArgument(_))), "{outcome:?}");
        let rank = transport.rank();
        refused(send(&transport, 2, 1 - rank, b"no such lane"));
        refused(send(&transport, 0, 2, b"no such rank"));
        refused(send(&transport, 0, rank, b"to itself"));
        let twice = comm_core::Outgoing { peer: 1 - rank, header: crate::common::header(1, 0), payload: b"x" };
        refused(transport.exchange(0, &[twice, twice], &mut [], soon()));
        refused(transport.exchange(0, &[comm_core::Outgoing { payload: b"xx", ..twice }], &mut [], soon()));
        swap_with_all(&transport, 0, 10);
        transport.close(soon()).unwrap();
    });
}

#[test]
fn a_communicator_works_in_spawn_blocking_and_refuses_a_task_without_ending_the_job() {
    let timeout = Duration::from_secs(60);
    job(2, &QuicOptions::default(), |transport, control| {
        let control: Arc<dyn Control> = control.clone();
        let mesh = Arc::new(Mesh::new(transport, control.clone(), MeshOptions::default()).unwrap());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            for outcome in [mesh.barrier(), mesh.finish(timeout)] {
                assert!(matches!(outcome, Err(Error::InvalidArgument(_))), "{outcome:?}");
            }
            assert!(control.failure().is_none());
            let sum = |mesh: &Mesh<QuicTransport>| mesh.all_reduce_scalar(1u32, ReduceOp::Sum);
            let work = mesh.clone();
            assert_eq!(tokio::task::spawn_blocking(move || sum(&work)).await.unwrap().unwrap(), 2);
            tokio::task::spawn_blocking(move || mesh.finish(timeout)).await.unwrap().unwrap();
        });
    });
}

#[test]
fn inside_a_runtime_it_says_so_instead_of_panicking() {
    let barrier = Barrier::new(2);
    job(2, &QuicOptions::default(), |transport, _control| {
        barrier.wait();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let error = send(&transport, 0, 1 - transport.rank(), b"x").unwrap_err();
            assert!(error.to_string().contains("within an asynchronous task"), "{error}");
            drop(transport);
        });
    });
}

#[test]
fn ranks_with_different_lanes_do_not_start() {
    let errors = connect_with(|rank| QuicOptions { lanes: 1 + rank, ..QuicOptions::default() });
    for error in errors {
        assert!(matches!(&error, Error::Rendezvous(what) if what.contains("lanes")), "{error}");
    }
}

#[test]
fn a_window_below_two_datagrams_does_not_start() {
    let errors = connect_with(|_| QuicOptions { congestion: Congestion::FixedWindow(2000), ..QuicOptions::default() });
    for error in errors {
        assert!(matches!(&error, Error::InvalidArgument(what) if what.contains("two datagrams")), "{error}");
    }
}

#[test]
fn connecting_ends_when_the_job_fails() {
    let mut ranks = group(2, 1).into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    thread::scope(|scope| {
        let connecting = scope
            .spawn(move || QuicTransport::connect(&*first.control, &QuicOptions::default(), soon()).err().unwrap());
        thread::sleep(Duration::from_millis(100));
        let began = Instant::now();
        second.control.poison(&Error::Aborted { by: 1, reason: "no GPU here".into() });
        let error = connecting.join().unwrap();
        assert!(matches!(error, Error::Aborted { by: 1, .. }), "{error}");
        assert!(began.elapsed() < PROMPT);
    });
}

fn connect_with(options: impl Fn(usize) -> QuicOptions + Sync) -> Vec<Error> {
    thread::scope(|scope| {
        let threads: Vec<_> = group(2, 1)
            .into_iter()
            .map(|rank| {
                let options = &options;
                scope.spawn(move || {
                    QuicTransport::connect(&*rank.control, &options(rank.control.rank()), soon()).err().unwrap()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
