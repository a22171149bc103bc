//! One DEALER used as a pair: segments under a byte window in both directions.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::collections::VecDeque;
use std::task::{Context, Poll};

use bytes::Bytes;
use comm_core::{Error, Header, Outgoing, Result, Sink};
use tokio::sync::mpsc;
use zeromq::{DealerRecvHalf, DealerSendHalf, SocketEvent, SocketRecv, SocketSend, ZmqError, ZmqMessage};
use zeromq::{DealerSocket, Socket};

use super::frame::{self, Frame};
use super::pool::Pool;
use crate::fault::Fault;
use crate::runtime::give_way;

/// Segments sent before others get their turn.
const BURST: usize = 4;

/// A connection to one peer on one lane. It is driven by the exchanges that use it; between them its queues are bounded by
/// the window.
pub(crate) struct Connection {
    peer: usize,
    send: DealerSendHalf,
    recv: DealerRecvHalf,
    /// `zeromq` says only here that a connection has ended; a receive goes on waiting.
    events: mpsc::Receiver<PeerEvent>,
    ended: bool,
    segment: usize,
    window: Window,
    /// Data that came before anybody asked for it.
    early: VecDeque<Frame>,
    peer_closed: bool,
    pool: Pool,
}

/// An event of the monitor of a socket with a single peer.
#[derive(Debug)]
pub(crate) enum PeerEvent {
    /// The peer connected, with this identity.
    Accepted(Vec<u8>),
    /// Its connection ended.
    Disconnected,
}

/// The events of a socket that has at most one peer.
pub(crate) fn watch(socket: &mut DealerSocket) -> mpsc::Receiver<PeerEvent> {
    let mut monitor = socket.monitor();
    let (sender, receiver) = mpsc::channel(8);
    // Ends with the socket.
    tokio::spawn(async move {
        while let Ok(event) = monitor.recv().await {
            let event = match event {
                SocketEvent::Accepted(_, identity) => PeerEvent::Accepted(identity.as_ref().to_vec()),
                SocketEvent::Disconnected(_) => PeerEvent::Disconnected,
                _ => continue,
            };
            if sender.send(event).await.is_err() {
                break;
            }
        }
    });
    receiver
}

impl Connection {
    pub(crate) fn new(
        peer: usize,
        socket: DealerSocket,
        events: mpsc::Receiver<PeerEvent>,
        segment: usize,
        window: usize,
        pool: Pool,
    ) -> Self {
        let (send, recv) = socket.split();
        Connection {
            peer,
            send,
            recv,
            events,
            ended: false,
            segment,
            window: Window::new(window),
            early: VecDeque::new(),
            peer_closed: false,
            pool,
        }
    }

    /// Sends one message and receives one, as far as asked for, both at once.
    pub(crate) async fn exchange(
        &mut self,
        outgoing: Option<&Outgoing<'_>>,
        sink: Option<&mut dyn Sink>,
    ) -> Result<(), Fault> {
        let mut sending = outgoing.map(Sending::new);
        let mut receiving = sink.map(Receiving::new);
        loop {
            let blocked = self.send_burst(&mut sending).await?;
            while let Some(message) = &mut receiving {
                let Some(frame) = self.early.pop_front() else { break };
                if self.take(message, frame).await? {
                    receiving = None;
                }
            }
            if sending.is_none() && receiving.is_none() {
                return Ok(());
            }
            let frame = if blocked || sending.is_none() {
                Some(self.next().await?)
            } else {
                give_way().await;
                self.next_if_ready().await?
            };
            match frame {
                None => {}
                Some(Frame::Credit(_)) => {}
                Some(data @ (Frame::First(..) | Frame::More(_))) => match &mut receiving {
                    Some(message) => {
                        if self.take(message, data).await? {
                            receiving = None;
                        }
                    }
                    None => self.early.push_back(data),
                },
                Some(Frame::Close | Frame::CloseAck) => return Err(Fault::Lost("it closed its transport".into())),
            }
        }
    }

