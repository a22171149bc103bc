//! Hidden commands, by which this executable starts itself again.

use std::process::ExitCode;

use crate::BenchError;
use crate::link::{self, EmulateArgs, EnterArgs, ProbeArgs};
use crate::rank::{TaskArgs, main};
use crate::training;

// No comment of its own: it would become the description of the program that has these commands.
#[derive(Debug, clap::Subcommand)]
#[allow(missing_docs)]
pub enum Command {
    /// One rank of a job, on its way into a network namespace.
    #[command(hide = true)]
    LinkEnter(EnterArgs),
    /// One end of a measurement of a link.
    #[command(hide = true)]
    LinkProbe(ProbeArgs),
    /// One rank of a training job, or all of them as threads.
    #[command(hide = true)]
    TrainRank(TaskArgs),
    /// The process that carries the packets of an emulated link.
    #[command(hide = true)]
    LinkEmulate(EmulateArgs),
}

impl Command {
    /// Runs it.
    ///
    /// # Errors
    /// What the user must know.
    pub fn run(&self) -> Result<ExitCode, BenchError> {
        match self {
            Command::LinkEnter(args) => link::enter(args),
            Command::LinkProbe(args) => link::run_probe(args),
            Command::TrainRank(task) => main::<training::Task>(task),
            Command::LinkEmulate(args) => link::run_emulator(args),
        }
    }
}
