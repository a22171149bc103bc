//! Datagrams from ends that send at a given pace to one that listens.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use rig::interrupts::uninterrupted;
use rig::sys::now;
use serde::{Deserialize, Serialize};
use socket2::SockRef;

use super::endpoint::ProcessSetup;
use super::interface::{self, Sampler, counter};

/// What one end sends.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Sender {
    pub(super) rank: usize,
    pub(super) packets_per_s: f64,
}

/// What has come.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct ReceiveStats {
    /// Median over samples of what the interface received, in bits of IP packets.
    pub(super) bits_per_s: Option<f64>,
    /// Different datagrams.
    pub(super) packets: u64,
    /// More than once.
    pub(super) twice: u64,
    /// After one that was sent later.
    pub(super) overtaken: u64,
    /// Dropped because this program was too slow.
    pub(super) unread: u64,
    /// How long they took.
    pub(super) delays: Option<Times>,
}

/// Of many times, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Times {
    pub(super) count: usize,
    pub(super) median: f64,
    /// What a tenth of them are below, and what a tenth are above.
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) longest: f64,
}

/// What was sent.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct SendStats {
    pub(super) packets: u64,
    pub(super) seconds: f64,
    /// How often the kernel would not take more: the link was what held packets back.
    pub(super) held_back: u64,
}

/// IP and UDP.
pub(super) const HEADERS: usize = 28;

/// Rank, number and time at the start of each datagram.
pub(super) const LEAST: usize = 20;

/// Nobody else is in the namespaces of a link, and on loopback one at a time measures.
const PORT: u16 = 29_410;

/// Far more than one measurement takes.
const MOST_PACKETS: u64 = 1 << 27;

/// How long senders collect what they send at once.
const TICK: Duration = Duration::from_millis(1);

/// Buffers as large as the kernel allows.
const BUFFER: usize = 8 << 20;

/// Receives from `senders` until all have ended and nothing comes any more.
pub(super) fn listen(setup: &ProcessSetup, senders: &[Sender]) -> io::Result<ReceiveStats> {
    let socket = UdpSocket::bind((setup.own, PORT))?;
    SockRef::from(&socket).set_recv_buffer_size(BUFFER)?;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    let sampler = Sampler::start(&setup.interface)?;
    let unread = || counter("Udp", "RcvbufErrors").unwrap_or(0);
    let unread_before = unread();
    setup.signal("ready")?;
    let mut seen: Vec<SenderStats> = senders.iter().map(|sender| SenderStats::new(sender.rank)).collect();
    let mut delays = Vec::new();
    let (mut first, mut last) = (None, Instant::now());
    let mut bytes = vec![0; 1 << 16];
    let patience = Instant::now() + setup.patience();
    loop {
        match uninterrupted(|| socket.recv(&mut bytes)) {
            Ok(count) => {
                let arrived = now();
                last = Instant::now();
                first.get_or_insert(last);
                let Some((rank, number, sent)) = bytes.get(..count).and_then(unpack) else { continue };
                let Some(seen) = seen.iter_mut().find(|seen| seen.rank == rank) else { continue };
                // The first one of a sender has waited for its neighbour's address.
                if seen.add(number) && number > 0 {
                    delays.push(arrived.saturating_sub(sent) as f64 / 1e3);
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let all_done = || senders.iter().all(|sender| setup.has_signal(&done(sender.rank)));
                if last.elapsed() >= setup.quiet && all_done() {
                    break;
                }
            }
            Err(error) => return Err(error),
        }
        if Instant::now() > patience {
            let text = "the senders did not finish".to_string();
            return Err(io::Error::new(ErrorKind::TimedOut, text));
        }
    }
    let samples = sampler.stop();
    let (from, to) = setup.steady(first.unwrap_or(last));
    let sum = |of: fn(&SenderStats) -> u64| seen.iter().map(of).sum();
    Ok(ReceiveStats {
        bits_per_s: interface::rate(&samples, from, to, setup.header),
        packets: sum(|seen| seen.packets),
        twice: sum(|seen| seen.twice),
        overtaken: sum(|seen| seen.overtaken),
        unread: unread() - unread_before,
        delays: Times::of(&delays),
    })
}

/// Sends datagrams with `payload` bytes.
pub(super) fn send(setup: &ProcessSetup, to: IpAddr, sender: Sender, payload: usize) -> io::Result<SendStats> {
    setup.wait_for("ready")?;
    let socket = UdpSocket::bind((setup.own, 0))?;
    SockRef::from(&socket).set_send_buffer_size(BUFFER)?;
    socket.connect(SocketAddr::from((to, PORT)))?;
    socket.set_nonblocking(true)?;
    let mut bytes = vec![0; payload.max(LEAST)];
    let mut sent = SendStats::default();
    let (began, mut due, mut number) = (Instant::now(), 0.0, 0);
    let mut tick = began;
    // Several ends must not send in step.
    thread::sleep(TICK.mul_f64(sender.rank as f64 / 16.0).min(TICK));
    let step = TICK.max(Duration::from_secs_f64(1.0 / sender.packets_per_s.max(0.1)));
    while began.elapsed() < setup.length {
        due += sender.packets_per_s * step.as_secs_f64();
        tick += step;
        while due >= 1.0 && began.elapsed() < setup.length {
            pack(&mut bytes, sender.rank, number);
            match socket.send(&bytes) {
                Ok(_) => {
                    (number, due) = (number + 1, due - 1.0);
                    sent.packets += 1;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    sent.held_back += 1;
                    if Instant::now() >= tick {
                        // What could not be sent in its time is not made up for.
                        due = 0.0;
                    }
                    thread::sleep(TICK / 20);
                }
                // Nobody listens any more, or the kernel has no buffer just now.
                Err(error) if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::OutOfMemory) => {
                    due -= 1.0
                }
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => due -= 1.0,
                Err(error) => return Err(error),
            }
        }
        match tick.checked_duration_since(Instant::now()) {
            Some(early) => thread::sleep(early),
            None if tick.elapsed() > 20 * TICK => tick = Instant::now(),
            None => {}
        }
    }
    sent.seconds = began.elapsed().as_secs_f64();
    setup.signal(&done(sender.rank))?;
    Ok(sent)
}

