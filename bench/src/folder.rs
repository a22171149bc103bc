//! Folders for results.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::BenchError;

/// The folder that the user has named, or a new one, ready to be written to.
///
/// # Errors
/// It cannot be written to.
pub(crate) fn results_folder(out: Option<PathBuf>, name: &str) -> Result<PathBuf, BenchError> {
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
pub(crate) fn make(out: &Path) -> Result<(), BenchError> {
    let probe = out.join(".write-test");
    let written = fs::create_dir_all(out).and_then(|()| fs::write(&probe, b"")).and_then(|()| fs::remove_file(&probe));
    written.map_err(|error| {
        format!("--out {}: cannot write there: {error}; give a folder that can be written", out.display()).into()
    })
}
