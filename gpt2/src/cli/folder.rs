//! The folder of a run's results: one run at a time, and none on top of another.

use std::fs;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::{CliError, Passing, complain, of_system};
use crate::checkpoint::sharded::{STATE, Store};
use crate::checkpoint::{self, COMPANIONS};

/// The checkpoint's name in the folder.
pub(super) const CHECKPOINT: &str = "model.safetensors";

/// The name of the weights of the best validation.
pub(super) const BEST: &str = "best.safetensors";

/// The name of the folder of checkpoints of the whole state.
pub(super) const CHECKPOINTS: &str = "checkpoints";

/// The name of the file of steps.
pub(super) const STEPS: &str = "steps.jsonl";

/// The name of the folder for TensorBoard.
pub(super) const EVENTS: &str = "tensorboard";

/// Makes the folder if need be, and finds out now, not after hours of training, whether files can be written there. `option` names it.
pub(super) fn make_writable(folder: &Path, option: &str) -> Result<(), CliError> {
    let probe = folder.join(format!("{PROBE}{}", std::process::id()));
    let probed = fs::create_dir_all(folder).and_then(|()| fs::write(&probe, b"")).and_then(|()| remove(&probe));
    probed.map_err(|error| {
        let said =
            format!("{option}{}: cannot write there: {error}; give a folder that can be written", folder.display());
        of_system(error.kind(), said)
    })
}

/// What becomes of an earlier run in the folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Earlier {
    /// There must be none.
    Refused,
    /// It is removed.
    Replaced,
    /// It goes on after so many steps. What it has of later ones is removed, if it may be.
    GoesOn {
        /// The steps.
        step: u64,
        /// Whether checkpoints of later steps may be removed.
        overwrite: bool,
    },
}

impl Earlier {
    /// Of a run in `folder` that goes on from `resume`, if from any, and may `overwrite` an earlier one.
    pub(super) fn of(folder: &Path, resume: Option<&Path>, overwrite: bool) -> Self {
        match resume.and_then(|resume| step_in(&checkpoints(folder), resume)) {
            Some(step) => Earlier::GoesOn { step, overwrite },
            None if overwrite => Earlier::Replaced,
            None => Earlier::Refused,
        }
    }

    /// # Errors
    /// The folder holds an earlier run that may not be replaced, or more of the one that goes on than may be removed.
    pub(super) fn check(self, folder: &Path) -> Result<(), CliError> {
        match self {
            Earlier::Refused => refuse_earlier_run(folder),
            Earlier::GoesOn { step, overwrite: false } => refuse_later_checkpoints(folder, step),
            Earlier::Replaced | Earlier::GoesOn { overwrite: true, .. } => Ok(()),
        }
    }

    /// Removes what is to go of an earlier run, as late as can be: a run that ends before its first step must not cost an earlier one.
    ///
    /// # Errors
    /// The operating system's, with the path.
    pub(super) fn make_way(self, folder: &Path) -> io::Result<()> {
        let store = checkpoints(folder);
        let after = match self {
            Earlier::Refused | Earlier::Replaced => {
                earlier_files(folder).iter().try_for_each(|path| remove(path).map_err(|error| at(path, &error)))?;
                None
            }
            Earlier::GoesOn { step, .. } => {
                let path = folder.join(STEPS);
                cut_steps(&path, step).map_err(|error| at(&path, &error))?;
                Some(step)
            }
        };
        let later = store.steps().into_iter().filter(|step| after.is_none_or(|after| *step > after));
        later.into_iter().try_for_each(|step| store.remove(step).map_err(|error| at(&store.path(step), &error)))
    }
}

/// The store of checkpoints in the folder of a run.
pub(super) fn checkpoints(folder: &Path) -> Store {
    Store::new(folder.join(CHECKPOINTS))
}

/// The checkpoint that `--resume` names: `latest` or `auto` in the folder of this run, a checkpoint, or the latest in the folder of a run.
/// `None` for `auto` where there is none yet.
///
/// # Errors
/// There is none.
pub(super) fn find_checkpoint(folder: &Path, given: &Path) -> Result<Option<PathBuf>, CliError> {
    if is_auto(given) {
        return newest(folder);
    }
    let is_latest = given == Path::new(LATEST);
    let run = if is_latest { folder } else { given };
    if !is_latest && (given.join(STATE).exists() || !given.join(CHECKPOINTS).is_dir()) {
        // Whatever is wrong with it is said where it is opened.
        return Ok(Some(given.to_owned()));
    }
    let store = checkpoints(run);
    store.latest().map(Some).ok_or_else(|| {
        format!(
            "--resume {}: there is no checkpoint in {}; name another folder, or leave out --resume to start from the beginning",
            given.display(),
            store.folder().display()
        )
        .into()
    })
}

