//! The one place of this crate with `unsafe`: loading NCCL and calling it.

use std::env;
use std::ffi::c_int;
use std::fs;
use std::path::{Path, PathBuf};

use comm_core::Error;

use crate::{LIBRARY_VARIABLE, candidates, unsupported};

/// NCCL's library, loaded.
#[derive(Debug)]
pub struct Library {
    /// Kept, because the code of the functions lives in it.
    _library: libloading::Library,
    path: PathBuf,
    version: i32,
}

impl Library {
    /// Finds the library: at the path that [`LIBRARY_VARIABLE`] names, else where the loader and a Python installation keep it.
    ///
    /// # Errors
    /// `Unsupported`, naming what was tried.
    pub fn load() -> Result<Self, Error> {
        let python = env::var_os("VIRTUAL_ENV").map(PathBuf::from);
        let roots: Vec<PathBuf> = python.iter().flat_map(|root| site_packages(root)).collect();
        Self::open(&candidates(env::var_os(LIBRARY_VARIABLE).map(PathBuf::from), &roots))
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
        Ok(Library { _library: library, path: path.to_path_buf(), version })
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
        // Since 2.9 the code is major·10000 + minor·100 + patch; before, major·1000.
        let (major, rest) = if self.version >= 10_000 {
            (self.version / 10_000, self.version % 10_000)
        } else {
            (self.version / 1000, self.version % 1000)
        };
        format!("{major}.{}.{}", rest / 100, rest % 100)
    }
}

/// `lib/python3.*/site-packages` below a Python installation.
fn site_packages(root: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(root.join("lib")) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
        .map(|entry| entry.path().join("site-packages"))
        .collect();
    found.sort();
    found
}
