//! Statistics of the connections, independent of who owns the transport.

use std::sync::Weak;

use quinn::Connection;

use crate::congestion::Congestion;
use crate::path::PeerPath;

/// Looks at the connections of a [`QuicTransport`](crate::QuicTransport) that has been moved elsewhere, into a
/// [`Mesh`](comm_core::Mesh) for example. From [`QuicTransport::monitor`](crate::QuicTransport::monitor).
///
/// It keeps nothing alive: once the transport is dropped there is nothing to see. Asking takes one short lock for each peer, and
/// may be done from any thread.
#[derive(Clone, Debug)]
pub struct QuicMonitor {
    /// By rank, `None` for this one.
    pub(crate) connections: Weak<[Option<Connection>]>,
    pub(crate) congestion: Congestion,
    /// Most bytes that may be under way whatever the congestion controller says.
    pub(crate) most: u64,
}

impl QuicMonitor {
    /// State and counters of the connection to every peer, in rank order; of all lanes together, which share it. Counters start
    /// when the ranks connect, and stay where they are after [`close`](comm_core::Transport::close). None once the transport is
    /// dropped.
    pub fn paths(&self) -> Vec<PeerPath> {
        let Some(connections) = self.connections.upgrade() else { return Vec::new() };
        let paths = connections.iter().enumerate();
        paths.filter_map(|(peer, connection)| Some(PeerPath::of(peer, connection.as_ref()?, self.most))).collect()
    }

    /// The congestion control in use: never [`Congestion::Auto`].
    pub fn congestion(&self) -> Congestion {
        self.congestion
    }
}
