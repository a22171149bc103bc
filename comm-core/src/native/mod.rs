//! Parts for communicators that bring their own collectives instead of moving bytes for a [`Mesh`](crate::Mesh): what they check,
//! how they number and name their operations, in what order these run, and what they tell of them.
//!
//! [`Mesh`](crate::Mesh) is made of the same parts, so that errors and stall reports of all communicators read alike.

mod backend;
mod group;
mod lane;
mod underway;
mod watch;

pub use crate::communicator::run_copied;
pub use crate::op::{Elements, Extents, OwnCopy, Shards, check};
pub use backend::{Backend, Owner, Shared};
pub(crate) use group::header_kind;
pub use group::{Asked, Group, Order, negotiate, verdict};
pub use lane::{Due, Job, Lane, Turn};
pub use underway::Started;
pub use watch::{Note, Watch, name, pair};
