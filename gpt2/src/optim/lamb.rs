//! LAMB over flat host vectors: Adam's step, rescaled for each tensor to the tensor's own size.
//!
//! You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (arXiv 1904.00962), algorithm 2. Of its
//! variants this is the one of NVIDIA's fused kernel with its default settings:
//! - both moments are corrected for their bias (some implementations leave that out);
//! - φ is the identity: the norm of the parameters is not clamped, nor is the trust ratio (some clamp it to 10);
//! - tensors that do not decay (biases and norms, of one dimension) are exempt from the trust ratio as well, as in the authors' program,
//!   whose list of tensors without layer adaptation is by default that of tensors without decay. What counts is the tensor and not
//!   λ: with a weight decay of 0 matrices keep their trust ratio;
//! - weight decay enters the update, and so its norm (it is not applied to the parameters beforehand as by AdamW).
//!
//! NVIDIA's kernel also clips the global gradient norm to 1; here clipping is the trainer's, by way of the gradient factor.

use std::ops::Range;

use comm_core::{Kernel, vectorised};
use rayon::prelude::*;

use super::{AdamWConfig, Decay, Moments, OptimError, TASK, integer_power, tiles};
use crate::segments::SegmentInfo;

/// LAMB for one contiguous range of a segment's flat vector, with state for that range only: that of AdamW, no more.
///
/// A step has two phases, since a tensor's norms may be spread over ranks: [`prepare`](Self::prepare) updates the moments and gives the
/// shard's part of the squared norms; the caller adds those of all shards; [`apply`](Self::apply) changes the parameters. Between the
/// two the parameters must not change: the update is computed from them a second time rather than kept.
///
/// Sums are taken in f64 in an order that depends on the shard alone, so a sharding gives the same bits whenever it is used. Another
/// sharding may differ in the last bits of the norms and therefore of the updates; the moments are the same bits in any.
#[derive(Clone, Debug)]
pub struct Lamb {
    config: AdamWConfig,
    moments: Moments,
    /// The paths of all tensors of the segment.
    tensors: Vec<String>,
    pieces: Vec<Piece>,
    /// Whether the moments are a step ahead of the parameters.
    prepared: bool,
}

/// What the shard holds of one tensor.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Index of the tensor in the segment.
    pub(super) tensor: usize,
    /// Elements, counted from the shard's start.
    pub(super) range: Range<usize>,
    /// Whether the tensor decays and has a trust ratio.
    pub(super) decay: bool,
    /// Whether this is all of the tensor.
    whole: bool,
}

