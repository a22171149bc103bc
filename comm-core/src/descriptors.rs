//! How many file descriptors this process may have: looked at before connections are made, and said when there are none left.

use std::fs;
use std::io;

use rustix::io::Errno;

use crate::sys::{self, Limits};

/// For what comes and goes while ranks connect: look-ups, handshakes at a listener, files of the program.
const SPARE: usize = 8;

/// Whether this process may have the file descriptors for something: `needed` beside those that it has open. `count` says how many each
/// part of it takes.
///
/// # Errors
/// Why not: what is needed, what is allowed and what to do.
pub fn check(needed: usize, count: impl FnOnce() -> String) -> Result<(), String> {
    let limits = sys::descriptor_limits();
    let open = open();
    let in_all = (needed + SPARE + open) as u64;
    if in_all <= limits.soft {
        return Ok(());
    }
    Err(format!(
        "this rank needs {needed} file descriptors for this ({}), and {} for itself; {}",
        count(),
        open + SPARE,
        limits.advice(in_all)
    ))
}

/// Whether `error` says that this process, or the machine, has no file descriptors left.
pub fn ran_out(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// `error` in words. Where it says that there are no descriptors left, also how many are allowed and what to do.
pub fn explain(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => {
            let limits = sys::descriptor_limits();
            format!("{error}: {}", limits.advice(limits.soft.saturating_mul(2)))
        }
        Some(Errno::NFILE) => {
            format!("{error}: the machine has no file descriptors left; /proc/sys/fs/file-max is its limit")
        }
        _ => error.to_string(),
    }
}

/// The system's error, if this process cannot have one more.
pub fn exhausted() -> Option<io::Error> {
    fs::File::open("/dev/null").err().filter(ran_out)
}

/// For the end of an error's text: that nearly all descriptors are in use, which may be why something did not come about; else
/// empty.
pub fn shortage() -> String {
    let limits = sys::descriptor_limits();
    let open = open() as u64;
    if open + 2 < limits.soft {
        return String::new();
    }
    format!("; {open} file descriptors are open, and {}", limits.advice(limits.soft.saturating_mul(2)))
}

/// Descriptors that this process has; 0 where the system does not tell.
fn open() -> usize {
    // One of them is that of the directory.
    fs::read_dir("/proc/self/fd").map_or(0, |all| all.count().saturating_sub(1))
}

impl Limits {
    /// What is allowed, and what to do to get `wanted`.
    fn advice(self, wanted: u64) -> String {
        let Limits { soft, hard } = self;
        let allowed = format!("{soft} are allowed (`ulimit -n`; hard limit {hard})");
        if wanted <= hard {
            format!("{allowed}: raise it with `ulimit -n {wanted}`, or use fewer ranks or lanes")
        } else {
            format!(
                "{allowed}: have the hard limit raised to {wanted} (/etc/security/limits.conf, LimitNOFILE= of a service, --ulimit \
                 nofile= of a container), or use fewer ranks or lanes"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_let_through_and_what_does_not_is_said_with_what_to_do() {
        let limits = sys::descriptor_limits();
        assert!(limits.soft <= limits.hard);
        check(1, || unreachable!()).unwrap();
        let needed = usize::try_from(limits.soft.min(1 << 40)).unwrap();
        if needed == 1 << 40 {
            println!("skipped: this process has no limit");
            return;
        }
        let why = check(needed, || "2 for each".into()).unwrap_err();
        for part in [&format!("needs {needed} file descriptors"), "2 for each", "allowed"] {
            assert!(why.contains(part), "{part}: {why}");
        }
    }

    #[test]
    fn the_advice_is_what_this_user_can_do() {
        let limits = Limits { soft: 64, hard: 4096 };
        assert!(limits.advice(130).contains("`ulimit -n 130`"), "{}", limits.advice(130));
        let closed = Limits { soft: 64, hard: 64 }.advice(130);
        assert!(closed.contains("limits.conf") && closed.contains("hard limit 64"), "{closed}");
    }

    #[test]
    fn a_process_without_descriptors_says_so() {
        let error = io::Error::from(Errno::MFILE);
        assert!(ran_out(&error) && explain(&error).contains("ulimit -n"), "{}", explain(&error));
        let other = io::Error::from(Errno::CONNREFUSED);
        assert!(!ran_out(&other));
        assert_eq!(explain(&other), other.to_string());
    }
}
