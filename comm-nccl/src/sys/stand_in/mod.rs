//! NCCL and the CUDA driver, done by threads of this process in host memory: for tests of how this crate calls them, on machines
//! without a GPU. It says nothing of NCCL itself.
//!
//! It is as strict as NCCL is allowed to be: streams run beside their callers, a send waits for its receive, calls that do not match
//! never end, and an abort ends those of the one communicator only.

mod cuda;
mod nccl;

use super::{Driver, Library};

/// The stand-ins for both libraries.
pub(crate) fn libraries() -> (Library, Driver) {
    (Library::of(&nccl::TABLE, 21_400), Driver::of(&cuda::TABLE))
}
