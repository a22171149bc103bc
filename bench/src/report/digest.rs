//! What the sections of the page share: cells in the order in which they are told of, looked up and put into groups.

use std::collections::{BTreeMap, BTreeSet};

use gpt2::strategy::{Setting, StrategyKind};
use isocomm::Rung;
use rig::flag::Flag;
use rig::record::{Axis, Cell, Record};
use rig::results::Results;
use rig::stats::{CellRuns, Keep, cell_runs};

pub(crate) use super::case::{Case, Comparison, Run};
use super::links::Traits;
use rig::record::NOBODY;

/// Links that hold nothing up, the one most like the others first.
pub(crate) const UNHINDERED: [&str; 2] = ["unlimited", rig::record::LOOPBACK];

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
        let mut flags: BTreeMap<&Cell, Vec<(u32, Flag)>> = BTreeMap::new();
        for record in &results.records {
            let of_run = record.flags.iter().map(|flag| (record.round, flag.clone()));
            flags.entry(&record.cell).or_default().extend(of_run);
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
        // That ranks share cores says how many there are.
        let crowd = self.case(cell).and_then(|case| case.crowd.as_ref()).filter(|_| !axes.contains(&Axis::Ranks));
        let told = |axis: &Axis| !(axes.contains(axis) || crowd.is_some() && *axis == Axis::Ranks);
        let told: Vec<Axis> = self.meant(cell).into_iter().filter(told).collect();
        let mut label = cell.label(&told);
        if label.is_empty() && axes.is_empty() {
            label = cell.label(&[Axis::Strategy, Axis::Transport, Axis::Link]);
        }
        match crowd {
            Some(crowd) if label.is_empty() => crowd.clone(),
            Some(crowd) => format!("{label} ({crowd})"),
            None => label,
        }
    }

    /// The axes that tell cells apart and mean something to this one.
    fn meant(&self, cell: &Cell) -> Vec<Axis> {
        let free = meaningless(cell);
        self.axes.iter().copied().filter(|axis| !free.contains(axis)).collect()
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
        const SAME: [Axis; 8] = [
            Axis::Preset,
            Axis::Batch,
            Axis::Accumulation,
            Axis::Recompute,
            Axis::Precision,
            Axis::Seed,
            Axis::Threads,
            Axis::Variant,
        ];
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

    /// The cell that is as that of `case` but over the transport that moves nothing, if that is another one.
    pub(crate) fn over_nothing(&self, case: &Case<'_>) -> Option<&Case<'a>> {
        let null = Rung::all().into_iter().find(|rung| rung.is_timing_only())?;
        self.over(case.cell, &null.name()).filter(|null| null.cell != case.cell)
    }

    /// The same cell over a link that holds nothing up, and that link's name.
    pub(crate) fn unhindered(&self, cell: &Cell) -> Option<&Case<'a>> {
        let there =
            UNHINDERED.into_iter().filter(|link| *link != cell.link && !UNHINDERED.contains(&cell.link.as_str()));
        let over = |link: &str| self.case(&Cell { link: link.into(), ..cell.clone() });
        there.filter_map(over).find(|case| case.step.is_some())
    }

    /// Cells without any figures.
    pub(crate) fn holes(&self) -> impl Iterator<Item = &Case<'a>> {
        self.cases.iter().filter(|case| case.step.is_none())
    }
}

/// Axes whose values mean nothing to a cell: plans give all such cells the same.
pub(crate) fn meaningless(cell: &Cell) -> Vec<Axis> {
    let mut axes = Vec::new();
    if is_in_memory(cell) {
        axes.extend([Axis::Link, Axis::Congestion, Axis::Ends]);
    }
    if !rung(cell).is_some_and(Rung::has_packets) {
        axes.push(Axis::QuicMtu);
    }
    if cell.strategy == SINGLE {
        axes.extend([Axis::Wire, Axis::Lanes]);
    }
    // Records of a strategy that this build does not know keep all axes.
    if let Ok(kind) = cell.strategy.parse::<StrategyKind>() {
        let spec = kind.spec();
        if !spec.in_buckets {
            axes.extend([Axis::Bucket, Axis::FirstBucket]);
        }
        if !spec.tells_nodes_apart {
            axes.extend([Axis::RanksPerNode, Axis::OneTransport]);
        }
        if spec.name != "ring" {
            axes.push(Axis::Fusion);
        }
        if spec.name != "ps" {
            axes.push(Axis::DedicatedServer);
        }
        if !spec.overlaps {
            axes.push(Axis::Overlap);
        }
        if !kind.compresses() {
            axes.push(Axis::Compress);
        }
        // Those that it needs are not chosen.
        let needed = kind.lanes(cell.ranks, 1);
        if needed > 1 && cell.lanes == needed {
            axes.push(Axis::Lanes);
        }
        if !spec.settings.contains(&Setting::SyncEvery) {
            axes.push(Axis::SyncEvery);
        }
        if !spec.settings.contains(&Setting::Staleness) {
            axes.push(Axis::Staleness);
        }
    }
    axes
}

/// Whether a cell's ranks talk without the kernel's network, or not at all.
pub(crate) fn is_in_memory(cell: &Cell) -> bool {
    cell.transport == NOBODY || rung(cell).is_some_and(Rung::is_in_memory)
}

/// Whether no data arrives in a cell, so that only its times mean something.
pub(crate) fn is_timing_only(cell: &Cell) -> bool {
    rung(cell).is_some_and(Rung::is_timing_only)
}

fn rung(cell: &Cell) -> Option<Rung> {
    cell.transport.parse().ok()
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
