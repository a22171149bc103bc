//! How a failure becomes the job's.

use std::time::Duration;

use super::State;
use crate::clock;
use crate::control::wire::{Failure, Message};
use crate::error::Error;

/// How long a provisional failure waits for rank 0's word. That takes a round trip and a turn of rank 0's event loop, so only a
/// rank 0 that is stopped, or cut off, lets it pass.
const SETTLE: Duration = Duration::from_secs(2);

pub(in crate::control) type Hook = Box<dyn Fn(&Error) + Send + Sync>;

impl State {
    /// The job's failure; before rank 0's word this rank's own.
    pub(in crate::control) fn failure(&self) -> Option<&Error> {
        self.decided.as_ref().or(self.provisional.as_ref().map(|(error, _)| error))
    }

    /// The job's failure, the same on all ranks and for good.
    pub(in crate::control) fn settled_failure(&self) -> Option<&Error> {
        self.decided.as_ref()
    }

    /// When a provisional failure is [to be settled](State::settle), if one is there.
    pub(in crate::control) fn settles_at(&self) -> Option<Duration> {
        self.provisional.as_ref().map(|(_, until)| *until).filter(|_| self.decided.is_none())
    }

    /// Waits for rank 0's word no longer than it may take. What this rank has seen is then not what the others will report, but
    /// that rank 0 does not answer is.
    pub(in crate::control) fn settle(&mut self) {
        if self.settles_at().is_some_and(|until| clock::running() >= until) {
            self.decide_alone(&rank_0_is_silent());
        }
    }

    /// Makes `error`, seen by this rank, the job's failure unless there is one.
    pub(in crate::control) fn fail(&mut self, error: &Error) {
        if self.failure().is_some() {
            return;
        }
        if let Some(send_half) = self.send_half(0).filter(|_| self.rank != 0) {
            send_half.send(&Message::Report(Failure::new(error, self.rank)));
            self.provisional = Some((error.clone(), clock::running() + SETTLE));
        } else {
            self.decide_alone(error);
        }
    }

    /// As [`fail`](State::fail), where rank 0's word is not waited for. It is told nevertheless: if it was only stopped, or this
    /// rank can only not hear it, it shall not take this rank's end for the cause.
    pub(in crate::control) fn decide_alone(&mut self, error: &Error) {
        self.decide_reported();
        if self.decided.is_some() {
            return;
        }
        let failure = Failure::new(error, self.rank);
        if self.rank == 0 {
            self.broadcast(&Message::Failed(failure.clone()));
        } else if let Some(send_half) = self.send_half(0) {
            send_half.send(&Message::Report(failure.clone()));
        }
        // As everyone else gets it.
        self.decide(failure.into_error());
    }

    /// At rank 0, when everything that has come has been read: one of the failures that it was told becomes the job's, the first.
    /// Unless it was stopped, and others had to do without its word: what they report has become final there.
    pub(in crate::control) fn decide_reported(&mut self) {
        let mut reported = std::mem::take(&mut self.reported).into_iter();
        if self.decided.is_some() {
            return;
        }
        let silent = rank_0_is_silent();
        let is_final = |failure: &Failure| *failure == Failure::new(&silent, 0);
        let Some(first) = reported.next() else { return };
        let failure = if is_final(&first) { first } else { reported.find(is_final).unwrap_or(first) };
        self.broadcast(&Message::Failed(failure.clone()));
        self.decide(failure.into_error());
    }

    pub(super) fn decide(&mut self, error: Error) {
        if self.decided.is_none() {
            self.decided = Some(error);
        }
    }

    pub(in crate::control) fn add_hook(&mut self, hook: Hook) {
        self.hooks.push(hook);
    }

    /// Hooks to call now, outside the lock, with the failure. They keep it, so it is the one that stays.
    pub(in crate::control) fn due_hooks(&mut self) -> Option<(Vec<Hook>, Error)> {
        if self.hooks.is_empty() {
            return None;
        }
        let error = self.settled_failure()?.clone();
        Some((std::mem::take(&mut self.hooks), error))
    }
}

/// The error of every rank when rank 0 is stopped or cut off.
pub(in crate::control) fn rank_0_is_silent() -> Error {
    let detail = "it does not answer; its process is stopped, or the network to it is down".into();
    Error::PeerLost { rank: 0, operation: String::new(), detail }
}
