//! The answers in a sentence for each link: which strategy is fastest, what QUIC changes, and what the link costs.

use rig::record::Axis;
use rig::stats::Interval;

use super::super::case::{LATE, NETWORK, ROUNDS};
use super::super::digest::{Case, Comparison, Digest, distinct};
use super::super::html::Mark;
use super::super::text::{all_of, interval, share_interval};
use super::network::{added, ends, is_networked};
use super::quic::{Pair, pairs};
use super::ranking::Front;
use super::statements::Statements;

/// Comparisons of strategies on one link that are told of one by one.
const ONE_BY_ONE: usize = 3;

/// Share of a step from which on late ranks are worth a word.
const LATE_MATTERS: f64 = 0.05;

/// The cells of a link that are told of: those whose ranks have cores of their own, where there are such.
struct Place<'d, 'a> {
    link: &'d str,
    /// `On wan (100 Mbit/s, 50 ms round trip; 2 ranks)`.
    name: String,
    cases: Vec<&'d Case<'a>>,
    /// Whether those with cores of their own are meant.
    own: bool,
}

impl<'d, 'a> Place<'d, 'a> {
    fn all(digest: &'d Digest<'a>) -> Vec<Self> {
        let links = distinct(digest.cases.iter().map(|case| case.cell.link.as_str()));
        links.into_iter().filter_map(|link| Place::of(digest, link)).collect()
    }

    fn of(digest: &'d Digest<'a>, link: &'d str) -> Option<Self> {
        let all = digest.cases.iter().filter(|case| case.cell.link == link && is_networked(case));
        let (own, shared): (Vec<_>, Vec<_>) = all.partition(|case| case.crowd.is_none());
        let has_own = !own.is_empty();
        let cases = if has_own { own } else { shared };
        let first = cases.first()?;
        let ranks = match &first.crowd {
            Some(crowd) => Some(crowd.clone()),
            None => one_number(&cases).then(|| super::super::text::count(first.cell.ranks, "rank")),
        };
        let about: Vec<String> = [first.traits.words(), ranks].into_iter().flatten().collect();
        let about = if about.is_empty() { String::new() } else { format!(" ({})", about.join("; ")) };
        Some(Place { link, name: format!("On {link}{about}"), cases, own: has_own })
    }

    fn has(&self, case: &Case<'_>) -> bool {
        case.cell.link == self.link && case.crowd.is_some() != self.own
    }

    fn mark(&self) -> Mark {
        if self.cases.iter().any(|case| case.good.len() >= ROUNDS) { Mark::Found } else { Mark::Open }
    }
}

