//! How a rank waits for bytes that have not come yet.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::deadline::Deadline;
use crate::error::Error;

/// What a thread does while it waits inside an exchange.
///
/// Waking a thread whose core has gone idle takes tens of microseconds, more than a small message takes to travel; looking
/// again and again instead keeps the core busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Waiting {
    /// Sleeps at once; the kernel wakes it.
    Park,
    /// Looks for up to [`LONGEST_SPIN`] first, where waits have lately been short enough for that to pay, then sleeps.
    #[default]
    Adaptive,
    /// Never sleeps inside an exchange. For ranks that have a core each.
    Busy,
}

/// Most time that [`Waiting::Adaptive`] spends looking.
pub const LONGEST_SPIN: Duration = Duration::from_micros(50);

/// A wait that ended within this time would have been found by looking, or nearly so: it counts as short.
const SHORT: Duration = Duration::from_micros(150);

impl Waiting {
    /// Every way.
    pub const ALL: [Waiting; 3] = [Waiting::Park, Waiting::Adaptive, Waiting::Busy];

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Waiting::Park => "park",
            Waiting::Adaptive => "adaptive",
            Waiting::Busy => "busy",
        }
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Waiting {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Waiting::ALL
            .into_iter()
            .find(|waiting| waiting.name() == name)
            .ok_or_else(|| Error::invalid(format!("'{name}' is no way to wait; choose one of park, adaptive, busy")))
    }
}

/// What one lane has learnt about its waits. Kept from exchange to exchange.
#[derive(Clone, Debug)]
pub struct Spinner {
    waiting: Waiting,
    budget: Duration,
}

/// One wait: from when nothing was there to when something came.
#[derive(Debug)]
pub struct Wait<'a> {
    spinner: &'a mut Spinner,
    began: Option<Instant>,
    looks: u32,
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
    /// Has learnt nothing yet.
    pub fn new(waiting: Waiting) -> Self {
        Spinner { waiting, budget: LONGEST_SPIN }
    }

    /// Begins a wait. Dropping it, when something has come, is what the spinner learns from.
    pub fn wait(&mut self) -> Wait<'_> {
        Wait { spinner: self, began: None, looks: 0 }
    }
}

impl Wait<'_> {
    /// Nothing was there: what now? Takes a fraction of a microsecond, or the time of a `sched_yield` now and then.
    pub fn next(&mut self, deadline: Deadline) -> Next {
        if self.spinner.waiting == Waiting::Park {
            return Next::Park;
        }
        let now = Instant::now();
        let began = *self.began.get_or_insert(now);
        if now >= deadline.instant() {
            return Next::Expired;
        }
        if self.spinner.waiting == Waiting::Adaptive && now - began >= self.spinner.budget {
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
        let (Waiting::Adaptive, Some(began)) = (self.spinner.waiting, self.began) else { return };
        let budget = &mut self.spinner.budget;
        *budget = match began.elapsed() {
            short if short <= SHORT => LONGEST_SPIN,
            // After six long waits in a row looking is given up, until a short one.
            _ if *budget < Duration::from_micros(1) => Duration::ZERO,
            _ => *budget / 2,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    #[test]
    fn long_waits_end_the_looking_and_a_short_one_brings_it_back() {
        let mut spinner = Spinner::new(Waiting::Adaptive);
        for _ in 0..8 {
            let mut wait = spinner.wait();
            while wait.next(soon()) == Next::Look {}
            std::thread::sleep(SHORT);
        }
        assert_eq!(spinner.budget, Duration::ZERO);
        let mut wait = spinner.wait();
        assert_eq!(wait.next(soon()), Next::Park);
        // As if the kernel had woken it at once.
        wait.began = Some(Instant::now());
        drop(wait);
        assert_eq!(spinner.wait().next(soon()), Next::Look);
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

    #[test]
    fn names_read_as_they_print() {
        for waiting in Waiting::ALL {
            assert_eq!(waiting.to_string().parse::<Waiting>().unwrap(), waiting);
        }
        assert!("spin".parse::<Waiting>().unwrap_err().to_string().contains("adaptive"));
    }
}
