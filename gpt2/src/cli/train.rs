//! `gpt2 train`.

mod start;
mod watch;

use std::error::Error;
use std::ffi::OsString;
use std::fs;
use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::Device;
use clap::Args;
use comm_core::Waiting;
use comm_core::job::{self, Job, Source};
use comm_core::launch::{Launch, Output};
use comm_core::process::StopRequest;
use isocomm::{Bind, Medium, TransportKind, TransportOptions};
use serde::Deserialize;

use super::attempts::Attempts;
use super::folder::{self, Earlier};
use super::loading::LoadProgress;
use super::metrics::Metrics;
use super::progress::Progress;
use super::{CliError, MAX_RANKS_HERE, MAX_THREADS, Passing, complain, is_passing, say};
use crate::batches::{Batches, LastBatch, Share, ShortSequences};
use crate::checkpoint::sharded::{Saved, SavedError};
use crate::config::{ModelConfig, Preset};
use crate::cores;
use crate::corpus::{Corpus, CorpusSource, LoadOptions, TokenCache};
use crate::devices::{self, CheckedDevice, DeviceChoice, cuda_ordinal};
use crate::env::default_cargo_home;
use crate::model::KernelChoice;
use crate::optim::{LearningRate, LossScaling, OptimizerConfig, OptimizerKind, ScheduleKind};
use crate::precision::Precision;
use crate::run::{RankOptions, refuse, run_rank, run_threads};
use crate::strategy::{Compression, LocalOptions, Setting, StrategyKind, StrategyOptions};
use crate::tokenizer::{Tokenizer, TokenizerKind};
use crate::trainer::{Checkpoints, Keep, Restarts, TrainConfig, TrainError, writing_time};
use start::Start;
use watch::WatchArgs;

