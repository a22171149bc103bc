//! `gpt2`: trains GPT-2 with any strategy over any transport, and samples from what it trained.

use std::process::ExitCode;

use gpt2::memory::{self, Category, CountingAllocator};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    memory::set_thread_default(Category::Other);
    gpt2::cli::main()
}
