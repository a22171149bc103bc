//! How many threads a transport has. A test program of its own, because it counts all threads of the process.

#![allow(clippy::unwrap_used, reason = "only tests come here")]

mod common;

use std::time::Duration;

use comm_core::conformance::Barrier;

use comm_tcp::TcpOptions;

use common::{Kind, job, soon};

#[test]
fn the_number_of_threads_does_not_grow_with_peers() {
    for kind in Kind::ALL {
        // With two ranks only one of them listens, and has a relay.
        for (ranks, lanes, gates) in [(2, 1, 1), (2, 3, 1), (5, 3, 5)] {
            let expected = match kind {
                Kind::Raw => 0,
                Kind::Zmq | Kind::ZmqWithoutGate | Kind::ZmqOverIpc => ranks * lanes,
                Kind::ZmqBehindRelay => ranks * lanes + gates,
            };
            let (connected, counted) = (Barrier::new(ranks), Barrier::new(ranks));
            job(kind, ranks, &TcpOptions { lanes, ..TcpOptions::default() }, |transport| {
                connected.wait();
                if transport.rank() == 0 {
                    // `zeromq` removes its socket files on a thread that goes away soon after.
                    std::thread::sleep(Duration::from_millis(200));
                    let threads = (std::fs::read_dir("/proc/self/task").unwrap())
                        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
                        .filter(|name| name.starts_with("comm-tcp"))
                        .count();
                    assert_eq!(threads, expected, "{kind:?}, {ranks} ranks, {lanes} lanes");
                }
                counted.wait();
                transport.close(soon()).unwrap();
            });
            // Dropped runtimes end their threads in their own time.
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}
