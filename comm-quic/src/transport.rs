//! The transport itself.

use std::cell::Cell;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Waker, Poll};
use std::time::Duration;

use comm_core::driver::{Driver, within};
use comm_core::lanes::{Lanes, check_messages};
use comm_core::spinner::Spinner;
use comm_core::{Deadline, Error, HEADER_LEN, Incoming, Outgoing, Result, Transport, Waiting};
use quinn::{Connection, ConnectionError, Endpoint, ReadError, StoppedError};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::config::{DatagramSizes, receive_window};
use crate::congestion::Congestion;
use crate::exchange::{Direction, Transfer, complete, poll_all};
use crate::message::{Channel, Context, DONE, DROPPED, Receiving, Sending, Step, is_done};
use crate::monitor::QuicMonitor;
use crate::options::QuicOptions;
use crate::path::PeerPath;
use crate::protection::Protection;
use crate::socket::CountingSocket;

/// A QUIC connection to every other rank.
///
/// The thread inside an exchange drives the socket, the connections and their timers itself; one thread more, named
/// `comm-quic-RANK`, does while no exchange runs, whatever the number of peers. Calls block: a thread that polls the tasks of a tokio runtime is
/// refused ([`Transport::may_block`]), one of its `spawn_blocking` is not.
pub struct QuicTransport {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) lanes: Lanes<QuicLane>,
    /// By rank, `None` for this one.
    pub(crate) connections: Arc<[Option<Connection>]>,
    pub(crate) endpoint: Endpoint,
    pub(crate) socket: Arc<CountingSocket>,
    pub(crate) address: SocketAddr,
    pub(crate) aborted: watch::Sender<Option<Error>>,
    pub(crate) settings: Settings,
    /// Last, so that what belongs to it is dropped before.
    pub(crate) driver: Driver,
}

/// What [`Transport::facts`] reports.
pub(crate) struct Settings {
    pub(crate) options: QuicOptions,
    pub(crate) protection: Protection,
    pub(crate) congestion: Congestion,
    pub(crate) sizes: DatagramSizes,
    pub(crate) segments: usize,
    pub(crate) send_window: u64,
    pub(crate) receive_buffer: usize,
    pub(crate) send_buffer: usize,
}

pub(crate) struct QuicLane {
    /// The name of an exchange on it, for errors.
    pub(crate) operation: String,
    /// By rank, `None` for this one.
    pub(crate) channels: Vec<Option<Channel>>,
    /// What it has learnt about its waits.
    pub(crate) spinner: Spinner,
}

impl QuicTransport {
    /// The UDP address of this rank.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// State and counters of the connection to every peer, in rank order.
    pub fn paths(&self) -> Vec<PeerPath> {
        self.monitor().paths()
    }

    /// Reads the same statistics after this transport has been moved elsewhere.
    pub fn monitor(&self) -> QuicMonitor {
        let most = match self.settings.congestion {
            Congestion::FixedWindow(_) => self.settings.send_window,
            _ => u64::MAX,
        };
        QuicMonitor { connections: Arc::downgrade(&self.connections), congestion: self.settings.congestion, most }
    }

    /// Fails once the transport was aborted.
    fn check(&self) -> Result<()> {
        self.aborted.borrow().clone().map_or(Ok(()), Err)
    }

