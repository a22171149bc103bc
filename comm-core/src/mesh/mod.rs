//! A [`Communicator`] over any [`Transport`].

mod algorithms;
mod finite;
mod round;
mod scratch;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::buffer::{Buffer, HostBuffer, View, ViewMut};
use crate::communicator::Communicator;
use crate::control::Control;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::handle::{Completed, Failed, Handle, Outcome};
use crate::header::{CHECK, CHECK_RECEIVE, Header};
use crate::native::{
    Asked, Backend, Due, Elements, Extents, Group, Lane, Owner, Shared, Started, name, negotiate, pair,
};
use crate::op::{Algorithm, BorrowedCall, Call, Mode, Op};
use crate::table::Table;
use crate::transport::Transport;

use algorithms::Data;
use round::Rounds;
use scratch::Scratch;

/// Settings of a [`Mesh`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MeshOptions {
    /// How long an operation may take from its start, unless its call says otherwise.
    pub timeout: Duration,
    /// How long to wait, after a data connection failed, for the control plane to say what really happened.
    pub verdict_grace: Duration,
    /// By what algorithms are chosen. All ranks use the same.
    pub table: Table,
    /// After how long an operation that goes on is reported as stalled, to all ranks, with the ranks that hold it up
    /// ([`Control::on_stall`]); again each time it has taken twice as long. An operation with an earlier deadline is reported
    /// after three quarters of its time.
    pub stall_after: Duration,
    /// Whether ranks compare their calls before every operation, with one message without payload between each pair that takes
    /// part. Without it a rank that calls something else is noticed when a message of the wrong kind comes, which some
    /// mistakes do not lead to (two ranks that both receive) and which a root may have left behind before; with it, no
    /// operation begins before all have called the same. A send then waits for its receive. All ranks use the same.
    pub checked: bool,
    /// Whether what this rank contributes is searched for NaN and infinities beforehand ([`Error::NotFinite`]).
    pub check_finite: bool,
}

impl Default for MeshOptions {
    fn default() -> Self {
        MeshOptions {
            timeout: Duration::from_secs(120),
            verdict_grace: Duration::from_millis(500),
            table: Table::fixed(),
            stall_after: Duration::from_secs(30),
            checked: false,
            check_finite: false,
        }
    }
}

impl MeshOptions {
    /// The same with another default deadline.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        MeshOptions { timeout, ..self }
    }

    /// The same with another table of algorithms.
    #[must_use]
    pub fn with_table(self, table: Table) -> Self {
        MeshOptions { table, ..self }
    }

    /// The same with another time after which an operation counts as stalled.
    #[must_use]
    pub fn with_stall_after(self, stall_after: Duration) -> Self {
        MeshOptions { stall_after, ..self }
    }

    /// The same with calls compared before every operation, or not.
    #[must_use]
    pub fn with_checked(self, checked: bool) -> Self {
        MeshOptions { checked, ..self }
    }

    /// The same with contributions searched for NaN and infinities, or not.
    #[must_use]
    pub fn with_check_finite(self, check_finite: bool) -> Self {
        MeshOptions { check_finite, ..self }
    }
}

/// Collectives over a byte transport.
///
/// Algorithms and their order of reduction are those of [`crate::table`]. Blocking calls run in the caller's thread; each lane
/// has one progress thread, started at its first asynchronous operation. Operations that are still under way when the last
/// communicator of a job is dropped end at once, with [`Error::Aborted`].
pub struct Mesh<T: Transport> {
    core: Arc<Core<T>>,
    /// What operations under way do not hold.
    owner: Arc<Owner<Core<T>>>,
    group: Arc<Group>,
}

/// What all communicators of a job run on, on one rank.
struct Core<T> {
    transport: T,
    options: MeshOptions,
    shared: Shared<Scratch>,
}

impl<T: Transport> Mesh<T> {
    /// The first communicator over a transport, over all ranks of `control`: those of the job, or of a
    /// [`Subgroup`](crate::control::Subgroup).
    ///
    /// # Errors
    /// `InvalidArgument` when the transport connects other ranks than those of `control`, or numbers them differently.
    pub fn new(transport: T, control: Arc<dyn Control>, options: MeshOptions) -> Result<Self> {
        let theirs = (transport.rank(), transport.world_size());
        let ours = (control.rank(), control.world_size());
        if theirs != ours {
            return Err(Error::invalid(format!(
                "the transport {} is that of rank {} of {}, the control plane that of rank {} of {}: connect the transport with the \
                 control plane that the communicator gets",
                transport.name(),
                theirs.0,
                theirs.1,
                ours.0,
                ours.1
            )));
        }
        Ok(Self::over(transport, control, options))
    }

