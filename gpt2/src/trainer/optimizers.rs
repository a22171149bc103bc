//! A rank's optimizers, where the parameters are that they update: in host memory, or on the device.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;
use comm_core::{Communicator, Error};

use super::{Session, TrainConfig, TrainError};
use crate::cross_entropy::Placement;
use crate::devices;
use crate::flat::{DeviceCollectives, Flat};
use crate::optim::{
    DeviceNorms, DeviceOptimizer, OptimError, Optimizer, OptimizerConfig, sum_of_squares, sum_of_squares_on_device,
};
use crate::precision::Precision;
use crate::segments::SegmentInfo;
use crate::strategy::{Clock, Comms, StrategyKind};

/// One for the owned range of each segment.
pub(super) enum Optimizers {
    Host(Vec<Optimizer>),
    Device(Vec<DeviceOptimizer>),
}

/// Where a rank's gradients and masters are.
#[derive(Clone)]
pub(super) struct Places {
    /// What keeps gradients from staying in the device's memory although a communicator works on that, where it may not be wanted.
    pub(super) staged: Option<String>,
    /// Whether the strategy gets gradients on the device.
    pub(super) gradients_on_device: bool,
    /// Whether masters and optimizers are there. Else what the strategy returns is read back.
    pub(super) masters_on_device: bool,
}

