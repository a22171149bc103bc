//! A rank's state between the thread of its control plane and the callers.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::guarded;
use super::state::State;
use crate::clock;
use crate::deadline::Deadline;
use crate::error::Error;

/// What the thread of the control plane and the callers share.
pub(super) struct SharedState {
    state: Mutex<State>,
    pub(super) changed: Condvar,
    /// The job has failed, or this rank has reported that it has.
    pub(super) is_failing: AtomicBool,
    waker: UnixStream,
    pub(super) stop: AtomicBool,
}

impl SharedState {
    /// Around `state`; what is written to `waker` wakes the thread.
    pub(super) fn new(state: State, waker: UnixStream) -> Self {
        SharedState {
            state: Mutex::new(state),
            changed: Condvar::new(),
            is_failing: AtomicBool::new(false),
            waker,
            stop: AtomicBool::new(false),
        }
    }

    /// Changes the state, lets those who wait look at it, and calls the failure hooks that have become due.
    pub(super) fn update<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let (result, due, stall, is_reported) = {
            let mut state = self.lock();
            let settled_before = state.settles_at();
            let result = change(&mut state);
            state.settle();
            let is_reported = state.settles_at().is_some() && settled_before.is_none();
            self.is_failing.fetch_or(state.failure().is_some(), Ordering::Release);
            (result, state.due_hooks(), state.due_stall(), is_reported)
        };
        self.changed.notify_all();
        if is_reported {
            // The thread keeps the time within which rank 0 has to answer.
            self.wake();
        }
        if let Some(stall) = stall {
            stall.tell();
        }
        if let Some((hooks, error)) = due {
            hooks.iter().for_each(|hook| guarded(|| hook(&error)));
        }
        result
    }

    /// The job's failure, for which it waits: up to `grace` for one to come, and once there is one until it is settled.
    pub(super) fn settled_within(&self, grace: Duration) -> Option<Error> {
        let deadline = Deadline::after(grace);
        let mut state = self.lock();
        loop {
            if let Some(error) = state.settled_failure() {
                return Some(error.clone());
            }
            let left = match state.settles_at() {
                Some(settles_at) => settles_at.saturating_sub(clock::running()),
                None => deadline.remaining(),
            };
            if !left.is_zero() {
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            state.settles_at()?;
            drop(state);
            self.update(State::settle);
            state = self.lock();
        }
    }

    /// When the event loop has something to do though nothing comes: to look for operations that take too long, and to settle a
    /// failure.
    pub(super) fn timers(&self) -> (Option<Duration>, Option<Duration>) {
        let state = self.lock();
        (state.stall_check_at(clock::running()), state.settles_at())
    }

    /// Has the thread send what the sockets did not take at once.
    pub(super) fn send_rest(&self) {
        let waiting = self.lock().is_sending();
        if waiting {
            self.wake();
        }
    }

    /// Makes the thread look around.
    pub(super) fn wake(&self) {
        // A full socket wakes it as well.
        let _ = (&self.waker).write(&[0]);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
