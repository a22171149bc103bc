//! The messages of a collective, round by round, as the algorithms of [`comm_core`] send them.
//!
//! A test compares the sums with [`comm_core::table`]'s formulas, which the transports' counters are checked against.

use comm_core::table::Table;
use comm_core::{Algorithm, OpKind, shard_range};

use crate::trace::Collective;

/// What one rank exchanges at a time: the next round begins when all of this one has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Round {
    /// To whom, by rank in the group, and payload bytes.
    pub sends: Vec<Part>,
    /// From whom.
    pub receives: Vec<Part>,
}

/// A message of a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The other end, by rank in the group.
    pub peer: usize,
    /// Payload.
    pub bytes: u64,
    /// Whether what comes is combined with what is there.
    pub reduces: bool,
}

/// How an operation is cut into messages.
#[derive(Clone, Copy, Debug)]
struct Shape {
    count: usize,
    width: usize,
    ranks: usize,
    rank: usize,
    root: usize,
    /// Elements of a piece of a shard.
    piece: usize,
}

/// Most rounds of one operation.
const MOST_ROUNDS: usize = 1 << 20;

/// By which algorithm an operation runs among `ranks` ranks.
pub fn algorithm(collective: &Collective, ranks: usize, table: &Table) -> Algorithm {
    collective.algorithm.unwrap_or_else(|| table.choose(collective.kind, collective.dtype, collective.count, ranks))
}

/// What `rank` of `ranks` exchanges in an operation, in order.
///
/// # Errors
/// The algorithm cannot run the operation, or takes more than 2^20 rounds.
pub fn rounds(collective: &Collective, ranks: usize, rank: usize, table: &Table) -> Result<Vec<Round>, String> {
    if ranks < 2 {
        return Ok(Vec::new());
    }
    let algorithm = algorithm(collective, ranks, table);
    let Collective { kind, dtype, count, root, .. } = *collective;
    if !comm_core::table::supports(algorithm, kind, dtype, ranks) {
        return Err(format!("the algorithm {algorithm} cannot run {kind} of {dtype} on {ranks} ranks"));
    }
    let width = dtype.size();
    let shape = Shape { count, width, ranks, rank, root, piece: (table.piece / width).max(1) };
    if matches!(algorithm, Algorithm::Ring | Algorithm::ScatterAllGather) {
        let steps = if kind == OpKind::AllReduce { 2 } else { 1 } * (ranks - 1);
        let rounds = shape.pieces().saturating_mul(steps);
        if rounds > MOST_ROUNDS {
            return Err(format!(
                "{kind} of {count} elements by {algorithm} takes {rounds} rounds of messages on {ranks} ranks, and at most {MOST_ROUNDS} \
                 can be simulated; divide it into several operations"
            ));
        }
    }
    Ok(match (algorithm, kind) {
        (Algorithm::Ring, OpKind::AllReduce) => shape.ring(ranks - 1, ranks - 1),
        (Algorithm::Ring, OpKind::ReduceScatter) => shape.ring(ranks - 1, 0),
        (Algorithm::Ring, OpKind::AllGather) => shape.ring(0, ranks - 1),
        (Algorithm::Ring, OpKind::Reduce) => [shape.ring(ranks - 1, 0), shape.rooted_gather()].concat(),
        (Algorithm::Sharded, OpKind::AllReduce) => vec![shape.scatter_reduce(), shape.spread()],
        (Algorithm::Sharded, OpKind::Reduce) => [vec![shape.scatter_reduce()], shape.rooted_gather()].concat(),
        (Algorithm::Sharded, _) => vec![shape.scatter_reduce()],
        (Algorithm::RecursiveDoubling, _) => shape.recursive_doubling(),
        (Algorithm::HalvingDoubling, _) => shape.halving_doubling(),
        (Algorithm::Tree, _) => shape.tree(),
        (Algorithm::ScatterAllGather, _) => [shape.rooted_scatter(), shape.ring(0, ranks - 1)].concat(),
        (_, OpKind::AllReduce) => vec![shape.with_all(|_| shape.whole(), |_| shape.whole(), true)],
        (_, OpKind::AllGather) => vec![shape.spread()],
        (_, OpKind::Reduce) => shape.whole_to_one(),
        (_, OpKind::Scatter) => shape.rooted_scatter(),
        (_, OpKind::Gather) => shape.rooted_gather(),
        (_, OpKind::AllToAll) => vec![shape.with_all(|to| shape.shard(to), |_| shape.shard(rank), false)],
        (_, OpKind::Barrier) => shape.barrier(),
        (algorithm, kind) => return Err(format!("the messages of {kind} by {algorithm} are not known")),
    })
}

