//! The communicator.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use comm_core::native::{Asked, Backend as _, Due, Elements, Extents, Group, Owner, Started, negotiate, run_copied};
use comm_core::{
    Algorithm, BorrowedCall, Buffer, Call, Communicator, CommunicatorExt, Completed, Control, Deadline, Error, Failed,
    Handle, Mode, Op, Outcome, Result, View,
};

use crate::NcclOptions;
use crate::connect;
use crate::core::{self, Core, Io, Members, Place, Source};
use crate::sys::{CudaBuffer, DataType, Device, UNIQUE_ID_BYTES};

/// The name under which [`NcclCommunicator::facts`] has the number of the CUDA device.
pub const DEVICE_FACT: &str = "cuda device";

/// Collectives by NCCL, one rank a GPU.
///
/// Buffers on the GPU ([`CudaBuffer`]) are worked on where they are; those in host memory travel through memory of the lane, page-locked
/// on the host and as large as they are on the GPU.
/// Each lane has a stream and an NCCL communicator of its own, so that operations of different lanes run side by side.
///
/// As on every backend, failures of any rank end everything on all ranks, and every wait has its deadline: communicators are
/// non-blocking, their state is looked at while an operation runs, and they are aborted when the job fails. What differs:
/// - NCCL sends no headers. Ranks that call different operations are found out at the deadline, by an error or a stall report that
///   tells what the others do; ranks that agree in all but the count may get wrong data.
/// - NCCL chooses algorithms itself. One that a call names is checked as elsewhere, and else not looked at.
/// - 16-bit floats are rounded after every step of a reduction, means may be sums of parts that were divided before, and which of NaN and
///   a number is the greater is up to NCCL.
/// - 16-bit integers can be moved, not reduced.
/// - A send may wait until its receive is there.
/// - Operations of several lanes are kernels that wait for peers beside each other. Whatever waits for the whole device meanwhile, such as
///   freeing its memory, waits for them too; each lane is warmed up when it is made, so that NCCL itself has little left to allocate.
/// - Where not even an abort ends what runs, the operation's memory on the GPU does not come back ([`Failed::buffer`] is `None`), and from
///   then on this process frees nothing there: a kernel could still write to it, and freeing would wait for that kernel.
pub struct NcclCommunicator {
    core: Arc<Core>,
    /// What operations under way do not hold.
    owner: Arc<Owner<Core>>,
    members: Arc<Members>,
}

impl NcclCommunicator {
    /// Connects the ranks of `control`. Collective: all ranks call it.
    ///
    /// # Errors
    /// `Unsupported` on all ranks if any of them has no NCCL, no GPU, or a GPU that another rank has too; `Rendezvous` for versions that
    /// differ; `Timeout`; NCCL's own.
    pub fn connect(control: Arc<dyn Control>, options: &NcclOptions, deadline: Deadline) -> Result<Self> {
        let (core, members) = connect::connect(control, options, deadline)?;
        Ok(NcclCommunicator { owner: Arc::new(Owner(core.clone())), core, members: Arc::new(members) })
    }

