//! Every decoder of bytes from outside on a great many changed inputs, and on the inputs that once broke one.
//!
//! `cargo test -p comm-core --test decoders` prints a table. `-- --inputs 1000000` tries a million inputs on each decoder, a word
//! selects decoders by name, and `PROPTEST_CASES` and `PROPTEST_RNG_SEED` do what they do for proptest.

use std::process::ExitCode;

use comm_core::fuzzing::{CountingAllocator, run, targets};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    run(&targets())
}
