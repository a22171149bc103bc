//! Emulated links with real packets on them, and emulators that misbehave.

use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::Command as Program;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::commands::Commands;
use super::device::within;
use super::model::{Pipe, Verdict};
use super::process::serve;
use super::*;
use crate::link::privileges::may_make_namespaces;
use crate::link::tools::{Namespace, ip};
use crate::sys::now;

const PATIENT: Duration = Duration::from_secs(5);

/// An emulator in a thread of this process.
struct Rig {
    spec: EmulatorSpec,
    input: Option<PipeWriter>,
    answers: BufReader<PipeReader>,
    emulator: Option<JoinHandle<Result<(), String>>>,
    // Taken away last.
    namespaces: Vec<Namespace>,
}

impl Rig {
    /// A link with an end for each pair of pipes, up and down; `None`, with the reason on the standard error, where there can be none.
    fn new(pipes: &[(PipeSpec, PipeSpec)]) -> Option<Rig> {
        let namespaces = may_make_namespaces().and_then(|()| {
            if !std::fs::exists("/dev/net/tun").unwrap() {
                return Err("there is no /dev/net/tun".into());
            }
            pipes.iter().map(|_| Namespace::new()).collect::<Result<Vec<_>, _>>()
        });
        let namespaces = namespaces.map_err(|why| eprintln!("skipped: {why}")).ok()?;
        let ends = namespaces.iter().zip(pipes).enumerate().map(|(number, (namespace, (up, down)))| EndSpec {
            namespace: namespace.name().into(),
            device: "link0".into(),
            address: address(number),
            prefix: 24,
            up: up.clone(),
            down: down.clone(),
        });
        let spec = EmulatorSpec { seed: 11, mtu: 1500, ends: ends.collect() };
        let (input, output) = (io::pipe().unwrap(), io::pipe().unwrap());
        let mut answer = output.1;
        let emulator = thread::spawn(move || {
            serve(&mut Commands::new(input.0.into()), &mut answer).inspect_err(|why| eprintln!("{why}"))
        });
        let answers = BufReader::new(output.0);
        let mut rig = Rig { spec, input: Some(input.1), answers, emulator: Some(emulator), namespaces };
        let text = serde_json::to_string(&rig.spec).unwrap();
        assert_eq!(rig.ask(&text), READY);
        Some(rig)
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        answer.trim_end().into()
    }

    fn counters(&mut self) -> Counters {
        serde_json::from_str(&self.ask("counters")).unwrap()
    }

    /// A UDP socket at an end.
    fn socket(&self, end: usize) -> UdpSocket {
        let bind = || UdpSocket::bind((address(end), 0));
        let socket = within(self.namespaces[end].name(), bind).unwrap().unwrap();
        socket.set_read_timeout(Some(PATIENT)).unwrap();
        socket
    }

    /// Bytes that an end's device has received, as its kernel counts.
    fn received(&self, end: usize) -> u64 {
        let read = || std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        let text = within(self.namespaces[end].name(), read).unwrap();
        let (_, figures) = text.split_once("link0:").unwrap();
        figures.split_whitespace().next().unwrap().parse().unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.input = None;
        if let Some(emulator) = self.emulator.take() {
            assert!(emulator.join().is_ok_and(|ended| ended.is_ok()) || thread::panicking());
        }
    }
}

fn address(end: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, u8::try_from(end + 1).unwrap())
}

