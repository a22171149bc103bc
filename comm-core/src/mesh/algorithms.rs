//! The collective algorithms, once for every byte transport.
//!
//! Names as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005). Which
//! one runs is [`crate::table`]'s choice, which both sides find in the header.

use std::ops::Range;

use crate::buffer::HostBuffer;
use crate::dtype::{DType, ReduceOp};
use crate::error::Result;
use crate::op::{Algorithm, Op, shard_range};
use crate::reduce::{finish_mean, reduce_in_rank_order};
use crate::table::{tree_children, tree_parent};

use super::round::{Receive, Rounds, Send};

/// Runs `op` on `buffer`, whose length the caller has checked.
pub(super) fn run(op: &Op, rounds: &mut Rounds<'_>, buffer: &mut HostBuffer) -> Result<()> {
    if rounds.ranks() == 1 {
        return Ok(());
    }
    let layout = Layout { dtype: buffer.dtype(), count: rounds.header().count as usize, ranks: rounds.ranks() };
    let algorithm = rounds.header().algorithm;
    let bytes = buffer.bytes_mut();
    match (*op, algorithm) {
        (Op::AllReduce(op), Algorithm::Direct) => direct_all_reduce(rounds, layout, op, bytes),
        (Op::AllReduce(op), Algorithm::Sharded) => {
            sharded_reduce_scatter(rounds, layout, op, bytes)?;
            direct_all_gather(rounds, layout, 1, bytes)
        }
        (Op::AllReduce(op), _) => {
            ring_reduce_scatter(rounds, layout, op, bytes)?;
            ring_all_gather(rounds, layout, layout.ranks - 1, bytes)
        }
        (Op::ReduceScatter(op), Algorithm::Sharded) => sharded_reduce_scatter(rounds, layout, op, bytes),
        (Op::ReduceScatter(op), _) => ring_reduce_scatter(rounds, layout, op, bytes),
        (Op::AllGather, Algorithm::Direct) => direct_all_gather(rounds, layout, 0, bytes),
        (Op::AllGather, _) => ring_all_gather(rounds, layout, 0, bytes),
        (Op::Reduce { root, op }, Algorithm::Direct) => direct_reduce(rounds, layout, root, op, bytes),
        (Op::Reduce { root, op }, algorithm) => scatter_reduce(rounds, layout, algorithm, root, op, bytes),
        (Op::Broadcast { root }, _) => tree_broadcast(rounds, root, bytes),
        (Op::Scatter { root, .. }, _) => scatter(rounds, layout, root, bytes),
        (Op::Gather { root, .. }, _) => gather(rounds, layout, 0, root, bytes),
        (Op::Barrier, _) => barrier(rounds),
        (Op::Send { to }, _) => rounds.exchange(0, &[Send { to, bytes }], Vec::new()),
        (Op::Recv { from }, _) => rounds.exchange(0, &[], vec![Receive { from, into: bytes, reduce: None }]),
    }
}

/// How a whole lies in its shards.
#[derive(Clone, Copy)]
struct Layout {
    dtype: DType,
    count: usize,
    ranks: usize,
}

impl Layout {
    /// Bytes of shard `index` (modulo the number of ranks).
    fn shard(self, index: usize) -> Range<usize> {
        let range = shard_range(self.count, self.ranks, index % self.ranks);
        range.start * self.dtype.size()..range.end * self.dtype.size()
    }

    fn others(self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.ranks).filter(move |other| *other != rank)
    }
}

/// Rank r sends shard r−1, then each shard it has just reduced, to its right; after N−1 rounds shard r is complete at rank r.
/// Shard s is summed in the order s+1, s+2, …, s.
fn ring_reduce_scatter(rounds: &mut Rounds<'_>, layout: Layout, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
    let (rank, ranks) = (rounds.rank, layout.ranks);
    let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
    for step in 0..ranks - 1 {
        let (out, into) =
            two_ranges(bytes, layout.shard(rank + 2 * ranks - step - 1), layout.shard(rank + 2 * ranks - step - 2));
        let receive = Receive { from: left, into, reduce: Some((layout.dtype, op)) };
        rounds.exchange(step, &[Send { to: right, bytes: out }], vec![receive])?;
    }
    if op == ReduceOp::Mean {
        finish_mean(layout.dtype, &mut bytes[layout.shard(rank)], ranks);
    }
    Ok(())
}

