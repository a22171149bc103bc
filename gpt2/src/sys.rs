//! The one place of this crate with `unsafe`: the allocator that counts and settings of the C library's, processor time, what the CUDA
//! driver says, and files mapped into memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::time::Duration;

use memmap2::Mmap;

use crate::memory::{self, Category, Counting, LEDGER};

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

/// Nanoseconds of the machine's monotonic clock, which all its processes share; 0 where there is no such clock.
pub(crate) fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec of ours, which outlives the call.
    if unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) } != 0 {
        return 0;
    }
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// Room in front of a block for its category. What the system's allocator aligns to by itself, so that it still serves the longer block
/// by `malloc`, `calloc` and `realloc`, which know fresh pages and move them without touching them.
const HEADER: usize = 2 * size_of::<usize>();

/// The block that the system is asked for in place of `layout`: with a header in front as long as the alignment, so that what follows
/// is aligned too. `None` where it would be longer than any block can be.
fn with_header(layout: Layout) -> Option<Layout> {
    let header = header(layout);
    Layout::from_size_align(layout.size().checked_add(header)?, header).ok()
}

fn header(layout: Layout) -> usize {
    layout.align().max(HEADER)
}

/// Writes `category` in front of a block.
///
/// # Safety
/// `block` comes from [`Counting`] and is not freed, and no other thread uses its header.
unsafe fn write_category(block: *mut u8, category: Category) {
    // SAFETY: each block has at least HEADER bytes of its own allocation in front.
    unsafe { block.sub(HEADER).write(category.code()) }
}

/// The category that a block is charged to.
///
/// # Safety
/// As for [`write_category`].
unsafe fn read_category(block: *mut u8) -> Category {
    // SAFETY: as above, and the byte was written when the block was allocated.
    Category::of_code(unsafe { block.sub(HEADER).read() })
}

/// Charges what the system allocated and returns the block after its header; null stays null.
///
/// # Safety
/// `outer` is null or a fresh block of `with_header(layout)`.
unsafe fn charged(outer: *mut u8, layout: Layout) -> *mut u8 {
    if outer.is_null() {
        return outer;
    }
    let category = memory::current();
    // SAFETY: the block is longer than its header, and nobody else has it yet.
    let block = unsafe { outer.add(header(layout)) };
    // SAFETY: as above.
    unsafe { write_category(block, category) };
    LEDGER.charge(category, layout.size());
    block
}

