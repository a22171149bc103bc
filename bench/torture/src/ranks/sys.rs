//! System calls that the standard library does not offer, behind safe functions.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use socket2::{Domain, SockFilter, SockRef, Type};

/// Sends `signal` to a process that this one has started and not yet waited for, so that its number is still its own.
pub(crate) fn signal(process: u32, signal: i32) {
    if let Ok(process) = libc::pid_t::try_from(process)
        && process > 1
    {
        // SAFETY: kill takes two integers and touches no memory of this process.
        unsafe { libc::kill(process, signal) };
    }
}

/// Memory pages that this process has in use, in bytes.
pub(crate) fn resident_bytes() -> u64 {
    // SAFETY: sysconf takes one integer and touches no memory of this process.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
    let text = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split_whitespace().nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * page
}

/// Entries of a folder of `/proc/self`.
pub(crate) fn entries(folder: &str) -> usize {
    fs::read_dir(Path::new("/proc/self").join(folder)).map_or(0, Iterator::count)
}

/// A socket of this process that talks to another, or a UDP socket.
pub(crate) struct Socket {
    /// A descriptor of its own for the same socket: what is set through it holds for the socket.
    own: OwnedFd,
    /// Under which number the rest of the process knows it.
    number: i32,
    pub(crate) local: SocketAddr,
    /// `None` for a UDP socket, which has no one peer.
    pub(crate) peer: Option<SocketAddr>,
}

impl Socket {
    /// Every connected TCP socket and every UDP socket of this process.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub(crate) fn all() -> io::Result<Vec<Socket>> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc/self/fd")? {
            let entry = entry?;
            let Some(number) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
            let is_socket = fs::read_link(entry.path()).is_ok_and(|name| name.to_string_lossy().starts_with("socket:"));
            if !is_socket {
                continue;
            }
            if let Some(socket) = Socket::of(number) {
                found.push(socket);
            }
        }
        Ok(found)
    }

    fn of(number: i32) -> Option<Socket> {
        // SAFETY: fcntl takes integers here; a number that has been closed meanwhile is an error, not undefined.
        let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
        if copy < 0 {
            return None;
        }
        // SAFETY: the call above has made this descriptor, and nobody else knows it.
        let own = unsafe { OwnedFd::from_raw_fd(copy) };
        let socket = SockRef::from(&own);
        let local = socket.local_addr().ok()?.as_socket()?;
        let peer = socket.peer_addr().ok().and_then(|address| address.as_socket());
        let kind = socket.r#type().ok()?;
        let counts = (kind == Type::STREAM && peer.is_some()) || kind == Type::DGRAM;
        counts.then_some(Socket { own, number, local, peer })
    }

    pub(crate) fn is_udp(&self) -> bool {
        self.peer.is_none()
    }

    /// From now on nothing that comes reaches this socket: no data, no acknowledgement, no end of the connection.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn block(&self) -> io::Result<()> {
        SockRef::from(&self.own).attach_filter(&[SockFilter::new(RETURN, 0, 0, 0)])
    }

    /// From now on no datagram that was sent from one of `ports` reaches this UDP socket.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn block_from(&self, ports: &[u16]) -> io::Result<()> {
        // A filter of a UDP socket sees the UDP header first: the source port is its first half-word.
        let mut program = vec![SockFilter::new(LOAD_HALF, 0, 0, 0)];
        for port in ports {
            program.push(SockFilter::new(JUMP_IF_EQUAL, 0, 1, u32::from(*port)));
            program.push(SockFilter::new(RETURN, 0, 0, 0));
        }
        program.push(SockFilter::new(RETURN, 0, 0, u32::MAX));
        SockRef::from(&self.own).attach_filter(&program)
    }

    /// Tells the other end that nothing more will be sent.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn shut_down(&self) -> io::Result<()> {
        SockRef::from(&self.own).shutdown(std::net::Shutdown::Write)
    }

    /// Closes the socket behind the back of whoever uses it, with a reset to the other end of a connection.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn reset(self) -> io::Result<()> {
        if !self.is_udp() {
            SockRef::from(&self.own).set_linger(Some(Duration::ZERO))?;
        }
        let nothing = fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
        let Socket { own, number, .. } = self;
        drop(own);
        // SAFETY: dup3 takes integers. It replaces the socket under its number by /dev/null, which its user then reads and writes
        // instead: that is the fault to be injected. Memory is not concerned.
        if unsafe { libc::dup3(nothing.as_raw_fd(), number, libc::O_CLOEXEC) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// Whether this user may put filters on sockets, which some systems keep for root, of some kinds of socket or of filter.
pub(crate) fn may_filter_sockets() -> bool {
    let nothing = [SockFilter::new(RETURN, 0, 0, 0)];
    let takes = |kind| socket2::Socket::new(Domain::IPV4, kind, None).and_then(|socket| socket.attach_filter(&nothing));
    [Type::STREAM, Type::DGRAM].into_iter().all(|kind| takes(kind).is_ok())
}

/// Instructions of the classic packet filter (linux/bpf_common.h).
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
const LOAD_HALF: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (dialled, listener.accept().unwrap().0)
    }

    fn socket_of(local: SocketAddr) -> Socket {
        Socket::all().unwrap().into_iter().find(|socket| socket.local == local && socket.peer.is_some()).unwrap()
    }

    #[test]
    fn a_blocked_socket_receives_nothing_and_the_other_end_sees_no_end() {
        if !may_filter_sockets() {
            eprintln!("skipped: this system lets only root put filters on sockets");
            return;
        }
        let (near, mut far) = pair();
        socket_of(near.local_addr().unwrap()).block().unwrap();
        far.write_all(b"hello").unwrap();
        near.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert_eq!((&near).read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn a_reset_reaches_the_other_end() {
        let (near, far) = pair();
        socket_of(near.local_addr().unwrap()).reset().unwrap();
        far.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        assert_eq!((&far).read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        assert!((&near).write(b"x").is_err());
    }

    #[test]
    fn a_shut_down_socket_ends_without_a_reset() {
        let (near, far) = pair();
        socket_of(near.local_addr().unwrap()).shut_down().unwrap();
        far.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        assert_eq!((&far).read(&mut [0; 8]).unwrap(), 0);
    }

    #[test]
    fn datagrams_are_told_apart_by_where_they_come_from() {
        if !may_filter_sockets() {
            eprintln!("skipped: this system lets only root put filters on sockets");
            return;
        }
        let bind = || UdpSocket::bind("127.0.0.1:0").unwrap();
        let (hearer, one, other) = (bind(), bind(), bind());
        let address = hearer.local_addr().unwrap();
        let socket = Socket::all().unwrap().into_iter().find(|socket| socket.local == address).unwrap();
        socket.block_from(&[7, one.local_addr().unwrap().port()]).unwrap();
        one.send_to(b"one", address).unwrap();
        other.send_to(b"other", address).unwrap();
        hearer.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut bytes = [0; 8];
        assert_eq!(hearer.recv(&mut bytes).unwrap(), 5);
        socket.block().unwrap();
        other.send_to(b"other", address).unwrap();
        hearer.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(hearer.recv(&mut bytes).is_err());
    }

    #[test]
    fn the_figures_of_this_process_are_there() {
        assert!(resident_bytes() > 0 && entries("task") > 0 && entries("fd") > 0);
    }
}
