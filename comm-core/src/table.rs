//! Which algorithm runs, and how many messages and payload bytes it sends.
//!
#![doc = include_str!("../docs/algorithms.md")]
//!
//! The choice is a pure function of (operation, type, bytes, ranks, table). One fixed table serves all transports, so that results
//! do not depend on the transport. A program has its ranks agree on [`Table::fingerprint`] at rendezvous. Another [`Table`] can be
//! put into [`MeshOptions`](crate::MeshOptions): it may suit a network better, and gives up bit-identity with runs under this one.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::dtype::DType;
use crate::hex;
use crate::mesh::algorithms;
use crate::op::{Algorithm, Op, OpKind};

/// The name of the fixed table. It changes whenever the table does.
pub const TABLE: &str = "2: recursive doubling, halving-doubling, ring; 16-bit types direct, sharded";

/// Rules by which algorithms are chosen.
///
/// ```
/// use comm_core::table::{self, Table};
/// use comm_core::{Algorithm, DType, MeshOptions, OpKind};
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
        hex(&hash.finalize()[..8])
    }

    /// Messages that `rank` of `ranks` sends in an operation over `count` elements in even shards, by the formula of the algorithm in the
    /// [table](self) above; none in one that the algorithm cannot run.
    ///
    /// # Panics
    /// If there are no ranks, or more bytes than 64 bits count.
    pub fn messages_sent_by(
        &self,
        algorithm: Algorithm,
        op: &Op,
        dtype: DType,
        count: usize,
        ranks: usize,
        rank: usize,
    ) -> u64 {
        algorithms::volume(algorithm, op, dtype, count, ranks, rank, self.piece).messages
    }

    /// The algorithm for an operation over `count` elements of `dtype` on `ranks` ranks.
    pub fn choose(&self, kind: OpKind, dtype: DType, count: usize, ranks: usize) -> Algorithm {
        let bytes = count.saturating_mul(dtype.size());
        let matching = self.rules.iter().filter(|rule| rule.kind == kind && ranks <= rule.ranks && bytes <= rule.bytes);
        matching
            .map(|rule| rule.algorithm)
            .chain(algorithms::fallbacks(kind))
            .find(|algorithm| algorithms::is_eligible(*algorithm, kind, dtype, ranks))
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

/// Whether `algorithm` can run an operation. The 16-bit floats are only reduced where all contributions meet in one place, so
/// that they are rounded once.
pub fn supports(algorithm: Algorithm, kind: OpKind, dtype: DType, ranks: usize) -> bool {
    algorithms::supports(algorithm, kind, dtype, ranks)
}

/// Payload bytes that `rank` of `ranks` sends in an operation over `count` elements under the fixed table: see
/// [`payload_sent_by`].
pub fn payload_sent(op: &Op, dtype: DType, count: usize, ranks: usize, rank: usize) -> u64 {
    payload_sent_by(choose(op.kind(), dtype, count, ranks), op, dtype, count, ranks, rank)
}

/// Payload bytes that `rank` of `ranks` sends in an operation over `count` elements in even shards, by the formula of the algorithm in the
/// [table](self) above; none in one that the algorithm cannot run.
///
/// # Panics
/// If there are no ranks, or more bytes than 64 bits count.
pub fn payload_sent_by(algorithm: Algorithm, op: &Op, dtype: DType, count: usize, ranks: usize, rank: usize) -> u64 {
    algorithms::volume(algorithm, op, dtype, count, ranks, rank, Table::fixed().piece).payload
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::ReduceOp;

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

    /// A hash of all that the fixed table, and a table with short pieces, say on a grid: it changes only with [`TABLE`].
    #[test]
    fn choices_and_formulas_are_those_of_this_table() {
        let mut hash = Sha256::new();
        let mut lines = 0;
        let short = Table { name: "short pieces".into(), piece: 1000, ..Table::fixed() };
        for (kind, dtype) in OpKind::ALL.iter().flat_map(|kind| DType::ALL.map(|dtype| (*kind, dtype))) {
            for ranks in [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 64] {
                for count in [0, 1, 7, 1024, 1025, 2049, 16_385, 65_537, 300_001, 1_048_577, 4_000_000, 30_000_000] {
                    hash.update(format!("{kind} {dtype} {ranks} {count}: {}\n", choose(kind, dtype, count, ranks)));
                    lines += 1;
                }
                for algorithm in Algorithm::ALL.into_iter().filter(|it| supports(*it, kind, dtype, ranks)) {
                    for (count, rank) in
                        [0, 5, 4099, 300_001].iter().flat_map(|count| (0..ranks).map(move |r| (*count, r)))
                    {
                        for op in ops_of(kind, ranks, rank, count) {
                            let payload = payload_sent_by(algorithm, &op, dtype, count, ranks, rank);
                            let [messages, more] = [&Table::fixed(), &short]
                                .map(|table| table.messages_sent_by(algorithm, &op, dtype, count, ranks, rank));
                            hash.update(format!("{op:?} {dtype} {ranks} {count} {rank} by {algorithm}: "));
                            hash.update(format!("{payload} {messages} {more}\n"));
                            lines += 1;
                        }
                    }
                }
            }
        }
        let hash: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        assert_eq!((lines, hash.as_str()), (185_512, "c194327fe4420720"));
        assert_eq!(Table::fixed().fingerprint(), "2705ffec312bcf8b");
    }

    /// An operation of a kind, with the first and the last rank as its root.
    fn ops_of(kind: OpKind, ranks: usize, rank: usize, total: usize) -> Vec<Op> {
        let peer = (rank + 1) % ranks;
        let rooted = |op: fn(usize, usize) -> Op| vec![op(0, total), op(ranks - 1, total)];
        match kind {
            OpKind::AllReduce => vec![Op::AllReduce(ReduceOp::Sum)],
            OpKind::Broadcast => rooted(|root, _| Op::Broadcast { root }),
            OpKind::Reduce => rooted(|root, _| Op::Reduce { root, op: ReduceOp::Mean }),
            OpKind::Scatter => rooted(|root, total| Op::Scatter { root, total }),
            OpKind::Gather => rooted(|root, total| Op::Gather { root, total }),
            OpKind::AllGather => vec![Op::AllGather],
            OpKind::ReduceScatter => vec![Op::ReduceScatter(ReduceOp::Max)],
            OpKind::AllToAll => vec![Op::AllToAll],
            OpKind::Barrier => vec![Op::Barrier],
            OpKind::Send => vec![Op::Send { to: peer }],
            OpKind::Recv => vec![Op::Recv { from: peer }],
        }
    }
}
