//! The answer on a terminal of 80 columns: a few sentences, and one table.

use std::cmp::Ordering;

use rig::flag::FlagKind;
use rig::record::Axis;
use rig::text::{grid, wrapped};

use super::case::{LATE, NETWORK, ROUNDS};
use super::digest::{Case, Digest, distinct};
use super::findings::{Pair, added, is_networked, pairs};
use super::links::Traits;
use super::text::{count, figure, listed};

/// Columns of a terminal.
const WIDTH: usize = 80;

/// Lines of the table.
const MOST_ROWS: usize = 24;

/// The sentences and the table.
pub(super) fn text(digest: &Digest<'_>) -> String {
    let timed: Vec<&Case<'_>> = digest.cases.iter().filter(|case| is_networked(case)).collect();
    let mut sentences: Vec<String> = Vec::new();
    let mut links = distinct(timed.iter().map(|case| case.cell.link.as_str()));
    // From what holds nothing up to the slowest.
    links.reverse();
    for link in &links {
        sentences.extend(of_link(digest, &comparable(&timed, link)));
    }
    sentences.extend(quic(digest, &links));
    sentences.extend(without_figures(digest));
    sentences.extend(busy(digest));
    let mut text: Vec<String> = sentences.iter().map(|sentence| wrapped(sentence, WIDTH)).collect();
    if text.is_empty() {
        text.push("No cell has figures.".into());
    }
    text.extend(table(digest, &timed, &links));
    text.join("\n")
}

/// The cells of a link that can be compared: those whose ranks have cores of their own, where there are such.
fn comparable<'d, 'a>(timed: &[&'d Case<'a>], link: &str) -> Vec<&'d Case<'a>> {
    let here: Vec<&Case<'_>> = timed.iter().copied().filter(|case| case.cell.link == link).collect();
    let own: Vec<&Case<'_>> = here.iter().copied().filter(|case| case.crowd.is_none()).collect();
    if own.is_empty() { here } else { own }
}

/// The fastest cell of a link and the slowest, with what the network takes of each.
fn of_link(digest: &Digest<'_>, cases: &[&Case<'_>]) -> Option<String> {
    let mut sorted: Vec<&Case<'_>> = cases.to_vec();
    sorted.sort_by(|a, b| by_step(a, b));
    let (best, worst) = (sorted.first()?, sorted.last()?);
    let place = format!("On {}{}", best.cell.link, like(&best.traits));
    let few = sorted.iter().map(|case| case.good.len()).min().unwrap_or(0);
    if few < ROUNDS {
        let rounds = count(few, "round");
        return Some(format!(
            "{place}: the shortest step is {} with {}; after {rounds} this may be chance; {ROUNDS} rounds are needed to tell.",
            spent(best),
            name(digest, best)
        ));
    }
    let near = sorted[1..].iter().filter(|case| case.against(best).is_some_and(|found| found.verdict <= 0)).count();
    let near = match near {
        0 => "the shortest of all".into(),
        _ if near + 1 == sorted.len() => "and no other differs from it by more than chance".into(),
        1 => "and one other cannot be told apart from it".into(),
        several => format!("and {several} others cannot be told apart from it"),
    };
    let costs = added(digest, best).map_or(String::new(), |(found, than)| {
        format!(", {} ms more than over {than}", figure(found.difference.estimate.max(0.0)))
    });
    let mut text = format!("{place}: a step of {} takes {}{costs}, {near}.", name(digest, best), spent(best));
    if worst.against(best).is_some_and(|found| found.verdict > 0) {
        let times = worst.step?.estimate / best.step?.estimate;
        text +=
            &format!(" The longest is that of {}: {}, {times:.1} times as long.", name(digest, worst), spent(worst));
    }
    Some(text)
}

/// ` (100 Mbit/s, 50 ms)`.
fn like(traits: &Traits) -> String {
    let rate = traits.rate.map(|rate| match rate {
        rate if rate >= 1000.0 => format!("{} Gbit/s", rate / 1000.0),
        rate => format!("{rate} Mbit/s"),
    });
    let trip = traits.rtt.filter(|ms| *ms >= 1.0).map(|ms| format!("{ms:.0} ms round trip"));
    let parts: Vec<String> = rate.into_iter().chain(trip).chain(traits.lossy.then(|| "lossy".into())).collect();
    if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) }
}

