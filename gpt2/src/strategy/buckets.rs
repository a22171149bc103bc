//! Strategies that all-reduce gradients, so that every rank updates every parameter: `ring` and `ddp`.

use std::ops::Range;
use std::sync::Arc;

use comm_core::{Algorithm, Call, Communicator, Handle, Op, OpKind, ReduceOp, table};

use super::{Clock, Layout, Strategy, StrategyOptions, Wire};

/// Gradients in buckets of whole segments, each all-reduced once.
pub(super) struct Buckets {
    comm: Arc<dyn Communicator>,
    layout: Layout,
    wire: Wire,
    owned: Vec<Range<usize>>,
    /// The segments of each bucket, in the order in which their gradients come.
    plan: Vec<Vec<usize>>,
    /// What each bucket is called in errors.
    labels: Vec<Arc<str>>,
    /// Whether a full bucket's all-reduce starts at once.
    overlap: bool,
    /// `None` for the table's choice.
    algorithm: Option<Algorithm>,
    /// Gradients that have come but not left.
    waiting: Vec<Option<Vec<f32>>>,
    /// All-reduces under way, by bucket.
    started: Vec<Handle>,
}

impl Buckets {
    /// `ring`: everything in one buffer, reduced around the ring after the backward pass.
    pub(super) fn fused(comm: Arc<dyn Communicator>, layout: Layout, wire: Wire) -> Self {
        let plan = plan(&layout, usize::MAX);
        let algorithm = ring(wire, comm.world_size());
        Buckets { algorithm, ..Buckets::new(comm, layout, wire, plan, false) }
    }

    /// `ddp`: buckets that leave while the backward pass goes on.
    pub(super) fn overlapped(comm: Arc<dyn Communicator>, layout: Layout, options: &StrategyOptions) -> Self {
        let plan = plan(&layout, options.bucket_bytes);
        Buckets::new(comm, layout, options.wire, plan, options.overlap)
    }

    fn new(comm: Arc<dyn Communicator>, layout: Layout, wire: Wire, plan: Vec<Vec<usize>>, overlap: bool) -> Self {
        let (owned, waiting) = (layout.everything(), vec![None; layout.segments()]);
        let label = |(index, bucket): (usize, &Vec<usize>)| {
            let segments: Vec<String> = bucket.iter().map(|segment| layout.name(*segment)).collect();
            format!("gradients, bucket {index}: {}", segments.join(", ")).into()
        };
        let labels = plan.iter().enumerate().map(label).collect();
        Buckets { comm, layout, wire, owned, plan, labels, overlap, algorithm: None, waiting, started: Vec::new() }
    }

    /// Starts the buckets, in order, whose gradients have all come.
    fn start_full(&mut self, clock: &mut Clock) {
        while let Some(bucket) = self.plan.get(self.started.len()) {
            if bucket.iter().any(|segment| self.waiting[*segment].is_none()) {
                return;
            }
            let waiting = &mut self.waiting;
            let buffer = clock.pack(|| {
                let mut parts = bucket.iter().filter_map(|segment| waiting[*segment].take());
                let mut flat = parts.next().unwrap_or_default();
                for part in parts {
                    flat.extend_from_slice(&part);
                }
                self.wire.pack(flat)
            });
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
    }
}

impl Strategy for Buckets {
    fn owned(&self) -> &[Range<usize>] {
        &self.owned
    }

    fn gradient(&mut self, segment: usize, grads: Vec<f32>, clock: &mut Clock) -> comm_core::Result<()> {
        self.waiting[segment] = Some(grads);
        if self.overlap {
            self.start_full(clock);
        }
        Ok(())
    }

    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Vec<f32>>> {
        self.start_full(clock);
        let mut grads = vec![Vec::new(); self.layout.segments()];
        for (bucket, handle) in self.plan.iter().zip(std::mem::take(&mut self.started)) {
            let buffer = clock.wait(handle)?;
            clock.unpack(|| -> comm_core::Result<()> {
                let mut flat = self.wire.unpack(buffer)?;
                // From the back, so that the bucket's first segment keeps the buffer.
                for segment in bucket.iter().rev() {
                    grads[*segment] = flat.split_off(flat.len() - self.layout.len(*segment));
                }
                Ok(())
            })?;
        }
        Ok(grads)
    }

    fn distribute(&mut self, _params: &mut [Vec<f32>], _clock: &mut Clock) -> comm_core::Result<()> {
        // Every rank has computed the same.
        Ok(())
    }
}

/// The ring, where it can reduce the wire type: 16-bit gradients meet in one place, so that they are rounded once.
pub(super) fn ring(wire: Wire, ranks: usize) -> Option<Algorithm> {
    table::supports(Algorithm::Ring, OpKind::AllReduce, wire.dtype(), ranks).then_some(Algorithm::Ring)
}

/// Segments from last to first, in buckets that are closed once they hold `bucket_bytes` of f32.
pub(super) fn plan(layout: &Layout, bucket_bytes: usize) -> Vec<Vec<usize>> {
    let mut plan: Vec<Vec<usize>> = Vec::new();
    let mut open = 0;
    for segment in (0..layout.segments()).rev() {
        match plan.last_mut() {
            Some(bucket) if open < bucket_bytes => bucket.push(segment),
            _ => {
                plan.push(vec![segment]);
                open = 0;
            }
        }
        open = open.saturating_add(layout.len(segment) * size_of::<f32>());
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_close_once_full_and_keep_the_backward_order() {
        let layout = Layout::new(&[100, 10, 10, 10, 1]);
        assert_eq!(plan(&layout, 44), [vec![4, 3], vec![2, 1], vec![0]]);
        assert_eq!(plan(&layout, usize::MAX), [vec![4, 3, 2, 1, 0]]);
        assert_eq!(plan(&layout, 0), [vec![4], vec![3], vec![2], vec![1], vec![0]]);
    }
}
