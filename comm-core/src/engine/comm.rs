//! The one implementation of [`Communicator`].

use std::any::Any;
use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::group::{header_kind, negotiate};
use super::job_state::Owner;
use super::outstanding::InFlight;
use super::{Data, Dequeued, Engine, Group, JobState, Lane, Operation, abort, follow};
use crate::buffer::Buffer;
use crate::communicator::{Communicator, run_copied};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::handle::{Completed, Failed, Handle, Outcome};
use crate::op::{Algorithm, BorrowedCall, Call, Extents, Mode, Op, Request, check};
use crate::table::supports;

/// A communicator on an [`Engine`].
///
/// Blocking calls run in the caller's thread; each lane has one progress thread, started at its first asynchronous operation. Operations
/// that are still under way when the last communicator of a job is dropped end at once, with [`Error::Aborted`].
pub struct Comm<E: Engine> {
    engine: Arc<E>,
    /// Not held by operations under way.
    owner: Arc<Owner<E>>,
    group: Arc<Group>,
    group_state: Arc<E::GroupState>,
}

impl<E: Engine> Comm<E> {
    /// The first communicator of a job, over all ranks of the engine's control plane.
    pub fn first(engine: Arc<E>, group_state: E::GroupState) -> Self {
        follow(&engine);
        Self::with_group_state(engine, group_state)
    }

    /// The same where `group_state` has to be made by all ranks together: the job's failure reaches the engine meanwhile.
    ///
    /// # Errors
    /// Those of `group_state`.
    pub fn first_with(engine: Arc<E>, group_state: impl FnOnce(&Arc<E>) -> Result<E::GroupState>) -> Result<Self> {
        follow(&engine);
        let group_state = group_state(&engine)?;
        Ok(Self::with_group_state(engine, group_state))
    }

    fn with_group_state(engine: Arc<E>, group_state: E::GroupState) -> Self {
        let group = Group::first(&*engine.shared().control);
        Comm {
            owner: Arc::new(Owner(engine.clone())),
            engine,
            group: Arc::new(group),
            group_state: Arc::new(group_state),
        }
    }

    /// The engine that performs its operations.
    pub fn engine(&self) -> &Arc<E> {
        &self.engine
    }

    /// Its ranks.
    pub fn group(&self) -> &Group {
        &self.group
    }

    fn shared(&self) -> &JobState<E::Lane> {
        self.engine.shared()
    }

    /// Whether the caller's thread may wait for an operation.
    fn may_block(&self, mode: Mode) -> Result<()> {
        match mode {
            Mode::Blocking => self.engine.may_block(),
            Mode::Background => Ok(()),
        }
    }

    /// Checks a call, and chooses its algorithm where the caller has not. Nothing is numbered yet, so that a refusal is that call's alone.
    fn admit(&self, request: &Request, data: &mut Data<'_>) -> Result<(Extents, Algorithm)> {
        let (shared, ranks) = (self.shared(), self.group.world_size());
        self.may_block(request.mode)?;
        let (buffer, input) = data.elements();
        let extents = check(&request.op, self.group.rank, ranks, buffer, input, request.counts.as_ref())?;
        if request.lane >= shared.lanes.len() {
            let lanes = shared.lanes.len();
            return Err(Error::invalid(format!("lane {} of a communicator that has {lanes} lanes", request.lane)));
        }
        let (kind, dtype) = (header_kind(&request.op), extents.dtype);
        let algorithm = match request.algorithm {
            None => shared.settings.table.choose(kind, dtype, extents.count, ranks),
            Some(algorithm) if supports(algorithm, kind, dtype, ranks) => algorithm,
            Some(algorithm) => {
                let what = format!("the algorithm {algorithm} cannot run {kind} of {dtype} on {ranks} ranks");
                return Err(Error::invalid(what));
            }
        };
        shared.is_open()?;
        // One that this rank has reported may not have become the job's yet.
        if let Some(error) = shared.control.settled_failure() {
            return Err(error);
        }
        self.engine.accept(&request.op, &extents, data)?;
        Ok((extents, algorithm))
    }

    /// Numbers a call that was admitted; its deadline runs from now on.
    fn number(&self, request: Request, (extents, algorithm): (Extents, Algorithm), deadline: Deadline) -> Running<E> {
        let header = self.group.number(&request, &extents, algorithm);
        let Request { op, lane, label, .. } = request;
        let operation = Operation { op, extents, header, lane, deadline, label, group: self.group.clone() };
        let (engine, group_state) = (self.engine.clone(), self.group_state.clone());
        Running { engine, group_state, operation, in_flight: InFlight::new(&self.group) }
    }

