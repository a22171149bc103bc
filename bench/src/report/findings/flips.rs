//! Where two strategies change places.

use rig::record::{Axis, Cell};

use super::super::digest::{Case, Comparison, Digest, Grouped, meaningless};
use super::super::html::{Mark, Page};
use super::statements::said;

/// Changes of places that are told of, folded ones too.
const FLIPS: usize = 40;

/// Two strategies, and where which of them is faster.
struct Flip {
    /// Whether ranks share cores on either side.
    shared: bool,
    /// By which factor at least, on the side that is less sure, as a logarithm.
    clear: f64,
    text: String,
    /// What is compared: two links, or two transports.
    places: [String; 2],
    strategies: [String; 2],
}

/// Pairs of strategies that change places between two links or two transports, everything else being equal: the clearest for each two
/// places, the others folded.
pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    let groups = digest.groups(&[Axis::Strategy]);
    let places: Vec<(&Grouped<'_, '_>, Vec<Ordered<'_>>)> =
        groups.iter().map(|group| (group, ordered(&group.cases))).collect();
    let mut flips: Vec<Flip> = Vec::new();
    let mut compared = false;
    for (index, (here, pairs_here)) in places.iter().enumerate() {
        for (there, pairs_there) in &places[index + 1..] {
            let Some(axis) = only_difference(digest, here.like, there.like) else { continue };
            compared |= !pairs_here.is_empty() && !pairs_there.is_empty();
            flips.extend(between((here, pairs_here), (there, pairs_there), axis));
        }
    }
    if flips.is_empty() && compared {
        let text = "No strategy that is faster than another on one link or transport was found to be slower than it on another.";
        page.statements(&[(Mark::Open, text.into())]);
        return;
    }
    if flips.is_empty() {
        return;
    }
    page.topic("order", "Where a faster strategy becomes a slower one");
    let (told, rest) = clearest(flips);
    said(page, told.into_iter().map(|flip| (Mark::Found, flip.text)).collect());
    if !rest.is_empty() {
        let title = match rest.len() > FLIPS {
            true => format!("the clearest {FLIPS} of {} more", rest.len()),
            false => format!("{} more", rest.len()),
        };
        let rest: Vec<(Mark, String)> = rest.into_iter().take(FLIPS).map(|flip| (Mark::Found, flip.text)).collect();
        page.folded(&title, |page| page.statements(&rest));
    }
}

/// One for each two places, none of two strategies twice in it, and what is left: the clearest first, cores that are not shared before all.
fn clearest(mut flips: Vec<Flip>) -> (Vec<Flip>, Vec<Flip>) {
    flips.sort_by(|a, b| a.shared.cmp(&b.shared).then_with(|| b.clear.total_cmp(&a.clear)));
    let (mut told, mut rest): (Vec<Flip>, Vec<Flip>) = (Vec::new(), Vec::new());
    for flip in flips {
        let known = told.iter().any(|known| known.places == flip.places);
        if known {
            // The same strategies in the same places, with other ranks, say it once.
            let again = |other: &Flip| other.places == flip.places && other.strategies == flip.strategies;
            if !told.iter().chain(&rest).any(again) {
                rest.push(flip);
            }
        } else {
            told.push(flip);
        }
    }
    (told, rest)
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

fn between(
    here: (&Grouped<'_, '_>, &[Ordered<'_>]),
    there: (&Grouped<'_, '_>, &[Ordered<'_>]),
    axis: Axis,
) -> Vec<Flip> {
    let shares = |group: &Grouped<'_, '_>| group.cases.iter().any(|case| case.crowd.is_some());
    let mut flips = Vec::new();
    for one in here.1 {
        let other = there.1.iter().find(|other| (other.first, other.second) == (one.first, one.second));
        let Some(other) = other.filter(|other| other.comparison.verdict == -one.comparison.verdict) else { continue };
        let (first, second) = (one.first, one.second);
        let text = format!(
            "{}: {first} takes {} as long as {second}; {}: {}.",
            here.0.label,
            one.comparison.times(),
            there.0.label,
            other.comparison.times()
        );
        flips.push(Flip {
            shared: shares(here.0) || shares(there.0),
            clear: clearness(&one.comparison).min(clearness(&other.comparison)),
            text,
            places: [here.0.like.value(axis), there.0.like.value(axis)],
            strategies: [first.into(), second.into()],
        });
    }
    flips
}

/// How far the interval stays away from 1, as a logarithm.
fn clearness(comparison: &Comparison) -> f64 {
    let nearest = if comparison.verdict > 0 { comparison.ratio.low } else { comparison.ratio.high };
    let clear = nearest.ln().abs();
    if clear.is_finite() { clear } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clearest_of_each_two_places_is_told_and_shared_cores_come_last() {
        let flip = |text: &str, shared, clear, there: &str, second: &str| Flip {
            shared,
            clear,
            text: text.into(),
            places: ["wan".into(), there.into()],
            strategies: ["ddp".into(), second.into()],
        };
        let flips = vec![
            flip("shared", true, 2.0, "lan", "ring"),
            flip("weak", false, 0.1, "lan", "ring"),
            flip("clear", false, 0.5, "lan", "fsdp"),
            flip("elsewhere", false, 0.2, "dc", "ring"),
        ];
        let (told, rest) = clearest(flips);
        let texts = |flips: &[Flip]| flips.iter().map(|flip| flip.text.clone()).collect::<Vec<_>>();
        assert_eq!((texts(&told), texts(&rest)), (vec!["clear".into(), "elsewhere".into()], vec!["weak".to_string()]));
    }
}
