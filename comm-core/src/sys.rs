//! System calls that the standard library does not offer, behind safe functions.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use crate::descriptors::Limits;

/// A file descriptor to wait for with [`poll`], and what was found.
pub(crate) struct Waiter<'a> {
    fd: BorrowedFd<'a>,
    write: bool,
    /// Reading would not block: bytes, a connection, the end, or an error to be read.
    pub(crate) readable: bool,
    /// Writing would not block.
    pub(crate) writable: bool,
}

impl<'a> Waiter<'a> {
    /// Waits until `fd` is readable and, if `write`, also until it is writable.
    pub(crate) fn new(fd: BorrowedFd<'a>, write: bool) -> Self {
        Waiter { fd, write, readable: false, writable: false }
    }
}

/// Waits until one of `waiters` is ready, at most `timeout`. An interruption by a signal counts as the end of the wait.
pub(crate) fn poll(waiters: &mut [Waiter<'_>], timeout: Duration) -> io::Result<()> {
    let mut fds: Vec<libc::pollfd> = waiters
        .iter()
        .map(|w| libc::pollfd {
            fd: w.fd.as_raw_fd(),
            events: if w.write { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN },
            revents: 0,
        })
        .collect();
    // Rounded up, so that a timer that is due in half a millisecond does not make the caller spin.
    let millis = timeout.as_nanos().div_ceil(1_000_000).min(60_000) as libc::c_int;
    // SAFETY: `fds` is a live, exclusively borrowed array of exactly `fds.len()` pollfd structures, and each descriptor in it
    // is open for the whole call because `waiters` borrows it.
    let count = unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, millis) };
    if count < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) };
    }
    for (waiter, fd) in waiters.iter_mut().zip(&fds) {
        waiter.readable = fd.revents & (libc::POLLIN | libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0;
        waiter.writable = fd.revents & libc::POLLOUT != 0;
    }
    Ok(())
}

/// Waits until writing to `fd` would not block, or fails, at most `timeout`.
pub(crate) fn wait_until_writable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    let mut fd = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    let millis = timeout.as_millis().min(60_000) as libc::c_int;
    // SAFETY: `fd` is one live, exclusively borrowed pollfd structure, and its descriptor is open for the whole call because it is borrowed.
    let count = unsafe { libc::poll(&mut fd, 1, millis) };
    let error = io::Error::last_os_error();
    if count < 0 && error.kind() != io::ErrorKind::Interrupted { Err(error) } else { Ok(()) }
}

/// Writes some of `bytes`, by one system call, past all buffers; how many.
pub(crate) fn write(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the call only reads, `bytes.len()` bytes of the live slice `bytes`, and the descriptor is open because it is borrowed.
    let count = unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// Raises the soft limit of open file descriptors to the hard one, or to `most` where that is more. The soft limit after that.
pub(crate) fn raise_descriptor_limit(most: u64) -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a live, writable rlimit structure.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let wanted = limit.rlim_max.min(most);
    if limit.rlim_cur < wanted {
        let raised = libc::rlimit { rlim_cur: wanted, ..limit };
        // SAFETY: `raised` is a live rlimit structure, which the call only reads.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } == 0 {
            limit = raised;
        }
    }
    Ok(limit.rlim_cur)
}

/// Asks the kernel to kill this process when its parent ends, and fails if `parent` is no longer its parent.
///
/// The kernel takes "parent" to be the *thread* that started this process.
pub(crate) fn die_with_parent(parent: u32) -> io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes one integer argument and touches no memory of this process.
    let status = unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong) };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    // A parent that died before the call above will not send the signal any more.
    if std::os::unix::process::parent_id() == parent { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ESRCH)) }
}

/// Makes the process that `command` starts die with this one, whatever program it runs.
pub(crate) fn die_with_this_process(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe calls are allowed: it calls prctl and
    // getppid, and builds errors from plain numbers, without allocation or locks.
    unsafe {
        command.pre_exec(move || die_with_parent(parent));
    }
}

