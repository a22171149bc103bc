//! What an algorithm runs on, and the steps that several of them share.

use std::ops::Range;

use super::layout::Layout;
use crate::copy::copy;
use crate::dtype::ReduceOp;
use crate::error::{Error, Result};
use crate::mesh::round::{Receive, Rounds, Send};
use crate::mesh::scratch::{Scratch, ScratchBuffer};
use crate::op::{Extents, Op};
use crate::reduce::{reduce_in_rank_order, scale};

/// One rank's part in an operation whose arguments have been checked. Of an operation that only moves data, the own part of an input is
/// in its place in the buffer already.
pub(super) struct Task<'t, 'r> {
    pub(super) op: Op,
    pub(super) rounds: &'t mut Rounds<'r>,
    pub(super) layout: Layout<'t>,
    /// The buffer; in place, it holds what goes in.
    pub(super) bytes: &'t mut [u8],
    /// What goes in, out of place.
    pub(super) input: Option<&'t [u8]>,
    pub(super) extents: &'t Extents,
    pub(super) scratch: &'t mut Scratch,
}

impl<'t> Task<'t, '_> {
    /// This rank.
    pub(super) fn rank(&self) -> usize {
        self.rounds.rank
    }

    /// Bytes of this rank's shard of the whole.
    pub(super) fn own(&self) -> Range<usize> {
        self.layout.shard(self.rounds.rank)
    }

    /// The root of an operation that has one.
    pub(super) fn root(&self) -> Result<usize> {
        self.op.root().ok_or_else(|| Error::Internal(format!("{} has no root", self.op.kind())))
    }

    /// How contributions are combined, of an operation that reduces.
    pub(super) fn reduce_op(&self) -> Result<ReduceOp> {
        self.op.reduce_op().ok_or_else(|| Error::Internal(format!("{} reduces nothing", self.op.kind())))
    }

    /// As [`reduce_op`](Task::reduce_op), if contributions go in as they are; `None` if they are multiplied first.
    pub(super) fn unscaled(&self) -> Result<Option<ReduceOp>> {
        Ok(Some(self.reduce_op()?).filter(|op| !matches!(op, ReduceOp::ScaledSum(_))))
    }

    /// Puts this rank's contribution into the buffer, multiplied by its factor if it has one. Gives how it is combined then.
    pub(super) fn contribute(&mut self) -> Result<ReduceOp> {
        if let Some(input) = self.input {
            copy(self.bytes, input);
        }
        let op = self.reduce_op()?;
        Ok(scaled(self.layout, op, self.bytes))
    }

    /// How contributions are combined, and this rank's where it need not be copied: the input, as it is. Otherwise it is in the buffer, as
    /// after [`contribute`](Task::contribute).
    pub(super) fn contribution(&mut self) -> Result<(ReduceOp, Option<&'t [u8]>)> {
        match (self.input, self.unscaled()?) {
            // A rank alone receives nothing that its input could be combined with.
            (Some(input), Some(op)) if self.layout.ranks > 1 => Ok((op, Some(input))),
            _ => Ok((self.contribute()?, None)),
        }
    }

    /// Completes this rank's shard of the reduction by `reduce_scatter`, in its place; out of place in a copy, from which it comes into
    /// the buffer.
    pub(super) fn reduce_scatter_by(mut self, reduce_scatter: ReduceScatter) -> Result<()> {
        let Some(input) = self.input else {
            let op = self.contribute()?;
            return reduce_scatter(self.rounds, self.layout, op, self.bytes, self.scratch.inbox());
        };
        let (op, own) = (self.reduce_op()?, self.own());
        let (whole, inbox) = self.scratch.copy_and_inbox(input);
        let op = scaled(self.layout, op, whole);
        reduce_scatter(self.rounds, self.layout, op, whole, inbox)?;
        copy(self.bytes, &whole[own]);
        Ok(())
    }

    /// Reduces by `reduce_scatter`, and gathers the shards in the root's buffer. The buffers of the others stay as they are.
    pub(super) fn reduce_by(mut self, reduce_scatter: ReduceScatter) -> Result<()> {
        let (root, own, layout) = (self.root()?, self.own(), self.layout);
        if self.rank() == root {
            let op = self.contribute()?;
            reduce_scatter(self.rounds, layout, op, self.bytes, self.scratch.inbox())?;
            return gather_shards(self.rounds, layout, layout.last_step(), root, self.bytes);
        }
        let op = self.reduce_op()?;
        let (whole, inbox) = self.scratch.copy_and_inbox(self.input.unwrap_or(self.bytes));
        let op = scaled(layout, op, whole);
        reduce_scatter(self.rounds, layout, op, whole, inbox)?;
        self.rounds.exchange(layout.last_step(), &[Send { to: root, bytes: &whole[own] }], &mut [])
    }
}