impl Shape {
    fn elements(&self, shard: usize) -> usize {
        shard_range(self.count, self.ranks, shard % self.ranks).len()
    }

    fn shard(&self, shard: usize) -> u64 {
        (self.elements(shard) * self.width) as u64
    }

    /// Pieces of the largest shard.
    fn pieces(&self) -> usize {
        self.elements(0).div_ceil(self.piece).max(1)
    }

    fn whole(&self) -> u64 {
        (self.count * self.width) as u64
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let rank = self.rank;
        (0..self.ranks).filter(move |other| *other != rank)
    }

    /// Everyone with everyone.
    fn with_all(&self, out: impl Fn(usize) -> u64, into: impl Fn(usize) -> u64, reduces: bool) -> Round {
        let sends = self.others().map(|peer| Part { peer, bytes: out(peer), reduces: false }).collect();
        let receives = self.others().map(|peer| Part { peer, bytes: into(peer), reduces }).collect();
        Round { sends, receives }
    }

    /// Everyone collects its own shard from all.
    fn scatter_reduce(&self) -> Round {
        self.with_all(|to| self.shard(to), |_| self.shard(self.rank), true)
    }

    /// Everyone sends its own shard to all.
    fn spread(&self) -> Round {
        self.with_all(|_| self.shard(self.rank), |from| self.shard(from), false)
    }

    fn rooted_scatter(&self) -> Vec<Round> {
        if self.rank == self.root {
            return vec![Round { receives: Vec::new(), ..self.with_all(|to| self.shard(to), |_| 0, false) }];
        }
        let receives = vec![Part { peer: self.root, bytes: self.shard(self.rank), reduces: false }];
        vec![Round { sends: Vec::new(), receives }]
    }

    fn rooted_gather(&self) -> Vec<Round> {
        if self.rank == self.root {
            return vec![Round { sends: Vec::new(), ..self.with_all(|_| 0, |from| self.shard(from), false) }];
        }
        let sends = vec![Part { peer: self.root, bytes: self.shard(self.rank), reduces: false }];
        vec![Round { sends, receives: Vec::new() }]
    }

    fn whole_to_one(&self) -> Vec<Round> {
        if self.rank == self.root {
            return vec![Round { sends: Vec::new(), ..self.with_all(|_| 0, |_| self.whole(), true) }];
        }
        let sends = vec![Part { peer: self.root, bytes: self.whole(), reduces: false }];
        vec![Round { sends, receives: Vec::new() }]
    }

    /// Shards travel to the right, in pieces, first to be reduced and then as they are: step k of a piece comes after one step of each of
    /// the pieces around it.
    fn ring(&self, reducing: usize, gathering: usize) -> Vec<Round> {
        let Shape { ranks, rank, piece, .. } = *self;
        let (left, right) = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
        let pieces = self.pieces();
        let steps = reducing + gathering;
        let part = |shard: usize, number: usize| {
            let elements = self.elements(shard);
            (elements.saturating_sub(number * piece).min(piece) * self.width) as u64
        };
        let mut rounds = Vec::with_capacity(pieces * steps);
        for turn in 0..pieces + steps.saturating_sub(1) {
            for step in 0..steps.min(turn + 1) {
                let number = turn - step;
                if number >= pieces {
                    continue;
                }
                let shard =
                    if step < reducing { rank + 2 * ranks - step - 1 } else { rank + ranks - (step - reducing) };
                let message = |peer, bytes, reduces| match bytes == 0 && number > 0 {
                    true => Vec::new(),
                    false => vec![Part { peer, bytes, reduces }],
                };
                let sends = message(right, part(shard, number), false);
                let receives = message(left, part(shard + ranks - 1, number), step < reducing);
                rounds.push(Round { sends, receives });
            }
        }
        rounds
    }

