//! QUIC against TCP, and what the network costs each strategy.

use super::super::digest::{Case, Comparison, Digest, Grouped, ROUNDS, SINGLE, distinct};
use super::super::html::Mark;
use super::super::text::{figure, interval, share};
use super::Statements;
use crate::record::Axis;

/// For each link and whatever else differs: with which strategies QUIC is faster than ZeroMQ over TCP, and with which slower.
pub(super) fn quic(digest: &Digest<'_>) -> Statements {
    let mut said = Statements::new();
    let mut confounded = false;
    for Grouped { label, cases, .. } in digest.groups(&[Axis::Strategy, Axis::QuicMtu]) {
        let pairs: Vec<(&Case<'_>, &Case<'_>, Comparison)> = cases
            .iter()
            .filter(|case| case.cell.transport == "quic")
            .filter_map(|quic| {
                let tcp = digest.over(quic.cell, "tcp")?;
                Some((*quic, tcp, quic.against(tcp)?))
            })
            .filter(|(_, _, comparison)| comparison.rounds >= ROUNDS)
            .collect();
        if pairs.is_empty() {
            continue;
        }
        let list = |verdict: i32| {
            let of = |(quic, _, comparison): &(&Case<'_>, &Case<'_>, Comparison)| {
                let mtu = quic.cell.quic_mtu.map_or(String::new(), |mtu| format!(" (MTU {mtu})"));
                format!("{}{mtu} {}", quic.cell.strategy, comparison.times())
            };
            pairs.iter().filter(|pair| pair.2.verdict == verdict).map(of).collect::<Vec<_>>()
        };
        let (faster, equal, slower) = (list(-1), list(0), list(1));
        let mut parts = Vec::new();
        if !faster.is_empty() {
            parts.push(format!("QUIC is faster than TCP with {}", faster.join(", ")));
        }
        if !slower.is_empty() {
            parts.push(format!(
                "{} with {}",
                if parts.is_empty() { "QUIC is slower than TCP" } else { "slower" },
                slower.join(", ")
            ));
        }
        if !equal.is_empty() {
            parts.push(format!("no significant difference with {}", equal.join(", ")));
        }
        let mark = if faster.is_empty() && slower.is_empty() { Mark::Open } else { Mark::Found };
        let control = Control::of(pairs.iter().map(|pair| (pair.0, pair.1)));
        let place = label.replace("quic ", "");
        said.push((mark, format!("{place}{}: {}.", control.told(), parts.join("; "))));
        confounded |= control.differs();
    }
    if confounded {
        let text = "Where the two ran under different congestion controls, what differs is not the transport alone.";
        said.push((Mark::Doubt, text.into()));
    }
    said
}

/// Under which congestion controls QUIC and TCP ran, as their connections tell.
pub(super) struct Control {
    quic: Vec<String>,
    tcp: Vec<String>,
}

impl Control {
    /// Of pairs of the two.
    pub(super) fn of<'c>(pairs: impl Iterator<Item = (&'c Case<'c>, &'c Case<'c>)> + Clone) -> Self {
        Control {
            quic: distinct(pairs.clone().flat_map(|pair| congestion(pair.0))),
            tcp: distinct(pairs.flat_map(|pair| congestion(pair.1))),
        }
    }

    pub(super) fn differs(&self) -> bool {
        !self.quic.is_empty() && !self.tcp.is_empty() && self.quic != self.tcp
    }

    fn told(&self) -> String {
        let names = |names: &[String]| if names.is_empty() { "one not known".into() } else { names.join(" and ") };
        match (self.quic.is_empty() && self.tcp.is_empty(), self.quic == self.tcp) {
            (true, _) => String::new(),
            (_, true) => format!(" (both under {})", names(&self.quic)),
            (_, false) => format!(" (QUIC under {}, TCP under {})", names(&self.quic), names(&self.tcp)),
        }
    }
}

