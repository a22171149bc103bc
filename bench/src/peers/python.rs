//! PyTorch's side of `bench peers`.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use comm_core::launch::Captured;
use gpt2::config::ModelConfig;
use gpt2::strategy::StrategyKind;
use rig::link::World;
use rig::outcome::{self, RunError};
use serde::Deserialize;
use tempfile::TempDir;

use super::report::Outcome;

/// One rank, in Python. Part of this program, so that the program can be moved.
const RANK: &str = include_str!("gpt2_torch.py");

/// How long it may take to see whether the libraries are there: they are large.
const IMPORT: Duration = Duration::from_secs(120);

/// What PyTorch can do of what is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Every rank trains without the others.
    Alone,
    /// `DistributedDataParallel`.
    Ddp,
    /// `fully_shard`: ZeRO-3.
    Fsdp,
    /// `fully_shard` that keeps the parameters after the forward pass.
    Zero2,
}

/// A Python that has PyTorch.
#[derive(Debug)]
pub(super) struct Torch {
    python: PathBuf,
    folder: TempDir,
    /// PyTorch's.
    pub(super) version: String,
}

/// What is trained; the same on our side.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) model: ModelConfig,
    pub(super) ranks: usize,
    /// Sequences of a rank in a step.
    pub(super) rows: usize,
    pub(super) steps: u64,
    /// Steps at the start that count for nothing.
    pub(super) skip: u64,
    pub(super) threads: usize,
    /// Token ids of 16 bits.
    pub(super) tokens: PathBuf,
    /// Megabytes of a bucket of DDP.
    pub(super) bucket_mb: f64,
    pub(super) timeout: Duration,
}

/// What a rank says at its end.
#[derive(Debug, Deserialize)]
struct Said {
    step_ms: f64,
    losses: Vec<f64>,
    parameters: usize,
}

#[derive(Debug, Deserialize)]
struct Found {
    torch: String,
}

impl Mode {
    /// What corresponds to one of our strategies; `None` where PyTorch has nothing.
    pub(super) fn of(strategy: StrategyKind) -> Option<Self> {
        match strategy {
            StrategyKind::Ddp => Some(Mode::Ddp),
            StrategyKind::Fsdp => Some(Mode::Fsdp),
            StrategyKind::Zero2 => Some(Mode::Zero2),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Mode::Alone => "alone",
            Mode::Ddp => "ddp",
            Mode::Fsdp => "fsdp",
            Mode::Zero2 => "zero2",
        }
    }
}

impl Torch {
    /// Looks whether `python` has what it takes.
    ///
    /// # Errors
    /// What is missing, for the user, or that the user has had enough.
    pub(super) fn find(python: &Path) -> Result<Self, RunError> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let script = folder.path().join("gpt2_torch.py");
        fs::write(&script, RANK).map_err(|error| format!("{}: {error}", script.display()))?;
        let mut torch = Torch { python: python.to_owned(), folder, version: String::new() };
        let said = torch.start(&World::loopback(), vec!["probe".into()], 1, 1, IMPORT)?;
        torch.version = parse::<Found>(said.first())?.torch;
        Ok(torch)
    }

    /// Trains in processes of its own.
    ///
    /// # Errors
    /// The first thing that went wrong, or that the user has had enough.
    pub(super) fn train(&self, mode: Mode, work: &Work, place: &World) -> Result<Outcome, RunError> {
        let model = &work.model;
        let mut arguments: Vec<OsString> = vec![mode.name().into()];
        for (name, value) in [
            ("--layers", model.n_layer.to_string()),
            ("--heads", model.n_head.to_string()),
            ("--width", model.n_embd.to_string()),
            ("--block", model.block_size.to_string()),
            ("--vocabulary", model.vocab_size.to_string()),
            ("--rows", work.rows.to_string()),
            ("--steps", work.steps.to_string()),
            ("--skip", work.skip.to_string()),
            ("--threads", work.threads.to_string()),
            ("--bucket-mb", work.bucket_mb.to_string()),
            ("--timeout", (work.timeout / 2).as_secs_f64().to_string()),
        ] {
            arguments.extend([name.into(), value.into()]);
        }
        arguments.extend(["--tokens".into(), work.tokens.clone().into()]);
        let captured = self.start(place, arguments, work.ranks, work.threads, work.timeout)?;
        let said = captured.iter().map(|rank| parse(Some(rank))).collect::<Result<Vec<Said>, _>>()?;
        Ok(outcome(&said, work)?)
    }

    fn start(
        &self,
        place: &World,
        arguments: Vec<OsString>,
        ranks: usize,
        threads: usize,
        timeout: Duration,
    ) -> Result<Vec<Captured>, RunError> {
        let script = self.folder.path().join("gpt2_torch.py");
        let arguments = [vec![script.into()], arguments].concat();
        let mut launch = place.launch(&self.python, arguments, ranks, timeout)?;
        launch.env = vec![
            ("OMP_NUM_THREADS".into(), threads.to_string()),
            ("GLOO_SOCKET_IFNAME".into(), place.interface().into()),
        ];
        outcome::run(&launch)
    }
}