    /// Sends the close message and waits for the peer's, and for the acknowledgement that everything sent before has arrived there.
    ///
    /// The connection may end once the peer's close message is here: the peer closes only after it has ours.
    pub(crate) async fn close(&mut self) -> Result<(), Fault> {
        self.post(frame::close()).await?;
        let mut seen = false;
        loop {
            if self.peer_closed && (seen || self.ended) {
                return Ok(());
            }
            match self.next().await {
                Ok(Frame::Close) => {
                    self.peer_closed = true;
                    // If the peer is gone already, it has seen ours.
                    let _ = self.post(frame::close_ack()).await;
                }
                Ok(Frame::CloseAck) => seen = true,
                // Messages that nobody will ask for.
                Ok(Frame::First(..) | Frame::More(_) | Frame::Credit(_)) => {}
                Err(Fault::Lost(_)) if self.peer_closed => return Ok(()),
                Err(fault) => return Err(fault),
            }
        }
    }

    /// Sends segments while the window has space, at most [`BURST`]. Whether it is the window that stopped it.
    async fn send_burst(&mut self, sending: &mut Option<Sending<'_>>) -> Result<bool, Fault> {
        for _ in 0..BURST {
            let Some(message) = sending else { return Ok(false) };
            let length = message.rest.len().min(self.segment);
            let charge = frame::charge(message.header.is_some(), length);
            if !self.window.has_space(charge) {
                return Ok(true);
            }
            let (part, rest) = message.rest.split_at(length);
            let header = message.header.take();
            let bytes = self.pool.fill(|buffer| frame::encode_part(buffer, header, part));
            message.rest = rest;
            self.window.in_flight += charge;
            if rest.is_empty() {
                *sending = None;
            }
            self.post(bytes).await?;
        }
        Ok(false)
    }

    /// Hands data on and gives the peer credit for it. Whether the message is complete.
    async fn take(&mut self, message: &mut Receiving<'_>, frame: Frame) -> Result<bool, Fault> {
        let charge = frame.charge();
        let complete = message.accept(frame, self.peer)?;
        if let Some(owed) = self.window.use_up(charge) {
            self.post(frame::credit(owed)).await?;
        }
        Ok(complete)
    }

    async fn next(&mut self) -> Result<Frame, Fault> {
        match std::future::poll_fn(|cx| self.poll_message(cx)).await {
            Some(message) => self.admit(message),
            None => Err(ended()),
        }
    }

    async fn next_if_ready(&mut self) -> Result<Option<Frame>, Fault> {
        let ready = std::future::poll_fn(|cx| {
            Poll::Ready(match self.poll_message(cx) {
                Poll::Ready(message) => Some(message),
                Poll::Pending => None,
            })
        });
        match ready.await {
            None => Ok(None),
            Some(Some(message)) => self.admit(message).map(Some),
            Some(None) => Err(ended()),
        }
    }

    /// The next message, or `None` once the connection has ended. Messages come before the end.
    fn poll_message(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<ZmqMessage, ZmqError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        // The receive can be dropped at any time without losing a message: it is one poll of a stream.
        if let Poll::Ready(message) = self.recv.recv().as_mut().poll(cx) {
            return Poll::Ready(Some(message));
        }
        while let Poll::Ready(event) = self.events.poll_recv(cx) {
            if !matches!(event, Some(PeerEvent::Accepted(_))) {
                self.ended = true;
                return Poll::Ready(None);
            }
        }
        Poll::Pending
    }

    /// Checks a message before anything is done with it.
    fn admit(&mut self, message: Result<ZmqMessage, ZmqError>) -> Result<Frame, Fault> {
        let message = message.map_err(|error| match error {
            // A codec's error may carry the socket's: that is no fault of what the peer sent.
            ZmqError::Codec(error) if std::error::Error::source(&error).is_none() => {
                self.protocol(format!("what it sent is not ZMTP: {error}"))
            }
            error => Fault::Lost(error.to_string()),
        })?;
        let frame = Frame::decode(message, self.segment).map_err(|what| self.protocol(what))?;
        self.window.admit(&frame).map_err(|what| self.protocol(what))?;
        Ok(frame)
    }

