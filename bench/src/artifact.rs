//! `bench artifact`: the figures and pictures of the README and the book, made again from records that lie in the repository.
//!
//! A page has places that are made: `<!-- artifact: NAME -->`, what is made, `<!-- end -->`. What stands between the two follows from the records
//! alone, to the last byte, whatever machine makes it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use gpt2::cli::say;
use rig::BenchError;
use rig::plot;
use rig::results::{FILE, Results, read_records};
use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};

use crate::predict::{Comparison, PICTURE_TITLE, PREDICTIONS};
use crate::report;

/// Updates the figures and pictures of the README and the book from the records in docs/records.
#[derive(Debug, Args)]
pub(crate) struct ArtifactArgs {
    /// The repository.
    #[arg(long, default_value = ".")]
    root: PathBuf,
    /// Write nothing; list the files that would change, and exit with 1 if there are any.
    #[arg(long)]
    check: bool,
    /// Folder with results of the bare `bench`; its records replace those in docs/records/main first.
    #[arg(long, value_name = "FOLDER", conflicts_with = "check")]
    from: Option<PathBuf>,
    /// Folder with results of `bench sweep learning`; its records replace those in docs/records/learning first.
    #[arg(long, value_name = "FOLDER", conflicts_with = "check")]
    learning: Option<PathBuf>,
    /// A folder of results with predictions.jsonl beside them: what they come to takes the place of docs/records/predicted.json.
    #[arg(long, value_name = "FOLDER", conflicts_with = "check")]
    predicted: Option<PathBuf>,
}

/// Where records of the bare `bench` lie, from the root of the repository.
const MAIN: &str = "docs/records/main";

/// And those of `bench sweep learning`.
const LEARNING: &str = "docs/records/learning";

/// What a sweep that was predicted before came to.
const PREDICTED: &str = "docs/records/predicted.json";

/// The book's pages, and its pictures.
const PAGES: &str = "docs/src";
const FIGURES: &str = "figures";

/// The picture of the parts of a step.
const PICTURE: &str = "where-the-time-goes.svg";

/// The picture of predictions.
const PREDICTED_PICTURE: &str = "predicted.svg";

/// Begin and end of a place.
const BEGIN: &str = "<!-- artifact: ";
const BEGUN: &str = " -->";
const END: &str = "<!-- end -->";

pub(crate) fn run(args: &ArtifactArgs) -> Result<ExitCode, BenchError> {
    let root = &args.root;
    for (folder, place) in [(&args.from, MAIN), (&args.learning, LEARNING)] {
        folder.as_ref().map_or(Ok(()), |folder| take(folder, &root.join(place)))?;
    }
    if let Some(folder) = &args.predicted {
        let mut value = serde_json::to_value(Predicted::of(folder)?)?;
        round(&mut value);
        write(&root.join(PREDICTED), &format!("{value:#}\n"))?;
    }
    let mut changed = false;
    for (path, bytes) in made(root)? {
        if fs::read(&path).is_ok_and(|there| there == bytes.as_bytes()) {
            continue;
        }
        changed = true;
        let name = path.strip_prefix(root).unwrap_or(&path).display();
        if args.check {
            say(format_args!("{name} does not match the records; `bench artifact` updates it"));
        } else {
            write(&path, &bytes)?;
            say(format_args!("written: {name}"));
        }
    }
    if !changed {
        say("README and book match the records");
    }
    Ok(if args.check && changed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Copies the records of a folder of results, without digits that are only noise of binary fractions.
fn take(from: &Path, to: &Path) -> Result<(), BenchError> {
    let mut text = String::new();
    for record in read_records(from)?.records {
        let mut value = serde_json::to_value(&record)?;
        round(&mut value);
        text += &format!("{value}\n");
    }
    write(&to.join(FILE), &text)
}

/// What a sweep came to that was predicted before, and where it was measured.
#[derive(Serialize, Deserialize)]
struct Predicted {
    measured: String,
    comparison: Comparison,
}

impl Predicted {
    fn of(folder: &Path) -> Result<Self, String> {
        let results = read_records(folder)?;
        Ok(Predicted {
            measured: report::measured(&results).ok_or_else(|| format!("{} has no records", folder.display()))?,
            comparison: Comparison::of(&results.file.with_file_name(PREDICTIONS), &results.records)?,
        })
    }

    /// How far off predictions were, and when and where that was measured.
    fn text(&self) -> String {
        let sentences: Vec<String> =
            self.comparison.sentences().iter().map(|sentence| format!("- {sentence}")).collect();
        format!("{}\n\n{}", sentences.join("\n"), self.measured)
    }
}

/// Rounds fractions to six places: nanoseconds, where they are milliseconds.
fn round(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let rounded = number.as_f64().map(|fraction| (1e6 * fraction).round() / 1e6);
            *number = rounded.and_then(Number::from_f64).unwrap_or_else(|| number.clone());
        }
        Value::Array(values) => values.iter_mut().for_each(round),
        Value::Object(fields) => fields.values_mut().for_each(round),
        _ => {}
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    let written = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(path, text));
    Ok(written.map_err(|error| format!("{}: {error}", path.display()))?)
}

/// What can stand in a place of a page.
struct Parts {
    screen: String,
    title: String,
    measured: String,
    learning: String,
    predicted: String,
}

