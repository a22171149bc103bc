//! Calls that make no sense: refused where they are made, with the buffer given back, and without harm to the communicator.

use std::sync::Arc;

use super::data::check;
use super::{CallMode, Case, CaseResult, call, ensure, failed, run};
use crate::buffer::Buffer;
use crate::collectives::CommunicatorExt;
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::error::{Error, Result};
use crate::op::{Mode, Op, shard_range};

const SUM: ReduceOp = ReduceOp::Sum;

pub(super) fn add(cases: &mut Vec<Case>) {
    let mut add = |name: &str, refused: fn(&Arc<dyn Communicator>) -> CaseResult| {
        cases.push(Case::shared(format!("arguments/{name}"), 1, move |communicator| {
            refused(communicator)?;
            // All ranks made the same mistake at the same place, and nothing of it went anywhere.
            let ranks = communicator.world_size() as i32;
            let got = run(communicator, Op::AllReduce(SUM), vec![1i32; 1000], CallMode::Blocking)?;
            check(&got, &[ranks; 1000], format_args!("all-reduce afterwards"))
        }));
    };
    add("root_out_of_range", |communicator| {
        for root in [communicator.world_size(), usize::MAX] {
            for op in [Op::Broadcast { root }, Op::Reduce { root, op: SUM }] {
                refused(communicator, op, 10, 0)?;
            }
            refused(communicator, Op::Scatter { root, total: 10 }, 10, 0)?;
            refused(communicator, Op::Gather { root, total: 10 }, 10, 0)?;
        }
        Ok(())
    });
    add("peer_out_of_range", |communicator| {
        for peer in [communicator.world_size(), usize::MAX] {
            refused(communicator, Op::Send { to: peer }, 10, 0)?;
            refused(communicator, Op::Recv { from: peer }, 10, 0)?;
        }
        Ok(())
    });
    add("message_to_oneself", |communicator| {
        refused(communicator, Op::Send { to: communicator.rank() }, 10, 0)?;
        refused(communicator, Op::Recv { from: communicator.rank() }, 10, 0)
    });
    add("lane_out_of_range", |communicator| {
        for lane in [communicator.lanes(), usize::MAX] {
            for op in [Op::AllReduce(SUM), Op::Broadcast { root: 0 }, Op::AllGather] {
                refused(communicator, op, 10, lane)?;
            }
            refused(communicator, Op::Barrier, 0, lane)?;
        }
        Ok(())
    });
    add("shard_of_wrong_length", |communicator| {
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        for total in [0, 10, 1000] {
            for root in 0..ranks {
                let right = if rank == root { total } else { shard_range(total, ranks, rank).len() };
                for wrong in [right + 1, right.saturating_sub(1), total + 7] {
                    if wrong != right {
                        refused(communicator, Op::Scatter { root, total }, wrong, 0)?;
                        refused(communicator, Op::Gather { root, total }, wrong, 0)?;
                    }
                }
            }
        }
        Ok(())
    });
    add("total_beyond_memory", |communicator| {
        let total = usize::MAX;
        refused(communicator, Op::Scatter { root: 0, total }, 10, 0)?;
        refused(communicator, Op::Gather { root: 0, total }, 10, 0)
    });
    add("barrier_with_elements", |communicator| refused(communicator, Op::Barrier, 1, 0));
    add("conveniences", |communicator| {
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let total = 10 * ranks + 1;
        let long = vec![0f32; shard_range(total, ranks, rank).len() + 1];
        invalid(communicator.all_gather(&long, total), "all_gather")?;
        invalid(communicator.gather(&long, total, 0), "gather")?;
        invalid(communicator.broadcast(&mut [0f32], ranks), "broadcast")?;
        invalid(communicator.scatter(&long, total, ranks), "scatter")?;
        invalid(communicator.send(&long, ranks), "send")?;
        invalid(communicator.recv::<f32>(3, ranks), "recv")?;
        // Results that no memory holds.
        invalid(communicator.recv::<f64>(usize::MAX, 0), "recv of everything")?;
        invalid(communicator.all_gather(&[1u8], usize::MAX), "all_gather of everything")?;
        invalid(communicator.gather(&[1u8], usize::MAX, rank), "gather of everything")?;
        let counts = vec![usize::MAX / 2 / ranks; ranks];
        invalid(communicator.all_gather_v(&[1u8], &counts), "all_gather_v of everything")
    });
}

/// Starts `op` on `count` elements, both ways, and expects it to be refused with the buffer as it was.
fn refused(communicator: &Arc<dyn Communicator>, op: Op, count: usize, lane: usize) -> CaseResult {
    for mode in [Mode::Blocking, Mode::Background] {
        let values: Vec<i32> = (0..count as i32).collect();
        let what = format!("{op:?} of {count} on lane {lane}, {mode:?}");
        match communicator.start(call(op, Buffer::from_vec(values.clone()), lane, mode)).wait() {
            Ok(_) => return failed(format!("{what}: was accepted")),
            Err(error) => {
                let text = error.error.to_string();
                let is_invalid = matches!(error.error, Error::InvalidArgument(_));
                ensure(is_invalid, || format!("{what}: expected InvalidArgument, got: {text}"))?;
                ensure(!text.is_empty(), || format!("{what}: refused without a message"))?;
                match error.buffer {
                    None => return failed(format!("{what}: the buffer was not given back")),
                    Some(buffer) => check(&buffer.into_vec::<i32>()?, &values, format_args!("{what}: the buffer"))?,
                }
            }
        }
    }
    Ok(())
}

fn invalid<T>(result: Result<T>, what: &str) -> CaseResult {
    match result {
        Err(Error::InvalidArgument(_)) => Ok(()),
        Err(other) => failed(format!("{what}: expected InvalidArgument, got: {other}")),
        Ok(_) => failed(format!("{what}: was accepted")),
    }
}
