//! The job that is attacked: a small training, in processes, seeded.

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use comm_core::job::Job;
use comm_core::launch::{Launch, LaunchOutcome, Output};
use gpt2::config::Preset;
use gpt2::optim::LearningRate;
use gpt2::strategy::StrategyKind;
use gpt2::trainer::{Summary, TrainConfig};
use isocomm::{TransportKind, TransportOptions};
use rig::BenchError;
use rig::outcome::{self, RunError};
use rig::rank;
use tempfile::TempDir;

use super::options::Settings;
use super::rank::Task;
use super::watch::{JobObservation, Watch};

/// Ranks of the job.
pub(super) const RANKS: usize = 3;

/// Sequences a step, over all ranks.
const BATCH: usize = 6;

/// Longest time that one job may take.
const LIMIT: Duration = Duration::from_secs(300);

/// A job that runs in processes of its own, and what looks at it.
pub(super) struct RunningJob {
    launcher: Option<JoinHandle<Result<LaunchOutcome, comm_core::Error>>>,
    pub(super) watch: Watch,
    folder: TempDir,
    since: Instant,
}

/// How a job has ended.
pub(super) struct JobResult {
    pub(super) summary: Summary,
    /// Milliseconds that each step took.
    pub(super) steps: Vec<f64>,
    pub(super) seen: JobObservation,
    /// From the start of its processes to the end of the first step.
    pub(super) start: Duration,
}

impl RunningJob {
    /// Starts a job of `steps` steps over `transport`, which waits for [`release`](RunningJob::release) before the last ones if it `waits`.
    pub(super) fn start(
        settings: &Settings,
        transport: TransportKind,
        steps: u64,
        waits: bool,
    ) -> Result<Self, BenchError> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let task = Task {
            config: TrainConfig {
                seed: settings.seed,
                steps,
                global_batch: BATCH,
                learning_rate: LearningRate::WarmupCosine { peak: 1e-3, floor: 1e-4, warmup: 5, total: steps.max(10) },
                ..TrainConfig::of(Preset::Micro.config(settings.corpus.vocab_size()), StrategyKind::Ddp)
            },
            transport,
            options: TransportOptions { timeout: 2 * LIMIT / 3, ..TransportOptions::default() },
            source: settings.source.clone(),
            folder: folder.path().to_path_buf(),
            late: settings.late,
            waits,
        };
        // So that there may be ranks of an epoch before theirs.
        let mut launch = Launch::new("env", RANKS);
        launch.args = vec!["COMM_EPOCH=1".into(), rank::this_program()?.into()];
        launch.args.extend(rank::arguments(&task, folder.path())?);
        // The ranks compute in the pool that all of a process share.
        launch.env = vec![("RAYON_NUM_THREADS".into(), "1".into())];
        launch.output = Output::Captured;
        launch.timeout = Some(LIMIT);
        let watch = Watch::start(folder.path(), RANKS)?;
        let since = Instant::now();
        let launcher = thread::Builder::new().name("hostile-launch".into()).spawn(move || launch.run())?;
        Ok(RunningJob { launcher: Some(launcher), watch, folder, since })
    }

    pub(super) fn is_over(&self) -> bool {
        self.launcher.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Lets it take its last steps.
    pub(super) fn release(&self) -> Result<(), BenchError> {
        Ok(fs::write(Task::over_file(self.folder.path()), b"")?)
    }

    /// How long each step took that it has taken, in milliseconds.
    pub(super) fn steps(&self) -> Vec<f64> {
        let text = fs::read_to_string(Task::steps_file(self.folder.path())).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// What rank 0 knows of the job, its secret included: what a stranger has who could read that process's environment.
    pub(super) fn stolen(&self) -> Option<Job> {
        let process = self.watch.seen().processes.first().copied().flatten()?;
        let environment = fs::read(format!("/proc/{process}/environ")).ok()?;
        let variables: Vec<(String, String)> = environment
            .split(|byte| *byte == 0)
            .filter_map(|variable| {
                let (name, value) = str::from_utf8(variable).ok()?.split_once('=')?;
                Some((name.to_string(), value.to_string()))
            })
            .collect();
        let find = |name: &str| variables.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone());
        Job::from_vars(&find).ok().flatten()
    }

    /// Where the control plane listens.
    pub(super) fn control(&self) -> Option<SocketAddr> {
        match self.stolen()?.address {
            comm_core::job::Address::File(path) => address_in(&path),
            comm_core::job::Address::Tcp { .. } => None,
        }
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// Why it failed, in the words of the rank that failed first.
    pub(super) fn finish(mut self) -> Result<JobResult, RunError> {
        let outcome = match self.launcher.take().map(JoinHandle::join) {
            Some(Ok(Ok(outcome))) => outcome,
            Some(Ok(Err(error))) => return Err(RunError::Failed(error.to_string())),
            Some(Err(_)) | None => {
                return Err(RunError::Failed("the thread that watches the ranks panicked".into()));
            }
        };
        outcome::captured(outcome)?;
        let summary = rank::left(&Task::summary_file(self.folder.path()), 0)?;
        let seen = self.watch.seen().clone();
        let start = seen.training_since.map_or(Duration::ZERO, |training| training - self.since);
        Ok(JobResult { summary, steps: self.steps(), seen, start })
    }
}

fn address_in(path: &PathBuf) -> Option<SocketAddr> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}
