//! The collective algorithms, once for every byte transport. Which one runs is the [table](crate::table)'s choice or the caller's,
//! and both sides of a message find it in the header.

use std::ops::Range;

use crate::copy::copy;
use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::op::{Algorithm, Extents, Op, Shards};
use crate::reduce::{finish_mean, reduce_in_rank_order, scale};
use crate::table::{supports, tree_children, tree_parent};

use super::round::{Receive, Rounds, Send};
use super::scratch::{Room, Scratch};

/// What an operation works on, and with.
pub(super) struct Data<'a> {
    /// The buffer; in place, it holds what goes in.
    pub(super) bytes: &'a mut [u8],
    /// What goes in, out of place.
    pub(super) input: Option<&'a [u8]>,
    pub(super) extents: &'a Extents,
    pub(super) scratch: &'a mut Scratch,
    /// Most bytes of a message in a ring.
    pub(super) piece: usize,
}

/// Runs `op`, whose arguments have been checked.
pub(super) fn run(op: &Op, rounds: &mut Rounds<'_>, data: Data<'_>) -> Result<()> {
    let header = *rounds.header();
    let algorithm = header.algorithm;
    if !supports(algorithm, header.kind, header.dtype, rounds.ranks()) {
        return Err(Error::invalid(format!(
            "the algorithm {algorithm} cannot run {} of {} on {} ranks",
            header.kind,
            header.dtype,
            rounds.ranks()
        )));
    }
    let Data { bytes, input, extents, scratch, piece } = data;
    let layout = Layout { dtype: header.dtype, ranks: rounds.ranks(), shards: &extents.shards, piece: piece.max(1) };
    let rank = rounds.rank;
    if let Some(input) = input
        && op.reduce_op().is_none()
    {
        extents.copy_own(bytes, Some(input));
    }
    match *op {
        Op::AllReduce(reduce) => {
            if let Some(input) = input {
                if algorithm == Algorithm::Sharded && !is_weighted(reduce) {
                    let own = layout.shard(rank);
                    copy(&mut bytes[own.clone()], &input[own.clone()]);
                    sharded_into(rounds, layout, reduce, input, &mut bytes[own], scratch.inbox())?;
                    return direct_all_gather(rounds, layout, 1, bytes);
                }
                copy(bytes, input);
            }
            all_reduce(rounds, layout, algorithm, weighted(layout, reduce, bytes), bytes, scratch.inbox())
        }
        Op::ReduceScatter(reduce) => match input {
            None => {
                let reduce = weighted(layout, reduce, bytes);
                reduce_scatter(rounds, layout, algorithm, reduce, bytes, scratch.inbox())
            }
            // Whose input need not change.
            Some(input) if algorithm == Algorithm::Sharded && !is_weighted(reduce) => {
                copy(bytes, &input[layout.shard(rank)]);
                sharded_into(rounds, layout, reduce, input, bytes, scratch.inbox())
            }
            Some(input) => {
                let (whole, inbox) = scratch.copy_and_inbox(input);
                let reduce = weighted(layout, reduce, whole);
                reduce_scatter(rounds, layout, algorithm, reduce, whole, inbox)?;
                copy(bytes, &whole[layout.shard(rank)]);
                Ok(())
            }
        },
        Op::AllGather => match algorithm {
            Algorithm::Direct => direct_all_gather(rounds, layout, 0, bytes),
            _ => ring(rounds, layout, None, Phases::Gather, 0, bytes),
        },
        Op::Reduce { root, op } if rank == root => {
            if let Some(input) = input {
                if algorithm == Algorithm::Sharded && !is_weighted(op) {
                    let own = layout.shard(rank);
                    copy(&mut bytes[own.clone()], &input[own.clone()]);
                    sharded_into(rounds, layout, op, input, &mut bytes[own], scratch.inbox())?;
                    return gather_in(rounds, layout, layout.last_step(), root, bytes);
                }
                copy(bytes, input);
            }
            let op = weighted(layout, op, bytes);
            match algorithm {
                Algorithm::Direct => direct_reduce(rounds, layout, root, op, bytes, scratch.inbox()),
                _ => {
                    reduce_scatter(rounds, layout, algorithm, op, bytes, scratch.inbox())?;
                    gather_in(rounds, layout, layout.last_step(), root, bytes)
                }
            }
        }
        Op::Reduce { root, op } => {
            let mine = input.unwrap_or(bytes);
            if algorithm == Algorithm::Direct && !is_weighted(op) {
                return rounds.exchange(0, &[Send { to: root, bytes: mine }], &mut []);
            }
            if algorithm == Algorithm::Sharded && !is_weighted(op) {
                // What this rank holds stays as it is: only its own shard is worked on.
                let (shard, inbox) = scratch.copy_and_inbox(&mine[layout.shard(rank)]);
                sharded_into(rounds, layout, op, mine, shard, inbox)?;
                return rounds.exchange(layout.last_step(), &[Send { to: root, bytes: shard }], &mut []);
            }
            let (work, inbox) = scratch.copy_and_inbox(mine);
            let op = weighted(layout, op, work);
            if algorithm == Algorithm::Direct {
                return rounds.exchange(0, &[Send { to: root, bytes: work }], &mut []);
            }
            reduce_scatter(rounds, layout, algorithm, op, work, inbox)?;
            rounds.exchange(layout.last_step(), &[Send { to: root, bytes: &work[layout.shard(rank)] }], &mut [])
        }
        Op::Broadcast { root } => match algorithm {
            Algorithm::Tree => tree_broadcast(rounds, root, bytes),
            _ => scatter_all_gather(rounds, layout, root, bytes),
        },
        Op::Scatter { root, .. } if rank == root => {
            let whole = input.unwrap_or(bytes);
            let sends: Vec<Send<'_>> =
                layout.others(rank).map(|to| Send { to, bytes: &whole[layout.shard(to)] }).collect();
            rounds.exchange(0, &sends, &mut [])
        }
        Op::Scatter { root, .. } => rounds.exchange(0, &[], &mut [Receive { from: root, into: bytes, reduce: None }]),
        Op::Gather { root, .. } if rank == root => gather_in(rounds, layout, 0, root, bytes),
        Op::Gather { root, .. } => rounds.exchange(0, &[Send { to: root, bytes: input.unwrap_or(bytes) }], &mut []),
        Op::AllToAll => all_to_all(rounds, layout, extents, input, bytes, scratch.inbox()),
        Op::Barrier => barrier(rounds),
        Op::Send { to } => rounds.exchange(0, &[Send { to, bytes: input.unwrap_or(bytes) }], &mut []),
        Op::Recv { from } => rounds.exchange(0, &[], &mut [Receive { from, into: bytes, reduce: None }]),
    }
}

