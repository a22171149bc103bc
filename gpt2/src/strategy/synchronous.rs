//! The order of a step in which gradients are averaged before parameters are updated.

use super::formula::Expected;
use super::{Channels, DuringPass, LocalStep, Ranks, StepOutcome};
use crate::error::TrainError;
use crate::flat::Flat;

/// What a strategy does in a [`synchronous`] step, besides its part in the pass.
pub trait Synchronous: DuringPass {
    /// Returns the gradients, averaged over all ranks that compute, of the owned range of each segment: in host memory where the
    /// communicator moved bytes. Called after every segment's gradients came.
    ///
    /// # Errors
    /// The communicator's.
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>>;

    /// Puts the weights that follow from all ranks' masters into the model, where it keeps any.
    ///
    /// # Errors
    /// Those of the communicator and of the model.
    fn distribute(&mut self, train: &mut dyn LocalStep, channels: &mut Channels) -> Result<(), TrainError>;
}

/// Averages gradients, applies them, and brings every model up to date: after it all replicas are equal. What this rank sends is `expected`,
/// unless the step is skipped.
///
/// # Errors
/// Those of [`Strategy::step`](super::Strategy::step).
pub fn synchronous<S: Synchronous>(
    strategy: &mut S,
    expected: Expected,
    train: &mut dyn LocalStep,
    channels: &mut Channels,
) -> Result<StepOutcome, TrainError> {
    let loss = train.backward(strategy, channels)?;
    let grads = strategy.synchronise(channels)?;
    let mut checked = train.check(loss, grads, Ranks::All)?;
    if !checked.skip {
        train.update(&mut checked)?;
        strategy.distribute(train, channels)?;
    }
    Ok(StepOutcome::new(&checked, (!checked.skip).then_some(expected), true))
}

/// Puts the weights that follow from this rank's masters into the model, where it has all of them.
pub fn put_own(train: &mut dyn LocalStep, channels: &Channels) -> Result<(), TrainError> {
    for segment in 0..train.masters().len() {
        if train.lend(segment)? {
            continue;
        }
        let weights = channels.parameters.weights(&train.masters()[segment]);
        train.put(segment, weights)?;
    }
    Ok(())
}
