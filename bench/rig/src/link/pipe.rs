//! What passed a link.

use serde::{Deserialize, Serialize};

/// One direction of one end of an emulated link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Pipe {
    /// Number of the end (a namespace), from 0.
    pub(crate) end: usize,
    /// `up` for what the end sends, `down` for what it receives.
    pub(crate) direction: String,
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    /// Dropped at random.
    pub(crate) lost: u64,
    /// Dropped because the queue was full.
    pub(crate) overflowed: u64,
    pub(crate) reordered: u64,
    pub(crate) duplicated: u64,
    /// How much later than asked packets went out: median and 99th percentile, in microseconds.
    pub(crate) late_p50_us: f64,
    pub(crate) late_p99_us: f64,
}
