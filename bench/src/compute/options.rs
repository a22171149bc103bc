//! The command line of `bench compute`, checked.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use gpt2::cli::MAX_THREADS;
use gpt2::config::Preset;
use gpt2::model::KernelChoice;
use rig::BenchError;
use rig::check::between;
use rig::record::Axis;

use crate::plan::Draft;
use crate::pytorch::SKIPPED;

/// Measures how fast one device computes: the whole training step and each layer, as a share of the measured speed of matrix products and of the
/// theoretical peak, with memory and allocations.
///
/// Every round runs each case once, in a process of its own, so that other load on the machine affects all of them. The vocabulary is GPT-2's.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ComputeArgs {
    /// Cases, separated by commas: PRESET:TxB is the model size PRESET with B sequences of T tokens in a step. [default:
    /// tiny:64x16,small:256x4,124m:256x1]
    #[arg(long, value_delimiter = ',', value_name = "PRESET:TxB")]
    cases: Vec<Case>,
    /// Compute threads. [default: the machine's cores]
    #[arg(long)]
    threads: Option<usize>,
    /// Timed steps of a run; two more come first and are not counted.
    #[arg(long, default_value_t = 6)]
    steps: u64,
    /// Number of rounds.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Kernels of layers and loss, separated by commas: fused, or composed of the backend's single operations. With both, which run in the same
    /// rounds, the tables show how much longer the composed ones take.
    #[arg(long, value_delimiter = ',', default_value = "fused", value_name = "KERNELS")]
    kernels: Vec<KernelChoice>,
    /// Also measure PyTorch, in the same rounds: eager, or compiled (by `torch.compile`, which needs a C++ compiler); without a value both.
    #[arg(long, value_delimiter = ',', num_args = 0.., value_name = "FORM")]
    peers: Option<Vec<Form>>,
    /// Python interpreter with the package torch.
    #[arg(long, default_value = "python3")]
    peer_python: PathBuf,
    /// Measure whole steps only, not single layers.
    #[arg(long)]
    no_layers: bool,
    /// Seconds that a run may take; compiling a large model takes minutes.
    #[arg(long, default_value_t = 600)]
    cell_timeout: u64,
    /// Folder for compute.jsonl, and for results that `bench report` reads. [default: a new folder under bench-results/]
    #[arg(long)]
    pub(super) out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    pub(super) allow_debug: bool,
}

/// A form of PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Form {
    /// Operation by operation.
    Eager,
    /// By `torch.compile`.
    Compiled,
}

/// A model, and the sequences of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    preset: Preset,
    /// Tokens of a sequence.
    cols: usize,
    /// Sequences.
    rows: usize,
}

const MIN_STEPS: u64 = 3;
const MAX_STEPS: u64 = 10_000;
const MAX_ROUNDS: u32 = 10_000;

/// The longest sequence: that of GPT-2.
const MAX_COLS: usize = 1024;

impl ComputeArgs {
    /// The plan that the command line makes of the ready one, PyTorch included.
    ///
    /// # Errors
    /// The first argument that cannot be, for the user.
    pub(super) fn check(&self) -> Result<Draft, BenchError> {
        if let Some(threads) = &self.threads {
            between("--threads", threads, 1..=MAX_THREADS)?;
        }
        between("--steps", &self.steps, MIN_STEPS..=MAX_STEPS)?;
        between("--rounds", &self.rounds, 1..=MAX_ROUNDS)?;
        if self.cell_timeout == 0 {
            return Err("--cell-timeout must be at least 1".into());
        }
        if let Some(case) = self.cases.iter().find(|case| case.cols > MAX_COLS) {
            return Err(format!("--cases {case}: a sequence has at most {MAX_COLS} tokens").into());
        }
        let mut draft = Draft::ready("compute")?;
        draft.rounds = self.rounds;
        draft.timeout_s = self.cell_timeout;
        let mut programs = vec!["ours"];
        for (form, name) in [(Form::Eager, "pytorch"), (Form::Compiled, "pytorch-compiled")] {
            if self.forms().contains(&form) {
                programs.push(name);
            }
        }
        draft
            .set(Axis::Program, &programs)
            .set(Axis::Kernels, &self.kernels)
            .set(Axis::Threads, &[self.threads()])
            .set(Axis::Steps, &[self.steps()]);
        if let [first, more @ ..] = &self.cases[..] {
            draft
                .without_also()
                .set(Axis::Preset, &[first.preset])
                .set(Axis::Block, &[first.cols])
                .set(Axis::Batch, &[first.rows]);
            for case in more {
                draft.also(&[
                    (Axis::Preset, case.preset.to_string()),
                    (Axis::Block, case.cols.to_string()),
                    (Axis::Batch, case.rows.to_string()),
                ]);
            }
        }
        draft.plan()?;
        Ok(draft)
    }

