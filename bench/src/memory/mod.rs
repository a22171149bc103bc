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
use std::time::Duration;

use gpt2::cli::say;
use gpt2::precision::Precision;
use gpt2::strategy::{StrategyKind, StrategyOptions};
use gpt2::trainer::TrainConfig;
use isocomm::TransportKind;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::lines::Lines;
use rig::outcome;
use rig::progress::bar;
use rig::training::Training;

pub(crate) use options::MemoryArgs;

use case::Case;
use options::Settings;
use report::Row;

/// A run must end within this time.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Each segment is a bucket of its own, so that what is on its way has one size for all strategies.
const BUCKET_BYTES: usize = 1;

/// Measures; fails when a category takes more than its bound, or a control does not.
pub(crate) fn run(args: &MemoryArgs) -> Result<ExitCode, BenchError> {
    debug::refuse(args.allows_debug(), "which takes minutes")?;
    let settings = args.check()?;
    say(format_args!("machine: {}", Environment::read().one_line()));
    say(theory::introduction(&settings));
    let mut file = settings.out.as_ref().map(|out| Lines::create(&out.join("memory.jsonl"))).transpose()?;
    let cases = cases(&settings);
    let bar = bar(cases.len());
    let mut rows: Vec<Row> = Vec::new();
    for case in cases {
        bar.set_message(case.name());
        let row = measure(&settings, case)?;
        if let Some(file) = &mut file {
            file.write(&row)?;
        }
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    say(format_args!("\n{}", report::table(&rows)));
    say(format_args!("\n{}", theory::formulas()));
    let verdicts = report::verdicts(&settings, &rows);
    if let Some(file) = &mut file {
        verdicts.iter().try_for_each(|verdict| file.write(verdict))?;
    }
    say(format_args!("\n{}", report::sentences(&verdicts)));
    if let Some(out) = &settings.out {
        say(format_args!("rows: {}", out.join("memory.jsonl").display()));
    }
    let sound = rows.iter().all(|row| row.holds) && verdicts.iter().all(|verdict| verdict.holds);
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Every strategy on every number of ranks; then recomputation and 16-bit computation, of the ends of the scale.
fn cases(settings: &Settings) -> Vec<Case> {
    let case = |strategy, ranks| Case { strategy, ranks, precision: Precision::F32, recompute: false };
    let mut cases = Vec::new();
    for strategy in &settings.strategies {
        let most = if *strategy == StrategyKind::Single { 1 } else { usize::MAX };
        cases.extend(settings.ranks.iter().filter(|ranks| **ranks <= most).map(|ranks| case(*strategy, *ranks)));
    }
    let most = settings.ranks.iter().copied().max().unwrap_or(1);
    for strategy in [StrategyKind::Ddp, StrategyKind::Fsdp] {
        if settings.strategies.contains(&strategy) {
            cases.push(Case { recompute: true, ..case(strategy, most) });
            cases.push(Case { precision: Precision::Bf16, ..case(strategy, most) });
        }
    }
    cases
}

fn measure(settings: &Settings, case: Case) -> Result<Row, BenchError> {
    let config = TrainConfig {
        precision: case.precision,
        recompute: case.recompute,
        steps: settings.steps,
        global_batch: settings.batch,
        options: StrategyOptions {
            first_bucket_bytes: BUCKET_BYTES,
            bucket_bytes: BUCKET_BYTES,
            ..StrategyOptions::default()
        },
        ..TrainConfig::of(settings.model.clone(), case.strategy)
    };
    let transport = (case.ranks > 1).then_some(TransportKind::SHM);
    let training =
        Training { source: settings.source.clone(), ..Training::new(config, transport, case.ranks, 1, TIMEOUT) };
    let bounds = theory::bounds(&settings.segments, case);
    Ok(match outcome::settled(training.summary())? {
        Ok(summary) => Row::new(case, &bounds, &summary),
        Err(why) => Row::failed(case, &bounds, why),
    })
}
