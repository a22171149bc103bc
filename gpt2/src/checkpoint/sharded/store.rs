//! The folder of a run's checkpoints, in which one is whole or not there.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::{SavedError, State};

/// The file of a checkpoint's [`State`]: the last that is written.
pub const STATE: &str = "run.json";

/// What a checkpoint's name begins with; the step follows.
const STEP: &str = "step-";

/// What the name of one that is being written or removed ends with, after a dot, the name, and before this another dot.
const UNFINISHED: &str = "tmp";
const REMOVED: &str = "old";

/// A folder of checkpoints, each a folder `step-N` in it.
///
/// One is begun as `.step-N.tmp`, filled by all ranks, and renamed when everything is on disk. One that is removed is renamed first. What a
/// kill leaves under such names is removed by the next run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store(PathBuf);

impl Store {
    /// The store in `folder`, which need not be there.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Store(folder.into())
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Where the checkpoint after `step` steps is, or would be.
    pub fn path(&self, step: u64) -> PathBuf {
        self.0.join(format!("{STEP}{step}"))
    }

    /// The steps of all checkpoints, in order.
    pub fn steps(&self) -> Vec<u64> {
        let mut steps: Vec<u64> = self.names().iter().filter_map(|name| step_of(name)).collect();
        steps.sort_unstable();
        steps
    }

    /// The newest checkpoint.
    pub fn latest(&self) -> Option<PathBuf> {
        self.steps().last().map(|step| self.path(*step))
    }

    /// What lies here under names of unfinished and removed checkpoints.
    pub fn left_behind(&self) -> Vec<PathBuf> {
        let is_left = |name: &String| {
            let inner = name.strip_prefix('.').and_then(|name| name.rsplit_once('.'));
            inner.is_some_and(|(name, end)| step_of(name).is_some() && [UNFINISHED, REMOVED].contains(&end))
        };
        self.names().into_iter().filter(is_left).map(|name| self.0.join(name)).collect()
    }

    /// Removes the checkpoint after `step` steps, if there is one: at once from under its name, and then its files.
    ///
    /// # Errors
    /// The operating system's.
    pub fn remove(&self, step: u64) -> io::Result<()> {
        let away = self.hidden(step, REMOVED);
        remove_folder(&away)?;
        match fs::rename(self.path(step), &away) {
            Ok(()) => remove_folder(&away),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Makes an empty folder for the checkpoint after `step` steps, under the name that it has until it is whole.
    ///
    /// # Errors
    /// [`SavedError::Io`].
    pub(crate) fn begin(&self, step: u64) -> Result<(), SavedError> {
        let path = self.unfinished(step);
        let made = fs::create_dir_all(&self.0).and_then(|()| remove_folder(&path)).and_then(|()| fs::create_dir(&path));
        made.map_err(|source| SavedError::Io { path: self.path(step), what: "cannot make a folder for it", source })
    }

    /// Where `rank` writes its part until the checkpoint is whole, and what that file is called.
    pub(crate) fn part(&self, step: u64, rank: usize) -> (PathBuf, String) {
        let name = format!("rank-{rank}.safetensors");
        (self.unfinished(step).join(&name), name)
    }

    /// Ends the checkpoint that [`begin`](Self::begin) began, when all parts of `state` are written: it appears under its name.
    ///
    /// # Errors
    /// [`SavedError::Io`]; [`SavedError::Altered`] for a part that is not here as it was written, which is so where ranks of several machines
    /// do not share the folder.
    pub(crate) fn commit(&self, state: &State) -> Result<(), SavedError> {
        let (folder, path) = (self.unfinished(state.step), self.path(state.step));
        for file in &state.files {
            let found = fs::metadata(folder.join(&file.name)).map(|found| found.len());
            if !matches!(found, Ok(len) if len == file.bytes) {
                return Err(SavedError::Absent {
                    path: self.path(state.step),
                    detail: format!(
                        "{} is missing, or is not what its rank wrote; --out must be a folder that all ranks share",
                        file.name
                    ),
                });
            }
        }
        let io = |what| {
            let path = path.clone();
            move |source| SavedError::Io { path, what, source }
        };
        let bytes = state.to_file().map_err(io::Error::from).map_err(io("cannot write it"))?;
        let write = || {
            let mut file = File::create(folder.join(STATE))?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            sync(&folder)
        };
        write().map_err(io("cannot write it (disk full?)"))?;
        // One of an earlier run, or of this one before it went on from another step.
        self.remove(state.step).map_err(io("cannot replace the earlier one"))?;
        fs::rename(&folder, &path).map_err(io("cannot rename the finished folder to it"))?;
        sync(&self.0).map_err(io("cannot sync its folder"))
    }

    /// Removes what [`begin`](Self::begin) and the ranks have made, after one has failed.
    pub(crate) fn discard(&self, step: u64) {
        // The error of the write says more than one of this would.
        let _ = remove_folder(&self.unfinished(step));
    }

    /// Removes all checkpoints but the newest `keep` and that of the step `spared`.
    ///
    /// # Errors
    /// The operating system's.
    pub(crate) fn keep_newest(&self, keep: usize, spared: Option<u64>) -> io::Result<()> {
        let steps = self.steps();
        let older = steps.len().saturating_sub(keep);
        steps[..older].iter().filter(|step| Some(**step) != spared).try_for_each(|step| self.remove(*step))
    }

    fn unfinished(&self, step: u64) -> PathBuf {
        self.hidden(step, UNFINISHED)
    }

    fn hidden(&self, step: u64, end: &str) -> PathBuf {
        self.0.join(format!(".{STEP}{step}.{end}"))
    }

    fn names(&self) -> Vec<String> {
        // A folder that cannot be read is found out where one is written or opened.
        let Ok(entries) = fs::read_dir(&self.0) else { return Vec::new() };
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }
}

/// The step in a checkpoint's name.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(STEP)?;
    let step = digits.parse().ok()?;
    // One name a step.
    (format!("{step}") == digits).then_some(step)
}

/// Removes a folder with all that is in it, if it is there.
fn remove_folder(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_stay_and_the_one_that_is_spared() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path());
        [2, 4, 6, 10].iter().for_each(|step| fs::create_dir(store.path(*step)).unwrap());
        for (keep, spared, left) in
            [(9, None, vec![2, 4, 6, 10]), (2, Some(4), vec![4, 6, 10]), (2, Some(6), vec![6, 10]), (1, None, vec![10])]
        {
            store.keep_newest(keep, spared).unwrap();
            assert_eq!(store.steps(), left, "{keep}, {spared:?}");
        }
    }
}
