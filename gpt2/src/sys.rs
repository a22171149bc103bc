//! What needs `unsafe`: settings of the C library's allocator, clocks and processor time, what the CUDA driver says, and files mapped into
//! memory.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use memmap2::Mmap;

/// Tells glibc's allocator to keep freed memory instead of handing it back to the kernel, and to serve large blocks and all threads
/// from the one growing heap. A training step frees and allocates the same hundreds of megabytes again and again; touching
/// fresh pages costs several times the memory's bandwidth.
///
/// Call once at the start of a program, before other threads run. Returns whether every setting was taken; elsewhere than on glibc it
/// does nothing and returns false.
pub fn keep_freed_pages() -> bool {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        const GIB: libc::c_int = 1 << 30;
        let set = |parameter: libc::c_int, value: libc::c_int| {
            // SAFETY: mallopt takes two plain integers, checks them itself and locks the allocator; it reads and writes no memory of
            // ours.
            unsafe { libc::mallopt(parameter, value) == 1 }
        };
        // Older versions of glibc accept at most 32 MiB as the threshold.
        let large_blocks = set(libc::M_MMAP_THRESHOLD, GIB) || set(libc::M_MMAP_THRESHOLD, 32 << 20);
        let keep = set(libc::M_TRIM_THRESHOLD, libc::c_int::MAX);
        let grow = set(libc::M_TOP_PAD, 64 << 20);
        // Heaps of other threads end at 64 MiB and fall back to fresh mappings beyond.
        let one_heap = set(libc::M_ARENA_MAX, 1);
        large_blocks && keep && grow && one_heap
    }
    #[cfg(not(all(target_os = "linux", target_env = "gnu")))]
    {
        false
    }
}

/// Nanoseconds of the machine's monotonic clock, which all its processes share; 0 where there is no such clock.
pub(crate) fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec of ours, which outlives the call.
    if unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) } != 0 {
        return 0;
    }
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

/// The user as whom this process acts.
pub(crate) fn user_id() -> u32 {
    // SAFETY: geteuid takes nothing, touches no memory of ours and cannot fail.
    unsafe { libc::geteuid() }
}

/// Columns of the terminal that is standard output; `None` where it is none, or does not say.
pub(crate) fn terminal_width() -> Option<u16> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: TIOCGWINSZ writes a winsize, and `size` is a live one of ours.
    let status = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    (status == 0 && size.ws_col > 0).then_some(size.ws_col)
}

/// Processor time that all threads of this process have used, in user and in kernel mode; zero where the system does not say.
pub fn processor_time() -> Duration {
    #[cfg(unix)]
    {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: getrusage writes one `rusage` to a valid pointer and reads nothing.
        if unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } != 0 {
            return Duration::ZERO;
        }
        // SAFETY: plain integers, all of which are set.
        let usage = unsafe { usage.assume_init() };
        let duration = |time: libc::timeval| {
            let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
            Duration::from_secs(seconds) + Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
        };
        duration(usage.ru_utime) + duration(usage.ru_stime)
    }
    #[cfg(not(unix))]
    {
        Duration::ZERO
    }
}

/// The UUID of a CUDA device as NVML writes it (`GPU-…`), by the ordinal that CUDA gives it in this process.
///
/// # Errors
/// What the driver lacks or answers.
#[cfg(feature = "cuda")]
pub fn cuda_device_uuid(ordinal: i32) -> Result<String, String> {
    CudaDriver::load()?.uuid(ordinal)
}

/// A device of the CUDA driver.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaDevice {
    /// Its name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
}

/// The CUDA driver's library, loaded and initialised.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub struct CudaDriver(libloading::Library);

#[cfg(feature = "cuda")]
impl CudaDriver {
    /// Loads the driver under the names by which the backend will, and initialises it, which may be done any number of times.
    ///
    /// # Errors
    /// Which names the loader did not find, or what the driver answers.
    pub fn load() -> Result<Self, String> {
        let names: Vec<String> = ["cuda", "nvcuda"].into_iter().flat_map(cudarc::get_lib_name_candidates).collect();
        let library = names
            .iter()
            .find_map(|name| load(name).ok())
            .ok_or_else(|| format!("there is no NVIDIA driver: the loader finds none of {}", listed(&names)))?;
        let driver = CudaDriver(library);
        // SAFETY: the type is that of cuda.h. cuInit may be called any number of times, from any thread.
        unsafe {
            let init = driver.function::<unsafe extern "C" fn(u32) -> i32>("cuInit")?;
            driver.check("cuInit", init(0))?;
        }
        Ok(driver)
    }

