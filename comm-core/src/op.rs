//! Operations and how they are cut into messages.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::buffer::{Buffer, View, ViewMut};
use crate::dtype::ReduceOp;
use crate::names;

mod extents;

pub use extents::{Elements, Extents, OwnCopy, Shards, check};

/// One operation on a buffer. Roots and peers are ranks within the communicator.
///
/// "Shard r" is element range [`shard_range`]`(count, world_size, r)` of the whole: the first `count % world_size` shards
/// are one element longer. Where shards of other lengths are wanted, a call brings [`Counts`].
///
/// In place, the one buffer holds what goes in and what comes out, as described at each operation. Out of place
/// ([`Call::out_of_place`]) a second buffer holds what goes in and stays as it is:
///
/// | operation | input | buffer |
/// |---|---|---|
/// | all-reduce, all-to-all | the whole | the whole |
/// | broadcast | the whole, on the root only | the whole |
/// | reduce | the whole | the whole on the root, elsewhere anything: it is not looked at |
/// | scatter | the whole, on the root only | the rank's shard |
/// | gather | the rank's shard | the whole on the root, elsewhere anything |
/// | all-gather | the rank's shard | the whole |
/// | reduce-scatter | the whole | the rank's shard |
/// | send | what is sent | empty |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Op {
    /// Every rank gets the reduction of all ranks' buffers, in place. All buffers have the same count.
    AllReduce(ReduceOp),
    /// Every rank gets the root's buffer, in place. All buffers have the same count.
    Broadcast {
        /// The rank whose buffer is copied.
        root: usize,
    },
    /// The root gets the reduction, in place; the other ranks' buffers stay as they are.
    Reduce {
        /// The rank that gets the result.
        root: usize,
        /// How elements are combined.
        op: ReduceOp,
    },
    /// Each rank gets its own shard of the root's buffer. The root passes the whole and gets it back unchanged (its shard is
    /// where it was); every other rank passes a buffer of its shard's length.
    Scatter {
        /// The rank that holds the whole.
        root: usize,
        /// Elements of the whole, the same on all ranks.
        total: usize,
    },
    /// The root gets every rank's shard. The root passes the whole, with its own shard in its place; every other rank passes
    /// its shard and gets it back unchanged.
    Gather {
        /// The rank that collects.
        root: usize,
        /// Elements of the whole, the same on all ranks.
        total: usize,
    },
    /// Every rank passes the whole with its own shard in place, and gets all shards.
    AllGather,
    /// Every rank passes the whole; rank r gets shard r of the reduction, in place. What the other shards hold afterwards is
    /// not specified.
    ReduceScatter(ReduceOp),
    /// Every rank passes a whole of one block for each rank, and gets block r of every rank's whole, in rank order, in place.
    /// Blocks are equal, so the count is a multiple of the number of ranks, unless the call brings [`Counts::all_to_all`].
    AllToAll,
    /// Returns once every rank has called it. The buffer has no elements.
    Barrier,
    /// Sends the buffer to one rank, which must receive it with the same count and type.
    Send {
        /// The receiving rank.
        to: usize,
    },
    /// Receives into the buffer from one rank.
    Recv {
        /// The sending rank.
        from: usize,
    },
}

impl Op {
    /// The operation without its arguments.
    pub fn kind(&self) -> OpKind {
        match self {
            Op::AllReduce(_) => OpKind::AllReduce,
            Op::Broadcast { .. } => OpKind::Broadcast,
            Op::Reduce { .. } => OpKind::Reduce,
            Op::Scatter { .. } => OpKind::Scatter,
            Op::Gather { .. } => OpKind::Gather,
            Op::AllGather => OpKind::AllGather,
            Op::ReduceScatter(_) => OpKind::ReduceScatter,
            Op::AllToAll => OpKind::AllToAll,
            Op::Barrier => OpKind::Barrier,
            Op::Send { .. } => OpKind::Send,
            Op::Recv { .. } => OpKind::Recv,
        }
    }

    /// The reduction, for those that reduce.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        match self {
            Op::AllReduce(op) | Op::ReduceScatter(op) | Op::Reduce { op, .. } => Some(*op),
            Op::Broadcast { .. }
            | Op::Scatter { .. }
            | Op::Gather { .. }
            | Op::AllGather
            | Op::AllToAll
            | Op::Barrier
            | Op::Send { .. }
            | Op::Recv { .. } => None,
        }
    }

    pub(crate) fn partners(&self) -> Partners {
        match *self {
            Op::Send { to } => Partners::To(to),
            Op::Recv { from } => Partners::From(from),
            Op::AllReduce(_)
            | Op::Broadcast { .. }
            | Op::Reduce { .. }
            | Op::Scatter { .. }
            | Op::Gather { .. }
            | Op::AllGather
            | Op::ReduceScatter(_)
            | Op::AllToAll
            | Op::Barrier => Partners::All,
        }
    }

    /// The root, for those that have one.
    pub fn root(&self) -> Option<usize> {
        match self {
            Op::Broadcast { root } | Op::Reduce { root, .. } | Op::Scatter { root, .. } | Op::Gather { root, .. } => {
                Some(*root)
            }
            Op::AllReduce(_)
            | Op::AllGather
            | Op::ReduceScatter(_)
            | Op::AllToAll
            | Op::Barrier
            | Op::Send { .. }
            | Op::Recv { .. } => None,
        }
    }
}

