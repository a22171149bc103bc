//! Where a tensor is on its device, and what keeps it there.

use std::any::Any;
use std::io;

use burn::tensor::{DType, Tensor};
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::tensor::CubeTensor;
use comm_core::{Error, Result};
use cubecl_runtime::runtime::Runtime;

use crate::devices;

/// A tensor that was lent, and what keeps its memory in place meanwhile.
pub(super) struct LentTensor {
    pub(super) tensor: Tensor<1>,
    /// A binding: the backend moves what is only held by a tensor when it tidies its memory.
    _resource: Box<dyn Any + Send>,
}

/// Where a lent tensor is: its address, and the type of its elements.
pub(super) type Address = (u64, comm_core::DType);

/// Where the elements of a tensor are in the device's memory, after everything that computes them has ended: a host thread waits for it,
/// since NCCL's stream knows nothing of the tensors' ones. They stay there while the result lives.
pub(super) fn location(tensor: Tensor<1>) -> Result<(Address, LentTensor)> {
    let dtype = match tensor.dtype() {
        DType::F32 => comm_core::DType::F32,
        DType::BF16 => comm_core::DType::Bf16,
        DType::F16 => comm_core::DType::F16,
        other => return Err(Error::invalid(format!("tensors of {other:?} are not lent to NCCL"))),
    };
    let failed = |error: String| Error::io("lending a tensor to NCCL", io::Error::other(error));
    // All that was put off, by whichever thread of the backend runs it.
    tensor.device().sync().map_err(|error| failed(devices::reason(error)))?;
    let cube = cube(tensor.clone())?;
    if !cube.is_contiguous() {
        return Err(Error::Internal("a tensor with gaps was to be lent to NCCL".into()));
    }
    // First the resource: asking for it makes this thread's stream wait for the one on which the tensor is computed. Then that stream.
    let resource = cube.client.get_resource::<<CudaRuntime as Runtime>::Server>(cube.handle.clone());
    let resource = resource.map_err(|error| failed(devices::reason(error)))?;
    let waited = cubecl::future::block_on(cube.client.sync_buffers([&cube.handle]));
    waited.map_err(|error| failed(devices::reason(error)))?;
    Ok(((resource.resource().ptr, dtype), LentTensor { tensor, _resource: Box::new(resource) }))
}

/// The tensor as the backend has it, once all operations that were put off have been issued.
fn cube(tensor: Tensor<1>) -> Result<CubeTensor> {
    let primitive = tensor
        .try_into_primitive::<burn_cuda::Cuda>()
        .map_err(|error| Error::invalid(format!("a tensor of no CUDA device: {error:?}")))?;
    #[cfg(feature = "fusion")]
    let primitive = {
        let client = primitive.client.clone();
        client.resolve_tensor_float::<burn_cubecl::CubeBackend>(primitive)
    };
    Ok(primitive)
}
