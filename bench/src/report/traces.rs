//! Traces to look at, and how to get all this again.

use std::fs;
use std::path::{Component, Path, PathBuf};

use rig::record::Cell;
use rig::results::PLAN;

use super::digest::Digest;
use super::html::Page;

/// Traces that are linked; a folder with more is named.
const LINKED: usize = 200;

pub(super) fn write(page: &mut Page, digest: &Digest<'_>, planned: &[Cell], (folder, beside): (&Path, &Path)) {
    page.topic("traces", "Traces, and how to repeat this");
    let mut names: Vec<String> = fs::read_dir(folder.join("traces"))
        .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    names.retain(|name| name.ends_with(".json"));
    names.sort_by_key(|name| (number(name), name.clone()));
    let place = relative(beside, folder).join("traces");
    if names.is_empty() {
        page.text("There are no traces beside the results.");
    } else {
        page.text(
            "Each trace shows the last steps of a cell's first run, on lines of time for every rank. To look at one, open ui.perfetto.dev (or chrome://tracing) in a browser \
             and load the file there.",
        );
        let link = |name: &String| {
            let cell = number(name).and_then(|number| planned.get(number));
            let about = cell.map_or(name.clone(), |cell| format!("{name}: {}", digest.label(cell)));
            (place.join(name).to_string_lossy().into_owned(), about)
        };
        page.links(&names.iter().take(LINKED).map(link).collect::<Vec<_>>());
        if names.len() > LINKED {
            page.text(&format!("{} more lie in the same folder.", names.len() - LINKED));
        }
    }
    page.text("To make this page again:");
    page.code(&format!("bench report {}", quoted(&folder.display().to_string())));
    let plan = folder.join(PLAN);
    if plan.is_file() {
        page.text("To run the same cells again:");
        let (plan, again) = (plan.display().to_string(), folder.display().to_string() + "-again");
        page.code(&format!("bench sweep {} --out {}", quoted(&plan), quoted(&again)));
    }
}

/// The place in the plan of a trace's cell, by the name of its file.
fn number(name: &str) -> Option<usize> {
    name.strip_prefix("cell-")?.strip_suffix(".json")?.parse().ok()
}

/// A word of a command line.
fn quoted(word: &str) -> String {
    let plain = |letter: char| letter.is_alphanumeric() || "./-_".contains(letter);
    if word.chars().all(plain) && !word.starts_with('-') {
        word.to_string()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// The way from one folder to another, both of which are there; `to` itself where that cannot be told.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let (Ok(from), Ok(to)) = (fs::canonicalize(from), fs::canonicalize(to)) else { return to.to_path_buf() };
    let (from, to): (Vec<Component<'_>>, Vec<Component<'_>>) = (from.components().collect(), to.components().collect());
    let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
    let up = std::iter::repeat_n(Component::ParentDir, from.len() - common);
    up.chain(to[common..].iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_between_folders() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a/x"), folder.path().join("b"));
        fs::create_dir_all(&a).unwrap();
        fs::create_dir_all(&b).unwrap();
        assert_eq!(relative(&a, &b), Path::new("../../b"));
        assert_eq!(relative(&a, &a).join("traces"), Path::new("traces"));
        assert_eq!(relative(folder.path(), &a), Path::new("a/x"));
    }

    #[test]
    fn words_of_a_command_line() {
        assert_eq!(quoted("plan.toml"), "plan.toml");
        assert_eq!(quoted("a b'; rm"), "'a b'\\''; rm'");
        assert_eq!(quoted("-x"), "'-x'");
    }
}
