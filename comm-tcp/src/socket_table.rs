//! The kernel's table of TCP sockets (`/proc/net/tcp`, `/proc/net/tcp6`): how a rank learns the addresses of a connection whose socket
//! another library keeps to itself.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::collections::HashSet;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) local: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) state: State,
    /// Number of the socket, 0 for one that no process has.
    pub(crate) inode: u64,
}

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

/// The sockets of the calling thread's network namespace.
///
/// # Errors
/// Where the system has no such table or the process has no descriptor left to read it.
pub(crate) fn rows() -> io::Result<Vec<Row>> {
    let mut text = fs::read_to_string("/proc/thread-self/net/tcp")?;
    match fs::read_to_string("/proc/thread-self/net/tcp6") {
        Ok(more) => text.push_str(&more),
        // A kernel without IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    // The lines that name the columns are none.
    Ok(text.lines().filter_map(parse).collect())
}

/// The numbers of this process's own sockets.
///
/// # Errors
/// As [`rows`].
pub(crate) fn own_sockets() -> io::Result<HashSet<u64>> {
    let mut own = HashSet::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        // One that was closed meanwhile is no error.
        let Ok(target) = fs::read_link(entry?.path()) else { continue };
        own.extend(
            target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<u64>().ok()),
        );
    }
    Ok(own)
}

/// Whether two addresses are the same one; the table does not tell the scope of a link-local one.
pub(crate) fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    (one.ip(), one.port()) == (other.ip(), other.port())
}

/// A line of the table: number, local address, remote address, state, three columns, user, timeouts, inode, and more.
pub(crate) fn parse(line: &str) -> Option<Row> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote) = (parse_address(fields.next()?)?, parse_address(fields.next()?)?);
    let state = match fields.next()? {
        "01" => State::Established,
        "02" => State::Asked,
        "03" => State::Answered,
        _ => State::Other,
    };
    Some(Row { local, remote, state, inode: fields.nth(5)?.parse().ok()? })
}

/// `0100007F:1F90`: each 32 bits of the address as this machine's processor would print them.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    if !text.bytes().all(|byte| byte == b':' || byte.is_ascii_hexdigit()) || port.len() != 4 {
        return None;
    }
    let word = |at: usize| u32::from_str_radix(ip.get(8 * at..8 * at + 8)?, 16).ok().map(u32::to_ne_bytes);
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut octets = [0; 16];
            for (at, part) in octets.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(at)?);
            }
            IpAddr::V6(Ipv6Addr::from(octets))
        }
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn both_ends_of_a_connection_are_found_with_whose_they_are() {
        for bind in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(bind) else {
                println!("skipped: no {bind}");
                continue;
            };
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (accepted, from) = listener.accept().unwrap();
            let (near, far) = (stream.local_addr().unwrap(), accepted.local_addr().unwrap());
            let own = own_sockets().unwrap();
            let rows = rows().unwrap();
            for (local, remote) in [(near, far), (far, from)] {
                let row = rows.iter().find(|row| is_same(row.local, local) && is_same(row.remote, remote)).unwrap();
                assert!(row.state == State::Established && own.contains(&row.inode), "{row:?}");
            }
        }
    }

    #[test]
    fn a_line_is_read_or_left_out() {
        let line = "   1: 0100007F:A3B4 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 77 1";
        let row = parse(line).unwrap();
        assert_eq!(row.inode, 77);
        assert_eq!([row.local, row.remote].map(|address| address.to_string()), ["127.0.0.1:41908", "127.0.0.1:8080"]);
        for (from, to) in
            [("1F90", "1F9"), ("1F90", "1F9g"), ("0100007F:A", "+100007F:A"), (" 77 1", ""), ("7F:", "7F")]
        {
            assert_eq!(parse(&line.replace(from, to)), None, "{to}");
        }
    }
}
