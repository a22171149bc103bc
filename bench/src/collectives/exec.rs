//! One rank's part of a measurement: the operation, again and again, on a communicator.

use std::any::Any;
use std::mem;
use std::time::{Duration, Instant};

use comm_core::table::supports;
use comm_core::{
    Algorithm, BorrowedCall, Buffer, Call, Communicator, CommunicatorExt, Error, Failed, Op, View, ViewMut,
    prefer_huge_pages, shard_range,
};
use isocomm::Connected;
use rig::samples::{Pattern, Sample, count_wrong, fill};
use rig::sys::process_cpu_time;
use rig::with_sample;

use super::case::{Case, Operation, ResultPlacement};
use super::protocol::{MAX_SAMPLES, Measure, MeasureError, Reply};

/// A rank's buffers, kept from one command to the next so that each measures memory that is already there.
#[derive(Default)]
pub(crate) struct Memory {
    kept: Option<Box<dyn Any + Send>>,
}

/// What an operation works on: in place `output` alone.
struct Buffers<T> {
    input: Vec<T>,
    output: Vec<T>,
}

/// Does what `request` says on `session`. `is_process` says that this rank has the process to itself, or is the one among its
/// threads that answers for it.
pub(crate) fn measure(session: &Connected, request: &Measure, memory: &mut Memory, is_process: bool) -> Reply {
    let dtype = request.case.dtype;
    let outcome = with_sample!(
        dtype,
        T => run::<T>(session, request, memory, is_process),
        else Err(MeasureError::Unsupported(format!("no test data of type {dtype}")))
    );
    outcome.unwrap_or_else(|error| Reply { error: Some(error), ..Reply::default() })
}

fn run<T: Sample>(
    session: &Connected,
    request: &Measure,
    memory: &mut Memory,
    is_process: bool,
) -> Result<Reply, MeasureError> {
    let (comm, timing_only) = (&*session.comm, session.properties.timing_only);
    let plan = Plan::new(request, comm.world_size(), comm.rank(), comm.lanes())?;
    let mut buffers = memory.take::<T>(plan.input, plan.output);
    // Sums of zeros stay zeros, however often; written, so that every page is there.
    buffers.input.fill(T::zeroed());
    buffers.output.fill(T::zeroed());
    for _ in 0..request.warmup {
        plan.step(comm, &mut buffers)?;
    }
    comm.barrier().map_err(failure)?;

    let stride = request.iters.div_ceil(MAX_SAMPLES).max(1);
    let mut samples = Vec::with_capacity(usize::try_from(request.iters / stride).unwrap_or(0) + 1);
    let cpu = cpu_time(is_process)?;
    let start = Instant::now();
    let mut last = start;
    for iteration in 0..request.iters {
        plan.step(comm, &mut buffers)?;
        let now = Instant::now();
        if iteration % stride == 0 {
            samples.push(nanos(now - last));
        }
        last = now;
    }
    plan.receipt(comm, &mut buffers)?;
    let elapsed = start.elapsed();
    let cpu = cpu_time(is_process)?.saturating_sub(cpu);

    // Where nothing arrives everything is wrong.
    let wrong = if request.check && !timing_only { Some(check(comm, request, &plan, &mut buffers)?) } else { None };
    memory.keep(buffers);
    Ok(Reply { ns: nanos(elapsed), samples, cpu_ns: nanos(cpu), wrong, error: None })
}

