//! Devices that compute: chosen by name, and probed before they are used.
//!
//! The backends make their devices at the first tensor operation, in a thread of their own, and panic there where a driver, a
//! compiler or an adapter is missing. So whatever they will look for is looked for here first, in the same places, and what is not
//! there is an ordinary error. [`Report`] lists what a machine has.

#[cfg(any(feature = "cuda", test))]
mod cuda;
mod failure;
#[cfg(any(feature = "kernel-cache", test))]
mod kernel_cache;
mod placement;
mod products;
mod report;
#[cfg(feature = "wgpu")]
mod wgpu;

use std::fmt;
use std::str::FromStr;

use burn::tensor::Device;

pub(crate) use failure::reason;
pub(crate) use placement::Placement;
pub use products::{MatrixKernels, MatrixProducts};
pub use report::{Cpu, Cuda, CudaHeaders, CudaInfo, Features, Found, KernelCache, Library, Report, WgpuInfo};

/// A device by its name: `cpu`, `cuda`, `cuda:N`, `wgpu` or `wgpu:N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The processor.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by the number that the driver gives it in this process. Without a number the ranks of a machine take its GPUs in turn,
    /// as far as their launcher says which rank is which; else it is the first one.
    Cuda(Option<usize>),
    /// A wgpu adapter, by its place in the list of [`Report`]; the first one unless a number is given.
    Wgpu(Option<usize>),
}

impl DeviceChoice {
    /// The device, ready for tensors. Settles where compiled kernels are kept, if this is the first device but the processor.
    ///
    /// # Errors
    /// What is missing on this machine or in this build, and what to try.
    pub fn open(self) -> Result<CheckedDevice, DeviceError> {
        self.probe().map_err(|problem| DeviceError { choice: self, problem })
    }

    fn probe(self) -> Result<CheckedDevice, Problem> {
        match self {
            DeviceChoice::Cpu => Ok(CheckedDevice { device: Device::flex(), largest_tensor: None }),
            #[cfg(feature = "cuda")]
            DeviceChoice::Cuda(number) => {
                let (ordinal, (major, minor)) = cuda::probe(number)?;
                kernel_cache::settle(&format!("nvrtc-{major}.{minor}"));
                Ok(CheckedDevice { device: Device::cuda(ordinal), largest_tensor: None })
            }
            #[cfg(feature = "wgpu")]
            DeviceChoice::Wgpu(number) => {
                let adapter = wgpu::choose(number)?;
                adapter.probe()?;
                #[cfg(feature = "kernel-cache")]
                kernel_cache::settle("wgpu");
                Ok(CheckedDevice { device: adapter.device(), largest_tensor: Some(adapter.largest_tensor()) })
            }
            #[allow(unreachable_patterns, reason = "a build with every feature")]
            lacking => {
                let Problem { why, remedy } = lacks_feature(lacking.backend());
                Err(Problem::new(why, format!("{remedy}, or use --device cpu")))
            }
        }
    }

    /// The name without a number: also that of the build's feature.
    fn backend(self) -> &'static str {
        match self {
            DeviceChoice::Cpu => "cpu",
            DeviceChoice::Cuda(_) => "cuda",
            DeviceChoice::Wgpu(_) => "wgpu",
        }
    }
}

/// A device that was looked at and found fit.
#[derive(Clone, Debug)]
pub struct CheckedDevice {
    /// The device.
    pub device: Device,
    /// Bytes that one tensor may have at most, where the device sets a limit by itself.
    pub largest_tensor: Option<u64>,
}

impl FromStr for DeviceChoice {
    type Err = UnknownDevice;

    fn from_str(name: &str) -> Result<Self, UnknownDevice> {
        let unknown = || UnknownDevice { name: name.to_string() };
        let (backend, number) = match name.split_once(':') {
            // `usize` alone would take a sign, too.
            Some((backend, digits)) if digits.bytes().all(|digit| digit.is_ascii_digit()) => {
                (backend, Some(digits.parse().map_err(|_| unknown())?))
            }
            Some(_) => return Err(unknown()),
            None => (name, None),
        };
        match (backend, number) {
            ("cpu", None) => Ok(DeviceChoice::Cpu),
            ("cuda", number) => Ok(DeviceChoice::Cuda(number)),
            ("wgpu", number) => Ok(DeviceChoice::Wgpu(number)),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Cuda(Some(number)) | DeviceChoice::Wgpu(Some(number)) => {
                write!(f, "{}:{number}", self.backend())
            }
            _ => f.write_str(self.backend()),
        }
    }
}

