//! A communicator whose operations differ from the defaults.

use std::sync::Arc;
use std::time::Duration;

use crate::communicator::Communicator;
use crate::error::Result;
use crate::handle::Handle;
use crate::op::{Algorithm, BorrowedCall, Call};

/// A communicator whose operations, blocking and asynchronous ones, run on a chosen lane, with a deadline, a label and an
/// algorithm if they are given. [`CommunicatorExt::on_lane`](crate::CommunicatorExt::on_lane) makes it; it costs nothing.
///
/// ```
/// use std::time::Duration;
/// use comm_core::{Algorithm, CommunicatorExt, ReduceOp, local};
///
/// let sums = local::run(2, |comm| {
///     let buckets = comm.on_lane(1).with_timeout(Duration::from_secs(10)).with_algorithm(Algorithm::Ring);
///     let first = buckets.labelled("bucket 0").all_reduce_async(vec![1.0f32; 100], ReduceOp::Sum);
///     let second = buckets.labelled("bucket 1").all_reduce_async(vec![2.0f32; 100], ReduceOp::Sum);
///     (first.wait().unwrap()[0], second.wait().unwrap()[0])
/// });
/// assert_eq!(sums, [(2.0, 4.0); 2]);
/// ```
#[derive(Debug)]
#[must_use]
pub struct Preset<'c, C: ?Sized> {
    communicator: &'c C,
    lane: usize,
    timeout: Option<Duration>,
    label: Option<Arc<str>>,
    algorithm: Option<Algorithm>,
}

impl<'c, C: Communicator + ?Sized> Preset<'c, C> {
    pub(crate) fn new(communicator: &'c C, lane: usize) -> Self {
        Preset { communicator, lane, timeout: None, label: None, algorithm: None }
    }

    /// The same on another lane.
    pub fn on_lane(&self, lane: usize) -> Self {
        Preset { lane, ..self.clone() }
    }

    /// The same with a deadline for each operation, counted from its start.
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        Preset { timeout: Some(timeout), ..self.clone() }
    }

    /// The same with a name for errors and reports.
    pub fn labelled(&self, label: impl Into<Arc<str>>) -> Self {
        Preset { label: Some(label.into()), ..self.clone() }
    }

    /// The same with another algorithm than the table's. Only operations that it can run are accepted.
    pub fn with_algorithm(&self, algorithm: Algorithm) -> Self {
        Preset { algorithm: Some(algorithm), ..self.clone() }
    }
}

impl<C: ?Sized> Clone for Preset<'_, C> {
    fn clone(&self) -> Self {
        Preset { label: self.label.clone(), ..*self }
    }
}

/// What a call says itself stays; its lane is replaced.
#[deny(clippy::missing_trait_methods)]
impl<C: Communicator + ?Sized> Communicator for Preset<'_, C> {
    fn name(&self) -> &str {
        self.communicator.name()
    }

    fn rank(&self) -> usize {
        self.communicator.rank()
    }

    fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    fn lanes(&self) -> usize {
        self.communicator.lanes()
    }

    fn id(&self) -> u64 {
        self.communicator.id()
    }

    fn start(&self, call: Call) -> Handle {
        self.communicator.start(Call {
            lane: self.lane,
            timeout: call.timeout.or(self.timeout),
            label: call.label.or_else(|| self.label.clone()),
            algorithm: call.algorithm.or(self.algorithm),
            ..call
        })
    }

    fn run_borrowed(&self, call: BorrowedCall<'_>) -> Result<()> {
        self.communicator.run_borrowed(BorrowedCall {
            lane: self.lane,
            timeout: call.timeout.or(self.timeout),
            label: call.label.or_else(|| self.label.clone()),
            algorithm: call.algorithm.or(self.algorithm),
            ..call
        })
    }

    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        self.communicator.split(color, key)
    }

    fn abort(&self, reason: &str) {
        self.communicator.abort(reason);
    }

    fn finish(&self, timeout: Duration) -> Result<()> {
        self.communicator.finish(timeout)
    }
}
