//! The programs `gpt2` and `bench` with a transport of one's own:
//!
//! ```text
//! cargo run --release -p bench --example own_transport -- train --strategy ddp --transport sockets
//! cargo run --release -p bench --example own_transport -- --transports shm,sockets,tcp
//! ```

use std::process::ExitCode;

use gpt2::memory::CountingAllocator;
use isocomm::{Entry, Medium, register};

#[path = "../../comm-core/examples/own_transport.rs"]
#[allow(dead_code, reason = "its main function is that of another example")]
mod own_transport;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// `gpt2` where the first argument is its command, else `bench`.
pub(crate) fn main() -> ExitCode {
    // Ranks are this program again.
    let sockets = Entry::new("sockets", "plain sockets, polled", Medium::Tcp, |control, options| {
        own_transport::Sockets::connect(control, options.lanes)
    });
    register(sockets).expect("no other transport has this name");
    match std::env::args().nth(1).as_deref() {
        Some("train") => gpt2::cli::main(),
        _ => bench::main(),
    }
}
