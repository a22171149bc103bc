//! One lane's queue of operations, and the thread that runs those that nobody waits in.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::deadline::Deadline;

type Job = Box<dyn FnOnce() + Send>;

/// Operations of one lane, one at a time, in the order in which they came. `S` is what the one that runs may use.
pub struct Lane<S = ()> {
    shared: Arc<Shared>,
    name: String,
    /// Of the operation that runs.
    scratch: Mutex<S>,
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
    /// Threads that wait for a change: without them a change is not announced, which costs a system call.
    waiters: usize,
}

/// The right to run on the lane, until dropped.
pub struct Turn<'a>(&'a Shared);

impl<S> Lane<S> {
    /// A lane whose progress thread, once there is one, is called `name`.
    pub fn new(name: String, scratch: S) -> Self {
        Lane {
            shared: Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() }),
            name,
            scratch: Mutex::new(scratch),
        }
    }

    /// Takes the lane if nothing runs or waits on it.
    pub fn try_enter(&self) -> Option<Turn<'_>> {
        let mut state = self.shared.lock();
        if state.busy || !state.queue.is_empty() {
            return None;
        }
        state.busy = true;
        Some(Turn(&self.shared))
    }

    /// The lane's memory, for the one operation that runs on it.
    pub fn scratch(&self) -> MutexGuard<'_, S> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `job` on the progress thread after everything that came before.
    pub fn enqueue(&self, job: Job) {
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
        self.shared.announce(state);
    }

    /// Waits until nothing runs or waits on the lane; false at the deadline.
    pub fn wait_idle(&self, deadline: Deadline) -> bool {
        let mut state = self.shared.lock();
        while state.busy || !state.queue.is_empty() {
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            state.waiters += 1;
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiters -= 1;
        }
        true
    }

    /// Ends the progress thread once its queue is empty.
    pub fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        self.shared.announce(state);
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
                state.waiters += 1;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.waiters -= 1;
            }
        }
    }

    fn announce(&self, state: MutexGuard<'_, State>) {
        let is_awaited = state.waiters > 0;
        drop(state);
        if is_awaited {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.busy = false;
        self.0.announce(state);
    }
}

impl<S> fmt::Debug for Lane<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").field("name", &self.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for Turn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Turn")
    }
}
