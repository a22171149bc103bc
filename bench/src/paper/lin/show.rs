//! Tables, pictures and sentences.

use std::path::Path;

use gpt2::cli::say;
use rig::BenchError;
use rig::plot::{self, Bars, Labels, Line};

use super::cells::{LARGER_BATCH, LAST, Part};
use super::found::{Entry, Found, Gain, bytes_per_token, exposed};
use crate::paper::row::Run;
use crate::paper::rows::picture;
use crate::paper::text::{UNDECIDED, number, paragraph, table, times};

pub(super) fn tables(found: &Found) {
    for link in &found.links {
        ladder(found, link);
    }
    say(
        "of the row before: tokens a second compared with the row before; exposed: how long a step waits for other ranks, on the rank that \
         waits longest; hidden: communication during other work; data: reading the rank's part of a batch; MB sent: payload of the rank \
         that sends most; peak MB: memory during training, of the rank that takes most",
    );
    scaling(found);
    phases(found);
}

fn ladder(found: &Found, link: &str) {
    let header = [
        "row",
        "tokens/s",
        "of one device",
        "of the row before",
        "step ms",
        "exposed ms",
        "hidden ms",
        "data ms",
        "MB sent/step",
        "peak MB",
        "loss",
        "status",
    ];
    let one = found.get(Part::Ladder(0), link).map(|(_, run)| run.tokens_per_s);
    let line = |(entry, run): (&Entry, &Run)| {
        let Part::Ladder(place) = entry.wanted.part else { return Vec::new() };
        let most = |of: fn(&crate::paper::row::RankRun) -> f64| run.ranks.iter().map(of).fold(0.0, f64::max);
        vec![
            entry.wanted.name.clone(),
            number(Some(run.tokens_per_s), 0),
            number(one.map(|one| run.tokens_per_s / one), 2),
            found.gain(place, link).map_or("-".into(), |gain| gain.words()),
            number(Some(run.step_ms), 1),
            number(Some(exposed(run)), 1),
            number(Some(most(|rank| rank.parts.hidden)), 1),
            number(Some(most(|rank| rank.parts.data)), 2),
            number(Some(most(|rank| rank.bytes_expected as f64) / 1e6), 2),
            number(entry.row.fullest().map(|(_, usage)| usage.total.peak as f64 / 1e6), 1),
            number(Some(run.final_loss), 3),
            entry.row.status.clone(),
        ]
    };
    let lines: Vec<Vec<String>> = found.all(link, |part| matches!(part, Part::Ladder(_))).map(line).collect();
    say(format_args!("\none optimization after another, on {link}\n{}", table(&header, &lines, 1)));
}

fn scaling(found: &Found) {
    let header =
        ["link", "ranks", "strong: tokens/s", "over one", "efficiency", "weak: tokens/s", "over one", "efficiency"];
    let mut lines = Vec::new();
    let mut crowded = false;
    for link in &found.links {
        for ranks in sizes(found, link) {
            let (strong, weak) = (Part::Strong(ranks), Part::Weak(ranks));
            let speed = |part| number(found.get(part, link).map(|(_, run)| run.tokens_per_s), 0);
            let over = |part, one| number(found.against(part, one, link).map(|gain| gain.times), 2);
            let efficiency =
                |part| found.efficiency(part, link).map_or("-".into(), |share| format!("{:.0} %", 100.0 * share));
            let shares_cores = found.get(strong, link).is_some_and(|(entry, _)| entry.crowded);
            crowded |= shares_cores;
            lines.push(vec![
                link.clone(),
                format!("{ranks}{}", if shares_cores { "*" } else { "" }),
                speed(strong),
                over(strong, Part::Strong(1)),
                efficiency(strong),
                speed(weak),
                over(weak, Part::Weak(1)),
                efficiency(weak),
            ]);
        }
    }
    say(format_args!(
        "\nscaling with all optimizations: strong, with the same batch; weak, with the same number of sequences for each rank"
    ));
    say(table(&header, &lines, 1));
    if crowded {
        say("*: ranks share cores, so their speed says nothing about the network");
    }
}

/// The numbers of ranks of a link's scaling.
fn sizes(found: &Found, link: &str) -> Vec<usize> {
    let ranks = |(entry, _): (&Entry, &Run)| match entry.wanted.part {
        Part::Strong(ranks) => Some(ranks),
        _ => None,
    };
    found.all(link, |part| matches!(part, Part::Strong(_))).filter_map(ranks).collect()
}

