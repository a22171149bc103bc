//! Both transports, ZeroMQ with and without its gate and over IPC: content, concurrency, and every way to end.

#![allow(clippy::unwrap_used, reason = "only tests come here")]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::conformance::Barrier;
use comm_core::{
    Buffer, Call, Communicator, CommunicatorExt, Control, Deadline, Error, Incoming, Mesh, MeshOptions, Op, ReduceOp,
    Transport, Waiting,
};
use comm_tcp::TcpOptions;

use crate::common::{Collect, Kind, controls, job, outgoing, payload, receive, send, soon, swap};

/// What comes at once has come by then on a busy machine too; the deadline that would otherwise end a wait is a minute away.
const PROMPT: Duration = Duration::from_secs(10);

#[test]
fn messages_of_many_sizes_arrive_whole_and_in_order() {
    let sizes = [0, 1, 7, 4096, 63 << 10, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, 5 << 20];
    for kind in Kind::ALL {
        job(kind, 2, &TcpOptions::default(), |transport| {
            let (rank, peer) = (transport.rank(), 1 - transport.rank());
            for (index, size) in sizes.into_iter().enumerate() {
                let received = swap(&*transport, 1, peer, &payload(10 * index + rank, size)).unwrap();
                assert!(received == payload(10 * index + peer, size), "{kind:?}, {size} B");
            }
            // One way, so that several messages wait for the receiver at once.
            for (index, size) in sizes.into_iter().enumerate() {
                match rank {
                    0 => send(&*transport, 0, peer, &payload(index, size)).unwrap(),
                    _ => assert!(receive(&*transport, 0, peer, soon()).unwrap() == payload(index, size)),
                }
            }
            transport.close(soon()).unwrap();
        });
    }
}

#[test]
fn more_than_all_buffers_both_ways_does_not_deadlock() {
    for kind in Kind::ALL {
        job(kind, 2, &TcpOptions::default(), |transport| {
            let (rank, peer) = (transport.rank(), 1 - transport.rank());
            let received = swap(&*transport, 0, peer, &payload(rank, 64 << 20)).unwrap();
            assert!(received == payload(peer, 64 << 20), "{kind:?}");
            transport.close(soon()).unwrap();
        });
    }
}

#[test]
fn a_small_window_still_carries_large_messages() {
    let options = TcpOptions { window: 10 << 10, segment: 4 << 10, ..TcpOptions::default() };
    job(Kind::Zmq, 2, &options, |transport| {
        let (rank, peer) = (transport.rank(), 1 - transport.rank());
        for size in [3 << 20, 100, 0, 12 << 10] {
            assert!(swap(&*transport, 0, peer, &payload(rank, size)).unwrap() == payload(peer, size));
        }
        transport.close(soon()).unwrap();
    });
}

#[test]
fn many_small_messages_one_way_are_held_back_not_piled_up() {
    for kind in Kind::ALL {
        job(kind, 2, &TcpOptions::default(), |transport| {
            for index in 0..20_000_usize {
                match transport.rank() {
                    0 => send(&*transport, 0, 1, &index.to_le_bytes()[..index % 9]).unwrap(),
                    _ => assert_eq!(receive(&*transport, 0, 0, soon()).unwrap(), index.to_le_bytes()[..index % 9]),
                }
            }
            transport.close(soon()).unwrap();
        });
    }
}

