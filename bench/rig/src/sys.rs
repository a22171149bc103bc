//! System calls that the standard library does not offer, behind safe functions.

use std::io;
use std::time::Duration;

/// Nanoseconds of the clock that all processes of this machine share and that never goes back (`CLOCK_MONOTONIC`).
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec through a pointer that is valid for it. This clock always exists, so it cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// Time that cores have spent on this process so far, on all its threads, ended ones included.
///
/// # Errors
/// The kernel's.
pub fn process_cpu_time() -> io::Result<Duration> {
    cpu_time(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// Time that cores have spent on this thread so far.
///
/// # Errors
/// The kernel's.
pub fn thread_cpu_time() -> io::Result<Duration> {
    cpu_time(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn cpu_time(clock: libc::clockid_t) -> io::Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec through a pointer that is valid for it.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Ok(Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0)))
}

/// Kills every process of the group that process `leader` leads.
pub fn kill_group(leader: u32) {
    if let Ok(leader) = libc::pid_t::try_from(leader)
        && leader > 1
    {
        // SAFETY: the call takes two integers. A negative id names the group; that it may be gone already is no error here.
        unsafe { libc::kill(-leader, libc::SIGKILL) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_goes_on() {
        let before = now();
        assert!(before > 0 && now() >= before);
    }

    #[test]
    fn work_takes_processor_time() {
        let before = process_cpu_time().unwrap();
        let end = std::time::Instant::now() + Duration::from_millis(20);
        while std::time::Instant::now() < end {}
        assert!(process_cpu_time().unwrap() > before);
    }
}