#[derive(Clone, Debug, Args)]
#[command(allow_negative_numbers = true)]
pub(super) struct TrainArgs {
    #[arg(long, default_value = "single", help = strategies())]
    strategy: StrategyKind,
    /// The transport that connects the ranks.
    #[arg(long, default_value_t, help = format!("The transport that connects the ranks: {}", TransportKind::help()))]
    transport: TransportKind,
    /// Number of ranks to start on this machine. A launcher such as srun, mpirun or torchrun starts the ranks itself; --nproc must then equal the
    /// number of its ranks on this machine. If COMM_RANK is set by hand, --nproc is the number of ranks that share this machine's cores. [default: 1
    /// for single, else 2]
    #[arg(long)]
    nproc: Option<usize>,
    /// TOML file with values for these options, by their names, such as `strategy = "ddp"`. The command line overrides the file; `--NAME=false` turns
    /// off a switch that the file turns on. Paths in the file are relative to the current folder.
    #[arg(long)]
    pub(super) config: Option<PathBuf>,
    /// Model size: micro, tiny, mini, small, 124m, 350m, 774m, 1558m. [default: tiny, or that of --init-from]
    #[arg(long)]
    preset: Option<Preset>,
    /// Weights to start from: a checkpoint of this program, or a GPT-2 that Hugging Face's transformers saved as safetensors (the file beside its
    /// config.json, the index of several files, or the folder). The model's size and tokenizer come from there; optimizer state and data order start
    /// from the beginning. Not with --resume, which restores all of these.
    #[arg(long)]
    init_from: Option<PathBuf>,
    /// Tokens of a sequence. With --init-from at most the number of positions of its model. [default: that of the preset or of --init-from]
    #[arg(long)]
    block_size: Option<usize>,
    /// A text file, a folder of text files, or token shards (.bin). [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Treat <|endoftext|> as ordinary text, and put line ends between the files of a folder. By default the gpt2 tokenizer makes one token of
    /// <|endoftext|> (id 50256) and puts this token between the files of a folder.
    #[arg(long)]
    no_special_tokens: bool,
    /// Encode the text again instead of using the token cache. By default the token ids of texts of 2 MiB and more are kept in
    /// $XDG_CACHE_HOME/isocomm/tokens or ~/.cache/isocomm/tokens, up to 8 GiB; the least recently used are removed first. This folder should be on a
    /// local disk (if the home folder is not, set XDG_CACHE_HOME), and can be deleted when no run uses it.
    #[arg(long)]
    no_token_cache: bool,
    /// Tokenizer: gpt2 (byte-pair encoding), bytes or chars. [default: gpt2, or that of --init-from]
    #[arg(long)]
    tokenizer: Option<TokenizerKind>,
    /// Number of optimizer steps.
    #[arg(long, default_value_t = 100)]
    steps: u64,
    /// Random seed of weights, data order and dropout.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Dropout probability, from 0 to below 1, at GPT-2's three places: after the embedding, on attention weights, and on what a block adds to the
    /// residual stream. Which elements are dropped depends only on seed, step, layer and place in the global batch, not on the number of ranks,
    /// strategy, accumulation or kernels. GPT-2 itself was trained with 0.1.
    #[arg(long, default_value_t = 0.0)]
    dropout: f64,
    /// Sequences of a step, all ranks together (the global batch).
    #[arg(long, default_value_t = 12)]
    batch: usize,
    /// Micro-steps of a step (gradient accumulation); gradients are communicated after the last.
    #[arg(long, default_value_t = 1)]
    accumulation: usize,
    /// What happens to the sequences at the end of an epoch that do not fill a step: drop leaves them out; join makes a smaller step of them, divided
    /// among the ranks as evenly as possible.
    #[arg(long, default_value_t)]
    last_batch: LastBatch,
    /// A first phase with shorter sequences: 128x900 cuts each sequence of the first 900 steps into pieces of 128 tokens, so the number of tokens of
    /// a step stays the same. BERT is trained like this: nine tenths of its steps have sequences of 128 tokens instead of 512.
    #[arg(long, value_name = "TOKENSxSTEPS")]
    short_sequences: Option<ShortSequences>,
    /// Type in which the model computes: f32, bf16, f16. Master weights, optimizer, layer norm, softmax and loss stay in f32.
    #[arg(long, default_value = "f32")]
    precision: Precision,
    /// Loss scaling, which keeps small gradients from becoming 0 in 16 bits: off, dynamic, or a fixed factor. [default: dynamic where --precision or
    /// --wire is f16, else off]
    #[arg(long)]
    loss_scale: Option<LossScaling>,
    /// Recompute activations in the backward pass instead of keeping them (activation checkpointing).
    #[arg(long)]
    recompute: bool,
    /// Kernels of layers and loss: fused (each layer in as few passes over memory as possible), or composed (of the backend's single operations,
    /// which is slower and takes more memory; for measuring what fused kernels save).
    #[arg(long, default_value_t)]
    kernels: KernelChoice,
    /// Optimizer: adamw, lamb, sgd (plain, without momentum).
    #[arg(long, default_value_t)]
    optimizer: OptimizerKind,
    /// Shape of the learning rate after the warm-up: cosine, linear, constant.
    #[arg(long, default_value_t)]
    schedule: ScheduleKind,
    /// Highest learning rate.
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// Lowest learning rate, at the end of the schedule. [default: a tenth of --lr]
    #[arg(long)]
    min_lr: Option<f64>,
    /// Steps of linear warm-up. [default: a twentieth of --steps, at most 100]
    #[arg(long)]
    warmup: Option<u64>,
    /// Decoupled weight decay, applied to two-dimensional tensors only. [default: 0.1 for adamw, 0.01 for lamb, 0 for sgd]
    #[arg(long)]
    weight_decay: Option<f64>,
    /// Decay rate of the running mean of gradients (first moment). [default: 0.9]
    #[arg(long)]
    beta1: Option<f64>,
    /// Decay rate of the running mean of squared gradients (second moment). [default: 0.95 for adamw, 0.999 for lamb]
    #[arg(long)]
    beta2: Option<f64>,
    /// Constant that is added to the root of the second moment. [default: 1e-8 for adamw, 1e-6 for lamb]
    #[arg(long)]
    epsilon: Option<f64>,
    /// Clip gradients to this global norm; 0 turns clipping off.
    #[arg(long, default_value_t = 1.0)]
    clip: f64,
    /// Wire type, in which gradients are sent: f32, bf16, f16. [default: that of --precision]
    #[arg(long)]
    wire: Option<Precision>,
    /// Compression of gradients before they are sent, for ring, ddp and ps: none, int8 (8-bit integers, with a scale for each block of 256), sign
    /// (one bit for each element, and the mean magnitude of each block of 256), topk:FRACTION (this fraction of each bucket, the elements of largest
    /// magnitude), powersgd:RANK (two low-rank factors of each matrix; not for ps). With ps only what workers push is compressed; parameters are sent
    /// whole. What is left out is added to the rank's next gradients (error feedback). Not with --wire or loss scaling.
    #[arg(long, default_value_t)]
    compress: Compression,
    /// Size of the first bucket, in bytes of f32, for strategies that send gradients or parameters in buckets: it is sent once it holds this many.
    #[arg(long, default_value_t = StrategyOptions::default().first_bucket_bytes)]
    first_bucket_bytes: usize,
    /// Size of every further bucket, in bytes of f32.
    #[arg(long, default_value_t = StrategyOptions::default().bucket_bytes)]
    bucket_bytes: usize,
    /// Size of a fusion buffer of ring, in bytes of f32: it is sent once it holds this many.
    #[arg(long, default_value_t = StrategyOptions::default().fusion_bytes)]
    fusion_bytes: usize,
    /// Start communication only after the backward pass, and finish gathering or pulling weights before the next step; fsdp and hsdp gather a block's
    /// weights only when they are needed.
    #[arg(long)]
    no_overlap: bool,
    /// With ps, rank 0 is only a server; the other ranks share the batch.
    #[arg(long)]
    dedicated_server: bool,
    /// Ranks of a node, for hierarchical and hsdp. Each machine's ranks are divided into nodes in rank order; its last node may have fewer. Ranks in
    /// different containers of one machine count as ranks of that machine. [default: the ranks that the launcher has started on a machine, or else
    /// all ranks there; each container counts as a machine]
    #[arg(long)]
    ranks_per_node: Option<usize>,
    /// Transport between the ranks of a node, for hierarchical and hsdp; values as for --transport. [default: that of --transport]
    #[arg(long)]
    node_transport: Option<TransportKind>,
    #[arg(long, value_name = "STEPS", help = setting(Setting::SyncEvery, "Steps between two synchronisations of the same parameters"))]
    sync_every: Option<u64>,
    #[arg(long, help = setting(Setting::OuterRate, "Learning rate of the outer optimizer"))]
    outer_rate: Option<f64>,
    #[arg(long, help = setting(Setting::OuterMomentum, "Nesterov momentum of the outer optimizer"))]
    outer_momentum: Option<f64>,
    #[arg(long, help = setting(Setting::Fragments, "Number of fragments, parts of the model that are synchronised one after another"))]
    fragments: Option<usize>,
    #[arg(long, value_name = "STEPS", help = setting(Setting::OverlapSteps, "Training steps between starting a fragment's average and applying it"))]
    overlap_steps: Option<u64>,
    #[arg(long, value_name = "SHARE", help = setting(Setting::Mixing, "Weight of a rank's own parameters when a synchronised fragment is \
        applied: 0 replaces them by the synchronised ones, 1 keeps them"))]
    mixing: Option<f64>,
    #[arg(long, value_name = "SHARE", help = setting(Setting::SpartaShare, "Share of all parameters, chosen at random, that is averaged in \
        each step"))]
    sparta_share: Option<f64>,
    #[arg(long, value_name = "STEPS", help = setting(Setting::Staleness, "Most steps that a worker may be ahead of the slowest worker; \
        with 0 all workers wait for each other in every step, as with ps"))]
    staleness: Option<u64>,
    /// Factor by which the loss is multiplied before the backward pass, for experiments with small gradients.
    #[arg(long, default_value_t = 1.0)]
    loss_factor: f64,
    /// Lanes, independent channels between each pair of ranks. [default: 2; for async-ps the number of ranks]
    #[arg(long)]
    lanes: Option<usize>,
    /// What a rank does while it waits for others: park (sleep), adaptive (poll for at most 50 µs, then sleep), busy (poll all the time, for ranks
    /// that have a core each).
    #[arg(long, default_value_t)]
    waiting: Waiting,
    /// Congestion control: of TCP by its kernel name, of QUIC cubic, bbr, reno, auto or fixed:BYTES. [default: the kernel's for TCP, auto for QUIC]
    #[arg(long)]
    congestion: Option<String>,
    /// QUIC's largest datagram, in bytes of UDP payload. [default: what the interface carries]
    #[arg(long)]
    quic_mtu: Option<u16>,
    /// Leave out the gate, which lets only ranks of the job reach ZeroMQ's ports. Without it anyone who can reach a port can end a rank while it
    /// connects.
    #[arg(long)]
    no_gate: bool,
    /// Address on which this rank listens and others reach it, or interfaces as in NCCL_SOCKET_IFNAME: prefixes of names (eth,ib), whole names
    /// (=eth0), or names to leave out (^docker). [default: COMM_IFNAME, or the address by which it reaches rank 0]
    #[arg(long, value_name = "ADDRESS|INTERFACES")]
    bind: Option<Bind>,
    /// Seconds that an operation may take, and for async-ps a step of the slowest worker. At the start, ranks wait for each other longer, because
    /// some may have to encode the text first: one second more for each MiB of text or each 64 MiB of token shards.
    #[arg(long, default_value_t = 120.0)]
    timeout: f64,
    /// Run without a secret if the launcher gives none. Anyone who can connect to the ranks can then join or end the job.
    #[arg(long)]
    insecure: bool,
    /// Seconds without a heartbeat after which a rank counts as lost. The end of a rank's process is noticed at once.
    #[arg(long, default_value_t = 30.0)]
    liveness: f64,
    /// Seconds after which an operation that has not finished is reported, with the ranks that it waits for.
    #[arg(long, default_value_t = 30.0)]
    stall_after: f64,
    /// Check before every operation that all ranks have called the same one.
    #[arg(long)]
    checked: bool,
    /// Search what each rank contributes to an operation for NaN and infinities. If there is one, the run ends and names rank, bucket and index. Not
    /// with loss scaling, under which gradients are expected to overflow at times.
    #[arg(long)]
    check_finite: bool,
    /// Compute threads of each rank. [default: the machine's cores divided by the ranks on it; where a launcher binds ranks to cores, the cores that
    /// a rank may use, each divided by the ranks that may use it]
    #[arg(long)]
    threads: Option<usize>,
    /// Device that computes: cpu, cuda or cuda:N, wgpu or wgpu:N; the last two need a build with that feature. `gpt2 devices` lists the numbers N. A
    /// build with the feature `kernel-cache` (which `cuda` includes) keeps compiled kernels in $XDG_CACHE_HOME/isocomm or ~/.cache/isocomm, unless a
    /// cubecl.toml, or a burn.toml with a section cubecl, in this folder or one above says otherwise.
    #[arg(long, default_value_t)]
    device: DeviceChoice,
    /// Steps between two validations; the last step is also followed by one. 0 turns validation off. [default: a quarter of --steps]
    #[arg(long)]
    eval_every: Option<u64>,
    /// Most batches, of --batch sequences each, that a validation uses.
    #[arg(long, default_value_t = 20)]
    eval_batches: usize,
    #[command(flatten)]
    watch: WatchArgs,
    /// Folder for the results: the weights (model.safetensors, with the files that Hugging Face's transformers need to open it; best.safetensors has
    /// the weights of the best validation), the steps (steps.jsonl), TensorBoard's event file, and the checkpoints of --save-every. A folder that
    /// holds an earlier run is refused, unless --resume continues that run.
    #[arg(long, default_value = "out")]
    out: PathBuf,
    /// Replace an earlier run in --out. Its files are removed before the first step, once all ranks have met.
    #[arg(long, overrides_with = "overwrite")]
    overwrite: bool,
    /// Steps between two checkpoints of the whole state, from which --resume continues; 0 saves none. They are written to checkpoints/step-N in
    /// --out, a folder that all ranks must share. SIGTERM or SIGUSR1 makes all ranks finish their step, save a checkpoint and end with exit code 85,
    /// even if this is 0; with local-sgd, diloco, streaming-diloco and sparta this happens at the next synchronisation, validation or checkpoint.
    /// With async-ps the workers wait for the slowest worker before a checkpoint is saved.
    #[arg(long, default_value_t = 0)]
    save_every: u64,
    /// Number of newest checkpoints of the whole state that are kept; older ones are removed.
    #[arg(long, default_value_t = 2)]
    keep: usize,
    /// Continue from a checkpoint of the whole state. DIR is the folder of a checkpoint or of a run, whose newest checkpoint is taken; latest is the
    /// newest checkpoint in --out. auto does the same, but starts from the beginning if there is no checkpoint yet, so that a scheduler can repeat
    /// one command; add --overwrite if it may replace a run that was interrupted before its first checkpoint. Give the same options as for the
    /// earlier run, but not --init-from (which is allowed with auto). These may differ: the number of ranks, --strategy and its options, --transport
    /// and its options, --wire, --precision, --loss-scale, --accumulation, --recompute, --threads, --device, --out, --eval-every, --eval-batches,
    /// --save-every, --keep. With the same number of ranks, strategy and types the result is bit-identical to that of an uninterrupted run; except
    /// for async-ps with a --staleness above 0, where no two runs are alike. If each rank had parameters of its own, and the number of ranks or the
    /// strategy is another one now, all ranks continue with the mean of those parameters.
    #[arg(long, value_name = "DIR|latest|auto", overrides_with = "resume")]
    resume: Option<PathBuf>,
    /// When a rank dies, start all ranks again from the last checkpoint, or from the beginning if there is none; at most this many times. Only for
    /// ranks that this program starts itself; a launcher such as srun has to restart its ranks, with --resume auto.
    #[arg(long, default_value_t = 0)]
    max_restarts: u64,
    /// Restarts before this one, for the summary.
    #[arg(long, hide = true, default_value_t = 0)]
    restarts: u64,
    /// Steps that were lost in them.
    #[arg(long, hide = true, default_value_t = 0)]
    steps_lost: u64,
}

