//! Folders for results, and small files that users write.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::BenchError;

/// The folder that the user has named, or a new one, ready to be written to.
///
/// # Errors
/// It cannot be written to.
pub fn results_folder(out: Option<PathBuf>, name: &str) -> Result<PathBuf, BenchError> {
    let out = out.unwrap_or_else(|| {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        PathBuf::from("bench-results").join(format!("{name}-{seconds}"))
    });
    make(&out)?;
    Ok(out)
}

/// Makes a folder that can be written to.
///
/// # Errors
/// It cannot.
pub fn make(out: &Path) -> Result<(), BenchError> {
    let probe = out.join(".write-test");
    let written = fs::create_dir_all(out).and_then(|()| fs::write(&probe, b"")).and_then(|()| fs::remove_file(&probe));
    written.map_err(|error| {
        format!("--out {}: cannot write there: {error}; give a folder that can be written", out.display()).into()
    })
}

/// Largest file that a person writes for this program.
const LARGEST: u64 = 1 << 20;

/// The text of a small file.
///
/// # Errors
/// What is wrong with it, for the user.
pub fn read_small(path: &Path) -> Result<String, String> {
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    // A pipe would be waited for, and a device has no end.
    if !fs::metadata(path).map_err(told)?.is_file() {
        return Err(format!("{} is not a regular file; give the path of a text file", path.display()));
    }
    let mut text = String::new();
    File::open(path).and_then(|file| file.take(LARGEST + 1).read_to_string(&mut text)).map_err(told)?;
    if text.len() as u64 > LARGEST {
        return Err(format!("{} is longer than 1 MiB; give the path of a small text file", path.display()));
    }
    Ok(text)
}
