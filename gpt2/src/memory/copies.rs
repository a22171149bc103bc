//! What is copied and filled with zeros on the way of gradients and parameters.

use std::cell::Cell;

use serde::{Deserialize, Serialize};

/// Bytes of gradients and parameters in host memory that were written without being computed, between the backward pass, the communicator, the
/// optimizer and the model; differences of two are what happened between them. What a transport copies, and what a device does in its own
/// memory, is not in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// Copied from one place to another, or rounded on the way.
    pub copied: u64,
    /// Filled with zeros, to be overwritten.
    pub zeroed: u64,
}

impl Copies {
    /// What came after `earlier`.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Self {
        Copies { copied: self.copied - earlier.copied, zeroed: self.zeroed - earlier.zeroed }
    }
}

thread_local! {
    static COPIES: Cell<Copies> = const { Cell::new(Copies { copied: 0, zeroed: 0 }) };
}

/// What this thread has copied and filled with zeros so far, a rank's training thread with what was done beside it.
#[must_use]
pub fn copies() -> Copies {
    COPIES.get()
}

/// Counts elements of type `T` that this thread copies.
pub(crate) fn copied<T>(elements: usize) {
    let so_far = COPIES.get();
    COPIES.set(Copies { copied: so_far.copied + (elements * size_of::<T>()) as u64, ..so_far });
}

/// Counts as this thread's what another has copied and filled with zeros for it.
pub(crate) fn also_copied(copies: Copies) {
    let so_far = COPIES.get();
    COPIES.set(Copies { copied: so_far.copied + copies.copied, zeroed: so_far.zeroed + copies.zeroed });
}

/// Counts elements of type `T` that this thread fills with zeros.
pub(crate) fn zeroed<T>(elements: usize) {
    let so_far = COPIES.get();
    COPIES.set(Copies { zeroed: so_far.zeroed + (elements * size_of::<T>()) as u64, ..so_far });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_counts_its_own() {
        let before = copies();
        copied::<f32>(3);
        zeroed::<u16>(5);
        std::thread::scope(|scope| scope.spawn(|| copied::<f64>(7)).join().unwrap());
        assert_eq!(copies().since(before), Copies { copied: 12, zeroed: 10 });
    }
}
