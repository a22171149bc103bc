//! Ranks of one machine that share memory.
//!
//! For every ordered pair of ranks and every lane there is a ring of bytes with one writer and one reader, in anonymous memory that
//! both map. A message is copied into the ring by its sender and reduced, or copied, out of it by its receiver, piece by piece
//! if it is longer than the ring; no system call is made unless a peer sleeps.
//!
//! A message that does not fit into the ring waits for its receiver in any case. Where the kernel allows it ([`ShmOptions::single_copy`]), such a
//! message is *lent*: the ring holds its address, the receiver reads it out of the sender's memory, in blocks that are reduced while
//! they are in cache, and the exchange of the sender ends when all has been read. A sender whose exchange fails before that
//! takes the loan back, and the receiver fails rather than believe what it has read.
//!
//! Each rank makes the memory into which all others write: a `memfd` that cannot change its size any more. The others find it
//! through the control plane and open it as `/proc/PID/fd/N`. It has no name in any directory, so whenever and however the
//! ranks end, nothing is left behind.

mod connect;
mod exchange;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod layout;
mod single_copy;
#[allow(unsafe_code, reason = "memory shared with other processes, and the system calls around it")]
mod sys;

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crate::control::Control;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::lanes::{Lanes, check_messages};
use crate::spinner::Spinner;
use crate::transport::{Incoming, Outgoing, Transport};
use crate::waiting::Waiting;

use exchange::{IdleWait, ShmLane, TransportState, lost, state};
use layout::Layout;

/// Settings of a [`ShmTransport`]. All ranks use the same lanes and rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShmOptions {
    /// Lanes, at least one.
    pub lanes: usize,
    /// Bytes of each ring, a power of two from 4 KiB to 1 GiB. Each rank takes `(ranks − 1) · lanes` times as much memory, of which
    /// [`for_ranks`](ShmOptions::for_ranks) takes care. Two rings, one in each direction, should fit into a core's second cache.
    pub ring_bytes: usize,
    /// Whether a message that does not fit into a ring is copied once, out of the sender's memory, if the system lets every rank read that of
    /// every other. The fact `shm.single_copy` says whether it does. A rank without it is enough for none to use it.
    /// Buffers that do not fit into the processor's caches should be in huge pages ([`prefer_huge_pages`](crate::prefer_huge_pages)): the kernel
    /// copies page by page, which takes longer than two copies by way of the ring where pages of 4 KiB are not in a cache.
    pub single_copy: bool,
    /// How this rank waits. Ranks that never sleep ([`Waiting::Busy`]) spare the others the question whether they do.
    pub waiting: Waiting,
}

impl ShmOptions {
    /// For a job of so many ranks: with the default rings, or with shorter ones where a rank's rings would take more than 16 MiB. With one lane that is
    /// from 66 ranks on; 256 ranks have rings of 64 KiB.
    pub fn for_ranks(ranks: usize, lanes: usize) -> Self {
        /// Bytes of all rings of a rank.
        const MOST: usize = 16 << 20;
        let default = ShmOptions::default();
        let rings = ranks.saturating_sub(1).saturating_mul(lanes).max(1);
        // The largest power of two of which so many fit.
        let fits = 1 << (MOST / rings).max(1).ilog2();
        ShmOptions { lanes, ring_bytes: default.ring_bytes.min(fits).max(layout::RING_BYTES.0), ..default }
    }
}

impl Default for ShmOptions {
    fn default() -> Self {
        ShmOptions { lanes: 2, ring_bytes: 256 << 10, single_copy: true, waiting: Waiting::Adaptive }
    }
}

/// Moves messages through memory that the ranks' processes share.
pub struct ShmTransport {
    options: ShmOptions,
    shared: TransportState,
    lanes: Lanes<ShmLane>,
    aborted: OnceLock<Error>,
}

