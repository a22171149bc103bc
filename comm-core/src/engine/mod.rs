//! The life of a call, once for all communicators: what is checked, how operations are numbered and named, in what order they run,
//! and how a job fails and ends.
//!
//! [`Comm`] is the one implementation of [`Communicator`](crate::Communicator). It runs on an [`Engine`], which performs operations:
//! [`Mesh`](crate::Mesh) by messages of a byte transport, [`NullCommunicator`](crate::null::NullCommunicator) not at all, and crates
//! of their own by a library that has collectives itself.

mod comm;
mod data;
mod group;
mod job_state;
mod lane;
mod operation;
mod outstanding;
mod watch;

use std::sync::Arc;

pub use crate::op::{Elements, Extents, OwnCopy, Shards, check};
pub use comm::Comm;
pub use data::{BufferLocation, Data, Source};
pub use group::Group;
pub use job_state::{JobState, Settings};
pub use lane::{Dequeued, Job, Lane, LaneGuard};
pub use operation::Operation;

use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::op::Op;
use group::verdict;

/// Performs the operations of a [`Comm`], on one rank.
pub trait Engine: Send + Sync + Sized + 'static {
    /// The lane's own state, for the one operation that runs on it.
    type Lane: Send + 'static;

    /// State of one communicator beside its ranks.
    type GroupState: Send + Sync + 'static;

    /// Whether operations end at once, so that those which may run beside their caller run in its thread too.
    const IS_INSTANT: bool = false;

    /// The backend's name as users write it.
    fn name(&self) -> &str;

    /// What the communicators of the job share.
    fn shared(&self) -> &JobState<Self::Lane>;

    /// Whether the calling thread may wait for an operation.
    ///
    /// # Errors
    /// Why not.
    fn may_block(&self) -> Result<()> {
        Ok(())
    }

    /// Whether this engine can perform an operation whose arguments make sense, before it has a number: a refusal is that call's
    /// alone.
    ///
    /// # Errors
    /// Why not.
    fn accept(&self, op: &Op, extents: &Extents, data: &mut Data<'_>) -> Result<()>;

    /// Performs an operation, in its turn on its lane.
    ///
    /// # Errors
    /// The cause, in ranks of the job. It becomes the job's failure, unless there is one already.
    fn perform(
        &self,
        operation: &Operation,
        group_state: &Self::GroupState,
        lane: &mut Self::Lane,
        data: Data<'_>,
    ) -> Result<()>;

    /// Waits, after an operation on device memory failed or panicked, until nothing of it runs any more. False where something may go
    /// on: the memory is then neither given back nor freed.
    fn has_settled(&self, lane: &Self::Lane) -> bool {
        let _ = lane;
        true
    }

    /// Makes what the communicator `group` has of its own, which came out of a split of `parent`. Collective over `parent`: ranks that
    /// get no communicator call it too, with no group, and get nothing.
    ///
    /// # Errors
    /// As any collective.
    fn split(parent: &Comm<Self>, group: Option<&Group>) -> Result<Option<Self::GroupState>>;

    /// Ends whatever runs, since the job has failed. Called once. Must not wait.
    fn end(self: &Arc<Self>, failure: &Error);

    /// Closes the connections, when no rank runs anything any more. `group_state` is the first communicator's.
    ///
    /// # Errors
    /// In ranks of the job.
    fn close(self: &Arc<Self>, group_state: &Self::GroupState, deadline: Deadline) -> Result<()>;

    /// Turns an error that was seen `during` an operation, in ranks of the job, into the job's failure.
    fn fail(self: &Arc<Self>, observed: Error, during: &str) -> Error {
        let shared = self.shared();
        let verdict = verdict(&*shared.control, shared.failure(), observed, during, shared.settings.verdict_grace);
        adopt(self, &verdict);
        shared.failure().cloned().unwrap_or(verdict)
    }
}

/// Has `engine` learn of the job's failure from the control plane.
fn follow<E: Engine>(engine: &Arc<E>) {
    let weak = Arc::downgrade(engine);
    engine.shared().control.on_failure(Box::new(move |error| {
        if let Some(engine) = weak.upgrade() {
            adopt(&engine, error);
        }
    }));
}

/// Takes over the job's failure: everything running and everything later fails with it. Does not wait.
fn adopt<E: Engine>(engine: &Arc<E>, error: &Error) {
    if engine.shared().set_failure(error) {
        engine.end(error);
    }
}

/// Fails the job because this rank gives up, for a `reason`. Does not wait: what runs ends when it is settled with which failure.
fn abort<E: Engine>(engine: &Arc<E>, reason: &str) {
    let shared = engine.shared();
    shared.control.poison(&Error::Aborted { by: shared.job_rank(), reason: reason.into() });
}