    /// The device that this rank works on.
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// What results are recorded with, as (name, value): the library, its version and the device.
    pub fn facts(&self) -> Vec<(String, String)> {
        let Core { library, device, .. } = &*self.core;
        [
            ("nccl", library.version_text()),
            ("nccl library", library.path().display().to_string()),
            ("gpu", device.name().unwrap_or_else(|_| "unknown".into())),
            (DEVICE_FACT, device.ordinal().to_string()),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into()
    }

    fn group(&self) -> &Group {
        &self.members.group
    }

    /// Checks what was asked for, and numbers nothing yet.
    fn admit(&self, asked: &Asked<'_>, buffer: Elements, input: Option<Elements>) -> Result<(Extents, Algorithm)> {
        let Core { shared, table, .. } = &*self.core;
        let (_, extents, algorithm) = shared.admit(self.group(), table, asked, buffer, input)?;
        if asked.op.reduce_op().is_some() && DataType::of(extents.dtype).is_none() {
            return Err(crate::no_such_type(extents.dtype));
        }
        Ok((extents, algorithm))
    }

    /// Runs a call in its turn, on buffers that are owned.
    fn own(&self, call: Call) -> Result<Owned, Box<Failed>> {
        let Call { op, mut buffer, mut input, counts, algorithm, lane, timeout, label, mode: _ } = call;
        let elements = |buffer: &Buffer| Elements { dtype: buffer.dtype(), count: buffer.count() };
        let asked = Asked { op: &op, counts: counts.as_ref(), algorithm, lane };
        let admitted = self.admit(&asked, elements(&buffer), input.as_ref().map(elements));
        let admitted = admitted.and_then(|admitted| {
            // Before anything waits for it.
            on_device(&mut buffer)?;
            input.as_mut().map_or(Ok(None), on_device)?;
            Ok(admitted)
        });
        match admitted {
            Err(error) => Err(Box::new(Failed { error, buffer: Some(buffer), input })),
            Ok((extents, algorithm)) => {
                let mut order = self.group().order();
                let header = self.group().header(&mut order, &asked, &extents, algorithm);
                drop(order);
                let deadline = Deadline::after(timeout.unwrap_or(self.core.options.timeout));
                Ok(Owned { header, extents, deadline, op, buffer, input, lane, label })
            }
        }
    }
}

/// A call that was admitted, with its number.
struct Owned {
    header: comm_core::Header,
    extents: Extents,
    deadline: Deadline,
    op: Op,
    buffer: Buffer,
    input: Option<Buffer>,
    lane: usize,
    label: Option<Arc<str>>,
}

impl Owned {
    fn run(self, core: &Arc<Core>, members: &Members, due: Due<'_>) -> Outcome {
        let Owned { header, extents, deadline, op, mut buffer, mut input, lane, label } = self;
        let began = Instant::now();
        let Due::Turn(turn) = due else {
            let error =
                core.fail_without_turn(&due, lane, &core::named(header, &op, label.as_deref(), members), deadline);
            return Err(Failed { error, buffer: Some(buffer), input });
        };
        let io = Io { extents: &extents, buffer: place(&mut buffer), input: input.as_mut().map(source) };
        let outcome = catch_unwind(AssertUnwindSafe(|| core.run(members, lane, &op, header, label, io, deadline)));
        // Whoever sees the end finds the lane free.
        drop(turn);
        let outcome = match outcome {
            Ok(outcome) => outcome,
            Err(panic) => {
                if core.device.is_given_up() {
                    // A kernel may still write there.
                    std::mem::forget((buffer, input));
                }
                resume_unwind(panic)
            }
        };
        match outcome {
            Ok(()) => Ok(Completed { buffer, input, began, ended: Instant::now() }),
            Err(ended) => {
                let kept = |buffer: Buffer| match buffer {
                    // A kernel may still write there: nobody gets it, and it is not freed.
                    Buffer::Device(device) if ended.is_running => {
                        std::mem::forget(device);
                        None
                    }
                    buffer => Some(buffer),
                };
                Err(Failed { error: ended.error, buffer: kept(buffer), input: input.and_then(kept) })
            }
        }
    }
}

/// Where a buffer on a device is; `None` for one of the host.
fn on_device(buffer: &mut Buffer) -> Result<Option<crate::sys::DevicePointer>> {
    let Buffer::Device(device) = buffer else { return Ok(None) };
    let memory: &mut dyn Any = device.as_any_mut();
    match memory.downcast_ref::<CudaBuffer>() {
        Some(cuda) => Ok(Some(cuda.place())),
        None => Err(Error::Unsupported {
            what: format!("{device:?} on NCCL"),
            why: "it takes memory of its own CUDA device only; copy the buffer to the host".into(),
        }),
    }
}

/// A buffer that was admitted.
fn place(buffer: &mut Buffer) -> Place<'_> {
    match on_device(buffer) {
        Ok(Some(pointer)) => Place::Device(pointer),
        _ => match buffer {
            Buffer::Host(host) => Place::Host(host.bytes_mut()),
            Buffer::Device(_) => Place::Host(&mut []),
        },
    }
}

fn source(buffer: &mut Buffer) -> Source<'_> {
    match place(buffer) {
        Place::Device(pointer) => Source::Device(pointer),
        Place::Host(bytes) => Source::Host(bytes),
    }
}

impl Communicator for NcclCommunicator {
    fn name(&self) -> &str {
        "nccl"
    }

    fn rank(&self) -> usize {
        self.group().rank
    }

    fn world_size(&self) -> usize {
        self.group().world_size()
    }

    fn lanes(&self) -> usize {
        self.core.shared.lanes.len()
    }

    fn id(&self) -> u64 {
        self.group().id
    }

