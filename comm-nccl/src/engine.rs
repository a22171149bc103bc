//! NCCL as an engine: how an operation runs, and how NCCL's communicators end.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::engine::{
    BufferLocation, Comm, Data, Elements, Engine, Extents, Group, JobState, Lane, Operation, Settings, Source, check,
};
use comm_core::table::Table;
use comm_core::{
    Communicator as _, CommunicatorExt as _, Control, DType, Deadline, DeviceMemory, Error, Op, ReduceOp, Result,
    ViewMut,
};

use crate::NcclOptions;
use crate::lane::LaneState;
use crate::plan::{DataPointers, Plan, is_known};
use crate::sys::{
    CudaBuffer, DataType, Device, DevicePointer, Event, GRACE, Library, NcclTable, RawComm, Reduction, UNIQUE_ID_BYTES,
    UniqueId,
};

/// How long who drops the last communicator waits for what may still run on the device.
const PROMPT: Duration = Duration::from_millis(100);

/// How long a communicator that is dropped may take to flush before it is aborted.
const FLUSH: Duration = Duration::from_secs(10);

/// Performs operations by NCCL on one device.
pub(crate) struct NcclEngine {
    pub(crate) device: Device,
    pub(crate) library: Library,
    pub(crate) options: NcclOptions,
    pub(crate) shared: JobState<LaneState>,
    /// NCCL's communicators of this rank, to be aborted when the job fails.
    comms: Mutex<Vec<Arc<RawComm>>>,
    /// Threads that end some of them.
    ending: (Mutex<usize>, Condvar),
}

/// NCCL's communicators of one of ours, by lane.
pub(crate) struct LaneComms {
    pub(crate) engine: Arc<NcclEngine>,
    pub(crate) comms: Vec<Arc<RawComm>>,
}

impl Engine for NcclEngine {
    type Lane = LaneState;
    type GroupState = LaneComms;

    fn name(&self) -> &str {
        "nccl"
    }

    fn shared(&self) -> &JobState<LaneState> {
        &self.shared
    }

    fn accept(&self, op: &Op, extents: &Extents, data: &mut Data<'_>) -> Result<()> {
        if !is_known(op) {
            return Err(crate::unsupported(format!("it has no {}", op.kind())));
        }
        if op.reduce_op().is_some() && DataType::of(extents.dtype).is_none() {
            return Err(crate::no_such_type(extents.dtype));
        }
        if let BufferLocation::Device(memory) = &mut data.buffer {
            pointer(&mut **memory)?;
        }
        if let Some(Source::Device(memory)) = &mut data.input {
            pointer(&mut **memory)?;
        }
        Ok(())
    }

    fn perform(
        &self,
        operation: &Operation,
        group_state: &LaneComms,
        lane: &mut LaneState,
        data: Data<'_>,
    ) -> Result<()> {
        let Operation { op, extents, lane: number, deadline, group, .. } = operation;
        let plan = Plan { op, rank: group.rank, extents, has_input: data.input.is_some() };
        let outcome = self.run(&plan, &group_state.comms[*number], *number, lane, data, *deadline);
        outcome.map_err(|error| self.own_error(error, lane, operation))
    }

    fn has_settled(&self, lane: &LaneState) -> bool {
        let soon = Deadline::after(GRACE);
        let has_settled = self.wait_for_ends(soon) && lane.mark().is_ok() && passes(|| lane.event.has_passed(), soon);
        if !has_settled {
            self.device.give_up();
        }
        has_settled
    }

    fn split(parent: &Comm<Self>, group: Option<&Group>) -> Result<Option<LaneComms>> {
        let engine = parent.engine();
        // The first of each part names its communicators, one a lane.
        let (lanes, ranks) = (parent.lanes(), parent.world_size());
        let bytes = lanes * UNIQUE_ID_BYTES;
        let mut names = vec![0u8; ranks * bytes];
        if group.is_some_and(|group| group.rank == 0) {
            let mine = LaneComms::names(engine.library.table(), lanes)
                .map_err(|error| engine.fail(error, "naming new communicators"))?;
            names[parent.rank() * bytes..][..bytes].copy_from_slice(&mine);
        }
        let names: Vec<u8> = parent.run_vec(Op::AllGather, names)?;
        let Some(group) = group else { return Ok(None) };
        let first = parent.group().members.iter().position(|member| Some(member) == group.members.first());
        let names = names.chunks_exact(bytes).nth(first.unwrap_or(0)).unwrap_or_default();
        let deadline = Deadline::after(engine.options.timeout);
        let (rank, ranks) = (group.rank, group.world_size());
        let group_state = LaneComms::join(engine, names, rank, ranks, deadline)
            .and_then(|state| state.warm_up(rank, ranks, deadline).map(|()| state));
        let group_state =
            group_state.map_err(|error| engine.fail(error, &format!("splitting communicator {:x}", parent.id())))?;
        Ok(Some(group_state))
    }

