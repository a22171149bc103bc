//! The command line of `bench overlap`, checked.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use gpt2::cli::{MAX_RANKS_HERE, MAX_THREADS};
use gpt2::config::Preset;
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use isocomm::{Medium, Rung, TransportKind};
use rig::BenchError;
use rig::check::{between, even_batch};
use rig::link::{LinkOptions, RateLimit};
use rig::record::{Axis, Cell, LOOPBACK};
use rig::transports;
use serde::{Serialize, Serializer};

use crate::plan::{Draft, default};

/// Measures how much of the communication runs during the backward pass, over a slow link.
///
/// The ranks run in two network namespaces that are connected by a link of the given rate (needs root, or a user namespace). They train the same
/// model with each strategy over each transport in turn, in rounds, so that other load on the machine affects all of them.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct OverlapArgs {
    /// Rate of the link in each direction, such as 1gbit or 250mbit; none for no limit.
    #[arg(long, default_value = "1gbit")]
    rate: RateLimit,
    /// Run on loopback instead of a link; needs no root.
    #[arg(long, conflicts_with_all = ["rate", "mtu", "congestion"])]
    loopback: bool,
    /// MTU of the link, its largest packet, in bytes.
    #[arg(long, default_value_t = 1500)]
    mtu: u32,
    /// TCP congestion control of all connections over the link, by its kernel name. [default: the kernel's]
    #[arg(long)]
    congestion: Option<String>,
    /// Strategies, separated by commas; NAME-no-overlap starts communication only after the backward pass.
    #[arg(long, value_delimiter = ',', default_value = "ddp,ddp-no-overlap,ring")]
    pub(super) strategies: Vec<Variant>,
    /// Transports, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = transports::over_networks())]
    transports: Vec<TransportKind>,
    /// Number of ranks; the first half runs at one end of the link, the second half at the other.
    #[arg(long, default_value = default("overlap", Axis::Ranks))]
    ranks: usize,
    /// Compute threads of each rank.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Model size.
    #[arg(long, default_value = default("overlap", Axis::Preset))]
    preset: Preset,
    /// Sequences of a step, all ranks together; a multiple of --ranks.
    #[arg(long, default_value = default("overlap", Axis::Batch))]
    batch: usize,
    /// Steps of each run; the first two are not counted.
    #[arg(long, default_value = default("overlap", Axis::Steps))]
    steps: u64,
    /// Number of rounds.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Size of a bucket of ddp, in bytes of f32 gradients. [default: as in training]
    #[arg(long)]
    bucket_bytes: Option<usize>,
    /// Wire type, in which gradients are sent: f32, bf16, f16.
    #[arg(long, default_value = "f32")]
    wire: Precision,
    /// Random seed of weights and data order.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    pub(super) data: Option<PathBuf>,
    /// Seconds that a run may take.
    #[arg(long, default_value_t = 120)]
    cell_timeout: u64,
    /// Folder for overlap.jsonl. [default: a new folder under bench-results/]
    #[arg(long)]
    pub(super) out: Option<PathBuf>,
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

/// Fewest steps: two for nothing, and a few of which the median says something.
const MIN_STEPS: u64 = 5;

const MAX_ROUNDS: u32 = 10_000;

const WITHOUT: &str = "-no-overlap";

