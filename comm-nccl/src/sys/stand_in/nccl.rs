//! NCCL's functions.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use super::super::{Config, IN_PROGRESS, NcclTable, SUCCESS, UniqueId};
use super::comm_group::{CommGroup, GroupedCall, Kind, RankComm, Shape, run};
use super::reduce::size;
use super::stream::{Context, Stream, lock};

type Comm = *mut c_void;
type CudaStream = *mut c_void;

const UNHANDLED_CUDA_ERROR: c_int = 1;
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

static COMM_GROUPS: LazyLock<Mutex<HashMap<[u8; 128], Weak<CommGroup>>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// Calls of the group that this thread has started, with the communicator and the stream of each.
    static GROUP: RefCell<Option<Vec<Added>>> = const { RefCell::new(None) };
}

/// A call of a group: whose, into which stream, and what.
type Added = (Arc<RankComm>, usize, GroupedCall);

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
    let Some(context) = Context::current() else { return INVALID };
    if (config.magic, config.blocking) != (0xcafe_beef, 0) || rank < 0 || rank >= ranks {
        return INVALID;
    }
    let comm_group = {
        let mut comm_groups = lock(&COMM_GROUPS);
        comm_groups.retain(|_, comm_group| comm_group.strong_count() > 0);
        let comm_group = comm_groups.get(&id.0).and_then(Weak::upgrade).unwrap_or_default();
        comm_groups.insert(id.0, Arc::downgrade(&comm_group));
        comm_group
    };
    let mut state = lock(&comm_group.state);
    state.ranks = ranks as usize;
    state.joined += 1;
    drop(state);
    let own = RankComm {
        context,
        comm_group,
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
unsafe fn own(comm: Comm) -> Arc<RankComm> {
    // SAFETY: as the caller says.
    unsafe {
        Arc::increment_strong_count(comm.cast::<RankComm>());
        Arc::from_raw(comm.cast::<RankComm>())
    }
}

unsafe extern "C" fn async_error(comm: Comm, state: *mut c_int) -> c_int {
    // SAFETY: see `unique_id`.
    let own = unsafe { own(comm) };
    let reached = match lock(&own.comm_group.state).joined >= own.ranks {
        _ if own.context.is_lost() => UNHANDLED_CUDA_ERROR,
        true => SUCCESS,
        false => IN_PROGRESS,
    };
    // SAFETY: see `unique_id`.
    unsafe { *state = reached };
    SUCCESS
}

extern "C" fn finalize(_comm: Comm) -> c_int {
    SUCCESS
}

unsafe extern "C" fn destroy(comm: Comm) -> c_int {
    // SAFETY: see `unique_id`; given back once.
    let own = unsafe { Arc::from_raw(comm.cast::<RankComm>()) };
    let mut state = lock(&own.comm_group.state);
    state.leaving += 1;
    own.comm_group.changed.notify_all();
    while state.leaving < own.ranks {
        state = own.comm_group.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    SUCCESS
}

unsafe extern "C" fn abort(comm: Comm) -> c_int {
    // SAFETY: see `unique_id`; given back once.
    let own = unsafe { Arc::from_raw(comm.cast::<RankComm>()) };
    own.is_aborted.store(true, Ordering::SeqCst);
    {
        // Under the lock, so that nobody looks just before and waits just after.
        let mut state = lock(&own.comm_group.state);
        state.leaving += 1;
        own.comm_group.changed.notify_all();
    }
    let Some(context) = Context::current() else { return INVALID };
    context.synchronise();
    SUCCESS
}

extern "C" fn group_start() -> c_int {
    GROUP.set(Some(Vec::new()));
    SUCCESS
}

extern "C" fn group_end() -> c_int {
    let Some(calls) = GROUP.take().filter(|_| Context::current().is_some()) else { return INVALID };
    let Some((own, stream, _)) = calls.first() else { return SUCCESS };
    let (own, stream) = (own.clone(), *stream);
    if own.context.is_lost() {
        return UNHANDLED_CUDA_ERROR;
    }
    // Numbers follow the order in which groups are queued.
    let mut numbered = Vec::new();
    for (_, _, work) in calls {
        let number = match work {
            GroupedCall::Collective { .. } => own.numbers.fetch_add(1, Ordering::Relaxed),
            _ => 0,
        };
        numbered.push((number, work));
    }
    // SAFETY: whoever makes a call keeps its stream until it has run.
    unsafe { Stream::of(ptr::with_exposed_provenance_mut(stream)) }.push(Box::new(move || run(&own, &numbered)));
    IN_PROGRESS
}

/// Adds a call to the group of this thread: this crate makes none outside of one.
unsafe fn add(comm: Comm, stream: CudaStream, work: impl FnOnce(&RankComm) -> GroupedCall) -> c_int {
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
    let work = |own: &RankComm| {
        let factor = lock(&own.factors).get(&shape.op).copied();
        if factor.is_some() {
            shape.op = 5;
        }
        GroupedCall::Collective { shape, factor, from, to }
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
    let work = GroupedCall::Send { from: from.expose_provenance(), bytes: count * size(dtype), peer: peer as usize };
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
    let work = GroupedCall::Recv { to: to.expose_provenance(), bytes: count * size(dtype), peer: peer as usize };
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
