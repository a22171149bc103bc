//! A transport that breaks on purpose, at a message chosen beforehand.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::transport::{Incoming, Outgoing, Transport};

/// Wraps a transport and does one thing wrong, always at the same outgoing message of this rank. Without a fault, or before and
/// after it, every call passes through as it is.
pub struct Faulty<T> {
    inner: T,
    fault: Option<Fault>,
    state: Mutex<State>,
    aborted: Condvar,
}

/// A fault to inject, and when.
///
/// Messages that match `peer` and `lane` are counted in the order in which exchanges name them. When several lanes are in use
/// at the same time, name one: their order among each other is not determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// How many matching outgoing messages pass unharmed before the one that is hit.
    pub at_message: u64,
    /// Only messages to this rank.
    pub peer: Option<usize>,
    /// Only messages on this lane.
    pub lane: Option<usize>,
    /// What happens to it.
    pub kind: FaultKind,
}

/// The ways to go wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The connection ends: the exchange fails with [`Error::PeerLost`], naming the message's receiver, before it sends
    /// anything, and so does everything after it.
    Cut,
    /// The exchange does nothing until its deadline ([`Error::Timeout`]) or until the transport is aborted (that error). So does everything
    /// after it on its lane, at once.
    Stall,
    /// The lowest bit of this byte of the payload (modulo its length) is flipped on its way. Messages without a payload are
    /// not counted.
    Corrupt {
        /// Which byte.
        byte: usize,
    },
    /// The exchange begins this much later, unless its deadline comes first or the transport is aborted.
    Delay(Duration),
}

#[derive(Default)]
struct State {
    matched: u64,
    error: Option<Error>,
    /// The lane on which a message was held up until its deadline, and with what.
    failed: Option<(usize, Error)>,
}

impl<T: Transport> Faulty<T> {
    /// Wraps `inner`, which will suffer `fault`; `None` for a transport that works.
    pub fn new(inner: T, fault: Option<Fault>) -> Self {
        Faulty { inner, fault, state: Mutex::default(), aborted: Condvar::new() }
    }

    /// The transport inside.
    pub fn inner(&self) -> &T {
        &self.inner
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fault and the index of the message it hits, if it hits one of these. The error of an earlier one on this lane.
    fn strike(&self, lane: usize, outgoing: &[Outgoing<'_>]) -> Result<Option<(FaultKind, usize)>> {
        let Some(fault) = self.fault.filter(|fault| fault.lane.is_none_or(|only| only == lane)) else {
            return Ok(None);
        };
        let mut state = self.state();
        if let Some((_, error)) = state.failed.as_ref().filter(|(failed, _)| *failed == lane) {
            return Err(error.clone());
        }
        for (index, message) in outgoing.iter().enumerate() {
            let is_of_peer = fault.peer.is_none_or(|only| only == message.peer);
            let can_be_hit = !matches!(fault.kind, FaultKind::Corrupt { .. }) || !message.payload.is_empty();
            if is_of_peer && can_be_hit {
                state.matched += 1;
                if state.matched == fault.at_message.saturating_add(1) {
                    return Ok(Some((fault.kind, index)));
                }
            }
        }
        Ok(None)
    }

    /// Waits for at most `wait`, and no longer than `deadline`. Fails when the transport is aborted meanwhile.
    fn pause(&self, wait: Duration, deadline: Deadline) -> Result<()> {
        let end = deadline.at_most(wait);
        let mut state = self.state();
        loop {
            if let Some(error) = &state.error {
                return Err(error.clone());
            }
            let left = end.remaining();
            if left.is_zero() {
                return Ok(());
            }
            state = self.aborted.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends the use of a lane because of this message.
    fn timeout(&self, lane: usize, message: &Outgoing<'_>, deadline: Deadline) -> Error {
        let error = Error::timeout(self.inner.rank(), message.header.to_string(), deadline, [message.peer]);
        self.state().failed = Some((lane, error.clone()));
        error
    }
}

#[deny(clippy::missing_trait_methods)]
impl<T: Transport> Transport for Faulty<T> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn lanes(&self) -> usize {
        self.inner.lanes()
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let Some((kind, index)) = self.strike(lane, outgoing)? else {
            return self.inner.exchange(lane, outgoing, incoming, deadline);
        };
        let hit = &outgoing[index];
        match kind {
            FaultKind::Cut => {
                let error = Error::PeerLost {
                    rank: hit.peer,
                    operation: hit.header.to_string(),
                    detail: "the connection was cut on purpose".into(),
                };
                self.abort(&error);
                Err(error)
            }
            FaultKind::Stall => {
                self.pause(Duration::MAX, deadline)?;
                Err(self.timeout(lane, hit, deadline))
            }
            FaultKind::Corrupt { byte } => {
                let mut payload = hit.payload.to_vec();
                let byte = byte % payload.len().max(1);
                if let Some(byte) = payload.get_mut(byte) {
                    *byte ^= 1;
                }
                let mut changed = outgoing.to_vec();
                changed[index] = Outgoing { payload: &payload, ..*hit };
                self.inner.exchange(lane, &changed, incoming, deadline)
            }
            FaultKind::Delay(wait) => {
                self.pause(wait, deadline)?;
                if deadline.has_passed() {
                    return Err(self.timeout(lane, hit, deadline));
                }
                self.inner.exchange(lane, outgoing, incoming, deadline)
            }
        }
    }

    fn may_block(&self) -> Result<()> {
        self.inner.may_block()
    }

    fn abort(&self, error: &Error) {
        self.state().error.get_or_insert_with(|| error.clone());
        self.aborted.notify_all();
        self.inner.abort(error);
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        self.inner.close(deadline)
    }

    fn facts(&self) -> Vec<(String, String)> {
        self.inner.facts()
    }
}