/// Runs the operation once on fresh data; how many elements of this rank are wrong afterwards.
fn check<T: Sample>(
    comm: &dyn Communicator,
    request: &Measure,
    plan: &Plan,
    buffers: &mut Buffers<T>,
) -> Result<u64, MeasureError> {
    let (case, ranks, rank) = (&request.case, comm.world_size(), comm.rank());
    let pattern = Pattern::new::<T>(request.seed, ranks, case.reduction);
    // Where something is to come, something else is first.
    let other = Pattern::new::<T>(!request.seed, ranks, case.reduction);
    let length = case.count.checked_div(ranks).unwrap_or(0);
    let mine = shard_range(case.count, ranks, rank);
    let root = case.root.unwrap_or(0);
    let at_root = rank == root;

    // What goes in: this rank's contribution, of which a shard may be all that there is.
    let is_shard = |values: &[T]| values.len() < case.count;
    let contribute = |values: &mut [T]| {
        let start = if is_shard(values) { mine.start } else { 0 };
        fill(values, &pattern, rank, start);
    };
    let out_of_place = !buffers.input.is_empty() && request.place == ResultPlacement::OutOfPlace;
    contribute(&mut buffers.input);
    match case.operation {
        Operation::Gather | Operation::AllGather if !out_of_place && !is_shard(&buffers.output) => {
            fill(&mut buffers.output, &other, rank, 0);
            fill(&mut buffers.output[mine.clone()], &pattern, rank, mine.start);
        }
        Operation::Broadcast | Operation::Scatter if !at_root => fill(&mut buffers.output, &other, rank, 0),
        Operation::SendRecv | Operation::RoundTrip => fill(&mut buffers.output, &other, rank, 0),
        Operation::OneWay if rank == 1 => fill(&mut buffers.output, &other, rank, 0),
        _ if out_of_place => fill(&mut buffers.output, &other, rank, 0),
        _ => contribute(&mut buffers.output),
    }
    plan.step(comm, buffers)?;
    plan.receipt(comm, buffers)?;

    let output = &buffers.output[..];
    let own = |index| pattern.value(rank, index);
    let of_root = |index| pattern.value(root, index);
    let reduced = |index| pattern.reduced(index);
    // Shards are equal (`Case::new`), so the owner of an element is found by division.
    let gathered = |index| pattern.value(index / length.max(1), index);
    let exchanged = |index| pattern.value(index / length.max(1), mine.start + index % length.max(1));
    let of_previous = |index| pattern.value((rank + ranks - 1) % ranks, index);
    let shard = |values: &'_ [T], expected: &dyn Fn(usize) -> i64| {
        let values = if is_shard(values) { values } else { &values[mine.clone()] };
        count_wrong(values, |index| expected(mine.start + index))
    };
    let result = match case.operation {
        Operation::AllReduce => count_wrong(output, reduced),
        Operation::Reduce if at_root => count_wrong(output, reduced),
        Operation::Broadcast => count_wrong(output, of_root),
        // In place the root keeps the whole.
        Operation::Scatter if at_root && !out_of_place => count_wrong(output, of_root),
        Operation::Scatter => shard(output, &of_root),
        Operation::Gather if at_root => count_wrong(output, gathered),
        Operation::AllGather => count_wrong(output, gathered),
        Operation::ReduceScatter => shard(output, &reduced),
        Operation::AllToAll => count_wrong(output, exchanged),
        Operation::SendRecv | Operation::RoundTrip => count_wrong(output, of_previous),
        Operation::OneWay => count_wrong(output, |index| pattern.value(0, index)),
        // What only gives keeps what it had.
        Operation::Reduce | Operation::Gather if out_of_place => 0,
        Operation::Reduce => count_wrong(output, own),
        Operation::Gather => shard(output, &own),
    };
    let input = &buffers.input[..];
    let kept = match case.operation {
        // One element that served as the receipt.
        Operation::OneWay => 0,
        _ if is_shard(input) => shard(input, &own),
        _ => count_wrong(input, own),
    };
    Ok(result + kept)
}

/// What this rank does in every iteration.
struct Plan {
    step: Step,
    algorithm: Option<Algorithm>,
    /// At the end of all iterations, on the one element of the input.
    receipt: Option<Op>,
    /// Elements of the two buffers.
    input: usize,
    output: usize,
}

enum Step {
    /// One operation, in place.
    Inside(Op),
    /// One operation from the input to the output.
    Across(Op),
    /// A message from the input and one into the output, at the same time, each on its own lane.
    Shift { send: (Op, usize), receive: (Op, usize) },
    /// A message from the input, and then one into the output.
    ThereAndBack { send: Op, receive: Op },
    /// The other side of that.
    BackAndForth { receive: Op, send: Op },
}

impl Plan {
    fn new(request: &Measure, ranks: usize, rank: usize, lanes: usize) -> Result<Self, MeasureError> {
        let case = &request.case;
        let unsupported = |why: String| Err(MeasureError::Unsupported(why));
        if matches!(case.operation, Operation::SendRecv | Operation::OneWay | Operation::RoundTrip) {
            return Self::of_messages(case, ranks, rank, lanes);
        }
        let op = case.op();
        if let Some(algorithm) = request.algorithm
            && !supports(algorithm, op.kind(), case.dtype, ranks)
        {
            let dtype = case.dtype;
            return unsupported(format!(
                "the algorithm {algorithm} cannot run {} of {dtype} on {ranks} ranks",
                op.kind()
            ));
        }
        let (whole, shard) = (case.count, shard_range(case.count, ranks, rank).len());
        let at_root = op.root() == Some(rank);
        let (step, input, output) = if request.place == ResultPlacement::InPlace {
            let is_whole = at_root || !matches!(op, Op::Scatter { .. } | Op::Gather { .. });
            (Step::Inside(op), 0, if is_whole { whole } else { shard })
        } else {
            // What is only written on the root needs no room elsewhere.
            let on_root = |length| if at_root { length } else { 0 };
            let (input, output) = match op {
                Op::Broadcast { .. } => (on_root(whole), whole),
                Op::Reduce { .. } => (whole, on_root(whole)),
                Op::Scatter { .. } => (on_root(whole), shard),
                Op::Gather { .. } => (shard, on_root(whole)),
                Op::AllGather => (shard, whole),
                Op::ReduceScatter(_) => (whole, shard),
                _ => (whole, whole),
            };
            let receives_only = matches!(op, Op::Broadcast { .. } | Op::Scatter { .. }) && !at_root;
            (if receives_only { Step::Inside(op) } else { Step::Across(op) }, input, output)
        };
        Ok(Plan { step, algorithm: request.algorithm, receipt: None, input, output })
    }

