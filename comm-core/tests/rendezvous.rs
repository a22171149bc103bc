//! How ranks meet over real sockets, and which connections are refused.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use comm_core::conformance::Barrier;
use comm_core::control::{MissingRanksReport, TcpControl, TcpOptions};
use comm_core::job::{Address, Job, Secret};
use comm_core::{Control, Error};

use crate::common::{after, connect, free_address, job, jobs, options, port, relay, run, texts};

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
        control.leave(after(20_000)).unwrap();
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
    assert!(errors.iter().all(|e| e.contains("rank 2 was started for 4 ranks, and rank 0 for 3")), "{errors:?}");
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
        control.leave(after(20_000)).unwrap();
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

/// Meets, and tells of every report.
fn meet_watched(job: &Job, tell: &mpsc::Sender<MissingRanksReport>) {
    let report = |report: &MissingRanksReport| tell.send(report.clone()).unwrap();
    let watch = (Some(Duration::from_millis(50)), &report as &dyn Fn(&MissingRanksReport));
    let control = TcpControl::connect_watched(job, &[], options(), after(30_000), watch).unwrap();
    control.leave(after(20_000)).unwrap();
}

/// The next report of `rank` that `fits`.
fn report_of(
    told: &mpsc::Receiver<MissingRanksReport>,
    rank: usize,
    fits: impl Fn(&MissingRanksReport) -> bool,
) -> String {
    loop {
        let report = told.recv_timeout(Duration::from_secs(20)).unwrap();
        if report.rank == rank && fits(&report) {
            return report.to_string();
        }
    }
}

#[test]
fn ranks_that_do_not_come_are_reported_on_all_until_they_do() {
    let jobs = &jobs(4);
    thread::scope(|scope| {
        let come = |rank: usize| {
            let (tell, told) = mpsc::channel();
            scope.spawn(move || meet_watched(&jobs[rank], &tell));
            told
        };
        let told = [come(0), come(2)];
        for (told, rank) in told.iter().zip([0, 2]) {
            let text = report_of(told, rank, |report| report.missing == [1, 3]);
            let address = jobs[0].address.to_string();
            assert!(text.contains(&format!("for ranks 1, 3, meeting 4 ranks at {address}")), "{text}");
        }
        let _told = [come(1), come(3)];
    });
}

#[test]
fn a_rank_0_that_does_not_come_is_reported_with_the_address_that_was_tried() {
    let (address, addr) = free_address();
    let (tell, told) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| meet_watched(&job(1, 2, &address), &tell));
        let text = report_of(&told, 1, |report| report.missing == [0]);
        assert!(
            text.contains(&format!("dialling rank 0 at {addr} (last attempt: {addr}: Connection refused")),
            "{text}"
        );
        let (tell, _told) = mpsc::channel();
        let address = &address;
        scope.spawn(move || meet_watched(&job(0, 2, address), &tell));
    });
}

#[test]
fn listeners_are_best_at_the_address_that_routes_to_rank_0() {
    for (host, own) in [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")] {
        let address = Address::Tcp { host: host.into(), port: free_address().1.port() };
        let jobs: Vec<Job> = (0..3).map(|rank| job(rank, 3, &address)).collect();
        let addresses = run(&jobs, |job| {
            let control = connect(job).unwrap();
            let address = control.local_address().unwrap().ip();
            control.leave(after(20_000)).unwrap();
            address
        });
        assert_eq!(addresses[0].to_string(), own);
        assert!(addresses.iter().all(|ip| ip.is_loopback()), "{addresses:?}");
    }
}

#[test]
fn without_rank_0_dialling_ends_at_the_deadline() {
    let jobs = jobs(2);
    let start = Instant::now();
    let error = TcpControl::connect_with(&jobs[1], &[], options(), after(300)).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10));
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
        (|job| job.epoch = 3, "has epoch 3, but this job has epoch 4"),
    ];
    for (change, text) in changes {
        let mut jobs = jobs(2);
        jobs.iter_mut().for_each(|job| job.epoch = 4);
        let mut wrong = jobs[1].clone();
        change(&mut wrong);
        run(&jobs, |job| {
            if job.rank == 1 {
                let error = connect(&wrong).unwrap_err().to_string();
                assert!(error.contains(text), "{error}");
            }
            connect(job).unwrap().leave(after(20_000)).unwrap();
        });
    }
}

