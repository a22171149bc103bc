//! An operation that was admitted: its arguments are checked, and it has its number.

use std::fmt::Write as _;
use std::sync::Arc;

use super::Group;
use crate::deadline::Deadline;
use crate::header::{CHECK, CHECK_RECEIVE, Header};
use crate::op::{Extents, Op, Partners};

/// An operation whose arguments have been checked, with its number and its deadline; its data aside.
#[derive(Clone, Debug)]
pub struct Operation {
    /// What to do.
    pub op: Op,
    /// What it reads, writes and copies on this rank.
    pub extents: Extents,
    /// The header of its messages; step and payload are set for each message.
    pub header: Header,
    /// The lane on which it runs.
    pub lane: usize,
    /// By when it has to end.
    pub deadline: Deadline,
    /// Its caller's name for it.
    pub label: Option<Arc<str>>,
    /// The ranks of its communicator.
    pub group: Arc<Group>,
}

impl Operation {
    /// A header that stands for the operation as such, not for one of its messages.
    pub fn call(&self) -> Header {
        Header {
            step: if matches!(self.op.partners(), Partners::From(_)) { CHECK_RECEIVE } else { CHECK },
            ..self.header
        }
    }

    /// From which rank of the job to which a message goes; `None` for a collective.
    pub(super) fn pair(&self) -> Option<(u32, u32)> {
        let Group { rank: me, job_ranks, .. } = &*self.group;
        let rank = |rank: usize| job_ranks.get(rank).map(|rank| *rank as u32);
        match self.op.partners() {
            Partners::To(peer) => Some((rank(*me)?, rank(peer)?)),
            Partners::From(peer) => Some((rank(peer)?, rank(*me)?)),
            Partners::All => None,
        }
    }

    /// The operation for people: what it is, between whom, and what its caller calls it.
    pub fn name(&self) -> String {
        name(&self.call(), self.pair(), self.label.as_deref())
    }
}

/// As [`Operation::name`], of an operation with this [`Operation::call`].
pub(super) fn name(call: &Header, pair: Option<(u32, u32)>, label: Option<&str>) -> String {
    let mut name = call.to_string();
    // Writing to a string does not fail.
    let _ = match pair {
        None => Ok(()),
        Some((from, _)) if call.step == CHECK_RECEIVE => write!(name, " from rank {from}"),
        Some((_, to)) => write!(name, " to rank {to}"),
    };
    if let Some(label) = label {
        let _ = write!(name, " [{label}]");
    }
    name
}
