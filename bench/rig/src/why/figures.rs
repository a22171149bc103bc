//! What was seen of the network.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What the network did meanwhile, on one rank, from the first step to the last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Network {
    /// Bytes and packets that the rank's network interface sent and received, headers included; `None` where ranks share one.
    pub interface: Option<Interface>,
    pub connections: Vec<Connection>,
    /// Processor seconds of the process, by group of threads: `training`, `compute`, `network`, `control`, `other`.
    pub cpu_s: BTreeMap<String, f64>,
    /// Why there are no figures of connections, where there are none.
    pub missing: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    pub bytes_sent: u64,
    pub bytes_received: u64,
    pub packets_sent: u64,
    pub packets_received: u64,
}

/// One connection of a transport, as its kernel or QUIC itself tells.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Connection {
    /// `tcp` or `quic`.
    pub protocol: String,
    /// Address of the other end.
    pub peer: String,
    /// Name of the congestion control.
    pub congestion: String,
    /// Smoothed round-trip time at the end, and the smallest seen.
    pub rtt_ms: f64,
    pub min_rtt_ms: Option<f64>,
    /// At the end.
    pub congestion_window_bytes: u64,
    pub bytes_sent: u64,
    pub packets_sent: u64,
    /// Packets sent again (TCP), or taken for lost (QUIC).
    pub retransmitted_packets: u64,
    pub retransmitted_bytes: u64,
}