    /// Looks at some work with `poll` until it is done; false at the deadline. Returns when the up to `unsent` bytes that it has
    /// left to quinn are sent, as far as the windows allow; `leaves_work` says that they may not.
    fn drive(
        &self,
        spinner: &mut Spinner,
        deadline: Deadline,
        unsent: &Cell<u64>,
        leaves_work: bool,
        poll: impl FnMut(&mut Waker<'_>) -> Result<Step>,
    ) -> Result<bool> {
        let work = async {
            let is_done = complete(spinner, deadline, self.aborted.subscribe(), poll).await?;
            // quinn's tasks run while this one gives way, and send a burst each time. They are through when nothing leaves any
            // more, unless it is another lane's.
            let burst = BURST * u64::from(self.settings.sizes.initial);
            for _ in 0..unsent.get().min(self.settings.send_window).div_ceil(burst) {
                let sends = self.socket.sends();
                tokio::task::yield_now().await;
                if sends == self.socket.sends() {
                    break;
                }
            }
            Ok(is_done)
        };
        if leaves_work {
            let outcome = self.driver.run(&mut Spinner::new(Waiting::Park), deadline, true, work)?;
            Ok(outcome.unwrap_or(false))
        } else {
            self.driver.block_on(work)
        }
    }

    /// Closes each lane.
    fn close_lanes(&self, lanes: &mut [&mut QuicLane], deadline: Deadline) -> Result<()> {
        let operation = "closing the QUIC transport";
        let mut closes = Vec::new();
        for lane in lanes {
            for (peer, channel) in lane.channels.iter_mut().enumerate() {
                let Some(Channel { send, receive, .. }) = channel else { continue };
                let context = Context { peer, operation };
                // An error says that it was finished before.
                let _ = send.finish();
                let stopped = send.stopped();
                closes.push(LaneClose::new(peer, async move { acknowledged(stopped.await, context) }));
                closes.push(LaneClose::new(peer, async move {
                    // Unexpected data is dropped.
                    while receive.read_chunk(usize::MAX, true).await.map(|chunk| chunk.is_some()).or_else(|error| {
                        match &error {
                            ReadError::ConnectionLost(lost) if is_done(lost) => Ok(false),
                            _ => Err(context.read_error(&error)),
                        }
                    })? {}
                    Ok(())
                }));
            }
        }
        let mut spinner = Spinner::new(Waiting::Park);
        if self.drive(&mut spinner, deadline, &Cell::new(0), false, |cx| poll_closes(&mut closes, cx))? {
            return Ok(());
        }
        let silent = closes.iter().filter(|close| !close.is_done).map(|close| close.peer);
        Err(Error::timeout(self.rank, operation, deadline, silent))
    }
}

impl Transport for QuicTransport {
    fn name(&self) -> &str {
        self.settings.protection.transport_name()
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn lanes(&self) -> usize {
        self.lanes.count()
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        self.may_block()?;
        self.check()?;
        check_messages(self.rank, self.world_size, outgoing, incoming)?;
        self.lanes.run(lane, |lane| self.exchange_on(lane, outgoing, incoming, deadline))
    }

    fn may_block(&self) -> Result<()> {
        comm_core::driver::may_block()
    }

    fn abort(&self, error: &Error) {
        self.aborted.send_if_modified(|aborted| {
            let first = aborted.is_none();
            if first {
                *aborted = Some(error.clone());
            }
            first
        });
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        self.may_block()?;
        let close_handshake = |lanes: &mut [&mut QuicLane]| {
            self.close_lanes(lanes, deadline)?;
            self.endpoint.close(DONE, b"done");
            // Until then a peer that missed the last packets is told again. Nothing depends on it but the peer's speed.
            let close_deadline = deadline.at_most(CLOSE_TIMEOUT);
            self.driver.block_on(async {
                let _ = within(close_deadline, self.endpoint.wait_idle()).await;
                Ok(())
            })
        };
        self.lanes.close(self.rank, deadline, || self.check(), close_handshake)
    }

    fn facts(&self) -> Vec<(String, String)> {
        let Settings { options, protection, congestion, sizes, segments, send_window, receive_buffer, send_buffer } =
            &self.settings;
        let mut facts = vec![
            ("quic.congestion".to_string(), congestion.to_string()),
            ("quic.congestion_asked".to_string(), options.congestion.to_string()),
            ("quic.mtu_asked".to_string(), options.mtu.map_or("largest".to_string(), |mtu| mtu.to_string())),
            ("quic.mtu_initial".to_string(), sizes.initial.to_string()),
            ("quic.mtu_largest".to_string(), sizes.largest.to_string()),
            ("quic.datagrams_per_call".to_string(), segments.to_string()),
            ("quic.datagrams_per_receive".to_string(), self.socket.receive_segments().to_string()),
            ("quic.cipher_suite".to_string(), protection.cipher_suite().to_string()),
            ("quic.stream_window".to_string(), options.stream_window.to_string()),
            ("quic.receive_window".to_string(), receive_window(options).to_string()),
            ("quic.send_window".to_string(), send_window.to_string()),
            ("quic.udp_receive_buffer".to_string(), receive_buffer.to_string()),
            ("quic.udp_send_buffer".to_string(), send_buffer.to_string()),
            ("quic.idle_timeout_ms".to_string(), options.idle_timeout.as_millis().to_string()),
            ("quic.keep_alive_ms".to_string(), options.keep_alive.as_millis().to_string()),
            ("quic.waiting".to_string(), options.waiting.to_string()),
        ];
        facts.extend(self.paths().iter().map(|path| (format!("quic.mtu_to_rank_{}", path.peer), path.mtu.to_string())));
        facts
    }
}

impl Drop for QuicTransport {
    fn drop(&mut self) {
        let mut reset = vec![0; self.world_size];
        for lane in self.lanes.contents_mut() {
            for (channel, reset) in lane.channels.iter_mut().zip(&mut reset) {
                if let Some(channel) = channel
                    && channel.send.reset(DROPPED).is_ok()
                {
                    *reset += 1;
                }
            }
        }
        // A peer that is not told would learn of it at the idle timeout. Where tasks are polled nothing may block.
        if self.may_block().is_err() {
            self.endpoint.close(DROPPED, b"dropped");
            return;
        }
        // quinn-proto 0.11.19 puts off the last packet of a connection while stream data waits for the congestion window, and
        // then, as a closed connection takes no acknowledgements, never sends it. So streams are reset first.
        let peers = || self.connections.iter().zip(&reset).filter_map(|(peer, reset)| Some((peer.as_ref()?, *reset)));
        let streams_are_reset = || {
            peers().all(|(peer, reset)| peer.close_reason().is_some() || peer.stats().frame_tx.reset_stream >= reset)
        };
        let peers_are_told = || {
            peers().all(|(peer, _)| match peer.close_reason() {
                None => false,
                Some(ConnectionError::LocallyClosed) => peer.stats().frame_tx.connection_close > 0,
                Some(_) => true,
            })
        };
        let _ = self.driver.block_on(async {
            let _ = within(Deadline::after(LAST_PACKETS_TIMEOUT), until(streams_are_reset)).await;
            self.endpoint.close(DROPPED, b"dropped");
            let _ = within(Deadline::after(LAST_PACKETS_TIMEOUT), until(peers_are_told)).await;
            Ok(())
        });
    }
}

impl QuicTransport {
    fn exchange_on(
        &self,
        lane: &mut QuicLane,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let QuicLane { operation, channels, spinner } = lane;
        // A fixed window is all that quinn takes over, and may leave at once.
        let leaves_work = !outgoing.is_empty() && !matches!(self.settings.congestion, Congestion::FixedWindow(_));
        let written: u64 = outgoing.iter().map(|message| HEADER_LEN as u64 + message.header.payload_len).sum();
        let unsent = Cell::new(written);
        let mut transfers: Vec<Transfer<'_>> = Vec::with_capacity(outgoing.len() + incoming.len());
        transfers
            .extend(outgoing.iter().map(|message| Transfer::new(message.peer, Direction::Send(Sending::new(message)))));
        transfers.extend(
            incoming
                .iter_mut()
                .map(|Incoming { peer, sink }| Transfer::new(*peer, Direction::Receive(Receiving::new(&mut **sink)))),
        );
        // Long before the window is used up quinn grants more, which should not wait for the next exchange.
        let credit = u64::from(self.settings.options.stream_window) / 16;
        let is_done = self.drive(spinner, deadline, &unsent, leaves_work, |cx| {
            let step = poll_all(&mut transfers, cx, channels, operation)?;
            if step == Step::Done && transfers.iter().any(|transfer| transfer.received() >= credit) {
                unsent.set(written + 1);
            }
            Ok(step)
        })?;
        if is_done {
            return Ok(());
        }
        let waiting_for = transfers.iter().filter(|transfer| !transfer.is_done).map(|transfer| transfer.peer);
        Err(Error::timeout(self.rank, operation.as_str(), deadline, waiting_for))
    }
}

/// Datagrams that quinn 0.11 sends before other tasks get their turn.
const BURST: u64 = 20;

/// Most time that closing spends on repeating its last packet.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Most time that dropping spends on each of its two last packets.
const LAST_PACKETS_TIMEOUT: Duration = Duration::from_millis(100);

/// Polls: quinn does not announce what it has sent.
async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        sleep(Duration::from_millis(1)).await;
    }
}

