//! NCCL's functions, and one of its communicators behind a lock.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use comm_core::{DType, Error, Factor, ReduceOp, Result};
use half::{bf16, f16};

use super::{DevicePointer, Stream, table};

type Comm = *mut c_void;
type CudaStream = *mut c_void;

table! {
    /// What this crate calls of NCCL.
    NcclTable {
        unique_id: "ncclGetUniqueId", (*mut UniqueId) -> c_int;
        init: "ncclCommInitRankConfig", (*mut Comm, c_int, UniqueId, c_int, *mut Config) -> c_int;
        async_error: "ncclCommGetAsyncError", (Comm, *mut c_int) -> c_int;
        finalize: "ncclCommFinalize", (Comm) -> c_int;
        destroy: "ncclCommDestroy", (Comm) -> c_int;
        abort: "ncclCommAbort", (Comm) -> c_int;
        group_start: "ncclGroupStart", () -> c_int;
        group_end: "ncclGroupEnd", () -> c_int;
        all_reduce: "ncclAllReduce", (*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
        reduce: "ncclReduce", (*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, CudaStream) -> c_int;
        reduce_scatter: "ncclReduceScatter", (*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
        broadcast: "ncclBroadcast", (*const c_void, *mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
        all_gather: "ncclAllGather", (*const c_void, *mut c_void, usize, c_int, Comm, CudaStream) -> c_int;
        send: "ncclSend", (*const c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
        recv: "ncclRecv", (*mut c_void, usize, c_int, c_int, Comm, CudaStream) -> c_int;
        scaled_sum: "ncclRedOpCreatePreMulSum", (*mut c_int, *mut c_void, c_int, c_int, Comm) -> c_int;
        forget_op: "ncclRedOpDestroy", (c_int, Comm) -> c_int;
        error_text: "ncclGetErrorString", (c_int) -> *const c_char;
        last_error: "ncclGetLastError", (Comm) -> *const c_char;
    }
}

/// `ncclSuccess`.
pub(crate) const SUCCESS: c_int = 0;

/// `ncclInProgress`.
pub(crate) const IN_PROGRESS: c_int = 7;

pub(crate) const UNIQUE_ID_BYTES: usize = 128;

/// NCCL's unique id, with which the ranks of a communicator find each other: an address and a random number. A process that has it can join.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; UNIQUE_ID_BYTES]);

/// `ncclConfig_t` as of 2.14, which newer versions read by its `size` and complete with their defaults.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields of nccl.h")]
pub(crate) struct Config {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    pub(crate) blocking: c_int,
}

impl Config {
    /// Calls return at once, and the communicator's state says how far they are.
    fn non_blocking() -> Self {
        Config { size: size_of::<Config>(), magic: 0xcafe_beef, version: 21_400, blocking: 0 }
    }
}

/// `ncclDataType_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataType(pub(crate) c_int);

impl DataType {
    /// NCCL's name for a type; `None` for the 16-bit integers, which it does not know.
    pub(crate) fn of(dtype: DType) -> Option<Self> {
        let code = match dtype {
            DType::I8 => 0,
            DType::U8 => 1,
            DType::I32 => 2,
            DType::U32 => 3,
            DType::I64 => 4,
            DType::U64 => 5,
            DType::F16 => 6,
            DType::F32 => 7,
            DType::F64 => 8,
            DType::Bf16 => 9,
            _ => return None,
        };
        Some(DataType(code))
    }

    /// Bytes, for what is only moved.
    pub(crate) const BYTE: DataType = DataType(1);
}

/// `ncclRedOp_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RedOp(pub(crate) c_int);

/// A reduction of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    pub(crate) op: ReduceOp,
    pub(crate) dtype: DType,
}

/// One of NCCL's communicators. Every call that uses it holds the lock, and whoever ends it takes it out first, so that nobody uses it
/// after that.
pub(crate) struct RawComm {
    table: &'static NcclTable,
    /// `None` once it is gone.
    comm: Mutex<Option<Live>>,
}

struct Live(Comm);

// SAFETY: NCCL's communicators may be used by any thread, one at a time, which the lock of `RawComm` sees to.
unsafe impl Send for Live {}

/// The calls of one operation, between the start and the end of a group.
pub(crate) struct Calls<'a> {
    table: &'static NcclTable,
    comm: Comm,
    stream: &'a Stream,
    status: c_int,
}

impl RawComm {
    /// A name for a new communicator, made by one of its ranks for all.
    pub(crate) fn unique_id(table: &'static NcclTable) -> Result<UniqueId> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: writes 128 bytes through the pointer.
        let status = unsafe { (table.unique_id)(&raw mut id) };
        if status == SUCCESS { Ok(id) } else { Err(failure(table, status, ptr::null_mut(), "making a unique id")) }
    }

    /// Begins to connect rank `rank` of `ranks`, on the device that is current in this thread; [`RawComm::progress`] tells when it has.
    /// What could not be begun may have been half made, and is to be aborted like any other.
    pub(crate) fn begin(table: &'static NcclTable, id: UniqueId, rank: usize, ranks: usize) -> (Self, Result<()>) {
        let mut comm = ptr::null_mut();
        let number = |number: usize| c_int::try_from(number).unwrap_or(c_int::MAX);
        let mut config = Config::non_blocking();
        // SAFETY: writes the communicator through the first pointer and reads the configuration of the version that it names.
        let status = unsafe { (table.init)(&raw mut comm, number(ranks), id, number(rank), &raw mut config) };
        let begun = match status {
            SUCCESS | IN_PROGRESS => Ok(()),
            status => Err(failure(table, status, comm, "making a communicator")),
        };
        (RawComm { table, comm: Mutex::new((!comm.is_null()).then_some(Live(comm))) }, begun)
    }

    /// Whether everything that was asked of it has been set up; the work itself may go on.
    ///
    /// # Errors
    /// What went wrong, here or at a peer; `None` where it was aborted.
    pub(crate) fn progress(&self) -> Result<bool, Option<Error>> {
        let comm = self.lock();
        let Some(Live(comm)) = *comm else { return Err(None) };
        let mut state = SUCCESS;
        // SAFETY: the communicator lives, as the lock says; writes one int through the pointer.
        let status = unsafe { (self.table.async_error)(comm, &raw mut state) };
        match (status, state) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS, IN_PROGRESS) => Ok(false),
            (SUCCESS, state) => Err(Some(failure(self.table, state, comm, "the communicator"))),
            (status, _) => Err(Some(failure(self.table, status, comm, "asking for the communicator's state"))),
        }
    }

    /// Makes the calls of one operation as one group, whose kernel goes into `stream`.
    ///
    /// # Errors
    /// What NCCL refuses; `None` where it was aborted.
    pub(crate) fn group(
        &self,
        stream: &Stream,
        reduction: Option<Reduction>,
        body: impl FnOnce(&mut Calls<'_>, RedOp),
    ) -> Result<(), Option<Error>> {
        let comm = self.lock();
        let Some(Live(comm)) = *comm else { return Err(None) };
        let checked = |status: c_int, what: &str| {
            if status == SUCCESS || status == IN_PROGRESS {
                return Ok(());
            }
            Err(Some(failure(self.table, status, comm, what)))
        };
        let (op, is_own) = match reduction {
            Some(reduction) => self.red_op(comm, reduction).map_err(Some)?,
            None => (RedOp(0), false),
        };
        let mut calls = Calls { table: self.table, comm, stream, status: SUCCESS };
        // SAFETY: a group belongs to this thread and is ended below.
        checked(unsafe { (self.table.group_start)() }, "starting a group")?;
        body(&mut calls, op);
        let status = calls.status;
        // SAFETY: ends the group that was started above.
        let ended = unsafe { (self.table.group_end)() };
        if is_own {
            // SAFETY: an operation of this communicator that the calls above have taken up; it may go before they have run.
            unsafe { (self.table.forget_op)(op.0, comm) };
        }
        checked(status, "a call")?;
        checked(ended, "ending a group")
    }

    /// NCCL's operation for a reduction, and whether it is to be given back.
    fn red_op(&self, comm: Comm, reduction: Reduction) -> Result<(RedOp, bool)> {
        let factor = match reduction.op {
            ReduceOp::Sum => return Ok((RedOp(0), false)),
            ReduceOp::Prod => return Ok((RedOp(1), false)),
            ReduceOp::Max => return Ok((RedOp(2), false)),
            ReduceOp::Min => return Ok((RedOp(3), false)),
            ReduceOp::Mean => return Ok((RedOp(4), false)),
            ReduceOp::ScaledSum(factor) => factor,
            other => {
                return Err(Error::Unsupported {
                    what: format!("the reduction {other}"),
                    why: "NCCL does not have it".into(),
                });
            }
        };
        let Some(DataType(code)) = DataType::of(reduction.dtype) else {
            return Err(crate::no_such_type(reduction.dtype));
        };
        let mut scalar = scalar(factor, reduction.dtype);
        let mut op = 0;
        // SAFETY: reads one value of the type, which is in host memory (1 = ncclScalarHostImmediate), and writes one int.
        let status = unsafe { (self.table.scaled_sum)(&raw mut op, scalar.as_mut_ptr().cast(), code, 1, comm) };
        if status == SUCCESS { Ok((RedOp(op), true)) } else { Err(failure(self.table, status, comm, "a scaled sum")) }
    }

    /// Begins to flush it: [`RawComm::progress`] tells when it has.
    pub(crate) fn finalize(&self) {
        if let Some(Live(comm)) = *self.lock() {
            // SAFETY: the communicator lives. What goes wrong shows in its state.
            unsafe { (self.table.finalize)(comm) };
        }
    }

    /// Gives it back after it was flushed. May wait for peers: not for threads that must not.
    pub(crate) fn destroy(&self) {
        // Not with the lock held: it may wait for peers that do the same.
        let taken = self.lock().take();
        if let Some(Live(comm)) = taken {
            // SAFETY: taken out of the lock, so that nobody uses it again.
            unsafe { (self.table.destroy)(comm) };
        }
    }

    /// Ends its kernels and gives it back. May take its time: not for threads that must not wait.
    pub(crate) fn abort(&self) {
        let taken = self.lock().take();
        if let Some(Live(comm)) = taken {
            // SAFETY: taken out of the lock, so that nobody uses it again.
            unsafe { (self.table.abort)(comm) };
        }
    }

    /// Whether it was given back.
    pub(crate) fn is_gone(&self) -> bool {
        self.lock().is_none()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Live>> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for RawComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RawComm")
    }
}

/// Ranks are numbers below the number of ranks, which NCCL took as an int.
fn int(rank: usize) -> c_int {
    rank as c_int
}

// SAFETY (of every call below): the communicator lives, since its lock is held; the pointers are those of device memory that the
// operation owns until the event recorded after this group has passed; counts are in elements of the type.
impl Calls<'_> {
    fn note(&mut self, status: c_int) {
        if self.status == SUCCESS || self.status == IN_PROGRESS {
            self.status = status;
        }
    }

    pub(crate) fn all_reduce(&mut self, from: DevicePointer, to: DevicePointer, count: usize, t: DataType, op: RedOp) {
        let stream = self.stream.handle();
        // SAFETY: see above.
        let status = unsafe { (self.table.all_reduce)(from.raw(), to.raw(), count, t.0, op.0, self.comm, stream) };
        self.note(status);
    }

    #[allow(clippy::too_many_arguments, reason = "those of NCCL's function")]
    pub(crate) fn reduce(
        &mut self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        t: DataType,
        op: RedOp,
        root: usize,
    ) {
        let stream = self.stream.handle();
        // SAFETY: see above.
        let status =
            unsafe { (self.table.reduce)(from.raw(), to.raw(), count, t.0, op.0, int(root), self.comm, stream) };
        self.note(status);
    }

    pub(crate) fn reduce_scatter(
        &mut self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        t: DataType,
        op: RedOp,
    ) {
        let stream = self.stream.handle();
        // SAFETY: see above.
        let status = unsafe { (self.table.reduce_scatter)(from.raw(), to.raw(), count, t.0, op.0, self.comm, stream) };
        self.note(status);
    }

    pub(crate) fn broadcast(&mut self, from: DevicePointer, to: DevicePointer, count: usize, t: DataType, root: usize) {
        let stream = self.stream.handle();
        // SAFETY: see above.
        let status = unsafe { (self.table.broadcast)(from.raw(), to.raw(), count, t.0, int(root), self.comm, stream) };
        self.note(status);
    }

    pub(crate) fn all_gather(&mut self, from: DevicePointer, to: DevicePointer, count: usize, t: DataType) {
        let stream = self.stream.handle();
        // SAFETY: see above.
        let status = unsafe { (self.table.all_gather)(from.raw(), to.raw(), count, t.0, self.comm, stream) };
        self.note(status);
    }

    pub(crate) fn send(&mut self, from: DevicePointer, count: usize, t: DataType, to: usize) {
        let stream = self.stream.handle();
        // SAFETY: see above.
        let status = unsafe { (self.table.send)(from.raw(), count, t.0, int(to), self.comm, stream) };
        self.note(status);
    }

    pub(crate) fn recv(&mut self, to: DevicePointer, count: usize, t: DataType, from: usize) {
        let stream = self.stream.handle();
        // SAFETY: see above.
        let status = unsafe { (self.table.recv)(to.raw(), count, t.0, int(from), self.comm, stream) };
        self.note(status);
    }
}

