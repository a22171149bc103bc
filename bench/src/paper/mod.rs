//! `bench paper`: the comparisons of two published papers, run again under equal conditions.
//!
//! Both compare strategies of data-parallel training on GPT-2. Here all of them share one training loop, seed, order of the data, global
//! batch, schedule and arithmetic; that they do is asserted for each row, together with the number of operations and bytes that the
//! definition of the strategy asks for and one update a step. What the papers state stands in [`bai`] and [`patwardhan`], with where it
//! was read; what could not be read is called so.

mod bai;
mod options;
mod patwardhan;
mod row;
mod text;

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use gpt2::cli::say;
use gpt2::trainer::{Summary, TrainConfig};
use rig::BenchError;
use rig::debug;
use rig::lines::Lines;
use rig::plot;
use rig::progress::bar;

pub(crate) use options::PaperArgs;

use options::{Paper, Settings};
use row::{Row, Variant};

/// Runs the comparison of one paper; fails when a row fails or an assertion does not hold.
pub(crate) fn run(args: &PaperArgs) -> Result<ExitCode, BenchError> {
    let (common, paper) = args.parts();
    debug::refuse_timings(common.allows_debug())?;
    let rows = match paper {
        Paper::Bai(args) => bai::run(args)?,
        Paper::Patwardhan(args) => patwardhan::run(args)?,
    };
    for row in &rows {
        for problem in &row.problems {
            say(format_args!("ASSERTION FAILED: {}: {problem}", row.name));
        }
        if row.summary.is_none() {
            say(format_args!("ROW FAILED: {}: {}", row.name, row.status));
        }
    }
    let sound = rows.iter().all(Row::is_sound);
    if sound {
        say(format_args!("\nAll {} rows ran, and every assertion held.", rows.len()));
    }
    Ok(if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs the variants one after the other; the first is the reference that the others are compared with. Rows are in `results.jsonl` as
/// soon as they are known.
fn measure(settings: &Settings, base: &TrainConfig, variants: &[Variant]) -> Result<Vec<Row>, BenchError> {
    let mut file = Lines::create(&settings.out.join("results.jsonl"))?;
    let bar = bar(variants.len());
    let mut rows: Vec<Row> = Vec::new();
    for variant in variants {
        settings.signals.check()?;
        bar.set_message(variant.name.clone());
        let began = Instant::now();
        let reference = rows.first().and_then(|row| row.summary.as_ref());
        let row = Row::measure(variant, base, settings, reference)?;
        file.write(&row)?;
        bar.inc(1);
        let took = began.elapsed().as_secs_f64();
        bar.suspend(|| match &row.summary {
            Some(summary) => {
                say(format_args!(
                    "  {}: {:.0} tokens/s ({took:.0} s with start and end)",
                    row.name, summary.tokens_per_s
                ));
            }
            None => say(format_args!("  {}: {}", row.name, row.status)),
        });
        rows.push(row);
    }
    bar.finish_and_clear();
    Ok(rows)
}

/// Rows that have figures, with these.
fn measured(rows: &[Row]) -> impl Iterator<Item = (&Row, &Summary)> + Clone {
    rows.iter().filter_map(|row| Some((row, row.summary.as_ref()?)))
}

/// Writes a picture, if there was anything to draw, and adds its name to the list.
fn picture(out: &Path, name: &str, svg: Result<String, String>, written: &mut Vec<String>) -> Result<(), BenchError> {
    match svg {
        Ok(svg) => {
            plot::write(&out.join(name), &svg)?;
            written.push(name.into());
        }
        Err(why) => say(format_args!("no {name}: {why}")),
    }
    Ok(())
}

fn say_files(settings: &Settings, lines: &[&str], pictures: &[String]) {
    say(format_args!(
        "\nin {}: {}; pictures: {}",
        settings.out.display(),
        lines.join(", "),
        if pictures.is_empty() { "none".into() } else { pictures.join(", ") }
    ));
}