    /// Threads that compute.
    pub(super) fn threads(&self) -> usize {
        self.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS))
    }

    /// Steps of a run, with those that count for nothing.
    pub(super) fn steps(&self) -> u64 {
        self.steps + SKIPPED
    }

    /// The Python that PyTorch is asked of; `None` to leave it out.
    pub(super) fn python(&self) -> Option<&Path> {
        self.peers.is_some().then_some(&self.peer_python)
    }

    pub(super) fn has_layers(&self) -> bool {
        !self.no_layers
    }

    /// Whether layers are measured in PyTorch, too: operation by operation.
    pub(super) fn has_eager_peer(&self) -> bool {
        self.forms().contains(&Form::Eager)
    }

    fn forms(&self) -> &[Form] {
        match self.peers.as_deref() {
            None => &[],
            Some([]) => &[Form::Eager, Form::Compiled],
            Some(forms) => forms,
        }
    }
}

impl FromStr for Case {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let shape = || format!("`{text}` is not a case; write PRESET:TxB, such as tiny:64x16");
        let (preset, sizes) = text.split_once(':').ok_or_else(shape)?;
        let (cols, rows) = sizes.split_once('x').ok_or_else(shape)?;
        let count = |digits: &str| digits.parse().ok().filter(|count| *count > 0).ok_or_else(shape);
        let preset = preset.parse().map_err(|error: gpt2::config::ConfigError| error.to_string())?;
        Ok(Case { preset, cols: count(cols)?, rows: count(rows)? })
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}x{}", self.preset, self.cols, self.rows)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use gpt2::tokenizer::GPT2_VOCABULARY;
    use rig::record::{Cell, Trainer};
    use rig::training::model;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: ComputeArgs,
    }

    fn check(arguments: &[&str]) -> Result<Vec<Cell>, String> {
        let program = Program::try_parse_from([&["bench"], arguments].concat()).map_err(|error| error.to_string())?;
        let draft = program.args.check().map_err(|error| error.to_string())?;
        draft.plan().map(|plan| plan.cells)
    }

    #[test]
    fn cases_are_models_with_sequences_of_their_length() {
        let cells = check(&["--cases", "tiny:64x16,124m:1024x1", "--threads", "2", "--steps", "4"]).unwrap();
        let found: Vec<(&str, usize, usize, usize, u64)> = cells
            .iter()
            .map(|cell| (cell.preset.as_str(), cell.model.block.unwrap(), cell.batch, cell.threads, cell.steps))
            .collect();
        assert_eq!(found, [("tiny", 64, 16, 2, 6), ("124m", 1024, 1, 2, 6)]);
        assert_eq!(model(&cells[0], GPT2_VOCABULARY).unwrap().parameter_count(), 7_234_432);
        assert_eq!(check(&[]).unwrap().len(), 3);
    }

    #[test]
    fn peers_are_those_that_are_named_or_both() {
        let programs = |arguments: &[&str]| -> Vec<Trainer> {
            check(&[&["--cases", "micro:8x2"], arguments].concat()).unwrap().iter().map(|cell| cell.program).collect()
        };
        assert_eq!(programs(&[]), [Trainer::Ours]);
        assert_eq!(programs(&["--peers"]), [Trainer::Ours, Trainer::Pytorch, Trainer::PytorchCompiled]);
        assert_eq!(programs(&["--peers", "compiled"]), [Trainer::Ours, Trainer::PytorchCompiled]);
    }

    #[test]
    fn kernels_are_those_that_are_named_and_pytorch_has_its_own() {
        let cells = |arguments: &[&str]| -> Vec<(Trainer, String)> {
            let cells = check(&[&["--cases", "micro:8x2"], arguments].concat()).unwrap();
            cells.into_iter().map(|cell| (cell.program, cell.kernels)).collect()
        };
        let of = |program: Trainer, kernels: &str| (program, kernels.to_string());
        assert_eq!(cells(&[]), [of(Trainer::Ours, "fused")]);
        assert_eq!(cells(&["--kernels", "composed,composed"]), [of(Trainer::Ours, "composed")]);
        assert_eq!(
            cells(&["--kernels", "fused,composed", "--peers", "eager"]),
            [of(Trainer::Ours, "fused"), of(Trainer::Ours, "composed"), of(Trainer::Pytorch, "fused")]
        );
        // In every case.
        assert_eq!(check(&["--kernels", "fused,composed"]).unwrap().len(), 6);
    }

    #[test]
    fn what_cannot_be_measured_is_refused_by_name() {
        for (arguments, part) in [
            (&["--cases", "tiny"][..], "`tiny` is not a case"),
            (&["--cases", "tiny:64"], "PRESET:TxB"),
            (&["--cases", "tiny:0x4"], "PRESET:TxB"),
            (&["--cases", "huge:64x4"], "unknown model preset 'huge'"),
            (&["--cases", "tiny:2048x1"], "--cases tiny:2048x1"),
            (&["--threads", "0"], "--threads 0"),
            (&["--steps", "2"], "--steps 2"),
            (&["--rounds", "0"], "--rounds 0"),
            (&["--cell-timeout", "0"], "--cell-timeout"),
            (&["--peers", "jax"], "jax"),
            (&["--kernels", "magic"], "unknown choice of kernels 'magic'"),
        ] {
            let why = check(arguments).unwrap_err();
            assert!(why.contains(part), "{arguments:?}: {why}");
        }
    }
}
