//! Operations and how they are cut into messages.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use crate::buffer::Buffer;
use crate::dtype::ReduceOp;

/// One operation on a buffer. Roots and peers are ranks within the communicator.
///
/// "Shard r" is element range [`shard_range`]`(count, world_size, r)` of the whole: the first `count % world_size` shards
/// are one element longer.
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
            Op::Barrier => OpKind::Barrier,
            Op::Send { .. } => OpKind::Send,
            Op::Recv { .. } => OpKind::Recv,
        }
    }

    /// The reduction, for those that reduce.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        match self {
            Op::AllReduce(op) | Op::ReduceScatter(op) | Op::Reduce { op, .. } => Some(*op),
            _ => None,
        }
    }

    /// The root, for those that have one.
    pub fn root(&self) -> Option<usize> {
        match self {
            Op::Broadcast { root } | Op::Reduce { root, .. } | Op::Scatter { root, .. } | Op::Gather { root, .. } => {
                Some(*root)
            }
            _ => None,
        }
    }
}

/// The operations without their arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
}

impl OpKind {
    const ALL: [OpKind; 10] = [
        OpKind::AllReduce,
        OpKind::Broadcast,
        OpKind::Reduce,
        OpKind::Scatter,
        OpKind::Gather,
        OpKind::AllGather,
        OpKind::ReduceScatter,
        OpKind::Barrier,
        OpKind::Send,
        OpKind::Recv,
    ];

    /// The operation with this code in a header.
    pub fn from_code(code: u8) -> Option<OpKind> {
        OpKind::ALL.into_iter().find(|kind| *kind as u8 == code)
    }

    /// Whether one rank is special.
    pub fn has_root(self) -> bool {
        matches!(self, OpKind::Broadcast | OpKind::Reduce | OpKind::Scatter | OpKind::Gather)
    }
}

impl fmt::Display for OpKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OpKind::AllReduce => "all-reduce",
            OpKind::Broadcast => "broadcast",
            OpKind::Reduce => "reduce",
            OpKind::Scatter => "scatter",
            OpKind::Gather => "gather",
            OpKind::AllGather => "all-gather",
            OpKind::ReduceScatter => "reduce-scatter",
            OpKind::Barrier => "barrier",
            OpKind::Send => "send",
            OpKind::Recv => "receive",
        })
    }
}

/// How a collective is cut into messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Algorithm {
    /// Every pair of ranks that has data for each other exchanges it directly, in one round.
    Direct = 1,
    /// Shards travel around the ring of ranks.
    Ring = 2,
    /// Binomial tree from the root.
    Tree = 3,
    /// Every rank collects its own shard from all others directly and reduces it in rank order; an all-reduce then sends the
    /// reduced shards to all directly. The bytes of a ring, with one rounding.
    Sharded = 4,
}

impl Algorithm {
    const ALL: [Algorithm; 4] = [Algorithm::Direct, Algorithm::Ring, Algorithm::Tree, Algorithm::Sharded];

    /// The algorithm with this code in a header.
    pub fn from_code(code: u8) -> Option<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| *algorithm as u8 == code)
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Algorithm::Direct => "direct",
            Algorithm::Ring => "ring",
            Algorithm::Tree => "tree",
            Algorithm::Sharded => "sharded",
        })
    }
}

/// An operation with everything it needs.
#[derive(Debug)]
pub struct Call {
    /// What to do.
    pub op: Op,
    /// The buffer, owned until the operation has ended.
    pub buffer: Buffer,
    /// The lane on which its messages travel; operations of one lane run in the order in which they were started.
    pub lane: usize,
    /// How long it may take from its start, a communicator's default if `None`.
    pub timeout: Option<Duration>,
    /// Where it runs.
    pub mode: Mode,
}

impl Call {
    /// A call that runs in the caller's thread on lane 0.
    pub fn blocking(op: Op, buffer: Buffer) -> Self {
        Call { op, buffer, lane: 0, timeout: None, mode: Mode::Blocking }
    }

    /// A call that runs beside the caller on `lane`.
    pub fn background(op: Op, buffer: Buffer, lane: usize) -> Self {
        Call { op, buffer, lane, timeout: None, mode: Mode::Background }
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
