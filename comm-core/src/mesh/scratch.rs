//! Memory that an operation needs for a moment, kept from one to the next: fresh pages cost more than copying into them.

/// One lane's scratch memory.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// Of eight-byte words, so that it is aligned for every element type.
    words: Vec<u64>,
}

/// More is given back after an operation: where so much is copied, fresh pages matter less than the memory.
const KEPT: usize = 256 << 20;

impl Scratch {
    /// Gives back what is too much to keep.
    pub(super) fn tidy(&mut self) {
        if self.words.len() * size_of::<u64>() > KEPT {
            self.words = Vec::new();
        }
    }

    /// `bytes` bytes of rubbish, aligned for every element type.
    pub(super) fn bytes(&mut self, bytes: usize) -> &mut [u8] {
        let words = bytes.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            // Not grown by copying: nothing of what is there is needed.
            self.words = Vec::new();
            self.words = vec![0; words];
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
