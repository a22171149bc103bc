//! The command line, checked.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand};
use gpt2::cli::{CompletionsArgs, MAX_RANKS_HERE, MAX_THREADS, ManArgs};
use gpt2::config::Preset;
use gpt2::precision::Precision;
use gpt2::strategy::StrategyKind;
use gpt2::tokenizer::TokenizerKind;
use isocomm::TransportKind;
use rig::BenchError;
use rig::check::{between, even_batch};
use rig::environment::Environment;
use rig::folder::results_folder;
use rig::link::Profile;
use rig::rank::{TaskArgs, load_text};
use rig::record::LOOPBACK;
use rig::signal::Signals;

use crate::artifact::ArtifactArgs;
use crate::budget::budget;
use crate::collectives::CollectivesArgs;
use crate::compare::CompareArgs;
use crate::compute::ComputeArgs;
use crate::links::LinksArgs;
use crate::memory::MemoryArgs;
use crate::overlap::OverlapArgs;
use crate::paper::PaperArgs;
use crate::parity::ParityArgs;
use crate::peers::PeersArgs;
use crate::predict::{AdviseArgs, CalibrateArgs, PredictArgs, RecordArgs, ReplayArgs};
use crate::report::ReportArgs;
use crate::setup::Setup;
use crate::sweep::SweepArgs;

/// Rounds without which nothing is told apart.
const ROUNDS: u32 = 3;

/// Measures every training strategy over every transport of this machine.
#[derive(Debug, Parser)]
#[command(name = "bench", version, about, args_conflicts_with_subcommands = true)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Folder for the report, results.jsonl, proof.jsonl and traces. [default: a new folder under bench-results/]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Run although this is a debug build.
    #[arg(long)]
    pub(crate) allow_debug: bool,
    /// Leave out the proof, the check on 3 and 4 ranks that all transports give identical weights.
    #[arg(long)]
    pub(crate) skip_proof: bool,
    #[arg(long, value_delimiter = ',', default_value = StrategyKind::list_of_one_device(), help = strategies())]
    strategies: Vec<StrategyKind>,
    /// Transports, separated by commas.
    #[arg(long, value_delimiter = ',', default_values_t = TransportKind::all())]
    transports: Vec<TransportKind>,
    /// Number of ranks (single always has 1, hierarchical and hsdp have at least 4).
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Model size.
    #[arg(long, default_value = "micro")]
    preset: Preset,
    /// Optimizer steps of each run.
    #[arg(long, default_value_t = 12)]
    steps: u64,
    /// Links, separated by commas: names or files of profiles (see `bench links --help`). Transports through memory use no link.
    #[arg(long, value_delimiter = ',', default_value = "loopback,lan-1g,wan-near")]
    links: Vec<String>,
    /// How often each cell (a strategy over a transport on a link) runs. [default: as often as --budget allows; from the 4th round on only cells that
    /// are not told apart yet]
    #[arg(long, conflicts_with = "budget")]
    rounds: Option<u32>,
    /// Time for the measurement, such as 90s or 5m. The first round always runs to its end. The next two, without which no cells can be compared, may
    /// exceed the budget by half. Time that is left after 3 rounds is used for cells that are not told apart yet.
    #[arg(long, default_value = "3m", value_parser = budget)]
    budget: Duration,
    /// Also print a table with a line for each cell: throughput, payload, loss and memory.
    #[arg(long)]
    table: bool,
    /// Sequences of a step, all ranks together; a multiple of --ranks.
    #[arg(long, default_value_t = 12)]
    batch: usize,
    /// Random seed of weights and data order.
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Wire type, in which gradients are sent: f32, bf16, f16.
    #[arg(long, default_value = "f32")]
    wire: Precision,
    /// Compute threads of each rank. [default: the machine's cores divided by --ranks]
    #[arg(long)]
    threads: Option<usize>,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
    /// Seconds that a run may take.
    #[arg(long, default_value_t = 120)]
    cell_timeout: u64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    #[command(flatten)]
    Rig(rig::Command),
    Collectives(Box<CollectivesArgs>),
    /// One rank of a measurement of collectives, or all of them as threads.
    #[command(hide = true)]
    CollectivesRank(TaskArgs),
    #[command(flatten)]
    Torture(torture::Command),
    Parity(Box<ParityArgs>),
    Memory(Box<MemoryArgs>),
    Paper(Box<PaperArgs>),
    Overlap(Box<OverlapArgs>),
    Peers(Box<PeersArgs>),
    Compute(Box<ComputeArgs>),
    Sweep(SweepArgs),
    Report(ReportArgs),
    Compare(CompareArgs),
    Links(LinksArgs),
    Artifact(ArtifactArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    Record(Box<RecordArgs>),
    Replay(ReplayArgs),
    Calibrate(CalibrateArgs),
    Predict(Box<PredictArgs>),
    Advise(Box<AdviseArgs>),
    /// One rank of a trace that is carried out.
    #[command(hide = true)]
    TraceRank(TaskArgs),
    /// One end of a check of a link.
    #[command(hide = true)]
    LinksRank(TaskArgs),
}

