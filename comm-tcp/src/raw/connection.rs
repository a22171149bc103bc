//! One raw TCP connection: headers and payloads back to back.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};

use comm_core::{Error, HEADER_LEN, Header, Outgoing, Result, Sink};

use super::engine::PartState;
use crate::fault::Fault;

/// Bytes read at once where a header is due: a small message comes whole, and little of a large one has to be copied.
const INBOX: usize = 16 << 10;

/// Payload that has to be looked at is handed on in pieces of at most this size: large enough to be cheap, small enough to
/// stay in cache.
pub(crate) const SCRATCH: usize = 128 << 10;

/// The close message. It stands where a header would: nothing follows it.
const CLOSE: [u8; HEADER_LEN] = *b"isocomm end: this rank has sent all that it will ever send here.";

/// A connection to one peer on one lane.
pub(crate) struct Connection<S = TcpStream> {
    pub(crate) stream: S,
    /// Bytes of the message being sent that the kernel has.
    sent: usize,
    inbox: Inbox,
    /// Payload bytes of the message being received that are still to come; `None` before its header.
    remaining: Option<u64>,
    /// The peer's close message has come.
    peer_closed: bool,
}

impl Connection {
    /// Sends the close message, and ends this direction.
    pub(crate) fn send_close(&mut self) -> Result<PartState, Fault> {
        let rest = CLOSE.get(self.sent..).unwrap_or_default();
        let Some(wrote) = moved(self.stream.write(rest))? else { return Ok(PartState::Blocked) };
        self.sent += wrote;
        if self.sent < CLOSE.len() {
            return Ok(PartState::Ready);
        }
        self.stream.shutdown(Shutdown::Write).map_err(|error| Fault::Lost(error.to_string()))?;
        Ok(PartState::Done)
    }
}

impl<S: Read + Write> Connection<S> {
    /// Takes a non-blocking socket.
    pub(crate) fn new(stream: S) -> Self {
        let inbox = Inbox { buffer: vec![0; INBOX], start: 0, end: 0 };
        Connection { stream, sent: 0, inbox, remaining: None, peer_closed: false }
    }

    /// Hands more of a message to the kernel, without a copy of its own.
    pub(crate) fn send(&mut self, message: &Outgoing<'_>) -> Result<PartState, Fault> {
        let total = HEADER_LEN + message.payload.len();
        let wrote = match message.payload.get(self.sent.wrapping_sub(HEADER_LEN)..) {
            Some(rest) if self.sent >= HEADER_LEN => self.stream.write(rest),
            _ => {
                let header = message.header.encode();
                let rest = header.get(self.sent..).unwrap_or_default();
                self.stream.write_vectored(&[IoSlice::new(rest), IoSlice::new(message.payload)])
            }
        };
        self.sent += match moved(wrote)? {
            Some(0) => return Err(Fault::Lost("the connection takes no more bytes".into())),
            Some(wrote) => wrote,
            None => return Ok(PartState::Blocked),
        };
        if self.sent < total {
            return Ok(PartState::Ready);
        }
        self.sent = 0;
        Ok(PartState::Done)
    }

    /// Receives more of the next message into `sink`; what is read beyond it waits in the inbox. `scratch` is memory for
    /// payload that the sink wants to look at.
    pub(crate) fn receive(&mut self, peer: usize, sink: &mut dyn Sink, scratch: &mut [u8]) -> Result<PartState, Fault> {
        let mut remaining = match self.remaining {
            Some(remaining) => remaining,
            None => {
                let header = match self.header(peer)? {
                    Some(header) => header,
                    None => return Ok(PartState::Blocked),
                };
                sink.begin(&header)?;
                header.payload_len
            }
        };
        let early = self.inbox.take(remaining);
        if !early.is_empty() {
            sink.piece(early)?;
            remaining -= early.len() as u64;
        }
        let mut blocked = false;
        if remaining > 0 {
            match read_payload(&mut self.stream, remaining, sink, scratch)? {
                Some(read) => remaining = remaining.saturating_sub(read as u64),
                None => blocked = true,
            }
        }
        self.remaining = (remaining > 0).then_some(remaining);
        Ok(match remaining {
            0 => PartState::Done,
            _ if blocked => PartState::Blocked,
            _ => PartState::Ready,
        })
    }

