//! What all communicators of a job share on one rank, and how an operation runs.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use comm_core::header::{CHECK, CHECK_RECEIVE};
use comm_core::native::{Backend, Elements, Extents, Group, Shared, check, name, pair};
use comm_core::table::Table;
use comm_core::{Control, DType, Deadline, Error, Header, Op, ReduceOp, Result};

use crate::NcclOptions;
use crate::plan::{Places, Plan};
use crate::sys::{Device, DevicePointer, Event, GRACE, Library, Memory, RawComm, Reduction, Staging, Stream};

/// How long a communicator that is dropped may take to flush before it is aborted.
const FLUSH: Duration = Duration::from_secs(10);

pub(crate) struct Core {
    pub(crate) device: Device,
    pub(crate) library: Library,
    pub(crate) options: NcclOptions,
    /// NCCL chooses algorithms itself: by this one what a call asks for is checked and named.
    pub(crate) table: Table,
    pub(crate) shared: Shared<LaneState>,
    /// NCCL's communicators of this rank, to be aborted when the job fails.
    comms: Mutex<Vec<Arc<RawComm>>>,
    /// Threads that end some of them.
    ending: (Mutex<usize>, Condvar),
    starting: Mutex<()>,
}

/// One communicator: its ranks, and NCCL's communicators by lane.
pub(crate) struct Members {
    pub(crate) core: Arc<Core>,
    pub(crate) group: Arc<Group>,
    pub(crate) comms: Vec<Arc<RawComm>>,
}

/// What one lane works with.
#[derive(Debug)]
pub(crate) struct LaneState {
    stream: Stream,
    event: Event,
    staging: Staging,
    buffer: Room,
    input: Room,
    scratch: Room,
}

impl LaneState {
    fn new(device: &Device) -> Result<Self> {
        Ok(LaneState {
            stream: device.stream()?,
            event: device.event()?,
            staging: Staging::new(device)?,
            buffer: Room::default(),
            input: Room::default(),
            scratch: Room::default(),
        })
    }
}

/// Memory on the device that grows.
///
/// Freeing waits for everything that runs on the device, and what runs there may wait for peers. So what it has outgrown stays until an
/// operation finds nothing else under way.
#[derive(Debug, Default)]
struct Room {
    memory: Option<Memory>,
    outgrown: Vec<Memory>,
}

impl Room {
    /// At least so many bytes. `quiet` gives something while nothing else runs on the device, and nothing begins there.
    fn of<Q>(&mut self, device: &Device, bytes: usize, quiet: impl Fn() -> Option<Q>) -> Result<DevicePointer> {
        if bytes == 0 {
            return Ok(DevicePointer::NULL);
        }
        let held = self.memory.as_ref().map_or(0, Memory::bytes);
        if held < bytes {
            self.outgrown.extend(self.memory.take());
        }
        if !self.outgrown.is_empty()
            && let Some(_quiet) = quiet()
        {
            self.outgrown.clear();
        }
        let memory = match self.memory.take() {
            Some(memory) => memory,
            None => {
                // While nothing can be freed it at least doubles, so that all that is kept is no more than the last.
                let bytes = if self.outgrown.is_empty() { bytes } else { bytes.max(2 * held) };
                let step = bytes.next_power_of_two().clamp(4096, 64 << 20);
                device.allocate(bytes.next_multiple_of(step))?
            }
        };
        Ok(self.memory.insert(memory).pointer())
    }
}

/// Where an operation's buffer is.
pub(crate) enum Place<'a> {
    Host(&'a mut [u8]),
    Device(DevicePointer),
}

/// Where an operation's input is.
pub(crate) enum Source<'a> {
    Host(&'a [u8]),
    Device(DevicePointer),
}

/// The data of an operation.
pub(crate) struct Io<'a> {
    pub(crate) extents: &'a Extents,
    pub(crate) buffer: Place<'a>,
    pub(crate) input: Option<Source<'a>>,
}

/// A failed operation.
pub(crate) struct Ended {
    pub(crate) error: Error,
    /// Whether its kernel may still run.
    pub(crate) is_running: bool,
}

impl Backend for Core {
    type Scratch = LaneState;

    fn shared(&self) -> &Shared<LaneState> {
        &self.shared
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
}

impl Core {
    pub(crate) fn new(
        device: Device,
        library: Library,
        control: Arc<dyn Control>,
        options: &NcclOptions,
    ) -> Result<Arc<Self>> {
        let states: Vec<LaneState> = (0..options.lanes).map(|_| LaneState::new(&device)).collect::<Result<_>>()?;
        device.prepare_copies()?;
        let shared = Shared::new(control, states, options.stall_after, options.verdict_grace);
        let core = Arc::new(Core {
            device,
            library,
            options: options.clone(),
            table: Table::fixed(),
            shared,
            comms: Mutex::default(),
            ending: (Mutex::new(0), Condvar::new()),
            starting: Mutex::default(),
        });
        core.follow();
        Ok(core)
    }

