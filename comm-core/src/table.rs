//! Which algorithm runs, and how many messages and payload bytes it sends.
//!
//! The choice is a pure function of (operation, type, bytes, ranks, table). One fixed table serves all transports, so that results
//! do not depend on the transport. A program has its ranks agree on [`Table::fingerprint`] at rendezvous. Another [`Table`] can be
//! put into [`MeshOptions`](crate::MeshOptions): it may suit a network better, and gives up bit-identity with runs under this one.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::dtype::DType;
use crate::op::{Algorithm, Op, OpKind, shard_range};

/// The name of the fixed table. It changes whenever the table does.
pub const TABLE: &str = "2: recursive doubling, halving-doubling, ring; 16-bit types direct, sharded";

/// Rules by which algorithms are chosen.
///
/// ```
/// use comm_core::{Algorithm, DType, MeshOptions, OpKind, Table, table};
///
/// let mut table = Table::fixed();
/// assert_eq!(table.choose(OpKind::AllReduce, DType::F32, 1 << 22, 4), Algorithm::Ring);
/// // A network on which rounds are dear: its own table, with a name of its own.
/// table.name = "halving and doubling up to 64 MiB".into();
/// let rule = table::Rule {
///     kind: OpKind::AllReduce,
///     ranks: usize::MAX,
///     bytes: 64 << 20,
///     algorithm: Algorithm::HalvingDoubling,
/// };
/// table.rules.to_mut().insert(0, rule);
/// assert_eq!(table.choose(OpKind::AllReduce, DType::F32, 1 << 22, 4), Algorithm::HalvingDoubling);
/// let options = MeshOptions::default().with_table(table);
/// # let _ = options;
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// For people.
    pub name: Cow<'static, str>,
    /// The first that matches decides. An algorithm that cannot run an operation is passed over.
    pub rules: Cow<'static, [Rule]>,
    /// Bytes that travel as one message in a ring, at most.
    pub piece: usize,
}

/// One line of a [`Table`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// The operation that it is about.
    pub kind: OpKind,
    /// Holds for so many ranks at most.
    pub ranks: usize,
    /// Holds for so many bytes of the whole at most.
    pub bytes: usize,
    /// What to run then.
    pub algorithm: Algorithm,
}

const fn rule(kind: OpKind, ranks: usize, bytes: usize, algorithm: Algorithm) -> Rule {
    Rule { kind, ranks, bytes, algorithm }
}

const ANY: usize = usize::MAX;

/// Made from `bench collectives --tune` over shm, tcp-raw, tcp and quic, with 2 and 4 ranks on 2 cores. Beyond 8 ranks nothing was
/// measured: there a long broadcast is scattered and gathered because that bounds what its root sends to twice the whole.
const RULES: [Rule; 9] = [
    // With two ranks one round of everything costs no more bytes than two rounds of halves.
    rule(OpKind::AllReduce, 2, 256 << 10, Algorithm::RecursiveDoubling),
    rule(OpKind::AllReduce, ANY, 64 << 10, Algorithm::RecursiveDoubling),
    rule(OpKind::AllReduce, ANY, 4 << 20, Algorithm::HalvingDoubling),
    // Numbers of ranks that are no power of two, and the 16-bit floats.
    rule(OpKind::AllReduce, ANY, 4 << 10, Algorithm::Direct),
    rule(OpKind::Reduce, ANY, 4 << 10, Algorithm::Direct),
    rule(OpKind::ReduceScatter, ANY, 4 << 10, Algorithm::Sharded),
    rule(OpKind::AllGather, ANY, 64 << 10, Algorithm::Direct),
    rule(OpKind::Broadcast, 8, ANY, Algorithm::Tree),
    rule(OpKind::Broadcast, ANY, 512 << 10, Algorithm::Tree),
];

impl Table {
    /// The table that is used unless another one is asked for.
    pub const fn fixed() -> Table {
        Table { name: Cow::Borrowed(TABLE), rules: Cow::Borrowed(&RULES), piece: 512 << 10 }
    }

    /// A number in hexadecimal that is another one for every other table: ranks with different tables would wait for messages
    /// that never come.
    pub fn fingerprint(&self) -> String {
        let mut hash = Sha256::new();
        hash.update(format!("{} {} ", self.name, self.piece));
        for Rule { kind, ranks, bytes, algorithm } in self.rules.iter() {
            hash.update(format!("{kind} {ranks} {bytes} {algorithm} "));
        }
        hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
    }

