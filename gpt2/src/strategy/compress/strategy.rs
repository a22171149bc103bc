//! `ddp` and `ring` with compressed gradients.

use std::ops::Range;
use std::sync::Arc;

use comm_core::{Algorithm, DType, Error, Op};

use super::Compression;
use super::averaged::{self, Averaged};
use super::int8::Int8;
use super::keeping::{kept_of, read_kept};
use super::power_sgd::{self, PowerSgd};
use super::sign::Sign;
use super::top_k::{self, TopK};
use crate::checkpoint::sharded::Kept;
use crate::error::TrainError;
use crate::flat::{Flat, Gradients};
use crate::strategy::channels::{Channel, Route};
use crate::strategy::formula::{Expected, Run, Tally};
use crate::strategy::layout::{Bucket, BucketFiller};
use crate::strategy::{
    Built, Channels, DuringPass, KeptVector, Layout, LocalStep, SavedKept, Setup, StepOutcome, Strategy, StrategyKind,
    Synchronous, put_own, synchronous,
};

/// One bucket's way through the ranks, in one or two operations, the second of what has come of the first. What it keeps is of this rank.
pub(super) trait Codec {
    /// Starts the first operation, with this rank's gradients and what was left of the ones before.
    ///
    /// # Errors
    /// The communicator's.
    fn start(&mut self, grads: Vec<f32>, channel: &Channel, route: Route) -> comm_core::Result<()>;

    /// Waits for the first operation, and starts the second, where there is one.
    ///
    /// # Errors
    /// The communicator's.
    fn go_on(&mut self, channel: &Channel, route: Route) -> comm_core::Result<()> {
        let _ = (channel, route);
        Ok(())
    }

    /// Waits for the last operation, and returns the mean of what all ranks have sent, the same on all.
    ///
    /// # Errors
    /// The communicator's.
    fn finish(&mut self, channel: &Channel) -> comm_core::Result<Vec<f32>>;

    /// What it keeps for the next step, each with the element of the bucket from which on it is.
    fn kept(&self) -> Vec<(Kept, usize, &[f32])>;

    /// Goes on with what `read` finds of these elements of the bucket, or with zeros.
    ///
    /// # Errors
    /// Those of `read`.
    fn restore(&mut self, read: ReadKept<'_>) -> Result<(), TrainError>;
}

/// Reads what was kept of these elements of a bucket; zeros where nothing was.
pub(super) type ReadKept<'a> = &'a mut dyn FnMut(Kept, Range<usize>) -> Result<Vec<f32>, TrainError>;

/// An operation that a bucket takes, by its definition.
pub(super) struct ExpectedOperation {
    op: Op,
    dtype: DType,
    count: usize,
}

impl ExpectedOperation {
    /// Over so many bytes.
    pub(super) fn bytes(op: Op, count: usize) -> Self {
        ExpectedOperation { op, dtype: DType::U8, count }
    }

    /// Over so many f32.
    pub(super) fn floats(op: Op, count: usize) -> Self {
        ExpectedOperation { op, dtype: DType::F32, count }
    }
}

/// What a rank sends in a step with compressed gradients, in buckets of these bytes of f32; `None` where they are not compressed. Reductions go
/// by `algorithm`.
pub(in crate::strategy) fn expected(
    run: &Run<'_>,
    layout: &Layout,
    bytes: (usize, usize),
    algorithm: Option<Algorithm>,
    rank: usize,
) -> Option<Expected> {
    let mut tally = Tally::of(run, rank);
    for segments in units(layout, bytes) {
        let count = segments.iter().map(|segment| layout.len(*segment)).sum();
        let operations = match run.options.compress {
            Compression::None => return None,
            Compression::Int8 => averaged::operations(&Int8, count, run.ranks),
            Compression::Sign => averaged::operations(&Sign, count, run.ranks),
            Compression::TopK { fraction } => top_k::operations(fraction, count, run.ranks),
            Compression::PowerSgd { rank } => {
                power_sgd::operations(rank, count, segments.iter().filter_map(|segment| run.tensors.get(*segment)))
            }
        };
        for ExpectedOperation { op, dtype, count } in operations {
            let algorithm = algorithm.filter(|_| matches!(op, Op::AllReduce(_)));
            tally.collective(algorithm, op, dtype, count);
        }
    }
    Some(tally.sum)
}

/// The segments of each bucket, from the last to the first.
fn units(layout: &Layout, (first, others): (usize, usize)) -> Vec<Vec<usize>> {
    let (mut units, mut open, mut bytes) = (Vec::new(), Vec::new(), 0);
    for segment in (0..layout.segments()).rev() {
        open.push(segment);
        bytes += layout.len(segment) * size_of::<f32>();
        if bytes >= if units.is_empty() { first } else { others } {
            units.push(std::mem::take(&mut open));
            bytes = 0;
        }
    }
    units.extend(Some(open).filter(|open| !open.is_empty()));
    units
}

/// Whether the gradients of a channel can be compressed, if they are to be.
///
/// # Errors
/// `InvalidArgument` where they travel in the memory of a device.
pub(in crate::strategy) fn in_host_memory(compress: Compression, gradients: &Channel) -> comm_core::Result<()> {
    if !compress.is_on() || !gradients.is_native() {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "--compress {compress} works on gradients in host memory, and this transport moves GPU memory; choose shm, tcp-raw, tcp or quic, \
         or leave out --compress"
    )))
}