    fn deadline(&self, request: &Request) -> Deadline {
        Deadline::after(request.timeout.unwrap_or(self.shared().settings.timeout))
    }

    fn lane(&self, request: &Request) -> &Lane<E::Lane> {
        &self.shared().lanes[request.lane]
    }
}

impl<E: Engine> Communicator for Comm<E> {
    fn name(&self) -> &str {
        self.engine.name()
    }

    fn rank(&self) -> usize {
        self.group.rank
    }

    fn world_size(&self) -> usize {
        self.group.world_size()
    }

    fn lanes(&self) -> usize {
        self.shared().lanes.len()
    }

    fn id(&self) -> u64 {
        self.group.id
    }

    fn start(&self, call: Call) -> Handle {
        let (request, mut buffer, mut input) = call.replace_data((), None);
        let starting = self.shared().starting();
        let admitted = match self.admit(&request, &mut Data::of(&mut buffer, input.as_mut())) {
            Ok(admitted) => admitted,
            Err(error) => return Handle::done(Err(Failed { error, buffer: Some(buffer), input })),
        };
        let (mode, lane, deadline) = (request.mode, self.lane(&request), self.deadline(&request));
        let running = self.number(request, admitted, deadline);
        if (mode == Mode::Blocking || E::IS_INSTANT)
            && let Some(guard) = lane.try_enter(deadline)
        {
            drop(starting);
            return Handle::done(running.run_owned(buffer, input, Dequeued::Granted(guard)));
        }
        let (completer, handle) = Handle::pending();
        let job = move |due: Dequeued<'_>| {
            let outcome = running.run_owned(buffer, input, due);
            // Before its end is announced, so that a waiter finds that it holds nothing any more.
            let in_flight = running.let_go();
            completer.complete(outcome);
            drop(in_flight);
        };
        lane.enqueue(deadline, Box::new(job));
        drop(starting);
        match mode {
            Mode::Background => handle,
            Mode::Blocking => Handle::done(handle.wait()),
        }
    }

    fn run_borrowed(&self, call: BorrowedCall<'_>) -> Result<()> {
        let (request, mut buffer, input) = call.replace_data((), None);
        let starting = self.shared().starting();
        let admitted = self.admit(&request, &mut Data::lent(buffer.reborrow(), input))?;
        let deadline = self.deadline(&request);
        let Some(guard) = self.lane(&request).try_enter(deadline) else {
            drop(starting);
            // The operations before it on its lane run on another thread, which cannot be lent this memory.
            return run_copied(self, request.replace_data(buffer, input).0);
        };
        let running = self.number(request, admitted, deadline);
        drop(starting);
        let outcome = running.run(Data::lent(buffer, input));
        drop(guard);
        outcome.map_err(|failed| match failed.panic {
            Some(panic) => resume_unwind(panic),
            None => failed.error,
        })
    }

    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        let group = negotiate(self, &self.group, &*self.shared().control, color, key)?;
        let group_state = E::split(self, group.as_ref())?;
        Ok(group.zip(group_state).map(|(group, group_state)| -> Arc<dyn Communicator> {
            let (engine, owner) = (self.engine.clone(), self.owner.clone());
            Arc::new(Comm { engine, owner, group: Arc::new(group), group_state: Arc::new(group_state) })
        }))
    }

    fn abort(&self, reason: &str) {
        abort(&self.engine, reason);
    }

    fn finish(&self, timeout: Duration) -> Result<()> {
        let (shared, group, deadline) = (self.shared(), &self.group, Deadline::after(timeout));
        let during = "finishing, with operations still under way";
        self.engine.may_block()?;
        if group.is_first && shared.has_left() {
            return Ok(());
        }
        if group.is_first {
            if !group.all.wait_for_none(deadline) {
                return Err(self.engine.fail(shared.timeout(deadline), during));
            }
        } else if !group.own.wait_for_none(deadline) || !shared.lanes[0].wait_idle(deadline) {
            // The ranks meet on lane 0, in their turn. Before that nothing was sent, so the others can go on.
            let (rank, waited) = (shared.job_rank(), deadline.waited());
            let timeout = Error::Timeout { rank, operation: during.into(), waited, waiting_for: Vec::new() };
            return Err(shared.failure().cloned().unwrap_or(timeout));
        }
        if let Some(error) = shared.failure() {
            return Err(error.clone());
        }
        let barrier = Call::blocking(Op::Barrier, Buffer::from_vec::<u8>(Vec::new()));
        self.start(barrier.with_timeout(deadline.remaining())).wait().map_err(Failed::into_error)?;
        if group.is_first {
            shared.finish();
            let closed = self.engine.close(&self.group_state, deadline);
            closed.map_err(|error| self.engine.fail(error, "closing the connections"))?;
            shared.control.leave(deadline)?;
            shared.leave();
        }
        Ok(())
    }
}

