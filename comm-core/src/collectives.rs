//! Every operation on slices and vectors, built on [`Communicator`].

use crate::buffer::{Buffer, Element, View, ViewMut};
use crate::communicator::Communicator;
use crate::dtype::ReduceOp;
use crate::error::{Error, Result};
use crate::handle::{Failed, Handle, Pending};
use crate::op::{BorrowedCall, Call, Counts, Elements, Op, check, shard_range};
use crate::preset::Preset;

/// Blocking and asynchronous forms of every operation, on slices and vectors.
///
/// Built once on [`Communicator::start`] and [`Communicator::run_borrowed`], so that a decorator which forwards these covers all
/// of them. They run on lane 0 with the communicator's default deadline, unless [`on_lane`](CommunicatorExt::on_lane) says otherwise.
/// Blocking forms work on the caller's own memory, without a copy. Asynchronous ones take over vectors and give a [`Pending`] at once,
/// from which the result comes by waiting or by awaiting; bad arguments come out of it too.
///
/// ```
/// use comm_core::{Communicator, CommunicatorExt, ReduceOp, local};
///
/// local::run(3, |comm| {
///     let mut values = [1.0f32, comm.rank() as f32];
///     comm.all_reduce(&mut values, ReduceOp::Mean).unwrap();
///     assert_eq!(values, [1.0, 1.0]);
///
///     // Rank r has r + 1 elements.
///     let mine = vec![comm.rank() as u16; comm.rank() + 1];
///     let all = comm.all_gather_v(&mine, &[1, 2, 3]).unwrap();
///     assert_eq!(all, [0, 1, 1, 2, 2, 2]);
///
///     // Weighted: ½·0 + 1·1 + 2·2.
///     let weight = [0.5, 1.0, 2.0][comm.rank()];
///     let sum = comm.all_reduce_scalar(comm.rank() as f32, ReduceOp::scaled_sum(weight)).unwrap();
///     assert_eq!(sum, 5.0);
/// });
/// ```
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

    /// The same communicator, whose operations run on `lane`; see [`Preset`] for what else can be set.
    fn on_lane(&self, lane: usize) -> Preset<'_, Self> {
        Preset::new(self, lane)
    }

    /// Reduces `values` over all ranks, in place on every rank. All ranks pass equally many elements.
    ///
    /// # Errors
    /// The operation's.
    fn all_reduce<T: Element>(&self, values: &mut [T], op: ReduceOp) -> Result<()> {
        self.run_borrowed(BorrowedCall::new(Op::AllReduce(op), ViewMut::of(values)))
    }

    /// Reduces `input` over all ranks into every rank's `output`, which is as long. All ranks pass equally many elements.
    ///
    /// # Errors
    /// The operation's; `InvalidArgument` when `output` is not as long as `input`.
    fn all_reduce_into<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        let call = BorrowedCall::new(Op::AllReduce(op), ViewMut::of(output));
        self.run_borrowed(call.out_of_place(View::of(input)))
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

    /// Copies the root's `values` to every rank. All ranks pass equally many elements.
    ///
    /// # Errors
    /// The operation's.
    fn broadcast<T: Element>(&self, values: &mut [T], root: usize) -> Result<()> {
        self.run_borrowed(BorrowedCall::new(Op::Broadcast { root }, ViewMut::of(values)))
    }

    /// Reduces `values` over all ranks into the root's; the other ranks' stay as they are. All ranks pass equally many elements.
    ///
    /// # Errors
    /// The operation's.
    fn reduce<T: Element>(&self, values: &mut [T], root: usize, op: ReduceOp) -> Result<()> {
        self.run_borrowed(BorrowedCall::new(Op::Reduce { root, op }, ViewMut::of(values)))
    }

    /// Gives every rank its shard ([`shard_range`]) of the root's `whole`, which has `total` elements on the root and is not
    /// looked at elsewhere.
    ///
    /// # Errors
    /// The operation's; `InvalidArgument` when the root's `whole` has another length.
    fn scatter<T: Element>(&self, whole: &[T], total: usize, root: usize) -> Result<Vec<T>> {
        let mine = shard_range(total, self.world_size(), self.rank()).len();
        self.divide(Op::Scatter { root, total }, whole, None, mine)
    }

    /// As [`scatter`](CommunicatorExt::scatter), with `counts[r]` elements for rank r, known on all ranks.
    ///
    /// # Errors
    /// As there.
    fn scatter_v<T: Element>(&self, whole: &[T], counts: &[usize], root: usize) -> Result<Vec<T>> {
        let (total, mine) = (total_of(counts)?, count_of(counts, self.rank())?);
        self.divide(Op::Scatter { root, total }, whole, Some(counts), mine)
    }

    /// Collects every rank's shard of a whole of `total` elements on the root, which gets `Some(whole)`.
    ///
    /// # Errors
    /// The operation's; `InvalidArgument` when `shard` is not as long as [`shard_range`] says.
    fn gather<T: Element>(&self, shard: &[T], total: usize, root: usize) -> Result<Option<Vec<T>>> {
        let length = if self.rank() == root { total } else { 0 };
        let whole = self.divide(Op::Gather { root, total }, shard, None, length)?;
        Ok((self.rank() == root).then_some(whole))
    }

    /// As [`gather`](CommunicatorExt::gather), with `counts[r]` elements from rank r, known on all ranks.
    ///
    /// # Errors
    /// As there.
    fn gather_v<T: Element>(&self, shard: &[T], counts: &[usize], root: usize) -> Result<Option<Vec<T>>> {
        let total = total_of(counts)?;
        let length = if self.rank() == root { total } else { 0 };
        let whole = self.divide(Op::Gather { root, total }, shard, Some(counts), length)?;
        Ok((self.rank() == root).then_some(whole))
    }

    /// Every rank passes its shard of a whole of `total` elements and gets the whole.
    ///
    /// # Errors
    /// The operation's; `InvalidArgument` when `shard` is not as long as [`shard_range`] says.
    fn all_gather<T: Element>(&self, shard: &[T], total: usize) -> Result<Vec<T>> {
        self.divide(Op::AllGather, shard, None, total)
    }

    /// As [`all_gather`](CommunicatorExt::all_gather), with `counts[r]` elements from rank r, known on all ranks.
    ///
    /// # Errors
    /// As there.
    fn all_gather_v<T: Element>(&self, shard: &[T], counts: &[usize]) -> Result<Vec<T>> {
        self.divide(Op::AllGather, shard, Some(counts), total_of(counts)?)
    }

    /// Every rank passes a whole and gets its own shard of the reduction.
    ///
    /// # Errors
    /// The operation's.
    fn reduce_scatter<T: Element>(&self, whole: &[T], op: ReduceOp) -> Result<Vec<T>> {
        let mine = shard_range(whole.len(), self.world_size(), self.rank()).len();
        self.divide(Op::ReduceScatter(op), whole, None, mine)
    }

    /// Every rank passes one block for each rank, all equally long, and gets the blocks that are for it, in rank order.
    ///
    /// # Errors
    /// The operation's; `InvalidArgument` when the blocks are not equal.
    fn all_to_all<T: Element>(&self, blocks: &[T]) -> Result<Vec<T>> {
        self.divide(Op::AllToAll, blocks, None, blocks.len())
    }

    /// As [`all_to_all`](CommunicatorExt::all_to_all), with `send[r]` elements for rank r and `receive[r]` from it.
    ///
    /// # Errors
    /// The operation's; `Mismatch` when a rank sends another number than is expected of it.
    fn all_to_all_v<T: Element>(&self, blocks: &[T], send: &[usize], receive: &[usize]) -> Result<Vec<T>> {
        let counts = Counts::all_to_all(send, receive);
        let mut received = self.output_buffer(Op::AllToAll, Some(blocks), Some(&counts), total_of(receive)?)?;
        let call = BorrowedCall::new(Op::AllToAll, ViewMut::of(&mut received))
            .out_of_place(View::of(blocks))
            .with_counts(counts);
        self.run_borrowed(call)?;
        Ok(received)
    }

    /// Starts an [`all_reduce`](CommunicatorExt::all_reduce) of `values`, whose result is the reduction.
    fn all_reduce_async<T: Element>(&self, values: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        begin(self, Op::AllReduce(op), values)
    }

    /// Starts a [`broadcast`](CommunicatorExt::broadcast), whose result is the root's `values`. All ranks pass equally many elements.
    fn broadcast_async<T: Element>(&self, values: Vec<T>, root: usize) -> Pending<Vec<T>> {
        begin(self, Op::Broadcast { root }, values)
    }

    /// Starts a [`reduce`](CommunicatorExt::reduce), whose result is the reduction on the root and `values` elsewhere.
    fn reduce_async<T: Element>(&self, values: Vec<T>, root: usize, op: ReduceOp) -> Pending<Vec<T>> {
        begin(self, Op::Reduce { root, op }, values)
    }

    /// Starts a [`scatter`](CommunicatorExt::scatter), whose result is this rank's shard. `whole` is not looked at but on the root.
    fn scatter_async<T: Element>(&self, whole: Vec<T>, total: usize, root: usize) -> Pending<Vec<T>> {
        let mine = shard_range(total, self.world_size(), self.rank()).len();
        begin_into(self, Op::Scatter { root, total }, whole, mine)
    }

    /// Starts a [`gather`](CommunicatorExt::gather), whose result is the whole on the root and empty elsewhere.
    fn gather_async<T: Element>(&self, shard: Vec<T>, total: usize, root: usize) -> Pending<Vec<T>> {
        begin_into(self, Op::Gather { root, total }, shard, if self.rank() == root { total } else { 0 })
    }

    /// Starts an [`all_gather`](CommunicatorExt::all_gather), whose result is the whole of `total` elements.
    fn all_gather_async<T: Element>(&self, shard: Vec<T>, total: usize) -> Pending<Vec<T>> {
        begin_into(self, Op::AllGather, shard, total)
    }

    /// Starts a [`reduce_scatter`](CommunicatorExt::reduce_scatter), whose result is this rank's shard of the reduction.
    fn reduce_scatter_async<T: Element>(&self, whole: Vec<T>, op: ReduceOp) -> Pending<Vec<T>> {
        let mine = shard_range(whole.len(), self.world_size(), self.rank()).len();
        begin_into(self, Op::ReduceScatter(op), whole, mine)
    }

    /// Starts an [`all_to_all`](CommunicatorExt::all_to_all), whose result is the blocks that are for this rank.
    fn all_to_all_async<T: Element>(&self, blocks: Vec<T>) -> Pending<Vec<T>> {
        let length = blocks.len();
        begin_into(self, Op::AllToAll, blocks, length)
    }

    /// Starts a [`barrier`](CommunicatorExt::barrier).
    fn barrier_async(&self) -> Pending<()> {
        let nothing = Buffer::from_vec::<u8>(Vec::new());
        Pending::new(self.start(Call::background(Op::Barrier, nothing, 0)), |_| Ok(()))
    }

    /// Starts a [`send`](CommunicatorExt::send), whose result is `values`, to be used again.
    fn send_async<T: Element>(&self, values: Vec<T>, to: usize) -> Pending<Vec<T>> {
        begin(self, Op::Send { to }, values)
    }

    /// Starts a [`recv`](CommunicatorExt::recv), whose result is the `count` values that come.
    fn recv_async<T: Element>(&self, count: usize, from: usize) -> Pending<Vec<T>> {
        match zeros(count) {
            Ok(values) => begin(self, Op::Recv { from }, values),
            Err(error) => failed(error),
        }
    }

    /// Runs an operation out of place into a new vector of `length` elements. Where the root alone has an input, the others'
    /// is not looked at.
    ///
    /// # Errors
    /// The operation's.
    #[doc(hidden)]
    fn divide<T: Element>(&self, op: Op, input: &[T], counts: Option<&[usize]>, length: usize) -> Result<Vec<T>> {
        let input = (!matches!(op, Op::Scatter { root, .. } if root != self.rank())).then_some(input);
        let counts = counts.map(Counts::new);
        let mut output = self.output_buffer(op, input, counts.as_ref(), length)?;
        let mut call = BorrowedCall::new(op, ViewMut::of(&mut output));
        call.input = input.map(View::of);
        call.counts = counts;
        self.run_borrowed(call)?;
        Ok(output)
    }

    /// Memory for the result of an operation whose arguments make sense.
    #[doc(hidden)]
    fn output_buffer<T: Element>(
        &self,
        op: Op,
        input: Option<&[T]>,
        counts: Option<&Counts>,
        length: usize,
    ) -> Result<Vec<T>> {
        let elements = |count: usize| Elements { dtype: T::DTYPE, count };
        let input = input.map(|input| elements(input.len()));
        check(&op, self.rank(), self.world_size(), elements(length), input, counts)?;
        zeros(length)
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// The operation's.
    fn barrier(&self) -> Result<()> {
        self.run_borrowed(BorrowedCall::new(Op::Barrier, ViewMut::of::<u8>(&mut [])))
    }

    /// Sends `values` to one rank.
    ///
    /// # Errors
    /// The operation's.
    fn send<T: Element>(&self, values: &[T], to: usize) -> Result<()> {
        let call = BorrowedCall::new(Op::Send { to }, ViewMut::of::<T>(&mut []));
        self.run_borrowed(call.out_of_place(View::of(values)))
    }

    /// Receives `count` values from one rank.
    ///
    /// # Errors
    /// The operation's.
    fn recv<T: Element>(&self, count: usize, from: usize) -> Result<Vec<T>> {
        let mut values = zeros(count)?;
        self.recv_into(&mut values, from)?;
        Ok(values)
    }

    /// Receives as many values as fit into `values` from one rank.
    ///
    /// # Errors
    /// The operation's.
    fn recv_into<T: Element>(&self, values: &mut [T], from: usize) -> Result<()> {
        self.run_borrowed(BorrowedCall::new(Op::Recv { from }, ViewMut::of(values)))
    }
}

