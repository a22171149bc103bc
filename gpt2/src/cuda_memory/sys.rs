//! The memory of tensors as NCCL takes it.

use burn::tensor::Tensor;
use comm_core::Result;
use comm_nccl::CudaBuffer;

use super::lent::location;

/// The memory of a CUDA tensor as NCCL takes it, which keeps the tensor; its values are there when this returns.
///
/// # Errors
/// `InvalidArgument` for a tensor of another type or device; `Io` where the device fails.
pub(super) fn cuda_buffer(tensor: Tensor<1>) -> Result<CudaBuffer> {
    let [count] = tensor.dims();
    let ((address, dtype), lent) = location(tensor)?;
    // SAFETY: the address is that of `count` contiguous elements of `dtype` in memory that the compute backend allocated in the primary
    // context of the tensor's device, aligned for any type, and all work on it has ended. What was lent goes into the buffer: the tensor,
    // so that nobody computes with it meanwhile, and the binding, with which the backend neither frees nor moves nor hands out that
    // memory. The caller has made sure that no other tensor shares it, and that the communicator is of the tensor's device.
    Ok(unsafe { CudaBuffer::from_raw(address, dtype, count, Box::new(lent)) })
}
