//! Ways to wait for bytes that have not come yet.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::names;

/// What a thread does while it waits inside an exchange.
///
/// Waking a thread whose core has gone idle takes tens of microseconds, more than a small message takes to travel; spinning
/// again and again instead keeps the core busy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Waiting {
    /// Sleeps at once; the kernel wakes it.
    Park,
    /// Spins for up to [`LONGEST_SPIN`](Waiting::LONGEST_SPIN) first, where that has lately found something, then sleeps.
    #[default]
    Adaptive,
    /// Never sleeps inside an exchange. For ranks that have a core each.
    Busy,
}

names!(pub Waiting, "way to wait": Park = "park", Adaptive = "adaptive", Busy = "busy");

impl Waiting {
    /// Longest time that [`Adaptive`](Waiting::Adaptive) spins.
    pub const LONGEST_SPIN: Duration = Duration::from_micros(50);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_as_they_print() {
        for waiting in Waiting::ALL {
            assert_eq!(waiting.to_string().parse::<Waiting>().unwrap(), waiting);
        }
        assert!("spin".parse::<Waiting>().unwrap_err().to_string().contains("adaptive"));
    }
}
