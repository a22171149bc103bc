//! Collectives between threads of one process.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use half::{bf16, f16};

use super::super::{Config, IN_PROGRESS, NcclTable, SUCCESS, UniqueId};
use super::cuda::{Stream, has_context, lock, synchronise};

type Comm = *mut c_void;
type CudaStream = *mut c_void;

const INVALID: c_int = 4;

pub(super) static TABLE: NcclTable = NcclTable {
    unique_id,
    init,
    async_error,
    finalize,
    destroy,
    abort,
    group_start,
    group_end,
    all_reduce,
    reduce,
    reduce_scatter,
    broadcast,
    all_gather,
    send,
    recv,
    scaled_sum,
    forget_op,
    error_text,
    last_error,
};

/// The ranks of one communicator.
#[derive(Default)]
struct World {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    ranks: usize,
    joined: usize,
    /// Ranks that destroy it or have aborted it.
    leaving: usize,
    /// Collectives that not all ranks have been through, by number.
    collectives: HashMap<u64, Meeting>,
    /// Messages from one rank to another.
    messages: HashMap<(usize, usize), VecDeque<Arc<Message>>>,
}

#[derive(Default)]
struct Meeting {
    parts: HashMap<usize, (Shape, Vec<u8>)>,
    done: usize,
}

struct Message {
    bytes: Vec<u8>,
    is_taken: AtomicBool,
}

/// What ranks must agree on.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Shape {
    kind: Kind,
    count: usize,
    dtype: c_int,
    /// 5 for every scaled sum.
    op: c_int,
    root: c_int,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    AllReduce,
    Reduce,
    ReduceScatter,
    Broadcast,
    AllGather,
}

/// One rank's communicator.
struct Own {
    world: Arc<World>,
    rank: usize,
    ranks: usize,
    is_aborted: AtomicBool,
    numbers: AtomicU64,
    /// Factors of scaled sums, by number of the operation.
    factors: Mutex<HashMap<c_int, [u8; 8]>>,
}

/// A call within a group.
enum Work {
    Collective { shape: Shape, factor: Option<[u8; 8]>, from: usize, to: usize },
    Send { from: usize, bytes: usize, peer: usize },
    Recv { to: usize, bytes: usize, peer: usize },
}

static WORLDS: LazyLock<Mutex<HashMap<[u8; 128], Weak<World>>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// Calls of the group that this thread has started, with the communicator and the stream of each.
    static GROUP: RefCell<Option<Vec<Added>>> = const { RefCell::new(None) };
}

/// A call of a group: whose, into which stream, and what.
type Added = (Arc<Own>, usize, Work);

