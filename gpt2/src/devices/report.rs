//! What a machine has to compute with, and for each thing that is missing, why.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use super::{MatrixProducts, Problem};

/// The devices of this machine, as this build sees them.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What this build has.
    pub features: Features,
    /// The processor.
    pub cpu: Cpu,
    /// wgpu adapters, by their numbers.
    pub wgpu: Found<Vec<WgpuInfo>>,
    /// The NVIDIA driver and its devices.
    pub cuda: Found<Cuda>,
    /// The compiler of CUDA kernels.
    pub nvrtc: Found<Library>,
    /// What those kernels include.
    pub cuda_headers: Found<CudaHeaders>,
    /// NCCL.
    pub nccl: Found<Library>,
    /// Where compiled kernels are kept between runs.
    pub kernel_cache: Found<KernelCache>,
}

/// Something that may be missing.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Found<T> {
    /// It is there.
    Found(T),
    /// It is not, or not fit for use.
    Missing(Problem),
}

/// The features of this build that concern devices.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Features {
    /// CUDA devices.
    pub cuda: bool,
    /// wgpu adapters.
    pub wgpu: bool,
    /// NCCL.
    pub nccl: bool,
    /// Operations on tensors joined into one kernel.
    pub fusion: bool,
    /// Kernels chosen by measuring.
    pub autotune: bool,
    /// Kernels and measurements kept between runs.
    #[serde(rename = "kernel-cache")]
    pub kernel_cache: bool,
}

/// The processor.
#[derive(Clone, Debug, Serialize)]
pub struct Cpu {
    /// Its name, where the system says.
    pub name: Option<String>,
    /// Threads that can run at once, for this process.
    pub cores: usize,
    /// Instruction sets that matter to kernels.
    pub features: Vec<&'static str>,
    /// The kernels that multiply matrices.
    pub products: MatrixProducts,
}

/// A wgpu adapter.
#[derive(Clone, Debug, Serialize)]
pub struct WgpuInfo {
    /// N in `--device wgpu:N`.
    pub number: usize,
    /// Its name.
    pub name: String,
    /// Graphics API.
    pub backend: String,
    /// Discrete, integrated or virtual GPU, software, or other.
    pub kind: String,
    /// Name and version of its driver.
    pub driver: String,
    /// Bytes that one tensor may have.
    pub largest_tensor_bytes: u64,
    /// Bytes that the invocations of a workgroup share.
    pub workgroup_memory_bytes: u64,
    /// Invocations a workgroup.
    pub invocations_per_workgroup: u32,
    /// Whether shaders compute in f16.
    pub f16: bool,
    /// Why it cannot be used, if so.
    pub unfit: Option<Problem>,
}

/// The NVIDIA driver.
#[derive(Clone, Debug, Serialize)]
pub struct Cuda {
    /// The newest CUDA that it knows.
    pub driver_version: String,
    /// Its devices, by their numbers.
    pub devices: Vec<CudaInfo>,
}

/// A CUDA device.
#[derive(Clone, Debug, Serialize)]
pub struct CudaInfo {
    /// N in `--device cuda:N`.
    pub number: usize,
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Compute capability, such as 9.0.
    pub compute_capability: String,
}

/// A library that was found.
#[derive(Clone, Debug, Serialize)]
pub struct Library {
    /// Its path, or the name by which the loader finds it.
    pub path: String,
    /// Its version.
    pub version: String,
}

/// The headers of a CUDA toolkit.
#[derive(Clone, Debug, Serialize)]
pub struct CudaHeaders {
    /// Their folder.
    pub path: PathBuf,
}

/// Where compiled kernels are kept.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum KernelCache {
    /// As a file with the user's settings says.
    Settings(PathBuf),
    /// In this folder.
    Folder(PathBuf),
}

impl Report {
    /// Looks at this machine. Nothing that is missing is an error.
    #[must_use]
    pub fn new() -> Self {
        Report {
            features: Features {
                cuda: cfg!(feature = "cuda"),
                wgpu: cfg!(feature = "wgpu"),
                nccl: cfg!(feature = "nccl"),
                fusion: cfg!(feature = "fusion"),
                autotune: cfg!(feature = "autotune"),
                kernel_cache: cfg!(feature = "kernel-cache"),
            },
            cpu: Cpu {
                name: cpu_name(),
                cores: std::thread::available_parallelism().map_or(1, usize::from),
                features: cpu_features(),
                products: MatrixProducts::here(),
            },
            wgpu: wgpu().into(),
            cuda: cuda().into(),
            nvrtc: nvrtc().into(),
            cuda_headers: cuda_headers().into(),
            nccl: nccl().into(),
            kernel_cache: kernel_cache().into(),
        }
    }
}

