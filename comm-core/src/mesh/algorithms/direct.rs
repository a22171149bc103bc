//! Every pair of ranks that has data for each other exchanges it directly, in one round. A barrier takes log₂N rounds.

use super::layout::Layout;
use super::task::{Task, around, gather_shards, receives, reduce_with_inbox, scaled};
use super::{Entry, Formula, Method, Ranks};
use crate::error::{Error, Result};
use crate::mesh::round::{Receive, Rounds, Send};
use crate::op::{Op, OpKind};

const NOTHING: Formula = Formula { text: "0", value: |_| 0 };

pub(super) const ENTRY: Entry = Entry {
    name: "direct",
    rounds_once: true,
    methods: &[
        Method {
            kind: OpKind::AllReduce,
            ranks: Ranks::Any,
            is_fallback: false,
            messages: Formula { text: "N−1", value: |work| work.others() },
            payload: Formula { text: "(N−1)·S", value: |work| work.others() * work.whole() },
            run: all_reduce,
        },
        Method {
            kind: OpKind::AllGather,
            ranks: Ranks::Any,
            is_fallback: false,
            messages: Formula { text: "N−1", value: |work| work.others() },
            payload: Formula { text: "(N−1)·cᵣ", value: |work| work.others() * work.shard(work.rank) },
            run: all_gather,
        },
        Method {
            kind: OpKind::Reduce,
            ranks: Ranks::Any,
            is_fallback: false,
            messages: Formula { text: "1 unless root", value: |work| work.unless_root(1) },
            payload: Formula { text: "S unless root", value: |work| work.unless_root(work.whole()) },
            run: reduce,
        },
        Method {
            kind: OpKind::Scatter,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula { text: "N−1 from the root", value: |work| work.on_root(work.others()) },
            payload: Formula { text: "S − cᵣ from the root", value: |work| work.on_root(work.other_shards()) },
            run: scatter,
        },
        Method {
            kind: OpKind::Gather,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula { text: "1 unless root", value: |work| work.unless_root(1) },
            payload: Formula { text: "cᵣ unless root", value: |work| work.unless_root(work.shard(work.rank)) },
            run: gather,
        },
        Method {
            kind: OpKind::AllToAll,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula { text: "N−1", value: |work| work.others() },
            payload: Formula { text: "S − cᵣ", value: |work| work.other_shards() },
            run: all_to_all,
        },
        Method {
            kind: OpKind::Barrier,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula {
                text: "⌈log₂N⌉", value: |work| u64::from(work.ranks.next_power_of_two().ilog2())
            },
            payload: NOTHING,
            run: barrier,
        },
        Method {
            kind: OpKind::Send,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: Formula { text: "1", value: |_| 1 },
            payload: Formula { text: "S", value: |work| work.whole() },
            run: send_or_receive,
        },
        Method {
            kind: OpKind::Recv,
            ranks: Ranks::Any,
            is_fallback: true,
            messages: NOTHING,
            payload: NOTHING,
            run: send_or_receive,
        },
    ],
};

/// Everyone sends everything to everyone, and reduces in rank order.
fn all_reduce(mut task: Task<'_, '_>) -> Result<()> {
    let op = task.contribute()?;
    let Task { rounds, layout, bytes, scratch, .. } = task;
    let rank = rounds.rank;
    let inbox = scratch.inbox().bytes(bytes.len() * (layout.ranks - 1));
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes }).collect();
    rounds.exchange(0, &sends, &mut receives(inbox, layout.others(rank).map(|from| (from, bytes.len()))))?;
    reduce_with_inbox(layout, op, rank, inbox, bytes);
    Ok(())
}

fn all_gather(task: Task<'_, '_>) -> Result<()> {
    send_shards(task.rounds, task.layout, 0, task.bytes)
}

/// Everyone sends its own shard, which is in its place, to everyone.
pub(super) fn send_shards(rounds: &mut Rounds<'_>, layout: Layout<'_>, step: usize, bytes: &mut [u8]) -> Result<()> {
    let rank = rounds.rank;
    let (own, mut receives) = around(bytes, rank, layout.ranks, |rank| layout.shard(rank));
    let own = &*own;
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes: own }).collect();
    rounds.exchange(step, &sends, &mut receives)
}