/// Every file that is made, with its text.
fn made(root: &Path) -> Result<Vec<(PathBuf, String)>, BenchError> {
    let results = read_records(&root.join(MAIN))?;
    let picture = report::picture(&results)?;
    let predicted: Predicted = serde_json::from_str(&read(&root.join(PREDICTED))?)?;
    let parts = Parts {
        screen: report::screen(&results, &[]),
        title: picture.title,
        measured: report::measured(&results).ok_or("docs/records/main has no records")?,
        learning: learning(&read_records(&root.join(LEARNING))?)?,
        predicted: predicted.text(),
    };
    let figures = root.join(PAGES).join(FIGURES);
    let mut files = vec![
        (figures.join(PICTURE), plot::on_its_own(&picture.svg)),
        (figures.join(PREDICTED_PICTURE), plot::on_its_own(&predicted.comparison.picture()?)),
    ];
    let pages = fs::read_dir(root.join(PAGES)).map_err(|error| format!("{}: {error}", root.join(PAGES).display()))?;
    let mut pages: Vec<PathBuf> = pages.flatten().map(|entry| entry.path()).collect();
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    pages.sort_unstable();
    let readme = (root.join("README.md"), format!("{PAGES}/{FIGURES}"));
    for (page, figures) in pages.into_iter().map(|page| (page, FIGURES.to_string())).chain([readme]) {
        let text = fs::read_to_string(&page).map_err(|error| format!("{}: {error}", page.display()))?;
        let part = |name: &str| match name {
            "last-screen" => Ok(format!("```text\n{}\n```\n\n{}", parts.screen, parts.measured)),
            "picture" => Ok(format!("![{}]({figures}/{PICTURE})", parts.title)),
            "learning" => Ok(parts.learning.clone()),
            "predicted" => Ok(format!("![{PICTURE_TITLE}]({figures}/{PREDICTED_PICTURE})\n\n{}", parts.predicted)),
            other => Err(format!("unknown part `{other}`, expected one of last-screen, picture, learning, predicted")),
        };
        let filled = filled(&text, part).map_err(|why| format!("{}: {why}", page.display()))?;
        files.push((page, filled));
    }
    Ok(files)
}

/// What strategies have learnt, sent and taken: sentences, and a row for each.
fn learning(results: &Results) -> Result<String, String> {
    let (sentences, table) = report::seeds(results).ok_or("docs/records/learning has no cells with several seeds")?;
    let measured = report::measured(results).ok_or("docs/records/learning has no records")?;
    let row = |cells: &[String]| format!("| {} |", cells.join(" | "));
    let named = |cells: &Vec<String>| {
        let names = cells.iter().take(table.names).map(|name| format!("`{name}`"));
        row(&names.chain(cells.iter().skip(table.names).cloned()).collect::<Vec<String>>())
    };
    let mut lines: Vec<String> = sentences.iter().map(|sentence| format!("- {sentence}")).collect();
    lines.extend([String::new(), row(&table.head), format!("|{}", "---|".repeat(table.head.len()))]);
    lines.extend(table.rows.iter().map(named));
    Ok(format!("{}\n\n{measured}", lines.join("\n")))
}

/// The page with every place filled.
fn filled(page: &str, part: impl Fn(&str) -> Result<String, String>) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = page;
    while let Some((before, after)) = rest.split_once(BEGIN) {
        let (name, after) = after.split_once(BEGUN).ok_or(format!("a place whose name does not end: `{BEGIN}`"))?;
        let (_, after) = after.split_once(END).ok_or(format!("the place `{name}` has no `{END}`"))?;
        text += &format!("{before}{BEGIN}{name}{BEGUN}\n{}\n{END}", part(name)?);
        rest = after;
    }
    Ok(text + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_filled_and_the_rest_stays() {
        let part = |name: &str| if name == "two" { Ok("2".to_string()) } else { Err(format!("no {name}")) };
        let page = "a <!-- artifact: two -->\nold\n<!-- end --> b\n<!-- artifact: two --><!-- end -->";
        let filled_once = filled(page, part).unwrap();
        assert_eq!(filled_once, "a <!-- artifact: two -->\n2\n<!-- end --> b\n<!-- artifact: two -->\n2\n<!-- end -->");
        assert_eq!(filled(&filled_once, part).unwrap(), filled_once);
        assert_eq!(filled("<!-- artifact: three --><!-- end -->", part), Err("no three".into()));
        assert!(filled("<!-- artifact: two -->", part).unwrap_err().contains("has no `<!-- end -->`"));
    }

    #[test]
    fn records_lose_noise_and_nothing_else() {
        let mut value =
            serde_json::json!({"ms": [0.018_046_000_000_000_45, 3], "at": 1_795_989_943.546_032, "name": "x"});
        round(&mut value);
        assert_eq!(value, serde_json::json!({"ms": [0.018_046, 3], "at": 1_795_989_943.546_032, "name": "x"}));
    }

    #[test]
    fn readme_and_book_are_what_the_records_say() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (path, text) in made(&root).unwrap() {
            let there = fs::read_to_string(&path).unwrap_or_default();
            assert!(there == text, "{} is not what `bench artifact` writes", path.display());
        }
    }
}
