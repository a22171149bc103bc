//! What the kernel knows of TCP sockets: of those of this process that another library keeps to itself, and of a connection that has been asked
//! for and that no process has yet. What it takes does not grow with the connections of the machine.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::fs;
use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::RawFd;

use socket2::{Domain, Protocol, Socket, Type};

use crate::sys;

/// The state of a connection, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Established,
    /// This side has asked for the connection, and nobody has answered yet.
    Asked,
    /// The other side has asked for it, was answered, and has not replied yet.
    Answered,
    Other,
}

impl State {
    /// By the kernel's number (`net/tcp_states.h`).
    fn of(number: u8) -> State {
        match number {
            1 => State::Established,
            2 => State::Asked,
            3 => State::Answered,
            _ => State::Other,
        }
    }
}

/// The number of a descriptor of this process, and of its socket, which no other socket has.
pub(crate) type OwnSocket = (RawFd, u64);

/// The sockets of this process.
///
/// # Errors
/// Where the system does not list them, or the process has no descriptor left for that.
pub(crate) fn own() -> io::Result<Vec<OwnSocket>> {
    let mut own = Vec::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        let entry = entry?;
        // One that was closed meanwhile is no error.
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let inode = target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
        let descriptor = entry.file_name().to_str().and_then(|number| number.parse().ok());
        own.extend(descriptor.zip(inode));
    }
    Ok(own)
}

/// A TCP socket of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TcpSocket {
    pub(crate) state: State,
    pub(crate) inode: u64,
    pub(crate) local: SocketAddr,
    /// `None` until it is connected.
    pub(crate) remote: Option<SocketAddr>,
}

impl TcpSocket {
    /// `None` if it is none, or has been closed meanwhile.
    pub(crate) fn of((descriptor, inode): OwnSocket) -> Option<TcpSocket> {
        let state = State::of(sys::tcp_state(descriptor)?);
        let local = sys::local_address(descriptor)?;
        Some(TcpSocket { state, inode, local, remote: sys::remote_address(descriptor) })
    }
}

/// Whether two addresses are the same one. The kernel does not tell the scope of a link-local one everywhere.
pub(crate) fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    (one.ip().to_canonical(), one.port()) == (other.ip().to_canonical(), other.port())
}

/// Asks the kernel for single connections (`man 7 sock_diag`), which takes no rights.
pub(crate) struct ConnectionLookup {
    socket: Socket,
    questions: u32,
}

/// Of `linux/netlink.h` and `linux/sock_diag.h`.
const HEADER_LEN: usize = 16;
const ERROR: u16 = 2;
const BY_FAMILY: u16 = 20;
const REQUEST: u16 = 1;

/// Longer than an answer about one connection.
const ANSWER_LEN: usize = 4 << 10;

impl ConnectionLookup {
    /// # Errors
    /// Those of the system where it does not have this.
    pub(crate) fn open() -> io::Result<Self> {
        let protocol = Protocol::from(libc::NETLINK_SOCK_DIAG);
        let socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::DGRAM, Some(protocol))?;
        // The kernel has answered when it has taken the question.
        socket.set_nonblocking(true)?;
        Ok(ConnectionLookup { socket, questions: 0 })
    }

    /// The state of the connection between this machine's `local` address and `remote`, in this thread's network namespace; `None` where there is
    /// none.
    ///
    /// # Errors
    /// Those of the system where it does not tell.
    pub(crate) fn state(&mut self, local: SocketAddr, remote: SocketAddr) -> io::Result<Option<State>> {
        self.questions = self.questions.wrapping_add(1);
        let Some(question) = question(self.questions, local, remote) else { return Ok(None) };
        // What has no other address goes to the kernel.
        self.socket.send(&question)?;
        let mut answer = [0; ANSWER_LEN];
        let length = loop {
            match (&self.socket).read(&mut answer) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                read => break read?,
            }
        };
        parse(answer.get(..length).unwrap_or_default(), self.questions)
    }
}

/// `struct inet_diag_req_v2` behind a header. `None` for two addresses of different families: there is no such connection.
fn question(number: u32, local: SocketAddr, remote: SocketAddr) -> Option<Vec<u8>> {
    let octets = |ip: IpAddr| match ip.to_canonical() {
        IpAddr::V4(v4) => (libc::AF_INET, v4.to_ipv6_compatible().octets()),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets()),
    };
    let ((family, mut from), (other, mut to)) = (octets(local.ip()), octets(remote.ip()));
    if family != other {
        return None;
    }
    if family == libc::AF_INET {
        // The kernel has these in front.
        from.rotate_left(12);
        to.rotate_left(12);
    }
    let interface = match local {
        SocketAddr::V6(v6) => v6.scope_id(),
        SocketAddr::V4(_) => 0,
    };
    let (length, tcp) = (HEADER_LEN as u32 + 56, libc::IPPROTO_TCP);
    let mut bytes = Vec::with_capacity(length as usize);
    bytes.extend_from_slice(&length.to_ne_bytes());
    bytes.extend_from_slice(&BY_FAMILY.to_ne_bytes());
    bytes.extend_from_slice(&REQUEST.to_ne_bytes());
    bytes.extend_from_slice(&number.to_ne_bytes());
    bytes.extend_from_slice(&[0; 4]);
    // Family, protocol, no extensions, padding; then all states.
    bytes.extend_from_slice(&[u8::try_from(family).ok()?, u8::try_from(tcp).ok()?, 0, 0]);
    bytes.extend_from_slice(&u32::MAX.to_ne_bytes());
    bytes.extend_from_slice(&local.port().to_be_bytes());
    bytes.extend_from_slice(&remote.port().to_be_bytes());
    bytes.extend_from_slice(&from);
    bytes.extend_from_slice(&to);
    bytes.extend_from_slice(&interface.to_ne_bytes());
    // Any socket with these addresses.
    bytes.extend_from_slice(&[u8::MAX; 8]);
    Some(bytes)
}

