//! What QUIC says of its connections, of which the kernel knows nothing.

use std::sync::Arc;

use comm_quic::{PeerPath, QuicMonitor};

use super::Figures;
use super::figures::Connection;

/// The connections that `monitors` see.
pub fn quic_figures(monitors: Vec<QuicMonitor>) -> Figures {
    Arc::new(move || {
        let of_one = |monitor: &QuicMonitor| {
            let congestion = monitor.congestion().to_string();
            monitor.paths().into_iter().map(move |path| connection(&path, &congestion))
        };
        monitors.iter().flat_map(of_one).collect()
    })
}

fn connection(path: &PeerPath, congestion: &str) -> Connection {
    Connection {
        protocol: "quic".into(),
        peer: path.address.to_string(),
        congestion: congestion.into(),
        rtt_ms: path.rtt.as_secs_f64() * 1e3,
        min_rtt_ms: Some(path.min_rtt.as_secs_f64() * 1e3),
        congestion_window_bytes: path.congestion_window,
        bytes_sent: path.sent_bytes,
        packets_sent: path.sent_packets,
        retransmitted_packets: path.lost_packets,
        retransmitted_bytes: path.lost_bytes,
    }
}
