//! One rank of the job that is attacked: a training process that tells when each step ended.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use comm_core::control::TcpControl;
use comm_core::job::Job;
use comm_core::{Control, Deadline, Error};
use gpt2::corpus::Corpus;
use gpt2::tokenizer::TokenizerKind;
use gpt2::trainer::{Observer, Session, StepReport, TrainConfig, TrainError, train};
use isocomm::{TransportKind, TransportOptions};
use rig::BenchError;
use rig::rank::{Program, load_text, of_a_job};
use serde::{Deserialize, Serialize};

/// What a rank is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(super) config: TrainConfig,
    pub(super) transport: TransportKind,
    pub(super) options: TransportOptions,
    /// The path given with `--data`.
    pub(super) source: Option<PathBuf>,
    /// Where ranks leave their process ids, and rank 0 its steps and its summary.
    pub(super) folder: PathBuf,
    /// How much later than rank 0 the others come, so that strangers find the job waiting.
    pub(super) late: Duration,
    /// Before its last steps the job waits for the end of the attack, so that it is under way all the time and goes on after.
    pub(super) waits: bool,
}

/// Steps that come after the attack.
const LAST_STEPS: u64 = 5;

/// How long the job waits at most. The other ranks wait with it, inside of an operation that has a longer deadline.
const LONGEST_WAIT: Duration = Duration::from_secs(150);

impl Task {
    pub(super) fn process_file(folder: &Path, rank: usize) -> PathBuf {
        folder.join(format!("process-{rank}"))
    }

    pub(super) fn steps_file(folder: &Path) -> PathBuf {
        folder.join("steps")
    }

    /// Whose existence means that the attack has ended.
    pub(super) fn over_file(folder: &Path) -> PathBuf {
        folder.join("over")
    }

    pub(super) fn summary_file(folder: &Path) -> PathBuf {
        folder.join("summary.json")
    }
}

impl Program for Task {
    const COMMAND: &'static str = "hostile-rank";

    fn run(&self, job: Option<&Job>) -> Result<(), BenchError> {
        let job = of_a_job(job)?;
        fs::write(Task::process_file(&self.folder, job.rank), std::process::id().to_string())?;
        let corpus = load_text(self.source.as_deref(), TokenizerKind::Bytes)?;
        if job.rank != 0 {
            thread::sleep(self.late);
        }
        Ok(take_part(self, job, &corpus)?)
    }
}

fn take_part(task: &Task, job: &Job, corpus: &Corpus) -> Result<(), TrainError> {
    let agreement = [
        ("transport", task.transport.to_string()),
        ("steps", task.config.steps.to_string()),
        ("the text's hash (--data)", corpus.hash_hex()),
    ];
    let control = TcpControl::connect(job, &agreement, Deadline::after(task.options.timeout))?;
    // The others listen already and wait for this one.
    if job.rank + 1 == job.world_size {
        thread::sleep(task.late);
    }
    let connected =
        task.transport.connect(control.clone(), &task.options).inspect_err(|error| control.poison(error))?;
    let session = Session::new(connected, &task.options);
    if job.rank != 0 {
        return train(&task.config, corpus, &session, &Device::flex(), None, &mut ()).map(drop);
    }
    let file_error = |what: &str, error: std::io::Error| Error::io(what.to_string(), error);
    let mut steps = Steps {
        file: File::create(Task::steps_file(&task.folder))
            .map_err(|error| file_error("creating the list of steps", error))?,
        wait_at: task.waits.then(|| task.config.steps.saturating_sub(LAST_STEPS)),
        over: Task::over_file(&task.folder),
    };
    let summary = train(&task.config, corpus, &session, &Device::flex(), None, &mut steps)?;
    let bytes =
        serde_json::to_vec(&summary).map_err(|error| Error::Internal(format!("writing the summary: {error}")))?;
    fs::write(Task::summary_file(&task.folder), bytes).map_err(|error| file_error("writing the summary", error))?;
    Ok(())
}

/// Writes how many milliseconds each step took, one step a line.
struct Steps {
    file: File,
    /// After this step it waits.
    wait_at: Option<u64>,
    over: PathBuf,
}

impl Observer for Steps {
    fn step(&mut self, report: &StepReport) {
        // Figures are missing then, which the program that reads them says.
        let _ = self.file.write_all(format!("{:.4}\n", report.ms).as_bytes());
        if self.wait_at == Some(report.step) {
            let end = Instant::now() + LONGEST_WAIT;
            while !self.over.exists() && Instant::now() < end {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}