    /// Reads on to the peer's end, dropping messages that nobody asked for.
    pub(crate) fn drain(&mut self, peer: usize, scratch: &mut [u8]) -> Result<PartState, Fault> {
        if !self.peer_closed {
            return match self.receive(peer, &mut DiscardSink, scratch) {
                Ok(PartState::Done) => Ok(PartState::Ready),
                Err(Fault::Lost(_)) if self.peer_closed => Ok(PartState::Ready),
                outcome => outcome,
            };
        }
        match moved(self.stream.read(&mut [0; 1]))? {
            Some(0) if self.inbox.bytes().is_empty() => Ok(PartState::Done),
            Some(_) => Err(protocol(peer, "bytes after its last message".into()).into()),
            None => Ok(PartState::Blocked),
        }
    }

    /// The next header, `None` as long as it is not there.
    fn header(&mut self, peer: usize) -> Result<Option<Header>, Fault> {
        while self.inbox.bytes().len() < HEADER_LEN {
            if self.inbox.fill(&mut self.stream)?.is_none() {
                return Ok(None);
            }
        }
        let Some(bytes) = self.inbox.take(HEADER_LEN as u64).first_chunk::<HEADER_LEN>() else { return Ok(None) };
        if *bytes == CLOSE {
            self.peer_closed = true;
            return Err(Fault::Lost("it closed its transport".into()));
        }
        Ok(Some(Header::decode(bytes, &format!("rank {peer}"))?))
    }
}

/// Reads at most `remaining` bytes of payload into the sink's own memory, or shows them to it. `None` when there are none yet.
fn read_payload(
    stream: &mut impl Read,
    remaining: u64,
    sink: &mut dyn Sink,
    scratch: &mut [u8],
) -> Result<Option<usize>, Fault> {
    let limit = |length: usize| usize::try_from(remaining).map_or(length, |remaining| remaining.min(length));
    match sink.space() {
        Some(space) if !space.is_empty() => {
            let length = limit(space.len());
            let read = some(moved(stream.read(&mut space[..length]))?)?;
            if let Some(count) = read {
                sink.filled(count)?;
            }
            Ok(read)
        }
        _ => {
            let length = limit(scratch.len());
            let read = some(moved(stream.read(&mut scratch[..length]))?)?;
            if let Some(count) = read {
                sink.piece(&scratch[..count])?;
            }
            Ok(read)
        }
    }
}

/// How much a call of the kernel moved; `None` if the socket has to become ready first.
fn moved(outcome: std::io::Result<usize>) -> Result<Option<usize>, Fault> {
    match outcome {
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(Fault::Lost(error.to_string())),
    }
}

/// Nothing read is the end of the connection.
fn some(read: Option<usize>) -> Result<Option<usize>, Fault> {
    match read {
        Some(0) => Err(Fault::Lost("it closed the connection without a close message".into())),
        read => Ok(read),
    }
}

fn protocol(peer: usize, what: String) -> Error {
    Error::Protocol { who: format!("rank {peer}"), what }
}

/// Received bytes that have not been handed on: `buffer[start..end]`.
struct Inbox {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// The first bytes, at most `limit`, which are gone from the inbox then.
    fn take(&mut self, limit: u64) -> &[u8] {
        let start = self.start;
        let length = self.bytes().len().min(usize::try_from(limit).unwrap_or(usize::MAX));
        self.start += length;
        &self.buffer[start..start + length]
    }

    /// Reads once. What is there is less than a header, so the buffer has space.
    fn fill(&mut self, stream: &mut impl Read) -> Result<Option<usize>, Fault> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        let read = some(moved(stream.read(&mut self.buffer[self.end..]))?)?;
        self.end += read.unwrap_or(0);
        Ok(read)
    }
}

/// Drops what it gets.
struct DiscardSink;

impl Sink for DiscardSink {
    fn begin(&mut self, _: &Header) -> Result<()> {
        Ok(())
    }

    fn piece(&mut self, _: &[u8]) -> Result<()> {
        Ok(())
    }
}
