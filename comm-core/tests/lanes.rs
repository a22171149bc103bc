//! Operations that share a lane, and the end of the communicators that they belong to.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::Subgroup;
use comm_core::engine::{Dequeued, Lane};
use comm_core::local::{self, LocalControl, LocalTransport};
use comm_core::{Buffer, Call, Communicator, Control, Deadline, Error, Mesh, MeshOptions, Op, ReduceOp};

/// The ranks of a local job; a control plane that lives on is no death.
fn ranks(ranks: usize, lanes: usize) -> Vec<(Mesh<LocalTransport>, Arc<LocalControl>)> {
    let mesh = |rank: local::LocalRank| {
        let mesh = Mesh::new(rank.transport, rank.control.clone(), MeshOptions::default()).unwrap();
        (mesh, rank.control)
    };
    local::group(ranks, lanes).into_iter().map(mesh).collect()
}

fn receive(from: usize, timeout: Duration) -> Call {
    Call::background(Op::Recv { from }, Buffer::from_vec(vec![0u8]), 0).with_timeout(timeout)
}

#[test]
fn a_queued_operation_that_runs_out_of_time_says_behind_what_it_waited() {
    let mut both = ranks(2, 1);
    let (mesh, control) = &mut both[0];
    let began = Instant::now();
    let long = mesh.start(receive(1, Duration::from_secs(60)).labelled("the long one"));
    let others: Vec<_> = (0..3).map(|_| mesh.start(receive(1, Duration::from_secs(50)))).collect();
    let short = mesh.start(receive(1, Duration::from_millis(200)).labelled("the short one"));
    let error = short.wait().unwrap_err().error;
    assert!((200..20_000).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
    let text = error.to_string();
    for part in ["rank 0", "the short one", "its turn on lane 0", "behind", "the long one"] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    // With it the job has failed, and whatever else was under way.
    for handle in others.into_iter().chain([long]) {
        assert_eq!(handle.wait().unwrap_err().error.to_string(), text);
    }
    assert_eq!(control.failure().unwrap().to_string(), text);
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn of_two_with_the_same_deadline_the_one_that_runs_says_why() {
    let mut both = ranks(2, 1);
    let (mesh, _) = &mut both[0];
    let first = mesh.start(receive(1, Duration::from_millis(200)).labelled("the first"));
    let second = mesh.start(receive(1, Duration::from_millis(200)).labelled("the second"));
    let error = second.wait().unwrap_err().error;
    assert!(error.to_string().contains("the first"), "{error}");
    assert!(matches!(error, Error::Timeout { waiting_for, .. } if waiting_for == [1]));
    drop(first);
}

#[test]
fn operations_that_get_their_turn_in_time_run() {
    // More operations than fit into the deadline of the earliest that waits, had it to wait for all of them.
    let meshes = ranks(2, 1);
    thread::scope(|scope| {
        for (mesh, _) in &meshes {
            scope.spawn(move || {
                for round in 0..50u64 {
                    let call = |index: u64| {
                        let timeout = Duration::from_secs(20) - Duration::from_millis(index);
                        let op = Op::AllReduce(ReduceOp::Sum);
                        Call::background(op, Buffer::from_vec(vec![round + index; 100]), 0).with_timeout(timeout)
                    };
                    let handles: Vec<_> = (0..10).map(|index| mesh.start(call(index))).collect();
                    for (index, handle) in handles.into_iter().enumerate() {
                        let sums = handle.wait().unwrap().buffer.into_vec::<u64>().unwrap();
                        assert_eq!(sums, vec![2 * (round + index as u64); 100]);
                    }
                }
                mesh.finish(Duration::from_secs(20)).unwrap();
            });
        }
    });
}

/// What somebody has waited for does not count as under way: a communicator that is dropped then has ended in order.
#[test]
fn a_communicator_may_be_dropped_as_soon_as_its_operations_have_been_waited_for() {
    for round in 0..300 {
        let meshes = ranks(2, 1);
        let threads: Vec<_> = meshes
            .into_iter()
            .map(|(mesh, control)| {
                thread::spawn(move || {
                    let call = Call::background(Op::AllReduce(ReduceOp::Sum), Buffer::from_vec(vec![1u8; 10]), 0);
                    let handle = mesh.start(call);
                    handle.wait().unwrap();
                    drop(mesh);
                    // The end of a control plane would be one of the rank.
                    control
                })
            })
            .collect();
        let controls: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        for control in &controls {
            let failure = control.failure();
            assert!(failure.is_none(), "round {round}: {}", failure.unwrap());
        }
    }
}

#[test]
fn one_that_is_dropped_with_an_operation_under_way_ends_the_job() {
    let mut both = ranks(2, 1);
    let (mesh, control) = both.remove(0);
    let handle = mesh.start(receive(1, Duration::from_secs(60)));
    drop(mesh);
    assert!(matches!(handle.wait().unwrap_err().error, Error::Aborted { by: 0, .. }));
    assert!(matches!(control.failure(), Some(Error::Aborted { by: 0, .. })));
}

#[test]
fn a_lane_is_free_before_the_end_is_told() {
    let lane = Arc::new(Lane::new("test".into(), ()));
    let (told, ended) = std::sync::mpsc::channel();
    let soon = Deadline::after(Duration::from_secs(20));
    let free = lane.clone();
    let job = move |due: Dequeued<'_>| {
        let Dequeued::Granted(guard) = due else { panic!("{due:?}") };
        let before = free.is_idle();
        drop(guard);
        told.send((before, free.is_idle())).unwrap();
    };
    lane.enqueue(soon, Box::new(job));
    assert_eq!(ended.recv_timeout(Duration::from_secs(20)), Ok((false, true)));
    lane.stop();
}

/// However late the deadlines are looked at: both have passed by then.
#[test]
fn who_waits_gets_its_turn_while_the_one_that_runs_is_as_late() {
    let lane: Lane = Lane::new("test".into(), ());
    let (told, came) = std::sync::mpsc::channel();
    let (begun, runs) = std::sync::mpsc::channel();
    let late = Deadline::after(Duration::ZERO);
    let first = move |due: Dequeued<'_>| {
        begun.send(()).unwrap();
        // Long enough for the thread that watches the deadlines to look.
        thread::sleep(Duration::from_millis(100));
        drop(due);
    };
    lane.enqueue(late, Box::new(first));
    runs.recv_timeout(Duration::from_secs(20)).unwrap();
    let second = move |due: Dequeued<'_>| told.send(matches!(due, Dequeued::Granted(_))).unwrap();
    lane.enqueue(Deadline::after(Duration::ZERO), Box::new(second));
    assert_eq!(came.recv_timeout(Duration::from_secs(20)), Ok(true));
    lane.stop();
}

