//! What ends a training run.

use std::path::PathBuf;

use crate::batches::BatchError;
use crate::checkpoint::CheckpointError;
use crate::checkpoint::sharded::SavedError;
use crate::optim::{OptimError, ScalingError};
use crate::segments::ModelError;

/// Why a run ended early.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The transport or another rank.
    #[error(transparent)]
    Comm(#[from] comm_core::Error),
    /// What all ranks agree on, and none of them can do: each finds it by itself.
    #[error("{error}")]
    Refused {
        /// What is wrong.
        error: comm_core::Error,
        /// Whether rank 0, another one, says the same, so that nobody else needs to.
        is_said: bool,
    },
    /// The model or the device.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The batches.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// The optimizer.
    #[error(transparent)]
    Optim(#[from] OptimError),
    /// The checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The whole state of a run, written or read.
    #[error(transparent)]
    Saved(#[from] SavedError),
    /// No error: the run was asked to leave, and has saved its state.
    #[error("stopped after step {step}: the state is saved in {}; --resume {} continues from it", path.display(), path.display())]
    Stopped {
        /// Steps taken.
        step: u64,
        /// The checkpoint.
        path: PathBuf,
    },
    /// Loss scaling ended the run.
    #[error("step {step}: {error}")]
    Scaling {
        /// The step, from 1.
        step: u64,
        /// Why.
        error: ScalingError,
    },
    /// A loss or gradient that is not a number.
    #[error(
        "step {step}: {what} is {value}; lower the learning rate or clip gradients; with a 16-bit --precision or --wire, try --loss-scale \
         dynamic or bf16"
    )]
    NotFinite {
        /// The step, from 1.
        step: u64,
        /// What is not finite.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// A bug in a strategy: ranks ended with different weights.
    #[error("the ranks ended with different weights: {0}")]
    Diverged(String),
}