    /// Nobody else numbers or queues an operation while this lives.
    pub(crate) fn starting(&self) -> MutexGuard<'_, ()> {
        self.starting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Given to the operation that has `lane` while no other lane is in use, which stays so until it is dropped.
    fn quiet(&self, lane: usize) -> Option<MutexGuard<'_, ()>> {
        let starting = self.starting();
        let others = self.shared.lanes.iter().enumerate().filter(|(other, _)| *other != lane);
        others.into_iter().all(|(_, lane)| lane.is_idle()).then_some(starting)
    }

    /// Has `comm` aborted when the job fails; at once if it has.
    pub(crate) fn keep(self: &Arc<Self>, comm: &Arc<RawComm>) {
        let mut comms = lock(&self.comms);
        comms.retain(|comm| !comm.is_gone());
        comms.push(comm.clone());
        drop(comms);
        // Looked at afterwards: whoever adopts a failure later finds the communicator there.
        if let Some(failure) = self.shared.failure() {
            self.end(failure);
        }
    }

    /// Ends communicators in a thread of their own, which [`Core::wait_for_ends`] waits for. Without a thread they are left alone.
    fn beside(self: &Arc<Self>, name: &str, end: impl FnOnce() + Send + 'static) {
        *lock(&self.ending.0) += 1;
        let core = self.clone();
        let run = move || {
            // NCCL would make itself at home on the first device otherwise.
            let _ = core.device.make_current();
            end();
            core.has_ended();
            // Here, so that whoever drops the communicator does not wait for a kernel that nothing ends.
            core.settle();
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

    #[allow(clippy::too_many_arguments, reason = "they are the parts of one call")]
    pub(crate) fn run(
        self: &Arc<Self>,
        members: &Members,
        lane: usize,
        op: &Op,
        header: Header,
        label: Option<Arc<str>>,
        io: Io<'_>,
        deadline: Deadline,
    ) -> Result<(), Ended> {
        let shared = &self.shared;
        if let Some(error) = shared.failure() {
            return Err(Ended { error: error.clone(), is_running: false });
        }
        let call = call_of(header, op);
        let group = &members.group;
        let note = shared.watch.note(lane, call, op, label.clone(), group, deadline);
        let is_lent = matches!(io.buffer, Place::Device(_)) || matches!(io.input, Some(Source::Device(_)));
        let mut state = shared.lanes[lane].scratch();
        let guard = PanicGuard { core: self, call: &call, state: &mut state, is_lent };
        let outcome = self.perform(members, lane, op, io, guard.state, deadline);
        drop(guard);
        drop(note);
        outcome.map_err(|error| {
            let (error, during) = shared.watch.explain(error, &call, op, label.as_deref(), group);
            let error = self.fail(self.own_error(error, &state, &during), &during);
            // Memory of the host is not touched by the device.
            Ended { error, is_running: is_lent && !self.has_settled(&state, Deadline::after(GRACE)) }
        })
    }

    /// An error of NCCL or of the driver on this rank, `during` an operation: where the device is lost, what it says itself.
    fn own_error(&self, error: Error, state: &LaneState, during: &str) -> Error {
        match error {
            Error::Io { what, source } => {
                let (what, source) = match state.event.record(&state.stream) {
                    Err(Error::Io { what, source }) => (what, source),
                    _ => (what, source),
                };
                Error::Io { what: format!("rank {}, {during}: {what}", self.shared.job_rank()), source }
            }
            other => other,
        }
    }

    fn perform(
        &self,
        members: &Members,
        lane: usize,
        op: &Op,
        io: Io<'_>,
        state: &mut LaneState,
        deadline: Deadline,
    ) -> Result<()> {
        let LaneState { stream, event, staging, buffer: room, input: input_room, scratch } = state;
        let (device, comm) = (&self.device, &members.comms[lane]);
        let Io { extents, buffer, input } = io;
        let plan = Plan { op, rank: members.group.rank, extents, has_input: input.is_some() };
        let quiet = || self.quiet(lane);
        let passed = &mut |event: &Event| self.wait(comm, deadline, || event.has_passed());

        let at_buffer = match &buffer {
            Place::Device(pointer) => *pointer,
            Place::Host(host) => {
                let pointer = room.of(device, host.len(), quiet)?;
                let read = if plan.has_input { 0..0 } else { extents.bytes(extents.reads.clone()) };
                staging.upload(pointer.at(read.start), &host[read], stream, passed)?;
                pointer
            }
        };
        let at_input = match input {
            None => None,
            Some(Source::Device(pointer)) => Some(pointer),
            Some(Source::Host(host)) => {
                let pointer = input_room.of(device, host.len(), quiet)?;
                staging.upload(pointer, host, stream, passed)?;
                Some(pointer)
            }
        };
        let at =
            Places { buffer: at_buffer, input: at_input, scratch: scratch.of(device, plan.scratch_bytes(), quiet)? };

        device.make_current()?;
        for copy in plan.copies(at) {
            device.copy(copy.from, copy.to, copy.bytes, stream)?;
        }
        let reduction = op.reduce_op().map(|op| Reduction { op, dtype: extents.dtype });
        comm.group(stream, reduction, |calls, op| plan.call(at, calls, op)).map_err(|error| self.or_failure(error))?;
        self.wait(comm, deadline, || comm.progress().map_err(|error| self.or_failure(error)))?;
        if let Place::Host(host) = buffer {
            for written in extents.writes.clone() {
                let written = extents.bytes(written);
                staging.download(at.buffer.at(written.start), &mut host[written], stream, passed)?;
            }
        }
        event.record(stream)?;
        passed(event)
    }

    /// Looks again and again until it is so; NCCL and the control plane are watched meanwhile.
    pub(crate) fn wait(
        &self,
        comm: &RawComm,
        deadline: Deadline,
        mut is_so: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
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
    pub(crate) fn or_failure(&self, error: Option<Error>) -> Error {
        error
            .or_else(|| self.shared.failure().cloned())
            .unwrap_or_else(|| Error::Internal("NCCL's communicator is gone, though the job has not failed".into()))
    }

    /// Whether everything that a lane has begun on the device has ended, for which it waits. If not, the device is given up.
    fn has_settled(&self, state: &LaneState, deadline: Deadline) -> bool {
        let passed = || -> Result<bool> {
            // A mark after all of it: the operation may have failed before it set its own.
            state.event.record(&state.stream)?;
            while !state.event.has_passed()? {
                if deadline.has_passed() {
                    return Ok(false);
                }
                thread::sleep(Duration::from_millis(1));
            }
            Ok(true)
        };
        let has_settled = self.wait_for_ends(deadline) && passed().unwrap_or(false);
        if !has_settled {
            self.device.give_up();
        }
        has_settled
    }

    /// Waits until everything that any lane has begun on the device has ended. If it does not, the device is given up.
    fn settle(&self) {
        let soon = Deadline::after(GRACE);
        for lane in &self.shared.lanes {
            if self.device.is_given_up() || !self.has_settled(&lane.scratch(), soon) {
                break;
            }
        }
    }

    /// Ends the first communicator in an orderly way, and waits for those that were dropped.
    pub(crate) fn close(self: &Arc<Self>, members: &Members, deadline: Deadline) -> Result<()> {
        // Whoever was still let in has queued what it starts.
        drop(self.starting());
        self.device.make_current()?;
        for comm in &members.comms {
            comm.finalize();
            self.wait(comm, deadline, || comm.progress().map_err(|error| self.or_failure(error)))?;
        }
        for comm in &members.comms {
            let comm = comm.clone();
            self.beside("comm-nccl-end", move || comm.destroy());
        }
        if self.wait_for_ends(deadline) { Ok(()) } else { Err(self.shared.timeout(deadline)) }
    }
}

/// Tells the other ranks if an operation panics: they would wait for it. What is on the device then stays there unless all that the lane
/// has begun has ended.
struct PanicGuard<'a> {
    core: &'a Arc<Core>,
    call: &'a Header,
    state: &'a mut LaneState,
    is_lent: bool,
}

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            let PanicGuard { core, call, state, is_lent } = self;
            core.fail(Error::Internal(format!("{call} panicked on rank {}", core.shared.job_rank())), "");
            if *is_lent {
                core.has_settled(state, Deadline::after(GRACE));
            }
        }
    }
}

