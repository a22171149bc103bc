//! How the whole of an operation lies in its shards, and how a shard is cut into pieces.

use std::ops::Range;

use crate::dtype::DType;
use crate::op::Shards;

/// How a whole lies in its shards.
#[derive(Clone, Copy)]
pub(super) struct Layout<'a> {
    pub(super) dtype: DType,
    pub(super) ranks: usize,
    pub(super) shards: &'a Shards,
    /// Most bytes of a message in a ring.
    pub(super) piece: usize,
}

impl Layout<'_> {
    /// Bytes of shard `index` (modulo the number of ranks).
    pub(super) fn shard(self, index: usize) -> Range<usize> {
        let (range, size) = (self.shards.range(index % self.ranks), self.dtype.size());
        range.start * size..range.end * size
    }

    /// Bytes of the part of shard `index` that travels as its piece number `piece`, maybe none.
    pub(super) fn part(self, index: usize, piece: usize) -> Range<usize> {
        let shard = self.shard(index);
        let length = self.piece_bytes();
        let start = shard.start + piece.saturating_mul(length).min(shard.len());
        start..shard.end.min(start.saturating_add(length))
    }

    /// Pieces of the longest shard, at least one.
    pub(super) fn pieces(self) -> usize {
        let longest = self.shards.longest() * self.dtype.size();
        longest.div_ceil(self.piece_bytes()).max(1)
    }

    /// A step after all those of a ring.
    pub(super) fn last_step(self) -> usize {
        (self.pieces() + 2 * self.ranks) * 2 * self.ranks
    }

    /// Whole elements.
    fn piece_bytes(self) -> usize {
        let size = self.dtype.size();
        (self.piece / size).max(1) * size
    }

    pub(super) fn others(self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.ranks).filter(move |other| *other != rank)
    }
}