/// Answers until the other end, which measures, is done.
pub(super) fn answer(setup: &ProcessSetup) -> io::Result<()> {
    let socket = UdpSocket::bind((setup.own, PORT))?;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    setup.signal("ready")?;
    let patience = Instant::now() + setup.patience();
    let mut bytes = [0; LEAST];
    while !setup.has_signal("done") && Instant::now() < patience {
        match uninterrupted(|| socket.recv_from(&mut bytes)) {
            Ok((count, from)) => drop(socket.send_to(&bytes[..count], from)?),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Measures round trips at a pace of their own, so that a burst of losses costs no more than those it takes.
pub(super) fn ask(setup: &ProcessSetup, to: IpAddr, packets_per_s: f64) -> io::Result<Option<Times>> {
    setup.wait_for("ready")?;
    let socket = UdpSocket::bind((setup.own, 0))?;
    socket.connect(SocketAddr::from((to, PORT)))?;
    let step = Duration::from_secs_f64(1.0 / packets_per_s.max(0.1));
    let (mut times, mut seen) = (Vec::new(), SenderStats::new(0));
    let mut bytes = [0; LEAST];
    let (end, mut due, mut number) = (Instant::now() + setup.length, Instant::now(), 0);
    // There and back.
    let patience = end + 2 * setup.quiet;
    while Instant::now() < patience {
        let is_sending = due < end;
        if is_sending && Instant::now() >= due {
            pack(&mut bytes, 0, number);
            socket.send(&bytes)?;
            (number, due) = (number + 1, due + step);
        }
        let until = if is_sending { due } else { patience };
        let wait = until.saturating_duration_since(Instant::now());
        if wait.is_zero() {
            continue;
        }
        socket.set_read_timeout(Some(wait))?;
        match uninterrupted(|| socket.recv(&mut bytes)) {
            Ok(count) => {
                let Some((_, number, sent)) = bytes.get(..count).and_then(unpack) else { continue };
                // The first one has waited for its neighbour's address.
                if seen.add(number) && number > 0 {
                    times.push(now().saturating_sub(sent) as f64 / 1e3);
                }
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
    }
    setup.signal("done")?;
    Ok(Times::of(&times))
}

fn done(rank: usize) -> String {
    format!("done-{rank}")
}

fn pack(bytes: &mut [u8], rank: usize, number: u64) {
    let parts = [&(rank as u32).to_le_bytes()[..], &number.to_le_bytes(), &now().to_le_bytes()].concat();
    bytes.iter_mut().zip(parts).for_each(|(to, from)| *to = from);
}

/// Rank, number and time of sending.
fn unpack(bytes: &[u8]) -> Option<(usize, u64, u64)> {
    let rank = u32::from_le_bytes(bytes.get(..4)?.try_into().ok()?);
    let number = u64::from_le_bytes(bytes.get(4..12)?.try_into().ok()?);
    let sent = u64::from_le_bytes(bytes.get(12..20)?.try_into().ok()?);
    Some((rank as usize, number, sent))
}

impl Times {
    pub(super) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let at = |share: f64| {
            let place = share * count.saturating_sub(1) as f64;
            let (below, above) = (sorted.get(place.floor() as usize)?, sorted.get(place.ceil() as usize)?);
            Some(below + (above - below) * place.fract())
        };
        Some(Times { count, median: at(0.5)?, low: at(0.1)?, high: at(0.9)?, longest: at(1.0)? })
    }
}

/// Which datagrams of a sender have come.
struct SenderStats {
    rank: usize,
    /// A bit for each.
    bits: Vec<u64>,
    highest: u64,
    packets: u64,
    twice: u64,
    overtaken: u64,
}

impl SenderStats {
    fn new(rank: usize) -> Self {
        SenderStats { rank, bits: Vec::new(), highest: 0, packets: 0, twice: 0, overtaken: 0 }
    }

    /// Whether it is new.
    fn add(&mut self, number: u64) -> bool {
        if number >= MOST_PACKETS {
            return false;
        }
        let (word, bit) = ((number / 64) as usize, 1 << (number % 64));
        if self.bits.len() <= word {
            self.bits.resize(word + 1, 0);
        }
        if self.bits[word] & bit != 0 {
            self.twice += 1;
            return false;
        }
        self.bits[word] |= bit;
        self.packets += 1;
        self.overtaken += u64::from(number < self.highest);
        self.highest = self.highest.max(number);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::*;

    #[test]
    fn datagrams_are_known_again() {
        let mut bytes = [0; LEAST];
        pack(&mut bytes, 3, 77);
        let (rank, number, sent) = unpack(&bytes).unwrap();
        assert_eq!((rank, number), (3, 77));
        assert!(now() >= sent);
        assert!(unpack(&bytes[..19]).is_none());
        let mut seen = SenderStats::new(0);
        assert_eq!([0, 2, 1, 2, 500].map(|number| seen.add(number)), [true, true, true, false, true]);
        assert_eq!((seen.packets, seen.twice, seen.overtaken), (4, 1, 1));
        assert!(!seen.add(u64::MAX), "nonsense takes no memory");
    }

    #[test]
    fn nothing_has_no_median() {
        assert_eq!(Times::of(&[]), None);
        let times = Times { count: 3, median: 2.0, low: 1.2, high: 2.8, longest: 3.0 };
        assert_eq!(Times::of(&[3.0, 1.0, 2.0]), Some(times));
    }

    /// At an address of its own, since the port is always the same.
    fn setup(folder: &tempfile::TempDir) -> ProcessSetup {
        static NUMBER: AtomicU8 = AtomicU8::new(1);
        let [.., high, low] = std::process::id().to_be_bytes();
        ProcessSetup {
            own: [127, NUMBER.fetch_add(1, Ordering::Relaxed), high, low].into(),
            interface: "lo".into(),
            header: 14,
            length: Duration::from_millis(300),
            quiet: Duration::from_millis(100),
            folder: folder.path().to_owned(),
        }
    }

    /// An end that answers all but the numbers from 1 to `lost`, as a burst would have it.
    fn answer_after(setup: &ProcessSetup, lost: u64) {
        let socket = UdpSocket::bind((setup.own, PORT)).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        setup.signal("ready").unwrap();
        let mut bytes = [0; LEAST];
        while !setup.has_signal("done") {
            let Ok((count, from)) = socket.recv_from(&mut bytes) else { continue };
            let (_, number, _) = unpack(&bytes[..count]).unwrap();
            if number == 0 || number > lost {
                socket.send_to(&bytes[..count], from).unwrap();
            }
        }
    }

    /// One after the other: there is one port.
    #[test]
    fn what_is_sent_is_heard_and_a_burst_of_losses_ends_no_measurement() {
        let folder = tempfile::tempdir().unwrap();
        let setup = setup(&folder);
        let sender = Sender { rank: 1, packets_per_s: 1000.0 };
        let other = setup.clone();
        let sending = thread::spawn(move || send(&other, other.own, sender, 100).unwrap());
        let heard = listen(&setup, &[sender]).unwrap();
        let sent = sending.join().unwrap();
        assert!(sent.packets > 100 && sent.packets <= 310, "{sent:?}");
        assert_eq!((heard.packets + heard.unread, heard.twice), (sent.packets, 0), "{heard:?}");
        let median = heard.delays.unwrap().median;
        assert!(median > 0.0 && median < 1e5, "{heard:?}");
        let folder = tempfile::tempdir().unwrap();
        let other = self::setup(&folder);
        let asking = other.clone();
        let times = thread::spawn(move || ask(&asking, asking.own, 100.0).unwrap());
        answer_after(&other, 10);
        let times = times.join().unwrap().unwrap();
        assert!(times.count >= 10 && times.count <= 19, "30 were sent, 11 of them do not count: {times:?}");
    }
}
