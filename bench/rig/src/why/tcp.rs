//! What the kernel knows of this process's TCP connections, asked through `sock_diag` (`man 7 sock_diag`), which needs no rights and
//! answers for the network namespace of the thread that asks. It covers every transport on TCP without their help.
//!
//! Where the queue of the connection's own interface is full, as with a `tbf` on it, the kernel tries again, and counts each try as bytes
//! and packets sent, though not as sent again. The interface counts what really left.

use std::collections::HashSet;
use std::fs;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, InetResponse, SocketId, StateFlags};
use socket2::{Domain, Protocol, Socket, Type};

use super::figures::Connection;
use crate::interrupts::uninterrupted;

/// The kernel answers at once.
const PATIENCE: Duration = Duration::from_millis(500);

/// Longer than what the kernel puts into one datagram.
const DATAGRAM: usize = 64 << 10;

/// The connections of this process with counters since they were made, each under a name that stays with it; without those from or to
/// the port of the control plane.
///
/// # Errors
/// Why the kernel does not tell, for the user.
pub(super) fn connections(control_port: Option<u16>) -> Result<Vec<(String, Connection)>, String> {
    let own = own_sockets().map_err(|error| format!("the sockets of this process cannot be listed: {error}"))?;
    if own.is_empty() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for family in families() {
        for response in ask(family).map_err(|why| format!("the kernel does not report TCP connections: {why}"))? {
            let id = &response.header.socket_id;
            let is_control = control_port.is_some_and(|port| [id.source_port, id.destination_port].contains(&port));
            if own.contains(&response.header.inode) && !is_control {
                let name = format!("tcp {}", u64::from_ne_bytes(id.cookie));
                found.push((name, connection(&response)?));
            }
        }
    }
    Ok(found)
}

/// Inodes of the sockets that this process has open, as `sock_diag` has them.
fn own_sockets() -> io::Result<HashSet<u32>> {
    let links = fs::read_dir("/proc/self/fd")?.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    // The kernel cuts the numbers there, so they are cut here.
    Ok(links.filter_map(|link| inode(link.to_str()?).map(|inode| inode as u32)).collect())
}

fn inode(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// The families that this kernel has.
fn families() -> impl Iterator<Item = u8> {
    let has_v6 = Path::new("/proc/thread-self/net/if_inet6").exists();
    [AF_INET].into_iter().chain(has_v6.then_some(AF_INET6))
}

/// All connections of a family in this thread's network namespace.
fn ask(family: u8) -> Result<Vec<InetResponse>, String> {
    let failed = |what: &str| {
        let what = what.to_string();
        move |error: io::Error| format!("{what}: {error}; is this process allowed to use netlink sockets?")
    };
    let protocol = Protocol::from(libc::NETLINK_SOCK_DIAG);
    let mut socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::DGRAM, Some(protocol))
        .map_err(failed("no socket for sock_diag"))?;
    // What has no other address goes to the kernel.
    socket.send(&request(family)).map_err(failed("asking sock_diag"))?;
    let (mut responses, mut datagram, deadline) = (Vec::new(), vec![0; DATAGRAM], Instant::now() + PATIENCE);
    loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        socket.set_read_timeout(Some(left)).map_err(failed("a time limit for sock_diag"))?;
        let length = uninterrupted(|| socket.read(&mut datagram)).map_err(failed("no answer from sock_diag"))?;
        if take(datagram.get(..length).unwrap_or_default(), &mut responses)? {
            return Ok(responses);
        }
        if Instant::now() >= deadline {
            return Err(format!("sock_diag did not finish within {PATIENCE:?}; are there very many connections?"));
        }
    }
}

/// Asks for the connections of a family that have been established, whether or not the other end has closed since.
fn request(family: u8) -> Vec<u8> {
    let message = InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::INFO | ExtensionFlags::CONG,
        states: StateFlags::ESTABLISHED
            | StateFlags::FIN_WAIT1
            | StateFlags::FIN_WAIT2
            | StateFlags::CLOSE_WAIT
            | StateFlags::CLOSING
            | StateFlags::LAST_ACK,
        socket_id: if family == AF_INET { SocketId::new_v4() } else { SocketId::new_v6() },
    };
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut message = NetlinkMessage::new(header, SockDiagMessage::InetRequest(message).into());
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// Adds what a datagram tells to `responses`; whether it was the last one.
fn take(mut datagram: &[u8], responses: &mut Vec<InetResponse>) -> Result<bool, String> {
    while !datagram.is_empty() {
        let message = NetlinkMessage::<SockDiagMessage>::deserialize(datagram)
            .map_err(|error| format!("sock_diag's answer cannot be decoded (a kernel older than 5.4?): {error}"))?;
        match message.payload {
            NetlinkPayload::Done(done) if done.code < 0 => {
                return Err(refused(done.code));
            }
            NetlinkPayload::Done(_) => return Ok(true),
            NetlinkPayload::Error(error) => return Err(refused(error.raw_code())),
            NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => responses.push(*response),
            _ => {}
        }
        // A message is at least its header long, and followed by the next at a multiple of four.
        let length = (message.header.length as usize).max(1).next_multiple_of(4);
        datagram = datagram.get(length..).unwrap_or_default();
    }
    Ok(false)
}

/// `code` is an error of the system, negated.
fn refused(code: i32) -> String {
    let error = io::Error::from_raw_os_error(code.saturating_abs());
    format!("sock_diag refuses: {error}; does the kernel have CONFIG_INET_DIAG and CONFIG_INET_TCP_DIAG?")
}

