//! How each operation is made of NCCL's calls.

use std::ops::Range;

use comm_core::Op;
use comm_core::engine::{Extents, OwnCopy};

use crate::sys::{Calls, DataType, DevicePointer, RedOp};

/// An operation on device memory.
pub(crate) struct Plan<'a> {
    pub(crate) op: &'a Op,
    pub(crate) rank: usize,
    pub(crate) extents: &'a Extents,
    pub(crate) has_input: bool,
}

/// Whether there is a plan for an operation: there may be more of them one day.
pub(crate) fn is_known(op: &Op) -> bool {
    matches!(
        op,
        Op::AllReduce(_)
            | Op::Reduce { .. }
            | Op::Broadcast { .. }
            | Op::Scatter { .. }
            | Op::Gather { .. }
            | Op::AllGather
            | Op::ReduceScatter(_)
            | Op::AllToAll
            | Op::Barrier
            | Op::Send { .. }
            | Op::Recv { .. }
    )
}

/// Where an operation's data are on the device.
#[derive(Clone, Copy)]
pub(crate) struct DataPointers {
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

/// What is only moved goes as bytes, so that the types that NCCL does not know can travel.
const MOVED: DataType = DataType::BYTE;

impl Plan<'_> {
    fn size(&self) -> usize {
        self.extents.dtype.size()
    }

    /// Bytes of rank `rank`'s shard of the whole.
    fn shard(&self, rank: usize) -> Range<usize> {
        self.extents.bytes(self.extents.shards.range(rank))
    }

    /// Bytes of the buffer where rank `rank`'s block of an all-to-all comes to lie.
    fn received(&self, rank: usize) -> Range<usize> {
        self.extents.bytes(self.extents.received.range(rank))
    }

    /// Elements of the whole.
    fn whole(&self) -> usize {
        self.extents.shards.whole()
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let rank = self.rank;
        (0..self.extents.shards.ranks()).filter(move |other| *other != rank)
    }

    /// The type in which elements are reduced.
    fn reduced(&self) -> DataType {
        DataType::of(self.extents.dtype).unwrap_or(DataType::BYTE)
    }

    fn is_all_to_all_in_place(&self) -> bool {
        *self.op == Op::AllToAll && !self.has_input
    }

    /// Bytes of scratch memory.
    pub(crate) fn scratch_bytes(&self) -> usize {
        match *self.op {
            Op::Barrier => 4,
            _ if self.is_all_to_all_in_place() => self.whole() * self.size(),
            _ => 0,
        }
    }

    /// What is copied on the device before the calls.
    pub(crate) fn copies(&self, pointers: DataPointers) -> Vec<Copy> {
        let size = self.size();
        let mut copies = Vec::new();
        if self.is_all_to_all_in_place() {
            copies.push(Copy { from: pointers.buffer, to: pointers.scratch, bytes: self.whole() * size });
        }
        // NCCL's own operations copy a rank's own part themselves.
        let is_made_of_messages = matches!(*self.op, Op::Scatter { .. } | Op::Gather { .. } | Op::AllToAll);
        if let Some(OwnCopy { from, to }) = &self.extents.own_copy
            && is_made_of_messages
        {
            let source = pointers.input.unwrap_or(pointers.scratch);
            copies.push(Copy {
                from: source.at(from.start * size),
                to: pointers.buffer.at(to * size),
                bytes: from.len() * size,
            });
        }
        copies
    }