#[test]
fn a_job_that_panics_frees_its_lane() {
    let lane: Lane = Lane::new("test".into(), ());
    let soon = Deadline::after(Duration::from_secs(20));
    lane.enqueue(soon, Box::new(|_| std::panic::resume_unwind(Box::new("on purpose"))));
    assert!(lane.wait_idle(soon));
    assert!(lane.try_enter(soon).is_some());
    lane.stop();
}

#[test]
fn a_transport_and_a_control_plane_of_different_ranks_are_refused() {
    let mut ranks = local::group(4, 1);
    let (third, first) = (ranks.remove(2), ranks.remove(0));
    let refused = Mesh::new(third.transport, first.control, MeshOptions::default()).err().unwrap();
    for part in ["local", "rank 2 of 4", "rank 0 of 4"] {
        assert!(matches!(refused, Error::InvalidArgument(_)) && refused.to_string().contains(part), "{refused}");
    }
    // A part of the job with the transport of the whole.
    let group = Subgroup::of_colors(third.control, "halves", &[0, 0, 1, 1]).unwrap();
    let spare = local::group(4, 1).remove(2);
    let refused = Mesh::new(spare.transport, group, MeshOptions::default()).err().unwrap();
    assert!(refused.to_string().contains("rank 2 of 4") && refused.to_string().contains("rank 0 of 2"), "{refused}");
}

#[test]
fn no_two_splits_at_once_get_one_id() {
    // Of a communicator of one rank, whose order nobody else has to follow.
    let alone = ranks(1, 1).remove(0).0;
    let ids: Vec<u64> = thread::scope(|scope| {
        let split = || -> Vec<u64> { (0..200).map(|_| alone.split(Some(0), 0).unwrap().unwrap().id()).collect() };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(split)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let different: std::collections::HashSet<u64> = ids.iter().copied().collect();
    assert_eq!(different.len(), ids.len());
}

#[test]
fn the_first_communicator_ends_after_the_operations_of_its_children() {
    // It closes the connections on which they run.
    let meshes = ranks(2, 2);
    thread::scope(|scope| {
        for (mesh, _) in &meshes {
            scope.spawn(move || {
                let child = mesh.split(Some(0), 0).unwrap().unwrap();
                let peer = 1 - mesh.rank();
                let op = if mesh.rank() == 0 { Op::Recv { from: peer } } else { Op::Send { to: peer } };
                let mut handle = child.start(Call::background(op, Buffer::from_vec(vec![3u8; 10]), 1));
                mesh.finish(Duration::from_secs(20)).unwrap();
                assert!(handle.test());
                assert_eq!(handle.wait().unwrap().buffer.into_vec::<u8>().unwrap(), [3; 10]);
            });
        }
    });
}