/// The newest checkpoint in the folder of this run, if there is one.
///
/// # Errors
/// The folder is there and cannot be read: a run must not begin anew for that.
fn newest(folder: &Path) -> Result<Option<PathBuf>, CliError> {
    let store = checkpoints(folder);
    match fs::read_dir(store.folder()).and_then(|mut entries| entries.try_for_each(|entry| entry.map(drop))) {
        Ok(()) => Ok(store.latest()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            let said = format!("--resume auto: cannot look for checkpoints in {}: {error}", store.folder().display());
            Err(of_system(error.kind(), said))
        }
    }
}

/// What `--resume` takes for the newest checkpoint in `--out`.
pub(super) const LATEST: &str = "latest";

/// Whether `--resume` is given so that the same command begins a run and goes on with it.
pub(super) fn is_auto(given: &Path) -> bool {
    given == Path::new("auto")
}

/// The number of the last step in the file of steps, if there is one.
pub(super) fn last_step(folder: &Path) -> Option<u64> {
    let mut last = None;
    // What cannot be read is not counted.
    let _ = lines(&folder.join(STEPS), &mut |line, _| {
        last = step_of(line).or(last);
        true
    });
    last
}

/// How long a run waits for another one that writes into its folder: an earlier start of it may still be saving its state.
pub(super) const ENDING: Duration = Duration::from_secs(30);

/// Readies the folder that a run has taken by [`lock`]. What a run that was killed has left half-written is removed; an earlier run stays
/// until [`Earlier::make_way`].
///
/// # Errors
/// An earlier run lies there that must not.
pub(super) fn make_ready(folder: &Path, earlier: Earlier) -> Result<(), CliError> {
    earlier.check(folder)?;
    for path in left_by_the_killed(folder) {
        // What cannot be removed is in nobody's way until it is to be written, and then that says why.
        let _ = remove(&path);
    }
    for path in checkpoints(folder).left_behind() {
        let _ = fs::remove_dir_all(&path);
    }
    Ok(())
}

fn refuse_later_checkpoints(folder: &Path, after: u64) -> Result<(), CliError> {
    let store = checkpoints(folder);
    match store.steps().last().filter(|last| **last > after) {
        None => Ok(()),
        Some(last) => Err(format!(
            "--out {}: it holds checkpoints of later steps than step {after}, from which this run continues ({}); give another folder, or \
             --overwrite to remove them",
            folder.display(),
            store.path(*last).display()
        )
        .into()),
    }
}

/// The step of `path`, where that is a checkpoint in `store`.
fn step_in(store: &Store, path: &Path) -> Option<u64> {
    let path = path.canonicalize().ok()?;
    store.steps().into_iter().find(|step| store.path(*step).canonicalize().is_ok_and(|found| found == path))
}

/// Cuts the file of steps, if there is one, behind what it has of the first `after` steps.
fn cut_steps(path: &Path, after: u64) -> io::Result<()> {
    let mut end = 0;
    let read = lines(path, &mut |line, behind| {
        let stays = step_of(line).is_some_and(|step| step <= after);
        if stays {
            end = behind;
        }
        stays
    });
    match read {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(()) => fs::OpenOptions::new().write(true).open(path)?.set_len(end),
    }
}

/// Gives each whole line of a file to `each`, with where it ends, as long as that wants more.
fn lines(path: &Path, each: &mut dyn FnMut(&[u8], u64) -> bool) -> io::Result<()> {
    let mut file = BufReader::new(fs::File::open(path)?);
    let (mut line, mut end) = (Vec::new(), 0);
    loop {
        line.clear();
        end += file.read_until(b'\n', &mut line)? as u64;
        if !line.ends_with(b"\n") || !each(&line, end) {
            return Ok(());
        }
    }
}

