//! Operations whose every result is known beforehand.

use std::mem;

use comm_core::{
    Algorithm, BorrowedCall, Buffer, Call, Communicator, CommunicatorExt, Error, Failed, Handle, Op, ViewMut,
    shard_range,
};
use rig::samples::Reduction;
use rig::samples::{Pattern, Sample, fill};
use serde::{Deserialize, Serialize};

/// What the ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Collective {
    AllReduce,
    Broadcast,
    Reduce,
    Scatter,
    Gather,
    AllGather,
    ReduceScatter,
    AllToAll,
    /// Every rank sends to the next and receives from the one before.
    SendRecv,
    Barrier,
}

comm_core::names!(
    pub(crate) Collective, "collective":
    AllReduce = "all-reduce",
    Broadcast = "broadcast",
    Reduce = "reduce",
    Scatter = "scatter",
    Gather = "gather",
    AllGather = "all-gather",
    ReduceScatter = "reduce-scatter",
    AllToAll = "all-to-all",
    SendRecv = "send-recv",
    Barrier = "barrier",
);

/// How a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallMode {
    /// On the caller's memory.
    Borrowed,
    /// On an owned buffer, in the caller's thread.
    Blocking,
    /// Beside the caller.
    Background,
}

/// One operation, data aside. The same on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) collective: Collective,
    pub(crate) reduction: Reduction,
    pub(crate) root: usize,
    /// Elements, rounded up to a whole block for each rank by an all-to-all.
    pub(crate) count: usize,
    pub(crate) lane: usize,
    pub(crate) mode: CallMode,
    pub(crate) algorithm: Option<Algorithm>,
}

/// An operation with its data, on one rank.
pub(crate) struct Prepared<T> {
    step: Step,
    op: Op,
    input: Vec<T>,
    /// What the first elements after `skip` shall be.
    expected: Vec<T>,
    skip: usize,
    rank: usize,
    ranks: usize,
}

/// An operation under way.
pub(crate) struct Started<T> {
    handle: Option<Handle>,
    /// What came of one that has ended already.
    done: Option<Result<Vec<T>, Error>>,
    sent: Option<Handle>,
}

impl<T: Sample> Prepared<T> {
    /// The data that `rank` of `ranks` brings to `step`, and what shall come of it.
    pub(crate) fn new(step: Step, seed: u64, ranks: usize, rank: usize) -> Self {
        let pattern = Pattern::new::<T>(seed, ranks, Some(step.reduction));
        let root = step.root;
        let count = match step.collective {
            Collective::AllToAll => step.count.div_ceil(ranks) * ranks,
            Collective::Barrier => 0,
            _ => step.count,
        };
        let mine = shard_range(count, ranks, rank);
        let block = count / ranks;
        let previous = (rank + ranks - 1) % ranks;
        let of = |owner: usize, start: usize, length: usize| {
            let mut values = vec![T::zeroed(); length];
            fill(&mut values, &pattern, owner, start);
            values
        };
        let whole = |owner| of(owner, 0, count);
        let reduced = |range: std::ops::Range<usize>| -> Vec<T> { range.map(|i| T::of(pattern.reduced(i))).collect() };
        let shards = || -> Vec<T> {
            (0..ranks)
                .flat_map(|owner| {
                    let range = shard_range(count, ranks, owner);
                    of(owner, range.start, range.len())
                })
                .collect()
        };
        let (op, input, expected, skip) = match step.collective {
            Collective::AllReduce => (Op::AllReduce(step.reduction.op()), whole(rank), reduced(0..count), 0),
            Collective::Broadcast => (Op::Broadcast { root }, whole(rank), whole(root), 0),
            Collective::Reduce => {
                let expected = if rank == root { reduced(0..count) } else { whole(rank) };
                (Op::Reduce { root, op: step.reduction.op() }, whole(rank), expected, 0)
            }
            Collective::Scatter => {
                let input = if rank == root { whole(root) } else { of(rank, mine.start, mine.len()) };
                let expected = if rank == root { whole(root) } else { of(root, mine.start, mine.len()) };
                (Op::Scatter { root, total: count }, input, expected, 0)
            }
            Collective::Gather => {
                let input = if rank == root { whole(root) } else { of(rank, mine.start, mine.len()) };
                let expected = if rank == root { shards() } else { input.clone() };
                (Op::Gather { root, total: count }, input, expected, 0)
            }
            Collective::AllGather => (Op::AllGather, whole(rank), shards(), 0),
            Collective::ReduceScatter => {
                (Op::ReduceScatter(step.reduction.op()), whole(rank), reduced(mine.clone()), mine.start)
            }
            Collective::AllToAll => {
                let expected = (0..ranks).flat_map(|owner| of(owner, rank * block, block)).collect();
                (Op::AllToAll, whole(rank), expected, 0)
            }
            Collective::SendRecv => (Op::Send { to: (rank + 1) % ranks }, whole(rank), whole(previous), 0),
            Collective::Barrier => (Op::Barrier, Vec::new(), Vec::new(), 0),
        };
        Prepared { step, op, input, expected, skip, rank, ranks }
    }

    /// Runs the operation; what it left in the buffer.
    ///
    /// # Errors
    /// The operation's.
    pub(crate) fn run(&self, comm: &dyn Communicator) -> Result<Vec<T>, Error> {
        self.start(comm).wait()
    }