    fn pair(&self, peer: usize, out: u64, into: u64, reduces: bool) -> Round {
        Round {
            sends: vec![Part { peer, bytes: out, reduces: false }],
            receives: vec![Part { peer, bytes: into, reduces }],
        }
    }

    fn recursive_doubling(&self) -> Vec<Round> {
        let (rank, whole) = (self.rank, self.whole());
        let core = 1 << self.ranks.ilog2();
        let one = |peer, reduces| vec![Part { peer, bytes: whole, reduces }];
        if rank >= core {
            let give = Round { sends: one(rank - core, false), receives: Vec::new() };
            return vec![give, Round { sends: Vec::new(), receives: one(rank - core, false) }];
        }
        let folded = rank + core < self.ranks;
        let mut rounds = Vec::new();
        if folded {
            rounds.push(Round { sends: Vec::new(), receives: one(rank + core, true) });
        }
        let distances = (0..self.ranks.ilog2()).map(|bit| 1 << bit);
        rounds.extend(distances.map(|distance: usize| self.pair(rank ^ distance, whole, whole, true)));
        if folded {
            rounds.push(Round { sends: one(rank + core, false), receives: Vec::new() });
        }
        rounds
    }

    fn halving_doubling(&self) -> Vec<Round> {
        let rank = self.rank;
        let block = |of: usize, distance: usize| -> u64 {
            let first = of / distance * distance;
            (first..first + distance).map(|shard| self.shard(shard)).sum()
        };
        let bits = self.ranks.ilog2();
        let halving = (0..bits).rev().map(|bit| 1 << bit).map(|distance: usize| {
            let peer = rank ^ distance;
            self.pair(peer, block(peer, distance), block(rank, distance), true)
        });
        let doubling = (0..bits).map(|bit| 1 << bit).map(|distance: usize| {
            let peer = rank ^ distance;
            self.pair(peer, block(rank, distance), block(peer, distance), false)
        });
        halving.chain(doubling).collect()
    }

    /// A binomial tree from the root.
    fn tree(&self) -> Vec<Round> {
        let Shape { ranks, root, .. } = *self;
        let relative = (self.rank + ranks - root) % ranks;
        let bits = if relative == 0 { ranks.next_power_of_two().ilog2() } else { relative.trailing_zeros() };
        let children = (0..bits).rev().map(|bit| relative + (1 << bit)).filter(|child| *child < ranks);
        let part = |relative: usize| Part { peer: (relative + root) % ranks, bytes: self.whole(), reduces: false };
        let sends: Vec<Part> = children.map(part).collect();
        let mut rounds = Vec::new();
        if relative != 0 {
            rounds.push(Round { sends: Vec::new(), receives: vec![part(relative & (relative - 1))] });
        }
        if !sends.is_empty() {
            rounds.push(Round { sends, receives: Vec::new() });
        }
        rounds
    }