/// Everyone sends everything to the root, which reduces it in rank order.
fn reduce(mut task: Task<'_, '_>) -> Result<()> {
    let root = task.root()?;
    if task.rank() != root {
        let op = task.reduce_op()?;
        let is_unscaled = task.unscaled()?.is_some();
        let Task { rounds, layout, bytes, input, scratch, .. } = task;
        let mut own = input.unwrap_or(bytes);
        if !is_unscaled {
            let copy = scratch.inbox().copy_of(own);
            scaled(layout, op, copy);
            own = copy;
        }
        return rounds.exchange(0, &[Send { to: root, bytes: own }], &mut []);
    }
    let op = task.contribute()?;
    let Task { rounds, layout, bytes, scratch, .. } = task;
    let inbox = scratch.inbox().bytes(bytes.len() * (layout.ranks - 1));
    rounds.exchange(0, &[], &mut receives(inbox, layout.others(root).map(|from| (from, bytes.len()))))?;
    reduce_with_inbox(layout, op, root, inbox, bytes);
    Ok(())
}

fn scatter(task: Task<'_, '_>) -> Result<()> {
    let root = task.root()?;
    let Task { rounds, layout, bytes, input, .. } = task;
    if rounds.rank != root {
        return rounds.exchange(0, &[], &mut [Receive { from: root, into: bytes, reduce: None }]);
    }
    let whole = input.unwrap_or(bytes);
    let sends: Vec<Send<'_>> = layout.others(root).map(|to| Send { to, bytes: &whole[layout.shard(to)] }).collect();
    rounds.exchange(0, &sends, &mut [])
}

fn gather(task: Task<'_, '_>) -> Result<()> {
    let root = task.root()?;
    if task.rank() == root {
        return gather_shards(task.rounds, task.layout, 0, root, task.bytes);
    }
    task.rounds.exchange(0, &[Send { to: root, bytes: task.input.unwrap_or(task.bytes) }], &mut [])
}

/// Everyone sends its block for everyone.
fn all_to_all(task: Task<'_, '_>) -> Result<()> {
    let Task { rounds, layout, bytes, input, extents, scratch, .. } = task;
    let rank = rounds.rank;
    let out: &[u8] = match input {
        Some(input) => input,
        // Blocks that come would overwrite blocks that have not gone yet.
        None => {
            let out = scratch.inbox().copy_of(bytes);
            extents.copy_own(bytes, Some(out));
            out
        }
    };
    let (_, mut receives) = around(bytes, rank, layout.ranks, |from| extents.bytes(extents.received.range(from)));
    let sends: Vec<Send<'_>> = layout.others(rank).map(|to| Send { to, bytes: &out[layout.shard(to)] }).collect();
    rounds.exchange(0, &sends, &mut receives)
}

/// Dissemination: in round k every rank hears from the one 2ᵏ to its left.
fn barrier(task: Task<'_, '_>) -> Result<()> {
    let (rank, ranks) = (task.rank(), task.layout.ranks);
    let mut distance = 1;
    let mut step = 0;
    while distance < ranks {
        let send = Send { to: (rank + distance) % ranks, bytes: &[] };
        let receive = Receive { from: (rank + ranks - distance) % ranks, into: &mut [], reduce: None };
        task.rounds.exchange(step, &[send], &mut [receive])?;
        distance *= 2;
        step += 1;
    }
    Ok(())
}

/// Both ends of a message: they are one operation in headers and tables.
fn send_or_receive(task: Task<'_, '_>) -> Result<()> {
    match task.op {
        Op::Send { to } => task.rounds.exchange(0, &[Send { to, bytes: task.input.unwrap_or(task.bytes) }], &mut []),
        Op::Recv { from } => task.rounds.exchange(0, &[], &mut [Receive { from, into: task.bytes, reduce: None }]),
        op => Err(Error::Internal(format!("{} as a message", op.kind()))),
    }
}
