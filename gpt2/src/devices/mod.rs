//! Devices that compute, found without a panic where they are not there.

use burn::tensor::Device;

/// The first CUDA device.
///
/// # Errors
/// What is missing: the feature, or the driver.
pub fn cuda() -> Result<Device, String> {
    #[cfg(feature = "cuda")]
    {
        // burn itself panics in a worker thread, at the first tensor operation.
        crate::sys::has_library(&["libcuda.so.1", "libcuda.so", "nvcuda.dll"]).then(|| Device::cuda(0)).ok_or_else(
            || "--device cuda: no NVIDIA driver (libcuda.so.1) on this machine; use --device cpu".to_string(),
        )
    }
    #[cfg(not(feature = "cuda"))]
    Err("--device cuda: this build lacks the feature `cuda`; build with --features cuda".into())
}

/// The number of a CUDA device, as the driver counts; `None` for any other.
pub(crate) fn cuda_ordinal(device: &Device) -> Option<u16> {
    #[cfg(feature = "cuda")]
    {
        // More than any machine has.
        (0..64).find(|ordinal| *device == Device::cuda(usize::from(*ordinal)))
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = device;
        None
    }
}

/// The default wgpu device.
///
/// # Errors
/// What is missing: the feature, or any adapter.
pub fn wgpu() -> Result<Device, String> {
    #[cfg(feature = "wgpu")]
    {
        let instance = wgpu::Instance::default();
        let adapters = burn::tensor::try_read_sync(instance.enumerate_adapters(wgpu::Backends::PRIMARY));
        match adapters {
            Some(adapters) if !adapters.is_empty() => Ok(Device::wgpu(Default::default())),
            _ => Err("--device wgpu: no Vulkan adapter on this machine; use --device cpu".into()),
        }
    }
    #[cfg(not(feature = "wgpu"))]
    Err("--device wgpu: this build lacks the feature `wgpu`; build with --features wgpu".into())
}
