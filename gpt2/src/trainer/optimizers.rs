//! A rank's optimizers, where the parameters are that they update: in host memory, or on the device.

mod sgd;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Device;
use comm_core::{Communicator, Error};

use super::save::Means;
use super::{Session, TrainConfig, TrainError};
use crate::devices::{self, Placement};
use crate::flat::{DeviceCollectives, Flat};
use crate::memory::Category;
use crate::optim::{
    DeviceAdamW, DeviceLamb, DeviceNorms, OptimError, Optimizer, OptimizerConfig, OptimizerKind, sum_of_squares,
    sum_of_squares_on_device,
};
use crate::precision::Precision;
use crate::record::{self, Activity};
use crate::segments::SegmentInfo;
use crate::strategy::{Comms, StrategyKind};
use sgd::SgdOnDevice;

/// Makes sums over what this rank's optimizers own those of whole tensors.
pub(super) type AddUp<'a> = &'a mut dyn FnMut(&mut [f64]) -> Result<(), TrainError>;

/// Updates a rank's masters, wherever they are: one optimizer for the owned range of each segment.
pub(super) trait MasterOptimizer {
    /// Adds that of the next segment.
    fn push(&mut self, config: OptimizerConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<(), OptimError>;

    /// The steps taken, over segments.
    fn steps(&self) -> Vec<u64>;

    /// The moments of a segment's optimizer.
    fn state(&self, segment: usize) -> Result<Means<'_>, TrainError>;

    /// Has a segment's optimizer go on with these moments, after so many steps, on `device` if it is there.
    fn restore(&mut self, segment: usize, means: [Vec<f32>; 2], steps: u64, device: &Device) -> Result<(), TrainError>;

    /// Gradients where the masters are: read back, if that is in host memory.
    fn fetch(&self, grads: Vec<Flat>) -> Result<Vec<Flat>, Error> {
        Ok(grads)
    }

    /// Sum of squares of all gradients, which are scaled by the inverse of `unscale`.
    fn sum_of_squares(&self, grads: &[Flat], unscale: f32) -> Result<f64, TrainError>;

    /// A step on the `masters` of these segments, of which `grads` are. Gradients are first multiplied by the second of the rates. Where it
    /// needs the norms of whole tensors, `add_up` gets the sums of squares of this rank's parts.
    fn step(
        &mut self,
        segments: &[usize],
        masters: &mut [Flat],
        grads: Vec<Flat>,
        rates: (f64, f32),
        add_up: AddUp<'_>,
    ) -> Result<(), TrainError>;
}

/// In host memory, of any kind.
#[derive(Default)]
struct OnHost(Vec<Optimizer>);

/// AdamW on the device.
#[derive(Default)]
struct AdamWOnDevice(Vec<DeviceAdamW>);

/// LAMB on the device.
#[derive(Default)]
struct LambOnDevice(Vec<DeviceLamb>);

/// The optimizer for masters in these places, of no segment yet.
pub(super) fn optimizer(kind: OptimizerKind, places: &MemoryPlacement) -> Box<dyn MasterOptimizer> {
    match (places.masters_on_device, kind) {
        (false, _) => Box::new(OnHost::default()),
        (true, OptimizerKind::AdamW) => Box::new(AdamWOnDevice::default()),
        (true, OptimizerKind::Lamb) => Box::new(LambOnDevice::default()),
        (true, OptimizerKind::Sgd) => Box::new(SgdOnDevice::default()),
    }
}

impl MasterOptimizer for OnHost {
    fn push(&mut self, config: OptimizerConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<(), OptimError> {
        self.0.push(Optimizer::new(config, segment, range)?);
        Ok(())
    }

    fn steps(&self) -> Vec<u64> {
        self.0.iter().map(Optimizer::steps).collect()
    }

    fn state(&self, segment: usize) -> Result<Means<'_>, TrainError> {
        let (mean, square, _) = self.0[segment].state();
        Ok([Cow::Borrowed(mean), Cow::Borrowed(square)])
    }

