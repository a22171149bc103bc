//! What runs collectives for a group of ranks.

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{Buffer, HostBuffer, View};
use crate::error::{Error, Result};
use crate::handle::{Failed, Handle};
use crate::op::{BorrowedCall, Call};

/// A group of ranks that run collectives together.
///
/// All ranks of a communicator start the same collectives in the same order. Ranks that do not get `Mismatch`, which names both
/// sides, as soon as a message shows it; where each only waits for others, the deadline ends the wait. After an error the whole job is poisoned: every
/// operation on every rank fails with the first error.
pub trait Communicator: Send + Sync {
    /// The backend's name as users write it: `tcp`, `quic`, `nccl`, ….
    fn name(&self) -> &str;

    /// This rank within the communicator.
    fn rank(&self) -> usize;

    /// Number of ranks in the communicator.
    fn world_size(&self) -> usize;

    /// Number of lanes on which operations can run side by side.
    fn lanes(&self) -> usize;

    /// The communicator's id, equal on its ranks, different from every other communicator's of the job.
    fn id(&self) -> u64;

    /// Starts an operation. Its deadline bounds the wait for its turn on its lane too. The buffer is owned until [`Handle::wait`] gives it
    /// back. Bad arguments, like every failure, come out of the handle, with the buffer. For vectors the asynchronous forms of
    /// [`CommunicatorExt`](crate::CommunicatorExt) are simpler: they give a typed [`Pending`](crate::Pending).
    ///
    /// ```
    /// use comm_core::{Buffer, Call, Communicator, Op, ReduceOp, local};
    ///
    /// let sums = local::run(2, |comm| {
    ///     // Two operations at once, on lanes of their own; the rank goes on.
    ///     let sum = Call::background(Op::AllReduce(ReduceOp::Sum), Buffer::from_vec(vec![1.0f32; 1000]), 0);
    ///     let least = Call::background(Op::AllReduce(ReduceOp::Min), Buffer::from_vec(vec![comm.rank() as i64]), 1);
    ///     let (sum, mut least) = (comm.start(sum), comm.start(least));
    ///     while !least.test() {
    ///         std::thread::yield_now();
    ///     }
    ///     let least = least.wait().unwrap().buffer.into_vec::<i64>().unwrap();
    ///     let sum = sum.wait().unwrap().buffer.into_vec::<f32>().unwrap();
    ///     (sum[999], least[0])
    /// });
    /// assert_eq!(sums, [(2.0, 0), (2.0, 0)]);
    /// ```
    fn start(&self, call: Call) -> Handle;

    /// Runs an operation in the caller's thread on memory that the caller lends. Without this method of its own a backend gets
    /// copies, through [`start`](Communicator::start).
    ///
    /// # Errors
    /// Those that `start`'s handle would give.
    fn run_borrowed(&self, call: BorrowedCall<'_>) -> Result<()> {
        run_copied(self, call)
    }

    /// Makes a communicator of some of the ranks.
    ///
    /// ```
    /// use comm_core::{Communicator, CommunicatorExt, ReduceOp, local};
    ///
    /// let sums = local::run(4, |comm| {
    ///     let half = comm.split(Some(comm.rank() as u64 % 2), 0).unwrap().unwrap();
    ///     half.all_reduce_scalar(comm.rank() as i32, ReduceOp::Sum).unwrap()
    /// });
    /// assert_eq!(sums, [2, 4, 2, 4]);
    /// ```
    ///
    /// Ranks that pass the same `color` form a new communicator, ordered by (`key`, rank); those that pass `None` get none.
    /// Collective over this communicator. New and old communicator share lanes: two ranks that are in both must issue the
    /// operations of both in the same order.
    ///
    /// # Errors
    /// As any collective.
    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn Communicator>>>;

    /// Fails every operation of the job, on all ranks, with [`Error::Aborted`]. Never blocks; callable from any thread.
    fn abort(&self, reason: &str);

    /// Ends the communicator in an orderly way: waits for its operations and reports errors that none of them has reported.
    /// Collective. On the first communicator of a job it also waits for the operations of those that came out of it, closes the
    /// transport's connections and leaves the job; nothing can be started afterwards, and another call of this succeeds at once. Rank 0
    /// goes on listening at the job's address until its control plane is dropped, that is, with all that holds it: this communicator, those
    /// that came out of it, and clones (of the crate `isocomm`: the `Connected`). A rank that ends without it counts as lost to those that
    /// still work. After a failure it need not be called.
    ///
    /// # Errors
    /// The job's failure, or [`Error::Timeout`] when operations are still under way, or other ranks have not called it, at the deadline.
    /// A timeout ends the job, with one exception. The ranks of a communicator that came out of a [`split`](Communicator::split) meet on lane 0,
    /// each once its own operations have ended and lane 0, which all communicators of the job share, is idle. Where that is not so by the
    /// deadline, this rank has sent nothing yet: the timeout does not end the job, and the communicator can be finished later.
    fn finish(&self, timeout: Duration) -> Result<()>;
}

/// Runs a call on copies of what it was lent, through [`Communicator::start`].
///
/// # Errors
/// Those of the call.
pub(crate) fn run_copied<C: Communicator + ?Sized>(communicator: &C, call: BorrowedCall<'_>) -> Result<()> {
    let input = call.input.map(|input| Buffer::Host(HostBuffer::copy_of(input)));
    let copy = Buffer::Host(HostBuffer::copy_of(View::from(&call.buffer)));
    let (owned, mut buffer, _) = call.replace_data(copy, input);
    match communicator.start(owned).wait().map_err(Failed::into_error)?.buffer {
        Buffer::Host(result) if result.bytes().len() == buffer.bytes().len() => {
            buffer.bytes_mut().copy_from_slice(result.bytes());
            Ok(())
        }
        other => Err(Error::Internal(format!("{} gave another buffer back: {other:?}", communicator.name()))),
    }
}

/// A shared communicator is a communicator.
#[deny(clippy::missing_trait_methods)]
impl<C: Communicator + ?Sized> Communicator for Arc<C> {
    fn name(&self) -> &str {
        (**self).name()
    }

    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }

    fn lanes(&self) -> usize {
        (**self).lanes()
    }

    fn id(&self) -> u64 {
        (**self).id()
    }

    fn start(&self, call: Call) -> Handle {
        (**self).start(call)
    }

    fn run_borrowed(&self, call: BorrowedCall<'_>) -> Result<()> {
        (**self).run_borrowed(call)
    }

    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        (**self).split(color, key)
    }

    fn abort(&self, reason: &str) {
        (**self).abort(reason);
    }

    fn finish(&self, timeout: Duration) -> Result<()> {
        (**self).finish(timeout)
    }
}