fn phases(found: &Found) {
    let header = ["link", "phase", "tokens a sequence", "steps", "tokens/s", "loss at its end"];
    let mut lines = Vec::new();
    for link in &found.links {
        for (name, phase) in ["first", "second"].into_iter().zip(found.phases(link).into_iter().flatten()) {
            lines.push(vec![
                link.clone(),
                name.into(),
                phase.tokens.to_string(),
                phase.steps.to_string(),
                number(phase.tokens_per_s, 0),
                number(phase.loss, 3),
            ]);
        }
    }
    say(
        "\ntwo phases, with all optimizations: the same number of tokens in a step, in the first phase in shorter sequences",
    );
    say(table(&header, &lines, 2));
}

/// What the paper concludes beside what is found here.
pub(super) fn findings(found: &Found) {
    say("\nThe paper's conclusions (abstract), and the findings of this run:");
    let header = ["the paper", "here"];
    let lines: Vec<Vec<String>> = conclusions(found).into_iter().map(|(paper, here)| vec![paper, here]).collect();
    say(table(&header, &lines, 2));
    let by_link = found.links.iter().filter_map(|link| of_link(found, link));
    let said: Vec<String> = by_link.chain(accumulation(found)).chain(two_phases(found)).collect();
    say(format_args!("\n{}", paragraph(&said.join(" "))));
}

fn conclusions(found: &Found) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    if let Some(link) = found.links.first() {
        let gain = |number| found.gain(number, link).map_or("-".into(), |gain| gain.words());
        lines.push((
            "a single device is faster".into(),
            format!("mixed precision {}, fused operations {}, on {link}", gain(2), gain(3)),
        ));
    }
    for link in &found.links {
        let of = |part| found.get(part, link).map(|(_, run)| exposed(run) / run.step_ms);
        let share = |share: Option<f64>| share.map_or("-".into(), |share| format!("{:.0} %", 100.0 * share));
        let (before, after) = (of(Part::Ladder(3)), of(Part::Ladder(LARGER_BATCH)));
        lines.push((
            "the network is no longer the bottleneck".into(),
            format!(
                "{link}: waiting is {} of a step before accumulation and overlap, and {} with both and the larger batch",
                share(before),
                share(after)
            ),
        ));
    }
    for link in &found.links {
        let Some((entry, _)) = found.get(Part::Ladder(LAST), link) else { continue };
        let ranks = entry.row.ranks;
        let gain = found.against(Part::Ladder(LAST), Part::Ladder(0), link);
        let scaled = found.against(Part::Ladder(LAST), Part::Strong(1), link);
        let of = |gain: Option<Gain>| gain.map_or("-".into(), |gain| times(gain.times));
        lines.push((
            "an ordinary network is enough".into(),
            format!("{link}: {ranks} ranks with all optimizations have {} of the speed of one device without any, and {} of one device \
                with all", of(gain), of(scaled)),
        ));
    }
    lines
}

