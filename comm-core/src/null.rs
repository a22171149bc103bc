//! A communicator that is infinitely fast, because it communicates nothing: what a program takes without its network.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::communicator::Communicator as _;
use crate::control::Control;
use crate::deadline::Deadline;
use crate::engine::{Comm, Data, Engine, Group, JobState, Operation, Settings};
use crate::error::{Error, Result};
use crate::op::{Extents, Op};
use crate::table::Table;

/// One rank of a job whose other ranks are not there. For timing only: every operation ends at once, and its results are wrong.
///
/// In a result, the part that this rank contributes holds its own contribution, of a reduction too: no sum, no mean, no
/// factor, so that a program that feeds results back into the next operation never leaves the range of its numbers.
/// What the other ranks would have sent stays as the caller passed it. Arguments are checked as everywhere else.
///
/// Device memory is taken as it is where nothing has to be copied, that is in place.
///
/// [`split`](crate::Communicator::split) is refused with [`Error::Unsupported`] where there are other ranks: their colors are not known.
pub type NullCommunicator = Comm<NullEngine>;

/// Performs operations by leaving out what other ranks would do.
pub struct NullEngine {
    shared: JobState<()>,
}

impl NullCommunicator {
    /// Rank `rank` of `world_size`.
    ///
    /// # Errors
    /// `InvalidArgument` when there is no such rank, or no lane.
    pub fn new(rank: usize, world_size: usize, lanes: usize) -> Result<Self> {
        if rank >= world_size || lanes == 0 {
            return Err(Error::invalid(format!("rank {rank} of {world_size} with {lanes} lanes")));
        }
        let control = NullControl { rank, world_size, failure: OnceLock::new(), hooks: Mutex::default() };
        let never = Duration::MAX;
        let settings =
            Settings { timeout: never, stall_after: never, verdict_grace: Duration::ZERO, table: Table::fixed() };
        let shared = JobState::new(Arc::new(control), vec![(); lanes], settings);
        Ok(Comm::first(Arc::new(NullEngine { shared }), ()))
    }
}

impl Engine for NullEngine {
    type Lane = ();
    type GroupState = ();

    const IS_INSTANT: bool = true;

    fn name(&self) -> &str {
        "null"
    }

    fn shared(&self) -> &JobState<()> {
        &self.shared
    }

    fn accept(&self, op: &Op, extents: &Extents, data: &mut Data<'_>) -> Result<()> {
        // In place nothing moves, unless an all-to-all has its own block in different places.
        if data.is_on_device() && (data.input.is_some() || extents.own_copy.is_some()) {
            return Err(Error::Unsupported {
                what: format!(
                    "{} from one place in device memory to another, on a communicator that does nothing",
                    op.kind()
                ),
                why: "run it in place, or on host memory".into(),
            });
        }
        Ok(())
    }

    fn perform(&self, operation: &Operation, (): &(), (): &mut (), data: Data<'_>) -> Result<()> {
        if let Some((mut buffer, input)) = data.into_host() {
            operation.extents.copy_own(buffer.bytes_mut(), input.map(|input| input.bytes()));
        }
        Ok(())
    }

    fn split(parent: &Comm<Self>, group: Option<&Group>) -> Result<Option<()>> {
        if parent.world_size() > 1 {
            return Err(Error::Unsupported {
                what: format!("splitting a null communicator of {} ranks", parent.world_size()),
                why: "it has no other ranks, so their colors are unknown; make a NullCommunicator of the size of the part"
                    .into(),
            });
        }
        Ok(group.map(|_| ()))
    }

    fn end(self: &Arc<Self>, _failure: &Error) {}

    fn close(self: &Arc<Self>, (): &(), _deadline: Deadline) -> Result<()> {
        Ok(())
    }
}

/// What is called with the job's failure.
type Hook = Box<dyn Fn(&Error) + Send + Sync>;

