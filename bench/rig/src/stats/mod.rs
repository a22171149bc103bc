//! What runs of a cell say, and how sure one can be of it.
//!
//! The unit is the run, one a round. Steps inside a run are many but not independent: they share the run's luck
//! (placement in memory, state of the machine), so that a thousand of them say little about the next run. Hence:
//! - steps before the run settled are cut off where the series itself says so ([`warm_up()`]);
//! - a run counts with the median of its steps, which a few slow ones cannot move;
//! - intervals are Student's, over runs, by far the most honest at 3 to 10 of them: resampling so few runs gives
//!   intervals that are too narrow. From 7 runs on, one in seven at each end is trimmed (Tukey and McLaughlin), so that
//!   one run that something disturbed does not decide. The variance between runs is never taken for less than what a
//!   bootstrap of steps, in blocks, shows inside them;
//! - cells of one sweep are compared by differences in the same round, which takes out what drifts between rounds;
//!   cells of two sweeps by Welch's test.

mod beta;
mod bootstrap;
mod compare;
mod interval;
mod median;
mod metric;
#[cfg(test)]
mod simulate;
mod summary;
mod warm_up;

pub use compare::{Change, Comparison, Verdict, paired, unpaired};
pub use interval::{Interval, RunValue, interval};
pub use median::{Ratio, difference, median, percentile};
pub use metric::{Metric, Over};
#[cfg(any(test, feature = "made-up"))]
pub use summary::made_up;
pub use summary::{
    CellRuns, ExcludedRun, ExclusionReason, Keep, Summary, cell_runs, compare_paired, compare_unpaired, step_time,
    summary,
};
pub use warm_up::warm_up;

/// The level of intervals by default.
pub const LEVEL: f64 = 0.95;
