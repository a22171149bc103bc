//! The command line of `bench peers`, checked.

use std::path::PathBuf;
use std::time::Duration;

use gpt2::cli::{MAX_RANKS_HERE, MAX_THREADS};
use gpt2::config::ModelConfig;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::GPT2_VOCABULARY;
use isocomm::{Medium, TransportKind};
use rig::BenchError;
use rig::check::{between, even_batch};
use rig::link::{LinkOptions, RateLimit};

/// Trains the same model as PyTorch does over Gloo, side by side, by the strategies that both have.
///
/// Every round runs everything once, each in processes of its own, so that a busy moment of the machine hits all. Both sides also
/// train without any communication in every round: what a step takes longer than that is its exposed communication.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PeersArgs {
    /// The Python that has torch; without torch, ours run alone.
    #[arg(long, default_value = "python3")]
    peer_python: PathBuf,
    /// Leave PyTorch out.
    #[arg(long)]
    no_peer: bool,
    /// Strategies, separated by commas; PyTorch has ddp, fsdp and zero2.
    #[arg(long, value_delimiter = ',', default_value = "ddp,fsdp,zero2")]
    strategies: Vec<StrategyKind>,
    /// Transports of ours, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "shm,tcp-raw,tcp,quic")]
    transports: Vec<TransportKind>,
    /// Put a link of this rate between the first and the second half of the ranks: 1gbit, 250mbit or the like, or none for as fast
    /// as the kernel copies. Needs root, or a user namespace. [default: loopback]
    #[arg(long)]
    rate: Option<RateLimit>,
    /// Largest packet of the link in bytes.
    #[arg(long, default_value_t = 1500, requires = "rate")]
    mtu: u32,
    /// TCP congestion control of everything on the link, PyTorch included, by its kernel name. [default: the kernel's]
    #[arg(long, requires = "rate")]
    congestion: Option<String>,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Threads that compute, in each rank.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Transformer blocks of the model.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Attention heads.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Width of the residual stream.
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 128)]
    block: usize,
    /// Sequences a step, over all ranks; a multiple of --ranks.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Timed steps of a job, after two more.
    #[arg(long, default_value_t = 8)]
    steps: u64,
    /// Rounds.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// A bucket of our ddp is closed once it holds this many bytes. [default: as in training]
    #[arg(long)]
    bucket_bytes: Option<usize>,
    /// Megabytes of a bucket of PyTorch's ddp; 25 is its own default.
    #[arg(long, default_value_t = 25.0)]
    peer_bucket_mb: f64,
    /// Seed of weights and tokens.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Seconds that a job may take.
    #[arg(long, default_value_t = 120)]
    cell_timeout: u64,
    /// Folder for peers.jsonl. [default: a new folder under bench-results/]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    pub(super) allow_debug: bool,
}

/// What to measure.
#[derive(Clone, Debug)]
pub(super) struct Settings {
    /// `None` to leave PyTorch out.
    pub(super) python: Option<PathBuf>,
    pub(super) strategies: Vec<StrategyKind>,
    pub(super) transports: Vec<TransportKind>,
    /// `None` for loopback.
    pub(super) link: Option<LinkOptions>,
    pub(super) ranks: usize,
    pub(super) threads: usize,
    pub(super) model: ModelConfig,
    pub(super) batch: usize,
    /// Those that count for nothing included.
    pub(super) steps: u64,
    pub(super) rounds: usize,
    pub(super) bucket_bytes: Option<usize>,
    pub(super) peer_bucket_mb: f64,
    pub(super) seed: u64,
    pub(super) cell_timeout: Duration,
    pub(super) out: Option<PathBuf>,
}

/// Steps at the start that count for nothing: our trainer leaves the first two out once there are more than four.
pub(super) const SKIPPED: u64 = 2;

const MIN_STEPS: u64 = 3;
const MAX_STEPS: u64 = 10_000;
const MAX_ROUNDS: usize = 10_000;

impl PeersArgs {
    /// # Errors
    /// The first argument that cannot be, for the user.
    pub(super) fn check(&self) -> Result<Settings, BenchError> {
        between("--ranks", &self.ranks, 2..=MAX_RANKS_HERE)?;
        between("--threads", &self.threads, 1..=MAX_THREADS)?;
        even_batch(self.batch, self.ranks)?;
        between("--steps", &self.steps, MIN_STEPS..=MAX_STEPS)?;
        between("--rounds", &self.rounds, 1..=MAX_ROUNDS)?;
        if self.cell_timeout == 0 {
            return Err("--cell-timeout must be at least 1".into());
        }
        if !(self.peer_bucket_mb.is_finite() && self.peer_bucket_mb > 0.0) {
            return Err(format!("--peer-bucket-mb {} must be above 0", self.peer_bucket_mb).into());
        }
        if self.strategies.contains(&StrategyKind::Single) {
            return Err("--strategies single: training without communication is measured anyway".into());
        }
        if let Some(threads) = self.transports.iter().find(|kind| kind.medium() == Medium::Threads) {
            return Err(format!(
                "--transports {threads}: its ranks are threads of one process; PyTorch's are processes"
            )
            .into());
        }
        let model = ModelConfig {
            n_layer: self.layers,
            n_head: self.heads,
            n_embd: self.width,
            block_size: self.block,
            vocab_size: GPT2_VOCABULARY,
        };
        model.validate()?;
        let link =
            self.rate.map(|RateLimit(rate)| LinkOptions { rate, mtu: self.mtu, congestion: self.congestion.clone() });
        link.as_ref().map_or(Ok(()), LinkOptions::check)?;
        Ok(Settings {
            python: (!self.no_peer).then(|| self.peer_python.clone()),
            strategies: self.strategies.clone(),
            transports: self.transports.clone(),
            link,
            ranks: self.ranks,
            threads: self.threads,
            model,
            batch: self.batch,
            steps: self.steps + SKIPPED,
            rounds: self.rounds,
            bucket_bytes: self.bucket_bytes,
            peer_bucket_mb: self.peer_bucket_mb,
            seed: self.seed,
            cell_timeout: Duration::from_secs(self.cell_timeout),
            out: self.out.clone(),
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: PeersArgs,
    }

    fn check(arguments: &[&str]) -> Result<Settings, String> {
        let program = Program::try_parse_from([&["bench"], arguments].concat()).map_err(|error| error.to_string())?;
        program.args.check().map_err(|error| error.to_string())
    }

    #[test]
    fn the_model_is_a_small_gpt2_with_its_whole_vocabulary() {
        let settings = check(&[]).unwrap();
        assert_eq!(settings.model.parameter_count(), 7_242_624);
        assert!(settings.link.is_none() && settings.python.is_some());
        assert_eq!(settings.steps, 10);
        assert!(check(&["--rate", "1gbit"]).unwrap().link.unwrap().rate.is_some());
        assert!(check(&["--no-peer"]).unwrap().python.is_none());
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        for (arguments, part) in [
            (&["--ranks", "1"][..], "--ranks 1"),
            (&["--batch", "3"], "--batch 3"),
            (&["--steps", "2"], "--steps 2"),
            (&["--rounds", "0"], "--rounds 0"),
            (&["--heads", "3"], "heads"),
            (&["--strategies", "single"], "measured anyway"),
            (&["--transports", "local"], "threads"),
            (&["--peer-bucket-mb", "nan"], "--peer-bucket-mb"),
            (&["--mtu", "9000"], "--rate"),
        ] {
            let why = check(arguments).unwrap_err();
            assert!(why.contains(part), "{arguments:?}: {why}");
        }
    }
}