unsafe extern "C" fn unique_id(id: *mut UniqueId) -> c_int {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut bytes = [0; 128];
    bytes[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    // SAFETY: as nccl.h asks of callers, here and in every function below.
    unsafe { *id = UniqueId(bytes) };
    SUCCESS
}

unsafe extern "C" fn init(comm: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int, config: *mut Config) -> c_int {
    // SAFETY: see `unique_id`.
    let config = unsafe { &*config };
    if !has_context() || (config.magic, config.blocking) != (0xcafe_beef, 0) || rank < 0 || rank >= ranks {
        return INVALID;
    }
    let world = {
        let mut worlds = lock(&WORLDS);
        worlds.retain(|_, world| world.strong_count() > 0);
        let world = worlds.get(&id.0).and_then(Weak::upgrade).unwrap_or_default();
        worlds.insert(id.0, Arc::downgrade(&world));
        world
    };
    let mut state = lock(&world.state);
    state.ranks = ranks as usize;
    state.joined += 1;
    drop(state);
    let own = Own {
        world,
        rank: rank as usize,
        ranks: ranks as usize,
        is_aborted: AtomicBool::new(false),
        numbers: AtomicU64::new(0),
        factors: Mutex::default(),
    };
    // SAFETY: see `unique_id`.
    unsafe { *comm = Arc::into_raw(Arc::new(own)).cast_mut().cast() };
    IN_PROGRESS
}

/// A share of what a communicator stands for.
///
/// # Safety
/// It came from `init`, and was neither destroyed nor aborted.
unsafe fn own(comm: Comm) -> Arc<Own> {
    // SAFETY: as the caller says.
    unsafe {
        Arc::increment_strong_count(comm.cast::<Own>());
        Arc::from_raw(comm.cast::<Own>())
    }
}

unsafe extern "C" fn async_error(comm: Comm, state: *mut c_int) -> c_int {
    // SAFETY: see `unique_id`.
    let own = unsafe { own(comm) };
    let is_there = lock(&own.world.state).joined >= own.ranks;
    // SAFETY: see `unique_id`.
    unsafe { *state = if is_there { SUCCESS } else { IN_PROGRESS } };
    SUCCESS
}

extern "C" fn finalize(_comm: Comm) -> c_int {
    SUCCESS
}

unsafe extern "C" fn destroy(comm: Comm) -> c_int {
    // SAFETY: see `unique_id`; given back once.
    let own = unsafe { Arc::from_raw(comm.cast::<Own>()) };
    let mut state = lock(&own.world.state);
    state.leaving += 1;
    own.world.changed.notify_all();
    while state.leaving < own.ranks {
        state = own.world.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    SUCCESS
}

unsafe extern "C" fn abort(comm: Comm) -> c_int {
    // SAFETY: see `unique_id`; given back once.
    let own = unsafe { Arc::from_raw(comm.cast::<Own>()) };
    own.is_aborted.store(true, Ordering::SeqCst);
    {
        // Under the lock, so that nobody looks just before and waits just after.
        let mut state = lock(&own.world.state);
        state.leaving += 1;
        own.world.changed.notify_all();
    }
    synchronise();
    if has_context() { SUCCESS } else { INVALID }
}

extern "C" fn group_start() -> c_int {
    GROUP.set(Some(Vec::new()));
    SUCCESS
}

extern "C" fn group_end() -> c_int {
    let Some(calls) = GROUP.take().filter(|_| has_context()) else { return INVALID };
    let Some((own, stream, _)) = calls.first() else { return SUCCESS };
    let (own, stream) = (own.clone(), *stream);
    // Numbers follow the order in which groups are queued.
    let mut numbered = Vec::new();
    for (_, _, work) in calls {
        let number = match work {
            Work::Collective { .. } => own.numbers.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
        numbered.push((number, work));
    }
    // SAFETY: whoever makes a call keeps its stream until it has run.
    unsafe { Stream::of(ptr::with_exposed_provenance_mut(stream)) }.push(Box::new(move || run(&own, &numbered)));
    IN_PROGRESS
}

/// All calls of a group at once: whatever this rank gives is there before it waits for anything.
fn run(own: &Own, calls: &[(u64, Work)]) {
    let world = &*own.world;
    let mut sent = Vec::new();
    let mut state = lock(&world.state);
    for (number, work) in calls {
        match *work {
            Work::Collective { shape, factor, from, .. } => {
                let mut bytes = read(from, contribution(&shape, own.rank, own.ranks));
                if let Some(factor) = factor {
                    scale(shape.dtype, &mut bytes, factor);
                }
                state.collectives.entry(*number).or_default().parts.insert(own.rank, (shape, bytes));
            }
            Work::Send { from, bytes, peer } => {
                let message = Arc::new(Message { bytes: read(from, bytes), is_taken: AtomicBool::new(false) });
                state.messages.entry((own.rank, peer)).or_default().push_back(message.clone());
                sent.push(message);
            }
            Work::Recv { .. } => {}
        }
    }
    world.changed.notify_all();
    for (number, work) in calls {
        match *work {
            Work::Recv { to, bytes, peer } => {
                let key = (peer, own.rank);
                // One of another length is never taken, as NCCL may hang.
                let fits = |state: &State| {
                    state
                        .messages
                        .get(&key)
                        .and_then(VecDeque::front)
                        .is_some_and(|message| message.bytes.len() == bytes)
                };
                let Some(mut there) = wait(own, state, &fits) else { return };
                if let Some(message) = there.messages.get_mut(&key).and_then(VecDeque::pop_front) {
                    write(to, &message.bytes);
                    message.is_taken.store(true, Ordering::SeqCst);
                }
                world.changed.notify_all();
                state = there;
            }
            Work::Collective { shape, to, .. } => {
                let agreed = |state: &State| {
                    state.collectives.get(number).is_some_and(|meeting| {
                        meeting.parts.len() == own.ranks && meeting.parts.values().all(|(theirs, _)| *theirs == shape)
                    })
                };
                let Some(mut there) = wait(own, state, &agreed) else { return };
                if let Some(meeting) = there.collectives.get_mut(number) {
                    finish(&shape, own, meeting, to);
                    meeting.done += 1;
                    if meeting.done == own.ranks {
                        there.collectives.remove(number);
                    }
                }
                state = there;
            }
            Work::Send { .. } => {}
        }
    }
    let all_taken = |_: &State| sent.iter().all(|message| message.is_taken.load(Ordering::SeqCst));
    drop(wait(own, state, &all_taken));
}

/// Waits until it is so; `None` once this rank's communicator is aborted.
fn wait<'a>(
    own: &'a Own,
    mut state: MutexGuard<'a, State>,
    is_so: &dyn Fn(&State) -> bool,
) -> Option<MutexGuard<'a, State>> {
    while !is_so(&state) {
        if own.is_aborted.load(Ordering::SeqCst) {
            return None;
        }
        let waited = own.world.changed.wait_timeout(state, Duration::from_secs(1));
        state = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    Some(state)
}

/// Bytes that a rank gives.
fn contribution(shape: &Shape, rank: usize, ranks: usize) -> usize {
    let bytes = shape.count * size(shape.dtype);
    match shape.kind {
        Kind::ReduceScatter => bytes * ranks,
        Kind::Broadcast if shape.root as usize != rank => 0,
        _ => bytes,
    }
}

/// Writes what a rank gets.
fn finish(shape: &Shape, own: &Own, meeting: &Meeting, to: usize) {
    let parts: Vec<&[u8]> =
        (0..own.ranks).filter_map(|rank| meeting.parts.get(&rank)).map(|(_, bytes)| bytes.as_slice()).collect();
    let bytes = shape.count * size(shape.dtype);
    let shards = |start: usize| parts.iter().map(|part| &part[start..start + bytes]).collect::<Vec<_>>();
    match shape.kind {
        Kind::AllReduce => write(to, &reduced(shape, &shards(0))),
        Kind::Reduce if shape.root as usize == own.rank => write(to, &reduced(shape, &shards(0))),
        Kind::Reduce => {}
        Kind::ReduceScatter => write(to, &reduced(shape, &shards(own.rank * bytes))),
        Kind::Broadcast => write(to, parts[shape.root as usize]),
        Kind::AllGather => write(to, &parts.concat()),
    }
}

fn reduced(shape: &Shape, parts: &[&[u8]]) -> Vec<u8> {
    macro_rules! integers {
        ($type:ty, $wide:ty) => {
            fold::<$type, $type>(
                parts,
                |part| part,
                |a, b| match shape.op {
                    1 => a.wrapping_mul(b),
                    2 => a.max(b),
                    3 => a.min(b),
                    _ => a.wrapping_add(b),
                },
                |sum, ranks| if shape.op == 4 { ((sum as $wide) / (ranks as $wide)) as $type } else { sum },
            )
        };
    }
    macro_rules! floats {
        ($type:ty, $wide:ty, $widen:expr, $round:expr) => {
            fold::<$type, $wide>(
                parts,
                $widen,
                |a, b| match shape.op {
                    1 => a * b,
                    2 => {
                        if a.is_nan() || a > b {
                            a
                        } else {
                            b
                        }
                    }
                    3 => {
                        if a.is_nan() || a < b {
                            a
                        } else {
                            b
                        }
                    }
                    _ => a + b,
                },
                |sum, ranks| $round(if shape.op == 4 { sum / ranks as $wide } else { sum }),
            )
        };
    }
    match shape.dtype {
        0 => integers!(i8, i64),
        1 => integers!(u8, u64),
        2 => integers!(i32, i64),
        3 => integers!(u32, u64),
        4 => integers!(i64, i64),
        5 => integers!(u64, u64),
        6 => floats!(f16, f32, f16::to_f32, f16::from_f32),
        7 => floats!(f32, f32, |part| part, |sum| sum),
        8 => floats!(f64, f64, |part| part, |sum| sum),
        _ => floats!(bf16, f32, bf16::to_f32, bf16::from_f32),
    }
}

/// Element by element in rank order.
fn fold<T: Copy + FromBytes, W: Copy>(
    parts: &[&[u8]],
    widen: impl Fn(T) -> W,
    combine: impl Fn(W, W) -> W,
    end: impl Fn(W, usize) -> T,
) -> Vec<u8> {
    let width = size_of::<T>();
    let count = parts.first().map_or(0, |part| part.len() / width);
    let mut out = Vec::with_capacity(count * width);
    for index in 0..count {
        let mut of_ranks = parts.iter().map(|part| widen(T::read(&part[index * width..])));
        let Some(first) = of_ranks.next() else { break };
        let all = of_ranks.fold(first, &combine);
        end(all, parts.len()).write(&mut out);
    }
    out
}

/// Numbers in the machine's own order of bytes.
trait FromBytes {
    fn read(bytes: &[u8]) -> Self;
    fn write(self, bytes: &mut Vec<u8>);
}

macro_rules! from_bytes {
    ($($type:ty),*) => {$(
        impl FromBytes for $type {
            fn read(bytes: &[u8]) -> Self {
                Self::from_ne_bytes(std::array::from_fn(|index| bytes[index]))
            }

            fn write(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_ne_bytes());
            }
        }
    )*};
}

from_bytes!(i8, u8, i32, u32, i64, u64, f16, bf16, f32, f64);

/// Multiplies what a rank gives by its factor, a value of the type.
fn scale(dtype: c_int, bytes: &mut Vec<u8>, factor: [u8; 8]) {
    let op = 1;
    let shape = Shape { kind: Kind::AllReduce, count: 0, dtype, op, root: 0 };
    let factors = factor[..size(dtype)].repeat(bytes.len() / size(dtype));
    *bytes = reduced(&shape, &[bytes, &factors]);
}

fn size(dtype: c_int) -> usize {
    match dtype {
        0 | 1 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        _ => 8,
    }
}

fn read(from: usize, bytes: usize) -> Vec<u8> {
    if bytes == 0 {
        return Vec::new();
    }
    // SAFETY: whoever makes a call keeps its memory until the call has run.
    unsafe { slice::from_raw_parts(ptr::with_exposed_provenance(from), bytes) }.to_vec()
}

fn write(to: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), ptr::with_exposed_provenance_mut(to), bytes.len()) };
    }
}