/// How a whole lies in its shards.
#[derive(Clone, Copy)]
struct Layout<'a> {
    dtype: DType,
    ranks: usize,
    shards: &'a Shards,
    /// Most bytes of a message in a ring.
    piece: usize,
}

impl Layout<'_> {
    /// Bytes of shard `index` (modulo the number of ranks).
    fn shard(self, index: usize) -> Range<usize> {
        let (range, size) = (self.shards.range(index % self.ranks), self.dtype.size());
        range.start * size..range.end * size
    }

    /// Bytes of the part of shard `index` that travels as its piece number `piece`, maybe none.
    fn part(self, index: usize, piece: usize) -> Range<usize> {
        let shard = self.shard(index);
        let length = self.piece_bytes();
        let start = shard.start + piece.saturating_mul(length).min(shard.len());
        start..shard.end.min(start.saturating_add(length))
    }

    /// Pieces of the longest shard, at least one.
    fn pieces(self) -> usize {
        let longest = self.shards.longest() * self.dtype.size();
        longest.div_ceil(self.piece_bytes()).max(1)
    }

    /// A step after all those of a ring.
    fn last_step(self) -> usize {
        (self.pieces() + 2 * self.ranks) * 2 * self.ranks
    }

    /// Whole elements.
    fn piece_bytes(self) -> usize {
        let size = self.dtype.size();
        (self.piece / size).max(1) * size
    }

    fn others(self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.ranks).filter(move |other| *other != rank)
    }
}

/// Whether this rank's contribution has to be multiplied before it is sent.
fn is_weighted(op: ReduceOp) -> bool {
    matches!(op, ReduceOp::ScaledSum(_))
}

/// Multiplies this rank's contribution by its factor, if it has one, which leaves a sum.
fn weighted(layout: Layout<'_>, op: ReduceOp, contribution: &mut [u8]) -> ReduceOp {
    let ReduceOp::ScaledSum(factor) = op else { return op };
    scale(layout.dtype, factor, contribution);
    ReduceOp::Sum
}