    /// As [`new`](Mesh::new), where both are known to be of the same ranks.
    pub(crate) fn over(transport: T, control: Arc<dyn Control>, options: MeshOptions) -> Self {
        let scratch = (0..transport.lanes()).map(|_| Scratch::default()).collect();
        let shared = Shared::new(control, scratch, options.stall_after, options.verdict_grace);
        let core = Arc::new(Core { transport, options, shared });
        core.follow();
        let group = Group::first(&*core.shared.control);
        Mesh { owner: Arc::new(Owner(core.clone())), core, group: Arc::new(group) }
    }

    /// The transport.
    pub fn transport(&self) -> &T {
        &self.core.transport
    }
}

impl<T: Transport> Communicator for Mesh<T> {
    fn name(&self) -> &str {
        self.core.transport.name()
    }

    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.members.len()
    }

    fn lanes(&self) -> usize {
        self.core.shared.lanes.len()
    }

    fn id(&self) -> u64 {
        self.group.id
    }

    fn start(&self, call: Call) -> Handle {
        let Call { op, buffer, input, counts, algorithm, lane, timeout, label, mode } = call;
        let refused = |error, buffer, input| Handle::done(Err(Failed { error, buffer: Some(buffer), input }));
        let (mut buffer, input) = match (buffer, input) {
            (Buffer::Host(buffer), None) => (buffer, None),
            (Buffer::Host(buffer), Some(Buffer::Host(input))) => (buffer, Some(input)),
            (buffer, input) => {
                let error = Error::Unsupported {
                    what: "device memory on a byte transport".into(),
                    why: "copy the buffer to the host first, or use a communicator that is native to the device".into(),
                };
                return refused(error, buffer, input);
            }
        };
        let asked = Asked { op: &op, counts: counts.as_ref(), algorithm, lane };
        let admitted =
            self.may_block(mode).and_then(|()| self.admit(&asked, buffer.view(), input.as_ref().map(HostBuffer::view)));
        let (lane_queue, extents, chosen) = match admitted {
            Ok(admitted) => admitted,
            Err(error) => return refused(error, Buffer::Host(buffer), input.map(Buffer::Host)),
        };

        let started = Started::new(&self.group);
        let deadline = Deadline::after(timeout.unwrap_or(self.core.options.timeout));
        // The number and the place on the lane are taken together, so that both follow the order of the callers.
        let mut order = self.group.order();
        let header = self.group.header(&mut order, &asked, &extents, chosen);
        let (core, group) = (self.core.clone(), self.group.clone());
        let run = move |due: Due<'_>| -> Outcome {
            let began = Instant::now();
            let outcome = match due {
                Due::Turn(turn) => {
                    let (buffer, input) = (buffer.view_mut(), input.as_ref().map(HostBuffer::view));
                    let io = Io { buffer, input, extents: &extents };
                    let outcome = core.run(&group, lane, &op, header, label, io, deadline);
                    // Whoever sees the end finds the lane free.
                    drop(turn);
                    outcome
                }
                without => {
                    let named = name(&call_of(header, &op), pair(&op, &group), label.as_deref());
                    Err(core.fail_without_turn(&without, lane, &named, deadline))
                }
            };
            let (buffer, input) = (Buffer::Host(buffer), input.map(Buffer::Host));
            match outcome {
                Ok(()) => Ok(Completed { buffer, input, began, ended: Instant::now() }),
                Err(error) => Err(Failed { error, buffer: Some(buffer), input }),
            }
        };
        if mode == Mode::Blocking
            && let Some(turn) = lane_queue.try_enter(deadline)
        {
            drop(order);
            return Handle::done(run(Due::Turn(turn)));
        }
        let (completer, handle) = Handle::pending();
        let job = move |due: Due<'_>| {
            completer.complete(run(due));
            drop(started);
        };
        lane_queue.enqueue(deadline, Box::new(job));
        drop(order);
        match mode {
            Mode::Background => handle,
            Mode::Blocking => Handle::done(handle.wait()),
        }
    }

    fn run_borrowed(&self, call: BorrowedCall<'_>) -> Result<()> {
        let BorrowedCall { op, buffer, input, counts, algorithm, lane, timeout, label, mode } = call;
        let asked = Asked { op: &op, counts: counts.as_ref(), algorithm, lane };
        let lent = View::from(&buffer);
        self.may_block(Mode::Blocking)?;
        let (lane_queue, extents, chosen) = self.admit(&asked, lent, input)?;
        let started = Started::new(&self.group);
        let deadline = Deadline::after(timeout.unwrap_or(self.core.options.timeout));
        let mut order = self.group.order();
        let Some(turn) = lane_queue.try_enter(deadline) else {
            // The operations before it on its lane run on another thread, which cannot be lent this memory.
            drop(order);
            let call = BorrowedCall { op, buffer, input, counts, algorithm, lane, timeout, label, mode };
            return crate::communicator::run_copied(self, call);
        };
        let header = self.group.header(&mut order, &asked, &extents, chosen);
        drop(order);
        let io = Io { buffer, input, extents: &extents };
        let outcome = self.core.run(&self.group, lane, &op, header, label, io, deadline);
        drop(turn);
        drop(started);
        outcome
    }

    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        let part = negotiate(self, &self.group, &*self.core.shared.control, color, key)?;
        Ok(part.map(|group| -> Arc<dyn Communicator> {
            let (core, owner) = (self.core.clone(), self.owner.clone());
            Arc::new(Mesh { core, owner, group: Arc::new(group) })
        }))
    }

    fn abort(&self, reason: &str) {
        self.core.abort(reason);
    }

    fn finish(&self, timeout: Duration) -> Result<()> {
        let Core { transport, shared, .. } = &*self.core;
        self.may_block(Mode::Blocking)?;
        let close = |deadline| transport.close(deadline).map_err(|error| shared.control.in_job(error));
        self.core.finish(self, &self.group, timeout, close)
    }
}