    fn end(self: &Arc<Self>, _failure: &Error) {
        // Each in a thread of its own: an abort waits for everything that runs on the device, so for what the others abort.
        for comm in std::mem::take(&mut *lock(&self.comms)) {
            let aborting = self.device.aborting();
            self.beside("comm-nccl-abort", move || {
                comm.abort();
                drop(aborting);
            });
        }
    }

    /// It also waits for those communicators that were dropped.
    fn close(self: &Arc<Self>, group_state: &LaneComms, deadline: Deadline) -> Result<()> {
        self.device.make_current()?;
        for comm in &group_state.comms {
            comm.finalize();
            self.wait(comm, deadline, || comm.progress().map_err(|error| self.or_failure(error)))?;
        }
        for comm in &group_state.comms {
            let comm = comm.clone();
            self.beside("comm-nccl-end", move || comm.destroy());
        }
        if self.wait_for_ends(deadline) { Ok(()) } else { Err(self.shared.timeout(deadline)) }
    }
}

impl NcclEngine {
    pub(crate) fn new(
        device: Device,
        library: Library,
        control: Arc<dyn Control>,
        options: &NcclOptions,
    ) -> Result<Arc<Self>> {
        let states: Vec<LaneState> = (0..options.lanes).map(|_| LaneState::new(&device)).collect::<Result<_>>()?;
        device.prepare_copies()?;
        // NCCL chooses algorithms itself: by this table what a call asks for is checked and named.
        let table = Table::fixed();
        let NcclOptions { timeout, stall_after, verdict_grace, .. } = *options;
        let shared = JobState::new(control, states, Settings { timeout, stall_after, verdict_grace, table });
        Ok(Arc::new(NcclEngine {
            device,
            library,
            options: options.clone(),
            shared,
            comms: Mutex::default(),
            ending: (Mutex::new(0), Condvar::new()),
        }))
    }