    /// The newest CUDA that it knows, major and minor.
    ///
    /// # Errors
    /// What the driver lacks or answers.
    pub fn version(&self) -> Result<(u32, u32), String> {
        let mut version = 0;
        // SAFETY: the type is that of cuda.h, and the pointer is to an int of ours.
        unsafe {
            let version_of = self.function::<unsafe extern "C" fn(*mut i32) -> i32>("cuDriverGetVersion")?;
            self.check("cuDriverGetVersion", version_of(&raw mut version))?;
        }
        let version = u32::try_from(version).map_err(|_| format!("cuDriverGetVersion says {version}"))?;
        Ok((version / 1000, version % 1000 / 10))
    }

    /// The devices that it shows to this process, in the order of their ordinals.
    ///
    /// # Errors
    /// What the driver lacks or answers.
    pub fn devices(&self) -> Result<Vec<CudaDevice>, String> {
        let mut count = 0;
        // SAFETY: the type is that of cuda.h, and the pointer is to an int of ours.
        unsafe {
            let count_of = self.function::<unsafe extern "C" fn(*mut i32) -> i32>("cuDeviceGetCount")?;
            self.check("cuDeviceGetCount", count_of(&raw mut count))?;
        }
        (0..count).map(|ordinal| self.describe(ordinal)).collect()
    }

    /// Makes the context that the backend will compute in, and a stream in it, which may fail on a device that is there: where another
    /// process has it alone, or all of its memory, or where it is out of order.
    ///
    /// # Errors
    /// What the driver lacks or answers, with what to try.
    pub fn try_out(&self, ordinal: usize) -> Result<(), (String, &'static str)> {
        /// `CUDA_ERROR_OUT_OF_MEMORY`.
        const OUT_OF_MEMORY: i32 = 2;
        /// `CUDA_ERROR_DEVICE_UNAVAILABLE`.
        const UNAVAILABLE: i32 = 46;
        let said = |(code, why): (i32, String)| match code {
            OUT_OF_MEMORY => (
                why,
                "check with `nvidia-smi` which processes use its memory, or choose another GPU with --device cuda:N",
            ),
            UNAVAILABLE => (
                why,
                "another process may use it exclusively (`nvidia-smi -q -d COMPUTE` shows the mode); wait until that has ended, or choose \
                 another GPU with --device cuda:N",
            ),
            // The driver is not whole.
            0 => (why, "install a newer NVIDIA driver"),
            _ => (
                why,
                "look for `Xid` in the kernel's log; `nvidia-smi --gpu-reset` or a restart of the machine may bring the GPU back",
            ),
        };
        self.make_context(ordinal).map_err(said)
    }

    /// The error with its code, 0 where the driver is not whole.
    fn make_context(&self, ordinal: usize) -> Result<(), (i32, String)> {
        type Handle = *mut std::ffi::c_void;
        /// `CU_STREAM_NON_BLOCKING`.
        const NON_BLOCKING: u32 = 1;
        let lacks = |why: String| (0, why);
        let device = self.handle(i32::try_from(ordinal).unwrap_or(i32::MAX)).map_err(lacks)?;
        let (mut context, mut stream): (Handle, Handle) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the types are those of cuda.h, and the pointers are to values of ours. The context stays retained: the backend's is the
        // same one, and making it takes time. It is current in this thread for these calls alone.
        unsafe {
            let retain = self
                .function::<unsafe extern "C" fn(*mut Handle, i32) -> i32>("cuDevicePrimaryCtxRetain")
                .map_err(lacks)?;
            let set = self.function::<unsafe extern "C" fn(Handle) -> i32>("cuCtxSetCurrent").map_err(lacks)?;
            let create =
                self.function::<unsafe extern "C" fn(*mut Handle, u32) -> i32>("cuStreamCreate").map_err(lacks)?;
            let destroy = self.function::<unsafe extern "C" fn(Handle) -> i32>("cuStreamDestroy_v2").map_err(lacks)?;
            let check = |function: &str, code: i32| self.check(function, code).map_err(|why| (code, why));
            check("cuDevicePrimaryCtxRetain", retain(&raw mut context, device))?;
            check("cuCtxSetCurrent", set(context))?;
            let made = check("cuStreamCreate", create(&raw mut stream, NON_BLOCKING));
            let made = made.and_then(|()| check("cuStreamDestroy", destroy(stream)));
            check("cuCtxSetCurrent", set(std::ptr::null_mut()))?;
            made
        }
    }

