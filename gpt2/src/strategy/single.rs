//! One device.

use std::ops::Range;

use comm_core::{Communicator, Error};

use super::{Clock, Layout, Put, Strategy, put_own};
use crate::flat::{Flat, Packer};

/// No communication at all.
pub(super) struct Single {
    weights: Packer,
    owned: Vec<Range<usize>>,
    grads: Vec<Flat>,
}

impl Single {
    pub(super) fn new(comm: &dyn Communicator, layout: Layout, weights: Packer) -> comm_core::Result<Self> {
        if comm.world_size() != 1 {
            return Err(Error::InvalidArgument(format!(
                "the strategy `single` trains on one rank, not on {}; use --nproc 1 or another strategy",
                comm.world_size()
            )));
        }
        Ok(Single { weights, owned: layout.everything(), grads: vec![Flat::default(); layout.segments()] })
    }
}

impl Strategy for Single {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn gradient(&mut self, segment: usize, grads: Flat, _clock: &mut Clock) -> comm_core::Result<()> {
        self.grads[segment] = grads;
        Ok(())
    }

    fn synchronise(&mut self, _clock: &mut Clock) -> comm_core::Result<Vec<Flat>> {
        let empty = vec![Flat::default(); self.grads.len()];
        Ok(std::mem::replace(&mut self.grads, empty))
    }

    fn distribute(&mut self, masters: &[Flat], put: Put<'_>, clock: &mut Clock) -> comm_core::Result<()> {
        put_own(masters, &self.weights, put, clock);
        Ok(())
    }
}
