//! `gpt2`: trains GPT-2 with any strategy over any transport, and samples from what it trained.

use std::process::ExitCode;

fn main() -> ExitCode {
    gpt2::cli::main()
}
