//! NCCL and the CUDA driver, done by threads of this process in host memory: for tests of how this crate calls them, on machines
//! without a GPU. It says nothing of NCCL itself.
//!
//! It is as strict as NCCL is allowed to be: streams run beside their callers, a send waits for its receive, calls that do not match
//! never end, an abort ends those of the one communicator only and then waits for everything else on its device, and destroying a
//! communicator waits for the other ranks to do the same. Each rank has a context, as processes have, which calls need.

mod comm_group;
mod cuda;
mod nccl;
mod reduce;
mod stream;

use std::ffi::c_void;

use super::{Driver, Library};

/// What a rank's stand-in for a device does, so that a test sees what this crate makes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// What it is told, by threads beside its caller.
    Works,
    /// The same in the thread of its caller, before a call returns: for times of this crate's own part, in a job of one rank. Nothing
    /// may be under way when this begins.
    AtOnce,
    /// Nothing that it is handed from now on ends, not even by an abort.
    Hangs,
    /// It is lost, as after a kernel's illegal access: what ran there has ended, and calls fail with that error.
    Lost,
}

/// The stand-ins for both libraries.
pub(crate) fn libraries() -> (Library, Driver) {
    (Library::of(&nccl::TABLE, 21_800), Driver::of(&cuda::TABLE))
}

/// Has the device of a context behave so from now on. Of a real device's context nothing is known here.
pub(crate) fn behave(context: *mut c_void, behaviour: Behaviour) {
    if let Some(context) = stream::Context::of(context) {
        context.behave(behaviour);
    }
}

/// Whether the device of a context has something to do.
pub(crate) fn is_busy(context: *mut c_void) -> bool {
    stream::Context::of(context).is_some_and(stream::Context::is_busy)
}
