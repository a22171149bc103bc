//! Fully sharded data parallel: ZeRO stage 3 (Rajbhandari et al. 2020; Zhao et al. 2023).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use comm_core::{Buffer, Call, Communicator, Op, ReduceOp, shard_range};

use super::clock::Started;
use super::{Clock, Layout, Put, Strategy, StrategyOptions};
use crate::flat::{Flat, Packer, Weights};
use crate::memory::{self, Category};

/// Segments whose whole gradients are in memory at a time: one that is under way, and the next.
const WHOLE: usize = 2;

/// Every rank keeps a shard of each segment: of its parameters, gradients and optimizer state. A segment's weights are gathered, one
/// segment ahead, in the forward pass and again in the backward pass; the embedding, which is also the head, once for both, and it
/// stays in between. (3S − S_emb)(N−1)/N each way.
///
/// Whole gradients are in memory where they cannot leave at once: with accumulation, since only the last micro-step communicates them,
/// and with `overlap` off.
pub(super) struct Fsdp {
    comm: Arc<dyn Communicator>,
    layout: Layout,
    wire: Packer,
    packer: Packer,
    overlap: bool,
    owned: Vec<Range<usize>>,
    /// What each segment's gradients and weights are called in errors.
    labels: Vec<[Arc<str>; 2]>,
    /// The segments that the pass still has to gather.
    to_come: VecDeque<usize>,
    /// The one that has been asked for ahead.
    coming: Option<(usize, Started)>,
    started: VecDeque<(usize, Started)>,
    /// With `overlap` off: gradients that wait for the end of the pass.
    waiting: Vec<(usize, Flat)>,
    grads: Vec<Flat>,
}

impl Fsdp {
    pub(super) fn new(
        comm: Arc<dyn Communicator>,
        layout: Layout,
        options: &StrategyOptions,
        wire: Packer,
        packer: Packer,
    ) -> Self {
        let owned: Vec<_> =
            layout.lengths().iter().map(|len| shard_range(*len, comm.world_size(), comm.rank())).collect();
        let labels = (0..layout.segments())
            .map(|segment| {
                let name = layout.name(segment);
                [format!("gradients of {name}").into(), format!("parameters of {name}").into()]
            })
            .collect();
        Fsdp {
            wire,
            packer,
            overlap: options.overlap,
            owned,
            labels,
            to_come: VecDeque::new(),
            coming: None,
            started: VecDeque::new(),
            waiting: Vec::new(),
            grads: vec![Flat::default(); layout.segments()],
            layout,
            comm,
        }
    }

    fn start_gather(&self, segment: usize, masters: &[Flat], clock: &mut Clock) -> comm_core::Result<Started> {
        let (start, count) = (self.owned[segment].start, self.layout.len(segment));
        let buffer = clock.pack(|waits| {
            memory::within(Category::Parameters, || self.packer.pack_into(&masters[segment], start, count, waits))
        })?;
        let call = Call::background(Op::AllGather, buffer, 0);
        Ok(clock.start(&*self.comm, call.labelled(self.labels[segment][1].clone())))
    }

    fn start_reduction(&mut self, segment: usize, grads: Flat, clock: &mut Clock) -> comm_core::Result<()> {
        let buffer = clock.pack(|waits| self.wire.pack(grads, waits))?;
        // Beside the gathers, where there is a second lane.
        let call = Call::background(Op::ReduceScatter(ReduceOp::Mean), buffer, 1 % self.comm.lanes());
        let call = call.labelled(self.labels[segment][0].clone());
        while self.started.len() + 1 >= WHOLE {
            self.finish_first(clock)?;
        }
        self.started.push_back((segment, clock.start(&*self.comm, call)));
        Ok(())
    }

    fn finish_first(&mut self, clock: &mut Clock) -> comm_core::Result<()> {
        let Some((segment, handle)) = self.started.pop_front() else { return Ok(()) };
        let buffer = clock.wait(handle)?;
        let (wire, range) = (&self.wire, self.owned[segment].clone());
        self.grads[segment] = clock.unpack(|| wire.unpack_part(buffer, range))?;
        Ok(())
    }
}

impl Strategy for Fsdp {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn brings_weights(&self) -> bool {
        true
    }

    fn begin(&mut self, training: bool) {
        let segments = self.layout.segments();
        self.to_come =
            if training { (0..segments).chain((1..segments).rev()).collect() } else { (0..segments).collect() };
    }

    fn weights(&mut self, segment: usize, masters: &[Flat], clock: &mut Clock) -> comm_core::Result<Weights> {
        let handle = match self.coming.take() {
            Some((_, handle)) => handle,
            None => {
                self.to_come.pop_front();
                self.start_gather(segment, masters, clock)?
            }
        };
        let buffer = clock.wait(handle)?;
        match buffer {
            Buffer::Host(_) => Ok(Weights::Host(buffer)),
            Buffer::Device(_) => clock.unpack(|| self.packer.whole(buffer)),
        }
    }

    fn prefetch(&mut self, masters: &[Flat], clock: &mut Clock) -> comm_core::Result<()> {
        if self.overlap
            && let Some(next) = self.to_come.pop_front()
        {
            self.coming = Some((next, self.start_gather(next, masters, clock)?));
        }
        Ok(())
    }

    fn gradient(&mut self, segment: usize, grads: Flat, clock: &mut Clock) -> comm_core::Result<()> {
        if self.overlap {
            return self.start_reduction(segment, grads, clock);
        }
        self.waiting.push((segment, grads));
        Ok(())
    }

    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Flat>> {
        for (segment, grads) in std::mem::take(&mut self.waiting) {
            self.start_reduction(segment, grads, clock)?;
        }
        while !self.started.is_empty() {
            self.finish_first(clock)?;
        }
        let empty = vec![Flat::default(); self.grads.len()];
        Ok(std::mem::replace(&mut self.grads, empty))
    }

    fn distribute(&mut self, _masters: &[Flat], _put: Put<'_>, _clock: &mut Clock) -> comm_core::Result<()> {
        // The next pass gathers what it needs.
        Ok(())
    }
}
