//! The error of a connection. The operation is added later, where it is known.

use comm_core::Error;

/// Why a connection cannot go on.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The connection has ended, with what was seen.
    Lost(String),
    /// Anything else.
    Other(Error),
}

impl Fault {
    /// The error that blames `rank`, noticed by `operation`.
    pub(crate) fn blame(self, rank: usize, operation: impl FnOnce() -> String) -> Error {
        match self {
            Fault::Lost(detail) => Error::PeerLost { rank, operation: operation(), detail },
            Fault::Other(error) => error,
        }
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Other(error)
    }
}