#[test]
fn ranks_and_lanes_do_not_disturb_each_other() {
    for kind in Kind::ALL {
        job(kind, 3, &TcpOptions::default(), |transport| {
            let transport = &transport;
            thread::scope(|scope| {
                for lane in 0..2 {
                    scope.spawn(move || {
                        for step in 0..20 {
                            let rank = transport.rank();
                            let peers: Vec<usize> = (0..3).filter(|peer| *peer != rank).collect();
                            let seed = |from: usize, to: usize| ((step * 2 + lane) * 3 + from) * 3 + to;
                            let size = |from: usize, to: usize| (seed(from, to) * 7919) % 300_000;
                            let payloads: Vec<Vec<u8>> =
                                peers.iter().map(|to| payload(seed(rank, *to), size(rank, *to))).collect();
                            let sends: Vec<_> =
                                peers.iter().zip(&payloads).map(|(peer, bytes)| outgoing(*peer, bytes)).collect();
                            let mut sinks: Vec<Collect> = peers.iter().map(|_| Collect::default()).collect();
                            // The other way round, so that order plays no part.
                            let mut receives: Vec<Incoming<'_>> = (peers.iter().zip(&mut sinks).rev())
                                .map(|(peer, sink)| Incoming { peer: *peer, sink })
                                .collect();
                            transport.exchange(lane, &sends, &mut receives, soon()).unwrap();
                            for (from, sink) in peers.iter().zip(&sinks) {
                                assert!(sink.bytes == payload(seed(*from, rank), size(*from, rank)), "{kind:?}");
                            }
                        }
                    });
                }
            });
            transport.close(soon()).unwrap();
        });
    }
}

#[test]
fn a_deadline_ends_a_wait_on_time_and_names_who_is_late() {
    for kind in Kind::ALL {
        let done = Barrier::new(3);
        job(kind, 3, &TcpOptions::default(), |transport| {
            if transport.rank() == 0 {
                let start = Instant::now();
                let error = receive(&*transport, 0, 2, Deadline::after(Duration::from_millis(300))).unwrap_err();
                let waited = start.elapsed();
                assert!(waited >= Duration::from_millis(300) && waited < PROMPT, "{waited:?}");
                match error {
                    Error::Timeout { rank: 0, waiting_for, .. } => assert_eq!(waiting_for, [2]),
                    other => panic!("{kind:?}: {other}"),
                }
            }
            done.wait();
        });
    }
}

#[test]
fn every_way_of_waiting_carries_messages_and_ends_by_deadline_and_by_abort() {
    for kind in Kind::ALL {
        for waiting in Waiting::ALL {
            let done = Barrier::new(2);
            job(kind, 2, &TcpOptions { waiting, ..TcpOptions::default() }, |transport| {
                let (rank, peer) = (transport.rank(), 1 - transport.rank());
                assert!(transport.facts().contains(&("waiting".to_string(), waiting.to_string())));
                for size in [0, 8, 8, 8, 5000, 9 << 20] {
                    assert!(
                        swap(&*transport, 0, peer, &payload(rank, size)).unwrap() == payload(peer, size),
                        "{kind:?}"
                    );
                }
                if rank == 0 {
                    let start = Instant::now();
                    let error = receive(&*transport, 0, peer, Deadline::after(Duration::from_millis(100))).unwrap_err();
                    assert!(matches!(error, Error::Timeout { .. }), "{kind:?}, {waiting}: {error}");
                    assert!((Duration::from_millis(100)..PROMPT).contains(&start.elapsed()), "{kind:?}, {waiting}");
                    let reason = Error::Aborted { by: 1, reason: "a test".into() };
                    thread::scope(|scope| {
                        let blocked = scope.spawn(|| receive(&*transport, 1, peer, soon()).unwrap_err());
                        thread::sleep(Duration::from_millis(50));
                        let start = Instant::now();
                        transport.abort(&reason);
                        assert_eq!(blocked.join().unwrap().to_string(), reason.to_string());
                        assert!(start.elapsed() < PROMPT, "{kind:?}, {waiting}");
                    });
                }
                done.wait();
            });
        }
    }
}

#[test]
fn a_send_that_nobody_receives_ends_at_its_deadline() {
    for kind in Kind::ALL {
        let done = Barrier::new(2);
        job(kind, 2, &TcpOptions::default(), |transport| {
            if transport.rank() == 0 {
                let bytes = payload(0, 64 << 20);
                let deadline = Deadline::after(Duration::from_millis(300));
                let error = transport.exchange(0, &[outgoing(1, &bytes)], &mut [], deadline).unwrap_err();
                assert!(
                    matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1]),
                    "{kind:?}: {error}"
                );
            }
            done.wait();
        });
    }
}

