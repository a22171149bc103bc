//! What each strategy sends in a step, computed from its definition and not from its code.
//!
//! With S_g the bytes of all gradients in the wire type, S_p those of all parameters in the type of computation, N ranks, A micro-steps,
//! and c(r) the bytes of rank r's shard (S/N, give or take one element):
//!
//! | strategy | rank r sends |
//! |---|---|
//! | `single` | 0 |
//! | `ps` | (N−1)·S_p from the server; S_g from every worker |
//! | `sharded-ps` | S_g − c_g(r), and (N−1)·c_p(r) |
//! | `ring` | 2·S_g(N−1)/N around the ring, to the element: 2·S_g − c_g(r) − c_g(r+1); a 16-bit wire as `ddp` |
//! | `ddp` | for each bucket what [`comm_core::table::payload_sent`] says of the algorithm that is chosen for it |
//! | `zero1`, `zero2` | for each bucket a reduce-scatter of its gradients and an all-gather of its parameters: (S_g + S_p)(N−1)/N |
//! | `fsdp` | for each segment a reduce-scatter, and A times two all-gathers, for the embedding one: (S_g + A(2·S_p − S_emb))(N−1)/N |
//! | `hierarchical` | n ranks a node, m nodes: 2·S_g(n−1)/n inside the node, an all-reduce of S_g/n between m ranks |

use comm_core::{Algorithm, DType, Op, ReduceOp, shard_range, table};
use serde::{Deserialize, Serialize};

use super::{Layout, StrategyKind, StrategyOptions};
use crate::precision::Precision;

/// What one rank sends in one step for gradients and parameters: no scalars, no framing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The strategy.
    pub kind: StrategyKind,
    /// Its options; `ranks_per_node` is the true number.
    pub options: &'a StrategyOptions,
    /// Type of computation.
    pub precision: Precision,
    /// Micro-steps a step.
    pub accumulation: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Whether ranks compare their calls before every operation: N−1 messages more a collective, one more at both ends of a send.
    pub checked: bool,
}

/// What `rank` sends in one step.
pub fn sent(run: Run<'_>, layout: &Layout, rank: usize) -> Expected {
    let Run { kind, options, precision, accumulation, ranks, checked } = run;
    let (others, total) = (ranks - 1, layout.total());
    let (gradient, parameter) = (options.wire.dtype(), precision.dtype());
    let mut tally = Tally { checked, ..Tally::default() };
    match kind {
        StrategyKind::Single => {}
        StrategyKind::Ps if rank == 0 => {
            tally.receive(others as u64);
            (1..ranks).for_each(|to| tally.send(to, parameter, total, ranks, rank));
        }
        StrategyKind::Ps => {
            tally.send(0, gradient, total, ranks, rank);
            tally.receive(1);
        }
        StrategyKind::ShardedPs => {
            tally.receive(2 * others as u64);
            let mine = shard_range(total, ranks, rank).len();
            for to in (0..ranks).filter(|to| *to != rank) {
                tally.send(to, gradient, shard_range(total, ranks, to).len(), ranks, rank);
                tally.send(to, parameter, mine, ranks, rank);
            }
        }
        StrategyKind::Ring => {
            let algorithm = super::buckets::ring(options.wire, ranks);
            for count in units(layout, options.fusion_bytes, options.fusion_bytes) {
                tally.collective(algorithm, Op::AllReduce(ReduceOp::Mean), gradient, count, ranks, rank);
            }
        }
        StrategyKind::Ddp => {
            for count in units(layout, options.first_bucket_bytes, options.bucket_bytes) {
                tally.collective(None, Op::AllReduce(ReduceOp::Mean), gradient, count, ranks, rank);
            }
        }
        StrategyKind::Zero1 | StrategyKind::Zero2 => {
            for count in units(layout, options.first_bucket_bytes, options.bucket_bytes) {
                tally.collective(None, Op::ReduceScatter(ReduceOp::Mean), gradient, count, ranks, rank);
                tally.collective(None, Op::AllGather, parameter, count, ranks, rank);
            }
        }
        StrategyKind::Fsdp => {
            for segment in 0..layout.segments() {
                let count = layout.len(segment);
                tally.collective(None, Op::ReduceScatter(ReduceOp::Mean), gradient, count, ranks, rank);
                let gathers = if segment == 0 { accumulation } else { 2 * accumulation };
                for _ in 0..gathers {
                    tally.collective(None, Op::AllGather, parameter, count, ranks, rank);
                }
            }
        }
        StrategyKind::Hierarchical => {
            let size = if options.ranks_per_node == 0 { ranks } else { options.ranks_per_node };
            let (node, inside) = super::hierarchical::place(rank, size);
            for count in units(layout, options.first_bucket_bytes, options.bucket_bytes) {
                let mut within = Tally { checked, ..Tally::default() };
                within.collective(None, Op::ReduceScatter(ReduceOp::Mean), gradient, count, size, inside);
                within.collective(None, Op::AllGather, gradient, count, size, inside);
                let shard = shard_range(count, size, inside).len();
                tally.collective(None, Op::AllReduce(ReduceOp::Mean), gradient, shard, ranks / size, node);
                tally.within(within);
            }
        }
    }
    tally.sum
}

/// The gradients' elements, from the last segment to the first, cut each time that enough has come together.
fn units(layout: &Layout, first: usize, others: usize) -> Vec<usize> {
    let mut units = Vec::new();
    let mut open = 0;
    for segment in (0..layout.segments()).rev() {
        open += layout.len(segment);
        if open * size_of::<f32>() >= if units.is_empty() { first } else { others } {
            units.push(std::mem::take(&mut open));
        }
    }
    if open > 0 {
        units.push(open);
    }
    units
}

#[derive(Default)]
struct Tally {
    sum: Expected,
    checked: bool,
}

impl Tally {
    fn receive(&mut self, operations: u64) {
        self.sum.operations += operations;
        self.sum.messages += operations * u64::from(self.checked);
    }

    fn send(&mut self, to: usize, dtype: DType, count: usize, ranks: usize, rank: usize) {
        self.collective(None, Op::Send { to }, dtype, count, ranks, rank);
    }

    fn collective(
        &mut self,
        algorithm: Option<Algorithm>,
        op: Op,
        dtype: DType,
        count: usize,
        ranks: usize,
        rank: usize,
    ) {
        let chosen = algorithm.unwrap_or_else(|| table::choose(op.kind(), dtype, count, ranks));
        self.sum.operations += 1;
        self.sum.payload += table::payload_sent_by(chosen, &op, dtype, count, ranks, rank);
        self.sum.messages += table::messages_sent_by(chosen, &op, dtype, count, ranks, rank);
        if self.checked {
            self.sum.messages += if let Op::Send { .. } = op { 1 } else { ranks as u64 - 1 };
        }
    }

    /// Adds what was sent inside the node.
    fn within(&mut self, Tally { sum: other, .. }: Tally) {
        self.sum.operations += other.operations;
        self.sum.payload += other.payload;
        self.sum.messages += other.messages;
        self.sum.node_payload += other.payload;
        self.sum.node_messages += other.messages;
    }
}
