//! System calls that the standard library does not offer, behind safe functions.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::BorrowedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit, kill_process_group,
    set_parent_process_death_signal, setrlimit, waitid,
};

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

/// Waits until one of `waiters` is ready, at most `timeout` and a minute. An interruption by a signal counts as the end of the wait.
pub(crate) fn poll(waiters: &mut [Waiter<'_>], timeout: Duration) -> io::Result<()> {
    let events = |write| if write { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    let mut fds: Vec<_> = waiters.iter().map(|w| PollFd::from_borrowed_fd(w.fd, events(w.write))).collect();
    wait(&mut fds, timeout)?;
    let found: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
    for (waiter, found) in waiters.iter_mut().zip(found) {
        waiter.readable = found.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
        waiter.writable = found.contains(PollFlags::OUT);
    }
    Ok(())
}

/// Waits until writing to `fd` would not block, or fails, at most `timeout` and a minute.
pub(crate) fn wait_until_writable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    wait(&mut [PollFd::from_borrowed_fd(fd, PollFlags::OUT)], timeout)
}

fn wait(fds: &mut [PollFd<'_>], timeout: Duration) -> io::Result<()> {
    let timeout = timeout.min(Duration::from_secs(60));
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    match rustix::event::poll(fds, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Raises the soft limit of open file descriptors to the hard one, or to `most` where that is more. The soft limit after that.
pub(crate) fn raise_descriptor_limit(most: u64) -> u64 {
    let limits = descriptor_limits();
    let wanted = limits.hard.min(most);
    let raised = Rlimit { current: Some(wanted), maximum: getrlimit(Resource::Nofile).maximum };
    if limits.soft < wanted && setrlimit(Resource::Nofile, raised).is_ok() { wanted } else { limits.soft }
}

/// How many of something a process may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// The one that counts.
    pub(crate) soft: u64,
    /// To which the process itself may raise it.
    pub(crate) hard: u64,
}

/// How many file descriptors this process may have.
pub(crate) fn descriptor_limits() -> Limits {
    let limits = getrlimit(Resource::Nofile);
    Limits { soft: limits.current.unwrap_or(u64::MAX), hard: limits.maximum.unwrap_or(u64::MAX) }
}

/// Asks the kernel to kill this process when its parent ends, and fails if `parent` is no longer its parent.
///
/// The kernel takes "parent" to be the *thread* that started this process.
pub(crate) fn die_with_parent(parent: u32) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // A parent that died before the call above will not send the signal any more.
    if std::os::unix::process::parent_id() == parent { Ok(()) } else { Err(Errno::SRCH.into()) }
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
pub(crate) fn memory_file(name: &str, flags: MemfdFlags) -> io::Result<File> {
    let flags = flags | MemfdFlags::CLOEXEC;
    // Some machines allow only files that can never be executed; kernels before 6.3 do not know that flag.
    let file = match memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => memfd_create(name, flags),
        other => other,
    };
    Ok(file?.into())
}

/// Copies from the memory of process `pid` into each place what lies at its address there. The bytes that were copied, in the places' order.
pub(crate) fn read_process<const N: usize>(pid: u32, places: [(u64, &mut [u8]); N]) -> io::Result<usize> {
    let pid = process(pid).ok_or(Errno::SRCH)?.as_raw_nonzero().get();
    // An address of the other process is not one here; where it does not fit, there is nothing to read.
    let theirs = places.each_ref().map(|(address, place)| libc::iovec {
        iov_base: std::ptr::without_provenance_mut(usize::try_from(*address).unwrap_or(0)),
        iov_len: place.len(),
    });
    let own = places.map(|(_, place)| libc::iovec { iov_base: place.as_mut_ptr().cast(), iov_len: place.len() });
    let count = N as libc::c_ulong;
    // SAFETY: both lists have N entries of the same lengths. The kernel writes only to the places of `own`, which this call has borrowed alone, and it checks the
    // addresses of the other process itself.
    let copied = unsafe { libc::process_vm_readv(pid, own.as_ptr(), count, theirs.as_ptr(), count, 0) };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// Asks for huge pages for what of `memory` lies on whole pages.
pub(crate) fn advise_huge_pages(memory: &mut [u8]) {
    // A multiple of the page size on every architecture.
    const PAGE: usize = 64 << 10;
    let skipped = memory.as_ptr().align_offset(PAGE);
    let Some(pages) = memory.get_mut(skipped..).filter(|rest| rest.len() >= PAGE) else { return };
    let length = pages.len() / PAGE * PAGE;
    // SAFETY: the range lies within memory that this call has borrowed alone, and the advice does not change what it holds.
    let _ = unsafe { libc::madvise(pages.as_mut_ptr().cast(), length, libc::MADV_HUGEPAGE) };
}

/// The addresses of interfaces that are up, with the names of these and port 0, in the kernel's order.
pub(crate) fn interface_addresses() -> io::Result<Vec<(String, SocketAddr)>> {
    struct List(*mut libc::ifaddrs);

    impl Drop for List {
        fn drop(&mut self) {
            // SAFETY: the pointer is what getifaddrs has given, and nothing else frees it.
            unsafe { libc::freeifaddrs(self.0) };
        }
    }

    let mut first = std::ptr::null_mut();
    // SAFETY: getifaddrs writes one pointer, to a list that stays until it is freed.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let list = List(first);
    let mut found = Vec::new();
    let mut next = list.0;
    // SAFETY: each pointer is null at the end of the list, or an entry of it, and the list lives as long as `list`.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as u32 == 0 || entry.ifa_name.is_null() {
            continue;
        }
        // SAFETY: the address of an entry is null, or one whose family says which type it is of.
        let address = unsafe { socket_address(entry.ifa_addr) };
        // SAFETY: the name of an entry ends with a zero byte, and lives as long as the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        found.extend(address.map(|address| (name.to_string_lossy().into_owned(), address)));
    }
    Ok(found)
}

/// # Safety
/// `address` is null, or points to an address of the type that its family says.
unsafe fn socket_address(address: *const libc::sockaddr) -> Option<SocketAddr> {
    // SAFETY: it is null or points to an address, of which every type begins with its family.
    match i32::from(unsafe { address.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: of this family it is of this type.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some((Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)), 0).into())
        }
        libc::AF_INET6 => {
            // SAFETY: of this family it is of this type.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let scope = if ip.is_unicast_link_local() { v6.sin6_scope_id } else { 0 };
            Some(SocketAddrV6::new(ip, 0, 0, scope).into())
        }
        _ => None,
    }
}

