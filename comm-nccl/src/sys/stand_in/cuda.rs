//! A driver with one device, whose memory is the host's.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::{Arc, LazyLock, Mutex};

use super::super::CudaTable;
use super::stream::{Context, Handle, Stream, lock};

const OK: c_int = 0;
const INVALID: c_int = 1;
const OUT_OF_MEMORY: c_int = 2;
const NOT_READY: c_int = 600;
const ILLEGAL_ADDRESS: c_int = 700;

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
    host_alloc,
    host_free,
    upload,
    download,
    copy,
    error_text,
};

/// How often a stream has come to the mark, and how often it was set.
#[derive(Default)]
struct Event {
    state: Mutex<(u64, u64)>,
}

/// The context in which a call is made; else its answer.
fn context() -> Result<&'static Context, c_int> {
    match Context::current() {
        None => Err(INVALID),
        Some(context) if context.is_lost() => Err(ILLEGAL_ADDRESS),
        Some(context) => Ok(context),
    }
}

/// Does what a call asks for in its context.
fn within(call: impl FnOnce(&'static Context) -> c_int) -> c_int {
    context().map_or_else(|status| status, call)
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
    // SAFETY: see `device_count`.
    unsafe { *context = Context::new().handle() };
    OK
}

extern "C" fn context_set(context: Handle) -> c_int {
    if Context::enter(context) { OK } else { INVALID }
}

unsafe extern "C" fn stream_create(stream: *mut Handle, _flags: c_uint) -> c_int {
    within(|context| {
        let Ok(made) = Stream::new(context) else { return OUT_OF_MEMORY };
        // SAFETY: see `device_count`.
        unsafe { *stream = Box::into_raw(Box::new(made)).cast() };
        OK
    })
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
    };
    within(|_| {
        // SAFETY: the stream lives.
        unsafe { Stream::of(stream) }.push(Box::new(pass));
        OK
    })
}

unsafe extern "C" fn event_query(event: Handle) -> c_int {
    // SAFETY: made by `event_create`, not destroyed.
    let event = unsafe { &*event.cast::<Event>() };
    within(|_| {
        let (passed, set) = *lock(&event.state);
        if passed >= set { OK } else { NOT_READY }
    })
}

unsafe extern "C" fn event_destroy(event: Handle) -> c_int {
    // SAFETY: made by `event_create`, destroyed once.
    drop(unsafe { Arc::from_raw(event.cast::<Event>()) });
    OK
}

/// Memory of the device or of the host, at the address that is written.
///
/// # Safety
/// One address can be written there.
unsafe fn allocated(address: *mut u64, bytes: usize) -> c_int {
    within(|_| {
        let Ok(layout) = Layout::from_size_align(bytes, 256) else { return OUT_OF_MEMORY };
        if bytes == 0 {
            return INVALID;
        }
        // SAFETY: the size is not zero.
        let block = unsafe { alloc_zeroed(layout) };
        if block.is_null() {
            return OUT_OF_MEMORY;
        }
        let number = block.expose_provenance() as u64;
        lock(&BLOCKS).insert(number, layout);
        // SAFETY: as the caller says.
        unsafe { *address = number };
        OK
    })
}

/// Frees it once nothing runs on the device. That of a lost device stays.
fn freed(address: u64) -> c_int {
    within(|context| {
        context.synchronise();
        if context.is_lost() {
            return ILLEGAL_ADDRESS;
        }
        let Some(layout) = lock(&BLOCKS).remove(&address) else { return INVALID };
        // SAFETY: allocated with this layout, freed once.
        unsafe { dealloc(pointer(address), layout) };
        OK
    })
}

unsafe extern "C" fn memory_alloc(address: *mut u64, bytes: usize) -> c_int {
    // SAFETY: see `device_count`.
    unsafe { allocated(address, bytes) }
}

extern "C" fn memory_free(address: u64) -> c_int {
    freed(address)
}

unsafe extern "C" fn host_alloc(address: *mut *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
    let mut number = 0;
    // SAFETY: a local.
    let status = unsafe { allocated(&raw mut number, bytes) };
    if status == OK {
        // SAFETY: see `device_count`.
        unsafe { *address = pointer(number).cast() };
    }
    status
}

extern "C" fn host_free(address: *mut c_void) -> c_int {
    freed(address.addr() as u64)
}

/// Where it is in the host's memory.
fn pointer(address: u64) -> *mut u8 {
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
    within(|_| {
        // SAFETY: the stream lives.
        unsafe { Stream::of(stream) }.push(Box::new(copy));
        OK
    })
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

unsafe extern "C" fn error_text(status: c_int, text: *mut *const c_char) -> c_int {
    let words = if status == ILLEGAL_ADDRESS {
        c"an illegal memory access of the stand-in"
    } else {
        c"an error of the stand-in"
    };
    // SAFETY: see `device_count`.
    unsafe { *text = words.as_ptr() };
    OK
}
