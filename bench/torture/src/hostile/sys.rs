//! System calls that the standard library does not offer.

use std::io;

/// As many descriptors as the hard limit allows, until this is dropped: processes started before and after have the usual ones.
pub(super) struct ManyDescriptors {
    /// How many there may be now.
    pub(super) limit: u64,
    before: libc::rlimit,
}

impl ManyDescriptors {
    /// # Errors
    /// The kernel's.
    pub(super) fn allow() -> io::Result<Self> {
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the call writes one rlimit through a pointer that is valid for it.
        if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut before) } != 0 {
            return Err(io::Error::last_os_error());
        }
        set(libc::rlimit { rlim_cur: before.rlim_max, ..before })?;
        Ok(ManyDescriptors { limit: before.rlim_max, before })
    }
}

impl Drop for ManyDescriptors {
    fn drop(&mut self) {
        // Lowering one's own limit is always allowed.
        let _ = set(self.before);
    }
}

fn set(limit: libc::rlimit) -> io::Result<()> {
    // SAFETY: the call reads one rlimit through a pointer that is valid for it.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_a_number_of_descriptors() {
        assert!(ManyDescriptors::allow().unwrap().limit >= 3);
    }
}