/// Sends `signal` to the process group that `leader` leads. A group that is gone is no error.
pub(crate) fn signal_group(leader: u32, signal: i32) {
    // 1 would address every process there is.
    let leader = process(leader).filter(|leader| !leader.is_init());
    if let (Some(leader), Some(signal)) = (leader, Signal::from_named_raw(signal)) {
        let _ = kill_process_group(leader, signal);
    }
}

/// Whether the child `pid` has ended. It stays unreaped, so its process id and its group's cannot be given to another.
pub(crate) fn has_ended(pid: u32) -> io::Result<bool> {
    let pid = process(pid).ok_or(Errno::CHILD)?;
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::Pid(pid), options)?.is_some())
}

fn process(pid: u32) -> Option<Pid> {
    Pid::from_raw(pid.try_into().ok()?)
}

/// A loop over elements that the compiler can vectorise, for [`vectorised`]. `run` and all that it calls must be `#[inline(always)]`, or it is
/// compiled for the machine's least.
pub trait Kernel {
    /// What the loop finds.
    type Output;

    /// The loop.
    fn run(self) -> Self::Output;
}

/// Runs the kernel compiled for the widest vectors that this machine has. (On aarch64 the least has NEON already.)
///
/// Products and sums are never contracted to one operation, so a kernel whose order of additions is fixed has the same bits on every
/// machine.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub fn vectorised<K: Kernel>(kernel: K) -> K::Output {
    kernel.run()
}
