//! System calls that the standard library does not offer, behind safe functions.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;

/// Takes the calling thread into a network namespace, for good.
///
/// # Errors
/// The kernel's.
pub(super) fn enter_network(namespace: &File) -> io::Result<()> {
    // SAFETY: setns takes two integers and touches no memory of this process.
    outcome(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) })
}

/// Opens the file through which TUN devices are made. What is opened never waits.
///
/// # Errors
/// The kernel's.
pub(super) fn open_tun() -> io::Result<File> {
    // An open file is not passed on to programs that are started (the standard library opens all with O_CLOEXEC).
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(super::TUN)
}

/// Makes a TUN device in the network namespace of the calling thread, which is there as long as what is returned: reading takes one IP
/// packet that was sent through it, writing hands one in as received. Never waits.
///
/// # Errors
/// The kernel's. The name has at most 15 bytes.
pub(super) fn make_tun(device: &str) -> io::Result<File> {
    let tun = open_tun()?;
    // SAFETY: an ifreq is plain old data, for which zeros are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // One byte less, so that a zero ends it.
    let room = request.ifr_name.len() - 1;
    if device.len() > room {
        return Err(io::Error::from_raw_os_error(libc::ENAMETOOLONG));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(device.bytes()) {
        *to = from as libc::c_char;
    }
    // IP packets without a header of the device's own; and it must not be there yet.
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short | IFF_TUN_EXCL;
    // SAFETY: TUNSETIFF reads and writes one ifreq through a pointer that is valid for it.
    outcome(unsafe { libc::ioctl(tun.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) })?;
    Ok(tun)
}

/// linux/if_tun.h
const IFF_TUN_EXCL: libc::c_short = 0x8000_u16 as libc::c_short;

/// Waits until one of `fds` is ready or `timeout_ns` have passed; whichever is ready says so in its `revents`.
///
/// # Errors
/// The kernel's. A signal is none.
pub(super) fn wait(fds: &mut [libc::pollfd], timeout_ns: Option<u64>) -> io::Result<()> {
    let timeout = timeout_ns.map(|ns| libc::timespec {
        tv_sec: libc::time_t::try_from(ns / 1_000_000_000).unwrap_or(libc::time_t::MAX),
        tv_nsec: (ns % 1_000_000_000) as libc::c_long,
    });
    let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: the first pointer is valid for as many pollfd as said; the second is null or points at the timespec above, which lives
    // until after the call; no signal mask is given. A number that is no open file makes an event, nothing worse.
    let status = unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout, ptr::null()) };
    match outcome(status) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => {
            fds.iter_mut().for_each(|fd| fd.revents = 0);
            Ok(())
        }
        other => other,
    }
}

/// Gets the calling thread a core as soon as it needs one, and has its timers end when they should, as far as this user may have that.
pub(super) fn hurry() {
    let first = libc::sched_param { sched_priority: 1 };
    // SAFETY: sched_setscheduler reads one sched_param through a pointer that is valid for it; the other two calls take integers. Each
    // concerns the calling thread alone. What is refused stays as it was, which is no error here.
    unsafe {
        if libc::sched_setscheduler(0, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, &raw const first) != 0 {
            libc::setpriority(libc::PRIO_PROCESS, 0, -20);
        }
        libc::prctl(libc::PR_SET_TIMERSLACK, 1 as libc::c_ulong);
    }
}

fn outcome(status: libc::c_int) -> io::Result<()> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::time::Instant;

    use super::*;

    #[test]
    fn waits_end_in_time_and_say_who_is_ready() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut fds = [libc::pollfd { fd: reader.as_raw_fd(), events: libc::POLLIN, revents: 0 }];
        let began = Instant::now();
        wait(&mut fds, Some(3_000_000)).unwrap();
        assert!(began.elapsed().as_nanos() >= 3_000_000);
        assert_eq!(fds[0].revents, 0);
        writer.write_all(b"x").unwrap();
        wait(&mut fds, None).unwrap();
        assert_eq!(fds[0].revents, libc::POLLIN);
    }

    #[test]
    fn a_long_name_is_refused() {
        match make_tun("sixteen-letters-") {
            Ok(_) => panic!("it was cut"),
            Err(error) => assert!(
                error.raw_os_error() == Some(libc::ENAMETOOLONG)
                    || !std::fs::exists("/dev/net/tun").unwrap()
                    || error.kind() == io::ErrorKind::PermissionDenied
            ),
        }
    }
}
