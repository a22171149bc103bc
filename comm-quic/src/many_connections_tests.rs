//! Many unauthenticated connections to the socket of a job while its ranks connect.

use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::{Deadline, Transport};
use quinn::Endpoint;

use crate::tls::{ALPN, SERVER_NAME};
use crate::unauthenticated_tests::{stranger, swap, two_ranks};

#[test]
fn thousands_of_first_packets_delay_nobody() {
    delay_of(|address, stop| {
        let packets = first_packets(1500);
        assert!(packets.len() > 1000, "{} first packets", packets.len());
        thread::spawn(move || {
            let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
            let mut sent = 0;
            for burst in packets.chunks(50).cycle() {
                if stop.load(Ordering::Relaxed) {
                    return println!("{sent} first packets");
                }
                sent += burst.iter().filter(|packet| socket.send_to(packet, address).is_ok()).count();
                thread::sleep(Duration::from_millis(5));
            }
        });
        thread::sleep(Duration::from_millis(300));
        address
    });
}

#[test]
fn many_silent_connections_delay_nobody() {
    delay_of(|address, stop| {
        open_silent_connections(address, stop);
        address
    });
}

#[test]
fn a_rank_from_another_address_than_it_announced_gets_past_many_connections_too() {
    delay_of(|address, stop| {
        open_silent_connections(address, Arc::clone(&stop));
        relay(address, stop, |_| true)
    });
}

/// Opens more connections than are served at a time. Their addresses are validated, and then they send nothing more.
fn open_silent_connections(address: SocketAddr, stop: Arc<AtomicBool>) {
    // Of the answers only Retry packets get through.
    let relay = relay(address, Arc::clone(&stop), |answer| answer[0] & 0xf0 == 0xf0);
    thread::spawn(move || dial_many(relay, 400, &stop));
    thread::sleep(Duration::from_millis(1500));
}

/// Has two ranks connect while an attack goes on at rank 0, and says how long it took rank 1 after the attack had begun. The attack
/// returns the address that rank 1 dials.
fn delay_of(attack: impl Fn(SocketAddr, Arc<AtomicBool>) -> SocketAddr + Send + Sync + 'static) {
    let stop = Arc::new(AtomicBool::new(false));
    let began = Arc::new(std::sync::Mutex::new(None));
    let (stops, begins, before) = (Arc::clone(&stop), Arc::clone(&began), resident());
    let outcome = two_ranks(
        move |mut ranks| {
            ranks[0].address.0 = attack(ranks[0].address.0, Arc::clone(&stops));
            *begins.lock().unwrap() = Some(Instant::now());
            ranks
        },
        |transport| {
            let waited = began.lock().unwrap().unwrap().elapsed();
            swap(&transport, 1 << 20);
            transport.close(Deadline::after(Duration::from_secs(30))).unwrap();
            (transport.rank(), waited)
        },
    );
    stop.store(true, Ordering::Relaxed);
    let grown = resident().saturating_sub(before);
    for outcome in outcome {
        let (rank, waited) = outcome.unwrap();
        println!("rank {rank} was connected after {waited:?}; {grown} KiB more in memory, the strangers' included");
        assert!(waited < Duration::from_secs(4), "rank {rank}: {waited:?}");
    }
    assert!(grown < 300 << 10, "{grown} KiB");
}

/// KiB of memory that this process has.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Dials `count` times at once and goes on until it is stopped.
fn dial_many(address: SocketAddr, count: usize, stop: &AtomicBool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let config = stranger(ALPN, true);
    runtime.block_on(async {
        let endpoint = Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        let dialling: Vec<_> = (0..count)
            .map(|_| tokio::spawn(endpoint.connect_with(config.clone(), address, SERVER_NAME).unwrap()))
            .collect();
        while !stop.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        drop(dialling);
    });
}

/// The first packets of `count` connections, each of another one.
fn first_packets(count: usize) -> Vec<Vec<u8>> {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let (address, stop) = (socket.local_addr().unwrap(), Arc::new(AtomicBool::new(false)));
    let stops = Arc::clone(&stop);
    let dialling = thread::spawn(move || dial_many(address, count, &stops));
    let mut packets = Vec::new();
    let mut buffer = [0; 2048];
    while packets.len() < count {
        match socket.recv(&mut buffer) {
            Ok(len) => packets.push(buffer[..len].to_vec()),
            Err(_) => break,
        }
    }
    stop.store(true, Ordering::Relaxed);
    dialling.join().unwrap();
    packets
}

/// Stands before `address` and lets through what goes there, and of the answers those for which `lets` says so.
fn relay(address: SocketAddr, stop: Arc<AtomicBool>, lets: fn(&[u8]) -> bool) -> SocketAddr {
    let inner = UdpSocket::bind("127.0.0.1:0").unwrap();
    let outer = UdpSocket::bind("127.0.0.1:0").unwrap();
    let here = inner.local_addr().unwrap();
    for socket in [&inner, &outer] {
        socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
    }
    thread::spawn(move || {
        let mut buffer = [0; 65536];
        let mut client = None;
        while !stop.load(Ordering::Relaxed) {
            while let Ok((len, from)) = inner.recv_from(&mut buffer) {
                client = Some(from);
                let _ = outer.send_to(&buffer[..len], address);
            }
            while let Ok(len) = outer.recv(&mut buffer) {
                if let Some(client) = client.filter(|_| lets(&buffer[..len])) {
                    let _ = inner.send_to(&buffer[..len], client);
                }
            }
        }
    });
    here
}
