//! The connections can be looked at while somebody else has the transport.

use std::thread;
use std::time::Duration;

use comm_core::Transport;
use comm_core::conformance::Barrier;
use comm_quic::{Congestion, QuicOptions};

use crate::common::{job, soon, swap_with_all};

#[test]
fn figures_of_eight_megabytes_make_sense() {
    const PAYLOAD: u64 = 8 << 20;
    let options = QuicOptions { lanes: 2, ..QuicOptions::default() };
    let together = Barrier::new(2);
    job(2, &options, |transport, _control| {
        let monitor = transport.monitor();
        assert!(matches!(monitor.congestion(), Congestion::FixedWindow(_)), "{}", monitor.congestion());
        let transport: Box<dyn Transport> = Box::new(transport);
        let before = monitor.paths();
        together.wait();
        swap_with_all(&*transport, 0, PAYLOAD as usize / 2);
        swap_with_all(&*transport, 1, PAYLOAD as usize / 2);
        // Whoever is done has received everything, and sent all that the other one has received.
        together.wait();
        let (before, after) = (before[0], monitor.paths()[0]);
        assert_eq!(after.peer, 1 - transport.rank());
        assert!(after.address.ip().is_loopback() && after.address == before.address, "{after:?}");
        assert!(after.rtt > Duration::ZERO && after.rtt < Duration::from_secs(10), "{after:?}");
        assert!(after.min_rtt <= after.rtt.max(before.min_rtt), "{after:?}");
        assert!((1 << 16..1 << 32).contains(&after.congestion_window), "{after:?}");
        let grown = |count: fn(&comm_quic::PeerPath) -> u64| count(&after) - count(&before);
        // Headers and acknowledgements are a few percent; what is lost is sent again.
        let most = PAYLOAD + PAYLOAD / 4;
        let sent = grown(|path| path.sent_bytes) - grown(|path| path.lost_bytes);
        assert!((PAYLOAD..most).contains(&sent), "{after:?}");
        assert!(grown(|path| path.received_bytes) >= PAYLOAD, "{after:?}");
        let packets = grown(|path| path.sent_packets);
        assert!(packets >= PAYLOAD / u64::from(after.mtu) && packets < PAYLOAD / 1000, "{after:?}");
        transport.close(soon()).unwrap();
        assert!(monitor.paths()[0].sent_bytes >= after.sent_bytes);
        drop(transport);
        assert!(monitor.paths().is_empty());
    });
}

#[test]
fn a_transport_may_go_away_while_it_is_looked_at() {
    for round in 0..8 {
        let swapped = Barrier::new(2);
        job(2, &QuicOptions::default(), |transport, _control| {
            let monitor = transport.monitor();
            thread::scope(|scope| {
                scope.spawn(move || {
                    while !monitor.paths().is_empty() {
                        thread::yield_now();
                    }
                });
                swap_with_all(&transport, 0, 1000);
                swapped.wait();
                if round % 2 == 0 {
                    transport.close(soon()).unwrap();
                }
                drop(transport);
            });
        });
    }
}
