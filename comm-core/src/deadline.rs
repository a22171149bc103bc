//! The moment by which a wait must have ended.

use std::time::{Duration, Instant};

/// A point in time that bounds a wait. Every wait of this workspace has one.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Instant,
    end: Instant,
}

/// Longer waits are cut to this: about a century, so that adding it to an instant cannot overflow.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl Deadline {
    /// `wait` from now.
    pub fn after(wait: Duration) -> Self {
        let start = Instant::now();
        Deadline { start, end: start + wait.min(LONGEST) }
    }

    /// The moment itself.
    pub fn instant(&self) -> Instant {
        self.end
    }

    /// Time left, zero when it has passed.
    pub fn remaining(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Whether it has passed.
    pub fn has_passed(&self) -> bool {
        self.remaining().is_zero()
    }

    /// Time since the wait began.
    pub fn waited(&self) -> Duration {
        self.start.elapsed()
    }

    /// The earlier of this deadline and `wait` from now.
    pub fn at_most(&self, wait: Duration) -> Deadline {
        let now = Instant::now();
        Deadline { start: now, end: self.end.min(now + wait.min(LONGEST)) }
    }
}
