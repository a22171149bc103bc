//! The communicator.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use comm_core::engine::Comm;
use comm_core::{BorrowedCall, Call, Communicator, Control, Deadline, Handle, Result};

use crate::NcclOptions;
use crate::connect;
use crate::engine::NcclEngine;
use crate::sys::Device;

/// The name under which [`NcclCommunicator::facts`] has the number of the CUDA device.
pub const DEVICE_FACT: &str = "cuda device";

/// Collectives by NCCL, one rank a GPU.
///
/// Buffers on the GPU ([`CudaBuffer`](crate::CudaBuffer)) are worked on where they are; those in host memory travel through memory of the
/// lane, page-locked on the host and as large as they are on the GPU.
/// Each lane has a stream and an NCCL communicator of its own, so that operations of different lanes run side by side.
///
/// As on every backend, failures of any rank end everything on all ranks, and every wait has its deadline: communicators are
/// non-blocking, their state is looked at while an operation runs, and they are aborted when the job fails. What differs:
/// - NCCL sends no headers. Ranks that call different operations are found out at the deadline, by an error or a stall report that
///   tells what the others do; ranks that agree in all but the count may get wrong data.
/// - NCCL chooses algorithms itself. One that a call names is checked as elsewhere, and else not looked at.
/// - 16-bit floats are rounded after every step of a reduction, means may be sums of parts that were divided before, and which of NaN and
///   a number is the greater is up to NCCL.
/// - 16-bit integers can be moved, not reduced.
/// - A send may wait until its receive is there.
/// - Operations of several lanes are kernels that wait for peers beside each other. Whatever waits for the whole device meanwhile, such as
///   freeing its memory, waits for them too; each lane is warmed up when it is made, so that NCCL itself has little left to allocate.
/// - Where not even an abort ends what runs, the operation's memory on the GPU does not come back
///   ([`Failed::buffer`](comm_core::Failed::buffer) is `None`), and from then on this process frees nothing there: a kernel could still
///   write to it, and freeing would wait for that kernel.
pub struct NcclCommunicator(Comm<NcclEngine>);

impl NcclCommunicator {
    /// Connects the ranks of `control`. Collective: all ranks call it.
    ///
    /// # Errors
    /// `Unsupported` on all ranks if any of them has no NCCL, no GPU, or a GPU that another rank has too; `Rendezvous` for versions that
    /// differ; `Timeout`; NCCL's own.
    pub fn connect(control: Arc<dyn Control>, options: &NcclOptions, deadline: Deadline) -> Result<Self> {
        connect::connect(control, options, deadline).map(NcclCommunicator)
    }

    /// The device that this rank works on.
    pub fn device(&self) -> &Device {
        &self.0.engine().device
    }

    /// What results are recorded with, as (name, value): the library, its version and the device.
    pub fn facts(&self) -> Vec<(String, String)> {
        let NcclEngine { library, device, .. } = &**self.0.engine();
        [
            ("nccl", library.version_text()),
            ("nccl library", library.path().display().to_string()),
            ("gpu", device.name().unwrap_or_else(|_| "unknown".into())),
            (DEVICE_FACT, device.ordinal().to_string()),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into()
    }
}

#[deny(clippy::missing_trait_methods)]
impl Communicator for NcclCommunicator {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn lanes(&self) -> usize {
        self.0.lanes()
    }

    fn id(&self) -> u64 {
        self.0.id()
    }

    fn start(&self, call: Call) -> Handle {
        self.0.start(call)
    }

    fn run_borrowed(&self, call: BorrowedCall<'_>) -> Result<()> {
        self.0.run_borrowed(call)
    }

    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        self.0.split(color, key)
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }

    fn finish(&self, timeout: Duration) -> Result<()> {
        self.0.finish(timeout)
    }
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclCommunicator(rank {} of {})", self.rank(), self.world_size())
    }
}
