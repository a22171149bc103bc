//! The one place of this crate with `unsafe`: NCCL and the CUDA driver, found at run time and called through tables of functions.
//!
//! Libraries are never unloaded: both start threads of their own.

mod copies;
mod cuda;
mod find;
mod memory;
mod nccl;
#[cfg(feature = "stand-in")]
pub(crate) mod stand_in;

use std::any::Any;
use std::fmt;

use comm_core::{DType, DeviceMemory};

pub use cuda::Device;
pub use find::Library;
pub use nccl::{SHARE_VARIABLE, share_gpu};
#[cfg(feature = "stand-in")]
pub use stand_in::Behaviour;

#[cfg(feature = "stand-in")]
pub(crate) use cuda::CudaTable;
pub(crate) use cuda::{DevicePointer, Driver, Event, GRACE, Stream};
pub(crate) use find::version_text;
pub(crate) use memory::{Memory, Staging};
pub(crate) use nccl::{
    Calls, DataType, NcclTable, RawComm, RedOp, Reduction, UNIQUE_ID_BYTES, UniqueId, check_environment, may_share,
};
#[cfg(feature = "stand-in")]
pub(crate) use nccl::{Config, IN_PROGRESS, SUCCESS};

/// Declares a table of C functions and how it is filled from a library.
macro_rules! table {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $symbol:literal, ($($argument:ty),*) -> $result:ty;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        #[allow(missing_docs, reason = "the functions of these names in the library's own documentation")]
        pub(crate) struct $name { $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,)* }

        impl $name {
            /// The functions of `library`; else the name of the first one that it lacks.
            ///
            /// # Safety
            /// The library's functions of these names have these signatures.
            pub(crate) unsafe fn of(library: &libloading::Library) -> Result<Self, &'static str> {
                // SAFETY: as the caller says.
                unsafe {
                    Ok(Self { $($field: *library.get(concat!($symbol, "\0").as_bytes()).map_err(|_| $symbol)?,)* })
                }
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    };
}
pub(crate) use table;

/// Memory of a CUDA device, as an operation's buffer.
///
/// What is in it must be there before the operation is started: whoever fills it waits for its own stream first. Once the operation
/// has ended the result is there for every stream.
pub struct CudaBuffer {
    pointer: u64,
    dtype: DType,
    count: usize,
    /// What keeps the memory.
    owner: Option<Box<dyn Any + Send>>,
}

impl CudaBuffer {
    /// `count` elements of `dtype` at `pointer`, an address on the communicator's device, kept by `owner`.
    ///
    /// # Safety
    /// The memory is allocated in the primary context of the communicator's device, is aligned for `dtype`, and stays there, used by
    /// nobody else, until `owner` is dropped or [taken back](CudaBuffer::into_owner).
    pub unsafe fn from_raw(pointer: u64, dtype: DType, count: usize, owner: Box<dyn Any + Send>) -> Self {
        CudaBuffer { pointer, dtype, count, owner: Some(owner) }
    }

    pub(crate) fn owned(memory: Memory, dtype: DType, count: usize) -> Self {
        CudaBuffer { pointer: memory.pointer().address(), dtype, count, owner: Some(Box::new(memory)) }
    }

    /// Its address on the device.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// What keeps the memory, for the one who handed it in.
    pub fn into_owner(mut self) -> Option<Box<dyn Any + Send>> {
        self.owner.take()
    }

    pub(crate) fn device_pointer(&self) -> DevicePointer {
        DevicePointer::new(self.pointer)
    }
}

impl DeviceMemory for CudaBuffer {
    fn dtype(&self) -> DType {
        self.dtype
    }

    fn count(&self) -> usize {
        self.count
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }
}

impl fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaBuffer({} {} at {:#x})", self.count, self.dtype, self.pointer)
    }
}
