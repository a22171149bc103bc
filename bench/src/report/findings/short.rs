//! The answer in a few lines: for each link which strategy is fastest, what the link adds to a step, what waits, and how QUIC did.

use rig::record::Axis;
use rig::stats::Interval;

use super::super::case::{LATE, NETWORK, ROUNDS};
use super::super::digest::{Case, Digest, distinct};
use super::super::html::Mark;
use super::super::text::{interval, share_interval};
use super::network::{added, ends, is_networked};
use super::quic::{Pair, pairs};
use super::ranking::Front;
use super::statements::Statements;

/// Comparisons of strategies on one link that are told of one by one.
const ONE_BY_ONE: usize = 3;

/// Share of a step from which on late ranks are worth a word.
const LATE_MATTERS: f64 = 0.05;

/// Two statements for each link: of cells whose ranks have cores of their own, where there are such.
pub(super) fn by_link(digest: &Digest<'_>) -> Statements {
    let groups = digest.groups(&[Axis::Strategy]);
    let pairs = pairs(digest);
    let mut said = Statements::new();
    for link in distinct(digest.cases.iter().map(|case| case.cell.link.as_str())) {
        let all: Vec<&Case<'_>> =
            digest.cases.iter().filter(|case| case.cell.link == link && is_networked(case)).collect();
        let own = all.iter().any(|case| case.crowd.is_none());
        let told = |case: &Case<'_>| case.cell.link == link && case.crowd.is_some() != own;
        let here: Vec<&Case<'_>> = all.iter().copied().filter(|case| told(case)).collect();
        let fronts = groups.iter().filter(|group| group.cases.iter().any(|case| told(case)) && group.like.link == link);
        let fronts: Vec<(String, Front<'_>)> = fronts
            .filter_map(|group| {
                let over = digest.label_without(group.like, &[Axis::Strategy, Axis::Link, Axis::Ranks]);
                let ranks = if one_number(&here) { String::new() } else { format!(" with {} ranks", group.like.ranks) };
                Some((format!("{over}{ranks}").trim().to_string(), Front::of(&group.cases)?))
            })
            .collect();
        let of_link: Vec<&Pair<'_, '_>> = pairs.iter().filter(|pair| told(pair.0)).collect();
        let mark = if here.iter().any(|case| case.good.len() >= ROUNDS) { Mark::Found } else { Mark::Open };
        let of = ranks(&here);
        // What the link costs, and then how those that are compared on it did.
        for parts in [[adds(digest, &here), waits(&here)], [fastest(&fronts), quic(&of_link)]] {
            let parts: Vec<String> = parts.into_iter().flatten().collect();
            if !parts.is_empty() {
                let verb = parts[0].starts_with("adds ");
                said.push((mark, format!("{link}{of}{} {}.", if verb { "" } else { ":" }, parts.join("; "))));
            }
        }
    }
    said
}

fn one_number(cases: &[&Case<'_>]) -> bool {
    distinct(cases.iter().map(|case| case.cell.ranks)).len() == 1
}

/// `, 2 ranks`, where all have as many.
fn ranks(cases: &[&Case<'_>]) -> String {
    match cases.first() {
        Some(Case { crowd: Some(crowd), .. }) => format!(" ({crowd})"),
        Some(case) if one_number(cases) => format!(" ({} ranks)", case.cell.ranks),
        _ => String::new(),
    }
}

/// Which strategy is fastest, over what.
fn fastest(fronts: &[(String, Front<'_>)]) -> Option<String> {
    if fronts.is_empty() {
        return None;
    }
    if fronts.len() <= ONE_BY_ONE {
        let one = |(over, front): &(String, Front<'_>)| {
            let over = if over.is_empty() { String::new() } else { format!("over {over}: ") };
            format!("{over}{}", front.words())
        };
        return Some(fronts.iter().map(one).collect::<Vec<_>>().join("; "));
    }
    let ranked: Vec<&Front<'_>> = fronts.iter().map(|(_, front)| front).filter(|front| !front.is_noisy()).collect();
    let names = distinct(ranked.iter().map(|front| front.best));
    let one = |name: &&str| {
        let mine: Vec<_> = ranked.iter().filter(|front| front.best == *name).collect();
        let clear = mine.iter().filter(|front| front.is_clear()).count();
        format!("{name} in {} (told apart from all others in {clear})", mine.len())
    };
    let noisy = match fronts.len() - ranked.len() {
        0 => String::new(),
        several => format!("; {several} are too noisy to rank"),
    };
    let best = if names.is_empty() { "none".into() } else { names.iter().map(one).collect::<Vec<_>>().join(", ") };
    Some(format!("in {} comparisons of strategies the shortest mean step is of {best}{noisy}", fronts.len()))
}

/// Strategy, and transport where cells differ in it.
fn named<T>(cases: &[&Case<'_>], pick: impl Fn(&Case<'_>) -> Option<(Interval, T)>) -> Vec<(Interval, (String, T))> {
    let transports = super::super::charts::varies(cases, Axis::Transport);
    let ranks = !one_number(cases);
    let name = |case: &Case<'_>| {
        let mut name = case.cell.strategy.clone();
        if transports {
            name += &format!(" {}", case.cell.transport);
        }
        if ranks {
            name += &format!(", {} ranks", case.cell.ranks);
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
    Some(format!("adds {} ms ({least_name}){to} a step to the same cell on {than}", interval(&least)))
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
        format!(", waiting for ranks that still compute up to {} ({name})", share_interval(&late))
    });
    Some(format!("waiting for the network takes {} ({least_name}){to} of a step{late}", share_interval(&least)))
}

/// How often QUIC is faster, and how often slower, than ZeroMQ over TCP with the same strategy and all else equal.
fn quic(pairs: &[&Pair<'_, '_>]) -> Option<String> {
    if pairs.is_empty() {
        return None;
    }
    let told = |verdict: i32, word: &str| {
        let of = pairs.iter().filter(|pair| pair.2.verdict == verdict);
        let (least, most) =
            ends(of.clone().map(|pair| (pair.2.ratio, (pair.2, pair.0.cell.strategy.as_str()))).collect())?;
        let one = |(_, (comparison, name)): &(Interval, (super::super::digest::Comparison, &str))| {
            format!("{} {name}", comparison.times())
        };
        let range = if of.clone().count() == 1 { one(&least) } else { format!("{} to {}", one(&least), one(&most)) };
        Some(format!("{word} in {} ({range})", of.count()))
    };
    let equal = pairs.iter().filter(|pair| pair.2.verdict == 0).count();
    let equal = (equal > 0).then(|| format!("not told apart in {equal}"));
    let parts: Vec<String> = [told(-1, "faster"), told(1, "slower"), equal].into_iter().flatten().collect();
    Some(format!("of {} comparisons of QUIC with TCP, QUIC is {}", pairs.len(), parts.join(", ")))
}