    fn describe(&self, ordinal: i32) -> Result<CudaDevice, String> {
        type Name = unsafe extern "C" fn(*mut std::ffi::c_char, i32, i32) -> i32;
        type Memory = unsafe extern "C" fn(*mut usize, i32) -> i32;
        type Attribute = unsafe extern "C" fn(*mut i32, i32, i32) -> i32;
        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.
        const CAPABILITY: [i32; 2] = [75, 76];
        let device = self.handle(ordinal)?;
        let mut name = [0_u8; 256];
        let mut memory = 0;
        let mut capability = [0; 2];
        // SAFETY: the types are those of cuda.h, the pointers are to values of ours that live through the calls, and the name's buffer
        // is as long as is said.
        unsafe {
            let name_of = self.function::<Name>("cuDeviceGetName")?;
            self.check("cuDeviceGetName", name_of(name.as_mut_ptr().cast(), name.len() as i32, device))?;
            let memory_of = self.function::<Memory>("cuDeviceTotalMem_v2")?;
            self.check("cuDeviceTotalMem", memory_of(&raw mut memory, device))?;
            let attribute_of = self.function::<Attribute>("cuDeviceGetAttribute")?;
            for (value, attribute) in capability.iter_mut().zip(CAPABILITY) {
                self.check("cuDeviceGetAttribute", attribute_of(&raw mut *value, attribute, device))?;
            }
        }
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        let [major, minor] = capability.map(|part| u32::try_from(part).unwrap_or(0));
        Ok(CudaDevice {
            name: String::from_utf8_lossy(name).into_owned(),
            memory_bytes: memory as u64,
            capability: (major, minor),
        })
    }

    fn uuid(&self, ordinal: i32) -> Result<String, String> {
        type Uuid = unsafe extern "C" fn(*mut [u8; 16], i32) -> i32;
        let device = self.handle(ordinal)?;
        let mut uuid = [0_u8; 16];
        // SAFETY: as in `describe`; `CUuuid` is 16 bytes.
        unsafe {
            // The second version also knows the slices of a divided GPU.
            let uuid_of =
                self.function::<Uuid>("cuDeviceGetUuid_v2").or_else(|_| self.function::<Uuid>("cuDeviceGetUuid"))?;
            self.check("cuDeviceGetUuid", uuid_of(&raw mut uuid, device))?;
        }
        let hex = comm_core::hex(&uuid);
        let (a, b, c, d, e) = (&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
        Ok(format!("GPU-{a}-{b}-{c}-{d}-{e}"))
    }

    /// `CUdevice`, which is an int.
    fn handle(&self, ordinal: i32) -> Result<i32, String> {
        let mut device = 0;
        // SAFETY: the type is that of cuda.h, and the pointer is to an int of ours.
        unsafe {
            let device_of = self.function::<unsafe extern "C" fn(*mut i32, i32) -> i32>("cuDeviceGet")?;
            self.check("cuDeviceGet", device_of(&raw mut device, ordinal))?;
        }
        Ok(device)
    }

    /// # Safety
    /// `F` is the type of the C function of this name.
    unsafe fn function<F>(&self, name: &str) -> Result<libloading::Symbol<'_, F>, String> {
        // SAFETY: by the caller.
        unsafe { self.0.get(name.as_bytes()) }.map_err(|error| format!("the NVIDIA driver is too old: {error}"))
    }

