//! Looks for numbers that are none in what a rank contributes.

use std::ops::Range;

use half::{bf16, f16};

use crate::buffer::{Element, View};
use crate::dtype::DType;
use crate::op::Extents;

/// The first NaN or infinity of a contribution.
pub(super) struct NotFinite {
    /// In elements of the buffer that was passed.
    pub(super) index: usize,
    pub(super) value: String,
    pub(super) count: usize,
}

/// Looks at what this rank contributes, which lies in `contribution`.
pub(super) fn find(extents: &Extents, contribution: View<'_>) -> Option<NotFinite> {
    let (bytes, part) = (contribution.bytes(), extents.reads.clone());
    match extents.dtype {
        DType::F32 => scan(bytes, part, |value: f32| !value.is_finite()),
        DType::F64 => scan(bytes, part, |value: f64| !value.is_finite()),
        DType::F16 => scan(bytes, part, |value: f16| !value.is_finite()),
        DType::Bf16 => scan(bytes, part, |value: bf16| !value.is_finite()),
        DType::I8 | DType::I16 | DType::I32 | DType::I64 | DType::U8 | DType::U16 | DType::U32 | DType::U64 => None,
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
