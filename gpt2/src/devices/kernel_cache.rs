//! Where compiled kernels and the results of autotuning are kept between runs.
//!
//! By itself the kernel compiler keeps nothing that it compiled, and what it measured below the folder it was started in. A file with
//! its settings, in the current folder or one above, is taken as it is; without one, both go to the user's cache folder.

use std::path::{Path, PathBuf};

/// Files that hold settings of the kernel compiler and nothing else, and those that hold them in the section `cubecl`.
const FILES: [&str; 2] = ["cubecl.toml", "CubeCL.toml"];
const FILES_WITH_SECTION: [&str; 2] = ["burn.toml", "Burn.toml"];

/// Where compiled kernels are kept, and what decides it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CacheLocation {
    /// The user's file with settings.
    Settings(PathBuf),
    /// The default folder.
    Folder(PathBuf),
    /// Nowhere: there is no default folder, since the user has no home folder.
    Nowhere,
}

impl CacheLocation {
    /// `start` and the folders above it are searched for a file with settings; `cache` is the user's cache folder.
    pub(super) fn find(start: Option<&Path>, cache: Option<PathBuf>) -> Self {
        if let Some(file) = start.and_then(settings_file) {
            return CacheLocation::Settings(file);
        }
        cache.map_or(CacheLocation::Nowhere, |cache| CacheLocation::Folder(cache.join("isocomm")))
    }

    /// The place for this process.
    #[cfg(feature = "kernel-cache")]
    pub(super) fn here() -> Self {
        Self::find(std::env::current_dir().ok().as_deref(), crate::env::user_cache_folder())
    }
}

fn settings_file(start: &Path) -> Option<PathBuf> {
    start.ancestors().find_map(|folder| {
        let whole = FILES.map(|name| folder.join(name)).into_iter().find(|path| path.is_file());
        whole.or_else(|| {
            FILES_WITH_SECTION.map(|name| folder.join(name)).into_iter().find(|path| {
                // Whether it parses, the compiler itself says.
                std::fs::read_to_string(path).is_ok_and(|text| text.contains("cubecl"))
            })
        })
    })
}

/// Sets the default, once; later calls, and calls after the first device was made, change nothing. What `compiler` makes goes into a
/// folder of its own, since another version's kernels may not load.
#[cfg(feature = "kernel-cache")]
pub(super) fn settle(compiler: &str) {
    use burn::cubecl::config::cache::CacheConfig;
    use burn::cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    let mut config = CubeClRuntimeConfig::default();
    match CacheLocation::here() {
        // Read by the compiler itself.
        CacheLocation::Settings(_) => return,
        CacheLocation::Folder(folder) => {
            config.compilation.cache = true;
            config.environment.path = CacheConfig::Directory(folder.join(compiler));
        }
        CacheLocation::Nowhere => config.autotune.disable_cache = true,
    }
    CubeClRuntimeConfig::try_set(config.override_from_env());
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn kernels_are_kept_in_the_users_cache_folder() {
        let start = tempfile::tempdir().unwrap();
        let place = CacheLocation::find(Some(start.path()), Some("/home/me/.cache".into()));
        assert_eq!(place, CacheLocation::Folder("/home/me/.cache/isocomm".into()));
        assert_eq!(CacheLocation::find(None, None), CacheLocation::Nowhere);
    }

    #[test]
    fn a_file_with_settings_here_or_above_decides() {
        let start = tempfile::tempdir().unwrap();
        let below = start.path().join("a/b");
        fs::create_dir_all(&below).unwrap();
        let find = || CacheLocation::find(Some(&below), Some("/cache".into()));

        fs::write(start.path().join("burn.toml"), "[fusion]\n").unwrap();
        assert_eq!(find(), CacheLocation::Folder("/cache/isocomm".into()));
        fs::write(start.path().join("burn.toml"), "[cubecl.autotune]\nlevel = \"minimal\"\n").unwrap();
        assert_eq!(find(), CacheLocation::Settings(start.path().join("burn.toml")));
        fs::write(below.join("cubecl.toml"), "").unwrap();
        assert_eq!(find(), CacheLocation::Settings(below.join("cubecl.toml")));
    }
}
