//! The command line of `bench peers`, checked.

use std::path::{Path, PathBuf};

use gpt2::cli::{MAX_RANKS_HERE, MAX_THREADS};
use gpt2::strategy::StrategyKind;
use isocomm::{Medium, TransportKind};
use rig::BenchError;
use rig::check::{between, even_batch};
use rig::link::{LinkOptions, RateLimit};
use rig::record::{Axis, LOOPBACK};
use rig::transports;

use crate::plan::{Draft, default};
use crate::pytorch::{SKIPPED, Torch};

/// Compares training here with PyTorch over Gloo: the same model, with the strategies that both have.
///
/// Every round runs each case once, in processes of its own, so that other load on the machine affects all of them. In every round both sides also
/// train without communication; the difference to that step time is the exposed communication.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PeersArgs {
    /// Python interpreter with the package torch; without torch only this program is measured.
    #[arg(long, default_value = "python3")]
    peer_python: PathBuf,
    /// Leave PyTorch out.
    #[arg(long)]
    no_peer: bool,
    /// Strategies, separated by commas; PyTorch has ddp, zero1, zero2 and fsdp.
    #[arg(long, value_delimiter = ',', default_value = default("peers", Axis::Strategy))]
    pub(super) strategies: Vec<StrategyKind>,
    /// Transports of this program, separated by commas; PyTorch uses Gloo.
    #[arg(long, value_delimiter = ',', default_values_t = transports::between_processes())]
    transports: Vec<TransportKind>,
    /// Put a link of this rate, such as 1gbit or 250mbit, between the first and the second half of the ranks; none for a link without a limit. Needs
    /// root, or a user namespace. [default: loopback]
    #[arg(long)]
    rate: Option<RateLimit>,
    /// MTU of the link, its largest packet, in bytes.
    #[arg(long, default_value_t = 1500, requires = "rate")]
    mtu: u32,
    /// TCP congestion control of all connections over the link, PyTorch's included, by its kernel name. [default: the kernel's]
    #[arg(long, requires = "rate")]
    congestion: Option<String>,
    /// Number of ranks.
    #[arg(long, default_value = default("peers", Axis::Ranks))]
    ranks: usize,
    /// Compute threads of each rank.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Transformer blocks of the model.
    #[arg(long, default_value = default("peers", Axis::Layers))]
    layers: usize,
    /// Attention heads.
    #[arg(long, default_value = default("peers", Axis::Heads))]
    heads: usize,
    /// Width of the residual stream.
    #[arg(long, default_value = default("peers", Axis::Width))]
    width: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value = default("peers", Axis::Block))]
    block: usize,
    /// Sequences of a step, all ranks together; a multiple of --ranks.
    #[arg(long, default_value = default("peers", Axis::Batch))]
    batch: usize,
    /// Timed steps of a run; two more come first and are not counted.
    #[arg(long, default_value_t = 8)]
    steps: u64,
    /// Number of rounds.
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    /// Size of a bucket of this program's ddp, in bytes. [default: as in training]
    #[arg(long)]
    bucket_bytes: Option<usize>,
    /// Size of a bucket of PyTorch's ddp, in MB; 25 is PyTorch's default.
    #[arg(long, default_value_t = 25.0)]
    peer_bucket_mb: f64,
    /// Random seed of weights and tokens.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Seconds that a run may take.
    #[arg(long, default_value_t = 120)]
    cell_timeout: u64,
    /// Folder for peers.jsonl. [default: a new folder under bench-results/]
    #[arg(long)]
    pub(super) out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    pub(super) allow_debug: bool,
}

const MIN_STEPS: u64 = 3;
const MAX_STEPS: u64 = 10_000;
const MAX_ROUNDS: u32 = 10_000;

