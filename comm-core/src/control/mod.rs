//! The control plane: how ranks find each other, agree, and learn that one of them is gone.

mod acceptor;
mod auth;
mod event_loop;
mod gather;
mod missing;
mod options;
pub(crate) mod plane;
mod rendezvous;
mod send_half;
mod shared;
mod stall;
mod state;
mod subgroup;
mod tcp;
mod wire;

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

pub use gather::ControlExt;
pub(crate) use gather::RankResult;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use gather::{decode, encode};
pub use missing::{MissingRanksHook, MissingRanksReport};
pub use options::TcpOptions;
pub(crate) use plane::Control;
pub(crate) use stall::abridged;
pub use stall::{Activity, LaneActivity, StallReport};
pub use subgroup::Subgroup;
pub use tcp::TcpControl;

/// Most bytes of one rank's message in [`Control::all_gather`].
pub const MAX_BLOB: usize = 1 << 20;

/// Calls a caller's hook. Its panic, which has been reported, must not end the thread that watches over the job.
pub(crate) fn guarded(hook: impl FnOnce()) {
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(hook));
}
