//! One device.

use std::ops::Range;

use comm_core::{Communicator, Error};

use super::{Clock, Layout, Put, Strategy, put_own};
use crate::precision::Precision;

/// No communication at all.
pub(super) struct Single {
    precision: Precision,
    owned: Vec<Range<usize>>,
    grads: Vec<Vec<f32>>,
}

impl Single {
    pub(super) fn new(comm: &dyn Communicator, layout: Layout, precision: Precision) -> comm_core::Result<Self> {
        if comm.world_size() != 1 {
            return Err(Error::InvalidArgument(format!(
                "the strategy `single` trains on one rank, not on {}; use --nproc 1 or another strategy",
                comm.world_size()
            )));
        }
        Ok(Single { precision, owned: layout.everything(), grads: vec![Vec::new(); layout.segments()] })
    }
}

impl Strategy for Single {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn gradient(&mut self, segment: usize, grads: Vec<f32>, _clock: &mut Clock) -> comm_core::Result<()> {
        self.grads[segment] = grads;
        Ok(())
    }

    fn synchronise(&mut self, _clock: &mut Clock) -> comm_core::Result<Vec<Vec<f32>>> {
        let empty = vec![Vec::new(); self.grads.len()];
        Ok(std::mem::replace(&mut self.grads, empty))
    }

    fn distribute(&mut self, masters: &[Vec<f32>], put: Put<'_>, clock: &mut Clock) -> comm_core::Result<()> {
        put_own(masters, self.precision, put, clock);
        Ok(())
    }
}