    /// Queues a message; the queue has space, for the window bounds what is in it.
    async fn post(&mut self, bytes: Bytes) -> Result<(), Fault> {
        let sent = self.send.send(ZmqMessage::from(bytes)).await;
        sent.map_err(|error| Fault::Lost(error.to_string()))
    }

    fn protocol(&self, what: String) -> Fault {
        Error::Protocol { who: format!("rank {}", self.peer), what }.into()
    }
}

fn ended() -> Fault {
    Fault::Lost("its connection ended without a close message".into())
}

/// How much is on its way in each direction, in charged bytes.
struct Window {
    size: usize,
    /// Sent, and not given back by the peer.
    in_flight: usize,
    /// Received and not given back, of which `owed` have been used up.
    held: usize,
    owed: usize,
}

impl Window {
    fn new(size: usize) -> Self {
        Window { size, in_flight: 0, held: 0, owed: 0 }
    }

    fn has_space(&self, charge: usize) -> bool {
        self.in_flight + charge <= self.size
    }

    /// Takes note of a received frame; says what is wrong with one that the peer was not allowed to send.
    fn admit(&mut self, frame: &Frame) -> Result<(), String> {
        if let Frame::Credit(bytes) = frame {
            self.in_flight = usize::try_from(*bytes)
                .ok()
                .and_then(|bytes| self.in_flight.checked_sub(bytes))
                .ok_or_else(|| format!("credit for {bytes} B that were not in flight"))?;
        }
        self.held += frame.charge();
        if self.held > self.size {
            return Err(format!("more than the {} B that its window allows", self.size));
        }
        Ok(())
    }

    /// Received data has been used up; how much is to be given back to the peer now.
    fn use_up(&mut self, charge: usize) -> Option<u64> {
        self.owed += charge;
        // With less than a quarter owed, a sender always has space for a segment once everything was used up.
        if self.owed < self.size / 4 {
            return None;
        }
        let owed = std::mem::take(&mut self.owed);
        self.held = self.held.saturating_sub(owed);
        Some(owed as u64)
    }
}

/// A message on its way out.
struct Sending<'a> {
    /// Until the first part has gone.
    header: Option<&'a Header>,
    rest: &'a [u8],
}

impl<'a> Sending<'a> {
    fn new(message: &'a Outgoing<'a>) -> Self {
        Sending { header: Some(&message.header), rest: message.payload }
    }
}

/// A message on its way in.
struct Receiving<'a> {
    sink: &'a mut dyn Sink,
    /// Bytes still to come; `None` before the header.
    remaining: Option<u64>,
}

impl<'a> Receiving<'a> {
    fn new(sink: &'a mut dyn Sink) -> Self {
        Receiving { sink, remaining: None }
    }

    /// Whether the message is complete with this part.
    fn accept(&mut self, frame: Frame, peer: usize) -> Result<bool> {
        let bad = |what: &str| Error::Protocol { who: format!("rank {peer}"), what: what.to_string() };
        let (payload, remaining) = match (frame, self.remaining) {
            (Frame::First(header, payload), None) => {
                let header = Header::decode(&header, &format!("rank {peer}"))?;
                self.sink.begin(&header)?;
                (payload, header.payload_len)
            }
            (Frame::More(payload), Some(remaining)) => (payload, remaining),
            (Frame::First(..), Some(_)) => return Err(bad("a new message in the middle of another")),
            _ => return Err(bad("a part of a message that was not begun")),
        };
        let remaining =
            remaining.checked_sub(payload.len() as u64).ok_or_else(|| bad("more payload than its header announces"))?;
        if !payload.is_empty() {
            self.sink.piece(&payload)?;
        }
        self.remaining = Some(remaining);
        Ok(remaining == 0)
    }
}