impl<E: Engine> fmt::Debug for Comm<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Comm({}, rank {} of {})", self.name(), self.rank(), self.world_size())
    }
}

/// An operation with what it runs on.
struct Running<E: Engine> {
    engine: Arc<E>,
    group_state: Arc<E::GroupState>,
    operation: Operation,
    in_flight: InFlight,
}

/// A failed operation.
struct FailedRun {
    error: Error,
    /// Something may still use the device memory that it was lent.
    is_lost: bool,
    /// It panicked, and its caller is to panic too.
    panic: Option<Box<dyn Any + Send>>,
}

impl From<Error> for FailedRun {
    fn from(error: Error) -> Self {
        FailedRun { error, is_lost: false, panic: None }
    }
}

impl<E: Engine> Running<E> {
    /// Lets go of all that it runs on. It is outstanding until what this returns is dropped.
    fn let_go(self) -> InFlight {
        self.in_flight
    }

    /// Runs it on buffers that it owns.
    fn run_owned(&self, mut buffer: Buffer, mut input: Option<Buffer>, due: Dequeued<'_>) -> Outcome {
        let began = Instant::now();
        let outcome = match due {
            Dequeued::Granted(guard) => {
                let outcome = self.run(Data::of(&mut buffer, input.as_mut()));
                // Before its end is announced, so that a waiter finds the lane free.
                drop(guard);
                outcome
            }
            not_run => Err(self.fail_without_lane(&not_run).into()),
        };
        let Err(FailedRun { error, is_lost, panic }) = outcome else {
            return Ok(Completed { buffer, input, began, ended: Instant::now() });
        };
        let keep = |buffer: Buffer| match buffer {
            Buffer::Device(device) if is_lost => {
                // It is neither returned nor freed.
                mem::forget(device);
                None
            }
            // Memory of the host is not touched by the device.
            buffer => Some(buffer),
        };
        let (buffer, input) = (keep(buffer), input.and_then(keep));
        match panic {
            Some(panic) => resume_unwind(panic),
            None => Err(Failed { error, buffer, input }),
        }
    }

    /// Runs it, in its turn.
    fn run(&self, data: Data<'_>) -> Result<(), FailedRun> {
        let Running { engine, group_state, operation, .. } = self;
        let shared = engine.shared();
        if let Some(error) = shared.failure() {
            return Err(error.clone().into());
        }
        let is_on_device = data.is_on_device();
        let running_guard = shared.watch.note(operation);
        let mut lane = shared.lanes[operation.lane].scratch();
        let outcome = catch_unwind(AssertUnwindSafe(|| engine.perform(operation, group_state, &mut lane, data)));
        drop(running_guard);
        let (error, panic) = match outcome {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => {
                let (error, during) = shared.watch.explain(error, operation);
                (engine.fail(error, &during), None)
            }
            // The other ranks would wait for it.
            Err(panic) => {
                let what = format!("{} panicked on rank {}", operation.call(), shared.job_rank());
                (engine.fail(Error::Internal(what), ""), Some(panic))
            }
        };
        Err(FailedRun { error, is_lost: is_on_device && !engine.has_settled(&lane), panic })
    }

    /// Fails the job because the operation has left the queue of its lane without its turn. Gives the error.
    fn fail_without_lane(&self, why: &Dequeued<'_>) -> Error {
        let Operation { lane, deadline, .. } = self.operation;
        let (shared, named) = (self.engine.shared(), self.operation.name());
        match why {
            Dequeued::Granted(_) => Error::Internal(format!("{named} reached the head of its lane and was not run")),
            Dequeued::Expired => {
                let ahead = shared.watch.running(lane);
                let ahead = ahead.map_or_else(String::new, |operation| format!(", behind {operation}"));
                let during = format!("{named}, waiting for its turn on lane {lane}{ahead},");
                self.engine.fail(shared.timeout(deadline), &during)
            }
            Dequeued::NoThread(error) => {
                let what = format!("rank {}, {named}: starting the thread of lane {lane}", shared.job_rank());
                let error = Error::io(what, std::io::Error::new(error.kind(), error.to_string()));
                self.engine.fail(error, &named)
            }
        }
    }
}

#[cfg(test)]
mod tests;