    fn restore(&mut self, segment: usize, means: [Vec<f32>; 2], steps: u64, _: &Device) -> Result<(), TrainError> {
        let [mean, square] = means;
        Ok(self.0[segment].restore(mean, square, steps)?)
    }

    fn fetch(&self, grads: Vec<Flat>) -> Result<Vec<Flat>, Error> {
        let fetch = |grads| match grads {
            Flat::Host(_) | Flat::Part(..) => Ok(grads),
            // The device has been waited for at the end of the pass.
            Flat::Device(_) => {
                let read = || grads.into_host().map(Flat::Host);
                record::charged(Activity::Pack, Category::Gradients, read)
            }
        };
        grads.into_iter().map(fetch).collect()
    }

    fn sum_of_squares(&self, grads: &[Flat], _unscale: f32) -> Result<f64, TrainError> {
        let squares = grads.iter().map(|grads| grads.host().map(sum_of_squares));
        Ok(squares.sum::<Result<f64, Error>>()?)
    }

    fn step(
        &mut self,
        segments: &[usize],
        masters: &mut [Flat],
        grads: Vec<Flat>,
        (learning_rate, factor): (f64, f32),
        add_up: AddUp<'_>,
    ) -> Result<(), TrainError> {
        let mut norms = Vec::new();
        for (segment, grads) in segments.iter().zip(grads) {
            let (optimizer, master) = (&mut self.0[*segment], &mut masters[*segment]);
            match optimizer.prepare(master.host()?, grads.host()?, factor)? {
                Some(of_segment) => norms.push(of_segment),
                None => optimizer.step(master.host_mut()?, grads.host()?, learning_rate, factor)?,
            }
        }
        whole_tensors(&mut norms, add_up)?;
        for (segment, norms) in segments.iter().zip(&norms) {
            self.0[*segment].apply(masters[*segment].host_mut()?, learning_rate, norms)?;
        }
        Ok(())
    }
}

impl MasterOptimizer for AdamWOnDevice {
    fn push(&mut self, config: OptimizerConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<(), OptimError> {
        config.validate()?;
        self.0.push(DeviceAdamW::new(config.constants(), segment, range)?);
        Ok(())
    }

    fn steps(&self) -> Vec<u64> {
        self.0.iter().map(DeviceAdamW::steps).collect()
    }

    fn state(&self, segment: usize) -> Result<Means<'_>, TrainError> {
        Ok(self.0[segment].state()?.0.map(Cow::Owned))
    }

    fn restore(&mut self, segment: usize, means: [Vec<f32>; 2], steps: u64, device: &Device) -> Result<(), TrainError> {
        Ok(self.0[segment].restore(means, steps, device)?)
    }

    fn sum_of_squares(&self, grads: &[Flat], unscale: f32) -> Result<f64, TrainError> {
        squares_on_device(grads, unscale)
    }

    fn step(
        &mut self,
        segments: &[usize],
        masters: &mut [Flat],
        grads: Vec<Flat>,
        (learning_rate, factor): (f64, f32),
        _add_up: AddUp<'_>,
    ) -> Result<(), TrainError> {
        for (segment, grads) in segments.iter().zip(grads) {
            let params = std::mem::take(&mut masters[*segment]).into_tensor()?;
            let updated = self.0[*segment].step(params, grads.pieces()?, learning_rate, factor)?;
            masters[*segment] = Flat::Device(updated.into_iter().collect());
        }
        Ok(())
    }
}

impl MasterOptimizer for LambOnDevice {
    fn push(&mut self, config: OptimizerConfig, segment: &SegmentInfo, range: Range<usize>) -> Result<(), OptimError> {
        config.validate()?;
        self.0.push(DeviceLamb::new(config.constants(), segment, range)?);
        Ok(())
    }

    fn steps(&self) -> Vec<u64> {
        self.0.iter().map(DeviceLamb::steps).collect()
    }

    fn state(&self, segment: usize) -> Result<Means<'_>, TrainError> {
        Ok(self.0[segment].state()?.0.map(Cow::Owned))
    }

    fn restore(&mut self, segment: usize, means: [Vec<f32>; 2], steps: u64, device: &Device) -> Result<(), TrainError> {
        Ok(self.0[segment].restore(means, steps, device)?)
    }