/// `83.1 ms (92 % waiting for the network)`.
fn spent(case: &Case<'_>) -> String {
    let step = case.step.map_or("?".into(), |step| figure(step.estimate));
    let of = |parts: &[&str]| case.share_of(parts).map(|share| 100.0 * share.estimate.clamp(0.0, 1.0));
    let waits = of(&NETWORK).map(|share| format!("{share:.0} % waiting for the network"));
    let late = of(&LATE).filter(|share| *share >= 5.0).map(|share| format!("{share:.0} % for late ranks"));
    let parts: Vec<String> = waits.into_iter().chain(late).collect();
    if parts.is_empty() { format!("{step} ms") } else { format!("{step} ms ({})", parts.join(", ")) }
}

/// The cell in words; its link is told of before.
fn name(digest: &Digest<'_>, case: &Case<'_>) -> String {
    let axes = [&[Axis::Strategy, Axis::Transport, Axis::Link][..], of_one_number(digest)].concat();
    let rest = digest.label_without(case.cell, &axes);
    let rest = if rest.is_empty() { rest } else { format!(" ({rest})") };
    format!("{} over {}{rest}", case.cell.strategy, case.cell.transport)
}

/// The number of ranks, as an axis that needs no telling: all cells whose ranks have cores of their own have as many.
fn of_one_number(digest: &Digest<'_>) -> &'static [Axis] {
    let own = digest.cases.iter().filter(|case| case.crowd.is_none() && is_networked(case));
    if distinct(own.map(|case| case.cell.ranks)).len() == 1 { &[Axis::Ranks] } else { &[] }
}

fn by_step(a: &Case<'_>, b: &Case<'_>) -> Ordering {
    let step = |case: &Case<'_>| case.step.map_or(f64::INFINITY, |step| step.estimate);
    step(a).total_cmp(&step(b))
}

/// How QUIC did beside ZeroMQ over TCP, link by link.
fn quic(digest: &Digest<'_>, links: &[&str]) -> Option<String> {
    let pairs = pairs(digest);
    let told: Vec<String> = links
        .iter()
        .filter_map(|link| {
            let mut here: Vec<&Pair<'_, '_>> = pairs.iter().filter(|pair| pair.0.cell.link == *link).collect();
            if here.iter().any(|pair| pair.0.crowd.is_none()) {
                here.retain(|pair| pair.0.crowd.is_none());
            }
            let of = |verdict: i32| {
                here.iter().filter(move |pair| pair.2.verdict == verdict).map(|pair| pair.2.ratio.estimate)
            };
            let one = |verdict: i32, word: &str| {
                let (least, most) =
                    of(verdict).fold((f64::INFINITY, 0.0_f64), |(l, m), ratio| (l.min(ratio), m.max(ratio)));
                let number = of(verdict).count();
                let range = if number == 1 { format!("{least:.2}") } else { format!("{least:.2} to {most:.2}") };
                (number > 0)
                    .then(|| format!("{word} in {number} of {} comparisons ({range} times its time)", here.len()))
            };
            let parts: Vec<String> = one(1, "slower").into_iter().chain(one(-1, "faster")).collect();
            match (here.is_empty(), parts.is_empty()) {
                (true, _) => None,
                (false, true) => Some(format!("on {link} not told apart")),
                (false, false) => Some(format!("on {link} {}", parts.join(" and "))),
            }
        })
        .collect();
    (!told.is_empty()).then(|| format!("QUIC beside ZeroMQ over TCP: {}.", told.join("; ")))
}

/// Which cells have no figures, and why.
fn without_figures(digest: &Digest<'_>) -> Option<String> {
    let mut reasons: Vec<(String, usize)> = Vec::new();
    for case in digest.holes() {
        let (word, why) = case.hole();
        let reason = format!("{word}: {why}");
        match reasons.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, number)) => *number += 1,
            None => reasons.push((reason, 1)),
        }
    }
    let told: Vec<String> =
        reasons.iter().map(|(reason, number)| format!("{} ({reason})", count(*number, "cell"))).collect();
    (!told.is_empty()).then(|| format!("Without figures: {}.", listed(&told, 2)))
}

/// How many runs were disturbed by other programs.
fn busy(digest: &Digest<'_>) -> Option<String> {
    let runs = digest.results.records.len();
    let busy = |flags: &[rig::flag::Flag]| flags.iter().any(|flag| flag.kind == FlagKind::MachineBusy);
    let disturbed = digest.results.records.iter().filter(|record| busy(&record.flags)).count();
    (disturbed * 10 > runs).then(|| {
        format!(
            "Other programs used the processor during {disturbed} of {runs} runs: times are longer than on a quiet machine, and small \
             differences cannot be seen."
        )
    })
}

