//! Interchangeable communication: one [`Communicator`] trait, collective algorithms written once for every byte
//! [`Transport`], and the [control plane](control) that makes failures end in an error instead of a hang.
//!
//! - A [`Transport`] moves messages between ranks. This crate has [`local`] (threads of one process) and [`shm`] (processes of one
//!   machine); others live in crates of their own.
//! - [`Mesh`] turns any transport into a [`Communicator`]. Algorithm and order of reduction follow from (operation, type,
//!   size, ranks), so results are bit-identical on every transport and on every rank.
//! - [`control`] is the rendezvous, and the side channel over which ranks learn that one of them was lost. A
//!   [`Subgroup`](control::Subgroup) is one over some of the ranks, for a transport of their own.
//! - [`launch`] starts one process per rank on this machine; [`printer`] is output that never holds up a rank.
//! - [`CountingTransport`] and [`Faulty`] wrap a transport: one counts what passes, one breaks it on purpose.
//! - [`engine`] runs a call from its start to its end, once for all communicators: one over a library with collectives of its own is
//!   an [`Engine`](engine::Engine) too.
//! - [`vectorised`] runs a loop compiled for the widest vectors that the machine has: this crate's reductions, and whatever computes
//!   beside them.
//! - [`conformance`] is the suite that every transport passes.
//!
//! ```
//! use comm_core::{CommunicatorExt, ReduceOp, local};
//!
//! let sums = local::run(3, |comm| {
//!     let mut values = [1.0f32, 2.0];
//!     comm.all_reduce(&mut values, ReduceOp::Sum).unwrap();
//!     values
//! });
//! assert_eq!(sums, [[3.0, 6.0]; 3]);
//! ```

#![deny(unsafe_code)]

pub mod addresses;
mod buffer;
pub mod clock;
mod collectives;
mod communicator;
pub mod conformance;
pub mod control;
mod copy;
mod counted;
mod deadline;
pub mod descriptors;
#[cfg(feature = "tokio")]
pub mod driver;
mod dtype;
pub mod engine;
mod error;
mod faulty;
mod float16;
pub mod folder;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod handle;
mod header;
mod hex;
mod huge_pages;
pub mod interfaces;
pub mod job;
pub mod lanes;
pub mod launch;
pub mod local;
pub mod location;
mod mesh;
mod names;
pub mod null;
mod op;
mod preset;
pub mod printer;
pub mod process;
mod reduce;
pub mod shm;
mod small_file;
pub mod spinner;
pub mod splitmix;
#[allow(unsafe_code, reason = "system calls that the standard library does not offer")]
mod sys;
pub mod table;
#[doc = include_str!("../docs/threat-model.md")]
pub mod threat_model {}
mod transport;
mod waiting;

pub use buffer::{Buffer, DeviceMemory, Element, HostBuffer, View, ViewMut};
pub use collectives::CommunicatorExt;
pub use communicator::Communicator;
pub use control::plane::Control;
pub use copy::copy;
pub use counted::{Counters, CountingTransport, Exchanges, Flow, Traffic, Volume};
pub use deadline::Deadline;
pub use dtype::{DType, Factor, ReduceOp};
pub use error::{Error, Notice, Result};
pub use faulty::{Fault, FaultKind, Faulty};
pub use float16::Float16;
pub use half::{bf16, f16};
pub use handle::{Completed, Completer, Failed, Handle, Outcome, Pending};
pub use header::{HEADER_LEN, Header};
pub use hex::hex;
pub use huge_pages::prefer_huge_pages;
pub use mesh::{Mesh, MeshOptions};
pub use names::UnknownName;
pub use op::{Algorithm, BorrowedCall, Call, Counts, Mode, Op, OpKind, shard_range};
pub use preset::Preset;
pub use sys::{Kernel, vectorised};
pub use transport::{Incoming, Outgoing, Sink, Transport};
pub use waiting::Waiting;
