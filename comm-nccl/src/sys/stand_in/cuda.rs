//! A driver with one device, whose memory is the host's.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::super::CudaTable;

type Handle = *mut c_void;
type Job = Box<dyn FnOnce() + Send>;

const OK: c_int = 0;
const INVALID: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NOT_READY: c_int = 600;

pub(super) static TABLE: CudaTable = CudaTable {
    init,
    device_count,
    device_get,
    device_name,
    device_uuid,
    context_retain,
    context_set,
    stream_create,
    stream_destroy,
    event_create,
    event_record,
    event_query,
    event_destroy,
    memory_alloc,
    memory_free,
    upload,
    download,
    copy,
    error_text,
};

/// A thread that does one thing after the other.
pub(super) struct Stream {
    jobs: Sender<Job>,
    /// Of its context, jobs that have not been done.
    load: Arc<Load>,
}

/// Jobs of all streams of a context that have not been done.
#[derive(Default)]
struct Load {
    jobs: Mutex<usize>,
    changed: Condvar,
}

/// Contexts, by number: one for each rank, as if it were a process.
static CONTEXTS: LazyLock<Mutex<HashMap<usize, Arc<Load>>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// The current one; 0 for none.
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// That of this thread's context.
fn load() -> Option<Arc<Load>> {
    lock(&CONTEXTS).get(&CURRENT.get()).cloned()
}

/// Whether this thread has a context, as NCCL wants it.
pub(super) fn has_context() -> bool {
    CURRENT.get() != 0
}

/// Waits for everything on the device, as freeing its memory does.
pub(super) fn synchronise() {
    let Some(load) = load() else { return };
    let mut jobs = lock(&load.jobs);
    while *jobs > 0 {
        jobs = load.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner);
    }
}

impl Stream {
    /// # Safety
    /// `handle` came from `stream_create` and was not destroyed.
    pub(super) unsafe fn of<'a>(handle: Handle) -> &'a Stream {
        // SAFETY: as the caller says.
        unsafe { &*handle.cast::<Stream>() }
    }

    pub(super) fn push(&self, job: Job) {
        *lock(&self.load.jobs) += 1;
        // The thread ends only after this is dropped.
        let _ = self.jobs.send(job);
    }
}

/// How often a stream has come to the mark, and how often it was set.
#[derive(Default)]
struct Event {
    state: Mutex<(u64, u64)>,
    changed: Condvar,
}

/// Sizes of what is allocated, to be freed with.
static BLOCKS: LazyLock<Mutex<HashMap<u64, Layout>>> = LazyLock::new(Mutex::default);

extern "C" fn init(flags: c_uint) -> c_int {
    if flags == 0 { OK } else { INVALID }
}

unsafe extern "C" fn device_count(count: *mut c_int) -> c_int {
    // SAFETY: as cuda.h asks of callers, here and in every function below.
    unsafe { *count = 1 };
    OK
}

unsafe extern "C" fn device_get(device: *mut c_int, ordinal: c_int) -> c_int {
    if ordinal != 0 {
        return 101;
    }
    // SAFETY: see `device_count`.
    unsafe { *device = 0 };
    OK
}

unsafe extern "C" fn device_name(name: *mut c_char, length: c_int, _device: c_int) -> c_int {
    let text = b"stand-in\0";
    if (length as usize) < text.len() {
        return INVALID;
    }
    // SAFETY: there is room for `length` characters.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
    OK
}

unsafe extern "C" fn device_uuid(uuid: *mut u8, _device: c_int) -> c_int {
    // SAFETY: there is room for 16 bytes.
    unsafe { ptr::write_bytes(uuid, 7, 16) };
    OK
}

unsafe extern "C" fn context_retain(context: *mut Handle, _device: c_int) -> c_int {
    let mut contexts = lock(&CONTEXTS);
    let number = contexts.len() + 1;
    contexts.insert(number, Arc::default());
    // SAFETY: see `device_count`.
    unsafe { *context = ptr::without_provenance_mut(number) };
    OK
}

extern "C" fn context_set(context: Handle) -> c_int {
    CURRENT.set(context.addr());
    if context.is_null() { INVALID } else { OK }
}

unsafe extern "C" fn stream_create(stream: *mut Handle, _flags: c_uint) -> c_int {
    let (jobs, received) = channel::<Job>();
    let Some(load) = load() else { return INVALID };
    let of_thread = load.clone();
    let work = move || {
        for job in received {
            job();
            *lock(&of_thread.jobs) -= 1;
            of_thread.changed.notify_all();
        }
    };
    if thread::Builder::new().name("stand-in-stream".into()).spawn(work).is_err() {
        return OUT_OF_MEMORY;
    }
    // SAFETY: see `device_count`.
    unsafe { *stream = Box::into_raw(Box::new(Stream { jobs, load })).cast() };
    OK
}