impl<C: Communicator + ?Sized> CommunicatorExt for C {}

/// Starts an operation in place.
fn begin<T: Element>(communicator: &(impl Communicator + ?Sized), op: Op, values: Vec<T>) -> Pending<Vec<T>> {
    Pending::values(communicator.start(Call::background(op, Buffer::from_vec(values), 0)))
}

/// Starts an operation out of place, into a new vector of `length` elements. Where the root alone has an input, the others' is dropped.
fn begin_into<T: Element>(
    communicator: &(impl Communicator + ?Sized),
    op: Op,
    input: Vec<T>,
    length: usize,
) -> Pending<Vec<T>> {
    let input = (!matches!(op, Op::Scatter { root, .. } if root != communicator.rank())).then_some(input);
    let output = match communicator.output_buffer(op, input.as_deref(), None, length) {
        Ok(output) => output,
        Err(error) => return failed(error),
    };
    let mut call = Call::background(op, Buffer::from_vec::<T>(output), 0);
    call.input = input.map(Buffer::from_vec);
    Pending::values(communicator.start(call))
}

/// An operation that has failed before it began.
fn failed<T: Element>(error: Error) -> Pending<Vec<T>> {
    Pending::values(Handle::done(Err(Failed { error, buffer: None, input: None })))
}

/// So many zeros.
fn zeros<T: Element>(count: usize) -> Result<Vec<T>> {
    // A failure to allocate cannot be caught, but it can be seen coming.
    Vec::<T>::new()
        .try_reserve_exact(count)
        .map_err(|_| Error::invalid(format!("not enough memory for a result of {count} elements of {}", T::DTYPE)))?;
    Ok(vec![T::zeroed(); count])
}

fn total_of(counts: &[usize]) -> Result<usize> {
    let total = counts.iter().try_fold(0usize, |sum, count| sum.checked_add(*count));
    total.ok_or_else(|| Error::invalid("the counts add up to more elements than memory can hold"))
}

fn count_of(counts: &[usize], rank: usize) -> Result<usize> {
    let count = counts.get(rank).copied();
    count.ok_or_else(|| Error::invalid(format!("{} counts, but none for rank {rank}", counts.len())))
}

#[cfg(test)]
mod tests;