/// The help text of `--strategies`.
fn strategies() -> String {
    let others: Vec<&str> =
        StrategyKind::ALL.into_iter().filter(|kind| !kind.spec().is_one_device).map(StrategyKind::name).collect();
    format!(
        "Strategies, separated by commas. Possible are also {}, which compute something else than one device",
        others.join(", ")
    )
}

impl Args {
    /// Whether any cell goes over more than loopback.
    pub(crate) fn goes_over_links(&self) -> bool {
        self.links.iter().any(|link| link != LOOPBACK)
    }

    pub(crate) fn check(&self) -> Result<Setup, BenchError> {
        between("--ranks", &self.ranks, 1..=MAX_RANKS_HERE)?;
        let rounds = self.rounds.unwrap_or(ROUNDS);
        let at_least_one =
            [("--steps", self.steps), ("--rounds", rounds.into()), ("--cell-timeout", self.cell_timeout)];
        for (name, value) in at_least_one {
            if value == 0 {
                return Err(format!("{name} must be at least 1").into());
            }
        }
        even_batch(self.batch, self.ranks)?;
        if let Some(threads) = &self.threads {
            between("--threads", threads, 1..=MAX_THREADS)?;
        }
        let links = self.links.iter().map(|name| Profile::find(name).map(|_| name.clone()));
        let links = links.collect::<Result<Vec<_>, _>>().map_err(|why| format!("--links: {why}"))?;
        let out = results_folder(self.out.clone(), "run")?;
        // Rows of an earlier run are hours of somebody's time.
        if let Some(old) = ["results.jsonl", "proof.jsonl"].iter().map(|name| out.join(name)).find(|path| path.exists())
        {
            return Err(format!("{} holds an earlier run; give another folder with --out", old.display()).into());
        }
        let corpus = load_text(self.data.as_deref(), TokenizerKind::Bytes)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Ok(Setup {
            out,
            corpus,
            source: self.data.clone(),
            strategies: self.strategies.clone(),
            transports: self.transports.clone(),
            ranks: self.ranks,
            preset: self.preset,
            steps: self.steps,
            rounds,
            budget: self.rounds.is_none().then_some(self.budget),
            links,
            table: self.table,
            batch: self.batch,
            seed: self.seed,
            wire: self.wire,
            threads: self.threads.unwrap_or_else(|| (cores / self.ranks).max(1)),
            cell_timeout: Duration::from_secs(self.cell_timeout),
            environment: Environment::read(),
            signals: Signals::catch()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::plan::Plan;

    /// The pages of the book, and the README.
    fn pages() -> Vec<(PathBuf, String)> {
        let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        let pages = fs::read_dir(root.join("docs/src")).unwrap().map(|entry| entry.unwrap().path());
        let pages = pages.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
        let all = pages.chain([root.join("README.md")]);
        all.map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
    }

    /// Every `cargo run … -p bench … -- …`, but those of the program with a transport of its own.
    #[test]
    fn the_commands_of_readme_and_book_are_commands() {
        let mut tried = 0;
        for (page, text) in pages() {
            let lines = text.lines().filter(|line| line.starts_with("cargo run") && line.contains("-p bench"));
            for line in lines.filter(|line| !line.contains("--example")) {
                let arguments = line.split_once(" -- ").map_or("", |(_, arguments)| arguments);
                let words = ["bench"].into_iter().chain(arguments.split_whitespace());
                if let Err(error) = Args::try_parse_from(words) {
                    panic!("{}: {line}: {error}", page.display());
                }
                tried += 1;
            }
        }
        assert!(tried >= 14, "only {tried} commands were found");
    }

    #[test]
    fn the_plan_of_the_book_is_a_plan() {
        let sweeps = pages().into_iter().find(|(page, _)| page.ends_with("sweeps.md")).unwrap().1;
        let plan = sweeps.split_once("```toml\n").unwrap().1.split_once("```").unwrap().0;
        let plan = Plan::parse(plan).unwrap();
        // 2 strategies × 3 transports × 3 links × 2 numbers of ranks × 2 congestion controls, less fsdp on 4 ranks.
        assert_eq!((plan.name.as_str(), plan.rounds, plan.cells.len()), ("my-plan", 5, 54));
    }

    #[test]
    fn the_profile_of_the_book_is_that_of_the_file() {
        let links = pages().into_iter().find(|(page, _)| page.ends_with("links.md")).unwrap().1;
        let shown = links.split_once("```toml\n").unwrap().1.split_once("```").unwrap().0;
        let file = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/profiles/wan.toml")).unwrap();
        let settings = |text: &str| text.parse::<toml::Table>().unwrap();
        assert_eq!(settings(shown), settings(&file));
    }
}
