//! What a caller can choose of the control plane.

use std::time::Duration;

use crate::error::{Error, Result};

/// Intervals of the control plane, the same on all ranks. The defaults suit any job.
#[derive(Clone, Copy, Debug)]
pub struct TcpOptions {
    /// How often each side gives a sign of life. A thread of its own does, so that no computation delays it.
    pub heartbeat: Duration,
    /// How long a rank may give none before it counts as lost. This is for stopped processes and dead networks; a process that
    /// ends is noticed at once. Time in which this rank did not listen, because it was stopped itself, does not count.
    pub liveness: Duration,
    /// How long a new connection may take to authenticate.
    pub handshake: Duration,
}

impl TcpOptions {
    /// # Errors
    /// [`Error::InvalidArgument`] for intervals that cannot work.
    pub(super) fn check(&self) -> Result<()> {
        if self.heartbeat.is_zero() || self.liveness <= self.heartbeat {
            return Err(Error::invalid(format!(
                "a liveness bound of {:?} needs a shorter heartbeat than {:?}, above zero",
                self.liveness, self.heartbeat
            )));
        }
        if self.handshake.is_zero() {
            return Err(Error::invalid("a handshake time of 0 s: connections need some time to authenticate"));
        }
        Ok(())
    }
}

impl Default for TcpOptions {
    fn default() -> Self {
        TcpOptions {
            heartbeat: Duration::from_secs(1),
            liveness: Duration::from_secs(30),
            handshake: Duration::from_secs(5),
        }
    }
}