    /// Given to the operation that has `lane` while no other lane is in use, which stays so until it is dropped.
    fn quiet(&self, lane: usize) -> Option<MutexGuard<'_, ()>> {
        let starting = self.shared.starting();
        let others = self.shared.lanes.iter().enumerate().filter(|(other, _)| *other != lane);
        others.into_iter().all(|(_, lane)| lane.is_idle()).then_some(starting)
    }

    /// Has `comm` aborted when the job fails; at once if it has.
    fn keep(self: &Arc<Self>, comm: &Arc<RawComm>) {
        let mut comms = lock(&self.comms);
        comms.retain(|comm| !comm.is_gone());
        comms.push(comm.clone());
        drop(comms);
        // Looked at afterwards: whoever adopts a failure later finds the communicator there.
        if let Some(failure) = self.shared.failure() {
            self.end(failure);
        }
    }

    /// Ends communicators in a thread of their own, which [`NcclEngine::wait_for_ends`] waits for. Without a thread they are left alone.
    fn beside(self: &Arc<Self>, name: &str, end: impl FnOnce() + Send + 'static) {
        *lock(&self.ending.0) += 1;
        let engine = self.clone();
        let run = move || {
            // NCCL would make itself at home on the first device otherwise.
            let _ = engine.device.make_current();
            end();
            engine.has_ended();
            // Here, so that whoever drops the communicator does not wait for a kernel that nothing ends.
            engine.settle();
        };
        if thread::Builder::new().name(name.into()).spawn(run).is_err() {
            self.has_ended();
        }
    }

    fn has_ended(&self) {
        *lock(&self.ending.0) -= 1;
        self.ending.1.notify_all();
    }

    /// Waits for the threads that end communicators; false at the deadline.
    fn wait_for_ends(&self, deadline: Deadline) -> bool {
        let mut ending = lock(&self.ending.0);
        while *ending > 0 {
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            ending = self.ending.1.wait_timeout(ending, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// An error of NCCL or of the driver on this rank: where the device is lost, what it says itself.
    fn own_error(&self, error: Error, lane: &LaneState, operation: &Operation) -> Error {
        match error {
            Error::Io { what, source } => {
                let (what, source) = match lane.event.record(&lane.stream) {
                    Err(Error::Io { what, source }) => (what, source),
                    _ => (what, source),
                };
                Error::Io { what: format!("rank {}, {}: {what}", self.shared.job_rank(), operation.name()), source }
            }
            other => other,
        }
    }

    /// Runs what is planned on lane `number`.
    fn run(
        &self,
        plan: &Plan<'_>,
        comm: &RawComm,
        number: usize,
        lane: &mut LaneState,
        data: Data<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let LaneState { stream, event, staging, buffer: buffer_memory, input: input_memory, scratch } = lane;
        let (device, extents) = (&self.device, plan.extents);
        let Data { mut buffer, input } = data;
        let quiet = || self.quiet(number);
        let wait_for = &mut |event: &Event| self.wait(comm, deadline, || event.has_passed());

        let at_buffer = match &mut buffer {
            BufferLocation::Device(memory) => pointer(&mut **memory)?,
            BufferLocation::Host(host) => {
                let pointer = buffer_memory.of(device, host.bytes().len(), quiet)?;
                let read = if plan.has_input { 0..0 } else { extents.bytes(extents.reads.clone()) };
                staging.upload(pointer.at(read.start), &host.bytes()[read], stream, wait_for)?;
                pointer
            }
        };
        let at_input = match input {
            None => None,
            Some(Source::Device(memory)) => Some(pointer(memory)?),
            Some(Source::Host(host)) => {
                let pointer = input_memory.of(device, host.bytes().len(), quiet)?;
                staging.upload(pointer, host.bytes(), stream, wait_for)?;
                Some(pointer)
            }
        };
        let pointers = DataPointers {
            buffer: at_buffer,
            input: at_input,
            scratch: scratch.of(device, plan.scratch_bytes(), quiet)?,
        };

        device.make_current()?;
        for copy in plan.copies(pointers) {
            device.copy(copy.from, copy.to, copy.bytes, stream)?;
        }
        let reduction = plan.op.reduce_op().map(|op| Reduction { op, dtype: extents.dtype });
        comm.group(stream, reduction, |calls, op| plan.call(pointers, calls, op))
            .map_err(|error| self.or_failure(error))?;
        self.wait(comm, deadline, || comm.progress().map_err(|error| self.or_failure(error)))?;
        if let BufferLocation::Host(mut host) = buffer {
            for written in extents.writes.clone() {
                let written = extents.bytes(written);
                staging.download(
                    pointers.buffer.at(written.start),
                    &mut host.bytes_mut()[written],
                    stream,
                    wait_for,
                )?;
            }
        }
        event.record(stream)?;
        wait_for(event)
    }

    /// Looks again and again until it is so; NCCL and the control plane are watched meanwhile.
    fn wait(&self, comm: &RawComm, deadline: Deadline, mut is_so: impl FnMut() -> Result<bool>) -> Result<()> {
        let began = Instant::now();
        for look in 0u64.. {
            let is_so = is_so()?;
            // In this order: an abort, which the failure brings, ends kernels before they have done their work.
            if let Some(error) = self.shared.failure() {
                return Err(error.clone());
            }
            if is_so {
                return Ok(());
            }
            if look % 16 == 15 {
                comm.progress().map_err(|error| self.or_failure(error))?;
            }
            if deadline.has_passed() {
                return Err(self.shared.timeout(deadline));
            }
            match began.elapsed() {
                short if short < Duration::from_micros(50) => std::hint::spin_loop(),
                // A sleep is longer than asked for by as much again: not for what takes no more than a few of them.
                longer if longer < Duration::from_millis(10) => thread::yield_now(),
                _ => thread::sleep(Duration::from_micros(50)),
            }
        }
        Ok(())
    }

    /// NCCL's error; for a communicator that was aborted, why.
    fn or_failure(&self, error: Option<Error>) -> Error {
        error
            .or_else(|| self.shared.failure().cloned())
            .unwrap_or_else(|| Error::Internal("NCCL's communicator was aborted, though the job has not failed".into()))
    }

    /// Waits until everything that any lane has begun on the device has ended. If it does not, the device is given up.
    fn settle(&self) {
        let soon = Deadline::after(GRACE);
        let has_settled = || self.wait_for_ends(soon) && have_settled(&self.shared.lanes, soon);
        if !(self.device.is_given_up() || has_settled()) {
            self.device.give_up();
        }
    }
}

/// Waits until everything that these lanes have begun on the device has ended; false where it does not by the deadline.
fn have_settled(lanes: &[Lane<LaneState>], deadline: Deadline) -> bool {
    lanes.iter().all(|lane| {
        // Not held while this waits: an operation may need it to learn that the job has failed.
        let is_marked = lane.scratch().mark().is_ok();
        is_marked && passes(|| lane.scratch().event.has_passed(), deadline)
    })
}

/// Whether it has passed by the deadline, for which it waits.
fn passes(has_passed: impl Fn() -> Result<bool>, deadline: Deadline) -> bool {
    loop {
        match has_passed() {
            Ok(false) if !deadline.has_passed() => thread::sleep(Duration::from_millis(1)),
            outcome => return outcome.unwrap_or(false),
        }
    }
}

/// Where memory on the device is.
fn pointer(memory: &mut dyn DeviceMemory) -> Result<DevicePointer> {
    let any: &mut dyn Any = memory.as_any_mut();
    if let Some(cuda) = any.downcast_ref::<CudaBuffer>() {
        return Ok(cuda.device_pointer());
    }
    Err(Error::Unsupported {
        what: format!("{memory:?} on NCCL"),
        why: "it takes memory of its own CUDA device only; copy the buffer to the host".into(),
    })
}

impl Drop for NcclEngine {
    /// Frees nothing that a kernel may still use: what has not ended within [`GRACE`] counts as running for ever. Whoever drops the last
    /// communicator waits no longer than [`PROMPT`] for that, and a thread does the rest.
    fn drop(&mut self) {
        let lanes = Arc::new(std::mem::take(&mut self.shared.lanes));
        lanes.iter().for_each(Lane::stop);
        let device = self.device.clone();
        if device.is_given_up() || have_settled(&lanes, Deadline::after(PROMPT)) {
            drop(lanes);
            device.forget_copies();
            return;
        }
        let theirs = lanes.clone();
        let run = move || {
            if !have_settled(&theirs, Deadline::after(GRACE)) {
                device.give_up();
            }
            drop(theirs);
            device.forget_copies();
        };
        if thread::Builder::new().name("comm-nccl-end".into()).spawn(run).is_err() {
            self.device.give_up();
        }
    }
}

impl LaneComms {
    /// New names, one for each of so many communicators.
    pub(crate) fn names(table: &'static NcclTable, lanes: usize) -> Result<Vec<u8>> {
        let names: Vec<[u8; UNIQUE_ID_BYTES]> =
            (0..lanes).map(|_| RawComm::unique_id(table).map(|id| id.0)).collect::<Result<_>>()?;
        Ok(names.concat())
    }

    /// Joins the communicators of these names, one a lane, as rank `rank` of `ranks`.
    pub(crate) fn join(
        engine: &Arc<NcclEngine>,
        names: &[u8],
        rank: usize,
        ranks: usize,
        deadline: Deadline,
    ) -> Result<LaneComms> {
        if names.len() != engine.options.lanes * UNIQUE_ID_BYTES {
            return Err(Error::Internal(format!("{} bytes of names of communicators", names.len())));
        }
        engine.device.make_current()?;
        let mut comms = Vec::new();
        for name in names.chunks_exact(UNIQUE_ID_BYTES) {
            let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
            id.0.copy_from_slice(name);
            let (comm, begun) = RawComm::begin(engine.library.table(), id, rank, ranks);
            let comm = Arc::new(comm);
            // A rank that fails ends the job, and with it what has been joined so far.
            engine.keep(&comm);
            begun?;
            engine.wait(&comm, deadline, || comm.progress().map_err(|error| engine.or_failure(error)))?;
            comms.push(comm);
        }
        Ok(LaneComms { engine: engine.clone(), comms })
    }

    /// Runs each kind of connection once, lane after lane, while nothing else runs: NCCL makes them at their first use, with memory that
    /// it would have to allocate beside other lanes' kernels. Collective over its ranks.
    pub(crate) fn warm_up(&self, rank: usize, ranks: usize, deadline: Deadline) -> Result<()> {
        /// Beyond so many ranks, connections between all pairs are more than most will need.
        const PAIRS: usize = 16;
        for (number, queue) in self.engine.shared.lanes.iter().enumerate() {
            let mut lane = queue.scratch();
            let mut run = |op: Op| {
                let mut values = vec![0u8; ranks];
                let extents = check(&op, rank, ranks, Elements { dtype: DType::U8, count: ranks }, None, None)?;
                let plan = Plan { op: &op, rank, extents: &extents, has_input: false };
                let data = Data::lent(ViewMut::of(&mut values), None);
                self.engine.run(&plan, &self.comms[number], number, &mut lane, data, deadline)
            };
            run(Op::AllReduce(ReduceOp::Sum))?;
            run(Op::AllGather)?;
            if ranks <= PAIRS {
                run(Op::AllToAll)?;
            }
        }
        Ok(())
    }
}

impl Drop for LaneComms {
    /// Flushes what is on its way, beside the caller, and gives NCCL's communicators back.
    fn drop(&mut self) {
        let mut comms = std::mem::take(&mut self.comms);
        comms.retain(|comm| !comm.is_gone());
        if comms.is_empty() || self.engine.shared.failure().is_some() {
            return;
        }
        let end = move || {
            let deadline = Deadline::after(FLUSH);
            comms.iter().for_each(|comm| comm.finalize());
            for comm in comms {
                loop {
                    match comm.progress() {
                        Ok(true) => break comm.destroy(),
                        Ok(false) if !deadline.has_passed() => thread::sleep(Duration::from_millis(1)),
                        _ => break comm.abort(),
                    }
                }
            }
        };
        self.engine.beside("comm-nccl-end", end);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, feature = "stand-in"))]
mod tests;
