//! Tests of robustness, as commands: jobs whose ranks fail (`chaos`, `soak`), and jobs whose ports are attacked by strangers (`hostile`).

mod chaos;
mod command;
mod hostile;
mod ranks;
mod soak;
mod time;

pub use command::Command;
