//! A process's end of a link that is measured.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

/// What a process knows of its end and of the measurement.
#[derive(Clone, Debug)]
pub(super) struct ProcessSetup {
    pub(super) own: IpAddr,
    pub(super) interface: String,
    pub(super) header: u64,
    pub(super) length: Duration,
    pub(super) quiet: Duration,
    pub(super) folder: PathBuf,
}

/// The part of a measurement at its start that does not count: queues fill, and congestion control finds its rate.
const SETTLING: f64 = 0.3;

/// Longest wait for the other ends, beyond the measurement itself.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// How often signs are looked for.
const LOOK: Duration = Duration::from_millis(2);

impl ProcessSetup {
    /// Says something to the other processes.
    pub(super) fn signal(&self, name: &str) -> io::Result<()> {
        fs::write(self.folder.join(name), b"")
    }

    pub(super) fn has_signal(&self, name: &str) -> bool {
        self.folder.join(name).exists()
    }

    /// # Errors
    /// It does not come.
    pub(super) fn wait_for(&self, name: &str) -> io::Result<()> {
        let began = Instant::now();
        while !self.has_signal(name) {
            if began.elapsed() > PATIENCE {
                let text = format!("no other end of the link was {name} within {PATIENCE:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, text));
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// How long everything may take.
    pub(super) fn patience(&self) -> Duration {
        self.length + PATIENCE
    }

    /// The part of a measurement that counts, where the first packet came at `first`.
    pub(super) fn steady(&self, first: Instant) -> (Instant, Instant) {
        (first + self.length.mul_f64(SETTLING), first + self.length)
    }
}
