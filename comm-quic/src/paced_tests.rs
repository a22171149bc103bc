//! Messages over a link of which the clock, the rate and the losses are the test's own.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use quinn::congestion::{ControllerFactory, CubicConfig};
use quinn::{Dir, EndpointConfig, StreamId};
use quinn_proto::{Connection, ConnectionHandle, DatagramEvent, Endpoint, Event, StreamEvent, WriteError};

use crate::allowance::Limited;
use crate::config::{DatagramSizes, transport_config};
use crate::congestion::Congestion;
use crate::options::QuicOptions;
use crate::paced::Paced;
use crate::rendezvous::server_config;
use crate::tls::{Identity, Pins, SERVER_NAME};

/// What the datagrams of both directions go through.
#[derive(Clone, Copy)]
struct Path {
    /// One way.
    delay: Duration,
    bytes_per_s: f64,
    /// Bytes that wait before the link at most.
    queue: f64,
    /// By how much timers are late.
    tick: Duration,
}

/// 100 Mbit/s with a round trip of 50 ms, and a queue that holds as much as the link carries in one.
const WAN: Path =
    Path { delay: Duration::from_millis(25), bytes_per_s: 12.5e6, queue: 625e3, tick: Duration::from_millis(1) };

/// 1 Gbit/s in one hall, where the thread that sends waits for those that compute.
const LAN: Path =
    Path { delay: Duration::from_micros(50), bytes_per_s: 125e6, queue: 1.25e6, tick: Duration::from_millis(2) };

/// IP and UDP headers.
const HEADERS: usize = 28;

/// What messages are made of.
static ONES: [u8; 65_536] = [1; 65_536];

/// What half of a training step of a small model sends.
const MESSAGE: usize = 70_000;

#[test]
fn a_message_takes_as_long_as_the_link_does() {
    let floor = WAN.least(MESSAGE);
    let last = |congestion: Congestion| {
        let mut link = Link::with(congestion.factory(1452, 4 << 20), None);
        (0..10).map(|turn| link.transfer(turn % 2, MESSAGE)).last().unwrap()
    };
    for congestion in [Congestion::Cubic, Congestion::NewReno] {
        let took = last(congestion);
        assert!(took > floor && took < floor * 5 / 4, "{congestion}: {took:?}, and {floor:?} is the least");
    }
    // What this is about: quinn's own takes most of a round trip more.
    let mut link = Link::with(Arc::new(CubicConfig::default()), None);
    let took = (0..10).map(|turn| link.transfer(turn % 2, MESSAGE)).last().unwrap();
    assert!(took > floor + WAN.delay / 2, "{took:?}");
}

/// Neither do ends whose windows are full wait for each other's acknowledgement.
#[test]
fn late_timers_hold_nothing_back_on_a_short_path() {
    let bytes = 512 << 10;
    let floor = LAN.least(bytes);
    let mut link = Link::over(LAN, Congestion::Cubic.factory(1452, 4 << 20), None);
    let took: Vec<Duration> = (0..40).map(|_| link.exchange(bytes)).collect();
    let slowest = took[5..].iter().max().unwrap();
    assert!(*slowest < floor * 6 / 5, "{floor:?} is the least: {took:?}");
}

#[test]
fn long_messages_lose_no_more_than_with_quinns_pacing() {
    let lost = |factory| {
        let mut link = Link::with(factory, None);
        let took: Vec<_> = (0..6).map(|turn| link.transfer(turn % 2, 4 << 20)).collect();
        (link.dropped, took.iter().sum::<Duration>())
    };
    let (ours, our_time) = lost(Congestion::Cubic.factory(1452, 4 << 20));
    let (theirs, their_time) = lost(Arc::new(CubicConfig::default()));
    println!("4 MiB: {ours} dropped in {our_time:?}, with quinn's own {theirs} in {their_time:?}");
    assert!(ours <= theirs / 4, "{ours} datagrams dropped, with quinn's own {theirs}");
    assert!(our_time < their_time * 11 / 10, "{our_time:?}, with quinn's own {their_time:?}");
}