/// The data of an operation.
struct Io<'a> {
    buffer: ViewMut<'a>,
    input: Option<View<'a>>,
    extents: &'a Extents,
}

/// A header that stands for the operation as such, not for one of its messages.
fn call_of(header: Header, op: &Op) -> Header {
    Header { step: if matches!(op, Op::Recv { .. }) { CHECK_RECEIVE } else { CHECK }, ..header }
}

impl<T: Transport> Mesh<T> {
    /// Whether the caller's thread may wait for an operation. Looked at before the operation has a number, so that a refusal is that
    /// call's alone.
    fn may_block(&self, mode: Mode) -> Result<()> {
        if mode == Mode::Blocking { self.core.transport.may_block() } else { Ok(()) }
    }

    /// Checks what was asked for: the lane that it runs on, and by which algorithm.
    fn admit(
        &self,
        asked: &Asked<'_>,
        buffer: View<'_>,
        input: Option<View<'_>>,
    ) -> Result<(&Lane<Scratch>, Extents, Algorithm)> {
        let Core { shared, options, .. } = &*self.core;
        let elements = |view: View<'_>| Elements { dtype: view.dtype(), count: view.count() };
        shared.admit(&self.group, &options.table, asked, elements(buffer), input.map(elements))
    }
}

impl<T: Transport> Backend for Core<T> {
    type Scratch = Scratch;

    fn shared(&self) -> &Shared<Scratch> {
        &self.shared
    }

    fn end(self: &Arc<Self>, failure: &Error) {
        self.transport.abort(failure);
    }
}

impl<T: Transport> Core<T> {
    #[allow(clippy::too_many_arguments, reason = "they are the parts of one call")]
    fn run(
        self: &Arc<Self>,
        group: &Arc<Group>,
        lane: usize,
        op: &Op,
        header: Header,
        label: Option<Arc<str>>,
        io: Io<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let shared = &self.shared;
        if let Some(error) = shared.failure() {
            return Err(error.clone());
        }
        let call = call_of(header, op);
        if self.options.check_finite
            && let Some(found) = finite::find(io.extents, io.input.unwrap_or(View::from(&io.buffer)))
        {
            let error = Error::NotFinite {
                rank: shared.job_rank(),
                operation: name(&call, pair(op, group), label.as_deref()),
                index: found.index,
                value: found.value,
                count: found.count,
            };
            return Err(self.fail(error, ""));
        }
        let note = shared.watch.note(lane, call, op, label.clone(), group, deadline);
        let Io { mut buffer, input, extents } = io;
        let mut rounds = Rounds::new(&self.transport, &group.members, group.rank, lane, header, deadline);
        let mut scratch = shared.lanes[lane].scratch();
        let data = Data {
            bytes: buffer.bytes_mut(),
            input: input.map(|input| input.bytes()),
            extents,
            scratch: &mut scratch,
            piece: self.options.table.piece,
        };
        let guard = PanicGuard { core: self, header: &call };
        let compared = if self.options.checked { rounds.compare(op) } else { Ok(()) };
        let outcome = compared.and_then(|()| algorithms::run(op, &mut rounds, data));
        drop(guard);
        scratch.tidy();
        drop(note);
        outcome.map_err(|error| {
            let error = shared.control.in_job(error);
            let (error, during) = shared.watch.explain(error, &call, op, label.as_deref(), group);
            self.fail(error, &during)
        })
    }
}

/// Tells the other ranks if an operation panics: they would wait for it.
struct PanicGuard<'a, T: Transport> {
    core: &'a Arc<Core<T>>,
    header: &'a Header,
}

impl<T: Transport> Drop for PanicGuard<'_, T> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let error = Error::Internal(format!("{} panicked on rank {}", self.header, self.core.shared.job_rank()));
            self.core.fail(error, "");
        }
    }
}
