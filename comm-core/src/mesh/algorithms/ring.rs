//! Shards travel around the ring of ranks, in pieces that follow each other without waiting for a whole shard.
//!
//! To reduce-scatter, rank r sends shard r−1, then each shard that it has just reduced, to its right; after N−1 steps shard r is complete
//! at rank r, summed in the order r+1, r+2, …, r. To all-gather, rank r sends shard r, then each shard that it has just received.

use super::layout::Layout;
use super::task::{Task, gather_shards, two_ranges};
use super::{Entry, Formula, Method, Ranks};
use crate::copy::copy;
use crate::dtype::ReduceOp;
use crate::error::Result;
use crate::mesh::round::{Receive, Reduction, Rounds, Send};
use crate::mesh::scratch::ScratchBuffer;
use crate::op::OpKind;
use crate::reduce::finish_mean;

pub(super) const ENTRY: Entry = Entry {
    name: "ring",
    rounds_once: false,
    methods: &[
        Method {
            kind: OpKind::AllReduce,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula {
                text: "2·Σm − mᵣ − mᵣ₊₁",
                value: |work| work.ring_messages_without(work.rank) + work.ring_messages_without(work.rank + 1),
            },
            payload: Formula {
                text: "2S − cᵣ − cᵣ₊₁",
                value: |work| work.other_shards() + work.whole() - work.shard(work.rank + 1),
            },
            run: all_reduce,
        },
        Method {
            kind: OpKind::ReduceScatter,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula { text: "Σm − mᵣ", value: |work| work.ring_messages_without(work.rank) },
            payload: Formula { text: "S − cᵣ", value: |work| work.other_shards() },
            run: reduce_scatter,
        },
        Method {
            kind: OpKind::AllGather,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula { text: "Σm − mᵣ₊₁", value: |work| work.ring_messages_without(work.rank + 1) },
            payload: Formula { text: "S − cᵣ₊₁", value: |work| work.whole() - work.shard(work.rank + 1) },
            run: all_gather,
        },
        Method {
            kind: OpKind::Reduce,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula {
                text: "Σm − mᵣ, and 1 unless root",
                value: |work| work.ring_messages_without(work.rank) + work.unless_root(1),
            },
            payload: Formula {
                text: "S − cᵣ, and cᵣ unless root",
                value: |work| work.other_shards() + work.unless_root(work.shard(work.rank)),
            },
            run: reduce,
        },
    ],
};

fn all_reduce(mut task: Task<'_, '_>) -> Result<()> {
    let (op, input) = task.contribution()?;
    travel(task.rounds, task.layout, Some(op), Phases::Both, 0, task.bytes, input)
}

fn all_gather(task: Task<'_, '_>) -> Result<()> {
    gather(task.rounds, task.layout, 0, task.bytes)
}

fn reduce_scatter(task: Task<'_, '_>) -> Result<()> {
    let (Some(input), Some(op), true) = (task.input, task.unscaled()?, task.layout.ranks > 1) else {
        return task.reduce_scatter_by(reduce_in_place);
    };
    let own = task.own();
    let whole = task.scratch.inbox().bytes(input.len());
    travel(task.rounds, task.layout, Some(op), Phases::Reduce, 0, whole, Some(input))?;
    copy(task.bytes, &whole[own]);
    Ok(())
}

fn reduce(task: Task<'_, '_>) -> Result<()> {
    let (root, own, rank) = (task.root()?, task.own(), task.rank());
    let is_in_place = rank == root && task.input.is_none();
    let (Some(op), false, true) = (task.unscaled()?, is_in_place, task.layout.ranks > 1) else {
        return task.reduce_by(reduce_in_place);
    };
    let Task { rounds, layout, bytes, input, scratch, .. } = task;
    if rank == root {
        travel(rounds, layout, Some(op), Phases::Reduce, 0, bytes, input)?;
        return gather_shards(rounds, layout, layout.last_step(), root, bytes);
    }
    // What this rank holds stays as it is.
    let input = input.unwrap_or(bytes);
    let whole = scratch.inbox().bytes(input.len());
    travel(rounds, layout, Some(op), Phases::Reduce, 0, whole, Some(input))?;
    rounds.exchange(layout.last_step(), &[Send { to: root, bytes: &whole[own] }], &mut [])
}

fn reduce_in_place(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    op: ReduceOp,
    bytes: &mut [u8],
    _: &mut ScratchBuffer,
) -> Result<()> {
    travel(rounds, layout, Some(op), Phases::Reduce, 0, bytes, None)
}

/// Gathers the shards, of which each rank's own is in its place, in steps from `first_step` on.
pub(super) fn gather(rounds: &mut Rounds<'_>, layout: Layout<'_>, first_step: usize, bytes: &mut [u8]) -> Result<()> {
    travel(rounds, layout, None, Phases::Gather, first_step, bytes, None)
}

/// What a ring does.
#[derive(Clone, Copy, PartialEq)]
enum Phases {
    Reduce,
    Gather,
    Both,
}

/// Shards are cut into pieces, and step k of a piece follows step k−1 of it only after one step of each of the pieces before
/// and after it: neighbours may be so much apart before one waits for the other, and what was reduced is sent on while it is in
/// cache. This rank's contribution is `input`, or else what lies in `bytes`.
fn travel(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    reduce: Option<ReduceOp>,
    phases: Phases,
    first_step: usize,
    bytes: &mut [u8],
    input: Option<&[u8]>,
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
            let (give, take) = (layout.part(sent, piece), layout.part(sent + ranks - 1, piece));
            let (out, into) = two_ranges(bytes, give.clone(), take.clone());
            // What is sent first is this rank's own part; each other part is combined with its own here, once.
            let out = input.filter(|_| step == 0).map_or(out, |input| &input[give]);
            let operand = input.map(|input| &input[take]);
            let reduce = reduce.filter(|_| step < reducing).map(|op| Reduction { dtype: layout.dtype, op, operand });
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
            if step + 1 == reducing && reduce.is_some_and(|reduction| reduction.op == ReduceOp::Mean) {
                finish_mean(layout.dtype, &mut bytes[layout.part(rank, piece)], ranks);
            }
        }
    }
    Ok(())
}
