//! What a training step would take on a network that is not there.
//!
//! A [`Trace`](trace::Trace) is a step of a job: each rank's computation and operations, and what waits for what. [`simulate()`] predicts what it takes on a
//! [`Network`](network::Network), at the level of flows; [`alpha_beta`](alpha_beta::alpha_beta) is the plain formula to compare that with. [`calibration`]
//! has what was measured of transports and of the machine, and how far a prediction may be off; [`prediction`] puts it together, and says where it is
//! asked for more than was measured. [`chakra`] reads and writes traces as files.

pub mod alpha_beta;
pub mod calibration;
pub mod chakra;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod network;
pub mod prediction;
mod program;
pub mod schedule;
mod share;
mod simulate;
pub mod tcp;
pub mod trace;

pub use simulate::{Detail, Outcome, RankOutcome, simulate};
