//! The command line of `bench overlap`, checked.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use gpt2::cli::{MAX_RANKS_HERE, MAX_THREADS};
use gpt2::config::Preset;
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use isocomm::{Medium, TransportKind};
use rig::BenchError;
use rig::check::{between, even_batch};
use rig::link::{LinkOptions, RateLimit};
use serde::{Serialize, Serializer};

/// Shows how much communication hides behind the backward pass, over a slow link.
///
/// The ranks live in two network namespaces joined by a link of a given rate (needs root, or a user namespace), and train the same model in turn by
/// each strategy over each transport, in rounds, so that a busy moment of the machine hits all of them.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct OverlapArgs {
    /// Rate of the link, each way: 1gbit, 250mbit or the like; none for as fast as the kernel copies.
    #[arg(long, default_value = "1gbit")]
    rate: RateLimit,
    /// Stay on loopback, without a link; needs no root.
    #[arg(long, conflicts_with_all = ["rate", "mtu", "congestion"])]
    loopback: bool,
    /// Largest packet of the link in bytes.
    #[arg(long, default_value_t = 1500)]
    mtu: u32,
    /// TCP congestion control of everything on the link, by its kernel name. [default: the kernel's]
    #[arg(long)]
    congestion: Option<String>,
    /// Strategies, separated by commas; NAME-no-overlap starts no communication before the backward pass has ended.
    #[arg(long, value_delimiter = ',', default_value = "ddp,ddp-no-overlap,ring")]
    strategies: Vec<Variant>,
    /// Transports, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "tcp-raw,tcp,quic")]
    transports: Vec<TransportKind>,
    /// Ranks; the first half lives at one end of the link.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Threads that compute, in each rank.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Model size.
    #[arg(long, default_value = "mini")]
    preset: Preset,
    /// Sequences a step, over all ranks; a multiple of --ranks.
    #[arg(long, default_value_t = 8)]
    batch: usize,
    /// Steps of a job; the first two count for nothing.
    #[arg(long, default_value_t = 12)]
    steps: u64,
    /// Rounds.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// A bucket of `ddp` is closed once it holds this many bytes of f32 gradients. [default: as in training]
    #[arg(long)]
    bucket_bytes: Option<usize>,
    /// Type in which gradients travel.
    #[arg(long, default_value = "f32")]
    wire: Precision,
    /// Seed of weights and data order.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Seconds that a job may take.
    #[arg(long, default_value_t = 120)]
    cell_timeout: u64,
    /// Folder for overlap.jsonl. [default: a new folder under bench-results/]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    pub(super) allow_debug: bool,
}

/// A strategy, with or without overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) strategy: StrategyKind,
    pub(crate) overlap: bool,
}

/// What to measure.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// `None` for loopback.
    pub(crate) link: Option<LinkOptions>,
    pub(crate) variants: Vec<Variant>,
    pub(crate) transports: Vec<TransportKind>,
    pub(crate) ranks: usize,
    pub(crate) threads: usize,
    pub(crate) preset: Preset,
    pub(crate) batch: usize,
    pub(crate) steps: u64,
    pub(crate) rounds: usize,
    pub(crate) bucket_bytes: Option<usize>,
    pub(crate) wire: Precision,
    pub(crate) seed: u64,
    pub(crate) data: Option<PathBuf>,
    pub(crate) cell_timeout: Duration,
    pub(crate) out: Option<PathBuf>,
}

/// Fewest steps: two for nothing, and a few of which the median says something.
const MIN_STEPS: u64 = 5;

const MAX_ROUNDS: usize = 10_000;

const WITHOUT: &str = "-no-overlap";

impl OverlapArgs {
    /// # Errors
    /// The first argument that cannot be, for the user.
    pub(super) fn check(&self) -> Result<Settings, BenchError> {
        between("--ranks", &self.ranks, 2..=MAX_RANKS_HERE)?;
        between("--threads", &self.threads, 1..=MAX_THREADS)?;
        even_batch(self.batch, self.ranks)?;
        if self.steps < MIN_STEPS {
            return Err(format!("--steps {} must be at least {MIN_STEPS}", self.steps).into());
        }
        between("--rounds", &self.rounds, 1..=MAX_ROUNDS)?;
        if self.cell_timeout == 0 {
            return Err("--cell-timeout must be at least 1".into());
        }
        if let Some(single) = self.strategies.iter().find(|variant| variant.strategy == StrategyKind::Single) {
            return Err(format!("--strategies {single}: it does not communicate, so nothing can be hidden").into());
        }
        if let Some(threads) = self.transports.iter().find(|kind| kind.medium() == Medium::Threads) {
            return Err(format!(
                "--transports {threads}: its ranks are threads, which cannot live at two ends of a link"
            )
            .into());
        }
        let link = LinkOptions { rate: self.rate.0, mtu: self.mtu, congestion: self.congestion.clone() };
        link.check()?;
        Ok(Settings {
            link: (!self.loopback).then_some(link),
            variants: self.strategies.clone(),
            transports: self.transports.clone(),
            ranks: self.ranks,
            threads: self.threads,
            preset: self.preset,
            batch: self.batch,
            steps: self.steps,
            rounds: self.rounds,
            bucket_bytes: self.bucket_bytes,
            wire: self.wire,
            seed: self.seed,
            data: self.data.clone(),
            cell_timeout: Duration::from_secs(self.cell_timeout),
            out: self.out.clone(),
        })
    }
}

impl FromStr for Variant {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, overlap) = text.strip_suffix(WITHOUT).map_or((text, true), |name| (name, false));
        Ok(Variant { strategy: name.parse()?, overlap })
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}{}", self.strategy, if self.overlap { "" } else { WITHOUT }))
    }
}

impl Serialize for Variant {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: OverlapArgs,
    }

    fn check(arguments: &[&str]) -> Result<Settings, String> {
        let program = Program::try_parse_from([&["bench"], arguments].concat()).map_err(|error| error.to_string())?;
        program.args.check().map_err(|error| error.to_string())
    }

    #[test]
    fn a_strategy_may_leave_overlap_away() {
        let settings = check(&[]).unwrap();
        let names: Vec<String> = settings.variants.iter().map(Variant::to_string).collect();
        assert_eq!(names, ["ddp", "ddp-no-overlap", "ring"]);
        assert_eq!(settings.variants.iter().map(|variant| variant.overlap).collect::<Vec<_>>(), [true, false, true]);
        assert!(settings.link.unwrap().rate.is_some());
    }

    #[test]
    fn loopback_has_no_link_and_none_no_rate() {
        assert!(check(&["--loopback"]).unwrap().link.is_none());
        assert_eq!(check(&["--rate", "none"]).unwrap().link.unwrap().rate, None);
        assert!(check(&["--loopback", "--rate", "1gbit"]).is_err());
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        for (arguments, part) in [
            (&["--ranks", "1"][..], "--ranks 1"),
            (&["--batch", "7"], "--batch 7"),
            (&["--steps", "3"], "--steps 3"),
            (&["--rounds", "0"], "--rounds 0"),
            (&["--threads", "0"], "--threads 0"),
            (&["--strategies", "single"], "does not communicate"),
            (&["--transports", "local"], "threads"),
            (&["--rate", "quick"], "not a rate"),
            (&["--mtu", "100"], "--mtu 100"),
            (&["--strategies", "dpp-no-overlap"], "unknown strategy"),
        ] {
            let why = check(arguments).unwrap_err();
            assert!(why.contains(part), "{arguments:?}: {why}");
        }
    }
}
