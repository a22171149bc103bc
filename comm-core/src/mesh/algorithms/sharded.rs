//! Every rank collects its own shard from all others directly and reduces it in rank order; an all-reduce then sends the reduced shards to
//! all directly. The bytes of a ring, with one rounding.

use super::direct;
use super::layout::Layout;
use super::task::{Task, gather_shards, receives, reduce_with_inbox};
use super::{Entry, Formula, Method, Ranks};
use crate::copy::copy;
use crate::dtype::ReduceOp;
use crate::error::Result;
use crate::mesh::round::{Rounds, Send};
use crate::mesh::scratch::ScratchBuffer;
use crate::op::OpKind;

pub(super) const ENTRY: Entry = Entry {
    name: "sharded",
    rounds_once: true,
    methods: &[
        Method {
            kind: OpKind::AllReduce,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula { text: "2(N−1)", value: |work| 2 * work.others() },
            payload: Formula {
                text: "S − cᵣ + (N−1)·cᵣ",
                value: |work| work.other_shards() + work.others() * work.shard(work.rank),
            },
            run: all_reduce,
        },
        Method {
            kind: OpKind::ReduceScatter,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula { text: "N−1", value: |work| work.others() },
            payload: Formula { text: "S − cᵣ", value: |work| work.other_shards() },
            run: reduce_scatter,
        },
        Method {
            kind: OpKind::Reduce,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula { text: "N−1, and 1 unless root", value: |work| work.others() + work.unless_root(1) },
            payload: Formula {
                text: "S − cᵣ, and cᵣ unless root",
                value: |work| work.other_shards() + work.unless_root(work.shard(work.rank)),
            },
            run: reduce,
        },
    ],
};

fn all_reduce(mut task: Task<'_, '_>) -> Result<()> {
    reduce_own_shard(&mut task)?;
    direct::send_shards(task.rounds, task.layout, 1, task.bytes)
}

fn reduce_scatter(task: Task<'_, '_>) -> Result<()> {
    let (Some(input), Some(op)) = (task.input, task.unscaled()?) else {
        return task.reduce_scatter_by(reduce_in_place);
    };
    let own = task.own();
    copy(task.bytes, &input[own]);
    reduce_shard(task.rounds, task.layout, op, input, task.bytes, task.scratch.inbox())
}

fn reduce(mut task: Task<'_, '_>) -> Result<()> {
    let (root, layout, own) = (task.root()?, task.layout, task.own());
    if task.rank() == root {
        reduce_own_shard(&mut task)?;
        return gather_shards(task.rounds, layout, layout.last_step(), root, task.bytes);
    }
    let Some(op) = task.unscaled()? else { return task.reduce_by(reduce_in_place) };
    // What this rank holds stays as it is: only its own shard is worked on.
    let whole = task.input.unwrap_or(task.bytes);
    let (shard, inbox) = task.scratch.copy_and_inbox(&whole[own]);
    reduce_shard(task.rounds, layout, op, whole, shard, inbox)?;
    task.rounds.exchange(layout.last_step(), &[Send { to: root, bytes: shard }], &mut [])
}

/// Completes rank r's shard in its place in the buffer. What else is there is not specified.
fn reduce_own_shard(task: &mut Task<'_, '_>) -> Result<()> {
    let own = task.own();
    match (task.input, task.unscaled()?) {
        // An input that goes in as it is need not be copied as a whole.
        (Some(input), Some(op)) => {
            let shard = &mut task.bytes[own.clone()];
            copy(shard, &input[own]);
            reduce_shard(task.rounds, task.layout, op, input, shard, task.scratch.inbox())
        }
        _ => {
            let op = task.contribute()?;
            reduce_in_place(task.rounds, task.layout, op, task.bytes, task.scratch.inbox())
        }
    }
}

/// Rank r collects shard r from everyone and reduces it in rank order.
fn reduce_in_place(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    op: ReduceOp,
    bytes: &mut [u8],
    memory: &mut ScratchBuffer,
) -> Result<()> {
    let inbox = exchange_shards(rounds, layout, bytes, memory)?;
    reduce_with_inbox(layout, op, rounds.rank, inbox, &mut bytes[layout.shard(rounds.rank)]);
    Ok(())
}

/// The same where the contribution is `whole`, which stays as it is; `own` holds rank r's part of it, and gets the reduced shard.
fn reduce_shard(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    op: ReduceOp,
    whole: &[u8],
    own: &mut [u8],
    memory: &mut ScratchBuffer,
) -> Result<()> {
    let inbox = exchange_shards(rounds, layout, whole, memory)?;
    reduce_with_inbox(layout, op, rounds.rank, inbox, own);
    Ok(())
}

/// Everyone sends everyone else's shard there. Gives those of this rank, in rank order.
fn exchange_shards<'s>(
    rounds: &mut Rounds<'_>,
    layout: Layout<'_>,
    whole: &[u8],
    memory: &'s mut ScratchBuffer,
) -> Result<&'s [u8]> {
    let rank = rounds.rank;
    let length = layout.shard(rank).len();
    let inbox = memory.bytes(length * (layout.ranks - 1));
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes: &whole[layout.shard(to)] }).collect();
    rounds.exchange(0, &sends, &mut receives(inbox, layout.others(rank).map(|from| (from, length))))?;
    Ok(inbox)
}
