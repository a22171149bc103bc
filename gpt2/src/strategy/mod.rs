//! The distributed strategies, each written once against `dyn Communicator`.
//!
//! All of them train on the same batches with the same arithmetic; they differ in who averages which gradients, who updates which
//! parameters, and by which messages. A step goes through a [`Strategy`] like this:
//!
//! 1. [`gradient`](Strategy::gradient) for each segment, in the order in which the backward pass ends them;
//! 2. [`synchronise`](Strategy::synchronise): the averaged gradients of the elements that this rank updates;
//! 3. the trainer clips them and runs the optimizer on [`owned`](Strategy::owned);
//! 4. [`distribute`](Strategy::distribute): every rank gets the parameters that others updated.

mod buckets;
pub mod formula;
mod ps;
mod sharded_ps;
mod single;
mod wire;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::{Communicator, DType, Handle};
use serde::{Deserialize, Serialize};

pub use wire::Wire;

/// Which strategy; written as in [`StrategyKind::name`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StrategyKind {
    /// One device, no communication.
    Single,
    /// Rank 0 computes, and serves: it averages everyone's gradients, updates the parameters and sends them to everyone.
    Ps,
    /// Every rank computes, and serves one shard of the parameters.
    ShardedPs,
    /// Horovod: all gradients in one fused buffer, one ring all-reduce after the backward pass.
    Ring,
    /// PyTorch's DistributedDataParallel: buckets of gradients, all-reduced while the backward pass goes on.
    Ddp,
}

impl StrategyKind {
    /// Every strategy.
    pub const ALL: [StrategyKind; 5] =
        [StrategyKind::Single, StrategyKind::Ps, StrategyKind::ShardedPs, StrategyKind::Ring, StrategyKind::Ddp];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            StrategyKind::Single => "single",
            StrategyKind::Ps => "ps",
            StrategyKind::ShardedPs => "sharded-ps",
            StrategyKind::Ring => "ring",
            StrategyKind::Ddp => "ddp",
        }
    }
}

impl fmt::Display for StrategyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for StrategyKind {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        StrategyKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let names = StrategyKind::ALL.map(StrategyKind::name).join(", ");
            format!("`{name}` is no strategy; choose one of {names}")
        })
    }
}

/// Options that belong to no strategy alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StrategyOptions {
    /// The type in which gradients travel. Parameters always travel in f32.
    pub wire: Wire,
    /// A bucket of `ddp` is closed once it holds this many bytes of f32 gradients.
    pub bucket_bytes: usize,
    /// Whether `ddp` starts a bucket's all-reduce while the backward pass goes on.
    pub overlap: bool,
}

impl Default for StrategyOptions {
    fn default() -> Self {
        // PyTorch's 25 MB would be one bucket for every model that a CPU trains in minutes.
        StrategyOptions { wire: Wire::F32, bucket_bytes: 1 << 20, overlap: true }
    }
}

/// How gradients become updated parameters on all ranks.
pub trait Strategy: Send {
    /// The elements of each segment, in forward order, that this rank's optimizer updates; together the ranks' ranges cover every
    /// element, and where they overlap all compute the same.
    fn owned(&self) -> &[Range<usize>];

    /// Takes one segment's gradients (flat f32, the mean over this rank's rows). Segments come in the order in which the backward pass
    /// ends them: last to first.
    ///
    /// # Errors
    /// The communicator's.
    fn gradient(&mut self, segment: usize, grads: Vec<f32>, clock: &mut Clock) -> comm_core::Result<()>;

    /// Returns the gradients, averaged over all ranks, of the owned range of each segment. Called after every segment's gradients came.
    ///
    /// # Errors
    /// The communicator's.
    fn synchronise(&mut self, clock: &mut Clock) -> comm_core::Result<Vec<Vec<f32>>>;

    /// Brings every rank's whole `params` (flat, by segment) up to date after each rank has updated what it owns.
    ///
    /// # Errors
    /// The communicator's.
    fn distribute(&mut self, params: &mut [Vec<f32>], clock: &mut Clock) -> comm_core::Result<()>;
}

/// The strategy for `segments` (their lengths in elements, forward order).
///
/// # Errors
/// `InvalidArgument` for `single` on several ranks.
pub fn build(
    kind: StrategyKind,
    comm: Arc<dyn Communicator>,
    segments: &[usize],
    options: &StrategyOptions,
) -> comm_core::Result<Box<dyn Strategy>> {
    let layout = Layout::new(segments);
    Ok(match kind {
        StrategyKind::Single => Box::new(single::Single::new(&*comm, layout)?),
        StrategyKind::Ps => Box::new(ps::ParameterServer::new(comm, layout, options.wire)),
        StrategyKind::ShardedPs => Box::new(sharded_ps::ShardedServer::new(comm, layout, options.wire)),
        StrategyKind::Ring => Box::new(buckets::Buckets::fused(comm, layout, options.wire)),
        StrategyKind::Ddp => Box::new(buckets::Buckets::overlapped(comm, layout, options)),
    })
}

/// The model's flat vector: all segments one after another.
#[derive(Clone, Debug)]
pub struct Layout {
    ranges: Vec<Range<usize>>,
}

