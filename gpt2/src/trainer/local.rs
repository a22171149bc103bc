//! What a rank computes by itself in a step: passes over the model, the look at its gradients, and the optimizer.

use std::ops::Range;
use std::sync::Arc;

use comm_core::job::MAX_WORLD_SIZE;
use comm_core::process::StopRequest;
use comm_core::{Buffer, Communicator, CommunicatorExt, ReduceOp};

use super::optimizers::{MasterOptimizer, MemoryPlacement};
use super::{TrainConfig, TrainError};
use crate::batches::{Batches, Share};
use crate::dropout::Dropout;
use crate::flat::{Flat, Weights};
use crate::memory::{self, Category};
use crate::optim::{LossScaler, LossScaling, Overflow, clip_factor};
use crate::record::{self, Activity};
use crate::segments::{Destination, Pass, PassHooks, SegmentGrads, SegmentedModel, TokenBatch};
use crate::strategy::{Channels, CheckedGradients, DuringPass, LocalStep, Ranks};

/// A rank's model, data and optimizer.
pub(super) struct Local<'a> {
    pub(super) config: &'a TrainConfig,
    /// For scalars, so that their bytes are counted apart.
    pub(super) scalars: Arc<dyn Communicator>,
    pub(super) model: SegmentedModel,
    pub(super) batches: Batches,
    /// This rank's part of the data; `None` for one that only serves.
    pub(super) share: Option<Share>,
    /// Ranks that have one.
    pub(super) workers: usize,
    /// The f32 parameters that this rank's optimizer updates: the owned range of each segment.
    pub(super) masters: Vec<Flat>,
    /// Whether the model has them, from the end of a step to the next update: they are its weights.
    pub(super) lends_masters: bool,
    pub(super) optimizer: Box<dyn MasterOptimizer>,
    pub(super) places: MemoryPlacement,
    pub(super) scaler: LossScaler,
    /// Where each rank's owned range of each segment begins, and its length: `[rank][segment]`.
    pub(super) owned_by: Vec<Vec<(usize, usize)>>,
    /// The step under way, from 0.
    pub(super) step: u64,
    /// Rows of it that this rank has passed through its model.
    pub(super) rows: usize,
    /// Steps between two checkpoints of the whole state; 0 for none.
    pub(super) save_every: u64,
    /// What asks this rank to leave.
    pub(super) stop: StopRequest,
    /// Whether any rank was asked to before the end of the last step; `None` where its scalars did not tell.
    pub(super) leaving: Option<bool>,
}

/// What a rank that was asked to leave adds to the number of ranks with an overflow, which travels in any case: more than there are ranks.
const LEAVE: f64 = (1 << 20) as f64;
const _: () = assert!(MAX_WORLD_SIZE < 1 << 20);

impl Local<'_> {
    /// Learning rate of the step's update.
    pub(super) fn learning_rate(&self) -> f64 {
        self.config.learning_rate.at(self.step)
    }

    /// Whether every rank's optimizer updates every parameter.
    pub(super) fn owns_everything(&self) -> bool {
        let whole = |owned: &Vec<(usize, usize)>| {
            owned.iter().zip(self.model.segments()).all(|((_, len), info)| *len == info.len)
        };
        self.owned_by.iter().all(whole)
    }

    /// Takes the masters of these segments that the model has.
    fn take_back(&mut self, segments: &[usize]) -> Result<(), TrainError> {
        if self.lends_masters {
            for segment in segments {
                // What stands for them in the model meanwhile is memory of parameters, too.
                let take = || self.model.take_params(*segment);
                if let Some(weights) = memory::within(Category::Parameters, take)? {
                    self.masters[*segment] = Flat::Host(weights);
                }
            }
        }
        Ok(())
    }

    /// Mean loss of a batch without gradients.
    pub(super) fn evaluate(
        &mut self,
        batch: &TokenBatch,
        strategy: &mut dyn DuringPass,
        channels: &mut Channels,
    ) -> Result<f64, TrainError> {
        strategy.begin(false);
        let mut hooks = Hooks { strategy, channels, masters: &self.masters, gradients: None };
        memory::within(Category::Activations, || self.model.evaluate::<TrainError>(batch, &mut hooks))
    }

    /// What becomes of sums over what this rank's optimizer owns.
    fn sums(&self, ranks: Ranks) -> Sums {
        let rank = self.scalars.rank();
        let is_replica = self.owned_by[..rank].contains(&self.owned_by[rank]);
        match ranks {
            Ranks::All => Sums::of(self.owns_everything(), self.places.masters_on_device, is_replica),
            Ranks::This => Sums::Known,
        }
    }
}

