//! An allocator that knows how much this thread holds.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread has allocated and not freed, and the most that these ever were since the last look. What one thread
    /// allocates and another frees makes the first negative.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

/// The system's allocator, counting for each thread. A test program installs it with `#[global_allocator]`.
#[derive(Debug)]
pub struct CountingAllocator;

/// The most bytes that this thread held at a time while `work` ran, beyond what it held before; 0 if another allocator is installed.
pub fn peak_of<R>(work: impl FnOnce() -> R) -> (R, usize) {
    let before = HELD.get().0;
    HELD.set((before, before));
    let result = work();
    let (_, most) = HELD.get();
    (result, usize::try_from(most - before).unwrap_or(0))
}

fn note(change: isize) {
    // An error means that the thread is ending, and that nobody will ask.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + change, most.max(now + change)));
    });
}

// SAFETY: every method hands on to the system's allocator what it got, and returns what that gave. Counting touches a thread-local
// cell that needs neither initialization nor destruction, so it does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: the caller keeps to the contract of `alloc`, which is the same there.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        note(-(layout.size() as isize));
        // SAFETY: the block came from `System` with this layout.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: as for `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both may be there for a moment.
        note(new_size as isize);
        note(-(layout.size() as isize));
        // SAFETY: the block came from `System` with this layout, and the caller keeps to the contract of `realloc`.
        unsafe { System.realloc(block, layout, new_size) }
    }
}