/// The help text of `--strategy`.
fn strategies() -> String {
    format!(
        "How ranks share a training step: {}. The pages \"Strategies\" and \"Strategies for slow networks\" of the book describe \
        them",
        StrategyKind::names(", ")
    )
}

/// The help text of an option that some strategies have.
fn setting(setting: Setting, what: &str) -> String {
    format!("{what}, for {}. [default: {}]", setting.strategies(), LocalOptions::default().value(setting))
}

/// More lanes than this are of no use to anyone.
const MAX_LANES: usize = 256;

/// `arguments` are those of the program, by which ranks are started.
pub(super) fn run(args: &TrainArgs, arguments: Vec<OsString>) -> ExitCode {
    if let Err(error) = job::die_with_parent() {
        complain(format_args!("error: {error}"));
        return ExitCode::FAILURE;
    }
    begin(args, arguments).unwrap_or_else(|error| {
        complain(format_args!("error: {error}"));
        not_begun(&error)
    })
}

/// The exit code of a run that `error` ends before it begins: it has been asked for wrongly, or of the wrong machine, unless that may pass.
fn not_begun(error: &CliError) -> ExitCode {
    if is_passing(error) { ExitCode::FAILURE } else { exit_code(job::EXIT_CONFIGURATION) }
}

fn exit_code(code: i32) -> ExitCode {
    u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// # Errors
/// What is wrong with the arguments or the environment.
fn begin(args: &TrainArgs, arguments: Vec<OsString>) -> Result<ExitCode, CliError> {
    match Job::from_env_with(args.insecure)? {
        Some(job) => {
            if let Some(nproc) = args.nproc {
                check_nproc(nproc, &job, job::ranks_on_this_machine())?;
            }
            if args.max_restarts > 0 && job.source != Source::Launch {
                return Err(format!(
                    "--max-restarts is for ranks that this program starts, and these were started by {}; leave it out, and have the \
                     launcher restart them, with --resume auto",
                    job.source
                )
                .into());
            }
            run_one(args, &job)
        }
        None => start(args, arguments),
    }
}

/// This process's rank of a job that a launcher has started.
fn run_one(args: &TrainArgs, job: &Job) -> Result<ExitCode, CliError> {
    let ranks_here = args.nproc.or_else(job::ranks_on_this_machine).unwrap_or(job.world_size);
    check_saving(args)?;
    let earlier = EarlierRun::find(args)?;
    let refused = if job.rank == 0 { earlier.fate.check(&args.out) } else { Ok(()) };
    if let Err(why) = refused {
        // Before the text is loaded, which may take long.
        return refuse_for_all(args, job, (ranks_here, &earlier), None, why);
    }
    let metrics = match (job.rank == 0).then(|| args.watch.serve(args)).transpose() {
        Ok(metrics) => metrics.flatten(),
        Err(why) => return refuse_for_all(args, job, (ranks_here, &earlier), None, why),
    };
    let mut prepared = Prepared::new(args, job.world_size, ranks_here, &earlier, Verbosity::of(job))?;
    if args.threads.is_none() && job.source != Source::Launch {
        // The launcher may have bound the ranks to cores, which they learn of each other when they have met.
        prepared.options.threads = None;
    }
    let _lock = match (job.rank == 0).then(|| earlier.take(args)).transpose() {
        Ok(lock) => lock,
        Err(why) => return refuse_for_all(args, job, (ranks_here, &earlier), Some(prepared), why),
    };
    let mut progress = Prepared::progress(args, &earlier, job.rank, metrics);
    if job.rank == 0 {
        say(format_args!("ranks: {}, by {}", job.world_size, job.source));
        // Our own launcher has said the rest.
        if job.source != Source::Launch {
            say(format_args!("job: {}", job.describe()));
            say(prepared.describe(args, job.world_size));
        }
    }
    let Prepared { config, corpus, options, device, .. } = &prepared;
    match run_rank(job, config, corpus, options, device, &mut progress) {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(TrainError::Comm(error)) => {
            complain(format_args!("error: {error}"));
            // Whoever started the ranks looks for the one that is the cause.
            Ok(exit_code(job::exit_code(&error, job.rank)))
        }
        Err(error @ TrainError::Stopped { .. }) => Ok(stopped(&error, job.rank)),
        Err(TrainError::Refused { is_said: true, .. }) => Ok(ExitCode::FAILURE),
        Err(error) => Ok(failed(&error)),
    }
}

/// The exit code of a run that has begun and then failed. What it was to go on from may turn out to be no checkpoint only then.
fn failed(error: &(dyn Error + 'static)) -> ExitCode {
    use SavedError::{Altered, Contradicts, Foreign, Newer};
    complain(format_args!("error: {error}"));
    match error.downcast_ref() {
        Some(TrainError::Saved(Altered { .. } | Contradicts { .. } | Foreign { .. } | Newer { .. })) => {
            exit_code(job::EXIT_CONFIGURATION)
        }
        _ => ExitCode::FAILURE,
    }
}

/// The exit code of a rank that was asked to leave, and has saved the state of the run.
fn stopped(error: &TrainError, rank: usize) -> ExitCode {
    if rank == 0 {
        say(error);
    }
    exit_code(job::EXIT_STOPPED)
}

/// An earlier run, or an earlier part of this one.
#[derive(PartialEq)]
struct EarlierRun {
    /// The checkpoint from which this run goes on.
    resume: Option<PathBuf>,
    /// What becomes of what lies in `--out`.
    fate: Earlier,
}

impl EarlierRun {
    fn find(args: &TrainArgs) -> Result<Self, CliError> {
        let find = |given: &PathBuf| folder::find_checkpoint(&args.out, given);
        let resume = args.resume.as_ref().map(find).transpose()?.flatten();
        let fate = Earlier::of(&args.out, resume.as_deref(), args.overwrite);
        Ok(EarlierRun { resume, fate })
    }

    /// Takes `--out` for this run, until the file that is returned is dropped.
    ///
    /// # Errors
    /// Another run keeps it, or has left there something else than was found before.
    fn take(&self, args: &TrainArgs) -> Result<fs::File, CliError> {
        let lock = folder::lock(&args.out, folder::ENDING)?;
        let now = EarlierRun::find(args)?;
        if now != *self {
            let of = |earlier: &EarlierRun| match &earlier.resume {
                Some(resume) => resume.display().to_string(),
                None => "no checkpoint".to_owned(),
            };
            return Err(Passing(format!(
                "--out {}: another run wrote to it while this one was starting; the checkpoint to continue from was {} and is now {}; \
                 start this run again",
                args.out.display(),
                of(self),
                of(&now)
            ))
            .into());
        }
        folder::make_ready(&args.out, self.fate)?;
        Ok(lock)
    }
}

/// Ends a job whose rank 0, which is this process, has found that it must not run: says why at once, and then tells the other ranks, which
/// would otherwise wait for this one until their time is up. They are met with what a run is `prepared` by.
fn refuse_for_all(
    args: &TrainArgs,
    job: &Job,
    (ranks_here, earlier): (usize, &EarlierRun),
    prepared: Option<Prepared>,
    why: CliError,
) -> Result<ExitCode, CliError> {
    // Ranks of this program's own launcher are ended by it.
    if job.world_size == 1 || job.source == Source::Launch {
        return Err(why);
    }
    complain(format_args!("error: {why}"));
    // The user has been told; later errors are not reported.
    let silent = Verbosity { speaks: false, warns: false };
    let prepared = prepared.map_or_else(|| Prepared::new(args, job.world_size, ranks_here, earlier, silent), Ok);
    if let Ok(Prepared { config, corpus, options, device, .. }) = &prepared {
        let _ = refuse(job, config, corpus, options, device, &why.to_string());
    }
    Ok(not_begun(&why))
}

/// No launcher started this process: it is one itself, unless all ranks fit in it.
fn start(args: &TrainArgs, arguments: Vec<OsString>) -> Result<ExitCode, CliError> {
    let ranks = args.nproc.unwrap_or(if args.strategy == StrategyKind::Single { 1 } else { 2 });
    check_saving(args)?;
    let earlier = EarlierRun::find(args)?;
    earlier.fate.check(&args.out)?;
    if is_threads(args.transport) && args.max_restarts > 0 {
        return Err(format!(
            "--max-restarts is for ranks that are processes, and with --transport {} they are threads; choose another transport",
            args.transport
        )
        .into());
    }
    let is_here = is_threads(args.transport) || (ranks == 1 && args.max_restarts == 0);
    // Before the text is loaded, which may take long. Rank 0 listens later, where it is another process.
    let metrics = if is_here { args.watch.serve(args)? } else { args.watch.check_port().map(|()| None)? };
    // What is wrong with the arguments or the text is said once, here, and not by every rank.
    let prepared = Prepared::new(args, ranks, ranks, &earlier, Verbosity { speaks: true, warns: true })?;
    if is_here {
        let _lock = earlier.take(args)?;
        let mut progress = Prepared::progress(args, &earlier, 0, metrics);
        say(match args.nproc {
            Some(_) => format!("ranks: {ranks}, by --nproc"),
            None => format!("ranks: {ranks}, the default for --strategy {}; see --nproc", args.strategy),
        });
        say(prepared.describe(args, ranks));
        let Prepared { config, corpus, options, device, .. } = &prepared;
        return match run_threads(config, corpus, ranks, options, device, &mut progress) {
            Ok(_) => Ok(ExitCode::SUCCESS),
            Err(error @ TrainError::Stopped { .. }) => Ok(stopped(&error, 0)),
            Err(error) => Ok(failed(&error)),
        };
    }
    say(prepared.describe(args, ranks));
    let resume = prepared.options.keep.resume.clone();
    let writing = writing_time(&prepared.config, ranks);
    drop(prepared);
    let mut command = arguments;
    if args.nproc.is_none() {
        command.extend(["--nproc".into(), ranks.to_string().into()]);
    }
    let mut launch = Launch::new(std::env::current_exe()?, ranks);
    launch.args.clone_from(&command);
    launch.stop = Some(LEAVING.saturating_add(writing));
    // On a terminal rank 0 has it to itself, for its progress bar.
    launch.output = if std::io::stdout().is_terminal() { Output::RankZeroPlain } else { Output::Prefixed };
    let mut attempts = Attempts::new(&args.out, args.max_restarts, resume.as_deref(), command);
    let outcome = match launch.run_again(&mut |outcome| attempts.next(outcome)) {
        Ok(outcome) => outcome,
        Err(error) => return Ok(failed(&error)),
    };
    if let Some(cause) = outcome.cause {
        complain(format_args!("error: {cause}"));
    }
    Ok(exit_code(outcome.code))
}

/// How long ranks that were asked to leave may take for it, beside the time in which they write their state.
const LEAVING: Duration = Duration::from_secs(30);

/// Refuses `--nproc` where a launcher has left another number of ranks of this machine, `ranks_here`, in the environment: whoever gives it means
/// to start that many, or is mistaken about the launcher.
fn check_nproc(nproc: usize, job: &Job, ranks_here: Option<usize>) -> Result<(), CliError> {
    let fits = match job.source {
        // Nothing but this option says how many of them are here.
        Source::Hand => nproc <= job.world_size,
        _ => nproc == ranks_here.unwrap_or(job.world_size),
    };
    let Some((rank, _)) = job.source.variables().filter(|_| !fits) else { return Ok(()) };
    let here = ranks_here.filter(|_| job.source != Source::Hand);
    let here = here.map_or(String::new(), |here| format!(", with {here} on this machine"));
    let hint = match job.source.local_size_variable() {
        Some(name) if ranks_here.is_none() && nproc < job.world_size => {
            format!(" If the job has {nproc} ranks on this machine and others elsewhere, set {name}={nproc}.")
        }
        _ => String::new(),
    };
    Err(format!(
        "--nproc {nproc} contradicts the environment, where {} say that this process is rank {} of {}{here}. To start {nproc} rank(s) \
         here, unset these variables: env -u {rank} gpt2 train ...; to run as that rank, leave out --nproc.{hint}",
        job.source, job.rank, job.world_size
    )
    .into())
}

/// What a process says while it prepares for the job.
#[derive(Clone, Copy)]
struct Verbosity {
    /// What all ranks do.
    speaks: bool,
    /// What goes wrong and does not matter much.
    warns: bool,
}

impl Verbosity {
    fn of(job: &Job) -> Self {
        let speaks = job.rank == 0;
        // Our own launcher has prepared, too, and said it.
        Verbosity { speaks, warns: speaks && job.source != Source::Launch }
    }
}

/// Arguments that have been checked, and the text.
struct Prepared {
    config: TrainConfig,
    corpus: Corpus,
    options: RankOptions,
    device: Device,
    /// What the model's size comes from, for people.
    model: String,
}

impl Prepared {
    /// `ranks` in all, of which `ranks_here` share this machine.
    fn new(
        args: &TrainArgs,
        ranks: usize,
        ranks_here: usize,
        earlier: &EarlierRun,
        verbosity: Verbosity,
    ) -> Result<Self, CliError> {
        check_ranks(args, ranks, ranks_here)?;
        check_numbers(args)?;
        let local = local_options(args)?;
        let optimizer = optimizer(args)?;
        let (wire, loss_scaling) = types(args)?;
        check_compression(args, wire, loss_scaling, ranks)?;
        check_counts(args, ranks, ranks_here)?;
        let learning_rate = learning_rate(args)?;
        let of_transport = transport_options(args, lanes(args, ranks))?;

        // Before the text is loaded, which may take long.
        let resume = earlier.resume.as_deref().map(Saved::open).transpose()?;
        let CheckedDevice { device, largest_tensor } = args.device.open()?;
        let cuda_device = cuda_ordinal(&device).map(usize::from);
        folder::make_writable(&args.out, "--out ")?;
        let start = Start::new(args, resume.as_ref())?;
        let corpus = load(args, start.tokenizer()?, verbosity)?;
        let (model, initial) = start.model(args, &corpus)?;
        args.short_sequences.map_or(Ok(()), |short| short.check(model.block_size))?;
        let config = TrainConfig {
            model,
            strategy: args.strategy,
            options: StrategyOptions { local, ..strategy_options(args, wire, ranks_per_node(args)?) },
            precision: args.precision,
            recompute: args.recompute,
            kernels: args.kernels,
            loss_scaling,
            loss_factor: args.loss_factor,
            seed: args.seed,
            dropout: args.dropout,
            initial,
            steps: args.steps,
            global_batch: args.batch,
            accumulation: args.accumulation,
            last_batch: args.last_batch,
            short_sequences: args.short_sequences,
            learning_rate,
            optimizer,
            clip: args.clip,
            eval_every: args.eval_every.unwrap_or_else(|| (args.steps / 4).max(1)),
            eval_batches: args.eval_batches,
        };
        check_batches(args.device, &config, &corpus, ranks, largest_tensor)?;
        if let Some(saved) = &resume {
            saved.check(&serde_json::to_value(&config)?, &corpus.hash_hex())?;
        }
        let options = RankOptions {
            transport: args.transport,
            options: TransportOptions { cuda_device, ..of_transport },
            node_transport: args.node_transport,
            threads: Some(args.threads.unwrap_or_else(|| (cores::count() / ranks_here).max(1))),
            keep: keep(args, resume),
        };
        Ok(Prepared { config, corpus, options, device, model: start.describe() })
    }

    /// The observer of `rank`: only rank 0 prints, writes, and answers with `metrics`.
    fn progress(args: &TrainArgs, earlier: &EarlierRun, rank: usize, metrics: Option<Metrics>) -> Progress {
        Progress::new(args.watch.log_every, (rank == 0).then(|| (args.out.clone(), earlier.fate)), metrics)
    }

    fn describe(&self, args: &TrainArgs, ranks: usize) -> String {
        let model = &self.config.model;
        let over = if ranks == 1 { String::new() } else { format!(" over {}", args.transport) };
        let compressed = match args.compress.is_on() {
            true => format!(", gradients compressed by {}", args.compress),
            false => String::new(),
        };
        let threads = self.options.threads.map_or(String::new(), |threads| format!("{threads} thread(s) each, "));
        let short = self
            .config
            .short_sequences
            .map_or(String::new(), |short| format!(" ({} in the first {} steps)", short.tokens, short.steps));
        format!(
            "text: {}\nmodel: {} ({} layers, {} heads, {} wide, {} tokens a sequence{short}, {:.2} M parameters)\nstrategy: {} on {ranks} \
             rank(s){over}, {threads}{} sequences a step{compressed}{}",
            self.corpus.describe(),
            self.model,
            model.n_layer,
            model.n_head,
            model.n_embd,
            model.block_size,
            model.parameter_count() as f64 / 1e6,
            args.strategy,
            args.batch,
            self.options.keep.resume.as_ref().map_or(String::new(), |saved| self.describe_resume(saved, ranks)),
        )
    }

    /// From where the run goes on, and whether its result is that of one that was never interrupted.
    fn describe_resume(&self, saved: &Saved, ranks: usize) -> String {
        let step = saved.state().step;
        let changes =
            serde_json::to_value(&self.config).map_or_else(|_| Vec::new(), |now| saved.state().changes(&now, ranks));
        let TrainConfig { strategy, options, .. } = &self.config;
        let how = match (changes.is_empty(), strategy.is_repeatable(options.local.staleness)) {
            (true, true) => "bit-identical to an uninterrupted run on the same kind of device".to_owned(),
            (true, false) => format!(
                "with all gradients applied; as in every run of {strategy} with --staleness {}, what follows depends on the order in which \
                 gradients arrive",
                options.local.staleness
            ),
            (false, _) if self.is_one_device() && is_one_device(saved) => {
                format!("resharded; equal to the earlier run up to rounding ({})", changes.join("; "))
            }
            (false, _) => format!("not equal to the earlier run from here on ({})", changes.join("; ")),
        };
        let elsewhere = self.moved(saved, ranks).map_or(String::new(), |moved| format!("\nresume: {moved}"));
        format!("\nresume: {}, after step {step} of {}, {how}{elsewhere}", saved.folder().display(), self.config.steps)
    }

    /// Whether the run computes what one device computes, but for rounding.
    fn is_one_device(&self) -> bool {
        self.config.options.is_one_device(self.config.strategy)
    }

    /// What the run was saved on, where that was something else than it goes on with.
    fn moved(&self, saved: &Saved, ranks: usize) -> Option<String> {
        let state = saved.state();
        let (transport, device) = (self.options.transport.name(), devices::kind(&self.device));
        let mut moved = Vec::new();
        // One rank has nobody to send to.
        if state.ranks > 1 && ranks > 1 && state.transport != transport {
            moved.push(format!("the transport was {} and is {transport} now", state.transport));
        }
        // Earlier versions did not say it.
        if let Some(then) = state.device.as_deref().filter(|then| *then != device) {
            moved.push(format!("the device was {then} and is {device} now; results differ by rounding"));
        }
        (!moved.is_empty()).then(|| moved.join("; "))
    }
}

/// Whether the run that was saved computed what one device computes, but for rounding.
fn is_one_device(saved: &Saved) -> bool {
    let config = &saved.state().config;
    let strategy = StrategyKind::deserialize(&config["strategy"]);
    let options = StrategyOptions::deserialize(&config["options"]);
    strategy.is_ok_and(|strategy| options.is_ok_and(|options| options.is_one_device(strategy)))
}

/// Refuses weights to start from of a run that goes on, or that would be replaced before it is started again.
fn check_saving(args: &TrainArgs) -> Result<(), CliError> {
    // Ranks that are started again have the arguments of the first start.
    let named = args.resume.as_ref().filter(|resume| !folder::is_auto(resume));
    if let (Some(init_from), Some(resume), 0) = (&args.init_from, named, args.restarts) {
        return Err(format!(
            "--init-from {} cannot be combined with --resume {}, which restores weights, model size and tokenizer; leave out --init-from \
             to continue that run, or --resume to begin a new one",
            init_from.display(),
            resume.display()
        )
        .into());
    }
    check_restarts_from(args)
}

/// Refuses weights to start from that a run which may be started again would itself replace.
fn check_restarts_from(args: &TrainArgs) -> Result<(), CliError> {
    let Some(init_from) = args.init_from.as_ref().filter(|_| args.max_restarts > 0) else { return Ok(()) };
    let (Ok(weights), Ok(out)) = (init_from.canonicalize(), args.out.canonicalize()) else { return Ok(()) };
    if weights != out && weights.parent() != Some(&out) {
        return Ok(());
    }
    Err(format!(
        "--max-restarts: the weights of --init-from {} are in --out {}, where this run replaces them, so a restart could not read them; \
         give another --out",
        init_from.display(),
        args.out.display()
    )
    .into())
}

/// What is saved, and from what the run goes on.
fn keep(args: &TrainArgs, resume: Option<Saved>) -> Keep {
    let store = folder::checkpoints(&args.out);
    Keep {
        model: Some(args.out.join(folder::CHECKPOINT)),
        best: Some(args.out.join(folder::BEST)),
        checkpoints: Some(Checkpoints { store, every: args.save_every, keep: args.keep }),
        resume: resume.map(Arc::new),
        stop: StopRequest::default(),
        restarts: Restarts { count: args.restarts, steps_lost: args.steps_lost },
    }
}

/// Refuses numbers of ranks, and what does not go with them, of the strategy and the transports.
fn check_ranks(args: &TrainArgs, ranks: usize, ranks_here: usize) -> Result<(), CliError> {
    if ranks == 0 || ranks_here == 0 {
        return Err("--nproc 0: at least 1 rank is needed".into());
    }
    if args.strategy == StrategyKind::Single && ranks != 1 {
        return Err(format!("--strategy single trains on 1 rank, not on {ranks}; choose another strategy").into());
    }
    if let Some(missing) = args.transport.missing().filter(|_| ranks > 1) {
        return Err(format!("--transport {}: {missing}", args.transport).into());
    }
    if let Some((kind, missing)) = args.node_transport.and_then(|kind| Some((kind, kind.missing()?))) {
        return Err(format!("--node-transport {kind}: {missing}").into());
    }
    if let Some(inside) = args.node_transport.filter(|inside| is_threads(*inside) != is_threads(args.transport)) {
        return Err(format!(
            "--node-transport {inside} cannot be combined with --transport {0}: with {1} ranks are threads of one process, with all others \
             processes; give both options {1}, or neither",
            args.transport,
            TransportKind::LOCAL
        )
        .into());
    }
    if args.dedicated_server && (args.strategy != StrategyKind::Ps || ranks == 1) {
        return Err(format!(
            "--dedicated-server is for --strategy ps on at least 2 ranks, not for {} on {ranks}",
            args.strategy
        )
        .into());
    }
    Ok(())
}

/// Refuses numbers that are to be positive and are not.
fn check_numbers(args: &TrainArgs) -> Result<(), CliError> {
    let positive = [
        ("--lr", args.lr),
        ("--timeout", args.timeout),
        ("--liveness", args.liveness),
        ("--stall-after", args.stall_after),
        ("--loss-factor", args.loss_factor),
    ];
    for (name, value) in positive {
        if !(value.is_finite() && value > 0.0) {
            return Err(format!("{name} {value} must be a positive number").into());
        }
    }
    if !(0.0..1.0).contains(&args.dropout) {
        return Err(format!("--dropout {} must be at least 0 and below 1", args.dropout).into());
    }
    args.watch.check()?;
    if !(args.clip.is_finite() && args.clip >= 0.0) {
        return Err(format!("--clip {} must be zero or a positive number", args.clip).into());
    }
    Ok(())
}

/// Channels between each pair of ranks.
fn lanes(args: &TrainArgs, ranks: usize) -> usize {
    args.lanes.unwrap_or_else(|| args.strategy.lanes(ranks, TransportOptions::default().lanes))
}

/// Refuses counts that are too small or too large.
fn check_counts(args: &TrainArgs, ranks: usize, ranks_here: usize) -> Result<(), CliError> {
    for (name, value) in [("--steps", args.steps), ("--keep", args.keep as u64)] {
        if value == 0 {
            return Err(format!("{name} must be at least 1").into());
        }
    }
    let lanes = lanes(args, ranks);
    if args.lanes.is_none() && lanes > MAX_LANES {
        return Err(format!(
            "--strategy {} can have at most {MAX_LANES} ranks, not {ranks}: it needs a lane for each rank, and there are at most {MAX_LANES} lanes",
            args.strategy
        )
        .into());
    }
    if lanes == 0 || lanes > MAX_LANES {
        return Err(format!("--lanes {lanes} must be from 1 to {MAX_LANES}").into());
    }
    args.strategy.check_lanes(lanes, ranks)?;
    if ranks_here > MAX_RANKS_HERE {
        return Err(format!(
            "{ranks_here} ranks on one machine, and at most {MAX_RANKS_HERE} are possible; see --nproc"
        )
        .into());
    }
    if args.threads.is_some_and(|threads| threads == 0 || threads > MAX_THREADS) {
        return Err(format!("--threads must be from 1 to {MAX_THREADS}").into());
    }
    Ok(())
}

/// The optimizer, with the usual constants where none are given.
fn optimizer(args: &TrainArgs) -> Result<OptimizerConfig, CliError> {
    let of_moments =
        [("--beta1", args.beta1.is_some()), ("--beta2", args.beta2.is_some()), ("--epsilon", args.epsilon.is_some())];
    if let Some((name, _)) = of_moments.iter().find(|(_, given)| *given && !args.optimizer.has_moments()) {
        return Err(format!(
            "{name} is for optimizers that keep moments (adamw, lamb), not for --optimizer {}",
            args.optimizer
        )
        .into());
    }
    let usual = OptimizerConfig::of(args.optimizer);
    let optimizer = OptimizerConfig {
        kind: args.optimizer,
        beta1: args.beta1.unwrap_or(usual.beta1),
        beta2: args.beta2.unwrap_or(usual.beta2),
        epsilon: args.epsilon.unwrap_or(usual.epsilon),
        weight_decay: args.weight_decay.unwrap_or(usual.weight_decay),
    };
    optimizer.validate().map_err(|error| format!("{error}; see --beta1, --beta2, --epsilon, --weight-decay"))?;
    Ok(optimizer)
}

/// The type in which gradients travel, and how they are kept from vanishing in it.
fn types(args: &TrainArgs) -> Result<(Precision, LossScaling), CliError> {
    let usual = if args.compress.is_on() { Precision::F32 } else { args.precision };
    let wire = args.wire.unwrap_or(usual);
    let loss_scaling = args.loss_scale.unwrap_or(if [wire, args.precision].contains(&Precision::F16) {
        LossScaling::DYNAMIC
    } else {
        LossScaling::Off
    });
    loss_scaling.validate().map_err(|error| format!("--loss-scale: {error}"))?;
    if args.check_finite && loss_scaling != LossScaling::Off {
        return Err(format!(
            "--check-finite cannot be combined with --loss-scale {loss_scaling}, under which gradients overflow at times and their steps \
             are skipped; leave out --check-finite, or give --loss-scale off"
        )
        .into());
    }
    Ok((wire, loss_scaling))
}

/// Refuses compression where it means nothing, and what does not go with it.
fn check_compression(args: &TrainArgs, wire: Precision, scaling: LossScaling, ranks: usize) -> Result<(), CliError> {
    let TrainArgs { compress, strategy, .. } = *args;
    let options = StrategyOptions { wire, compress, ..StrategyOptions::default() };
    compress.check(strategy, &options, ranks)?;
    options.check_scaling(strategy, scaling)?;
    if compress.is_on() && args.check_finite {
        return Err(format!(
            "--check-finite searches the numbers that are sent, and with --compress {compress} most of what is sent is not floating-point \
             numbers; leave out one of the two"
        )
        .into());
    }
    Ok(())
}

/// The learning rate by step.
fn learning_rate(args: &TrainArgs) -> Result<LearningRate, CliError> {
    let floor = args.min_lr.unwrap_or(args.lr / 10.0);
    if !(0.0..=args.lr).contains(&floor) {
        return Err(format!("--min-lr {floor} must be between 0 and --lr {}", args.lr).into());
    }
    let warmup = args.warmup.unwrap_or_else(|| (args.steps / 20).min(100));
    if warmup >= args.steps && args.warmup.is_some() {
        return Err(format!("--warmup {warmup} must be less than --steps {}", args.steps).into());
    }
    Ok(args.schedule.learning_rate(args.lr, floor, warmup, args.steps))
}

/// The settings of the transports, but for the device.
fn transport_options(args: &TrainArgs, lanes: usize) -> Result<TransportOptions, CliError> {
    let options = TransportOptions {
        lanes,
        bind: args.bind.clone(),
        timeout: seconds(args.timeout),
        // Several of them may be late without a consequence.
        heartbeat: (seconds(args.liveness) / 5).min(TransportOptions::default().heartbeat),
        liveness: seconds(args.liveness),
        stall_after: seconds(args.stall_after),
        checked: args.checked,
        check_finite: args.check_finite,
        waiting: args.waiting,
        congestion: args.congestion.clone(),
        mtu: args.quic_mtu,
        gate: !args.no_gate,
        ..TransportOptions::default()
    };
    let kinds: Vec<TransportKind> = [args.transport].into_iter().chain(args.node_transport).collect();
    options.check_for(&kinds)?;
    Ok(options)
}

fn strategy_options(args: &TrainArgs, wire: Precision, ranks_per_node: usize) -> StrategyOptions {
    StrategyOptions {
        wire,
        first_bucket_bytes: args.first_bucket_bytes,
        bucket_bytes: args.bucket_bytes,
        fusion_bytes: args.fusion_bytes,
        overlap: !args.no_overlap,
        dedicated_server: args.dedicated_server,
        ranks_per_node,
        compress: args.compress,
        local: LocalOptions::default(),
    }
}

/// The settings that only some strategies have; those that the chosen one has no use for are refused.
fn local_options(args: &TrainArgs) -> Result<LocalOptions, CliError> {
    let usual = LocalOptions::default();
    let given = [
        (Setting::SyncEvery, args.sync_every.is_some()),
        (Setting::OuterRate, args.outer_rate.is_some()),
        (Setting::OuterMomentum, args.outer_momentum.is_some()),
        (Setting::Fragments, args.fragments.is_some()),
        (Setting::OverlapSteps, args.overlap_steps.is_some()),
        (Setting::Mixing, args.mixing.is_some()),
        (Setting::SpartaShare, args.sparta_share.is_some()),
        (Setting::Staleness, args.staleness.is_some()),
    ];
    if let Some((setting, _)) = given.into_iter().find(|(setting, given)| *given && !args.strategy.has(*setting)) {
        return Err(format!("--{setting} is for --strategy {}, not for {}", setting.strategies(), args.strategy).into());
    }
    if args.no_overlap && !args.strategy.spec().is_one_device {
        return Err(format!(
            "--no-overlap is for strategies that communicate during the backward pass, which --strategy {} does not do; leave it out",
            args.strategy
        )
        .into());
    }
    let local = LocalOptions {
        sync_every: args.sync_every.unwrap_or(usual.sync_every),
        outer_rate: args.outer_rate.unwrap_or(usual.outer_rate),
        outer_momentum: args.outer_momentum.unwrap_or(usual.outer_momentum),
        fragments: args.fragments.unwrap_or(usual.fragments),
        overlap_steps: args.overlap_steps.unwrap_or(usual.overlap_steps),
        mixing: args.mixing.unwrap_or(usual.mixing),
        sparta_share: args.sparta_share.unwrap_or(usual.sparta_share),
        staleness: args.staleness.unwrap_or(usual.staleness),
    };
    local.check(args.strategy)?;
    Ok(local)
}

/// The text, as tokens: of `tokenizer`, where the weights belong to one.
fn load(args: &TrainArgs, tokenizer: Option<Tokenizer>, verbosity: Verbosity) -> Result<Corpus, CliError> {
    let tokenizer = match (tokenizer, args.tokenizer, &args.init_from) {
        (Some(own), Some(asked), _) if own.kind() != asked => {
            let whose = match (&args.resume, &args.init_from) {
                (None, Some(path)) => format!("--init-from {}", path.display()),
                (resume, _) => format!("--resume {}", resume.as_deref().unwrap_or(&args.out).display()),
            };
            return Err(format!(
                "--tokenizer {asked}: the weights of {whose} were trained with the tokenizer {}; leave out --tokenizer",
                own.kind()
            )
            .into());
        }
        (None, None, Some(path)) => {
            return Err(format!(
                "--init-from {}: its files do not name the model's tokenizer; name it with --tokenizer",
                path.display()
            )
            .into());
        }
        (own, ..) => own,
    };
    let source = CorpusSource::from_path(args.data.clone(), default_cargo_home());
    let cache = TokenCache::of_user().filter(|_| !args.no_token_cache);
    let options = LoadOptions { documents: !args.no_special_tokens, cache, ..LoadOptions::default() };
    let mut loading = LoadProgress::new(verbosity.speaks);
    let watch = &mut |now| loading.watch(now);
    let corpus = match &tokenizer {
        Some(tokenizer) => Corpus::load_with(&source, tokenizer, &options, watch)?,
        None => Corpus::load_as(&source, args.tokenizer.unwrap_or_default(), &options, watch)?,
    };
    loading.finish(options.cache.as_ref().map(TokenCache::folder), verbosity.warns);
    Ok(corpus)
}

/// Refuses a text that has not enough batches for all ranks, and a model with tensors for which the device has no room.
fn check_batches(
    device: DeviceChoice,
    config: &TrainConfig,
    corpus: &Corpus,
    ranks: usize,
    largest_tensor: Option<u64>,
) -> Result<(), CliError> {
    let TrainConfig { model, global_batch, seed, last_batch, accumulation, .. } = config;
    let batches = Batches::with_last_batch(corpus, model.block_size, *global_batch, *seed, *last_batch)?;
    let world = config.options.workers(config.strategy, ranks);
    let share = Share { rank: 0, world, accumulation: *accumulation };
    let rows = batches.rows_per_micro_step(share)?;
    if let Some(limit) = largest_tensor {
        check_tensors(device, limit, model, Pass::Training { rows })?;
    }
    if config.eval_every > 0 {
        batches.validation(config.eval_batches, share)?;
    }
    Ok(())
}

/// Ranks of a node, where they were given.
fn ranks_per_node(args: &TrainArgs) -> Result<usize, CliError> {
    if !args.strategy.spec().tells_nodes_apart {
        return match (args.ranks_per_node, args.node_transport) {
            (None, None) => Ok(0),
            _ => Err(format!(
                "--ranks-per-node and --node-transport are for --strategy hierarchical and hsdp, not for {}",
                args.strategy
            )
            .into()),
        };
    }
    if args.ranks_per_node == Some(0) {
        return Err("--ranks-per-node 0: a node has at least 1 rank".into());
    }
    Ok(args.ranks_per_node.unwrap_or(0))
}

/// Whether all ranks of a job over it live in one process.
fn is_threads(kind: TransportKind) -> bool {
    kind.medium() == Medium::Threads
}

/// A positive number of seconds, at most a few decades.
fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.min(1e9))
}