#[test]
fn losses_at_random_cost_no_more_than_with_quinns_own() {
    for (bytes, times) in [(MESSAGE, 300), (1 << 20, 40)] {
        let time = |factory| {
            let mut link = Link::with(factory, Some(200));
            (0..times).map(|_| link.exchange(bytes)).sum::<Duration>()
        };
        let (ours, theirs) = (time(Congestion::Cubic.factory(1452, 4 << 20)), time(Arc::new(CubicConfig::default())));
        println!("0.5 % of {bytes} B lost: {ours:?}, with quinn's own {theirs:?}");
        assert!(ours < theirs * 11 / 10, "{bytes} B: {ours:?}, with quinn's own {theirs:?}");
    }
}

/// A writer that waits for room for whole datagrams leaves a part of each window empty.
#[test]
fn losses_at_random_cost_messages_one_way_little_more_than_with_quinns_own() {
    for (one_in, times) in [(200, 300), (100, 100), (1000, 300)] {
        let time = |factory| {
            let mut link = Link::with(factory, Some(one_in));
            (0..times).map(|_| link.transfer(0, 2 * MESSAGE)).sum::<Duration>()
        };
        let (ours, theirs) = (time(Congestion::Cubic.factory(1452, 4 << 20)), time(Arc::new(CubicConfig::default())));
        println!("1 of {one_in} lost: {ours:?}, with quinn's own {theirs:?}");
        assert!(ours < theirs * 6 / 5, "1 of {one_in} lost: {ours:?}, with quinn's own {theirs:?}");
    }
}

/// As a server of parameters and its workers send. While the one waits for the other its clock stops, which quinn's own does not.
#[test]
fn losses_at_random_cost_messages_in_turn_no_more_than_if_quinn_gets_all_at_once() {
    for (one_in, times) in [(200, 300), (100, 100), (1000, 300)] {
        let time = |gets_all| {
            let mut link = Link::with(Congestion::Cubic.factory(1452, 4 << 20), Some(one_in));
            if gets_all {
                link.give_all();
            }
            (0..times).map(|turn| link.transfer(turn % 2, 2 * MESSAGE)).sum::<Duration>()
        };
        let (ours, at_once) = (time(false), time(true));
        println!("1 of {one_in} lost: {ours:?}, all at once {at_once:?}");
        assert!(ours < at_once * 21 / 20, "1 of {one_in} lost: {ours:?}, all at once {at_once:?}");
    }
}

/// What acknowledgements make room for is not filled byte by byte.
#[test]
fn messages_go_in_full_datagrams() {
    for is_exchange in [false, true] {
        let sent = |factory| {
            let mut link = Link::with(factory, Some(200));
            let before = link.filled;
            for turn in 0..40 {
                let _ = if is_exchange { link.exchange(2 * MESSAGE) } else { link.transfer(turn % 2, 2 * MESSAGE) };
            }
            link.filled - before
        };
        let (ours, theirs) = (sent(Congestion::Cubic.factory(1452, 4 << 20)), sent(Arc::new(CubicConfig::default())));
        println!("{ours} datagrams, with quinn's own {theirs}");
        assert!(ours < theirs * 21 / 20, "{ours} datagrams, with quinn's own {theirs}");
    }
}

#[test]
fn long_messages_both_ways_lose_less_than_with_quinns_pacing() {
    for bytes in [700_000, 2 << 20] {
        let run = |factory| {
            let mut link = Link::with(factory, None);
            let took: Duration = (0..10).map(|_| link.exchange(bytes)).sum();
            (link.dropped, took)
        };
        let (ours, our_time) = run(Congestion::Cubic.factory(1452, 4 << 20));
        let (theirs, their_time) = run(Arc::new(CubicConfig::default()));
        println!("{bytes} B: {ours} dropped in {our_time:?}, with quinn's own {theirs} in {their_time:?}");
        assert!(ours <= theirs, "{bytes} B: {ours} datagrams dropped, with quinn's own {theirs}");
        assert!(our_time < their_time * 11 / 10, "{bytes} B: {our_time:?}, with quinn's own {their_time:?}");
    }
}

