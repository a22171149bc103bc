//! Collectives over any [`Transport`].

pub(crate) mod algorithms;
mod finite;
mod round;
mod scratch;

use std::sync::Arc;
use std::time::Duration;

use crate::buffer::View;
use crate::control::Control;
use crate::deadline::Deadline;
use crate::engine::{Comm, Data, Engine, Group, JobState, Operation, Settings};
use crate::error::{Error, Result};
use crate::op::{Extents, Op};
use crate::table::Table;
use crate::transport::Transport;

use round::Rounds;
use scratch::Scratch;

/// Settings of a [`Mesh`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MeshOptions {
    /// How long an operation may take from its start, unless its call says otherwise.
    pub timeout: Duration,
    /// How long to wait, after a data connection failed, for the control plane to say what really happened.
    pub verdict_grace: Duration,
    /// By what algorithms are chosen. All ranks use the same.
    pub table: Table,
    /// After how long an operation that goes on is reported as stalled, to all ranks, with the ranks that hold it up
    /// ([`Control::on_stall`]); again each time it has taken twice as long. An operation with an earlier deadline is reported
    /// after three quarters of its time.
    pub stall_after: Duration,
    /// Whether ranks compare their calls before every operation, with one message without payload between each pair that takes
    /// part. Without it a rank that calls something else is noticed when a message of the wrong kind comes, which some
    /// mistakes do not lead to (two ranks that both receive) and which a root may have left behind before; with it, no
    /// operation begins before all have called the same. A send then waits for its receive. All ranks use the same.
    pub checked: bool,
    /// Whether what this rank contributes is searched for NaN and infinities beforehand ([`Error::NotFinite`]).
    pub check_finite: bool,
}

impl Default for MeshOptions {
    fn default() -> Self {
        MeshOptions {
            timeout: Duration::from_secs(120),
            verdict_grace: Duration::from_millis(500),
            table: Table::fixed(),
            stall_after: Duration::from_secs(30),
            checked: false,
            check_finite: false,
        }
    }
}

impl MeshOptions {
    /// The same with another default deadline.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        MeshOptions { timeout, ..self }
    }

    /// The same with another table of algorithms.
    #[must_use]
    pub fn with_table(self, table: Table) -> Self {
        MeshOptions { table, ..self }
    }

    /// The same with another time after which an operation counts as stalled.
    #[must_use]
    pub fn with_stall_after(self, stall_after: Duration) -> Self {
        MeshOptions { stall_after, ..self }
    }

    /// The same with calls compared before every operation, or not.
    #[must_use]
    pub fn with_checked(self, checked: bool) -> Self {
        MeshOptions { checked, ..self }
    }

    /// The same with contributions searched for NaN and infinities, or not.
    #[must_use]
    pub fn with_check_finite(self, check_finite: bool) -> Self {
        MeshOptions { check_finite, ..self }
    }
}

/// Collectives over a byte transport.
///
/// Algorithms and their order of reduction are those of [`crate::table`].
pub type Mesh<T> = Comm<MeshEngine<T>>;

/// Performs collectives by messages of a byte transport.
pub struct MeshEngine<T> {
    transport: T,
    options: MeshOptions,
    shared: JobState<Scratch>,
}

impl<T: Transport> Mesh<T> {
    /// The first communicator over a transport, over all ranks of `control`: those of the job, or of a
    /// [`Subgroup`](crate::control::Subgroup).
    ///
    /// # Errors
    /// `InvalidArgument` when the transport connects other ranks than those of `control`, or numbers them differently.
    pub fn new(transport: T, control: Arc<dyn Control>, options: MeshOptions) -> Result<Self> {
        let theirs = (transport.rank(), transport.world_size());
        let ours = (control.rank(), control.world_size());
        if theirs != ours {
            return Err(Error::invalid(format!(
                "the transport {} belongs to rank {} of {}, but the control plane to rank {} of {}: connect the transport through the \
                 control plane of this communicator",
                transport.name(),
                theirs.0,
                theirs.1,
                ours.0,
                ours.1
            )));
        }
        Ok(Self::over(transport, control, options))
    }

    /// As [`new`](Mesh::new), where both are known to be of the same ranks.
    pub(crate) fn over(transport: T, control: Arc<dyn Control>, options: MeshOptions) -> Self {
        let scratch = (0..transport.lanes()).map(|_| Scratch::default()).collect();
        let MeshOptions { timeout, stall_after, verdict_grace, ref table, .. } = options;
        let settings = Settings { timeout, stall_after, verdict_grace, table: table.clone() };
        let shared = JobState::new(control, scratch, settings);
        Comm::first(Arc::new(MeshEngine { transport, options, shared }), ())
    }

    /// The transport.
    pub fn transport(&self) -> &T {
        &self.engine().transport
    }
}

impl<T: Transport> Engine for MeshEngine<T> {
    type Lane = Scratch;
    type GroupState = ();

    fn name(&self) -> &str {
        self.transport.name()
    }

    fn shared(&self) -> &JobState<Scratch> {
        &self.shared
    }

    fn may_block(&self) -> Result<()> {
        self.transport.may_block()
    }

    fn accept(&self, _op: &Op, _extents: &Extents, data: &mut Data<'_>) -> Result<()> {
        if data.is_on_device() { Err(no_device_memory()) } else { Ok(()) }
    }

    fn perform(&self, operation: &Operation, (): &(), scratch: &mut Scratch, data: Data<'_>) -> Result<()> {
        let Operation { op, extents, header, lane, deadline, group, .. } = operation;
        let (mut buffer, input) = data.into_host().ok_or_else(no_device_memory)?;
        if self.options.check_finite
            && let Some(found) = finite::find(extents, input.unwrap_or(View::from(&buffer)))
        {
            let finite::NotFinite { index, value, count } = found;
            let (rank, operation) = (self.shared.job_rank(), operation.name());
            return Err(Error::NotFinite { rank, operation, index, value, count });
        }
        let mut rounds = Rounds::new(&self.transport, &group.members, group.rank, *lane, *header, *deadline);
        let data = algorithms::Data {
            bytes: buffer.bytes_mut(),
            input: input.map(|input| input.bytes()),
            extents,
            scratch,
            piece: self.options.table.piece,
        };
        let compared = if self.options.checked { rounds.compare(op) } else { Ok(()) };
        let outcome = compared.and_then(|()| algorithms::run(op, &mut rounds, data));
        scratch.tidy();
        outcome.map_err(|error| self.shared.control.in_job(error))
    }

    fn split(_parent: &Comm<Self>, group: Option<&Group>) -> Result<Option<()>> {
        Ok(group.map(|_| ()))
    }

    fn end(self: &Arc<Self>, failure: &Error) {
        self.transport.abort(failure);
    }

    fn close(self: &Arc<Self>, (): &(), deadline: Deadline) -> Result<()> {
        self.transport.close(deadline).map_err(|error| self.shared.control.in_job(error))
    }
}

fn no_device_memory() -> Error {
    Error::Unsupported {
        what: "device memory on a byte transport".into(),
        why: "copy the buffer to the host first, or use a communicator that is native to the device".into(),
    }
}
