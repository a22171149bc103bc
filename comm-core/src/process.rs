//! What a process of a job asks of its system before it starts.

use std::sync::Arc;
use std::sync::LazyLock;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::SIGXFSZ;

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
