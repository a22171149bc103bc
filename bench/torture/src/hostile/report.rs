//! What the attack showed: rows, sentences, and whether anything broke.

use std::time::Duration;

use isocomm::TransportKind;
use rig::stats::median;
use serde::Serialize;

use super::attack::Outcome;
use super::job::JobResult;
use super::kinds::Kind;
use super::options::Settings;
use super::tally::Tally;
use super::watch::{Port, Protocol, ResourcePeak};

/// By how much the peak memory of a rank may rise, in bytes. The job bounds what strangers may cost by the number of handshakes and the
/// length of what it reads from each.
const MEMORY_BOUND: u64 = 64 << 20;

/// One kind of stranger at one job.
#[derive(Clone, Debug, Serialize)]
pub(super) struct KindRow {
    transport: String,
    /// `start` (while the job waited for its ranks) or `training`.
    phase: &'static str,
    kind: &'static str,
    #[serde(flatten)]
    tally: Tally,
    /// Those that found an open port.
    live: u64,
    /// How far the peak memory of a rank rose above the undisturbed run's, in bytes; the most of all ranks.
    memory_rise: Option<u64>,
    /// The most of all ranks, each above the undisturbed run's.
    descriptors_rise: Option<usize>,
    threads_rise: Option<usize>,
    left_out: Option<String>,
}

/// One transport.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Verdict {
    transport: String,
    steps: u64,
    pub(super) live_inputs: u64,
    weights_undisturbed: String,
    weights_attacked: Option<String>,
    pub(super) weights_equal: bool,
    /// Median milliseconds a step of rank 0.
    step_ms_undisturbed: Option<f64>,
    step_ms_attacked: Option<f64>,
    /// Processor seconds of all ranks, for a thousand steps.
    cpu_undisturbed: f64,
    cpu_attacked: Option<f64>,
    /// From the start of the processes to the end of the first step.
    start_ms_undisturbed: f64,
    start_ms_attacked: Option<f64>,
    peak_undisturbed: Vec<ResourcePeak>,
    peak_attacked: Vec<ResourcePeak>,
    attack_s: f64,
    ports: Vec<PortRow>,
    pub(super) broken: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
struct PortRow {
    #[serde(flatten)]
    port: Port,
    seen_for_ms: f64,
    stays_open: bool,
}

/// Rows and verdict of one transport.
pub(super) fn judge(
    settings: &Settings,
    transport: TransportKind,
    quiet: &JobResult,
    attacked: Result<JobResult, String>,
    outcome: Outcome,
    ports: Vec<Port>,
) -> (Vec<KindRow>, Verdict) {
    let rows = rows(transport, quiet, &outcome);
    let live_inputs = rows.iter().map(|row| row.live).sum();
    let mut broken = Vec::new();
    let mut complain = |what: String| broken.push(format!("{transport}: {what}"));
    let ended = attacked.as_ref().ok();
    if let Err(why) = &attacked {
        complain(format!("the attacked job failed: {why}"));
    }
    let weights_attacked = ended.map(|ended| ended.summary.weights_hash.clone());
    let weights_equal = weights_attacked.as_ref() == Some(&quiet.summary.weights_hash);
    if ended.is_some() && !weights_equal {
        complain("the weights differ".into());
    }
    for row in &rows {
        if row.tally.let_in > 0 {
            complain(format!("{} of \"{}\" were accepted as ranks", row.tally.let_in, row.kind));
        }
        // Those who only hold a connection may wait in the kernel's queue, where they cost the job nothing.
        if row.tally.overdue > 0 && row.kind != Kind::Hold.name() {
            complain(format!("{} of \"{}\" were not disconnected in time", row.tally.overdue, row.kind));
        }
        if row.memory_rise.is_some_and(|rise| rise > MEMORY_BOUND) {
            let rise = row.memory_rise.unwrap_or(0) >> 20;
            complain(format!("\"{}\" made the memory of a rank grow by {rise} MiB", row.kind));
        }
    }
    if outcome.outlasted {
        complain("the job ended before the attack; give a shorter --seconds".into());
    }
    if live_inputs < settings.inputs {
        complain(format!(
            "only {live_inputs} of {} strangers found an open port; give a larger --seconds",
            settings.inputs
        ));
    }
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let cpu = |ended: &JobResult| {
        let seconds: f64 = ended.seen.peak.iter().map(|rank| rank.cpu).sum();
        1e3 * seconds / ended.summary.steps.max(1) as f64
    };
    let verdict = Verdict {
        transport: transport.to_string(),
        steps: quiet.summary.steps,
        live_inputs,
        weights_undisturbed: quiet.summary.weights_hash.clone(),
        weights_attacked,
        weights_equal,
        step_ms_undisturbed: median(&quiet.steps),
        step_ms_attacked: median(&outcome.steps),
        cpu_undisturbed: cpu(quiet),
        cpu_attacked: ended.map(cpu),
        start_ms_undisturbed: milliseconds(quiet.start),
        start_ms_attacked: ended.map(|ended| milliseconds(ended.start)),
        peak_undisturbed: quiet.seen.peak.clone(),
        peak_attacked: ended.map(|ended| ended.seen.peak.clone()).unwrap_or_default(),
        attack_s: outcome.lasted.as_secs_f64(),
        ports: ports
            .into_iter()
            .map(|port| PortRow { seen_for_ms: milliseconds(port.until - port.since), stays_open: port.is_open, port })
            .collect(),
        broken,
    };
    (rows, verdict)
}

