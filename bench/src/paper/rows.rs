//! Rows one after the other, and the files that are made of them.

use std::path::Path;
use std::time::Instant;

use gpt2::cli::say;
use gpt2::trainer::{Summary, TrainConfig};
use rig::BenchError;
use rig::lines::Lines;
use rig::plot;
use rig::progress::bar;

use super::options::Settings;
use super::row::{Row, Variant};

/// Runs the variants one after the other; the first is the reference that the others are compared with. Rows are in `results.jsonl` as
/// soon as they are known.
pub(super) fn measure(settings: &Settings, base: &TrainConfig, variants: &[Variant]) -> Result<Vec<Row>, BenchError> {
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
pub(super) fn measured(rows: &[Row]) -> impl Iterator<Item = (&Row, &Summary)> + Clone {
    rows.iter().filter_map(|row| Some((row, row.summary.as_ref()?)))
}

/// Writes a picture, if there was anything to draw, and adds its name to the list.
pub(super) fn picture(
    out: &Path,
    name: &str,
    svg: Result<String, String>,
    written: &mut Vec<String>,
) -> Result<(), BenchError> {
    match svg {
        Ok(svg) => {
            plot::write(&out.join(name), &svg)?;
            written.push(name.into());
        }
        Err(why) => say(format_args!("no {name}: {why}")),
    }
    Ok(())
}

/// Says which files a run has left.
pub(super) fn say_files(settings: &Settings, lines: &[&str], pictures: &[String]) {
    say(format_args!(
        "\nin {}: {}; pictures: {}",
        settings.out.display(),
        lines.join(", "),
        if pictures.is_empty() { "none".into() } else { pictures.join(", ") }
    ));
}
