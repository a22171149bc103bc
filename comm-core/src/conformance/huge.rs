//! Buffers of more than 4 GiB, whose lengths do not fit into 32 bits.

use std::sync::Arc;
use std::time::Duration;

use super::{Case, CaseResult, ensure};
use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::op::{Call, Op};
use crate::splitmix::mix;

pub(super) fn add(cases: &mut Vec<Case>) {
    // One message holds all of it, and then pieces of it go around a ring.
    cases.push(Case::heavy("huge/send_recv/u8", 2, |communicator| {
        let rank = communicator.rank();
        match rank {
            0 => run(communicator, Op::Send { to: 1 }, |index| pattern(index, 0), None),
            1 => run(communicator, Op::Recv { from: 0 }, |_| 0, Some(&|index| pattern(index, 0))),
            _ => Ok(()),
        }
    }));
    cases.push(Case::heavy("huge/all_reduce/u8", 2, |communicator| {
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let sum = |index: u64| (0..ranks).fold(0u8, |sum, rank| sum.wrapping_add(pattern(index, rank)));
        run(communicator, Op::AllReduce(ReduceOp::Sum), |index| pattern(index, rank), Some(&sum))
    }));
}

/// Bytes, a little more than 32 bits count.
const COUNT: u64 = (4 << 30) + 12_345;

const TIMEOUT: Duration = Duration::from_secs(300);

/// Differs from place to place, also between places that are 2³² apart.
fn pattern(index: u64, rank: usize) -> u8 {
    (mix(index >> 12).wrapping_add(index) ^ rank as u64) as u8
}

fn run(
    communicator: &Arc<dyn Communicator>,
    op: Op,
    values: impl Fn(u64) -> u8,
    expected: Option<&dyn Fn(u64) -> u8>,
) -> CaseResult {
    let values: Vec<u8> = (0..COUNT).map(values).collect();
    let done = communicator.start(Call::blocking(op, Buffer::from_vec(values)).with_timeout(TIMEOUT)).wait()?;
    let got = done.buffer.into_vec::<u8>()?;
    ensure(got.len() as u64 == COUNT, || format!("came back with {} B", got.len()))?;
    let Some(expected) = expected else { return Ok(()) };
    let wrong = got.iter().zip(0..).find(|(value, index)| **value != expected(*index));
    ensure(wrong.is_none(), || format!("element {:?} is wrong", wrong.map(|(_, index)| index)))
}