#[test]
fn abort_wakes_a_blocked_exchange_and_refuses_later_ones() {
    for kind in Kind::ALL {
        let done = Barrier::new(2);
        job(kind, 2, &TcpOptions::default(), |transport| {
            if transport.rank() == 0 {
                let reason = Error::Aborted { by: 1, reason: "a test".into() };
                thread::scope(|scope| {
                    let blocked = scope.spawn(|| {
                        let error = receive(&*transport, 0, 1, soon()).unwrap_err();
                        (error, Instant::now())
                    });
                    thread::sleep(Duration::from_millis(100));
                    let start = Instant::now();
                    transport.abort(&reason);
                    transport.abort(&Error::invalid("a later reason is not heard"));
                    let (error, end) = blocked.join().unwrap();
                    assert_eq!(error.to_string(), reason.to_string());
                    assert!(end - start < PROMPT, "{kind:?}: {:?}", end - start);
                });
                let start = Instant::now();
                assert_eq!(send(&*transport, 1, 1, b"x").unwrap_err().to_string(), reason.to_string());
                assert_eq!(transport.close(soon()).unwrap_err().to_string(), reason.to_string());
                assert!(start.elapsed() < PROMPT);
            }
            done.wait();
        });
    }
}

#[test]
fn a_peer_that_goes_away_is_named() {
    for kind in Kind::ALL {
        let done = Barrier::new(2);
        job(kind, 3, &TcpOptions::default(), |transport| match transport.rank() {
            2 => {
                thread::sleep(Duration::from_millis(100));
                drop(transport);
            }
            rank => {
                let start = Instant::now();
                let error = receive(&*transport, rank, 2, soon()).unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 2, .. }), "{kind:?}: {error}");
                assert!(start.elapsed() < PROMPT, "{kind:?}: {:?}", start.elapsed());
                done.wait();
            }
        });
    }
}

#[test]
fn a_peer_that_goes_away_in_the_middle_of_a_message_is_named() {
    for kind in Kind::ALL {
        let gone = Barrier::new(2);
        job(kind, 2, &TcpOptions::default(), |transport| match transport.rank() {
            0 => {
                let bytes = payload(0, 64 << 20);
                let deadline = Deadline::after(Duration::from_millis(200));
                transport.exchange(0, &[outgoing(1, &bytes)], &mut [], deadline).unwrap_err();
                drop(transport);
                gone.wait();
            }
            _ => {
                gone.wait();
                let error = receive(&*transport, 0, 0, soon()).map(|bytes| bytes.len()).unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{kind:?}: {error}");
            }
        });
    }
}

#[test]
fn close_delivers_what_was_sent_just_before() {
    for kind in Kind::ALL {
        job(kind, 2, &TcpOptions::default(), |transport| {
            if transport.rank() == 0 {
                for lane in 0..2 {
                    send(&*transport, lane, 1, &payload(lane, 6 << 20))
                        .unwrap_or_else(|error| panic!("{kind:?}: {error}"));
                }
            } else {
                thread::sleep(Duration::from_millis(200));
                for lane in [1, 0] {
                    assert!(receive(&*transport, lane, 0, soon()).unwrap() == payload(lane, 6 << 20), "{kind:?}");
                }
            }
            transport.close(soon()).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            transport.close(soon()).unwrap();
            assert!(send(&*transport, 0, 1 - transport.rank(), b"x").is_err());
        });
    }
}

#[test]
fn closing_again_and_again_loses_nothing() {
    for kind in Kind::ALL {
        for round in 0..20 {
            job(kind, 2, &TcpOptions { lanes: 1, ..TcpOptions::default() }, |transport| {
                let bytes = payload(round, 100_000);
                match transport.rank() {
                    0 => send(&*transport, 0, 1, &bytes).unwrap(),
                    _ => assert!(receive(&*transport, 0, 0, soon()).unwrap() == bytes),
                }
                transport.close(soon()).unwrap_or_else(|error| panic!("{kind:?}, round {round}: {error}"));
            });
        }
    }
}

#[test]
fn a_close_that_the_peer_does_not_answer_ends_at_its_deadline() {
    for kind in Kind::ALL {
        let done = Barrier::new(2);
        job(kind, 2, &TcpOptions::default(), |transport| {
            if transport.rank() == 0 {
                let error = transport.close(Deadline::after(Duration::from_millis(200))).unwrap_err();
                assert!(
                    matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1]),
                    "{kind:?}: {error}"
                );
            }
            done.wait();
        });
    }
}

