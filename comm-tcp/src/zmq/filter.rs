//! Packet filters of a listening socket (`SO_ATTACH_FILTER`), which the kernel runs on every TCP segment for it, before the segment does
//! anything. A socket that it accepts keeps the filter of its listener. They take no privilege.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};

use socket2::Socket;

/// Lets nobody in: a connection can be asked for, and is answered by the kernel, but it does not come about, for the segment that would
/// complete it is dropped, and so is everything else. Nothing can be accepted. To be called before the socket listens.
///
/// # Errors
/// Those of the kernel; `Unsupported` on other systems than Linux.
pub(super) fn close_to_all(socket: &Socket) -> io::Result<()> {
    attach(&socket2::SockRef::from(socket), &closed())
}

/// Lets in what is sent from `source`, except for a new request: so the connection that was asked for from there comes about, and no other
/// one, not even from the same port later. The listener is closed to everybody else, as before.
///
/// # Errors
/// As [`close_to_all`].
pub(super) fn admit_only(listener: &TcpListener, source: SocketAddr) -> io::Result<()> {
    attach(&socket2::SockRef::from(listener), &open_to(source))
}

/// A step of a filter. One that is not met drops the segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// An instruction of classic BPF, by its code, and its operand.
    Do(u16, u32),
    /// The accumulator is this.
    Is(u32),
    /// The accumulator has none of these bits.
    HasNoneOf(u32),
}

// Of linux/filter.h.
const LOAD_WORD: u16 = 0x20;
const LOAD_HALF: u16 = 0x28;
const LOAD_BYTE: u16 = 0x30;
const LOAD_LENGTH: u16 = 0x80;
const AND: u16 = 0x54;
const SHIFT_RIGHT: u16 = 0x74;
const SUBTRACT_INDEX: u16 = 0x1c;
const TO_INDEX: u16 = 0x07;

/// Offsets from here on count from the start of the IP header, others from that of TCP.
const IP_HEADER: u32 = 0xfff0_0000;

/// Bytes of the TCP header.
const SOURCE_PORT: u32 = 0;
const HEADER_LENGTH: u32 = 12;
const FLAGS: u32 = 13;

const FIN_SYN_RST_ACK: u32 = 0x17;
const SYN: u32 = 0x02;

/// A request for a connection, without data.
fn closed() -> Vec<Step> {
    vec![
        Step::Do(LOAD_BYTE, FLAGS),
        Step::Do(AND, FIN_SYN_RST_ACK),
        Step::Is(SYN),
        // The upper half of the byte counts words of 4 bytes.
        Step::Do(LOAD_BYTE, HEADER_LENGTH),
        Step::Do(AND, 0xf0),
        Step::Do(SHIFT_RIGHT, 2),
        Step::Do(TO_INDEX, 0),
        Step::Do(LOAD_LENGTH, 0),
        Step::Do(SUBTRACT_INDEX, 0),
        Step::Is(0),
    ]
}

/// Anything from `source` but a request.
fn open_to(source: SocketAddr) -> Vec<Step> {
    let mut steps = vec![
        Step::Do(LOAD_HALF, SOURCE_PORT),
        Step::Is(source.port().into()),
        Step::Do(LOAD_BYTE, FLAGS),
        Step::HasNoneOf(SYN),
    ];
    // Where the IP header has the source's address.
    let (offset, octets) = match source.ip().to_canonical() {
        IpAddr::V4(v4) => (12, v4.octets().to_vec()),
        IpAddr::V6(v6) => (8, v6.octets().to_vec()),
    };
    for (word, at) in octets.chunks_exact(4).zip((IP_HEADER + offset..).step_by(4)) {
        let word = word.iter().fold(0, |word, octet| word << 8 | u32::from(*octet));
        steps.extend([Step::Do(LOAD_WORD, at), Step::Is(word)]);
    }
    steps
}