    fn barrier(&self) -> Vec<Round> {
        let Shape { ranks, rank, .. } = *self;
        let round = |bit: u32| {
            let distance = 1 << bit;
            let part = |peer| vec![Part { peer, bytes: 0, reduces: false }];
            Round { sends: part((rank + distance) % ranks), receives: part((rank + ranks - distance) % ranks) }
        };
        (0..ranks.next_power_of_two().ilog2()).map(round).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use comm_core::table::{messages_sent_by, payload_sent_by, supports};
    use comm_core::{DType, Op, ReduceOp};

    use super::*;

    fn op(kind: OpKind, root: usize, total: usize) -> Op {
        match kind {
            OpKind::AllReduce => Op::AllReduce(ReduceOp::Sum),
            OpKind::Broadcast => Op::Broadcast { root },
            OpKind::Reduce => Op::Reduce { root, op: ReduceOp::Sum },
            OpKind::Scatter => Op::Scatter { root, total },
            OpKind::Gather => Op::Gather { root, total },
            OpKind::AllGather => Op::AllGather,
            OpKind::ReduceScatter => Op::ReduceScatter(ReduceOp::Sum),
            OpKind::AllToAll => Op::AllToAll,
            _ => Op::Barrier,
        }
    }

    /// Calls `check` with every operation that an algorithm can run.
    fn every_case(mut check: impl FnMut(&Collective, usize)) {
        for (kind, algorithm) in OpKind::ALL.iter().flat_map(|kind| Algorithm::ALL.map(|algorithm| (*kind, algorithm)))
        {
            if matches!(kind, OpKind::Send | OpKind::Recv) {
                continue;
            }
            for (ranks, dtype) in
                [2, 3, 4, 7, 8, 16, 17].into_iter().flat_map(|ranks| [(ranks, DType::F32), (ranks, DType::Bf16)])
            {
                for count in [0, 5, 5040, 300_160, 1_000_003] {
                    let barrier_or_blocks = match kind {
                        OpKind::Barrier => count == 0,
                        OpKind::AllToAll => count % ranks == 0,
                        _ => true,
                    };
                    if !barrier_or_blocks || !supports(algorithm, kind, dtype, ranks) {
                        continue;
                    }
                    let collective = Collective {
                        dtype,
                        root: ranks - 1,
                        algorithm: Some(algorithm),
                        ..Collective::of_all(kind, count)
                    };
                    check(&collective, ranks);
                }
            }
        }
    }

    #[test]
    fn messages_and_bytes_are_those_of_the_formulas() {
        let table = Table::fixed();
        let mut cases = 0;
        every_case(|collective, ranks| {
            let Collective { kind, dtype, count, root, .. } = *collective;
            let (op, algorithm) = (op(kind, root, count), algorithm(collective, ranks, &table));
            for rank in 0..ranks {
                let rounds = rounds(collective, ranks, rank, &table).unwrap();
                let sends = || rounds.iter().flat_map(|round| &round.sends);
                let sent = (sends().count() as u64, sends().map(|part| part.bytes).sum::<u64>());
                let expected = (
                    messages_sent_by(algorithm, &op, dtype, count, ranks, rank),
                    payload_sent_by(algorithm, &op, dtype, count, ranks, rank),
                );
                assert_eq!(sent, expected, "{kind} of {count} {dtype} by {algorithm}, rank {rank} of {ranks}");
                cases += 1;
            }
        });
        assert!(cases > 3000, "{cases}");
    }

    /// The n-th message from one rank to another is the n-th that the other receives from it, with the same bytes.
    #[test]
    fn what_one_rank_sends_another_receives() {
        let table = Table::fixed();
        every_case(|collective, ranks| {
            let (mut sent, mut received): (HashMap<_, Vec<u64>>, HashMap<_, Vec<u64>>) = Default::default();
            for rank in 0..ranks {
                for round in rounds(collective, ranks, rank, &table).unwrap() {
                    for part in round.sends {
                        sent.entry((rank, part.peer)).or_default().push(part.bytes);
                    }
                    for part in round.receives {
                        received.entry((part.peer, rank)).or_default().push(part.bytes);
                    }
                }
            }
            assert_eq!(sent, received, "{collective:?} on {ranks}");
        });
    }

    #[test]
    fn what_cannot_run_is_refused() {
        let collective =
            Collective { algorithm: Some(Algorithm::HalvingDoubling), ..Collective::of_all(OpKind::AllReduce, 8) };
        let why = rounds(&collective, 3, 0, &Table::fixed()).unwrap_err();
        assert_eq!(why, "the algorithm halving-doubling cannot run all-reduce of f32 on 3 ranks");
        assert!(rounds(&collective, 1, 0, &Table::fixed()).unwrap().is_empty());
        for algorithm in [Algorithm::Ring, Algorithm::ScatterAllGather] {
            let kind = if algorithm == Algorithm::Ring { OpKind::AllGather } else { OpKind::Broadcast };
            let huge = Collective { algorithm: Some(algorithm), ..Collective::of_all(kind, 1 << 40) };
            let why = rounds(&huge, 2, 0, &Table::fixed()).unwrap_err();
            assert!(why.contains("takes 4194304 rounds of messages on 2 ranks"), "{why}");
        }
    }
}
