//! `bench peers`: the same training in PyTorch and here, side by side.
//!
//! A round runs PyTorch and ours once each: every strategy, ours over every transport, and on both sides ranks that train at the
//! same time without a word to each other. What a step takes beyond that is communication that shows, whoever measures it.

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
use rig::outcome;
use rig::record::Axis;
use rig::signal::Signals;
use rig::training::model;

pub(crate) use options::PeersArgs;

use crate::pytorch::{SKIPPED, Torch};
use crate::sweep::{Job, source};
use report::{Row, Table};

/// Runs the benchmark; fails when something that should have run did not.
pub(crate) fn run(args: &PeersArgs) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    let mut draft = args.check()?;
    if args.has_link() {
        gain_namespaces();
        if let Some(why) = TestNetwork::unavailable() {
            return Err(format!("{why}; without --rate no link is needed").into());
        }
    }
    // Before the link: from here on a signal ends this program in good order.
    let signals = Signals::catch()?;
    let out = results_folder(args.out.clone(), "peers")?;
    let mut file = Lines::create(&out.join("peers.jsonl"))?;
    let torch = match args.python() {
        None => Err(String::new()),
        Some(python) => outcome::settled(Torch::find(python))?,
    };
    if torch.is_err() {
        draft.retain(Axis::Program, |program| program == "ours");
    }
    let plan = draft.plan()?;
    let text = source(&plan, None, &out)?;
    let cell = plan.cells.first().ok_or("the plan has no cell")?;
    let model = model(cell, text.vocabulary)?;
    say(format_args!("machine: {}", Environment::read().one_line()));
    match &torch {
        Ok(torch) => say(format_args!("peer: PyTorch {} over Gloo", torch.version)),
        Err(why) if args.python().is_some() => {
            say(format_args!(
                "peer: PyTorch is left out: {why}; name a Python interpreter that has it with --peer-python"
            ));
        }
        Err(_) => {}
    }
    say(format_args!(
        "model: {} layers, {} heads, {} wide, {} positions, {} tokens ({:.2} M parameters); {} ranks × {} thread(s), \
         {} sequences a step, {} + {SKIPPED} steps, {} rounds",
        model.n_layer,
        model.n_head,
        model.n_embd,
        model.block_size,
        model.vocab_size,
        model.parameter_count() as f64 / 1e6,
        cell.ranks,
        cell.threads,
        cell.batch,
        cell.steps - SKIPPED,
        plan.rounds,
    ));
    let version = torch.as_ref().ok().map(|torch| torch.version.clone());
    let job = Job { draft: &draft, out: Some(&out), text, signals, torch };
    let of = |record| Row::of(record, &model, version.as_deref());
    let mut rows: Vec<Row> = job.records()?.iter().map(of).collect::<Result<_, _>>()?;
    report::sort(&mut rows, &args.strategies);
    rows.iter().try_for_each(|row| file.write(row))?;
    let table = Table::new(rows);
    say(format_args!("{}", table.render()));
    say(format_args!("rows: {}", out.join("peers.jsonl").display()));
    Ok(if table.is_sound() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