/// Rank r sends shard r, then each shard it has just received, to its right.
fn ring_all_gather(rounds: &mut Rounds<'_>, layout: Layout, first_step: usize, bytes: &mut [u8]) -> Result<()> {
    let (rank, ranks) = (rounds.rank, layout.ranks);
    let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
    for step in 0..ranks - 1 {
        let (out, into) = two_ranges(bytes, layout.shard(rank + ranks - step), layout.shard(rank + ranks - step - 1));
        let receive = Receive { from: left, into, reduce: None };
        rounds.exchange(first_step + step, &[Send { to: right, bytes: out }], vec![receive])?;
    }
    Ok(())
}

/// Everyone sends everything to everyone and reduces it in rank order.
fn direct_all_reduce(rounds: &mut Rounds<'_>, layout: Layout, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
    let rank = rounds.rank;
    let mut inbox = vec![0u8; bytes.len() * (layout.ranks - 1)];
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes }).collect();
    rounds.exchange(0, &sends, receives(&mut inbox, layout.others(rank).map(|from| (from, bytes.len()))))?;
    reduce_with_inbox(layout, op, rank, &inbox, bytes);
    Ok(())
}

/// Everyone sends shard r to rank r, which reduces what it gets in rank order.
fn sharded_reduce_scatter(rounds: &mut Rounds<'_>, layout: Layout, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
    let rank = rounds.rank;
    let own = layout.shard(rank);
    let mut inbox = vec![0u8; own.len() * (layout.ranks - 1)];
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes: &bytes[layout.shard(to)] }).collect();
    rounds.exchange(0, &sends, receives(&mut inbox, layout.others(rank).map(|from| (from, own.len()))))?;
    reduce_with_inbox(layout, op, rank, &inbox, &mut bytes[own]);
    Ok(())
}

/// Everyone sends its own shard to everyone.
fn direct_all_gather(rounds: &mut Rounds<'_>, layout: Layout, step: usize, bytes: &mut [u8]) -> Result<()> {
    let rank = rounds.rank;
    let own = layout.shard(rank);
    let (before, rest) = bytes.split_at_mut(own.start);
    let (own, after) = rest.split_at_mut(own.len());
    let own = &*own;
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes: own }).collect();
    let mut all = receives(before, (0..rank).map(|from| (from, layout.shard(from).len())));
    all.extend(receives(after, (rank + 1..layout.ranks).map(|from| (from, layout.shard(from).len()))));
    rounds.exchange(step, &sends, all)
}

/// Everyone sends everything to the root, which reduces it in rank order.
fn direct_reduce(rounds: &mut Rounds<'_>, layout: Layout, root: usize, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
    if rounds.rank != root {
        return rounds.exchange(0, &[Send { to: root, bytes }], Vec::new());
    }
    let mut inbox = vec![0u8; bytes.len() * (layout.ranks - 1)];
    rounds.exchange(0, &[], receives(&mut inbox, layout.others(root).map(|from| (from, bytes.len()))))?;
    reduce_with_inbox(layout, op, root, &inbox, bytes);
    Ok(())
}

/// Reduce-scatter, then the shards are gathered at the root. The others' buffers stay as they are.
fn scatter_reduce(
    rounds: &mut Rounds<'_>,
    layout: Layout,
    algorithm: Algorithm,
    root: usize,
    op: ReduceOp,
    bytes: &mut [u8],
) -> Result<()> {
    let mut scratch;
    let is_root = rounds.rank == root;
    let work = if is_root {
        &mut *bytes
    } else {
        scratch = HostBuffer::zeros(layout.dtype, layout.count);
        scratch.bytes_mut().copy_from_slice(bytes);
        scratch.bytes_mut()
    };
    if algorithm == Algorithm::Sharded {
        sharded_reduce_scatter(rounds, layout, op, work)?;
    } else {
        ring_reduce_scatter(rounds, layout, op, work)?;
    }
    let own = layout.shard(rounds.rank);
    if is_root {
        gather(rounds, layout, layout.ranks, root, work)
    } else {
        gather(rounds, layout, layout.ranks, root, &mut work[own])
    }
}

