//! What the sections of the page share: the runs of each cell put together, and cells looked up and compared.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use super::links::Traits;
use crate::collectives::stats::median;
use crate::record::{Axis, Cell, Flag, FlagKind, Measured, Rank, Record};
use crate::results::Results;
use crate::stats::{
    CellRuns, Change, Interval, Keep, LEVEL, LeftOut, Metric, Over, Summary, Verdict, Why, cell_runs, paired,
    step_time, summary,
};

/// Rounds that two cells must have in common before one is called faster.
pub(crate) const ROUNDS: usize = 3;

/// The strategy of one rank alone.
pub(crate) const SINGLE: &str = "single";

/// Results by cell.
pub(crate) struct Digest<'a> {
    pub(crate) results: &'a Results,
    /// The axes that tell cells apart.
    pub(crate) axes: Vec<Axis>,
    /// In the order in which a reader looks for them.
    pub(crate) cases: Vec<Case<'a>>,
    places: BTreeMap<&'a Cell, usize>,
}

/// Cells that differ on few axes.
pub(crate) struct Grouped<'a, 'd> {
    /// What they have in common, in words.
    pub(crate) label: String,
    /// A cell to which all that they have in common means something.
    pub(crate) like: &'a Cell,
    pub(crate) cases: Vec<&'d Case<'a>>,
}

/// All runs of one cell.
pub(crate) struct Case<'a> {
    pub(crate) cell: &'a Cell,
    /// Those that count, by round.
    pub(crate) good: Vec<Run<'a>>,
    pub(crate) left_out: Vec<LeftOut>,
    /// What is doubted in any of its runs, by round.
    pub(crate) flags: Vec<(u32, &'a Flag)>,
    /// Milliseconds a step.
    pub(crate) step: Option<Interval>,
    /// Milliseconds a step that wait for gradients and parameters.
    pub(crate) exposed: Option<Interval>,
    /// Of `step`, run by run.
    timed: Option<Summary>,
    pub(crate) traits: Traits,
}

/// A run that counts.
pub(crate) struct Run<'a> {
    pub(crate) measured: &'a Measured,
    /// Steps before it settled.
    pub(crate) from: usize,
}

/// One cell against another.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Comparison {
    /// Times of the first by times of the second, round by round.
    pub(crate) ratio: Interval,
    /// Milliseconds of the first less those of the second, likewise.
    pub(crate) difference: Interval,
    /// Rounds that both have.
    pub(crate) rounds: usize,
    /// Whether the first is slower (1), faster (−1), or neither for all that the data says (0).
    pub(crate) verdict: i32,
}

