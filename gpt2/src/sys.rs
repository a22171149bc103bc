//! The one place of this crate with `unsafe`: settings of the C library's allocator, and files mapped into memory.

use std::{fs::File, io, path::Path};

use memmap2::Mmap;

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
        let large_blocks = set(libc::M_MMAP_THRESHOLD, GIB) || set(libc::M_MMAP_THRESHOLD, 32 << 20);
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

/// Whether the loader finds a library under any of these names.
#[cfg(feature = "cuda")]
pub fn has_library(names: &[&str]) -> bool {
    names.iter().any(|name| {
        // SAFETY: loading runs the library's initialisers. The names are those of device drivers, whose initialisers touch nothing of
        // this program and are made to be loaded at any time.
        unsafe { libloading::Library::new(name) }.is_ok()
    })
}

/// A file mapped read-only into memory. Its pages are read as they are touched, so a shard larger than memory costs
/// nothing to open.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps the whole of `path`.
    ///
    /// The file must not be cut short while it is mapped: the kernel answers a read past its new end with `SIGBUS`.
    ///
    /// # Errors
    /// The operating system's error where the file cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the mapping is read-only and owned by `Mmap`, which outlives every slice lent by `bytes`. The one
        // thing that the type system cannot hold is that no other process rewrites the file meanwhile; readers
        // therefore copy values out, accept every bit pattern (`u8`), and check each token id after the copy, so
        // nothing in memory safety rests on the contents.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map })
    }

    /// The contents of the file, as long as it was when it was mapped.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn glibc_takes_every_setting() {
        assert!(super::keep_freed_pages());
    }

    #[test]
    fn a_mapped_file_shows_the_bytes_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes.bin");
        std::fs::write(&path, [1_u8, 2, 3]).unwrap();
        assert_eq!(super::MappedFile::open(&path).unwrap().bytes(), [1, 2, 3]);
        let missing = super::MappedFile::open(&folder.path().join("missing.bin")).unwrap_err();
        assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    }
}
