//! How one rank's gradients are written in fewer bytes, by themselves.

use std::fmt;

/// Numbers in fewer bytes. What is sent and what is left are together the numbers.
pub(in crate::strategy) trait Encoding: fmt::Debug + Send + Sync {
    /// Bytes of so many numbers.
    fn bytes(&self, count: usize) -> usize;

    /// Writes what is sent of `values` to `out`, which has [`bytes`](Encoding::bytes) of them, and replaces them by what is left.
    fn encode(&self, values: &mut [f32], out: &mut [u8]);

    /// Adds what `bytes` say, which rank `from` has encoded, to `sums`.
    ///
    /// # Errors
    /// `Protocol` for bytes that no rank encodes.
    fn add(&self, bytes: &[u8], sums: &mut [f32], from: usize) -> comm_core::Result<()>;
}
