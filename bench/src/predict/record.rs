//! `bench record`: what the ranks do in a step, as Chakra execution traces, from a real run or from ranks that are alone.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use gpt2::cli::say;
use gpt2::strategy::StrategyKind;
use isocomm::{Rung, TransportOptions};
use predict::chakra;
use predict::trace::Trace;
use rig::BenchError;
use rig::debug;
use rig::folder::results_folder;
use rig::link::{Profile, TestNetwork, gain_namespaces};
use rig::record::{Cell, LOOPBACK};
use rig::signal::Signals;
use rig::training::{TextSource, Training, config};

use super::cells::{CellOptions, Recorder, file_names, name};
use super::steps;

/// Records what the ranks do in a step, and writes it as Chakra execution traces: one trace for each cell, with the files PREFIX.RANK.et.
///
/// A run over a transport is recorded with all its ranks together. Over `null`, which sends nothing, ranks are recorded one after another, each
/// alone: so a small machine can record many ranks, and a computation takes as long as it does when nothing else runs.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct RecordArgs {
    /// A plan whose cells are recorded, instead of those of the options: a TOML file, or the name of a plan that comes with this program.
    plan: Option<PathBuf>,
    #[command(flatten)]
    cells: CellOptions,
    /// Folder for the traces. [default: a new folder under bench-results/]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Seconds that a run may take.
    #[arg(long, default_value_t = 120)]
    cell_timeout: u64,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

pub(crate) fn run(args: &RecordArgs) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    let cells = args.cells.cells(args.plan.as_deref(), &[StrategyKind::Ddp])?;
    if cells.iter().any(|cell| cell.link != LOOPBACK) {
        gain_namespaces();
    }
    let signals = Signals::catch()?;
    let out = results_folder(args.out.clone(), "record")?;
    let prefixes = file_names(&cells);
    refuse_taken(&out, &prefixes)?;
    let text = args.cells.text()?;
    let mut recorder = Recorder::new(text.clone());
    let timeout = Duration::from_secs(args.cell_timeout.max(1));
    for (cell, prefix) in cells.iter().zip(&prefixes) {
        signals.check()?;
        let trace = match cell.transport.parse::<Rung>()? {
            rung if rung.is_timing_only() => recorder.trace(cell)?,
            rung => of_run(cell, rung, &text, timeout)?,
        };
        write(&trace, &out, prefix)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether each trace has files of its own, and none of an earlier run.
fn refuse_taken(out: &Path, prefixes: &[String]) -> Result<(), BenchError> {
    for (index, prefix) in prefixes.iter().enumerate() {
        let file = out.join(format!("{prefix}.0.et"));
        if file.exists() {
            return Err(format!("{} holds an earlier trace; give another folder with --out", file.display()).into());
        }
        if prefixes[..index].contains(prefix) {
            return Err(format!(
                "two cells would be written to the same file, {}; record them separately",
                file.display()
            )
            .into());
        }
    }
    Ok(())
}

fn write(trace: &Trace, out: &Path, prefix: &str) -> Result<(), BenchError> {
    chakra::write(trace, out, prefix)?;
    let operations =
        trace.ranks.first().map_or(0, |rank| rank.nodes.iter().filter(|node| node.work.communicates()).count());
    let compute = trace.ranks.iter().map(|rank| rank.compute_ns()).max().unwrap_or(0) as f64 / 1e6;
    let steps = if trace.steps == 1 { "a step".into() } else { format!("{} steps", trace.steps) };
    say(format_args!(
        "{}.*.et: {operations} operations and {compute:.1} ms of computation in {steps}",
        out.join(prefix).display()
    ));
    Ok(())
}

/// The trace of a real run of a cell.
///
/// # Errors
/// Why it did not run.
pub(super) fn of_run(cell: &Cell, rung: Rung, text: &TextSource, timeout: Duration) -> Result<Trace, BenchError> {
    let kind: StrategyKind = cell.strategy.parse()?;
    let profile = Profile::find(&cell.link)?;
    let network = TestNetwork::new(&profile, cell.ends(), None)?;
    let mut config = config(cell, text.vocabulary)?;
    config.steps = cell.steps.max(2 + 3 * cell.period() as u64);
    let training = Training {
        rung: Some(rung),
        options: TransportOptions {
            lanes: kind.lanes(cell.ranks, cell.lanes),
            timeout: timeout / 2,
            ..TransportOptions::default()
        },
        source: text.source.clone(),
        tokenizer: text.tokenizer,
        watched: true,
        ..Training::new(config, None, cell.ranks, cell.threads, timeout)
    };
    let ranks: Vec<_> = training.run(&network)?.into_iter().flat_map(|process| process.steps).collect();
    let groups = steps::groups(&ranks);
    let of_rank =
        |steps: &Vec<_>| Ok::<_, String>(steps::with_groups(steps::rank_trace(steps, cell.period())?, steps, &groups));
    let ranks = ranks.iter().map(of_rank).collect::<Result<Vec<_>, _>>()?;
    let trace = Trace { name: name(cell), steps: cell.period() as u64, ranks };
    trace.check().map_err(|why| format!("the trace of {}: {why}", name(cell)))?;
    Ok(trace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_trace_is_written_over_another() {
        let folder = tempfile::tempdir().unwrap();
        let names = |names: &[&str]| names.iter().map(|name| (*name).into()).collect::<Vec<String>>();
        assert!(refuse_taken(folder.path(), &names(&["a", "b"])).is_ok());
        let twice = refuse_taken(folder.path(), &names(&["a", "a"])).unwrap_err().to_string();
        assert!(twice.contains("two cells"), "{twice}");
        std::fs::write(folder.path().join("b.0.et"), "").unwrap();
        let taken = refuse_taken(folder.path(), &names(&["a", "b"])).unwrap_err().to_string();
        assert!(taken.contains("holds an earlier trace"), "{taken}");
    }
}
