//! Errors, grouped by what a caller can do about them.

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::deadline::Deadline;
use crate::descriptors;

/// The result of everything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure of a collective, of a transport or of the control plane.
///
/// Errors are cheap to clone, because the first one of a job is handed to every rank and to every operation in flight.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rank died or its connection ended. Start the job again, from a checkpoint if there is one.
    #[error("rank {rank} was lost{}: {detail}", during(operation))]
    PeerLost {
        /// The rank that is gone.
        rank: usize,
        /// The operation that noticed, empty when none was running.
        operation: String,
        /// What was seen: a closed connection, a reset, a missed heartbeat.
        detail: String,
    },

    /// An operation did not end by its deadline. Raise the deadline, or look at why the named ranks are late.
    #[error(
        "rank {rank}: {operation} did not finish within {:.1} s (still waiting for {}); check what delays them, or give a longer timeout",
        waited.as_secs_f64(),
        ranks(waiting_for)
    )]
    Timeout {
        /// The rank that gave up.
        rank: usize,
        /// What it was doing.
        operation: String,
        /// How long it had waited.
        waited: Duration,
        /// The ranks that had not answered, as far as known.
        waiting_for: Vec<usize>,
    },

    /// Two ranks called different operations. A bug in the caller: all ranks must issue the same operations in the same order,
    /// each on the same lane.
    #[error(
        "rank {rank} called {ours}, but rank {peer} called {theirs}; all ranks must call the same operations in the same order, each on the same lane"
    )]
    Mismatch {
        /// The rank that noticed.
        rank: usize,
        /// What it had called.
        ours: String,
        /// The rank that differs.
        peer: usize,
        /// What that rank had called.
        theirs: String,
    },

    /// A rank contributed NaN or an infinity. Found only where it is looked for
    /// ([`MeshOptions::check_finite`](crate::MeshOptions::check_finite); of the crate `isocomm`: `TransportOptions::check_finite`).
    #[error("rank {rank} contributed {value} to {operation}, at index {index}{}; check what computed this value", of_many(*count))]
    NotFinite {
        /// The rank whose contribution it is.
        rank: usize,
        /// The operation, with the label that its caller gave it.
        operation: String,
        /// Where in the rank's buffer the first one is, in elements.
        index: usize,
        /// What it is: `NaN`, `inf` or `-inf`.
        value: String,
        /// How many there are in this contribution.
        count: usize,
    },

    /// A rank gave up on purpose.
    #[error("rank {by} aborted the job: {reason}")]
    Aborted {
        /// The rank that called abort.
        by: usize,
        /// Its reason.
        reason: String,
    },

    /// The caller asked for something that makes no sense here: a root out of range, a wrong length.
    #[error("{0}")]
    InvalidArgument(String),

    /// This backend, build or machine cannot do what was asked.
    #[error("{what} is not available: {why}")]
    Unsupported {
        /// What was asked.
        what: String,
        /// Why it is not there and what to try.
        why: String,
    },

    /// A peer sent bytes that the protocol does not allow.
    #[error("{who} sent bytes that cannot be decoded: {what}")]
    Protocol {
        /// The peer, as well as it is known: "rank 3", or an address.
        who: String,
        /// What is wrong with them.
        what: String,
    },

    /// The ranks could not find each other, or did not agree on what to run.
    #[error("rendezvous failed: {0}")]
    Rendezvous(String),

    /// This program is at fault, not its input.
    #[error("internal error, please report it: {0}")]
    Internal(String),

    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was attempted, on which file or address.
        what: String,
        /// The system's own error.
        #[source]
        source: Arc<io::Error>,
    },
}

/// The message of a panic.
pub(crate) fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}

impl Error {
    /// An [`Error::Io`] that says what was attempted; where there are no file descriptors left, also what to do.
    pub fn io(what: impl Into<String>, source: io::Error) -> Self {
        let source =
            if descriptors::ran_out(&source) { io::Error::other(descriptors::explain(&source)) } else { source };
        Error::Io { what: what.into(), source: Arc::new(source) }
    }

    /// An [`Error::InvalidArgument`].
    pub fn invalid(what: impl Into<String>) -> Self {
        Error::InvalidArgument(what.into())
    }

