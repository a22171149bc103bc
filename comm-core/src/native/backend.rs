//! What the communicators of a job share on one rank, and how they end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{Asked, Due, Group, Lane, Watch, header_kind, verdict};
use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::control::{Activity, Control};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::handle::Failed;
use crate::op::{Algorithm, Call, Elements, Extents, Op, check};
use crate::table::{Table, supports};

/// What the communicators of a job share on one rank, whatever they run on. `S` is what an operation may use of its lane.
pub struct Shared<S> {
    /// The job's control plane, or that of a part of it.
    pub control: Arc<dyn Control>,
    /// On which operations run.
    pub lanes: Vec<Lane<S>>,
    /// What runs there. It knows nothing else of this, so that whoever drops it last drops nothing else.
    pub watch: Arc<Watch>,
    verdict_grace: Duration,
    failure: OnceLock<Error>,
    /// The first communicator has finished, and its connections are closed or about to be.
    is_finished: AtomicBool,
    /// All of that went well.
    has_left: AtomicBool,
}

impl<S> Shared<S> {
    /// With a lane for each scratch memory. An operation counts as stalled after `stall_after`; the control plane gets `verdict_grace` to
    /// say what was behind an error ([`verdict`]).
    pub fn new(control: Arc<dyn Control>, scratch: Vec<S>, stall_after: Duration, verdict_grace: Duration) -> Self {
        let lane = |(number, scratch)| Lane::new(format!("comm-lane-{number}"), scratch);
        let lanes: Vec<Lane<S>> = scratch.into_iter().enumerate().map(lane).collect();
        let watch = Arc::new(Watch::new(lanes.len(), stall_after));
        // Two steps, since a `Weak` of a trait object is made from one of the type itself.
        let activity: Arc<dyn Activity> = watch.clone();
        control.watch(Arc::downgrade(&activity));
        let (failure, is_finished, has_left) = (OnceLock::new(), AtomicBool::new(false), AtomicBool::new(false));
        Shared { control, lanes, watch, verdict_grace, failure, is_finished, has_left }
    }

    /// This rank as the job numbers it.
    pub fn job_rank(&self) -> usize {
        self.control.job_rank(self.control.rank())
    }

    /// The job's failure. After an orderly end, that nothing can be started any more.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Whether operations can be started.
    ///
    /// # Errors
    /// Why not.
    pub fn is_open(&self) -> Result<()> {
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        if self.is_finished.load(Ordering::Acquire) {
            return Err(Error::invalid("the job's first communicator has finished, so its connections are closed"));
        }
        Ok(())
    }

    /// Checks what was asked for of a communicator whose ranks are `group`: the lane that it runs on, its extents, and its algorithm, which
    /// `table` chooses where the caller has not.
    ///
    /// # Errors
    /// `InvalidArgument`, or why nothing can be started.
    pub fn admit(
        &self,
        group: &Group,
        table: &Table,
        asked: &Asked<'_>,
        buffer: Elements,
        input: Option<Elements>,
    ) -> Result<(&Lane<S>, Extents, Algorithm)> {
        let ranks = group.world_size();
        let extents = check(asked.op, group.rank, ranks, buffer, input, asked.counts)?;
        let Some(lane) = self.lanes.get(asked.lane) else {
            let lanes = self.lanes.len();
            return Err(Error::invalid(format!("lane {} of a communicator that has {lanes} lanes", asked.lane)));
        };
        let (kind, dtype) = (header_kind(asked.op), extents.dtype);
        let algorithm = match asked.algorithm {
            None => table.choose(kind, dtype, extents.count, ranks),
            Some(algorithm) if supports(algorithm, kind, dtype, ranks) => algorithm,
            Some(algorithm) => {
                let what = format!("the algorithm {algorithm} cannot run {kind} of {dtype} on {ranks} ranks");
                return Err(Error::invalid(what));
            }
        };
        self.is_open()?;
        // One that this rank has reported may not have become the job's yet.
        if let Some(error) = self.control.settled_failure() {
            return Err(error);
        }
        Ok((lane, extents, algorithm))
    }

    /// That a deadline has passed, of an operation to be named by [`Backend::fail`].
    pub fn timeout(&self, deadline: Deadline) -> Error {
        let (rank, waited) = (self.job_rank(), deadline.waited());
        Error::Timeout { rank, operation: String::new(), waited, waiting_for: Vec::new() }
    }
}

impl<S> Drop for Shared<S> {
    fn drop(&mut self) {
        self.lanes.iter().for_each(Lane::stop);
    }
}

