//! Memory that an operation needs for a moment, kept from one to the next: fresh pages cost more than copying into them.

use crate::huge_pages::prefer_huge_pages;

/// One lane's scratch memory.
#[derive(Debug, Default)]
pub struct Scratch {
    /// For what comes, and copies of what goes.
    inbox: ScratchBuffer,
    /// For a contribution that is changed while both it and the inbox are needed.
    copy: ScratchBuffer,
}

/// Memory that grows to what operations need, and is given back when they need much less.
#[derive(Debug, Default)]
pub(super) struct ScratchBuffer {
    /// Of eight-byte words, so that it is aligned for every element type.
    words: Vec<u64>,
    /// How many of them the current operation uses.
    used: usize,
    /// Operations since more than half of it was used.
    unused_for: usize,
}

/// Bytes that are kept in any case.
const KEPT: usize = 256 << 20;

/// A larger one is given back after so many operations in a row that had no use for half of it.
const MAX_UNUSED: usize = 16;

impl Scratch {
    /// Ends an operation: gives back what has not been needed for some time.
    pub(super) fn tidy(&mut self) {
        self.inbox.tidy();
        self.copy.tidy();
    }

    /// The memory of an operation that needs one.
    pub(super) fn inbox(&mut self) -> &mut ScratchBuffer {
        &mut self.inbox
    }

    /// A copy of `bytes`, and memory beside it.
    pub(super) fn copy_and_inbox(&mut self, bytes: &[u8]) -> (&mut [u8], &mut ScratchBuffer) {
        (self.copy.copy_of(bytes), &mut self.inbox)
    }
}

impl ScratchBuffer {
    fn tidy(&mut self) {
        let used = std::mem::take(&mut self.used);
        if self.words.len() * size_of::<u64>() <= KEPT || used > self.words.len() / 2 {
            self.unused_for = 0;
            return;
        }
        self.unused_for += 1;
        if self.unused_for >= MAX_UNUSED {
            *self = ScratchBuffer::default();
        }
    }

    /// `bytes` bytes of rubbish, aligned for every element type.
    pub(super) fn bytes(&mut self, bytes: usize) -> &mut [u8] {
        let words = bytes.div_ceil(size_of::<u64>());
        self.used = self.used.max(words);
        if self.words.len() < words {
            // Not grown by copying: nothing of what is there is needed.
            self.words = Vec::new();
            self.words = vec![0; words];
            prefer_huge_pages(&mut self.words);
        }
        &mut bytemuck::cast_slice_mut(&mut self.words)[..bytes]
    }

    /// A copy of `bytes`.
    pub(super) fn copy_of(&mut self, bytes: &[u8]) -> &mut [u8] {
        let copy = self.bytes(bytes.len());
        crate::copy(copy, bytes);
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that are held after operations that use so many.
    fn held_after(uses: &[usize]) -> usize {
        let mut scratch = Scratch::default();
        for bytes in uses {
            // Never written, so that the test takes no memory.
            let _ = scratch.inbox().bytes(*bytes);
            scratch.tidy();
        }
        scratch.inbox.words.len() * size_of::<u64>()
    }

    #[test]
    fn what_is_used_again_and_again_is_kept_whatever_its_size() {
        assert_eq!(held_after(&[2 * KEPT, 2 * KEPT]), 2 * KEPT);
        // As a training step has it: one large operation among small ones.
        let step = [&[2 * KEPT][..], &[0; MAX_UNUSED - 1]].concat();
        assert_eq!(held_after(&step.repeat(3)), 2 * KEPT);
    }

    #[test]
    fn what_is_not_used_any_more_is_given_back() {
        assert_eq!(held_after(&[&[2 * KEPT][..], &[KEPT; MAX_UNUSED - 1]].concat()), 2 * KEPT);
        assert_eq!(held_after(&[&[2 * KEPT][..], &[KEPT; MAX_UNUSED]].concat()), 0);
        // Little is kept for good.
        assert_eq!(held_after(&[&[KEPT][..], &[0; 2 * MAX_UNUSED]].concat()), KEPT);
    }

    #[test]
    fn a_copy_lies_beside_the_inbox() {
        let mut scratch = Scratch::default();
        let (copy, inbox) = scratch.copy_and_inbox(&[1, 2, 3]);
        inbox.bytes(100).fill(9);
        assert_eq!(copy, [1, 2, 3]);
    }
}
