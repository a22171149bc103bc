//! `bench links`: what links really do, beside what their profiles ask for.
//!
//! Every profile is set up, and measured from within by processes at its ends: the rate while a queue waits for it, by what the receiving
//! interface counts; delays on the idle link, by the clock that all processes of a machine share; loss, by the emulator's counters
//! and by what arrives; and what one flow over TCP and one over QUIC make of it.

mod endpoint;
mod expected;
mod flow;
mod interface;
mod judge;
mod measure;
mod options;
mod possible;
mod rank;
mod report;
mod transport;
mod udp;

use std::process::ExitCode;

use gpt2::cli::say;
use rig::BenchError;
use rig::debug;
use rig::lines::Lines;
use rig::link::{self, Profile, TestNetwork};
use rig::signal::Signals;

pub(crate) use options::LinksArgs;
pub(crate) use possible::keep_possible;
pub(crate) use rank::Task;

use measure::Bench;
use report::Row;

/// Measures the profiles; fails when one is not what it asks for.
pub(crate) fn run(args: &LinksArgs) -> Result<ExitCode, BenchError> {
    debug::refuse(args.allow_debug, debug::NO_TIMINGS)?;
    let settings = args.check()?;
    if settings.needs_namespaces() {
        link::gain_namespaces();
    }
    // Before the first link: from here on a signal ends this program in good order.
    let signals = Signals::catch()?;
    let mut file = settings.create_file()?;
    let mut rows: Vec<Row> = Vec::new();
    for profile in &settings.profiles {
        signals.check()?;
        let network = TestNetwork::new(profile, expected::ends(profile), settings.congestion.as_deref())?;
        if !settings.json {
            say(format_args!("{}", network.describe()));
        }
        let bench = Bench { network: &network, seconds: settings.seconds };
        for measure in expected::measures(profile, settings.flows) {
            signals.check()?;
            for row in bench.rows(&measure)? {
                tell(&row, settings.json, file.as_mut())?;
                rows.push(row);
            }
        }
    }
    if !settings.json {
        say(format_args!("\n{}", report::table(&rows)));
    }
    Ok(if rows.iter().any(Row::is_out) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn tell(row: &Row, json: bool, file: Option<&mut Lines>) -> Result<(), BenchError> {
    if json {
        say(serde_json::to_string(row)?);
    }
    file.map_or(Ok(()), |file| file.write(row))
}

/// The settings' own profiles, read.
fn profiles(names: &[String]) -> Result<Vec<Profile>, String> {
    if names.is_empty() {
        return Profile::names().map(Profile::find).collect();
    }
    names.iter().map(|name| Profile::find(name)).collect()
}
