//! One lane's queue of operations, and the thread that runs those that nobody waits in.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::deadline::Deadline;

type Job = Box<dyn FnOnce() + Send>;

/// Operations of one lane, one at a time, in the order in which they came.
pub(super) struct Lane {
    shared: Arc<Shared>,
    name: String,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    busy: bool,
    queue: VecDeque<Job>,
    has_thread: bool,
    stopped: bool,
}

/// The right to run on the lane, until dropped.
pub(super) struct Turn<'a>(&'a Shared);

impl Lane {
    pub(super) fn new(name: String) -> Self {
        Lane { shared: Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() }), name }
    }

    /// Takes the lane if nothing runs or waits on it.
    pub(super) fn try_enter(&self) -> Option<Turn<'_>> {
        let mut state = self.shared.lock();
        if state.busy || !state.queue.is_empty() {
            return None;
        }
        state.busy = true;
        Some(Turn(&self.shared))
    }

    /// Runs `job` on the progress thread after everything that came before.
    pub(super) fn enqueue(&self, job: Job) {
        let mut state = self.shared.lock();
        state.queue.push_back(job);
        if !state.has_thread {
            let shared = self.shared.clone();
            // If no thread can be had, the job is dropped, and whoever waits for it gets an error.
            state.has_thread = thread::Builder::new().name(self.name.clone()).spawn(move || shared.work()).is_ok();
            if !state.has_thread {
                state.queue.clear();
            }
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Waits until nothing runs or waits on the lane; false at the deadline.
    pub(super) fn wait_idle(&self, deadline: Deadline) -> bool {
        let mut state = self.shared.lock();
        while state.busy || !state.queue.is_empty() {
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Ends the progress thread once its queue is empty.
    pub(super) fn stop(&self) {
        self.shared.lock().stopped = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.lock();
        loop {
            if !state.busy
                && let Some(job) = state.queue.pop_front()
            {
                state.busy = true;
                drop(state);
                let turn = Turn(self);
                // A panicking job has dropped its completer, which its waiter sees; the lane goes on.
                let _ = catch_unwind(AssertUnwindSafe(job));
                drop(turn);
                state = self.lock();
            } else if state.stopped && state.queue.is_empty() {
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.lock().busy = false;
        self.0.changed.notify_all();
    }
}
