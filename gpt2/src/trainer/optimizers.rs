//! A rank's optimizers, where the parameters are that they update: in host memory, or on the device.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;
use comm_core::Error;

use super::{Session, TrainConfig, TrainError};
use crate::cross_entropy::Placement;
use crate::devices;
use crate::flat::{DeviceCollectives, Flat};
use crate::memory::{self, Category};
use crate::optim::{
    DeviceAdamW, OptimError, Optimizer, OptimizerConfig, OptimizerKind, sum_of_squares, sum_of_squares_on_device,
};
use crate::precision::Precision;
use crate::segments::{SegmentInfo, SegmentedModel};
use crate::strategy::{Activity, Clock, StrategyKind};

/// One for the owned range of each segment.
pub(super) enum Optimizers {
    Host(Vec<Optimizer>),
    Device(Vec<DeviceAdamW>),
}

/// Where a rank's gradients and masters are.
#[derive(Clone)]
pub(super) struct Places {
    /// Lends the device's memory to the communicator.
    pub(super) native: Option<Arc<dyn DeviceCollectives>>,
    /// What keeps gradients from staying in the device's memory although the communicator works on that.
    pub(super) staged: Option<String>,
    /// Whether the strategy gets gradients on the device.
    pub(super) gradients_on_device: bool,
    /// Whether masters and optimizers are there. Else what the strategy returns is read back.
    pub(super) masters_on_device: bool,
}

impl Places {
    /// Gradients stay on the device that computes until the strategy packs them. What a communicator in device memory averages, and what
    /// nobody has to, is applied there as well; what travels as bytes is in host memory anyway. A strategy or an optimizer that works in
    /// host memory only gets gradients there, whatever the communicator.
    ///
    /// # Errors
    /// `InvalidArgument` where the communicator works on the memory of another device.
    pub(super) fn new(config: &TrainConfig, session: &Session, device: &Device) -> Result<Self, Error> {
        let TrainConfig { strategy, optimizer: OptimizerConfig { kind: optimizer, .. }, .. } = *config;
        let works_there = optimizer == OptimizerKind::AdamW;
        let mut native = session.native.clone();
        if let Some(native) = &native
            && *native.device() != device.clone().without_autodiff()
        {
            return Err(Error::invalid(format!(
                "{} works on the memory of {:?}, and the model is on {device:?}",
                session.comm.name(),
                native.device()
            )));
        }
        let mut staged = None;
        if native.is_some() && !(works_there && strategy.works_in_device_memory()) {
            let who = if works_there { format!("strategy {strategy}") } else { format!("optimizer {optimizer}") };
            staged = Some(format!(
                "gradients travel through host memory although {} works on the device's: the {who} needs them there",
                session.comm.name()
            ));
            native = None;
        }
        let gradients_on_device = native.is_some() || Placement::of(device) == Placement::Device;
        if session.comm.name() == "nccl" && native.is_none() && staged.is_none() {
            staged = Some(
                "gradients travel through host memory: NCCL works on CUDA devices, and the model is on another".into(),
            );
        }
        // Other devices than CUDA's may round weights of 16 bits otherwise than the processor, which has to find the same.
        let rounds_alike = config.precision == Precision::F32 || devices::cuda_ordinal(device).is_some();
        let stays = native.is_some() || (strategy == StrategyKind::Single && rounds_alike);
        let masters_on_device = gradients_on_device && stays && works_there;
        Ok(Places { native, staged, gradients_on_device, masters_on_device })
    }

    /// The masters that begin with these values.
    pub(super) fn masters(&self, initial: &[f32], device: &Device) -> Flat {
        if self.masters_on_device { Flat::on_device(initial, device) } else { Flat::Host(initial.to_vec()) }
    }
}

impl Optimizers {
    pub(super) fn none(places: &Places) -> Self {
        if places.masters_on_device { Optimizers::Device(Vec::new()) } else { Optimizers::Host(Vec::new()) }
    }

    /// Adds that of the next segment.
    pub(super) fn push(
        &mut self,
        config: OptimizerConfig,
        segment: &SegmentInfo,
        range: Range<usize>,
    ) -> Result<(), OptimError> {
        match self {
            Optimizers::Host(all) => all.push(Optimizer::new(config, segment, range)?),
            Optimizers::Device(all) => {
                config.validate()?;
                all.push(DeviceAdamW::new(config.constants(), segment, range)?);
            }
        }
        Ok(())
    }

    /// The fewest and the most steps taken, over segments.
    pub(super) fn steps(&self) -> (u64, u64) {
        let steps: Vec<u64> = match self {
            Optimizers::Host(all) => all.iter().map(Optimizer::steps).collect(),
            Optimizers::Device(all) => all.iter().map(DeviceAdamW::steps).collect(),
        };
        (steps.iter().min().copied().unwrap_or(0), steps.iter().max().copied().unwrap_or(0))
    }

    /// Gradients where the optimizers are: read back, if that is in host memory.
    pub(super) fn fetch(&self, grads: Vec<Flat>, clock: &mut Clock) -> Result<Vec<Flat>, Error> {
        match self {
            Optimizers::Device(_) => Ok(grads),
            Optimizers::Host(_) => grads.into_iter().map(|grads| Ok(Flat::Host(clock.fetch(grads)?))).collect(),
        }
    }

    /// Sum of squares of all gradients, which are scaled by the inverse of `unscale`.
    pub(super) fn sum_of_squares(&self, grads: &[Flat], unscale: f32) -> Result<f64, TrainError> {
        match self {
            Optimizers::Host(_) => {
                let squares = grads.iter().map(|grads| grads.host().map(|grads| sum_of_squares(grads)));
                Ok(squares.sum::<Result<f64, Error>>()?)
            }
            Optimizers::Device(_) => {
                // Piece by piece: joined, they would all be there twice.
                let pieces = grads.iter().map(Flat::pieces).collect::<Result<Vec<_>, Error>>()?;
                Ok(sum_of_squares_on_device(pieces.concat(), unscale)?)
            }
        }
    }
}

/// Runs optimizers on the device.
pub(super) fn step_on_device(
    optimizers: &mut [DeviceAdamW],
    masters: &mut [Flat],
    grads: Vec<Flat>,
    (learning_rate, factor): (f64, f32),
    model: &SegmentedModel,
    clock: &mut Clock,
) -> Result<(), TrainError> {
    let _scope = memory::scope(Category::Optimizer);
    clock.spend(Activity::Optimizer, || {
        for ((optimizer, master), grads) in optimizers.iter_mut().zip(masters).zip(grads) {
            let params = std::mem::take(master).into_tensor()?;
            let updated = optimizer.step(params, grads.into_tensor()?, learning_rate, factor)?;
            *master = Flat::Device(updated.into_iter().collect());
        }
        // So that the time is counted here.
        Ok(model.wait()?)
    })
}
