//! log₂N rounds in which pairs of ranks, at distances 1, 2, 4, …, exchange and reduce everything. With a number of ranks that is no power
//! of two, those from the greatest power P on hand their part to a neighbour first and get the result last.

use super::task::Task;
use super::workload::Workload;
use super::{Entry, Formula, Method, Ranks};
use crate::dtype::ReduceOp;
use crate::error::Result;
use crate::mesh::round::{Receive, Reduction, Send};
use crate::op::OpKind;
use crate::reduce::finish_mean;

pub(super) const ENTRY: Entry = Entry {
    name: "recursive-doubling",
    rounds_once: false,
    methods: &[Method {
        kind: OpKind::AllReduce,
        ranks: Ranks::AnyOnRequest,
        is_fallback: false,
        messages: Formula { text: "log₂P below P, 1 more below N − P; 1 from P on", value: messages },
        payload: Formula {
            text: "S·log₂P below P, S more below N − P; S from P on",
            value: |work| work.whole() * messages(work),
        },
        run: all_reduce,
    }],
};

fn messages(work: &Workload<'_>) -> u64 {
    let core = 1 << work.ranks.ilog2();
    if work.rank >= core { 1 } else { work.doublings() + u64::from(work.rank < work.ranks - core) }
}

fn all_reduce(mut task: Task<'_, '_>) -> Result<()> {
    let (op, mut input) = task.contribution()?;
    let Task { rounds, layout, bytes, scratch, .. } = task;
    let (rank, ranks) = (rounds.rank, layout.ranks);
    let core = 1 << ranks.ilog2();
    let last = ranks.ilog2() as usize + 1;
    let reduction = |operand| Some(Reduction { dtype: layout.dtype, op, operand });
    if rank >= core {
        let to = rank - core;
        rounds.exchange(0, &[Send { to, bytes: input.unwrap_or(bytes) }], &mut [])?;
        return rounds.exchange(last, &[], &mut [Receive { from: to, into: bytes, reduce: None }]);
    }
    let folded = rank + core;
    if folded < ranks {
        let receive = Receive { from: folded, into: &mut *bytes, reduce: reduction(input.take()) };
        rounds.exchange(0, &[], &mut [receive])?;
    }
    for step in 1..last {
        let peer = rank ^ (1 << (step - 1));
        // What is sent must not change while the peer's part is added to it.
        let operand = input.take();
        let out = match operand {
            Some(input) => input,
            None => scratch.inbox().copy_of(bytes),
        };
        let receive = Receive { from: peer, into: &mut *bytes, reduce: reduction(operand) };
        rounds.exchange(step, &[Send { to: peer, bytes: out }], &mut [receive])?;
    }
    if op == ReduceOp::Mean {
        finish_mean(layout.dtype, bytes, ranks);
    }
    if folded < ranks {
        rounds.exchange(last, &[Send { to: folded, bytes }], &mut [])?;
    }
    Ok(())
}