#[test]
fn a_pause_adds_nothing_to_the_window() {
    let grown = |pause: Duration| {
        let mut link = Link::with(Congestion::Cubic.factory(1452, 4 << 20), Some(200));
        for _ in 0..20 {
            link.transfer(0, MESSAGE);
        }
        assert!(link.dropped > 0, "the window has not been cut");
        link.lose_one_in = None;
        link.pause(pause);
        let before = link.congestion_window(0);
        for _ in 0..20 {
            link.transfer(0, MESSAGE);
        }
        link.congestion_window(0) - before
    };
    let (without, with) = (grown(Duration::from_millis(1)), grown(Duration::from_secs(30)));
    println!("the window grows by {without} B, and by {with} B after a pause");
    // A datagram more where a limit falls differently.
    assert!(with <= without + 2 * 1452, "{with} B, without the pause {without} B");
}

/// One end of the connection.
struct End {
    endpoint: Endpoint,
    connection: Option<(ConnectionHandle, Connection)>,
    stream: Option<StreamId>,
    /// Bytes that are left to write, and that have been read.
    unwritten: usize,
    read: usize,
    /// What wakes the task that writes; as in an exchange, it is the one that reads if it expects something.
    woken: Arc<Woken>,
    expects: bool,
    /// Whether quinn gets all of a message at once, whatever is allowed.
    gets_all: bool,
    is_connected: bool,
    /// When the link has sent all that this end gave to it.
    is_free_at: Instant,
}

/// Whether a task is to run.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A stream of a connection.
struct Outlet<'a>(&'a mut Connection, StreamId);

impl Limited for Outlet<'_> {
    type Error = WriteError;

    fn set_limit(&mut self, bytes: u64) {
        self.0.set_send_window(bytes);
    }

    fn poll_write(&mut self, _cx: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize, WriteError>> {
        match self.0.send_stream(self.1).write(bytes) {
            Err(WriteError::Blocked) => Poll::Pending,
            outcome => Poll::Ready(outcome),
        }
    }
}

/// When a datagram arrives, its number, the end that it comes to and its bytes.
type Arrival = Reverse<(Instant, u64, usize, Vec<u8>)>;

struct Link {
    path: Path,
    now: Instant,
    ends: [End; 2],
    on_the_way: BinaryHeap<Arrival>,
    sent: u64,
    /// Of these, those that are more than an acknowledgement.
    filled: u64,
    /// Every such datagram is lost, in an order without a pattern.
    lose_one_in: Option<u64>,
    dropped: u64,
}

fn address(end: usize) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, 1000 + end as u16).into()
}

impl Path {
    /// The least time that a message takes.
    fn least(self, bytes: usize) -> Duration {
        self.delay + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s)
    }
}

impl Link {
    /// A connection over [`WAN`] with controllers of `factory`.
    fn with(factory: Arc<dyn ControllerFactory + Send + Sync>, lose_one_in: Option<u64>) -> Self {
        Self::over(WAN, factory, lose_one_in)
    }

    fn over(path: Path, factory: Arc<dyn ControllerFactory + Send + Sync>, lose_one_in: Option<u64>) -> Self {
        let options = QuicOptions::default();
        let sizes = DatagramSizes { initial: 1200, largest: 1452 };
        let identities = [Identity::generate().unwrap(), Identity::generate().unwrap()];
        let settings = || {
            let mut settings =
                Arc::into_inner(transport_config(&options, Congestion::Cubic, sizes, 1).unwrap()).unwrap();
            settings.congestion_controller_factory(factory.clone());
            Arc::new(settings)
        };
        let pins = Pins::new(std::iter::once((1, identities[1].fingerprint())));
        let server = server_config(identities[0].server_config(&pins).unwrap(), settings());
        let mut client = quinn::ClientConfig::new(identities[1].client_config(0, identities[0].fingerprint()).unwrap());
        client.transport_config(settings());

        let now = Instant::now();
        let end = |server| End {
            endpoint: Endpoint::new(Arc::new(EndpointConfig::default()), server, true, Some([7; 32])),
            connection: None,
            stream: None,
            unwritten: 0,
            read: 0,
            woken: Arc::default(),
            expects: false,
            gets_all: false,
            is_connected: false,
            is_free_at: now,
        };
        let mut ends = [end(Some(Arc::new(server))), end(None)];
        ends[1].connection = Some(ends[1].endpoint.connect(now, client, address(0), SERVER_NAME).unwrap());
        let mut link =
            Link { path, now, ends, on_the_way: BinaryHeap::new(), sent: 0, filled: 0, lose_one_in: None, dropped: 0 };
        link.run_until(|link| link.ends.iter().all(|end| end.is_connected));
        let client = &mut link.ends[1];
        client.stream = client.connection.as_mut().unwrap().1.streams().open(Dir::Bi);
        link.transfer(1, 1);
        link.lose_one_in = lose_one_in;
        link
    }