impl Default for Report {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> From<Result<T, Problem>> for Found<T> {
    fn from(result: Result<T, Problem>) -> Self {
        result.map_or_else(Found::Missing, Found::Found)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Features { cuda, wgpu, nccl, fusion, autotune, kernel_cache } = self.features;
        let all = [
            ("cuda", cuda),
            ("wgpu", wgpu),
            ("nccl", nccl),
            ("fusion", fusion),
            ("autotune", autotune),
            ("kernel-cache", kernel_cache),
        ];
        let names = |there: bool| -> String {
            let names: Vec<&str> = all.iter().filter(|(_, has)| *has == there).map(|(name, _)| *name).collect();
            if names.is_empty() { "none".into() } else { names.join(", ") }
        };
        line(f, "build", format!("features {}; without {}", names(true), names(false)))?;
        let cpu = &self.cpu;
        let name = cpu.name.as_deref().unwrap_or("processor");
        let features = if cpu.features.is_empty() { String::new() } else { format!(", {}", cpu.features.join(" ")) };
        line(f, "cpu", format!("{name}, {} core(s){features}", cpu.cores))?;
        line(f, "cpu", cpu.products)?;
        part(f, "wgpu", &self.wgpu, |adapters| adapters.iter().map(|a| (Some(a.number), a.to_string())).collect())?;
        part(f, "cuda", &self.cuda, |cuda| {
            let driver = (None, format!("driver for CUDA {} and older", cuda.driver_version));
            std::iter::once(driver).chain(cuda.devices.iter().map(|d| (Some(d.number), d.to_string()))).collect()
        })?;
        part(f, "nvrtc", &self.nvrtc, |library| vec![(None, library.to_string())])?;
        part(f, "headers", &self.cuda_headers, |headers| vec![(None, headers.path.display().to_string())])?;
        part(f, "nccl", &self.nccl, |library| vec![(None, library.to_string())])?;
        part(f, "kernels", &self.kernel_cache, |cache| vec![(None, cache.to_string())])
    }
}

/// One line for each thing found, with its number, or one for what is missing.
fn part<T>(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    found: &Found<T>,
    lines: impl Fn(&T) -> Vec<(Option<usize>, String)>,
) -> fmt::Result {
    match found {
        Found::Found(there) => lines(there).into_iter().try_for_each(|(number, text)| match number {
            Some(number) => line(f, &format!("{name}:{number}"), text),
            None => line(f, name, text),
        }),
        Found::Missing(problem) => line(f, name, format!("missing: {problem}")),
    }
}

fn line(f: &mut fmt::Formatter<'_>, name: &str, text: impl fmt::Display) -> fmt::Result {
    writeln!(f, "{name:<8} {text}")
}

impl fmt::Display for WgpuInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {}, {}, driver {}, tensors up to {} MiB, {} KiB a workgroup of {}",
            self.name,
            self.backend,
            self.kind,
            self.driver,
            self.largest_tensor_bytes >> 20,
            self.workgroup_memory_bytes >> 10,
            self.invocations_per_workgroup
        )?;
        if self.f16 {
            f.write_str(", f16")?;
        }
        self.unfit.as_ref().map_or(Ok(()), |problem| write!(f, "; cannot be used: {problem}"))
    }
}

impl fmt::Display for CudaInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.memory_bytes as f64 / (1_u64 << 30) as f64;
        write!(f, "{}, {gib:.1} GiB, compute capability {}", self.name, self.compute_capability)
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, version {}", self.path, self.version)
    }
}

impl fmt::Display for KernelCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KernelCache::Settings(file) => write!(f, "kept where {} says", file.display()),
            KernelCache::Folder(folder) => write!(f, "kept in {}", folder.display()),
        }
    }
}

#[cfg(feature = "wgpu")]
fn wgpu() -> Result<Vec<WgpuInfo>, Problem> {
    let adapters = super::wgpu::adapters();
    if adapters.is_empty() {
        return Err(super::wgpu::no_adapter());
    }
    Ok(adapters.iter().enumerate().map(|(number, adapter)| adapter.describe(number)).collect())
}

#[cfg(not(feature = "wgpu"))]
fn wgpu() -> Result<Vec<WgpuInfo>, Problem> {
    Err(super::lacks_feature("wgpu"))
}

