//! The one module of this crate that reads the process environment.

use std::path::PathBuf;

/// Cargo's home folder: `CARGO_HOME` where it is set and not empty, else `.cargo` in the user's home folder; `None`
/// where neither is known.
#[must_use]
pub fn default_cargo_home() -> Option<PathBuf> {
    folder("CARGO_HOME").or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))
}

/// The user's folder for what can be made again: `XDG_CACHE_HOME`, else `.cache` in the home folder; `None` where neither is known.
#[must_use]
pub fn user_cache_folder() -> Option<PathBuf> {
    // As the XDG specification has it, a relative path counts for nothing.
    folder("XDG_CACHE_HOME")
        .filter(|folder| folder.is_absolute())
        .or_else(|| home_folder().map(|home| home.join(".cache")))
}

/// The folder of a CUDA toolkit that `CUDA_PATH` names, even if that is not there: nothing else is then searched.
#[must_use]
pub fn cuda_path() -> Option<PathBuf> {
    std::env::var_os("CUDA_PATH").map(PathBuf::from)
}

/// Folders below which Python packages may lie: of the virtual or Conda environment that is active, of the user, of the system.
#[must_use]
pub fn python_roots() -> Vec<PathBuf> {
    let active = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(folder);
    let home = home_folder().map(|home| home.join(".local"));
    active.chain(home).chain(["/usr/local", "/usr"].map(PathBuf::from)).collect()
}

/// Whether Open MPI has started this process. It gives ranks a terminal for their standard output, and hands on what they write there to
/// whatever its own is, a file perhaps.
#[must_use]
pub fn is_rank_of_open_mpi() -> bool {
    std::env::var_os("OMPI_COMM_WORLD_RANK").is_some()
}

fn home_folder() -> Option<PathBuf> {
    std::env::home_dir().filter(|home| !home.as_os_str().is_empty())
}

fn folder(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}
