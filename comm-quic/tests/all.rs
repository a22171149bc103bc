//! The tests that need no process of their own, in one program. `decoders` counts what its process allocates.

mod common;
mod exchange;
mod failures;
mod frozen;
mod monitor;