fn all_reduce(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    algorithm: Algorithm,
    op: ReduceOp,
    bytes: &mut [u8],
    scratch: &mut Room,
) -> Result<()> {
    match algorithm {
        Algorithm::Direct => direct_all_reduce(rounds, layout, op, bytes, scratch),
        Algorithm::Sharded => {
            sharded_reduce_scatter(rounds, layout, op, bytes, scratch)?;
            direct_all_gather(rounds, layout, 1, bytes)
        }
        Algorithm::RecursiveDoubling => recursive_doubling(rounds, layout, op, bytes, scratch),
        Algorithm::HalvingDoubling => halving_doubling(rounds, layout, op, bytes),
        _ => ring(rounds, layout, Some(op), Phases::Both, 0, bytes),
    }
}

fn reduce_scatter(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    algorithm: Algorithm,
    op: ReduceOp,
    bytes: &mut [u8],
    scratch: &mut Room,
) -> Result<()> {
    match algorithm {
        Algorithm::Sharded => sharded_reduce_scatter(rounds, layout, op, bytes, scratch),
        _ => ring(rounds, layout, Some(op), Phases::Reduce, 0, bytes),
    }
}

/// What a ring does.
#[derive(Clone, Copy, PartialEq)]
enum Phases {
    Reduce,
    Gather,
    Both,
}

/// Shards travel around the ring. To reduce-scatter, rank r sends shard r−1, then each shard that it has just reduced, to its
/// right; after N−1 steps shard r is complete at rank r, summed in the order r+1, r+2, …, r. To all-gather, rank r sends shard r,
/// then each shard that it has just received.
///
/// Shards are cut into pieces, and step k of a piece follows step k−1 of it only after one step of each of the pieces before
/// and after it: neighbours may be so much apart before one waits for the other, and what was reduced is sent on while it is in
/// cache.
fn ring(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    reduce: Option<ReduceOp>,
    phases: Phases,
    first_step: usize,
    bytes: &mut [u8],
) -> Result<()> {
    let (rank, ranks) = (rounds.rank, layout.ranks);
    let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
    let reducing = if phases == Phases::Gather { 0 } else { ranks - 1 };
    let steps = if phases == Phases::Both { 2 * (ranks - 1) } else { ranks - 1 };
    let pieces = layout.pieces();
    for turn in 0..pieces + steps.saturating_sub(1) {
        for step in 0..steps {
            let Some(piece) = turn.checked_sub(step).filter(|piece| *piece < pieces) else { continue };
            // From the first gathering step on, rank r holds shard r, r−1, … complete.
            let sent = if step < reducing { rank + 2 * ranks - step - 1 } else { rank + ranks - (step - reducing) };
            let (out, into) = two_ranges(bytes, layout.part(sent, piece), layout.part(sent + ranks - 1, piece));
            let reduce = if step < reducing { reduce.map(|op| (layout.dtype, op)) } else { None };
            let send = Send { to: right, bytes: out };
            let receive = Receive { from: left, into, reduce };
            let number = first_step + turn * steps + step;
            // Unequal shards may have unequal numbers of pieces; both ends know which are empty.
            match (send.bytes.is_empty() && piece > 0, receive.into.is_empty() && piece > 0) {
                (true, true) => {}
                (false, true) => rounds.exchange(number, &[send], &mut [])?,
                (true, false) => rounds.exchange(number, &[], &mut [receive])?,
                (false, false) => rounds.exchange(number, &[send], &mut [receive])?,
            }
            if step + 1 == reducing && reduce.is_some_and(|(_, op)| op == ReduceOp::Mean) {
                finish_mean(layout.dtype, &mut bytes[layout.part(rank, piece)], ranks);
            }
        }
    }
    Ok(())
}

/// Everyone sends everything to everyone, and reduces in rank order.
fn direct_all_reduce(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    op: ReduceOp,
    bytes: &mut [u8],
    scratch: &mut Room,
) -> Result<()> {
    let rank = rounds.rank;
    let inbox = scratch.bytes(bytes.len() * (layout.ranks - 1));
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes }).collect();
    rounds.exchange(0, &sends, &mut receives(inbox, layout.others(rank).map(|from| (from, bytes.len()))))?;
    reduce_with_inbox(layout, op, rank, inbox, bytes);
    Ok(())
}

/// Rank r collects shard r from everyone and reduces it in rank order.
fn sharded_reduce_scatter(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    op: ReduceOp,
    bytes: &mut [u8],
    scratch: &mut Room,
) -> Result<()> {
    let inbox = exchange_shards(rounds, layout, bytes, scratch)?;
    reduce_with_inbox(layout, op, rounds.rank, inbox, &mut bytes[layout.shard(rounds.rank)]);
    Ok(())
}

