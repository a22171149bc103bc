//! Many unauthenticated connections to rank 0's port, in a process of its own: it counts this process's threads and descriptors.

#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::control::TcpControl;
use comm_core::job::{Address, Job, Secret};
use comm_core::{Control, Deadline};

/// Many more connections than rank 0 serves at a time.
const SILENT: usize = 2000;
const DRIPPING: usize = 50;
/// Connections that are made one after the other while the ranks connect.
const COMING: usize = 500;

/// What rank 0 may hold for unauthenticated connections, and a little for the ranks and this test.
const DESCRIPTORS: usize = 256 + 64;

fn count(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

/// How many descriptors this process may have.
fn limit() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
    line.split_whitespace().nth(3).unwrap().parse().unwrap_or(usize::MAX)
}

/// The begin of a hello, a byte at a time, on many connections; how many were shut.
fn drip(addr: SocketAddr, stop: &AtomicBool) -> usize {
    let hello = b"ISOCTRL\0\x02\0\x01\0\0\0\x03\0\0\0";
    let mut shut = 0;
    let mut drops: Vec<(TcpStream, usize)> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        while drops.len() < DRIPPING {
            drops.push((TcpStream::connect(addr).unwrap(), 0));
        }
        drops.retain_mut(|(stream, at)| {
            let sent = stream.write_all(&[hello[*at % hello.len()]]).is_ok();
            *at += 1;
            shut += usize::from(!sent);
            sent
        });
        thread::sleep(Duration::from_millis(20));
    }
    shut
}

/// Ends the connections, whatever becomes of the test.
struct Ending<'a>(&'a AtomicBool);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn many_connections_delay_no_rank_and_cost_a_bounded_amount() {
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = Address::Tcp { host: "127.0.0.1".into(), port: addr.port() };
    let secret = Secret::new("a secret for tests only").unwrap();
    let job = |rank| Job::new(rank, 3, address.clone(), secret.clone()).unwrap();
    let connect = |rank| TcpControl::connect(&job(rank), &[], Deadline::after(Duration::from_secs(30))).unwrap();

    let stop = &AtomicBool::new(false);
    thread::scope(|scope| {
        let ending = Ending(stop);
        let first = scope.spawn(|| {
            let control = connect(0);
            control.all_gather("there", b"", Deadline::after(Duration::from_secs(60))).unwrap();
            control
        });
        while TcpStream::connect(addr).is_err() {
            thread::sleep(Duration::from_millis(5));
        }
        let threads = count("/proc/self/task");
        let silent = SILENT.min(limit().saturating_sub(DESCRIPTORS + DRIPPING + COMING + 100));
        let _silent: Vec<TcpStream> = (0..silent).map(|_| TcpStream::connect(addr).unwrap()).collect();
        let dripping = scope.spawn(|| drip(addr, stop));
        let coming = scope.spawn(|| {
            let mut came = 0;
            while !stop.load(Ordering::Relaxed) {
                let connections: Vec<_> = (0..COMING).map_while(|_| TcpStream::connect(addr).ok()).collect();
                came += connections.len();
                thread::sleep(Duration::from_millis(10));
            }
            came
        });
        let watching = scope.spawn(|| {
            let (mut descriptors, mut threads) = (0, 0);
            while !stop.load(Ordering::Relaxed) {
                descriptors = descriptors.max(count("/proc/self/fd"));
                threads = threads.max(count("/proc/self/task"));
                thread::sleep(Duration::from_millis(5));
            }
            (descriptors, threads)
        });
        // Until the limit has been reached many times over.
        thread::sleep(Duration::from_millis(500));
        let start = Instant::now();
        let others = [1, 2].map(|rank| {
            scope.spawn(move || {
                let control = connect(rank);
                let took = start.elapsed();
                control.all_gather("there", b"", Deadline::after(Duration::from_secs(60))).unwrap();
                (control, took)
            })
        });
        let mut controls = vec![first.join().unwrap()];
        for (rank, other) in others.into_iter().enumerate() {
            let (control, took) = other.join().unwrap();
            println!("rank {} was in after {took:?}", rank + 1);
            // Waiting for the silent connections to time out would take minutes.
            assert!(took < Duration::from_secs(4), "{took:?}");
            controls.push(control);
        }
        thread::sleep(Duration::from_millis(200));
        drop(ending);
        let (descriptors, most_threads) = watching.join().unwrap();
        let (shut, came) = (dripping.join().unwrap(), coming.join().unwrap());
        let own = descriptors - silent.min(descriptors);
        println!(
            "{silent} silent, {shut} dripping ones shut, {came} came meanwhile; {descriptors} descriptors, {most_threads} threads"
        );
        assert!(own <= DESCRIPTORS + DRIPPING + COMING, "{own} descriptors beside the silent strangers' own");
        // This test's own: three that attack or watch, two ranks with a thread of the control plane each.
        assert!(most_threads <= threads + 3 + 4, "{most_threads} threads, {threads} before");
        assert!(controls.iter().all(|control| control.failure().is_none()));
        thread::scope(|scope| {
            for control in &controls {
                scope.spawn(|| control.leave(Deadline::after(Duration::from_secs(60))).unwrap());
            }
        });
    });
}
