//! Files of traces, on a great many changed inputs: see `comm-core/tests/decoders.rs`.

use std::process::ExitCode;

use comm_core::fuzzing::{CountingAllocator, run};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    run(&predict::fuzzing::targets())
}
