//! The allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::mem::ManuallyDrop;

use super::ledger::{Category, LEDGER, current, take_moving};

/// The allocator that counts: the system's, with each block charged to the [`Category`] that is current in the thread that
/// allocates it, and credited to that same category when it is freed, by whatever thread.
///
/// A block that grows or shrinks stays in its category. Each block takes 16 bytes more than asked for (its alignment, where that is
/// larger), which hold the category; zeroed memory and growth are still the system's own, so that pages come when they are touched.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

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
/// `block` comes from [`CountingAllocator`] and is not freed, and no other thread uses its header.
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
    let category = current();
    // SAFETY: the block is longer than its header, and nobody else has it yet.
    let block = unsafe { outer.add(header(layout)) };
    // SAFETY: as above.
    unsafe { write_category(block, category) };
    LEDGER.charge(category, layout.size());
    LEDGER.request(layout.size());
    block
}

// SAFETY: every block is the tail of one of the system's, which is fresh, long enough and aligned: its header is as long as its own
// alignment, which is at least the block's. Blocks are given back to the system by the same start and layout. Nothing here
// allocates or panics: the thread-local values are constants without destructors, and the counters are atomic integers.
unsafe impl GlobalAlloc for CountingAllocator {
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
            // How `recharge` reaches the header: by the allocator's own interface.
            if let Some(to) = take_moving() {
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
            LEDGER.request(new_size);
        } else {
            LEDGER.credit(category, layout.size() - new_size);
        }
        // SAFETY: the new block is longer than its header.
        unsafe { outer.add(header) }
    }
}

/// Asks the global allocator for as much memory for `buffer` as it has, which changes nothing, except where [`recharge`] has
/// told [`CountingAllocator`] to move it to another category.
pub(super) fn reallocate<T>(buffer: Vec<T>) -> Vec<T> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_keeps_alignment_and_refuses_what_is_too_long() {
        for align in [1, 2, 8, 16, 64, 4096] {
            let outer = with_header(Layout::from_size_align(5, align).unwrap()).unwrap();
            assert_eq!(outer.align(), align.max(HEADER));
            assert_eq!(outer.size(), 5 + outer.align());
        }
        assert_eq!(with_header(Layout::from_size_align(isize::MAX as usize - 8, 8).unwrap()), None);
    }
}