impl LocalStep for Local<'_> {
    fn backward(&mut self, strategy: &mut dyn DuringPass, channels: &mut Channels) -> Result<f64, TrainError> {
        let Some(share) = self.share else { return Ok(0.0) };
        // Each micro-step's gradients are weighed so that the mean over ranks of the sums is the mean over the global batch, however its
        // rows are spread.
        let rows_in_step = self.batches.rows_in_step(self.step) as f64;
        let loss_scale = f64::from(self.scaler.scale());
        let pieces = self.config.pieces(self.step);
        let (mut loss, mut sums) = (0.0, vec![None; self.masters.len()]);
        self.rows = 0;
        for micro_step in 0..self.config.accumulation {
            let read = || self.batches.rows(self.step, micro_step, share);
            let batch = record::charged(Activity::Data, Category::Other, read)?;
            let weight = (self.workers * batch.rows) as f64 / rows_in_step;
            let scale = (weight * loss_scale * self.config.loss_factor) as f32;
            let first = self.batches.first_row(self.step, micro_step, share)?;
            self.model.set_dropout(Dropout::new(self.config.dropout, self.config.seed, self.step, first * pieces));
            let (rows, batch) = (batch.rows, batch.cut(pieces));
            strategy.begin(true);
            let is_last = micro_step + 1 == self.config.accumulation;
            let on_device = self.places.gradients_on_device;
            let gradients = Some(GradientSink { sums: &mut sums, is_last, on_device });
            let mut hooks = Hooks { strategy: &mut *strategy, channels, masters: &self.masters, gradients };
            let mean = record::charged(Activity::Forward, Category::Activations, || {
                let mean = self.model.train::<TrainError>(&batch, scale, &mut hooks)?;
                if on_device {
                    // Else what comes next would wait for it, and be taken for slow.
                    self.model.wait()?;
                }
                Ok::<f64, TrainError>(mean)
            })?;
            loss += mean * rows as f64 / rows_in_step;
            self.rows += rows;
        }
        Ok(loss)
    }

    fn check(&mut self, loss: f64, grads: Vec<Flat>, ranks: Ranks) -> Result<CheckedGradients, TrainError> {
        let grads = self.optimizer.fetch(grads)?;
        let (unscale, loss_scale) = (self.scaler.unscale(), f64::from(self.scaler.scale()));
        let own = record::span(Activity::Optimizer, || self.optimizer.sum_of_squares(&grads, unscale))?;
        let sums = self.sums(ranks);
        let overflows = f64::from(u8::from(!own.is_finite()));
        let asked = if self.stop.is_asked() { LEAVE } else { 0.0 };
        let mut totals = [loss, sums.contribution(own), overflows + asked];
        match ranks {
            // Loss and norm in one small all-reduce that every strategy needs alike.
            Ranks::All => {
                let count = totals.len();
                record::scalars("loss and gradient norm", count, || {
                    self.scalars.all_reduce(&mut totals, ReduceOp::Sum)
                })?;
            }
            Ranks::This => totals[0] *= self.batches.rows_in_step(self.step) as f64 / self.rows.max(1) as f64,
        }
        let [loss, all_squares, counts] = totals;
        let overflows = counts % LEAVE;
        if ranks == Ranks::All {
            self.leaving = Some(counts >= LEAVE);
        }
        let squares = if sums == Sums::Known { own } else { all_squares };
        let grad_norm = squares.sqrt() / loss_scale;
        if self.config.loss_scaling == LossScaling::Off {
            let values = [("the loss", loss), ("the gradient norm", grad_norm)];
            if let Some((what, value)) = values.into_iter().find(|(_, value)| !value.is_finite()) {
                return Err(TrainError::NotFinite { step: self.step + 1, what, value });
            }
        }
        // A rank's loss that is not finite makes the sum of all so.
        let overflow = match (loss.is_finite(), overflows > 0.0) {
            (false, _) => Some(Overflow::Loss),
            (true, true) => Some(Overflow::Gradient),
            (true, false) => None,
        };
        let skip = self.scaler.update(overflow);
        let skip = skip.map_err(|error| TrainError::Scaling { step: self.step + 1, error })?;
        let clip = if self.config.clip > 0.0 { clip_factor(grad_norm, self.config.clip) } else { 1.0 };
        Ok(CheckedGradients { loss, grad_norm, skip, grads, factor: clip * unscale, part_of_rate: 1.0, ranks })
    }

    fn update_some(&mut self, checked: &mut CheckedGradients, segments: &[usize]) -> Result<(), TrainError> {
        let grads = segments.iter().map(|segment| std::mem::take(&mut checked.grads[*segment])).collect();
        let (rates, sums) = ((self.learning_rate() * checked.part_of_rate, checked.factor), self.sums(checked.ranks));
        let scalars = self.scalars.clone();
        let mut add_up = |squares: &mut [f64]| {
            if sums == Sums::Known {
                return Ok(());
            }
            squares.iter_mut().for_each(|own| *own = sums.contribution(*own));
            Ok(record::scalars("norms of tensors", squares.len(), || scalars.all_reduce(squares, ReduceOp::Sum))?)
        };
        record::charged(Activity::Optimizer, Category::Optimizer, || {
            self.take_back(segments)?;
            self.optimizer.step(segments, &mut self.masters, grads, rates, &mut add_up)?;
            if self.places.masters_on_device {
                self.model.wait()?;
            }
            Ok(())
        })
    }

    fn updates_apart(&self) -> bool {
        !self.config.optimizer.kind.needs_norms()
    }

    fn masters(&self) -> &[Flat] {
        &self.masters
    }

    fn masters_mut(&mut self) -> &mut [Flat] {
        &mut self.masters
    }

    fn lend(&mut self, segment: usize) -> Result<bool, TrainError> {
        if self.lends_masters {
            let masters = std::mem::take(&mut self.masters[segment]).into_host()?;
            self.put(segment, Weights::Host(Buffer::from_vec(masters)))?;
        }
        Ok(self.lends_masters)
    }

    fn is_last(&self) -> bool {
        self.step + 1 == self.config.steps
    }

    fn is_asked_to_leave(&self) -> bool {
        self.stop.is_asked()
    }

    fn rests(&self) -> bool {
        let is_due = |every: u64| every > 0 && (self.step + 1).is_multiple_of(every);
        self.is_last() || is_due(self.config.eval_every) || is_due(self.save_every) || self.leaving == Some(true)
    }

    fn put(&mut self, segment: usize, weights: Weights) -> Result<(), TrainError> {
        let put = || self.model.put_weights(segment, weights);
        Ok(record::charged(Activity::Unpack, Category::Parameters, put)?)
    }
}