/// Adds a call to the group of this thread: this crate makes none outside of one.
unsafe fn add(comm: Comm, stream: CudaStream, work: impl FnOnce(&Own) -> Work) -> c_int {
    // SAFETY: see `unique_id`.
    let own = unsafe { own(comm) };
    let work = work(&own);
    GROUP.with_borrow_mut(|group| match group {
        Some(calls) => {
            calls.push((own, stream.expose_provenance(), work));
            SUCCESS
        }
        None => INVALID,
    })
}

unsafe fn collective(comm: Comm, stream: CudaStream, mut shape: Shape, from: *const c_void, to: *mut c_void) -> c_int {
    let (from, to) = (from.expose_provenance(), to.expose_provenance());
    let work = |own: &Own| {
        let factor = lock(&own.factors).get(&shape.op).copied();
        if factor.is_some() {
            shape.op = 5;
        }
        Work::Collective { shape, factor, from, to }
    };
    // SAFETY: as the caller says.
    unsafe { add(comm, stream, work) }
}

unsafe extern "C" fn all_reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: Comm,
    stream: CudaStream,
) -> c_int {
    // SAFETY: see `unique_id`.
    unsafe { collective(comm, stream, Shape { kind: Kind::AllReduce, count, dtype, op, root: 0 }, from, to) }
}