/// A header that stands for the operation as such, not for one of its messages.
fn call_of(header: Header, op: &Op) -> Header {
    Header { step: if matches!(op, Op::Recv { .. }) { CHECK_RECEIVE } else { CHECK }, ..header }
}

/// What to call an operation in errors.
pub(crate) fn named(header: Header, op: &Op, label: Option<&str>, members: &Members) -> String {
    name(&call_of(header, op), pair(op, &members.group), label)
}

impl Drop for Core {
    /// Frees nothing that a kernel may still use: what has not ended within [`GRACE`] counts as running for ever.
    fn drop(&mut self) {
        self.settle();
        self.device.forget_copies();
    }
}

impl Members {
    /// Runs each kind of connection once, lane after lane, while nothing else runs: NCCL makes them at their first use, with memory that
    /// it would have to allocate beside other lanes' kernels. Collective.
    pub(crate) fn warm_up(&self, deadline: Deadline) -> Result<()> {
        /// Beyond so many ranks, connections between all pairs are more than most will need.
        const PAIRS: usize = 16;
        let core = &self.core;
        let ranks = self.group.world_size();
        for (lane, queue) in core.shared.lanes.iter().enumerate() {
            let mut state = queue.scratch();
            let mut run = |op: Op, values: &mut [u8]| {
                let elements = Elements { dtype: DType::U8, count: values.len() };
                let extents = check(&op, self.group.rank, ranks, elements, None, None)?;
                let io = Io { extents: &extents, buffer: Place::Host(values), input: None };
                core.perform(self, lane, &op, io, &mut state, deadline)
            };
            run(Op::AllReduce(ReduceOp::Sum), &mut vec![0; ranks])?;
            run(Op::AllGather, &mut vec![0; ranks])?;
            if ranks <= PAIRS {
                run(Op::AllToAll, &mut vec![0; ranks])?;
            }
        }
        Ok(())
    }
}

