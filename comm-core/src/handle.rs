//! The other end of an operation that was started.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::time::{Duration, Instant};

use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::Error;

/// An operation that ended well.
#[derive(Debug)]
pub struct Completed {
    /// The buffer that went in with the call.
    pub buffer: Buffer,
    /// The input that went in with the call, unchanged.
    pub input: Option<Buffer>,
    /// When its first message could be sent: after those before it on its lane.
    pub began: Instant,
    /// When it ended.
    pub ended: Instant,
}

/// An operation that failed.
#[derive(Debug)]
pub struct Failed {
    /// Why.
    pub error: Error,
    /// The buffer that went in with the call, partly overwritten; `None` if it is lost.
    pub buffer: Option<Buffer>,
    /// The input that went in with the call, unchanged; `None` if there was none, or it is lost.
    pub input: Option<Buffer>,
}

impl Failed {
    /// The error alone.
    pub fn into_error(self) -> Error {
        self.error
    }
}

impl From<Failed> for Error {
    fn from(failed: Failed) -> Error {
        failed.error
    }
}

/// How an operation ended.
pub type Outcome = std::result::Result<Completed, Failed>;

/// A started operation. Dropping it does not stop the operation.
#[derive(Debug)]
#[must_use = "the buffer and any error come out of `wait`"]
pub struct Handle {
    state: State,
}

#[derive(Debug)]
enum State {
    Done(Box<Outcome>),
    Pending(Receiver<Outcome>),
}

impl Handle {
    /// A handle of an operation that has already ended.
    pub fn done(outcome: Outcome) -> Self {
        Handle { state: State::Done(Box::new(outcome)) }
    }

    /// A handle of an operation under way, and the end through which its backend completes it.
    pub fn pending() -> (Completer, Self) {
        let (sender, receiver) = sync_channel(1);
        (Completer { sender }, Handle { state: State::Pending(receiver) })
    }

    /// Whether [`wait`](Handle::wait) would return at once.
    pub fn test(&mut self) -> bool {
        if let State::Pending(receiver) = &self.state {
            match receiver.try_recv() {
                Ok(outcome) => self.state = State::Done(Box::new(outcome)),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => self.state = State::Done(Box::new(Err(lost()))),
            }
        }
        true
    }

    /// Waits for the end, which the operation's own deadline bounds.
    ///
    /// # Errors
    /// Why it failed, with the buffer.
    pub fn wait(self) -> Outcome {
        match self.state {
            State::Done(outcome) => *outcome,
            State::Pending(receiver) => receiver.recv().unwrap_or_else(|_| Err(lost())),
        }
    }

    /// Waits for at most `timeout`.
    ///
    /// # Errors
    /// The handle itself when the operation has not ended by then.
    pub fn wait_timeout(self, timeout: Duration) -> Result<Outcome, Handle> {
        match self.state {
            State::Done(outcome) => Ok(*outcome),
            State::Pending(receiver) => {
                let deadline = Deadline::after(timeout);
                loop {
                    match receiver.recv_timeout(deadline.remaining()) {
                        Ok(outcome) => return Ok(outcome),
                        Err(RecvTimeoutError::Disconnected) => return Ok(Err(lost())),
                        Err(RecvTimeoutError::Timeout) if deadline.has_passed() => {
                            return Err(Handle { state: State::Pending(receiver) });
                        }
                        // This process was stopped meanwhile.
                        Err(RecvTimeoutError::Timeout) => {}
                    }
                }
            }
        }
    }
}

/// Completes a pending [`Handle`].
#[derive(Debug)]
pub struct Completer {
    sender: SyncSender<Outcome>,
}

impl Completer {
    /// Hands over the outcome. If the handle was dropped, so is the outcome.
    pub fn complete(self, outcome: Outcome) {
        let _ = self.sender.send(outcome);
    }
}

fn lost() -> Failed {
    Failed {
        error: Error::Internal("the thread that ran the operation ended without a result".into()),
        buffer: None,
        input: None,
    }
}