/// The strategy `kind` with compressed gradients, in buckets of these bytes of f32, of which, with `one_by_one`, each waits for the one before, and
/// whose reductions go by `algorithm`; `None` where they are not compressed.
///
/// # Errors
/// Those of [`in_host_memory`], and `InvalidArgument` for a bucket that is too large for the compression.
pub(in crate::strategy) fn built(
    setup: &Setup<'_>,
    kind: StrategyKind,
    (first, others): (usize, usize),
    one_by_one: bool,
    algorithm: Option<Algorithm>,
) -> comm_core::Result<Option<Built>> {
    let compress = setup.options.compress;
    if !compress.is_on() {
        return Ok(None);
    }
    let (layout, channels) = (setup.layout(), setup.channels());
    in_host_memory(compress, &channels.gradients)?;
    let buckets = BucketFiller::new(&layout, first, others);
    let codec = |bucket: &Bucket| -> comm_core::Result<Box<dyn Codec>> {
        let channel = &channels.gradients;
        Ok(match compress {
            Compression::None => return Err(Error::Internal("a codec of what is not compressed".into())),
            Compression::Int8 => Box::new(Averaged::new(Arc::new(Int8), bucket.len(), channel)),
            Compression::Sign => Box::new(Averaged::new(Arc::new(Sign), bucket.len(), channel)),
            Compression::TopK { fraction } => Box::new(TopK::new(fraction, bucket.len(), channel)?),
            Compression::PowerSgd { rank } => {
                let segments = bucket.segments.iter().zip(bucket.lengths());
                let tensors = segments.map(|(segment, len)| (*segment, len, setup.tensors.get(*segment)));
                Box::new(PowerSgd::new(rank, setup.seed, tensors, algorithm))
            }
        })
    };
    let codecs = buckets.plan().iter().map(codec).collect::<comm_core::Result<Vec<_>>>()?;
    let (overlap, expected) = (setup.options.overlap, setup.expected(kind));
    let strategy = Compressed { buckets, codecs, overlap, one_by_one, started: 0, expected };
    Ok(Some(Built::new(strategy, channels, layout.everything())))
}

/// Gradients in buckets of whole segments, each compressed and averaged by itself. With overlap the first operation of a bucket runs beside the
/// backward pass, and the second after it: lanes have their operations in the same order on all ranks.
struct Compressed {
    buckets: BucketFiller,
    /// One for each bucket.
    codecs: Vec<Box<dyn Codec>>,
    /// Whether a full bucket leaves at once.
    overlap: bool,
    /// Whether all go on one lane.
    one_by_one: bool,
    /// Buckets that have left.
    started: usize,
    expected: Expected,
}

impl Compressed {
    /// How a bucket's operation goes that is called so.
    fn route(&self, label: Arc<str>, bucket: usize) -> Route {
        match (self.overlap, self.one_by_one) {
            (true, true) => Route::lane(label, 0),
            (true, false) => Route::lane(label, bucket),
            (false, _) => Route::blocking(label),
        }
    }

    /// Starts the buckets that are full.
    fn start_full(&mut self, channels: &Channels) -> comm_core::Result<()> {
        let channel = &channels.gradients;
        while let Some((bucket, grads)) = self.buckets.next_full() {
            let grads = channel.pack(|| Ok(grads))?.into_vec()?;
            let route = self.route(self.buckets.label(bucket), bucket);
            self.codecs[bucket].start(grads, channel, route)?;
            self.started += 1;
        }
        Ok(())
    }
}

impl DuringPass for Compressed {
    fn room(&mut self, segment: usize) -> Vec<f32> {
        self.buckets.room(segment)
    }

    fn gradient(&mut self, segment: usize, grads: Gradients, channels: &mut Channels) -> comm_core::Result<()> {
        self.buckets.add(segment, grads)?;
        if self.overlap { self.start_full(channels) } else { Ok(()) }
    }
}

impl Synchronous for Compressed {
    fn synchronise(&mut self, channels: &mut Channels) -> comm_core::Result<Vec<Flat>> {
        self.start_full(channels)?;
        let channel = &channels.gradients;
        for bucket in 0..std::mem::take(&mut self.started) {
            let route = self.route(format!("{}, second part", self.buckets.label(bucket)).into(), bucket);
            self.codecs[bucket].go_on(channel, route)?;
        }
        let mut grads = self.buckets.vectors();
        for (bucket, codec) in self.buckets.restart().iter().zip(&mut self.codecs) {
            let mean = Flat::Host(codec.finish(channel)?);
            bucket.put_into(channel.unpacking(|| mean.share(&bucket.lengths())), &mut grads);
        }
        Ok(grads)
    }

    fn distribute(&mut self, train: &mut dyn LocalStep, channels: &mut Channels) -> Result<(), TrainError> {
        // Every rank has computed the same.
        put_own(train, channels)
    }
}

impl Strategy for Compressed {
    fn step(
        &mut self,
        _step: u64,
        train: &mut dyn LocalStep,
        channels: &mut Channels,
    ) -> Result<StepOutcome, TrainError> {
        synchronous(self, self.expected, train, channels)
    }

    fn kept(&self) -> Vec<KeptVector<'_>> {
        let mut kept = Vec::new();
        for (bucket, codec) in self.buckets.plan().iter().zip(&self.codecs) {
            let own = codec.kept().into_iter();
            kept.extend(own.flat_map(|(what, start, values)| kept_of(bucket, what, start, values)));
        }
        kept
    }

    fn restore(&mut self, saved: &mut SavedKept<'_>) -> Result<(), TrainError> {
        for (bucket, codec) in self.buckets.plan().iter().zip(&mut self.codecs) {
            codec.restore(&mut |what, range| read_kept(bucket, what, &range, saved))?;
        }
        Ok(())
    }
}
