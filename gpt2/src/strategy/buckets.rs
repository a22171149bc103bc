//! Strategies that all-reduce gradients, so that every rank updates every parameter: `ring` and `ddp`.

use std::ops::Range;
use std::sync::Arc;

use comm_core::{Algorithm, Call, Communicator, Op, OpKind, ReduceOp, table};

use super::clock::Started;
use super::layout::{Bucket, buckets};
use super::{Clock, Layout, Put, Strategy, StrategyOptions, put_own};
use crate::flat::{Flat, Packer};
use crate::precision::Precision;

/// Gradients in buckets of whole segments, each all-reduced once.
pub(super) struct Buckets {
    comm: Arc<dyn Communicator>,
    wire: Packer,
    weights: Packer,
    owned: Vec<Range<usize>>,
    /// In the order in which their gradients come.
    plan: Vec<Bucket>,
    /// What each bucket is called in errors.
    labels: Vec<Arc<str>>,
    /// Whether a full bucket's all-reduce starts at once.
    overlap: bool,
    /// `None` for the table's choice.
    algorithm: Option<Algorithm>,
    /// Gradients that have come but not left.
    waiting: Vec<Option<Flat>>,
    /// All-reduces under way, by bucket.
    started: Vec<Started>,
}

impl Buckets {
    /// `ring`: fusion buffers, each reduced around the ring after the backward pass.
    pub(super) fn fused(
        comm: Arc<dyn Communicator>,
        layout: Layout,
        options: &StrategyOptions,
        wire: Packer,
        weights: Packer,
    ) -> Self {
        let plan = buckets(&layout, options.fusion_bytes, options.fusion_bytes);
        let algorithm = ring(options.wire, comm.world_size());
        Buckets { algorithm, ..Buckets::new(comm, layout, false, wire, weights, plan) }
    }

    /// `ddp`: buckets that leave while the backward pass goes on.
    pub(super) fn overlapped(
        comm: Arc<dyn Communicator>,
        layout: Layout,
        options: &StrategyOptions,
        wire: Packer,
        weights: Packer,
    ) -> Self {
        let plan = buckets(&layout, options.first_bucket_bytes, options.bucket_bytes);
        Buckets::new(comm, layout, options.overlap, wire, weights, plan)
    }

    fn new(
        comm: Arc<dyn Communicator>,
        layout: Layout,
        overlap: bool,
        wire: Packer,
        weights: Packer,
        plan: Vec<Bucket>,
    ) -> Self {
        Buckets {
            comm,
            wire,
            weights,
            owned: layout.everything(),
            labels: labels(&plan),
            plan,
            overlap,
            algorithm: None,
            waiting: vec![None; layout.segments()],
            started: Vec::new(),
        }
    }

    /// Starts the buckets, in order, whose gradients have all come.
    fn start_full(&mut self, clock: &mut Clock) -> comm_core::Result<()> {
        while let Some(bucket) = self.plan.get(self.started.len()) {
            let (waiting, wire) = (&mut self.waiting, &self.wire);
            let packed = clock.pack(|waits| bucket.take(waiting).map(|flat| wire.pack(flat?, waits)));
            let Some(buffer) = packed.transpose()? else { break };
            let op = Op::AllReduce(ReduceOp::Mean);
            let call = if self.overlap {
                Call::background(op, buffer, self.started.len() % self.comm.lanes())
            } else {
                Call::blocking(op, buffer)
            };
            let label = self.labels.get(self.started.len()).cloned();
            let call = Call { algorithm: self.algorithm, label, ..call };
            self.started.push(clock.start(&*self.comm, call));
        }
        Ok(())
    }
}

impl Strategy for Buckets {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn gradient(&mut self, segment: usize, grads: Flat, clock: &mut Clock) -> comm_core::Result<()> {
        self.waiting[segment] = Some(grads);
        if self.overlap { self.start_full(clock) } else { Ok(()) }
    }

    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Flat>> {
        self.start_full(clock)?;
        let mut grads = vec![Flat::default(); self.owned.len()];
        for (bucket, handle) in self.plan.iter().zip(std::mem::take(&mut self.started)) {
            let buffer = clock.wait(handle)?;
            clock.unpack(|| -> comm_core::Result<()> {
                bucket.cut_into(self.wire.unpack(buffer)?, &mut grads);
                Ok(())
            })?;
        }
        Ok(grads)
    }

    fn distribute(&mut self, masters: &[Flat], put: Put<'_>, clock: &mut Clock) -> comm_core::Result<()> {
        // Every rank has computed the same.
        put_own(masters, &self.weights, put, clock);
        Ok(())
    }
}

/// What each bucket's gradients are called.
pub(super) fn labels(plan: &[Bucket]) -> Vec<Arc<str>> {
    let label = |(index, bucket): (usize, &Bucket)| format!("gradients, bucket {index}: {}", bucket.name).into();
    plan.iter().enumerate().map(label).collect()
}

/// The ring, where it can reduce the wire type: 16-bit gradients meet in one place, so that they are rounded once.
pub(super) fn ring(wire: Precision, ranks: usize) -> Option<Algorithm> {
    table::supports(Algorithm::Ring, OpKind::AllReduce, wire.dtype(), ranks).then_some(Algorithm::Ring)
}
