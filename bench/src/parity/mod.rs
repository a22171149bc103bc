//! `bench parity`: that every strategy computes what one device computes, and sends what its formula says.
//!
//! Three tables. The first compares training runs of each strategy, on several numbers of ranks and with each option alone, with
//! `single` on the same global batches: losses and gradient norms step by step, against bounds that are fixed in [`plan`]. The second
//! plants faults in the communicator and demands that the same comparison notices them. The third counts payload bytes and messages
//! over every transport, beside the strategy's formula, and demands one hash of the weights on all ranks and all byte transports.

mod fault;
pub(crate) mod formula;
mod options;
mod plan;
mod report;
mod threads;

use std::process::ExitCode;
use std::time::Instant;

use gpt2::cli::say;
use gpt2::trainer::Summary;
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::lines::Lines;
use rig::progress::bar;
use rig::stats::difference;

pub(crate) use options::ParityArgs;

use fault::Fault;
use options::Settings;
use plan::{Column, FAULT_RANKS, Variant};
use report::{Compared, Noticed};

/// Makes the comparisons; fails when a run differs by more than its bound, a fault goes unnoticed, or a count is off the formula.
pub(crate) fn run(args: &ParityArgs) -> Result<ExitCode, BenchError> {
    debug::refuse(args.allows_debug(), "which takes minutes")?;
    let start = Instant::now();
    let settings = args.check()?;
    say(format_args!("text: {}", settings.corpus.describe()));
    say(format_args!("machine: {}", Environment::read().one_line()));
    let mut file = settings.out.as_ref().map(|out| Lines::create(&out.join("parity.jsonl"))).transpose()?;
    let yardsticks = Yardsticks::train(&settings)?;

    let compared = compare(&settings, &yardsticks)?;
    say(format_args!("\n{}", report::comparison(&settings, &compared)));
    write(&mut file, &compared)?;
    let noticed = plant(&settings, &yardsticks)?;
    say(format_args!("\n{}", report::faults(&noticed)));
    write(&mut file, &noticed)?;
    let counted = formula::count(&settings)?;
    say(format_args!("\n{}", formula::table(&counted)));
    write(&mut file, &counted)?;

    if let Some(out) = &settings.out {
        say(format_args!("rows: {}", out.join("parity.jsonl").display()));
    }
    let wrong = compared.iter().filter(|row| !row.within).count()
        + noticed.iter().filter(|row| !row.noticed).count()
        + counted.iter().filter(|row| !row.holds).count();
    say(match wrong {
        0 => format!(
            "everything within its bound, every fault noticed, every count as the formula ({:.0} s)",
            start.elapsed().as_secs_f64()
        ),
        wrong => format!("{wrong} rows are NOT as they should be"),
    });
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write<T: serde::Serialize>(file: &mut Option<Lines>, rows: &[T]) -> Result<(), BenchError> {
    file.as_mut().map_or(Ok(()), |file| rows.iter().try_for_each(|row| file.write(row)))
}

/// What one device computes, in f32.
struct Yardsticks {
    clipped: Summary,
    unclipped: Summary,
}

impl Yardsticks {
    fn train(settings: &Settings) -> Result<Self, BenchError> {
        let single = |column: Column| {
            let config = column.config(settings.base, Variant::SINGLE, 1);
            threads::train_all(&config, &settings.corpus, 1, None)
                .map_err(|error| format!("the yardstick, single on one rank: {error}"))
        };
        let yardsticks = Yardsticks { clipped: single(Column::F32)?, unclipped: single(Column::Unclipped)? };
        if !yardsticks.clipped.grad_norms.iter().any(|norm| *norm > plan::CLIP) {
            return Err(format!(
                "no gradient of the yardstick is longer than {}: clipping would not be compared",
                plan::CLIP
            )
            .into());
        }
        Ok(yardsticks)
    }

    fn of(&self, column: Column) -> &Summary {
        if column == Column::Unclipped { &self.unclipped } else { &self.clipped }
    }
}

/// The largest relative differences to the yardstick, of losses and of gradient norms.
fn differences(outcome: &Result<Summary, String>, yardstick: &Summary) -> (f64, f64) {
    match outcome {
        Ok(summary) => {
            (difference(&summary.losses, &yardstick.losses), difference(&summary.grad_norms, &yardstick.grad_norms))
        }
        Err(_) => (f64::INFINITY, f64::INFINITY),
    }
}

fn compare(settings: &Settings, yardsticks: &Yardsticks) -> Result<Vec<Compared>, BenchError> {
    let bar = bar(settings.variants.len() * settings.ranks.len() * Column::ALL.len());
    let mut rows = Vec::new();
    for variant in &settings.variants {
        for ranks in &settings.ranks {
            for column in Column::ALL {
                bar.set_message(format!("{} on {ranks} ranks, {}", variant.name(), column.name()));
                if variant.runs_on(*ranks) {
                    let config = column.config(settings.base, *variant, *ranks);
                    let outcome = threads::train_all(&config, &settings.corpus, *ranks, None);
                    let found = differences(&outcome, yardsticks.of(column));
                    rows.push(Compared::new(*variant, *ranks, column, found, &outcome));
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    Ok(rows)
}

fn plant(settings: &Settings, yardsticks: &Yardsticks) -> Result<Vec<Noticed>, BenchError> {
    let bar = bar(settings.variants.len() * Fault::ALL.len());
    let mut rows = Vec::new();
    for variant in &settings.variants {
        for fault in Fault::ALL {
            bar.set_message(format!("{}: {}", variant.name(), fault.name()));
            let config = Column::F32.config(settings.base, *variant, FAULT_RANKS);
            let outcome = threads::train_all(&config, &settings.corpus, FAULT_RANKS, Some(fault));
            let found = differences(&outcome, yardsticks.of(Column::F32));
            rows.push(Noticed::new(*variant, fault, found, &outcome));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(rows)
}
