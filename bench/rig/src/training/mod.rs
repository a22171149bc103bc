//! Jobs that train: one task, one program of a rank, one way to run it.
//!
//! [`Training`] is a job by its configuration; [`CellRun`] makes one of a cell and a [`Record`](crate::record::Record) of what it leaves.

mod cell;
mod figures;
mod job;
mod launched;
mod schedule;
mod skew;
mod task;
mod text;
mod trace;

pub use cell::{CellOutcome, CellRun, config, local_options, model, status};
pub use figures::{Figures, outcome, sound};
pub use job::{FOLDER, Training};
pub use launched::LaunchedRanks;
pub use schedule::schedule;
pub use skew::Step;
pub use task::{RankOutput, Task};
pub use text::TextSource;