    /// Messages that `rank` of `ranks` sends in an operation over `count` elements in even shards, by the definition of the
    /// algorithm. With N ranks, P the greatest power of two not above N, and mᵣ the messages as which shard r travels around a
    /// ring, one for each begun [`piece`](Table::piece) of it, and one if it is empty:
    ///
    /// | operation | direct | ring | sharded | other |
    /// |---|---|---|---|---|
    /// | all-reduce | N−1 | 2·Σm − mᵣ − mᵣ₊₁ | 2(N−1) | recursive doubling: log₂P below P, 1 more below N − P; 1 from P on. Halving-doubling: 2·log₂N |
    /// | reduce-scatter | | Σm − mᵣ | N−1 | |
    /// | all-gather | N−1 | Σm − mᵣ₊₁ | | |
    /// | reduce | 1 unless root | Σm − mᵣ, and 1 unless root | N−1, and 1 unless root | |
    /// | scatter | N−1 from the root | | | |
    /// | gather | 1 unless root | | | |
    /// | all-to-all | N−1 | | | |
    /// | broadcast | | | | tree: 1 for each child; scatter-all-gather: Σm − mᵣ₊₁, and from the root N−1 more |
    /// | barrier | ⌈log₂N⌉ | | | |
    /// | send | 1 | | | |
    ///
    /// These are messages of [`Transport`](crate::Transport), as [`Counted`](crate::Counted) counts them, whatever a transport makes
    /// of them: packets, segments, frames. With [`MeshOptions::checked`](crate::MeshOptions::checked) N−1 more precede them, or one
    /// more from both ends of a send.
    ///
    /// # Panics
    /// If there are no ranks.
    pub fn messages_sent_by(
        &self,
        algorithm: Algorithm,
        op: &Op,
        dtype: DType,
        count: usize,
        ranks: usize,
        rank: usize,
    ) -> u64 {
        let others = ranks as u64 - 1;
        if others == 0 {
            return 0;
        }
        let elements = (self.piece / dtype.size()).max(1);
        let shard = |index: usize| shard_range(count, ranks, index % ranks).len().div_ceil(elements).max(1) as u64;
        let all_but = |index: usize| (0..ranks).map(shard).sum::<u64>() - shard(index);
        let is_root = op.root() == Some(rank);
        let unless_root = u64::from(!is_root);
        let from_root = if is_root { others } else { 0 };
        let doublings = u64::from(ranks.ilog2());
        match (op, algorithm) {
            (Op::AllReduce(_), Algorithm::Ring) => all_but(rank) + all_but(rank + 1),
            (Op::AllReduce(_), Algorithm::Sharded) => 2 * others,
            (Op::AllReduce(_), Algorithm::RecursiveDoubling) => {
                let core = 1 << ranks.ilog2();
                if rank >= core { 1 } else { doublings + u64::from(rank < ranks - core) }
            }
            (Op::AllReduce(_), Algorithm::HalvingDoubling) => 2 * doublings,
            (Op::ReduceScatter(_), Algorithm::Ring) => all_but(rank),
            (Op::AllGather, Algorithm::Ring) => all_but(rank + 1),
            (Op::Reduce { .. }, Algorithm::Direct) => unless_root,
            (Op::Reduce { .. }, Algorithm::Ring) => all_but(rank) + unless_root,
            (Op::Reduce { .. }, _) => others + unless_root,
            (Op::Broadcast { root }, Algorithm::Tree) => tree_children(rank, *root, ranks).len() as u64,
            (Op::Broadcast { .. }, _) => from_root + all_but(rank + 1),
            (Op::AllReduce(_) | Op::ReduceScatter(_) | Op::AllGather | Op::AllToAll, _) => others,
            (Op::Scatter { .. }, _) => from_root,
            (Op::Gather { .. }, _) => unless_root,
            (Op::Barrier, _) => u64::from(ranks.next_power_of_two().ilog2()),
            (Op::Send { .. }, _) => 1,
            (Op::Recv { .. }, _) => 0,
        }
    }

    /// The algorithm for an operation over `count` elements of `dtype` on `ranks` ranks.
    pub fn choose(&self, kind: OpKind, dtype: DType, count: usize, ranks: usize) -> Algorithm {
        let bytes = count.saturating_mul(dtype.size());
        let matching = self.rules.iter().filter(|rule| rule.kind == kind && ranks <= rule.ranks && bytes <= rule.bytes);
        matching
            .map(|rule| rule.algorithm)
            .chain(last_resorts(kind).iter().copied())
            .find(|algorithm| supports(*algorithm, kind, dtype, ranks) && !folds(*algorithm, ranks))
            .unwrap_or(Algorithm::Direct)
    }
}

impl Default for Table {
    fn default() -> Self {
        Table::fixed()
    }
}

/// The fixed table's algorithm; see [`Table::choose`].
pub fn choose(kind: OpKind, dtype: DType, count: usize, ranks: usize) -> Algorithm {
    Table::fixed().choose(kind, dtype, count, ranks)
}

