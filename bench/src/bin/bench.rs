//! `bench`: what each strategy costs over each transport of this machine.

use std::process::ExitCode;

use gpt2::memory::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    bench::main()
}
