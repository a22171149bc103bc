//! What transports have in common: what becomes of a lane, and which messages make no sense.

use std::sync::{Mutex, PoisonError, TryLockError};
use std::thread;
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::transport::{Incoming, Outgoing};

/// What [`exchange`](crate::Transport::exchange) and [`close`](crate::Transport::close) promise of each lane, for transports that keep something for it, a
/// `C`: one exchange at a time, and none after one that failed or after the end.
///
/// ```
/// use std::time::Duration;
/// use comm_core::{Deadline, Error, lanes::Lanes};
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
        let Some(slot) = self.0.get(lane) else {
            return Err(Error::invalid(format!("lane {lane} of a transport that has {} lanes", self.0.len())));
        };
        let mut state = slot.try_lock().map_err(|error| match error {
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

    /// Ends all lanes of `rank` by `close_handshake`, when the exchanges that run have ended; it gets what the lanes keep. Once that has
    /// succeeded, doing so again does nothing. `check` fails once the transport was aborted.
    ///
    /// # Errors
    /// `Timeout` when an exchange still runs at the deadline, those of `check`, of an exchange that failed, and of `close_handshake`.
    pub fn close(
        &self,
        rank: usize,
        deadline: Deadline,
        check: impl Fn() -> Result<()>,
        close_handshake: impl FnOnce(&mut [&mut C]) -> Result<()>,
    ) -> Result<()> {
        let mut states = Vec::with_capacity(self.0.len());
        for (lane, slot) in self.0.iter().enumerate() {
            states.push(loop {
                match slot.try_lock() {
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
        let outcome = close_handshake(&mut contents);
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
/// `InvalidArgument` for a message to or from this rank or one that does not exist, for two of them one way, and for a header that announces
/// another length than its payload has.
pub fn check_messages(rank: usize, ranks: usize, outgoing: &[Outgoing<'_>], incoming: &[Incoming<'_>]) -> Result<()> {
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
