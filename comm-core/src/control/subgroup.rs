//! Some of a job's ranks, with a control plane of their own that rests on the job's.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::{Activity, Control, StallReport};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::hex;
use crate::job::Network;

/// The part of a job's ranks that gave the same color, for a transport of its own: shared memory inside a machine, say, beside a
/// network among all.
///
/// Ranks are numbered within the group, in the order of the job. Everything else is the job's: its failure is the group's and
/// the other way round, a death anywhere ends the groups too, and errors and stall reports name ranks of the job. Keys
/// are the group's own.
///
/// [`all_gather`](Control::all_gather) is carried by the job's: while one group gathers, all ranks of the job do, each in its own
/// group, with the same label and in the same order. So whoever connects a transport inside a group has every rank of the job
/// connect one, of the same kind, at the same time. Where that fails in one group, the job has to be told
/// ([`poison`](Control::poison)), or the others wait for it until their deadline.
pub struct Subgroup {
    job: Arc<dyn Control>,
    name: String,
    color: u64,
    /// Those of `job` that are in the group, in order.
    members: Vec<usize>,
    /// This one's place among them.
    rank: usize,
    /// Tells this group from every other one of the job.
    id: [u8; 32],
}

impl Subgroup {
    /// This rank's group: those that give the same `color`. All ranks of `job` call it together, with the same `name`, which is
    /// for people, and sets apart what different divisions of one job derive and gather.
    ///
    /// # Errors
    /// Those of [`Control::all_gather`]; [`Error::Protocol`] for a rank that gives no color.
    pub fn split(job: Arc<dyn Control>, name: &str, color: u64, deadline: Deadline) -> Result<Arc<Self>> {
        let colors: Vec<u64> = job
            .all_gather(&format!("colors of {name}"), &color.to_le_bytes(), deadline)?
            .iter()
            .enumerate()
            .map(|(rank, blob)| {
                let bytes = <[u8; 8]>::try_from(blob.as_slice()).map_err(|_| Error::Protocol {
                    who: format!("rank {}", job.job_rank(rank)),
                    what: format!("{} bytes as its color in the division into {name}", blob.len()),
                })?;
                Ok(u64::from_le_bytes(bytes))
            })
            .collect::<Result<_>>()?;
        Self::of_colors(job, name, &colors)
    }

    /// As [`split`](Subgroup::split), where the colors of all ranks are known, by rank of `job`: nothing is exchanged.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] unless there is one color for each rank.
    pub fn of_colors(job: Arc<dyn Control>, name: &str, colors: &[u64]) -> Result<Arc<Self>> {
        let own = colors.get(job.rank()).filter(|_| colors.len() == job.world_size());
        let Some(&color) = own else {
            return Err(Error::invalid(format!(
                "{} colors for the division of {} ranks into {name}; every rank has one",
                colors.len(),
                job.world_size()
            )));
        };
        let members: Vec<usize> = (0..colors.len()).filter(|rank| colors.get(*rank) == Some(&color)).collect();
        let rank = members.iter().take_while(|rank| **rank < job.rank()).count();
        let mut hash = Sha256::new();
        hash.update(job.communicator_id().to_le_bytes());
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update(color.to_le_bytes());
        members.iter().for_each(|rank| hash.update((*rank as u64).to_le_bytes()));
        let id = hash.finalize().into();
        Ok(Arc::new(Subgroup { job, name: name.into(), color, members, rank, id }))
    }

    /// The control plane that it rests on.
    pub fn job(&self) -> &Arc<dyn Control> {
        &self.job
    }

    /// The color that this rank and the others of its group gave.
    pub fn color(&self) -> u64 {
        self.color
    }

    /// The ranks of the job that are in the group, in order.
    pub fn job_ranks(&self) -> Vec<usize> {
        self.members.iter().map(|rank| self.job.job_rank(*rank)).collect()
    }

