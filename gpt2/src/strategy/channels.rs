//! What strategies communicate through. Here alone is timed, named and charged what moves gradients and parameters.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use comm_core::{Algorithm, Buffer, Call, Communicator, Error, Failed, Handle, HostBuffer, Op, ReduceOp};

use super::{Comms, StrategyOptions};
use crate::flat::{Flat, Packer, Weights};
use crate::memory::{self, Category};
use crate::precision::Precision;
use crate::record::{self, Activity, EVERYONE, Ticket};

/// The channels of one rank.
#[derive(Clone, Debug)]
pub struct Channels {
    /// For gradients, in the wire type: of all ranks, or of those of a node where a strategy tells nodes apart.
    pub(super) gradients: Channel,
    /// For shards of gradients between nodes, in the wire type; where nodes are not told apart, the same as `gradients`.
    pub(super) between: Channel,
    /// For parameters, in the type of computation.
    pub(super) parameters: Channel,
}

impl Channels {
    /// Among all ranks.
    pub(super) fn among_all(comms: &Comms, options: &StrategyOptions, precision: Precision) -> Self {
        let channel = |wire, category| {
            Channel::new(comms.world.clone(), EVERYONE, Packer::new(wire, comms.native.clone()), category)
        };
        let gradients = channel(options.wire, Category::Gradients);
        Channels { between: gradients.clone(), gradients, parameters: channel(precision, Category::Parameters) }
    }
}

/// Moves values of one kind, gradients or parameters, between some ranks: a communicator, the type in which they travel, and the memory
/// that is lent to it. Spans, the names of operations and the category of memory follow from it.
#[derive(Clone)]
pub(super) struct Channel {
    comm: Arc<dyn Communicator>,
    /// What the ranks are called in the step's times.
    group: u64,
    packer: Packer,
    category: Category,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Channel").field("group", &self.group).field("packer", &self.packer).finish_non_exhaustive()
    }
}

/// How an operation goes.
#[derive(Clone, Debug)]
pub(super) struct Route {
    /// What it is called in errors and in the step's times.
    label: Arc<str>,
    /// On which lane beside the training thread, or in it.
    lane: Option<usize>,
    /// `None` for the table's choice.
    algorithm: Option<Algorithm>,
    /// How long it may take; `None` for what the communicator gives every operation.
    timeout: Option<Duration>,
}

impl Route {
    /// Beside the training thread, on a lane; of as many as there are, counted on from the first again.
    pub(super) fn lane(label: impl Into<Arc<str>>, lane: usize) -> Self {
        Route { label: label.into(), lane: Some(lane), algorithm: None, timeout: None }
    }

    /// In the training thread.
    pub(super) fn blocking(label: impl Into<Arc<str>>) -> Self {
        Route { label: label.into(), lane: None, algorithm: None, timeout: None }
    }

    /// By this algorithm.
    pub(super) fn by(self, algorithm: Option<Algorithm>) -> Self {
        Route { algorithm, ..self }
    }

    /// With so much time.
    pub(super) fn within(self, timeout: Duration) -> Self {
        Route { timeout: Some(timeout), ..self }
    }
}

impl Channel {
    pub(super) fn new(comm: Arc<dyn Communicator>, group: u64, packer: Packer, category: Category) -> Self {
        Channel { comm, group, packer, category }
    }

    /// Among all ranks, for what optimizers update, or for what becomes of it.
    pub(super) fn of_masters(comms: &Comms, wire: Precision) -> Self {
        Channel::new(comms.world.clone(), EVERYONE, Packer::new(wire, comms.native.clone()), Category::Optimizer)
    }