/// One direction of closing a lane with one peer.
struct LaneClose<'a> {
    peer: usize,
    future: Pin<Box<dyn Future<Output = Result<()>> + 'a>>,
    is_done: bool,
}

impl<'a> LaneClose<'a> {
    fn new(peer: usize, future: impl Future<Output = Result<()>> + 'a) -> Self {
        LaneClose { peer, future: Box::pin(future), is_done: false }
    }
}

fn poll_closes(closes: &mut [LaneClose<'_>], cx: &mut Waker<'_>) -> Result<Step> {
    let mut step = Step::Done;
    for close in closes.iter_mut().filter(|close| !close.is_done) {
        match close.future.as_mut().poll(cx) {
            Poll::Ready(outcome) => outcome.map(|()| close.is_done = true)?,
            Poll::Pending => step = Step::Blocked,
        }
    }
    Ok(step)
}

/// Whether the peer has all that was sent to it on a stream.
fn acknowledged(stopped: Result<Option<quinn::VarInt>, StoppedError>, context: Context<'_>) -> Result<()> {
    match stopped {
        Ok(None) => Ok(()),
        Ok(Some(code)) => Err(context.lost(format!("it stopped reading (code {code})"))),
        Err(StoppedError::ConnectionLost(error)) if is_done(&error) => Ok(()),
        Err(StoppedError::ConnectionLost(error)) => Err(context.lost(crate::message::describe(&error))),
        Err(error) => Err(context.lost(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use comm_core::{Header, Sink};

    use super::*;
    use crate::unauthenticated_tests::two_ranks;

    struct Nothing;

    impl Sink for Nothing {
        fn begin(&mut self, header: &Header) -> Result<()> {
            panic!("nothing was announced, but {header} came")
        }

        fn piece(&mut self, _bytes: &[u8]) -> Result<()> {
            panic!("nothing was announced, but bytes came")
        }
    }

    #[test]
    fn bytes_that_are_no_message_are_named_as_such() {
        let outcome = two_ranks(
            |ranks| ranks,
            |transport| {
                let deadline = Deadline::after(Duration::from_secs(10));
                if transport.rank() == 0 {
                    let write = |lane: &mut QuicLane| {
                        let channel = lane.channels[1].as_mut().unwrap();
                        transport.driver.block_on(async {
                            channel.send.write_all(&[0xab; 200]).await.unwrap();
                            Ok(())
                        })
                    };
                    transport.lanes.run(1, write).unwrap();
                    // Leaving would lose them.
                    let _ = transport.exchange(0, &[], &mut [Incoming { peer: 1, sink: &mut Nothing }], deadline);
                    return;
                }
                let error =
                    transport.exchange(1, &[], &mut [Incoming { peer: 0, sink: &mut Nothing }], deadline).unwrap_err();
                assert!(matches!(&error, Error::Protocol { who, .. } if who == "rank 0"), "{error}");
            },
        );
        for outcome in outcome {
            outcome.unwrap();
        }
    }
}
