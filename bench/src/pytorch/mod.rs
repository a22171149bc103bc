//! PyTorch as the program that trains: what a cell asks for, over Gloo.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use comm_core::launch::Captured;
use gpt2::config::ModelConfig;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::TokenizerKind;
use rig::link::TestNetwork;
use rig::outcome::{self, RunError};
use rig::record::{Cell, Measured, Rank, Status, Trained, Trainer};
use rig::signal::Interrupted;
use rig::training::{CellOutcome, CellRun, TextSource, model, status};
use serde::Deserialize;
use tempfile::TempDir;

/// One rank, in Python. Part of this program, so that the program can be moved.
const RANK: &str = include_str!("gpt2_torch.py");

/// How long it may take to see whether the libraries are there: they are large.
const IMPORT: Duration = Duration::from_secs(120);

/// Steps at the start that count for nothing: as in our trainer, which leaves the first two out once there are more than four.
pub(crate) const SKIPPED: u64 = 2;

/// A Python that has PyTorch.
#[derive(Clone, Debug)]
pub(crate) struct Torch {
    python: PathBuf,
    folder: Arc<TempDir>,
    /// PyTorch's.
    pub(crate) version: String,
}

/// What a rank says at its end.
#[derive(Debug, Deserialize)]
struct TorchReport {
    step_ms: f64,
    losses: Vec<f64>,
    parameters: usize,
    /// The most memory that the process held.
    #[serde(default)]
    peak_rss_bytes: u64,
}

/// What a rank says of its layers.
#[derive(Debug, Deserialize)]
struct TorchLayers {
    /// Median milliseconds forward and backward, by the name of the layer.
    layers: BTreeMap<String, f64>,
}

#[derive(Debug, Deserialize)]
struct TorchVersion {
    torch: String,
}

impl Torch {
    /// Whether PyTorch has what corresponds to one of our strategies: `DistributedDataParallel`, which is ZeRO-1 with `ZeroRedundancyOptimizer`, or
    /// `fully_shard`, which is ZeRO-3, or ZeRO-2 where it keeps the parameters after the forward pass.
    pub(crate) fn has(strategy: StrategyKind) -> bool {
        [StrategyKind::Ddp, StrategyKind::Zero1, StrategyKind::Zero2, StrategyKind::Fsdp].contains(&strategy)
    }

    /// Looks whether `python` has what it takes.
    ///
    /// # Errors
    /// What is missing, for the user, or an end by a signal.
    pub(crate) fn find(python: &Path) -> Result<Self, RunError> {
        let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
        let script = folder.path().join("gpt2_torch.py");
        fs::write(&script, RANK).map_err(|error| format!("{}: {error}", script.display()))?;
        let mut torch = Torch { python: python.to_owned(), folder: Arc::new(folder), version: String::new() };
        let said = torch.start(&TestNetwork::loopback(), vec!["probe".into()], 1, 1, IMPORT)?;
        torch.version = parse::<TorchVersion>(said.first())?.torch;
        Ok(torch)
    }

    /// Trains as the cell says, in processes of its own.
    ///
    /// # Errors
    /// [`Interrupted`] when a signal asked to end.
    pub(crate) fn train(
        &self,
        job: &CellRun<'_>,
        cell: &Cell,
        network: &TestNetwork,
    ) -> Result<CellOutcome, Interrupted> {
        if job.text.tokenizer != TokenizerKind::Gpt2 {
            return Ok(Err(Status::NotAvailable("PyTorch reads GPT-2's tokens: set tokens = true in the plan".into())));
        }
        match self.measured(job, cell, network) {
            Ok(measured) => Ok(Ok((measured, Vec::new()))),
            Err(error) => Ok(Err(status(error)?)),
        }
    }

    fn measured(&self, job: &CellRun<'_>, cell: &Cell, network: &TestNetwork) -> Result<Measured, RunError> {
        let model = model(cell, job.text.vocabulary)?;
        // What is alone is our `single`.
        let mode = if cell.strategy == "single" { "alone" } else { &cell.strategy };
        let mut arguments = arguments(mode, &model, cell, job.text, job.timeout)?;
        if cell.program == Trainer::PytorchCompiled {
            arguments.push("--compile".into());
        }
        let captured = self.start(network, arguments, cell.ranks, cell.threads, job.timeout)?;
        let said = captured.iter().map(|rank| parse(Some(rank))).collect::<Result<Vec<TorchReport>, _>>()?;
        let tokens_per_step = (cell.batch * model.block_size) as u64;
        Ok(measured(said, model.parameter_count(), tokens_per_step)?)
    }