impl<'a> Digest<'a> {
    /// Of results, and of the cells of their plan, some of which may not have been reached.
    pub(crate) fn of(results: &'a Results, planned: &'a [Cell]) -> Self {
        let mut gathered = cell_runs(&results.records, Keep::Sound);
        let reached: BTreeSet<&Cell> = gathered.iter().map(|runs| runs.cell).collect();
        let missing = planned.iter().filter(|cell| !reached.contains(cell));
        let missing: Vec<CellRuns<'_>> =
            missing.map(|cell| CellRuns { cell, runs: Vec::new(), left_out: Vec::new() }).collect();
        gathered.extend(missing);
        let axes = axes(gathered.iter().map(|runs| runs.cell));
        let mut flags: BTreeMap<&Cell, Vec<(u32, &Flag)>> = BTreeMap::new();
        for record in &results.records {
            flags.entry(&record.cell).or_default().extend(record.flags.iter().map(|flag| (record.round, flag)));
        }
        // A cell that failed has a link all the same.
        let mut links: BTreeMap<&str, Vec<&Record>> = BTreeMap::new();
        results.records.iter().for_each(|record| links.entry(&record.cell.link).or_default().push(record));
        let links: BTreeMap<&str, Traits> = links.into_iter().map(|(name, runs)| (name, Traits::of(&runs))).collect();
        let traits = |cell: &Cell| links.get(cell.link.as_str()).cloned().unwrap_or_default();
        let case = |runs: CellRuns<'a>| {
            let flags = flags.remove(runs.cell).unwrap_or_default();
            let traits = traits(runs.cell);
            Case::of(runs, flags, traits)
        };
        let mut cases: Vec<Case<'a>> = gathered.into_iter().map(case).collect();
        cases.sort_by(|a, b| a.order(b));
        let places = cases.iter().enumerate().map(|(place, case)| (case.cell, place)).collect();
        Digest { results, axes, cases, places }
    }

    pub(crate) fn case(&self, cell: &Cell) -> Option<&Case<'a>> {
        self.places.get(cell).and_then(|place| self.cases.get(*place))
    }

    /// The cell in words, by what tells cells apart.
    pub(crate) fn label(&self, cell: &Cell) -> String {
        self.label_without(cell, &[])
    }

    /// The cell in words, but for `axes`, which are told elsewhere; empty where nothing is left.
    pub(crate) fn label_without(&self, cell: &Cell, axes: &[Axis]) -> String {
        let left_out = |axis: &Axis| axes.contains(axis) || meaningless(cell).contains(axis);
        let told: Vec<Axis> = self.axes.iter().copied().filter(|axis| !left_out(axis)).collect();
        let label = cell.label(&told);
        if label.is_empty() && axes.is_empty() {
            cell.label(&[Axis::Strategy, Axis::Transport, Axis::Link])
        } else {
            label
        }
    }

    /// Cells in groups that differ on none but `axes`, in order. A cell belongs to every group that it is like in all that means something
    /// to it: shared memory, which has no congestion control, to those of each. One rank alone (`single`) is in no group of strategies,
    /// unless there are no others.
    pub(crate) fn groups(&self, axes: &[Axis]) -> Vec<Grouped<'a, '_>> {
        let others: Vec<Axis> = self.axes.iter().copied().filter(|axis| !axes.contains(axis)).collect();
        let meant = |cell: &Cell| -> Vec<Axis> {
            let free = meaningless(cell);
            others.iter().copied().filter(|axis| !free.contains(axis)).collect()
        };
        let only_single = self.cases.iter().all(|case| case.cell.strategy == SINGLE);
        let left_out = |case: &Case<'_>| axes.contains(&Axis::Strategy) && case.cell.strategy == SINGLE && !only_single;
        let mut places: Vec<usize> = (0..self.cases.len()).filter(|place| !left_out(&self.cases[*place])).collect();
        // Those to which most means something make the groups that others belong to.
        places.sort_by_key(|place| others.len() - meant(self.cases[*place].cell).len());
        let mut groups: Vec<(usize, Vec<usize>)> = Vec::new();
        for place in places {
            let cell = self.cases[place].cell;
            let meant = meant(cell);
            let mut found = false;
            for (like, members) in &mut groups {
                let like = self.cases[*like].cell;
                if meant.iter().all(|axis| like.value(*axis) == cell.value(*axis)) {
                    members.push(place);
                    found = true;
                }
            }
            if !found {
                groups.push((place, vec![place]));
            }
        }
        groups.sort_by_key(|group| group.0);
        let grouped = |(like, mut members): (usize, Vec<usize>)| {
            members.sort_unstable();
            let like = self.cases[like].cell;
            let cases = members.into_iter().map(|place| &self.cases[place]).collect();
            Grouped { label: self.label_without(like, axes), like, cases }
        };
        groups.into_iter().map(grouped).collect()
    }

    /// As [`groups`](Digest::groups), each with one rank alone that does the same work before it, where there is one.
    pub(crate) fn groups_and_single(&self, axes: &[Axis]) -> Vec<Grouped<'a, '_>> {
        let mut groups = self.groups(axes);
        for Grouped { cases, .. } in &mut groups {
            let single = cases.first().filter(|case| case.cell.strategy != SINGLE).and_then(|case| self.single(case));
            single.into_iter().for_each(|single| cases.insert(0, single));
        }
        groups
    }

    /// One rank that does alone all that the ranks of `case` do together.
    pub(crate) fn single(&self, case: &Case<'_>) -> Option<&Case<'a>> {
        const SAME: [Axis; 7] =
            [Axis::Preset, Axis::Batch, Axis::Accumulation, Axis::Precision, Axis::Seed, Axis::Threads, Axis::Variant];
        let alike = |single: &&Case<'a>| {
            let same = |axis: Axis| single.cell.value(axis) == case.cell.value(axis);
            single.cell.strategy == SINGLE && single.step.is_some() && SAME.into_iter().all(same)
        };
        let near =
            |single: &&Case<'a>| (single.cell.link == case.cell.link, single.cell.transport == case.cell.transport);
        self.cases.iter().filter(alike).max_by_key(near)
    }

    /// The cell that is as `cell` but over `transport`, whatever its settings of what means nothing to that transport.
    pub(crate) fn over(&self, cell: &Cell, transport: &str) -> Option<&Case<'a>> {
        let wanted = Cell { transport: transport.into(), ..cell.clone() };
        let free = meaningless(&wanted);
        self.case(&wanted).or_else(|| {
            self.cases.iter().find(|case| {
                let mut axes = Axis::ALL.into_iter().filter(|axis| !free.contains(axis));
                axes.all(|axis| case.cell.value(axis) == wanted.value(axis))
            })
        })
    }

    /// Cells without any figures.
    pub(crate) fn holes(&self) -> impl Iterator<Item = &Case<'a>> {
        self.cases.iter().filter(|case| case.step.is_none())
    }
}

