//! The one place of this crate with `unsafe`: settings of the C library's allocator.

/// Tells glibc's allocator to keep freed memory instead of handing it back to the kernel, and to serve large blocks and all threads
/// from the one growing heap. A training step frees and allocates the same hundreds of megabytes again and again; touching
/// fresh pages costs several times the memory's bandwidth.
///
/// Call once at the start of a program, before other threads run. Returns whether every setting was taken; elsewhere than on glibc it
/// does nothing and returns false.
pub fn keep_freed_pages() -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const GIB: libc::c_int = 1 << 30;
        let set = |parameter: libc::c_int, value: libc::c_int| {
            // SAFETY: mallopt takes two plain integers, checks them itself and locks the allocator; it reads and writes no memory of
            // ours.
            unsafe { libc::mallopt(parameter, value) == 1 }
        };
        // Older versions of glibc accept at most 32 MiB as the threshold.
        let large_blocks =
            set(libc::M_MMAP_THRESHOLD, GIB) || set(libc::M_MMAP_THRESHOLD, 32 << 20);
        let keep = set(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        let grow = set(libc::M_TOP_PAD, 64 << 20);
        // Heaps of other threads end at 64 MiB and fall back to fresh mappings beyond.
        let one_heap = set(libc::M_ARENA_MAX, 1);
        large_blocks && keep && grow && one_heap
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    {
        false
    }
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn glibc_takes_every_setting() {
        assert!(super::keep_freed_pages());
    }
}