    /// The driver's own words for a code that is no success.
    fn check(&self, function: &str, code: i32) -> Result<(), String> {
        type ErrorString = unsafe extern "C" fn(i32, *mut *const std::ffi::c_char) -> i32;
        if code == 0 {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: the type is that of cuda.h; what it points to, if anything, is a constant string of the driver's.
        let said = unsafe {
            self.function::<ErrorString>("cuGetErrorString")
                .ok()
                .filter(|text_of| text_of(code, &raw mut text) == 0 && !text.is_null())
                .map(|_| std::ffi::CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        Err(format!("the NVIDIA driver's {function} fails: {} (CUDA error {code})", said.unwrap_or("unknown".into())))
    }
}

/// Names of a library for a message: each once, without those that only Windows has.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn listed(names: &[String]) -> String {
    let mut all: Vec<&str> = Vec::new();
    for name in names.iter().filter(|name| !cfg!(target_os = "linux") || !name.contains("64")) {
        if !all.contains(&name.as_str()) {
            all.push(name);
        }
    }
    all.join(", ")
}

/// The names under which the backend will ask the loader for NVRTC.
#[cfg(feature = "cuda")]
pub fn nvrtc_names() -> Vec<String> {
    cudarc::get_lib_name_candidates("nvrtc")
}

/// NVRTC, which compiles CUDA kernels.
#[cfg(feature = "cuda")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvrtc {
    /// The name by which the loader finds it.
    pub name: String,
    /// The CUDA that it belongs to, major and minor.
    pub version: (u32, u32),
}

#[cfg(feature = "cuda")]
impl Nvrtc {
    /// The first of `names` that the loader finds; an error if that is no NVRTC.
    pub fn find(names: &[String]) -> Option<Result<Self, String>> {
        let (name, library) = names.iter().find_map(|name| Some((name, load(name).ok()?)))?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the type is that of nvrtc.h, and the pointers are to ints of ours.
        let code = unsafe {
            library
                .get::<unsafe extern "C" fn(*mut i32, *mut i32) -> i32>(b"nvrtcVersion\0")
                .map(|version_of| version_of(&raw mut major, &raw mut minor))
        };
        Some(match (code, u32::try_from(major), u32::try_from(minor)) {
            (Ok(0), Ok(major), Ok(minor)) => Ok(Nvrtc { name: name.clone(), version: (major, minor) }),
            (Ok(code), ..) => Err(format!("{name}: nvrtcVersion fails with error {code}")),
            (Err(error), ..) => Err(format!("{name} is not NVRTC: {error}")),
        })
    }
}

#[cfg(feature = "cuda")]
fn load(name: &str) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: loading runs the library's initialisers. The names are those of the CUDA driver and of NVRTC, whose initialisers touch
    // nothing of this program and are made to be loaded at any time.
    unsafe { libloading::Library::new(name) }
}

/// Leave to ask an adapter for features that wgpu calls experimental, as the backend does.
#[cfg(feature = "wgpu")]
pub(crate) fn experimental_features() -> wgpu::ExperimentalFeatures {
    // SAFETY: such features may only do harm when shaders or commands use them, and the device that is asked for with this is dropped
    // without any.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}

/// A file mapped read-only into memory. Its pages are read as they are touched, so a shard larger than memory costs
/// nothing to open.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
}

impl MappedFile {
    /// Maps the whole of `path`.
    ///
    /// The file must not be cut short while it is mapped: the kernel answers a read past its new end with `SIGBUS`.
    ///
    /// # Errors
    /// The operating system's error where the file cannot be opened or mapped.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::of(&File::open(path)?)
    }

    /// Maps the whole of `file`, which must not be cut short either.
    ///
    /// # Errors
    /// The operating system's error where the file cannot be mapped.
    pub fn of(file: &File) -> io::Result<Self> {
        // SAFETY: the mapping is read-only and owned by `Mmap`, which outlives every slice lent by `bytes`. The one
        // thing that the type system cannot hold is that no other process rewrites the file meanwhile; readers
        // therefore copy values out, accept every bit pattern (`u8`), and check each token id after the copy, so
        // nothing in memory safety rests on the contents.
        let map = unsafe { Mmap::map(file)? };
        Ok(Self { map })
    }

    /// The contents of the file, as long as it was when it was mapped.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn processor_time_grows_with_work() {
        let before = processor_time();
        let start = std::time::Instant::now();
        while processor_time() - before < Duration::from_millis(20) {
            assert!(start.elapsed() < Duration::from_secs(20), "20 ms of work count for nothing");
            std::hint::black_box((0..1000_u64).sum::<u64>());
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn glibc_takes_every_setting() {
        assert!(keep_freed_pages());
    }

    #[test]
    fn a_mapped_file_shows_the_bytes_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes.bin");
        std::fs::write(&path, [1_u8, 2, 3]).unwrap();
        assert_eq!(MappedFile::open(&path).unwrap().bytes(), [1, 2, 3]);
        let missing = MappedFile::open(&folder.path().join("missing.bin")).unwrap_err();
        assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
    }
}
