//! What passed a link.

use serde::{Deserialize, Serialize};

/// One direction of one end of an emulated link.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pipe {
    /// Number of the end (a namespace), from 0.
    pub end: usize,
    /// `up` for what the end sends, `down` for what it receives.
    pub direction: String,
    pub packets: u64,
    pub bytes: u64,
    /// Dropped at random.
    pub lost: u64,
    /// Dropped because the queue was full.
    pub overflowed: u64,
    pub reordered: u64,
    pub duplicated: u64,
    /// How much later than asked packets went out: median and 99th percentile, in microseconds.
    pub late_p50_us: f64,
    pub late_p99_us: f64,
}
