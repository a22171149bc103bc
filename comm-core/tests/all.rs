//! The tests that need no process of their own, in one program. `decoders` and `acceptor` count what their process has; `launcher` and `subgroups`
//! start themselves as ranks.

mod common;
mod control;
mod decorators;
mod frozen;
mod lanes;
mod limits;
mod networks;
mod rendezvous;
mod safety;
