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
use rig::BenchError;
use rig::debug;
use rig::environment::Environment;
use rig::lines::Lines;
use rig::progress::bar;
use rig::record::{Axis, Cell, Measured, Record, numbers};
use rig::signal::Signals;
use rig::stats::difference;
use rig::training::{TextSource, config, outcome};

pub(crate) use options::ParityArgs;

use crate::sweep::Job;
use fault::Fault;
use options::Settings;
use plan::{Column, FAULT_RANKS, Variant};
use report::{Compared, FaultDetection};

/// Makes the comparisons; fails when a run differs by more than its bound, a fault goes unnoticed, or a count is off the formula.
pub(crate) fn run(args: &ParityArgs) -> Result<ExitCode, BenchError> {
    debug::refuse(args.allows_debug(), "which takes minutes")?;
    let start = Instant::now();
    let settings = args.check()?;
    let Settings { draft, out, .. } = &settings;
    say(format_args!("text: {}", settings.corpus.describe()));
    say(format_args!("machine: {}", Environment::read().one_line()));
    let mut file = out.as_ref().map(|out| Lines::create(&out.join("parity.jsonl"))).transpose()?;
    let text = TextSource::bytes(settings.source.clone())?;
    let torch = Err("not asked for".into());
    let signals = Signals::catch()?;
    let records = Job { draft, out: out.as_deref(), text, signals: signals.clone(), torch }.records()?;
    let baselines = Baselines::of(&records)?;

    let compared = compare(&settings, &records, &baselines)?;
    say(format_args!("\n{}", report::comparison(&settings.variants, baselines.cell, &compared)));
    write(&mut file, &compared)?;
    let noticed = plant(&settings, &baselines, &signals)?;
    say(format_args!("\n{}", report::faults(&noticed)));
    write(&mut file, &noticed)?;
    let counted = counted(&settings, &records)?;
    say(format_args!("\n{}", formula::table(&counted)));
    write(&mut file, &counted)?;

    if let Some(out) = out {
        say(format_args!("rows: {}", out.join("parity.jsonl").display()));
    }
    let wrong = compared.iter().filter(|row| !row.within).count()
        + noticed.iter().filter(|row| !row.noticed).count()
        + counted.iter().filter(|row| !row.holds).count();
    say(match wrong {
        0 => format!(
            "all differences are within their bounds, all planted faults were noticed, and all counts match the formulas ({:.0} s)",
            start.elapsed().as_secs_f64()
        ),
        wrong => format!("{wrong} rows are WRONG"),
    });
    Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn write<T: serde::Serialize>(file: &mut Option<Lines>, rows: &[T]) -> Result<(), BenchError> {
    file.as_mut().map_or(Ok(()), |file| rows.iter().try_for_each(|row| file.write(row)))
}

/// Losses and gradient norms by step.
struct Curves {
    losses: Vec<f64>,
    norms: Vec<f64>,
}

impl Curves {
    fn of(measured: &Measured) -> Self {
        Curves { losses: numbers(&measured.losses), norms: numbers(&measured.grad_norms) }
    }
}

/// What one device computes, in f32.
struct Baselines<'a> {
    clipped: Curves,
    unclipped: Curves,
    /// Of the clipped one.
    cell: &'a Cell,
}

impl<'a> Baselines<'a> {
    fn of(records: &'a [Record]) -> Result<Self, BenchError> {
        let single = |column: Column| {
            let is = |record: &&Record| record.cell.strategy == "single" && Column::of(&record.cell) == Some(column);
            let record =
                records.iter().find(is).ok_or_else(|| format!("there is no run of single, {}", column.name()))?;
            let measured = outcome(record).map_err(|why| format!("the baseline, single on one rank: {why}"))?;
            Ok::<_, String>((Curves::of(measured), &record.cell))
        };
        let (clipped, cell) = single(Column::F32)?;
        let clip: f64 = cell.clip.as_deref().unwrap_or("1").parse()?;
        if !clipped.norms.iter().any(|norm| *norm > clip) {
            return Err(
                format!("no gradient norm of the baseline is above {clip}, so clipping would not be tested").into()
            );
        }
        Ok(Baselines { clipped, unclipped: single(Column::Unclipped)?.0, cell })
    }