#[test]
fn a_rank_that_is_started_again_before_rank_0_waits_for_it() {
    let (address, _) = free_address();
    let of_epoch = |rank, epoch| Job { epoch, ..job(rank, 2, &address) };
    thread::scope(|scope| {
        // Rank 0 of the first start is still there, and waits for its own rank 1.
        let stale = scope.spawn(|| TcpControl::connect_with(&of_epoch(0, 1), &[], options(), after(60_000)).map(drop));
        let again = scope.spawn(|| TcpControl::connect_with(&of_epoch(1, 2), &[], options(), after(60_000)));
        let began = Instant::now();
        let error = stale.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("rank 1 has epoch 2, but this job has epoch 1, an earlier start"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(20), "it ends when a later start is there");
        let first = TcpControl::connect_with(&of_epoch(0, 2), &[], options(), after(20_000)).unwrap();
        let second = again.join().unwrap().unwrap();
        run(&[of_epoch(0, 2), of_epoch(1, 2)], |job| {
            let control = if job.rank == 0 { &first } else { &second };
            control.leave(after(20_000)).unwrap();
        });
    });
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
                // The other end may have closed the connection already.
                let _ = stream.write_all(rubbish);
                strangers.push(stream);
            }
        }
        let control = connect(job).unwrap();
        control.all_gather("there", b"", after(20_000)).unwrap();
        control.leave(after(20_000)).unwrap();
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
    assert!(
        error.contains("1 connection was rejected") && error.contains("does not use the control protocol"),
        "{error}"
    );
}

#[test]
fn rank_0_says_whom_it_refused_and_no_rubbish_hides_it() {
    type Change = fn(&mut Job);
    let changes: [(Change, &str); 3] = [
        (|job| job.secret = Secret::new("another secret for tests").unwrap(), "as a rank with another secret does"),
        (|job| job.id = "other".into(), "rank 1 belongs to job \"other\", but this is job \"test\""),
        (|job| job.epoch = 3, "rank 1 has epoch 3, but this job has epoch 4"),
    ];
    for (change, text) in changes {
        let (address, addr) = free_address();
        let mut jobs = [job(0, 2, &address), job(1, 2, &address)];
        jobs.iter_mut().for_each(|job| job.epoch = 4);
        let mut errors = texts(run(&jobs, |job| {
            if job.rank == 0 {
                return TcpControl::connect_with(job, &[], options(), after(1500)).map(drop);
            }
            let mut wrong = job.clone();
            change(&mut wrong);
            let start = Instant::now();
            let result = TcpControl::connect_with(&wrong, &[], options(), after(60_000)).map(drop);
            assert!(start.elapsed() < Duration::from_secs(10), "it is told at once, not at the deadline");
            for _ in 0..3 {
                TcpStream::connect(addr).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
            }
            result
        }));
        let (there, here) = (errors.pop().unwrap(), errors.pop().unwrap());
        assert!(here.contains("4 connections were rejected") && here.contains(text), "{here}");
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
    assert!(error.contains("not rank 0 of this job") && error.contains("COMM_PORT"), "{error}");
    server.join().unwrap();
}

#[test]
fn a_recorded_connection_lets_nobody_in() {
    let (address, addr) = free_address();
    let (relayed, record) = relay(addr, |_, _| {});
    run(&[job(0, 2, &address), job(1, 2, &port(relayed))], |job| {
        let control = connect(job).unwrap();
        control.leave(after(20_000)).unwrap();
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
        connect(job).unwrap().leave(after(20_000)).unwrap();
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
    assert!(start.elapsed() < Duration::from_secs(5), "its handshake is enough to see that");
    mirror.join().unwrap();
}

#[test]
fn a_connection_recorded_at_an_earlier_epoch_lets_nobody_in() {
    let (address, addr) = free_address();
    let (relayed, record) = relay(addr, |_, _| {});
    run(&[job(0, 2, &address), job(1, 2, &port(relayed))], |job| {
        connect(job).unwrap().leave(after(20_000)).unwrap();
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
        connect(job).unwrap().leave(after(20_000)).unwrap();
    });
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
            control.leave(after(20_000)).unwrap();
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
        assert!(start.elapsed() < Duration::from_secs(5), "{host}: somebody waited");
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
            assert!(error.contains("not overwritten"), "{error}");
            assert!(path.exists());
        }
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}

#[test]
fn intervals_have_to_be_the_same() {
    let errors = texts(run(&jobs(2), |job| {
        let heartbeat = Duration::from_millis(if job.rank == 0 { 50 } else { 70 });
        TcpControl::connect_with(job, &[], TcpOptions { heartbeat, ..options() }, after(10_000))
    }));
    assert!(errors.iter().all(|e| e.contains("rank 1 has control heartbeat = 70ms")), "{errors:?}");
}