fn rows(transport: TransportKind, quiet: &JobResult, outcome: &Outcome) -> Vec<KindRow> {
    let row = |phase, kind: Kind, tally: &Tally| KindRow {
        transport: transport.to_string(),
        phase,
        kind: kind.name(),
        live: tally.live(),
        tally: tally.clone(),
        memory_rise: None,
        descriptors_rise: None,
        threads_rise: None,
        left_out: None,
    };
    let early = outcome.early.iter().map(|(kind, tally)| row("start", *kind, tally));
    let running = outcome.running.iter().map(|(kind, tally, used)| {
        let pairs = || used.iter().zip(&quiet.seen.recent);
        KindRow {
            memory_rise: pairs().map(|(now, then)| now.memory.saturating_sub(then.memory)).max(),
            descriptors_rise: pairs().map(|(now, then)| now.descriptors.saturating_sub(then.descriptors)).max(),
            threads_rise: pairs().map(|(now, then)| now.threads.saturating_sub(then.threads)).max(),
            ..row("training", *kind, tally)
        }
    });
    let left_out = (outcome.left_out.iter())
        .map(|(kind, why)| KindRow { left_out: Some(why.clone()), ..row("training", *kind, &Tally::default()) });
    early.chain(running).chain(left_out).collect()
}

const HEADER: [&str; 9] = [
    "transport",
    "while",
    "strangers",
    "on ports",
    "memory MB",
    "descriptors",
    "threads",
    "longest ms",
    "what became of them",
];

/// The rows as text; what came while the job started as one line.
pub(super) fn table(rows: &[KindRow]) -> String {
    let mut early = Tally::default();
    rows.iter().filter(|row| row.phase == "start").for_each(|row| early.merge(&row.tally));
    let mut lines: Vec<[String; 9]> = vec![HEADER.map(String::from)];
    if let Some(first) = rows.first() {
        let mixed =
            KindRow { phase: "start", kind: "all kinds, mixed", live: early.live(), tally: early, ..first.clone() };
        lines.push(line(&KindRow { memory_rise: None, descriptors_rise: None, threads_rise: None, ..mixed }));
    }
    lines.extend(rows.iter().filter(|row| row.phase != "start").map(line));
    let mut widths = [0; 9];
    for line in &lines {
        widths.iter_mut().zip(line).for_each(|(width, cell)| *width = (*width).max(cell.chars().count()));
    }
    let joined = lines.iter().map(|line| {
        let cells: Vec<String> = line
            .iter()
            .zip(widths)
            .enumerate()
            .map(|(at, (cell, width))| match at {
                0..=2 => format!("{cell:<width$}"),
                8 => cell.clone(),
                _ => format!("{cell:>width$}"),
            })
            .collect();
        cells.join("  ")
    });
    joined.collect::<Vec<_>>().join("\n")
}

fn line(row: &KindRow) -> [String; 9] {
    let rise = |value: Option<String>| value.map_or("-".into(), |value| format!("+{value}"));
    let ends = match &row.left_out {
        Some(why) => format!("left out: {why}"),
        None if row.tally.answered > 0 => {
            format!("{} ({} heard something, at most {} B)", row.tally.ends(), row.tally.answered, row.tally.heard_most)
        }
        None => row.tally.ends(),
    };
    [
        row.transport.clone(),
        row.phase.into(),
        row.kind.into(),
        row.live.to_string(),
        rise(row.memory_rise.map(|bytes| format!("{:.1}", bytes as f64 / 1e6))),
        rise(row.descriptors_rise.map(|count| count.to_string())),
        rise(row.threads_rise.map(|count| count.to_string())),
        if row.tally.closed + row.tally.refused > 0 { format!("{:.0}", row.tally.longest_ms) } else { "-".into() },
        ends,
    ]
}

/// The verdict in sentences.
pub(super) fn sentences(verdict: &Verdict) -> String {
    let number = |value: Option<f64>| value.map_or("?".into(), |value| format!("{value:.2}"));
    let peak = |ranks: &[ResourcePeak]| {
        let most = |value: fn(&ResourcePeak) -> u64| ranks.iter().map(value).max().unwrap_or(0);
        format!(
            "{:.0} MB, {} descriptors, {} threads",
            most(|rank| rank.memory) as f64 / 1e6,
            most(|rank| rank.descriptors as u64),
            most(|rank| rank.threads as u64)
        )
    };
    let name = |row: &PortRow| {
        let protocol = if row.port.protocol == Protocol::Tcp { "TCP" } else { "UDP" };
        format!("rank {} {protocol} {} ({:.0} ms)", row.port.rank, row.port.address, row.seen_for_ms)
    };
    let list = |stays: bool| {
        let names: Vec<String> = verdict.ports.iter().filter(|row| row.stays_open == stays).map(name).collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    };
    format!(
        "ports that stay open: {}\n\
         ports that are open at the start only: {}\n\
         from the start to the first step {:.0} ms undisturbed, {} ms attacked; a step {} ms undisturbed, {} ms under attack ({:.1} s); \
         processor time for 1000 steps {:.2} s undisturbed, {} s attacked\n\
         peaks undisturbed: {}; attacked: {}\n\
         weights equal: {}{}",
        list(true),
        list(false),
        verdict.start_ms_undisturbed,
        verdict.start_ms_attacked.map_or("?".into(), |ms| format!("{ms:.0}")),
        number(verdict.step_ms_undisturbed),
        number(verdict.step_ms_attacked),
        verdict.attack_s,
        verdict.cpu_undisturbed,
        number(verdict.cpu_attacked),
        peak(&verdict.peak_undisturbed),
        peak(&verdict.peak_attacked),
        if verdict.weights_equal { "yes" } else { "NO" },
        verdict.broken.iter().map(|what| format!("\nBROKEN: {what}")).collect::<String>()
    )
}
