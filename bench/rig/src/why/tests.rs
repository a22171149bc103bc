//! On real sockets.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;
use std::{env, fs, thread};

use comm_core::conformance::Barrier;
use comm_core::local::group;
use comm_core::{Algorithm, DType, Deadline, Header, Incoming, OpKind, Outgoing, Sink, Transport};
use comm_quic::{QuicOptions, QuicTransport};

use super::*;

const PAYLOAD: usize = 16 << 20;

fn scope(control_port: Option<u16>) -> Scope {
    Scope { interface: "lo".into(), shared_interface: false, control_port, quic: None }
}

/// Two ends of a connection; `None` where there is no such address.
fn pair(address: IpAddr) -> Option<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind((address, 0)).ok()?;
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    for end in [&near, &far] {
        end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        end.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    }
    Some((near, far))
}

fn send(near: &mut TcpStream, far: &mut TcpStream, bytes: usize) {
    thread::scope(|scope| {
        scope.spawn(|| near.write_all(&vec![7; bytes]).unwrap());
        far.read_exact(&mut vec![0; bytes]).unwrap();
    });
}

/// What the probe tells of the connection of which `end` is an end.
fn of<'a>(network: &'a Network, end: &TcpStream) -> Option<&'a Connection> {
    let peer = end.peer_addr().unwrap().to_string();
    network.connections.iter().find(|connection| connection.peer == peer)
}

#[test]
fn sixteen_megabytes_over_tcp_are_seen_by_both_ends() {
    let default = fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap();
    for address in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        let Some((mut near, mut far)) = pair(address) else {
            eprintln!("skipped: this machine has no {address}");
            continue;
        };
        // What came before does not count.
        send(&mut near, &mut far, PAYLOAD);
        let probe = Probe::start(scope(None));
        send(&mut near, &mut far, PAYLOAD);
        let network = probe.finish();
        let (sender, receiver) = (of(&network, &near).unwrap(), of(&network, &far).unwrap());
        let payload = PAYLOAD as u64;
        assert_eq!((sender.protocol.as_str(), sender.congestion.as_str()), ("tcp", default.trim()));
        // What is sent again counts again.
        let sent = sender.bytes_sent - sender.retransmitted_bytes;
        assert!((payload..payload + payload / 10).contains(&sent), "{sender:?}");
        assert_eq!(receiver.bytes_sent, 0, "{receiver:?}");
        assert!(sender.rtt_ms > 0.0 && sender.rtt_ms < 1e3, "{sender:?}");
        assert!(sender.min_rtt_ms.is_some_and(|ms| ms <= sender.rtt_ms), "{sender:?}");
        assert!(sender.congestion_window_bytes > 10_000, "{sender:?}");
        // Up to 64 KiB each.
        assert!(sender.packets_sent >= payload / (64 << 10) && sender.packets_sent < payload / 100, "{sender:?}");
        // Other tests use this interface too.
        let interface = network.interface.unwrap();
        assert!(interface.bytes_sent >= payload && interface.bytes_received >= payload, "{interface:?}");
        assert!(network.cpu_s.values().all(|seconds| *seconds >= 0.0) && network.missing.is_none(), "{network:?}");
        println!("{}", serde_json::to_string(&network).unwrap());
    }
}

#[test]
fn the_control_plane_and_what_others_own_are_left_out() {
    let (near, far) = pair(Ipv4Addr::LOCALHOST.into()).unwrap();
    let port = near.peer_addr().unwrap().port();
    let finish = |control_port| Probe::start(scope(control_port)).finish();
    assert!(of(&finish(None), &near).is_some() && of(&finish(None), &far).is_some());
    let without = finish(Some(port));
    assert!(of(&without, &near).is_none() && of(&without, &far).is_none());
    // A connection that nobody has open any more is none of ours; the other end stays to be seen.
    let gone = near.peer_addr().unwrap();
    let mine = near.local_addr().unwrap();
    drop(near);
    let left = finish(None);
    assert!(!left.connections.iter().any(|connection| connection.peer == gone.to_string()), "{left:?}");
    assert!(left.connections.iter().any(|connection| connection.peer == mine.to_string()), "{left:?}");
    drop(far);
}

#[test]
fn an_interface_that_ranks_share_says_nothing() {
    let shared = Scope { shared_interface: true, ..scope(None) };
    assert_eq!(Probe::start(shared).finish().interface, None);
    let unknown = Scope { interface: "no-such-interface".into(), ..scope(None) };
    assert_eq!(Probe::start(unknown).finish().interface, None);
}

