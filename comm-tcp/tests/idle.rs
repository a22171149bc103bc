//! What connected transports cost while nothing is to do. A test program of its own, because it counts the CPU time of the
//! whole process.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "only tests come here")]

mod common;

use std::thread;
use std::time::Duration;

use comm_core::conformance::Barrier;
use comm_core::{Transport, Waiting};
use comm_tcp::TcpOptions;

use common::{Kind, controls, receive, send, soon};

const WATCHED: Duration = Duration::from_secs(2);

/// CPU time that all kinds of transport together may use while nothing happens, as a share of one core.
const IDLE: f64 = 0.02;

#[test]
fn nothing_is_used_up_between_exchanges_nor_by_a_rank_that_sleeps_in_one() {
    let modes: Vec<(Kind, Waiting)> =
        Kind::ALL.into_iter().flat_map(|kind| Waiting::ALL.map(|waiting| (kind, waiting))).collect();
    let controls = controls(2);
    let barrier = Barrier::new(3);
    thread::scope(|scope| {
        for control in &controls {
            let (modes, barrier) = (&modes, &barrier);
            scope.spawn(move || {
                let transports: Vec<_> = (modes.iter())
                    .map(|(kind, waiting)| {
                        let options = TcpOptions { lanes: 1, waiting: *waiting, ..TcpOptions::default() };
                        (*waiting, kind.connect(&**control, &options, soon()).unwrap())
                    })
                    .collect();
                for (_, transport) in &transports {
                    greet(&**transport);
                }
                barrier.wait();
                // Watched: all are connected and have been used.
                barrier.wait();
                thread::scope(|scope| {
                    for (waiting, transport) in &transports {
                        if *waiting != Waiting::Busy && transport.rank() == 1 {
                            scope.spawn(move || assert_eq!(receive(&**transport, 0, 0, soon()).unwrap(), b"at last"));
                        }
                    }
                    barrier.wait();
                    // Watched: rank 1 waits on all that may sleep.
                    barrier.wait();
                    for (waiting, transport) in &transports {
                        if *waiting != Waiting::Busy && transport.rank() == 0 {
                            send(&**transport, 0, 1, b"at last").unwrap();
                        }
                    }
                });
                for (_, transport) in &transports {
                    transport.close(soon()).unwrap();
                }
            });
        }
        barrier.wait();
        let idle = watch();
        barrier.wait();
        barrier.wait();
        let waiting = watch();
        barrier.wait();
        assert!(idle < IDLE, "idle transports used {:.1} % of a core", 100.0 * idle);
        assert!(waiting < IDLE, "ranks that wait used {:.1} % of a core", 100.0 * waiting);
    });
}

/// A message each way.
fn greet(transport: &dyn Transport) {
    let peer = 1 - transport.rank();
    send(transport, 0, peer, b"hello").unwrap();
    assert_eq!(receive(transport, 0, peer, soon()).unwrap(), b"hello");
}

/// The share of a core that this process uses, after a moment in which what has just begun may settle.
fn watch() -> f64 {
    thread::sleep(Duration::from_millis(300));
    let before = cpu_time();
    thread::sleep(WATCHED);
    (cpu_time() - before).as_secs_f64() / WATCHED.as_secs_f64()
}

/// User and system time of all threads that are alive.
fn cpu_time() -> Duration {
    let nanoseconds = std::fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        let text = std::fs::read_to_string(task.unwrap().path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(nanoseconds.sum())
}
