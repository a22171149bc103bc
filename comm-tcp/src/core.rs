//! Common to both transports: ranks and lanes, the first abort, and the checks of a call.

use std::sync::OnceLock;

use comm_core::lanes::check_messages;
use comm_core::{Deadline, Error, Incoming, Outgoing, Result, descriptors};

use crate::rendezvous::listens;

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

    /// The file descriptors that connecting takes: one for each connection that this rank dials, `accepted` for each that it
    /// listens for, at most, and what it takes `beside`.
    pub(crate) fn need(&self, transport: &'static str, accepted: usize, beside: usize) -> DescriptorNeed {
        let Core { rank, world_size, lanes, .. } = *self;
        let listening = (0..world_size).filter(|peer| *peer != rank && listens(rank, *peer)).count();
        let dialling = world_size.saturating_sub(listening + 1);
        DescriptorNeed {
            what: format!("{transport} between {world_size} ranks with {lanes} lane(s)"),
            descriptors: lanes * (dialling + accepted * listening) + beside,
            count: format!(
                "on each lane 1 for each of the {dialling} that rank {rank} dials and {accepted} for each of the {listening} that dial it"
            ),
        }
    }

    pub(crate) fn timeout(&self, operation: String, deadline: Deadline, waiting_for: Vec<usize>) -> Error {
        Error::timeout(self.rank, operation, deadline, waiting_for)
    }

    /// Fails once the transport was aborted.
    pub(crate) fn check(&self) -> Result<()> {
        self.aborted().map_or(Ok(()), Err)
    }

    /// Refuses an exchange that makes no sense.
    pub(crate) fn check_messages(&self, outgoing: &[Outgoing<'_>], incoming: &[Incoming<'_>]) -> Result<()> {
        self.check()?;
        check_messages(self.rank, self.world_size, outgoing, incoming)
    }
}

/// How many file descriptors connecting takes.
pub(crate) struct DescriptorNeed {
    what: String,
    descriptors: usize,
    count: String,
}

impl DescriptorNeed {
    /// Refuses, before anything is opened, what this process may not have the descriptors for.
    pub(crate) fn check(&self) -> Result<()> {
        descriptors::check(self.descriptors, || self.count.clone())
            .map_err(|why| Error::Unsupported { what: self.what.clone(), why })
    }

    /// There were none left for `doing` something.
    pub(crate) fn unmet(&self, doing: &str, error: &std::io::Error) -> Error {
        let why =
            format!("{doing}: {}; it takes up to {} ({})", descriptors::explain(error), self.descriptors, self.count);
        Error::Unsupported { what: self.what.clone(), why }
    }
}

/// The name of the operation, for errors. Made when there is an error, not before: it takes longer than sending a small message.
pub(crate) fn describe(lane: usize, outgoing: &[Outgoing<'_>]) -> String {
    match outgoing {
        [message, ..] => format!("{} on lane {lane}", message.header),
        [] => format!("a receive on lane {lane}"),
    }
}