/// What the communicators of a job run on, on one rank: how a job fails and how it ends is the same for all.
pub trait Backend: Send + Sync + Sized + 'static {
    /// What an operation may use of its lane.
    type Scratch: Send + 'static;

    /// What the communicators share.
    fn shared(&self) -> &Shared<Self::Scratch>;

    /// Ends whatever runs, since the job has failed. Called once. Must not wait.
    fn end(self: &Arc<Self>, failure: &Error);

    /// Learns of the job's failure from the control plane.
    fn follow(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.shared().control.on_failure(Box::new(move |error| {
            if let Some(backend) = weak.upgrade() {
                backend.adopt(error);
            }
        }));
    }

    /// Takes over the job's failure: everything running and everything later fails with it. Does not wait.
    fn adopt(self: &Arc<Self>, error: &Error) {
        if self.shared().failure.set(error.clone()).is_ok() {
            self.end(error);
        }
    }

    /// Turns an error that was seen `during` an operation, in ranks of the job, into the job's failure.
    fn fail(self: &Arc<Self>, observed: Error, during: &str) -> Error {
        let shared = self.shared();
        let verdict = verdict(&*shared.control, shared.failure(), observed, during, shared.verdict_grace);
        self.adopt(&verdict);
        shared.failure().cloned().unwrap_or(verdict)
    }

    /// Fails the job because this rank gives up, for a `reason`. Does not wait: what runs ends when it is settled with which failure.
    fn abort(self: &Arc<Self>, reason: &str) {
        let shared = self.shared();
        let error = Error::Aborted { by: shared.job_rank(), reason: reason.into() };
        shared.control.poison(&error);
    }

    /// Fails the job because an operation has left the queue of its lane without its turn. Gives the error.
    fn fail_without_turn(self: &Arc<Self>, why: &Due<'_>, lane: usize, named: &str, deadline: Deadline) -> Error {
        let shared = self.shared();
        match why {
            Due::Turn(_) => Error::Internal(format!("{named} had its turn and was not run")),
            Due::Expired => {
                let ahead = shared.watch.running(lane);
                let ahead = ahead.map_or_else(String::new, |operation| format!(", behind {operation}"));
                let during = format!("{named}, waiting for its turn on lane {lane}{ahead},");
                self.fail(shared.timeout(deadline), &during)
            }
            Due::NoThread(error) => {
                let what = format!("rank {}, {named}: starting the thread of lane {lane}", shared.job_rank());
                self.fail(Error::io(what, std::io::Error::new(error.kind(), error.to_string())), named)
            }
        }
    }

    /// Ends `communicator` of this backend, whose ranks are `group`, in an orderly way, as [`Communicator::finish`] does. If it is the
    /// first one, `close` ends the connections, while nothing runs on any rank, with errors in ranks of the job.
    ///
    /// # Errors
    /// The job's failure, or what becomes it; for another than the first one, `Timeout`, after which the job goes on, when its own
    /// operations, or those before it on lane 0, take too long.
    fn finish(
        self: &Arc<Self>,
        communicator: &dyn Communicator,
        group: &Group,
        timeout: Duration,
        close: impl FnOnce(Deadline) -> Result<()>,
    ) -> Result<()> {
        let (shared, deadline) = (self.shared(), Deadline::after(timeout));
        let during = "finishing, with operations still under way";
        if group.is_first && shared.has_left.load(Ordering::Acquire) {
            return Ok(());
        }
        if group.is_first {
            if !group.all.wait_for_none(deadline) {
                return Err(self.fail(shared.timeout(deadline), during));
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
        let mut barrier = Call::blocking(Op::Barrier, Buffer::from_vec::<u8>(Vec::new()));
        barrier.timeout = Some(deadline.remaining());
        communicator.start(barrier).wait().map_err(Failed::into_error)?;
        if group.is_first {
            shared.is_finished.store(true, Ordering::Release);
            close(deadline).map_err(|error| self.fail(error, "closing the connections"))?;
            shared.control.leave(deadline)?;
            // What is started from now on gets this answer.
            let _ = shared.failure.set(Error::invalid("the communicator has finished; nothing can be started on it"));
            shared.has_left.store(true, Ordering::Release);
        }
        Ok(())
    }
}

/// Held by all communicators of a job on one rank, but not by its operations: dropped when nobody can wait for these any more.
pub struct Owner<B: Backend>(pub Arc<B>);

impl<B: Backend> Drop for Owner<B> {
    fn drop(&mut self) {
        let shared = self.0.shared();
        if shared.is_open().is_err() {
            return;
        }
        // An operation has let go of its lane when its handle says that it has ended.
        if !shared.lanes.iter().all(Lane::is_idle) {
            // They would keep this rank alive in the eyes of others until their deadlines.
            self.0.abort("its communicator was dropped with operations under way");
        }
    }
}
