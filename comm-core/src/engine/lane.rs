//! One lane's queue of operations, the thread that runs asynchronous ones, and the one that watches their deadlines.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::clock;
use crate::deadline::Deadline;

/// A queued operation. It is called once.
pub type Job = Box<dyn FnOnce(Dequeued<'_>) + Send>;

/// How an operation leaves the queue.
#[derive(Debug)]
pub enum Dequeued<'a> {
    /// It has the lane until it drops this, which it does before it announces its end.
    Granted(LaneGuard<'a>),
    /// Its deadline passed while others had the lane.
    Expired,
    /// The system gave no thread to run it on.
    NoThread(io::Error),
}

/// Operations of one lane, one at a time, in the order in which they came. `S` is what the one that runs may use.
pub struct Lane<S = ()> {
    shared: Arc<LaneShared>,
    name: String,
    /// Of the operation that runs.
    scratch: Mutex<S>,
}

struct LaneShared {
    state: Mutex<State>,
    changed: Condvar,
    /// For the thread that watches the deadlines.
    deadline_changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The deadline of the operation that has the lane.
    running: Option<Deadline>,
    queue: VecDeque<Queued>,
    has_thread: bool,
    stopped: bool,
    /// Threads that wait for a change: without them a change is not announced, which costs a system call.
    waiters: usize,
    /// There is a thread that watches the deadlines of the queue, …
    is_watched: bool,
    /// … which looks at them next at this moment of the [`clock`]; without one, when it is told to.
    looks_at: Option<Duration>,
}

struct Queued {
    deadline: Deadline,
    job: Job,
}

/// How long an operation whose deadline has passed gets to report its own timeout, before those queued behind it with the same deadline expire:
/// it knows which ranks it waits for.
const EXPIRY_GRACE: Duration = Duration::from_millis(500);

/// The right to run on the lane, until dropped.
pub struct LaneGuard<'a>(&'a LaneShared);

impl<S> Lane<S> {
    /// A lane whose progress thread, once there is one, is called `name`.
    pub fn new(name: String, scratch: S) -> Self {
        let shared = LaneShared { state: Mutex::default(), changed: Condvar::new(), deadline_changed: Condvar::new() };
        Lane { shared: Arc::new(shared), name, scratch: Mutex::new(scratch) }
    }

    /// Takes the lane for an operation with this deadline, if nothing runs or waits there.
    pub fn try_enter(&self, deadline: Deadline) -> Option<LaneGuard<'_>> {
        let mut state = self.shared.lock();
        if state.is_busy() {
            return None;
        }
        state.running = Some(deadline);
        Some(LaneGuard(&self.shared))
    }

    /// The lane's memory, for the one operation that runs on it.
    pub fn scratch(&self) -> MutexGuard<'_, S> {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `job` on the progress thread after everything that came before, unless its deadline passes first. Where it cannot run, it is
    /// told why.
    pub fn enqueue(&self, deadline: Deadline, job: Job) {
        let mut state = self.shared.lock();
        let waits = state.is_busy();
        if !state.has_thread {
            let shared = self.shared.clone();
            match thread::Builder::new().name(self.name.clone()).spawn(move || shared.work()) {
                Ok(_) => state.has_thread = true,
                Err(error) => {
                    drop(state);
                    return job(Dequeued::NoThread(error));
                }
            }
        }
        state.queue.push_back(Queued { deadline, job });
        if waits {
            self.watch(&mut state, deadline);
        }
        self.shared.announce(state);
    }

    /// Has the deadline of an operation that waits watched.
    fn watch(&self, state: &mut State, deadline: Deadline) {
        if !state.is_watched {
            let shared = self.shared.clone();
            let spawned = thread::Builder::new().name(format!("{}-time", self.name)).spawn(move || shared.keep_time());
            // Without a thread the operation ends when it has had its turn, as the one before it ends by its own deadline.
            state.is_watched = spawned.is_ok();
        } else if state.looks_at.is_none_or(|at| deadline.end() < at) {
            state.looks_at = Some(deadline.end());
            self.shared.deadline_changed.notify_one();
        }
    }

    /// Whether nothing runs or waits on the lane.
    pub fn is_idle(&self) -> bool {
        !self.shared.lock().is_busy()
    }

    /// Waits until nothing runs or waits on the lane; false at the deadline.
    pub fn wait_idle(&self, deadline: Deadline) -> bool {
        let mut state = self.shared.lock();
        while state.is_busy() {
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

    /// Ends the lane's threads once its queue is empty.
    pub fn stop(&self) {
        let mut state = self.shared.lock();
        state.stopped = true;
        self.shared.deadline_changed.notify_one();
        self.shared.announce(state);
    }
}

impl State {
    fn is_busy(&self) -> bool {
        self.running.is_some() || !self.queue.is_empty()
    }

    /// When an operation of the queue with this deadline is given up, on the [`clock`]. The first of the queue has the lane next, if
    /// nothing runs: its thread may only be late.
    fn expires(&self, deadline: Deadline) -> Duration {
        let at = deadline.end();
        let ahead = self.running.or_else(|| self.queue.front().map(|first| first.deadline));
        match ahead {
            Some(ahead) if ahead.end() <= at => at + EXPIRY_GRACE,
            _ => at,
        }
    }
}

impl LaneShared {
    fn work(&self) {
        let mut state = self.lock();
        loop {
            if state.running.is_none()
                && let Some(Queued { deadline, job }) = state.queue.pop_front()
            {
                state.running = Some(deadline);
                drop(state);
                let guard = LaneGuard(self);
                // A panicking job has dropped its completer, which its waiter sees; the lane goes on.
                let _ = catch_unwind(AssertUnwindSafe(|| job(Dequeued::Granted(guard))));
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

    /// Takes operations out of the queue whose deadline has passed.
    fn keep_time(&self) {
        let mut state = self.lock();
        loop {
            let next = (0..state.queue.len()).min_by_key(|index| state.queue[*index].deadline.end());
            let next = next.map(|index| (index, state.expires(state.queue[index].deadline)));
            let now = clock::running();
            match next {
                Some((index, at)) if at <= now => {
                    let expired = state.queue.remove(index);
                    self.announce(state);
                    if let Some(Queued { job, .. }) = expired {
                        let _ = catch_unwind(AssertUnwindSafe(|| job(Dequeued::Expired)));
                    }
                    state = self.lock();
                }
                Some((_, at)) => {
                    state.looks_at = Some(at);
                    state =
                        self.deadline_changed.wait_timeout(state, at - now).unwrap_or_else(PoisonError::into_inner).0;
                }
                None if state.stopped => return,
                None => {
                    state.looks_at = None;
                    state = self.deadline_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
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

impl Drop for LaneGuard<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.running = None;
        self.0.announce(state);
    }
}

impl<S> fmt::Debug for Lane<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane").field("name", &self.name).finish_non_exhaustive()
    }
}

impl fmt::Debug for LaneGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LaneGuard")
    }
}
