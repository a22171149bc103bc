//! Ranks that disagree, are late, or contribute what is no number: who is told what.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::{StallReport, TcpControl, TcpOptions};
use comm_core::job::{Address, Job, Secret};
use comm_core::local::{self, LocalTransport};
use comm_core::{
    Buffer, Call, Communicator, CommunicatorExt, Control, Deadline, Error, Mesh, MeshOptions, Op, ReduceOp, f16,
};

type LocalMesh = Mesh<LocalTransport>;

/// Runs `body` on every rank of a local group with these options.
fn on_ranks<R: Send>(ranks: usize, options: &MeshOptions, body: impl Fn(&LocalMesh) -> R + Sync) -> Vec<R> {
    let group: Vec<LocalMesh> = local::group(ranks, 2)
        .into_iter()
        .map(|rank| Mesh::new(rank.transport, rank.control, options.clone()).unwrap())
        .collect();
    let body = &body;
    thread::scope(|scope| {
        let threads: Vec<_> = group.iter().map(|mesh| scope.spawn(move || body(mesh))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All ranks fail with one text, which has all `parts`.
fn all_say(errors: &[Error], parts: &[&str]) {
    let texts: Vec<String> = errors.iter().map(Error::to_string).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    for part in parts {
        assert!(texts[0].contains(part), "{part:?} in {}", texts[0]);
    }
}

#[test]
fn checked_mode_notices_two_ranks_that_both_receive() {
    let began = Instant::now();
    let errors = on_ranks(2, &MeshOptions::default().with_checked(true), |mesh| {
        mesh.recv::<f32>(5, 1 - mesh.rank()).unwrap_err()
    });
    assert!(matches!(errors[0], Error::Mismatch { .. }), "{}", errors[0]);
    all_say(&errors, &["receive of 5 f32"]);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn checked_mode_lets_no_rank_begin_what_another_does_not_do() {
    // Without it the root of a broadcast is gone before anyone sees what it did.
    let errors = on_ranks(3, &MeshOptions::default().with_checked(true), |mesh| match mesh.rank() {
        0 => mesh.broadcast(&mut [1f32; 10], 0).unwrap_err(),
        _ => mesh.broadcast(&mut [1f32; 10], 1).unwrap_err(),
    });
    all_say(&errors, &["root 0", "root 1"]);
}

#[test]
fn checked_mode_notices_what_the_algorithm_would_not() {
    // With three ranks a broadcast gives ranks 1 and 2 nothing to say to each other.
    let errors = on_ranks(3, &MeshOptions::default().with_checked(true), |mesh| {
        let count = if mesh.rank() == 2 { 11 } else { 10 };
        mesh.broadcast(&mut vec![1f32; count], 0).unwrap_err()
    });
    all_say(&errors, &["of 10 f32", "of 11 f32"]);
}

#[test]
fn a_number_that_is_none_is_named_with_rank_label_and_index() {
    let options = MeshOptions::default().with_check_finite(true);
    let errors = on_ranks(3, &options, |mesh| {
        let mut values = vec![f16::ONE; 1000];
        if mesh.rank() == 1 {
            values[700] = f16::NEG_INFINITY;
            values[900] = f16::NAN;
        }
        let call = Call::background(Op::AllReduce(ReduceOp::Sum), Buffer::from_vec(values), 1);
        mesh.start(call.labelled("bucket 3")).wait().unwrap_err().error
    });
    all_say(&errors, &["rank 1 contributed -inf", "all-reduce sum of 1000 f16", "[bucket 3]", "index 700 and 1 more"]);
    assert!(errors.iter().all(|error| error.culprit() == Some(1)));
}

#[test]
fn room_for_what_an_uneven_all_to_all_receives_may_hold_anything() {
    on_ranks(2, &MeshOptions::default().with_check_finite(true), |mesh| {
        let (send, receive) = if mesh.rank() == 0 { ([1, 1], [1, 3]) } else { ([3, 1], [1, 1]) };
        let mut values = vec![f32::NAN; 4];
        let sent: usize = send.iter().sum();
        values[..sent].fill(mesh.rank() as f32);
        let call = Call::blocking(Op::AllToAll, Buffer::from_vec(values))
            .with_counts(comm_core::Counts::all_to_all(send, receive));
        let received: usize = receive.iter().sum();
        let got = mesh.start(call).wait().unwrap().buffer.into_vec::<f32>().unwrap();
        let expected: Vec<f32> = (0..2).flat_map(|rank| vec![rank as f32; receive[rank]]).collect();
        assert_eq!(got[..received], expected);
    });
}

#[test]
fn checked_mode_on_one_rank_only_is_said_as_such() {
    let group: Vec<LocalMesh> = local::group(2, 2)
        .into_iter()
        .enumerate()
        .map(|(number, rank)| {
            Mesh::new(rank.transport, rank.control, MeshOptions::default().with_checked(number == 0)).unwrap()
        })
        .collect();
    let errors: Vec<Error> = thread::scope(|scope| {
        let work = |mesh: LocalMesh| mesh.all_reduce(&mut [1f32; 10], ReduceOp::Sum).unwrap_err();
        let threads: Vec<_> = group.into_iter().map(|mesh| scope.spawn(move || work(mesh))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    all_say(&errors, &["with MeshOptions::checked", "without MeshOptions::checked"]);
}

#[test]
fn only_what_a_rank_contributes_has_to_be_finite() {
    let options = MeshOptions::default().with_check_finite(true);
    on_ranks(3, &options, |mesh| {
        let rank = mesh.rank();
        // Room for what others send may hold anything.
        let mut whole = vec![f32::NAN; 9];
        whole[3 * rank..3 * rank + 3].fill(rank as f32);
        let whole = mesh.run_vec(Op::AllGather, whole).unwrap();
        assert_eq!(whole, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]);
        let mut values = [if rank == 2 { 7.0 } else { f64::NAN }; 4];
        mesh.broadcast(&mut values, 2).unwrap();
        assert_eq!(values, [7.0; 4]);
    });
    let errors = on_ranks(3, &options, |mesh| {
        let mut whole = vec![0f32; 9];
        whole[7] = if mesh.rank() == 2 { f32::INFINITY } else { 0.0 };
        mesh.run_vec(Op::AllGather, whole).unwrap_err()
    });
    all_say(&errors, &["rank 2 contributed inf", "index 7;"]);
}

#[test]
fn a_stall_is_reported_with_who_holds_it_up_and_what_that_rank_does() {
    let options = MeshOptions::default().with_stall_after(Duration::from_millis(200));
    let group: Vec<_> = local::group(3, 2);
    let (tell, told) = mpsc::channel::<StallReport>();
    let tell = Mutex::new(tell);
    group[1].control.on_stall(Box::new(move |report| drop(tell.lock().unwrap().send(report.clone()))));
    let meshes: Vec<_> =
        group.into_iter().map(|rank| Mesh::new(rank.transport, rank.control, options.clone()).unwrap()).collect();
    thread::scope(|scope| {
        for mesh in &meshes {
            scope.spawn(move || {
                mesh.barrier().unwrap();
                if mesh.rank() == 2 {
                    thread::sleep(Duration::from_secs(2));
                }
                mesh.all_reduce(&mut [1f32; 77], ReduceOp::Sum).unwrap();
            });
        }
    });
    let report = told.try_recv().unwrap();
    assert_eq!(report.late, [2]);
    let text = report.to_string();
    for part in
        ["all-reduce sum of 77 f32", "late: rank 2", "rank 2: outside any operation for", "the last one was barrier"]
    {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    // Reported again only when it has taken twice as long.
    let more = told.try_iter().count();
    assert!((1..=6).contains(&more), "{more} more reports in 2 s");
}

/// As it is between processes: every rank has a control plane of its own.
fn over_tcp<R: Send>(
    ranks: usize,
    options: &MeshOptions,
    body: impl Fn(&LocalMesh, &TcpControl) -> R + Sync,
) -> Vec<R> {
    let intervals =
        TcpOptions { heartbeat: Duration::from_millis(50), liveness: Duration::from_secs(10), ..TcpOptions::default() };
    over_tcp_with(intervals, ranks, options, body)
}

fn over_tcp_with<R: Send>(
    intervals: TcpOptions,
    ranks: usize,
    options: &MeshOptions,
    body: impl Fn(&LocalMesh, &TcpControl) -> R + Sync,
) -> Vec<R> {
    let folder = tempfile::tempdir().unwrap();
    let body = &body;
    let secret = Secret::random().unwrap();
    thread::scope(|scope| {
        let threads: Vec<_> = local::group(ranks, 2)
            .into_iter()
            .enumerate()
            .map(|(number, rank)| {
                let address = Address::File(folder.path().join("address"));
                let job = Job::new(number, ranks, address, secret.clone()).unwrap();
                scope.spawn(move || {
                    let deadline = Deadline::after(Duration::from_secs(20));
                    let control = TcpControl::connect_with(&job, &[], intervals, deadline).unwrap();
                    let mesh = Mesh::new(rank.transport, control.clone(), options.clone()).unwrap();
                    body(&mesh, &control)
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_process_gets_the_report_and_a_timeout_names_the_cause_and_not_its_victims() {
    let done = comm_core::conformance::Barrier::new(4);
    let outcomes = over_tcp(4, &MeshOptions::default(), |mesh, control| {
        let reports: Arc<Mutex<Vec<StallReport>>> = Arc::default();
        let kept = reports.clone();
        control.on_stall(Box::new(move |report| kept.lock().unwrap().push(report.clone())));
        mesh.barrier().unwrap();
        let error = if mesh.rank() == 2 {
            // Busy on another lane, for longer than the others wait.
            let never = Call::background(Op::Recv { from: 0 }, Buffer::from_vec(vec![0u8]), 1);
            mesh.start(never.labelled("something else")).wait().unwrap_err().error
        } else {
            let ring = Call::blocking(Op::AllReduce(ReduceOp::Sum), Buffer::from_vec(vec![1f32; 4096]))
                .with_algorithm(comm_core::Algorithm::Ring)
                .with_timeout(Duration::from_secs(2));
            mesh.start(ring).wait().unwrap_err().error
        };
        done.wait();
        let reports = reports.lock().unwrap().clone();
        (error, reports)
    });
    for (rank, (error, reports)) in outcomes.iter().enumerate() {
        let Error::Timeout { waiting_for, .. } = error else { panic!("rank {rank}: {error}") };
        assert_eq!(waiting_for, &[2], "rank {rank}: {error}");
        let report = reports.iter().find(|report| report.stalled.operation.contains("4096 f32"));
        let report = report.unwrap_or_else(|| panic!("rank {rank} got no report: {reports:?}"));
        assert_eq!(report.late, [2], "rank {rank}: {report}");
        assert!(report.to_string().contains("rank 2: in receive of 1 u8"), "{report}");
        assert!(report.to_string().contains("[something else] on lane 1"), "{report}");
    }
}

#[test]
fn a_timeout_after_less_than_a_heartbeat_names_the_cause_too() {
    let intervals = TcpOptions { heartbeat: Duration::from_secs(20), ..TcpOptions::default() };
    let done = comm_core::conformance::Barrier::new(4);
    let errors = over_tcp_with(intervals, 4, &MeshOptions::default(), |mesh, control| {
        mesh.barrier().unwrap();
        let error = if mesh.rank() == 2 {
            control.verdict(Error::invalid("nobody was late"), Duration::from_secs(20))
        } else {
            // Only rank 0 is in a hurry. It waits for rank 3, and that for rank 2.
            let timeout = Duration::from_secs(if mesh.rank() == 0 { 2 } else { 60 });
            let ring = Call::blocking(Op::AllReduce(ReduceOp::Sum), Buffer::from_vec(vec![1f32; 4096]))
                .with_algorithm(comm_core::Algorithm::Ring)
                .with_timeout(timeout);
            mesh.start(ring).wait().unwrap_err().error
        };
        done.wait();
        error
    });
    for error in &errors {
        let Error::Timeout { waiting_for, .. } = error else { panic!("{error}") };
        assert_eq!(waiting_for, &[2], "{error}");
    }
}

#[test]
fn a_message_that_does_not_come_is_blamed_on_its_sender_alone() {
    let done = comm_core::conformance::Barrier::new(3);
    let errors = over_tcp(3, &MeshOptions::default(), |mesh, _| {
        mesh.barrier().unwrap();
        let error = if mesh.rank() == 0 {
            let never = Call::blocking(Op::Recv { from: 1 }, Buffer::from_vec(vec![0u8]));
            mesh.start(never.with_timeout(Duration::from_secs(2))).wait().unwrap_err().error
        } else {
            let never = Call::background(Op::Recv { from: 0 }, Buffer::from_vec(vec![0u8]), 1);
            mesh.start(never).wait().unwrap_err().error
        };
        done.wait();
        error
    });
    for error in &errors {
        let Error::Timeout { waiting_for, .. } = error else { panic!("{error}") };
        assert_eq!(waiting_for, &[1], "{error}");
    }
    all_say(&errors, &["receive of 1 u8", "from rank 1"]);
}

#[test]
fn ranks_that_make_one_call_on_different_lanes_are_told_so() {
    let options = MeshOptions::default().with_stall_after(Duration::from_millis(200));
    let errors = over_tcp(3, &options, |mesh, _| {
        let lane = usize::from(mesh.rank() == 2);
        let call = Call::background(Op::AllReduce(ReduceOp::Sum), Buffer::from_vec(vec![1f32; 10]), lane);
        mesh.start(call.with_timeout(Duration::from_secs(3))).wait().unwrap_err().error
    });
    for error in &errors {
        let Error::Mismatch { ours, theirs, .. } = error else { panic!("{error}") };
        assert!(ours != theirs, "{error}");
    }
    all_say(&errors, &["all-reduce sum of 10 f32", "on lane 0", "on lane 1", "each on the same lane"]);
}

#[test]
fn a_hook_that_panics_harms_nobody() {
    let options = MeshOptions::default().with_stall_after(Duration::from_millis(200));
    over_tcp(2, &options, |mesh, control| {
        control.on_stall(Box::new(|_| panic!("on purpose")));
        mesh.barrier().unwrap();
        if mesh.rank() == 1 {
            thread::sleep(Duration::from_secs(1));
        }
        mesh.barrier().unwrap();
        mesh.finish(Duration::from_secs(10)).unwrap();
    });
}

#[test]
fn operations_that_stall_together_are_all_looked_at() {
    // Rank 2 waits for rank 1, which calls nothing, and rank 0, one operation further, for rank 2.
    let options = MeshOptions::default().with_stall_after(Duration::from_millis(300));
    let errors = over_tcp(3, &options, |mesh, _| {
        mesh.barrier().unwrap();
        let call = |op, timeout| {
            let call = Call::blocking(op, Buffer::from_vec(vec![1f32; 3])).with_timeout(Duration::from_millis(timeout));
            mesh.start(call).wait().unwrap_err().error
        };
        match mesh.rank() {
            0 => {
                mesh.gather(&[1f32], 3, 2).unwrap();
                call(Op::Broadcast { root: 2 }, 2000)
            }
            1 => {
                let never = Call::background(Op::Recv { from: 0 }, Buffer::from_vec(vec![0u8]), 1);
                mesh.start(never).wait().unwrap_err().error
            }
            _ => call(Op::Gather { root: 2, total: 3 }, 8000),
        }
    });
    for error in &errors {
        let Error::Timeout { rank: 0, waiting_for, .. } = error else { panic!("{error}") };
        assert_eq!(waiting_for, &[1, 2], "{error}");
    }
}

#[test]
fn a_computation_of_many_stall_times_is_no_stall() {
    let options = MeshOptions::default().with_stall_after(Duration::from_millis(100));
    let reports = over_tcp(2, &options, |mesh, control| {
        let (tell, told) = mpsc::channel();
        let tell = Mutex::new(tell);
        control.on_stall(Box::new(move |report| drop(tell.lock().unwrap().send(report.to_string()))));
        for _ in 0..3 {
            mesh.barrier().unwrap();
            thread::sleep(Duration::from_millis(400));
        }
        let reports: Vec<String> = told.try_iter().collect();
        mesh.finish(Duration::from_secs(10)).unwrap();
        reports
    });
    // Both compute equally long, so nobody waits for anybody for 100 ms unless the machine is busy.
    assert!(reports.iter().flatten().all(|text| text.contains("barrier")), "{reports:?}");
}

#[test]
fn a_communicator_that_is_dropped_with_an_operation_under_way_ends_it_and_tells_all() {
    let (tell, told) = mpsc::channel();
    let tell = Mutex::new(tell);
    let began = Instant::now();
    let group = local::group(2, 2);
    let meshes: Vec<_> = group
        .into_iter()
        .map(|rank| Mesh::new(rank.transport, rank.control, MeshOptions::default()).unwrap())
        .collect();
    thread::scope(|scope| {
        for mesh in meshes {
            let tell = tell.lock().unwrap().clone();
            scope.spawn(move || {
                if mesh.rank() == 0 {
                    let child = mesh.split(Some(0), 0).unwrap().unwrap();
                    let never = Call::background(Op::Recv { from: 1 }, Buffer::from_vec(vec![0u8]), 1);
                    let handle = child.start(never);
                    drop(mesh);
                    // The other communicator could still be waited for.
                    thread::sleep(Duration::from_millis(100));
                    drop(child);
                    tell.send(handle.wait().unwrap_err().error).unwrap();
                } else {
                    mesh.split(Some(0), 0).unwrap();
                    tell.send(mesh.barrier().unwrap_err()).unwrap();
                }
            });
        }
    });
    let errors: Vec<Error> = told.try_iter().collect();
    all_say(&errors, &["rank 0 aborted the job: its communicator was dropped with operations under way"]);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn finish_that_runs_out_of_time_is_told_to_the_others() {
    let errors = on_ranks(2, &MeshOptions::default(), |mesh| {
        if mesh.rank() == 0 {
            let never = Call::background(Op::Recv { from: 1 }, Buffer::from_vec(vec![0u8]), 0);
            let handle = mesh.start(never);
            let error = mesh.finish(Duration::from_millis(200)).unwrap_err();
            assert!(handle.wait().is_err(), "the operation under way has ended too");
            error
        } else {
            mesh.recv::<u8>(1, 0).unwrap_err()
        }
    });
    all_say(&errors, &["rank 0: finishing, with operations still under way"]);
}