fn nothing() -> (PipeSpec, PipeSpec) {
    Default::default()
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// UDP and IP headers.
const HEADERS: u64 = 28;

fn receive(socket: &UdpSocket, bytes: &mut [u8]) -> io::Result<usize> {
    loop {
        match socket.recv(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Numbers that come until nothing has come for a while.
fn numbers(socket: &UdpSocket, quiet: Duration) -> Vec<u64> {
    socket.set_read_timeout(Some(quiet)).unwrap();
    let mut bytes = [0; 2048];
    let mut found = Vec::new();
    while receive(socket, &mut bytes).is_ok() {
        found.push(u64::from_le_bytes(*bytes.first_chunk().unwrap()));
    }
    found
}

#[test]
fn a_delay_is_a_delay() {
    let up = PipeSpec { delay: ms(15), ..PipeSpec::default() };
    let down = PipeSpec { delay: ms(5), ..PipeSpec::default() };
    let Some(mut rig) = Rig::new(&[(up, PipeSpec::default()), (PipeSpec::default(), down)]) else { return };
    let (near, far) = (rig.socket(0), rig.socket(1));
    let mut delays = Vec::new();
    let mut bytes = [0; 8];
    for _ in 0..15 {
        near.send_to(&now().to_le_bytes(), far.local_addr().unwrap()).unwrap();
        receive(&far, &mut bytes).unwrap();
        delays.push(now() - u64::from_le_bytes(bytes));
    }
    delays.sort_unstable();
    assert!(delays[0] >= 20_000_000, "{delays:?}");
    assert!(delays[7] < 25_000_000, "{delays:?}");
    let counters = rig.counters();
    let (up, down) = (&counters.ends[0].up, &counters.ends[1].down);
    assert_eq!((up.packets, up.bytes, down.packets), (15, 15 * (HEADERS + 8), 15), "{counters:?}");
    assert_eq!((counters.ends[1].up.packets, counters.ends[0].down.packets), (0, 0));
    assert_eq!((up.delay_us, down.delay_us), (15_000.0, 5_000.0));
    assert!(down.late_p50_us <= down.late_p99_us && down.late_p99_us <= down.late_max_us);
    assert_eq!((counters.missed, counters.no_memory, counters.unwritten), (0, 0, 0));
    assert!(counters.wall_s > 0.3 && counters.cpu_s > 0.0, "{counters:?}");
}

#[test]
fn a_rate_is_a_rate() {
    let down = PipeSpec { rate_bits_per_s: Some(20_000_000), ..PipeSpec::default() };
    let Some(mut rig) = Rig::new(&[nothing(), (PipeSpec::default(), down)]) else { return };
    let (near, far) = (rig.socket(0), rig.socket(1));
    // The usual buffer holds packets of 50 ms, and a busy machine may let this thread wait for longer.
    socket2::SockRef::from(&far).set_recv_buffer_size(1 << 20).unwrap();
    let packets = 200;
    let mut bytes = [0; 2048];
    let mut times = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..packets {
                near.send_to(&[0; 1472], far.local_addr().unwrap()).unwrap();
            }
        });
        for _ in 0..packets {
            receive(&far, &mut bytes).unwrap();
            times.push(now());
        }
    });
    // 600 µs a packet. The kernel keeps the first ones until this thread asks.
    let took = (times[packets - 1] - times[50]) as f64 / (packets - 51) as f64;
    assert!((took / 600_000.0 - 1.0).abs() < 0.03, "{took} ns a packet");
    assert_eq!(rig.received(1), 1500 * packets as u64);
    let counters = rig.counters();
    assert_eq!(counters.ends[1].down.overflowed, 0, "{counters:?}");
}

#[test]
fn which_packets_get_lost_follows_from_the_seed() {
    let loss = Loss::Bursty { enter: 0.1, leave: 0.3, loss_in_burst: 0.8 };
    let up = PipeSpec { loss, duplicate_probability: 0.1, ..PipeSpec::default() };
    let Some(mut rig) = Rig::new(&[(up.clone(), PipeSpec::default()), nothing()]) else { return };
    let mut model = Pipe::new(up, rig.spec.seed, 0);
    let copies = |number| match model.offer(number, 36) {
        Verdict::Arrives { twice, .. } => vec![number; 1 + usize::from(twice)],
        _ => Vec::new(),
    };
    let expected: Vec<u64> = (0..100).flat_map(copies).collect();
    assert!(model.tally().lost > 5 && model.tally().duplicated > 5);
    let (near, far) = (rig.socket(0), rig.socket(1));
    for _ in 0..2 {
        (0..100_u64).for_each(|number| {
            near.send_to(&number.to_le_bytes(), far.local_addr().unwrap()).unwrap();
        });
        assert_eq!(numbers(&far, ms(100)), expected);
        let (counters, tally) = (rig.counters(), model.tally());
        let up = &counters.ends[0].up;
        assert_eq!((up.packets, up.lost, up.duplicated), (100, tally.lost, tally.duplicated));
        assert_eq!(rig.ask("reset"), "done");
        assert_eq!(rig.counters().ends[0].up.packets, 0);
    }
}

#[test]
fn what_many_send_to_one_queues_in_front_of_it() {
    let down = PipeSpec { rate_bits_per_s: Some(10_000_000), queue_bytes: Some(15_000), ..PipeSpec::default() };
    let Some(mut rig) = Rig::new(&[(PipeSpec::default(), down), nothing(), nothing()]) else { return };
    let hub = rig.socket(0);
    let senders = [rig.socket(1), rig.socket(2)];
    // Each alone would fit.
    for _ in 0..8 {
        senders.iter().for_each(|sender| {
            sender.send_to(&[0; 1472], hub.local_addr().unwrap()).unwrap();
        });
    }
    let arrived = numbers(&hub, ms(100)).len() as u64;
    let counters = rig.counters();
    let [hub, one, two] = &counters.ends[..] else { panic!("{counters:?}") };
    assert_eq!((one.up.packets, two.up.packets, hub.down.packets), (8, 8, 16));
    assert_eq!(arrived + hub.down.overflowed, 16);
    assert!((1..=6).contains(&hub.down.overflowed), "{counters:?}");
}

