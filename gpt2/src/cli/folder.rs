//! The folder of a run's results: one run at a time, and none on top of another.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::CliError;
use crate::checkpoint::{self, COMPANIONS};

/// The checkpoint's name in the folder.
pub(super) const CHECKPOINT: &str = "model.safetensors";

/// The name of the file of steps.
pub(super) const STEPS: &str = "steps.jsonl";

/// The name of the folder for TensorBoard.
pub(super) const EVENTS: &str = "tensorboard";

/// Makes the folder if need be, and finds out now, not after hours of training, whether files can be written there. `option` names it.
pub(super) fn make_writable(folder: &Path, option: &str) -> Result<(), CliError> {
    let probe = folder.join(format!("{PROBE}{}", std::process::id()));
    let probed = fs::create_dir_all(folder).and_then(|()| fs::write(&probe, b"")).and_then(|()| remove(&probe));
    probed.map_err(|error| {
        format!("{option}{}: cannot write there: {error}; give a folder that can be written", folder.display()).into()
    })
}

/// Takes the folder for a run that is about to begin, until the file that is returned is dropped. What a run that was killed has left
/// half-written is removed; an earlier run stays until [`remove_earlier_run`].
///
/// # Errors
/// Another run has taken the folder, an earlier one lies there and `overwrite` is not set, or the operating system refuses.
pub(super) fn take(folder: &Path, overwrite: bool) -> Result<fs::File, CliError> {
    let lock = lock(folder)?;
    if !overwrite {
        refuse_earlier_run(folder)?;
    }
    for path in left_by_the_killed(folder) {
        // What cannot be removed is in nobody's way until it is to be written, and then that says why.
        let _ = remove(&path);
    }
    Ok(lock)
}

/// Removes the files of an earlier run, as late as can be: a run that ends before its first step must not cost an earlier one.
///
/// # Errors
/// The operating system's, with the path.
pub(super) fn remove_earlier_run(folder: &Path) -> io::Result<()> {
    earlier_run(folder).iter().try_for_each(|path| {
        remove(path).map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
    })
}

/// # Errors
/// The folder holds an earlier run.
pub(super) fn refuse_earlier_run(folder: &Path) -> Result<(), CliError> {
    let found = earlier_run(folder);
    if found.is_empty() {
        return Ok(());
    }
    let names: Vec<String> =
        found.iter().map(|path| path.strip_prefix(folder).unwrap_or(path).display().to_string()).collect();
    let message = format!(
        "--out {}: it holds an earlier run ({}); give another folder, or --overwrite to replace that run",
        folder.display(),
        names.join(", ")
    );
    Err(message.into())
}

/// # Errors
/// The folder holds a model.
pub(super) fn refuse_model(folder: &Path) -> Result<(), CliError> {
    match [CHECKPOINT].into_iter().chain(COMPANIONS).find(|name| folder.join(name).symlink_metadata().is_ok()) {
        None => Ok(()),
        Some(name) => Err(format!(
            "{}: it holds a model ({name}); give another folder, or --overwrite to replace it",
            folder.display()
        )
        .into()),
    }
}

/// What the name of a file begins with that is written to see whether one can be.
const PROBE: &str = ".write-test-";

/// The files of an earlier run.
fn earlier_run(folder: &Path) -> Vec<PathBuf> {
    let names = [CHECKPOINT, STEPS].into_iter().chain(COMPANIONS);
    let mut files: Vec<PathBuf> = names.map(|name| folder.join(name)).collect();
    files.retain(|path| path.symlink_metadata().is_ok());
    files.extend(named(&folder.join(EVENTS), "events.out.tfevents."));
    files
}

fn left_by_the_killed(folder: &Path) -> Vec<PathBuf> {
    let mut files = named(folder, PROBE);
    files.extend([CHECKPOINT].into_iter().chain(COMPANIONS).map(|name| checkpoint::temporary(&folder.join(name))));
    files
}

/// What lies in `folder`, if there is one, under names that begin so; in the order of names.
fn named(folder: &Path, beginning: &str) -> Vec<PathBuf> {
    // One that cannot be read is found out where it is written.
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(beginning))
        .map(|entry| entry.path())
        .collect();
    paths.sort();
    paths
}

/// Removes a file that may be gone already: ranks of one machine look into the same folder at the same time.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn lock(folder: &Path) -> Result<fs::File, CliError> {
    let path = folder.join(".lock");
    let file = fs::File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    file.try_lock().map_err(|error| match error {
        fs::TryLockError::WouldBlock => {
            format!("--out {}: another run is writing there; give another folder", folder.display())
        }
        fs::TryLockError::Error(error) => format!("{}: {error}", path.display()),
    })?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of all files in the folder and the one for TensorBoard, in order.
    fn files(folder: &Path) -> Vec<String> {
        let names = |path: &Path| {
            let entries = fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            entries.collect::<Vec<_>>()
        };
        let mut all = names(folder);
        if folder.join(EVENTS).is_dir() {
            all.extend(names(&folder.join(EVENTS)));
        }
        all.sort();
        all
    }

    #[test]
    fn any_file_of_an_earlier_run_is_refused_and_replaced_only_when_told() {
        let events = "tensorboard/events.out.tfevents.1.host.2.0";
        for name in [CHECKPOINT, STEPS, "config.json", events] {
            let folder = tempfile::tempdir().unwrap();
            let folder = folder.path();
            fs::create_dir(folder.join(EVENTS)).unwrap();
            fs::write(folder.join("notes.txt"), "mine").unwrap();
            fs::write(folder.join(EVENTS).join("profile.pb"), "mine").unwrap();
            // Files of others are no run.
            refuse_earlier_run(folder).unwrap();
            drop(take(folder, false).unwrap());
            fs::write(folder.join(name), "of the earlier run").unwrap();
            for error in [refuse_earlier_run(folder).unwrap_err(), take(folder, false).unwrap_err()] {
                let said = error.to_string();
                assert!(said.contains(name) && said.contains("--overwrite"), "{said}");
            }
            assert_eq!(fs::read(folder.join(name)).unwrap(), b"of the earlier run");
            let lock = take(folder, true).unwrap();
            assert_eq!(fs::read(folder.join(name)).unwrap(), b"of the earlier run", "until the first step");
            remove_earlier_run(folder).unwrap();
            drop(lock);
            assert_eq!(files(folder), [".lock", "notes.txt", "profile.pb", "tensorboard"], "{name}");
        }
    }

    #[test]
    fn what_a_killed_run_left_half_written_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        for name in [".model.safetensors.tmp", ".config.json.tmp", ".write-test-1", ".write-test-23456"] {
            fs::write(folder.path().join(name), "half").unwrap();
        }
        drop(take(folder.path(), false).unwrap());
        assert_eq!(files(folder.path()), [".lock"]);
        make_writable(&folder.path().join("a/b"), "--out ").unwrap();
        assert_eq!(files(&folder.path().join("a/b")), [""; 0]);
    }

    #[test]
    fn a_folder_is_taken_by_one_run_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let held = take(folder.path(), false).unwrap();
        fs::write(folder.path().join(STEPS), "of the run that goes on").unwrap();
        let said = take(folder.path(), true).unwrap_err().to_string();
        assert!(said.contains("another run is writing there"), "{said}");
        assert!(folder.path().join(STEPS).exists());
        drop(held);
        take(folder.path(), true).unwrap();
    }
}
