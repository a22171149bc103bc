//! What benchmarks stand on: ranks that are this executable started again, links between them, and what was measured of both.
//!
//! [`rank`] is the frame of a rank's program, [`outcome`] runs a job to its end and says how it ended, [`training`] is the job that
//! trains. [`link`] has the networks that ranks live in, [`why`] and [`machine`] watch connections and the machine meanwhile, [`record`]
//! is what a run leaves, and [`stats`] and [`plot`] are what is made of records. A program that uses it has [`Command`] among its
//! commands.
#![allow(
    missing_docs,
    reason = "a library for the programs of this folder, whose fields and methods mostly say in their names what they are"
)]

pub mod check;
pub mod debug;
pub mod environment;
pub mod flag;
pub mod folder;
pub mod formula;
pub mod interrupts;
pub mod lines;
pub mod link;
pub mod machine;
pub mod outcome;
pub mod plot;
pub mod progress;
pub mod rank;
pub mod record;
pub mod results;
pub mod samples;
pub mod signal;
pub mod stats;
pub mod sys;
pub mod text;
pub mod training;
pub mod transports;
pub mod why;

mod command;

pub use command::Command;

/// What a command fails with: one message for the user.
pub type BenchError = Box<dyn std::error::Error + Send + Sync>;
