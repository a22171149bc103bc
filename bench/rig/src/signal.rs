//! Signals that end this program, noticed between two pieces of work.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use comm_core::launch::ending_signals;

use crate::BenchError;

/// A signal ended the run.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "interrupted by signal {signal}; the folder of results, if the command keeps one, holds what was measured before"
)]
pub struct Interrupted {
    pub signal: i32,
}

/// The signal that came since [`catch`](Signals::catch), if any. A launcher catches signals while its ranks run; this is for the time
/// between two jobs.
#[derive(Clone, Debug, Default)]
pub struct Signals(Arc<AtomicUsize>);

impl Signals {
    /// Catches signals from here on: none ends this program by itself any more.
    ///
    /// # Errors
    /// The kernel's.
    pub fn catch() -> Result<Self, BenchError> {
        let signals = Signals::default();
        for signal in ending_signals() {
            signal_hook::flag::register_usize(signal, signals.0.clone(), signal.unsigned_abs() as usize)?;
        }
        Ok(signals)
    }

    /// As if this one had come.
    #[cfg(test)]
    pub(crate) fn raise(&self, signal: usize) {
        self.0.store(signal, Ordering::Relaxed);
    }

    /// Whether one has come.
    pub fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }

    /// # Errors
    /// [`Interrupted`] if one has come.
    pub fn check(&self) -> Result<(), Interrupted> {
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            signal => Err(Interrupted { signal: i32::try_from(signal).unwrap_or(2) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_is_kept_and_told_of() {
        let signals = Signals::default();
        assert!(!signals.came() && signals.check().is_ok());
        signals.raise(15);
        assert!(signals.clone().came());
        assert_eq!(signals.check().unwrap_err().signal, 15);
    }
}
