//! What each strategy sends in a step, computed from its definition and not from what it does; each strategy's file has its own.
//!
//! With S_g the bytes of all gradients in the wire type, S_p those of all parameters in the type of computation, N ranks, A micro-steps,
//! and c(r) the bytes of rank r's shard (S/N, give or take one element):
//!
//! | strategy | rank r sends |
//! |---|---|
//! | `single` | 0 |
//! | `ps` | (N−1)·S_p from the server; S_g from every worker, compressed of each bucket of n elements E(n), as below |
//! | `sharded-ps` | for each bucket what is not its shard of the gradients, and N−1 times its shard of the parameters |
//! | `ring` | 2·S_g(N−1)/N around the ring, to the element: 2·S_g − c_g(r) − c_g(r+1); a 16-bit wire as `ddp` |
//! | `ddp` | for each bucket what [`comm_core::table::payload_sent`] says of the algorithm that is chosen for it |
//! | `ring`, `ddp` compressed | for each bucket of n elements, with E(n) = n + 4·⌈n/256⌉ of `int8`, ⌈n/8⌉ + 4·⌈n/256⌉ of `sign`, 8·⌈f·n⌉ of `topk:f`: `int8` and `sign` an all-to-all and an all-gather of N·E(⌈n/N⌉) bytes; `topk:f` an all-gather of N·E(n); `powersgd:r` all-reduces of r·rows and of r·columns f32 of each matrix with r·(rows + columns) < rows·columns, the first with all else |
//! | `zero1`, `zero2` | for each bucket a reduce-scatter of its gradients and an all-gather of its parameters: (S_g + S_p)(N−1)/N |
//! | `fsdp` | for each segment a reduce-scatter, and A times two all-gathers, for the embedding one: (S_g + A(2·S_p − S_emb))(N−1)/N |
//! | `hierarchical` | n ranks a node, m nodes: 2·S_g(n−1)/n inside the node, an all-reduce of S_g/n between m ranks; in nodes of unequal sizes a reduction of S_g to one rank of each, an all-reduce among those, and a broadcast |
//! | `hsdp` | n ranks a node, m nodes: what `fsdp` sends on n ranks inside the node, an all-reduce of S_g/n between m ranks |
//! | `async-ps` | the bytes of `ps` with a dedicated server, each way in one operation, 24 bytes more from every worker, and 8 more to it; the server in the mean |
//! | `local-sgd`, `diloco` | after every H steps, and after the last, what `ddp` sends in each |
//! | `streaming-diloco` | of P fragments each: after every H steps, and after the last, what `ddp` sends of it in each |
//! | `sparta` | an all-reduce of ⌈p·S_g⌉ a step; in the last step what `ddp` sends of f32 |
//!
//! Parameters of `ps`, `sharded-ps`, `zero1` and `zero2` may travel in the step after the update that made them: a step sends them once for each
//! update whose parameters come in it.

use comm_core::{Algorithm, DType, Op, table};
use isocomm::Nodes;
use serde::{Deserialize, Serialize};

use super::{Layout, StrategyOptions};
use crate::precision::Precision;
use crate::segments::SegmentInfo;

/// What one rank sends in one step for gradients and parameters: no scalars, no framing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Expected {
    /// Operations that it takes part in.
    pub operations: u64,
    /// Payload bytes to ranks of all nodes, or of a single one.
    pub payload: u64,
    /// Messages, likewise. An operation's pieces are messages of their own.
    pub messages: u64,
    /// Of these, payload bytes inside the node, where strategies tell nodes apart.
    pub node_payload: u64,
    /// Of these, messages inside the node.
    pub node_messages: u64,
}

impl std::iter::Sum for Expected {
    fn sum<I: Iterator<Item = Self>>(several: I) -> Self {
        several.fold(Expected::default(), |sum, one| Expected {
            operations: sum.operations + one.operations,
            payload: sum.payload + one.payload,
            messages: sum.messages + one.messages,
            node_payload: sum.node_payload + one.node_payload,
            node_messages: sum.node_messages + one.node_messages,
        })
    }
}

impl Expected {
    /// The same without the bytes and messages inside the node. Operations there still count.
    #[must_use]
    pub fn between_nodes(self) -> Self {
        Expected {
            payload: self.payload - self.node_payload,
            messages: self.messages - self.node_messages,
            node_payload: 0,
            node_messages: 0,
            ..self
        }
    }
}

/// What a run is, as far as its messages depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// Its options.
    pub options: &'a StrategyOptions,
    /// What tensors each segment consists of, where something is compressed as a matrix.
    pub tensors: &'a [SegmentInfo],
    /// Type of computation.
    pub precision: Precision,
    /// Micro-steps a step.
    pub accumulation: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Who shares a node.
    pub nodes: &'a Nodes,
    /// Whether ranks compare their calls before every operation: N−1 messages more a collective, one more at both ends of a send.
    pub checked: bool,
}

/// The gradients' elements, from the last segment to the first, cut each time that enough has come together.
pub(super) fn units(layout: &Layout, first: usize, others: usize) -> Vec<usize> {
    units_of((0..layout.segments()).rev().map(|segment| layout.len(segment)), first, others)
}

/// The same of segments of these lengths.
pub(super) fn units_of(lengths: impl Iterator<Item = usize>, first: usize, others: usize) -> Vec<usize> {
    let mut units = Vec::new();
    let mut open = 0;
    for len in lengths {
        open += len;
        if open * size_of::<f32>() >= if units.is_empty() { first } else { others } {
            units.push(std::mem::take(&mut open));
        }
    }
    if open > 0 {
        units.push(open);
    }
    units
}

/// Adds up what one of some ranks sends.
pub(super) struct Tally {
    pub(super) sum: Expected,
    ranks: usize,
    rank: usize,
    checked: bool,
}

impl Tally {
    /// Among all ranks of `run`.
    pub(super) fn of(run: &Run<'_>, rank: usize) -> Self {
        Tally::among(run, run.ranks, rank)
    }

    /// Among `ranks` ranks, of which it is that with the number `rank`.
    pub(super) fn among(run: &Run<'_>, ranks: usize, rank: usize) -> Self {
        Tally { sum: Expected::default(), ranks, rank, checked: run.checked }
    }

    /// Adds receives.
    pub(super) fn receive(&mut self, operations: u64) {
        self.sum.operations += operations;
        self.sum.messages += operations * u64::from(self.checked);
    }

    /// Adds an operation, by the table's algorithm where none is given.
    pub(super) fn collective(&mut self, algorithm: Option<Algorithm>, op: Op, dtype: DType, count: usize) {
        let Tally { ranks, rank, checked, .. } = *self;
        let chosen = algorithm.unwrap_or_else(|| table::choose(op.kind(), dtype, count, ranks));
        self.sum.operations += 1;
        self.sum.payload += table::payload_sent_by(chosen, &op, dtype, count, ranks, rank);
        self.sum.messages += table::messages_sent_by(chosen, &op, dtype, count, ranks, rank);
        if checked {
            self.sum.messages += if let Op::Send { .. } = op { 1 } else { ranks as u64 - 1 };
        }
    }

    /// Adds what was sent inside the node.
    pub(super) fn within_node(&mut self, Tally { sum: other, .. }: Tally) {
        self.sum.operations += other.operations;
        self.sum.payload += other.payload;
        self.sum.messages += other.messages;
        self.sum.node_payload += other.payload;
        self.sum.node_messages += other.messages;
    }
}