    /// This rank among them.
    pub(super) fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Number of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.comm.world_size()
    }

    /// Independent channels between each pair of ranks.
    pub(super) fn lanes(&self) -> usize {
        self.comm.lanes()
    }

    /// Starts the mean over all ranks of `values`.
    pub(super) fn all_reduce(&self, values: Flat, route: Route) -> comm_core::Result<Pending> {
        let buffer = self.pack(|| Ok(values))?;
        Ok(self.start(Op::AllReduce(ReduceOp::Mean), buffer, route))
    }

    /// Starts sending `values`.
    pub(super) fn send(
        &self,
        to: usize,
        values: impl FnOnce() -> comm_core::Result<Flat>,
        route: Route,
    ) -> comm_core::Result<Pending> {
        let buffer = self.pack(values)?;
        Ok(self.start(Op::Send { to }, buffer, route))
    }

    /// Starts receiving `count` values.
    pub(super) fn receive(&self, from: usize, count: usize, route: Route) -> comm_core::Result<Pending> {
        let buffer = self.packing(|| self.packer.empty(count))?;
        Ok(self.start(Op::Recv { from }, buffer, route))
    }

    /// Starts receiving into `room`, which what has come is in as it has come.
    pub(super) fn receive_into(&self, from: usize, room: impl FnOnce() -> Buffer, route: Route) -> Pending {
        let buffer = self.packing(room);
        self.start(Op::Recv { from }, buffer, route)
    }

    /// Starts the gathering of `count` values, of which this rank has those of `parts` from `start` on; in the memory of `spare` where that
    /// is such a buffer.
    pub(super) fn all_gather<'a>(
        &self,
        parts: impl Iterator<Item = &'a Flat> + Clone,
        place: (usize, usize),
        spare: Option<Buffer>,
        route: Route,
    ) -> comm_core::Result<Pending> {
        let buffer = self.packing(|| self.packer.pack_into(parts, place, spare))?;
        Ok(self.start(Op::AllGather, buffer, route))
    }

    /// Starts an operation in place.
    pub(super) fn start(&self, op: Op, buffer: Buffer, route: Route) -> Pending {
        let Route { label, lane, algorithm, timeout } = route;
        let call = match lane {
            Some(lane) => Call::background(op, buffer, lane % self.comm.lanes()),
            None => Call::blocking(op, buffer),
        };
        let call = Call { algorithm, timeout, label: Some(label), ..call };
        let (handle, ticket) =
            record::started(call, self.group, |call| memory::within(Category::Communication, || self.comm.start(call)));
        Pending { channel: self.clone(), handle, ticket }
    }

    /// A buffer that holds what `values` returns, in the type that travels. Getting the values counts as packing.
    pub(super) fn pack(&self, values: impl FnOnce() -> comm_core::Result<Flat>) -> comm_core::Result<Buffer> {
        self.packing(|| self.packer.pack(values()?))
    }

    /// The values of such a buffer.
    pub(super) fn unpack(&self, buffer: Buffer) -> comm_core::Result<Flat> {
        self.unpacking(|| self.packer.unpack(buffer))
    }

    /// Whether values travel in device memory.
    pub(super) fn is_native(&self) -> bool {
        self.packer.is_native()
    }

    /// The values rounded to the type that travels, as those are that come from another rank.
    pub(super) fn rounded(&self, values: impl FnOnce() -> comm_core::Result<Flat>) -> comm_core::Result<Flat> {
        let buffer = self.pack(values)?;
        self.unpack(buffer)
    }

    /// The weights that follow from masters of this rank.
    pub(super) fn weights(&self, masters: &Flat) -> Weights {
        self.unpacking(|| self.packer.weights(masters))
    }

    /// What lies one after another in several buffers, cut into pieces of these lengths.
    pub(super) fn cut_all(&self, buffers: Vec<Buffer>, lengths: &[usize]) -> comm_core::Result<Vec<Weights>> {
        self.unpacking(|| self.packer.cut_all(buffers, lengths))
    }

    /// A copy of the elements `range` of what is to travel.
    pub(super) fn cut_out(&self, whole: &HostBuffer, range: &Range<usize>) -> comm_core::Result<Buffer> {
        self.packing(|| Ok(Buffer::Host(self.packer.copied_part(whole, range.clone())?)))
    }

    /// The elements `range` of `whole`, which came from this channel, in a buffer for the channel `other`, and what is to be kept of the
    /// rest.
    pub(super) fn take_out(
        &self,
        whole: Buffer,
        range: &Range<usize>,
        other: &Channel,
    ) -> comm_core::Result<(Buffer, HostRemainder)> {
        self.packing(|| match whole {
            Buffer::Host(whole) => {
                let part = self.packer.copied_part(&whole, range.clone())?;
                let part = match other.packer.is_native() {
                    true => other.packer.pack(other.packer.upload(part)?)?,
                    false => Buffer::Host(part),
                };
                Ok((part, HostRemainder::Whole(whole)))
            }
            Buffer::Device(_) => {
                let count = whole.count();
                let part = self.packer.unpack_part(whole, range.clone())?;
                Ok((other.packer.pack(part)?, HostRemainder::Count(count)))
            }
        })
    }

    /// The whole buffer again, with the elements `range` as they came from `other`.
    pub(super) fn put_back(
        &self,
        kept: HostRemainder,
        range: &Range<usize>,
        part: Buffer,
        other: &Channel,
    ) -> comm_core::Result<Buffer> {
        self.packing(|| match kept {
            HostRemainder::Whole(mut whole) => {
                let part = match part {
                    Buffer::Host(part) => part,
                    // Inside the node nothing is lent, so this comes in host memory.
                    Buffer::Device(_) => match self.packer.pack(other.packer.unpack(part)?)? {
                        Buffer::Host(part) => part,
                        Buffer::Device(_) => {
                            return Err(Error::Internal("what was to come to the host was lent".into()));
                        }
                    },
                };
                copy_in(&mut whole, range, &part);
                Ok(Buffer::Host(whole))
            }
            HostRemainder::Count(count) => {
                let part = match part {
                    Buffer::Host(part) => self.packer.upload(part)?,
                    Buffer::Device(_) => other.packer.unpack(part)?,
                };
                self.packer.pack_into([&part].into_iter(), (range.start, count), None)
            }
        })
    }

    /// The values of a buffer that came from `other`, where this channel's are: in device memory or in the host's.
    pub(super) fn unpack_from(&self, other: &Channel, buffer: Buffer) -> comm_core::Result<Flat> {
        self.unpacking(|| self.packer.unpack_from(&other.packer, buffer))
    }

    /// Ends the job, for whoever waits for this rank.
    pub(super) fn abort(&self, reason: &str) {
        self.comm.abort(reason);
    }

    /// Runs `work`, which makes what is to leave.
    pub(super) fn packing<R>(&self, work: impl FnOnce() -> R) -> R {
        record::charged(Activity::Pack, self.category, work)
    }

    /// Runs `work`, which changes parameters by what has come.
    pub(super) fn applying<R>(&self, work: impl FnOnce() -> R) -> R {
        record::charged(Activity::Optimizer, self.category, work)
    }

    /// Runs `work` on what has come.
    pub(super) fn unpacking<R>(&self, work: impl FnOnce() -> R) -> R {
        record::charged(Activity::Unpack, self.category, work)
    }
}

