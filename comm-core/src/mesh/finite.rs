//! Looks for numbers that are none in what a rank contributes.

use std::ops::Range;

use half::{bf16, f16};

use super::Io;
use crate::buffer::View;
use crate::dtype::{DType, Element};
use crate::op::{Counts, Op, shard_range};

/// The first NaN or infinity of a contribution.
pub(super) struct NotFinite {
    /// In elements of the buffer that was passed.
    pub(super) index: usize,
    pub(super) value: String,
    pub(super) count: usize,
}

/// Looks at what `rank` of `ranks` contributes to `op`.
pub(super) fn find(op: &Op, rank: usize, ranks: usize, io: &Io<'_>) -> Option<NotFinite> {
    let buffer = View::from(&io.buffer);
    if !buffer.dtype().is_float() {
        return None;
    }
    let all = |view: View<'_>| 0..view.count();
    let (view, part) = match (io.input, *op) {
        (_, Op::Barrier | Op::Recv { .. }) => return None,
        (_, Op::Broadcast { root } | Op::Scatter { root, .. }) if root != rank => return None,
        (Some(input), _) => (input, all(input)),
        // The buffer is as long as the longer of what is sent and what is received.
        (None, Op::AllToAll) if let Some(counts) = io.counts => (buffer, 0..counts.send().iter().sum()),
        (None, Op::AllGather) => (buffer, shard(io.counts, buffer.count(), ranks, rank)),
        (None, Op::Gather { root, total }) if root == rank => (buffer, shard(io.counts, total, ranks, rank)),
        (None, _) => (buffer, all(buffer)),
    };
    match view.dtype() {
        DType::F32 => scan(view.bytes(), part, |value: f32| !value.is_finite()),
        DType::F64 => scan(view.bytes(), part, |value: f64| !value.is_finite()),
        DType::F16 => scan(view.bytes(), part, |value: f16| !value.is_finite()),
        DType::Bf16 => scan(view.bytes(), part, |value: bf16| !value.is_finite()),
        _ => None,
    }
}

fn shard(counts: Option<&Counts>, whole: usize, ranks: usize, rank: usize) -> Range<usize> {
    match counts.map(Counts::send) {
        None => shard_range(whole, ranks, rank),
        Some(counts) => {
            let start: usize = counts.iter().take(rank).sum();
            start..start + counts.get(rank).copied().unwrap_or(0)
        }
    }
}

/// Elements that are looked at together.
const CHUNK: usize = 1024;

fn scan<T: Element + std::fmt::Display>(
    bytes: &[u8],
    part: Range<usize>,
    is_bad: impl Fn(T) -> bool,
) -> Option<NotFinite> {
    let size = size_of::<T>();
    let mine = bytes.get(part.start * size..part.end * size)?;
    let element = |bytes: &[u8]| bytemuck::pod_read_unaligned::<T>(bytes);
    // Without a branch for every element, so that the compiler makes use of wide registers.
    let has_bad = |chunk: &[u8]| chunk.chunks_exact(size).fold(false, |any, bytes| any | is_bad(element(bytes)));
    let chunk = mine.chunks(CHUNK * size).position(has_bad)? * CHUNK;
    let first = chunk + mine.get(chunk * size..)?.chunks_exact(size).position(|bytes| is_bad(element(bytes)))?;
    let bad = mine.chunks_exact(size).skip(first).filter(|bytes| is_bad(element(bytes))).count();
    let value = mine.get(first * size..(first + 1) * size).map(|bytes| element(bytes).to_string());
    Some(NotFinite { index: part.start + first, value: value.unwrap_or_default(), count: bad })
}
