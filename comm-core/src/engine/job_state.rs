//! The state that the communicators of a job share on one rank, and how they end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use super::watch::Watch;
use super::{Engine, Lane, abort};
use crate::control::{Activity, Control};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::table::Table;

/// Settings that all engines have.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How long an operation may take from its start, unless its call says otherwise.
    pub timeout: Duration,
    /// After how long an operation that goes on counts as stalled.
    pub stall_after: Duration,
    /// How long the control plane gets to say what was behind an error.
    pub verdict_grace: Duration,
    /// By what an algorithm is chosen, checked and named.
    pub table: Table,
}

/// The state that the communicators of a job share on one rank, for every engine. `S` is a lane's own state ([`Engine::Lane`]).
pub struct JobState<S> {
    /// The job's control plane, or that of a part of it.
    pub control: Arc<dyn Control>,
    /// On which operations run.
    pub lanes: Vec<Lane<S>>,
    pub(super) settings: Settings,
    /// What runs on the lanes. Shared with the control plane, which may drop it last; it therefore holds no reference to the rest.
    pub(super) watch: Arc<Watch>,
    starting: Mutex<()>,
    failure: OnceLock<Error>,
    /// The first communicator has finished, and its connections are closed or about to be.
    is_finished: AtomicBool,
    /// All of that went well.
    has_left: AtomicBool,
}

impl<S> JobState<S> {
    /// With a lane for each `scratch`.
    pub fn new(control: Arc<dyn Control>, scratch: Vec<S>, settings: Settings) -> Self {
        let lane = |(number, scratch)| Lane::new(format!("comm-lane-{number}"), scratch);
        let lanes: Vec<Lane<S>> = scratch.into_iter().enumerate().map(lane).collect();
        let watch = Arc::new(Watch::new(lanes.len(), settings.stall_after));
        // Two steps, since a `Weak` of a trait object is made from one of the type itself.
        let activity: Arc<dyn Activity> = watch.clone();
        control.watch(Arc::downgrade(&activity));
        JobState {
            control,
            lanes,
            settings,
            watch,
            starting: Mutex::default(),
            failure: OnceLock::new(),
            is_finished: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
        }
    }

    /// Nobody else starts an operation while this lives. An operation is admitted, numbered and put on its lane under one guard, so
    /// that numbers and places follow the order of the callers, and every admitted operation has its place.
    pub fn starting(&self) -> MutexGuard<'_, ()> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This rank as the job numbers it.
    pub fn job_rank(&self) -> usize {
        self.control.job_rank(self.control.rank())
    }

    /// The job's failure. After an orderly end, that nothing can be started any more.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// False if there is one already.
    pub(super) fn set_failure(&self, error: &Error) -> bool {
        self.failure.set(error.clone()).is_ok()
    }

    /// Whether operations can be started.
    ///
    /// # Errors
    /// Why not.
    pub(super) fn is_open(&self) -> Result<()> {
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        if self.is_finished.load(Ordering::Acquire) {
            return Err(Error::invalid("the job's first communicator has finished, so its connections are closed"));
        }
        Ok(())
    }

    /// Admits no more operations. Those admitted before have their place on a lane.
    pub(super) fn finish(&self) {
        self.is_finished.store(true, Ordering::Release);
        drop(self.starting());
    }

    /// Whether the first communicator has ended well.
    pub(super) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    /// The first communicator has ended well.
    pub(super) fn leave(&self) {
        // What is started from now on gets this answer.
        let _ = self.failure.set(Error::invalid("the communicator has finished; nothing can be started on it"));
        self.has_left.store(true, Ordering::Release);
    }

    /// That a deadline has passed, of an operation to be named by [`Engine::fail`].
    pub fn timeout(&self, deadline: Deadline) -> Error {
        let (rank, waited) = (self.job_rank(), deadline.waited());
        Error::Timeout { rank, operation: String::new(), waited, waiting_for: Vec::new() }
    }
}

impl<S> Drop for JobState<S> {
    fn drop(&mut self) {
        self.lanes.iter().for_each(Lane::stop);
    }
}

/// Held by all communicators of a job on one rank, but not by its operations: dropped when nobody can wait for these any more.
pub(super) struct Owner<E: Engine>(pub(super) Arc<E>);

impl<E: Engine> Drop for Owner<E> {
    fn drop(&mut self) {
        let shared = self.0.shared();
        if shared.is_open().is_err() {
            return;
        }
        // An operation has let go of its lane when its handle says that it has ended.
        if !shared.lanes.iter().all(Lane::is_idle) {
            // They would keep this rank alive in the eyes of others until their deadlines.
            abort(&self.0, "its communicator was dropped with operations under way");
        }
    }
}