    /// How long a message of `bytes` takes from the end `from` to the other.
    fn transfer(&mut self, from: usize, bytes: usize) -> Duration {
        let began = self.now;
        let to = 1 - from;
        let whole = self.ends[to].read + bytes;
        self.ends[from].begin(bytes, false);
        self.run_until(|link| link.ends[to].read == whole);
        self.now - began
    }

    /// How long messages of `bytes` take that both ends send at the same time.
    fn exchange(&mut self, bytes: usize) -> Duration {
        let began = self.now;
        let whole = [0, 1].map(|end| self.ends[end].read + bytes);
        self.ends.iter_mut().for_each(|end| end.begin(bytes, true));
        self.run_until(|link| (0..2).all(|end| link.ends[end].read == whole[end]));
        self.now - began
    }

    /// From now on quinn gets all of a message at once, whatever is allowed.
    fn give_all(&mut self) {
        for end in &mut self.ends {
            end.gets_all = true;
            end.connection.as_mut().unwrap().1.set_send_window(4 << 20);
        }
    }

    /// Sends nothing for a while.
    fn pause(&mut self, pause: Duration) {
        let end = self.now + pause;
        self.run_until(|link| link.now >= end);
    }

    /// The congestion window of an end, in bytes.
    fn congestion_window(&self, end: usize) -> u64 {
        let (_, connection) = self.ends[end].connection.as_ref().unwrap();
        connection.congestion_state().metrics().congestion_window
    }

    fn run_until(&mut self, is_done: impl Fn(&Link) -> bool) {
        let last = self.now + Duration::from_secs(60);
        loop {
            (0..2).for_each(|end| self.drive(end));
            if is_done(self) {
                return;
            }
            assert!(self.now < last, "nothing comes any more");
            let timers = self.ends.iter_mut().filter_map(|end| end.connection.as_mut()?.1.poll_timeout());
            let timer = timers.min().map(|due| due.max(self.now) + self.path.tick);
            let arrival = self.on_the_way.peek().map(|Reverse((at, ..))| *at);
            self.now = [timer, arrival].into_iter().flatten().min().unwrap();
            while self.on_the_way.peek().is_some_and(|Reverse((at, ..))| *at <= self.now) {
                let Reverse((_, _, end, datagram)) = self.on_the_way.pop().unwrap();
                self.arrive(end, &datagram);
            }
        }
    }

    fn arrive(&mut self, end: usize, datagram: &[u8]) {
        let (now, End { endpoint, connection, .. }) = (self.now, &mut self.ends[end]);
        let mut answer = Vec::new();
        match endpoint.handle(now, address(1 - end), None, None, BytesMut::from(datagram), &mut answer) {
            Some(DatagramEvent::NewConnection(incoming)) => {
                *connection =
                    Some(endpoint.accept(incoming, now, &mut answer, None).map_err(|error| error.cause).unwrap());
            }
            Some(DatagramEvent::ConnectionEvent(_, event)) => connection.as_mut().unwrap().1.handle_event(event),
            _ => {}
        }
    }

