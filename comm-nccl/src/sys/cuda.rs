//! The CUDA driver.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use comm_core::{Deadline, Error, Result};

use super::copies::Copying;
use super::{Memory, table};
use crate::unsupported;

type Handle = *mut c_void;

table! {
    /// What this crate calls of the CUDA driver.
    CudaTable {
        init: "cuInit", (c_uint) -> c_int;
        device_count: "cuDeviceGetCount", (*mut c_int) -> c_int;
        device_get: "cuDeviceGet", (*mut c_int, c_int) -> c_int;
        device_name: "cuDeviceGetName", (*mut c_char, c_int, c_int) -> c_int;
        device_uuid: "cuDeviceGetUuid", (*mut u8, c_int) -> c_int;
        context_retain: "cuDevicePrimaryCtxRetain", (*mut Handle, c_int) -> c_int;
        context_set: "cuCtxSetCurrent", (Handle) -> c_int;
        stream_create: "cuStreamCreate", (*mut Handle, c_uint) -> c_int;
        stream_destroy: "cuStreamDestroy_v2", (Handle) -> c_int;
        event_create: "cuEventCreate", (*mut Handle, c_uint) -> c_int;
        event_record: "cuEventRecord", (Handle, Handle) -> c_int;
        event_query: "cuEventQuery", (Handle) -> c_int;
        event_destroy: "cuEventDestroy_v2", (Handle) -> c_int;
        memory_alloc: "cuMemAlloc_v2", (*mut u64, usize) -> c_int;
        memory_free: "cuMemFree_v2", (u64) -> c_int;
        host_alloc: "cuMemHostAlloc", (*mut *mut c_void, usize, c_uint) -> c_int;
        host_free: "cuMemFreeHost", (*mut c_void) -> c_int;
        upload: "cuMemcpyHtoDAsync_v2", (u64, *const c_void, usize, Handle) -> c_int;
        download: "cuMemcpyDtoHAsync_v2", (*mut c_void, u64, usize, Handle) -> c_int;
        copy: "cuMemcpyDtoDAsync_v2", (u64, u64, usize, Handle) -> c_int;
        error_text: "cuGetErrorString", (c_int, *mut *const c_char) -> c_int;
    }
}

const NOT_READY: c_int = 600;

/// `CU_STREAM_NON_BLOCKING`: does not wait for what others do on the legacy stream.
const NON_BLOCKING: c_uint = 1;

/// `CU_EVENT_DISABLE_TIMING`.
const NO_TIMING: c_uint = 2;

/// How long what is aborted may take to end, before it counts as running for ever.
pub(crate) const GRACE: Duration = Duration::from_secs(10);

/// Errors after which a context does nothing any more and every call repeats them: of a kernel that broke down, of memory or of a link that
/// cannot be corrected.
const LOST: [c_int; 14] = [46, 214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999];

/// The driver, loaded and initialised.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver {
    table: &'static CudaTable,
}