fn connection(response: &InetResponse) -> Result<Connection, String> {
    let (mut info, mut congestion) = (None, "");
    for attribute in &response.nlas {
        match attribute {
            Nla::TcpInfo(found) => info = Some(found),
            Nla::Congestion(name) => congestion = name,
            _ => {}
        }
    }
    let info = info.ok_or("the kernel lists TCP connections without figures")?;
    let id = &response.header.socket_id;
    let ms = |microseconds: u32| f64::from(microseconds) / 1e3;
    Ok(Connection {
        protocol: "tcp".into(),
        peer: SocketAddr::new(id.destination_address.to_canonical(), id.destination_port).to_string(),
        congestion: congestion.into(),
        rtt_ms: ms(info.rtt),
        // All ones before the first sample.
        min_rtt_ms: (info.min_rtt != u32::MAX).then(|| ms(info.min_rtt)),
        congestion_window_bytes: u64::from(info.snd_cwnd) * u64::from(info.snd_mss),
        bytes_sent: info.bytes_sent,
        packets_sent: info.segs_out.into(),
        retransmitted_packets: info.total_retrans.into(),
        retransmitted_bytes: info.bytes_retrans,
    })
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, TcpStream};

    use netlink_packet_core::{DoneMessage, ErrorMessage};

    use super::*;

    /// A datagram with one connection, as the kernel wrote it.
    fn example() -> Vec<u8> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let _stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut socket =
            Socket::new(Domain::from(libc::AF_NETLINK), Type::DGRAM, Some(Protocol::from(libc::NETLINK_SOCK_DIAG)))
                .unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket.send(&request(AF_INET)).unwrap();
        let mut datagram = vec![0; DATAGRAM];
        let length = socket.read(&mut datagram).unwrap();
        datagram.truncate(length);
        let first = u32::from_ne_bytes(datagram[..4].try_into().unwrap()) as usize;
        datagram.truncate(first.next_multiple_of(4));
        datagram
    }

    #[test]
    fn no_answer_whatever_it_is_does_harm() {
        let example = example();
        let mut all = Vec::new();
        assert!(!take(&example, &mut all).unwrap());
        assert_eq!(all.len(), 1);
        connection(&all[0]).unwrap();
        let attempt = |bytes: &[u8]| {
            let mut found = Vec::new();
            let outcome = take(bytes, &mut found);
            found.iter().for_each(|response| drop(connection(response)));
            outcome
        };
        for length in 0..example.len() {
            let cut = attempt(&example[..length]);
            assert!(length == 0 || cut.is_err(), "{length} of {} bytes are taken", example.len());
            // A header that claims just what is there.
            let mut shorter = example[..length].to_vec();
            if length >= 16 {
                shorter[..4].copy_from_slice(&(length as u32).to_ne_bytes());
                let _ = attempt(&shorter);
            }
        }
        for position in 0..example.len() {
            for value in [0, 1, 2, 3, 4, 0x7f, 0x80, 0xff] {
                let mut changed = example.clone();
                changed[position] = value;
                let _ = attempt(&changed);
            }
        }
        // Lengths that lead nowhere.
        for length in [0_u32, 1, 15, u32::MAX, u32::MAX - 3] {
            let mut changed = example.clone();
            changed[..4].copy_from_slice(&length.to_ne_bytes());
            assert!(attempt(&changed).is_err(), "{length}");
        }
    }

    #[test]
    fn a_kernel_that_refuses_is_quoted() {
        let datagram = |payload| {
            let mut message = NetlinkMessage::<SockDiagMessage>::new(NetlinkHeader::default(), payload);
            message.finalize();
            let mut bytes = vec![0; message.buffer_len()];
            message.serialize(&mut bytes);
            bytes
        };
        let mut done = DoneMessage::default();
        assert!(take(&datagram(NetlinkPayload::Done(done.clone())), &mut Vec::new()).unwrap());
        done.code = -libc::ENOENT;
        let why = take(&datagram(NetlinkPayload::Done(done)), &mut Vec::new()).unwrap_err();
        assert!(why.contains("No such file"), "{why}");
        let mut error = ErrorMessage::default();
        error.code = std::num::NonZeroI32::new(-libc::EPERM);
        error.header = vec![0; 16];
        let why = take(&datagram(NetlinkPayload::Error(error)), &mut Vec::new()).unwrap_err();
        assert!(why.contains("not permitted"), "{why}");
    }

    #[test]
    fn a_family_that_there_is_not_is_an_error() {
        assert!(ask(AF_INET).is_ok());
        let why = ask(200).unwrap_err();
        assert!(why.contains("sock_diag"), "{why}");
    }

    #[test]
    fn mapped_addresses_are_written_as_what_they_stand_for() {
        let Ok(listener) = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)) else {
            return eprintln!("skipped: this machine has no IPv6");
        };
        let port = listener.local_addr().unwrap().port();
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        let (_far, _) = listener.accept().unwrap();
        let all = connections(None).unwrap();
        for end in [format!("127.0.0.1:{port}"), stream.local_addr().unwrap().to_string()] {
            assert!(all.iter().any(|(_, connection)| connection.peer == end), "{end}: {all:?}");
        }
    }

    #[test]
    fn a_link_of_proc_is_read() {
        assert_eq!(inode("socket:[4711]"), Some(4711));
        for other in ["pipe:[4711]", "socket:[]", "socket:[4711", "/dev/null", "socket:4711]"] {
            assert_eq!(inode(other), None, "{other}");
        }
    }
}
