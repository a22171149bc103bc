//! What each step of a rank sent.

use comm_core::Communicator;
use comm_core::Traffic;

use super::Session;

/// What one rank sent in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepTraffic {
    /// Payload bytes of gradients and parameters; between nodes only, where the node's own transport counts nothing.
    pub(super) payload: u64,
    pub(super) messages: u64,
    /// Of both, what was sent over the node's own transport.
    pub(super) node: Option<(u64, u64)>,
    /// Payload bytes of scalars.
    pub(super) scalars: u64,
    pub(super) framing: u64,
}

/// Everything sent so far.
pub(super) struct TrafficTotals {
    all: Traffic,
    node: Option<Traffic>,
}

impl TrafficTotals {
    /// `None` where nothing counts.
    pub(super) fn now(session: &Session) -> Option<Self> {
        let all = session.counters.as_ref()?.snapshot();
        let node = session.node.as_ref().and_then(|node| Some(node.counters.as_ref()?.snapshot()));
        Some(TrafficTotals { all, node })
    }

    /// What was sent since `earlier`; what went over the communicator `scalars` is not counted as work.
    pub(super) fn since(&self, earlier: &TrafficTotals, scalars: &dyn Communicator) -> StepTraffic {
        let all = self.all.since(&earlier.all);
        let of_scalars = Some(scalars.id());
        let node = self.node.as_ref().zip(earlier.node.as_ref()).map(|(now, earlier)| now.since(earlier));
        let node_sent = node.as_ref().map(|node| (node.payload_sent(None), node.messages_sent(None)));
        let (node_payload, node_messages) = node_sent.unwrap_or_default();
        let framing = |traffic: &Traffic| -> u64 { traffic.flows.values().map(|flow| flow.sent.header_bytes()).sum() };
        StepTraffic {
            payload: all.payload_sent(None) - all.payload_sent(of_scalars) + node_payload,
            messages: all.messages_sent(None) - all.messages_sent(of_scalars) + node_messages,
            node: node_sent,
            scalars: all.payload_sent(of_scalars),
            framing: framing(&all) + node.as_ref().map_or(0, framing),
        }
    }
}
