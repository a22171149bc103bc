//! What both transports share besides their connections: who takes part, the first abort, and the checks of a call.

use std::sync::OnceLock;

use comm_core::{Deadline, Error, Incoming, Outgoing, Result};

/// The ranks and lanes of a transport, and whether it was aborted.
pub(crate) struct Core {
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) lanes: usize,
    aborted: OnceLock<Error>,
}

impl Core {
    pub(crate) fn new(rank: usize, world_size: usize, lanes: usize) -> Self {
        Core { rank, world_size, lanes, aborted: OnceLock::new() }
    }

    /// Notes why everything ends; the first call wins. Waking those who wait is the transport's part.
    pub(crate) fn abort(&self, error: &Error) {
        let _ = self.aborted.set(error.clone());
    }

    /// The error of the first abort.
    pub(crate) fn aborted(&self) -> Option<Error> {
        self.aborted.get().cloned()
    }

    pub(crate) fn timeout(&self, operation: String, deadline: Deadline, waiting_for: Vec<usize>) -> Error {
        Error::Timeout { rank: self.rank, operation, waited: deadline.waited(), waiting_for }
    }

    /// Refuses an exchange that makes no sense.
    pub(crate) fn check(&self, lane: usize, outgoing: &[Outgoing<'_>], incoming: &[Incoming<'_>]) -> Result<()> {
        if let Some(error) = self.aborted() {
            return Err(error);
        }
        if lane >= self.lanes {
            return Err(Error::invalid(format!("lane {lane} of {}", self.lanes)));
        }
        for message in outgoing {
            if message.header.payload_len != message.payload.len() as u64 {
                return Err(Error::invalid(format!(
                    "a message to rank {} whose header says {} B and that has {} B",
                    message.peer,
                    message.header.payload_len,
                    message.payload.len()
                )));
            }
        }
        self.check_peers("to", outgoing.iter().map(|message| message.peer))?;
        self.check_peers("from", incoming.iter().map(|message| message.peer))
    }

    fn check_peers(&self, direction: &str, peers: impl Iterator<Item = usize> + Clone) -> Result<()> {
        for (index, peer) in peers.clone().enumerate() {
            if peer >= self.world_size || peer == self.rank {
                return Err(Error::invalid(format!(
                    "rank {} of {}: a message {direction} rank {peer}",
                    self.rank, self.world_size
                )));
            }
            if peers.clone().take(index).any(|earlier| earlier == peer) {
                return Err(Error::invalid(format!("rank {}: two messages {direction} rank {peer}", self.rank)));
            }
        }
        Ok(())
    }
}

/// What an error says was going on. Made when there is an error, not before: it takes longer than sending a small message.
pub(crate) fn describe(lane: usize, outgoing: &[Outgoing<'_>]) -> String {
    match outgoing {
        [message, ..] => format!("{} on lane {lane}", message.header),
        [] => format!("a receive on lane {lane}"),
    }
}