#[test]
fn a_peer_that_closed_is_lost_to_those_who_still_wait_for_it() {
    for kind in Kind::ALL {
        job(kind, 2, &TcpOptions::default(), |transport| match transport.rank() {
            0 => {
                let _ = transport.close(Deadline::after(Duration::from_millis(500)));
            }
            _ => {
                let error = receive(&*transport, 0, 0, soon()).unwrap_err();
                assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{kind:?}: {error}");
            }
        });
    }
}

#[test]
fn an_error_of_a_sink_ends_the_exchange_and_the_lane() {
    struct Refusing;
    impl comm_core::Sink for Refusing {
        fn begin(&mut self, _: &comm_core::Header) -> comm_core::Result<()> {
            Err(Error::invalid("too long for me"))
        }
        fn piece(&mut self, _: &[u8]) -> comm_core::Result<()> {
            panic!("a piece after a refusal")
        }
    }
    for kind in Kind::ALL {
        let done = Barrier::new(2);
        job(kind, 2, &TcpOptions::default(), |transport| {
            if transport.rank() == 0 {
                send(&*transport, 0, 1, &[1; 1000]).unwrap();
                assert_eq!(receive(&*transport, 1, 1, soon()).unwrap(), b"still here");
            } else {
                let mut receive_into = [Incoming { peer: 0, sink: &mut Refusing }];
                let error = transport.exchange(0, &[], &mut receive_into, soon()).unwrap_err();
                assert_eq!(error.to_string(), "too long for me");
                assert!(send(&*transport, 0, 0, b"x").is_err());
                send(&*transport, 1, 0, b"still here").unwrap();
            }
            done.wait();
        });
    }
}

#[test]
fn calls_that_make_no_sense_are_refused() {
    for kind in Kind::ALL {
        job(kind, 2, &TcpOptions::default(), |transport| {
            let (rank, peer) = (transport.rank(), 1 - transport.rank());
            let long = comm_core::Outgoing { payload: b"xy", ..outgoing(peer, b"x") };
            for (lane, sends) in [
                (2, vec![outgoing(peer, b"x")]),
                (0, vec![outgoing(rank, b"x")]),
                (0, vec![outgoing(2, b"x")]),
                (0, vec![outgoing(peer, b"x"), outgoing(peer, b"y")]),
                (0, vec![long]),
            ] {
                let error = transport.exchange(lane, &sends, &mut [], soon()).unwrap_err();
                assert!(matches!(error, Error::InvalidArgument(_)), "{kind:?}: {error}");
            }
            assert!(!transport.facts().is_empty());
            // None of them did any harm.
            assert_eq!(swap(&*transport, 0, peer, &[7; 10]).unwrap(), [7; 10]);
            transport.close(soon()).unwrap();
        });
    }
}

#[test]
fn blocking_inside_an_asynchronous_task_is_an_error_and_dropping_there_is_fine() {
    for kind in Kind::ALL {
        let connected = Barrier::new(2);
        job(kind, 2, &TcpOptions::default(), |transport| {
            // A rank that goes away at once may leave the other one dialling.
            connected.wait();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(async move {
                let sent = send(&*transport, 0, 1 - transport.rank(), b"x");
                match (kind, sent) {
                    // It has no runtime that would be in the way.
                    (Kind::Raw, Ok(())) | (_, Err(Error::InvalidArgument(_))) => {}
                    (_, other) => panic!("{kind:?}: {other:?}"),
                }
                drop(transport);
            });
        });
    }
}

