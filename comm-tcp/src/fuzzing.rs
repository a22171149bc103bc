//! Entry points for fuzzing (feature `fuzzing`): see [`comm_core::fuzzing`].

pub use comm_core::fuzzing::{Target, Verdict};

pub use crate::kernel_sockets::fuzzing::*;
pub use crate::raw::fuzzing::*;
pub use crate::zmq::fuzzing::*;

/// The decoders of this crate.
pub fn targets() -> Vec<Target> {
    let raw = crate::raw::fuzzing::targets();
    crate::zmq::fuzzing::targets().into_iter().chain(raw).chain(crate::kernel_sockets::fuzzing::targets()).collect()
}
