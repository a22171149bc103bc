//! What comes over raw TCP, for fuzzing.

use comm_core::fuzzing::Target;

pub use super::connection::fuzzing::*;
pub use super::prelude::fuzzing::*;

pub(crate) fn targets() -> Vec<Target> {
    super::prelude::fuzzing::targets().into_iter().chain(super::connection::fuzzing::targets()).collect()
}
