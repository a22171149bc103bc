//! `bench memory`: what a rank of each strategy takes, by what it is for, beside what it should.
//!
//! Each run trains a few steps in processes over shared memory; the counting allocator gives every rank's peak of each category from the
//! first step to the last. [`theory`] says what parameters, gradients and optimizer may take. Plain data parallelism is the control: it
//! has to exceed the bounds of those that shard. Recomputation and 16-bit computation are each measured beside the run without.

mod case;
mod options;
mod report;
mod theory;

use std::process::ExitCode;

use gpt2::cli::say;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::lines::Lines;
use rig::signal::Signals;

pub(crate) use options::MemoryArgs;

use crate::sweep::Job;
use report::Row;

/// Measures; fails when a category takes more than its bound, or a control does not.
pub(crate) fn run(args: &MemoryArgs) -> Result<ExitCode, BenchError> {
    debug::refuse(args.allows_debug(), "which takes minutes")?;
    let (settings, draft, text) = args.check()?;
    say(format_args!("machine: {}", Environment::read().one_line()));
    say(theory::introduction(&settings));
    let mut file = settings.out.as_ref().map(|out| Lines::create(&out.join("memory.jsonl"))).transpose()?;
    let torch = Err("not asked for".into());
    let job = Job { draft: &draft, out: settings.out.as_deref(), text, signals: Signals::catch()?, torch };
    let mut rows: Vec<Row> =
        job.records()?.iter().map(|record| Row::of(record, &settings)).collect::<Result<_, _>>()?;
    report::sort(&mut rows);
    say(format_args!("\n{}", report::table(&rows)));
    say(format_args!("\n{}", theory::formulas()));
    let verdicts = report::verdicts(&settings, &rows);
    if let Some(file) = &mut file {
        rows.iter().try_for_each(|row| file.write(row))?;
        verdicts.iter().try_for_each(|verdict| file.write(verdict))?;
    }
    say(format_args!("\n{}", report::sentences(&verdicts)));
    if let Some(out) = &settings.out {
        say(format_args!("rows: {}", out.join("memory.jsonl").display()));
    }
    let sound = rows.iter().all(|row| row.holds) && verdicts.iter().all(|verdict| verdict.holds);
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