#[test]
fn a_connection_gets_its_bytes_over_a_rough_link() {
    let rough = PipeSpec {
        rate_bits_per_s: Some(50_000_000),
        delay: ms(2),
        jitter: ms(1),
        reorder_probability: 0.02,
        reorder_by: ms(1),
        duplicate_probability: 0.02,
        queue_bytes: Some(100_000),
        ..PipeSpec::default()
    };
    let Some(mut rig) = Rig::new(&[(rough.clone(), PipeSpec::default()), (rough, PipeSpec::default())]) else { return };
    let listen = || TcpListener::bind((address(1), 0)).unwrap();
    let listener = within(rig.namespaces[1].name(), listen).unwrap();
    let peer: SocketAddr = listener.local_addr().unwrap();
    let dial = || TcpStream::connect_timeout(&peer, PATIENT).unwrap();
    let mut dialled = within(rig.namespaces[0].name(), dial).unwrap();
    let data: Vec<u8> = (0..500_000_u32).map(|k| (k.wrapping_mul(k) >> 7) as u8).collect();
    let sent = data.clone();
    let sending = thread::spawn(move || dialled.write_all(&sent).unwrap());
    let mut accepted = listener.accept().unwrap().0;
    accepted.set_read_timeout(Some(PATIENT)).unwrap();
    let mut received = Vec::new();
    accepted.read_to_end(&mut received).unwrap();
    sending.join().unwrap();
    assert!(received == data);
    let counters = rig.counters();
    assert!(counters.ends[0].up.reordered > 0 && counters.ends[0].up.duplicated > 0, "{counters:?}");
}

#[test]
fn a_device_that_vanishes_is_named() {
    let Some(mut rig) = Rig::new(&[nothing(), nothing()]) else { return };
    ip(&["-netns", rig.namespaces[1].name(), "link", "delete", "link0"]).unwrap();
    let why = rig.emulator.take().unwrap().join().unwrap().unwrap_err();
    assert!(why.contains("link0") && why.contains("is gone"), "{why}");
}

/// A program that does what `script` says, in a folder that must be kept.
fn program(script: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("program");
    // Written by another process: one that a test beside this one starts could hold a file of ours open for writing, and what is open
    // for writing cannot be run.
    let write = r#"printf '#!/bin/sh\n%s\n' "$1" >"$0" && chmod 700 "$0""#;
    assert!(Program::new("sh").args(["-c", write]).arg(&path).arg(script).status().unwrap().success());
    (folder, path)
}

fn spec() -> EmulatorSpec {
    let end = |number| EndSpec {
        namespace: format!("bench-link-none-{number}"),
        device: "link0".into(),
        address: address(number),
        prefix: 24,
        up: PipeSpec::default(),
        down: PipeSpec::default(),
    };
    EmulatorSpec { seed: 1, mtu: 1500, ends: vec![end(0), end(1)] }
}

fn complaint(script: &str) -> String {
    let (_folder, path) = program(script);
    Emulator::start(&path, &spec()).unwrap_err()
}

#[test]
fn an_emulator_that_fails_says_why() {
    let why = complaint("read line; echo 'error: no luck' >&2; echo more >&2; exit 1");
    assert_eq!(why, "the link emulator ended: no luck");
    assert!(complaint("exit 3").contains("without a message (exit status: 3)"));
    assert!(complaint("read line; echo hello; read line").contains("\"hello\""));
    let why = Emulator::start(Path::new("/nowhere"), &spec()).unwrap_err();
    assert!(why.contains("starting /nowhere"), "{why}");
    let why = Emulator::start(Path::new("/nowhere"), &EmulatorSpec { mtu: 1, ..spec() }).unwrap_err();
    assert!(why.contains("MTU"), "{why}");
}

#[test]
fn an_emulator_is_asked_and_ended() {
    let (folder, path) = program(
        "test \"$1\" = link-emulate || exit 9; read line; echo ready
        while read line; do case $line in reset) echo done;; *) echo '{}';; esac; done
        touch \"${0%/*}/ended\"",
    );
    let mut emulator = Emulator::start(&path, &spec()).unwrap();
    emulator.reset().unwrap();
    assert!(emulator.counters().unwrap_err().contains("\"{}\""), "not all counters are there");
    drop(emulator);
    assert!(folder.path().join("ended").exists());
}

#[test]
fn an_emulator_that_does_not_end_is_ended() {
    let (_folder, path) = program("read line; echo ready; exec sleep 60");
    let emulator = Emulator::start(&path, &spec()).unwrap();
    let began = Instant::now();
    drop(emulator);
    assert!(began.elapsed() < EXIT_TIMEOUT + PATIENT);
}
