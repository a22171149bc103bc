//! A step that a rank takes by itself.

use super::{Channels, CheckedGradients, DuringPass, Layout, LocalStep, Ranks};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};

/// This rank's gradients of each segment, as the backward pass has left them.
pub(super) struct OwnGradients(Vec<Flat>);

impl OwnGradients {
    pub(super) fn of(layout: &Layout) -> Self {
        OwnGradients(layout.vectors())
    }

    /// Takes all of them.
    pub(super) fn take(&mut self) -> Vec<Flat> {
        self.0.iter_mut().map(std::mem::take).collect()
    }

    /// Has this rank's optimizer take a step by this rank's gradients. Their norm, clipping, and whether they overflow are this rank's too.
    pub(super) fn step(
        &mut self,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<CheckedGradients, TrainError> {
        let loss = train.backward(self, channels)?;
        let mut checked = train.check(loss, self.take(), Ranks::This)?;
        if !checked.skip {
            train.update(&mut checked)?;
        }
        Ok(checked)
    }
}

impl DuringPass for OwnGradients {
    fn gradient(&mut self, segment: usize, grads: Gradients, _channels: &mut Channels) -> comm_core::Result<()> {
        self.0[segment] = grads.into_flat()?;
        Ok(())
    }
}