    /// Times the layers of a cell's model by themselves, in a process of its own: median milliseconds forward and backward, by name.
    ///
    /// # Errors
    /// Why there are none, or an end by a signal.
    pub(crate) fn layers(
        &self,
        cell: &Cell,
        text: &TextSource,
        timeout: Duration,
    ) -> Result<BTreeMap<String, f64>, RunError> {
        let arguments = arguments("layers", &model(cell, text.vocabulary)?, cell, text, timeout)?;
        let captured = self.start(&TestNetwork::loopback(), arguments, 1, cell.threads, timeout)?;
        Ok(parse::<TorchLayers>(captured.first())?.layers)
    }

    fn start(
        &self,
        network: &TestNetwork,
        arguments: Vec<OsString>,
        ranks: usize,
        threads: usize,
        timeout: Duration,
    ) -> Result<Vec<Captured>, RunError> {
        let script = self.folder.path().join("gpt2_torch.py");
        let arguments = [vec![script.into()], arguments].concat();
        let mut launch = network.launch(&self.python, arguments, ranks, timeout)?;
        launch.env = vec![
            ("OMP_NUM_THREADS".into(), threads.to_string()),
            ("GLOO_SOCKET_IFNAME".into(), network.interface().into()),
        ];
        outcome::run(&launch)
    }
}

/// What a rank is started with, but for its mode's own options.
fn arguments(
    mode: &str,
    model: &ModelConfig,
    cell: &Cell,
    text: &TextSource,
    timeout: Duration,
) -> Result<Vec<OsString>, String> {
    let tokens = text.source.clone().ok_or_else(|| "PyTorch needs a file of tokens".to_string())?;
    let mut arguments: Vec<OsString> = vec![mode.into()];
    for (name, value) in [
        ("--layers", model.n_layer.to_string()),
        ("--heads", model.n_head.to_string()),
        ("--width", model.n_embd.to_string()),
        ("--block", model.block_size.to_string()),
        ("--vocabulary", model.vocab_size.to_string()),
        ("--rows", (cell.batch / cell.ranks).to_string()),
        ("--steps", cell.steps.to_string()),
        ("--skip", SKIPPED.to_string()),
        ("--threads", cell.threads.to_string()),
        ("--bucket-mb", (cell.bucket_bytes as f64 / f64::from(1 << 20)).to_string()),
        ("--timeout", (timeout / 2).as_secs_f64().to_string()),
    ] {
        arguments.extend([name.into(), value.into()]);
    }
    arguments.extend(["--tokens".into(), tokens.into()]);
    Ok(arguments)
}

fn measured(said: Vec<TorchReport>, parameters: usize, tokens_per_step: u64) -> Result<Measured, String> {
    if let Some(other) = said.iter().find(|rank| rank.parameters != parameters) {
        return Err(format!(
            "PyTorch's model has {} parameters, and this program's has {parameters}",
            other.parameters
        ));
    }
    let step_ms = said.iter().map(|rank| rank.step_ms).fold(0.0, f64::max);
    let steps = said.iter().map(|rank| rank.losses.len()).min().unwrap_or(0);
    let mean = |step: usize| said.iter().map(|rank| rank.losses[step]).sum::<f64>() / said.len() as f64;
    Ok(Measured {
        tokens_per_step,
        parameters: parameters as u64,
        losses: (0..steps).map(|step| Some(mean(step)).filter(|loss| loss.is_finite())).collect(),
        ranks: (0..)
            .zip(&said)
            .map(|(rank, said)| Rank { rank, peak_rss_bytes: said.peak_rss_bytes, ..Rank::default() })
            .collect(),
        trained: Some(Trained {
            step_ms: Some(step_ms),
            tokens_per_s: Some(tokens_per_step as f64 / step_ms * 1e3),
            ..Trained::default()
        }),
        ..Measured::default()
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
        let rank = |step_ms, parameters| TorchReport {
            step_ms,
            losses: vec![3.0, 2.0, 1.0],
            parameters,
            peak_rss_bytes: 7 << 20,
        };
        let both = measured(vec![rank(10.0, 7), rank(20.0, 7)], 7, 40).unwrap();
        let trained = both.trained.unwrap();
        assert_eq!((trained.step_ms, trained.tokens_per_s), (Some(20.0), Some(2000.0)));
        assert!(both.ranks.iter().all(|rank| rank.peak_rss_bytes == 7 << 20));
        assert_eq!(both.losses, [Some(3.0), Some(2.0), Some(1.0)]);
        let why = measured(vec![rank(10.0, 8)], 7, 40).unwrap_err();
        assert!(why.contains("parameters"), "{why}");
    }
}
