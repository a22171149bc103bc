//! wgpu adapters, in the order of their numbers.

use burn::tensor::{Device, DeviceKind, try_read_sync};
use wgpu::{Backend, Backends, DeviceType};

use super::{Problem, WgpuInfo, out_of_range};

/// An adapter that burn reaches.
pub(super) struct Adapter {
    adapter: wgpu::Adapter,
    kind: DeviceKind,
}

/// What WebGPU guarantees of every device, and burn's kernels therefore take for granted.
const BINDINGS: u32 = 8;
const INVOCATIONS: u32 = 256;
const WORKGROUP_STORAGE: u32 = 16 << 10;

/// The adapters that burn reaches, the likely fastest kind first. These are those of one graphics API: the first that has a GPU, else
/// the first that has anything.
pub(super) fn adapters() -> Vec<Adapter> {
    let mut software = Vec::new();
    for backend in GRAPHICS_APIS {
        let adapters = adapters_of(*backend);
        if adapters.iter().any(|adapter| adapter.get_info().device_type != DeviceType::Cpu) {
            return numbered(adapters);
        }
        if software.is_empty() {
            software = adapters;
        }
    }
    numbered(software)
}

/// The adapter with this number, or the first.
pub(super) fn choose(number: Option<usize>) -> Result<Adapter, Problem> {
    let mut adapters = adapters();
    let wanted = number.unwrap_or(0);
    if adapters.is_empty() {
        return Err(no_adapter());
    }
    if wanted >= adapters.len() {
        return Err(out_of_range(wanted, adapters.len(), "wgpu adapter"));
    }
    Ok(adapters.swap_remove(wanted))
}

pub(super) fn no_adapter() -> Problem {
    let apis: Vec<String> = GRAPHICS_APIS.iter().map(ToString::to_string).collect();
    Problem::new(
        format!("no adapter was found on this machine through {}", apis.join(", ")),
        "install the GPU's Vulkan driver, or mesa-vulkan-drivers to run on the processor; if a driver is installed, check whether \
         `vulkaninfo` finds it, and VK_ICD_FILENAMES",
    )
}

/// Those that burn tries, in its order.
const GRAPHICS_APIS: &[Backend] =
    if cfg!(target_os = "macos") { &[Backend::Metal] } else { &[Backend::Vulkan, Backend::Dx12, Backend::Gl] };

impl Adapter {
    /// Whether a device can be made of this adapter that serves for training.
    ///
    /// # Errors
    /// What it lacks.
    pub(super) fn probe(&self) -> Result<(), Problem> {
        let info = self.adapter.get_info();
        let limits = self.adapter.limits();
        let needs = [
            ("storage buffers a shader", limits.max_storage_buffers_per_shader_stage, BINDINGS),
            ("invocations a workgroup", limits.max_compute_invocations_per_workgroup, INVOCATIONS),
            ("bytes of workgroup memory", limits.max_compute_workgroup_storage_size, WORKGROUP_STORAGE),
        ];
        if let Some((what, has, needs)) = needs.into_iter().find(|(_, has, needs)| has < needs) {
            return Err(Problem::new(
                format!("{} ({}) allows {has} {what}, and at least {needs} are needed", info.name, info.backend),
                "update its driver, choose another adapter of `gpt2 devices`, or use --device cpu",
            ));
        }
        if info.device_type == DeviceType::Cpu
            && let Some(features) = unfit_for_software()
        {
            return Err(Problem::new(
                format!(
                    "{} is a software driver, with which a build with {features} crashes or takes minutes before its first step",
                    info.name
                ),
                "build without `fusion` and `autotune`, or use --device cpu",
            ));
        }
        // As burn will, except that it panics.
        let device = self.adapter.request_device(&wgpu::DeviceDescriptor {
            required_features: self.adapter.features() - wgpu::Features::MAPPABLE_PRIMARY_BUFFERS,
            required_limits: limits,
            experimental_features: crate::sys::experimental_features(),
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        });
        let problem = |error: String| {
            Problem::new(
                format!("{} ({}) gives no device: {error}", info.name, info.backend),
                "check whether another program uses it, update its driver, or use --device cpu",
            )
        };
        match try_read_sync(device) {
            Some(Ok(_)) => Ok(()),
            Some(Err(error)) => Err(problem(error.to_string())),
            None => Err(problem("it did not answer at once".into())),
        }
    }

