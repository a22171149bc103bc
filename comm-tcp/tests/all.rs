//! The tests that need no process of their own, in one program. `decoders`, `descriptors`, `idle` and `threads` count what their process has.

mod common;
mod frozen;
mod ipc;
mod strangers;
mod transport;