    /// Begins the operation.
    pub(crate) fn start(&self, comm: &dyn Communicator) -> Started<T> {
        let mut values = self.input.clone();
        if self.step.collective == Collective::SendRecv {
            return self.shift(comm, values);
        }
        match self.step.mode {
            CallMode::Borrowed => {
                let mut call = BorrowedCall::new(self.op, ViewMut::of(&mut values));
                call.algorithm = self.step.algorithm;
                call.lane = self.step.lane;
                let done = comm.run_borrowed(call).map(|()| values);
                Started { handle: None, done: Some(done), sent: None }
            }
            mode => {
                let mut call = Call::background(self.op, Buffer::from_vec(values), self.step.lane);
                if mode == CallMode::Blocking {
                    call.mode = comm_core::Mode::Blocking;
                }
                call.algorithm = self.step.algorithm;
                Started { handle: Some(comm.start(call)), done: None, sent: None }
            }
        }
    }

    /// Elements that are not what they should be, of how many.
    pub(crate) fn check(&self, values: &[T]) -> (u64, u64) {
        let got = values.get(self.skip..).unwrap_or_default();
        let missing = self.expected.len().saturating_sub(got.len()) as u64;
        let wrong = got.iter().zip(&self.expected).filter(|(got, expected)| got != expected).count() as u64;
        (missing + wrong, self.expected.len() as u64)
    }

    fn shift(&self, comm: &dyn Communicator, values: Vec<T>) -> Started<T> {
        let (rank, ranks) = (self.rank, self.ranks);
        if ranks == 1 {
            return Started { handle: None, done: Some(Ok(values)), sent: None };
        }
        let previous = (rank + ranks - 1) % ranks;
        let mut received = vec![T::zeroed(); values.len()];
        let send = Call::background(self.op, Buffer::from_vec(values), shift_lane(rank, ranks));
        let sent = comm.start(send);
        let receive = Op::Recv { from: previous };
        let lane = shift_lane(previous, ranks);
        if self.step.mode == CallMode::Background {
            let call = Call::background(receive, Buffer::from_vec(received), lane);
            return Started { handle: Some(comm.start(call)), done: None, sent: Some(sent) };
        }
        let mut call = BorrowedCall::new(receive, ViewMut::of(&mut received));
        call.lane = lane;
        let done = comm.run_borrowed(call).map(|()| received);
        Started { handle: None, done: Some(done), sent: Some(sent) }
    }
}

impl<T: Sample> Started<T> {
    /// What the operation left in the buffer.
    ///
    /// # Errors
    /// The operation's.
    pub(crate) fn wait(mut self) -> Result<Vec<T>, Error> {
        let done = match (self.done.take(), self.handle.take()) {
            (Some(done), _) => done,
            (None, Some(handle)) => {
                handle.wait().map_err(Failed::into_error).and_then(|completed| completed.buffer.into_vec())
            }
            (None, None) => Err(Error::Internal("an operation without a result".into())),
        };
        // Both halves of a shift have to end before either's error is told: the buffers belong to them.
        let sent = mem::take(&mut self.sent).map(|handle| handle.wait().map_err(Failed::into_error));
        let done = done?;
        sent.transpose()?;
        Ok(done)
    }
}

/// Lanes that a shift among an odd number of ranks needs.
pub(crate) const LANES: usize = 3;

/// The lane of the message that `sender` sends to the next rank: no rank sends and receives on the same one.
fn shift_lane(sender: usize, ranks: usize) -> usize {
    if !ranks.is_multiple_of(2) && sender == ranks - 1 { 2 } else { sender % 2 }
}

/// Whether any rank wants to end, asked of all.
///
/// # Errors
/// The operation's.
pub(crate) fn any(comm: &dyn Communicator, wants: bool) -> Result<bool, Error> {
    comm.all_reduce_scalar(u8::from(wants), comm_core::ReduceOp::Max).map(|any| any > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_collective_leaves_what_was_foreseen_and_a_wrong_element_shows() {
        for ranks in [1, 2, 3, 4] {
            for collective in Collective::ALL {
                for mode in [CallMode::Borrowed, CallMode::Blocking, CallMode::Background] {
                    for count in [1, 7, 1000] {
                        let root = ranks - 1;
                        let reduction = Reduction::Sum;
                        let step = Step { collective, reduction, root, count, lane: 0, mode, algorithm: None };
                        let outcomes = thread_group(ranks, &step);
                        for (wrong, checked) in outcomes {
                            assert_eq!(wrong, 0, "{collective} {mode:?} {count} {ranks}");
                            assert!(checked > 0 || collective == Collective::Barrier || count < ranks);
                        }
                    }
                }
            }
        }
        let step = Step {
            collective: Collective::AllReduce,
            reduction: Reduction::Max,
            root: 0,
            count: 9,
            lane: 0,
            mode: CallMode::Borrowed,
            algorithm: None,
        };
        let prepared = Prepared::<f32>::new(step, 1, 1, 0);
        let mut values = prepared.expected.clone();
        values[3] += 1.0;
        assert_eq!(prepared.check(&values), (1, 9));
        assert_eq!(prepared.check(&values[..3]), (6, 9));
    }

    fn thread_group(ranks: usize, step: &Step) -> Vec<(u64, u64)> {
        let step = *step;
        let sessions =
            isocomm::threads(ranks, &isocomm::TransportOptions { lanes: LANES, ..Default::default() }).unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = sessions
                .into_iter()
                .enumerate()
                .map(|(rank, session)| {
                    scope.spawn(move || {
                        let prepared = Prepared::<i64>::new(step, 5, ranks, rank);
                        let values = prepared.run(&*session.comm).unwrap();
                        session.comm.finish(std::time::Duration::from_secs(20)).unwrap();
                        prepared.check(&values)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}
