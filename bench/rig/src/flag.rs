//! Doubts about a run.

use serde::{Deserialize, Serialize};

/// A doubt about a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flag {
    pub kind: FlagKind,
    /// What was seen, with figures.
    pub what: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FlagKind {
    /// Bytes, messages or operations are not what the strategy's formula says.
    OffTheFormula,
    /// Other processes, or other virtual machines, took processor time.
    MachineBusy,
    /// The processor ran faster or slower after the run than before it.
    ClockMoved,
    /// The emulator, not the link that it plays, was what held packets back.
    EmulatorBehind,
    /// More ranks than processor cores.
    SharedCores,
    /// Steps never settled.
    NoSteadyState,
}