/// Reduces contributions in place, so that this rank's shard is complete; the last argument is memory for what comes.
pub(super) type ReduceScatter = fn(&mut Rounds<'_>, Layout<'_>, ReduceOp, &mut [u8], &mut ScratchBuffer) -> Result<()>;

/// Multiplies this rank's contribution by its factor, if it has one, which leaves a sum.
pub(super) fn scaled(layout: Layout<'_>, op: ReduceOp, contribution: &mut [u8]) -> ReduceOp {
    let ReduceOp::ScaledSum(factor) = op else { return op };
    scale(layout.dtype, factor, contribution);
    ReduceOp::Sum
}

/// The root's part of a gather into the whole, where its own shard is in its place.
pub(super) fn gather_shards(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    step: usize,
    root: usize,
    bytes: &mut [u8],
) -> Result<()> {
    let (_, mut receives) = around(bytes, root, layout.ranks, |rank| layout.shard(rank));
    rounds.exchange(step, &[], &mut receives)
}

/// This rank's own place in `bytes`, and the places of what the other ranks send, which lie around it in rank order.
pub(super) fn around(
    bytes: &mut [u8],
    rank: usize,
    ranks: usize,
    place: impl Fn(usize) -> Range<usize>,
) -> (&mut [u8], Vec<Receive<'_>>) {
    let own = place(rank);
    let (before, rest) = bytes.split_at_mut(own.start);
    let (own, after) = rest.split_at_mut(own.len());
    let mut all = receives(before, (0..rank).map(|from| (from, place(from).len())));
    all.extend(receives(after, (rank + 1..ranks).map(|from| (from, place(from).len()))));
    (own, all)
}

/// Consecutive places in `bytes` for messages of the given (sender, length).
pub(super) fn receives(mut bytes: &mut [u8], from: impl Iterator<Item = (usize, usize)>) -> Vec<Receive<'_>> {
    from.map(|(from, len)| {
        let (into, rest) = std::mem::take(&mut bytes).split_at_mut(len);
        bytes = rest;
        Receive { from, into, reduce: None }
    })
    .collect()
}

/// Reduces `own`, this rank's contribution, with those of the other ranks, which lie in rank order in `inbox`.
pub(super) fn reduce_with_inbox(layout: Layout<'_>, op: ReduceOp, rank: usize, inbox: &[u8], own: &mut [u8]) {
    let length = own.len();
    let of_rank = |other: usize| {
        let place = if other < rank { other } else { other.saturating_sub(1) };
        (other != rank).then(|| &inbox[place * length..(place + 1) * length])
    };
    reduce_in_rank_order(layout.dtype, op, layout.ranks, of_rank, own);
}

/// Two ranges of `bytes` that do not overlap: one to read, one to write.
pub(super) fn two_ranges(bytes: &mut [u8], read: Range<usize>, write: Range<usize>) -> (&[u8], &mut [u8]) {
    if read.end <= write.start {
        let (low, high) = bytes.split_at_mut(write.start);
        (&low[read], &mut high[..write.len()])
    } else {
        let (low, high) = bytes.split_at_mut(read.start);
        (&high[..read.len()], &mut low[write])
    }
}