/// The root passes the whole; the others pass their shard.
fn gather(rounds: &mut Rounds<'_>, layout: Layout, step: usize, root: usize, bytes: &mut [u8]) -> Result<()> {
    if rounds.rank != root {
        return rounds.exchange(step, &[Send { to: root, bytes }], Vec::new());
    }
    let own = layout.shard(root);
    let (before, rest) = bytes.split_at_mut(own.start);
    let after = &mut rest[own.len()..];
    let mut all = receives(before, (0..root).map(|from| (from, layout.shard(from).len())));
    all.extend(receives(after, (root + 1..layout.ranks).map(|from| (from, layout.shard(from).len()))));
    rounds.exchange(step, &[], all)
}

/// The root passes the whole; the others a buffer for their shard.
fn scatter(rounds: &mut Rounds<'_>, layout: Layout, root: usize, bytes: &mut [u8]) -> Result<()> {
    if rounds.rank != root {
        return rounds.exchange(0, &[], vec![Receive { from: root, into: bytes, reduce: None }]);
    }
    let sends: Vec<Send<'_>> = layout.others(root).map(|to| Send { to, bytes: &bytes[layout.shard(to)] }).collect();
    rounds.exchange(0, &sends, Vec::new())
}

fn tree_broadcast(rounds: &mut Rounds<'_>, root: usize, bytes: &mut [u8]) -> Result<()> {
    if let Some(from) = tree_parent(rounds.rank, root, rounds.ranks()) {
        rounds.exchange(0, &[], vec![Receive { from, into: &mut *bytes, reduce: None }])?;
    }
    let sends: Vec<Send<'_>> =
        tree_children(rounds.rank, root, rounds.ranks()).into_iter().map(|to| Send { to, bytes }).collect();
    if sends.is_empty() { Ok(()) } else { rounds.exchange(0, &sends, Vec::new()) }
}

/// Dissemination: in round k every rank hears from the one 2ᵏ to its left.
fn barrier(rounds: &mut Rounds<'_>) -> Result<()> {
    let (rank, ranks) = (rounds.rank, rounds.ranks());
    let mut distance = 1;
    let mut step = 0;
    while distance < ranks {
        let send = Send { to: (rank + distance) % ranks, bytes: &[] };
        let receive = Receive { from: (rank + ranks - distance) % ranks, into: &mut [], reduce: None };
        rounds.exchange(step, &[send], vec![receive])?;
        distance *= 2;
        step += 1;
    }
    Ok(())
}

/// Consecutive places in `bytes` for messages of the given (sender, length).
fn receives(mut bytes: &mut [u8], from: impl Iterator<Item = (usize, usize)>) -> Vec<Receive<'_>> {
    from.map(|(from, len)| {
        let (into, rest) = std::mem::take(&mut bytes).split_at_mut(len);
        bytes = rest;
        Receive { from, into, reduce: None }
    })
    .collect()
}

/// Reduces `own`, this rank's contribution, with those of the other ranks, which lie in rank order in `inbox`.
fn reduce_with_inbox(layout: Layout, op: ReduceOp, rank: usize, inbox: &[u8], own: &mut [u8]) {
    if own.is_empty() {
        return;
    }
    let mine = own.to_vec();
    let mut contributions: Vec<&[u8]> = inbox.chunks_exact(own.len()).collect();
    contributions.insert(rank, &mine);
    reduce_in_rank_order(layout.dtype, op, &contributions, own);
}

/// Two ranges of `bytes` that do not overlap: one to read, one to write.
fn two_ranges(bytes: &mut [u8], read: Range<usize>, write: Range<usize>) -> (&[u8], &mut [u8]) {
    if read.end <= write.start {
        let (low, high) = bytes.split_at_mut(write.start);
        (&low[read], &mut high[..write.len()])
    } else {
        let (low, high) = bytes.split_at_mut(read.start);
        (&high[..read.len()], &mut low[write])
    }
}
