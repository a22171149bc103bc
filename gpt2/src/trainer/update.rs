//! The optimizers' step, where norms of tensors may be spread over ranks.

use comm_core::{CommunicatorExt, ReduceOp};

use super::TrainError;
use super::rank::Trainer;
use crate::flat::Flat;
use crate::memory::{self, Category};
use crate::strategy::{Activity, Clock};

/// Sums over what a rank's optimizers own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    /// They are those of every rank.
    Known,
    /// They are added to those of other ranks.
    Added,
    /// Those of rank 0 count, and not this rank's.
    OfRankZero,
}

impl Trainer<'_> {
    /// Runs the optimizers. On a device the time is counted here in which it does what they asked for.
    pub(super) fn update(
        &mut self,
        grads: Vec<Flat>,
        learning_rate: f64,
        factor: f32,
        clock: &mut Clock,
    ) -> Result<(), TrainError> {
        let _scope = memory::scope(Category::Optimizer);
        if !self.config.optimizer.kind.needs_norms() {
            return clock.spend(Activity::Optimizer, || {
                self.optimizers.step(&mut self.masters, grads, (learning_rate, factor))?;
                self.finish_masters()
            });
        }
        // Norms of whole tensors, of which this rank may hold a part only.
        let mut norms = clock.spend(Activity::Optimizer, || self.optimizers.prepare(&self.masters, grads, factor))?;
        if self.sums() != Sums::Known {
            let mut flat: Vec<f64> = norms.iter().flatten().flatten().copied().collect();
            if self.sums() == Sums::OfRankZero {
                flat.fill(0.0);
            }
            clock.scalars("norms of tensors", || self.scalars.all_reduce(&mut flat, ReduceOp::Sum))?;
            for (pair, sums) in norms.iter_mut().flatten().zip(flat.chunks_exact(2)) {
                pair.copy_from_slice(sums);
            }
        }
        clock.spend(Activity::Optimizer, || {
            self.optimizers.apply(&mut self.masters, learning_rate, &norms)?;
            self.finish_masters()
        })
    }

    /// Waits for the device, where masters are there.
    fn finish_masters(&self) -> Result<(), TrainError> {
        if self.places.masters_on_device {
            self.model.wait()?;
        }
        Ok(())
    }

    /// What becomes of sums over what this rank's optimizers own. Where each rank sees everything nothing needs to be added, unless it comes
    /// from a device, whose sums differ in their last bits from rank to rank: then all take that of rank 0.
    pub(super) fn sums(&self) -> Sums {
        match (self.owns_everything(), self.places.masters_on_device) {
            (true, false) => Sums::Known,
            (true, true) if self.session.comm.rank() != 0 => Sums::OfRankZero,
            _ => Sums::Added,
        }
    }
}
