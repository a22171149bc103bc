//! What every control plane does.

use std::net::SocketAddr;
use std::sync::Weak;
use std::time::Duration;

use super::stall::{Activity, StallReport};
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::job::Network;

/// The side channel of a job, alive from rendezvous to the end: small, authenticated, independent of the transport under
/// measurement.
///
/// Its first failure is the job's: whatever is reported first, by the death of a rank or by [`poison`](Control::poison), is
/// what every rank gets.
///
/// A [`Subgroup`](super::Subgroup) is one too, over some of the job's ranks. [`rank`](Control::rank), [`world_size`](Control::world_size) and the
/// order of [`all_gather`](Control::all_gather) are then the group's, while errors and reports always speak of the job's ranks:
/// whoever hands one over has it numbered so ([`in_job`](Control::in_job)).
pub trait Control: Send + Sync + 'static {
    /// This rank.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Gathers one small message (at most [`MAX_BLOB`](super::MAX_BLOB) bytes) of every rank, in rank order. All ranks call it with the same
    /// `label`, in the same order; one call at a time.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] when the labels differ, [`Error::Timeout`], [`Error::PeerLost`], or the job's failure.
    fn all_gather(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>>;

    /// As [`all_gather`](Control::all_gather), for rank 0 alone: there it gives the messages of all ranks, elsewhere none once rank 0 has them
    /// all. A control plane that sends them to everybody nevertheless is right, too, and only slower.
    ///
    /// # Errors
    /// As there.
    fn gather_at_0(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let all = self.all_gather(label, blob, deadline)?;
        Ok(if self.rank() == 0 { all } else { Vec::new() })
    }

    /// A key that only the ranks of this job know, for `label`. Keys of different labels tell nothing of each other, and so do
    /// those of another job, another start of this one, another number of ranks or other settings.
    fn derive_key(&self, label: &str) -> [u8; 32];

    /// Tells every rank that the job has failed with `error`. Never blocks.
    fn poison(&self, error: &Error);

    /// The job's failure, if it has one. Until it is settled, which takes a round trip, it may still become another one.
    fn failure(&self) -> Option<Error>;

    /// The job's failure, if it has one, the same on all ranks and for good. Once a failure has been reported, by this rank or to
    /// it, nothing may begin any more, so this waits until it is settled; otherwise it returns at once.
    fn settled_failure(&self) -> Option<Error> {
        self.failure()
    }

    /// Which error to report after `observed` was seen on the data path: a closed data connection may be the echo of a death
    /// elsewhere. Waits up to `grace` for the job's failure; without one `observed` becomes it, unless another rank was faster.
    /// Returns the [settled](Control::settled_failure) one.
    fn verdict(&self, observed: Error, grace: Duration) -> Error;

    /// Calls `hook` once, from some thread, when the job's failure is [settled](Control::settled_failure); at once if it already
    /// is. The hook must not block.
    fn on_failure(&self, hook: Box<dyn Fn(&Error) + Send + Sync>);

    /// Asks `activity` from time to time whether an operation of this rank takes too long. If one does, every rank is asked what it
    /// is doing, and all ranks get the [`StallReport`]. A rank may have several, one for each of its transports. A control plane
    /// that cannot do so does nothing.
    fn watch(&self, activity: Weak<dyn Activity>) {
        let _ = activity;
    }

    /// Calls `hook` with every stall report, from some thread. The hook must not block.
    fn on_stall(&self, hook: Box<dyn Fn(&StallReport) + Send + Sync>) {
        let _ = hook;
    }

    /// The address by which this rank reaches rank 0 of the job, with its port there; at rank 0 the one by which most others reach
    /// it. It routes, so it is where listeners for the others are best ([`location::bind_address`](crate::location::bind_address)). `None`
    /// where no network is in between.
    fn local_address(&self) -> Option<SocketAddr> {
        None
    }

    /// Which addresses and ports the job's listeners take.
    fn network(&self) -> Network {
        Network::default()
    }

    /// The job's number of this control plane's rank `rank`.
    fn job_rank(&self, rank: usize) -> usize {
        rank
    }

    /// `error`, which names ranks of this control plane, as it names ranks of the job.
    fn in_job(&self, error: Error) -> Error {
        error
    }

    /// The id of the communicator over all ranks of this control plane. Other groups of the job have others, so that what is told
    /// of one is not taken for the other's.
    fn communicator_id(&self) -> u64 {
        1
    }

    /// Leaves in an orderly way: after this, the end of this process is no death. All ranks call it; it returns once all have.
    ///
    /// # Errors
    /// [`Error::Timeout`], or the job's failure.
    fn leave(&self, deadline: Deadline) -> Result<()>;
}
