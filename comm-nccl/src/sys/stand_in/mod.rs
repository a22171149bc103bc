//! NCCL and the CUDA driver, done by threads of this process in host memory: for tests of how this crate calls them, on machines
//! without a GPU. It says nothing of NCCL itself.
//!
//! It is as strict as NCCL is allowed to be: streams run beside their callers, a send waits for its receive, calls that do not match
//! never end, an abort ends those of the one communicator only and then waits for everything else on its device, and destroying a
//! communicator waits for the other ranks to do the same. Each rank has a context, as processes have, which calls need.

mod cuda;
mod nccl;

use super::{Driver, Library};

/// The stand-ins for both libraries.
pub(crate) fn libraries() -> (Library, Driver) {
    (Library::of(&nccl::TABLE, 21_800), Driver::of(&cuda::TABLE))
}
