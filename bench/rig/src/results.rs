//! Reads what sweeps left behind.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::record::{Record, SCHEMA};

/// Name of the file in a folder of results.
pub const FILE: &str = "results.jsonl";

/// Name of the file that says what all parts of a sweep have in common.
pub const HEADER: &str = "sweep.json";

/// Name of the file with the plan of a sweep.
pub const PLAN: &str = "plan.toml";

/// Name of the folder of traces.
pub const TRACES: &str = "traces";

/// Longest line that is read. The longest runs have some tens of kilobytes a rank.
const LONGEST_LINE: u64 = 256 << 20;

/// The records of one file.
#[derive(Debug)]
pub struct Results {
    /// The file itself, also where a folder was given.
    pub file: PathBuf,
    pub records: Vec<Record>,
    /// What a reader should know: lines left out.
    pub warnings: Vec<String>,
    /// Bytes of whole records. A sweep that goes on cuts the file off here, and ends the last line where it is not
    /// ended.
    pub whole_bytes: u64,
}

/// Reads a folder's `results.jsonl`, or such a file. The last line may have been cut off with its sweep and is then
/// left out, with a warning; a file may be empty but for that.
///
/// # Errors
/// What is wrong with the path or with which line, and what to do.
pub fn read_records(path: &Path) -> Result<Results, String> {
    let file = locate(path)?;
    let name = file.display().to_string();
    let opened = File::open(&file).map_err(|error| format!("{name}: cannot be read: {error}"))?;
    let mut results = Results { file, records: Vec::new(), warnings: Vec::new(), whole_bytes: 0 };
    let mut reader = BufReader::new(opened);
    let mut line = Vec::new();
    for number in 1_u64.. {
        line.clear();
        let read = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line);
        let read = read.map_err(|error| format!("{name}: line {number}: cannot be read: {error}"))? as u64;
        if read == 0 {
            break;
        }
        if read == LONGEST_LINE && line.last() != Some(&b'\n') {
            return Err(format!(
                "{name}: line {number} is longer than {} MiB, so this is not a file of results",
                LONGEST_LINE >> 20
            ));
        }
        match parse(&line) {
            Ok(record) => results.records.extend(record),
            // Only the last line can lack its end: the sweep was interrupted while it wrote.
            Err(LineError::Syntax(_)) if line.last() != Some(&b'\n') => {
                results.warnings.push(format!(
                    "{name}: line {number}, the last, is cut off (its sweep was interrupted); it is left out"
                ));
                break;
            }
            Err(bad) => {
                let hint = "remove that line to keep the others; `bench sweep --resume` then runs its cell again";
                return Err(format!("{name}: line {number}: {}; {hint}", bad.what()));
            }
        }
        results.whole_bytes += read;
    }
    Ok(results)
}

/// Reads results that must hold something.
///
/// # Errors
/// As [`read_records`], and where no run is in them.
pub fn read_some_records(path: &Path) -> Result<Results, String> {
    let results = read_records(path)?;
    if results.records.is_empty() {
        let why = if results.warnings.is_empty() { "is empty" } else { "holds only a line that is cut off" };
        return Err(format!(
            "{} {why}: its sweep ended before its first run did; run it again",
            results.file.display()
        ));
    }
    Ok(results)
}

fn locate(path: &Path) -> Result<PathBuf, String> {
    let about = |path: &Path| std::fs::metadata(path);
    let given = about(path)
        .map_err(|error| format!("{}: {error}; give the folder of a sweep, or its {FILE}", path.display()))?;
    let file = if given.is_dir() { path.join(FILE) } else { path.to_path_buf() };
    match about(&file) {
        Ok(about) if about.is_file() => Ok(file),
        Ok(_) => Err(format!("{} is not a regular file; give the folder of a sweep, or its {FILE}", file.display())),
        Err(error) => {
            Err(format!("{} holds no {FILE}: {error}; give the folder that `bench sweep` wrote to", path.display()))
        }
    }
}

/// What is wrong with a line.
enum LineError {
    /// It is not a JSON object.
    Syntax(String),
    /// It is not a record, or one of another version.
    Content(String),
}

impl LineError {
    fn what(self) -> String {
        match self {
            LineError::Syntax(what) => format!("it is not a JSON object: {what}"),
            LineError::Content(what) => what,
        }
    }
}