#[cfg(target_os = "linux")]
fn attach(socket: &Socket, steps: &[Step]) -> io::Result<()> {
    use socket2::SockFilter;

    const RETURN: u16 = 0x06;
    const JUMP_IF_EQUAL: u16 = 0x15;
    const JUMP_IF_ANY: u16 = 0x45;
    const ALL: u32 = u32::MAX;
    const NOTHING: u32 = 0;

    // The last instruction drops the segment, the one before it lets it pass.
    let mut program = Vec::with_capacity(steps.len() + 2);
    for (index, step) in steps.iter().enumerate() {
        let to_the_last = u8::try_from(steps.len() - index).map_err(io::Error::other)?;
        program.push(match *step {
            Step::Do(code, operand) => SockFilter::new(code, 0, 0, operand),
            Step::Is(value) => SockFilter::new(JUMP_IF_EQUAL, 0, to_the_last, value),
            Step::HasNoneOf(bits) => SockFilter::new(JUMP_IF_ANY, to_the_last, 0, bits),
        });
    }
    program.extend([SockFilter::new(RETURN, 0, 0, ALL), SockFilter::new(RETURN, 0, 0, NOTHING)]);
    socket.attach_filter(&program)
}

#[cfg(not(target_os = "linux"))]
fn attach(_: &Socket, _: &[Step]) -> io::Result<()> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "only Linux has filters on sockets"))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::net::TcpStream;
    use std::time::{Duration, Instant};

    use socket2::{Domain, Type};

    use super::*;
    use crate::socket::listen_prepared;

    fn accept(listener: &TcpListener) -> Option<(TcpStream, SocketAddr)> {
        match listener.accept() {
            Ok(accepted) => Some(accepted),
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn only_the_connection_that_was_asked_for_comes_about() {
        for bind in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let bind: SocketAddr = bind.parse().unwrap();
            if TcpListener::bind(bind).is_err() {
                println!("skipped: no {bind}");
                continue;
            }
            let listener = listen_prepared(bind, None, None, |socket| close_to_all(socket).unwrap()).unwrap();
            let address = listener.local_addr().unwrap();
            let dial = || TcpStream::connect(address).unwrap();
            let (mut before, mut rank, mut after) = (dial(), dial(), dial());
            let source = rank.local_addr().unwrap();
            before.write_all(b"stranger").unwrap();
            assert!(accept(&listener).is_none());
            admit_only(&listener, source).unwrap();
            after.write_all(b"stranger").unwrap();
            rank.write_all(b"hello").unwrap();
            let begun = Instant::now();
            let (mut accepted, from) = loop {
                if let Some(accepted) = accept(&listener) {
                    break accepted;
                }
                assert!(begun.elapsed() < Duration::from_secs(20), "{bind}: nobody comes");
            };
            assert_eq!(from, source);
            let late = TcpStream::connect_timeout(&address, Duration::from_millis(100)).unwrap_err();
            assert_eq!(late.kind(), ErrorKind::TimedOut);
            accepted.set_nonblocking(false).unwrap();
            // Longer than a segment, in both directions.
            let sent: Vec<u8> = (0..3_000_000_u32).map(|index| (index % 251) as u8).collect();
            for (mut from, mut to) in [(&rank, &accepted), (&accepted, &rank)] {
                let skip = if std::ptr::eq(to, &accepted) { 5 } else { 0 };
                std::thread::scope(|scope| {
                    scope.spawn(|| from.write_all(&sent).unwrap());
                    let mut heard = vec![0; skip + sent.len()];
                    to.read_exact(&mut heard).unwrap();
                    assert!(heard[skip..] == sent && (skip == 0 || heard[..skip] == *b"hello"));
                });
            }
            assert!(accept(&listener).is_none());
            // Whoever has the same port later asks anew, and is not answered.
            socket2::SockRef::from(&rank).set_linger(Some(Duration::ZERO)).unwrap();
            drop(rank);
            assert!(accepted.read(&mut [0]).is_err());
            let again = Socket::new(Domain::for_address(address), Type::STREAM, None).unwrap();
            again.set_reuse_address(true).unwrap();
            again.bind(&source.into()).unwrap();
            let error = again.connect_timeout(&address.into(), Duration::from_millis(300)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut);
        }
    }
}