/// Whether some ranks only hand their part to another and wait. A rank that has called something else may then keep all others
/// waiting without ever being sent what would show it, so this runs only where it is asked for.
fn folds(algorithm: Algorithm, ranks: usize) -> bool {
    algorithm == Algorithm::RecursiveDoubling && !ranks.is_power_of_two()
}

/// What runs where no rule says otherwise, the preferred one first.
fn last_resorts(kind: OpKind) -> &'static [Algorithm] {
    match kind {
        OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter => &[Algorithm::Ring, Algorithm::Sharded],
        OpKind::AllGather => &[Algorithm::Ring],
        OpKind::Broadcast => &[Algorithm::ScatterAllGather],
        _ => &[Algorithm::Direct],
    }
}

/// Whether `algorithm` can run an operation. The 16-bit floats are only reduced where all contributions meet in one place, so
/// that they are rounded once.
pub fn supports(algorithm: Algorithm, kind: OpKind, dtype: DType, ranks: usize) -> bool {
    let rounds_once = matches!(algorithm, Algorithm::Direct | Algorithm::Sharded);
    let reduces = matches!(kind, OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter);
    if reduces && dtype.accumulates_in_f32() && !rounds_once {
        return false;
    }
    match kind {
        OpKind::AllReduce => match algorithm {
            Algorithm::HalvingDoubling => ranks.is_power_of_two(),
            other => !matches!(other, Algorithm::Tree | Algorithm::ScatterAllGather),
        },
        OpKind::Reduce => matches!(algorithm, Algorithm::Direct | Algorithm::Ring | Algorithm::Sharded),
        OpKind::ReduceScatter => matches!(algorithm, Algorithm::Ring | Algorithm::Sharded),
        OpKind::AllGather => matches!(algorithm, Algorithm::Direct | Algorithm::Ring),
        OpKind::Broadcast => matches!(algorithm, Algorithm::Tree | Algorithm::ScatterAllGather),
        _ => algorithm == Algorithm::Direct,
    }
}

/// Payload bytes that `rank` of `ranks` sends in an operation over `count` elements under the fixed table: see
/// [`payload_sent_by`].
pub fn payload_sent(op: &Op, dtype: DType, count: usize, ranks: usize, rank: usize) -> u64 {
    payload_sent_by(choose(op.kind(), dtype, count, ranks), op, dtype, count, ranks, rank)
}

/// Payload bytes that `rank` of `ranks` sends in an operation over `count` elements in even shards, by the formula of the
/// algorithm. With S the bytes of the whole, cᵣ those of shard r, P the greatest power of two not above N:
///
/// | operation | direct | ring | sharded | other |
/// |---|---|---|---|---|
/// | all-reduce | (N−1)·S | 2S − cᵣ − cᵣ₊₁ | S − cᵣ + (N−1)·cᵣ | recursive doubling: S·log₂P below P, S more below N − P; S from P on. Halving-doubling: S − cᵣ, and the 1, 2, 4, … N/2 shards around shard r |
/// | reduce-scatter | | S − cᵣ | S − cᵣ | |
/// | all-gather | (N−1)·cᵣ | S − cᵣ₊₁ | | |
/// | reduce | S unless root | S − cᵣ, and cᵣ unless root | as ring | |
/// | scatter | S − cᵣ from the root | | | |
/// | gather | cᵣ unless root | | | |
/// | all-to-all | S − cᵣ | | | |
/// | broadcast | | | | tree: S for each child; scatter-all-gather: S − cᵣ₊₁, and from the root S − c_root more |
///
/// Barriers carry no payload. Summed over ranks, ring, sharded and halving-doubling all-reduce are the textbook 2S(N−1).
///
/// # Panics
/// If there are no ranks, or more bytes than 64 bits count.
pub fn payload_sent_by(algorithm: Algorithm, op: &Op, dtype: DType, count: usize, ranks: usize, rank: usize) -> u64 {
    let whole = (count * dtype.size()) as u64;
    let shard = |index: usize| (shard_range(count, ranks, index % ranks).len() * dtype.size()) as u64;
    let others = ranks as u64 - 1;
    if others == 0 {
        return 0;
    }
    let unless_root = |bytes: u64| if op.root() == Some(rank) { 0 } else { bytes };
    match (op, algorithm) {
        (Op::AllReduce(_), Algorithm::Direct) => others * whole,
        (Op::AllReduce(_), Algorithm::Ring) => 2 * whole - shard(rank) - shard(rank + 1),
        (Op::AllReduce(_), Algorithm::RecursiveDoubling) => {
            let core = 1 << ranks.ilog2();
            if rank >= core {
                whole
            } else {
                whole * u64::from(ranks.ilog2()) + if rank < ranks - core { whole } else { 0 }
            }
        }
        (Op::AllReduce(_), Algorithm::HalvingDoubling) => {
            let block = |bits: u32| -> u64 {
                let first = rank >> bits << bits;
                (first..first + (1 << bits)).map(shard).sum()
            };
            whole - shard(rank) + (0..ranks.ilog2()).map(block).sum::<u64>()
        }
        (Op::AllReduce(_), _) => whole - shard(rank) + others * shard(rank),
        (Op::ReduceScatter(_), _) => whole - shard(rank),
        (Op::AllGather, Algorithm::Direct) => others * shard(rank),
        (Op::AllGather, _) => whole - shard(rank + 1),
        (Op::Reduce { .. }, Algorithm::Direct) => unless_root(whole),
        (Op::Reduce { .. }, _) => whole - shard(rank) + unless_root(shard(rank)),
        (Op::Broadcast { root }, Algorithm::Tree) => whole * tree_children(rank, *root, ranks).len() as u64,
        (Op::Broadcast { .. }, _) => 2 * whole - shard(rank + 1) - shard(rank) - unless_root(whole - shard(rank)),
        (Op::Scatter { .. }, _) => whole - shard(rank) - unless_root(whole - shard(rank)),
        (Op::Gather { .. }, _) => unless_root(shard(rank)),
        (Op::AllToAll, _) => whole - shard(rank),
        (Op::Send { .. }, _) => whole,
        (Op::Recv { .. } | Op::Barrier, _) => 0,
    }
}

