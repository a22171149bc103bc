//! The moment by which a wait must have ended.

use std::time::{Duration, Instant};

use crate::clock;

/// A point in time that bounds a wait. Every wait of this workspace has one.
///
/// Time in which this process was stopped does not count ([`clock`]): it has not waited then, and who woke up just now accuses
/// nobody of being late.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    start: Duration,
    end: Duration,
}

/// Longer waits are cut to this: about a century, so that adding it to an instant cannot overflow.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl Deadline {
    /// `wait` from now.
    pub fn after(wait: Duration) -> Self {
        let start = clock::running();
        Deadline { start, end: start + wait.min(LONGEST) }
    }

    /// The moment itself, if this process runs until then. Whoever has waited until it asks [`has_passed`](Deadline::has_passed):
    /// after a standstill there is time left.
    pub fn instant(&self) -> Instant {
        Instant::now() + self.remaining()
    }

    /// The moment on the [`clock`], which stays the same once it has passed, unlike [`instant`](Deadline::instant).
    pub(crate) fn end(&self) -> Duration {
        self.end
    }

    /// Time left, zero when it has passed.
    pub fn remaining(&self) -> Duration {
        self.end.saturating_sub(clock::running())
    }

    /// Whether it has passed.
    pub fn has_passed(&self) -> bool {
        self.remaining().is_zero()
    }

    /// Time since the wait began.
    pub fn waited(&self) -> Duration {
        clock::running().saturating_sub(self.start)
    }

    /// The earlier of this deadline and `wait` from now.
    pub fn at_most(&self, wait: Duration) -> Deadline {
        let now = clock::running();
        Deadline { start: now, end: self.end.min(now + wait.min(LONGEST)) }
    }
}
