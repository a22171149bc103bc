//! The answer in a few lines: for each link how strategies and transports did over all that was compared on it.

use super::super::digest::{Case, Comparison, Digest, ROUNDS, SINGLE, distinct};
use super::super::html::Mark;
use super::super::text::share;
use super::Statements;
use super::network::Control;
use super::ranking::Front;
use crate::record::Axis;

/// One statement for each link.
pub(super) fn by_link(digest: &Digest<'_>) -> Statements {
    let fronts: Vec<(String, Front<'_>)> = digest
        .groups(&[Axis::Strategy])
        .iter()
        .filter_map(|group| Some((group.like.link.clone(), Front::of(&group.cases)?)))
        .collect();
    let mut said = Statements::new();
    for link in distinct(digest.cases.iter().map(|case| case.cell.link.as_str())) {
        let here: Vec<&Case<'_>> = digest.cases.iter().filter(|case| case.cell.link == link).collect();
        let mine: Vec<&Front<'_>> = fronts.iter().filter(|front| front.0 == link).map(|front| &front.1).collect();
        let parts: Vec<String> = [fastest(&mine), quic(digest, &here), waits(&here)].into_iter().flatten().collect();
        if !parts.is_empty() {
            said.push((Mark::Found, format!("{link}: {}.", parts.join("; "))));
        }
    }
    said
}

/// Who is among the fastest most often.
fn fastest(fronts: &[&Front<'_>]) -> Option<String> {
    let names = distinct(fronts.iter().flat_map(|front| front.names()));
    let among = |name: &str| fronts.iter().filter(|front| front.names().contains(&name)).count();
    let most = names.iter().map(|name| among(name)).max()?;
    let best: Vec<String> = names.iter().filter(|name| among(name) == most).map(ToString::to_string).collect();
    let alone =
        fronts.iter().filter(|front| front.names().len() == 1 && best.iter().any(|name| name == front.best)).count();
    let (of, verb) = (fronts.len(), if best.len() == 1 { "is" } else { "are" });
    let places = if of == 1 { "in the one comparison".into() } else { format!("in {most} of {of} comparisons") };
    let alone = match alone {
        0 => "never alone".to_string(),
        _ if alone == most => "always alone".into(),
        1 => "once alone".into(),
        _ => format!("{alone} times alone"),
    };
    Some(format!("{} {verb} among the fastest {places} of strategies, {alone}", and(&best)))
}

/// How often QUIC is faster, and how often slower, than ZeroMQ over TCP with the same strategy and all else equal.
fn quic(digest: &Digest<'_>, cases: &[&Case<'_>]) -> Option<String> {
    let quic = cases.iter().filter(|case| case.cell.transport == "quic");
    let pairs: Vec<(&Case<'_>, &Case<'_>, Comparison)> = quic
        .filter_map(|case| {
            let tcp = digest.over(case.cell, "tcp")?;
            Some((*case, tcp, case.against(tcp)?))
        })
        .filter(|pair| pair.2.rounds >= ROUNDS)
        .collect();
    let compared: Vec<Comparison> = pairs.iter().map(|pair| pair.2).collect();
    if compared.is_empty() {
        return None;
    }
    let told = |verdict: i32, word: &str| {
        let mut ratios: Vec<f64> =
            compared.iter().filter(|one| one.verdict == verdict).map(|one| one.ratio.estimate).collect();
        ratios.sort_by(f64::total_cmp);
        let (least, most) = (ratios.first()?, ratios.last()?);
        let (least, most) = (format!("{least:.2}×"), format!("{most:.2}×"));
        let range = if least == most { least } else { format!("{least} to {most}") };
        Some(format!("{word} in {} ({range} the time)", ratios.len()))
    };
    let equal = compared.iter().filter(|one| one.verdict == 0).count();
    let equal = (equal > 0).then(|| format!("not told apart in {equal}"));
    let parts: Vec<String> = [told(-1, "faster"), told(1, "slower"), equal].into_iter().flatten().collect();
    let control = match Control::of(pairs.iter().map(|pair| (pair.0, pair.1))).differs() {
        true => " (under different congestion controls)",
        false => "",
    };
    Some(format!("of {} comparisons of QUIC with TCP{control}, QUIC is {}", compared.len(), parts.join(", ")))
}

/// Between which shares of a step ranks wait for the network.
fn waits(cases: &[&Case<'_>]) -> Option<String> {
    let networked = cases.iter().filter(|case| case.cell.strategy != SINGLE && case.cell.transport != "null");
    let mut shares: Vec<(f64, &str)> =
        networked.filter_map(|case| Some((case.exposed_share()?, case.cell.strategy.as_str()))).collect();
    shares.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (least, most) = (shares.first()?, shares.last()?);
    Some(format!(
        "waiting for the network takes {} ({}) to {} ({}) of a step",
        share(least.0),
        least.1,
        share(most.0),
        most.1
    ))
}

fn and(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}
