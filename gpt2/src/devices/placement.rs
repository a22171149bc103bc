//! Where tensors of a device live.

use burn::tensor::Device;

/// Where tensors of a device live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// In this process's memory, handed over without a copy.
    Host,
    /// Elsewhere.
    Device,
}

impl Placement {
    pub(crate) fn of(device: &Device) -> Self {
        if *device == Device::flex() { Self::Host } else { Self::Device }
    }
}
