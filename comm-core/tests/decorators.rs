//! What the decorators count and break.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::conformance::{CaseOutcome, Connector, RunOptions, cases, run_threads};
use comm_core::local::{self, LocalTransport};
use comm_core::{
    Algorithm, Buffer, Call, Communicator, CommunicatorExt, CountingTransport, DType, Error, Fault, FaultKind, Faulty,
    HEADER_LEN, Mesh, MeshOptions, Mode, Op, ReduceOp, Transport, bf16, shard_range, table,
};
use comm_core::{Counters, Traffic};

const SUM: ReduceOp = ReduceOp::Sum;
const TIMEOUT: Duration = Duration::from_secs(20);

/// Runs `body` on every rank of a group, in a thread each, with what `wrap` makes of its transport.
fn on_ranks<T: Transport, R: Send>(
    ranks: usize,
    wrap: impl Fn(LocalTransport) -> T,
    body: impl Fn(&Mesh<T>) -> R + Sync,
) -> Vec<R> {
    on_ranks_with(ranks, &MeshOptions::default(), wrap, body)
}

fn on_ranks_with<T: Transport, R: Send>(
    ranks: usize,
    options: &MeshOptions,
    wrap: impl Fn(LocalTransport) -> T,
    body: impl Fn(&Mesh<T>) -> R + Sync,
) -> Vec<R> {
    let group: Vec<_> = local::group(ranks, 2)
        .into_iter()
        .map(|rank| Mesh::new(wrap(rank.transport), rank.control, options.clone()).unwrap())
        .collect();
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> = group.iter().map(|mesh| scope.spawn(move || body(mesh))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What each rank's counters say of `body`.
fn traffic(ranks: usize, body: impl Fn(&Mesh<CountingTransport<LocalTransport>>) + Sync) -> Vec<Traffic> {
    traffic_with(ranks, &MeshOptions::default(), body)
}

fn traffic_with(
    ranks: usize,
    options: &MeshOptions,
    body: impl Fn(&Mesh<CountingTransport<LocalTransport>>) + Sync,
) -> Vec<Traffic> {
    let counters: std::sync::Mutex<Vec<Arc<Counters>>> = std::sync::Mutex::default();
    on_ranks_with(
        ranks,
        options,
        |transport| {
            let (counted, its) = CountingTransport::new(transport);
            counters.lock().unwrap().push(its);
            counted
        },
        body,
    );
    counters.into_inner().unwrap().iter().map(|counters| counters.snapshot()).collect()
}

#[test]
fn a_ring_all_reduce_moves_the_textbook_bytes() {
    let (ranks, count) = (3, 10_007);
    let traffic = traffic(ranks, |mesh| run(mesh, Op::AllReduce(SUM), DType::F32, count, Some(Algorithm::Ring)));
    let whole = 4 * count as u64;
    let shard = |index: usize| 4 * shard_range(count, ranks, index % ranks).len() as u64;
    for (rank, traffic) in traffic.iter().enumerate() {
        assert_eq!(traffic.payload_sent(None), 2 * whole - shard(rank) - shard(rank + 1), "rank {rank}");
    }
    let sent: u64 = traffic.iter().map(|traffic| traffic.payload_sent(None)).sum();
    let received: u64 = traffic.iter().map(|traffic| traffic.payload_received(None)).sum();
    assert_eq!(sent, 2 * whole * (ranks as u64 - 1));
    assert_eq!(received, sent);
}

#[test]
fn every_operation_sends_what_its_formula_says() {
    for ranks in [1, 2, 3, 4, 5, 7] {
        for count in [0, 1, 3, 1000, 100_003] {
            for root in [0, ranks - 1] {
                let operations = [
                    Op::Barrier,
                    Op::AllReduce(SUM),
                    Op::Broadcast { root },
                    Op::Reduce { root, op: SUM },
                    Op::Scatter { root, total: count },
                    Op::Gather { root, total: count },
                    Op::AllGather,
                    Op::ReduceScatter(SUM),
                    Op::AllToAll,
                ];
                for op in operations {
                    for dtype in [DType::F32, DType::Bf16] {
                        let count = match op {
                            Op::AllToAll => count / ranks * ranks,
                            Op::Barrier => 0,
                            _ => count,
                        };
                        let chosen = table::choose(op.kind(), dtype, count, ranks);
                        for algorithm in Algorithm::ALL {
                            if !table::supports(algorithm, op.kind(), dtype, ranks) {
                                continue;
                            }
                            let asked = (algorithm != chosen).then_some(algorithm);
                            let traffic = traffic(ranks, |mesh| run(mesh, op, dtype, count, asked));
                            for (rank, traffic) in traffic.iter().enumerate() {
                                let expected = table::payload_sent_by(algorithm, &op, dtype, count, ranks, rank);
                                let what =
                                    format!("{op:?} of {count} {dtype} by {algorithm} on rank {rank} of {ranks}");
                                assert_eq!(traffic.payload_sent(None), expected, "{what}");
                                let expected = table::messages_sent_by(algorithm, &op, dtype, count, ranks, rank);
                                assert_eq!(traffic.messages_sent(None), expected, "messages of {what}");
                            }
                            check_both_ends(&traffic);
                        }
                    }
                }
            }
        }
    }
}

/// Shards of several pieces, some of which have one more than others.
#[test]
fn a_ring_sends_a_message_for_each_piece() {
    for piece in [1, 4, 10, 64, 4096] {
        let table = table::Table { name: "short pieces".into(), piece, ..table::Table::fixed() };
        let options = MeshOptions::default().with_table(table.clone());
        for ranks in [2, 3, 5] {
            for count in [0, 1, 3, 33, 1000] {
                for op in [
                    Op::AllReduce(SUM),
                    Op::ReduceScatter(SUM),
                    Op::AllGather,
                    Op::Reduce { root: 1, op: SUM },
                    Op::Broadcast { root: 1 },
                ] {
                    let broadcasts = matches!(op, Op::Broadcast { .. });
                    let algorithm = if broadcasts { Algorithm::ScatterAllGather } else { Algorithm::Ring };
                    let traffic =
                        traffic_with(ranks, &options, |mesh| run(mesh, op, DType::F32, count, Some(algorithm)));
                    for (rank, traffic) in traffic.iter().enumerate() {
                        let expected = table.messages_sent_by(algorithm, &op, DType::F32, count, ranks, rank);
                        let what = format!("{op:?} of {count} in pieces of {piece} B on rank {rank} of {ranks}");
                        assert_eq!(traffic.messages_sent(None), expected, "{what}");
                    }
                    check_both_ends(&traffic);
                }
            }
        }
    }
}

#[test]
fn a_message_from_rank_to_rank_is_one() {
    let traffic = traffic(3, |mesh| match mesh.rank() {
        0 => mesh.send(&[1f32; 10_007], 2).unwrap(),
        2 => drop(mesh.recv::<f32>(10_007, 0).unwrap()),
        _ => {}
    });
    for (rank, traffic) in traffic.iter().enumerate() {
        let op = if rank == 2 { Op::Recv { from: 0 } } else { Op::Send { to: 2 } };
        let expected = if rank == 1 { 0 } else { table::messages_sent(&op, DType::F32, 10_007, 3, rank) };
        assert_eq!((traffic.messages_sent(None), expected), (u64::from(rank == 0), u64::from(rank == 0)));
    }
}

fn run(
    mesh: &Mesh<CountingTransport<LocalTransport>>,
    op: Op,
    dtype: DType,
    count: usize,
    algorithm: Option<Algorithm>,
) {
    let length = match op {
        Op::Scatter { root, .. } | Op::Gather { root, .. } if root != mesh.rank() => {
            shard_range(count, mesh.world_size(), mesh.rank()).len()
        }
        _ => count,
    };
    let buffer = match dtype {
        DType::Bf16 => Buffer::from_vec(vec![bf16::ONE; length]),
        _ => Buffer::from_vec(vec![1f32; length]),
    };
    mesh.start(Call { algorithm, ..Call::blocking(op, buffer) }).wait().unwrap();
}

/// What one rank says it sent to another is what the other says it received.
fn check_both_ends(traffic: &[Traffic]) {
    for (rank, theirs) in traffic.iter().enumerate() {
        for ((communicator, peer), flow) in &theirs.flows {
            let other = traffic[*peer].flows.get(&(*communicator, rank)).copied().unwrap_or_default();
            assert_eq!(flow.sent, other.received, "from rank {rank} to rank {peer}");
        }
    }
}

#[test]
fn communicators_and_spans_are_counted_apart() {
    let outcome = std::sync::Mutex::new(Vec::new());
    let counters: std::sync::Mutex<Vec<Arc<Counters>>> = std::sync::Mutex::default();
    let wrap = |transport| {
        let (counted, its) = CountingTransport::new(transport);
        counters.lock().unwrap().push(its);
        counted
    };
    on_ranks(4, wrap, |mesh| {
        let counters = counters.lock().unwrap()[mesh.rank()].clone();
        let child = mesh.split(Some(mesh.rank() as u64 % 2), 0).unwrap().unwrap();
        let before = counters.snapshot();
        child.all_reduce(&mut [1f32; 10_007], SUM).unwrap();
        let between = counters.snapshot();
        mesh.send_or_receive(mesh.rank());
        let after = counters.snapshot();
        outcome.lock().unwrap().push((mesh.rank(), mesh.id(), child.id(), before, between, after));
    });
    for (rank, parent, child, before, between, after) in outcome.into_inner().unwrap() {
        let span = between.since(&before);
        assert!(span.flows.keys().all(|(communicator, peer)| *communicator == child && *peer == rank ^ 2));
        // With two ranks each sends everything once.
        assert_eq!(span.payload_sent(Some(child)), 4 * 10_007);
        assert_eq!(span.payload_sent(Some(parent)), 0);
        assert!(span.exchange_time(Some(child)) > Duration::ZERO);
        assert_eq!(span.exchange_time(Some(parent)), Duration::ZERO);

        let span = after.since(&between);
        assert_eq!(span.messages_sent(None), u64::from(rank == 0));
        assert_eq!(span.messages_received(None), u64::from(rank == 1));
        if rank == 0 {
            let flow = span.flows[&(parent, 1)];
            assert_eq!((flow.sent.payload_bytes, flow.sent.header_bytes()), (12, HEADER_LEN as u64));
        }
        assert_eq!(after.since(&after), Traffic::default());
    }
}

trait SendOrReceive {
    fn send_or_receive(&self, rank: usize);
}

impl<C: Communicator> SendOrReceive for C {
    fn send_or_receive(&self, rank: usize) {
        match rank {
            0 => self.send(&[1i32, 2, 3], 1).unwrap(),
            1 => assert_eq!(self.recv::<i32>(3, 0).unwrap(), [1, 2, 3]),
            _ => {}
        }
    }
}

/// Each rank's result of an all-reduce during which rank 1 suffers `fault`, and how long it took.
fn suffer(ranks: usize, fault: Fault, timeout: Duration, mode: Mode) -> Vec<(Result<Vec<f32>, Error>, Duration)> {
    let wrap = |transport: LocalTransport| {
        let fault = (transport.rank() == 1).then_some(fault);
        Faulty::new(transport, fault)
    };
    on_ranks(ranks, wrap, |mesh| {
        let began = Instant::now();
        let buffer = Buffer::from_vec(vec![1f32; 10_007]);
        let call = Call::blocking(Op::AllReduce(SUM), buffer).with_algorithm(Algorithm::Ring);
        let call = Call { mode, ..call.on_lane(1).with_timeout(timeout) };
        let result = mesh.start(call).wait().map_err(Error::from);
        let took = began.elapsed();
        (result.map(|completed| completed.buffer.into_vec().unwrap()), took)
    })
}

/// On lane 1, where nothing but the operation under test sends.
fn at(at_message: u64, kind: FaultKind) -> Fault {
    Fault { at_message, peer: None, lane: Some(1), kind }
}

#[test]
fn a_cut_is_a_lost_peer_on_every_rank_at_once() {
    for (ranks, message) in [(2, 0), (3, 0), (3, 2), (4, 1)] {
        for mode in [Mode::Blocking, Mode::Background] {
            for (rank, (result, took)) in
                suffer(ranks, at(message, FaultKind::Cut), TIMEOUT, mode).into_iter().enumerate()
            {
                let error = result.expect_err("the cut went unnoticed");
                let Error::PeerLost { rank: lost, operation, .. } = &error else {
                    panic!("rank {rank} of {ranks}: {error}");
                };
                assert_eq!(*lost, 2 % ranks, "rank 1 sends to its neighbour: {error}");
                assert!(operation.contains("all-reduce"), "{error}");
                assert!(took < TIMEOUT / 4, "rank {rank} took {took:?}");
            }
        }
    }
}

#[test]
fn a_stall_is_a_timeout_on_every_rank_on_time() {
    let timeout = Duration::from_millis(200);
    for ranks in [2, 3] {
        for (rank, (result, took)) in
            suffer(ranks, at(0, FaultKind::Stall), timeout, Mode::Blocking).into_iter().enumerate()
        {
            let error = result.expect_err("the stall went unnoticed");
            assert!(matches!(error, Error::Timeout { .. }), "rank {rank} of {ranks}: {error}");
            assert!(took >= timeout / 2 && took < timeout + Duration::from_secs(3), "rank {rank} took {took:?}");
        }
    }
}

#[test]
fn an_abort_ends_a_stall() {
    let wrap = |transport: LocalTransport| {
        let fault = (transport.rank() == 1).then_some(at(0, FaultKind::Stall));
        Faulty::new(transport, fault)
    };
    on_ranks(2, wrap, |mesh| {
        let began = Instant::now();
        let buffer = Buffer::from_vec(vec![1f32; 10]);
        let call = Call { timeout: Some(TIMEOUT), ..Call::background(Op::AllReduce(SUM), buffer, 1) };
        let handle = mesh.start(call);
        if mesh.rank() == 0 {
            thread::sleep(Duration::from_millis(50));
            mesh.abort("waited enough");
        }
        let error = handle.wait().expect_err("the stall ended well").into_error();
        assert!(matches!(error, Error::Aborted { by: 0, .. }), "{error}");
        assert!(began.elapsed() < TIMEOUT / 4);
    });
}

#[test]
fn a_corrupted_byte_changes_exactly_one_bit_of_one_message() {
    // Byte 22 holds the mantissa's highest bits and the exponent's lowest of element 5 of the message.
    let fault = at(0, FaultKind::Corrupt { byte: 22 });
    for ranks in [2, 3] {
        let results = suffer(ranks, fault, TIMEOUT, Mode::Blocking);
        let right = ranks as f32;
        let wrong: Vec<Vec<(usize, f32)>> = results
            .into_iter()
            .map(|(result, _)| {
                result.unwrap().into_iter().enumerate().filter(|(_, value)| *value != right).collect::<Vec<_>>()
            })
            .collect();
        // The contribution was wrong before it was summed, so all ranks agree on the wrong sum.
        assert_eq!(wrong[0].len(), 1, "{wrong:?}");
        assert!(wrong.iter().all(|elements| *elements == wrong[0]), "{wrong:?}");
    }
}

#[test]
fn a_delay_is_only_late() {
    let delay = Duration::from_millis(100);
    for (result, took) in suffer(3, at(1, FaultKind::Delay(delay)), TIMEOUT, Mode::Blocking) {
        assert_eq!(result.unwrap(), vec![3f32; 10_007]);
        assert!(took >= delay / 2 && took < delay + Duration::from_secs(3), "{took:?}");
    }
    let timeout = Duration::from_millis(150);
    for (result, took) in suffer(3, at(1, FaultKind::Delay(TIMEOUT)), timeout, Mode::Blocking) {
        assert!(matches!(result, Err(Error::Timeout { .. })));
        assert!(took < timeout + Duration::from_secs(3), "{took:?}");
    }
}

#[test]
fn a_fault_waits_for_its_message() {
    // Rank 1 never sends to itself, and lane 1 carries fewer messages.
    for fault in [
        Fault { at_message: 0, peer: Some(1), lane: None, kind: FaultKind::Cut },
        Fault { at_message: 1000, peer: None, lane: Some(1), kind: FaultKind::Cut },
        Fault { at_message: 0, peer: None, lane: Some(7), kind: FaultKind::Stall },
    ] {
        for (result, _) in suffer(3, fault, TIMEOUT, Mode::Background) {
            assert_eq!(result.unwrap(), vec![3f32; 10_007]);
        }
    }
}

/// The suite sees one flipped bit in some thousands of messages, names the place, and goes on.
#[test]
fn the_conformance_suite_catches_a_flipped_bit() {
    let has_struck = AtomicBool::new(false);
    let group = |ranks: usize| -> comm_core::Result<Vec<Connector>> {
        let is_first = !has_struck.swap(true, Ordering::Relaxed);
        let fault = Fault { at_message: 100, peer: None, lane: Some(0), kind: FaultKind::Corrupt { byte: 2 } };
        let connector = |rank: local::LocalRank| -> Connector {
            let fault = (is_first && rank.transport.rank() == 1).then_some(fault);
            Box::new(move || {
                let transport = Faulty::new(rank.transport, fault);
                Ok(Arc::new(Mesh::new(transport, rank.control, MeshOptions::default())?) as _)
            })
        };
        Ok(local::group(ranks, 1).into_iter().map(connector).collect())
    };
    let cases: Vec<_> = cases().into_iter().filter(|case| !case.fresh && case.name.contains("/f32")).collect();
    let outcomes = run_threads(3, &group, &cases, RunOptions::default());
    let failures: Vec<&str> = outcomes
        .iter()
        .filter_map(|outcome| match outcome {
            CaseOutcome::Failed(why) => Some(why.as_str()),
            _ => None,
        })
        .collect();
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert!(failures[0].contains("element") && failures[0].contains("expected"), "{failures:?}");
}