impl<'a> Case<'a> {
    fn of(runs: CellRuns<'a>, flags: Vec<(u32, &'a Flag)>, traits: Traits) -> Self {
        let CellRuns { cell, runs, left_out } = runs;
        let timed = step_time(&runs);
        let exposed = summary(Metric::Exposed, Over::Mean, &runs).map(|exposed| exposed.interval);
        let cut = |round: u32| timed.iter().flat_map(|timed| &timed.warm_up).find(|(there, _)| *there == round);
        let run = |record: &&'a Record| {
            let (_, warm_up) = cut(record.round)?;
            Some(Run { measured: record.measured.as_ref()?, from: warm_up.cut })
        };
        let good = runs.iter().filter_map(run).collect();
        Case { cell, good, left_out, flags, step: timed.as_ref().map(|timed| timed.interval), exposed, timed, traits }
    }

    /// Strategies, transports and links in the order in which they are told of, everything else by its value.
    fn order(&self, other: &Self) -> Ordering {
        let key = |case: &Self| (known(&STRATEGIES, &case.cell.strategy), known(&TRANSPORTS, &case.cell.transport));
        let links = self.traits.order(&other.traits).then_with(|| self.cell.link.cmp(&other.cell.link));
        links.then_with(|| key(self).cmp(&key(other))).then_with(|| self.cell.cmp(other.cell))
    }

    /// Times of this cell by those of `other`, by rounds that both have.
    pub(crate) fn against(&self, other: &Case<'_>) -> Option<Comparison> {
        let found = paired(&other.timed.as_ref()?.runs, &self.timed.as_ref()?.runs, LEVEL)?;
        let verdict = match found.verdict {
            _ if found.rounds < ROUNDS => 0,
            Verdict::Difference(Change::Higher) => 1,
            Verdict::Difference(Change::Lower) => -1,
            Verdict::NoSignificantDifference | Verdict::TooFewRuns => 0,
        };
        let ratio = found.ratio?;
        let verdict = if ratio.contains(1.0) { 0 } else { verdict };
        Some(Comparison { ratio, difference: found.difference, rounds: found.rounds, verdict })
    }

    /// The mean of a part over settled steps, ranks and rounds: means add up, medians do not.
    pub(crate) fn mean(&self, part: &str) -> Option<f64> {
        let values: Vec<f64> = self.good.iter().flat_map(|run| run.values(part)).collect();
        (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
    }

    /// Share of the step that waits for gradients and parameters.
    pub(crate) fn exposed_share(&self) -> Option<f64> {
        Some(self.exposed?.estimate / self.step?.estimate)
    }

    pub(crate) fn tokens_per_s(&self) -> Option<Interval> {
        let tokens = self.good.first()?.measured.tokens_per_step as f64;
        let step = self.step?;
        let speed = |ms: f64| tokens * 1e3 / ms;
        Some(Interval {
            estimate: speed(step.estimate),
            low: speed(step.high),
            high: speed(step.low),
            level: step.level,
        })
    }

    /// Something of each rank of each good run, as the median over runs of what `over_ranks` makes of it.
    pub(crate) fn by_rank(
        &self,
        one: impl Fn(&Rank) -> Option<f64>,
        over_ranks: impl Fn(Vec<f64>) -> Option<f64>,
    ) -> Option<f64> {
        let runs = self.good.iter().filter_map(|run| {
            let ranks = run.measured.ranks.iter().map(&one).collect::<Option<Vec<f64>>>()?;
            over_ranks(ranks)
        });
        median(&runs.collect::<Vec<_>>())
    }

    /// `210.3 [208.1, 213.0]`, or why there is nothing.
    pub(crate) fn step_text(&self) -> String {
        self.step.map_or_else(|| self.hole().0, |step| super::text::interval(&step))
    }

    /// In a word and in a sentence why it has no figures.
    pub(crate) fn hole(&self) -> (String, String) {
        if self.good.is_empty() && self.left_out.is_empty() {
            return ("not reached".into(), "the sweep ended before it".into());
        }
        let Some(LeftOut { why, what, .. }) = self.left_out.iter().find(|out| out.why != Why::Repeated) else {
            return ("no figures".into(), "it ended well, but its steps have no times".into());
        };
        let word = match why {
            Why::Failed => "failed",
            Why::TimedOut => "timed out",
            Why::NotAvailable => "not available",
            Why::Unsound => "not sound",
            Why::Repeated => "run again",
        };
        (word.into(), what.clone())
    }

    /// Whether any of its runs is doubted for this reason.
    pub(crate) fn is_flagged(&self, kind: FlagKind) -> bool {
        self.flags.iter().any(|(_, flag)| flag.kind == kind)
    }
}