/// The same where the contribution is `whole`, which stays as it is; `own` holds rank r's part of it, and gets the reduced shard.
fn sharded_into(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    op: ReduceOp,
    whole: &[u8],
    own: &mut [u8],
    scratch: &mut Room,
) -> Result<()> {
    let inbox = exchange_shards(rounds, layout, whole, scratch)?;
    reduce_with_inbox(layout, op, rounds.rank, inbox, own);
    Ok(())
}

/// Everyone sends everyone else's shard there. Gives those of this rank, in rank order.
fn exchange_shards<'s>(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    whole: &[u8],
    scratch: &'s mut Room,
) -> Result<&'s [u8]> {
    let rank = rounds.rank;
    let length = layout.shard(rank).len();
    let inbox = scratch.bytes(length * (layout.ranks - 1));
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes: &whole[layout.shard(to)] }).collect();
    rounds.exchange(0, &sends, &mut receives(inbox, layout.others(rank).map(|from| (from, length))))?;
    Ok(inbox)
}

/// Everyone sends its own shard to everyone.
fn direct_all_gather(rounds: &mut Rounds<'_>, layout: Layout<'_>, step: usize, bytes: &mut [u8]) -> Result<()> {
    let rank = rounds.rank;
    let own = layout.shard(rank);
    let (before, rest) = bytes.split_at_mut(own.start);
    let (own, after) = rest.split_at_mut(own.len());
    let own = &*own;
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes: own }).collect();
    let mut all = receives(before, (0..rank).map(|from| (from, layout.shard(from).len())));
    all.extend(receives(after, (rank + 1..layout.ranks).map(|from| (from, layout.shard(from).len()))));
    rounds.exchange(step, &sends, &mut all)
}

/// Everyone sends everything to the root, which reduces it in rank order. The root's part.
fn direct_reduce(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    root: usize,
    op: ReduceOp,
    bytes: &mut [u8],
    scratch: &mut Room,
) -> Result<()> {
    let inbox = scratch.bytes(bytes.len() * (layout.ranks - 1));
    rounds.exchange(0, &[], &mut receives(inbox, layout.others(root).map(|from| (from, bytes.len()))))?;
    reduce_with_inbox(layout, op, root, inbox, bytes);
    Ok(())
}

/// At distances 1, 2, 4, … pairs exchange and reduce all that they have.
fn recursive_doubling(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    op: ReduceOp,
    bytes: &mut [u8],
    scratch: &mut Room,
) -> Result<()> {
    let (rank, ranks) = (rounds.rank, layout.ranks);
    let core = 1 << ranks.ilog2();
    let last = ranks.ilog2() as usize + 1;
    let reduce = Some((layout.dtype, op));
    if rank >= core {
        let to = rank - core;
        rounds.exchange(0, &[Send { to, bytes }], &mut [])?;
        return rounds.exchange(last, &[], &mut [Receive { from: to, into: bytes, reduce: None }]);
    }
    let folded = rank + core;
    if folded < ranks {
        rounds.exchange(0, &[], &mut [Receive { from: folded, into: bytes, reduce }])?;
    }
    for step in 1..last {
        let peer = rank ^ (1 << (step - 1));
        // What is sent must not change while the peer's part is added to it.
        let out = scratch.copy_of(bytes);
        let receive = Receive { from: peer, into: &mut *bytes, reduce };
        rounds.exchange(step, &[Send { to: peer, bytes: out }], &mut [receive])?;
    }
    if op == ReduceOp::Mean {
        finish_mean(layout.dtype, bytes, ranks);
    }
    if folded < ranks {
        rounds.exchange(last, &[Send { to: folded, bytes }], &mut [])?;
    }
    Ok(())
}

/// Halves what is exchanged in each round until every rank holds its shard of the reduction, then doubles it again.
fn halving_doubling(rounds: &mut Rounds<'_>, layout: Layout<'_>, op: ReduceOp, bytes: &mut [u8]) -> Result<()> {
    let (rank, ranks) = (rounds.rank, layout.ranks);
    let shards = |first: usize, number: usize| layout.shard(first).start..layout.shard(first + number - 1).end;
    let mut distance = ranks / 2;
    let mut step = 0;
    while distance > 0 {
        let peer = rank ^ distance;
        // Of the block of 2·distance shards around both, each keeps the half that it lies in.
        let (keep, give) = (rank / distance * distance, peer / distance * distance);
        let (out, into) = two_ranges(bytes, shards(give, distance), shards(keep, distance));
        let receive = Receive { from: peer, into, reduce: Some((layout.dtype, op)) };
        rounds.exchange(step, &[Send { to: peer, bytes: out }], &mut [receive])?;
        distance /= 2;
        step += 1;
    }
    if op == ReduceOp::Mean {
        finish_mean(layout.dtype, &mut bytes[layout.shard(rank)], ranks);
    }
    let mut distance = 1;
    while distance < ranks {
        let peer = rank ^ distance;
        let (mine, theirs) = (rank / distance * distance, peer / distance * distance);
        let (out, into) = two_ranges(bytes, shards(mine, distance), shards(theirs, distance));
        let receive = Receive { from: peer, into, reduce: None };
        rounds.exchange(step, &[Send { to: peer, bytes: out }], &mut [receive])?;
        distance *= 2;
        step += 1;
    }
    Ok(())
}