    /// Says whose numbers the ranks are that `text` names in words, if it does.
    fn noted(&self, text: String) -> String {
        if text.contains("rank") { format!("{text} (ranks as numbered in {self})") } else { text }
    }
}

/// For errors: `group 1 of the nodes, whose ranks are 2, 3 of the job`.
impl fmt::Display for Subgroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// A group of thousands is not spelled out.
        const SHOWN: usize = 16;
        let ranks = self.job_ranks();
        let shown: Vec<String> = ranks.iter().take(SHOWN).map(usize::to_string).collect();
        let rest = if ranks.len() > SHOWN { ", …" } else { "" };
        write!(f, "group {} of {}, whose ranks are {}{rest} of the job", self.color, self.name, shown.join(", "))
    }
}

impl fmt::Debug for Subgroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subgroup")
            .field("name", &self.name)
            .field("color", &self.color)
            .field("members", &self.members)
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

#[deny(clippy::missing_trait_methods)]
impl Control for Subgroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.members.len()
    }

    /// All ranks of the job call it together, each in its own group.
    fn all_gather(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let mut all = self.job.all_gather(&format!("{}: {label}", self.name), blob, deadline)?;
        let own = self.members.iter().map(|rank| all.get_mut(*rank).map(std::mem::take));
        own.collect::<Option<_>>().ok_or_else(|| {
            Error::Internal(format!("gathering {label:?} gave fewer blobs than the job has ranks, which {self} needs"))
        })
    }

    /// The group's rank 0 may be another than the job's, so all get what they do not need.
    fn gather_at_0(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let all = self.all_gather(label, blob, deadline)?;
        Ok(if self.rank == 0 { all } else { Vec::new() })
    }

    fn derive_key(&self, label: &str) -> [u8; 32] {
        self.job.derive_key(&format!("group {}: {label}", hex(&self.id)))
    }

    /// The whole job fails.
    fn poison(&self, error: &Error) {
        self.job.poison(error);
    }

    fn failure(&self) -> Option<Error> {
        self.job.failure()
    }

    fn settled_failure(&self) -> Option<Error> {
        self.job.settled_failure()
    }

    fn verdict(&self, observed: Error, grace: Duration) -> Error {
        self.job.verdict(observed, grace)
    }

    fn on_failure(&self, hook: Box<dyn Fn(&Error) + Send + Sync>) {
        self.job.on_failure(hook);
    }

    fn watch(&self, activity: Weak<dyn Activity>) {
        self.job.watch(activity);
    }

    fn on_stall(&self, hook: Box<dyn Fn(&StallReport) + Send + Sync>) {
        self.job.on_stall(hook);
    }

    fn local_address(&self) -> Option<SocketAddr> {
        self.job.local_address()
    }

    fn network(&self) -> Network {
        self.job.network()
    }

    fn job_rank(&self, rank: usize) -> usize {
        self.members.get(rank).map_or(rank, |rank| self.job.job_rank(*rank))
    }

    fn in_job(&self, error: Error) -> Error {
        match error.with_ranks(|rank| self.job_rank(rank)) {
            Error::PeerLost { rank, operation, detail } => {
                Error::PeerLost { rank, operation, detail: self.noted(detail) }
            }
            Error::Protocol { who, what } => Error::Protocol { who: self.noted(who), what: self.noted(what) },
            Error::Rendezvous(why) => Error::Rendezvous(self.noted(why)),
            Error::InvalidArgument(why) => Error::InvalidArgument(self.noted(why)),
            Error::Unsupported { what, why } => Error::Unsupported { what, why: self.noted(why) },
            Error::Io { what, source } => Error::Io { what: self.noted(what), source },
            other => other,
        }
    }

    fn communicator_id(&self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.id;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }

    /// Nothing is left: the rank stays in the job, whose own `leave` is still to come. Returns at once; the transport has waited for
    /// what it needs.
    fn leave(&self, _deadline: Deadline) -> Result<()> {
        self.failure().map_or(Ok(()), Err)
    }
}
