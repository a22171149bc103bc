//! Rows one after the other, and the files that are made of them.

use std::path::Path;

use gpt2::cli::say;
use rig::BenchError;
use rig::lines::Lines;
use rig::plot;
use rig::record::Record;
use rig::training::TextSource;

use super::options::Settings;
use super::row::{Row, Run, Variant};
use crate::plan::Draft;
use crate::sweep::Job;

/// Runs the plan; a row for each of the variants, of which the first is the reference that the others are compared with. Records are in
/// `results.jsonl` as soon as they are known, rows in `rows.jsonl` at the end.
pub(super) fn measure(settings: &Settings, draft: &Draft, variants: &[Variant]) -> Result<Vec<Row>, BenchError> {
    let (records, mut file) = records(settings, draft)?;
    let vocabulary = settings.corpus.vocab_size();
    let mut rows: Vec<Row> = Vec::new();
    for variant in variants {
        let is = |record: &&Record| variant.is(&record.cell);
        let record = records.iter().find(is).ok_or_else(|| format!("the plan has no cell of {}", variant.name))?;
        let first = rows.first();
        let reference = first.and_then(|row| row.summary.as_ref());
        let row = Row::of(variant, record, vocabulary, first.map(|row| &row.config), reference)?;
        file.write(&row)?;
        rows.push(row);
    }
    Ok(rows)
}

/// Runs the plan; its records, which are in `results.jsonl`, and the file for rows.
pub(super) fn records(settings: &Settings, draft: &Draft) -> Result<(Vec<Record>, Lines), BenchError> {
    // Before there is any file.
    draft.plan()?;
    let file = Lines::create(&settings.out.join("rows.jsonl"))?;
    let text = TextSource {
        source: settings.source.clone(),
        tokenizer: settings.tokenizer,
        vocabulary: settings.corpus.vocab_size(),
        description: settings.corpus.describe(),
    };
    let torch = Err("not asked for".into());
    let job = Job { draft, out: Some(&settings.out), text, signals: settings.signals.clone(), torch };
    Ok((job.records()?, file))
}

/// Rows that have figures, with these.
pub(super) fn measured(rows: &[Row]) -> impl Iterator<Item = (&Row, &Run)> + Clone {
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
