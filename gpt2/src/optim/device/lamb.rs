//! LAMB as tensor operations.

use std::ops::Range;

use burn::tensor::{Device, Tensor};

use super::super::lamb::{Piece, Update, check_norms, pieces};
use super::{DeviceMoments, read, scaled};
use crate::optim::moments::Decay;
use crate::optim::{AdamWConfig, OptimError};
use crate::segments::SegmentInfo;

/// [`Lamb`](super::super::Lamb) for one contiguous range of a segment, with its state on the device of the parameters: the same
/// operations on the same scalars in the same order, but for sums of squares, which the device takes in f32 and in any order.
///
/// A step has the same two phases. What leaves the device between them is two numbers for each tensor that has a trust ratio: those of
/// other ranks are to be added, or where all compute the same one rank's are to be taken by all, since the last bits of a device's sums
/// differ from rank to rank; and a run whose norms are not finite is to end.
#[derive(Debug)]
pub struct DeviceLamb {
    config: AdamWConfig,
    moments: DeviceMoments,
    /// The paths of all tensors of the segment.
    tensors: Vec<String>,
    pieces: Vec<Piece>,
    /// Whether the moments are a step ahead of the parameters.
    prepared: bool,
}

impl DeviceLamb {
    /// An optimizer for the elements `range` of `segment` (the whole of it: `0..segment.len`; an empty range is fine).
    ///
    /// # Errors
    /// [`OptimError::RangeOutsideSegment`].
    pub fn new(config: AdamWConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<Self, OptimError> {
        let moments = DeviceMoments::new(segment, &range)?;
        let tensors = segment.params.iter().map(|info| info.path.clone()).collect();
        Ok(Self { config, moments, tensors, pieces: pieces(segment, &range), prepared: false })
    }

    /// Steps taken so far; a step counts from its [`prepare`](Self::prepare) on.
    pub fn steps(&self) -> u64 {
        self.moments.steps
    }

    /// The state for a checkpoint, in host memory: first and second moments and the number of steps. To be taken between steps, not between
    /// [`prepare`](Self::prepare) and [`apply`](Self::apply).
    ///
    /// # Errors
    /// [`OptimError::Device`].
    pub fn state(&self) -> Result<([Vec<f32>; 2], u64), OptimError> {
        self.moments.state()
    }

    /// Continues from a saved [`state`](Self::state), of a shard of the same range, on `device`.
    ///
    /// # Errors
    /// [`OptimError::Length`] if a moment does not have the shard's length; nothing has changed then.
    pub fn restore(&mut self, means: [Vec<f32>; 2], steps: u64, device: &Device) -> Result<(), OptimError> {
        self.moments.restore(means, steps, device)
    }

    /// The first half of a step: see [`Lamb::prepare`](super::super::Lamb::prepare). `params` and `grads` are the shard's elements in f32
    /// on one device, or `None` where there are none.
    ///
    /// # Errors
    /// [`OptimError::Length`] if a tensor does not have the shard's length, [`OptimError::AlreadyPrepared`]; nothing has changed then.
    pub fn prepare(
        &mut self,
        params: Option<Tensor<1>>,
        grads: Option<Tensor<1>>,
        grad_factor: f32,
    ) -> Result<DeviceNorms, OptimError> {
        if self.prepared {
            return Err(OptimError::AlreadyPrepared { segment: self.moments.segment.clone() });
        }
        self.moments.check("the parameter tensor", params.as_ref())?;
        self.moments.check("the gradient tensor", grads.as_ref())?;
        self.moments.steps += 1;
        self.prepared = true;
        let mut norms = DeviceNorms { tensors: self.tensors.len(), of: Vec::new(), sums: Vec::new() };
        let Some((params, grads)) = params.zip(grads) else { return Ok(norms) };
        let means = self.moments.advance(grads, Decay::of(&self.config, grad_factor));
        let update = self.update(params.clone(), means);
        for Piece { tensor, range, .. } in self.pieces.iter().filter(|piece| piece.decay) {
            norms.of.push(*tensor);
            norms.sums.extend([&params, &update].map(|whole| {
                let piece = whole.clone().narrow(0, range.start, range.len());
                (piece.clone() * piece).sum()
            }));
        }
        Ok(norms)
    }

    /// The second half of a step: see [`Lamb::apply`](super::super::Lamb::apply). Returns the new parameters.
    ///
    /// # Errors
    /// [`OptimError::NotPrepared`]; [`OptimError::Length`] if `params` does not have the shard's length or `norms` that of the
    /// segment's list of tensors; [`OptimError::Norm`] if a sum is negative or not finite. The step remains prepared then.
    pub fn apply(
        &mut self,
        params: Option<Tensor<1>>,
        learning_rate: f64,
        norms: &[[f64; 2]],
    ) -> Result<Option<Tensor<1>>, OptimError> {
        if !self.prepared {
            return Err(OptimError::NotPrepared { segment: self.moments.segment.clone() });
        }
        self.moments.check("the parameter tensor", params.as_ref())?;
        check_norms(&self.moments.segment, &self.tensors, norms)?;
        self.prepared = false;
        let Some((params, means)) = params.zip(self.moments.means.clone()) else { return Ok(None) };
        let update = self.update(params.clone(), means);
        let step_size = |piece: &Piece| (piece.range.len(), piece.step_size(learning_rate, norms));
        Ok(Some(params - scaled(update, self.pieces.iter().map(step_size))))
    }

    /// The current step's update, computed a second time rather than kept between the phases.
    fn update(&self, params: Tensor<1>, [mean, square]: [Tensor<1>; 2]) -> Tensor<1> {
        let of = |decays: bool| Update::of(&self.config, self.moments.steps, decays);
        let Update { mean_correction, root_correction, epsilon, .. } = of(false);
        let denominator = square.sqrt().div_scalar(root_correction).add_scalar(epsilon);
        let update = mean.div_scalar(mean_correction) / denominator;
        update + scaled(params, self.pieces.iter().map(|piece| (piece.range.len(), of(piece.decay).weight_decay)))
    }
}

/// The sums of squares of a shard, on the device still.
#[derive(Debug)]
pub struct DeviceNorms {
    /// Number of tensors of the segment.
    tensors: usize,
    /// The tensors that have a trust ratio, of those that the shard holds something of.
    of: Vec<usize>,
    /// Of each of these, that of its parameters and that of its update.
    sums: Vec<Tensor<1>>,
}

impl DeviceNorms {
    /// Those of several shards, in one transfer: for each shard and each tensor of its segment as
    /// [`Lamb::prepare`](super::super::Lamb::prepare) returns them, to f32's precision, with zeros for tensors that have no trust ratio,
    /// since nothing depends on theirs. Not finite where f32 cannot hold a square.
    ///
    /// # Errors
    /// [`OptimError::Device`].
    pub fn read(shards: Vec<DeviceNorms>) -> Result<Vec<Vec<[f64; 2]>>, OptimError> {
        let mut norms: Vec<Vec<[f64; 2]>> = shards.iter().map(|shard| vec![[0.0; 2]; shard.tensors]).collect();
        let places: Vec<(usize, usize)> =
            shards.iter().enumerate().flat_map(|(shard, norms)| norms.of.iter().map(move |of| (shard, *of))).collect();
        let sums: Vec<Tensor<1>> = shards.into_iter().flat_map(|shard| shard.sums).collect();
        if sums.is_empty() {
            return Ok(norms);
        }
        for ((shard, tensor), pair) in places.into_iter().zip(read(sums)?.chunks_exact(2)) {
            norms[shard][tensor] = [pair[0], pair[1]];
        }
        Ok(norms)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::tensor;
    use super::*;
    use crate::config::Preset;
    use crate::init;
    use crate::optim::{Lamb, OptimizerConfig, OptimizerKind};
    use crate::segments::layout;

    fn config() -> AdamWConfig {
        OptimizerConfig::of(OptimizerKind::Lamb).constants()
    }

    fn block() -> SegmentInfo {
        layout(&Preset::Micro.config(61)).unwrap().swap_remove(1)
    }

    /// The norms of all shards of a segment together.
    fn added(norms: &[Vec<[f64; 2]>]) -> Vec<[f64; 2]> {
        let mut sums = vec![[0.0; 2]; norms[0].len()];
        for shard in norms {
            sums.iter_mut().zip(shard).for_each(|(sum, part)| *sum = [sum[0] + part[0], sum[1] + part[1]]);
        }
        sums
    }

    #[test]
    fn steps_on_a_device_are_those_of_the_host_in_any_sharding() {
        let segment = block();
        let n = segment.len;
        for cuts in [vec![0, n], vec![0, 5, 5, n / 2 + 3, n]] {
            let ranges: Vec<Range<usize>> = cuts.windows(2).map(|ends| ends[0]..ends[1]).collect();
            let start = init::normal(1, "params", n, 0.5);
            let mut host = start.clone();
            let mut device: Vec<_> = ranges.iter().map(|range| tensor(&start[range.clone()])).collect();
            let mut on_host = Lamb::new(config(), &segment, 0..n).unwrap();
            let mut on_device: Vec<_> =
                ranges.iter().map(|range| DeviceLamb::new(config(), &segment, range.clone()).unwrap()).collect();
            for step in 0..4 {
                let grads = init::normal(step, "grads", n, 0.1);
                on_host.step(&mut host, &grads, 1e-2, 0.7).unwrap();
                let prepared = on_device.iter_mut().zip(&device).zip(&ranges).map(|((shard, params), range)| {
                    shard.prepare(params.clone(), tensor(&grads[range.clone()]), 0.7).unwrap()
                });
                let norms = added(&DeviceNorms::read(prepared.collect()).unwrap());
                for (shard, params) in on_device.iter_mut().zip(&mut device) {
                    *params = shard.apply(params.take(), 1e-2, &norms).unwrap();
                }
            }
            let read = |params: Tensor<1>| params.try_into_vec_as::<f32>().unwrap();
            let found: Vec<f32> = device.into_iter().flatten().flat_map(read).collect();
            assert_eq!(found.len(), host.len());
            for (a, b) in found.iter().zip(&host) {
                assert!((a - b).abs() <= 8.0 * f32::EPSILON * b.abs().max(0.1), "{a} {b}");
            }
            assert!(on_device.iter().all(|shard| shard.steps() == 4));
        }
    }

    #[test]
    fn what_cannot_be_a_step_changes_nothing() {
        let segment = block();
        assert!(DeviceLamb::new(config(), &segment, 0..segment.len + 1).is_err());
        let mut optimizer = DeviceLamb::new(config(), &segment, 0..8).unwrap();
        let (params, grads) = (|| tensor(&[0.5; 8]), || tensor(&[0.1; 8]));
        let norms = vec![[1.0; 2]; segment.params.len()];
        let error = optimizer.apply(params(), 0.1, &norms).unwrap_err();
        assert!(matches!(error, OptimError::NotPrepared { .. }), "{error}");
        let error = optimizer.prepare(params(), tensor(&[0.1; 7]), 1.0).unwrap_err();
        assert!(matches!(error, OptimError::Length { len: 7, expected: 8, .. }), "{error}");
        assert_eq!(optimizer.steps(), 0);
        optimizer.prepare(params(), grads(), 1.0).unwrap();
        let error = optimizer.prepare(params(), grads(), 1.0).unwrap_err();
        assert!(matches!(error, OptimError::AlreadyPrepared { .. }), "{error}");
        let error = optimizer.apply(params(), 0.1, &norms[1..]).unwrap_err();
        assert!(matches!(error, OptimError::Length { .. }), "{error}");
        let error = optimizer.apply(params(), 0.1, &vec![[f64::INFINITY, 1.0]; norms.len()]).unwrap_err();
        assert!(matches!(error, OptimError::Norm { what: "parameters", .. }), "{error}");
        assert!(optimizer.apply(params(), 0.1, &norms).unwrap().is_some());
        assert_eq!(optimizer.steps(), 1);
    }
}