#[test]
fn a_communicator_works_in_spawn_blocking_and_refuses_a_task_without_ending_the_job() {
    const FINISH_TIMEOUT: Duration = Duration::from_secs(60);
    for kind in Kind::ALL {
        let controls = controls(2);
        thread::scope(|scope| {
            for control in &controls {
                scope.spawn(move || {
                    let transport = kind.connect(&**control, &TcpOptions::default(), soon()).unwrap();
                    let mesh = Mesh::new(transport, control.clone(), MeshOptions::default()).unwrap();
                    let mesh = Arc::new(mesh);
                    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                    runtime.block_on(async {
                        if kind != Kind::Raw {
                            for outcome in [mesh.barrier(), mesh.finish(FINISH_TIMEOUT), mesh.split(None, 0).map(drop)]
                            {
                                assert!(matches!(outcome, Err(Error::InvalidArgument(_))), "{kind:?}: {outcome:?}");
                            }
                            assert!(control.failure().is_none());
                        }
                        let work = mesh.clone();
                        let sum = move || work.all_reduce_scalar(1u32, ReduceOp::Sum).unwrap();
                        assert_eq!(tokio::task::spawn_blocking(sum).await.unwrap(), 2, "{kind:?}");
                        // What runs on the lane's thread is no matter of the caller's.
                        let op = Op::AllReduce(ReduceOp::Sum);
                        let mut handle = mesh.start(Call::background(op, Buffer::from_vec(vec![1u32]), 0));
                        while !handle.test() {
                            tokio::task::yield_now().await;
                        }
                        assert_eq!(handle.wait().unwrap().buffer.into_vec::<u32>().unwrap(), [2]);
                        tokio::task::spawn_blocking(move || mesh.finish(FINISH_TIMEOUT)).await.unwrap().unwrap();
                    });
                });
            }
        });
    }
}

#[test]
fn connecting_in_a_task_is_refused() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for kind in Kind::ALL {
        let alone = controls(1);
        let outcome = runtime.block_on(async { kind.connect(&*alone[0], &TcpOptions::default(), soon()).err() });
        assert!(matches!(outcome, Some(Error::InvalidArgument(_))), "{kind:?}: {outcome:?}");
        assert!(alone[0].failure().is_none());
    }
}

#[test]
fn ranks_with_different_settings_are_told_apart() {
    for kind in [Kind::Zmq, Kind::Raw] {
        let controls = controls(2);
        thread::scope(|scope| {
            for (rank, control) in controls.iter().enumerate() {
                scope.spawn(move || {
                    let options = TcpOptions { lanes: 1 + rank, ..TcpOptions::default() };
                    match kind.connect(&**control, &options, soon()) {
                        Err(Error::Rendezvous(what)) => assert!(what.contains("lanes=2"), "{what}"),
                        Err(other) => panic!("{kind:?}: {other}"),
                        Ok(_) => panic!("{kind:?}: connected"),
                    }
                });
            }
        });
    }
}

#[test]
fn congestion_control_is_applied_and_reported() {
    for kind in Kind::ALL {
        job(kind, 2, &TcpOptions { congestion: Some("reno".into()), ..TcpOptions::default() }, |transport| {
            let facts = transport.facts();
            // With two ranks, rank 1 listens; the dialled side of ZeroMQ is out of reach.
            if kind == Kind::Raw || (kind == Kind::Zmq && transport.rank() == 1) {
                let found = facts.iter().any(|(name, value)| name.starts_with("congestion") && value == "reno");
                assert!(found, "{kind:?}: {facts:?}");
            }
            transport.close(soon()).unwrap();
        });
    }
}

#[test]
fn the_facts_say_which_gate_is_in_use() {
    let gates = [(Kind::Zmq, "packet filter"), (Kind::ZmqBehindRelay, "relay"), (Kind::ZmqWithoutGate, "off")];
    for (kind, gate) in gates {
        for bind in ["127.0.0.1", "::1"] {
            if std::net::TcpListener::bind((bind, 0)).is_err() {
                println!("skipped: no {bind}");
                continue;
            }
            job(kind, 2, &TcpOptions { bind: Some(bind.parse().unwrap()), ..TcpOptions::default() }, |transport| {
                let facts = transport.facts();
                assert!(facts.contains(&("gate".into(), gate.into())), "{kind:?} on {bind}: {facts:?}");
                transport.close(soon()).unwrap();
            });
        }
    }
}

#[test]
fn a_job_of_one_rank_needs_no_network() {
    for kind in Kind::ALL {
        job(kind, 1, &TcpOptions::default(), |transport| {
            transport.exchange(0, &[], &mut [], soon()).unwrap();
            transport.close(soon()).unwrap();
        });
    }
}