    /// The name by which burn finds this adapter again.
    pub(super) fn device(&self) -> Device {
        Device::wgpu(self.kind.clone())
    }

    /// Bytes of the largest buffer that a kernel can be given.
    pub(super) fn largest_tensor(&self) -> u64 {
        let limits = self.adapter.limits();
        limits.max_storage_buffer_binding_size.min(limits.max_buffer_size)
    }

    pub(super) fn describe(&self, number: usize) -> WgpuInfo {
        let info = self.adapter.get_info();
        let limits = self.adapter.limits();
        WgpuInfo {
            number,
            name: info.name,
            backend: info.backend.to_string(),
            kind: kind_name(info.device_type).into(),
            driver: format!("{} {}", info.driver, info.driver_info).trim().to_string(),
            largest_tensor_bytes: self.largest_tensor(),
            workgroup_memory_bytes: limits.max_compute_workgroup_storage_size.into(),
            invocations_per_workgroup: limits.max_compute_invocations_per_workgroup,
            f16: self.adapter.features().contains(wgpu::Features::SHADER_F16),
            unfit: self.probe().err(),
        }
    }
}

/// The features of this build that no software driver bears.
fn unfit_for_software() -> Option<&'static str> {
    match (cfg!(feature = "fusion"), cfg!(feature = "autotune")) {
        (true, true) => Some("`fusion` and `autotune`"),
        (true, false) => Some("`fusion`"),
        (false, true) => Some("`autotune`"),
        (false, false) => None,
    }
}

fn adapters_of(backend: Backend) -> Vec<wgpu::Adapter> {
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends: backend.into(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    try_read_sync(instance.enumerate_adapters(Backends::from(backend))).unwrap_or_default()
}

/// burn finds an adapter by its kind and its place among those of its kind. It finds only the first software driver, and one of another
/// kind only as what there is without being asked for a kind.
fn numbered(adapters: Vec<wgpu::Adapter>) -> Vec<Adapter> {
    let alone = adapters.len() == 1;
    let mut seen = [0; 5];
    let mut all: Vec<(usize, Adapter)> = Vec::new();
    for adapter in adapters {
        let kind = adapter.get_info().device_type;
        let rank = rank(kind);
        let place = seen[rank];
        seen[rank] += 1;
        let kind = match kind {
            DeviceType::DiscreteGpu => DeviceKind::DiscreteGpu(place),
            DeviceType::IntegratedGpu => DeviceKind::IntegratedGpu(place),
            DeviceType::VirtualGpu => DeviceKind::VirtualGpu(place),
            DeviceType::Cpu if place == 0 => DeviceKind::Cpu,
            DeviceType::Other if alone => DeviceKind::DefaultDevice,
            DeviceType::Cpu | DeviceType::Other => continue,
        };
        all.push((rank, Adapter { adapter, kind }));
    }
    all.sort_by_key(|(rank, _)| *rank);
    all.into_iter().map(|(_, adapter)| adapter).collect()
}

fn rank(kind: DeviceType) -> usize {
    match kind {
        DeviceType::DiscreteGpu => 0,
        DeviceType::IntegratedGpu => 1,
        DeviceType::VirtualGpu => 2,
        DeviceType::Other => 3,
        DeviceType::Cpu => 4,
    }
}

fn kind_name(kind: DeviceType) -> &'static str {
    match kind {
        DeviceType::DiscreteGpu => "discrete GPU",
        DeviceType::IntegratedGpu => "integrated GPU",
        DeviceType::VirtualGpu => "virtual GPU",
        DeviceType::Other => "other",
        DeviceType::Cpu => "software (CPU)",
    }
}
