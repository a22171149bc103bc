//! The root sends each rank its shard, then the shards are gathered around a ring: van de Geijn's broadcast.

use super::ring;
use super::task::Task;
use super::{Entry, Formula, Method, Ranks};
use crate::error::Result;
use crate::mesh::round::{Receive, Send};
use crate::op::OpKind;

pub(super) const ENTRY: Entry = Entry {
    name: "scatter-all-gather",
    rounds_once: false,
    methods: &[Method {
        kind: OpKind::Broadcast,
        ranks: Ranks::Any,
        is_fallback: true,
        messages: Formula {
            text: "Σm − mᵣ₊₁, and from the root N−1 more",
            value: |work| work.ring_messages_without(work.rank + 1) + work.on_root(work.others()),
        },
        payload: Formula {
            text: "S − cᵣ₊₁, and from the root S − cᵣ more",
            value: |work| work.whole() - work.shard(work.rank + 1) + work.on_root(work.other_shards()),
        },
        run: broadcast,
    }],
};

fn broadcast(task: Task<'_, '_>) -> Result<()> {
    let (root, own) = (task.root()?, task.own());
    let Task { rounds, layout, bytes, .. } = task;
    if rounds.rank == root {
        let sends: Vec<Send<'_>> = layout.others(root).map(|to| Send { to, bytes: &bytes[layout.shard(to)] }).collect();
        rounds.exchange(0, &sends, &mut [])?;
    } else {
        rounds.exchange(0, &[], &mut [Receive { from: root, into: &mut bytes[own], reduce: None }])?;
    }
    ring::gather(rounds, layout, 1, bytes)
}