/// The factor in the type, in its own bytes.
fn scalar(factor: Factor, dtype: DType) -> [u8; 8] {
    let value = factor.value();
    // The low 64 bits are the factor modulo 2^64, which is all that a wrapping product needs.
    let whole = value as i128 as i64;
    let mut bytes = [0; 8];
    match dtype {
        DType::F32 => bytes[..4].copy_from_slice(&(value as f32).to_ne_bytes()),
        DType::F64 => bytes.copy_from_slice(&value.to_ne_bytes()),
        DType::F16 => bytes[..2].copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
        DType::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f64(value).to_ne_bytes()),
        _ => bytes.copy_from_slice(&whole.to_le_bytes()),
    }
    bytes
}

/// NCCL's error, with what it says of the last one.
fn failure(table: &NcclTable, status: c_int, comm: Comm, what: &str) -> Error {
    let text = |text: *const c_char| {
        if text.is_null() {
            return String::new();
        }
        // SAFETY: NCCL gives texts ended by a zero that live as long as the library.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_string()
    };
    // SAFETY: any number has a text; the communicator lives or is null, which means the last error of this process.
    let (kind, last) = unsafe { (text((table.error_text)(status)), text((table.last_error)(comm))) };
    let last = if last.is_empty() { String::new() } else { format!(": {last}") };
    let hint = "NCCL_DEBUG=WARN makes NCCL print the reason";
    Error::io(format!("NCCL, {what}"), io::Error::other(format!("{kind} ({status}){last}; {hint}")))
}