impl ShmTransport {
    /// Shares memory with all other ranks, which call this too.
    ///
    /// # Errors
    /// [`Error::Unsupported`], on every rank, naming the rank that cannot have memory or cannot open that of another, because it runs
    /// on another machine, in another container or as another user; [`Error::Rendezvous`] when the ranks' settings
    /// differ; [`Error::InvalidArgument`] for settings that make no sense; and those of [`Control::all_gather`].
    pub fn connect(control: &dyn Control, options: &ShmOptions, deadline: Deadline) -> Result<Self> {
        let shared = connect::connect(control, options, deadline)?;
        let lanes = Lanes::new((0..options.lanes).map(|number| ShmLane::new(number, &shared)));
        Ok(ShmTransport { options: *options, shared, lanes, aborted: OnceLock::new() })
    }

    fn check(&self) -> Result<()> {
        match self.aborted.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// What was sent lies in the receivers' memory already, so this only waits for the others to close too.
    fn close_handshake(&self, deadline: Deadline) -> Result<()> {
        self.leave(state::CLOSED);
        let mut spinner = Spinner::new(self.options.waiting);
        let mut wait = IdleWait::new(&self.shared, self.lanes.count(), &mut spinner);
        loop {
            self.check()?;
            let is_open = |peer: &usize| self.shared.state_of(*peer) == state::OPEN;
            if !self.shared.peers().any(|peer| is_open(&peer)) {
                break;
            }
            if !wait.once(deadline) {
                let late = self.shared.peers().filter(is_open);
                return Err(Error::timeout(self.shared.rank, "closing the connections", deadline, late));
            }
        }
        let ended = self.shared.peers().find(|peer| self.shared.state_of(*peer) != state::CLOSED);
        ended.map_or(Ok(()), |peer| Err(lost(&self.shared, peer)))
    }

    /// Tells the others that nothing follows. A rank that has closed stays closed.
    fn leave(&self, as_state: u32) {
        let rank = self.shared.rank;
        for peer in self.shared.peers() {
            let theirs = self.shared.segments[peer].state(Layout::slot(peer, rank));
            let _ = theirs.compare_exchange(state::OPEN, as_state, Ordering::AcqRel, Ordering::Relaxed);
        }
        sys::after_stores();
        for peer in self.shared.peers() {
            (0..=self.lanes.count()).for_each(|futex| self.shared.segments[peer].futex(futex).notify_always());
        }
    }
}

impl Transport for ShmTransport {
    fn name(&self) -> &str {
        "shm"
    }

    fn rank(&self) -> usize {
        self.shared.rank
    }

    fn world_size(&self) -> usize {
        self.shared.segments.len()
    }

    fn lanes(&self) -> usize {
        self.lanes.count()
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        self.check()?;
        check_messages(self.shared.rank, self.world_size(), outgoing, incoming)?;
        self.lanes.run(lane, |lane| lane.exchange(&self.shared, outgoing, incoming, deadline, || self.check()))
    }

    fn abort(&self, error: &Error) {
        let _ = self.aborted.set(error.clone());
        sys::after_stores();
        (0..=self.lanes.count()).for_each(|futex| self.shared.mine().futex(futex).notify_always());
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        self.lanes.close(self.shared.rank, deadline, || self.check(), |_| self.close_handshake(deadline))
    }

    fn facts(&self) -> Vec<(String, String)> {
        let single_copy = match &self.shared.single_copy {
            Ok(_) => "yes".into(),
            Err(why) => format!("no ({why})"),
        };
        vec![
            ("shm.ring_bytes".into(), self.options.ring_bytes.to_string()),
            ("shm.single_copy".into(), single_copy),
            ("shm.waiting".into(), self.options.waiting.to_string()),
            ("shm.segment_bytes".into(), self.shared.mine().layout().total().to_string()),
        ]
    }
}

impl Drop for ShmTransport {
    fn drop(&mut self) {
        self.leave(state::ENDED);
    }
}

#[cfg(test)]
mod tests;
