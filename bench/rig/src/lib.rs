//! The library of the benchmarks: jobs whose ranks are this executable started again, links between them, and measurements of both.
//!
//! [`rank`] is the program of a rank, [`launched`] are ranks that a launcher has started, [`outcome`] runs a job to its end and reports how it ended, [`training`] is the job that
//! trains. [`link`] makes the networks that ranks run in, [`why`] and [`machine`] monitor connections and the machine, [`record`]
//! is the result of a run, and [`stats`] and [`plot`] evaluate records. A program that uses it has [`Command`] among its
//! commands.
#![allow(
    missing_docs,
    reason = "a library for the programs of this folder, most of whose fields and methods need no description"
)]

pub mod check;
pub mod debug;
pub mod environment;
pub mod flag;
pub mod folder;
pub mod formula;
pub mod interrupts;
pub mod launched;
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
