//! Commands of the program that has this crate.

use std::process::ExitCode;

use rig::BenchError;
use rig::rank::{TaskArgs, main};

use crate::chaos::{self, ChaosArgs};
use crate::hostile::{self, HostileArgs};
use crate::ranks::rank::{self, ChaosRankArgs};
use crate::soak::{self, SoakArgs};

// No comment of its own: it would become the description of the program that has these commands.
#[derive(Debug, clap::Subcommand)]
#[allow(missing_docs)]
pub enum Command {
    Hostile(Box<HostileArgs>),
    /// One rank of a job that is attacked.
    #[command(hide = true)]
    HostileRank(TaskArgs),
    Chaos(Box<ChaosArgs>),
    #[command(hide = true)]
    ChaosRank(ChaosRankArgs),
    Soak(Box<SoakArgs>),
}

impl Command {
    /// Whether it starts jobs, and is no rank of one.
    pub fn starts_ranks(&self) -> bool {
        match self {
            Command::Hostile(_) | Command::Chaos(_) | Command::Soak(_) => true,
            Command::HostileRank(_) | Command::ChaosRank(_) => false,
        }
    }

    /// Runs it.
    ///
    /// # Errors
    /// What the user must know.
    pub fn run(&self) -> Result<ExitCode, BenchError> {
        match self {
            Command::Hostile(args) => hostile::run(args),
            Command::HostileRank(task) => main::<hostile::Task>(task),
            Command::Chaos(args) => chaos::run(args),
            Command::ChaosRank(args) => rank::run_rank(args),
            Command::Soak(args) => soak::run(args),
        }
    }
}
