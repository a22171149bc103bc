//! What a process of a job asks of its system before it starts.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use signal_hook::consts::{SIGTERM, SIGUSR1, SIGXFSZ};

use crate::error::{Error, Result};
use crate::sys;

/// Readies this process for a job: raises the limit of open files ([`raise_descriptor_limit`]), and makes a write beyond the largest file that
/// this process may have (`ulimit -f`) an error like a full disk's, EFBIG, instead of the process's end by SIGXFSZ.
///
/// [`Launch::run`](crate::launch::Launch::run) and [`Job::from_env`](crate::job::Job::from_env) do this; a program that has neither calls it first
/// thing. Programs that this process starts get the limit, but not the signal's handler.
pub fn prepare() {
    raise_descriptor_limit();
    LazyLock::force(&FILE_SIZE);
}

/// Registered once. Where that fails, the signal does what it always did.
static FILE_SIZE: LazyLock<bool> =
    LazyLock::new(|| signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).is_ok());

/// The signals that ask a program which can go on later to save its state and leave.
pub const STOP_SIGNALS: [i32; 2] = [SIGTERM, SIGUSR1];

/// Whether this process has been asked to save its state and leave, by one of [`STOP_SIGNALS`] or by the program itself. Clones share what
/// was asked. A program that has saved ends with [`EXIT_STOPPED`](crate::job::EXIT_STOPPED).
#[derive(Clone, Debug, Default)]
pub struct StopRequest(Arc<Stop>);

#[derive(Debug, Default)]
struct Stop {
    asked: Arc<AtomicBool>,
    /// Whether the signals are caught.
    heeds: Mutex<bool>,
}

impl StopRequest {
    /// Asks.
    pub fn ask(&self) {
        self.0.asked.store(true, Ordering::Relaxed);
    }

    /// Whether anyone has asked.
    pub fn is_asked(&self) -> bool {
        self.0.asked.load(Ordering::Relaxed)
    }

    /// From now on the signals ask, for as long as this process runs, instead of ending it. Those that it was started to ignore stay ignored.
    ///
    /// # Errors
    /// [`Error::Io`] when a signal cannot be caught.
    pub fn heed_signals(&self) -> Result<()> {
        let mut heeds = self.0.heeds.lock().unwrap_or_else(PoisonError::into_inner);
        if !*heeds {
            for signal in not_ignored(&STOP_SIGNALS) {
                let registered = signal_hook::flag::register(signal, Arc::clone(&self.0.asked));
                registered.map_err(|e| Error::io(format!("catching signal {signal}"), e))?;
            }
            *heeds = true;
        }
        Ok(())
    }
}

/// Those of `signals` that this process was not started to ignore (by `nohup`, or by a script in the background).
pub(crate) fn not_ignored(signals: &[i32]) -> Vec<i32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    signals.iter().copied().filter(|signal| ignored.unwrap_or(0) >> (signal - 1) & 1 == 0).collect()
}

/// Enough for all ranks of any job; containers often allow a thousand times as many.
const MOST_DESCRIPTORS: u64 = 1 << 20;

/// Raises the soft limit of open files, pipes and connections of this process (`ulimit -n`) to the hard one, as far as the system lets it. How
/// many it may have after that.
///
/// A rank needs some for each other rank, and the usual soft limit, 1024, is for programs that keep descriptors in a set of that many bits. It
/// is not raised beyond a million: programs that this process starts may close all that they could have, one by one.
pub fn raise_descriptor_limit() -> u64 {
    sys::raise_descriptor_limit(MOST_DESCRIPTORS)
}
