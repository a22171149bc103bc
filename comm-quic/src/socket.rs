//! The UDP socket of a rank.

use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use comm_core::addresses::PortRange;
use comm_core::{Error, Result};
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use socket2::{Domain, Protocol, Socket, Type};

use crate::options::LARGEST_MTU;

/// Bytes asked of the kernel for each direction. It grants less where `net.core.rmem_max` and `wmem_max` say so.
const BUFFER: usize = 16 << 20;

/// A bound socket, and the buffers that the kernel granted.
pub(crate) struct BoundSocket {
    pub(crate) socket: UdpSocket,
    pub(crate) address: SocketAddr,
    /// Bytes, by the kernel's own accounting (Linux counts twice the payload, for its overhead).
    pub(crate) receive_buffer: usize,
    pub(crate) send_buffer: usize,
}

impl BoundSocket {
    /// Binds a free port of `address`, whose port is 0, or one of `ports`.
    pub(crate) fn bind(address: SocketAddr, ports: Option<PortRange>) -> Result<Self> {
        let open = |address: SocketAddr| -> io::Result<BoundSocket> {
            let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
            socket.set_recv_buffer_size(BUFFER)?;
            socket.set_send_buffer_size(BUFFER)?;
            socket.bind(&address.into())?;
            let receive_buffer = socket.recv_buffer_size()?;
            let send_buffer = socket.send_buffer_size()?;
            let socket = UdpSocket::from(socket);
            let address = socket.local_addr()?;
            Ok(BoundSocket { socket, address, receive_buffer, send_buffer })
        };
        PortRange::bind(ports, address, open)
            .map_err(|error| Error::io(format!("binding a UDP socket for QUIC on {}", address.ip()), error))
    }
}

/// quinn's own socket with other batches, which counts what it sends.
///
/// In one call go as many datagrams as together fit into the largest UDP payload. More are refused by the kernel with `EMSGSIZE`,
/// which quinn takes for an MTU probe that was too large and drops silently. For what is received the same bound holds, because
/// the kernel merges no more than that either; quinn would set aside 128 MiB.
#[derive(Debug)]
pub(crate) struct CountingSocket {
    inner: Arc<dyn AsyncUdpSocket>,
    send_segments: usize,
    sends: AtomicU64,
}

/// Buffers, of 64 KiB, that one call receives into: 512 KiB, which fits into the second cache of most cores. quinn has 32.
const RECEIVE_BATCH: usize = 8;

impl CountingSocket {
    /// Wraps `inner` for datagrams of up to `mtu` bytes.
    pub(crate) fn new(inner: Arc<dyn AsyncUdpSocket>, mtu: u16) -> Self {
        let send_segments = usize::from(LARGEST_MTU / mtu.max(1)).max(1);
        CountingSocket { inner, send_segments, sends: AtomicU64::new(0) }
    }

    /// Datagrams that the kernel may hand over merged into one (GRO); 1 where it merges none.
    pub(crate) fn receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    /// Calls that have sent something.
    pub(crate) fn sends(&self) -> u64 {
        self.sends.load(Ordering::Relaxed)
    }
}

impl AsyncUdpSocket for CountingSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Arc::clone(&self.inner).create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit) -> io::Result<()> {
        self.inner.try_send(transmit)?;
        self.sends.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn poll_recv(
        &self,
        cx: &mut Context,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let batch = bufs.len().min(meta.len()).min(RECEIVE_BATCH);
        match (bufs.get_mut(..batch), meta.get_mut(..batch)) {
            (Some(bufs), Some(meta)) => self.inner.poll_recv(cx, bufs, meta),
            _ => self.inner.poll_recv(cx, bufs, meta),
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments().min(self.send_segments)
    }

    fn max_receive_segments(&self) -> usize {
        // The endpoint accepts datagrams of every size, so space for one is space for all that the kernel merges into one.
        1
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}
