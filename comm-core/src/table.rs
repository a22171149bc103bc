//! Which algorithm runs, and how many payload bytes it sends.
//!
//! The choice is a pure function of (operation, type, bytes, ranks), the same for every transport, so that results do not
//! depend on the transport. [`TABLE`] names the version, which ranks agree on at rendezvous.

use crate::dtype::DType;
use crate::op::{Algorithm, Op, OpKind, shard_range};

/// The name of this table. It changes whenever [`choose`] does.
pub const TABLE: &str = "1: direct up to 4096 B; then ring, 16-bit types sharded; broadcast by tree";

/// Up to this many bytes a round less is worth more than the bytes it costs.
const SMALL: usize = 4096;

/// The algorithm for an operation over `count` elements of `dtype` on `ranks` ranks.
pub fn choose(kind: OpKind, dtype: DType, count: usize, ranks: usize) -> Algorithm {
    let small = count.saturating_mul(dtype.size()) <= SMALL || ranks == 1;
    match kind {
        OpKind::AllReduce | OpKind::Reduce if small => Algorithm::Direct,
        OpKind::AllReduce | OpKind::Reduce if dtype.accumulates_in_f32() => Algorithm::Sharded,
        OpKind::ReduceScatter if small || dtype.accumulates_in_f32() => Algorithm::Sharded,
        OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter => Algorithm::Ring,
        OpKind::AllGather => {
            if small {
                Algorithm::Direct
            } else {
                Algorithm::Ring
            }
        }
        OpKind::Broadcast => Algorithm::Tree,
        OpKind::Scatter | OpKind::Gather | OpKind::Barrier | OpKind::Send | OpKind::Recv => Algorithm::Direct,
    }
}

/// Payload bytes that `rank` of `ranks` sends in an operation over `count` elements, by the formula of the algorithm that
/// [`choose`] picks. With S the bytes of the whole and cᵣ those of shard r:
///
/// | operation | direct | ring | sharded |
/// |---|---|---|---|
/// | all-reduce | (N−1)·S | 2S − cᵣ − cᵣ₊₁ | S − cᵣ + (N−1)·cᵣ |
/// | reduce-scatter | | S − cᵣ | S − cᵣ |
/// | all-gather | (N−1)·cᵣ | S − cᵣ₊₁ | |
/// | reduce | S unless root | S − cᵣ, and cᵣ unless root | as ring |
/// | scatter, gather | root: S − c_root; else cᵣ | | |
///
/// Broadcast: S for each child in the binomial tree. Barriers carry no payload. Summed over ranks, ring and sharded all-reduce
/// are the textbook 2S(N−1).
pub fn payload_sent(op: &Op, dtype: DType, count: usize, ranks: usize, rank: usize) -> u64 {
    let whole = (count * dtype.size()) as u64;
    let shard = |index: usize| (shard_range(count, ranks, index % ranks).len() * dtype.size()) as u64;
    let others = ranks as u64 - 1;
    if others == 0 {
        return 0;
    }
    match (op, choose(op.kind(), dtype, count, ranks)) {
        (Op::AllReduce(_), Algorithm::Direct) => others * whole,
        (Op::AllReduce(_), Algorithm::Ring) => 2 * whole - shard(rank) - shard(rank + 1),
        (Op::AllReduce(_), _) => whole - shard(rank) + others * shard(rank),
        (Op::ReduceScatter(_), _) => whole - shard(rank),
        (Op::AllGather, Algorithm::Direct) => others * shard(rank),
        (Op::AllGather, _) => whole - shard(rank + 1),
        (Op::Reduce { root, .. }, Algorithm::Direct) => {
            if rank == *root {
                0
            } else {
                whole
            }
        }
        (Op::Reduce { root, .. }, _) => whole - shard(rank) + if rank == *root { 0 } else { shard(rank) },
        (Op::Broadcast { root }, _) => whole * tree_children(rank, *root, ranks).len() as u64,
        (Op::Scatter { root, .. }, _) => {
            if rank == *root {
                whole - shard(rank)
            } else {
                0
            }
        }
        (Op::Gather { root, .. }, _) => {
            if rank == *root {
                0
            } else {
                shard(rank)
            }
        }
        (Op::Send { .. }, _) => whole,
        (Op::Recv { .. } | Op::Barrier, _) => 0,
    }
}

/// The rank from which `rank` receives in a binomial tree, `None` for the root.
pub(crate) fn tree_parent(rank: usize, root: usize, ranks: usize) -> Option<usize> {
    let relative = (rank + ranks - root) % ranks;
    // The parent's number is this one's without its lowest set bit.
    (relative != 0).then(|| ((relative & (relative - 1)) + root) % ranks)
}

/// The ranks to which `rank` sends in a binomial tree, those with the largest subtrees first.
pub(crate) fn tree_children(rank: usize, root: usize, ranks: usize) -> Vec<usize> {
    let relative = (rank + ranks - root) % ranks;
    let bits = if relative == 0 { usize::BITS } else { relative.trailing_zeros() };
    (0..bits)
        .map(|bit| 1usize.checked_shl(bit).map_or(usize::MAX, |step| relative.saturating_add(step)))
        .take_while(|child| *child < ranks)
        .map(|child| (child + root) % ranks)
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_reaches_every_rank_once() {
        for ranks in 1..20 {
            for root in 0..ranks {
                for rank in 0..ranks {
                    for child in tree_children(rank, root, ranks) {
                        assert_eq!(tree_parent(child, root, ranks), Some(rank));
                    }
                }
                let children: usize = (0..ranks).map(|rank| tree_children(rank, root, ranks).len()).sum();
                assert_eq!(children, ranks - 1);
            }
        }
    }

    #[test]
    fn ring_totals_are_the_textbook_ones() {
        use crate::dtype::ReduceOp;
        for ranks in [2, 3, 4, 7] {
            for (op, factor) in
                [(Op::AllReduce(ReduceOp::Sum), 2), (Op::AllGather, 1), (Op::ReduceScatter(ReduceOp::Sum), 1)]
            {
                for dtype in [DType::F32, DType::Bf16] {
                    let sum: u64 = (0..ranks).map(|rank| payload_sent(&op, dtype, 10_007, ranks, rank)).sum();
                    assert_eq!(sum, factor * 10_007 * dtype.size() as u64 * (ranks as u64 - 1));
                }
            }
        }
    }
}