/// The rest of a buffer while a part of it is with another channel.
pub(super) enum HostRemainder {
    /// All of it, in host memory: the part goes back to its place.
    Whole(HostBuffer),
    /// On the device nothing but its number of elements: a buffer is made around the part, whose rest another operation fills.
    Count(usize),
}

/// An operation under way. It may be finished in a later step than the one in which it was started.
pub(super) struct Pending {
    channel: Channel,
    handle: Handle,
    ticket: Ticket,
}

impl Pending {
    /// Whether it has ended; if not, whoever `context` is of is woken when it does.
    fn has_ended(&mut self, context: &mut Context<'_>) -> bool {
        match Pin::new(&mut self.handle).poll(context) {
            Poll::Ready(outcome) => {
                self.handle = Handle::done(outcome);
                true
            }
            Poll::Pending => false,
        }
    }

    /// Waits for its end; what has come is still packed.
    pub(super) fn wait(self) -> comm_core::Result<Buffer> {
        let Pending { handle, ticket, .. } = self;
        record::waited(ticket, || match memory::within(Category::Communication, || handle.wait()) {
            Ok(completed) => (Ok(completed.buffer), Some((completed.began, completed.ended))),
            Err(failed) => (Err(Failed::into_error(failed)), None),
        })
    }

    /// Waits, and returns the values, cut into pieces of these lengths, each in memory of its own.
    pub(super) fn finish_split(self, lengths: &[usize]) -> comm_core::Result<Vec<Flat>> {
        let channel = self.channel.clone();
        let buffer = self.wait()?;
        channel.unpacking(|| Ok(channel.packer.unpack(buffer)?.split(lengths)))
    }

