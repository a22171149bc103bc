//! `bench`: what each strategy costs over each transport of this machine.

use std::process::ExitCode;

use gpt2::memory::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> ExitCode {
    bench::main()
}
