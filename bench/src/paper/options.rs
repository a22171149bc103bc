//! The command line of `bench paper`, checked.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use gpt2::batches::{Batches, Share};
use gpt2::cli::{MAX_RANKS_HERE, MAX_THREADS, say};
use gpt2::config::{ModelConfig, Preset};
use gpt2::corpus::Corpus;
use gpt2::optim::{LossScaling, OptimizerKind};
use gpt2::precision::Precision;
use gpt2::tokenizer::TokenizerKind;
use isocomm::TransportKind;
use rig::BenchError;
use rig::check::{between, even_batch};
use rig::environment::Environment;
use rig::folder::results_folder;
use rig::rank::load_text;
use rig::record::Axis;
use rig::signal::Signals;

use crate::plan::Draft;

/// Repeats the comparison of a published paper, with equal conditions for all strategies.
///
/// Each row is a separate run, in processes of its own. All rows have the same transport, training loop, seed, order of the data, global batch,
/// schedule and arithmetic. The program checks this, and that each step has the operations and bytes of the strategy's definition and exactly one
/// update. It prints tables and compares its findings with the paper's conclusions, and writes rows (JSON lines) and pictures (SVG) to a folder. The
/// exit code is 1 if a row fails or a check does not hold.
#[derive(Debug, Args)]
pub(crate) struct PaperArgs {
    #[command(subcommand)]
    paper: Paper,
}

#[derive(Debug, Subcommand)]
pub(super) enum Paper {
    Bai(BaiArgs),
    Patwardhan(PatwardhanArgs),
    Lin(LinArgs),
}

/// Bai 2022 (HP3C; arXiv 2206.06356): one device, parameter servers, Horovod, and mixed precision.
///
/// Rows: single; ps, a single parameter server, which also computes or is dedicated; sharded-ps, a distributed one; ring, Horovod; and ddp, which the
/// paper's code calls a distributed parameter server. The last three also run in mixed precision. The results are loss against time, utilisation by
/// rank, number of parameter servers, memory by purpose, tokens/s, and counted operations compared with the formula.
#[derive(Debug, Args)]
pub(crate) struct BaiArgs {
    /// Optimizer steps of each row. [default: 120; 200 with --full]
    #[arg(long)]
    pub(super) steps: Option<u64>,
    /// 16-bit type of the mixed-precision rows, in which they compute and send gradients: bf16, or f16 with dynamic loss scaling, like Apex in the
    /// paper. Masters and optimizer are f32 in every row.
    #[arg(long, value_enum, default_value = "bf16")]
    pub(super) mixed: Mixed,
    #[command(flatten)]
    pub(super) common: CommonArgs,
}

/// Patwardhan et al. 2024 (arXiv 2405.15628): one device, DDP and FSDP, epoch by epoch.
///
/// Rows: single, ddp, fsdp. The results are throughput, gradient norm, time, training and validation loss of each epoch, and memory by purpose.
#[derive(Debug, Args)]
pub(crate) struct PatwardhanArgs {
    /// Number of epochs.
    #[arg(long, default_value_t = 3)]
    pub(super) epochs: u64,
    /// Most optimizer steps of an epoch; a longer text is cut off. [default: 100; with --full the whole text]
    #[arg(long)]
    pub(super) steps: Option<u64>,
    #[command(flatten)]
    pub(super) common: CommonArgs,
}

/// Lin et al. 2020 (arXiv 2008.00177): optimizations that make pretraining on a cluster with an ordinary network fast enough, one after another.
///
/// Rows, over each link: one device; then data sharding, mixed precision, fused operations, gradient accumulation, and communication during the
/// backward pass, each added to those before it; then all of them with a larger batch, on more ranks with the same batch (strong scaling) and with a
/// batch that grows with the ranks (weak scaling), and with short sequences first, like BERT's training. The results are throughput, exposed
/// communication, bytes, memory and loss, and the gain of each optimization.
#[derive(Debug, Args)]
pub(crate) struct LinArgs {
    /// Optimizer steps of each row. [default: 30; 100 with --full]
    #[arg(long)]
    pub(super) steps: Option<u64>,
    /// 16-bit type of mixed precision, in which ranks compute and send gradients: bf16, or f16 with dynamic loss scaling.
    #[arg(long, value_enum, default_value = "bf16")]
    pub(super) mixed: Mixed,
    /// Optimizer of all rows: lamb, with which BERT is trained in large batches, or adamw.
    #[arg(long, default_value = "lamb")]
    pub(super) optimizer: OptimizerKind,
    /// Micro-steps of a step in rows with gradient accumulation; the larger batch is this many times as large.
    #[arg(long, default_value_t = 4)]
    pub(super) accumulation: usize,
    /// Links, separated by commas: names or files of profiles (see `bench links --help`).
    #[arg(long, value_delimiter = ',', default_value = "lan-10g,lan-1g,lan-100m")]
    pub(super) links: Vec<String>,
    /// Numbers of ranks for the scaling rows, separated by commas. The table marks rows whose ranks share cores.
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    pub(super) scale_ranks: Vec<usize>,
    #[command(flatten)]
    pub(super) common: CommonArgs,
}