/// A name that is no device's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown device '{name}', expected one of cpu, cuda, cuda:N, wgpu, wgpu:N; `gpt2 devices` lists the numbers N")]
pub struct UnknownDevice {
    name: String,
}

/// Why a device cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--device {choice}: {problem}")]
pub struct DeviceError {
    choice: DeviceChoice,
    #[source]
    problem: Problem,
}

/// Something missing or wrong, and what may help.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, thiserror::Error)]
#[error("{why}; {remedy}")]
pub struct Problem {
    /// What is the matter, with what was searched.
    pub why: String,
    /// What to try.
    pub remedy: String,
}

impl Problem {
    fn new(why: impl Into<String>, remedy: impl Into<String>) -> Self {
        Problem { why: why.into(), remedy: remedy.into() }
    }
}

fn lacks_feature(feature: &str) -> Problem {
    Problem::new(format!("this build lacks the feature `{feature}`"), format!("build with --features {feature}"))
}

/// No device has the number that was asked for.
#[cfg(any(feature = "cuda", feature = "wgpu", test))]
fn out_of_range(number: usize, count: usize, kind: &str) -> Problem {
    let there = match count {
        1 => format!("this machine has 1 {kind}, number 0"),
        count => format!("this machine has {count} {kind}s, numbers 0 to {}", count.saturating_sub(1)),
    };
    Problem::new(format!("no {kind} has the number {number}: {there}"), "`gpt2 devices` lists them")
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

/// The kind of a device, as in [`DeviceChoice`] without a number. Arithmetic differs between kinds.
pub(crate) fn kind(device: &Device) -> &'static str {
    match cuda_ordinal(device) {
        Some(_) => "cuda",
        None if *device == Device::flex() => "cpu",
        None => "wgpu",
    }
}

/// Whether the processor itself plays the device, through a software driver: correct, but slow.
pub(crate) fn is_software(device: &Device) -> bool {
    #[cfg(feature = "wgpu")]
    {
        *device == Device::wgpu(burn::tensor::DeviceKind::Cpu)
    }
    #[cfg(not(feature = "wgpu"))]
    {
        let _ = device;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_are_read_and_written() {
        let cases = [
            ("cpu", DeviceChoice::Cpu),
            ("cuda", DeviceChoice::Cuda(None)),
            ("cuda:0", DeviceChoice::Cuda(Some(0))),
            ("cuda:17", DeviceChoice::Cuda(Some(17))),
            ("wgpu", DeviceChoice::Wgpu(None)),
            ("wgpu:3", DeviceChoice::Wgpu(Some(3))),
        ];
        for (name, choice) in cases {
            assert_eq!(name.parse(), Ok(choice));
            assert_eq!(choice.to_string(), name);
        }
    }

    #[test]
    fn other_names_are_refused_with_the_names_that_there_are() {
        for name in [
            "",
            "gpu",
            "CUDA",
            "cpu:0",
            "cuda:",
            "cuda:-1",
            "cuda:+1",
            "cuda:1:2",
            "wgpu:x",
            "cuda:99999999999999999999",
        ] {
            let said = name.parse::<DeviceChoice>().unwrap_err().to_string();
            assert!(said.contains(&format!("'{name}'")) && said.contains("cuda:N"), "{said}");
        }
    }

    #[test]
    fn a_number_out_of_range_says_how_many_there_are() {
        assert!(
            out_of_range(4, 1, "CUDA device")
                .to_string()
                .contains("number 4: this machine has 1 CUDA device, number 0")
        );
        assert!(out_of_range(4, 3, "adapter").to_string().contains("this machine has 3 adapters, numbers 0 to 2"));
    }

    #[test]
    fn the_processor_is_always_there() {
        let opened = DeviceChoice::Cpu.open().unwrap();
        assert_eq!((opened.device, opened.largest_tensor), (Device::flex(), None));
        assert!(!is_software(&Device::flex()));
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn a_build_without_the_feature_says_so() {
        let said = DeviceChoice::Cuda(Some(1)).open().unwrap_err().to_string();
        assert!(said.starts_with("--device cuda:1: this build lacks the feature `cuda`; build with"), "{said}");
    }
}
