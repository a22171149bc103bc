//! The optimizers' step, where norms of tensors may be spread over ranks.

use comm_core::{CommunicatorExt, ReduceOp};

use super::TrainError;
use super::rank::Trainer;
use crate::flat::Flat;
use crate::memory::{self, Category};
use crate::strategy::{Activity, Clock};

/// What becomes of sums over what a rank's optimizers own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    /// They are those of every rank.
    Known,
    /// They are added to those of other ranks.
    Added,
    /// Those of rank 0 count, and not this rank's.
    OfRankZero,
}

impl Sums {
    /// Where each rank sees everything nothing needs to be added, unless it comes from a device, whose sums differ in their last bits
    /// from rank to rank: then all take that of rank 0.
    fn of(owns_everything: bool, on_device: bool, rank: usize) -> Self {
        match (owns_everything, on_device, rank) {
            (true, false, _) => Sums::Known,
            (true, true, 1..) => Sums::OfRankZero,
            _ => Sums::Added,
        }
    }

    /// What a rank adds to the others' sums, given its own. One that is not finite is never left out, so that all ranks fail alike.
    pub(super) fn contribution(self, own: f64) -> f64 {
        match self {
            Sums::Known | Sums::Added => own,
            Sums::OfRankZero if own.is_finite() => 0.0,
            Sums::OfRankZero => f64::NAN,
        }
    }
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
        let sums = self.sums();
        if sums != Sums::Known {
            let own = norms.iter().flatten().flatten();
            let mut flat: Vec<f64> = own.map(|own| sums.contribution(*own)).collect();
            clock.scalars("norms of tensors", || self.scalars.all_reduce(&mut flat, ReduceOp::Sum))?;
            for (pair, whole) in norms.iter_mut().flatten().zip(flat.chunks_exact(2)) {
                pair.copy_from_slice(whole);
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

    /// What becomes of sums over what this rank's optimizers own.
    pub(super) fn sums(&self) -> Sums {
        Sums::of(self.owns_everything(), self.places.masters_on_device, self.session.comm.rank())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_known_added_or_those_of_rank_zero() {
        // Whether a rank owns everything, and on a device; what becomes of rank 0's sums, and of another's.
        let table = [
            ((true, false), [Sums::Known, Sums::Known]),
            ((true, true), [Sums::Added, Sums::OfRankZero]),
            ((false, false), [Sums::Added, Sums::Added]),
            ((false, true), [Sums::Added, Sums::Added]),
        ];
        for ((owns_everything, on_device), [first, others]) in table {
            for (rank, expected) in [(0, first), (1, others), (2, others)] {
                let sums = Sums::of(owns_everything, on_device, rank);
                assert_eq!(sums, expected, "{owns_everything} {on_device} {rank}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_on_any_rank_is_not_finite_on_all() {
        for spoilt in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for sums in [Sums::Known, Sums::Added, Sums::OfRankZero] {
                // Rank 0's own may be the other infinity.
                for first in [3.0, -spoilt] {
                    assert!(!(first + sums.contribution(spoilt)).is_finite(), "{sums:?}: {first} and {spoilt}");
                }
            }
        }
        assert_eq!([Sums::Added, Sums::OfRankZero].map(|sums| sums.contribution(2.5)), [2.5, 0.0]);
    }
}