impl Lamb {
    /// An optimizer for the elements `range` of `segment` (the whole of it: `0..segment.len`; an empty range is fine). The constants
    /// mean what they mean for AdamW, though LAMB's usual values differ: see [`OptimizerConfig::of`](super::OptimizerConfig::of).
    ///
    /// # Errors
    /// [`OptimError::RangeOutsideSegment`].
    pub fn new(config: AdamWConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<Self, OptimError> {
        let moments = Moments::new(segment, &range)?;
        let tensors = segment.params.iter().map(|info| info.path.clone()).collect();
        Ok(Self { config, moments, tensors, pieces: pieces(segment, &range), prepared: false })
    }

    /// Number of elements of the shard.
    pub fn len(&self) -> usize {
        self.moments.len()
    }

    /// Whether the shard is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Steps taken so far; a step counts from its [`prepare`](Self::prepare) on.
    pub fn steps(&self) -> u64 {
        self.moments.steps
    }

    /// The state for a checkpoint: first and second moments and the number of steps. Between [`prepare`](Self::prepare) and
    /// [`apply`](Self::apply) it is a step ahead of the parameters, and not to be saved with them.
    pub fn state(&self) -> (&[f32], &[f32], u64) {
        self.moments.state()
    }

    /// Continues from a saved [`state`](Self::state); a step that was prepared is forgotten.
    ///
    /// # Errors
    /// [`OptimError::Length`] if a moment does not have the shard's length; nothing has changed then.
    pub fn restore(&mut self, mean: Vec<f32>, square: Vec<f32>, steps: u64) -> Result<(), OptimError> {
        self.moments.restore(mean, square, steps)?;
        self.prepared = false;
        Ok(())
    }

    /// The first half of a step. `params` and `grads` are the shard's elements; each gradient is first multiplied by `grad_factor` (a
    /// clip factor, the inverse of a loss scale, or 1). Gradients that are not finite spoil the moments for good: look before.
    ///
    /// With g the gradient: m ← m + (1−β₁)(g − m); v ← β₂v + (1−β₂)g². Returned are, for each tensor of the *segment* in the layout's
    /// order, the sums of squares of this shard's elements of p and of the update u of [`apply`](Self::apply); zeros for tensors
    /// of which it holds nothing. Their sum over all shards of the segment is what `apply` takes.
    ///
    /// # Errors
    /// [`OptimError::Length`] if a slice does not have the shard's length, [`OptimError::AlreadyPrepared`]; nothing has changed then.
    pub fn prepare(&mut self, params: &[f32], grads: &[f32], grad_factor: f32) -> Result<Vec<[f64; 2]>, OptimError> {
        if self.prepared {
            return Err(OptimError::AlreadyPrepared { segment: self.moments.segment.clone() });
        }
        self.moments.check("the parameter slice", params.len())?;
        self.moments.check("the gradient slice", grads.len())?;
        self.moments.steps += 1;
        self.prepared = true;
        let decay = Decay::of(&self.config, grad_factor);
        let mut norms = vec![[0.0; 2]; self.tensors.len()];
        for Piece { tensor, range, decay: decays, .. } in &self.pieces {
            let update = Update::of(&self.config, self.moments.steps, *decays);
            let partial: Vec<[f64; 2]> = params[range.clone()]
                .par_chunks(TASK)
                .zip(grads[range.clone()].par_chunks(TASK))
                .zip(self.moments.mean[range.clone()].par_chunks_mut(TASK))
                .zip(self.moments.square[range.clone()].par_chunks_mut(TASK))
                .map(|(((params, grads), mean), square)| {
                    vectorised(Prepare { decay, update, params, grads, mean, square })
                })
                .collect();
            norms[*tensor] = partial.iter().fold([0.0; 2], |sum, part| [sum[0] + part[0], sum[1] + part[1]]);
        }
        Ok(norms)
    }

    /// The second half of a step: `params` are the shard's elements as they were given to [`prepare`](Self::prepare), and `norms` the
    /// sum of what it returned over all shards of the segment, the same bits on all of them.
    ///
    /// With t the number of the step (from 1): u = m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + ε) + λp, the last term where the tensor decays;
    /// p ← p − lr · r · u, with r the [`trust_ratio`] where the tensor decays and 1 elsewhere.
    ///
    /// # Errors
    /// [`OptimError::NotPrepared`]; [`OptimError::Length`] if `params` does not have the shard's length or `norms` that of the
    /// segment's list of tensors; [`OptimError::Norm`] if a sum is negative or not finite. Nothing has changed then, and the step
    /// remains prepared.
    pub fn apply(&mut self, params: &mut [f32], learning_rate: f64, norms: &[[f64; 2]]) -> Result<(), OptimError> {
        if !self.prepared {
            return Err(OptimError::NotPrepared { segment: self.moments.segment.clone() });
        }
        self.moments.check("the parameter slice", params.len())?;
        check_norms(&self.moments.segment, &self.tensors, norms)?;
        for piece in &self.pieces {
            let (range, update) = (&piece.range, Update::of(&self.config, self.moments.steps, piece.decay));
            let step_size = piece.step_size(learning_rate, norms);
            params[range.clone()]
                .par_chunks_mut(TASK)
                .zip(self.moments.mean[range.clone()].par_chunks(TASK))
                .zip(self.moments.square[range.clone()].par_chunks(TASK))
                .for_each(|((params, mean), square)| vectorised(Apply { update, step_size, params, mean, square }));
        }
        self.prepared = false;
        Ok(())
    }

    /// Both halves at once, for a shard whose tensors all lie within it: a whole segment, say.
    ///
    /// # Errors
    /// [`OptimError::Partial`] if the shard ends within a tensor that has a trust ratio, and those of [`prepare`](Self::prepare);
    /// nothing has changed then. [`OptimError::Norm`] if parameters or gradients were not finite: the moments are spoilt.
    pub fn step(
        &mut self,
        params: &mut [f32],
        grads: &[f32],
        learning_rate: f64,
        grad_factor: f32,
    ) -> Result<(), OptimError> {
        if let Some(piece) = self.pieces.iter().find(|piece| piece.decay && !piece.whole) {
            return Err(OptimError::Partial {
                segment: self.moments.segment.clone(),
                tensor: self.tensors[piece.tensor].clone(),
            });
        }
        let norms = self.prepare(params, grads, grad_factor)?;
        self.apply(params, learning_rate, &norms)
    }

    pub(super) fn moments(&self) -> &Moments {
        &self.moments
    }
}

impl Piece {
    /// By what the update of these elements is multiplied, given the norms of the segment's tensors.
    pub(super) fn step_size(&self, learning_rate: f64, norms: &[[f64; 2]]) -> f32 {
        let ratio = if self.decay { trust_ratio(norms[self.tensor]) } else { 1.0 };
        (learning_rate * ratio) as f32
    }
}

/// What the elements `range` of `segment` hold of its tensors.
pub(super) fn pieces(segment: &SegmentInfo, range: &Range<usize>) -> Vec<Piece> {
    let piece = |(tensor, range): (usize, Range<usize>)| {
        let info = &segment.params[tensor];
        let whole = range.len() == info.len;
        Piece { tensor, range, decay: info.decay, whole }
    };
    tiles(segment, range).map(piece).collect()
}

/// Whether these can be the norms of a segment's `tensors`.
pub(super) fn check_norms(segment: &str, tensors: &[String], norms: &[[f64; 2]]) -> Result<(), OptimError> {
    let (len, expected) = (norms.len(), tensors.len());
    if len != expected {
        return Err(OptimError::Length { segment: segment.into(), what: "the list of tensors' norms", len, expected });
    }
    for (pair, tensor) in norms.iter().zip(tensors) {
        for (value, what) in pair.iter().zip(["parameters", "update"]) {
            if !(*value >= 0.0 && value.is_finite()) {
                return Err(OptimError::Norm { segment: segment.into(), tensor: tensor.clone(), what, value: *value });
            }
        }
    }
    Ok(())
}

/// By what a tensor's update is multiplied, given the sums of squares of its parameters and of its update: ‖p‖/‖u‖ where both are
/// positive, else 1.
pub fn trust_ratio([params, update]: [f64; 2]) -> f64 {
    if params > 0.0 && update > 0.0 { params.sqrt() / update.sqrt() } else { 1.0 }
}

/// Sums that are taken side by side.
const LANES: usize = 8;

/// Updates that are computed before they are added up.
const BLOCK: usize = 64 * LANES;

/// Adds the squares of `values` to the sums, in turn.
#[inline(always)]
fn add_squares(sums: &mut [f64; LANES], values: &[f32]) {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = *sums;
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(*value) * f64::from(*value);
    }
    *sums = lanes;
}

