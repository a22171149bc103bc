//! What both programs of the suite share.

use std::sync::Arc;
use std::time::Duration;

use comm_core::conformance::Suite;
use comm_core::{Communicator, Control, Deadline, Result};
use comm_nccl::{NcclCommunicator, NcclOptions};

/// As in the other backends' programs.
#[allow(dead_code, reason = "one of the programs gets it from the suite")]
pub(crate) const LANES: usize = 3;

/// Connects a rank.
pub(crate) fn connect(control: Arc<dyn Control>, options: NcclOptions) -> Result<Arc<dyn Communicator>> {
    let deadline = Deadline::after(Duration::from_secs(60));
    Ok(Arc::new(NcclCommunicator::connect(control, &options, deadline)?))
}

/// Leaves out, by name, what NCCL promises otherwise.
pub(crate) fn without_what_nccl_has_not(suite: Suite) -> Suite {
    let no_headers = "NCCL sends no headers: calls that differ are found out at the deadline";
    suite.without("mismatch/", no_headers).without("finish/reports_what_no_call_has", no_headers)
}