unsafe extern "C" fn reduce(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    comm: Comm,
    stream: CudaStream,
) -> c_int {
    // SAFETY: see `unique_id`.
    unsafe { collective(comm, stream, Shape { kind: Kind::Reduce, count, dtype, op, root }, from, to) }
}

unsafe extern "C" fn reduce_scatter(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: Comm,
    stream: CudaStream,
) -> c_int {
    // SAFETY: see `unique_id`.
    unsafe { collective(comm, stream, Shape { kind: Kind::ReduceScatter, count, dtype, op, root: 0 }, from, to) }
}

unsafe extern "C" fn broadcast(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: Comm,
    stream: CudaStream,
) -> c_int {
    // SAFETY: see `unique_id`.
    unsafe { collective(comm, stream, Shape { kind: Kind::Broadcast, count, dtype, op: 0, root }, from, to) }
}

unsafe extern "C" fn all_gather(
    from: *const c_void,
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    comm: Comm,
    stream: CudaStream,
) -> c_int {
    // SAFETY: see `unique_id`.
    unsafe { collective(comm, stream, Shape { kind: Kind::AllGather, count, dtype, op: 0, root: 0 }, from, to) }
}

unsafe extern "C" fn send(
    from: *const c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Comm,
    stream: CudaStream,
) -> c_int {
    let work = Work::Send { from: from.expose_provenance(), bytes: count * size(dtype), peer: peer as usize };
    // SAFETY: see `unique_id`.
    unsafe { add(comm, stream, |_| work) }
}

