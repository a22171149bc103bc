//! The lanes of a transport, each with what belongs to it alone.

use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::Duration;

use comm_core::waiting::Spinner;
use comm_core::{Deadline, Error, Result};

use crate::core::Core;

/// All lanes of a transport, with a content of type `C` each. A lane is locked by the exchange that runs on it.
pub(crate) struct Lanes<C> {
    lanes: Vec<Mutex<Lane<C>>>,
}

/// One lane.
pub(crate) struct Lane<C> {
    pub(crate) content: C,
    /// How its exchanges wait.
    pub(crate) spinner: Spinner,
    state: State,
}

enum State {
    Open,
    /// With the first error.
    Failed(Error),
    Closed,
}

impl<C> Lanes<C> {
    pub(crate) fn new(contents: Vec<C>, spinner: &Spinner) -> Self {
        let lane = |content| Mutex::new(Lane { content, spinner: spinner.clone(), state: State::Open });
        Lanes { lanes: contents.into_iter().map(lane).collect() }
    }

    /// Locks a lane that is fit for use. `lane` is below the number of lanes.
    pub(crate) fn lock(&self, core: &Core, lane: usize, deadline: Deadline) -> Result<MutexGuard<'_, Lane<C>>> {
        let Some(mutex) = self.lanes.get(lane) else {
            return Err(Error::invalid(format!("lane {lane} of {}", self.lanes.len())));
        };
        let guard = loop {
            match mutex.try_lock() {
                Ok(guard) => break guard,
                Err(TryLockError::Poisoned(_)) => {
                    return Err(Error::Internal(format!("an exchange on lane {lane} has panicked")));
                }
                Err(TryLockError::WouldBlock) => {}
            }
            // Callers run one exchange at a time on a lane; whoever does not, waits without haste.
            if let Some(error) = core.aborted() {
                return Err(error);
            }
            if deadline.has_passed() {
                let operation = format!("waiting for another exchange on lane {lane}");
                return Err(core.timeout(operation, deadline, Vec::new()));
            }
            thread::sleep(Duration::from_micros(200));
        };
        match &guard.state {
            State::Open => Ok(guard),
            State::Failed(error) => Err(error.clone()),
            State::Closed => Err(Error::invalid(format!("rank {}: the transport has been closed already", core.rank))),
        }
    }

    /// Locks all lanes, in order.
    pub(crate) fn lock_all(&self, core: &Core, deadline: Deadline) -> Result<Vec<MutexGuard<'_, Lane<C>>>> {
        (0..self.lanes.len()).map(|lane| self.lock(core, lane, deadline)).collect()
    }
}

impl<C> Lane<C> {
    /// Notes how an exchange ended: after an error nothing goes over this lane any more, for its messages may have been cut
    /// anywhere.
    pub(crate) fn settle(&mut self, outcome: &Result<()>) {
        if let Err(error) = outcome {
            self.state = State::Failed(error.clone());
        }
    }

    /// Refuses every later exchange.
    pub(crate) fn close(&mut self) {
        self.state = State::Closed;
    }
}