impl Driver {
    /// Where the loader finds the driver.
    const NAMES: [&'static str; 2] = ["libcuda.so.1", "libcuda.so"];

    /// Loads and initialises the driver.
    ///
    /// # Errors
    /// `Unsupported`: there is none, or it sees no device.
    pub(crate) fn load() -> Result<Self> {
        let missing = |why: String| {
            unsupported(format!(
                "{why}; NCCL needs an NVIDIA GPU and its driver: choose shm, tcp, tcp-raw or quic instead"
            ))
        };
        // SAFETY: the names are those of the driver's library, whose initialisers may run at any time.
        let library = Self::NAMES.iter().find_map(|name| unsafe { libloading::Library::new(name) }.ok());
        let library = library.ok_or_else(|| missing(format!("no CUDA driver (tried {})", Self::NAMES.join(", "))))?;
        // SAFETY: the driver's functions of these names have had these signatures since CUDA 10 (cuda.h).
        let table = unsafe { CudaTable::of(&library) }
            .map_err(|symbol| missing(format!("the CUDA driver is too old: it lacks {symbol}")))?;
        // Never unloaded.
        std::mem::forget(library);
        let driver = Driver { table: Box::leak(Box::new(table)) };
        // SAFETY: no argument but flags, which must be 0.
        let status = unsafe { (driver.table.init)(0) };
        driver.check(status, "initialising the CUDA driver").map_err(|error| missing(error.to_string()))?;
        Ok(driver)
    }

    /// A driver whose functions are given.
    #[cfg(feature = "stand-in")]
    pub(crate) fn of(table: &'static CudaTable) -> Self {
        Driver { table }
    }

    /// How many devices this process sees.
    pub(crate) fn device_count(&self) -> Result<usize> {
        let mut count = 0;
        // SAFETY: writes one int through the pointer.
        self.check(unsafe { (self.table.device_count)(&raw mut count) }, "counting CUDA devices")?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// Device `ordinal`, with its primary context, which burn shares.
    pub(crate) fn device(self, ordinal: usize) -> Result<Device> {
        let (mut device, mut context) = (0, ptr::null_mut());
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: both write one value through their pointer; the context is retained for good.
        unsafe {
            self.check((self.table.device_get)(&raw mut device, number), &format!("opening CUDA device {ordinal}"))?;
            let what = format!("retaining the context of CUDA device {ordinal}");
            self.check((self.table.context_retain)(&raw mut context, device), &what)?;
        }
        let (aborts, is_given_up) = (AtomicUsize::new(0), AtomicBool::new(false));
        let idle = Mutex::default();
        Ok(Device(Arc::new(Inner { driver: self, ordinal, device, context, idle, aborts, is_given_up })))
    }

    fn check(&self, status: c_int, what: &str) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: writes a pointer to a text that lives as long as the driver, or leaves it null.
        let known = unsafe { (self.table.error_text)(status, &raw mut text) } == 0 && !text.is_null();
        // SAFETY: a text ended by a zero, as above.
        let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "unknown error".into() };
        let advice = if LOST.contains(&status) {
            "; this process can no longer use the GPU: look for `Xid` in the kernel's log, and use compute-sanitizer to find the kernel \
             that caused it"
        } else {
            ""
        };
        Err(Error::io(what, io::Error::other(format!("CUDA error {status}: {text}{advice}"))))
    }
}

/// An address in a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DevicePointer(u64);

impl DevicePointer {
    pub(crate) const NULL: DevicePointer = DevicePointer(0);

    pub(crate) fn new(address: u64) -> Self {
        DevicePointer(address)
    }

    pub(crate) fn address(self) -> u64 {
        self.0
    }

    /// So many bytes further on.
    pub(crate) fn at(self, bytes: usize) -> Self {
        DevicePointer(self.0 + bytes as u64)
    }

    pub(super) fn raw(self) -> *mut c_void {
        ptr::with_exposed_provenance_mut(self.0 as usize)
    }
}

/// A device with its primary context.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    driver: Driver,
    ordinal: usize,
    device: c_int,
    context: Handle,
    /// What copies have needed that have ended. Not freed after each: that would wait for everything that runs on the device.
    idle: Mutex<Vec<Copying>>,
    /// That go on.
    aborts: AtomicUsize,
    is_given_up: AtomicBool,
}

// SAFETY: contexts, streams, events and memory may be used by any thread that has made the context current, as each call here does.
unsafe impl Send for Inner {}
// SAFETY: the driver's functions may be called from several threads at once.
unsafe impl Sync for Inner {}

impl Device {
    /// Its number among the devices that this process sees.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// What tells it from every other device: NVML's UUID without its prefix, in hexadecimal.
    pub(crate) fn uuid(&self) -> Result<String> {
        let mut bytes = [0u8; 16];
        // SAFETY: writes 16 bytes through the pointer.
        self.call("asking for a device's UUID", |table| unsafe {
            (table.device_uuid)(bytes.as_mut_ptr(), self.0.device)
        })?;
        Ok(comm_core::hex(&bytes))
    }

    /// Its name, as `NVIDIA H100 80GB HBM3`.
    ///
    /// # Errors
    /// `Io` where the driver does not answer.
    pub fn name(&self) -> Result<String> {
        let mut text = [0 as c_char; 128];
        // SAFETY: writes at most 127 characters and a zero.
        self.call("asking for a device's name", |table| unsafe {
            (table.device_name)(text.as_mut_ptr(), 127, self.0.device)
        })?;
        // SAFETY: the array was zeroed and its last element was not written.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Has the stand-in for it behave so from now on. A real device is left alone.
    #[cfg(feature = "stand-in")]
    pub fn behave(&self, behaviour: super::Behaviour) {
        super::stand_in::behave(self.0.context, behaviour);
    }

    /// Whether the stand-in for it has been given something that it has not done. Of a real device this is not known.
    #[cfg(feature = "stand-in")]
    pub fn is_busy(&self) -> bool {
        super::stand_in::is_busy(self.0.context)
    }

    pub(crate) fn allocate(&self, bytes: usize) -> Result<Memory> {
        let mut address = 0;
        // The driver refuses to allocate nothing.
        let length = bytes.max(1);
        // SAFETY: writes one address through the pointer.
        self.call(&format!("allocating {length} bytes on the GPU"), |table| unsafe {
            (table.memory_alloc)(&raw mut address, length)
        })?;
        Ok(Memory::new(self, DevicePointer(address), length))
    }

    pub(crate) fn stream(&self) -> Result<Stream> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle through the pointer.
        self.call("making a CUDA stream", |table| unsafe { (table.stream_create)(&raw mut handle, NON_BLOCKING) })?;
        Ok(Stream { device: self.clone(), handle })
    }