impl PeersArgs {
    /// The plan that the command line makes of the ready one, PyTorch included.
    ///
    /// # Errors
    /// The first argument that cannot be, for the user.
    pub(super) fn check(&self) -> Result<Draft, BenchError> {
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
            return Err("--strategies single: training without communication is always measured; leave it out".into());
        }
        if let Some(threads) = self.transports.iter().find(|kind| kind.medium() == Medium::Threads) {
            return Err(format!(
                "--transports {threads}: its ranks are threads of one process, and PyTorch's are processes; choose another transport"
            )
            .into());
        }
        let link =
            self.rate.map(|RateLimit(rate)| LinkOptions { rate, mtu: self.mtu, congestion: self.congestion.clone() });
        link.as_ref().map_or(Ok(()), LinkOptions::check)?;
        let mut draft = Draft::ready("peers")?;
        draft.rounds = self.rounds;
        draft.timeout_s = self.cell_timeout;
        let both: Vec<StrategyKind> =
            self.strategies.iter().copied().filter(|strategy| Torch::has(*strategy)).collect();
        // Rounded to whole bytes.
        let peer_bucket = (self.peer_bucket_mb * f64::from(1 << 20)).round().max(1.0) as u64;
        draft
            .set_also_where(Axis::Program, "pytorch", Axis::Strategy, &both)
            .retain(Axis::Strategy, |_| true)
            .set(Axis::Strategy, &self.strategies)
            .set_also(Axis::Bucket, &[peer_bucket])
            .set(Axis::Transport, &self.transports)
            .set(Axis::Link, &[link.as_ref().map_or(LOOPBACK.into(), LinkOptions::to_string)])
            .set(Axis::Ranks, &[self.ranks])
            // A node at each end of the link; on loopback nodes have no transport of their own.
            .set(Axis::RanksPerNode, &[self.ranks.div_ceil(2)])
            .set(Axis::OneTransport, &[link.is_none()])
            .set(Axis::Threads, &[self.threads])
            .set(Axis::Layers, &[self.layers])
            .set(Axis::Heads, &[self.heads])
            .set(Axis::Width, &[self.width])
            .set(Axis::Block, &[self.block])
            .set(Axis::Batch, &[self.batch])
            .set(Axis::Steps, &[self.steps + SKIPPED])
            .set(Axis::Seed, &[self.seed]);
        if let Some(bytes) = self.bucket_bytes {
            draft.set(Axis::Bucket, &[bytes]);
        }
        // The model is one that there is.
        draft.plan()?;
        Ok(draft)
    }

    /// The Python that PyTorch is asked of; `None` to leave it out.
    pub(super) fn python(&self) -> Option<&Path> {
        (!self.no_peer).then_some(&self.peer_python)
    }

    /// Whether a link is asked for, which takes network namespaces.
    pub(super) fn has_link(&self) -> bool {
        self.rate.is_some()
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
        args: PeersArgs,
    }

    fn check(arguments: &[&str]) -> Result<Vec<Cell>, String> {
        let program = Program::try_parse_from([&["bench"], arguments].concat()).map_err(|error| error.to_string())?;
        let draft = program.args.check().map_err(|error| error.to_string())?;
        draft.plan().map(|plan| plan.cells)
    }

    #[test]
    fn the_model_is_a_small_gpt2_with_its_whole_vocabulary() {
        let cells = check(&[]).unwrap();
        assert_eq!(model(&cells[0], GPT2_VOCABULARY).unwrap().parameter_count(), 7_242_624);
        assert_eq!((cells.len(), cells[0].steps, cells[0].link.as_str()), (3 * 4 + 2 + 3, 10, LOOPBACK));
        let tcp = |cells: Vec<Cell>| cells.into_iter().find(|cell| cell.transport == "tcp").unwrap();
        assert_eq!(tcp(check(&["--rate", "1gbit"]).unwrap()).link, "1gbit,mtu=1500");
        let ring = check(&["--strategies", "ring"]).unwrap();
        assert!(ring.iter().all(|cell| cell.alone || cell.program == Trainer::Ours), "PyTorch has no ring");
    }

    #[test]
    fn what_cannot_be_compared_is_refused() {
        for (arguments, part) in [
            (&["--ranks", "1"][..], "--ranks 1"),
            (&["--batch", "3"], "--batch 3"),
            (&["--steps", "2"], "--steps 2"),
            (&["--rounds", "0"], "--rounds 0"),
            (&["--heads", "3"], "heads"),
            (&["--strategies", "single"], "always measured"),
            (&["--transports", "local"], "threads"),
            (&["--peer-bucket-mb", "nan"], "--peer-bucket-mb"),
            (&["--mtu", "9000"], "--rate"),
        ] {
            let why = check(arguments).unwrap_err();
            assert!(why.contains(part), "{arguments:?}: {why}");
        }
    }
}