/// What all papers have.
#[derive(Debug, Args)]
pub(super) struct CommonArgs {
    /// Folder for rows and pictures. [default: a new folder under bench-results/]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Transport that connects the ranks: local, shm, tcp-raw, tcp (ZeroMQ), quic.
    #[arg(long, default_value_t)]
    transport: TransportKind,
    /// Number of ranks that compute; a dedicated parameter server is one more. [default: 2; with --full the paper's number of devices, 8 for lin]
    #[arg(long)]
    ranks: Option<usize>,
    /// Model size. [default: tiny; with --full 124m, and 350m for lin]
    #[arg(long)]
    preset: Option<Preset>,
    /// Sequences of a step, all ranks together; a multiple of --ranks. [default: 12, for lin 32; with --full the paper's, if it states one]
    #[arg(long)]
    batch: Option<usize>,
    /// Random seed of weights and data order.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Compute threads of each rank. [default: the machine's cores divided by --ranks]
    #[arg(long)]
    threads: Option<usize>,
    /// A text file, a folder of text files, or (with --full) token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Use the paper's size: GPT-2 with 124 million parameters (for lin 350 million, the shape of BERT-large), GPT-2's tokenizer, and the sequence
    /// length, batch and learning rate that the paper states, if it states them. This takes days on a CPU.
    #[arg(long)]
    full: bool,
    /// Seconds that a row may take. [default: 900; a week with --full]
    #[arg(long)]
    row_timeout: Option<u64>,
    /// Run although this is a debug build.
    #[arg(long)]
    allow_debug: bool,
}

/// A 16-bit type.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Mixed {
    Bf16,
    F16,
}

impl Mixed {
    pub(super) fn precision(self) -> Precision {
        match self {
            Mixed::Bf16 => Precision::Bf16,
            Mixed::F16 => Precision::F16,
        }
    }

    /// bf16 has the exponents of f32 and needs none.
    pub(super) fn loss_scaling(self) -> LossScaling {
        match self {
            Mixed::Bf16 => LossScaling::Off,
            Mixed::F16 => LossScaling::DYNAMIC,
        }
    }
}

impl PaperArgs {
    pub(super) fn parts(&self) -> (&CommonArgs, &Paper) {
        match &self.paper {
            paper @ Paper::Bai(args) => (&args.common, paper),
            paper @ Paper::Patwardhan(args) => (&args.common, paper),
            paper @ Paper::Lin(args) => (&args.common, paper),
        }
    }
}

/// What a flag stands for that was not given.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    pub(super) preset: Preset,
    /// Tokens of a sequence, where it is not the preset's.
    pub(super) block_size: Option<usize>,
    pub(super) ranks: usize,
    pub(super) batch: usize,
    pub(super) tokenizer: TokenizerKind,
    pub(super) row_timeout: u64,
}

impl Size {
    /// What a laptop trains in a few minutes.
    pub(super) const SMALL: Size = Size {
        preset: Preset::Tiny,
        block_size: None,
        ranks: 2,
        batch: 12,
        tokenizer: TokenizerKind::Bytes,
        row_timeout: 900,
    };
}

/// What all rows share.
pub(super) struct Settings {
    pub(super) out: PathBuf,
    pub(super) corpus: Corpus,
    pub(super) source: Option<PathBuf>,
    pub(super) tokenizer: TokenizerKind,
    pub(super) transport: TransportKind,
    pub(super) ranks: usize,
    pub(super) threads: usize,
    pub(super) preset: Preset,
    pub(super) model: ModelConfig,
    pub(super) batch: usize,
    pub(super) seed: u64,
    pub(super) full: bool,
    pub(super) row_timeout: Duration,
    pub(super) environment: Environment,
    pub(super) signals: Signals,
}

