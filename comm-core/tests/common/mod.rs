//! What the tests of the control plane share: jobs whose ranks are threads, over real sockets.
#![allow(dead_code, reason = "each test program uses a part")]
#![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use comm_core::control::{TcpControl, TcpOptions};
use comm_core::job::{Address, Job, Secret};
use comm_core::{Control, Deadline, Error, Result};

pub(crate) const SECRET: &str = "a secret for tests only";

/// An address where nothing listens there yet.
pub(crate) fn free_address() -> (Address, SocketAddr) {
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    (Address::Tcp { host: "127.0.0.1".into(), port: addr.port() }, addr)
}

pub(crate) fn job(rank: usize, world_size: usize, address: &Address) -> Job {
    let mut job = Job::new(rank, world_size, address.clone(), Secret::new(SECRET).unwrap()).unwrap();
    job.id = "test".into();
    job
}

pub(crate) fn jobs(world_size: usize) -> Vec<Job> {
    let (address, _) = free_address();
    (0..world_size).map(|rank| job(rank, world_size, &address)).collect()
}

pub(crate) fn options() -> TcpOptions {
    TcpOptions {
        heartbeat: Duration::from_millis(50),
        liveness: Duration::from_secs(10),
        handshake: Duration::from_millis(400),
    }
}

pub(crate) fn after(millis: u64) -> Deadline {
    Deadline::after(Duration::from_millis(millis))
}

pub(crate) fn connect(job: &Job) -> Result<Arc<TcpControl>> {
    TcpControl::connect_with(job, &[("seed", "7".into())], options(), after(10_000))
}

/// Runs `work` for every job at once; results in the order of the jobs.
pub(crate) fn run<R: Send>(jobs: &[Job], work: impl Fn(&Job) -> R + Sync) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = jobs.iter().map(|job| scope.spawn(|| work(job))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Runs `work` on every rank of a job of `n` ranks that have met.
pub(crate) fn group<R: Send>(n: usize, work: impl Fn(Arc<TcpControl>) -> R + Sync) -> Vec<R> {
    run(&jobs(n), |job| work(connect(job).unwrap()))
}

pub(crate) fn texts<T>(results: Vec<Result<T>>) -> Vec<String> {
    results.into_iter().map(|r| r.err().expect("an error").to_string()).collect()
}

pub(crate) fn wait_for_failure(control: &TcpControl) -> Error {
    let (told, failure) = mpsc::channel();
    let told = Mutex::new(told);
    control.on_failure(Box::new(move |error| told.lock().unwrap().send(error.clone()).unwrap()));
    failure.recv_timeout(Duration::from_secs(5)).expect("the job should have failed")
}

/// Passes bytes between a dialler and rank 0, changed by `up`, and records those that go up.
pub(crate) fn relay(
    to: SocketAddr,
    up: impl FnMut(&mut [u8], usize) + Send + 'static,
) -> (SocketAddr, thread::JoinHandle<Vec<u8>>) {
    relay_both(to, up, |_| ())
}

/// As [`relay`], with bytes that go down changed by `down`.
pub(crate) fn relay_both(
    to: SocketAddr,
    mut up: impl FnMut(&mut [u8], usize) + Send + 'static,
    mut down: impl FnMut(&mut [u8]) + Send + 'static,
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
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            down(&mut bytes[..count]);
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
        upwards.join().unwrap()
    });
    (addr, thread)
}

pub(crate) fn port(addr: SocketAddr) -> Address {
    Address::Tcp { host: addr.ip().to_string(), port: addr.port() }
}
