//! Moving bytes between ranks.

use std::sync::Arc;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::header::Header;

/// Moves messages between the ranks of a job: reliable, and in order for each (peer, lane).
///
/// A *lane* is an independent ordered channel between every pair of ranks. A message is a [`Header`] and the payload whose
/// length the header states. There is no addressing beyond (peer, lane): the n-th message that a rank sends to a peer on a
/// lane is the n-th that this peer receives from it on that lane.
///
/// Implementations are tested by [`conformance`](crate::conformance).
pub trait Transport: Send + Sync + 'static {
    /// The transport's name as users write it: `tcp`, `quic`, ….
    fn name(&self) -> &str;

    /// This rank, below [`world_size`](Transport::world_size).
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Number of lanes, at least one.
    fn lanes(&self) -> usize;

    /// Sends and receives at the same time, and returns when every outgoing message has been taken over by the transport (its
    /// bytes may be reused; it will arrive unless the connection or a process fails) and every incoming one has been received
    /// completely and handed to its sink.
    ///
    /// Sends and receives must progress independently of each other and of their order in the slices: the peer of a send may
    /// be waiting for a receive further down. At most one outgoing and one incoming message per peer. Neither names this rank.
    /// The caller runs at most one exchange at a time on each lane; exchanges on different lanes run at the same time from
    /// different threads and must not wait for each other.
    ///
    /// Received pieces are handed on as they arrive, so that they can be reduced while in cache; a piece may end anywhere, in
    /// the middle of an element too, and may have any alignment. The sinks run in the thread of the caller.
    ///
    /// # Errors
    /// [`Error::Timeout`] at the deadline, [`Error::PeerLost`] when a peer's connection ended, [`Error::Protocol`] when its
    /// bytes make no sense, the error passed to [`abort`](Transport::abort) after it was called, and whatever a sink returns.
    /// After an error, or a sink's panic, messages may have been cut anywhere. So the lane is of no use any more: every later exchange on it
    /// fails, rather than take the rest of one message for the next. The caller aborts the transport.
    ///
    /// [`Error::InvalidArgument`] says what was refused before anything moved, and changes nothing: messages that make no sense ([`check_messages`](crate::lanes::check_messages)),
    /// a lane that does not exist, one on which another exchange runs, any lane after [`close`](Transport::close).
    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()>;

    /// Whether the calling thread may wait in [`exchange`](Transport::exchange) and [`close`](Transport::close), which is asked before an
    /// operation begins. Always, unless the transport says otherwise.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], with what to do instead: the thread polls tasks of an asynchronous runtime, say.
    fn may_block(&self) -> Result<()> {
        Ok(())
    }

    /// Makes every running and every later exchange fail promptly with `error`. Never blocks; the first call wins.
    fn abort(&self, error: &Error);

    /// Ends the connections in an orderly way: every message that an exchange took over reaches the peers, who may still be
    /// receiving. All ranks call it; it returns when nothing more is to come either way, or at the deadline. It waits for exchanges that
    /// run; later ones are refused.
    ///
    /// # Errors
    /// As [`exchange`](Transport::exchange). Closing twice is not an error.
    fn close(&self, deadline: Deadline) -> Result<()>;

    /// What a reader of a measurement wants to know of this transport's settings: congestion control, datagram size,
    /// encryption, …, as (name, value).
    fn facts(&self) -> Vec<(String, String)> {
        Vec::new()
    }
}

/// A message to send.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The receiving rank.
    pub peer: usize,
    /// Its header; `payload_len` equals the length of `payload`.
    pub header: Header,
    /// Its payload, maybe empty.
    pub payload: &'a [u8],
}

/// A message to receive.
pub struct Incoming<'a> {
    /// The sending rank.
    pub peer: usize,
    /// Where it goes.
    pub sink: &'a mut dyn Sink,
}

/// Takes one message as it arrives.
pub trait Sink: Send {
    /// The header came. The payload of `header.payload_len` bytes follows only if this returns `Ok`: the sink checks the length
    /// here, before the transport reads any of it.
    ///
    /// # Errors
    /// Whatever the exchange shall fail with.
    fn begin(&mut self, header: &Header) -> Result<()>;

    /// The next bytes of the payload, in order, never empty; together exactly `payload_len` bytes.
    ///
    /// # Errors
    /// Whatever the exchange shall fail with.
    fn piece(&mut self, bytes: &[u8]) -> Result<()>;

    /// Memory for the next bytes of the payload, where a transport may write them itself instead of calling
    /// [`piece`](Sink::piece), which spares a copy. Asked for after [`begin`](Sink::begin); never longer than what is missing
    /// of the payload. `None` where the bytes have to be looked at, which is the default.
    fn space(&mut self) -> Option<&mut [u8]> {
        None
    }

    /// The next `count` bytes of the payload, at least one, are now at the start of what [`space`](Sink::space) gave last.
    ///
    /// # Errors
    /// Whatever the exchange shall fail with.
    fn filled(&mut self, count: usize) -> Result<()> {
        Err(Error::Internal(format!("{count} B were written to a sink that gave no space")))
    }
}

/// A shared transport is a transport.
#[deny(clippy::missing_trait_methods)]
impl<T: Transport + ?Sized> Transport for Arc<T> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }

    fn lanes(&self) -> usize {
        (**self).lanes()
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        (**self).exchange(lane, outgoing, incoming, deadline)
    }

    fn may_block(&self) -> Result<()> {
        (**self).may_block()
    }

    fn abort(&self, error: &Error) {
        (**self).abort(error);
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        (**self).close(deadline)
    }

    fn facts(&self) -> Vec<(String, String)> {
        (**self).facts()
    }
}