/// The control plane of a rank whose job has no other ranks to tell anything.
struct NullControl {
    rank: usize,
    world_size: usize,
    failure: OnceLock<Error>,
    hooks: Mutex<Vec<Hook>>,
}

impl Control for NullControl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn all_gather(&self, _label: &str, blob: &[u8], _deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        Ok(vec![blob.to_vec(); self.world_size])
    }

    fn derive_key(&self, _label: &str) -> [u8; 32] {
        [0; 32]
    }

    fn poison(&self, error: &Error) {
        if self.failure.set(error.clone()).is_ok() {
            for hook in std::mem::take(&mut *self.hooks.lock().unwrap_or_else(PoisonError::into_inner)) {
                hook(error);
            }
        }
    }

    fn failure(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    fn verdict(&self, observed: Error, _grace: Duration) -> Error {
        self.poison(&observed);
        self.failure().unwrap_or(observed)
    }

    fn on_failure(&self, hook: Hook) {
        match self.failure.get() {
            Some(error) => hook(error),
            None => self.hooks.lock().unwrap_or_else(PoisonError::into_inner).push(hook),
        }
    }

    fn leave(&self, _deadline: Deadline) -> Result<()> {
        self.failure.get().cloned().map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Buffer;
    use crate::collectives::CommunicatorExt;
    use crate::communicator::Communicator;
    use crate::dtype::ReduceOp;
    use crate::local;
    use crate::mesh::{Mesh, MeshOptions};
    use crate::op::{Algorithm, Call, Counts};

    fn rank_1_of_3() -> NullCommunicator {
        NullCommunicator::new(1, 3, 2).unwrap()
    }

    #[test]
    fn a_reduction_is_the_own_contribution() {
        let null = rank_1_of_3();
        for op in ReduceOp::ALL.into_iter().chain([ReduceOp::scaled_sum(0.5)]) {
            let mut values = [1.5f32, f32::MAX, -2.0];
            null.all_reduce(&mut values, op).unwrap();
            assert_eq!(values, [1.5, f32::MAX, -2.0]);
            let mut out = [9.0f32; 3];
            null.all_reduce_into(&values, &mut out, op).unwrap();
            assert_eq!(out, values);
            null.reduce(&mut values, 2, op).unwrap();
            assert_eq!(values, [1.5, f32::MAX, -2.0]);
            assert_eq!(null.reduce_scatter(&[1i32, 2, 3, 4, 5, 6, 7], op.shared()).unwrap(), [4, 5]);
        }
    }

    #[test]
    fn what_others_would_have_sent_stays_as_passed() {
        let null = rank_1_of_3();
        let whole = null.run_vec(Op::AllGather, vec![1u8, 2, 3, 4, 5, 6]).unwrap();
        assert_eq!(whole, [1, 2, 3, 4, 5, 6]);
        assert_eq!(null.all_gather(&[7u8, 8], 7).unwrap(), [0, 0, 0, 7, 8, 0, 0]);
        assert_eq!(null.all_gather_v(&[7u8], &[2, 1, 3]).unwrap(), [0, 0, 7, 0, 0, 0]);
        assert_eq!(null.gather(&[7u8], 3, 1).unwrap().unwrap(), [0, 7, 0]);
        assert_eq!(null.gather(&[7u8], 3, 0).unwrap(), None);
        assert_eq!(null.scatter(&[1u8, 2, 3], 3, 1).unwrap(), [2]);
        assert_eq!(null.scatter::<u8>(&[], 3, 0).unwrap(), [0]);
        let mut values = [5i64, 6];
        null.broadcast(&mut values, 0).unwrap();
        null.recv_into(&mut values, 2).unwrap();
        null.send(&values, 2).unwrap();
        null.barrier().unwrap();
        assert_eq!(values, [5, 6]);
    }

    #[test]
    fn the_own_block_of_an_all_to_all_arrives() {
        let null = rank_1_of_3();
        assert_eq!(null.all_to_all(&[1u8, 2, 3, 4, 5, 6]).unwrap(), [0, 0, 3, 4, 0, 0]);
        // The own block of two elements moves from place 1 to place 3.
        assert_eq!(null.all_to_all_v(&[1u8, 2, 3, 4], &[1, 2, 1], &[3, 2, 0]).unwrap(), [0, 0, 0, 2, 3]);
        let in_place = Call::blocking(Op::AllToAll, Buffer::from_vec(vec![1u8, 2, 3, 4, 0]))
            .with_counts(Counts::all_to_all([1, 2, 1], [3, 2, 0]));
        let out: Vec<u8> = null.start(in_place).wait().unwrap().buffer.into_vec().unwrap();
        assert_eq!(out, [1, 2, 3, 2, 3]);
    }

    /// Every call that is refused on a mesh is refused here, with the same words.
    #[test]
    fn arguments_are_checked_as_on_a_mesh() {
        let mut ranks = local::group(3, 2);
        let rank = ranks.remove(1);
        let mesh = Mesh::new(rank.transport, rank.control, MeshOptions::default()).unwrap();
        let null = rank_1_of_3();
        let calls: [fn() -> Call; 9] = [
            || Call::blocking(Op::Broadcast { root: 3 }, Buffer::from_vec(vec![1u8])),
            || Call::blocking(Op::Send { to: 1 }, Buffer::from_vec(vec![1u8])),
            || Call::blocking(Op::Recv { from: 4 }, Buffer::from_vec(vec![1u8])),
            || Call::blocking(Op::Barrier, Buffer::from_vec(vec![1u8])),
            || Call::blocking(Op::Scatter { root: 0, total: 7 }, Buffer::from_vec(vec![1u8; 7])),
            || Call::blocking(Op::AllToAll, Buffer::from_vec(vec![1u8; 4])),
            || Call::background(Op::AllReduce(ReduceOp::Sum), Buffer::from_vec(vec![1u8; 4]), 2),
            || {
                Call::blocking(Op::AllReduce(ReduceOp::Sum), Buffer::from_vec(vec![1f32; 4]))
                    .with_algorithm(Algorithm::HalvingDoubling)
            },
            || {
                Call::blocking(Op::AllGather, Buffer::from_vec(vec![1f32; 4]))
                    .out_of_place(Buffer::from_vec(vec![1f64; 1]))
            },
        ];
        for (number, call) in calls.into_iter().enumerate() {
            let (theirs, ours) = (mesh.start(call()).wait().unwrap_err(), null.start(call()).wait().unwrap_err());
            assert!(matches!(ours.error, Error::InvalidArgument(_)), "{number}: {}", ours.error);
            assert_eq!(ours.error.to_string(), theirs.error.to_string(), "{number}");
            assert!(ours.buffer.is_some());
        }
        assert!(NullCommunicator::new(3, 3, 1).is_err() && NullCommunicator::new(0, 1, 0).is_err());
    }

    #[test]
    fn only_a_single_rank_can_be_split() {
        let error = rank_1_of_3().split(Some(0), 0).err().unwrap();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        let alone = NullCommunicator::new(0, 1, 1).unwrap();
        let children: Vec<_> = [Some(4), Some(4), None].map(|color| alone.split(color, 0).unwrap()).into();
        let ids: Vec<u64> = children.iter().flatten().map(|child| child.id()).collect();
        assert!(ids.len() == 2 && ids[0] != ids[1] && !ids.contains(&alone.id()), "{ids:?}");
    }

    #[test]
    fn nothing_starts_after_the_end() {
        let null = rank_1_of_3();
        null.finish(Duration::ZERO).unwrap();
        assert!(matches!(null.barrier(), Err(Error::InvalidArgument(_))));
        let null = rank_1_of_3();
        null.abort("the first");
        null.abort("the second");
        for error in [null.barrier().unwrap_err(), null.finish(Duration::ZERO).unwrap_err()] {
            assert!(matches!(&error, Error::Aborted { by: 1, reason } if reason == "the first"), "{error}");
        }
    }
}
