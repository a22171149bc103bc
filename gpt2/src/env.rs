//! The one module of this crate that reads the process environment.

use std::path::PathBuf;

/// Cargo's home folder: `CARGO_HOME` where it is set and not empty, else `.cargo` in the user's home folder; `None`
/// where neither is known.
#[must_use]
pub fn default_cargo_home() -> Option<PathBuf> {
    std::env::var_os("CARGO_HOME")
        .filter(|home| !home.is_empty())
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))
}