#[cfg(feature = "cuda")]
fn cuda() -> Result<Cuda, Problem> {
    let driver = super::cuda::driver()?;
    let devices = super::cuda::devices(&driver)?;
    let version = driver.version().map_or_else(|_| "unknown".to_string(), version_text);
    let describe = |(number, device): (usize, crate::sys::CudaDevice)| CudaInfo {
        number,
        name: device.name,
        memory_bytes: device.memory_bytes,
        compute_capability: version_text(device.capability),
    };
    Ok(Cuda { driver_version: version, devices: devices.into_iter().enumerate().map(describe).collect() })
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Result<Cuda, Problem> {
    Err(super::lacks_feature("cuda"))
}

#[cfg(feature = "cuda")]
fn nvrtc() -> Result<Library, Problem> {
    let crate::sys::Nvrtc { name, version } = super::cuda::nvrtc()?;
    let driver = crate::sys::CudaDriver::load().and_then(|driver| driver.version());
    super::cuda::fits(version, driver.ok())?;
    Ok(Library { path: name, version: version_text(version) })
}

#[cfg(not(feature = "cuda"))]
fn nvrtc() -> Result<Library, Problem> {
    Err(super::lacks_feature("cuda"))
}

#[cfg(feature = "cuda")]
fn cuda_headers() -> Result<CudaHeaders, Problem> {
    super::cuda::ToolkitPaths::here().headers()
}

#[cfg(not(feature = "cuda"))]
fn cuda_headers() -> Result<CudaHeaders, Problem> {
    Err(super::lacks_feature("cuda"))
}

#[cfg(feature = "cuda")]
fn version_text((major, minor): (u32, u32)) -> String {
    format!("{major}.{minor}")
}

#[cfg(feature = "nccl")]
fn nccl() -> Result<Library, Problem> {
    match comm_nccl::Library::load() {
        Ok(library) => Ok(Library { path: library.path().display().to_string(), version: library.version_text() }),
        Err(error) => Err(Problem::new(error.to_string(), "only the transport nccl needs it")),
    }
}

#[cfg(not(feature = "nccl"))]
fn nccl() -> Result<Library, Problem> {
    Err(super::lacks_feature("nccl"))
}

#[cfg(feature = "kernel-cache")]
fn kernel_cache() -> Result<KernelCache, Problem> {
    use super::kernel_cache::CacheLocation;
    match CacheLocation::here() {
        CacheLocation::Settings(file) => Ok(KernelCache::Settings(file)),
        CacheLocation::Folder(folder) => Ok(KernelCache::Folder(folder)),
        CacheLocation::Nowhere => Err(Problem::new(
            "compiled kernels cannot be kept: the user has no home folder",
            "set XDG_CACHE_HOME to an absolute path",
        )),
    }
}

#[cfg(not(feature = "kernel-cache"))]
fn kernel_cache() -> Result<KernelCache, Problem> {
    Err(super::lacks_feature("kernel-cache"))
}

fn cpu_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let (_, name) = text.lines().find(|line| line.starts_with("model name"))?.split_once(':')?;
    Some(name.trim().to_string())
}

fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let all = [
        ("avx", is_x86_feature_detected!("avx")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    #[cfg(target_arch = "aarch64")]
    let all = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("fp16", std::arch::is_aarch64_feature_detected!("fp16")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
        ("sve", std::arch::is_aarch64_feature_detected!("sve")),
    ];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let all: [(&'static str, bool); 0] = [];
    all.into_iter().filter(|(_, there)| *there).map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_names_every_part_in_words_and_in_json() {
        let report = Report::new();
        let text = report.to_string();
        for part in ["build ", "cpu ", "wgpu", "cuda", "nvrtc", "headers", "nccl", "kernels"] {
            assert!(text.lines().any(|line| line.starts_with(part)), "{part}: {text}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert!(json["cpu"]["cores"].as_u64().unwrap() >= 1);
        assert!(
            text.contains("cpu      matrix products by ") && json["cpu"]["products"]["in_use"].is_string(),
            "{text}"
        );
        for (part, has) in [("wgpu", cfg!(feature = "wgpu")), ("cuda", cfg!(feature = "cuda"))] {
            let fields = json[part].as_object().unwrap();
            assert!(fields.contains_key("found") || fields["missing"]["remedy"].is_string(), "{json}");
            assert_eq!(json["features"][part], has);
        }
    }

    #[test]
    fn devices_are_lines_with_their_numbers() {
        let device =
            |number| CudaInfo { number, name: "GPU".into(), memory_bytes: 80 << 30, compute_capability: "9.0".into() };
        let cuda = Cuda { driver_version: "13.0".into(), devices: vec![device(0), device(1)] };
        let text = Report { cuda: Found::Found(cuda), ..Report::new() }.to_string();
        assert!(text.contains("cuda:1   GPU, 80.0 GiB, compute capability 9.0"), "{text}");
    }
}
