//! System calls that the standard library does not offer.

use std::mem::MaybeUninit;
use std::time::Duration;

/// Processor time of this process and of all descendants that have ended and were waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Used {
    pub(super) user: Duration,
    pub(super) system: Duration,
}

/// `None` where the system does not say.
pub(super) fn used() -> Option<Used> {
    let one = |whose: libc::c_int| {
        let mut usage = MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: getrusage writes one `rusage` through a pointer that is valid for it, and reads nothing.
        if unsafe { libc::getrusage(whose, usage.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: plain integers, zeroed above, for which every pattern of bits is valid.
        let usage = unsafe { usage.assume_init() };
        Some(Used { user: duration(usage.ru_utime), system: duration(usage.ru_stime) })
    };
    let (own, children) = (one(libc::RUSAGE_SELF)?, one(libc::RUSAGE_CHILDREN)?);
    Some(Used { user: own.user + children.user, system: own.system + children.system })
}

/// How many ticks of `/proc/stat` a second has; `None` where the system does not say.
pub(super) fn ticks_a_second() -> Option<f64> {
    // SAFETY: sysconf takes one integer and touches no memory of this process.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    (ticks > 0).then_some(ticks as f64)
}

fn duration(time: libc::timeval) -> Duration {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::from_secs(seconds) + Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_of_this_process_and_of_children_counts() {
        let before = used().unwrap();
        let loops = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done";
        assert!(std::process::Command::new("sh").args(["-c", loops]).status().unwrap().success());
        assert!(used().unwrap().user + used().unwrap().system > before.user + before.system);
        assert!(ticks_a_second().unwrap() >= 1.0);
    }
}
