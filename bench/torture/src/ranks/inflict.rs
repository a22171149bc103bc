//! Faults that a rank plays on itself.

use std::io;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use super::protocol::{BlockSockets, Event};
use super::sys::Socket;

/// The connections of the control plane, by both their ends.
#[derive(Clone, Debug, Default)]
pub(crate) struct ControlConnections {
    connections: Vec<(SocketAddr, SocketAddr)>,
}

impl ControlConnections {
    /// Those that there are now.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub(crate) fn now() -> io::Result<Self> {
        let sockets = Socket::all()?;
        Ok(ControlConnections {
            connections: sockets.iter().filter_map(|socket| Some((socket.local, socket.peer?))).collect(),
        })
    }

    fn has(&self, socket: &Socket) -> bool {
        socket.peer.is_some_and(|peer| self.connections.contains(&(socket.local, peer)))
    }
}

/// The sockets of this process, by this process's end.
///
/// # Errors
/// `/proc` cannot be read.
pub(crate) fn sockets(control: &ControlConnections) -> io::Result<Event> {
    let (udp, tcp): (Vec<Socket>, Vec<Socket>) = Socket::all()?.into_iter().partition(Socket::is_udp);
    let of = |is_control: bool| tcp.iter().filter(|s| control.has(s) == is_control).map(|s| s.local).collect();
    Ok(Event::Sockets { control: of(true), data: of(false), udp: udp.iter().map(|s| s.local.port()).collect() })
}

/// Lets nothing reach the sockets that are meant.
///
/// # Errors
/// The kernel's.
pub(crate) fn block_sockets(whom: &BlockSockets, control: &ControlConnections) -> io::Result<()> {
    for socket in Socket::all()? {
        let is_control = control.has(&socket);
        let is_meant = if is_control { whom.control } else { whom.data };
        if is_meant || socket.peer.is_some_and(|peer| whom.peers.contains(&peer)) {
            socket.block()?;
        } else if socket.is_udp() && !whom.ports.is_empty() {
            socket.block_from(&whom.ports)?;
        }
    }
    Ok(())
}

/// Resets the data sockets, or ends them in the sending direction.
///
/// # Errors
/// The kernel's, and that there is no such socket.
pub(crate) fn break_data(control: &ControlConnections, resets: bool) -> io::Result<()> {
    let mut found = 0;
    for socket in Socket::all()? {
        if control.has(&socket) {
            continue;
        }
        found += 1;
        if resets { socket.reset()? } else { socket.shut_down()? }
    }
    if found == 0 { Err(io::Error::other("this rank has no data sockets")) } else { Ok(()) }
}

/// Computes on four threads a core.
pub(crate) fn compute(time: Duration) {
    let threads = 4 * thread::available_parallelism().map_or(1, usize::from);
    let end = Instant::now() + time;
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut value = 1u64;
                while Instant::now() < end {
                    for _ in 0..10_000 {
                        value = std::hint::black_box(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
                    }
                }
            });
        }
    });
}