    pub(crate) fn event(&self) -> Result<Event> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle through the pointer.
        self.call("making a CUDA event", |table| unsafe { (table.event_create)(&raw mut handle, NO_TIMING) })?;
        Ok(Event { device: self.clone(), handle })
    }

    /// Copies on the device, in the order of `stream`.
    pub(crate) fn copy(&self, from: DevicePointer, to: DevicePointer, bytes: usize, stream: &Stream) -> Result<()> {
        if bytes == 0 || from == to {
            return Ok(());
        }
        // SAFETY: the caller owns both places, which do not overlap, until the stream has done it.
        self.call("copying on the GPU", |table| unsafe { (table.copy)(to.0, from.0, bytes, stream.handle) })
    }

    /// Makes the context current in this thread and calls.
    pub(super) fn call(&self, what: &str, call: impl FnOnce(&CudaTable) -> c_int) -> Result<()> {
        let driver = &self.0.driver;
        // SAFETY: a context that was retained and is never released.
        driver.check(unsafe { (driver.table.context_set)(self.0.context) }, "using the GPU")?;
        driver.check(call(driver.table), what)
    }

    pub(super) fn idle(&self) -> &Mutex<Vec<Copying>> {
        &self.0.idle
    }

    /// Says that kernels are being aborted, until what it gives is dropped. Nothing is freed meanwhile.
    pub(crate) fn aborting(&self) -> Aborting {
        self.0.aborts.fetch_add(1, Ordering::AcqRel);
        Aborting(self.clone())
    }

    /// Says that what runs there does not end. What it may still use is never freed from now on, since freeing would wait for it.
    pub(crate) fn give_up(&self) {
        self.0.is_given_up.store(true, Ordering::Release);
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.0.is_given_up.load(Ordering::Acquire)
    }

    /// Whether memory may be freed. Waits for aborts that go on; if they do not end in time the device is given up.
    pub(super) fn can_free(&self) -> bool {
        let deadline = Deadline::after(GRACE);
        while !self.is_given_up() && self.0.aborts.load(Ordering::Acquire) > 0 {
            if deadline.has_passed() {
                self.give_up();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        !self.is_given_up()
    }

    /// Makes the context current in this thread: NCCL takes the device from there.
    pub(crate) fn make_current(&self) -> Result<()> {
        self.call("using the GPU", |_| 0)
    }
}

/// An abort that goes on.
pub(crate) struct Aborting(Device);

impl Drop for Aborting {
    fn drop(&mut self) {
        self.0.0.aborts.fetch_sub(1, Ordering::AcqRel);
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.0.ordinal)
    }
}

/// A queue of work on a device.
pub(crate) struct Stream {
    device: Device,
    handle: Handle,
}

// SAFETY: as for `Inner`.
unsafe impl Send for Stream {}
// SAFETY: as for `Inner`.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn handle(&self) -> Handle {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by this driver, destroyed once. Work that is still queued goes on; this does not wait for it.
        let _ = self.device.call("ending a stream", |table| unsafe { (table.stream_destroy)(self.handle) });
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stream")
    }
}

/// A mark in a stream.
pub(crate) struct Event {
    device: Device,
    handle: Handle,
}

// SAFETY: as for `Inner`.
unsafe impl Send for Event {}
// SAFETY: as for `Inner`.
unsafe impl Sync for Event {}

impl Event {
    /// Marks the end of what is in the stream now.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both live.
        self.device.call("marking a stream", |table| unsafe { (table.event_record)(self.handle, stream.handle) })
    }

    /// Whether the stream has come to the mark.
    pub(crate) fn has_passed(&self) -> Result<bool> {
        let mut status = 0;
        self.device.call("asking for a stream's progress", |table| {
            // SAFETY: the event lives.
            status = unsafe { (table.event_query)(self.handle) };
            if status == NOT_READY { 0 } else { status }
        })?;
        Ok(status != NOT_READY)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by this driver, destroyed once; the driver keeps it while a stream needs it.
        let _ = self.device.call("ending an event", |table| unsafe { (table.event_destroy)(self.handle) });
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Event")
    }
}
