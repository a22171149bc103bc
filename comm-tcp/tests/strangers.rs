//! Connections that do not belong to the job, while the job connects and after.

#![allow(clippy::unwrap_used, reason = "only tests come here")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use comm_core::control::TcpControl;
use comm_core::job::{Address, Job, Secret};
use comm_core::local::LocalControl;
use comm_core::location::OfferedAddress;
use comm_core::{Control, Deadline, Error, Result};
use comm_tcp::TcpOptions;
use hmac::{Hmac, Mac};
use sha2::Sha256;

use crate::common::{Addresses, Kind, PeerInfo, RankResult, controls, payload, soon, swap};

type Meddle = dyn Fn(SocketAddr, &[u8; 32]) -> SocketAddr + Send + Sync;

/// Is told of each step of rank 0 over the control plane, before and after it.
type Steps = dyn Fn(Step<'_>) + Send + Sync;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step<'l> {
    Before(&'l str),
    After(&'l str),
}

/// Runs a job of two ranks, of which rank 1 listens, and has it carry some traffic. Rank 0 gets to `meddle` with rank 1's
/// address before it dials: what that returns is dialled instead.
fn job_with(kind: Kind, meddle: impl Fn(SocketAddr) -> SocketAddr + Send + Sync + 'static) {
    let controls = controls(2).into_iter().map(|control| control as Arc<dyn Control>).collect();
    job_over(kind, controls, &TcpOptions::default(), move |address, _| meddle(address));
}

/// As [`job_with`], over these `controls`; `meddle` also gets the salt that rank 1 told.
fn job_over(
    kind: Kind,
    controls: Vec<Arc<dyn Control>>,
    options: &TcpOptions,
    meddle: impl Fn(SocketAddr, &[u8; 32]) -> SocketAddr + Send + Sync + 'static,
) {
    watched_job(kind, controls, options, Arc::new(meddle), Arc::new(|_| ()), &|_| ());
}

/// As [`job_over`]; rank 0's steps over the control plane are told to `steps`, the facts of each rank's transport to `facts`.
fn watched_job(
    kind: Kind,
    controls: Vec<Arc<dyn Control>>,
    options: &TcpOptions,
    meddle: Arc<Meddle>,
    steps: Arc<Steps>,
    facts: &(dyn Fn(Vec<(String, String)>) + Sync),
) {
    thread::scope(|scope| {
        for inner in &controls {
            let control =
                Meddling { inner: inner.clone(), meddle: meddle.clone(), steps: steps.clone(), refusal: None };
            scope.spawn(move || {
                let transport = kind.connect(&control, options, soon()).unwrap();
                facts(transport.facts());
                let (rank, peer) = (transport.rank(), 1 - transport.rank());
                for lane in 0..2 {
                    for round in 0..4 {
                        let bytes = swap(&*transport, lane, peer, &payload(round + rank, 3 << 20)).unwrap();
                        assert!(bytes == payload(round + peer, 3 << 20), "{kind:?}");
                    }
                }
                transport.close(soon()).unwrap();
            });
        }
    });
}

/// A control plane that lets a test between the addresses and the rank that dials them.
struct Meddling {
    inner: Arc<dyn Control>,
    meddle: Arc<Meddle>,
    steps: Arc<Steps>,
    /// What rank 1 says instead of where it listens behind a filter.
    refusal: Option<&'static str>,
}

impl Meddling {
    fn refused(&self, label: &str, blob: &[u8]) -> Vec<u8> {
        let mut told = blob.to_vec();
        if let (1, Some(why), true) = (self.rank(), self.refusal, label.ends_with(" addresses")) {
            let mut said: RankResult = postcard::from_bytes(blob).unwrap();
            if let Ok((_, PeerInfo { addresses: addresses @ Addresses::Each(..), .. })) = &mut said {
                *addresses = Addresses::Refused(why.into());
                told = postcard::to_stdvec(&said).unwrap();
            }
        }
        told
    }
}

impl Control for Meddling {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn all_gather(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let steps = |step| {
            if self.rank() == 0 {
                (self.steps)(step)
            }
        };
        steps(Step::Before(label));
        let mut blobs = self.inner.all_gather(label, &self.refused(label, blob), deadline)?;
        if self.rank() == 0 && label.ends_with(" addresses") {
            let mut told: RankResult = postcard::from_bytes(&blobs[1]).unwrap();
            match &mut told {
                Ok((_, PeerInfo { salt, addresses: Addresses::One(OfferedAddress(address)), .. })) => {
                    *address = (self.meddle)(*address, salt);
                }
                // Rank 0's are the first ports, one for each lane.
                Ok((_, PeerInfo { salt, addresses: Addresses::Each(OfferedAddress(address), ports), .. })) => {
                    for port in ports.iter_mut().filter(|port| **port != 0) {
                        *port = (self.meddle)(SocketAddr::new(address.ip(), *port), salt).port();
                    }
                }
                Ok((_, PeerInfo { addresses: Addresses::Refused(_), .. })) => {}
                _ => panic!("{told:?}"),
            }
            blobs[1] = postcard::to_stdvec(&told).unwrap();
        }
        steps(Step::After(label));
        Ok(blobs)
    }

    fn derive_key(&self, label: &str) -> [u8; 32] {
        self.inner.derive_key(label)
    }

    fn poison(&self, error: &Error) {
        self.inner.poison(error);
    }

    fn failure(&self) -> Option<Error> {
        self.inner.failure()
    }

    fn verdict(&self, observed: Error, grace: Duration) -> Error {
        self.inner.verdict(observed, grace)
    }

    fn on_failure(&self, hook: Box<dyn Fn(&Error) + Send + Sync>) {
        self.inner.on_failure(hook);
    }

    fn leave(&self, deadline: Deadline) -> Result<()> {
        self.inner.leave(deadline)
    }
}

/// What strangers say, with what it is.
fn rubbish() -> Vec<(&'static str, Vec<u8>)> {
    let greeted = |rest: &[u8]| [&greeting()[..], rest].concat();
    let huge = |flags: u8| [&[flags][..], &(64_u64 << 30).to_be_bytes()].concat();
    let mut other_mechanism = greeting();
    other_mechanism[12..17].copy_from_slice(b"PLAIN");
    let wrong_socket = String::from_utf8_lossy(&ready(b"x")).replace("DEALER", "ROUTER").into_bytes();
    vec![
        ("nothing", vec![]),
        ("random bytes", payload(3, 100_000)),
        ("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(10)),
        ("half a greeting", greeting()[..40].to_vec()),
        ("a greeting with another mechanism", other_mechanism),
        ("a command that announces 64 GiB", greeted(&huge(0x06))),
        ("a message that announces 64 GiB", greeted(&huge(0x02))),
        ("a message before READY", greeted(b"\0\x05hello")),
        ("READY of another socket type", greeted(&wrong_socket)),
        ("READY without a token", greeted(&ready(b""))),
        ("a token of rubbish", greeted(&ready(&payload(4, 52)))),
        ("the longest identity", greeted(&ready(&[7; 200]))),
    ]
}

/// How long a stranger waits for a connection that the kernel grants at once or never.
const NO_ANSWER: Duration = Duration::from_millis(20);

/// Strangers at the ports of a job, and when they came.
#[derive(Default)]
struct Crowd(Mutex<Vec<(String, TcpStream)>>);

impl Crowd {
    /// One of every kind comes to `address`.
    fn come(&self, when: &str, address: SocketAddr) {
        for (what, bytes) in rubbish() {
            // Where the filter lets one address in, others are not even answered.
            if let Ok(stream) = TcpStream::connect_timeout(&address, NO_ANSWER) {
                self.add(format!("{what}, {when}"), stream, &bytes);
            }
        }
    }

    fn add(&self, what: String, mut stream: TcpStream, bytes: &[u8]) {
        stream.set_nonblocking(true).unwrap();
        // Nobody takes it, so that the kernel may not have room for all.
        let _ = stream.write(bytes);
        self.0.lock().unwrap().push((what, stream));
    }

    /// After the job: nobody has said anything to anyone of them, not even the greeting that `zeromq` has for whoever it accepts.
    fn has_heard_nothing(&self, least: usize) {
        let crowd = self.0.lock().unwrap();
        assert!(crowd.len() >= least, "only {} came", crowd.len());
        for (what, mut stream) in crowd.iter().map(|(what, stream)| (what, stream)) {
            let heard = stream.read(&mut [0; 64]);
            // The port is closed, which shows as a reset, or not at all to one whose segments were all dropped.
            let is_nothing = matches!(&heard, Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ConnectionReset));
            assert!(is_nothing, "{what}: {heard:?}");
        }
    }
}

#[test]
fn zeromq_accepts_no_stranger_whenever_one_comes() {
    let (crowd, doors) = (Arc::new(Crowd::default()), Arc::new(Mutex::new(Vec::new())));
    let (seen, known) = (doors.clone(), doors.clone());
    let came = crowd.clone();
    let meddle = move |address: SocketAddr, _: &[u8; 32]| {
        seen.lock().unwrap().push(address);
        address
    };
    let steps = move |step: Step<'_>| {
        // Doors closed to all; the rank's connection asked for; its address told, and the doors opened to it; and the same once more
        // when all ranks know that, and rank 0 has not said anything yet.
        let when = format!("{step:?}");
        let addresses = known.lock().unwrap().clone();
        for address in addresses {
            came.come(&when, address);
            for (what, stream) in from_the_ports_of_those_who_dial(address) {
                came.add(format!("{what}, {when}"), stream, &[&greeting()[..], &ready(&[7; 52])].concat());
            }
        }
    };
    let controls = controls(2).into_iter().map(|control| control as Arc<dyn Control>).collect();
    let filtered = AtomicUsize::new(0);
    watched_job(Kind::Zmq, controls, &TcpOptions::default(), Arc::new(meddle), Arc::new(steps), &|facts| {
        let uses_filter = facts.contains(&("gate".into(), "packet filter".into()));
        assert!(uses_filter, "{facts:?}");
        filtered.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!((filtered.into_inner(), doors.lock().unwrap().len()), (2, 2));
    // At least those who came to the listeners of two lanes after the addresses were told, and before rank 0 told from where it dials.
    crowd.has_heard_nothing(2 * 2 * rubbish().len());
}

/// Connections to `address` from the ports that others connect there from, but from another address of this machine.
fn from_the_ports_of_those_who_dial(address: SocketAddr) -> Vec<(String, TcpStream)> {
    let remote = format!("0100007F:{:04X}", address.port());
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let rows = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let ports = rows
        .filter(|row| row[2] == remote && row[1].starts_with("0100007F"))
        .map(|row| u16::from_str_radix(row[1].split_once(':').unwrap().1, 16).unwrap());
    let dial = |port: u16| {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).ok()?;
        socket.bind(&SocketAddr::from(([127, 0, 0, 9], port)).into()).ok()?;
        socket.connect_timeout(&address.into(), NO_ANSWER).ok()?;
        Some((format!("from port {port}"), TcpStream::from(socket)))
    };
    ports.take(8).filter_map(dial).collect()
}

#[test]
fn a_translated_address_is_noticed_and_the_relay_takes_over() {
    let meddle = |address: SocketAddr, _: &[u8; 32]| {
        // Stands between the dialler and the listener, which sees another port.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let between = listener.local_addr().unwrap();
        thread::spawn(move || {
            while let Ok((dialler, _)) = listener.accept() {
                let Ok(far) = TcpStream::connect(address) else { continue };
                pump(&dialler, &far);
            }
        });
        between
    };
    let controls = controls(2).into_iter().map(|control| control as Arc<dyn Control>).collect();
    watched_job(Kind::Zmq, controls, &TcpOptions::default(), Arc::new(meddle), Arc::new(|_| ()), &|facts| {
        let (_, gate) = facts.iter().find(|(name, _)| name == "gate").unwrap();
        assert!(gate.starts_with("relay") && gate.contains("translated") && gate.contains("rank 1"), "{gate}");
    });
}

#[test]
fn a_rank_that_cannot_listen_behind_a_filter_has_all_use_the_relay() {
    let controls = controls(2);
    let facts: Vec<_> = thread::scope(|scope| {
        let connect = |inner: &Arc<LocalControl>| {
            let (meddle, steps) = (Arc::new(|address: SocketAddr, _: &[u8; 32]| address), Arc::new(|_: Step<'_>| ()));
            let control = Meddling { inner: inner.clone(), meddle, steps, refusal: Some("no free ports left") };
            scope.spawn(move || {
                let transport = Kind::Zmq.connect(&control, &TcpOptions::default(), soon()).unwrap();
                let peer = 1 - transport.rank();
                assert_eq!(swap(&*transport, 0, peer, &payload(transport.rank(), 9)).unwrap(), payload(peer, 9));
                transport.close(soon()).unwrap();
                transport.facts()
            })
        };
        let threads: Vec<_> = controls.iter().map(connect).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for facts in facts {
        let (_, gate) = facts.iter().find(|(name, _)| name == "gate").unwrap();
        assert!(gate.starts_with("relay") && gate.contains("rank 1: no free ports left"), "{gate}");
    }
}

/// Copies in both directions, in threads that end with the connections.
fn pump(one: &TcpStream, other: &TcpStream) {
    let end = |stream: &TcpStream| stream.try_clone().unwrap();
    for (mut from, mut to) in [(end(one), end(other)), (end(other), end(one))] {
        thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
    }
}

#[test]
fn rubbish_at_the_gate_is_turned_away_and_harms_nobody() {
    for kind in [Kind::ZmqBehindRelay, Kind::Raw] {
        job_with(kind, move |address| {
            for (what, bytes) in rubbish() {
                let answer = say(address, &bytes);
                // The relay gives its own greeting to whoever greets it, raw TCP a nonce to everybody; no more.
                let most = if kind == Kind::Raw { 32 } else { 64 };
                assert!(answer.len() <= most, "{kind:?}, {what}: answered {} B", answer.len());
            }
            address
        });
    }
}

#[test]
fn many_silent_connections_do_not_keep_the_ranks_out() {
    for kind in [Kind::Zmq, Kind::ZmqBehindRelay, Kind::Raw] {
        let silent = Arc::new(Mutex::new(Vec::new()));
        let (inside, stop) = (silent.clone(), Arc::new(AtomicBool::new(false)));
        let stops = stop.clone();
        job_with(kind, move |address| {
            // More than may prove themselves at the same time; they stay until the job has ended, and others keep coming.
            let connections = (0..400).map(|_| TcpStream::connect(address).unwrap());
            inside.lock().unwrap().extend(connections);
            let stop = stops.clone();
            thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let _short: Vec<_> = (0..100).map_while(|_| TcpStream::connect(address).ok()).collect();
                    thread::sleep(Duration::from_millis(5));
                }
            });
            address
        });
        stop.store(true, Ordering::Relaxed);
        // At each listener. Behind the filter each lane has one, and so many requests may make the ranks use the relay, which has another.
        let came = silent.lock().unwrap().len();
        assert!(if kind == Kind::Zmq { [800, 1200].contains(&came) } else { came == 400 }, "{kind:?}: {came}");
    }
}

#[test]
fn strangers_during_a_job_find_no_open_port() {
    for kind in [Kind::Zmq, Kind::ZmqBehindRelay, Kind::Raw] {
        let stop = Arc::new(AtomicBool::new(false));
        let (attacking, attackers) = (stop.clone(), Arc::new(Mutex::new(Vec::new())));
        let spawned = attackers.clone();
        job_with(kind, move |address| {
            let stop = attacking.clone();
            let attacker = thread::spawn(move || {
                let (mut heard, mut refused) = (0, 0);
                while !stop.load(Ordering::Relaxed) {
                    match TcpStream::connect(address) {
                        Ok(mut stream) => {
                            heard += 1;
                            let _ = stream.write_all(&[&greeting()[..], b"\x02\0\0\0\x10\0\0\0\0"].concat());
                        }
                        Err(_) => refused += 1,
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                (heard, refused)
            });
            spawned.lock().unwrap().push(attacker);
            thread::sleep(Duration::from_millis(50));
            address
        });
        stop.store(true, Ordering::Relaxed);
        for attacker in attackers.lock().unwrap().drain(..) {
            let (heard, refused) = attacker.join().unwrap();
            assert!(heard > 0, "{kind:?}: the port was open while the job connected");
            assert!(refused > 0, "{kind:?}: and closed once everybody was in");
        }
    }
}

#[test]
fn a_token_seen_on_the_wire_does_not_open_the_gate_again() {
    let replayed = Arc::new(AtomicBool::new(false));
    let done = replayed.clone();
    job_with(Kind::ZmqBehindRelay, move |gate| {
        let (listener, done) = (TcpListener::bind("127.0.0.1:0").unwrap(), done.clone());
        let address = listener.local_addr().unwrap();
        // Stands between the dialler and the gate. The second lane has to wait until the first one's token was replayed, so
        // that the gate is still open.
        thread::spawn(move || {
            for first in [true, false] {
                let (mut dialler, _) = listener.accept().unwrap();
                let mut gate_side = TcpStream::connect(gate).unwrap();
                let mut opening = [0; 64];
                dialler.read_exact(&mut opening).unwrap();
                gate_side.write_all(&opening).unwrap();
                let mut answer = [0; 64];
                gate_side.read_exact(&mut answer).unwrap();
                dialler.write_all(&answer).unwrap();
                let mut ready = [0; 2];
                dialler.read_exact(&mut ready).unwrap();
                let mut body = vec![0; usize::from(ready[1])];
                dialler.read_exact(&mut body).unwrap();
                let ready = [&ready[..], &body].concat();
                gate_side.write_all(&ready).unwrap();
                // The private side's READY shows that the gate took it.
                let mut taken = [0; 1];
                gate_side.read_exact(&mut taken).unwrap();
                dialler.write_all(&taken).unwrap();
                if first {
                    let answer = say(gate, &[&opening[..], &ready].concat());
                    assert_eq!(answer, greeting(), "a replayed token was answered with more than a greeting");
                    done.store(true, Ordering::Relaxed);
                }
                pump(&dialler, &gate_side);
            }
        });
        address
    });
    assert!(replayed.load(Ordering::Relaxed));
}

#[test]
fn a_key_of_an_earlier_start_opens_no_door() {
    for kind in [Kind::ZmqBehindRelay, Kind::Raw] {
        // Another epoch, and the same one once more.
        for epoch in [1, 0] {
            let key = earlier_key(kind);
            let refused = Arc::new(AtomicBool::new(false));
            let done = refused.clone();
            job_over(kind, tcp_controls(epoch), &TcpOptions::default(), move |address, salt| {
                let answer = show_key(kind, address, &key, salt);
                let (most, what) = if kind == Kind::Raw { (0, "nothing") } else { (64, "a greeting") };
                assert!(answer.len() <= most, "{kind:?}: answered with {} B, not with {what}", answer.len());
                done.store(true, Ordering::Relaxed);
                address
            });
            assert!(refused.load(Ordering::Relaxed));
        }
    }
}

#[test]
fn the_key_of_this_start_would_open_the_door() {
    for kind in [Kind::ZmqBehindRelay, Kind::Raw] {
        let (controls, answered) = (tcp_controls(0), Arc::new(AtomicBool::new(false)));
        let key = controls[0].derive_key(label(kind));
        thread::scope(|scope| {
            for inner in &controls {
                let done = answered.clone();
                let meddle = move |address, salt: &[u8; 32]| {
                    let answer = show_key(kind, address, &key, salt);
                    done.store(answer.len() > if kind == Kind::Raw { 31 } else { 64 }, Ordering::Relaxed);
                    address
                };
                let (meddle, steps) = (Arc::new(meddle), Arc::new(|_: Step<'_>| ()));
                let control = Meddling { inner: inner.clone(), meddle, steps, refusal: None };
                // The connection of the rank itself is taken.
                scope.spawn(move || {
                    kind.connect(&control, &TcpOptions::default(), Deadline::after(Duration::from_secs(3))).err()
                });
            }
        });
        assert!(answered.load(Ordering::Relaxed), "{kind:?}: the other test proves nothing");
    }
}

fn label(kind: Kind) -> &'static str {
    if kind == Kind::Raw { "tcp-raw" } else { "zeromq" }
}

/// The key that the data connections of an earlier start of the same job had.
fn earlier_key(kind: Kind) -> [u8; 32] {
    tcp_controls(0)[0].derive_key(label(kind))
}

/// The control planes of two ranks, with a secret.
fn tcp_controls(epoch: u64) -> Vec<Arc<dyn Control>> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let address = Address::Tcp { host: "127.0.0.1".into(), port };
    let job = |rank| {
        let secret = Secret::new("a secret for tests only").unwrap();
        Job { id: "again".into(), epoch, ..Job::new(rank, 2, address.clone(), secret).unwrap() }
    };
    thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let job = job(rank);
            scope.spawn(move || TcpControl::connect(&job, &[], soon()).unwrap() as Arc<dyn Control>)
        });
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A handshake of the right form for rank 0's first lane to rank 1, with `key`; what it is answered with.
fn show_key(kind: Kind, address: SocketAddr, key: &[u8; 32], salt: &[u8; 32]) -> Vec<u8> {
    let edge = [0_u32, 1, 0].map(u32::to_le_bytes).concat();
    let proof = |purpose: &[u8; 8], nonces: &[u8]| {
        let mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
        mac.chain_update(purpose).chain_update(&edge).chain_update(nonces).finalize().into_bytes()
    };
    if kind == Kind::Raw {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let mut nonce = [0; 32];
        stream.read_exact(&mut nonce).unwrap();
        let proof = proof(b"raw dial", &[nonce, [9; 32]].concat());
        stream.write_all(&[b"isoraw01", &edge[..], &[9; 32], &proof[..]].concat()).unwrap();
        let mut answer = vec![0; 32];
        let read = stream.read(&mut answer).unwrap_or(0);
        answer.truncate(read);
        return answer;
    }
    let token = [b"isozmq01", &edge[..], &proof(b"zmq gate", salt)[..]].concat();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    stream.write_all(&[greeting(), ready(&token)].concat()).unwrap();
    let (mut answer, mut buffer) = (Vec::new(), [0; 256]);
    while answer.len() <= 64 {
        match stream.read(&mut buffer) {
            Ok(read @ 1..) => answer.extend_from_slice(&buffer[..read]),
            _ => break,
        }
    }
    answer
}

#[test]
fn only_the_address_that_was_asked_for_is_listened_on() {
    for kind in [Kind::Zmq, Kind::ZmqBehindRelay, Kind::Raw] {
        let options = TcpOptions { bind: Some("127.0.0.2".parse().unwrap()), ..TcpOptions::default() };
        let controls = controls(2).into_iter().map(|control| control as Arc<dyn Control>).collect();
        job_over(kind, controls, &options, move |address, _| {
            assert_eq!(address.ip().to_string(), "127.0.0.2");
            // Local address and port as the kernel writes them, in hexadecimal; 0A is a listener's state.
            let port = format!(":{:04X}", address.port());
            for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
                for line in std::fs::read_to_string(table).unwrap_or_default().lines() {
                    let fields: Vec<&str> = line.split_whitespace().collect();
                    if fields[1].ends_with(&port) && fields[3] == "0A" {
                        assert_eq!(fields[1], format!("0200007F{port}"), "{kind:?}: {table}");
                    }
                }
            }
            address
        });
    }
}

#[test]
fn a_listener_that_does_not_know_the_key_is_not_taken_for_a_rank() {
    let controls = controls(2);
    thread::scope(|scope| {
        for inner in &controls {
            scope.spawn(move || {
                let impostor = |_, _: &[u8; 32]| {
                    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                    let address = listener.local_addr().unwrap();
                    thread::spawn(move || {
                        for stream in listener.incoming() {
                            let mut stream = stream.unwrap();
                            let _ = stream.write_all(&[1; 32]);
                            let _ = stream.read_exact(&mut [0; 84]);
                            let _ = stream.write_all(&[2; 32]);
                        }
                    });
                    address
                };
                let (meddle, steps) = (Arc::new(impostor), Arc::new(|_: Step<'_>| ()));
                let control = Meddling { inner: inner.clone(), meddle, steps, refusal: None };
                let deadline = Deadline::after(Duration::from_millis(500));
                let rank = control.rank();
                match Kind::Raw.connect(&control, &TcpOptions::default(), deadline) {
                    Err(Error::Timeout { operation, waiting_for, .. }) => {
                        assert_eq!(waiting_for, [1 - rank]);
                        if rank == 0 {
                            assert!(operation.contains("does not know this job's key"), "{operation}");
                        }
                    }
                    Err(other) => panic!("{other}"),
                    Ok(_) => panic!("connected to an impostor"),
                }
            });
        }
    });
}

/// The first 64 bytes of ZMTP 3.0 with the NULL mechanism.
fn greeting() -> Vec<u8> {
    let mut greeting = vec![0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    greeting
}

/// A READY command of a DEALER.
fn ready(identity: &[u8]) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity".to_vec();
    body.extend_from_slice(&u32::try_from(identity.len()).unwrap().to_be_bytes());
    body.extend_from_slice(identity);
    let mut frame = vec![0x04, u8::try_from(body.len()).unwrap()];
    frame.extend(body);
    frame
}

/// What a stranger is answered until its connection is closed, which must happen within two seconds.
fn say(address: SocketAddr, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let _ = stream.write_all(bytes);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return answer,
            Ok(read) => answer.extend_from_slice(&buffer[..read]),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => return answer,
            Err(error) => panic!("not closed: {error}"),
        }
    }
}
