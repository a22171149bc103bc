//! The process of an emulator, from within.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::ExitCode;

use comm_core::job;

use super::READY;
use super::commands::Commands;
use super::device::Device;
use super::relay::Relay;
use super::spec::EmulatorSpec;
use super::sys;
use crate::BenchError;

#[derive(Debug, clap::Args)]
pub struct EmulateArgs {}

/// Plays the link that the first line of the standard input tells of, until the input ends.
pub fn run_emulator(_: &EmulateArgs) -> Result<ExitCode, BenchError> {
    job::die_with_parent()?;
    let mut commands = Commands::new(io::stdin().as_fd().try_clone_to_owned()?);
    serve(&mut commands, &mut io::stdout().lock())?;
    Ok(ExitCode::SUCCESS)
}

/// All of it, on any pipes.
///
/// # Errors
/// Why there is no such link, or is not any more.
pub(super) fn serve(commands: &mut Commands, answers: &mut dyn Write) -> Result<(), String> {
    let line = loop {
        if let Some(line) = commands.line()? {
            break line;
        }
        if !commands.fill()? {
            return Err("link-emulate is an internal command: other commands of this program start it".into());
        }
    };
    let spec: EmulatorSpec =
        serde_json::from_str(&line).map_err(|error| format!("the link's description cannot be decoded: {error}"))?;
    spec.check()?;
    let devices = spec.ends.iter().map(|end| Device::new(end, spec.mtu)).collect::<Result<_, _>>()?;
    let mut relay = Relay::new(&spec, devices);
    sys::hurry();
    writeln!(answers, "{READY}").and_then(|()| answers.flush()).map_err(|error| format!("answering: {error}"))?;
    relay.run(commands, answers)
}