/// The root's part of a gather into the whole, where its own shard is in its place.
fn gather_in(rounds: &mut Rounds<'_>, layout: Layout<'_>, step: usize, root: usize, bytes: &mut [u8]) -> Result<()> {
    let own = layout.shard(root);
    let (before, rest) = bytes.split_at_mut(own.start);
    let after = &mut rest[own.len()..];
    let mut all = receives(before, (0..root).map(|from| (from, layout.shard(from).len())));
    all.extend(receives(after, (root + 1..layout.ranks).map(|from| (from, layout.shard(from).len()))));
    rounds.exchange(step, &[], &mut all)
}

fn tree_broadcast(rounds: &mut Rounds<'_>, root: usize, bytes: &mut [u8]) -> Result<()> {
    if let Some(from) = tree_parent(rounds.rank, root, rounds.ranks()) {
        rounds.exchange(0, &[], &mut [Receive { from, into: &mut *bytes, reduce: None }])?;
    }
    let sends: Vec<Send<'_>> =
        tree_children(rounds.rank, root, rounds.ranks()).into_iter().map(|to| Send { to, bytes }).collect();
    rounds.exchange(0, &sends, &mut [])
}

/// van de Geijn's broadcast.
fn scatter_all_gather(rounds: &mut Rounds<'_>, layout: Layout<'_>, root: usize, bytes: &mut [u8]) -> Result<()> {
    let rank = rounds.rank;
    if rank == root {
        let sends: Vec<Send<'_>> = layout.others(root).map(|to| Send { to, bytes: &bytes[layout.shard(to)] }).collect();
        rounds.exchange(0, &sends, &mut [])?;
    } else {
        let into = &mut bytes[layout.shard(rank)];
        rounds.exchange(0, &[], &mut [Receive { from: root, into, reduce: None }])?;
    }
    ring(rounds, layout, None, Phases::Gather, 1, bytes)
}

/// Everyone sends its block for everyone directly.
fn all_to_all(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    extents: &Extents,
    input: Option<&[u8]>,
    bytes: &mut [u8],
    scratch: &mut Room,
) -> Result<()> {
    let rank = rounds.rank;
    let out = match input {
        Some(input) => input,
        // Blocks that come would overwrite blocks that have not gone yet.
        None => {
            let out = scratch.copy_of(bytes);
            extents.copy_own(bytes, Some(out));
            out
        }
    };
    let slot = |index: usize| extents.bytes(extents.received.range(index));
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes: &out[layout.shard(to)] }).collect();
    let (before, rest) = bytes.split_at_mut(slot(rank).start);
    let after = &mut rest[slot(rank).len()..];
    let mut all = receives(before, (0..rank).map(|from| (from, slot(from).len())));
    all.extend(receives(after, (rank + 1..layout.ranks).map(|from| (from, slot(from).len()))));
    rounds.exchange(0, &sends, &mut all)
}

/// Dissemination: in round k every rank hears from the one 2ᵏ to its left.
fn barrier(rounds: &mut Rounds<'_>) -> Result<()> {
    let (rank, ranks) = (rounds.rank, rounds.ranks());
    let mut distance = 1;
    let mut step = 0;
    while distance < ranks {
        let send = Send { to: (rank + distance) % ranks, bytes: &[] };
        let receive = Receive { from: (rank + ranks - distance) % ranks, into: &mut [], reduce: None };
        rounds.exchange(step, &[send], &mut [receive])?;
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
fn reduce_with_inbox(layout: Layout<'_>, op: ReduceOp, rank: usize, inbox: &[u8], own: &mut [u8]) {
    let length = own.len();
    let of_rank = |other: usize| {
        let place = if other < rank { other } else { other.saturating_sub(1) };
        (other != rank).then(|| &inbox[place * length..(place + 1) * length])
    };
    reduce_in_rank_order(layout.dtype, op, layout.ranks, of_rank, own);
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