/// A record; nothing on a blank line.
fn parse(line: &[u8]) -> Result<Option<Record>, LineError> {
    /// What all versions have.
    #[derive(Deserialize)]
    struct Version {
        schema: Option<u32>,
    }
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    // As a list it could pass for a structure.
    if !line.trim_ascii_start().starts_with(b"{") {
        return Err(LineError::Syntax("it does not begin with a brace".into()));
    }
    let version = match serde_json::from_slice::<Version>(line) {
        Ok(version) => version.schema,
        Err(error) if error.is_data() => return Err(LineError::Content(not_a_record(&error.to_string()))),
        Err(error) => return Err(LineError::Syntax(error.to_string())),
    };
    match version {
        Some(SCHEMA) => {
            let record =
                serde_json::from_slice(line).map_err(|error| LineError::Content(not_a_record(&error.to_string())))?;
            Ok(Some(record))
        }
        Some(other) => Err(LineError::Content(format!(
            "it has version {other} of the format, and this program reads version {SCHEMA}; use the program that wrote it, or run the \
             sweep again"
        ))),
        None => Err(LineError::Content(
            "it names no version; is this the file of another command than `bench sweep`?".into(),
        )),
    }
}

fn not_a_record(error: &str) -> String {
    format!("it is not a record of `bench sweep`: {error}")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::stats::made_up::{cell, record};

    fn line(round: u32) -> String {
        serde_json::to_string(&record(cell("ddp"), round, &[1.0, 2.0])).unwrap()
    }

    /// The message for a file with these contents.
    fn error_of(contents: &[u8]) -> String {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(FILE), contents).unwrap();
        read_some_records(folder.path()).unwrap_err()
    }

    #[test]
    fn a_folder_and_its_file_read_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        fs::write(&file, format!("{}\n\n{}\n", line(1), line(2))).unwrap();
        for path in [folder.path(), &file] {
            let results = read_some_records(path).unwrap();
            assert_eq!(results.records, [1, 2].map(|round| record(cell("ddp"), round, &[1.0, 2.0])));
            assert_eq!((results.warnings.len(), &results.file), (0, &file));
            assert_eq!(results.whole_bytes, fs::metadata(&file).unwrap().len());
        }
    }

    #[test]
    fn a_last_line_that_is_cut_off_is_left_out_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(FILE);
        let (first, second) = (format!("{}\n", line(1)), line(2));
        // Cut anywhere, within a character of several bytes too.
        for cut in (1..second.len()).step_by(97) {
            fs::write(&file, format!("{first}{}", &second[..cut])).unwrap();
            let results = read_records(&file).unwrap();
            assert_eq!((results.records.len(), results.whole_bytes), (1, first.len() as u64), "cut at {cut}");
            assert!(results.warnings[0].contains("line 2, the last, is cut off"), "{:?}", results.warnings);
        }
        // Only its end is missing: nothing is lost.
        fs::write(&file, format!("{first}{second}")).unwrap();
        let results = read_records(&file).unwrap();
        assert_eq!((results.records.len(), results.warnings.len()), (2, 0));
        fs::write(&file, &second[..20]).unwrap();
        assert!(read_some_records(&file).unwrap_err().contains("holds only a line that is cut off"));
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        assert!(
            error_of(b"").ends_with("results.jsonl is empty: its sweep ended before its first run did; run it again")
        );
        let broken = format!("{}\n{{\"schema\": 1, \n{}\n", line(1), line(2));
        assert!(
            error_of(broken.as_bytes()).contains("line 2: it is not a JSON object"),
            "{}",
            error_of(broken.as_bytes())
        );
        let other = line(1).replacen("\"schema\":1", "\"schema\":7", 1) + "\n";
        assert!(error_of(other.as_bytes()).contains("line 1: it has version 7 of the format"));
        assert!(error_of(b"{\"strategy\": \"ddp\"}\n").contains("names no version"));
        assert!(error_of(b"{\"schema\": 1}\n").contains("not a record of `bench sweep`: missing field"));
        assert!(error_of(b"[1, 2]\n").contains("line 1: it is not a JSON object: it does not begin with a brace"));
        assert!(error_of(b"\x00\xff\n").contains("line 1: it is not a JSON object"));
        assert!(error_of("[".repeat(100_000).as_bytes()).contains("cut off"));
    }

    #[test]
    fn wrong_paths_are_said() {
        let folder = tempfile::tempdir().unwrap();
        let said = |path: &Path| read_records(path).unwrap_err();
        assert!(said(folder.path()).contains("holds no results.jsonl"), "{}", said(folder.path()));
        assert!(said(&folder.path().join("nowhere")).contains("give the folder of a sweep"));
        assert!(said(Path::new("/dev/zero")).contains("is not a regular file"));
    }
}
