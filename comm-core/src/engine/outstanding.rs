//! How many operations have been started and not ended.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::Group;
use crate::deadline::Deadline;

/// Counts operations from their start until their waiters have been woken at their end.
#[derive(Debug, Default)]
pub(super) struct Outstanding {
    count: AtomicUsize,
    /// Threads in [`wait_for_none`](Outstanding::wait_for_none): without them an end is not announced.
    waiters: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Outstanding {
    fn begin(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    fn end(&self) {
        // Either this sees the waiter, or the waiter sees the new count: each writes before it reads.
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 && self.waiters.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.changed.notify_all();
        }
    }

    /// Waits until there is none; false at the deadline.
    pub(super) fn wait_for_none(&self, deadline: Deadline) -> bool {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let has_ended = loop {
            if self.count.load(Ordering::SeqCst) == 0 {
                break true;
            }
            let left = deadline.remaining();
            if left.is_zero() {
                break false;
            }
            guard = self.changed.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        has_ended
    }
}

/// An operation of a communicator counts as outstanding until this is dropped, after its handle was completed.
#[derive(Debug)]
pub(super) struct InFlight(Arc<Group>);

impl InFlight {
    pub(super) fn new(group: &Arc<Group>) -> Self {
        let group = group.clone();
        group.own.begin();
        group.all.begin();
        InFlight(group)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.own.end();
        self.0.all.end();
    }
}
