//! One communicator's ranks, and the numbers of its operations.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::outstanding::Outstanding;
use crate::collectives::CommunicatorExt;
use crate::communicator::Communicator;
use crate::control::Control;
use crate::dtype::ReduceOp;
use crate::error::{Error, Result};
use crate::header::Header;
use crate::op::{Algorithm, Counts, Extents, Op, OpKind, Partners, Request};

/// One communicator.
#[derive(Debug)]
pub struct Group {
    /// Its id, the same on its ranks.
    pub id: u64,
    /// Ranks of the first communicator, by rank in this one.
    pub members: Vec<usize>,
    /// The same as the job numbers them.
    pub job_ranks: Vec<usize>,
    /// This rank within it.
    pub rank: usize,
    /// Whether it is the first one, which closes the connections.
    pub is_first: bool,
    numbers: Numbers,
    /// Its operations, and those of all communicators that share its connections.
    pub(super) own: Outstanding,
    pub(super) all: Arc<Outstanding>,
}

/// Numbers given out so far, those of messages by peer. Their order is that of [`JobState::starting`](super::JobState::starting).
#[derive(Debug)]
struct Numbers {
    collectives: AtomicU64,
    splits: AtomicU64,
    sends: Vec<AtomicU64>,
    receives: Vec<AtomicU64>,
}

impl Group {
    /// The communicator over all ranks of `control`.
    pub(super) fn first(control: &dyn Control) -> Self {
        let members = (0..control.world_size()).collect();
        Self::new(control.communicator_id(), members, control, control.rank(), None)
    }

    /// `parent` counts the operations of all communicators; without it this is the first one.
    fn new(
        id: u64,
        members: Vec<usize>,
        control: &dyn Control,
        rank: usize,
        parent: Option<&Arc<Outstanding>>,
    ) -> Self {
        let of_peers = || members.iter().map(|_| AtomicU64::new(0)).collect();
        let (collectives, splits) = (AtomicU64::new(0), AtomicU64::new(1));
        let numbers = Numbers { collectives, splits, sends: of_peers(), receives: of_peers() };
        let job_ranks = members.iter().map(|rank| control.job_rank(*rank)).collect();
        Group {
            id,
            members,
            job_ranks,
            rank,
            is_first: parent.is_none(),
            numbers,
            own: Outstanding::default(),
            all: parent.cloned().unwrap_or_default(),
        }
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.members.len()
    }

    /// Numbers an operation whose arguments have been checked, and describes it. Called while [`JobState::starting`](super::JobState::starting)
    /// is held.
    pub(super) fn number(&self, request: &Request, extents: &Extents, algorithm: Algorithm) -> Header {
        let op = &request.op;
        let counter = match op.partners() {
            Partners::To(rank) => &self.numbers.sends[rank],
            Partners::From(rank) => &self.numbers.receives[rank],
            Partners::All => &self.numbers.collectives,
        };
        let sequence = counter.fetch_add(1, Ordering::Relaxed);
        Header {
            communicator: self.id,
            sequence,
            kind: header_kind(op),
            dtype: extents.dtype,
            reduce: op.reduce_op().map(ReduceOp::shared),
            algorithm,
            root: op.root().unwrap_or(0) as u32,
            count: extents.count as u64,
            division: request.counts.as_ref().map_or(0, Counts::fingerprint),
            step: 0,
            payload_len: 0,
        }
    }

    /// The part of it that `members` of it form, ordered as they are, which came out of split `number` and this rank's `color`. `None`
    /// where this rank is not among them.
    fn part(&self, number: u64, color: u64, members: &[usize], control: &dyn Control) -> Option<Self> {
        let rank = members.iter().position(|rank| *rank == self.rank)?;
        let members = members.iter().map(|rank| self.members[*rank]).collect();
        Some(Self::new(child_id(self.id, number, color), members, control, rank, Some(&self.all)))
    }
}

/// Negotiates a [`Communicator::split`] of `communicator`, whose ranks are `group`: who is in this rank's part. Collective over the
/// communicator.
///
/// # Errors
/// As any collective.
pub(super) fn negotiate(
    communicator: &dyn Communicator,
    group: &Group,
    control: &dyn Control,
    color: Option<u64>,
    key: i64,
) -> Result<Option<Group>> {
    let mine = [i64::from(color.is_some()), color.unwrap_or(0).cast_signed(), key];
    let mut all = vec![0i64; 3 * group.world_size()];
    all[3 * group.rank..3 * group.rank + 3].copy_from_slice(&mine);
    // Three numbers a rank divide evenly, so shard r is rank r's.
    let all: Vec<i64> = communicator.run_vec(Op::AllGather, all)?;
    // No two splits get the same number, whoever else splits at the same time.
    let number = group.numbers.splits.fetch_add(1, Ordering::Relaxed);
    let Some(color) = color else { return Ok(None) };
    let mut chosen: Vec<(i64, usize)> = all
        .chunks_exact(3)
        .enumerate()
        .filter(|(_, theirs)| theirs[0] == 1 && theirs[1] == color.cast_signed())
        .map(|(rank, theirs)| (theirs[2], rank))
        .collect();
    chosen.sort_unstable();
    let members: Vec<usize> = chosen.into_iter().map(|(_, rank)| rank).collect();
    Ok(group.part(number, color, &members, control))
}

/// What the job's failure is after an error was `observed` on the data path, in ranks of the job, `during` an operation; `failure` is
/// what is known already. A connection that ended may be the echo of something else, for which the control plane gets `grace`.
pub(super) fn verdict(
    control: &dyn Control,
    failure: Option<&Error>,
    observed: Error,
    during: &str,
    grace: Duration,
) -> Error {
    let observed = match observed {
        Error::PeerLost { rank, operation, detail } if operation.is_empty() => {
            Error::PeerLost { rank, operation: during.into(), detail }
        }
        Error::Timeout { rank, waited, waiting_for, .. } => {
            Error::Timeout { rank, operation: during.into(), waited, waiting_for }
        }
        other => other,
    };
    match failure {
        Some(error) => error.clone(),
        None => {
            // Only a connection that ended may be an echo; the rest was seen first-hand.
            let may_be_echo = matches!(observed, Error::PeerLost { .. } | Error::Io { .. });
            control.verdict(observed, if may_be_echo { grace } else { Duration::ZERO })
        }
    }
}

/// Both ends of a message call it a send.
pub(super) fn header_kind(op: &Op) -> OpKind {
    if op.kind() == OpKind::Recv { OpKind::Send } else { op.kind() }
}

/// An id for the `number`-th split's part `color` of communicator `parent`, the same on all its ranks.
fn child_id(parent: u64, number: u64, color: u64) -> u64 {
    let mut hash = Sha256::new();
    for part in [parent, number, color] {
        hash.update(part.to_le_bytes());
    }
    let digest = hash.finalize();
    u64::from_le_bytes(std::array::from_fn(|index| digest[index]))
}
