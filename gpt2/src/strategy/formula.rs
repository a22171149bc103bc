//! Payload bytes that each strategy sends in a step, computed from its definition and not from its code.
//!
//! With S_g the bytes of all gradients in the wire type, S_p those of all parameters in f32, N ranks, and c(r) the bytes of rank r's
//! shard (S/N, give or take one element):
//!
//! | strategy | rank r sends |
//! |---|---|
//! | `single` | 0 |
//! | `ps` | (N−1)·S_p from the server; S_g from every worker |
//! | `sharded-ps` | S_g − c_g(r), and (N−1)·c_p(r) |
//! | `ring` | 2·S_g(N−1)/N around the ring, to the element: 2·S_g − c_g(r) − c_g(r+1); a 16-bit wire as `ddp` |
//! | `ddp` | for each bucket what [`comm_core::table::payload_sent`] says of the algorithm that is chosen for it |

use comm_core::{Algorithm, Op, ReduceOp, shard_range, table};

use super::{Layout, StrategyKind, StrategyOptions, width};

/// Payload bytes that `rank` of `ranks` sends in one step (gradients and parameters; no scalars, no framing).
pub fn payload_sent(kind: StrategyKind, layout: &Layout, options: &StrategyOptions, ranks: usize, rank: usize) -> u64 {
    let others = ranks as u64 - 1;
    let total = layout.total() as u64;
    let (gradient, parameter) = (width(options.wire.dtype()), size_of::<f32>() as u64);
    // From the last segment to the first, an all-reduce each time that enough has come together, and one for the rest.
    let all_reduce = |enough: usize, algorithm: Option<Algorithm>| -> u64 {
        let (op, dtype) = (Op::AllReduce(ReduceOp::Mean), options.wire.dtype());
        let bytes = |elements| {
            let chosen = algorithm.unwrap_or_else(|| table::choose(op.kind(), dtype, elements, ranks));
            table::payload_sent_by(chosen, &op, dtype, elements, ranks, rank)
        };
        let (mut sum, mut open) = (0, 0);
        for segment in (0..layout.segments()).rev() {
            open += layout.len(segment);
            if open * size_of::<f32>() >= enough {
                sum += bytes(open);
                open = 0;
            }
        }
        sum + bytes(open)
    };
    match kind {
        StrategyKind::Single => 0,
        StrategyKind::Ps if ranks == 1 => 0,
        StrategyKind::Ps if rank == 0 => others * total * parameter,
        StrategyKind::Ps => total * gradient,
        StrategyKind::ShardedPs => {
            let shard = shard_range(layout.total(), ranks, rank).len() as u64;
            (total - shard) * gradient + others * shard * parameter
        }
        StrategyKind::Ring => all_reduce(usize::MAX, super::buckets::ring(options.wire, ranks)),
        StrategyKind::Ddp => all_reduce(options.bucket_bytes, None),
    }
}