/// Strategies by links, over the transport that is fastest on all of them; by transports, where there is one link.
fn table(digest: &Digest<'_>, timed: &[&Case<'_>], links: &[&str]) -> Option<String> {
    if timed.is_empty() {
        return None;
    }
    let transports = distinct(timed.iter().map(|case| case.cell.transport.as_str()));
    let by_link = links.len() > 1;
    let over = if by_link { fastest_transport(timed, links, &transports)? } else { "" };
    let columns: Vec<&str> = if by_link { links.to_vec() } else { transports };
    let column = |case: &Case<'_>, name: &str| match by_link {
        true => case.cell.link == name && case.cell.transport == over,
        false => case.cell.transport == name,
    };
    let row_name = |case: &Case<'_>| {
        let (ranks, mark) = match case.crowd {
            Some(_) => (&[Axis::Ranks][..], "*"),
            None => (of_one_number(digest), ""),
        };
        let label = digest.label_without(case.cell, &[&[Axis::Link, Axis::Transport][..], ranks].concat());
        format!("{}{mark}", if label.is_empty() { case.cell.strategy.clone() } else { label })
    };
    let shown: Vec<&&Case<'_>> = timed.iter().filter(|case| columns.iter().any(|name| column(case, name))).collect();
    let names = distinct(shown.iter().map(|case| row_name(case)));
    let text = |case: &Case<'_>| {
        let waits = case
            .share_of(&NETWORK)
            .map_or(String::new(), |share| format!(" {:>3.0} %", 100.0 * share.estimate.clamp(0.0, 1.0)));
        case.step.map_or("-".into(), |step| format!("{}{waits}", figure(step.estimate)))
    };
    let line = |name: &String| {
        let of = |column_name: &&str| {
            let mut here = shown.iter().filter(|case| column(case, column_name) && row_name(case) == *name);
            here.next().map_or("-".into(), |case| text(case))
        };
        std::iter::once(name.clone()).chain(columns.iter().map(of)).collect::<Vec<String>>()
    };
    let mut head = vec![String::new()];
    head.extend(columns.iter().map(|name| (*name).to_string()));
    let lines: Vec<Vec<String>> = names.iter().take(MOST_ROWS).map(line).collect();
    let mut text = vec![String::new()];
    let over = if by_link { format!(" over {over}") } else { String::new() };
    text.push(format!("Step in ms{over}, and the share of it that waits for the network:"));
    text.push(grid(&head, &lines));
    if names.len() > MOST_ROWS {
        text.push(format!("and {} more rows in the report", names.len() - MOST_ROWS));
    }
    let crowds = distinct(shown.iter().filter_map(|case| case.crowd.as_deref()));
    if !crowds.is_empty() {
        text.push(format!("* {}", crowds.join("; ")));
    }
    Some(text.join("\n"))
}

/// The transport with the shortest steps, over all strategies and links that it has in common with the others that go over every link.
fn fastest_transport<'c>(timed: &[&Case<'_>], links: &[&str], transports: &[&'c str]) -> Option<&'c str> {
    let step = |transport: &str, like: &Case<'_>| {
        let same = |case: &&&Case<'_>| {
            case.cell.transport == transport
                && case.cell.link == like.cell.link
                && case.cell.strategy == like.cell.strategy
        };
        timed.iter().find(same).and_then(|case| case.step).map(|step| step.estimate)
    };
    let goes_over = |transport: &&&str, link: &&str| {
        timed.iter().any(|case| case.cell.transport == **transport && case.cell.link == *link)
    };
    let everywhere: Vec<&str> =
        transports.iter().filter(|transport| links.iter().all(|link| goes_over(transport, link))).copied().collect();
    let common = |case: &&&Case<'_>| everywhere.iter().all(|transport| step(transport, case).is_some());
    let length = |transport: &str| {
        timed.iter().filter(common).filter_map(|case| step(transport, case)).map(f64::ln).sum::<f64>()
    };
    let fastest = everywhere.iter().min_by(|a, b| length(a).total_cmp(&length(b)))?;
    transports.iter().find(|transport| *transport == fastest).copied()
}
