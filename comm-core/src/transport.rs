//! Moving bytes between ranks.

use std::sync::{Arc, Mutex, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

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
    /// [`Error::InvalidArgument`] says what was refused before anything moved, and changes nothing: messages that make no sense ([`check`]),
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

/// What [`exchange`](Transport::exchange) and [`close`](Transport::close) promise of each lane, for transports that keep something for it, a
/// `C`: one exchange at a time, and none after one that failed or after the end.
///
/// ```
/// use std::time::Duration;
/// use comm_core::{Deadline, Error, transport::Lanes};
///
/// let lanes = Lanes::new([0, 0]);
/// lanes.run(1, |count| Ok(*count += 1)).unwrap();
/// lanes.close(0, Deadline::after(Duration::from_secs(1)), || Ok(()), |counts| Ok(assert_eq!(*counts[1], 1))).unwrap();
/// assert!(matches!(lanes.run(1, |_| Ok(())), Err(Error::InvalidArgument(_))));
///
/// let lanes = Lanes::new([0, 0]);
/// let failed = lanes.run(1, |_| Err(Error::Internal("in the middle of a message".into())));
/// assert!(failed.is_err() && lanes.run(1, |_| Ok(())).is_err());
/// assert!(lanes.run(0, |_| Ok(())).is_ok());
/// ```
#[derive(Debug)]
pub struct Lanes<C>(Vec<Mutex<LaneState<C>>>);

#[derive(Debug)]
struct LaneState<C> {
    content: C,
    end: End,
}

#[derive(Debug)]
enum End {
    /// It has not come.
    Open,
    /// The error of the first exchange that failed.
    Failed(Error),
    Closed,
}

/// How long [`Lanes::close`] waits before it looks again whether an exchange has ended.
const PAUSE: Duration = Duration::from_micros(200);

impl<C> Lanes<C> {
    /// A lane for each content.
    pub fn new(contents: impl IntoIterator<Item = C>) -> Self {
        let lane = |content| Mutex::new(LaneState { content, end: End::Open });
        Lanes(contents.into_iter().map(lane).collect())
    }

    /// Number of lanes.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Runs an exchange on a lane, with what the lane keeps.
    ///
    /// # Errors
    /// `InvalidArgument`, which changes nothing, for a lane that does not exist, while another exchange runs there, and after the end;
    /// `Internal` after an exchange that panicked, the error of the first one that failed, or its own.
    pub fn run(&self, lane: usize, exchange: impl FnOnce(&mut C) -> Result<()>) -> Result<()> {
        let Some(place) = self.0.get(lane) else {
            return Err(Error::invalid(format!("lane {lane} of a transport that has {} lanes", self.0.len())));
        };
        let mut state = place.try_lock().map_err(|error| match error {
            TryLockError::Poisoned(_) => panicked(lane),
            TryLockError::WouldBlock => Error::invalid(format!("two exchanges at the same time on lane {lane}")),
        })?;
        match &state.end {
            End::Open => {}
            End::Failed(error) => return Err(error.clone()),
            End::Closed => return Err(Error::invalid("the transport has been closed already")),
        }
        let outcome = exchange(&mut state.content);
        if let Err(error) = &outcome {
            state.end = End::Failed(error.clone());
        }
        outcome
    }

    /// Ends all lanes of `rank` by `farewell`, when the exchanges that run have ended; it gets what the lanes keep. Once that has
    /// succeeded, doing so again does nothing. `check` fails once the transport was aborted.
    ///
    /// # Errors
    /// `Timeout` when an exchange still runs at the deadline, those of `check`, of an exchange that failed, and of `farewell`.
    pub fn close(
        &self,
        rank: usize,
        deadline: Deadline,
        check: impl Fn() -> Result<()>,
        farewell: impl FnOnce(&mut [&mut C]) -> Result<()>,
    ) -> Result<()> {
        let mut states = Vec::with_capacity(self.0.len());
        for (lane, place) in self.0.iter().enumerate() {
            states.push(loop {
                match place.try_lock() {
                    Ok(state) => break state,
                    Err(TryLockError::Poisoned(_)) => return Err(panicked(lane)),
                    Err(TryLockError::WouldBlock) => {}
                }
                check()?;
                if deadline.has_passed() {
                    let operation = format!("closing the connections, while an exchange runs on lane {lane}");
                    return Err(Error::timeout(rank, operation, deadline, Vec::new()));
                }
                thread::sleep(PAUSE);
            });
        }
        if states.iter().all(|state| matches!(state.end, End::Closed)) {
            return Ok(());
        }
        check()?;
        for state in &states {
            if let End::Failed(error) = &state.end {
                return Err(error.clone());
            }
        }
        let mut contents: Vec<&mut C> = states.iter_mut().map(|state| &mut state.content).collect();
        let outcome = farewell(&mut contents);
        for state in &mut states {
            state.end = match &outcome {
                Ok(()) => End::Closed,
                Err(error) => End::Failed(error.clone()),
            };
        }
        outcome
    }

    /// What the lanes keep, while nothing else can use it.
    pub fn contents_mut(&mut self) -> impl Iterator<Item = &mut C> {
        self.0.iter_mut().map(|state| &mut state.get_mut().unwrap_or_else(PoisonError::into_inner).content)
    }
}

fn panicked(lane: usize) -> Error {
    Error::Internal(format!("an exchange on lane {lane} has panicked"))
}

/// Refuses what no exchange of `rank` of `ranks` can do, before anything moves.
///
/// # Errors
/// `InvalidArgument` for a message to or from this rank or one that there is not, for two of them one way, and for a header that announces
/// another length than its payload has.
pub fn check(rank: usize, ranks: usize, outgoing: &[Outgoing<'_>], incoming: &[Incoming<'_>]) -> Result<()> {
    if let Some(message) = outgoing.iter().find(|message| message.header.payload_len != message.payload.len() as u64) {
        let (peer, says, has) = (message.peer, message.header.payload_len, message.payload.len());
        return Err(Error::invalid(format!(
            "a message to rank {peer} whose header says {says} B and that has {has} B"
        )));
    }
    check_peers(rank, ranks, "to", outgoing.iter().map(|message| message.peer))?;
    check_peers(rank, ranks, "from", incoming.iter().map(|message| message.peer))
}

fn check_peers(rank: usize, ranks: usize, way: &str, peers: impl Iterator<Item = usize> + Clone) -> Result<()> {
    for (index, peer) in peers.clone().enumerate() {
        if peer >= ranks || peer == rank {
            return Err(Error::invalid(format!("rank {rank} of {ranks}: a message {way} rank {peer}")));
        }
        if peers.clone().take(index).any(|earlier| earlier == peer) {
            return Err(Error::invalid(format!("rank {rank}: two messages {way} rank {peer} in one exchange")));
        }
    }
    Ok(())
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
