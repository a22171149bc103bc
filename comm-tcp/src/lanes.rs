//! The links of a transport, one set a lane.

use std::pin::pin;

use comm_core::{Deadline, Error, Incoming, Result, Sink};
use tokio::sync::{Mutex, MutexGuard};

use crate::runtime::Core;

/// All links of a transport, of type `L`. A lane is locked by the exchange that runs on it.
pub(crate) struct Lanes<L> {
    lanes: Vec<Mutex<Lane<L>>>,
}

/// The links of one lane, by peer; this rank's own place is empty.
pub(crate) struct Lane<L> {
    pub(crate) links: Vec<Option<L>>,
    state: State,
}

enum State {
    Open,
    /// With the first error.
    Failed(Error),
    Closed,
}

impl<L> Lanes<L> {
    /// From links in the order `[lane][peer]`.
    pub(crate) fn new(links: Vec<Vec<Option<L>>>) -> Self {
        Lanes { lanes: links.into_iter().map(|links| Mutex::new(Lane { links, state: State::Open })).collect() }
    }

    /// Locks a lane that is fit for use. `lane` is below the number of lanes.
    pub(crate) async fn lock(&self, core: &Core, lane: usize, deadline: Deadline) -> Result<MutexGuard<'_, Lane<L>>> {
        let Some(mutex) = self.lanes.get(lane) else {
            return Err(Error::invalid(format!("lane {lane} of {}", self.lanes.len())));
        };
        let guard = match mutex.try_lock() {
            Ok(guard) => guard,
            Err(_) => {
                let mut waiting = pin!(async { Ok(mutex.lock().await) });
                let operation = || format!("waiting for another exchange on lane {lane}");
                core.bounded(operation, deadline, &mut waiting, |_| Vec::new()).await?
            }
        };
        match &guard.state {
            State::Open => Ok(guard),
            State::Failed(error) => Err(error.clone()),
            State::Closed => Err(Error::invalid(format!("rank {}: the transport has been closed already", core.rank))),
        }
    }
}

impl<L> Lane<L> {
    /// Notes how an exchange ended.
    pub(crate) fn settle(&mut self, outcome: Result<()>) -> Result<()> {
        if let Err(error) = &outcome {
            self.fail(error);
        }
        outcome
    }

    /// Nothing goes over this lane any more: its messages may have been cut anywhere.
    pub(crate) fn fail(&mut self, error: &Error) {
        self.state = State::Failed(error.clone());
    }

    /// Ends the connections.
    pub(crate) fn close(&mut self) {
        self.links.clear();
        self.state = State::Closed;
    }
}

/// The sinks of an exchange by peer. The peers have been checked.
pub(crate) fn sinks_by_peer<'s>(world_size: usize, incoming: &'s mut [Incoming<'_>]) -> Vec<Option<&'s mut dyn Sink>> {
    let mut sinks: Vec<Option<&'s mut dyn Sink>> = (0..world_size).map(|_| None).collect();
    for message in incoming {
        if let Some(slot) = sinks.get_mut(message.peer) {
            *slot = Some(&mut *message.sink);
        }
    }
    sinks
}