    /// Lets an end do what it can at this moment, in the order in which quinn does it.
    fn drive(&mut self, number: usize) {
        let now = self.now;
        let Some((_, connection)) = &mut self.ends[number].connection else { return };
        if connection.poll_timeout().is_some_and(|due| due <= now) {
            connection.handle_timeout(now);
        }
        let mut datagrams = self.ends[number].transmit(now);
        self.ends[number].handle_events();
        self.ends[number].write();
        datagrams.extend(self.ends[number].transmit(now));
        datagrams.into_iter().for_each(|datagram| self.send(number, datagram));
    }

    fn send(&mut self, from: usize, datagram: Vec<u8>) {
        self.sent += 1;
        self.filled += u64::from(datagram.len() > 100);
        let is_free_at = self.ends[from].is_free_at.max(self.now);
        let waiting = (is_free_at - self.now).as_secs_f64() * self.path.bytes_per_s;
        // Knuth's multiplicative hash.
        let is_lost = self
            .lose_one_in
            .is_some_and(|one_in| (self.sent.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33).is_multiple_of(one_in));
        if waiting > self.path.queue || is_lost {
            self.dropped += 1;
            return;
        }
        let leaves = is_free_at + Duration::from_secs_f64((datagram.len() + HEADERS) as f64 / self.path.bytes_per_s);
        self.ends[from].is_free_at = leaves;
        self.on_the_way.push(Reverse((leaves + self.path.delay, self.sent, 1 - from, datagram)));
    }
}

impl End {
    /// Has `bytes` to write, and `expects` as many.
    fn begin(&mut self, bytes: usize, expects: bool) {
        (self.unwritten, self.expects) = (bytes, expects);
        self.woken.wake_by_ref();
    }

    fn transmit(&mut self, now: Instant) -> Vec<Vec<u8>> {
        let Some((_, connection)) = &mut self.connection else { return Vec::new() };
        let mut datagrams = Vec::new();
        let mut bytes = Vec::new();
        while let Some(sent) = connection.poll_transmit(now, 10, &mut bytes) {
            datagrams.extend(bytes.chunks(sent.segment_size.unwrap_or(sent.size)).map(<[u8]>::to_vec));
            bytes.clear();
        }
        datagrams
    }

    /// Lets the endpoint and the task know what has happened, and reads what has come.
    fn handle_events(&mut self) {
        let Some((handle, connection)) = &mut self.connection else { return };
        while let Some(event) = connection.poll_endpoint_events() {
            if let Some(event) = self.endpoint.handle_event(*handle, event) {
                connection.handle_event(event);
            }
        }
        while let Some(event) = connection.poll() {
            match event {
                Event::Connected => self.is_connected = true,
                Event::ConnectionLost { reason } => panic!("{reason}"),
                Event::Stream(StreamEvent::Writable { .. }) => self.woken.wake_by_ref(),
                _ => {}
            }
        }
        self.stream = self.stream.or_else(|| connection.streams().accept(Dir::Bi));
        let Some(id) = self.stream else { return };
        if let Ok(mut chunks) = connection.recv_stream(id).read(true) {
            while let Ok(Some(chunk)) = chunks.next(usize::MAX) {
                self.read += chunk.bytes.len();
                if self.expects {
                    self.woken.wake_by_ref();
                }
            }
            let _ = chunks.finalize();
        }
    }

    /// Runs the task, if it has been woken.
    fn write(&mut self) {
        let (Some((_, connection)), Some(id)) = (&mut self.connection, self.stream) else { return };
        if !self.woken.0.swap(false, Ordering::Relaxed) {
            return;
        }
        let controller = connection.congestion_state().clone_box();
        let allowance = Paced::allowance(controller).filter(|_| !self.gets_all);
        let waker = Waker::from(self.woken.clone());
        let (mut cx, mut outlet) = (Context::from_waker(&waker), Outlet(connection, id));
        while self.unwritten > 0 {
            let bytes = &ONES[..self.unwritten.min(ONES.len())];
            let written = match &allowance {
                Some(allowance) => allowance.poll_write(&mut cx, &mut outlet, bytes, 0, ONES.len()),
                None => outlet.poll_write(&mut cx, bytes),
            };
            match written {
                Poll::Ready(count) => self.unwritten -= count.unwrap(),
                Poll::Pending => break,
            }
        }
    }
}