    /// The largest relative differences to the baseline of a column, of losses and of gradient norms.
    fn differences(&self, column: Column, curves: Option<Curves>) -> (f64, f64) {
        let baseline = if column == Column::Unclipped { &self.unclipped } else { &self.clipped };
        curves.map_or((f64::INFINITY, f64::INFINITY), |curves| {
            (difference(&curves.losses, &baseline.losses), difference(&curves.norms, &baseline.norms))
        })
    }
}

/// Runs as threads beside one device.
fn compare(settings: &Settings, records: &[Record], baselines: &Baselines<'_>) -> Result<Vec<Compared>, BenchError> {
    let mut rows = Vec::new();
    for variant in &settings.variants {
        for ranks in &settings.ranks {
            for column in Column::ALL {
                let is = |cell: &Cell| {
                    Variant::in_cell(cell).is_ok_and(|other| other == *variant)
                        && (cell.ranks, cell.steps) == (*ranks, baselines.cell.steps)
                        && Column::of(cell) == Some(column)
                        && ["none", "local"].contains(&cell.transport.as_str())
                };
                let Some(record) = records.iter().find(|record| is(&record.cell)) else { continue };
                let outcome = outcome(record);
                let found = baselines.differences(column, outcome.as_ref().ok().map(|measured| Curves::of(measured)));
                rows.push(Compared::new(*variant, *ranks, column, found, &outcome));
            }
        }
    }
    Ok(rows)
}

/// Faults are planted in communicators, which only threads of this process can be given: no run of a plan has one.
fn plant(settings: &Settings, baselines: &Baselines<'_>, signals: &Signals) -> Result<Vec<FaultDetection>, BenchError> {
    let plan = settings.draft.clone().set(Axis::Ranks, &[FAULT_RANKS]).without_also().plan()?;
    let bar = bar(plan.cells.len() * Fault::ALL.len());
    let mut rows = Vec::new();
    for variant in &settings.variants {
        let is = |cell: &&Cell| Variant::in_cell(cell).is_ok_and(|other| other == *variant);
        let cell = plan.cells.iter().find(is).ok_or_else(|| format!("no cell of {}", variant.name()))?;
        let config = config(cell, settings.corpus.vocab_size())?;
        for fault in Fault::ALL {
            signals.check()?;
            bar.set_message(format!("{}: {}", variant.name(), fault.name()));
            let outcome = threads::train_all(&config, &settings.corpus, FAULT_RANKS, fault);
            let curves = outcome
                .as_ref()
                .ok()
                .map(|summary| Curves { losses: summary.losses.clone(), norms: summary.grad_norms.clone() });
            rows.push(FaultDetection::new(*variant, fault, baselines.differences(Column::F32, curves), &outcome));
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(rows)
}

/// Each variant on 3 and 4 ranks over each transport.
fn counted(settings: &Settings, records: &[Record]) -> Result<Vec<formula::Count>, BenchError> {
    let steps = settings.draft.last_also(Axis::Steps);
    let transports: Vec<String> = settings.transports.iter().map(ToString::to_string).collect();
    let is = |record: &&Record| {
        let cell = &record.cell;
        cell.ranks >= 3
            && Column::of(cell) == Some(Column::F32)
            && Some(cell.steps.to_string()) == steps
            && transports.contains(&cell.transport)
    };
    let counted: Vec<&Record> = records.iter().filter(is).collect();
    let order = |name: &str| settings.variants.iter().position(|variant| variant.name() == name);
    Ok(formula::counts(&counted, order)?.into_iter().map(|(count, _)| count).collect())
}
