//! Socket settings, the same for both transports.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use comm_core::addresses::PortRange;
use comm_core::{Error, Result};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

/// What `zeromq` asks for on its TCP sockets, in both directions; raw TCP asks for the same.
const SOCKET_BUFFER: usize = 4 << 20;

/// Connections that may wait to be accepted; the kernel grants less where `net.core.somaxconn` says so. When it is full, a
/// dialler tries again after a second, so connections from outside the job must not fill it while handshakes are served.
const BACKLOG: i32 = 4096;

/// A listener on a free port of `address`, whose port is 0, or on one of `ports`, non-blocking; accepted sockets inherit the congestion
/// control.
pub(crate) fn listen(
    address: SocketAddr,
    ports: Option<PortRange>,
    congestion: Option<&str>,
) -> Result<std::net::TcpListener> {
    listen_prepared(address, ports, congestion, |_| ())
}

/// As [`listen`], with a socket on which `prepare` may set more before it listens.
pub(crate) fn listen_prepared(
    address: SocketAddr,
    ports: Option<PortRange>,
    congestion: Option<&str>,
    mut prepare: impl FnMut(&Socket),
) -> Result<std::net::TcpListener> {
    let failed = |error| Error::io(format!("listening on {}", address.ip()), error);
    let open = || Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP));
    if congestion.is_some() {
        // What the kernel does not know is no matter of ports.
        set_congestion(&open().map_err(failed)?, congestion)?;
    }
    let socket = PortRange::bind(ports, address, |address| {
        let socket = open()?;
        if let Some(name) = congestion {
            socket.set_tcp_congestion(name.as_bytes())?;
        }
        if ports.is_some() {
            // Connections of an earlier start that linger do not keep a port.
            socket.set_reuse_address(true)?;
        }
        prepare(&socket);
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok(socket)
    });
    let socket = socket.map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    Ok(socket.into())
}

/// Sets the congestion control of a socket of this crate's own, if one is asked for.
pub(crate) fn set_congestion(socket: &impl AsFd, congestion: Option<&str>) -> Result<()> {
    let Some(name) = congestion else { return Ok(()) };
    SockRef::from(socket).set_tcp_congestion(name.as_bytes()).map_err(|error| Error::Unsupported {
        what: format!("TCP congestion control '{name}'"),
        why: format!("{error}; /proc/sys/net/ipv4/tcp_available_congestion_control lists what this kernel has"),
    })
}

/// No delay for small messages, and large buffers; like `zeromq`, a refused buffer size is not an error (the kernel caps it).
pub(crate) fn tune(socket: &impl AsFd) -> std::io::Result<()> {
    let socket = SockRef::from(socket);
    socket.set_tcp_nodelay(true)?;
    enlarge_buffers(&socket);
    Ok(())
}

/// Of sockets that `zeromq` keeps to itself.
pub(crate) fn buffers_asked_for() -> String {
    format!("asked for {SOCKET_BUFFER} each way")
}

/// Asks for the same buffers on a Unix socket.
pub(crate) fn enlarge_buffers(socket: &SockRef<'_>) {
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
}

/// What the kernel says about a connected socket, for a transport's facts.
#[derive(Clone, Debug)]
pub(crate) struct SocketFacts {
    /// Name of the congestion control in use.
    pub(crate) congestion: String,
    /// Send and receive buffers as the kernel counts them (twice what it granted), bytes.
    pub(crate) buffers: String,
}

impl SocketFacts {
    pub(crate) fn read(socket: &impl AsFd) -> Self {
        let socket = SockRef::from(socket);
        let congestion = socket
            .tcp_congestion()
            .map(|name| String::from_utf8_lossy(&name).trim_end_matches('\0').to_string())
            .unwrap_or_else(|error| format!("unknown ({error})"));
        let size = |size: std::io::Result<usize>| size.map_or("unknown".to_string(), |size| size.to_string());
        let buffers = format!("send {}, receive {}", size(socket.send_buffer_size()), size(socket.recv_buffer_size()));
        SocketFacts { congestion, buffers }
    }
}

/// The congestion control of sockets by default, as far as the kernel tells. A route can override it.
pub(crate) fn default_congestion() -> String {
    std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control")
        .map_or_else(|_| "unknown".to_string(), |name| name.trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_congestion_control_is_an_error_that_says_where_to_look() {
        let error = listen("127.0.0.1:0".parse().unwrap(), None, Some("no-such-thing")).unwrap_err();
        assert!(error.to_string().contains("tcp_available_congestion_control"), "{error}");
    }

    #[test]
    fn ports_of_a_range_are_free_again_when_an_earlier_start_has_ended() {
        use std::io::Read;
        let any = listen("127.0.0.1:0".parse().unwrap(), None, None).unwrap().local_addr().unwrap();
        let only: PortRange = any.port().to_string().parse().unwrap();
        let address = "127.0.0.1:0".parse().unwrap();
        let listener = listen(address, Some(only), None).unwrap();
        listener.set_nonblocking(false).unwrap();
        let mut dialler = std::net::TcpStream::connect(any).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        let taken = listen(address, Some(only), None).unwrap_err().to_string();
        assert!(taken.contains("COMM_PORT_RANGE"), "{taken}");
        drop(listener);
        // The side that closes first keeps the connection for a minute.
        drop(accepted);
        assert_eq!(dialler.read(&mut [0]).unwrap(), 0);
        drop(dialler);
        listen(address, Some(only), None).unwrap();
    }

    #[test]
    fn accepted_sockets_inherit_the_congestion_control() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), None, Some("reno")).unwrap();
        listener.set_nonblocking(false).unwrap();
        let _dialler = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        assert_eq!(SocketFacts::read(&accepted).congestion, "reno");
    }
}