/// The owned range of each segment of each rank.
pub(super) fn who_owns_what(
    scalars: &dyn Communicator,
    owned: &[Range<usize>],
) -> Result<Vec<Vec<(usize, usize)>>, TrainError> {
    let mine: Vec<u64> = owned.iter().flat_map(|range| [range.start as u64, range.len() as u64]).collect();
    let all = scalars.all_gather(&mine, mine.len() * scalars.world_size())?;
    let pairs = |of_rank: &[u64]| of_rank.chunks_exact(2).map(|pair| (pair[0] as usize, pair[1] as usize)).collect();
    Ok(all.chunks_exact(mine.len()).map(pairs).collect())
}

/// A strategy's part in a pass over the model.
struct Hooks<'a> {
    strategy: &'a mut dyn DuringPass,
    channels: &'a mut Channels,
    masters: &'a [Flat],
    /// In a pass with gradients.
    gradients: Option<GradientSink<'a>>,
}

/// Where a pass's gradients go.
struct GradientSink<'a> {
    /// Those of earlier micro-steps.
    sums: &'a mut [Option<Flat>],
    /// Whether this is the micro-step after which gradients are communicated.
    is_last: bool,
    /// Whether gradients stay on the device.
    on_device: bool,
}

impl Hooks<'_> {
    /// Whether the pass is followed in time. One without gradients is not.
    fn follow(&self, pass: Pass) {
        if self.gradients.is_some() {
            record::go_on_as(match pass {
                Pass::Forward => Activity::Forward,
                Pass::Backward => Activity::Backward,
            });
        }
    }
}

impl Hooks<'_> {
    /// Puts the weights into a model that it is to have got before it uses `segment`.
    fn bring_up_to_date(&mut self, model: &mut SegmentedModel, segment: usize) -> Result<(), TrainError> {
        let arrived = self.strategy.arriving(segment, self.masters, self.channels)?;
        if arrived.is_empty() {
            return Ok(());
        }
        for (segment, weights) in arrived {
            record::charged(Activity::Unpack, Category::Parameters, || model.put_weights(segment, weights))?;
        }
        Ok(self.strategy.prefetch(self.masters, self.channels)?)
    }
}

