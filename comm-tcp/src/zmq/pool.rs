//! Buffers for segments, used again: fresh memory costs more than the copy into it.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// Unused bytes before the content of every buffer. `zeromq` copies a message to nine bytes behind the start of an allocation. On
/// AMD processors since Zen 3 that copy runs at a twentieth of its speed if the source lies at the start of one, too: see
/// [`comm_core::copy`].
const OFFSET: usize = 2 << 10;

/// Buffers of one transport, handed out as [`Bytes`] and taken back when the last of those is dropped.
#[derive(Clone)]
pub(crate) struct Pool {
    free_list: Arc<FreeList>,
}

struct FreeList {
    buffers: Mutex<Vec<Vec<u8>>>,
    capacity: usize,
    keep: usize,
}

impl Pool {
    /// A pool of buffers of `capacity` bytes that keeps at most `keep` of them.
    pub(crate) fn new(capacity: usize, keep: usize) -> Self {
        Pool { free_list: Arc::new(FreeList { buffers: Mutex::new(Vec::new()), capacity, keep }) }
    }

    /// What `write` appends to a buffer.
    pub(crate) fn fill(&self, write: impl FnOnce(&mut Vec<u8>)) -> Bytes {
        let kept = self.free_list.buffers.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffer = kept.unwrap_or_else(|| {
            let mut buffer = Vec::with_capacity(OFFSET + self.free_list.capacity);
            buffer.resize(OFFSET, 0);
            buffer
        });
        // What is before the content of one that is used again stays.
        buffer.truncate(OFFSET);
        write(&mut buffer);
        Bytes::from_owner(PooledBuffer { buffer, free_list: self.free_list.clone() })
    }
}

struct PooledBuffer {
    buffer: Vec<u8>,
    free_list: Arc<FreeList>,
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        self.buffer.get(OFFSET..).unwrap_or_default()
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut buffers = self.free_list.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        if buffers.len() < self.free_list.keep {
            buffers.push(std::mem::take(&mut self.buffer));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back() {
        let pool = Pool::new(64, 1);
        let (first, second) = (pool.fill(|b| b.push(1)), pool.fill(|b| b.push(2)));
        let address = first.as_ptr();
        drop(first);
        drop(second);
        assert_eq!(pool.free_list.buffers.lock().unwrap().len(), 1);
        let again = pool.fill(|b| b.extend_from_slice(b"xyz"));
        assert_eq!((again.as_ptr(), &again[..]), (address, &b"xyz"[..]));
    }
}
