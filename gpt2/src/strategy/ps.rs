//! A single parameter server.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Call, Communicator, Error, Op};

use super::clock::{Started, Waits};
use super::{Clock, Layout, Put, Strategy, StrategyKind, StrategyOptions, put_own};
use crate::flat::{Flat, Packer};
use crate::memory::{self, Category};

/// The rank that serves.
const SERVER: usize = 0;

/// What its messages are called in errors.
const GRADIENTS: &str = "a worker's gradients";
const PARAMETERS: &str = "the server's parameters";

/// Rank 0 receives every worker's gradients, averages them in rank order, with its own unless it is dedicated, updates all parameters
/// and sends them to every worker: (N−1)·S each way through one rank.
pub(super) struct ParameterServer {
    comm: Arc<dyn Communicator>,
    layout: Layout,
    wire: Packer,
    weights: Packer,
    dedicated: bool,
    owned: Vec<Range<usize>>,
    grads: Vec<Flat>,
}

impl ParameterServer {
    pub(super) fn new(
        comm: Arc<dyn Communicator>,
        layout: Layout,
        options: &StrategyOptions,
        wire: Packer,
        weights: Packer,
    ) -> comm_core::Result<Self> {
        let ranks = comm.world_size();
        if options.dedicated_server && ranks == 1 {
            return Err(Error::invalid("a dedicated parameter server needs at least one worker beside it: 2 ranks"));
        }
        let owned = if comm.rank() == SERVER { layout.everything() } else { layout.nothing() };
        let grads = vec![Flat::default(); layout.segments()];
        let dedicated = options.serves_only(StrategyKind::Ps, ranks, SERVER);
        Ok(ParameterServer { comm, layout, wire, weights, dedicated, owned, grads })
    }

    /// Starts `op` with the server's partner `worker`, each worker on a lane of its own as far as lanes go.
    fn start(&self, worker: usize, op: Op, buffer: Buffer, what: &'static str, clock: &mut Clock) -> Started {
        let call = Call::background(op, buffer, worker % self.comm.lanes());
        clock.start(&*self.comm, call.labelled(what))
    }

    /// Starts an operation with each worker and finishes it, in rank order, as many at a time as have a lane to themselves.
    fn with_each_worker(
        &self,
        clock: &mut Clock,
        start: impl Fn(usize, &mut Clock) -> comm_core::Result<Started>,
        mut finish: impl FnMut(Started, &mut Clock) -> comm_core::Result<()>,
    ) -> comm_core::Result<()> {
        let mut under_way: VecDeque<Started> = VecDeque::new();
        for worker in 1..self.comm.world_size() {
            if under_way.len() >= self.comm.lanes() {
                under_way.pop_front().map_or(Ok(()), |first| finish(first, clock))?;
            }
            under_way.push_back(start(worker, clock)?);
        }
        under_way.into_iter().try_for_each(|handle| finish(handle, clock))
    }

    fn serves(&self) -> bool {
        self.comm.rank() == SERVER
    }
}

impl Strategy for ParameterServer {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn computes(&self) -> bool {
        !(self.dedicated && self.serves())
    }

    fn gradient(&mut self, segment: usize, grads: Flat, _clock: &mut Clock) -> comm_core::Result<()> {
        self.grads[segment] = grads;
        Ok(())
    }

    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Flat>> {
        let whole = 0..self.layout.total();
        let empty = vec![Flat::default(); self.layout.segments()];
        let grads = std::mem::replace(&mut self.grads, empty.clone());
        let pack = |waits: &mut Waits| self.wire.pack(self.layout.gather(&grads, &whole)?, waits);
        let mine = self.computes().then(|| clock.pack(pack));
        drop(grads);
        let mut sum: Option<Flat> = match mine.transpose()? {
            Some(mine) if !self.serves() => {
                let sent = self.start(self.comm.rank(), Op::Send { to: SERVER }, mine, GRADIENTS, clock);
                clock.wait(sent)?;
                return Ok(empty);
            }
            // The server's own gradients are rounded to the wire type like everyone's.
            Some(mine) => Some(clock.unpack(|| self.wire.unpack(mine))?),
            None => None,
        };
        let receive = |worker: usize, clock: &mut Clock| {
            let buffer = clock.pack(|waits| self.wire.empty(whole.len(), waits))?;
            Ok(self.start(worker, Op::Recv { from: worker }, buffer, GRADIENTS, clock))
        };
        let finish = |handle: Started, clock: &mut Clock| {
            let theirs = clock.wait(handle)?;
            clock.unpack(|| -> comm_core::Result<()> {
                let theirs = self.wire.unpack(theirs)?;
                sum = Some(match sum.take() {
                    Some(sum) => sum.plus(theirs)?,
                    None => theirs,
                });
                Ok(())
            })
        };
        self.with_each_worker(clock, receive, finish)?;
        let computing = self.comm.world_size() - usize::from(self.dedicated);
        let sum = sum.unwrap_or_default();
        Ok(clock.unpack(|| sum.divided(computing as f32).split(&self.layout.lengths())))
    }

    fn distribute(&mut self, masters: &[Flat], put: Put<'_>, clock: &mut Clock) -> comm_core::Result<()> {
        let whole = self.layout.total();
        if !self.serves() {
            let empty =
                clock.pack(|waits| memory::within(Category::Parameters, || self.weights.empty(whole, waits)))?;
            let arriving = self.start(self.comm.rank(), Op::Recv { from: SERVER }, empty, PARAMETERS, clock);
            let flat = clock.wait(arriving)?;
            let parts = clock
                .unpack(|| memory::within(Category::Parameters, || self.weights.cut(flat, &self.layout.lengths())))?;
            parts.into_iter().enumerate().for_each(|(segment, part)| put(segment, part));
            return Ok(());
        }
        let send = |worker: usize, clock: &mut Clock| {
            let pack = |waits: &mut Waits| self.weights.pack(self.layout.gather(masters, &(0..whole))?, waits);
            let flat = clock.pack(|waits| memory::within(Category::Parameters, || pack(waits)))?;
            Ok(self.start(worker, Op::Send { to: worker }, flat, PARAMETERS, clock))
        };
        self.with_each_worker(clock, send, |handle, clock| clock.wait(handle).map(drop))?;
        if self.computes() {
            put_own(masters, &self.weights, put, clock);
        }
        Ok(())
    }
}
