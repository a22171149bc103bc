//! How one rank's gradients are written in fewer bytes, by themselves.

use std::fmt;

use comm_core::Error;
use rayon::prelude::*;

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

/// Whether `bytes` of rank `from` are as many as `encoding` takes for `count` numbers.
///
/// # Errors
/// `Protocol` where they are not.
pub(super) fn check_length(encoding: &dyn Encoding, bytes: &[u8], count: usize, from: usize) -> comm_core::Result<()> {
    if bytes.len() == encoding.bytes(count) {
        return Ok(());
    }
    Err(Error::Protocol {
        who: format!("rank {from}"),
        what: format!("{} bytes for a bucket of {count} gradients, which takes {}", bytes.len(), encoding.bytes(count)),
    })
}

/// Does `each` to every block of `block` numbers and its `len` bytes: in parallel in the pool of threads of the caller. A thread of no pool does
/// it alone, since rayon would start a thread on every core for it.
pub(super) fn each_block(
    sums: &mut [f32],
    block: usize,
    bytes: &[u8],
    len: usize,
    each: impl Fn(&mut [f32], &[u8]) + Sync,
) {
    if rayon::current_thread_index().is_some() {
        sums.par_chunks_mut(block).zip(bytes.par_chunks(len)).for_each(|(sums, bytes)| each(sums, bytes));
    } else {
        sums.chunks_mut(block).zip(bytes.chunks(len)).for_each(|(sums, bytes)| each(sums, bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Compression;

    #[test]
    fn bytes_of_another_length_are_refused() {
        for compress in [Compression::Int8, Compression::Sign, Compression::TopK { fraction: 0.1 }] {
            let encoding = compress.encoding().unwrap();
            for count in [1, 256, 300] {
                let right = encoding.bytes(count);
                for wrong in [0, right - 1, right + 1, 2 * right] {
                    let said = encoding.add(&vec![0; wrong], &mut vec![0.0; count], 2).unwrap_err().to_string();
                    assert!(said.contains("rank 2") && said.contains(&format!("{wrong} bytes")), "{compress}: {said}");
                }
                encoding.add(&vec![0; right], &mut vec![0.0; count], 2).unwrap();
            }
        }
    }
}