/// Runs itself again in a network namespace with a line so short of buffer that connections lose packets.
#[test]
fn in_a_namespace_of_its_own_loss_shows_as_retransmissions() {
    const INSIDE: &str = "BENCH_WHY_INSIDE";
    const LOST: &str = "link set lo up mtu 1500 && tc qdisc add dev lo root tbf rate 400mbit burst 64kb limit 96kb";
    if env::var_os(INSIDE).is_none() {
        let script = format!(r#"ip {LOST} || exit 99; exec "$0" --exact --nocapture "$1""#);
        let name = thread::current().name().unwrap_or_default().to_string();
        let output = Command::new("unshare")
            .args(["--net", "sh", "-c", &script])
            .arg(env::current_exe().unwrap())
            .arg(name)
            .env(INSIDE, "1")
            .output();
        let Ok(output) = output else { return eprintln!("skipped: there is no program `unshare`") };
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        match output.status.code() {
            Some(0) => assert!(text.contains("retransmitted"), "{text}"),
            Some(1 | 99) if !text.contains("panicked") => eprintln!("skipped: no namespace with a `tbf`: {text}"),
            _ => panic!("{text}"),
        }
        return print!("{text}");
    }
    let alone = Probe::start(scope(None)).finish();
    assert!(alone.connections.is_empty() && alone.missing.unwrap().contains("no connection"));
    let mut pairs: Vec<_> = (0..8).map(|_| pair(Ipv4Addr::LOCALHOST.into()).unwrap()).collect();
    let probe = Probe::start(scope(None));
    thread::scope(|scope| {
        for (near, far) in &mut pairs {
            scope.spawn(|| send(near, far, 2 << 20));
        }
    });
    let network = probe.finish();
    assert_eq!(network.connections.len(), 16);
    let sum = |count: fn(&Connection) -> u64| network.connections.iter().map(count).sum::<u64>();
    let (packets, bytes) = (sum(|one| one.retransmitted_packets), sum(|one| one.retransmitted_bytes));
    assert!(packets > 0 && bytes > packets, "{network:?}");
    let (sent, payload) = (sum(|one| one.bytes_sent), 16 << 20);
    assert!(sent - bytes >= payload, "{network:?}");
    // Nobody else is in the namespace, and what found no room in the queue before the interface is not counted there.
    let interface = network.interface.unwrap();
    assert!((payload..payload + payload / 2).contains(&interface.bytes_sent), "{interface:?}");
    println!("retransmitted {packets} packets, {bytes} B of {sent} B; {interface:?}");
}

/// Takes a message and forgets it.
struct Forget;

impl Sink for Forget {
    fn begin(&mut self, _header: &Header) -> comm_core::Result<()> {
        Ok(())
    }

    fn piece(&mut self, _bytes: &[u8]) -> comm_core::Result<()> {
        Ok(())
    }
}

#[test]
fn quic_tells_of_its_own_connections() {
    let soon = || Deadline::after(Duration::from_secs(30));
    let together = Barrier::new(2);
    let networks = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for rank in group(2, 1) {
            let (together, networks) = (&together, &networks);
            scope.spawn(move || {
                let transport = QuicTransport::connect(&*rank.control, &QuicOptions::default(), soon()).unwrap();
                let quic = Some(quic_figures(vec![transport.monitor()]));
                let payload = vec![5; PAYLOAD];
                let header = Header {
                    communicator: 1,
                    sequence: 2,
                    kind: OpKind::Send,
                    dtype: DType::U8,
                    reduce: None,
                    algorithm: Algorithm::Direct,
                    root: 0,
                    count: PAYLOAD as u64,
                    step: 0,
                    division: 0,
                    payload_len: PAYLOAD as u64,
                };
                let peer = 1 - transport.rank();
                let probe = Probe::start(Scope { quic, ..self::scope(None) });
                together.wait();
                let outgoing = [Outgoing { peer, header, payload: &payload }];
                transport.exchange(0, &outgoing, &mut [Incoming { peer, sink: &mut Forget }], soon()).unwrap();
                together.wait();
                networks.lock().unwrap().push((transport.local_addr().to_string(), probe.finish()));
                transport.close(soon()).unwrap();
            });
        }
    });
    let networks = networks.into_inner().unwrap();
    let addresses: BTreeSet<&String> = networks.iter().map(|(address, _)| address).collect();
    for (own, network) in &networks {
        // Other tests of this process have connections over TCP.
        let quic: Vec<_> = network.connections.iter().filter(|connection| connection.protocol == "quic").collect();
        let [connection] = quic[..] else { panic!("{network:?}") };
        assert!(addresses.contains(&connection.peer) && connection.peer != *own, "{connection:?}");
        let sent = connection.bytes_sent - connection.retransmitted_bytes;
        assert!(sent >= PAYLOAD as u64 && sent < PAYLOAD as u64 * 5 / 4, "{connection:?}");
        assert!(connection.rtt_ms > 0.0 && connection.congestion.starts_with("fixed:"), "{connection:?}");
        println!("{connection:?}");
    }
}
