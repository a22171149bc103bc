//! A barrier for threads that play ranks in a test.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::TIMEOUT;

/// As [`std::sync::Barrier`], with a deadline: where one of the threads panics or returns early, the others panic too, after a minute,
/// instead of waiting for ever.
#[derive(Debug)]
pub struct Barrier {
    threads: usize,
    timeout: Duration,
    state: Mutex<State>,
    all_came: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: usize,
    rounds: u64,
}

impl Barrier {
    /// For `threads` threads.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self::with_timeout(threads, TIMEOUT)
    }

    fn with_timeout(threads: usize, timeout: Duration) -> Self {
        Self { threads, timeout, state: Mutex::default(), all_came: Condvar::new() }
    }

    /// Waits until all threads have called this as often as this one.
    ///
    /// # Panics
    ///
    /// When they have not within a minute.
    #[track_caller]
    pub fn wait(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting += 1;
        if state.waiting >= self.threads {
            *state = State { waiting: 0, rounds: state.rounds + 1 };
            self.all_came.notify_all();
            return;
        }
        let round = state.rounds;
        let (state, late) = self
            .all_came
            .wait_timeout_while(state, self.timeout, |state| state.rounds == round)
            .unwrap_or_else(PoisonError::into_inner);
        let (came, threads) = (state.waiting, self.threads);
        drop(state);
        assert!(!late.timed_out(), "{came} of {threads} threads came to the barrier within {:?}", self.timeout);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn nobody_passes_before_all_have_come() {
        let (barrier, came) = (Barrier::new(3), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for round in 1..=100 {
                        came.fetch_add(1, Ordering::SeqCst);
                        barrier.wait();
                        assert_eq!(came.load(Ordering::SeqCst), 3 * round);
                        barrier.wait();
                    }
                });
            }
        });
    }

    #[test]
    fn a_thread_that_is_gone_ends_the_wait_of_the_others() {
        let barrier = Barrier::with_timeout(3, Duration::from_millis(50));
        std::thread::scope(|scope| {
            let waiting = [(); 2].map(|()| scope.spawn(|| barrier.wait()));
            assert!(waiting.into_iter().all(|thread| thread.join().is_err()));
        });
    }
}