/// The state that an answer to the question of this `number` tells; `None` where there is no such socket.
///
/// # Errors
/// The kernel's; `InvalidData` for what is no answer to this question.
fn parse(answer: &[u8], number: u32) -> io::Result<Option<State>> {
    let nonsense = || io::Error::new(ErrorKind::InvalidData, "the kernel's answer is not understood");
    let word = |at: usize| answer.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
    let kind = answer.get(4..).and_then(|rest| rest.first_chunk()).map(|bytes| u16::from_ne_bytes(*bytes));
    let length = word(0).and_then(|length| usize::try_from(length).ok());
    if word(8) != Some(number) || length != Some(answer.len()) {
        return Err(nonsense());
    }
    match kind {
        // Family, then the state.
        Some(BY_FAMILY) => answer.get(HEADER_LEN + 1).map(|state| Some(State::of(*state))).ok_or_else(nonsense),
        Some(ERROR) => match word(HEADER_LEN).map(|code| i32::from_ne_bytes(code.to_ne_bytes())) {
            Some(code) if code == -libc::ENOENT => Ok(None),
            Some(code @ ..0) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
            _ => Err(nonsense()),
        },
        _ => Err(nonsense()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn both_ends_of_a_connection_are_found_with_whose_they_are() {
        let mut lookup = ConnectionLookup::open().unwrap();
        for bind in ["127.0.0.1:0", "[::1]:0", "[::ffff:127.0.0.1]:0"] {
            let Ok(listener) = TcpListener::bind(bind) else {
                println!("skipped: no {bind}");
                continue;
            };
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (accepted, from) = listener.accept().unwrap();
            let (near, far) = (stream.local_addr().unwrap(), accepted.local_addr().unwrap());
            let sockets: Vec<TcpSocket> = own().unwrap().into_iter().filter_map(TcpSocket::of).collect();
            for (local, remote) in [(near, far), (far, from)] {
                let is_it = |socket: &&TcpSocket| socket.remote == Some(remote) && is_same(socket.local, local);
                assert_eq!(sockets.iter().find(is_it).unwrap().state, State::Established);
                assert_eq!(lookup.state(local, remote).unwrap(), Some(State::Established), "{bind}");
            }
            // The listener itself answers for whoever has not asked.
            let nobody = SocketAddr::new(near.ip(), 1);
            assert_eq!(lookup.state(far, nobody).unwrap(), Some(State::Other));
            assert_eq!(lookup.state(nobody, far).unwrap(), None);
        }
        assert_eq!(lookup.state("127.0.0.1:1".parse().unwrap(), "[::1]:1".parse().unwrap()).unwrap(), None);
    }

    #[test]
    fn a_socket_that_has_not_been_answered_yet_has_no_other_end() {
        // For benchmarks of networks only (RFC 2544): nobody answers.
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        let asked = socket.connect(&"198.18.0.1:9".parse::<SocketAddr>().unwrap().into()).unwrap_err();
        if asked.raw_os_error() != Some(libc::EINPROGRESS) {
            println!("skipped: no route ({asked})");
            return;
        }
        let descriptor = std::os::fd::AsRawFd::as_raw_fd(&socket);
        let found = TcpSocket::of((descriptor, 7)).unwrap();
        assert!(found.remote.is_none() && found.inode == 7, "{found:?}");
        // A network may answer that there is no such host.
        assert!(matches!(found.state, State::Asked | State::Other), "{found:?}");
        assert!(TcpSocket::of((descriptor + 1000, 7)).is_none());
    }

    #[test]
    fn other_answers_are_refused() {
        let answer = |kind: u16, number: u32, rest: &[u8]| {
            let length = u32::try_from(HEADER_LEN + rest.len()).unwrap();
            let head =
                [&length.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 2], &number.to_ne_bytes(), &[0; 4]].concat();
            parse(&[&head, rest].concat(), 5)
        };
        assert_eq!(answer(BY_FAMILY, 5, &[2, 3, 0, 0]).unwrap(), Some(State::Answered));
        assert_eq!(answer(ERROR, 5, &(-libc::ENOENT).to_ne_bytes()).unwrap(), None);
        assert_eq!(answer(ERROR, 5, &(-libc::EPERM).to_ne_bytes()).unwrap_err().kind(), ErrorKind::PermissionDenied);
        for (kind, number, rest) in
            [(BY_FAMILY, 4, &[2, 3][..]), (BY_FAMILY, 5, &[2]), (ERROR, 5, &[0; 4]), (3, 5, &[2, 3])]
        {
            assert_eq!(answer(kind, number, rest).unwrap_err().kind(), ErrorKind::InvalidData);
        }
        assert!(parse(&[0; 3], 5).is_err());
    }
}