fn outcome(said: &[Said], work: &Work) -> Result<Outcome, String> {
    let expected = work.model.parameter_count();
    if let Some(other) = said.iter().find(|rank| rank.parameters != expected) {
        return Err(format!("PyTorch's model has {} parameters and ours {expected}", other.parameters));
    }
    let step_ms = said.iter().map(|rank| rank.step_ms).fold(0.0, f64::max);
    let tokens = (work.ranks * work.rows * work.model.block_size) as f64;
    let of = |at: fn(&[f64]) -> Option<&f64>| -> f64 {
        said.iter().filter_map(|rank| at(&rank.losses)).sum::<f64>() / said.len() as f64
    };
    Ok(Outcome {
        step_ms,
        tokens_per_s: tokens / step_ms * 1e3,
        waiting_ms: None,
        scalars_ms: None,
        first_loss: of(<[f64]>::first),
        final_loss: of(<[f64]>::last),
        payload_bytes: None,
    })
}

fn parse<T: for<'a> Deserialize<'a>>(rank: Option<&Captured>) -> Result<T, String> {
    // A library may have said something before.
    let line = rank.and_then(|rank| rank.stdout.lines().rfind(|line| line.starts_with('{'))).unwrap_or_default();
    serde_json::from_str(line).map_err(|error| format!("a rank in Python said {line:?}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        for (python, part) in [("/nowhere/python", "/nowhere/python"), ("/bin/false", "code 1")] {
            match Torch::find(Path::new(python)) {
                Err(RunError::Failed(why)) => assert!(why.contains(part), "{why}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn the_slowest_rank_decides_and_models_of_another_size_are_refused() {
        let model = ModelConfig { n_layer: 1, n_head: 1, n_embd: 8, block_size: 4, vocab_size: 16 };
        let parameters = model.parameter_count();
        let work = Work {
            model,
            ranks: 2,
            rows: 5,
            steps: 3,
            skip: 0,
            threads: 1,
            tokens: PathBuf::new(),
            bucket_mb: 25.0,
            timeout: Duration::from_secs(1),
        };
        let rank = |step_ms, parameters| Said { step_ms, losses: vec![3.0, 2.0, 1.0], parameters };
        let outcome = outcome(&[rank(10.0, parameters), rank(20.0, parameters)], &work).unwrap();
        assert_eq!((outcome.step_ms, outcome.tokens_per_s), (20.0, 2000.0));
        assert_eq!((outcome.first_loss, outcome.final_loss), (3.0, 1.0));
        let why = super::outcome(&[rank(10.0, parameters + 1)], &work).unwrap_err();
        assert!(why.contains("parameters"), "{why}");
    }
}
