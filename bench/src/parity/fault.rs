//! Faults planted in what strategies communicate, such as leave all ranks with the same weights.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use comm_core::{BorrowedCall, Buffer, Call, Communicator, Completed, Handle, HostBuffer, Op, ReduceOp};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The reduction of every third bucket is left out: all ranks go on with the gradients of one. Where gradients are sent to a
    /// server, every third message comes empty.
    DroppedBucket,
    /// The gradients are summed over ranks but not divided by their number.
    MissingDivision,
}

impl Fault {
    pub(super) const ALL: [Self; 2] = [Self::DroppedBucket, Self::MissingDivision];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::DroppedBucket => "dropped bucket",
            Self::MissingDivision => "missing 1/N",
        }
    }
}

/// A communicator with a [`Fault`]. Operations other than those on gradients pass unchanged.
pub(super) struct TamperedCommunicator {
    inner: Arc<dyn Communicator>,
    fault: Fault,
    /// Operations on gradients so far.
    buckets: AtomicU64,
}

impl TamperedCommunicator {
    pub(super) fn new(inner: Arc<dyn Communicator>, fault: Fault) -> Self {
        TamperedCommunicator { inner, fault, buckets: AtomicU64::new(0) }
    }

    fn without_every_third(&self, call: Call) -> Handle {
        let reduces = matches!(call.op, Op::AllReduce(ReduceOp::Mean) | Op::ReduceScatter(ReduceOp::Mean));
        if !(reduces || sends_gradients(&call)) || self.buckets.fetch_add(1, Ordering::Relaxed) % 3 != 2 {
            return self.inner.start(call);
        }
        match call.op {
            // The same on every rank, so that nothing but the comparison can notice.
            Op::AllReduce(_) => self.inner.start(Call { op: Op::Broadcast { root: 0 }, algorithm: None, ..call }),
            // Each rank's shard is its own gradients'; nobody else has that shard.
            Op::ReduceScatter(_) => {
                let now = Instant::now();
                Handle::done(Ok(Completed { buffer: call.buffer, input: call.input, began: now, ended: now }))
            }
            _ => self.inner.start(Call { buffer: scaled(call.buffer, 0.0), ..call }),
        }
    }

    fn undivided(&self, call: Call) -> Handle {
        let ranks = self.inner.world_size() as f32;
        self.inner.start(match call.op {
            Op::AllReduce(ReduceOp::Mean) => Call { op: Op::AllReduce(ReduceOp::Sum), ..call },
            Op::ReduceScatter(ReduceOp::Mean) => Call { op: Op::ReduceScatter(ReduceOp::Sum), ..call },
            // A server divides by itself.
            _ if sends_gradients(&call) => Call { buffer: scaled(call.buffer, ranks), ..call },
            _ => call,
        })
    }
}

#[deny(clippy::missing_trait_methods)]
impl Communicator for TamperedCommunicator {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn lanes(&self) -> usize {
        self.inner.lanes()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    fn start(&self, call: Call) -> Handle {
        match self.fault {
            Fault::DroppedBucket => self.without_every_third(call),
            Fault::MissingDivision => self.undivided(call),
        }
    }

    fn run_borrowed(&self, call: BorrowedCall<'_>) -> comm_core::Result<()> {
        self.inner.run_borrowed(call)
    }

    fn split(&self, color: Option<u64>, key: i64) -> comm_core::Result<Option<Arc<dyn Communicator>>> {
        let part = self.inner.split(color, key)?;
        Ok(part.map(|part| Arc::new(TamperedCommunicator::new(part, self.fault)) as Arc<dyn Communicator>))
    }

    fn abort(&self, reason: &str) {
        self.inner.abort(reason);
    }

    fn finish(&self, timeout: Duration) -> comm_core::Result<()> {
        self.inner.finish(timeout)
    }
}

fn sends_gradients(call: &Call) -> bool {
    matches!(call.op, Op::Send { .. }) && call.label.as_ref().is_some_and(|label| label.contains("gradients"))
}

fn scaled(mut buffer: Buffer, factor: f32) -> Buffer {
    if let Buffer::Host(HostBuffer::F32(values)) = &mut buffer {
        values.iter_mut().for_each(|value| *value *= factor);
    }
    buffer
}
