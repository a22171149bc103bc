//! How jobs end: what their ranks have written, or the one line that says why there is nothing.

use comm_core::job::EXIT_ECHO;
use comm_core::launch::{Captured, Launch, LaunchOutcome};

use crate::BenchError;
use crate::signal::Interrupted;

/// Why a job has no results.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("{0}")]
    Failed(String),
    /// It did not end by its deadline.
    #[error("{0}")]
    TimedOut(String),
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

impl From<String> for RunError {
    fn from(reason: String) -> Self {
        RunError::Failed(reason)
    }
}

/// A job's result, or why it has none. A signal ends the caller too.
///
/// # Errors
/// [`Interrupted`] when a signal came.
pub fn settled<T>(outcome: Result<T, RunError>) -> Result<Result<T, String>, Interrupted> {
    match outcome {
        Ok(result) => Ok(Ok(result)),
        Err(RunError::Failed(why) | RunError::TimedOut(why)) => Ok(Err(why)),
        Err(RunError::Interrupted(interrupted)) => Err(interrupted),
    }
}

/// The launcher's exit code when the time is up.
const EXIT_TIMED_OUT: i32 = 124;

/// Runs a job to its end; what its ranks have written, in order.
///
/// # Errors
/// As [`captured`].
pub fn run(launch: &Launch) -> Result<Vec<Captured>, RunError> {
    captured(launch.run().map_err(|error| error.to_string())?)
}

/// What the ranks of a job that has ended have written, in order.
///
/// # Errors
/// What the rank has said that failed first, that the time was up, or that a signal came.
pub fn captured(outcome: LaunchOutcome) -> Result<Vec<Captured>, RunError> {
    if outcome.code == 0 {
        return Ok(outcome.captured);
    }
    // The launcher has caught the signal for all of us.
    if let Some(signal) = outcome.interrupted_by {
        return Err(RunError::Interrupted(Interrupted { signal }));
    }
    let cause = outcome.cause.clone().unwrap_or_else(|| format!("exit code {}", outcome.code));
    if outcome.code == EXIT_TIMED_OUT {
        return Err(RunError::TimedOut(cause));
    }
    let said = complaint_of_first(&outcome).unwrap_or_else(|| "it printed nothing".into());
    Err(RunError::Failed(format!("{cause}: {said}")))
}

/// What the rank that failed first has said, else any other.
pub fn complaint_of_first(outcome: &LaunchOutcome) -> Option<String> {
    // An echo of another rank's failure says less than that rank.
    let culprit = outcome.codes.iter().position(|code| *code != 0 && *code != EXIT_ECHO);
    let in_order = culprit.into_iter().chain(0..outcome.captured.len());
    in_order.filter_map(|rank| complaint(&outcome.captured.get(rank)?.stderr)).next()
}

/// The line of a program's standard error that says most: the first that our programs mark, a panic with its message, the last error of
/// a Python traceback, or else the last line. Nothing where there is none.
pub fn complaint(stderr: &str) -> Option<String> {
    let lines = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    if let Some(marked) = lines().find(|line| line.starts_with("error:")) {
        return Some(marked.into());
    }
    if let Some(at) = lines().position(|line| line.starts_with("thread '") && line.contains("panicked at")) {
        return Some(lines().skip(at).take(2).collect::<Vec<_>>().join(" "));
    }
    let names_error = |line: &&str| line.contains("error:") || line.contains("Error: ");
    lines().rfind(names_error).or_else(|| lines().next_back()).map(String::from)
}

/// The signal that ended a command which failed with `error`, if one did.
pub fn ending_signal(error: &BenchError) -> Option<i32> {
    let of_run = error.downcast_ref::<RunError>().and_then(|error| match error {
        RunError::Interrupted(interrupted) => Some(*interrupted),
        RunError::Failed(_) | RunError::TimedOut(_) => None,
    });
    of_run.or_else(|| error.downcast_ref::<Interrupted>().copied()).map(|interrupted| interrupted.signal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_says_most_is_found() {
        let found = |stderr: &str| complaint(stderr).unwrap_or_default();
        assert_eq!(found("Traceback\n  File x\nValueError: bad\n\n"), "ValueError: bad");
        assert_eq!(
            found("ModuleNotFoundError: No module named 'torch'\n--\nbye\n"),
            "ModuleNotFoundError: No module named 'torch'"
        );
        assert_eq!(found("KeyError: a\nDuring handling of it\nValueError: b\n"), "ValueError: b");
        assert_eq!(found("stall: x\nerror: bad\nmore: error: worse"), "error: bad");
        assert_eq!(
            found("thread 'main' panicked at a.rs:1:2:\nno bytes\nnote: a hint"),
            "thread 'main' panicked at a.rs:1:2: no bytes"
        );
        assert_eq!(found("one\ntwo\n\n"), "two");
        assert_eq!(complaint(" \n"), None);
    }

    #[test]
    fn a_signal_is_found_in_what_a_command_fails_with() {
        let interrupted = Interrupted { signal: 2 };
        assert_eq!(ending_signal(&interrupted.into()), Some(2));
        assert_eq!(ending_signal(&RunError::from(interrupted).into()), Some(2));
        assert_eq!(ending_signal(&RunError::Failed("x".into()).into()), None);
    }
}