/// The ranks that take part in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Partners {
    /// This rank sends to that one.
    To(usize),
    /// This rank receives from that one.
    From(usize),
    All,
}

/// The operations without their arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
#[repr(u8)]
#[allow(missing_docs, reason = "described at `Op`")]
pub enum OpKind {
    AllReduce = 1,
    Broadcast = 2,
    Reduce = 3,
    Scatter = 4,
    Gather = 5,
    AllGather = 6,
    ReduceScatter = 7,
    Barrier = 8,
    /// A message from one rank to another, on both sides.
    Send = 9,
    Recv = 10,
    AllToAll = 11,
}

names!(
    pub OpKind, "operation":
    AllReduce = "all-reduce",
    Broadcast = "broadcast",
    Reduce = "reduce",
    Scatter = "scatter",
    Gather = "gather",
    AllGather = "all-gather",
    ReduceScatter = "reduce-scatter",
    AllToAll = "all-to-all",
    Barrier = "barrier",
    Send = "send",
    Recv = "receive",
);

impl OpKind {
    /// The operation with this code in a header.
    pub fn from_code(code: u8) -> Option<OpKind> {
        OpKind::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Whether one rank is special.
    pub fn has_root(self) -> bool {
        matches!(self, OpKind::Broadcast | OpKind::Reduce | OpKind::Scatter | OpKind::Gather)
    }
}

/// How a collective is cut into messages.
///
/// Names as in Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005). The numbers are
/// codes in headers; the rest of what there is to know of each is its entry in `mesh/algorithms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
#[repr(u8)]
pub enum Algorithm {
    /// Every pair of ranks that has data for each other exchanges it directly, in one round.
    Direct = 1,
    /// Shards travel around the ring of ranks, in pieces that follow each other without waiting for a whole shard.
    Ring = 2,
    /// Binomial tree from the root.
    Tree = 3,
    /// Every rank collects its own shard from all others directly and reduces it in rank order; an all-reduce then sends the
    /// reduced shards to all directly. The bytes of a ring, with one rounding.
    Sharded = 4,
    /// log₂N rounds in which pairs of ranks, at distances 1, 2, 4, …, exchange and reduce everything. With a number of ranks
    /// that is no power of two, the ranks beyond it hand their part to a neighbour first and get the result last.
    RecursiveDoubling = 5,
    /// Reduce-scatter by halving what is exchanged in each of log₂N rounds, then all-gather the other way round. For powers of two.
    HalvingDoubling = 6,
    /// The root sends each rank its shard, then the shards are gathered around a ring.
    ScatterAllGather = 7,
}

/// Lengths of shards, in elements by rank, for a call that does not divide its whole evenly: `MPI_Scatterv`, `MPI_Gatherv`,
/// `MPI_Allgatherv`, `MPI_Reduce_scatter` and `MPI_Alltoallv`. Shards lie one after the other in rank order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    send: Arc<[usize]>,
    /// For all-to-all only.
    receive: Option<Arc<[usize]>>,
}

impl Counts {
    /// Shard r has `counts[r]` elements. The same on all ranks.
    pub fn new(counts: impl Into<Arc<[usize]>>) -> Self {
        Counts { send: counts.into(), receive: None }
    }

    /// For [`Op::AllToAll`]: this rank sends `send[r]` elements to rank r and gets `receive[r]` from it. In place, the buffer is
    /// as long as the longer of the two needs.
    pub fn all_to_all(send: impl Into<Arc<[usize]>>, receive: impl Into<Arc<[usize]>>) -> Self {
        Counts { send: send.into(), receive: Some(receive.into()) }
    }

    /// What this rank sends to each rank; of any other operation than all-to-all, the shards.
    pub fn send(&self) -> &[usize] {
        &self.send
    }

    /// What this rank gets from each rank.
    pub fn receive(&self) -> &[usize] {
        self.receive.as_deref().unwrap_or(&self.send)
    }

    /// A number by which ranks see whether they mean the same division, never 0. Those of an all-to-all differ by nature.
    pub(crate) fn fingerprint(&self) -> u64 {
        if self.receive.is_some() {
            return 1;
        }
        // FNV-1a over the counts: this guards against mistakes, not against malice.
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for count in self.send.iter() {
            hash = (hash ^ *count as u64).wrapping_mul(0x0100_0000_01b3);
            hash ^= hash >> 32;
        }
        hash | 2
    }
}