impl OverlapArgs {
    /// The plan that the command line makes of the ready one.
    ///
    /// # Errors
    /// The first argument that cannot be, for the user.
    pub(super) fn check(&self) -> Result<Draft, BenchError> {
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
            return Err(format!(
                "--strategies {single}: it does not communicate, so there is nothing to overlap; leave it out"
            )
            .into());
        }
        if let Some(Variant { strategy, .. }) =
            self.strategies.iter().find(|variant| !variant.overlap && !variant.strategy.spec().overlaps)
        {
            return Err(format!("--strategies {strategy}{WITHOUT}: {strategy} never overlaps; give {strategy}").into());
        }
        if let Some(threads) = self.transports.iter().find(|kind| kind.medium() == Medium::Threads) {
            return Err(format!(
                "--transports {threads}: its ranks are threads of one process, which cannot be at two ends of a link; choose another transport"
            )
            .into());
        }
        let link = LinkOptions { rate: self.rate.0, mtu: self.mtu, congestion: self.congestion.clone() };
        link.check()?;
        let mut draft = Draft::ready("overlap")?;
        draft.rounds = self.rounds;
        draft.timeout_s = self.cell_timeout;
        let of = |overlap: bool| -> Vec<StrategyKind> {
            self.strategies
                .iter()
                .filter(|variant| variant.overlap == overlap)
                .map(|variant| variant.strategy)
                .collect()
        };
        draft
            .set(Axis::Strategy, &of(true))
            .set_also(Axis::Strategy, &of(false))
            .retain(Axis::Strategy, |_| true)
            .set(Axis::Transport, &[self.transports.iter().copied().map(Rung::from).collect(), nothing()].concat())
            .set(Axis::Link, &[if self.loopback { LOOPBACK.into() } else { link.to_string() }])
            .set(Axis::Ranks, &[self.ranks])
            // A node at each end of the link; on loopback nodes have no transport of their own.
            .set(Axis::RanksPerNode, &[self.ranks.div_ceil(2)])
            .set(Axis::OneTransport, &[self.loopback])
            .set(Axis::Threads, &[self.threads])
            .set(Axis::Preset, &[self.preset])
            .set(Axis::Batch, &[self.batch])
            .set(Axis::Steps, &[self.steps])
            .set(Axis::Wire, &[self.wire])
            .set(Axis::Seed, &[self.seed]);
        if let Some(bytes) = self.bucket_bytes {
            draft.set(Axis::Bucket, &[bytes]);
        }
        Ok(draft)
    }

    /// Whether a link is asked for, which takes network namespaces.
    pub(super) fn has_link(&self) -> bool {
        !self.loopback
    }
}

/// The transport that moves nothing: over it the passes take what they take by themselves.
fn nothing() -> Vec<Rung> {
    Rung::all().into_iter().filter(|rung| rung.is_timing_only()).collect()
}

impl Variant {
    /// What a cell trains by.
    ///
    /// # Errors
    /// There is no such strategy.
    pub(super) fn of(cell: &Cell) -> Result<Self, String> {
        Ok(Variant { strategy: cell.strategy.parse()?, overlap: cell.overlap })
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

    fn check(arguments: &[&str]) -> Result<Vec<Cell>, String> {
        let program = Program::try_parse_from([&["bench"], arguments].concat()).map_err(|error| error.to_string())?;
        let draft = program.args.check().map_err(|error| error.to_string())?;
        draft.plan().map(|plan| plan.cells)
    }

    #[test]
    fn a_strategy_may_leave_overlap_away() {
        let cells = check(&[]).unwrap();
        // Each of three over three transports, and over the one that moves nothing.
        assert_eq!(cells.len(), 3 * (3 + 1));
        assert_eq!(
            cells,
            Draft::ready("overlap").unwrap().plan().unwrap().cells,
            "the plan is the command without options"
        );
        let names: Vec<String> = cells.iter().map(|cell| Variant::of(cell).unwrap().to_string()).collect();
        assert_eq!(names.iter().filter(|name| *name == "ddp-no-overlap").count(), 4);
        let without = check(&["--strategies", "fsdp-no-overlap"]).unwrap();
        assert!(without.len() == 4 && without.iter().all(|cell| cell.strategy == "fsdp" && !cell.overlap));
    }

    #[test]
    fn loopback_has_no_link_and_none_no_rate() {
        assert_eq!(check(&["--loopback"]).unwrap()[0].link, LOOPBACK);
        assert_eq!(check(&["--rate", "none", "--congestion", "bbr"]).unwrap()[0].link, "none,mtu=1500,congestion=bbr");
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
            (&["--strategies", "ddp,local-sgd-no-overlap"], "local-sgd never overlaps"),
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
