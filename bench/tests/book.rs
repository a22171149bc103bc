//! The README and the book: every page is in the table of contents, and every link leads somewhere.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Where a page of the book links to files of the repository.
const REPOSITORY: &str = concat!(env!("CARGO_PKG_REPOSITORY"), "/blob/main/");

/// A README longer than this is not read.
const LONGEST_README: usize = 150;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// The text without what stands in fences, where brackets are code.
fn prose(text: &str) -> String {
    let mut fenced = false;
    let lines = text.lines().filter(|line| {
        let fence = line.starts_with("```");
        fenced ^= fence;
        !fence && !fenced
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Targets of links.
fn targets(text: &str) -> Vec<String> {
    let prose = prose(text);
    let pieces = prose.split("](").skip(1).filter_map(|piece| piece.split_once(')'));
    pieces.map(|(target, _)| target.to_string()).collect()
}

/// The anchors of a page's headings, as mdbook and code hosts make them.
fn anchors(text: &str) -> Vec<String> {
    let headings = prose(text).lines().filter(|line| line.starts_with('#')).map(String::from).collect::<Vec<_>>();
    let letter = |letter: char| match letter {
        ' ' => Some('-'),
        '-' | '_' => Some(letter),
        other => other.is_alphanumeric().then(|| other.to_ascii_lowercase()),
    };
    headings.iter().map(|line| line.trim_start_matches('#').trim().chars().filter_map(letter).collect()).collect()
}

/// The README, and the pages of the book.
fn pages() -> BTreeMap<PathBuf, String> {
    let folder = root().join("docs/src");
    let entries = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    let pages = entries.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let all = pages.chain([root().join("README.md"), root().join("CONTRIBUTING.md")]);
    all.map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn every_link_leads_to_a_page_or_a_file_and_to_a_heading_that_is_there() {
    let pages = pages();
    let mut checked = 0;
    for (page, text) in &pages {
        for target in targets(text) {
            let name = page.strip_prefix(root()).unwrap().display();
            let (path, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = match path.strip_prefix(REPOSITORY) {
                Some(inside) => root().join(inside),
                None if path.starts_with("https://") => continue,
                None if path.is_empty() => page.clone(),
                None => page.parent().unwrap().join(path),
            };
            assert!(file.exists(), "{name}: {target}: there is no {}", file.display());
            if !anchor.is_empty() {
                let text = &pages[&file.canonicalize().unwrap()];
                assert!(anchors(text).iter().any(|known| known == anchor), "{name}: {target}: {:?}", anchors(text));
            }
            checked += 1;
        }
    }
    assert!(checked > 60, "only {checked} links were found");
}

#[test]
fn the_contents_have_every_page_once() {
    let contents = fs::read_to_string(root().join("docs/src/SUMMARY.md")).unwrap();
    let mut listed = targets(&contents);
    listed.sort_unstable();
    let names = pages().into_keys().filter(|path| path.starts_with(root().join("docs")));
    let mut names: Vec<String> = names.map(|path| path.file_name().unwrap().to_string_lossy().into_owned()).collect();
    names.retain(|name| name != "SUMMARY.md");
    assert_eq!(listed, names);
}

#[test]
fn the_readme_is_short_and_rust_code_is_tested() {
    let pages = pages();
    let length = pages[&root().join("README.md")].lines().count();
    assert!(length <= LONGEST_README, "{length} lines");
    let tested = fs::read_to_string(root().join("src/book.rs")).unwrap();
    for (page, _) in pages.iter().filter(|(_, text)| text.contains("```rust")) {
        let name = page.strip_prefix(root()).unwrap().display().to_string();
        assert!(tested.contains(&format!("../{name}")), "the Rust code of {name} is not tested by src/book.rs");
    }
}