    fn sum_of_squares(&self, grads: &[Flat], unscale: f32) -> Result<f64, TrainError> {
        squares_on_device(grads, unscale)
    }

    fn step(
        &mut self,
        segments: &[usize],
        masters: &mut [Flat],
        grads: Vec<Flat>,
        (learning_rate, factor): (f64, f32),
        add_up: AddUp<'_>,
    ) -> Result<(), TrainError> {
        let mut norms = Vec::with_capacity(segments.len());
        for (segment, grads) in segments.iter().zip(grads) {
            let params = masters[*segment].clone().into_tensor()?;
            norms.push(self.0[*segment].prepare(params, grads.into_tensor()?, factor)?);
        }
        // In one transfer.
        let mut norms = DeviceNorms::read(norms)?;
        whole_tensors(&mut norms, add_up)?;
        for (segment, norms) in segments.iter().zip(&norms) {
            let params = std::mem::take(&mut masters[*segment]).into_tensor()?;
            let updated = self.0[*segment].apply(params, learning_rate, norms)?;
            masters[*segment] = Flat::Device(updated.into_iter().collect());
        }
        Ok(())
    }
}

/// Has the sums of squares of each segment's tensors added up, of parameters and of their update.
fn whole_tensors(norms: &mut [Vec<[f64; 2]>], add_up: AddUp<'_>) -> Result<(), TrainError> {
    if norms.is_empty() {
        return Ok(());
    }
    let mut flat: Vec<f64> = norms.iter().flatten().flatten().copied().collect();
    add_up(&mut flat)?;
    for (pair, whole) in norms.iter_mut().flatten().zip(flat.chunks_exact(2)) {
        pair.copy_from_slice(whole);
    }
    Ok(())
}

fn squares_on_device(grads: &[Flat], unscale: f32) -> Result<f64, TrainError> {
    // Piece by piece: joined, they would all be there twice.
    let pieces = grads.iter().map(Flat::pieces).collect::<Result<Vec<_>, Error>>()?;
    Ok(sum_of_squares_on_device(pieces.concat(), unscale)?)
}

/// Where a rank's gradients and masters are.
#[derive(Clone)]
pub(super) struct MemoryPlacement {
    /// What keeps gradients from staying in the device's memory although a communicator works on that, where it may not be wanted.
    pub(super) staged: Option<String>,
    /// Whether the strategy gets gradients on the device.
    pub(super) gradients_on_device: bool,
    /// Whether masters and optimizers are there. Else what the strategy returns is read back.
    pub(super) masters_on_device: bool,
}

impl MemoryPlacement {
    /// Gradients stay on the device that computes until the strategy packs them. What comes back from a communicator in device memory, and
    /// what nobody has to average, is applied there as well; what travelled as bytes is in host memory anyway.
    ///
    /// # Errors
    /// `InvalidArgument` where a communicator works on the memory of another device.
    pub(super) fn new(config: &TrainConfig, comms: &Comms, session: &Session, device: &Device) -> Result<Self, Error> {
        let TrainConfig { strategy, precision, .. } = *config;
        let node = comms.node.as_ref().filter(|_| strategy.spec().tells_nodes_apart);
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
        Ok(MemoryPlacement { staged: staged(comms, session, node), gradients_on_device, masters_on_device })
    }

    /// The masters that begin with these values, or what is kept beside them.
    pub(super) fn masters(&self, initial: Vec<f32>, device: &Device) -> Flat {
        if self.masters_on_device { Flat::on_device(&initial, device) } else { Flat::Host(initial) }
    }
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
            "gradients are sent from host memory{place}: {} moves memory of CUDA devices, and the model is on another device",
            comm.name()
        ));
    }
    match levels[..] {
        [(inside, false, _), (between, true, _)] => Some(format!(
            "gradients are read back from the device, and the optimizer runs on the host, because {}, the transport inside a node, moves \
             host memory; for {} between nodes a shard of each bucket is uploaded and read back again. Without --node-transport everything \
             stays on the device",
            inside.name(),
            between.name()
        )),
        _ => None,
    }
}
