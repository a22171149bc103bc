//! `bench overlap`: how much of the communication hides behind the backward pass, over a link that is slow enough to show it.
//!
//! The same model trains by `ddp`, by `ddp` whose communication starts after the backward pass, and by `ring`, which overlaps too, over each
//! transport, in processes that live in two network namespaces with a rate-limited link between them.

mod options;
mod report;

use std::process::ExitCode;

use gpt2::cli::say;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::folder::results_folder;
use rig::lines::Lines;
use rig::link::{TestNetwork, gain_namespaces};
use rig::signal::Signals;
use rig::training::{TextSource, model};

pub(crate) use options::OverlapArgs;

use crate::sweep::Job;
use report::{Row, Table};

/// Runs the benchmark; fails when a job that should have run did not, or transports came to different weights.
pub(crate) fn run(args: &OverlapArgs) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    let draft = args.check()?;
    if args.has_link() {
        gain_namespaces();
        if let Some(why) = TestNetwork::unavailable() {
            return Err(format!("{why}; with --loopback no link is needed").into());
        }
    }
    // Before the link: from here on a signal ends this program in good order.
    let signals = Signals::catch()?;
    let text = TextSource::bytes(args.data.clone())?;
    let plan = draft.plan()?;
    let cell = plan.cells.first().ok_or("the plan has no cell")?;
    let model = model(cell, text.vocabulary)?;
    let out = results_folder(args.out.clone(), "overlap")?;
    let mut file = Lines::create(&out.join("overlap.jsonl"))?;
    say(format_args!("text: {}", text.description));
    say(format_args!("machine: {}", Environment::read().one_line()));
    say(format_args!(
        "{} ({:.2} M parameters, bytes), {} ranks × {} thread(s), {} sequences of {} tokens a step, {} steps, {} rounds, wire {}",
        cell.preset,
        model.parameter_count() as f64 / 1e6,
        cell.ranks,
        cell.threads,
        cell.batch,
        model.block_size,
        cell.steps,
        plan.rounds,
        cell.wire,
    ));
    let job = Job { draft: &draft, out: Some(&out), text, signals, torch: Err("not asked for".into()) };
    let rows: Vec<Row> = job.records()?.iter().map(|record| Row::of(record, &model)).collect::<Result<_, _>>()?;
    rows.iter().try_for_each(|row| file.write(row))?;
    let table = Table::new(rows, &args.strategies);
    say(format_args!("{}", table.render()));
    say(format_args!("rows: {}", out.join("overlap.jsonl").display()));
    Ok(if table.is_sound() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
