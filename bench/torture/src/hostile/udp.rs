//! Strangers who send datagrams.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::thread;
use std::time::Duration;

use comm_core::splitmix::SplitMix64;
use socket2::{Domain, Protocol as SocketProtocol, SockAddr, Socket, Type};

use super::kinds::Kind;
use super::recipes::{Recipes, rubbish};
use super::tally::{AttackOutcome, End, Tally};

/// Largest payload of a UDP datagram over IPv4.
const LARGEST: u64 = 65_507;

/// Datagrams sent before a pause, so that what is tested is not how much a socket's buffer holds.
const BURST: u64 = 16;
const PAUSE: Duration = Duration::from_millis(4);

/// Sockets that send in turn, each from a port of its own.
const SENDERS: usize = 8;

/// Sends `count` datagrams of `kind` to `targets` in turn and listens for answers, until `go_on` says no.
///
/// # Errors
/// Where sockets cannot be had.
pub(super) fn send(
    kind: Kind,
    targets: &[SocketAddr],
    count: u64,
    recipes: &Recipes,
    random: &mut SplitMix64,
    go_on: &dyn Fn() -> bool,
) -> io::Result<Tally> {
    let mut tally = Tally::default();
    let mut senders = Senders::open()?;
    let forger = if kind == Kind::Spoofed { Some(Forger::open()?) } else { None };
    for n in 0..count {
        let Some(target) = targets.get(usize::try_from(n).unwrap_or(0) % targets.len().max(1)) else { break };
        let payload = datagram(kind, n, recipes, random);
        let sent = match &forger {
            Some(forger) => {
                // From the address of another rank of the job, or of itself if it is alone.
                let from = targets.get(usize::try_from(n + 1).unwrap_or(0) % targets.len()).unwrap_or(target);
                forger.send(*from, *target, &payload)
            }
            None => senders.send(n, *target, &payload),
        };
        let end = match sent {
            Ok(()) => End::Ignored,
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => End::NoPort,
            Err(_) => End::NotConnected,
        };
        tally.add(AttackOutcome { end, ..AttackOutcome::default() });
        if (n + 1).is_multiple_of(BURST) {
            thread::sleep(PAUSE);
            senders.listen(&mut tally);
            if !go_on() {
                break;
            }
        }
    }
    thread::sleep(PAUSE);
    senders.listen(&mut tally);
    Ok(tally)
}

fn datagram(kind: Kind, n: u64, recipes: &Recipes, random: &mut SplitMix64) -> Vec<u8> {
    match if kind == Kind::Spoofed { forged_kind(n) } else { kind } {
        Kind::Versions => {
            // A long header of a version that nobody speaks, or a version negotiation (version 0) that nobody asked for.
            let version = if n.is_multiple_of(2) { 0x1a2a_3a4a_u32 } else { 0 };
            let mut bytes = vec![0xc0 | (random.below(64) as u8)];
            bytes.extend_from_slice(&version.to_be_bytes());
            for _ in 0..2 {
                bytes.push(8);
                bytes.extend_from_slice(&rubbish(random, 8));
            }
            bytes.extend_from_slice(&rubbish(random, 1200));
            bytes
        }
        Kind::Initials => {
            let mut initial = recipes.initial.clone();
            if n.is_multiple_of(2) {
                initial.truncate(usize::try_from(n / 2 % initial.len() as u64).unwrap_or(0));
            } else {
                for _ in 0..=random.below(4) {
                    let at = random.below(initial.len() as u64);
                    if let Some(byte) = usize::try_from(at).ok().and_then(|at| initial.get_mut(at)) {
                        *byte ^= 1 << random.below(8);
                    }
                }
            }
            initial
        }
        Kind::Resets => {
            // A short header, and at its end what would be a token of 16 bytes.
            let len = 21 + random.below(80);
            let mut bytes = rubbish(random, usize::try_from(len).unwrap_or(21));
            bytes.first_mut().into_iter().for_each(|first| *first = 0x40 | (*first & 0x3f));
            bytes
        }
        _ => {
            let scale = 1 << random.below(17);
            let len = (1 + random.below(scale)).min(LARGEST);
            rubbish(random, usize::try_from(if n.is_multiple_of(50) { LARGEST } else { len }).unwrap_or(1))
        }
    }
}

fn forged_kind(n: u64) -> Kind {
    match n % 3 {
        0 => Kind::Initials,
        1 => Kind::Resets,
        _ => Kind::Datagrams,
    }
}

