//! Waiting for bytes inside an exchange, in the way that was chosen.

use std::time::Instant;

use crate::deadline::Deadline;
use crate::waiting::Waiting;

/// After so many waits in a row in which spinning found nothing, [`Waiting::Adaptive`] stops spinning: waits are long, or whoever
/// is waited for needs this core.
const MAX_MISSES: u32 = 4;

/// Waits that park at once, before spinning is tried again.
const PARKS_BEFORE_RETRY: u32 = 64;

/// Decides how one lane waits, from how its last waits went. Kept from exchange to exchange.
#[derive(Clone, Debug)]
pub struct Spinner {
    waiting: Waiting,
    /// Waits in a row in which spinning found nothing.
    misses: u32,
    /// Waits that still park at once.
    parks_left: u32,
}

/// One wait: from when nothing was there to when something came.
#[derive(Debug)]
pub struct Wait<'a> {
    spinner: &'a mut Spinner,
    began: Option<Instant>,
    looks: u32,
    parked: bool,
}

/// What to do next in a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again.
    Look,
    /// Sleep until the kernel wakes this thread, or the deadline.
    Park,
    /// The deadline has passed.
    Expired,
}

impl Spinner {
    /// Without a history.
    pub fn new(waiting: Waiting) -> Self {
        Spinner { waiting, misses: 0, parks_left: 0 }
    }

    /// Begins a wait. Drop it when something has come: its outcome goes into the history.
    pub fn wait(&mut self) -> Wait<'_> {
        Wait { spinner: self, began: None, looks: 0, parked: false }
    }
}

impl Wait<'_> {
    /// Nothing was there: what now? Takes a fraction of a microsecond, or the time of a `sched_yield` now and then.
    pub fn next(&mut self, deadline: Deadline) -> Next {
        if self.parked || self.spinner.waiting == Waiting::Park || self.spinner.parks_left > 0 {
            self.parked = true;
            return Next::Park;
        }
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        if deadline.has_passed() {
            return Next::Expired;
        }
        if self.spinner.waiting == Waiting::Adaptive && now - began >= Waiting::LONGEST_SPIN {
            self.parked = true;
            return Next::Park;
        }
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(64) && self.spinner.waiting == Waiting::Busy {
            // Where ranks share a core, the one that is waited for must get it.
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        Next::Look
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        let Spinner { waiting, misses, parks_left } = &mut *self.spinner;
        if *waiting != Waiting::Adaptive {
            return;
        }
        match (self.parked, self.began.is_some()) {
            (false, true) => *misses = 0,
            (false, false) => {}
            (true, false) => *parks_left = parks_left.saturating_sub(1),
            (true, true) => {
                *misses += 1;
                if *misses >= MAX_MISSES {
                    // The next attempt is the only one if it fails.
                    *misses = MAX_MISSES - 1;
                    *parks_left = PARKS_BEFORE_RETRY;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    /// Whether the next wait begins with a look, and ends with one.
    fn look(spinner: &mut Spinner, finds: bool) -> bool {
        let mut wait = spinner.wait();
        let looks = wait.next(soon()) == Next::Look;
        while !finds && wait.next(soon()) == Next::Look {}
        looks
    }

    #[test]
    fn looking_in_vain_is_given_up_and_tried_again() {
        let mut spinner = Spinner::new(Waiting::Adaptive);
        for _ in 0..MAX_MISSES {
            assert!(look(&mut spinner, false));
        }
        for round in 0..3 {
            for _ in 0..PARKS_BEFORE_RETRY {
                assert!(!look(&mut spinner, false), "round {round}");
            }
            assert!(look(&mut spinner, false), "round {round}");
        }
        for _ in 0..PARKS_BEFORE_RETRY {
            assert!(!look(&mut spinner, true));
        }
        // Once it has found something it may fail again a few times.
        assert!(look(&mut spinner, true));
        for _ in 0..MAX_MISSES {
            assert!(look(&mut spinner, false));
        }
        assert!(!look(&mut spinner, false));
    }

    #[test]
    fn parking_never_looks_and_busy_never_parks() {
        assert_eq!(Spinner::new(Waiting::Park).wait().next(soon()), Next::Park);
        let mut spinner = Spinner::new(Waiting::Busy);
        let mut wait = spinner.wait();
        let end = Deadline::after(Duration::from_millis(5));
        loop {
            match wait.next(end) {
                Next::Look => {}
                other => break assert_eq!(other, Next::Expired),
            }
        }
    }
}
