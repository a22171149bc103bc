//! Messages arrive, whatever their size and whatever else is under way.

use std::thread;
use std::time::Duration;

use comm_core::conformance::Barrier;
use comm_core::{Control, Error, Transport};
use comm_quic::{Congestion, QuicOptions};

use crate::common::{job, pattern, receive, send, soon, swap_with_all};

#[test]
fn messages_of_many_sizes_arrive_in_order() {
    job(2, &QuicOptions::default(), |transport, _control| {
        for len in [0, 1, 63, 64, 65, 63 << 10, (64 << 10) - 64, (64 << 10) - 63, 64 << 10, 0, 5 << 20, 3] {
            swap_with_all(&transport, 0, len);
        }
        transport.close(soon()).unwrap();
    });
}

#[test]
fn messages_larger_than_all_windows_cross() {
    job(2, &QuicOptions::default(), |transport, _control| {
        swap_with_all(&transport, 0, 64 << 20);
        transport.close(soon()).unwrap();
    });
}

#[test]
fn three_ranks_use_two_lanes_at_once() {
    job(3, &QuicOptions::default(), |transport, _control| {
        thread::scope(|scope| {
            for lane in 0..2 {
                let transport = &transport;
                scope.spawn(move || {
                    for len in [0, 17, 300_000, 2 << 20, 1] {
                        swap_with_all(transport, lane, len);
                    }
                });
            }
        });
        transport.close(soon()).unwrap();
    });
}

#[test]
fn a_lane_that_nobody_reads_does_not_hold_up_another() {
    let barrier = Barrier::new(2);
    job(2, &QuicOptions { receive_window: 64 << 10, ..QuicOptions::default() }, |transport, _control| {
        let large = pattern(0, 1, 0, 40 << 20);
        if transport.rank() == 0 {
            thread::scope(|scope| {
                let blocked = scope.spawn(|| send(&transport, 0, 1, &large));
                for _ in 0..20 {
                    swap_with_all(&transport, 1, 1 << 20);
                }
                assert!(!blocked.is_finished(), "the windows are larger than thought");
                barrier.wait();
                blocked.join().unwrap().unwrap();
            });
        } else {
            for _ in 0..20 {
                swap_with_all(&transport, 1, 1 << 20);
            }
            barrier.wait();
            assert!(receive(&transport, 0, 0, soon()).unwrap() == large);
        }
        transport.close(soon()).unwrap();
    });
}

#[test]
fn every_congestion_control_carries_every_datagram_size() {
    for congestion in [Congestion::Cubic, Congestion::NewReno, Congestion::Bbr, Congestion::FixedWindow(1 << 20)] {
        for mtu in [Some(1200), Some(6550), Some(20_000), None] {
            let options = QuicOptions { congestion, mtu, ..QuicOptions::default() };
            job(2, &options, |transport, _control| {
                swap_with_all(&transport, 1, 3 << 20);
                let paths = transport.paths();
                assert_eq!(paths.len(), 1);
                assert_eq!(paths[0].peer, 1 - transport.rank());
                assert!(paths[0].sent_packets > 0 && paths[0].received_bytes > 3 << 20, "{paths:?}");
                if let Some(mtu) = mtu {
                    assert_eq!(paths[0].mtu, mtu);
                }
                let facts = transport.facts();
                let fact = |name: &str| facts.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
                assert_eq!(fact("quic.congestion_asked"), Some(congestion.to_string().as_str()));
                assert_eq!(fact("quic.cipher_suite"), Some("TLS13_AES_128_GCM_SHA256"));
                transport.close(soon()).unwrap();
            });
        }
    }
}

#[test]
fn loopback_has_a_second_address_family() {
    let options = QuicOptions { bind: Some("::1".parse().unwrap()), ..QuicOptions::default() };
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        eprintln!("skipped: this machine has no IPv6 loopback");
        return;
    }
    job(2, &options, |transport, _control| {
        swap_with_all(&transport, 0, 2 << 20);
        transport.close(soon()).unwrap();
    });
}

#[test]
fn one_rank_alone_has_nobody_to_wait_for() {
    job(1, &QuicOptions::default(), |transport, _control| {
        transport.exchange(0, &[], &mut [], soon()).unwrap();
        transport.close(soon()).unwrap();
    });
}

#[test]
fn close_delivers_what_was_sent_just_before() {
    for len in [1, 3 << 20] {
        job(2, &QuicOptions::default(), |transport, _control| {
            if transport.rank() == 0 {
                send(&transport, 1, 1, &pattern(0, 1, 1, len)).unwrap();
            } else {
                // The other side is closing by now.
                thread::sleep(Duration::from_millis(200));
                assert!(receive(&transport, 1, 0, soon()).unwrap() == pattern(0, 1, 1, len));
            }
            transport.close(soon()).unwrap();
            transport.close(soon()).unwrap();
            assert!(matches!(transport.exchange(0, &[], &mut [], soon()), Err(Error::InvalidArgument(_))));
        });
    }
}

#[test]
fn a_message_nobody_received_does_not_keep_close_from_ending() {
    job(2, &QuicOptions::default(), |transport, _control| {
        if transport.rank() == 0 {
            send(&transport, 0, 1, &pattern(0, 1, 0, 5 << 20)).unwrap();
        }
        transport.close(soon()).unwrap();
    });
}

#[test]
fn a_pause_longer_than_the_idle_timeout_does_no_harm() {
    let options = QuicOptions {
        idle_timeout: Duration::from_millis(400),
        keep_alive: Duration::from_millis(100),
        ..QuicOptions::default()
    };
    job(2, &options, |transport, _control| {
        swap_with_all(&transport, 0, 1000);
        thread::sleep(Duration::from_millis(1500));
        swap_with_all(&transport, 0, 1000);
        transport.close(soon()).unwrap();
    });
}

#[test]
fn threads_do_not_grow_with_peers() {
    let barrier = Barrier::new(5);
    job(5, &QuicOptions::default(), |transport, control| {
        swap_with_all(&transport, 0, 100_000);
        barrier.wait();
        let name = format!("comm-quic-{}", control.rank());
        let threads = std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
            .filter(|comm| comm.trim() == name)
            .count();
        // Other tests of this program run beside this one; none of them has a rank 4.
        if control.rank() == 4 {
            assert_eq!(threads, 1);
        }
        barrier.wait();
        transport.close(soon()).unwrap();
    });
}