unsafe extern "C" fn recv(
    to: *mut c_void,
    count: usize,
    dtype: c_int,
    peer: c_int,
    comm: Comm,
    stream: CudaStream,
) -> c_int {
    let work = Work::Recv { to: to.expose_provenance(), bytes: count * size(dtype), peer: peer as usize };
    // SAFETY: see `unique_id`.
    unsafe { add(comm, stream, |_| work) }
}

unsafe extern "C" fn scaled_sum(
    op: *mut c_int,
    scalar: *mut c_void,
    dtype: c_int,
    residence: c_int,
    comm: Comm,
) -> c_int {
    if residence != 1 {
        return INVALID;
    }
    // SAFETY: see `unique_id`.
    let own = unsafe { own(comm) };
    let mut factors = lock(&own.factors);
    let number = (100..).find(|number| !factors.contains_key(number)).unwrap_or(c_int::MAX);
    let mut factor = [0u8; 8];
    // SAFETY: there is one value of the type.
    unsafe { ptr::copy_nonoverlapping(scalar.cast::<u8>(), factor.as_mut_ptr(), size(dtype)) };
    factors.insert(number, factor);
    // SAFETY: see `unique_id`.
    unsafe { *op = number };
    SUCCESS
}

unsafe extern "C" fn forget_op(op: c_int, comm: Comm) -> c_int {
    // SAFETY: see `unique_id`.
    let own = unsafe { own(comm) };
    let known = lock(&own.factors).remove(&op).is_some();
    if known { SUCCESS } else { INVALID }
}

extern "C" fn error_text(_status: c_int) -> *const c_char {
    c"an error of the stand-in".as_ptr()
}

extern "C" fn last_error(_comm: Comm) -> *const c_char {
    c"".as_ptr()
}