impl Drop for Members {
    /// Flushes what is on its way, beside the caller, and gives NCCL's communicators back.
    fn drop(&mut self) {
        let mut comms = std::mem::take(&mut self.comms);
        comms.retain(|comm| !comm.is_gone());
        if comms.is_empty() || self.core.shared.failure().is_some() {
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
        self.core.beside("comm-nccl-end", end);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, feature = "stand-in"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "the helpers of tests are tests too")]

    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    use comm_core::{OpKind, local};

    use super::*;
    use crate::connect;
    use crate::sys::Behaviour;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(20))
    }

    /// The ranks of a job, connected, with their control planes.
    fn ranks(count: usize, lanes: usize) -> Vec<(Arc<Core>, Members, Arc<local::LocalControl>)> {
        let connect = move |rank: local::LocalRank| {
            let options = NcclOptions::default().on_stand_in().with_lanes(lanes);
            let (core, members) = connect::connect(rank.control.clone(), &options, soon()).unwrap();
            (core, members, rank.control)
        };
        let threads: Vec<_> =
            local::group(count, lanes).into_iter().map(|rank| thread::spawn(move || connect(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    /// Lets an operation on lane 0 panic.
    fn panic_in_an_operation(core: &Arc<Core>, is_lent: bool) {
        let call = Header {
            communicator: 1,
            sequence: 0,
            kind: OpKind::Barrier,
            dtype: DType::U8,
            reduce: None,
            algorithm: comm_core::Algorithm::Direct,
            root: 0,
            count: 0,
            division: 0,
            step: CHECK,
            payload_len: 0,
        };
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let mut state = core.shared.lanes[0].scratch();
            let _guard = PanicGuard { core, call: &call, state: &mut state, is_lent };
            resume_unwind(Box::new("on purpose"));
        }));
        assert!(panicked.is_err());
    }

    #[test]
    fn a_panic_in_an_operation_ends_the_job_and_frees_nothing_that_may_be_in_use() {
        for (behaviour, is_given_up) in [(Behaviour::Works, false), (Behaviour::Hangs, true)] {
            let both = ranks(2, 1);
            let core = &both[1].0;
            core.device.behave(behaviour);
            panic_in_an_operation(core, true);
            for (_, _, control) in &both {
                let failure = control.failure().unwrap().to_string();
                assert!(failure.contains("barrier") && failure.contains("panicked on rank 1"), "{failure}");
            }
            assert_eq!(core.device.is_given_up(), is_given_up, "{behaviour:?}");
        }
    }

    #[test]
    fn a_room_gives_back_what_it_has_outgrown_once_nothing_else_runs() {
        const MIB: usize = 1 << 20;
        let (core, _members, _control) = ranks(1, 2).remove(0);
        let mut state = core.shared.lanes[0].scratch();
        let room = &mut state.buffer;
        let mut grow = |bytes: usize| -> (usize, usize) {
            room.of(&core.device, bytes, || core.quiet(0)).unwrap();
            (room.memory.as_ref().unwrap().bytes(), room.outgrown.iter().map(Memory::bytes).sum())
        };
        for mib in 1..200 {
            let (held, outgrown) = grow(mib * MIB);
            assert!((mib * MIB..=mib * MIB + 64 * MIB).contains(&held) && outgrown == 0, "{mib}: {held}, {outgrown}");
        }
        // Another lane is in use: nothing may be freed, and all that is kept is no more than what is used.
        let turn = core.shared.lanes[1].try_enter(soon()).unwrap();
        for mib in (200..1000).step_by(10) {
            let (held, outgrown) = grow(mib * MIB);
            assert!(held >= mib * MIB && outgrown <= held && held <= 3 * mib * MIB, "{mib}: {held}, {outgrown}");
        }
        assert!(grow(990 * MIB).1 > 0);
        drop(turn);
        assert_eq!(grow(990 * MIB).1, 0);
    }
}