    /// Waits, and returns the values `range`, cut into pieces of these lengths, to be read. They stay where they came, if they can, and the rest
    /// of it with them.
    pub(super) fn finish_shared(self, range: Range<usize>, lengths: &[usize]) -> comm_core::Result<Vec<Flat>> {
        let channel = self.channel.clone();
        let buffer = self.wait()?;
        channel.unpacking(|| channel.packer.share_part(buffer, range, lengths))
    }

    /// Waits, and returns the values `range`; the rest is let go of.
    pub(super) fn finish_part(self, range: Range<usize>) -> comm_core::Result<Flat> {
        let channel = self.channel.clone();
        let buffer = self.wait()?;
        channel.unpacking(|| channel.packer.unpack_part(buffer, range))
    }

    /// Waits, and returns the weights of segments of these lengths.
    pub(super) fn finish_weights(self, lengths: &[usize]) -> comm_core::Result<Vec<Weights>> {
        let channel = self.channel.clone();
        let buffer = self.wait()?;
        channel.unpacking(|| channel.packer.cut(buffer, lengths))
    }

    /// Waits, and returns the weights of one segment.
    pub(super) fn finish_whole(self) -> comm_core::Result<Weights> {
        let channel = self.channel.clone();
        let buffer = self.wait()?;
        match buffer {
            Buffer::Host(_) => Ok(Weights::Host(buffer)),
            Buffer::Device(_) => channel.unpacking(|| channel.packer.whole(buffer)),
        }
    }
}

/// Waits until any of these operations has ended, as their own deadlines see to, and returns what stands beside it: of several the first, and of no
/// operations nothing. What has come is still to be waited for.
pub(super) fn first_ended<T>(mut pending: Vec<(T, &mut Pending)>) -> Option<T> {
    /// Looks again after so long, whatever happens.
    const LOOK: Duration = Duration::from_secs(1);
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    record::span(Activity::Exposed, || {
        while !pending.is_empty() {
            if let Some(place) = pending.iter_mut().position(|(_, pending)| pending.has_ended(&mut context)) {
                return Some(pending.swap_remove(place).0);
            }
            thread::park_timeout(LOOK);
        }
        None
    })
}

/// Finishes the first of those under way until fewer than `most` are left.
pub(super) fn finish_until<T, E>(
    most: usize,
    under_way: &mut VecDeque<T>,
    mut finish: impl FnMut(T) -> Result<(), E>,
) -> Result<(), E> {
    while under_way.len() >= most.max(1) {
        under_way.pop_front().map_or(Ok(()), &mut finish)?;
    }
    Ok(())
}

/// Writes `part` over the elements `range` of `whole`.
fn copy_in(whole: &mut HostBuffer, range: &Range<usize>, part: &HostBuffer) {
    let width = part.dtype().size();
    memory::copied::<u8>(part.bytes().len());
    whole.bytes_mut()[range.start * width..range.end * width].copy_from_slice(part.bytes());
}
