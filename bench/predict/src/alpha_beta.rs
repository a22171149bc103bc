//! The plain model that stands beside every prediction: an operation takes a latency for each of its rounds, and its bytes at the link's rate.
//!
//! Operations know nothing of each other here: no shares of a link, no window, no loss, no processor. What runs beside what is as the trace has it.

use comm_core::table::Table;

use crate::network::Network;
use crate::schedule;
use crate::trace::{Trace, Work};

/// Seconds of a step by the plain model: of the rank that takes longest.
///
/// # Errors
/// The trace is none, or has an operation that cannot run.
pub fn alpha_beta(trace: &Trace, network: &Network) -> Result<f64, String> {
    trace.check().map_err(|why| why.to_string())?;
    let (table, ranks) = (Table::fixed(), trace.ranks.len());
    let mut longest: f64 = 0.0;
    // Ranks that do the same take the same; of many, the first few stand for the rest.
    for rank in (0..ranks).filter(|rank| *rank < 64 || rank + 1 == ranks) {
        let nodes = &trace.ranks[rank].nodes;
        let mut ends: Vec<f64> = Vec::with_capacity(nodes.len());
        let mut lane_free: Vec<f64> = Vec::new();
        for node in nodes {
            let ready = node.after.iter().map(|after| ends[*after]).fold(0.0, f64::max);
            let end = match (&node.work, node.work.lane()) {
                (Work::Compute { ns }, _) => ready + *ns as f64 / 1e9,
                (work, lane) => {
                    let lane = lane.unwrap_or(0);
                    lane_free.resize(lane_free.len().max(lane + 1), 0.0);
                    let end = ready.max(lane_free[lane]) + operation(work, ranks, rank, network, &table)?;
                    lane_free[lane] = end;
                    end
                }
            };
            ends.push(end);
        }
        longest = longest.max(ends.into_iter().fold(0.0, f64::max));
    }
    Ok(longest / trace.steps as f64)
}

fn operation(work: &Work, ranks: usize, rank: usize, network: &Network, table: &Table) -> Result<f64, String> {
    let pipes = network.link.pipes(rank);
    let rate = |bits: Option<f64>| bits.map_or(f64::INFINITY, |bits| bits / 8.0);
    let (up, down) = (rate(pipes.up.bits_per_s), rate(pipes.down.bits_per_s));
    let latency = network.costs.message_s + pipes.up.delay_s + pipes.down.delay_s;
    let cost = |rounds: usize, sent: u64, received: u64| {
        rounds as f64 * latency + f64::max(sent as f64 / up, received as f64 / down)
    };
    Ok(match work {
        Work::Compute { .. } => 0.0,
        Work::Send(message) => cost(1, message.bytes, 0),
        Work::Receive(message) => cost(1, 0, message.bytes),
        Work::Collective(collective) => {
            let group = &collective.group;
            let (members, own) = match group.iter().position(|each| *each == rank) {
                Some(own) => (group.len(), own),
                None => (ranks, rank),
            };
            let rounds = schedule::rounds(collective, members, own, table)?;
            let sum = |parts: fn(&schedule::Round) -> &Vec<schedule::Part>| -> u64 {
                rounds.iter().flat_map(parts).map(|part| part.bytes).sum()
            };
            cost(rounds.len(), sum(|round| &round.sends), sum(|round| &round.receives))
        }
    })
}