impl CommonArgs {
    pub(super) fn allows_debug(&self) -> bool {
        self.allow_debug
    }

    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// Checks everything, makes the folder and reads the text; `size` has what was not given.
    pub(super) fn check(&self, size: &Size) -> Result<Settings, BenchError> {
        let ranks = self.ranks.unwrap_or(size.ranks);
        // One is left for a dedicated server.
        between("--ranks", &ranks, 2..=MAX_RANKS_HERE - 1)?;
        let batch = self.batch.unwrap_or(size.batch);
        even_batch(batch, ranks)?;
        if let Some(threads) = &self.threads {
            between("--threads", threads, 1..=MAX_THREADS)?;
        }
        let row_timeout = self.row_timeout.unwrap_or(size.row_timeout);
        if row_timeout == 0 {
            return Err("--row-timeout must be at least 1".into());
        }
        if let Some(missing) = self.transport.missing() {
            return Err(format!("--transport {}: {missing}", self.transport).into());
        }
        let corpus = load_text(self.data.as_deref(), size.tokenizer)?;
        let preset = self.preset.unwrap_or(size.preset);
        let mut model = preset.config(corpus.vocab_size());
        if let Some(block_size) = size.block_size.filter(|_| self.preset.is_none()) {
            model.block_size = block_size;
        }
        let out = self.folder()?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Settings {
            out,
            corpus,
            source: self.data.clone(),
            tokenizer: size.tokenizer,
            transport: self.transport,
            ranks,
            threads: self.threads.unwrap_or_else(|| (cores / ranks).max(1)),
            preset,
            model,
            batch,
            seed: self.seed,
            full: self.full,
            row_timeout: Duration::from_secs(row_timeout),
            environment: Environment::read(),
            signals: Signals::catch()?,
        })
    }

    /// The folder for results, which can be written and holds none.
    fn folder(&self) -> Result<PathBuf, BenchError> {
        let out = results_folder(self.out.clone(), "paper")?;
        let rows = out.join("results.jsonl");
        if rows.exists() {
            return Err(format!("{} holds an earlier run; give another folder with --out", rows.display()).into());
        }
        Ok(out)
    }
}

impl Settings {
    /// Gives a plan what all rows share.
    pub(super) fn put(&self, draft: &mut Draft) {
        draft.timeout_s = self.row_timeout.as_secs();
        draft
            .set(Axis::Transport, &[self.transport])
            .set(Axis::Ranks, &[self.ranks])
            .set(Axis::Preset, &[self.preset])
            .set(Axis::Block, &[self.model.block_size])
            .set(Axis::Batch, &[self.batch])
            .set(Axis::Seed, &[self.seed])
            .set(Axis::Threads, &[self.threads.min(MAX_THREADS)]);
    }

    /// The batches of the text, which are enough for training and for validation.
    pub(super) fn batches(&self, draft: &Draft) -> Result<Batches, BenchError> {
        let eval_batches = draft.values(Axis::ValidationBatches).first().map_or(Ok(1), |text| text.parse())?;
        let batches = Batches::new(&self.corpus, self.model.block_size, self.batch, self.seed)?;
        batches.validation(eval_batches, Share { rank: 0, world: self.ranks, accumulation: 1 })?;
        Ok(batches)
    }

    /// Replaces the text by the beginning of it that has `steps` steps and a tenth more to validate on, if it is longer. The text that
    /// is used lies in the folder of results.
    pub(super) fn cut_text(&mut self, steps: u64) -> Result<(), BenchError> {
        let wanted = usize::try_from(steps)
            .ok()
            .and_then(|steps| steps.checked_mul(self.batch)?.checked_add(1)?.checked_mul(self.model.block_size))
            .ok_or("--steps is too large")?;
        // A tenth is held out; what is lost to rounding is a window at most.
        let tokens = wanted.saturating_add(wanted / 9).saturating_add(self.model.block_size);
        let stream = self.corpus.train();
        if tokens >= stream.len() {
            return Ok(());
        }
        let mut ids = Vec::with_capacity(tokens);
        stream.read(0, tokens, &mut ids)?;
        let ids = ids.into_iter().map(u16::try_from).collect::<Result<Vec<u16>, _>>()?;
        let path = self.out.join("text.txt");
        // A token may end inside a character, which a tokenizer of text would refuse.
        let bytes = match self.tokenizer {
            TokenizerKind::Bytes => self.corpus.tokenizer().decode_bytes(&ids)?,
            TokenizerKind::Gpt2 | TokenizerKind::Chars => self.corpus.tokenizer().decode(&ids)?.into_bytes(),
        };
        fs::write(&path, bytes).map_err(|error| format!("{}: {error}", path.display()))?;
        self.corpus = load_text(Some(&path), self.tokenizer)?;
        self.source = Some(path);
        Ok(())
    }

    /// The lines that a run begins with.
    pub(super) fn introduce(&self, paper: &str, what: &str) {
        say(format_args!("{paper}"));
        say(format_args!("text: {}", self.corpus.describe()));
        say(format_args!("machine: {}", self.environment.one_line()));
        say(format_args!(
            "{}: {:.2} M parameters, {} sequences of {} tokens a step, {what}; {} ranks × {} thread(s) over {}, seed {}",
            self.preset,
            self.model.parameter_count() as f64 / 1e6,
            self.batch,
            self.model.block_size,
            self.ranks,
            self.threads,
            self.transport,
            self.seed
        ));
        if self.full {
            say("--full: without a GPU this takes days; each finished row is written to results.jsonl");
        }
        say(format_args!("results: {}\n", self.out.display()));
    }
}
