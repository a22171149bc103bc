//! What quinn knows about the path to a peer.

use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;

use crate::paced::Paced;

/// State and counters of the connection to one peer, since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PeerPath {
    /// The peer's rank.
    pub peer: usize,
    /// Its address.
    pub address: SocketAddr,
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Smallest round-trip time seen.
    pub min_rtt: Duration,
    /// Congestion window in bytes; with a fixed window that.
    pub congestion_window: u64,
    /// Times the congestion controller was told of loss.
    pub congestion_events: u64,
    /// Packets sent to the peer.
    pub sent_packets: u64,
    /// Packets of these that were declared lost.
    pub lost_packets: u64,
    /// Bytes in them.
    pub lost_bytes: u64,
    /// Bytes sent in UDP payloads, with packet headers, acknowledgements and retransmissions.
    pub sent_bytes: u64,
    /// Bytes received in UDP payloads.
    pub received_bytes: u64,
    /// System calls that sent them.
    pub send_calls: u64,
    /// Largest datagram in bytes that the path carries, as far as known now.
    pub mtu: u16,
    /// Times the path turned out to carry less than thought.
    pub black_holes: u64,
}

impl PeerPath {
    /// `most`: bytes that may be under way whatever the congestion controller says.
    pub(crate) fn of(peer: usize, connection: &quinn::Connection, most: u64) -> Self {
        let stats = connection.stats();
        let paced = connection.congestion_state().into_any().downcast::<Paced>();
        let congestion_window = paced.map_or(stats.path.cwnd, |controller| controller.congestion_window());
        PeerPath {
            peer,
            address: connection.remote_address(),
            rtt: stats.path.rtt,
            min_rtt: stats.path.min_rtt,
            congestion_window: congestion_window.min(most),
            congestion_events: stats.path.congestion_events,
            sent_packets: stats.path.sent_packets,
            lost_packets: stats.path.lost_packets,
            lost_bytes: stats.path.lost_bytes,
            sent_bytes: stats.udp_tx.bytes,
            received_bytes: stats.udp_rx.bytes,
            send_calls: stats.udp_tx.ios,
            mtu: stats.path.current_mtu,
            black_holes: stats.path.black_holes_detected,
        }
    }
}
