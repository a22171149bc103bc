//! The command line of `bench links`, checked.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use rig::BenchError;
use rig::check::between;
use rig::lines::Lines;
use rig::link::{Carrier, Profile};

/// Measures links, and compares them with what their profiles ask for.
///
/// Each profile is set up between network namespaces (as root, or in a user namespace) and measured inside them. A rate may be off by 3 %, a delay by
/// 3 % or 100 µs; a loss must lie in the 99 % range for the number of packets sent. The exit code is 1 if one does not.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LinksArgs {
    /// Names of profiles, or paths of profile files, which end with .toml. [default: all profiles that come with this program]
    profiles: Vec<String>,
    /// Seconds that one measurement takes.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// Leave out the throughput of TCP and QUIC over the links.
    #[arg(long)]
    no_flows: bool,
    /// TCP congestion control on the links, by its kernel name. [default: the kernel's]
    #[arg(long)]
    congestion: Option<String>,
    /// Folder for links.jsonl.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Print a line of JSON for each measurement instead of a table.
    #[arg(long)]
    json: bool,
    /// Run although this is a debug build.
    #[arg(long)]
    pub(super) allow_debug: bool,
}

/// What to measure.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    pub(super) profiles: Vec<Profile>,
    pub(super) seconds: Duration,
    pub(super) flows: bool,
    pub(super) congestion: Option<String>,
    pub(super) out: Option<PathBuf>,
    pub(super) json: bool,
}

/// A shorter measurement has too few samples, a longer one says nothing more.
const SECONDS: std::ops::RangeInclusive<f64> = 0.5..=60.0;

impl LinksArgs {
    /// # Errors
    /// The first argument that cannot be, for the user.
    pub(super) fn check(&self) -> Result<Settings, BenchError> {
        between("--seconds", &self.seconds, SECONDS)?;
        Ok(Settings {
            profiles: super::profiles(&self.profiles)?,
            seconds: Duration::from_secs_f64(self.seconds),
            flows: !self.no_flows,
            congestion: self.congestion.clone(),
            out: self.out.clone(),
            json: self.json,
        })
    }
}

impl Settings {
    pub(super) fn needs_namespaces(&self) -> bool {
        self.profiles.iter().any(|profile| profile.carrier != Carrier::None)
    }

    /// The file of results, where one is asked for.
    pub(super) fn create_file(&self) -> Result<Option<Lines>, BenchError> {
        let Some(out) = &self.out else { return Ok(None) };
        fs::create_dir_all(out).map_err(|error| {
            format!("--out {}: cannot write there: {error}; give a folder that can be written", out.display())
        })?;
        Lines::create(&out.join("links.jsonl")).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: LinksArgs,
    }

    fn check(arguments: &[&str]) -> Result<Settings, String> {
        let program = Program::try_parse_from([&["bench"], arguments].concat()).map_err(|error| error.to_string())?;
        program.args.check().map_err(|error| error.to_string())
    }

    #[test]
    fn without_names_all_are_measured() {
        let settings = check(&[]).unwrap();
        assert_eq!(settings.profiles.len(), Profile::names().count());
        assert!(settings.needs_namespaces() && !check(&["loopback"]).unwrap().needs_namespaces());
        assert_eq!(check(&["wan", "home", "--seconds", "1"]).unwrap().profiles.len(), 2);
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for (arguments, part) in
            [(&["pigeon"][..], "pigeon"), (&["--seconds", "0.1"], "--seconds 0.1"), (&["--seconds", "nan"], "NaN")]
        {
            let why = check(arguments).unwrap_err();
            assert!(why.contains(part), "{arguments:?}: {why}");
        }
    }
}
