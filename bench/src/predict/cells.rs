//! Which steps are recorded or predicted: the cells of a plan, or those of a command line.

use std::path::{Path, PathBuf};

use gpt2::cli::MAX_THREADS;
use gpt2::config::Preset;
use gpt2::strategy::StrategyKind;
use isocomm::Rung;
use predict::trace::{RankTrace, Trace, Work};
use rig::BenchError;
use rig::check::between;
use rig::record::{Axis, Cell};
use rig::training::TextSource;

use super::alone;
use super::link::whole;
use crate::plan::{Draft, Plan};

/// Options by which `record`, `predict` and `advise` say what trains.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CellOptions {
    /// Strategies, separated by commas. hierarchical, hsdp and async-ps can only be recorded with all their ranks together (see `bench record`).
    /// [default: ddp; for `advise` all others that communicate]
    #[arg(long, value_delimiter = ',')]
    strategies: Vec<StrategyKind>,
    /// Transports, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "tcp")]
    transports: Vec<Rung>,
    /// Links, separated by commas: names or files of profiles (see `bench links --help`), or a rate with an MTU.
    #[arg(long, value_delimiter = ',', default_value = "loopback")]
    links: Vec<String>,
    /// Numbers of ranks, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "2")]
    ranks: Vec<usize>,
    /// Model size.
    #[arg(long, default_value = "mini")]
    preset: Preset,
    /// Sequences of a step, all ranks together; a multiple of every number in --ranks. [default: 4 times the largest number in --ranks]
    #[arg(long)]
    batch: Option<usize>,
    /// Compute threads of each rank.
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Steps that are recorded; the first two are not counted.
    #[arg(long, default_value_t = 8)]
    steps: u64,
    /// A text file, a folder of text files, or token shards. [default: documentation of this program's own dependencies]
    #[arg(long)]
    data: Option<PathBuf>,
}

impl CellOptions {
    /// The cells of `plan`, or else those of the options, with the strategies `usual` where none are named.
    ///
    /// # Errors
    /// What cannot be, for the user.
    pub(super) fn cells(&self, plan: Option<&Path>, usual: &[StrategyKind]) -> Result<Vec<Cell>, BenchError> {
        if let Some(plan) = plan {
            return Ok(Plan::load(plan)?.0.cells);
        }
        between("--threads", &self.threads, 1..=MAX_THREADS)?;
        let most = self.ranks.iter().copied().max().unwrap_or(1);
        let mut draft = Draft::ready("quick")?;
        draft
            .set(Axis::Strategy, if self.strategies.is_empty() { usual } else { &self.strategies })
            .set(Axis::Transport, &self.transports)
            .set(Axis::Link, &whole(&self.links))
            .set(Axis::Ranks, &self.ranks)
            .set(Axis::Preset, &[self.preset])
            .set(Axis::Batch, &[self.batch.unwrap_or(4 * most)])
            .set(Axis::Threads, &[self.threads])
            .set(Axis::Steps, &[self.steps]);
        Ok(draft.plan()?.cells)
    }

    /// The text.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn text(&self) -> Result<TextSource, BenchError> {
        TextSource::bytes(self.data.clone())
    }
}

/// Steps of cells as one rank after the other takes them by itself, recorded once for cells that differ in their network alone.
pub(super) struct Recorder {
    text: TextSource,
    known: Vec<(Cell, Trace)>,
}

/// Ranks beyond which only the first two are recorded, and the second stands for the others.
pub(super) const MOST_RECORDED: usize = 8;

impl Recorder {
    pub(super) fn new(text: TextSource) -> Self {
        Recorder { text, known: Vec::new() }
    }

    /// The trace of a cell.
    ///
    /// # Errors
    /// The cell cannot be trained by ranks that are alone.
    pub(super) fn trace(&mut self, cell: &Cell) -> Result<Trace, BenchError> {
        // What the network is does not matter to who is alone.
        let key =
            Cell { transport: "null".into(), link: "loopback".into(), congestion: "default".into(), ..cell.clone() };
        if let Some((_, trace)) = self.known.iter().find(|(known, _)| *known == key) {
            return Ok(trace.clone());
        }
        let recorded = cell.ranks.min(if cell.ranks > MOST_RECORDED { 2 } else { cell.ranks });
        let ranks =
            (0..recorded).map(|rank| alone::rank_trace(cell, &self.text, rank)).collect::<Result<Vec<_>, _>>()?;
        let trace = Trace {
            name: name(cell),
            steps: cell.period() as u64,
            ranks: (0..cell.ranks).map(|rank| of_rank(&ranks, rank, cell.ranks)).collect(),
        };
        trace.check().map_err(|why| format!("the trace of {}: {why}", name(cell)))?;
        self.known.push((key, trace.clone()));
        Ok(trace)
    }
}