/// Which optimization gains most on a link, and which none.
fn of_link(found: &Found, link: &str) -> Option<String> {
    let name = |number: usize| {
        let (entry, _) = found.get(Part::Ladder(number), link)?;
        Some(entry.wanted.name.trim_start_matches("+ ").to_string())
    };
    let gains: Vec<(usize, f64, &str)> =
        (2..=LAST).filter_map(|number| found.gain(number, link).map(|gain| (number, gain.times, gain.told))).collect();
    let (best, ratio, _) =
        gains.iter().filter(|gain| gain.2 == "faster").max_by(|a, b| a.1.total_cmp(&b.1)).copied()?;
    let listed = |told: &str| {
        let names: Vec<String> = gains.iter().filter(|gain| gain.2 == told).filter_map(|gain| name(gain.0)).collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    let mut text = format!("On {link}, {} gains most: {}.", name(best)?, times(ratio));
    if let Some(names) = listed("slower") {
        text.push_str(&format!(" Slower than the row before: {names}."));
    }
    if let Some(names) = listed(UNDECIDED) {
        text.push_str(&format!(" No difference was found: {names}."));
    }
    Some(text)
}

/// What accumulation does with the same batch, and what with a larger one.
fn accumulation(found: &Found) -> Option<String> {
    // The slowest link has most to gain.
    let link = found.links.last()?;
    let row = |number| found.get(Part::Ladder(number), link);
    let ((without, its), (with, run), (larger, larger_run)) = (row(3)?, row(4)?, row(LARGER_BATCH)?);
    let (_, last) = row(LAST)?;
    let peak = |entry: &Entry| number(entry.row.fullest().map(|(_, usage)| usage.total.peak as f64 / 1e6), 1);
    Some(format!(
        "Accumulation by itself sends the same bytes as the same batch without it ({:.0} bytes a token and {:.0}); it saves memory: {} MB \
         instead of {} MB. The larger batch that then fits saves communication: {:.0} bytes a token, with {} MB and {} of the speed on \
         {link}. It also makes fewer updates for the same number of tokens, for which LAMB is made.",
        bytes_per_token(&without.row, its),
        bytes_per_token(&with.row, run),
        peak(with),
        peak(without),
        bytes_per_token(&larger.row, larger_run),
        peak(larger),
        times(larger_run.tokens_per_s / last.tokens_per_s)
    ))
}

/// What the first phase gains.
fn two_phases(found: &Found) -> Option<String> {
    let link = found.links.first()?;
    let [first, second] = found.phases(link)?;
    let ((_, phased), (_, last)) = (found.get(Part::Phases, link)?, found.get(Part::Ladder(LAST), link)?);
    let seconds = |run: &Run| run.seconds.last().copied();
    Some(format!(
        "Two phases: on {link} a step of the first has {} of the speed of a step of the second, because attention spans {} tokens instead \
         of {}; all steps together take {} of the time of a run without a first phase, and end at a loss of {} instead of {}.",
        times(first.tokens_per_s? / second.tokens_per_s?),
        first.tokens,
        second.tokens,
        times(seconds(phased)? / seconds(last)?),
        number(Some(phased.final_loss), 3),
        number(Some(last.final_loss), 3)
    ))
}

pub(super) fn pictures(found: &Found, out: &Path) -> Result<Vec<String>, BenchError> {
    let mut written = Vec::new();
    let by_link = |title, value, of: &dyn Fn(&Run) -> f64| {
        let names =
            found.links.first().into_iter().flat_map(|link| found.all(link, |part| matches!(part, Part::Ladder(_))));
        let group = |(entry, _): (&Entry, &Run)| {
            let here = |link: &String| found.get(entry.wanted.part, link).map(|(_, run)| of(run));
            (entry.wanted.name.clone(), found.links.iter().map(here).collect())
        };
        let groups = names.map(group).collect();
        plot::bars(&Bars { title, value, parts: found.links.clone(), groups, stacked: false })
    };
    let throughput =
        by_link("Throughput, one optimization after another", "tokens a second, all ranks", &|run| run.tokens_per_s);
    let waiting =
        by_link("Waiting for other ranks", "milliseconds of a step, on the rank that waits longest", &exposed);
    for (name, drawn) in [
        ("throughput.svg", throughput),
        ("exposed.svg", waiting),
        ("scaling.svg", speedups(found)),
        ("loss-against-time.svg", losses(found)),
    ] {
        picture(out, name, drawn, &mut written)?;
    }
    Ok(written)
}

/// Speed over one device's, by ranks.
fn speedups(found: &Found) -> Result<String, String> {
    let mut lines = Vec::new();
    let mut most = 1;
    for (colour, link) in found.links.iter().enumerate() {
        let sizes = sizes(found, link);
        most = sizes.iter().copied().fold(most, usize::max);
        for (name, dashed, part) in
            [("strong", false, Part::Strong as fn(usize) -> Part), ("weak", true, Part::Weak as fn(usize) -> Part)]
        {
            let point = |ranks: &usize| Some((*ranks as f64, found.against(part(*ranks), part(1), link)?.times));
            let points = sizes.iter().filter_map(point).collect();
            lines.push(Line { name: format!("{link}, {name}"), points, colour: colour + 1, dashed, width: 2.0 });
        }
    }
    let ideal = vec![(1.0, 1.0), (most as f64, most as f64)];
    lines.push(Line { name: "as many times".into(), points: ideal, colour: 0, dashed: true, width: 1.0 });
    let labels = Labels { title: "Scaling with all optimizations", x: "ranks", y: "speed over one device's" };
    plot::lines(&labels, &lines, true)
}

/// On the slowest link, which was named last.
fn losses(found: &Found) -> Result<String, String> {
    let link = found.links.last().map_or("", String::as_str);
    let rows = found.all(link, |part| matches!(part, Part::Ladder(..=LAST)));
    let line = |(number, (entry, run)): (usize, (&Entry, &Run))| Line {
        name: entry.wanted.name.clone(),
        points: run.seconds.iter().copied().zip(run.losses.iter().copied()).collect(),
        colour: number + 1,
        dashed: number % 2 == 1,
        width: 2.0,
    };
    let lines: Vec<Line> = rows.enumerate().map(line).collect();
    let title = format!("Loss against time, on {link}");
    let labels = Labels { title: &title, x: "time since the first step (s)", y: "training loss (nats a token)" };
    plot::lines(&labels, &lines, false)
}
