//! What becomes of a job of processes in which a rank has died: `gpt2 train --max-restarts`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use comm_core::launch::LaunchOutcome;

use super::complain;
use super::folder::{self, STEPS};
use crate::checkpoint::sharded::{STATE, Saved};
use crate::trainer::Restarts;

/// The starts of a job, one after another.
pub(super) struct Attempts<'a> {
    out: &'a Path,
    max: u64,
    /// The arguments of the first.
    command: Vec<OsString>,
    /// Steps taken before the first.
    first_step: u64,
    /// The newest checkpoint in `out` before it, unless it went on from that: of an earlier run, or of a branch that is given up.
    foreign: Option<Latest>,
    /// Steps taken before the one that runs, and when the file of steps was last changed before it.
    began: (u64, Option<SystemTime>),
    so_far: Restarts,
}

/// A checkpoint that is the newest of its folder.
#[derive(PartialEq)]
struct Latest {
    path: PathBuf,
    step: u64,
    /// What its `run.json` says, in which everything has its hash: equal for equal checkpoints alone.
    state: Vec<u8>,
    /// When that was written: a run that is repeated saves the same.
    written: Option<SystemTime>,
}

impl Latest {
    fn of(out: &Path) -> Option<Self> {
        let store = folder::checkpoints(out);
        let step = *store.steps().last()?;
        let path = store.path(step);
        let state = fs::read(path.join(STATE)).ok()?;
        let written = fs::metadata(path.join(STATE)).and_then(|found| found.modified()).ok();
        Some(Latest { path, step, state, written })
    }
}

impl<'a> Attempts<'a> {
    /// Of a job with its files in `out` that goes on from `resume`, if from any, and is about to be started with `command`. It
    /// is started again `max` times at most.
    pub(super) fn new(out: &'a Path, max: u64, resume: Option<&Saved>, command: Vec<OsString>) -> Self {
        let same = |a: &Path, b: &Path| a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b));
        let foreign = Latest::of(out).filter(|latest| resume.is_none_or(|saved| !same(&latest.path, saved.folder())));
        let first_step = resume.map_or(0, |saved| saved.state().step);
        let began = (first_step, changed(out));
        Attempts { out, max, command, first_step, foreign, began, so_far: Restarts::default() }
    }

    /// The arguments with which the job that has failed is started again, if it is.
    ///
    /// A rank that a signal has killed is no fault of the run's. One that ended by itself may find the same wrong again; it is started
    /// again where the job had taken a step.
    pub(super) fn next(&mut self, outcome: &LaunchOutcome) -> Option<Vec<OsString>> {
        let (first, changed_before) = self.began;
        let has_steps = changed(self.out) != changed_before;
        let done = folder::last_step(self.out).filter(|_| has_steps).unwrap_or(first).max(first);
        if self.so_far.count == self.max || (outcome.code < 128 && done == first) {
            return None;
        }
        let latest = Latest::of(self.out).filter(|latest| Some(latest) != self.foreign.as_ref());
        let next = latest.as_ref().map_or(self.first_step, |latest| latest.step);
        let again = done.saturating_sub(next);
        self.so_far.count += 1;
        self.so_far.steps_lost += again;
        let cause = outcome.cause.as_deref().unwrap_or("the job failed");
        complain(format_args!(
            "warning: {cause}; restart {} of {}, from the state after step {next}; {again} steps are repeated",
            self.so_far.count, self.max
        ));
        let mut command = self.command.clone();
        match latest {
            Some(latest) => command.extend(["--resume".into(), latest.path.into()]),
            // Its files are in the way.
            None => command.push("--overwrite".into()),
        }
        let Restarts { count, steps_lost } = self.so_far;
        command.extend(["--restarts", &count.to_string(), "--steps-lost", &steps_lost.to_string()].map(OsString::from));
        self.began = (next, changed(self.out));
        Some(command)
    }
}

/// When the file of steps was last changed.
fn changed(out: &Path) -> Option<SystemTime> {
    fs::metadata(out.join(STEPS)).and_then(|found| found.modified()).ok()
}
