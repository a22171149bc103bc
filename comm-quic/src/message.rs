//! Messages on a lane's stream: a header of 64 bytes and its payload, one after the other.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context as Waker, Poll};

use bytes::{Buf, Bytes};
use comm_core::{Error, HEADER_LEN, Header, Outgoing, Result, Sink};
use quinn::{Connection, ConnectionError, ReadError, RecvStream, SendStream, VarInt, WriteError};

use crate::allowance::{Allowance, Limited};
use crate::paced::Paced;

/// A side closes its connections with this code when it has received and delivered everything.
pub(crate) const DONE: VarInt = VarInt::from_u32(1);

/// A side closes its connections with this code when the transport is dropped, which loses what is under way.
pub(crate) const DROPPED: VarInt = VarInt::from_u32(2);

/// Most payload bytes copied to quinn at once. quinn gives a piece's memory back when all of it is acknowledged, so pieces are small
/// against the send window; and below the size from which glibc's allocator maps fresh pages for each.
const PIECE: usize = 64 << 10;

/// Bytes moved in a row before quinn's tasks and the other directions of an exchange get their turn: packets leave while the rest
/// of a message is still being copied.
const TURN: usize = 512 << 10;

/// A message with a payload of up to this many bytes is handed over in one piece with its header.
const SMALL: usize = 1024;

/// Both directions of a lane to one peer.
pub(crate) struct Channel {
    connection: Connection,
    pub(crate) send: SendStream,
    pub(crate) receive: RecvStream,
    /// How much of what is sent quinn gets; all, where it has no congestion window.
    allowance: Option<Arc<Allowance>>,
    /// Received, but not asked for yet.
    rest: Bytes,
    /// The peer, as errors name it.
    name: String,
}

impl Channel {
    pub(crate) fn new(peer: usize, connection: &Connection, send: SendStream, receive: RecvStream) -> Self {
        let allowance = Paced::allowance(connection.congestion_state());
        let connection = connection.clone();
        Channel { connection, send, receive, allowance, rest: Bytes::new(), name: format!("rank {peer}") }
    }

    /// Hands over the beginning of `bytes`, which follow the first `before` of a message, and says how many.
    fn poll_write(&mut self, cx: &mut Waker<'_>, bytes: &[u8], before: usize) -> Poll<Result<usize, WriteError>> {
        let Channel { connection, send, allowance, .. } = self;
        match allowance {
            Some(allowance) => allowance.poll_write(cx, &mut Outlet { connection, send }, bytes, before, PIECE),
            None => Pin::new(send).poll_write(cx, bytes.get(..PIECE).unwrap_or(bytes)),
        }
    }
}

/// What [`Allowance`] needs of a stream.
struct Outlet<'a> {
    connection: &'a Connection,
    send: &'a mut SendStream,
}

impl Limited for Outlet<'_> {
    type Error = WriteError;

    fn set_limit(&mut self, bytes: u64) {
        self.connection.set_send_window(bytes);
    }

    fn poll_write(&mut self, cx: &mut Waker<'_>, bytes: &[u8]) -> Poll<Result<usize, WriteError>> {
        Pin::new(&mut *self.send).poll_write(cx, bytes)
    }
}

/// The progress that a poll has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// It is complete.
    Done,
    /// Nothing could be done; it will be woken.
    Blocked,
    /// Some of it was done, and the rest is blocked.
    Moved,
    /// More could be done at once, but it is the turn of others.
    Turn,
}

/// The peer and the operation that an error names.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) peer: usize,
    pub(crate) operation: &'a str,
}

impl Context<'_> {
    pub(crate) fn lost(&self, detail: String) -> Error {
        Error::PeerLost { rank: self.peer, operation: self.operation.to_string(), detail }
    }

    pub(crate) fn read_error(&self, error: &ReadError) -> Error {
        self.lost(match error {
            ReadError::ConnectionLost(error) => describe(error),
            ReadError::Reset(code) if *code == DROPPED => WITHOUT_CLOSING.into(),
            other => format!("reading its stream: {other}"),
        })
    }

    fn write_error(&self, error: &WriteError) -> Error {
        self.lost(match error {
            WriteError::ConnectionLost(error) => describe(error),
            other => format!("writing to its stream: {other}"),
        })
    }
}

/// A message that is being handed over to quinn.
pub(crate) struct Sending<'a> {
    header: [u8; HEADER_LEN],
    payload: &'a [u8],
    /// Bytes that quinn has, of the header and the payload together.
    taken: usize,
}

impl<'a> Sending<'a> {
    pub(crate) fn new(message: &Outgoing<'a>) -> Self {
        Sending { header: message.header.encode(), payload: message.payload, taken: 0 }
    }

    pub(crate) fn poll(&mut self, cx: &mut Waker<'_>, channel: &mut Channel, context: Context<'_>) -> Result<Step> {
        let whole = HEADER_LEN + self.payload.len();
        let began = self.taken;
        while self.taken < whole {
            match self.hand_over(cx, channel) {
                Poll::Ready(Ok(count)) => self.taken += count,
                Poll::Ready(Err(error)) => return Err(context.write_error(&error)),
                Poll::Pending => return Ok(if self.taken > began { Step::Moved } else { Step::Blocked }),
            }
            if self.taken - began >= TURN && self.taken < whole {
                return Ok(Step::Turn);
            }
        }
        Ok(Step::Done)
    }