    /// The same with every rank `number`ed anew, as far as ranks are named in fields of their own. What is said in words (an
    /// operation, a reason) stays.
    #[must_use]
    pub fn with_ranks(self, number: impl Fn(usize) -> usize) -> Self {
        match self {
            Error::PeerLost { rank, operation, detail } => Error::PeerLost { rank: number(rank), operation, detail },
            Error::Timeout { rank, operation, waited, waiting_for } => Error::Timeout {
                rank: number(rank),
                operation,
                waited,
                waiting_for: waiting_for.into_iter().map(number).collect(),
            },
            Error::Mismatch { rank, ours, peer, theirs } => {
                Error::Mismatch { rank: number(rank), ours, peer: number(peer), theirs }
            }
            Error::NotFinite { rank, operation, index, value, count } => {
                Error::NotFinite { rank: number(rank), operation, index, value, count }
            }
            Error::Aborted { by, reason } => Error::Aborted { by: number(by), reason },
            other => other,
        }
    }

    /// That `deadline` has passed for `operation` on `rank`, which waits for others.
    pub fn timeout(
        rank: usize,
        operation: impl Into<String>,
        deadline: Deadline,
        waiting_for: impl IntoIterator<Item = usize>,
    ) -> Error {
        let mut waiting_for: Vec<usize> = waiting_for.into_iter().collect();
        waiting_for.sort_unstable();
        waiting_for.dedup();
        Error::Timeout { rank, operation: operation.into(), waited: deadline.waited(), waiting_for }
    }

    /// The rank that this error blames: of `PeerLost`, `NotFinite` and `Aborted`. `None` for others; `Timeout` and `Mismatch` name several in their fields.
    pub fn culprit(&self) -> Option<usize> {
        match self {
            Error::PeerLost { rank, .. } | Error::NotFinite { rank, .. } => Some(*rank),
            Error::Aborted { by, .. } => Some(*by),
            _ => None,
        }
    }

    /// The same failure as it travels over the control plane to other ranks.
    pub fn to_notice(&self, rank: usize) -> Notice {
        match self {
            Error::PeerLost { rank, operation, detail } => {
                Notice::PeerLost { rank: *rank, operation: operation.clone(), detail: detail.clone() }
            }
            Error::Timeout { rank, operation, waited, waiting_for } => Notice::Timeout {
                rank: *rank,
                operation: operation.clone(),
                waited: *waited,
                waiting_for: waiting_for.clone(),
            },
            Error::Mismatch { rank, ours, peer, theirs } => {
                Notice::Mismatch { rank: *rank, ours: ours.clone(), peer: *peer, theirs: theirs.clone() }
            }
            Error::NotFinite { rank, operation, index, value, count } => Notice::NotFinite {
                rank: *rank,
                operation: operation.clone(),
                index: *index,
                value: value.clone(),
                count: *count,
            },
            Error::Aborted { by, reason } => Notice::Aborted { by: *by, reason: reason.clone() },
            other => Notice::Aborted { by: rank, reason: other.to_string() },
        }
    }
}

/// A failure as it is told to other ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of the errors of the same names")]
pub enum Notice {
    PeerLost { rank: usize, operation: String, detail: String },
    Timeout { rank: usize, operation: String, waited: Duration, waiting_for: Vec<usize> },
    Mismatch { rank: usize, ours: String, peer: usize, theirs: String },
    NotFinite { rank: usize, operation: String, index: usize, value: String, count: usize },
    Aborted { by: usize, reason: String },
}

impl From<Notice> for Error {
    fn from(notice: Notice) -> Self {
        match notice {
            Notice::PeerLost { rank, operation, detail } => Error::PeerLost { rank, operation, detail },
            Notice::Timeout { rank, operation, waited, waiting_for } => {
                Error::Timeout { rank, operation, waited, waiting_for }
            }
            Notice::Mismatch { rank, ours, peer, theirs } => Error::Mismatch { rank, ours, peer, theirs },
            Notice::NotFinite { rank, operation, index, value, count } => {
                Error::NotFinite { rank, operation, index, value, count }
            }
            Notice::Aborted { by, reason } => Error::Aborted { by, reason },
        }
    }
}

fn during(operation: &str) -> String {
    if operation.is_empty() { String::new() } else { format!(" during {operation}") }
}

fn of_many(count: usize) -> String {
    if count > 1 { format!(" and {} more", count - 1) } else { String::new() }
}

fn ranks(ranks: &[usize]) -> String {
    match ranks {
        [] => "an unknown rank".to_string(),
        [rank] => format!("rank {rank}"),
        ranks => {
            let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
            format!("ranks {}", list.join(", "))
        }
    }
}
