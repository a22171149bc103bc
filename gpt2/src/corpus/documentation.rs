//! The text that every machine which built this program holds: the documentation of its own dependencies, as Cargo
//! unpacked it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{CorpusError, text};

/// The crates whose Markdown is the corpus, with the versions that `Cargo.lock` pins, so that the text is the same
/// everywhere. All are built by the default features.
pub(super) const CRATES: [(&str, &str); 27] = [
    ("aho-corasick", "1.1.5"),
    ("bitflags", "2.13.2"),
    ("burn", "0.22.1"),
    ("burn-flex", "0.22.1"),
    ("clap", "4.6.9"),
    ("darling", "0.21.3"),
    ("derive_more-impl", "2.1.1"),
    ("fancy-regex", "0.19.2"),
    ("getrandom", "0.4.3"),
    ("gimli", "0.34.0"),
    ("half", "2.7.1"),
    ("hashbrown", "0.17.2"),
    ("libc", "0.2.191"),
    ("log", "0.4.35"),
    ("mio", "1.2.5"),
    ("nom", "8.0.0"),
    ("object", "0.40.0"),
    ("portable-atomic", "1.15.0"),
    ("quinn", "0.11.12"),
    ("rand", "0.10.4"),
    ("regex", "1.13.2"),
    ("rustls", "0.23.46"),
    ("scc", "3.8.8"),
    ("tokio", "1.54.1"),
    ("tokio-util", "0.7.20"),
    ("tracing", "0.1.44"),
    ("zeromq", "0.7.0"),
];

/// What became of the search.
pub(super) enum Documentation {
    /// All crates are there: their Markdown files, by crate and then by path.
    Found(Vec<PathBuf>),
    /// Why the text cannot be had here.
    Unavailable(String),
}

/// Looks for [`CRATES`] in `cargo_home`'s `registry/src`.
///
/// # Errors
/// A folder that is there but cannot be read.
pub(super) fn find(cargo_home: Option<&Path>) -> Result<Documentation, CorpusError> {
    find_crates(cargo_home, &CRATES)
}

fn find_crates(cargo_home: Option<&Path>, crates: &[(&str, &str)]) -> Result<Documentation, CorpusError> {
    let Some(cargo_home) = cargo_home else {
        return Ok(Documentation::Unavailable("Cargo's home folder is not known".to_owned()));
    };
    let sources = cargo_home.join("registry").join("src");
    let Ok(entries) = fs::read_dir(&sources) else {
        return Ok(Documentation::Unavailable(format!("{} does not exist", sources.display())));
    };
    // One folder for each registry in use. Which of them holds a crate does not matter: a version's contents never
    // change.
    let mut registries: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    registries.sort_unstable();
    let mut files = Vec::new();
    for (name, version) in crates {
        let unpacked = format!("{name}-{version}");
        let mut folders = registries.iter().map(|registry| registry.join(&unpacked));
        let Some(folder) = folders.find(|folder| folder.is_dir()) else {
            return Ok(Documentation::Unavailable(format!("{} has no {unpacked}", sources.display())));
        };
        files.extend(text::files_below(&folder, &["md"])?);
    }
    Ok(Documentation::Found(files))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The `(name, version)` pairs of the workspace's lock file.
    fn locked() -> Vec<(String, String)> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../Cargo.lock");
        let lock = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let mut pairs = Vec::new();
        let mut name = None;
        for line in lock.lines() {
            let value = |key| line.strip_prefix(key).map(|rest: &str| rest.trim_matches('"').to_owned());
            if let Some(found) = value("name = ") {
                name = Some(found);
            } else if let (Some(version), Some(name)) = (value("version = "), name.take()) {
                pairs.push((name, version));
            }
        }
        pairs
    }

    #[test]
    fn every_crate_of_the_list_is_locked() {
        let locked = locked();
        assert!(locked.len() > 100, "only {} packages were read", locked.len());
        for (name, version) in CRATES {
            assert!(
                locked.contains(&(name.to_owned(), version.to_owned())),
                "{name} {version} is not in Cargo.lock; set the version that is"
            );
        }
        assert!(CRATES.is_sorted(), "the order of the list is the order of the text");
    }

    #[test]
    fn files_come_by_crate_and_a_missing_crate_is_named() {
        let home = tempfile::tempdir().unwrap();
        for (registry, unpacked) in [("one", "b-2.0.0"), ("two", "a-1.0.0"), ("two", "b-2.0.0")] {
            let folder = home.path().join("registry/src").join(registry).join(unpacked);
            fs::create_dir_all(folder.join("docs")).unwrap();
            for name in ["README.md", "lib.rs", "docs/guide.md"] {
                fs::write(folder.join(name), "text").unwrap();
            }
        }
        let found = find_crates(Some(home.path()), &[("a", "1.0.0"), ("b", "2.0.0")]).unwrap();
        let Documentation::Found(files) = found else { panic!("both crates are there") };
        let root = home.path().join("registry/src");
        let names: Vec<_> = files.iter().map(|path| path.strip_prefix(&root).unwrap().to_str().unwrap()).collect();
        assert_eq!(
            names,
            [
                "two/a-1.0.0/README.md",
                "two/a-1.0.0/docs/guide.md",
                "one/b-2.0.0/README.md",
                "one/b-2.0.0/docs/guide.md"
            ]
        );
        let missing = find_crates(Some(home.path()), &[("a", "1.0.0"), ("c", "3.0.0")]).unwrap();
        assert!(matches!(missing, Documentation::Unavailable(why) if why.contains("c-3.0.0")));
        let nowhere = find_crates(Some(&home.path().join("none")), &[("a", "1.0.0")]).unwrap();
        assert!(matches!(nowhere, Documentation::Unavailable(_)));
        assert!(matches!(find(None).unwrap(), Documentation::Unavailable(_)));
    }
}