impl PassHooks<TrainError> for Hooks<'_> {
    fn enter(&mut self, model: &mut SegmentedModel, pass: Pass, segment: usize) -> Result<(), TrainError> {
        self.follow(pass);
        if !self.strategy.brings_weights() {
            return if pass == Pass::Forward { self.bring_up_to_date(model, segment) } else { Ok(()) };
        }
        // The embedding stays from the forward pass on.
        if (pass, segment) == (Pass::Backward, 0) {
            return Ok(());
        }
        let weights = self.strategy.weights(segment, self.masters, self.channels)?;
        record::charged(Activity::Unpack, Category::Parameters, || model.put_weights(segment, weights))?;
        Ok(self.strategy.prefetch(self.masters, self.channels)?)
    }

    fn leave(&mut self, model: &mut SegmentedModel, _pass: Pass, segment: usize) -> Result<(), TrainError> {
        if self.strategy.brings_weights() {
            // What stands for weights that are gone takes memory as well.
            let release = || model.take_released(segment);
            if let Some(weights) = record::charged(Activity::Unpack, Category::Parameters, release)? {
                self.strategy.released(weights);
            }
        }
        Ok(())
    }

    fn destination(&mut self, segment: usize) -> Destination {
        match &mut self.gradients {
            Some(GradientSink { sums, on_device: false, is_last }) => match sums[segment].take() {
                Some(Flat::Host(sum)) => Destination::Onto(sum),
                None if *is_last => Destination::Behind(self.strategy.room(segment)),
                other => {
                    sums[segment] = other;
                    Destination::default()
                }
            },
            _ => Destination::default(),
        }
    }

    fn gradients(&mut self, grads: SegmentGrads) -> Result<(), TrainError> {
        let Some(GradientSink { sums, is_last, on_device }) = &mut self.gradients else { return Ok(()) };
        let segment = grads.segment();
        let mut grads = grads.into_gradients(*on_device);
        let sum = &mut sums[segment];
        if sum.is_some() || !*is_last {
            let flat = match sum.take() {
                Some(sum) => grads.added_to(sum)?,
                None => grads.into_flat()?,
            };
            if !*is_last {
                *sum = Some(flat);
                return Ok(());
            }
            grads = flat.into();
        }
        Ok(self.strategy.gradient(segment, grads, self.channels)?)
    }
}

/// What becomes of sums over what a rank's optimizers own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    /// They are those of every rank.
    Known,
    /// They are added to those of other ranks.
    Added,
    /// Those of a lower rank that owns the same count, and not this rank's.
    OfAnother,
}

impl Sums {
    /// Where each rank sees everything nothing needs to be added, unless it comes from a device, whose sums differ in their last bits
    /// from rank to rank. Of ranks that own the same the lowest counts; `is_replica` says that this is another.
    fn of(owns_everything: bool, on_device: bool, is_replica: bool) -> Self {
        match (owns_everything, on_device, is_replica) {
            (true, false, _) => Sums::Known,
            (_, _, true) => Sums::OfAnother,
            _ => Sums::Added,
        }
    }

    /// What a rank adds to the others' sums, given its own. One that is not finite is never left out, so that all ranks fail alike.
    pub(super) fn contribution(self, own: f64) -> f64 {
        match self {
            Sums::Known | Sums::Added => own,
            Sums::OfAnother if own.is_finite() => 0.0,
            Sums::OfAnother => f64::NAN,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_known_or_added_once() {
        // Whether a rank owns everything, and on a device; what becomes of the sums of the first rank that owns it, and of another's.
        let table = [
            ((true, false), [Sums::Known, Sums::Known]),
            ((true, true), [Sums::Added, Sums::OfAnother]),
            ((false, false), [Sums::Added, Sums::OfAnother]),
            ((false, true), [Sums::Added, Sums::OfAnother]),
        ];
        for ((owns_everything, on_device), [first, others]) in table {
            for (is_replica, expected) in [(false, first), (true, others)] {
                let sums = Sums::of(owns_everything, on_device, is_replica);
                assert_eq!(sums, expected, "{owns_everything} {on_device} {is_replica}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_on_any_rank_is_not_finite_on_all() {
        for spoilt in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            for sums in [Sums::Known, Sums::Added, Sums::OfAnother] {
                // Another rank's may be the other infinity.
                for first in [3.0, -spoilt] {
                    assert!(!(first + sums.contribution(spoilt)).is_finite(), "{sums:?}: {first} and {spoilt}");
                }
            }
        }
        assert_eq!([Sums::Added, Sums::OfAnother].map(|sums| sums.contribution(2.5)), [2.5, 0.0]);
    }
}