/// The congestion controls that a cell's connections named; what was asked for, where none did.
pub(crate) fn congestion(case: &Case<'_>) -> Vec<String> {
    let connections = case.good.iter().flat_map(|run| &run.measured.ranks).flat_map(|rank| &rank.network.connections);
    let names = distinct(connections.map(|one| one.congestion.clone()).filter(|name| !name.is_empty()));
    match names.is_empty() {
        true if case.cell.congestion != "default" => vec![case.cell.congestion.clone()],
        _ => names,
    }
}

/// For each link, transport and whatever else differs: steps against those over a network that takes no time, and against one rank alone;
/// what share of a step waits.
pub(super) fn cost(digest: &Digest<'_>) -> Statements {
    let mut said = Statements::new();
    let singles = digest.cases.iter().filter(|case| case.cell.strategy == SINGLE);
    for (single, step) in singles.filter_map(|case| Some((case, case.step?))).take(1) {
        let text = format!(
            "{}: one rank that does all the work alone takes {} ms a step.",
            digest.label(single.cell),
            interval(&step)
        );
        said.push((Mark::Found, text));
    }
    for Grouped { label, cases, .. } in digest.groups(&[Axis::Strategy]) {
        let cases: Vec<&Case<'_>> = cases
            .into_iter()
            .filter(|case| case.cell.strategy != SINGLE && case.cell.transport != "null" && case.step.is_some())
            .collect();
        let Some(case) = cases.first() else { continue };
        let mut sentences = Vec::new();
        let mut mark = Mark::Open;
        let free = ends(&cases, |case| {
            let there = digest.over(case.cell, "null").filter(|null| null.cell != case.cell)?;
            case.against(there).filter(|comparison| comparison.rounds >= ROUNDS)
        });
        if let Some((least, most)) = free {
            let significant = [&least, &most].iter().any(|end| end.1.verdict != 0);
            if significant {
                mark = Mark::Found;
            }
            sentences.push(range("steps take", &least, &most, "of those over a network that takes no time"));
        }
        if let Some(single) = digest.single(case) {
            let all = ends(&cases, |case| case.against(single).filter(|comparison| comparison.rounds >= ROUNDS));
            if let Some((least, most)) = all {
                mark = Mark::Found;
                sentences.push(range(
                    if sentences.is_empty() { "steps take" } else { "and" },
                    &least,
                    &most,
                    "of single's",
                ));
            }
        }
        let mut waits: Vec<(f64, f64, &str)> = cases
            .iter()
            .filter_map(|case| Some((case.exposed_share()?, case.exposed?.estimate, case.cell.strategy.as_str())))
            .collect();
        waits.sort_by(|a, b| a.0.total_cmp(&b.0));
        if let (Some(least), Some(most)) = (waits.first(), waits.last()) {
            let of = |(share_, ms, name): &(f64, f64, &str)| format!("{} ({name}, {} ms)", share(*share_), figure(*ms));
            let text = if waits.len() == 1 { of(least) } else { format!("{} to {}", of(least), of(most)) };
            sentences.push(format!("waiting for the network takes {text} of a step"));
        }
        if !sentences.is_empty() {
            let place = if label.is_empty() { String::new() } else { format!("{label}: ") };
            said.push((mark, format!("{place}{}.", sentences.join("; "))));
        }
    }
    said
}

type End<'a> = (&'a str, Comparison);

/// The strategies with the least and the largest ratio.
fn ends<'a>(cases: &[&'a Case<'a>], compare: impl Fn(&Case<'_>) -> Option<Comparison>) -> Option<(End<'a>, End<'a>)> {
    let compared = cases.iter().filter_map(|case| Some((case.cell.strategy.as_str(), compare(case)?)));
    let mut compared: Vec<End<'a>> = compared.collect();
    compared.sort_by(|a, b| a.1.ratio.estimate.total_cmp(&b.1.ratio.estimate));
    Some((*compared.first()?, *compared.last()?))
}

fn range(verb: &str, least: &End<'_>, most: &End<'_>, of: &str) -> String {
    let one = |(name, comparison): &End<'_>| format!("{} ({name})", comparison.times());
    if least.0 == most.0 {
        return format!("{verb} {} {of}", one(least));
    }
    format!("{verb} {} to {} {of}", one(least), one(most))
}