/// An operation with everything it needs.
///
/// ```
/// use comm_core::{Buffer, Call, Communicator, Op, ReduceOp, local};
///
/// local::run(2, |comm| {
///     let (input, output) = (Buffer::from_vec(vec![comm.rank() as i32 + 1; 5]), Buffer::from_vec(vec![0i32; 5]));
///     let call = Call::blocking(Op::AllReduce(ReduceOp::Prod), output).out_of_place(input);
///     let done = comm.start(call).wait().unwrap();
///     assert_eq!(done.buffer.into_vec::<i32>().unwrap(), [2; 5]);
///     assert_eq!(done.input.unwrap().into_vec::<i32>().unwrap(), [comm.rank() as i32 + 1; 5]);
/// });
/// ```
#[derive(Debug)]
pub struct Call<B = Buffer, I = B> {
    /// What to do.
    pub op: Op,
    /// The buffer, owned (or lent) until the operation has ended.
    pub buffer: B,
    /// What goes in, if that is not in `buffer`. Owned (or lent) until the operation has ended, and never changed.
    pub input: Option<I>,
    /// How the whole is divided among the ranks, if not evenly.
    pub counts: Option<Counts>,
    /// The algorithm, if not the table's choice. The same on all ranks.
    pub algorithm: Option<Algorithm>,
    /// The lane on which its messages travel; operations of one lane run in the order in which they were started.
    pub lane: usize,
    /// How long it may take from its start, a communicator's default if `None`.
    pub timeout: Option<Duration>,
    /// What the caller calls it, for errors and reports: "bucket 3", for instance.
    pub label: Option<Arc<str>>,
    /// Where it runs. A call on lent memory always blocks.
    pub mode: Mode,
}

/// A blocking operation on memory that its caller lends.
pub type BorrowedCall<'a> = Call<ViewMut<'a>, View<'a>>;

/// A call without its data.
pub(crate) type Request = Call<(), ()>;

impl Call {
    /// A call that runs in the caller's thread on lane 0, in place.
    pub fn blocking(op: Op, buffer: Buffer) -> Self {
        Call::on(op, buffer)
    }

    /// A call that runs beside the caller on `lane`, in place.
    pub fn background(op: Op, buffer: Buffer, lane: usize) -> Self {
        Call { lane, mode: Mode::Background, ..Call::on(op, buffer) }
    }
}

impl<'a> BorrowedCall<'a> {
    /// A call on lane 0, in place.
    pub fn new(op: Op, buffer: ViewMut<'a>) -> Self {
        Call::on(op, buffer)
    }
}

impl<B, I> Call<B, I> {
    fn on(op: Op, buffer: B) -> Self {
        Call {
            op,
            buffer,
            input: None,
            counts: None,
            algorithm: None,
            lane: 0,
            timeout: None,
            label: None,
            mode: Mode::Blocking,
        }
    }

    /// The same with what goes in in a buffer of its own; see [`Op`] for the lengths of both.
    #[must_use]
    pub fn out_of_place(self, input: I) -> Self {
        Call { input: Some(input), ..self }
    }

    /// The same, with the whole divided as `counts` says.
    #[must_use]
    pub fn with_counts(self, counts: Counts) -> Self {
        Call { counts: Some(counts), ..self }
    }

    /// The same with another algorithm than the table's.
    #[must_use]
    pub fn with_algorithm(self, algorithm: Algorithm) -> Self {
        Call { algorithm: Some(algorithm), ..self }
    }

    /// The same on another lane.
    #[must_use]
    pub fn on_lane(self, lane: usize) -> Self {
        Call { lane, ..self }
    }

    /// The same with a deadline of its own.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        Call { timeout: Some(timeout), ..self }
    }

    /// The same with a name for errors and reports.
    #[must_use]
    pub fn labelled(self, label: impl Into<Arc<str>>) -> Self {
        Call { label: Some(label.into()), ..self }
    }

    /// The same call on other data, and the data that it had.
    pub(crate) fn replace_data<C, J>(self, buffer: C, input: Option<J>) -> (Call<C, J>, B, Option<I>) {
        let Call { op, buffer: old_buffer, input: old_input, counts, algorithm, lane, timeout, label, mode } = self;
        (Call { op, buffer, input, counts, algorithm, lane, timeout, label, mode }, old_buffer, old_input)
    }
}

/// Where an operation runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// In the caller's thread, if nothing on its lane is under way; the handle is complete when `start` returns.
    Blocking,
    /// On the lane's progress thread.
    Background,
}

/// Elements of shard `index` when `count` elements are divided among `shards`: the first `count % shards` shards are one
/// element longer.
///
/// # Panics
/// If `shards` is zero or `index` is not below it.
pub fn shard_range(count: usize, shards: usize, index: usize) -> Range<usize> {
    assert!(index < shards, "shard {index} of {shards}");
    let (base, longer) = (count / shards, count % shards);
    let start = index * base + index.min(longer);
    start..start + base + usize::from(index < longer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_everything_once() {
        for count in [0, 1, 2, 6, 7, 10_007] {
            for shards in 1..9 {
                let mut next = 0;
                for index in 0..shards {
                    let range = shard_range(count, shards, index);
                    assert_eq!(range.start, next);
                    next = range.end;
                }
                assert_eq!(next, count);
            }
        }
    }
}