/// Set to 1, it lets several processes of a job share one GPU: see [`share_gpu`].
pub const SHARE_VARIABLE: &str = "COMM_NCCL_SHARE_GPU";

/// Where [`SHARE_VARIABLE`] is 1, makes NCCL take this process for a machine of its own, which talks to the others over sockets:
/// NCCL refuses a second rank on a GPU otherwise. For tests: ranks take turns on the GPU, some milliseconds each.
///
/// To be called first thing in `main`: it sets variables of the environment, which NCCL reads.
///
/// # Errors
/// `InvalidArgument` where other threads run already, for which the environment must not change; `Unsupported` where that is not known.
pub fn share_gpu() -> Result<()> {
    if !is_wanted() {
        return Ok(());
    }
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    match status.lines().find_map(|line| line.strip_prefix("Threads:")).map(str::trim) {
        Some("1") => {}
        Some(threads) => {
            return Err(Error::invalid(format!(
                "{SHARE_VARIABLE}=1: the program already has {threads} threads, and this must be prepared before it starts any"
            )));
        }
        None => return Err(crate::unsupported(format!("{SHARE_VARIABLE}=1 works on Linux only"))),
    }
    let host = format!("process-{}", std::process::id());
    let settings = [
        ("NCCL_HOSTID", host.as_str()),
        ("NCCL_NET", "Socket"),
        ("NCCL_SOCKET_IFNAME", "lo"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NCCL_IB_DISABLE", "1"),
    ];
    for (name, value) in settings {
        // SAFETY: this is the only thread, as the kernel says, so that nobody reads the environment meanwhile.
        unsafe { env::set_var(name, value) };
    }
    PREPARED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Whether [`share_gpu`] has made its preparations.
static PREPARED: AtomicBool = AtomicBool::new(false);

/// Whether ranks may share a GPU: [`SHARE_VARIABLE`] says so, and this process is prepared for it.
pub(crate) fn may_share() -> bool {
    PREPARED.load(Ordering::Relaxed)
}

fn is_wanted() -> bool {
    env::var(SHARE_VARIABLE).is_ok_and(|value| value == "1")
}

/// Refuses what NCCL reads from the environment and nothing here could work with.
///
/// # Errors
/// `InvalidArgument` naming the variable.
pub(crate) fn check_environment() -> Result<()> {
    let set = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
    if let Some(value) = set("NCCL_COMM_BLOCKING").filter(|value| value != "0") {
        return Err(Error::invalid(format!(
            "NCCL_COMM_BLOCKING={value} would make NCCL's calls wait without a deadline; unset it"
        )));
    }
    if set("NCCL_COMM_ID").is_some() {
        return Err(Error::invalid("NCCL_COMM_ID is set, so all communicators would have the same id; unset it"));
    }
    Ok(())
}