unsafe extern "C" fn stream_destroy(stream: Handle) -> c_int {
    // SAFETY: made by `stream_create`, destroyed once. What is queued goes on.
    drop(unsafe { Box::from_raw(stream.cast::<Stream>()) });
    OK
}

unsafe extern "C" fn event_create(event: *mut Handle, _flags: c_uint) -> c_int {
    // SAFETY: see `device_count`.
    unsafe { *event = Arc::into_raw(Arc::new(Event::default())).cast_mut().cast() };
    OK
}

unsafe extern "C" fn event_record(event: Handle, stream: Handle) -> c_int {
    // SAFETY: made by `event_create`; the stream keeps a share of its own.
    let event = unsafe {
        Arc::increment_strong_count(event.cast::<Event>());
        Arc::from_raw(event.cast::<Event>())
    };
    let mark = {
        let mut state = lock(&event.state);
        state.1 += 1;
        state.1
    };
    let pass = move || {
        let mut state = lock(&event.state);
        state.0 = state.0.max(mark);
        event.changed.notify_all();
    };
    // SAFETY: the stream lives.
    unsafe { Stream::of(stream) }.push(Box::new(pass));
    OK
}

unsafe extern "C" fn event_query(event: Handle) -> c_int {
    // SAFETY: made by `event_create`, not destroyed.
    let event = unsafe { &*event.cast::<Event>() };
    let (passed, set) = *lock(&event.state);
    if passed >= set { OK } else { NOT_READY }
}

unsafe extern "C" fn event_destroy(event: Handle) -> c_int {
    // SAFETY: made by `event_create`, destroyed once.
    drop(unsafe { Arc::from_raw(event.cast::<Event>()) });
    OK
}

unsafe extern "C" fn memory_alloc(address: *mut u64, bytes: usize) -> c_int {
    let Ok(layout) = Layout::from_size_align(bytes, 256) else { return OUT_OF_MEMORY };
    if bytes == 0 {
        return INVALID;
    }
    // SAFETY: the size is not zero.
    let block = unsafe { alloc(layout) };
    if block.is_null() {
        return OUT_OF_MEMORY;
    }
    let number = block.expose_provenance() as u64;
    lock(&BLOCKS).insert(number, layout);
    // SAFETY: see `device_count`.
    unsafe { *address = number };
    OK
}

unsafe extern "C" fn memory_free(address: u64) -> c_int {
    synchronise();
    let Some(layout) = lock(&BLOCKS).remove(&address) else { return INVALID };
    // SAFETY: allocated with this layout, freed once.
    unsafe { dealloc(pointer(address), layout) };
    OK
}

/// Where it is in the host's memory.
pub(super) fn pointer(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// A copy in its stream.
unsafe fn copied(to: *mut u8, from: *const u8, bytes: usize, stream: Handle) -> c_int {
    let (to, from) = (to.expose_provenance(), from.expose_provenance());
    let copy = move || {
        let (to, from) = (ptr::with_exposed_provenance_mut::<u8>(to), ptr::with_exposed_provenance::<u8>(from));
        // SAFETY: the caller keeps both until the stream has done it.
        unsafe { ptr::copy(from, to, bytes) };
    };
    // SAFETY: the stream lives.
    unsafe { Stream::of(stream) }.push(Box::new(copy));
    OK
}

unsafe extern "C" fn upload(to: u64, from: *const c_void, bytes: usize, stream: Handle) -> c_int {
    // SAFETY: as the caller says.
    unsafe { copied(pointer(to), from.cast(), bytes, stream) }
}

unsafe extern "C" fn download(to: *mut c_void, from: u64, bytes: usize, stream: Handle) -> c_int {
    // SAFETY: as the caller says.
    unsafe { copied(to.cast(), pointer(from), bytes, stream) }
}

unsafe extern "C" fn copy(to: u64, from: u64, bytes: usize, stream: Handle) -> c_int {
    // SAFETY: as the caller says.
    unsafe { copied(pointer(to), pointer(from), bytes, stream) }
}

unsafe extern "C" fn error_text(_status: c_int, text: *mut *const c_char) -> c_int {
    // SAFETY: see `device_count`.
    unsafe { *text = c"an error of the stand-in".as_ptr() };
    OK
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
