//! Tensors of a CUDA device in the hands of NCCL.

mod lent;
mod sys;

use std::any::Any;

use burn::tensor::{Device, Tensor};
use comm_core::{Buffer, Error, Result};
use comm_nccl::CudaBuffer;

use crate::devices;
use crate::flat::{DeviceCollectives, unshared};
use lent::LentTensor;

/// Lends tensors of one CUDA device to a communicator on NCCL, which has to be of the same device.
#[derive(Debug)]
pub struct CudaMemory {
    device: Device,
}

impl CudaMemory {
    /// For the tensors of `device`; `None` where that is no CUDA device.
    pub fn new(device: &Device) -> Option<Self> {
        devices::cuda_ordinal(device).map(|_| CudaMemory { device: device.clone().without_autodiff() })
    }
}

impl DeviceCollectives for CudaMemory {
    fn device(&self) -> &Device {
        &self.device
    }

    fn lend(&self, tensor: Tensor<1>) -> Result<Buffer> {
        if tensor.device() != self.device {
            return Err(Error::invalid(format!("a tensor on {:?} for NCCL on {:?}", tensor.device(), self.device)));
        }
        Ok(Buffer::Device(Box::new(sys::cuda_buffer(if tensor.can_mut() { tensor } else { unshared(tensor) })?)))
    }

    fn take_back(&self, buffer: Buffer) -> Result<Tensor<1>> {
        let foreign = || Error::invalid("a buffer came back from NCCL that was never lent to it");
        let Buffer::Device(memory) = buffer else { return Err(foreign()) };
        let memory: Box<dyn Any> = memory;
        let buffer = memory.downcast::<CudaBuffer>().map_err(|_| foreign())?;
        let owner = buffer.into_owner().ok_or_else(foreign)?;
        owner.downcast::<LentTensor>().map(|lent| lent.tensor).map_err(|_| foreign())
    }
}
