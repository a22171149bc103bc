//! What is said at the end of a run.

use super::say;
use crate::trainer::{NODES, RankReport, Restarts, Summary};

/// Prints what a run came to.
pub(super) fn print(summary: &Summary) {
    // Rank 0 may only serve.
    let first = summary.ranks.iter().position(|rank| rank.computes).unwrap_or(0);
    let parts = summary.ranks.get(first).map_or(&summary.parts, |rank| &rank.parts);
    say(format!(
        "done: {} steps, final loss {:.4}{}, {:.0} tok/s, {:.1} ms a step, mfu {}, {:.1}% of the measured matrix peak",
        summary.steps,
        summary.final_loss,
        summary.validation_loss.map_or(String::new(), |loss| format!(", validation loss {loss:.4}")),
        summary.tokens_per_s,
        summary.step_ms,
        percent(summary.mfu),
        100.0 * summary.matrix_share
    ));
    say(format!(
        "a step of rank {first}, ms: compute {:.2}, pack {:.2}, exposed communication {:.2} (hidden {:.2}), scalars {:.2}, unpack {:.2}, \
         optimizer {:.2}",
        parts.compute, parts.pack, parts.exposed, parts.hidden, parts.scalars, parts.unpack, parts.optimizer
    ));
    if summary.skipped_steps > 0 {
        say(format!("skipped: {} steps whose gradients had overflowed", summary.skipped_steps));
    }
    if let Some(step) = summary.resumed_at {
        say(format!(
            "resumed after step {step}: the figures are those of the {} steps since then",
            summary.losses.len()
        ));
    }
    let Restarts { count, steps_lost } = summary.restarts;
    if count > 0 {
        say(format!("restarts: {count}; {steps_lost} steps were repeated"));
    }
    if let Some((name, nodes)) = summary.transport.iter().find(|(name, _)| name == NODES) {
        say(format!("{name}: {nodes}"));
    }
    for rank in &summary.ranks {
        print_rank(rank);
    }
    say(format!("mfu: {}", summary.mfu_formula));
    say(format!("share of the measured matrix peak: {}", summary.matrix_formula));
    if let Some(path) = &summary.checkpoint {
        say(format!("checkpoint: {}", path.display()));
    }
    say(format!("weights: sha256 {}", summary.weights_hash));
}

/// A share in percent, if it is known.
pub(super) fn percent(share: Option<f64>) -> String {
    share.map_or("unknown".into(), |share| format!("{:.1}%", 100.0 * share))
}

fn print_rank(rank: &RankReport) {
    let counted = |count: Option<u64>| count.map_or("not counted".into(), |count| format!("{count} counted"));
    let place = if rank.between_nodes { " between nodes (inside its node nothing is counted)" } else { "" };
    say(format!(
        "rank {}: sent a step{place}: {} bytes, {} by the formula; messages: {}, {} by the formula; cpu {:.0}%; \
         peak memory {:.0} MB; {:.1} MB of gradients and parameters copied a step, {:.1} MB zeroed",
        rank.rank,
        counted(rank.bytes_counted),
        rank.bytes_expected,
        counted(rank.messages),
        rank.expected.messages,
        100.0 * rank.cpu_utilization,
        rank.peak_rss_bytes as f64 / 1e6,
        rank.copies.copied as f64 / 1e6,
        rank.copies.zeroed as f64 / 1e6
    ));
    if let Some((bytes, messages)) = rank.node_sent {
        say(format!(
            "rank {}: of these inside its node: {bytes} bytes counted, {} by the formula; messages: {messages} counted, {} by the formula",
            rank.rank, rank.expected.node_payload, rank.expected.node_messages
        ));
    }
    if let Some(staleness) = &rank.staleness {
        say(format!(
            "rank {}: applied {} gradients of workers; staleness {:.2} steps on average, {} at most",
            rank.rank,
            staleness.pushes,
            staleness.mean(),
            staleness.max
        ));
    }
    if let Some(memory) = &rank.memory {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        say(format!(
            "rank {}: peak memory of its process during training, MB: {:.1} in all; parameters {:.1}, gradients {:.1}, optimizer {:.1}, \
             activations {:.1}, communication {:.1}, other {:.1}",
            rank.rank,
            mb(memory.total.peak),
            mb(memory.parameters.peak),
            mb(memory.gradients.peak),
            mb(memory.optimizer.peak),
            mb(memory.activations.peak),
            mb(memory.communication.peak),
            mb(memory.other.peak)
        ));
    }
}
