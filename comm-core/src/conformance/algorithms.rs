//! Every algorithm that an operation can be asked to run by, around the sizes at which messages are cut.

use std::sync::Arc;

use super::data::{Pattern, Sample, fingerprint};
use super::{Case, CaseResult, Step, ensure, exchange_number, failed, run_call};
use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::dtype::{DType, ReduceOp};
use crate::error::Error;
use crate::op::{Algorithm, Call, Mode, Op, OpKind, shard_range};
use crate::splitmix::mix;
use crate::table::supports;

pub(super) fn add(cases: &mut Vec<Case>) {
    for algorithm in Algorithm::ALL {
        add_type::<f32>(cases, algorithm);
        add_type::<half::bf16>(cases, algorithm);
        add_type::<i8>(cases, algorithm);
        add_type::<u64>(cases, algorithm);
    }
}

fn add_type<T: Sample>(cases: &mut Vec<Case>, algorithm: Algorithm) {
    for kind in [OpKind::AllReduce, OpKind::Reduce, OpKind::ReduceScatter, OpKind::AllGather, OpKind::Broadcast] {
        // On one rank every algorithm that there is for an operation can run it.
        if !supports(algorithm, kind, T::DTYPE, 1) {
            continue;
        }
        let name = format!("algorithm/{algorithm}/{kind}/{}", T::DTYPE);
        let case = Case::shared(name, 1, move |communicator| every_size::<T>(communicator, algorithm, kind));
        // What is reduced element by element, and what is gathered first.
        cases.push(case.of_type::<T>(&[DType::F32, DType::Bf16]));
    }
}

/// None, fewer than ranks, odd, a shard of one piece more or less than the ring's, several pieces.
const COUNTS: [usize; 6] = [0, 1, 5, 4099, 300_001, 1_200_007];

fn every_size<T: Sample>(communicator: &Arc<dyn Communicator>, algorithm: Algorithm, kind: OpKind) -> CaseResult {
    let (rank, ranks) = (communicator.rank(), communicator.world_size());
    if !supports(algorithm, kind, T::DTYPE, ranks) {
        return refused::<T>(communicator, algorithm, kind);
    }
    let seed = mix((algorithm as u64) << 16 | (kind as u64) << 8 | T::DTYPE as u64);
    for count in COUNTS {
        for op in [ReduceOp::Sum, ReduceOp::Mean] {
            let root = count % ranks;
            let (mine, reduced) = (Pattern::<T>::of_rank(seed, rank, ranks), Pattern::<T>::reduction(seed, op, ranks));
            let of_root = Pattern::<T>::of_rank(seed, root, ranks);
            let shard = shard_range(count, ranks, rank);
            let operation = match kind {
                OpKind::AllReduce => Op::AllReduce(op),
                OpKind::Reduce => Op::Reduce { root, op },
                OpKind::ReduceScatter => Op::ReduceScatter(op),
                OpKind::AllGather => Op::AllGather,
                _ => Op::Broadcast { root },
            };
            let values = match kind {
                OpKind::AllGather => {
                    let mut whole = vec![T::zeroed(); count];
                    whole[shard.clone()].copy_from_slice(&of_root.take(shard.start, shard.len()));
                    whole
                }
                _ => mine.take(0, count),
            };
            let call = Call::blocking(operation, Buffer::from_vec(values)).with_algorithm(algorithm);
            let (got, _) = run_call::<T>(communicator, call)?;
            let what = format!("{count} elements, {op}");
            match kind {
                OpKind::AllReduce => {
                    reduced.check(&got, 0, format_args!("{what}"))?;
                    same_everywhere(communicator, &got, &what)?;
                }
                OpKind::Reduce if rank == root => reduced.check(&got, 0, format_args!("{what}"))?,
                OpKind::Reduce => mine.check(&got, 0, format_args!("{what}: own buffer changed"))?,
                OpKind::ReduceScatter => reduced.check(&got[shard.clone()], shard.start, format_args!("{what}"))?,
                _ => of_root.check(&got, 0, format_args!("{what}"))?,
            }
            if !matches!(kind, OpKind::AllReduce | OpKind::Reduce | OpKind::ReduceScatter) {
                break;
            }
        }
    }
    Ok(())
}

fn same_everywhere<T: Sample>(communicator: &Arc<dyn Communicator>, got: &[T], what: &str) -> CaseResult {
    let hashes = exchange_number(communicator, fingerprint(got))?;
    match hashes.iter().position(|hash| *hash != hashes[0]) {
        Some(other) => failed(format!("{what}: ranks 0 and {other} have different bits")),
        None => Ok(()),
    }
}

/// An algorithm that cannot run on so many ranks is refused before anything is sent.
fn refused<T: Sample>(communicator: &Arc<dyn Communicator>, algorithm: Algorithm, kind: OpKind) -> Step<()> {
    let op = if kind == OpKind::AllReduce { Op::AllReduce(ReduceOp::Sum) } else { Op::Broadcast { root: 0 } };
    for mode in [Mode::Blocking, Mode::Background] {
        let buffer = Buffer::from_vec(vec![T::zeroed(); 10]);
        let call = Call { mode, ..Call::blocking(op, buffer).with_algorithm(algorithm) };
        match communicator.start(call).wait() {
            Err(failed) => ensure(matches!(failed.error, Error::InvalidArgument(_)), || failed.error.to_string())?,
            Ok(_) => return failed(format!("{algorithm} was accepted on {} ranks", communicator.world_size())),
        }
    }
    Ok(())
}