struct Senders {
    sockets: Vec<UdpSocket>,
}

impl Senders {
    fn open() -> io::Result<Self> {
        let mut senders = Senders { sockets: Vec::new() };
        for _ in 0..SENDERS {
            senders.sockets.push(Self::socket()?);
        }
        Ok(senders)
    }

    fn socket() -> io::Result<UdpSocket> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    }

    fn send(&mut self, n: u64, target: SocketAddr, payload: &[u8]) -> io::Result<()> {
        let at = usize::try_from(n).unwrap_or(0) % self.sockets.len().max(1);
        let Some(socket) = self.sockets.get_mut(at) else { return Err(ErrorKind::NotFound.into()) };
        // From another port every now and then.
        if (n / SENDERS as u64).is_multiple_of(16) {
            *socket = Self::socket()?;
        }
        socket.send_to(payload, target).map(drop)
    }

    /// Counts what came back.
    fn listen(&self, tally: &mut Tally) {
        let mut buffer = [0; 2048];
        for socket in &self.sockets {
            while let Ok((len, _)) = socket.recv_from(&mut buffer) {
                tally.answered += 1;
                tally.heard_most = tally.heard_most.max(len);
            }
        }
    }
}

/// Sends datagrams under others' addresses, which takes root or CAP_NET_RAW.
pub(super) struct Forger {
    socket: Socket,
}

impl Forger {
    /// # Errors
    /// `PermissionDenied` without the right to.
    pub(super) fn open() -> io::Result<Self> {
        // IPPROTO_RAW: what is sent has its own IP header.
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(SocketProtocol::from(255)))?;
        Ok(Forger { socket })
    }

    fn send(&self, from: SocketAddr, to: SocketAddr, payload: &[u8]) -> io::Result<()> {
        let (IpAddr::V4(source), IpAddr::V4(target)) = (from.ip(), to.ip()) else {
            return Err(ErrorKind::Unsupported.into());
        };
        // A raw socket does not fragment: what the interface of loopback takes at once.
        let payload = payload.get(..payload.len().min(60_000)).unwrap_or_default();
        let packet = packet((source, from.port()), (target, to.port()), payload);
        self.socket.send_to(&packet, &SockAddr::from(SocketAddr::new(to.ip(), 0))).map(drop)
    }
}

/// An IPv4 packet with a UDP datagram in it. The kernel fills in the total length, the identification and the checksum of the IP
/// header; a UDP checksum of 0 is none.
fn packet(from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), payload: &[u8]) -> Vec<u8> {
    let length = (8 + payload.len()) as u16;
    let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0];
    packet.extend_from_slice(&from.0.octets());
    packet.extend_from_slice(&to.0.octets());
    for field in [from.1, to.1, length, 0] {
        packet.extend_from_slice(&field.to_be_bytes());
    }
    packet.extend_from_slice(payload);
    packet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forged_datagram_comes_from_the_forged_address() {
        let forger = match Forger::open() {
            Ok(forger) => forger,
            Err(error) => {
                eprintln!("skipped: no raw sockets here: {error}");
                return;
            }
        };
        let (a, b) = (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        b.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        forger.send(a.local_addr().unwrap(), b.local_addr().unwrap(), b"forged").unwrap();
        let mut bytes = [0; 16];
        let (len, from) = b.recv_from(&mut bytes).unwrap();
        assert_eq!((&bytes[..len], from), (&b"forged"[..], a.local_addr().unwrap()));
    }

    #[test]
    fn datagrams_have_the_sizes_of_their_kind() {
        let recipes = Recipes::collect().unwrap();
        let mut random = SplitMix64::new(3);
        for n in 0..500 {
            for kind in [Kind::Datagrams, Kind::Versions, Kind::Initials, Kind::Resets, Kind::Spoofed] {
                assert!(datagram(kind, n, &recipes, &mut random).len() as u64 <= LARGEST);
            }
        }
        assert_eq!(datagram(Kind::Datagrams, 0, &recipes, &mut random).len() as u64, LARGEST);
    }

    #[test]
    fn a_closed_port_is_none() {
        let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let recipes = Recipes::collect().unwrap();
        let tally = send(Kind::Resets, &[closed], 64, &recipes, &mut SplitMix64::new(1), &|| true).unwrap();
        assert_eq!(tally.tried, 64);
        assert_eq!(tally.answered, 0);
    }
}
