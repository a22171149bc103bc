//! A single parameter server, which also computes.

use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Call, Communicator, Handle, Op};

use super::{Clock, Layout, Strategy, Wire};

/// The rank that serves.
const SERVER: usize = 0;

/// What its messages are called in errors.
const GRADIENTS: &str = "a worker's gradients";
const PARAMETERS: &str = "the server's parameters";

/// Rank 0 receives every worker's gradients, averages them with its own in rank order, updates all parameters and sends them to every
/// worker: (N−1)·S each way through one rank.
pub(super) struct ParameterServer {
    comm: Arc<dyn Communicator>,
    layout: Layout,
    wire: Wire,
    owned: Vec<Range<usize>>,
    grads: Vec<Vec<f32>>,
}

impl ParameterServer {
    pub(super) fn new(comm: Arc<dyn Communicator>, layout: Layout, wire: Wire) -> Self {
        let owned = if comm.rank() == SERVER { layout.everything() } else { layout.nothing() };
        let grads = vec![Vec::new(); layout.segments()];
        ParameterServer { comm, layout, wire, owned, grads }
    }

    /// Starts `op` with the server's partner `worker`, each worker on a lane of its own as far as lanes go.
    fn start(&self, worker: usize, op: Op, buffer: Buffer, what: &'static str, clock: &mut Clock) -> Handle {
        let call = Call::background(op, buffer, worker % self.comm.lanes());
        clock.start(&*self.comm, call.labelled(what))
    }

    fn workers(&self) -> Range<usize> {
        1..self.comm.world_size()
    }
}

impl Strategy for ParameterServer {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn gradient(&mut self, segment: usize, grads: Vec<f32>, _clock: &mut Clock) -> comm_core::Result<()> {
        self.grads[segment] = grads;
        Ok(())
    }

    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Vec<f32>>> {
        let whole = 0..self.layout.total();
        let mine = clock.pack(|| self.wire.pack(self.layout.gather(&self.grads, &whole)));
        let rank = self.comm.rank();
        if rank != SERVER {
            let sent = self.start(rank, Op::Send { to: SERVER }, mine, GRADIENTS, clock);
            clock.wait(sent)?;
            return Ok(vec![Vec::new(); self.layout.segments()]);
        }
        let arriving: Vec<Handle> = self
            .workers()
            .map(|worker| self.start(worker, Op::Recv { from: worker }, self.wire.empty(whole.len()), GRADIENTS, clock))
            .collect();
        // The server's own gradients are rounded to the wire type like everyone's.
        let mut sum = self.wire.unpack(mine)?;
        for handle in arriving {
            let theirs = clock.wait(handle)?;
            clock.unpack(|| -> comm_core::Result<()> {
                add(&mut sum, &self.wire.unpack(theirs)?);
                Ok(())
            })?;
        }
        let ranks = self.comm.world_size() as f32;
        Ok(clock.unpack(|| {
            sum.iter_mut().for_each(|value| *value /= ranks);
            self.layout.cut(&sum, &whole)
        }))
    }

    fn distribute(&mut self, params: &mut [Vec<f32>], clock: &mut Clock) -> comm_core::Result<()> {
        let whole = 0..self.layout.total();
        let rank = self.comm.rank();
        if rank != SERVER {
            let empty = Wire::F32.empty(whole.len());
            let arriving = self.start(rank, Op::Recv { from: SERVER }, empty, PARAMETERS, clock);
            let flat: Vec<f32> = clock.wait(arriving)?.into_vec()?;
            clock.unpack(|| self.layout.scatter(&flat, &whole, params));
            return Ok(());
        }
        let mut leaving = Vec::new();
        for worker in self.workers() {
            let flat = clock.pack(|| self.layout.gather(params, &whole));
            leaving.push(self.start(worker, Op::Send { to: worker }, Buffer::from_vec(flat), PARAMETERS, clock));
        }
        for handle in leaving {
            clock.wait(handle)?;
        }
        Ok(())
    }
}

/// `sum += values`, element by element.
pub(super) fn add(sum: &mut [f32], values: &[f32]) {
    for (sum, value) in sum.iter_mut().zip(values) {
        *sum += value;
    }
}