/// What a model is to do.
#[derive(Clone, Copy)]
pub(super) enum Pass {
    /// Training, with so many sequences at once.
    Training { rows: usize },
    /// The logits of what follows one sequence.
    Sampling,
}

/// Refuses a model with a tensor of more than `limit` bytes, which the device has no room for in one buffer: parameters, or what a pass
/// makes of them.
pub(super) fn check_tensors(device: DeviceChoice, limit: u64, model: &ModelConfig, pass: Pass) -> Result<(), CliError> {
    let (rows, logits, advice) = match pass {
        Pass::Training { rows } => (
            rows,
            rows * model.block_size,
            ", or train with a smaller --preset, --block-size or --batch, or a larger --accumulation",
        ),
        Pass::Sampling => (1, 1, ""),
    };
    let tokens = rows * model.block_size;
    let tensors = [
        ("logits", logits * model.vocab_size),
        ("attention scores", tokens * model.block_size * model.n_head),
        ("activations", tokens * model.n_embd * 4),
        // Read back in one piece.
        ("embeddings", (model.vocab_size + model.block_size) * model.n_embd),
        ("weights of a block", model.n_embd * model.n_embd * 13),
    ];
    let Some((what, values)) = tensors.into_iter().max_by_key(|(_, values)| *values) else { return Ok(()) };
    let bytes = values as u64 * 4;
    if bytes > limit {
        return Err(format!(
            "--device {device}: the {what} need {:.0} MiB in one buffer, and this device allows {:.0} MiB; choose another device{advice}",
            bytes as f64 / (1 << 20) as f64,
            limit as f64 / (1 << 20) as f64
        )
        .into());
    }
    Ok(())
}