/// Messages that `rank` of `ranks` sends in an operation over `count` elements under the fixed table: see
/// [`Table::messages_sent_by`].
pub fn messages_sent(op: &Op, dtype: DType, count: usize, ranks: usize, rank: usize) -> u64 {
    messages_sent_by(choose(op.kind(), dtype, count, ranks), op, dtype, count, ranks, rank)
}

/// Messages that `rank` of `ranks` sends in an operation over `count` elements by `algorithm`, in pieces of the fixed table's length:
/// see [`Table::messages_sent_by`].
pub fn messages_sent_by(algorithm: Algorithm, op: &Op, dtype: DType, count: usize, ranks: usize, rank: usize) -> u64 {
    Table::fixed().messages_sent_by(algorithm, op, dtype, count, ranks, rank)
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
    use crate::dtype::ReduceOp;

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
    fn totals_over_ranks_are_the_textbook_ones() {
        let sum = Op::AllReduce(ReduceOp::Sum);
        let broadcast = Op::Broadcast { root: 1 };
        for ranks in [2, 3, 4, 7, 8] {
            for (op, algorithm, factor) in [
                (sum, Algorithm::Ring, 2),
                (sum, Algorithm::Sharded, 2),
                (sum, Algorithm::HalvingDoubling, 2),
                (Op::AllGather, Algorithm::Ring, 1),
                (Op::AllGather, Algorithm::Direct, 1),
                (Op::ReduceScatter(ReduceOp::Sum), Algorithm::Ring, 1),
                (Op::AllToAll, Algorithm::Direct, 1),
                (broadcast, Algorithm::Tree, 1),
            ] {
                if !supports(algorithm, op.kind(), DType::F32, ranks) {
                    continue;
                }
                let count = if op == Op::AllToAll { 10_080 } else { 10_007 };
                let all: u64 =
                    (0..ranks).map(|rank| payload_sent_by(algorithm, &op, DType::F32, count, ranks, rank)).sum();
                assert_eq!(all, factor * 4 * count as u64 * (ranks as u64 - 1), "{op:?} by {algorithm} on {ranks}");
            }
        }
    }

    #[test]
    fn another_table_has_another_fingerprint() {
        let fixed = Table::fixed();
        for other in [
            Table { piece: fixed.piece + 1, ..fixed.clone() },
            Table { name: "another".into(), ..fixed.clone() },
            Table { rules: fixed.rules[1..].to_vec().into(), ..fixed.clone() },
        ] {
            assert_ne!(other.fingerprint(), fixed.fingerprint());
        }
    }

    #[test]
    fn what_is_chosen_can_run() {
        for kind in OpKind::ALL {
            for dtype in DType::ALL {
                for ranks in [1, 2, 3, 4, 7, 8, 64] {
                    for count in [0, 1, 1000, 100_000, 100_000_000] {
                        let algorithm = choose(kind, dtype, count, ranks);
                        assert!(supports(algorithm, kind, dtype, ranks), "{kind} of {count} {dtype} on {ranks}");
                    }
                }
            }
        }
    }
}