/// How the update follows from parameters and moments, in the type it is computed in.
#[derive(Clone, Copy)]
pub(super) struct Update {
    pub(super) mean_correction: f32,
    pub(super) root_correction: f32,
    pub(super) epsilon: f32,
    pub(super) weight_decay: f32,
}

impl Update {
    /// That of step `t`, counted from 1, for elements that decay or do not.
    pub(super) fn of(config: &AdamWConfig, t: u64, decays: bool) -> Self {
        let AdamWConfig { beta1, beta2, epsilon, weight_decay } = *config;
        Update {
            mean_correction: (1.0 - integer_power(beta1, t)) as f32,
            root_correction: (1.0 - integer_power(beta2, t)).sqrt() as f32,
            epsilon: epsilon as f32,
            weight_decay: if decays { weight_decay as f32 } else { 0.0 },
        }
    }

    #[inline(always)]
    fn at(&self, p: f32, m: f32, v: f32) -> f32 {
        m / self.mean_correction / (v.sqrt() / self.root_correction + self.epsilon) + self.weight_decay * p
    }
}

/// The pass of the first half of a step over some elements: moments, and the sums of squares of parameters and of their update, in an
/// order that depends on the length alone.
struct Prepare<'a> {
    decay: Decay,
    update: Update,
    params: &'a [f32],
    grads: &'a [f32],
    mean: &'a mut [f32],
    square: &'a mut [f32],
}

impl Kernel for Prepare<'_> {
    type Output = [f64; 2];

    #[inline(always)]
    fn run(self) -> [f64; 2] {
        let Self { decay, update, params, grads, mean, square } = self;
        let mut sums = [[0.0; LANES]; 2];
        let mut updates = [0.0; BLOCK];
        let moments = mean.chunks_mut(BLOCK).zip(square.chunks_mut(BLOCK));
        for ((params, grads), (mean, square)) in params.chunks(BLOCK).zip(grads.chunks(BLOCK)).zip(moments) {
            for ((((u, p), g), m), v) in updates.iter_mut().zip(params).zip(grads).zip(mean).zip(square) {
                decay.advance_one(*g, m, v);
                *u = update.at(*p, *m, *v);
            }
            let updates = updates.get(..params.len()).unwrap_or(&updates);
            add_squares(&mut sums[0], params);
            add_squares(&mut sums[1], updates);
        }
        sums.map(|lanes| lanes.iter().sum())
    }
}

/// The pass of the second half of a step over some elements.
struct Apply<'a> {
    update: Update,
    step_size: f32,
    params: &'a mut [f32],
    mean: &'a [f32],
    square: &'a [f32],
}

impl Kernel for Apply<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { update, step_size, params, mean, square } = self;
        for ((p, m), v) in params.iter_mut().zip(mean).zip(square) {
            *p -= step_size * update.at(*p, *m, *v);
        }
    }
}

#[cfg(test)]
mod tests;