impl Run<'_> {
    /// A part's values of all ranks, settled steps alone.
    pub(crate) fn values(&self, part: &str) -> Vec<f64> {
        let ranks = self.measured.ranks.iter();
        ranks.flat_map(|rank| column(rank, part).iter().skip(self.from).copied()).filter(|ms| ms.is_finite()).collect()
    }
}

fn column<'r>(rank: &'r Rank, part: &str) -> &'r [f64] {
    match part {
        "total" => &rank.steps.total,
        "communication" => &rank.steps.communication,
        "hidden" => &rank.steps.hidden,
        _ => rank.steps.parts().into_iter().find(|(name, _)| *name == part).map_or(&[], |(_, values)| values),
    }
}

impl Comparison {
    /// `1.25× [1.21, 1.30]`.
    pub(crate) fn times(&self) -> String {
        let Interval { estimate, low, high, .. } = self.ratio;
        // Close to 1 it matters on which side the ends are.
        let digits = if (estimate - 1.0).abs() < 0.1 { 3 } else { 2 };
        format!("{estimate:.digits$}× [{low:.digits$}, {high:.digits$}]")
    }
}

pub(crate) const STRATEGIES: [&str; 9] =
    ["single", "ps", "sharded-ps", "ring", "ddp", "zero1", "zero2", "fsdp", "hierarchical"];

/// From what costs least to what does most.
pub(crate) const TRANSPORTS: [&str; 11] =
    ["none", "null", "local", "shm", "tcp-raw", "tcp-ipc", "tcp-no-gate", "tcp", "quic-unprotected", "quic", "nccl"];

/// Place in an order that is known; what is not in it comes last.
pub(crate) fn known(order: &[&str], name: &str) -> usize {
    order.iter().position(|known| *known == name).unwrap_or(order.len())
}

/// Axes whose values mean nothing to a cell: plans give all such cells the same.
pub(crate) fn meaningless(cell: &Cell) -> Vec<Axis> {
    let mut axes = Vec::new();
    if is_in_memory(cell) {
        axes.extend([Axis::Link, Axis::Congestion]);
    }
    if !cell.transport.starts_with("quic") {
        axes.push(Axis::QuicMtu);
    }
    if cell.strategy == SINGLE {
        axes.extend([Axis::Wire, Axis::Lanes]);
    }
    let in_buckets = ["ddp", "zero1", "zero2", "hierarchical"].contains(&cell.strategy.as_str());
    if !in_buckets {
        axes.push(Axis::Bucket);
    }
    if !in_buckets && cell.strategy != "fsdp" {
        axes.push(Axis::Overlap);
    }
    axes
}

/// Whether a cell's ranks talk without the kernel's network, or not at all.
pub(crate) fn is_in_memory(cell: &Cell) -> bool {
    ["none", "null", "local", "shm", "tcp-ipc"].contains(&cell.transport.as_str())
}

/// The axes on which cells differ to which they mean something. One rank alone differs from all others in ranks and transport, which needs
/// no telling.
fn axes<'c>(cells: impl Iterator<Item = &'c Cell> + Clone) -> Vec<Axis> {
    let shared: Vec<&Cell> = cells.clone().filter(|cell| cell.strategy != SINGLE).collect();
    if shared.is_empty() {
        return Cell::varied(cells);
    }
    let several = cells.count() > shared.len();
    let differs = |axis: &Axis| {
        let meant = shared.iter().filter(|cell| !meaningless(cell).contains(axis));
        distinct(meant.map(|cell| cell.value(*axis))).len() > 1
    };
    Axis::ALL.into_iter().filter(|axis| differs(axis) || (*axis == Axis::Strategy && several)).collect()
}

/// The names in the order of their first appearance.
pub(crate) fn distinct<T: PartialEq>(names: impl Iterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    distinct
}
