//! `bench collectives`: the benchmark that people know from nccl-tests, for every transport here and for the libraries that a
//! user would pick instead.
//!
//! The program starts the ranks of each group once: one group of processes that has all transports open side by side, one
//! process with the ranks of `local` as threads, and one group for each peer. Then every case goes round by round over all of
//! them: a round has one batch of iterations on each, while the others sleep. Ranks and program talk as in [`protocol`].

mod case;
mod congestion;
#[cfg(test)]
mod decoders;
mod exec;
mod group;
mod launched;
mod options;
mod peers;
mod protocol;
mod rank;
mod report;
mod rounds;
mod safety;
mod tune;

use std::process::ExitCode;

use comm_core::job::Job;
use gpt2::cli::say;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::folder;
use rig::lines::Lines;

pub(crate) use options::CollectivesArgs;
pub(crate) use rank::Task;

use options::Settings;
use report::Row;
use rounds::Bench;

/// Runs the benchmark; fails when something that should have worked did not, or elements came out wrong.
pub(crate) fn run(args: &CollectivesArgs) -> Result<ExitCode, BenchError> {
    debug::refuse(args.allows_debug(), debug::NO_TIMINGS)?;
    let job = Job::from_env()?.filter(|job| job.world_size > 1);
    let settings = args.check(job.as_ref().map(|job| job.world_size))?;
    if let Some(job) = job.as_ref().filter(|job| job.rank > 0) {
        return launched::serve(job, &settings);
    }
    if let Some(name) = args.namespace() {
        return Err(congestion::enter(name).into());
    }
    if let Some(name) = args.is_inside() {
        congestion::set_up_namespace(name)?;
    }
    let note = |text: &str| {
        if args.is_json() {
            eprintln!("{text}");
        } else {
            say(text);
        }
    };
    if cfg!(debug_assertions) {
        note("# DEBUG BUILD: the times below are not meaningful");
    }
    let mut file = match &settings.out {
        Some(out) => {
            folder::make(out)?;
            Some(Lines::create(&out.join("collectives.jsonl"))?)
        }
        None => None,
    };
    let environment = Environment::read();
    note(&format!("# machine: {}", environment.one_line()));
    let mut bench = Bench::start(&settings, environment, job.as_ref())?;
    bench.introduce(&note);

    let mut rows: Vec<Row> = Vec::new();
    let has_table = !settings.json && !settings.one_way && !settings.tune;
    if has_table {
        say(report::header());
    }
    let mut previous = None;
    for case in &settings.cases {
        let found = bench.measure(case)?;
        let operation = Some(case.operation);
        if has_table {
            if previous != operation {
                say(format_args!("# {}", case.operation));
            }
            found.iter().for_each(|row| say(report::line(row)));
        }
        previous = operation;
        for row in &found {
            if settings.json {
                say(serde_json::to_string(row)?);
            }
            if let Some(file) = &mut file {
                file.write(row)?;
            }
        }
        rows.extend(found);
        if bench.is_over() {
            note("# every transport has failed; the remaining sizes are left out");
            break;
        }
    }
    bench.finish();
    if settings.one_way && !settings.json {
        say(report::one_way(&rows));
    }
    if settings.tune {
        note(&tune::report(&rows));
    }
    Ok(conclude(&settings, &rows, &note))
}

/// What nccl-tests says at its end, the comparisons, and whether all is well.
fn conclude(settings: &Settings, rows: &[Row], note: &dyn Fn(&str)) -> ExitCode {
    if settings.safety {
        note("#\n# time with / time without: median over rounds (least-most)");
        note(&safety::prices(rows));
        note(&safety::headers());
    } else if let Some(ratios) = report::ratios(rows).filter(|_| !settings.one_way) {
        note(
            "#\n# time of this transport / time of the other: median over rounds (least-most); below 1 this transport is faster",
        );
        note(&ratios);
    }
    let wrong: u64 = rows.iter().map(Row::wrong).sum();
    if settings.check {
        note(&format!("# wrong elements: {wrong} {}", if wrong == 0 { "OK" } else { "FAILED" }));
    }
    if let Some(out) = &settings.out {
        note(&format!("# rows: {}", out.join("collectives.jsonl").display()));
    }
    let failed = |row: &&Row| case::ResultPlacement::BOTH.iter().any(|place| row.outcome(*place).has_failed());
    let failures = rows.iter().filter(failed).count();
    if failures > 0 {
        note(&format!("# {failures} rows FAILED"));
    }
    if wrong == 0 && failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
