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
    /// One rank, or all ranks as threads, of one cell.
    #[command(hide = true)]
    Worker(TaskArgs),
    /// One rank of a job, on its way into a network namespace.
    #[command(hide = true)]
    LinkEnter(EnterArgs),
    /// One end of a measurement of a link.
    #[command(hide = true)]
    LinkProbe(ProbeArgs),
    /// One rank of a job on a link or on loopback.
    #[command(hide = true)]
    LinkRank(TaskArgs),
    /// One rank, or all ranks as threads, of a run of a sweep.
    #[command(hide = true)]
    SweepRank(TaskArgs),
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
            Command::Worker(task) => main::<training::worker::Task>(task),
            Command::LinkEnter(args) => link::enter(args),
            Command::LinkProbe(args) => link::run_probe(args),
            Command::LinkRank(task) => main::<training::pair::Task>(task),
            Command::SweepRank(task) => main::<training::rank::Task>(task),
            Command::LinkEmulate(args) => link::run_emulator(args),
        }
    }
}