impl Places {
    /// Gradients stay on the device that computes until the strategy packs them. What comes back from a communicator in device memory, and
    /// what nobody has to average, is applied there as well; what travelled as bytes is in host memory anyway.
    ///
    /// # Errors
    /// `InvalidArgument` where a communicator works on the memory of another device.
    pub(super) fn new(config: &TrainConfig, comms: &Comms, session: &Session, device: &Device) -> Result<Self, Error> {
        let TrainConfig { strategy, precision, .. } = *config;
        let node = comms.node.as_ref().filter(|_| strategy == StrategyKind::Hierarchical);
        check_device(&*comms.world, comms.native.as_ref(), device)?;
        if let Some(node) = node {
            check_device(&**node, comms.node_native.as_ref(), device)?;
        }
        let is_lent = comms.lender(strategy).is_some();
        let gradients_on_device = is_lent || Placement::of(device) == Placement::Device;
        // Other devices than CUDA's may round weights of 16 bits otherwise than the processor, which has to find the same.
        let rounds_alike = precision == Precision::F32 || devices::cuda_ordinal(device).is_some();
        let stays = is_lent || (strategy == StrategyKind::Single && rounds_alike);
        let masters_on_device = gradients_on_device && stays;
        Ok(Places { staged: staged(comms, session, node), gradients_on_device, masters_on_device })
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
            Optimizers::Device(all) => all.push(DeviceOptimizer::new(config, segment, range)?),
        }
        Ok(())
    }

    /// The fewest and the most steps taken, over segments.
    pub(super) fn steps(&self) -> (u64, u64) {
        let steps: Vec<u64> = match self {
            Optimizers::Host(all) => all.iter().map(Optimizer::steps).collect(),
            Optimizers::Device(all) => all.iter().map(DeviceOptimizer::steps).collect(),
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

    /// A whole step on `masters` of each, where they need no norms of tensors. Gradients are first multiplied by `factor`.
    pub(super) fn step(
        &mut self,
        masters: &mut [Flat],
        grads: Vec<Flat>,
        (learning_rate, factor): (f64, f32),
    ) -> Result<(), TrainError> {
        let vectors = masters.iter_mut().zip(grads);
        match self {
            Optimizers::Host(all) => {
                for (optimizer, (master, grads)) in all.iter_mut().zip(vectors) {
                    optimizer.step(master.host_mut()?, grads.host()?, learning_rate, factor)?;
                }
            }
            Optimizers::Device(all) => {
                for (optimizer, (master, grads)) in all.iter_mut().zip(vectors) {
                    let DeviceOptimizer::AdamW(adamw) = optimizer else { return Err(other_kind()) };
                    let params = std::mem::take(master).into_tensor()?;
                    let updated = adamw.step(params, grads.pieces()?, learning_rate, factor)?;
                    *master = Flat::Device(updated.into_iter().collect());
                }
            }
        }
        Ok(())
    }

    /// The first half of a step that needs norms of tensors: for each segment and each of its tensors the sums of squares of what this
    /// rank holds of its parameters and of its update. From the device they come in one transfer.
    pub(super) fn prepare(
        &mut self,
        masters: &[Flat],
        grads: Vec<Flat>,
        factor: f32,
    ) -> Result<Vec<Vec<[f64; 2]>>, TrainError> {
        let vectors = masters.iter().zip(grads);
        match self {
            Optimizers::Host(all) => {
                let prepare = |(optimizer, (master, grads)): (&mut Optimizer, (&Flat, Flat))| {
                    Ok(optimizer.prepare(master.host()?, grads.host()?, factor)?.unwrap_or_default())
                };
                all.iter_mut().zip(vectors).map(prepare).collect()
            }
            Optimizers::Device(all) => {
                let prepare = |(optimizer, (master, grads)): (&mut DeviceOptimizer, (&Flat, Flat))| {
                    let DeviceOptimizer::Lamb(lamb) = optimizer else { return Err(other_kind()) };
                    Ok(lamb.prepare(master.clone().into_tensor()?, grads.into_tensor()?, factor)?)
                };
                let norms = all.iter_mut().zip(vectors).map(prepare).collect::<Result<Vec<_>, TrainError>>()?;
                Ok(DeviceNorms::read(norms)?)
            }
        }
    }

    /// The second half, with the norms of whole tensors.
    pub(super) fn apply(
        &mut self,
        masters: &mut [Flat],
        learning_rate: f64,
        norms: &[Vec<[f64; 2]>],
    ) -> Result<(), TrainError> {
        let vectors = masters.iter_mut().zip(norms);
        match self {
            Optimizers::Host(all) => {
                for (optimizer, (master, norms)) in all.iter_mut().zip(vectors) {
                    optimizer.apply(master.host_mut()?, learning_rate, norms)?;
                }
            }
            Optimizers::Device(all) => {
                for (optimizer, (master, norms)) in all.iter_mut().zip(vectors) {
                    let DeviceOptimizer::Lamb(lamb) = optimizer else { return Err(other_kind()) };
                    let updated = lamb.apply(std::mem::take(master).into_tensor()?, learning_rate, norms)?;
                    *master = Flat::Device(updated.into_iter().collect());
                }
            }
        }
        Ok(())
    }
}

fn other_kind() -> TrainError {
    Error::Internal("an optimizer on the device was asked for a step of the other kind".into()).into()
}

/// What lends memory to `comm` has to lend that of the model's device.
fn check_device(
    comm: &dyn Communicator,
    native: Option<&Arc<dyn DeviceCollectives>>,
    device: &Device,
) -> Result<(), Error> {
    match native {
        Some(native) if *native.device() != device.clone().without_autodiff() => Err(Error::invalid(format!(
            "{} works on the memory of {:?}, and the model is on {device:?}",
            comm.name(),
            native.device()
        ))),
        _ => Ok(()),
    }
}

/// Why gradients are not kept on the device although a communicator works on its memory, which is seldom what was wanted. Whoever has
/// bytes moved between nodes alone has chosen so: no more than shards pass through host memory then.
fn staged(comms: &Comms, session: &Session, node: Option<&Arc<dyn Communicator>>) -> Option<String> {
    let world = (&*comms.world, comms.native.is_some());
    let levels = match node {
        Some(node) => {
            vec![(&**node, comms.node_native.is_some(), " inside a node"), (world.0, world.1, " between nodes")]
        }
        None => vec![(world.0, world.1, "")],
    };
    let of_node = session.node.as_ref().filter(|_| node.is_some()).map(|node| &node.properties);
    let properties = of_node.into_iter().chain([&session.properties]);
    let mut works_on_device = levels.iter().zip(properties).filter(|(_, known)| known.cuda_device.is_some());
    if let Some(((comm, _, place), _)) = works_on_device.find(|((_, is_lent, _), _)| !is_lent) {
        return Some(format!(
            "gradients travel through host memory{place}: {} works on CUDA devices, and the model is on another",
            comm.name()
        ));
    }
    match levels[..] {
        [(inside, false, _), (between, true, _)] => Some(format!(
            "gradients are read back from the device, and the optimizer runs on the host, because inside a node {} moves bytes; for {} \
             between nodes a shard of each bucket is uploaded and read back again; without --node-transport all of it stays on the device",
            inside.name(),
            between.name()
        )),
        _ => None,
    }
}
