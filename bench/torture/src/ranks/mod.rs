//! Ranks that do what they are told: they join jobs, run collectives whose results are known, and play faults on themselves. Chaos and
//! soak are made of them.

pub(crate) mod fault;
mod inflict;
pub(crate) mod judge;
mod mix;
pub(crate) mod play;
pub(crate) mod process;
pub(crate) mod protocol;
pub(crate) mod rank;
mod shared;
mod stream;
pub(crate) mod sys;
pub(crate) mod when;
pub(crate) mod work;
