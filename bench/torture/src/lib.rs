//! Tests of robustness, as commands: what becomes of a job when its ranks fail (`chaos`, `soak`), and when strangers attack its ports
//! (`hostile`).

mod chaos;
mod command;
mod hostile;
mod ranks;
mod soak;
mod time;

pub use command::Command;
