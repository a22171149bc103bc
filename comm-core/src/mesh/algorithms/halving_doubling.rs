//! Reduce-scatter by halving what is exchanged in each of log₂N rounds, then all-gather the other way round. For powers of two.

use super::task::{Task, two_ranges};
use super::workload::Workload;
use super::{Entry, Formula, Method, Ranks};
use crate::dtype::ReduceOp;
use crate::error::Result;
use crate::mesh::round::{Receive, Reduction, Send};
use crate::op::OpKind;
use crate::reduce::finish_mean;

pub(super) const ENTRY: Entry = Entry {
    name: "halving-doubling",
    rounds_once: false,
    methods: &[Method {
        kind: OpKind::AllReduce,
        ranks: Ranks::PowersOfTwo,
        is_fallback: false,
        messages: Formula { text: "2·log₂N", value: |work| 2 * work.doublings() },
        payload: Formula { text: "S − cᵣ, and the 1, 2, 4, … N/2 shards around shard r", value: payload },
        run: all_reduce,
    }],
};

fn payload(work: &Workload<'_>) -> u64 {
    let block = |bits: u32| -> u64 {
        let first = work.rank >> bits << bits;
        (first..first + (1 << bits)).map(|index| work.shard(index)).sum()
    };
    work.other_shards() + (0..work.ranks.ilog2()).map(block).sum::<u64>()
}

fn all_reduce(mut task: Task<'_, '_>) -> Result<()> {
    let (op, mut input) = task.contribution()?;
    let Task { rounds, layout, bytes, .. } = task;
    let (rank, ranks) = (rounds.rank, layout.ranks);
    let shards = |first: usize, number: usize| layout.shard(first).start..layout.shard(first + number - 1).end;
    let mut distance = ranks / 2;
    let mut step = 0;
    while distance > 0 {
        let peer = rank ^ distance;
        // Of the block of 2·distance shards around both, each keeps the half that it lies in.
        let (keep, give) = (rank / distance * distance, peer / distance * distance);
        let (give, keep) = (shards(give, distance), shards(keep, distance));
        let (out, into) = two_ranges(bytes, give.clone(), keep.clone());
        // In the first round the contribution is where it was given; from then on this rank works on the half that it keeps.
        let (out, operand) = match input.take() {
            Some(input) => (&input[give], Some(&input[keep])),
            None => (out, None),
        };
        let receive = Receive { from: peer, into, reduce: Some(Reduction { dtype: layout.dtype, op, operand }) };
        rounds.exchange(step, &[Send { to: peer, bytes: out }], &mut [receive])?;
        distance /= 2;
        step += 1;
    }
    if op == ReduceOp::Mean {
        finish_mean(layout.dtype, &mut bytes[layout.shard(rank)], ranks);
    }
    let mut distance = 1;
    while distance < ranks {
        let peer = rank ^ distance;
        let (mine, theirs) = (rank / distance * distance, peer / distance * distance);
        let (out, into) = two_ranges(bytes, shards(mine, distance), shards(theirs, distance));
        let receive = Receive { from: peer, into, reduce: None };
        rounds.exchange(step, &[Send { to: peer, bytes: out }], &mut [receive])?;
        distance *= 2;
        step += 1;
    }
    Ok(())
}
