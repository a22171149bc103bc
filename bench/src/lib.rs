//! `bench`: what each strategy costs over each transport of this machine.
//!
//! Without arguments it runs a quick proof, at 3 and 4 ranks, that all transports compute the same and send what the formulas
//! say, and then every strategy over every transport on 2 ranks, prints a table, and writes a report. Of the commands, `bench sweep`
//! runs the cells of a plan over links of all kinds, `bench report` and `bench compare` say what came out, and `bench links` checks
//! the links; `bench collectives` times collectives alone, beside the libraries that a user would pick instead; `bench parity`
//! compares every strategy with one device, `bench memory` what each takes with what it should, `bench overlap` shows over a slow
//! link how much communication hides behind the backward pass, `bench peers` trains beside PyTorch, `bench compute` shows how fast
//! one device computes, layer by layer, and `bench paper` repeats published comparisons. `bench artifact` writes the figures and pictures
//! of README and book from records that lie in the repository. `bench chaos` and `bench soak` show what becomes of a job when ranks fail, `bench hostile` what becomes of
//! it when strangers attack its ports.
//!
//! `bench record` writes what the ranks do in a step as a trace, `bench replay` runs one over any transport and link without a model, and `bench calibrate`,
//! `bench predict` and `bench advise` say what it would take on a network that is not there.

mod args;
mod artifact;
mod budget;
mod collectives;
mod compare;
mod compute;
mod links;
mod matrix;
mod memory;
mod overlap;
mod paper;
mod parity;
mod peers;
mod plan;
mod predict;
mod prices;
mod proof;
mod pytorch;
mod report;
mod setup;
mod sweep;
mod table;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use comm_core::job::Job;
use gpt2::cli::{complain, say};
use gpt2::memory::{Category, set_thread_default};
use rig::link::gain_namespaces;
use rig::{BenchError, debug, machine, outcome, rank};

use args::{Args, Command};

/// Runs the program. Ranks are this program again, so a program with a transport of its own calls [`isocomm::register`] first, and then this:
/// see `bench/examples/own_transport.rs`. Memory is counted where [`CountingAllocator`](gpt2::memory::CountingAllocator) is the program's allocator.
pub fn main() -> ExitCode {
    set_thread_default(Category::Other);
    let _printed = comm_core::printer::at_end();
    comm_core::process::prepare();
    gpt2::sys::keep_freed_pages();
    if let Err(error) = isocomm::prepare() {
        complain(format_args!("error: {error}"));
        return ExitCode::FAILURE;
    }
    let mut args = Args::parse();
    if let Err(error) = once(args.command.as_ref()) {
        complain(format_args!("error: {error}"));
        return ExitCode::FAILURE;
    }
    let result = match args.command.take() {
        Some(Command::Rig(command)) => command.run(),
        Some(Command::Torture(command)) => command.run(),
        Some(Command::Collectives(collectives)) => collectives::run(&collectives),
        Some(Command::CollectivesRank(task)) => rank::main::<collectives::Task>(&task),
        Some(Command::Overlap(overlap)) => overlap::run(&overlap),
        Some(Command::Peers(peers)) => peers::run(&peers),
        Some(Command::Compute(compute)) => compute::run(&compute),
        Some(Command::Sweep(sweep)) => sweep::run(&sweep),
        Some(Command::Report(report)) => report::run(&report),
        Some(Command::Compare(compare)) => compare::run(&compare),
        Some(Command::Links(links)) => links::run(&links),
        Some(Command::Record(record)) => predict::record(&record),
        Some(Command::Replay(replay)) => predict::replay(&replay),
        Some(Command::Calibrate(calibrate)) => predict::calibrate(&calibrate),
        Some(Command::Predict(args)) => predict::predict(&args),
        Some(Command::Advise(advise)) => predict::advise(&advise),
        Some(Command::TraceRank(task)) => rank::main::<predict::Task>(&task),
        Some(Command::LinksRank(task)) => rank::main::<links::Task>(&task),
        Some(Command::Parity(parity)) => parity::run(&parity),
        Some(Command::Memory(memory)) => memory::run(&memory),
        Some(Command::Paper(paper)) => paper::run(&paper),
        Some(Command::Artifact(artifact)) => artifact::run(&artifact),
        Some(Command::Completions(completions)) => {
            completions.run(&Args::command());
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::Man(man)) => man.run(&Args::command()).map(|()| ExitCode::SUCCESS),
        None => run(&args),
    };
    result.unwrap_or_else(|error| {
        complain(format_args!("error: {error}"));
        let signal = outcome::ending_signal(&error).map(|signal| 128 + signal);
        signal.and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
    })
}

/// Refuses to start ranks where a launcher has started this program several times: each would start a job of its own, and slow down the others.
fn once(command: Option<&Command>) -> Result<(), BenchError> {
    use Command::{Calibrate, Links, Memory, Overlap, Paper, Parity, Peers, Record, Replay, Torture};
    let starts_ranks = match command {
        Some(Torture(command)) => command.starts_ranks(),
        Some(
            Calibrate(_) | Links(_) | Memory(_) | Overlap(_) | Paper(_) | Parity(_) | Peers(_) | Record(_) | Replay(_),
        )
        | None => true,
        Some(_) => false,
    };
    if !starts_ranks {
        return Ok(());
    }
    let what = match Job::from_env_with(true) {
        Ok(Some(job)) if job.world_size > 1 => format!("rank {} of {}, by {}", job.rank, job.world_size, job.source),
        // What is missing or wrong would only matter if ranks were to meet.
        Err(_) => "its variables are in the environment".into(),
        Ok(_) => return Ok(()),
    };
    Err(format!(
        "this command starts its own ranks, on this machine, but a launcher has started it ({what}): start it once, without the launcher. \
         Only `bench sweep` and `bench collectives` run on a launcher's ranks"
    )
    .into())
}

fn run(args: &Args) -> Result<ExitCode, BenchError> {
    debug::refuse_timings(args.allow_debug)?;
    if args.goes_over_links() {
        gain_namespaces();
    }
    let mut setup = args.check()?;
    links::keep_possible(&mut setup.links);
    if setup.links.is_empty() {
        return Err("--links: none of these links is possible here; loopback always is".into());
    }
    if let Some(busy) = machine::busy() {
        say(format_args!(
            "note: {busy}. On a busy machine times are longer and small differences cannot be seen; stop other programs"
        ));
    }
    say(format_args!("text: {}", setup.corpus.describe()));
    say(format_args!("machine: {}", setup.environment.one_line()));
    say(format_args!("results: {}", setup.out.display()));
    let mut sound = true;
    if !args.skip_proof {
        sound &= proof::run(&setup)?;
    }
    sound &= matrix::run(&setup)?;
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