    fn of_messages(case: &Case, ranks: usize, rank: usize, lanes: usize) -> Result<Self, MeasureError> {
        let unsupported = |why: String| Err(MeasureError::Unsupported(why));
        let count = case.count;
        let plan = |step, receipt, input| Ok(Plan { step, algorithm: None, receipt, input, output: count });
        if case.operation == Operation::SendRecv {
            let needed = if ranks.is_multiple_of(2) { 2 } else { 3 };
            if ranks < 2 || lanes < needed {
                return unsupported(format!("both directions at once need 2 ranks and --lanes {needed}"));
            }
            let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let send = (Op::Send { to: next }, shift_lane(rank, ranks));
            let receive = (Op::Recv { from: previous }, shift_lane(previous, ranks));
            return plan(Step::Shift { send, receive }, None, count);
        }
        if ranks != 2 {
            return unsupported("this needs exactly two ranks".into());
        }
        let peer = 1 - rank;
        let (send, receive) = (Op::Send { to: peer }, Op::Recv { from: peer });
        match (case.operation, rank) {
            (Operation::OneWay, 0) => plan(Step::Inside(send), Some(receive), 1),
            (Operation::OneWay, _) => plan(Step::Inside(receive), Some(send), 1),
            (_, 0) => plan(Step::ThereAndBack { send, receive }, None, count),
            (_, _) => plan(Step::BackAndForth { receive, send }, None, count),
        }
    }

    fn step<T: Sample>(&self, comm: &dyn Communicator, buffers: &mut Buffers<T>) -> Result<(), MeasureError> {
        let Buffers { input, output } = buffers;
        match &self.step {
            Step::Inside(op) => self.call(comm, *op, output),
            Step::Across(op) => {
                let call = BorrowedCall::new(*op, ViewMut::of(output)).out_of_place(View::of(input));
                comm.run_borrowed(BorrowedCall { algorithm: self.algorithm, ..call }).map_err(failure)
            }
            Step::ThereAndBack { send, receive } => {
                self.call(comm, *send, input)?;
                self.call(comm, *receive, output)
            }
            Step::BackAndForth { receive, send } => {
                self.call(comm, *receive, output)?;
                self.call(comm, *send, input)
            }
            Step::Shift { send: (send, send_lane), receive: (receive, receive_lane) } => {
                // What runs beside the caller owns its buffer; the vector moves in and out without a copy.
                let sending = comm.start(Call::background(*send, Buffer::from_vec(mem::take(input)), *send_lane));
                let call = BorrowedCall::new(*receive, ViewMut::of(output));
                let received = comm.run_borrowed(BorrowedCall { lane: *receive_lane, ..call });
                let sent = sending.wait().map_err(Failed::into_error).and_then(|sent| sent.buffer.into_vec());
                *input = sent.map_err(failure)?;
                received.map_err(failure)
            }
        }
    }

    /// After the last iteration: the receiver's word that everything has come.
    fn receipt<T: Sample>(&self, comm: &dyn Communicator, buffers: &mut Buffers<T>) -> Result<(), MeasureError> {
        match self.receipt {
            Some(op) => self.call(comm, op, &mut buffers.input),
            None => Ok(()),
        }
    }

    fn call<T: Sample>(&self, comm: &dyn Communicator, op: Op, values: &mut [T]) -> Result<(), MeasureError> {
        let call = BorrowedCall::new(op, ViewMut::of(values));
        comm.run_borrowed(BorrowedCall { algorithm: self.algorithm, ..call }).map_err(failure)
    }
}

impl Memory {
    fn take<T: Sample>(&mut self, input: usize, output: usize) -> Buffers<T> {
        if let Some(kept) = self.kept.take()
            && let Ok(buffers) = kept.downcast::<Buffers<T>>()
            && (buffers.input.len(), buffers.output.len()) == (input, output)
        {
            return *buffers;
        }
        let mut buffers = Buffers { input: vec![T::zeroed(); input], output: vec![T::zeroed(); output] };
        // As NumPy does for the peers'.
        prefer_huge_pages(&mut buffers.input);
        prefer_huge_pages(&mut buffers.output);
        buffers
    }

    fn keep<T: Sample>(&mut self, buffers: Buffers<T>) {
        self.kept = Some(Box::new(buffers));
    }
}

/// The lane of the message that `sender` sends to the next rank: no rank sends and receives on the same one.
fn shift_lane(sender: usize, ranks: usize) -> usize {
    if !ranks.is_multiple_of(2) && sender == ranks - 1 { 2 } else { sender % 2 }
}

fn failure(error: Error) -> MeasureError {
    match error {
        Error::Unsupported { .. } => MeasureError::Unsupported(error.to_string()),
        error => MeasureError::Failed(error.to_string()),
    }
}

fn cpu_time(is_process: bool) -> Result<Duration, MeasureError> {
    if !is_process {
        return Ok(Duration::ZERO);
    }
    process_cpu_time().map_err(|error| MeasureError::Failed(format!("reading this process's clock: {error}")))
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
