//! One device.

use comm_core::Error;

use super::formula::Expected;
use super::own_step::OwnGradients;
use super::{
    Built, Channels, DuringPass, LocalStep, Setup, Spec, StepOutcome, Strategy, Synchronous, put_own, synchronous,
};
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};

pub(super) const SPEC: Spec = Spec {
    name: "single",
    about: "one device",
    is_one_device: true,
    tells_nodes_apart: false,
    in_buckets: false,
    overlaps: false,
    settings: &[],
    build,
    expected: |_, _, _| Expected::default(),
};

/// No communication at all.
struct Single {
    own: OwnGradients,
}

fn build(setup: &Setup<'_>) -> comm_core::Result<Built> {
    let (ranks, layout) = (setup.comms.world.world_size(), setup.layout());
    if ranks != 1 {
        return Err(Error::InvalidArgument(format!(
            "the strategy `single` trains on 1 rank, not on {ranks}; give --nproc 1, or choose another strategy"
        )));
    }
    Ok(Built::new(Single { own: OwnGradients::of(&layout) }, setup.channels(), layout.everything()))
}

impl DuringPass for Single {
    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.own.gradient(segment, grads, channels)
    }
}

impl Synchronous for Single {
    fn synchronise(&mut self, _channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        Ok(self.own.take())
    }

    fn distribute(&mut self, train: &mut dyn LocalStep, channels: &mut Channels) -> Result<(), TrainError> {
        put_own(train, channels)
    }
}

impl Strategy for Single {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        synchronous(self, Expected::default(), train, channels)
    }
}