    /// The calls of one group. What NCCL says of them is kept by `calls`.
    pub(crate) fn call(&self, pointers: DataPointers, calls: &mut Calls<'_>, op: RedOp) {
        let (source, whole) = (pointers.input.unwrap_or(pointers.buffer), self.whole());
        let bytes = whole * self.size();
        let own = self.shard(self.rank);
        match *self.op {
            Op::AllReduce(_) if whole > 0 => calls.all_reduce(source, pointers.buffer, whole, self.reduced(), op),
            Op::Reduce { root, .. } => {
                let into = if root == self.rank { pointers.buffer } else { DevicePointer::NULL };
                if whole > 0 {
                    calls.reduce(source, into, whole, self.reduced(), op, root);
                }
            }
            Op::Broadcast { root } if whole > 0 => calls.broadcast(source, pointers.buffer, bytes, MOVED, root),
            Op::Scatter { root, .. } if root == self.rank => {
                self.others().for_each(|peer| send(calls, source, self.shard(peer), peer));
            }
            Op::Scatter { root, .. } => receive(calls, pointers.buffer, 0..own.len(), root),
            Op::Gather { root, .. } if root == self.rank => {
                self.others().for_each(|peer| receive(calls, pointers.buffer, self.shard(peer), peer));
            }
            Op::Gather { root, .. } => send(calls, source, 0..own.len(), root),
            Op::AllGather => self.all_gather(pointers, calls),
            Op::ReduceScatter(_) => self.reduce_scatter(pointers, calls, op),
            Op::AllToAll => {
                let source = pointers.input.unwrap_or(pointers.scratch);
                for peer in self.others() {
                    send(calls, source, self.shard(peer), peer);
                    receive(calls, pointers.buffer, self.received(peer), peer);
                }
            }
            Op::Barrier => calls.all_reduce(pointers.scratch, pointers.scratch, 1, DataType(2), op),
            Op::Send { to } => calls.send(source, bytes, MOVED, to),
            Op::Recv { from } => calls.recv(pointers.buffer, bytes, MOVED, from),
            // Nothing to reduce or to broadcast; other operations are not let in.
            _ => {}
        }
    }

    /// NCCL's own operation where shards are equal, else a broadcast of each.
    fn all_gather(&self, pointers: DataPointers, calls: &mut Calls<'_>) {
        let mine = self.shard(self.rank);
        let own = pointers.input.unwrap_or(pointers.buffer.at(mine.start));
        if self.extents.shards.are_equal() {
            if !mine.is_empty() {
                calls.all_gather(own, pointers.buffer, mine.len(), MOVED);
            }
            return;
        }
        for root in 0..self.extents.shards.ranks() {
            let shard = self.shard(root);
            let into = pointers.buffer.at(shard.start);
            let from = if root == self.rank { own } else { into };
            if !shard.is_empty() {
                calls.broadcast(from, into, shard.len(), MOVED, root);
            }
        }
    }

    /// NCCL's own operation where shards are equal, else a reduction of each.
    fn reduce_scatter(&self, pointers: DataPointers, calls: &mut Calls<'_>, op: RedOp) {
        let (shards, reduced) = (&self.extents.shards, self.reduced());
        let source = pointers.input.unwrap_or(pointers.buffer);
        let into = if self.has_input { pointers.buffer } else { pointers.buffer.at(self.shard(self.rank).start) };
        let elements = |rank: usize| shards.range(rank).len();
        if shards.are_equal() {
            if elements(self.rank) > 0 {
                calls.reduce_scatter(source, into, elements(self.rank), reduced, op);
            }
            return;
        }
        for root in 0..shards.ranks() {
            let into = if root == self.rank { into } else { DevicePointer::NULL };
            if elements(root) > 0 {
                calls.reduce(source.at(self.shard(root).start), into, elements(root), reduced, op, root);
            }
        }
    }
}

/// Sends these bytes of `source` to `peer`, if there are any.
fn send(calls: &mut Calls<'_>, source: DevicePointer, bytes: Range<usize>, peer: usize) {
    if !bytes.is_empty() {
        calls.send(source.at(bytes.start), bytes.len(), MOVED, peer);
    }
}

/// Receives these bytes of `buffer` from `peer`, if there are any.
fn receive(calls: &mut Calls<'_>, buffer: DevicePointer, bytes: Range<usize>, peer: usize) {
    if !bytes.is_empty() {
        calls.recv(buffer.at(bytes.start), bytes.len(), MOVED, peer);
    }
}
