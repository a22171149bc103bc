//! Moments of a job.

use serde::{Deserialize, Serialize};

/// At which moment of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum When {
    /// The ranks have met; the others connect the transport, and the victim has not begun to.
    Connect,
    /// All ranks are connected, and none has called an operation.
    Before,
    /// Ranks run short and long operations, one after another.
    During,
    /// The victim has done its part of the last operation; the others finish.
    Last,
}

comm_core::names!(
    pub(crate) When, "moment":
    Connect = "connect",
    Before = "before",
    During = "during",
    Last = "last",
);