// SAFETY: every block is the tail of one of the system's, which is fresh, long enough and aligned: its header is as long as its own
// alignment, which is at least the block's. Blocks are given back to the system by the same start and layout. Nothing here
// allocates or panics: the thread-local values are constants without destructors, and the counters are atomic integers.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some(outer) = with_header(layout) else { return std::ptr::null_mut() };
        // SAFETY: the size is not zero, since the header's is not; the result is for this layout.
        unsafe { charged(System.alloc(outer), layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some(outer) = with_header(layout) else { return std::ptr::null_mut() };
        // SAFETY: as in `alloc`; writing the header leaves the block itself zeroed.
        unsafe { charged(System.alloc_zeroed(outer), layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller owns the block, which came from here.
        let category = unsafe { read_category(block) };
        LEDGER.credit(category, layout.size());
        let header = header(layout);
        // SAFETY: `with_header` accepted this very layout when the block was allocated, and it began one header earlier.
        unsafe {
            let outer = Layout::from_size_align_unchecked(layout.size() + header, header);
            System.dealloc(block.sub(header), outer);
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller owns the block, which came from here.
        let category = unsafe { read_category(block) };
        if new_size == layout.size() {
            // How `memory::recharge` reaches the header: by the allocator's own interface.
            if let Some(to) = memory::take_moving() {
                LEDGER.transfer(category, to, new_size);
                // SAFETY: as above.
                unsafe { write_category(block, to) };
            }
            return block;
        }
        let header = header(layout);
        let Some(new) = Layout::from_size_align(new_size, layout.align()).ok().and_then(with_header) else {
            return std::ptr::null_mut();
        };
        // SAFETY: as in `dealloc`; the new size is not zero and not too large, which was just checked.
        let outer = unsafe {
            let old = Layout::from_size_align_unchecked(layout.size() + header, header);
            System.realloc(block.sub(header), old, new.size())
        };
        if outer.is_null() {
            return outer;
        }
        // The header came along with the contents.
        if new_size > layout.size() {
            LEDGER.charge(category, new_size - layout.size());
        } else {
            LEDGER.credit(category, layout.size() - new_size);
        }
        // SAFETY: the new block is longer than its header.
        unsafe { outer.add(header) }
    }
}

/// Asks the global allocator for as much memory for `buffer` as it has, which changes nothing, except where [`memory::recharge`] has
/// told [`Counting`] to move it to another category.
pub(crate) fn reallocate<T>(buffer: Vec<T>) -> Vec<T> {
    let mut buffer = ManuallyDrop::new(buffer);
    let (start, length, capacity) = (buffer.as_mut_ptr(), buffer.len(), buffer.capacity());
    if let Ok(layout) = Layout::array::<T>(capacity)
        && layout.size() > 0
    {
        // SAFETY: a vector with room got it from the global allocator with this layout, and the size is not zero.
        let moved = unsafe { std::alloc::realloc(start.cast(), layout, layout.size()) };
        if !moved.is_null() {
            // SAFETY: the new block has the same layout and contents, the old one is gone, and the old vector is never dropped.
            return unsafe { Vec::from_raw_parts(moved.cast(), length, capacity) };
        }
    }
    ManuallyDrop::into_inner(buffer)
}

/// Processor time that all threads of this process have used, in user and in kernel mode; zero where the system does not say.
pub fn processor_time() -> Duration {
    #[cfg(unix)]
    {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: getrusage writes one `rusage` to a valid pointer and reads nothing.
        if unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } != 0 {
            return Duration::ZERO;
        }
        // SAFETY: plain integers, all of which are set.
        let usage = unsafe { usage.assume_init() };
        let duration = |time: libc::timeval| {
            let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
            Duration::from_secs(seconds) + Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
        };
        duration(usage.ru_utime) + duration(usage.ru_stime)
    }
    #[cfg(not(unix))]
    {
        Duration::ZERO
    }
}

/// The UUID of a CUDA device as NVML writes it (`GPU-…`), by the ordinal that CUDA gives it in this process.
///
/// # Errors
/// What the driver lacks or answers.
#[cfg(feature = "cuda")]
pub fn cuda_device_uuid(ordinal: i32) -> Result<String, String> {
    type Init = unsafe extern "C" fn(u32) -> i32;
    type DeviceOf = unsafe extern "C" fn(*mut i32, i32) -> i32;
    type Uuid = unsafe extern "C" fn(*mut [u8; 16], i32) -> i32;
    let check =
        |what: &str, code: i32| (code == 0).then_some(()).ok_or(format!("{what} answers with CUDA error {code}"));
    // SAFETY: as in `has_library`.
    let driver = unsafe { libloading::Library::new("libcuda.so.1") }.map_err(|error| error.to_string())?;
    let mut device = 0;
    let mut uuid = [0_u8; 16];
    // SAFETY: the types are those of cuda.h (`CUdevice` is an int, `CUuuid` 16 bytes), and the pointers are to values of ours that
    // live through the calls. cuInit may be called any number of times, from any thread.
    unsafe {
        let init = driver.get::<Init>(b"cuInit\0").map_err(|error| error.to_string())?;
        check("cuInit", init(0))?;
        let device_of = driver.get::<DeviceOf>(b"cuDeviceGet\0").map_err(|error| error.to_string())?;
        check("cuDeviceGet", device_of(&raw mut device, ordinal))?;
        // The second version also knows the slices of a divided GPU.
        let uuid_of = driver
            .get::<Uuid>(b"cuDeviceGetUuid_v2\0")
            .or_else(|_| driver.get::<Uuid>(b"cuDeviceGetUuid\0"))
            .map_err(|error| error.to_string())?;
        check("cuDeviceGetUuid", uuid_of(&raw mut uuid, device))?;
    }
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    Ok(format!("GPU-{a}-{b}-{c}-{d}-{e}"))
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
    use super::*;

    #[test]
    #[cfg(unix)]
    fn processor_time_grows_with_work() {
        let before = processor_time();
        let start = std::time::Instant::now();
        while processor_time() - before < Duration::from_millis(20) {
            assert!(start.elapsed() < Duration::from_secs(20), "20 ms of work count for nothing");
            std::hint::black_box((0..1000_u64).sum::<u64>());
        }
    }

    #[test]
    fn a_header_keeps_alignment_and_refuses_what_is_too_long() {
        for align in [1, 2, 8, 16, 64, 4096] {
            let outer = with_header(Layout::from_size_align(5, align).unwrap()).unwrap();
            assert_eq!(outer.align(), align.max(HEADER));
            assert_eq!(outer.size(), 5 + outer.align());
        }
        assert_eq!(with_header(Layout::from_size_align(isize::MAX as usize - 8, 8).unwrap()), None);
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn glibc_takes_every_setting() {
        assert!(keep_freed_pages());
    }

    #[test]
    fn a_mapped_file_shows_the_bytes_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes.bin");
        std::fs::write(&path, [1_u8, 2, 3]).unwrap();
        assert_eq!(MappedFile::open(&path).unwrap().bytes(), [1, 2, 3]);
        let missing = MappedFile::open(&folder.path().join("missing.bin")).unwrap_err();
        assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    }
}
