//! Which strategy is fastest, and where two change places.

use super::super::digest::{Case, Comparison, Digest, Grouped, ROUNDS, meaningless};
use super::super::html::Mark;
use super::super::text::{interval, listed};
use super::Statements;
use crate::record::{Axis, Cell};
use crate::stats::Interval;

/// Changes of places that are told.
const FLIPS: usize = 8;

/// For each link, transport and whatever else differs: the fastest strategies, and by how much.
pub(super) fn fastest(digest: &Digest<'_>) -> Statements {
    digest
        .groups(&[Axis::Strategy])
        .iter()
        .filter_map(|group| Some(Front::of(&group.cases)?.statement(&group.label)))
        .collect()
}

/// The fastest strategies of a group: those that are not significantly slower than the one with the shortest median.
pub(super) struct Front<'c> {
    pub(super) best: &'c str,
    step: Interval,
    /// The others, from the fastest on.
    others: Vec<(&'c str, Comparison)>,
    /// Strategies with too few rounds.
    few: Vec<String>,
}

impl<'c> Front<'c> {
    /// Of cells that differ in strategy alone; `None` where there are not two to compare.
    pub(super) fn of(cases: &[&'c Case<'_>]) -> Option<Self> {
        let enough = |case: &&&Case<'_>| case.good.len() >= ROUNDS;
        let timed = |cases: Vec<&&'c Case<'_>>| {
            let mut timed: Vec<(&'c Case<'_>, Interval)> =
                cases.into_iter().filter_map(|case| Some((*case, case.step?))).collect();
            timed.sort_by(|a, b| a.1.estimate.total_cmp(&b.1.estimate));
            timed
        };
        let all = timed(cases.iter().filter(enough).collect());
        let few: Vec<String> = timed(cases.iter().filter(|case| !enough(case)).collect())
            .iter()
            .map(|few| few.0.cell.strategy.clone())
            .collect();
        let ((best, step), rest) = all.split_first()?;
        let against = |(case, _): &(&'c Case<'_>, Interval)| {
            let comparison = case.against(best).filter(|comparison| comparison.rounds >= ROUNDS)?;
            Some((case.cell.strategy.as_str(), comparison))
        };
        let others: Vec<(&str, Comparison)> = rest.iter().filter_map(against).collect();
        (!others.is_empty()).then_some(Front { best: &best.cell.strategy, step: *step, others, few })
    }

    /// Those that are not told apart from the best.
    fn near(&self) -> impl Iterator<Item = &(&'c str, Comparison)> {
        self.others.iter().filter(|(_, comparison)| comparison.verdict <= 0)
    }

    /// The best, and those that are not told apart from it.
    pub(super) fn names(&self) -> Vec<&'c str> {
        std::iter::once(self.best).chain(self.near().map(|near| near.0)).collect()
    }

    fn statement(&self, label: &str) -> (Mark, String) {
        let place = if label.is_empty() { String::new() } else { format!("{label}: ") };
        let (best, step) = (self.best, interval(&self.step));
        let few = match self.few.is_empty() {
            true => String::new(),
            false => format!(" Of {} there are fewer than {ROUNDS} good rounds.", self.few.join(", ")),
        };
        let near: Vec<String> =
            self.near().map(|(name, comparison)| format!("{name} {}", comparison.times())).collect();
        if let (true, Some((next, comparison))) = (near.is_empty(), self.others.first()) {
            let text = format!(
                "{place}{best} is the fastest, {step} ms a step; {next}, the next, takes {} of that.{few}",
                comparison.times()
            );
            return (Mark::Found, text);
        }
        let beaten = self.others.len() - near.len();
        let beaten = match beaten {
            0 => String::new(),
            1 => format!(" {best} is faster than the other one."),
            _ => format!(" {best} is faster than the other {beaten}."),
        };
        let text = format!(
            "{place}no significant difference between {best}, {step} ms a step, and {}.{beaten}{few}",
            listed(&near, 4)
        );
        (Mark::Open, text)
    }
}

/// Two strategies, and where which of them is faster.
struct Flip {
    size: f64,
    text: String,
    pair: (String, String, Axis),
}

/// Pairs of strategies that change places between two links or two transports, everything else being equal.
pub(super) fn flips(digest: &Digest<'_>) -> Statements {
    let groups = digest.groups(&[Axis::Strategy]);
    let places: Vec<(&Grouped<'_, '_>, Vec<Ordered<'_>>)> =
        groups.iter().map(|group| (group, ordered(&group.cases))).collect();
    let mut flips: Vec<Flip> = Vec::new();
    let mut compared = false;
    for (index, (here, pairs_here)) in places.iter().enumerate() {
        for (there, pairs_there) in &places[index + 1..] {
            let Some(axis) = only_difference(digest, here.like, there.like) else { continue };
            compared |= !pairs_here.is_empty() && !pairs_there.is_empty();
            flips.extend(between((&here.label, pairs_here), (&there.label, pairs_there), axis));
        }
    }
    flips.sort_by(|a, b| b.size.total_cmp(&a.size));
    let mut told: Vec<&Flip> = Vec::new();
    for flip in &flips {
        if !told.iter().any(|known| known.pair == flip.pair) {
            told.push(flip);
        }
    }
    if told.is_empty() && compared {
        let text =
            "No two strategies change places between links or transports with a significant difference on both sides.";
        return vec![(Mark::Open, text.into())];
    }
    told.into_iter().take(FLIPS).map(|flip| (Mark::Found, flip.text.clone())).collect()
}

/// Two strategies of which one is significantly faster, in the order of their cells.
struct Ordered<'a> {
    first: &'a str,
    second: &'a str,
    comparison: Comparison,
}

fn ordered<'a>(cases: &[&'a Case<'a>]) -> Vec<Ordered<'a>> {
    let mut pairs = Vec::new();
    for (index, first) in cases.iter().enumerate() {
        for second in &cases[index + 1..] {
            if let Some(comparison) = first.against(second).filter(|comparison| comparison.verdict != 0) {
                pairs.push(Ordered { first: &first.cell.strategy, second: &second.cell.strategy, comparison });
            }
        }
    }
    pairs
}

/// The axis on which two groups differ, if it is one alone and that of links or transports.
fn only_difference(digest: &Digest<'_>, here: &Cell, there: &Cell) -> Option<Axis> {
    let free = [meaningless(here), meaningless(there)].concat();
    let differs =
        |axis: &&Axis| **axis != Axis::Strategy && !free.contains(axis) && here.value(**axis) != there.value(**axis);
    let mut axes = digest.axes.iter().filter(differs);
    let axis = *axes.next()?;
    (axes.next().is_none() && matches!(axis, Axis::Link | Axis::Transport)).then_some(axis)
}

fn between(here: (&str, &[Ordered<'_>]), there: (&str, &[Ordered<'_>]), axis: Axis) -> Vec<Flip> {
    let mut flips = Vec::new();
    for one in here.1 {
        let other = there.1.iter().find(|other| (other.first, other.second) == (one.first, one.second));
        let Some(other) = other.filter(|other| other.comparison.verdict == -one.comparison.verdict) else { continue };
        let (first, second) = (one.first, one.second);
        let text = format!(
            "{first} takes {} as long as {second} ({}), but {} ({}).",
            one.comparison.times(),
            here.0,
            other.comparison.times(),
            there.0
        );
        let size = (one.comparison.ratio.estimate / other.comparison.ratio.estimate).ln().abs();
        flips.push(Flip { size, text, pair: (first.into(), second.into(), axis) });
    }
    flips
}
