//! Entry points for fuzzing: each runs one decoder of bytes from outside on any bytes and checks what must hold (feature
//! `fuzzing`). Fuzz targets and property tests call the same ones.
//!
//! A [`Target`] is such an entry point with valid inputs to begin from; [`run`] tries each on a great many changed ones and prints
//! a table. Other crates have targets of their own, and run them here.
//!
//! What every target checks: no panic; what is accepted survives encoding and decoding, byte for byte where a value has only one
//! encoding; a stream gives the same however it is cut. [`run`] checks in addition that memory stays in proportion to the input.

pub(crate) mod header;
mod mutation;
mod runner;
pub(crate) mod stream;
#[allow(unsafe_code, reason = "an allocator that counts")]
mod sys;
pub(crate) mod target;
mod texts;

pub use crate::conformance::fuzzing::*;
pub use crate::control::fuzzing::*;
pub use crate::shm::fuzzing::*;
pub use header::{header, some_header};
pub use runner::{check, run};
pub use stream::{Kept, cuttings};
pub use sys::{CountingAllocator, peak_of};
pub use target::{Target, Verdict};
pub use texts::*;

/// The decoders of this crate.
pub fn targets() -> Vec<Target> {
    header::targets()
        .into_iter()
        .chain(crate::control::fuzzing::targets())
        .chain(crate::shm::fuzzing::targets())
        .chain(crate::conformance::fuzzing::targets())
        .chain(texts::targets())
        .collect()
}
