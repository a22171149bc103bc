//! How each operation is made of NCCL's calls.

use std::ops::Range;

use comm_core::{Counts, DType, Op, shard_range};

use crate::sys::{Calls, DataType, DevicePointer, RedOp};

/// An operation on device memory. Its arguments have been checked.
pub(crate) struct Plan<'a> {
    pub(crate) op: &'a Op,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) dtype: DType,
    /// Elements of the buffer.
    pub(crate) count: usize,
    /// Elements of the input, if there is one.
    pub(crate) input: Option<usize>,
    pub(crate) counts: Option<&'a Counts>,
}

/// Where an operation's data are on the device.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    pub(crate) buffer: DevicePointer,
    /// The same as the buffer in place.
    pub(crate) input: Option<DevicePointer>,
    /// A copy of what goes in, for an all-to-all in place; one element for a barrier.
    pub(crate) scratch: DevicePointer,
}

/// A copy on the device that goes before the calls, in bytes.
pub(crate) struct Copy {
    pub(crate) from: DevicePointer,
    pub(crate) to: DevicePointer,
    pub(crate) bytes: usize,
}

impl Plan<'_> {
    fn size(&self) -> usize {
        self.dtype.size()
    }

    fn is_root(&self) -> bool {
        self.op.root() == Some(self.rank)
    }

    /// Elements of the whole that is divided.
    fn whole(&self) -> usize {
        match *self.op {
            Op::Scatter { total, .. } | Op::Gather { total, .. } => total,
            Op::ReduceScatter(_) | Op::AllToAll => self.input.unwrap_or(self.count),
            _ => self.count,
        }
    }

    /// Rank `rank`'s shard of the whole.
    fn shard(&self, rank: usize) -> Range<usize> {
        part(self.counts.map(Counts::send), self.whole(), self.ranks, rank)
    }

    /// Where rank `rank`'s block of an all-to-all comes to lie.
    fn received(&self, rank: usize) -> Range<usize> {
        part(self.counts.map(Counts::receive), self.count, self.ranks, rank)
    }

    /// Whether all shards are equal, as NCCL's own operations want them.
    fn is_even(&self) -> bool {
        let first = self.shard(0).len();
        (1..self.ranks).all(|rank| self.shard(rank).len() == first)
    }

    /// Bytes of scratch memory.
    pub(crate) fn scratch_bytes(&self) -> usize {
        match *self.op {
            Op::AllToAll if self.input.is_none() => self.count * self.size(),
            Op::Barrier => 4,
            _ => 0,
        }
    }

    /// Elements of the buffer that the operation reads.
    pub(crate) fn reads(&self) -> Range<usize> {
        let everything = 0..self.count;
        if self.input.is_some() {
            return 0..0;
        }
        match *self.op {
            Op::AllReduce(_) | Op::Reduce { .. } | Op::ReduceScatter(_) | Op::AllToAll | Op::Send { .. } => everything,
            Op::Broadcast { .. } | Op::Scatter { .. } if self.is_root() => everything,
            Op::Gather { .. } if !self.is_root() => everything,
            Op::AllGather => self.shard(self.rank),
            _ => 0..0,
        }
    }

    /// Elements of the buffer that the operation writes.
    pub(crate) fn writes(&self) -> Vec<Range<usize>> {
        let everything = 0..self.count;
        let of_others = |plan: &Self| {
            let mine = plan.shard(plan.rank);
            vec![0..mine.start, mine.end..plan.count]
        };
        match (*self.op, self.input.is_some()) {
            (Op::AllReduce(_) | Op::Recv { .. }, _) => vec![everything],
            (Op::AllToAll, _) => {
                let end = (0..self.ranks).map(|rank| self.received(rank).end).max().unwrap_or(0);
                vec![Range { start: 0, end }]
            }
            (Op::Broadcast { .. }, input) if input || !self.is_root() => vec![everything],
            (Op::Reduce { .. }, _) if self.is_root() => vec![everything],
            (Op::Scatter { .. }, input) if input || !self.is_root() => vec![everything],
            (Op::Gather { .. }, true) if self.is_root() => vec![everything],
            (Op::Gather { .. }, false) if self.is_root() => of_others(self),
            (Op::AllGather, true) => vec![everything],
            (Op::AllGather, false) => of_others(self),
            (Op::ReduceScatter(_), true) => vec![everything],
            (Op::ReduceScatter(_), false) => vec![self.shard(self.rank)],
            _ => Vec::new(),
        }
    }

    /// What is copied on the device before the calls.
    pub(crate) fn copies(&self, at: Places) -> Vec<Copy> {
        let size = self.size();
        let copy = |from: DevicePointer, to: DevicePointer, elements: usize| Copy { from, to, bytes: elements * size };
        match (*self.op, at.input) {
            (Op::AllToAll, None) => vec![copy(at.buffer, at.scratch, self.shard(self.ranks - 1).end)],
            (Op::Scatter { .. }, Some(input)) => {
                let mine = self.shard(self.rank);
                vec![copy(input.at(mine.start * size), at.buffer, mine.len())]
            }
            (Op::Gather { .. }, Some(input)) if self.is_root() => {
                let mine = self.shard(self.rank);
                vec![copy(input, at.buffer.at(mine.start * size), mine.len())]
            }
            _ => Vec::new(),
        }
    }

    /// What is copied on the device beside the calls: an all-to-all's block for this rank itself.
    pub(crate) fn own_block(&self, at: Places) -> Option<Copy> {
        let (from, into) = match *self.op {
            Op::AllToAll => (self.shard(self.rank), self.received(self.rank)),
            _ => return None,
        };
        let (size, source) = (self.size(), at.input.unwrap_or(at.scratch));
        Some(Copy { from: source.at(from.start * size), to: at.buffer.at(into.start * size), bytes: from.len() * size })
    }

    /// The calls of one group.
    ///
    /// # Errors
    /// None: what NCCL says of them is kept by `calls`.
    pub(crate) fn call(&self, at: Places, calls: &mut Calls<'_>, op: RedOp) {
        let (size, source) = (self.size(), at.input.unwrap_or(at.buffer));
        // What is only moved goes as bytes, so that the types that NCCL does not know can travel.
        let (moved, bytes) = (DataType::BYTE, size);
        let reduced = DataType::of(self.dtype).unwrap_or(DataType::BYTE);
        let others = || (0..self.ranks).filter(|rank| *rank != self.rank);
        match *self.op {
            Op::AllReduce(_) if self.count > 0 => calls.all_reduce(source, at.buffer, self.count, reduced, op),
            Op::Reduce { root, .. } => {
                let count = self.input.unwrap_or(self.count);
                let into = if root == self.rank { at.buffer } else { DevicePointer::NULL };
                if count > 0 {
                    calls.reduce(source, into, count, reduced, op, root);
                }
            }
            Op::Broadcast { root } if self.count > 0 => {
                calls.broadcast(source, at.buffer, self.count * bytes, moved, root);
            }
            Op::Scatter { root, .. } if root == self.rank => {
                for peer in others() {
                    let shard = self.shard(peer);
                    if !shard.is_empty() {
                        calls.send(source.at(shard.start * size), shard.len() * bytes, moved, peer);
                    }
                }
            }
            Op::Scatter { root, .. } if self.count > 0 => calls.recv(at.buffer, self.count * bytes, moved, root),
            Op::Gather { root, .. } if root == self.rank => {
                for peer in others() {
                    let shard = self.shard(peer);
                    if !shard.is_empty() {
                        calls.recv(at.buffer.at(shard.start * size), shard.len() * bytes, moved, peer);
                    }
                }
            }
            Op::Gather { root, .. } => {
                let shard = self.shard(self.rank);
                if !shard.is_empty() {
                    calls.send(source, shard.len() * bytes, moved, root);
                }
            }
            Op::AllGather => {
                let mine = self.shard(self.rank);
                let own = at.input.unwrap_or(at.buffer.at(mine.start * size));
                if self.is_even() {
                    if !mine.is_empty() {
                        calls.all_gather(own, at.buffer, mine.len() * bytes, moved);
                    }
                    return;
                }
                for root in 0..self.ranks {
                    let shard = self.shard(root);
                    let into = at.buffer.at(shard.start * size);
                    let from = if root == self.rank { own } else { into };
                    if !shard.is_empty() {
                        calls.broadcast(from, into, shard.len() * bytes, moved, root);
                    }
                }
            }
            Op::ReduceScatter(_) => {
                let mine = self.shard(self.rank);
                let into = if at.input.is_some() { at.buffer } else { at.buffer.at(mine.start * size) };
                if self.is_even() {
                    if !mine.is_empty() {
                        calls.reduce_scatter(source, into, mine.len(), reduced, op);
                    }
                    return;
                }
                for root in 0..self.ranks {
                    let shard = self.shard(root);
                    let into = if root == self.rank { into } else { DevicePointer::NULL };
                    if !shard.is_empty() {
                        calls.reduce(source.at(shard.start * size), into, shard.len(), reduced, op, root);
                    }
                }
            }
            Op::AllToAll => {
                let source = at.input.unwrap_or(at.scratch);
                for peer in others() {
                    let (out, into) = (self.shard(peer), self.received(peer));
                    if !out.is_empty() {
                        calls.send(source.at(out.start * size), out.len() * bytes, moved, peer);
                    }
                    if !into.is_empty() {
                        calls.recv(at.buffer.at(into.start * size), into.len() * bytes, moved, peer);
                    }
                }
            }
            Op::Barrier => calls.all_reduce(at.scratch, at.scratch, 1, DataType(2), op),
            Op::Send { to } => {
                let count = self.input.unwrap_or(self.count);
                calls.send(source, count * bytes, moved, to);
            }
            Op::Recv { from } => calls.recv(at.buffer, self.count * bytes, moved, from),
            _ => {}
        }
    }
}

/// Rank `rank`'s part of `whole` elements.
fn part(counts: Option<&[usize]>, whole: usize, ranks: usize, rank: usize) -> Range<usize> {
    match counts {
        Some(counts) => {
            let start: usize = counts.iter().take(rank).sum();
            start..start + counts.get(rank).copied().unwrap_or(0)
        }
        None => shard_range(whole, ranks, rank),
    }
}