impl Layout {
    /// The layout of segments of these lengths.
    pub fn new(lengths: &[usize]) -> Self {
        let mut start = 0;
        let ranges = lengths
            .iter()
            .map(|len| {
                let range = start..start + len;
                start = range.end;
                range
            })
            .collect();
        Layout { ranges }
    }

    /// Elements of the whole.
    pub fn total(&self) -> usize {
        self.ranges.last().map_or(0, |range| range.end)
    }

    /// Number of segments.
    pub fn segments(&self) -> usize {
        self.ranges.len()
    }

    /// Elements of one segment.
    pub fn len(&self, segment: usize) -> usize {
        self.ranges[segment].len()
    }

    /// What a segment is called in messages: the embedding, a block or the head.
    fn name(&self, segment: usize) -> String {
        match segment {
            0 => "embedding".into(),
            last if last + 1 == self.segments() => "head".into(),
            block => format!("block {}", block - 1),
        }
    }

    /// All of every segment.
    fn everything(&self) -> Vec<Range<usize>> {
        self.ranges.iter().map(|range| 0..range.len()).collect()
    }

    /// None of any segment.
    fn nothing(&self) -> Vec<Range<usize>> {
        vec![0..0; self.segments()]
    }

    /// The part of each segment that lies in `part` of the flat vector, counted from the segment's start.
    fn within(&self, part: &Range<usize>) -> Vec<Range<usize>> {
        self.ranges
            .iter()
            .map(|range| {
                let (start, end) = (range.start.max(part.start), range.end.min(part.end));
                if start < end { start - range.start..end - range.start } else { 0..0 }
            })
            .collect()
    }

    /// The elements `part` of the flat vector.
    fn gather(&self, segments: &[Vec<f32>], part: &Range<usize>) -> Vec<f32> {
        let mut flat = Vec::with_capacity(part.len());
        for (values, range) in segments.iter().zip(self.within(part)) {
            flat.extend_from_slice(&values[range]);
        }
        flat
    }

    /// Writes the elements `part` of the flat vector.
    fn scatter(&self, flat: &[f32], part: &Range<usize>, segments: &mut [Vec<f32>]) {
        let mut rest = flat;
        for (values, range) in segments.iter_mut().zip(self.within(part)) {
            let (own, others) = rest.split_at(range.len());
            values[range].copy_from_slice(own);
            rest = others;
        }
    }

    /// Cuts the elements `part` of the flat vector into their segments.
    fn cut(&self, flat: &[f32], part: &Range<usize>) -> Vec<Vec<f32>> {
        let mut rest = flat;
        self.within(part)
            .into_iter()
            .map(|range| {
                let (own, others) = rest.split_at(range.len());
                rest = others;
                own.to_vec()
            })
            .collect()
    }
}

/// Where the time of a step went, on this rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock {
    /// The training thread waited for communication.
    pub exposed: Duration,
    /// When operations were under way, waited for or not.
    spans: Vec<(Instant, Instant)>,
    /// Gradients were cast, concatenated or read back from the device.
    pub pack: Duration,
    /// Results were cast, cut or uploaded to the device.
    pub unpack: Duration,
    /// Communication operations started.
    pub operations: u64,
}

impl Clock {
    /// Runs `work` and counts it as packing.
    pub fn pack<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.pack += start.elapsed();
        result
    }

    /// Runs `work` and counts it as unpacking.
    pub fn unpack<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.unpack += start.elapsed();
        result
    }

    /// How long at least one operation was under way, waited for or not.
    pub fn communication(&self) -> Duration {
        let mut spans = self.spans.clone();
        spans.sort_unstable();
        let mut total = Duration::ZERO;
        let mut covered: Option<Instant> = None;
        for (began, ended) in spans {
            let from = covered.map_or(began, |covered| began.max(covered));
            total += ended.saturating_duration_since(from);
            covered = Some(covered.map_or(ended, |covered| ended.max(covered)));
        }
        total
    }

    /// Starts an operation.
    fn start(&mut self, comm: &dyn Communicator, call: comm_core::Call) -> Handle {
        let start = Instant::now();
        let handle = comm.start(call);
        // A blocking call has run in here; a background one returns at once.
        self.exposed += start.elapsed();
        self.operations += 1;
        handle
    }

    /// Waits for an operation.
    fn wait(&mut self, handle: Handle) -> comm_core::Result<comm_core::Buffer> {
        let start = Instant::now();
        let outcome = handle.wait();
        self.exposed += start.elapsed();
        let completed = outcome.map_err(comm_core::Failed::into_error)?;
        self.spans.push((completed.began, completed.ended));
        Ok(completed.buffer)
    }
}

/// Bytes of one element of `dtype` on the wire.
fn width(dtype: DType) -> u64 {
    dtype.size() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_side_by_side_count_once() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let spans = vec![(at(30), at(40)), (at(0), at(10)), (at(5), at(20)), (at(6), at(8))];
        let clock = Clock { spans, ..Clock::default() };
        assert_eq!(clock.communication(), Duration::from_millis(30));
    }
}