/// The number of the step that a line of the file of steps is about.
fn step_of(line: &[u8]) -> Option<u64> {
    #[derive(Deserialize)]
    struct Step {
        step: u64,
    }
    serde_json::from_slice::<Step>(line).ok().map(|line| line.step)
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// # Errors
/// The folder holds an earlier run.
fn refuse_earlier_run(folder: &Path) -> Result<(), CliError> {
    let mut found = earlier_files(folder);
    let store = checkpoints(folder);
    found.extend(store.steps().into_iter().map(|step| store.path(step)));
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

/// The files of an earlier run, without its checkpoints of the whole state.
fn earlier_files(folder: &Path) -> Vec<PathBuf> {
    let names = [CHECKPOINT, BEST, STEPS].into_iter().chain(COMPANIONS);
    let mut files: Vec<PathBuf> = names.map(|name| folder.join(name)).collect();
    files.retain(|path| path.symlink_metadata().is_ok());
    files.extend(named(&folder.join(EVENTS), "events.out.tfevents."));
    files
}

fn left_by_the_killed(folder: &Path) -> Vec<PathBuf> {
    let mut files = named(folder, PROBE);
    files
        .extend([CHECKPOINT, BEST].into_iter().chain(COMPANIONS).map(|name| checkpoint::temporary(&folder.join(name))));
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

/// Takes the folder for a run that is about to begin, until the file that is returned is dropped. While another run has it, this waits `patience`
/// for it to end, and says so.
///
/// # Errors
/// Another run keeps the folder, or the operating system refuses.
pub(super) fn lock(folder: &Path, patience: Duration) -> Result<fs::File, CliError> {
    let path = folder.join(".lock");
    let refused = |error: &io::Error| of_system(error.kind(), format!("{}: {error}", path.display()));
    let file = fs::File::create(&path).map_err(|error| refused(&error))?;
    let since = Instant::now();
    let mut is_said = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(fs::TryLockError::Error(error)) => return Err(refused(&error)),
            Err(fs::TryLockError::WouldBlock) if since.elapsed() >= patience => {
                let said = format!("--out {}: another run is writing there; give another folder", folder.display());
                return Err(Passing(said).into());
            }
            Err(fs::TryLockError::WouldBlock) => {}
        }
        if !is_said {
            is_said = true;
            complain(format_args!(
                "--out {}: another run is writing there; waiting up to {} s for it to end",
                folder.display(),
                patience.as_secs()
            ));
        }
        thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::super::is_passing;
    use super::*;

    fn take(folder: &Path, earlier: Earlier) -> Result<fs::File, CliError> {
        let lock = lock(folder, Duration::ZERO)?;
        make_ready(folder, earlier).map(|()| lock)
    }

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
        for name in [CHECKPOINT, BEST, STEPS, "config.json", events] {
            let folder = tempfile::tempdir().unwrap();
            let folder = folder.path();
            fs::create_dir(folder.join(EVENTS)).unwrap();
            fs::write(folder.join("notes.txt"), "mine").unwrap();
            fs::write(folder.join(EVENTS).join("profile.pb"), "mine").unwrap();
            // Files of others are no run.
            refuse_earlier_run(folder).unwrap();
            drop(take(folder, Earlier::Refused).unwrap());
            fs::write(folder.join(name), "of the earlier run").unwrap();
            for error in [refuse_earlier_run(folder).unwrap_err(), take(folder, Earlier::Refused).unwrap_err()] {
                let said = error.to_string();
                assert!(said.contains(name) && said.contains("--overwrite"), "{said}");
            }
            assert_eq!(fs::read(folder.join(name)).unwrap(), b"of the earlier run");
            let lock = take(folder, Earlier::Replaced).unwrap();
            assert_eq!(fs::read(folder.join(name)).unwrap(), b"of the earlier run", "until the first step");
            Earlier::Replaced.make_way(folder).unwrap();
            drop(lock);
            assert_eq!(files(folder), [".lock", "notes.txt", "profile.pb", "tensorboard"], "{name}");
        }
    }

    #[test]
    fn what_a_killed_run_left_half_written_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let half = [
            ".model.safetensors.tmp",
            ".best.safetensors.tmp",
            ".config.json.tmp",
            ".write-test-1",
            ".write-test-23456",
        ];
        for name in half {
            fs::write(folder.path().join(name), "half").unwrap();
        }
        let store = checkpoints(folder.path());
        for name in [".step-7.tmp", ".step-3.old", ".step-7.mine"] {
            fs::create_dir_all(store.folder().join(name)).unwrap();
            fs::write(store.folder().join(name).join("rank-0.safetensors"), "half").unwrap();
        }
        drop(take(folder.path(), Earlier::Refused).unwrap());
        assert_eq!(files(folder.path()), [".lock", CHECKPOINTS]);
        assert_eq!(files(store.folder()), [".step-7.mine"]);
        make_writable(&folder.path().join("a/b"), "--out ").unwrap();
        assert_eq!(files(&folder.path().join("a/b")), [""; 0]);
    }

    #[test]
    fn a_folder_is_taken_by_one_run_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let held = take(folder.path(), Earlier::Refused).unwrap();
        fs::write(folder.path().join(STEPS), "of the run that goes on").unwrap();
        let error = take(folder.path(), Earlier::Replaced).unwrap_err();
        assert!(error.to_string().contains("another run is writing there") && is_passing(&error), "{error}");
        assert!(folder.path().join(STEPS).exists());
        thread::scope(|scope| {
            let waits = scope.spawn(|| lock(folder.path(), Duration::from_secs(600)));
            drop(held);
            waits.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_run_that_goes_on_keeps_what_it_has_of_earlier_steps() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let store = checkpoints(folder);
        for step in [2, 4, 10] {
            fs::create_dir_all(store.path(step)).unwrap();
        }
        assert_eq!(store.latest(), Some(store.path(10)));
        let steps = "{\"step\":1}\n{\"step\":2,\"loss\":1}\n{\"step\":2,\"validation_loss\":3}\n{\"step\":3}\n{\"step\":4}\n{\"st";
        fs::write(folder.join(STEPS), steps).unwrap();
        fs::write(folder.join(CHECKPOINT), "weights").unwrap();
        assert_eq!(last_step(folder), Some(4));
        // Whatever way leads there.
        let given = folder.join(CHECKPOINTS).join(".").join("step-2");
        assert_eq!(Earlier::of(folder, Some(&folder.join("step-2")), true), Earlier::Replaced);
        let goes_on = |overwrite| Earlier::of(folder, Some(&given), overwrite);
        assert_eq!(goes_on(false), Earlier::GoesOn { step: 2, overwrite: false });
        let said = take(folder, goes_on(false)).unwrap_err().to_string();
        assert!(said.contains("step-10") && said.contains("--overwrite"), "{said}");
        drop(take(folder, goes_on(true)).unwrap());
        goes_on(true).make_way(folder).unwrap();
        assert_eq!(store.steps(), [2]);
        let left = fs::read_to_string(folder.join(STEPS)).unwrap();
        assert_eq!(left, steps.split_once("{\"step\":3}").unwrap().0);
        assert_eq!(fs::read(folder.join(CHECKPOINT)).unwrap(), b"weights");
        take(folder, goes_on(false)).unwrap();
    }

    #[test]
    fn a_checkpoint_is_found_by_its_folder_by_that_of_its_run_and_as_the_latest_if_there_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        let find = |given: &Path| find_checkpoint(out, given);
        assert_eq!(find(Path::new("auto")).unwrap(), None);
        fs::write(out.join(CHECKPOINTS), "no folder").unwrap();
        let said = find(Path::new("auto")).unwrap_err().to_string();
        assert!(said.contains("--resume auto") && said.contains(CHECKPOINTS), "{said}");
        fs::remove_file(out.join(CHECKPOINTS)).unwrap();
        let said = find(Path::new(LATEST)).unwrap_err().to_string();
        assert!(said.contains("--resume latest") && said.contains("no checkpoint"), "{said}");
        let store = checkpoints(out);
        for step in [9, 10] {
            fs::create_dir_all(store.path(step)).unwrap();
            fs::write(store.path(step).join(STATE), "{}").unwrap();
        }
        fs::create_dir_all(store.folder().join(".step-11.tmp")).unwrap();
        assert_eq!(find(Path::new(LATEST)).unwrap(), Some(store.path(10)));
        assert_eq!(find(Path::new("auto")).unwrap(), Some(store.path(10)));
        assert_eq!(find(out).unwrap(), Some(store.path(10)));
        assert_eq!(find(&store.path(9)).unwrap(), Some(store.path(9)));
        assert_eq!(find(Path::new("/nowhere")).unwrap(), Some("/nowhere".into()));
    }
}