/// What a trace of a cell is called.
pub(super) fn name(cell: &Cell) -> String {
    let Cell { strategy, preset, transport, link, ranks, .. } = cell;
    format!("{strategy}-{preset}-{ranks}-{transport}-{}", in_a_path(link))
}

/// What the files of each cell are called: its name, and the values of what else differs between the cells.
pub(super) fn file_names(cells: &[Cell]) -> Vec<String> {
    let in_name = [Axis::Strategy, Axis::Preset, Axis::Ranks, Axis::Transport, Axis::Link];
    let mut axes = Cell::varied(cells.iter());
    axes.retain(|axis| !in_name.contains(axis));
    let value = |cell: &Cell, axis: &Axis| format!("-{axis}-{}", in_a_path(&cell.value(*axis)));
    let of_cell = |cell: &Cell| name(cell) + &axes.iter().map(|axis| value(cell, axis)).collect::<String>();
    cells.iter().map(of_cell).collect()
}

fn in_a_path(value: &str) -> String {
    value.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect()
}

/// The trace of a rank, or that of rank 1 as another rank has it: its peers are as far from it, unless they are rank 0 alone.
fn of_rank(recorded: &[RankTrace], rank: usize, ranks: usize) -> RankTrace {
    if let Some(own) = recorded.get(rank) {
        return own.clone();
    }
    let mut trace = recorded.get(1).cloned().unwrap_or_default();
    let peers = |trace: &mut RankTrace, of: &mut dyn FnMut(&mut usize)| {
        for node in &mut trace.nodes {
            if let Work::Send(message) | Work::Receive(message) = &mut node.work {
                of(&mut message.peer);
            }
        }
    };
    let mut only_first = true;
    peers(&mut trace, &mut |peer| only_first &= *peer == 0);
    if !only_first {
        peers(&mut trace, &mut |peer| *peer = (*peer + rank - 1) % ranks);
    }
    trace
}

#[cfg(test)]
mod tests {
    use predict::trace::Message;

    use super::*;

    fn rank(peers: &[usize]) -> RankTrace {
        let mut trace = RankTrace::default();
        for peer in peers {
            trace.push("x", vec![], Work::Send(Message { peer: *peer, bytes: 1, lane: 0, background: false }));
        }
        trace
    }

    fn peers(trace: &RankTrace) -> Vec<usize> {
        let peer = |work: &Work| match work {
            Work::Send(message) => Some(message.peer),
            _ => None,
        };
        trace.nodes.iter().filter_map(|node| peer(&node.work)).collect()
    }

    #[test]
    fn another_rank_has_other_peers_but_the_same_server() {
        let star = [rank(&[1, 2, 3]), rank(&[0, 0])];
        assert_eq!(peers(&of_rank(&star, 3, 4)), [0, 0]);
        assert_eq!(peers(&of_rank(&star, 0, 4)), [1, 2, 3]);
        let all = [rank(&[1, 2, 3]), rank(&[2, 3, 0])];
        assert_eq!(peers(&of_rank(&all, 3, 4)), [0, 1, 2]);
    }

    #[test]
    fn what_differs_between_cells_is_in_the_names_of_their_files() {
        let cell = |batch: usize, congestion: &str| Cell {
            batch,
            congestion: congestion.into(),
            ..rig::stats::made_up::cell("ddp")
        };
        let names = file_names(&[cell(8, "cubic"), cell(8, "bbr"), cell(16, "bbr")]);
        let base = name(&cell(8, "cubic"));
        let expected = ["congestion-cubic-batch-8", "congestion-bbr-batch-8", "congestion-bbr-batch-16"];
        assert_eq!(names, expected.map(|end| format!("{base}-{end}")));
        assert_eq!(file_names(&[cell(8, "cubic")]), [base]);
    }
}
