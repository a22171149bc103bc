//! The control plane over real sockets, one thread a rank.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::{MAX_BLOB, TcpControl, TcpOptions};
use comm_core::job::{Address, Job, Secret};
use comm_core::{Control, Deadline, Error, Result};

const SECRET: &str = "a secret for tests only";

/// An address where nobody listens yet.
fn free_address() -> (Address, SocketAddr) {
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    (Address::Tcp { host: "127.0.0.1".into(), port: addr.port() }, addr)
}

fn job(rank: usize, world_size: usize, address: &Address) -> Job {
    let mut job = Job::new(rank, world_size, address.clone(), Secret::new(SECRET).unwrap()).unwrap();
    job.id = "test".into();
    job
}

fn jobs(world_size: usize) -> Vec<Job> {
    let (address, _) = free_address();
    (0..world_size).map(|rank| job(rank, world_size, &address)).collect()
}

fn options() -> TcpOptions {
    TcpOptions {
        heartbeat: Duration::from_millis(50),
        liveness: Duration::from_secs(10),
        handshake: Duration::from_millis(400),
    }
}

fn after(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

fn connect(job: &Job) -> Result<Arc<TcpControl>> {
    TcpControl::connect_with(job, &[("seed", "7".into())], options(), after(10_000))
}

/// Runs `work` for every job at once; results in the order of the jobs.
fn run<R: Send>(jobs: &[Job], work: impl Fn(&Job) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(|| work(job))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `work` on every rank of a job of `n` ranks that have met.
fn group<R: Send>(n: usize, work: impl Fn(Arc<TcpControl>) -> R + Sync) -> Vec<R> {
    run(&jobs(n), |job| work(connect(job).unwrap()))
}

fn texts<T>(results: Vec<Result<T>>) -> Vec<String> {
    results.into_iter().map(|r| r.err().expect("an error").to_string()).collect()
}

fn wait_for_failure(control: &TcpControl) -> Error {
    let (told, failure) = mpsc::channel();
    let told = Mutex::new(told);
    control.on_failure(Box::new(move |error| told.lock().unwrap().send(error.clone()).unwrap()));
    failure.recv_timeout(Duration::from_secs(5)).expect("the job should have failed")
}

#[test]
fn gathers_in_rank_order() {
    for n in [1, 2, 5] {
        group(n, |control| {
            for round in 0..20_u8 {
                let rank = control.rank() as u8;
                let blob = vec![rank; usize::from(rank) * usize::from(round)];
                let all = control.all_gather("round", &blob, after(5000)).unwrap();
                let expected: Vec<Vec<u8>> =
                    (0..n as u8).map(|r| vec![r; usize::from(r) * usize::from(round)]).collect();
                assert_eq!(all, expected);
            }
            control.leave(after(5000)).unwrap();
        });
    }
}

#[test]
fn gathers_blobs_of_the_greatest_size() {
    let all = group(3, |control| {
        let all = control.all_gather("big", &vec![control.rank() as u8; MAX_BLOB], after(20_000)).unwrap();
        let too_big = control.all_gather("too big", &vec![0; MAX_BLOB + 1], after(1000)).unwrap_err();
        assert!(matches!(too_big, Error::InvalidArgument(_)));
        control.leave(after(5000)).unwrap();
        all
    });
    for blobs in all {
        assert!(blobs.iter().enumerate().all(|(rank, blob)| *blob == vec![rank as u8; MAX_BLOB]));
    }
}

#[test]
fn different_labels_are_an_error_for_all() {
    let errors = texts(group(3, |control| {
        let label = if control.rank() == 2 { "b" } else { "a" };
        control.all_gather(label, b"", after(5000))
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
    assert_eq!(errors[1], "rank 0 sent bytes that are not understood: rubbish");
    assert_eq!(errors[0], format!("rank 1 aborted the job: {}", errors[1]));
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
            let error = control.all_gather("never", b"", after(5000)).unwrap_err();
            assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
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
            control.leave(after(5000)).unwrap();
            control.leave(after(5000)).unwrap();
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
fn the_address_file_is_written_read_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("address");
    std::fs::write(&path, "127.0.0.1:1\n").unwrap();
    let jobs: Vec<Job> = (0..3).map(|rank| job(rank, 3, &Address::File(path.clone()))).collect();
    run(&jobs, |job| {
        // The others come first, and find what an earlier job has left.
        thread::sleep(Duration::from_millis(if job.rank == 0 { 50 } else { 0 }));
        let control = connect(job).unwrap();
        control.leave(after(5000)).unwrap();
    });
    assert!(!path.exists());
}

#[test]
fn other_settings_are_named_with_both_values_on_all() {
    let errors = texts(run(&jobs(4), |job| {
        thread::sleep(Duration::from_millis(20 * job.rank as u64));
        let seed = if job.rank == 2 { "5" } else { "7" };
        let config = [("steps", "10".to_string()), ("seed", seed.to_string())];
        TcpControl::connect_with(job, &config, options(), after(10_000))
    }));
    assert!(errors.iter().all(|e| e.contains("rank 2 has seed = 5, rank 0 has seed = 7")), "{errors:?}");
}

#[test]
fn a_setting_that_one_rank_lacks_is_named() {
    let errors = texts(run(&jobs(2), |job| {
        let both = [("steps", "10".to_string()), ("seed", "7".to_string())];
        TcpControl::connect_with(job, &both[job.rank..], options(), after(10_000))
    }));
    assert!(errors.iter().all(|e| e.contains("rank 1 has no steps, rank 0 has steps = 10")), "{errors:?}");
}

#[test]
fn another_world_size_is_an_error_for_all() {
    let mut jobs = jobs(3);
    jobs[2].world_size = 4;
    let errors = texts(run(&jobs, connect));
    assert!(errors.iter().all(|e| e.contains("rank 2 was started for 4 ranks, rank 0 for 3")), "{errors:?}");
}

#[test]
fn two_processes_of_one_rank_are_an_error_for_all() {
    let mut jobs = jobs(3);
    jobs[2].rank = 1;
    let errors = texts(run(&jobs, connect));
    assert!(errors.iter().all(|e| e.contains("two processes with rank 1")), "{errors:?}");
}

#[test]
fn a_second_process_does_not_harm_a_running_job() {
    let jobs = jobs(2);
    let barrier = Barrier::new(2);
    run(&jobs, |job| {
        let control = connect(job).unwrap();
        if job.rank == 0 {
            let late = connect(&jobs[1]).unwrap_err().to_string();
            assert!(late.contains("two processes with rank 1"), "{late}");
        }
        barrier.wait();
        assert!(control.failure().is_none());
        control.leave(after(5000)).unwrap();
    });
}

#[test]
fn ranks_that_never_come_are_named_on_all() {
    let jobs = jobs(5);
    let present: Vec<Job> = [0, 1, 3].map(|rank: usize| jobs[rank].clone()).into();
    let results = run(&present, |job| TcpControl::connect_with(job, &[], options(), after(1000)));
    for result in results {
        match result {
            Err(Error::Timeout { waiting_for, .. }) => assert_eq!(waiting_for, [2, 4]),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn without_rank_0_dialling_ends_at_the_deadline() {
    let jobs = jobs(2);
    let start = Instant::now();
    let error = TcpControl::connect_with(&jobs[1], &[], options(), after(300)).unwrap_err();
    assert!(start.elapsed() < Duration::from_millis(900));
    assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [0]), "{error}");
}

#[test]
fn a_used_port_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let job = job(0, 2, &Address::Tcp { host: "127.0.0.1".into(), port });
    let error = connect(&job).unwrap_err().to_string();
    assert!(error.contains(&format!("127.0.0.1:{port}")) && error.contains("COMM_PORT"), "{error}");
}

#[test]
fn another_secret_job_or_epoch_is_refused_and_the_job_goes_on() {
    type Change = fn(&mut Job);
    let changes: [(Change, &str); 3] = [
        (|job| job.secret = Secret::new("another secret for tests").unwrap(), "does not know this job's secret"),
        (|job| job.id = "other".into(), "belongs to job \"other\""),
        (|job| job.epoch = 3, "is of epoch 3"),
    ];
    for (change, text) in changes {
        let jobs = jobs(2);
        let mut wrong = jobs[1].clone();
        change(&mut wrong);
        run(&jobs, |job| {
            if job.rank == 1 {
                let error = connect(&wrong).unwrap_err().to_string();
                assert!(error.contains(text), "{error}");
            }
            connect(job).unwrap().leave(after(5000)).unwrap();
        });
    }
}

#[test]
fn rubbish_and_silence_at_the_door_keep_nobody_out() {
    let (address, addr) = free_address();
    let jobs: Vec<Job> = (0..3).map(|rank| job(rank, 3, &address)).collect();
    run(&jobs, |job| {
        let mut strangers = Vec::new();
        if job.rank == 1 {
            while TcpStream::connect(addr).is_err() {
                thread::sleep(Duration::from_millis(5));
            }
            // More than there is room for, silent.
            strangers.extend((0..80).map(|_| TcpStream::connect(addr).unwrap()));
            for rubbish in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"ISOCTRL\0\x02\x00", b"ISOCTRL\0\x09\x00"] {
                let mut stream = TcpStream::connect(addr).unwrap();
                // The other end may have had enough already.
                let _ = stream.write_all(rubbish);
                strangers.push(stream);
            }
        }
        let control = connect(job).unwrap();
        control.all_gather("there", b"", after(5000)).unwrap();
        control.leave(after(5000)).unwrap();
    });
}

#[test]
fn strangers_are_mentioned_when_ranks_are_missing() {
    let (address, addr) = free_address();
    let absent = job(0, 2, &address);
    let stranger = thread::spawn(move || {
        while TcpStream::connect(addr).and_then(|mut s| s.write_all(b"GET / HTTP/1.1\r\n\r\n")).is_err() {
            thread::sleep(Duration::from_millis(5));
        }
    });
    let error = TcpControl::connect_with(&absent, &[], options(), after(500)).unwrap_err().to_string();
    stranger.join().unwrap();
    assert!(error.contains("1 connection came to nothing") && error.contains("does not speak"), "{error}");
}

#[test]
fn rank_0_says_whom_it_refused_and_no_rubbish_hides_it() {
    type Change = fn(&mut Job);
    let changes: [(Change, &str); 3] = [
        (|job| job.secret = Secret::new("another secret for tests").unwrap(), "as a rank with another secret does"),
        (|job| job.id = "other".into(), "rank 1 belongs to job \"other\", but this is job \"test\""),
        (|job| job.epoch = 3, "rank 1 is of epoch 3, but this job is at epoch 0"),
    ];
    for (change, text) in changes {
        let (address, addr) = free_address();
        let jobs = [job(0, 2, &address), job(1, 2, &address)];
        let mut errors = texts(run(&jobs, |job| {
            if job.rank == 0 {
                return TcpControl::connect_with(job, &[], options(), after(1500)).map(drop);
            }
            let mut wrong = job.clone();
            change(&mut wrong);
            let start = Instant::now();
            let result = TcpControl::connect_with(&wrong, &[], options(), after(10_000)).map(drop);
            assert!(start.elapsed() < Duration::from_secs(1), "it is told at once, not at the deadline");
            for _ in 0..3 {
                TcpStream::connect(addr).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            }
            result
        }));
        let (there, here) = (errors.pop().unwrap(), errors.pop().unwrap());
        assert!(here.contains("4 connections came to nothing") && here.contains(text), "{here}");
        if text.contains("secret") {
            assert!(there.contains(&addr.to_string()) && there.contains("COMM_SECRET_FILE"), "{there}");
        } else {
            assert!(there.contains(text), "{there}");
        }
    }
}

#[test]
fn something_else_at_the_address_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail.example ESMTP").unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    });
    let job = job(1, 2, &Address::Tcp { host: "127.0.0.1".into(), port: addr.port() });
    let error = connect(&job).unwrap_err().to_string();
    assert!(error.contains("not this job's rank 0") && error.contains("COMM_PORT"), "{error}");
    server.join().unwrap();
}

/// Passes bytes between a dialler and rank 0, changed by `up`, and records those that go up.
fn relay(
    to: SocketAddr,
    mut up: impl FnMut(&mut [u8], usize) + Send + 'static,
) -> (SocketAddr, thread::JoinHandle<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let thread = thread::spawn(move || {
        let (near, _) = listener.accept().unwrap();
        let far = loop {
            match TcpStream::connect(to) {
                Ok(far) => break far,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        let (mut near_read, mut far_write) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let upwards = thread::spawn(move || {
            let mut record = Vec::new();
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = near_read.read(&mut bytes) {
                up(&mut bytes[..count], record.len());
                record.extend_from_slice(&bytes[..count]);
                if far_write.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = far_write.shutdown(Shutdown::Write);
            record
        });
        let (mut from, mut to) = (far, near);
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
        upwards.join().unwrap()
    });
    (addr, thread)
}

fn port(addr: SocketAddr) -> Address {
    Address::Tcp { host: addr.ip().to_string(), port: addr.port() }
}

#[test]
fn a_recorded_connection_lets_nobody_in() {
    let (address, addr) = free_address();
    let (relayed, record) = relay(addr, |_, _| {});
    run(&[job(0, 2, &address), job(1, 2, &port(relayed))], |job| {
        let control = connect(job).unwrap();
        control.leave(after(5000)).unwrap();
    });
    let record = record.join().unwrap();
    assert!(record.len() > 100);

    let again = thread::spawn(move || {
        let mut stream = loop {
            match TcpStream::connect(addr) {
                Ok(stream) => break stream,
                Err(_) => thread::sleep(Duration::from_millis(5)),
            }
        };
        let _ = stream.write_all(&record);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
    });
    let result = TcpControl::connect_with(&job(0, 2, &address), &[("seed", "7".into())], options(), after(700));
    let error = result.unwrap_err();
    again.join().unwrap();
    assert!(matches!(&error, Error::Timeout { waiting_for, .. } if *waiting_for == [1]), "{error}");
    assert!(error.to_string().contains("does not know this job's secret"), "{error}");
}

/// A hello as a rank sends it, which anybody can write.
fn hello(rank: u32, world_size: u32, epoch: u64, job: &str) -> Vec<u8> {
    let mut bytes = b"ISOCTRL\0\x02\0".to_vec();
    bytes.extend_from_slice(&rank.to_le_bytes());
    bytes.extend_from_slice(&world_size.to_le_bytes());
    bytes.extend_from_slice(&epoch.to_le_bytes());
    bytes.extend_from_slice(&[5; 32]);
    bytes.extend_from_slice(&(job.len() as u16).to_le_bytes());
    bytes.extend_from_slice(job.as_bytes());
    bytes
}

fn dial_until_there(addr: SocketAddr) -> TcpStream {
    loop {
        match TcpStream::connect(addr) {
            Ok(stream) => return stream,
            Err(_) => thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn proofs_that_are_not_a_ranks_own_let_nobody_in() {
    let (address, addr) = free_address();
    let jobs = [job(0, 2, &address), job(1, 2, &address)];
    run(&jobs, |job| {
        if job.rank == 1 {
            type Proof = fn(&[u8]) -> Vec<u8>;
            let proofs: [(&str, Proof); 3] = [
                ("rank 0's own, sent back", |reply| reply[42..].to_vec()),
                ("rank 0's nonce", |reply| reply[10..42].to_vec()),
                ("nothing but zeroes", |_| vec![0; 32]),
            ];
            for (what, proof) in proofs {
                let mut stream = dial_until_there(addr);
                stream.write_all(&hello(1, 2, 0, "test")).unwrap();
                let mut reply = [0; 74];
                stream.read_exact(&mut reply).unwrap();
                stream.write_all(&proof(&reply)).unwrap();
                let mut word = Vec::new();
                let _ = stream.read_to_end(&mut word);
                assert!(word.is_empty(), "{what}: answered with {} bytes", word.len());
            }
        }
        connect(job).unwrap().leave(after(5000)).unwrap();
    });
}

#[test]
fn a_mirror_at_the_address_is_not_taken_for_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port(listener.local_addr().unwrap());
    let mirror = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = [0; 1024];
        while let Ok(count @ 1..) = stream.read(&mut bytes) {
            // Twice, for rank 0's answer is longer than what it answers.
            if stream.write_all(&[&bytes[..count], &bytes[..count]].concat()).is_err() {
                break;
            }
        }
    });
    let start = Instant::now();
    let error = connect(&job(1, 2, &address)).unwrap_err().to_string();
    assert!(error.contains("does not know this job's secret") && error.contains(&address.to_string()), "{error}");
    assert!(start.elapsed() < Duration::from_secs(2), "its handshake is enough to see that");
    mirror.join().unwrap();
}

#[test]
fn a_connection_recorded_at_an_earlier_epoch_lets_nobody_in() {
    let (address, addr) = free_address();
    let (relayed, record) = relay(addr, |_, _| {});
    run(&[job(0, 2, &address), job(1, 2, &port(relayed))], |job| {
        connect(job).unwrap().leave(after(5000)).unwrap();
    });
    let record = record.join().unwrap();
    let mut jobs = [job(0, 2, &address), job(1, 2, &address)];
    jobs.iter_mut().for_each(|job| job.epoch = 1);
    run(&jobs, |job| {
        if job.rank == 1 {
            let mut stream = dial_until_there(addr);
            let _ = stream.write_all(&record);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            assert!(answer.len() <= 74, "no more than rank 0's own proof: {} bytes", answer.len());
        }
        connect(job).unwrap().leave(after(5000)).unwrap();
    });
}

#[test]
fn keys_follow_from_the_settings_too() {
    let key = |seed: &str| {
        let keys = run(&jobs(2), |job| {
            let control = TcpControl::connect_with(job, &[("seed", seed.into())], options(), after(10_000)).unwrap();
            control.derive_key("a")
        });
        assert_eq!(keys[0], keys[1]);
        keys[0]
    };
    assert_ne!(key("7"), key("8"));
}

#[test]
fn rank_0_listens_at_the_address_that_was_asked_for_and_no_other() {
    for host in ["127.0.0.1", "127.0.0.2", "localhost"] {
        let (_, addr) = free_address();
        let address = Address::Tcp { host: host.into(), port: addr.port() };
        let jobs = [job(0, 2, &address), job(1, 2, &address)];
        run(&jobs, |job| {
            let control = connect(job).unwrap();
            if let Some(listening) = control.listening() {
                assert!(listening.ip().is_loopback() && listening.port() == addr.port(), "{listening}");
                assert!(host == "localhost" || listening.ip().to_string() == host, "{listening}");
                assert!(TcpStream::connect(("127.0.0.3", addr.port())).is_err(), "reached at another address");
            }
            control.leave(after(5000)).unwrap();
        });
    }
}

#[test]
fn nobody_meets_at_an_address_of_everybody() {
    for host in ["0.0.0.0", "0", "::", "::ffff:0.0.0.0", "255.255.255.255", "127.255.255.255", "224.0.0.1", "ff02::1"] {
        let start = Instant::now();
        for rank in 0..2 {
            let job = job(rank, 2, &Address::Tcp { host: host.into(), port: 4000 });
            let error = connect(&job).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{host}, rank {rank}: {error}");
        }
        assert!(start.elapsed() < Duration::from_secs(1), "{host}: somebody waited");
    }
}

#[test]
fn an_address_file_that_is_something_else_is_left_alone_and_nobody_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let big = dir.path().join("big");
    std::fs::write(&big, vec![b' '; 1 << 20]).unwrap();
    for (path, what) in [
        (fifo.clone(), "is a FIFO"),
        (dir.path().to_path_buf(), "is a directory"),
        ("/dev/null".into(), "is a device"),
        (big.clone(), "at most 256"),
    ] {
        let start = Instant::now();
        let error = connect(&job(1, 2, &Address::File(path.clone()))).unwrap_err().to_string();
        assert!(error.contains(what) && error.contains(&path.display().to_string()), "{error}");
        if path != big {
            let error = connect(&job(0, 2, &Address::File(path.clone()))).unwrap_err().to_string();
            assert!(error.contains("left alone"), "{error}");
            assert!(path.exists());
        }
        assert!(start.elapsed() < Duration::from_secs(1));
    }
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
    let errors = run(&[job(0, 2, &address), job(1, 2, &port(relayed))], |job| {
        let control = connect(job).unwrap();
        control.all_gather("honest", b"x", after(5000)).unwrap();
        *seen.lock().unwrap() = true;
        wait_for_failure(&control).to_string()
    });
    record.join().unwrap();
    assert!(errors[0].contains("not authentic"), "{errors:?}");
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
        let control = TcpControl::connect_with(job, &[], options, after(5000)).unwrap();
        barrier.wait();
        let _guard = (job.rank == 1).then(|| silent.lock().unwrap());
        let start = Instant::now();
        let error = wait_for_failure(&control);
        assert!(start.elapsed() < Duration::from_secs(2));
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
    run(&jobs, |job| {
        let control = connect(job).unwrap();
        let start = Instant::now();
        drop(control);
        assert!(start.elapsed() < Duration::from_millis(500));
    });
}

#[test]
fn bad_options_are_refused() {
    let job = &jobs(2)[0];
    let options = TcpOptions { heartbeat: Duration::from_secs(40), ..TcpOptions::default() };
    assert!(matches!(TcpControl::connect_with(job, &[], options, after(100)), Err(Error::InvalidArgument(_))));
}

#[test]
fn intervals_have_to_be_the_same() {
    let errors = texts(run(&jobs(2), |job| {
        let heartbeat = Duration::from_millis(if job.rank == 0 { 50 } else { 70 });
        TcpControl::connect_with(job, &[], TcpOptions { heartbeat, ..options() }, after(10_000))
    }));
    assert!(errors.iter().all(|e| e.contains("rank 1 has control heartbeat = 70ms")), "{errors:?}");
}
