//! Programs that the ranks of a job run: this executable, started again with a hidden command and a task in a file.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use comm_core::job::{self, Job};
use comm_core::printer;
use gpt2::corpus::{Corpus, CorpusSource};
use gpt2::env::default_cargo_home;
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::TrainError;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::BenchError;

/// What all ranks of a job are told, and what each does.
pub trait Program: Serialize + DeserializeOwned {
    /// The hidden command of this executable that runs it.
    const COMMAND: &'static str;

    /// What the process does. `job` is `None` where no launcher started it.
    ///
    /// # Errors
    /// What ends the rank.
    fn run(&self, job: Option<&Job>) -> Result<(), BenchError>;
}

/// Arguments of a hidden command.
#[derive(Debug, clap::Args)]
pub struct TaskArgs {
    /// The task, as JSON.
    #[arg(long)]
    task: PathBuf,
}

/// The process of a rank, from its start to its exit code: an error of the communicator says which rank is to blame.
///
/// # Errors
/// The task cannot be read, or what else ended the rank.
pub fn main<P: Program>(args: &TaskArgs) -> Result<ExitCode, BenchError> {
    job::die_with_parent()?;
    let about =
        |what: &dyn std::fmt::Display| format!("{}: this is not a task of this program: {what}", args.task.display());
    let bytes = fs::read(&args.task).map_err(|error| about(&error))?;
    let program: P = serde_json::from_slice(&bytes).map_err(|error| about(&error))?;
    let job = Job::from_env()?;
    let Err(error) = program.run(job.as_ref()) else { return Ok(ExitCode::SUCCESS) };
    let of_training = error.downcast_ref::<TrainError>().and_then(|error| match error {
        TrainError::Comm(error) | TrainError::Refused { error, .. } => Some(error),
        _ => None,
    });
    let is_said = matches!(error.downcast_ref(), Some(TrainError::Refused { is_said: true, .. }));
    match (of_training.or_else(|| error.downcast_ref()), job) {
        (Some(_), Some(_)) if is_said => Ok(ExitCode::FAILURE),
        (Some(failure), Some(job)) => {
            printer::stderr().line(format_args!("error: {failure}"));
            let code = u8::try_from(job::exit_code(failure, job.rank));
            Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
        }
        _ => Err(error),
    }
}

/// The job that a rank belongs to.
///
/// # Errors
/// No launcher started it.
pub fn of_a_job(job: Option<&Job>) -> Result<&Job, BenchError> {
    job.ok_or_else(|| "this is an internal command: a launcher starts it as one rank of its job".into())
}

/// Writes the task for ranks to read; the arguments that have this executable run it.
///
/// # Errors
/// It cannot be written to `folder`.
pub fn arguments<P: Program>(task: &P, folder: &Path) -> Result<Vec<OsString>, String> {
    let file = folder.join("task.json");
    let bytes = serde_json::to_vec(task).map_err(|error| format!("the task of a job: {error}"))?;
    fs::write(&file, bytes).map_err(|error| format!("{}: {error}", file.display()))?;
    Ok(vec![P::COMMAND.into(), "--task".into(), file.into()])
}

/// Writes what a rank leaves for the program that started it.
///
/// # Errors
/// It cannot be written.
pub fn leave(path: &Path, what: &impl Serialize) -> Result<(), BenchError> {
    fs::write(path, serde_json::to_vec(what)?).map_err(|error| format!("{}: {error}", path.display()).into())
}

/// Reads what a rank has left.
///
/// # Errors
/// It has left nothing, or something else.
pub fn left<T: DeserializeOwned>(path: &Path, rank: usize) -> Result<T, String> {
    let bytes = fs::read(path).map_err(|error| format!("rank {rank} left no figures: {error}"))?;
    serde_json::from_slice(&bytes).map_err(|error| format!("the figures of rank {rank}: {error}"))
}

/// The text at `source`; that of this program's own dependencies for `None`.
///
/// # Errors
/// It cannot be read, or is too short.
pub fn load_text(source: Option<&Path>, tokenizer: TokenizerKind) -> Result<Corpus, BenchError> {
    let source = CorpusSource::from_path(source.map(Path::to_owned), default_cargo_home());
    Ok(Corpus::load(&source, tokenizer)?)
}

/// Where this program is.
///
/// # Errors
/// The operating system does not say.
pub fn this_program() -> Result<PathBuf, String> {
    std::env::current_exe().map_err(|error| format!("the path of this program: {error}"))
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Answer(u8);

    impl Program for Answer {
        const COMMAND: &'static str = "answer";

        fn run(&self, _job: Option<&Job>) -> Result<(), BenchError> {
            Ok(())
        }
    }

    #[test]
    fn a_task_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let arguments = arguments(&Answer(42), folder.path()).unwrap();
        assert_eq!((&arguments[0], &arguments[1]), (&"answer".into(), &"--task".into()));
        assert_eq!(left::<Answer>(Path::new(&arguments[2]), 0).unwrap(), Answer(42));
        assert!(left::<Answer>(&folder.path().join("none"), 3).unwrap_err().contains("rank 3 left no figures"));
    }
}