fn one_number(cases: &[&Case<'_>]) -> bool {
    distinct(cases.iter().map(|case| case.cell.ranks)).len() == 1
}

/// Which strategy is fastest on each link.
pub(super) fn strategies(digest: &Digest<'_>) -> Statements {
    let groups = digest.groups(&[Axis::Strategy]);
    let of_place = |place: &Place<'_, '_>| {
        let here = groups
            .iter()
            .filter(|group| group.like.link == place.link && group.cases.iter().any(|case| place.has(case)));
        let fronts: Vec<(String, Front<'_>)> = here
            .filter_map(|group| {
                let over = digest.label_without(group.like, &[Axis::Strategy, Axis::Link, Axis::Ranks]);
                let over = if over.is_empty() { group.like.transport.clone() } else { over };
                let ranks =
                    if one_number(&place.cases) { String::new() } else { format!(" with {} ranks", group.like.ranks) };
                Some((format!("{over}{ranks}"), Front::of(&group.cases)?))
            })
            .collect();
        let clear = fronts.iter().any(|(_, front)| !front.is_noisy());
        Some((if clear { Mark::Found } else { Mark::Open }, format!("{}: {}.", place.name, fastest(&fronts)?)))
    };
    Place::all(digest).iter().filter_map(of_place).collect()
}

/// Which strategy is fastest, over what.
fn fastest(fronts: &[(String, Front<'_>)]) -> Option<String> {
    if fronts.is_empty() {
        return None;
    }
    if fronts.len() <= ONE_BY_ONE {
        let one = |(over, front): &(String, Front<'_>)| format!("over {over}, {}", front.words());
        return Some(fronts.iter().map(one).collect::<Vec<_>>().join("; "));
    }
    let over = |wanted: &dyn Fn(&Front<'_>) -> bool| {
        let wanted = fronts.iter().filter(|(_, front)| wanted(front));
        all_of(&wanted.map(|(over, _)| over.clone()).collect::<Vec<_>>())
    };
    let mut parts = Vec::new();
    for best in distinct(fronts.iter().map(|(_, front)| front.best)) {
        let mine = |front: &Front<'_>| front.best == best && !front.is_noisy();
        let clear = over(&|front| mine(front) && front.is_clear());
        let near = over(&|front| mine(front) && !front.is_clear());
        parts.extend(clear.map(|over| format!("{best} is the fastest over {over}")));
        parts.extend(near.map(|over| format!("{best} has the shortest step over {over}, but others may be as fast")));
    }
    parts
        .extend(over(&|front| front.is_noisy()).map(|over| format!("over {over} the strategies cannot be told apart")));
    Some(parts.join("; "))
}

/// How QUIC did beside ZeroMQ over TCP on each link, with the same strategy and all else equal.
pub(super) fn quic(digest: &Digest<'_>) -> Statements {
    let pairs = pairs(digest);
    let of_place = |place: &Place<'_, '_>| {
        let here: Vec<&Pair<'_, '_>> = pairs.iter().filter(|pair| place.has(pair.0)).collect();
        let clear = here.iter().any(|pair| pair.2.verdict != 0);
        let mark = if clear { Mark::Found } else { Mark::Open };
        (!here.is_empty()).then(|| (mark, format!("{}, {}.", place.name, beside_tcp(&here))))
    };
    Place::all(digest).iter().filter_map(of_place).collect()
}

/// How often QUIC is faster, and how often slower.
fn beside_tcp(pairs: &[&Pair<'_, '_>]) -> String {
    let told = |verdict: i32, word: &str| {
        let of = pairs.iter().filter(|pair| pair.2.verdict == verdict);
        let (least, most) =
            ends(of.clone().map(|pair| (pair.2.ratio, (pair.2, pair.0.cell.strategy.as_str()))).collect())?;
        let one =
            |(_, (comparison, name)): &(Interval, (Comparison, &str))| format!("{} for {name}", comparison.times());
        let number = of.clone().count();
        let range = if number == 1 { one(&least) } else { format!("{} to {}", one(&least), one(&most)) };
        Some(format!("{word} in {number} of {} comparisons ({range})", pairs.len()))
    };
    let parts: Vec<String> = [told(-1, "takes less time"), told(1, "takes more time")].into_iter().flatten().collect();
    let equal = pairs.iter().filter(|pair| pair.2.verdict == 0).count();
    if parts.is_empty() {
        return format!("no difference between QUIC and ZeroMQ over TCP was found in {equal} comparisons");
    }
    let equal = if equal == 0 { String::new() } else { format!("; in {equal} no difference was found") };
    format!("QUIC {} than ZeroMQ over TCP{equal}", all_of(&parts).unwrap_or_default())
}

/// What each link adds to a step, and what share of it waits.
pub(super) fn costs(digest: &Digest<'_>) -> Statements {
    let of_place = |place: &Place<'_, '_>| {
        let parts: Vec<String> = [adds(digest, &place.cases), waits(&place.cases)].into_iter().flatten().collect();
        (!parts.is_empty()).then(|| (place.mark(), format!("{}, {}.", place.name, parts.join("; "))))
    };
    Place::all(digest).iter().filter_map(of_place).collect()
}

/// Strategy, and transport where cells differ in it.
fn named<T>(cases: &[&Case<'_>], pick: impl Fn(&Case<'_>) -> Option<(Interval, T)>) -> Vec<(Interval, (String, T))> {
    let transports = super::super::charts::varies(cases, Axis::Transport);
    let ranks = !one_number(cases);
    let name = |case: &Case<'_>| {
        let mut name = case.cell.strategy.clone();
        if transports {
            name += &format!(" over {}", case.cell.transport);
        }
        if ranks {
            name += &format!(" with {} ranks", case.cell.ranks);
        }
        name
    };
    cases.iter().filter_map(|case| pick(case).map(|(value, more)| (value, (name(case), more)))).collect()
}

/// What the link adds to a step.
fn adds(digest: &Digest<'_>, cases: &[&Case<'_>]) -> Option<String> {
    let added = named(cases, |case| added(digest, case).map(|(found, link)| (found.difference, link)));
    let ((least, (least_name, than)), (most, (most_name, _))) = ends(added)?;
    let to = if least_name == most_name { String::new() } else { format!(" to {} ms ({most_name})", interval(&most)) };
    Some(format!("a step takes {} ms ({least_name}){to} more than on {than}", interval(&least)))
}

/// Between which shares of a step ranks wait for the network, and how much at most for late ranks.
fn waits(cases: &[&Case<'_>]) -> Option<String> {
    let ((least, (least_name, ())), (most, (most_name, ()))) =
        ends(named(cases, |case| Some((case.share_of(&NETWORK)?, ()))))?;
    let to =
        if least_name == most_name { String::new() } else { format!(" to {} ({most_name})", share_interval(&most)) };
    let late = ends(named(cases, |case| Some((case.share_of(&LATE)?, ())))).map(|(_, most)| most);
    let late = late.filter(|(late, _)| late.estimate >= LATE_MATTERS && late.low > 0.0);
    let late = late.map_or(String::new(), |(late, (name, ()))| {
        format!(", and waiting for ranks that are still computing up to {} ({name})", share_interval(&late))
    });
    Some(format!("waiting for the network is {} ({least_name}){to} of a step{late}", share_interval(&least)))
}
