//! A job's figures in one line.

use gpt2::trainer::{RankReport, Summary};
use serde::Serialize;

use super::task::RankOutput;
use crate::formula::off_the_formula;

/// The figures of a job: medians over its steps but the first two.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Of the slowest rank, where each has its own.
    pub step_ms: f64,
    /// Of all ranks together.
    pub tokens_per_s: f64,
    /// How long a step waits for gradients and parameters, on the rank that waits longest.
    pub exposed_ms: f64,
    /// How long it waits for loss and norm, on the rank where that is longest.
    pub scalars_ms: f64,
    /// How long at least one operation on gradients or parameters is under way, on the rank of `exposed_ms`.
    pub communication_ms: f64,
    /// How much of that nobody waited for.
    pub hidden_ms: f64,
    /// Forward and backward pass, on the slowest rank.
    pub compute_ms: f64,
    /// Payload sent a step, on the rank that sends most.
    pub payload_bytes: Option<u64>,
    pub first_loss: f64,
    pub final_loss: f64,
    pub weights_hash: String,
    pub transport_facts: Vec<(String, String)>,
}

impl Figures {
    /// Of a job's ranks, which trained together or each alone.
    ///
    /// # Errors
    /// Something was sent that the strategy's formula does not know.
    pub fn of(outputs: &[RankOutput]) -> Result<Self, String> {
        let summaries: Vec<&Summary> = outputs.iter().filter_map(|output| output.summary.as_ref()).collect();
        let first = summaries.first().ok_or("no rank has left a summary")?;
        let ranks: Vec<&RankReport> = summaries.iter().flat_map(|summary| &summary.ranks).collect();
        if let Some(off) = ranks.iter().find_map(|rank| off_the_formula(rank)) {
            return Err(off);
        }
        let most = |of: fn(&RankReport) -> f64| ranks.iter().map(|rank| of(rank)).fold(0.0, f64::max);
        let waiting =
            ranks.iter().max_by(|a, b| a.parts.exposed.total_cmp(&b.parts.exposed)).ok_or("no rank has reported")?;
        Ok(Figures {
            step_ms: summaries.iter().map(|summary| summary.step_ms).fold(0.0, f64::max),
            tokens_per_s: summaries.iter().map(|summary| summary.tokens_per_s).sum(),
            exposed_ms: waiting.parts.exposed,
            scalars_ms: most(|rank| rank.parts.scalars),
            communication_ms: waiting.parts.communication,
            hidden_ms: waiting.parts.hidden,
            compute_ms: most(|rank| rank.parts.compute),
            payload_bytes: ranks.iter().filter_map(|rank| rank.bytes_counted).max(),
            first_loss: first.losses.first().copied().unwrap_or(f64::NAN),
            final_loss: first.final_loss,
            weights_hash: first.weights_hash.clone(),
            transport_facts: first.transport.clone(),
        })
    }
}
