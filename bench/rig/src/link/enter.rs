//! How a rank gets into its namespace: by becoming `ip netns exec`, which becomes the rank's program.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use comm_core::job::{self, Job};

use super::place::end_of;
use crate::BenchError;

#[derive(Debug, clap::Args)]
pub struct EnterArgs {
    /// The namespaces of the ends, in order.
    #[arg(required = true)]
    namespaces: Vec<String>,
    /// The program and its arguments.
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

/// Replaces this process, one rank of a job, by a program in the rank's namespace. It stays the same process, so it ends with its
/// launcher. (`ip` also shows it a `/sys` of that namespace, where transports look for their interface.)
pub fn enter(args: &EnterArgs) -> Result<ExitCode, BenchError> {
    job::die_with_parent()?;
    let job =
        Job::from_env()?.ok_or("link-enter is an internal command: a launcher starts it as one rank of its job")?;
    let end = end_of(job.rank, job.world_size, args.namespaces.len());
    let namespace = args.namespaces.get(end).ok_or("there are more ranks than ends")?;
    let error = Command::new("ip").args(["netns", "exec", namespace]).args(&args.command).exec();
    Err(format!("starting `ip netns exec {namespace}`: {error}").into())
}