    /// Hands over what comes next, and says how much.
    fn hand_over(&self, cx: &mut Waker<'_>, channel: &mut Channel) -> Poll<Result<usize, WriteError>> {
        if self.taken == 0 && self.payload.len() <= SMALL {
            let mut together = [0; HEADER_LEN + SMALL];
            let together = together.get_mut(..HEADER_LEN + self.payload.len()).unwrap_or_default();
            let (header, payload) = together.split_at_mut(HEADER_LEN);
            header.copy_from_slice(&self.header);
            payload.copy_from_slice(self.payload);
            return channel.poll_write(cx, together, 0);
        }
        match self.header.get(self.taken..).filter(|header| !header.is_empty()) {
            Some(header) => channel.poll_write(cx, header, 0),
            None => {
                let taken = self.taken - HEADER_LEN;
                let before = if taken == 0 { HEADER_LEN } else { 0 };
                channel.poll_write(cx, self.payload.get(taken..).unwrap_or_default(), before)
            }
        }
    }
}

/// A message that is being received.
pub(crate) struct Receiving<'a> {
    sink: &'a mut dyn Sink,
    header: [u8; HEADER_LEN],
    /// Bytes of the header that came.
    filled: usize,
    /// Bytes of the payload that are missing, once the header is complete.
    left: u64,
    /// Bytes that came in all.
    received: u64,
}

impl<'a> Receiving<'a> {
    pub(crate) fn new(sink: &'a mut dyn Sink) -> Self {
        Receiving { sink, header: [0; HEADER_LEN], filled: 0, left: 0, received: 0 }
    }

    /// Bytes that came so far.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    pub(crate) fn poll(&mut self, cx: &mut Waker<'_>, channel: &mut Channel, context: Context<'_>) -> Result<Step> {
        let mut moved = 0;
        loop {
            if channel.rest.is_empty() {
                // Chunks are as large as the datagrams that brought them. One may hold more than this message.
                match pin!(channel.receive.read_chunk(usize::MAX, true)).poll(cx) {
                    Poll::Ready(Ok(Some(chunk))) => channel.rest = chunk.bytes,
                    Poll::Ready(Ok(None)) => {
                        return Err(context.lost("it closed its side while a message from it was expected".into()));
                    }
                    Poll::Ready(Err(error)) => return Err(context.read_error(&error)),
                    Poll::Pending => return Ok(if moved > 0 { Step::Moved } else { Step::Blocked }),
                }
            }
            let before = channel.rest.len();
            let is_complete = self.take(&mut channel.rest, &channel.name)?;
            moved += before - channel.rest.len();
            self.received += (before - channel.rest.len()) as u64;
            if channel.rest.is_empty() {
                // Not kept until the next read.
                channel.rest = Bytes::new();
            }
            if is_complete {
                return Ok(Step::Done);
            }
            if moved >= TURN {
                return Ok(Step::Turn);
            }
        }
    }

    /// Takes what belongs to this message; whether it is complete.
    fn take(&mut self, bytes: &mut Bytes, name: &str) -> Result<bool> {
        if let Some(space) = self.header.get_mut(self.filled..).filter(|space| !space.is_empty()) {
            let count = space.len().min(bytes.len());
            bytes.copy_to_slice(space.get_mut(..count).unwrap_or_default());
            self.filled += count;
            if self.filled < HEADER_LEN {
                return Ok(false);
            }
            let header = Header::decode(&self.header, name)?;
            self.sink.begin(&header)?;
            self.left = header.payload_len;
        }
        let count = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        if count > 0 {
            self.sink.piece(bytes.get(..count).unwrap_or_default())?;
            bytes.advance(count);
            self.left -= count as u64;
        }
        Ok(self.left == 0)
    }
}

const WITHOUT_CLOSING: &str = "it dropped its transport without closing it";

/// Describes why a connection ended.
pub(crate) fn describe(error: &ConnectionError) -> String {
    match error {
        ConnectionError::ApplicationClosed(close) if close.error_code == DONE => "it has closed its connections".into(),
        ConnectionError::ApplicationClosed(close) if close.error_code == DROPPED => WITHOUT_CLOSING.into(),
        ConnectionError::ApplicationClosed(close) => format!("it ended the connection: {close}"),
        ConnectionError::TimedOut => "nothing arrived from it within the idle timeout".into(),
        ConnectionError::Reset => "it no longer knows the connection".into(),
        ConnectionError::LocallyClosed => "this rank has closed the connection".into(),
        other => format!("the QUIC connection failed: {other}"),
    }
}

/// Whether the peer closed because it had everything and had delivered everything.
pub(crate) fn is_done(error: &ConnectionError) -> bool {
    matches!(error, ConnectionError::ApplicationClosed(close) if close.error_code == DONE)
}
