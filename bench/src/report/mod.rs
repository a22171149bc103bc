//! `bench report`: a folder of results as one page that can be read anywhere: no network, no other file but pictures and traces beside it.
//!
//! The page begins with the answer: the sentences that the terminal shows, and one picture. Then come questions, each with its answer in
//! sentences and with the details folded below it.

mod bandwidth;
mod case;
mod charts;
mod collectives;
mod curves;
mod digest;
mod findings;
mod hosts;
mod html;
mod links;
mod loss;
mod maps;
mod order;
mod parts;
mod predicted;
mod scaling;
mod screen;
mod seeds;
mod setup;
#[cfg(test)]
mod synthetic;
#[cfg(test)]
mod tests;
mod text;
mod textbook;
mod traces;
mod why;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use gpt2::cli::say;
use rig::BenchError;
use rig::plot;
use rig::record::Cell;
use rig::results::{HEADER, PLAN, Results, read_records};

use crate::plan::Plan;
use digest::Digest;
use html::Page;
pub(crate) use html::Table;

/// The page's name, where nobody gives another.
const PAGE: &str = "report.html";

/// Folder of the pictures, beside the page.
const FIGURES: &str = "figures";

/// Makes an HTML page of a sweep's results.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Folder with results.jsonl.
    folder: PathBuf,
    /// File for the page. Pictures are written to figures/ beside it. [default: report.html in the folder]
    #[arg(long, value_name = "FILE.html")]
    out: Option<PathBuf>,
}

pub(crate) fn run(args: &ReportArgs) -> Result<ExitCode, BenchError> {
    let results = read_records(&args.folder)?;
    let folder = results.file.parent().map_or_else(PathBuf::new, Path::to_path_buf);
    let page = match &args.out {
        Some(out) => write_to(&results, &folder, out)?,
        None => write(&results, &folder)?,
    };
    say(format_args!("{}\n", screen(&results, &planned(&folder).0.cells)));
    say(format_args!("report: {}", page.display()));
    Ok(ExitCode::SUCCESS)
}

/// The answer in a few lines for a terminal.
pub(crate) fn screen(results: &Results, planned: &[Cell]) -> String {
    screen::text(&Digest::of(results, planned))
}

/// The picture at the top of the page.
pub(crate) struct Picture {
    /// What it shows, in words.
    pub(crate) title: String,
    pub(crate) svg: String,
}

/// The picture at the top of the page of these results.
///
/// # Errors
/// No cell has figures.
pub(crate) fn picture(results: &Results) -> Result<Picture, String> {
    screen::picture(&Digest::of(results, &[]))
}

/// What strategies have learnt from the same tokens with several seeds, what they sent and how long it took: sentences, and the table with intervals;
/// nothing where no cells differ in their seed alone.
pub(crate) fn seeds(results: &Results) -> Option<(Vec<String>, Table)> {
    seeds::told_and_table(&Digest::of(results, &[]))
}

/// When, where and of which commit results are; nothing of none.
pub(crate) fn measured(results: &Results) -> Option<String> {
    results.records.first().map(screen::measured)
}

/// Writes the page of the results that lie in `folder` into it, and returns its path.
///
/// # Errors
/// What could not be written, and why.
pub(crate) fn write(results: &Results, folder: &Path) -> Result<PathBuf, String> {
    write_to(results, folder, &folder.join(PAGE))
}

fn write_to(results: &Results, folder: &Path, out: &Path) -> Result<PathBuf, String> {
    let beside = match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let (planned, why) = planned(folder);
    let page = page(results, &planned, folder, beside, why.as_deref());
    let figures = beside.join(FIGURES);
    fs::create_dir_all(&figures).map_err(|error| format!("{}: {error}", figures.display()))?;
    remove_old(&figures);
    for (name, svg) in &page.figures {
        plot::write(&figures.join(name), svg)?;
    }
    let html = page.finish(&title(results));
    let unfinished = out.with_extension("html.tmp");
    fs::write(&unfinished, html)
        .and_then(|()| fs::rename(&unfinished, out))
        .map_err(|error| format!("{}: {error}", out.display()))?;
    Ok(out.to_path_buf())
}

/// The plan that a sweep leaves in its folder; nothing is planned where there is none. And why one that is there cannot be read.
fn planned(folder: &Path) -> (PlannedRuns, Option<String>) {
    let Ok(text) = fs::read_to_string(folder.join(PLAN)) else { return (PlannedRuns::default(), None) };
    match Plan::parse(&text) {
        Ok(mut plan) => {
            // As many rounds as the sweep was told, where it was told.
            let header = fs::read(folder.join(HEADER)).ok();
            let header = header.and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
            let told = header.as_ref().and_then(|header| u32::try_from(header.get("rounds")?.as_u64()?).ok());
            if header.and_then(|header| header.get("network")?.as_bool()) == Some(true) {
                plan.over_network();
            }
            (PlannedRuns { rounds: told.unwrap_or(plan.rounds), cells: plan.cells }, None)
        }
        Err(why) => (
            PlannedRuns::default(),
            Some(format!("{PLAN} cannot be read, so cells that did not run are not shown: {why}")),
        ),
    }
}

/// What was to be run.
#[derive(Debug, Default)]
struct PlannedRuns {
    rounds: u32,
    cells: Vec<Cell>,
}

/// All sections, of results in `folder`, for a page that lies in `beside`.
fn page(results: &Results, planned: &PlannedRuns, folder: &Path, beside: &Path, unplanned: Option<&str>) -> Page {
    let digest = Digest::of(results, &planned.cells);
    let mut page = Page::default();
    setup::beware(&mut page, &digest);
    unplanned.into_iter().for_each(|why| page.warning(why));
    screen::write(&mut page, &digest);
    if digest.cases.iter().any(|case| case.step.is_some()) {
        findings::strategies(&mut page, &digest);
    }
    seeds::write(&mut page, &digest);
    maps::write(&mut page, &digest);
    bandwidth::write(&mut page, &digest);
    if digest.cases.iter().any(|case| case.step.is_some()) {
        findings::transports(&mut page, &digest);
        findings::time(&mut page, &digest);
        parts::write(&mut page, &digest);
        why::write(&mut page, &digest);
        curves::write(&mut page, &digest);
        scaling::write(&mut page, &digest);
    }
    findings::trust(&mut page, &digest);
    setup::write(&mut page, &digest, planned.rounds);
    textbook::write(&mut page, &digest);
    page.section("more", "More", "What else is there?");
    loss::write(&mut page, &digest);
    collectives::write(&mut page, folder);
    predicted::write(&mut page, folder, &results.records);
    traces::write(&mut page, &digest, &planned.cells, (folder, beside));
    page
}

fn title(results: &Results) -> String {
    let plans =
        digest::distinct(results.records.iter().map(|record| record.plan.as_str()).filter(|name| !name.is_empty()));
    match plans.is_empty() {
        true => "bench report".into(),
        false => format!("bench report: {}", plans.join(", ")),
    }
}

/// Takes away the pictures of an earlier page: files that are named as [`Page::figure`] names them.
fn remove_old(figures: &Path) {
    let Ok(entries) = fs::read_dir(figures) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let number = name.split_once('-').map_or("", |(number, _)| number);
        let ours = name.ends_with(".svg") && number.len() >= 2 && number.bytes().all(|byte| byte.is_ascii_digit());
        if ours {
            // One that stays is of no harm: the page names those that it shows.
            let _ = fs::remove_file(entry.path());
        }
    }
}