    fn start(&self, call: Call) -> Handle {
        let (lane, mode) = (call.lane, call.mode);
        // Number and place on the lane follow the order of the callers.
        let starting = self.core.starting();
        let owned = match self.own(call) {
            Ok(owned) => owned,
            Err(failed) => return Handle::done(Err(*failed)),
        };
        let underway = Started::new(&self.members.group);
        let (queue, deadline) = (&self.core.shared.lanes[lane], owned.deadline);
        if mode == Mode::Blocking
            && let Some(turn) = queue.try_enter(deadline)
        {
            drop(starting);
            return Handle::done(owned.run(&self.core, &self.members, Due::Turn(turn)));
        }
        let (completer, handle) = Handle::pending();
        let (core, members) = (self.core.clone(), self.members.clone());
        let job = move |due: Due<'_>| {
            completer.complete(owned.run(&core, &members, due));
            drop(underway);
        };
        queue.enqueue(deadline, Box::new(job));
        drop(starting);
        if mode == Mode::Blocking { Handle::done(handle.wait()) } else { handle }
    }

    fn run_borrowed(&self, call: BorrowedCall<'_>) -> Result<()> {
        let BorrowedCall { op, mut buffer, input, counts, algorithm, lane, timeout, label, mode } = call;
        let asked = Asked { op: &op, counts: counts.as_ref(), algorithm, lane };
        let elements = |view: View<'_>| Elements { dtype: view.dtype(), count: view.count() };
        let starting = self.core.starting();
        let (extents, chosen) = self.admit(&asked, elements(View::from(&buffer)), input.map(elements))?;
        let underway = Started::new(&self.members.group);
        let deadline = Deadline::after(timeout.unwrap_or(self.core.options.timeout));
        let Some(turn) = self.core.shared.lanes[lane].try_enter(deadline) else {
            drop(starting);
            // The operations before it on its lane run on another thread, which cannot be lent this memory.
            let call = BorrowedCall { op, buffer, input, counts, algorithm, lane, timeout, label, mode };
            return run_copied(self, call);
        };
        let header = self.group().header(&mut self.group().order(), &asked, &extents, chosen);
        drop(starting);
        let io = Io {
            extents: &extents,
            buffer: Place::Host(buffer.bytes_mut()),
            input: input.map(|input| Source::Host(input.bytes())),
        };
        let outcome = self.core.run(&self.members, lane, &op, header, label, io, deadline);
        drop(turn);
        drop(underway);
        outcome.map_err(|ended| ended.error)
    }

    fn split(&self, color: Option<u64>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        let part = negotiate(self, self.group(), &*self.core.shared.control, color, key)?;
        // The first of each part names its communicators, one a lane.
        let (lanes, ranks) = (self.lanes(), self.world_size());
        let bytes = lanes * UNIQUE_ID_BYTES;
        let mut names = vec![0u8; ranks * bytes];
        if part.as_ref().is_some_and(|part| part.rank == 0) {
            let mine = connect::names(self.core.library.table(), lanes)
                .map_err(|error| self.core.fail(error, "naming new communicators"))?;
            names[self.rank() * bytes..][..bytes].copy_from_slice(&mine);
        }
        let names: Vec<u8> = self.run_vec(Op::AllGather, names)?;
        let Some(part) = part else { return Ok(None) };
        let first = self.group().members.iter().position(|member| Some(member) == part.members.first());
        let names = names.chunks_exact(bytes).nth(first.unwrap_or(0)).unwrap_or_default();
        let deadline = Deadline::after(self.core.options.timeout);
        let members = connect::join(&self.core, names, part.rank, part.world_size(), deadline).and_then(|comms| {
            let members = Members { core: self.core.clone(), group: Arc::new(part), comms };
            members.warm_up(deadline)?;
            Ok(Arc::new(members))
        });
        let members = members.map_err(|error| {
            let during = format!("splitting communicator {:x}", self.id());
            self.core.fail(error, &during)
        })?;
        Ok(Some(Arc::new(NcclCommunicator { core: self.core.clone(), owner: self.owner.clone(), members })))
    }

    fn abort(&self, reason: &str) {
        self.core.abort(reason);
    }

    fn finish(&self, timeout: Duration) -> Result<()> {
        let close = |deadline| self.core.close(&self.members, deadline);
        self.core.finish(self, self.group(), timeout, close)
    }
}

impl fmt::Debug for NcclCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NcclCommunicator(rank {} of {})", self.rank(), self.world_size())
    }
}
