//! A run's figures in one line.

use serde::Serialize;

use crate::flag::FlagKind;
use crate::record::{Measured, Record, Status};

/// The figures of a run that nobody watched: medians over its steps but the first two.
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
    /// Of a run's record.
    ///
    /// # Errors
    /// It has none: how it ended instead, or what it sent that the strategy's formula does not know.
    pub fn of(record: &Record) -> Result<Self, String> {
        let measured = sound(record)?;
        let parts = || measured.ranks.iter().filter_map(|rank| Some(rank.trained.as_ref()?.parts));
        let waiting = parts().max_by(|a, b| a.exposed.total_cmp(&b.exposed)).unwrap_or_default();
        let trained = measured.trained.clone().unwrap_or_default();
        let known = || measured.losses.iter().copied().flatten();
        Ok(Figures {
            step_ms: trained.step_ms.unwrap_or(f64::NAN),
            tokens_per_s: trained.tokens_per_s.unwrap_or(f64::NAN),
            exposed_ms: waiting.exposed,
            scalars_ms: parts().map(|parts| parts.scalars).fold(0.0, f64::max),
            communication_ms: waiting.communication,
            hidden_ms: waiting.hidden,
            compute_ms: parts().map(|parts| parts.compute).fold(0.0, f64::max),
            payload_bytes: measured.ranks.iter().filter_map(|rank| rank.payload_bytes).max(),
            first_loss: measured.losses.first().copied().flatten().unwrap_or(f64::NAN),
            final_loss: known().last().unwrap_or(f64::NAN),
            weights_hash: measured.weights_hash.clone(),
            transport_facts: measured.transport_facts.clone(),
        })
    }
}

/// What was measured in a run that ended well and sent what its strategy's formula says.
///
/// # Errors
/// How it ended instead, as tables say it.
pub fn sound(record: &Record) -> Result<&Measured, String> {
    let off = record.flags.iter().find(|flag| flag.kind == FlagKind::OffTheFormula);
    match (&record.status, off) {
        (Status::NotAvailable(why), _) => Err(format!("not available: {why}")),
        (Status::Ok, Some(off)) => Err(format!("failed: {}", off.what)),
        _ => outcome(record).map_err(|why| format!("failed: {why}")),
    }
}

/// What was measured in a run that ended well.
///
/// # Errors
/// Why it did not.
pub fn outcome(record: &Record) -> Result<&Measured, String> {
    match (&record.status, &record.measured) {
        (Status::Ok, Some(measured)) => Ok(measured),
        (Status::Ok, None) => Err("it left no figures".into()),
        (Status::Failed(why) | Status::TimedOut(why) | Status::NotAvailable(why), _) => Err(why.clone()),
    }
}
