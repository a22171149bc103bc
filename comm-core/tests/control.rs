//! The control plane over real sockets, one thread a rank: what it does once the ranks have met.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::conformance::Barrier;
use comm_core::control::{Activity, LaneActivity, MAX_BLOB, StallReport, TcpControl, TcpOptions};
use comm_core::{Control, Deadline, Error};

use crate::common::{
    after, connect, free_address, group, job, jobs, options, port, relay, relay_both, run, texts, wait_for_failure,
};

#[test]
fn gathers_in_rank_order() {
    for n in [1, 2, 5] {
        group(n, |control| {
            for round in 0..20_u8 {
                let rank = control.rank() as u8;
                let blob = vec![rank; usize::from(rank) * usize::from(round)];
                let all = control.all_gather("round", &blob, after(20_000)).unwrap();
                let expected: Vec<Vec<u8>> =
                    (0..n as u8).map(|r| vec![r; usize::from(r) * usize::from(round)]).collect();
                assert_eq!(all, expected);
            }
            control.leave(after(20_000)).unwrap();
        });
    }
}

#[test]
fn gathers_blobs_of_the_greatest_size() {
    let all = group(3, |control| {
        let all = control.all_gather("big", &vec![control.rank() as u8; MAX_BLOB], after(20_000)).unwrap();
        let too_big = control.all_gather("too big", &vec![0; MAX_BLOB + 1], after(1000)).unwrap_err();
        assert!(matches!(too_big, Error::InvalidArgument(_)));
        control.leave(after(20_000)).unwrap();
        all
    });
    for blobs in all {
        assert!(blobs.iter().enumerate().all(|(rank, blob)| *blob == vec![rank as u8; MAX_BLOB]));
    }
}

#[test]
fn what_only_rank_0_needs_the_others_do_not_get() {
    let all = group(3, |control| {
        let mine = vec![control.rank() as u8; MAX_BLOB];
        let at_0: Vec<_> = (0..3).map(|_| control.gather_at_0("big", &mine, after(20_000)).unwrap()).collect();
        // The next one is a gathering of its own.
        assert_eq!(control.all_gather("small", &mine[..1], after(20_000)).unwrap(), [[0], [1], [2]]);
        control.leave(after(20_000)).unwrap();
        at_0
    });
    for (rank, at_0) in all.into_iter().enumerate() {
        for blobs in at_0 {
            assert_eq!(blobs.len(), if rank == 0 { 3 } else { 0 });
            assert!(blobs.iter().enumerate().all(|(rank, blob)| *blob == vec![rank as u8; MAX_BLOB]));
        }
    }
    let errors = texts(group(3, |control| match control.rank() {
        1 => control.gather_at_0("a", b"", after(20_000)),
        _ => control.all_gather("a", b"", after(20_000)),
    }));
    assert!(errors.iter().all(|e| e.contains("rank 1 gathers \"a\" for rank 0")), "{errors:?}");
}

#[test]
fn different_labels_are_an_error_for_all() {
    let errors = texts(group(3, |control| {
        let label = if control.rank() == 2 { "b" } else { "a" };
        control.all_gather(label, b"", after(20_000))
    }));
    assert!(
        errors[0].contains("\"a\"") && errors[0].contains("\"b\"") && errors[0].contains("rank 2"),
        "{}",
        errors[0]
    );
    assert!(errors.iter().all(|e| *e == errors[0]), "{errors:?}");
}