/// Lets the process that `command` starts write to its terminal from a process group in the background, even where the terminal is set to
/// stop who does (`stty tostop`).
pub(crate) fn ignore_terminal_output_stops(command: &mut Command) {
    let ignore = || {
        // SAFETY: signal takes two integers, and no handler is installed.
        let before = unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
        if before == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe calls are allowed: signal is one, and the error is built
    // from a plain number.
    unsafe {
        command.pre_exec(ignore);
    }
}

/// A file in memory only, which ends with its last descriptor and which no program that this one starts inherits. `name` is for
/// people who look at `/proc`.
pub(crate) fn memory_file(name: &CStr) -> io::Result<File> {
    // Some machines allow only files that can never be executed; kernels before 6.3 do not know that flag.
    let kinds = [libc::MFD_CLOEXEC | libc::MFD_NOEXEC_SEAL, libc::MFD_CLOEXEC];
    let mut error = io::Error::from_raw_os_error(libc::EINVAL);
    for flags in kinds {
        // SAFETY: `name` is a live C string, and the call touches no other memory of this process.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        if fd >= 0 {
            // SAFETY: the descriptor has just been opened, and nothing else knows of it.
            return Ok(unsafe { File::from_raw_fd(fd) });
        }
        error = io::Error::last_os_error();
    }
    Err(error)
}

/// How many file descriptors this process may have.
pub(crate) fn descriptor_limits() -> io::Result<Limits> {
    let mut limits = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limits` is a live, writable rlimit; the other argument is an integer.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limits) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Limits { soft: limits.rlim_cur, hard: limits.rlim_max })
}

/// The user on whose behalf this process opens files.
pub(crate) fn effective_user() -> u32 {
    // SAFETY: geteuid takes nothing, touches no memory of this process and cannot fail.
    unsafe { libc::geteuid() }
}

/// Sends `signal` to the process group that `leader` leads. A group that is gone is no error.
pub(crate) fn signal_group(leader: u32, signal: i32) {
    let Ok(leader) = libc::pid_t::try_from(leader) else { return };
    // 0 and 1 would address the caller's own group and every process there is.
    if leader > 1 {
        // SAFETY: kill takes two integers and touches no memory of this process.
        unsafe { libc::kill(-leader, signal) };
    }
}

/// Whether the child `pid` has ended. It stays unreaped, so its process id and its group's cannot be given to another.
pub(crate) fn has_ended(pid: u32) -> io::Result<bool> {
    // SAFETY: a siginfo_t of zeroes is a valid value of this plain C structure.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: `info` is a live, writable siginfo_t; the other arguments are integers.
    let status = unsafe { libc::waitid(libc::P_PID, pid as libc::id_t, &mut info, options) };
    if status != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: after a successful waitid the structure holds either zeroes (nothing ended) or a SIGCHLD record, and in both
    // cases si_pid is initialised.
    Ok(unsafe { info.si_pid() } != 0)
}

/// A loop over elements that the compiler can vectorise. `run` and all that it calls must be `#[inline(always)]`, or it is
/// compiled for the machine's least.
pub(crate) trait Kernel {
    /// The loop.
    fn run(self);
}

/// Runs the kernel compiled for the widest vectors that this machine has. (On aarch64 the least has NEON already.)
pub(crate) fn vectorised(kernel: impl Kernel) {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
        fn avx512(kernel: impl Kernel) {
            kernel.run();
        }
        #[target_feature(enable = "avx2")]
        fn avx2(kernel: impl Kernel) {
            kernel.run();
        }
        use std::arch::is_x86_feature_detected as has;
        if has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq") {
            // SAFETY: the machine has every feature that the function was compiled for.
            return unsafe { avx512(kernel) };
        }
        if has!("avx2") {
            // SAFETY: the machine has the feature that the function was compiled for.
            return unsafe { avx2(kernel) };
        }
    }
    kernel.run();
}
