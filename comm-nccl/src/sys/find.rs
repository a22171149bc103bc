//! Where NCCL is.

use std::collections::BTreeSet;
use std::env;
use std::ffi::c_int;
use std::fs;
use std::path::{Path, PathBuf};

use comm_core::Error;

use super::NcclTable;
use crate::{LIBRARY_VARIABLE, candidates, unsupported};

/// NCCL's library, loaded.
#[derive(Clone, Debug)]
pub struct Library {
    path: PathBuf,
    version: i32,
    table: &'static NcclTable,
}

impl Library {
    /// Finds the library: at the path that [`LIBRARY_VARIABLE`] names, else where the loader and Python installations keep it.
    ///
    /// # Errors
    /// `Unsupported`, naming what was tried.
    pub fn load() -> Result<Self, Error> {
        Self::open(&candidates(env::var_os(LIBRARY_VARIABLE).map(PathBuf::from), &python_roots()))
    }

    /// Loads the first of `paths` that is an NCCL library.
    ///
    /// # Errors
    /// `Unsupported`, naming what was tried.
    pub fn open(paths: &[PathBuf]) -> Result<Self, Error> {
        let mut tried = Vec::new();
        for path in paths {
            match Self::open_one(path) {
                Ok(library) => return Ok(library),
                Err(reason) => tried.push(format!("{} ({reason})", path.display())),
            }
        }
        Err(unsupported(format!(
            "no NCCL library; tried {}. Install NCCL, or name the library in {LIBRARY_VARIABLE}",
            tried.join(", ")
        )))
    }

    fn open_one(path: &Path) -> Result<Self, String> {
        // SAFETY: loading runs the library's initialisers; the candidates are names of NCCL's library or what the user named, and
        // NCCL's initialisers may run at any time.
        let library = unsafe { libloading::Library::new(path) }.map_err(|error| error.to_string())?;
        let mut version: c_int = 0;
        // SAFETY: `ncclResult_t ncclGetVersion(int*)` has had this C signature since NCCL 2.0; the result is an enum of C ints.
        let get_version = unsafe { library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0") }
            .map_err(|error| format!("not NCCL: {error}"))?;
        // SAFETY: the pointer is to a local that outlives the call, which only writes one int through it.
        let status = unsafe { get_version(&raw mut version) };
        if status != 0 {
            return Err(format!("ncclGetVersion returned {status}"));
        }
        let too_old = |why: &str| format!("NCCL {} is too old{why}; 2.18 or newer is needed", version_text(version));
        // Before, a communicator that is being made is not safe to leave alone.
        if version < 21_800 {
            return Err(too_old(""));
        }
        // SAFETY: NCCL's functions of these names have had these signatures since 2.18 (nccl.h), and keep them: their enums and
        // structures only grow at the end.
        let table = unsafe { NcclTable::of(&library) }
            .map_err(|symbol| too_old(&format!(" or not whole: it lacks {symbol}")))?;
        // Never unloaded.
        std::mem::forget(library);
        Ok(Library { path: path.to_path_buf(), version, table: Box::leak(Box::new(table)) })
    }

    /// A library whose functions are given.
    #[cfg(feature = "stand-in")]
    pub(crate) fn of(table: &'static NcclTable, version: i32) -> Self {
        Library { path: "(stand-in)".into(), version, table }
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version as NCCL codes it, such as 22809 for 2.28.9.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Its version for people.
    pub fn version_text(&self) -> String {
        version_text(self.version)
    }

    pub(crate) fn table(&self) -> &'static NcclTable {
        self.table
    }
}

/// Since 2.9 the code is major·10000 + minor·100 + patch; before, major·1000.
pub(crate) fn version_text(version: i32) -> String {
    let (major, rest) =
        if version >= 10_000 { (version / 10_000, version % 10_000) } else { (version / 1000, version % 1000) };
    format!("{major}.{}.{}", rest / 100, rest % 100)
}

/// Folders of Python packages: of the environment that is active, of the interpreters on the search path, of the user and the system.
fn python_roots() -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env::var_os).map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    // An environment's interpreter is a link: both ends of it have packages.
    let interpreters = env::split_paths(&path).map(|folder| folder.join("python3")).filter(|python| python.exists());
    let prefixes = interpreters.flat_map(|python| {
        let real = fs::canonicalize(&python).ok();
        [Some(python), real].into_iter().flatten().filter_map(|file| Some(file.parent()?.parent()?.to_path_buf()))
    });
    let user = env::var_os("HOME").map(|home| PathBuf::from(home).join(".local"));
    let system = [PathBuf::from("/usr/local"), PathBuf::from("/usr")];
    let mut seen = BTreeSet::new();
    named
        .chain(prefixes)
        .chain(user)
        .chain(system)
        .flat_map(|root| packages_below(&root))
        .filter(|root| seen.insert(root.clone()))
        .collect()
}

/// `lib/python3*/site-packages` and Debian's `dist-packages` below a Python installation.
fn packages_below(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(root.join("lib")) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .flat_map(|entry| ["site-packages", "dist-packages"].map(|name| entry.path().join(name)))
        .filter(|folder| folder.join("nvidia/nccl/lib").is_dir())
        .collect();
    found.sort();
    found
}