#[test]
fn a_late_rank_is_named_on_all_others() {
    let barrier = Barrier::new(3);
    let results = group(3, |control| {
        let result = if control.rank() == 1 { Ok(vec![]) } else { control.all_gather("x", b"", after(800)) };
        barrier.wait();
        result
    });
    for rank in [0, 2] {
        match &results[rank] {
            Err(Error::Timeout { waiting_for, operation, .. }) => {
                assert_eq!(waiting_for, &[1]);
                assert_eq!(operation, "gathering \"x\"");
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn keys_are_equal_on_all_ranks_and_different_otherwise() {
    let keys = || group(3, |control| (control.derive_key("a"), control.derive_key("b")));
    let (first, second) = (keys(), keys());
    assert!(first.iter().all(|k| *k == first[0]));
    assert_ne!(first[0].0, first[0].1);
    assert_ne!(first[0].0, second[0].0, "a new start has new keys");
}

#[test]
fn poison_reaches_all_with_the_same_error() {
    for source in 0..3 {
        let errors = group(3, |control| {
            if control.rank() == source {
                control.poison(&Error::Aborted { by: source, reason: "enough".into() });
                assert!(control.failure().is_some(), "known at once where it comes from");
            }
            let error = wait_for_failure(&control);
            assert!(control.all_gather("later", b"", after(1000)).is_err());
            assert!(control.leave(after(1000)).is_err());
            error.to_string()
        });
        assert!(errors.iter().all(|e| *e == format!("rank {source} aborted the job: enough")), "{errors:?}");
    }
}

#[test]
fn of_two_failures_one_wins_everywhere() {
    for _ in 0..10 {
        let barrier = Barrier::new(4);
        let errors = group(4, |control| {
            barrier.wait();
            let observed = Error::Aborted { by: control.rank(), reason: "here".into() };
            let error = control.verdict(observed, Duration::ZERO);
            barrier.wait();
            error.to_string()
        });
        assert!(errors.iter().all(|e| *e == errors[0]), "{errors:?}");
    }
}

#[test]
fn what_hooks_and_verdicts_are_told_is_what_stays() {
    for _ in 0..20 {
        let barrier = Barrier::new(4);
        let errors = group(4, |control| {
            let (told, failure) = mpsc::channel();
            let told = Mutex::new(told);
            control.on_failure(Box::new(move |error| told.lock().unwrap().send(error.to_string()).unwrap()));
            barrier.wait();
            let rank = control.rank();
            let first = if rank % 2 == 0 {
                control.poison(&Error::Aborted { by: rank, reason: "here".into() });
                control.settled_failure().unwrap()
            } else {
                // One that is told otherwise to others, who were not there.
                let observed = Error::Io { what: "here".into(), source: Arc::new(std::io::Error::other("broken")) };
                control.verdict(observed, Duration::ZERO)
            };
            barrier.wait();
            let later = [control.settled_failure().unwrap(), control.failure().unwrap(), {
                control.all_gather("later", b"", after(1000)).unwrap_err()
            }];
            let told = failure.recv_timeout(Duration::from_secs(5)).unwrap();
            barrier.wait();
            assert!(later.iter().all(|error| error.to_string() == told), "{told} and then {later:?}");
            assert_eq!(first.to_string(), told);
            told
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    }
}

/// The control plane asks it in its own thread.
struct Broken;

impl Activity for Broken {
    fn overdue(&self) -> Option<LaneActivity> {
        panic!("on purpose");
    }

    fn doing(&self) -> Vec<LaneActivity> {
        Vec::new()
    }

    fn on_stall(&self, _report: &StallReport) {}
}

#[test]
fn a_panic_in_the_thread_of_the_control_plane_fails_the_job() {
    for victim in 0..3 {
        let barrier = Barrier::new(3);
        let errors = group(3, |control| {
            let broken: Arc<dyn Activity> = Arc::new(Broken);
            if control.rank() == victim {
                control.watch(Arc::downgrade(&broken));
            }
            let error = wait_for_failure(&control).to_string();
            barrier.wait();
            assert_eq!(control.all_gather("later", b"", after(1000)).unwrap_err().to_string(), error);
            error
        });
        assert!(errors[0].contains("panicked: on purpose"), "{errors:?}");
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    }
}

#[test]
fn the_longest_intervals_are_intervals_too() {
    let options = TcpOptions {
        heartbeat: Duration::MAX - Duration::from_nanos(1),
        liveness: Duration::MAX,
        handshake: Duration::MAX,
    };
    let forever = Deadline::after(Duration::MAX);
    let sums = run(&jobs(3), |job| {
        let control = TcpControl::connect_with(job, &[], options, forever).unwrap();
        let all = control.all_gather("x", &[job.rank as u8], forever).unwrap();
        // Who leaves last is the first to need a thread that still lives.
        control.leave(forever).unwrap();
        all.concat()
    });
    assert!(sums.iter().all(|all| *all == [0, 1, 2]), "{sums:?}");
    let errors = run(&jobs(3), |job| {
        let control = TcpControl::connect_with(job, &[], options, forever).unwrap();
        let error = if job.rank == 1 {
            control.verdict(Error::Aborted { by: 1, reason: "enough".into() }, Duration::ZERO)
        } else {
            control.verdict(Error::invalid("an echo"), Duration::MAX)
        };
        error.to_string()
    });
    assert!(errors.iter().all(|error| error == "rank 1 aborted the job: enough"), "{errors:?}");
}

#[test]
fn a_verdict_prefers_the_cause_to_its_echo() {
    let errors = group(3, |control| {
        if control.rank() == 1 {
            thread::sleep(Duration::from_millis(50));
            drop(control);
            return None;
        }
        // What a data connection shows may blame anybody.
        let echo = Error::PeerLost { rank: 0, operation: "all-reduce".into(), detail: "reset".into() };
        Some(control.verdict(echo, Duration::from_secs(3)).culprit())
    });
    assert_eq!(errors, [Some(Some(1)), None, Some(Some(1))]);
}

#[test]
fn a_verdict_without_a_cause_makes_the_observation_the_failure() {
    let errors = group(2, |control| {
        if control.rank() == 1 {
            let observed = Error::Protocol { who: "rank 0".into(), what: "rubbish".into() };
            control.verdict(observed, Duration::from_millis(20)).to_string()
        } else {
            wait_for_failure(&control).to_string()
        }
    });
    assert_eq!(errors[0], "rank 1 aborted the job: rank 0 sent bytes that cannot be decoded: rubbish");
    assert_eq!(errors[0], errors[1]);
}

#[test]
fn a_rank_that_goes_without_leaving_is_lost() {
    for victim in 0..3 {
        let barrier = Barrier::new(3);
        let errors = group(3, |control| {
            let rank = control.rank();
            barrier.wait();
            if rank == victim {
                drop(control);
                barrier.wait();
                return None;
            }
            let start = Instant::now();
            let error = control.all_gather("never", b"", after(20_000)).unwrap_err();
            // Long before silence would tell it.
            assert!(start.elapsed() < options().liveness / 2, "{:?}", start.elapsed());
            barrier.wait();
            assert!(matches!(error, Error::PeerLost { rank, .. } if rank == victim), "{error}");
            Some(error.to_string())
        });
        let survivors: Vec<String> = errors.into_iter().flatten().collect();
        assert_eq!(survivors[0], survivors[1]);
    }
}

#[test]
fn leaving_is_no_death() {
    for _ in 0..5 {
        let failures = group(4, |control| {
            // In any order and at different times.
            thread::sleep(Duration::from_millis(10 * control.rank() as u64));
            control.leave(after(20_000)).unwrap();
            control.leave(after(20_000)).unwrap();
            control.failure()
        });
        assert!(failures.iter().all(Option::is_none), "{failures:?}");
    }
}

#[test]
fn leaving_waits_for_all_and_names_the_late() {
    let barrier = Barrier::new(3);
    let results = group(3, |control| {
        let result = if control.rank() == 2 { Ok(()) } else { control.leave(after(800)) };
        barrier.wait();
        result
    });
    for rank in [0, 1] {
        assert!(
            matches!(&results[rank], Err(Error::Timeout { waiting_for, .. }) if *waiting_for == [2]),
            "{results:?}"
        );
    }
}

#[test]
fn hooks_are_called_once() {
    let calls = group(2, |control| {
        let count = Arc::new(Mutex::new(0));
        let counted = Arc::clone(&count);
        control.on_failure(Box::new(move |_| *counted.lock().unwrap() += 1));
        control.poison(&Error::invalid("one"));
        control.poison(&Error::invalid("two"));
        wait_for_failure(&control);
        thread::sleep(Duration::from_millis(100));
        *count.lock().unwrap()
    });
    assert_eq!(calls, [1, 1]);
}

#[test]
fn a_frame_that_is_changed_on_its_way_fails_the_job() {
    let (address, addr) = free_address();
    let seen = Arc::new(Mutex::new(false));
    let change = Arc::clone(&seen);
    let (relayed, record) = relay(addr, move |bytes, _| {
        if *change.lock().unwrap() {
            bytes[bytes.len() / 2] ^= 1;
        }
    });
    let barrier = Barrier::new(2);
    let errors = run(&[job(0, 2, &address), job(1, 2, &port(relayed))], |job| {
        let control = connect(job).unwrap();
        control.all_gather("honest", b"x", after(20_000)).unwrap();
        // Not before rank 1 has its answer.
        barrier.wait();
        *seen.lock().unwrap() = true;
        wait_for_failure(&control).to_string()
    });
    record.join().unwrap();
    assert!(errors[0].contains("not authentic"), "{errors:?}");
}

#[test]
fn a_frame_of_rank_0_that_is_changed_on_its_way_is_one_error_on_all() {
    let (address, addr) = free_address();
    let seen = Arc::new(Mutex::new(false));
    let change = Arc::clone(&seen);
    let down = move |bytes: &mut [u8]| {
        if *change.lock().unwrap() {
            bytes[bytes.len() / 2] ^= 1;
        }
    };
    let (relayed, record) = relay_both(addr, |_, _| (), down);
    let barrier = Barrier::new(3);
    let jobs = [job(0, 3, &address), job(1, 3, &port(relayed)), job(2, 3, &address)];
    let errors = run(&jobs, |job| {
        let control = connect(job).unwrap();
        control.all_gather("honest", b"x", after(20_000)).unwrap();
        // Not before rank 1 has its answer.
        barrier.wait();
        *seen.lock().unwrap() = true;
        let error = wait_for_failure(&control).to_string();
        // Nobody is lost before all have heard it.
        barrier.wait();
        error
    });
    record.join().unwrap();
    assert!(errors[0].contains("not authentic") && errors[0].contains("rank 0"), "{errors:?}");
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
}

#[test]
fn a_connection_that_goes_silent_is_noticed_on_both_sides() {
    let (address, addr) = free_address();
    let silent = Arc::new(Mutex::new(()));
    let hold = Arc::clone(&silent);
    let (relayed, record) = relay(addr, move |_, _| drop(hold.lock().unwrap()));
    let options = TcpOptions { liveness: Duration::from_millis(300), ..options() };
    let barrier = Barrier::new(2);
    let errors = run(&[job(0, 2, &address), job(1, 2, &port(relayed))], |job| {
        let control = TcpControl::connect_with(job, &[], options, after(20_000)).unwrap();
        barrier.wait();
        let _guard = (job.rank == 1).then(|| silent.lock().unwrap());
        let start = Instant::now();
        let error = wait_for_failure(&control);
        assert!(start.elapsed() < Duration::from_secs(20));
        barrier.wait();
        error.to_string()
    });
    record.join().unwrap();
    // Rank 0's word still reaches rank 1: only the way up is silent.
    assert!(errors.iter().all(|e| e.contains("rank 1 was lost") && e.contains("0.3 s")), "{errors:?}");
}

#[test]
fn dropping_is_quick_at_any_moment() {
    let jobs = jobs(2);
    let seldom = TcpOptions { heartbeat: Duration::from_secs(60), liveness: Duration::from_secs(600), ..options() };
    run(&jobs, |job| {
        let control = TcpControl::connect_with(job, &[], seldom, after(20_000)).unwrap();
        let start = Instant::now();
        drop(control);
        assert!(start.elapsed() < Duration::from_secs(10), "its thread was waited for until its next heartbeat");
    });
}

#[test]
fn bad_options_are_refused() {
    let job = &jobs(2)[0];
    let options = TcpOptions { heartbeat: Duration::from_secs(40), ..TcpOptions::default() };
    assert!(matches!(TcpControl::connect_with(job, &[], options, after(100)), Err(Error::InvalidArgument(_))));
    let options = TcpOptions { handshake: Duration::ZERO, ..TcpOptions::default() };
    assert!(matches!(TcpControl::connect_with(job, &[], options, after(100)), Err(Error::InvalidArgument(_))));
}
