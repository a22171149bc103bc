//! `bench compute`: how fast one device computes, the whole training step and each layer of it, beside PyTorch.
//!
//! Steps are cells of a plan, trained by the strategy `single` in processes of their own, in turns with PyTorch's. Layers are then run by
//! themselves, forward and backward, in this process, by each kind of kernels in turns, and with PyTorch's in another. All are held against the same two peaks: the theoretical
//! one, and the best that was measured before and after the steps.

mod layers;
mod options;
mod peaks;
mod report;

use std::process::ExitCode;

use gpt2::cli::say;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::folder::results_folder;
use rig::lines::Lines;
use rig::outcome;
use rig::record::{Axis, Cell, Trainer};
use rig::signal::Signals;

pub(crate) use options::ComputeArgs;

use crate::pytorch::Torch;
use crate::sweep::{Job, source};
use layers::Layers;
use peaks::Peaks;
use report::StepRow;

/// Runs the benchmark; fails when something that should have run did not.
pub(crate) fn run(args: &ComputeArgs) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    let mut draft = args.check()?;
    let signals = Signals::catch()?;
    let out = results_folder(args.out.clone(), "compute")?;
    let mut file = Lines::create(&out.join("compute.jsonl"))?;
    let torch = match args.python() {
        None => Err("not asked for".into()),
        Some(python) => outcome::settled(Torch::find(python))?,
    };
    if torch.is_err() {
        draft.retain(Axis::Program, |program| program == "ours");
    }
    let plan = draft.plan()?;
    let text = source(&plan, None, &out)?;
    let mut peaks = Peaks::measure(args.threads())?;
    say(format_args!("machine: {}", Environment::read().one_line()));
    match &torch {
        Ok(torch) => say(format_args!("peer: PyTorch {}", torch.version)),
        Err(why) if args.python().is_some() => {
            say(format_args!(
                "peer: PyTorch is left out: {why}; name a Python interpreter that has it with --peer-python"
            ));
        }
        Err(_) => {}
    }
    say(format_args!(
        "{} steps in each run, of which the first two are not counted; {} rounds",
        args.steps(),
        plan.rounds
    ));

    let job =
        Job { draft: &draft, out: Some(&out), text: text.clone(), signals: signals.clone(), torch: torch.clone() };
    let records = job.records()?;
    peaks.measure_again()?;
    say(peaks.introduction());
    let of = |record| StepRow::of(record, &peaks, text.vocabulary);
    let steps: Vec<StepRow> = records.iter().map(of).collect::<Result<_, _>>()?;
    steps.iter().try_for_each(|row| file.write(row))?;
    say(format_args!("\n{}", report::steps(&steps)));
    let mut sound = steps.iter().all(StepRow::is_sound);

    if args.has_layers() {
        let (torch, timeout) = (torch.as_ref().ok().filter(|_| args.has_eager_peer()), plan.timeout);
        let layers = Layers { text: &text, peaks: &peaks, torch, signals: &signals, timeout };
        for cells in by_kernels(&plan.cells) {
            let (rows, complaint) = layers.measure(&cells, plan.rounds, &records)?;
            rows.iter().try_for_each(|row| file.write(row))?;
            say(format_args!("\n{}", report::layers(&rows)));
            if let Some(why) = complaint {
                say(format_args!("layers by PyTorch: failed: {why}"));
                sound = false;
            }
        }
    }
    say(format_args!("\n{}", report::LEGEND));
    say(format_args!("rows: {}", out.join("compute.jsonl").display()));
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Our cells, those that differ in their kernels alone together.
fn by_kernels(cells: &[Cell]) -> Vec<Vec<&Cell>> {
    let mut cases: Vec<Vec<&Cell>> = Vec::new();
    for cell in cells.iter().filter(|cell| cell.program == Trainer::Ours) {
        let differs = |other: &Cell| Cell { kernels: cell.kernels.clone(), ..other.clone() } != *cell;
        match cases.iter_mut().find(|case| !differs(case[0])) {
            Some(case) => case.push(cell),
            None => cases.push(vec![cell]),
        }
    }
    cases
}
