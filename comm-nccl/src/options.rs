//! Settings.

use std::time::Duration;

use comm_core::Result;

use crate::sys::{Driver, Library};

/// Settings of an [`NcclCommunicator`](crate::NcclCommunicator). Ranks of a job use the same number of lanes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NcclOptions {
    /// Operations that can run side by side, each on a stream and an NCCL communicator of its own.
    pub lanes: usize,
    /// The CUDA device, by its number in this process. By default ranks of one machine take its devices in turn.
    pub device: Option<usize>,
    /// How long an operation may take from its start, unless its call says otherwise.
    pub timeout: Duration,
    /// How long to wait, after NCCL reported an error, for the control plane to say what really happened.
    pub verdict_grace: Duration,
    /// After how long an operation that goes on is reported as stalled, with the ranks that hold it up.
    pub stall_after: Duration,
    #[cfg(feature = "stand-in")]
    stand_in: StandIn,
}

impl Default for NcclOptions {
    fn default() -> Self {
        NcclOptions {
            lanes: 2,
            device: None,
            timeout: Duration::from_secs(120),
            verdict_grace: Duration::from_millis(500),
            stall_after: Duration::from_secs(30),
            #[cfg(feature = "stand-in")]
            stand_in: StandIn::Nothing,
        }
    }
}

impl NcclOptions {
    /// The same with other lanes.
    #[must_use]
    pub fn with_lanes(self, lanes: usize) -> Self {
        NcclOptions { lanes, ..self }
    }

    /// The same on another device.
    #[must_use]
    pub fn with_device(self, device: Option<usize>) -> Self {
        NcclOptions { device, ..self }
    }

    /// The same with another default deadline.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        NcclOptions { timeout, ..self }
    }

    /// The same with another time after which an operation counts as stalled.
    #[must_use]
    pub fn with_stall_after(self, stall_after: Duration) -> Self {
        NcclOptions { stall_after, ..self }
    }

    /// The same without NCCL: what this crate calls of it and of the CUDA driver is done by threads in host memory. It shows that this
    /// crate's own part is right, and says nothing of NCCL.
    #[cfg(feature = "stand-in")]
    #[must_use]
    pub fn on_stand_in(self) -> Self {
        NcclOptions { stand_in: StandIn::Both, ..self }
    }

    /// The same with NCCL itself on a CUDA driver that is none: NCCL finds no GPU, and what comes of that can be tested.
    #[cfg(feature = "stand-in")]
    #[must_use]
    pub fn on_stand_in_driver(self) -> Self {
        NcclOptions { stand_in: StandIn::Driver, ..self }
    }

    /// Whether ranks may have the same device whatever the environment says.
    pub(crate) fn may_share(&self) -> bool {
        #[cfg(feature = "stand-in")]
        return self.stand_in != StandIn::Nothing;
        #[cfg(not(feature = "stand-in"))]
        false
    }

    pub(crate) fn libraries(&self) -> Result<(Library, Driver)> {
        #[cfg(feature = "stand-in")]
        match self.stand_in {
            StandIn::Nothing => {}
            StandIn::Driver => return Ok((Library::load()?, crate::sys::stand_in::libraries().1)),
            StandIn::Both => return Ok(crate::sys::stand_in::libraries()),
        }
        Ok((Library::load()?, Driver::load()?))
    }
}

/// Which parts of the GPU software are replaced by stand-ins.
#[cfg(feature = "stand-in")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StandIn {
    Nothing,
    Driver,
    Both,
}
