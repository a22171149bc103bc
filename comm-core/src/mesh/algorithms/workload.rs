//! What the formulas of the algorithms are about: one rank's part in an operation with even shards.

use crate::dtype::DType;
use crate::op::{Op, shard_range};

/// One rank's part in an operation over `count` elements in even shards, on two or more ranks.
#[derive(Clone, Copy)]
pub(super) struct Workload<'a> {
    pub(super) op: &'a Op,
    pub(super) dtype: DType,
    pub(super) count: usize,
    pub(super) ranks: usize,
    pub(super) rank: usize,
    /// Most bytes of a message in a ring.
    pub(super) piece: usize,
}

impl Workload<'_> {
    /// Bytes of the whole.
    pub(super) fn whole(&self) -> u64 {
        (self.count * self.dtype.size()) as u64
    }

    /// Bytes of shard `index` (modulo the number of ranks).
    pub(super) fn shard(&self, index: usize) -> u64 {
        (self.elements(index) * self.dtype.size()) as u64
    }

    /// Bytes of all shards but this rank's.
    pub(super) fn other_shards(&self) -> u64 {
        self.whole() - self.shard(self.rank)
    }

    /// N−1.
    pub(super) fn others(&self) -> u64 {
        self.ranks as u64 - 1
    }

    /// log₂ of the greatest power of two not above N.
    pub(super) fn doublings(&self) -> u64 {
        u64::from(self.ranks.ilog2())
    }

    /// Σm − mᵢ: messages as which all shards but shard `index` travel around a ring.
    pub(super) fn ring_messages_without(&self, index: usize) -> u64 {
        let elements = (self.piece / self.dtype.size()).max(1);
        let messages = |index: usize| self.elements(index).div_ceil(elements).max(1) as u64;
        (0..self.ranks).map(messages).sum::<u64>() - messages(index)
    }

    /// `number` on the root, 0 elsewhere.
    pub(super) fn on_root(&self, number: u64) -> u64 {
        if self.is_root() { number } else { 0 }
    }

    /// 0 on the root, `number` elsewhere.
    pub(super) fn unless_root(&self, number: u64) -> u64 {
        if self.is_root() { 0 } else { number }
    }

    /// The root, 0 of an operation without one.
    pub(super) fn root(&self) -> usize {
        self.op.root().unwrap_or(0)
    }

    fn is_root(&self) -> bool {
        self.op.root() == Some(self.rank)
    }

    fn elements(&self, index: usize) -> usize {
        shard_range(self.count, self.ranks, index % self.ranks).len()
    }
}
