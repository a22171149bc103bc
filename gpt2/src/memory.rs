//! Memory of this process: what the kernel says, and what its parts take, by a global allocator that counts.
//!
//! A program asks to be counted with
//!
//! ```
//! #[global_allocator]
//! static ALLOCATOR: gpt2::memory::CountingAllocator = gpt2::memory::CountingAllocator;
//! # fn main() {}
//! ```
//!
//! and says what its allocations are for with [`scope`] or [`within`], thread by thread. All figures are of the whole process: ranks
//! that are threads of one process share them. Counted is what Rust code allocates on the heap, in bytes as asked for, while it is
//! allocated: memory of a device, memory of C libraries, mapped files, stacks of threads, and what the allocator itself needs are not.

mod copies;
mod ledger;
mod sys;

use std::marker::PhantomData;
use std::sync::OnceLock;

pub use copies::{Copies, copies};
pub(crate) use copies::{also_copied, copied, zeroed};
pub use ledger::{Allocations, Bytes, Category, Usage};
pub use sys::CountingAllocator;

use ledger::{LEDGER, THREAD, current, take_moving};

/// Memory by category, or `None` where the program was not built with [`CountingAllocator`] as its global allocator.
///
/// Peaks are exact under concurrency: they are taken from the sum that each allocation itself produced.
#[must_use]
pub fn usage() -> Option<Usage> {
    is_counted().then(|| LEDGER.usage())
}

/// What all threads of this process have asked for so far, or `None` where the program was not built with [`CountingAllocator`] as its global
/// allocator.
#[must_use]
pub fn allocations() -> Option<Allocations> {
    is_counted().then(|| LEDGER.allocations())
}

/// Makes the peaks what is allocated now. Allocations that other threads make and free while this call runs may count or not.
pub fn reset_peaks() {
    LEDGER.reset_peaks();
}

/// Charges what this thread allocates to `category` until the guard is dropped. Guards nest: drop them in the reverse order.
///
/// Work that is handed to other threads is charged to the categories of those.
pub fn scope(category: Category) -> Scope {
    Scope { before: THREAD.with(|thread| thread.scope.replace(Some(category))), stays_in_thread: PhantomData }
}

/// Runs `work` in [`scope`] of `category`.
pub fn within<T>(category: Category, work: impl FnOnce() -> T) -> T {
    let _scope = scope(category);
    work()
}

/// Charges what this thread allocates outside of any [`scope`] to `category`; without it, that is [`Category::Communication`].
pub fn set_thread_default(category: Category) {
    THREAD.with(|thread| thread.default.set(category));
}

/// Moves the memory of `buffer` to `category`, whoever allocated it; the elements stay where they are. Without [`CountingAllocator`] as the
/// global allocator nothing changes.
#[must_use = "the buffer comes back"]
pub fn recharge<T>(buffer: Vec<T>, category: Category) -> Vec<T> {
    THREAD.with(|thread| thread.moving.set(Some(category)));
    let buffer = sys::reallocate(buffer);
    THREAD.with(|thread| thread.moving.set(None));
    buffer
}

/// Keeps a category current in one thread; see [`scope`].
#[derive(Debug)]
#[must_use = "dropped at once, it does nothing"]
pub struct Scope {
    before: Option<Category>,
    // Dropped in another thread, it would change that one.
    stays_in_thread: PhantomData<*const ()>,
}

impl Drop for Scope {
    fn drop(&mut self) {
        THREAD.with(|thread| thread.scope.set(self.before));
    }
}

/// The most memory that this process has held, in bytes: `VmHWM` of `/proc/self/status`; 0 where there is none.
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.trim().parse().ok());
    kib.unwrap_or(0) * 1024
}

/// Whether [`CountingAllocator`] is this program's global allocator: only then does it see the request of [`recharge`].
fn is_counted() -> bool {
    static IS_COUNTED: OnceLock<bool> = OnceLock::new();
    *IS_COUNTED.get_or_init(|| {
        let probe = std::hint::black_box(vec![0_u8; 1]);
        THREAD.with(|thread| thread.moving.set(Some(current())));
        drop(sys::reallocate(probe));
        take_moving().is_none()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_process_holds_some_memory() {
        assert!(peak_rss_bytes() > 1 << 20);
    }

    #[test]
    fn without_the_allocator_there_are_no_figures() {
        assert_eq!((usage(), allocations()), (None, None));
        assert_eq!(recharge(vec![1_u64, 2, 3], Category::Gradients), [1, 2, 3]);
        assert_eq!(usage(), None);
    }
}
