//! Collectives on owned buffers, and the conveniences built on them.

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Buffer;
use crate::dtype::{Element, ReduceOp};
use crate::error::{Error, Result};
use crate::handle::{Failed, Handle};
use crate::op::{Call, Op, shard_range};

/// A group of ranks that run collectives together.
///
/// All ranks of a communicator start the same collectives in the same order. After an error the whole job is poisoned: every
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

    /// Starts an operation. The buffer is owned until [`Handle::wait`] gives it back. Bad arguments, like every failure, come
    /// out of the handle, with the buffer.
    fn start(&self, call: Call) -> Handle;

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
    /// Collective. On the first communicator of a job it also closes the connections; nothing can be started afterwards.
    ///
    /// # Errors
    /// The job's failure, or [`Error::Timeout`].
    fn finish(&self, timeout: Duration) -> Result<()>;
}

/// Blocking and asynchronous forms of every operation, on slices and vectors.
///
/// Built once on [`Communicator::start`], so that a decorator which forwards that method covers all of them. Blocking forms run
/// on lane 0 with the communicator's default deadline.
pub trait CommunicatorExt: Communicator {
    /// Runs `op` on `buffer` and returns the buffer.
    ///
    /// # Errors
    /// The operation's; the buffer is then dropped. Use [`Communicator::start`] to get it back.
    fn run(&self, op: Op, buffer: Buffer) -> Result<Buffer> {
        Ok(self.start(Call::blocking(op, buffer)).wait().map_err(Failed::into_error)?.buffer)
    }

    /// Runs `op` on the values in place. On an error the values are what they were, or partly overwritten.
    ///
    /// # Errors
    /// The operation's.
    fn run_vec<T: Element>(&self, op: Op, values: Vec<T>) -> Result<Vec<T>> {
        self.run(op, Buffer::from_vec(values))?.into_vec()
    }

    /// Starts `op` beside the caller on `lane`.
    fn start_vec<T: Element>(&self, op: Op, values: Vec<T>, lane: usize) -> Handle {
        self.start(Call::background(op, Buffer::from_vec(values), lane))
    }

    /// Reduces `values` over all ranks, in place on every rank.
    ///
    /// # Errors
    /// The operation's.
    fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        let out = self.run_vec(Op::AllReduce(op), values.to_vec())?;
        values.copy_from_slice(&out);
        Ok(())
    }

    /// Reduces one value over all ranks.
    ///
    /// # Errors
    /// The operation's.
    fn all_reduce_scalar<T: Element>(&self, value: T, op: ReduceOp) -> Result<T> {
        let mut values = [value];
        self.all_reduce(&mut values, op)?;
        Ok(values[0])
    }

    /// Copies the root's `values` to every rank.
    ///
    /// # Errors
    /// The operation's.
    fn broadcast<T: Element>(&self, values: &mut [T], root: usize) -> Result<()> {
        let out = self.run_vec(Op::Broadcast { root }, values.to_vec())?;
        values.copy_from_slice(&out);
        Ok(())
    }

    /// Reduces `values` over all ranks into the root's; the other ranks' stay as they are.
    ///
    /// # Errors
    /// The operation's.
    fn reduce<T: Element>(&self, values: &mut [T], root: usize, op: ReduceOp) -> Result<()> {
        let out = self.run_vec(Op::Reduce { root, op }, values.to_vec())?;
        values.copy_from_slice(&out);
        Ok(())
    }

    /// Gives every rank its shard ([`shard_range`]) of the root's `whole`, which has `total` elements on the root and is not
    /// looked at elsewhere.
    ///
    /// # Errors
    /// The operation's; `InvalidArgument` when the root's `whole` has another length.
    fn scatter<T: Element>(&self, whole: &[T], total: usize, root: usize) -> Result<Vec<T>> {
        let mine = shard_range(total, self.world_size(), self.rank());
        if self.rank() == root {
            let whole = self.run_vec(Op::Scatter { root, total }, whole.to_vec())?;
            whole.get(mine).map(<[T]>::to_vec).ok_or_else(|| Error::invalid("scatter lost its own shard"))
        } else {
            self.run_vec(Op::Scatter { root, total }, vec![T::zeroed(); mine.len()])
        }
    }

    /// Collects every rank's shard of a whole of `total` elements on the root, which gets `Some(whole)`.
    ///
    /// # Errors
    /// The operation's; `InvalidArgument` when `shard` is not as long as [`shard_range`] says.
    fn gather<T: Element>(&self, shard: &[T], total: usize, root: usize) -> Result<Option<Vec<T>>> {
        let op = Op::Gather { root, total };
        if self.rank() == root {
            Ok(Some(self.run_vec(op, placed(shard, total, self.world_size(), root)?)?))
        } else {
            self.run_vec(op, shard.to_vec())?;
            Ok(None)
        }
    }

    /// Every rank passes its shard of a whole of `total` elements and gets the whole.
    ///
    /// # Errors
    /// The operation's; `InvalidArgument` when `shard` is not as long as [`shard_range`] says.
    fn all_gather<T: Element>(&self, shard: &[T], total: usize) -> Result<Vec<T>> {
        self.run_vec(Op::AllGather, placed(shard, total, self.world_size(), self.rank())?)
    }

    /// Every rank passes a whole and gets its own shard of the reduction.
    ///
    /// # Errors
    /// The operation's.
    fn reduce_scatter<T: Element>(&self, whole: &[T], op: ReduceOp) -> Result<Vec<T>> {
        let out = self.run_vec(Op::ReduceScatter(op), whole.to_vec())?;
        Ok(out[shard_range(out.len(), self.world_size(), self.rank())].to_vec())
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// The operation's.
    fn barrier(&self) -> Result<()> {
        self.run_vec::<u8>(Op::Barrier, Vec::new()).map(drop)
    }

    /// Sends `values` to one rank.
    ///
    /// # Errors
    /// The operation's.
    fn send<T: Element>(&self, values: &[T], to: usize) -> Result<()> {
        self.run_vec(Op::Send { to }, values.to_vec()).map(drop)
    }

    /// Receives `count` values from one rank.
    ///
    /// # Errors
    /// The operation's.
    fn recv<T: Element>(&self, count: usize, from: usize) -> Result<Vec<T>> {
        self.run_vec(Op::Recv { from }, vec![T::zeroed(); count])
    }
}

impl<C: Communicator + ?Sized> CommunicatorExt for C {}

/// `shard` in its place in a whole of `total` elements.
fn placed<T: Element>(shard: &[T], total: usize, ranks: usize, rank: usize) -> Result<Vec<T>> {
    let range = shard_range(total, ranks, rank);
    if range.len() != shard.len() {
        return Err(Error::invalid(format!(
            "rank {rank} passed {} elements, but its shard of {total} has {}",
            shard.len(),
            range.len()
        )));
    }
    let mut whole = vec![T::zeroed(); total];
    whole[range].copy_from_slice(shard);
    Ok(whole)
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
