//! `gpt2 devices`.

use clap::Args;

use super::{CliError, say};
use crate::devices::Report;

#[derive(Clone, Copy, Debug, Args)]
pub(super) struct DevicesArgs {
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// Lists what there is; nothing that is missing is a failure.
pub(super) fn run(args: DevicesArgs) -> Result<(), CliError> {
    let report = Report::new();
    if args.json {
        say(serde_json::to_string_pretty(&report)?);
    } else {
        say(report.to_string().trim_end());
    }
    Ok(())
}
