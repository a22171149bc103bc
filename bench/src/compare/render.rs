//! The comparison as text: first what may explain differences, then figures, then what it comes to.

use rig::stats::{LEVEL, Metric, Verdict};
use rig::text::columns;

use super::changes::Difference;
use super::findings::{Figure, Findings, Outcome, Row, Sweep, Table};

/// Names that are listed before the rest is only counted.
const MOST_NAMES: usize = 6;
/// Changes of one kind that are listed.
const MOST_CHANGES: usize = 12;

pub(super) fn text(findings: &Findings) -> String {
    let Findings { a, b, .. } = findings;
    let mut parts = vec![format!("A: {}\nB: {}", sweep(a), sweep(b))];
    parts.extend(findings.warnings.iter().map(|warning| format!("warning: {warning}")));
    parts.push(changes(&findings.changes));
    for (name, cells) in [("A", &findings.only_a), ("B", &findings.only_b)] {
        if !cells.is_empty() {
            parts.push(format!("Only in {name}: {}", listed(cells)));
        }
    }
    parts.extend(findings.tables.iter().map(|table| self::table(table, findings.threshold)));
    parts.push(end(findings));
    parts.join("\n\n")
}

fn sweep(sweep: &Sweep) -> String {
    let left_out =
        if sweep.left_out > 0 { format!(", {} of which are not counted", sweep.left_out) } else { String::new() };
    format!("{} ({}: {} cells, {} runs{left_out})", sweep.file, sweep.plans.join(", "), sweep.cells, sweep.runs)
}

fn changes(changes: &[Difference]) -> String {
    if changes.is_empty() {
        return "Apart from the figures nothing changed: machine, code, settings, payload and weights are the same."
            .into();
    }
    let line = |change: &Difference| {
        let Difference { what, before, after, cells } = change;
        let values = match (before.as_str(), after.as_str()) {
            ("", "") => "differ".into(),
            (before, after) => format!("{} → {}", or_nothing(before), or_nothing(after)),
        };
        let cells = if cells.is_empty() { String::new() } else { format!(" ({})", listed(cells)) };
        format!("  {what}: {values}{cells}")
    };
    let mut lines = vec!["Apart from the figures, these changed from A to B:".to_string()];
    let mut left_out = 0;
    for (index, change) in changes.iter().enumerate() {
        let earlier = changes[..index].iter().filter(|other| other.what == change.what).count();
        if earlier < MOST_CHANGES { lines.push(line(change)) } else { left_out += 1 }
    }
    if left_out > 0 {
        lines.push(format!("  and {left_out} more of these kinds; --json has them all"));
    }
    lines.join("\n")
}

fn or_nothing(value: &str) -> &str {
    if value.is_empty() { "unknown" } else { value }
}

fn listed(names: &[String]) -> String {
    let shown = names.iter().take(MOST_NAMES).map(String::as_str).collect::<Vec<_>>().join("; ");
    match names.len().saturating_sub(MOST_NAMES) {
        0 => shown,
        more => format!("{shown}; and {more} more"),
    }
}

fn table(table: &Table, threshold: f64) -> String {
    let Table { metric, rows } = table;
    let lines: Vec<[String; 6]> = rows.iter().map(|row| line(*metric, row, threshold)).collect();
    let title = metric.title();
    let heading = format!(
        "{}{}, {} (with {:.0} % intervals over runs)",
        title[..1].to_uppercase(),
        &title[1..],
        metric.unit(),
        LEVEL * 100.0
    );
    // The verdict stands last and to the left.
    let widest = lines.iter().map(|line| line[5].chars().count()).max().unwrap_or(0);
    let padded: Vec<[String; 6]> = lines
        .into_iter()
        .map(|[cell, runs, a, b, ratio, verdict]| [cell, runs, a, b, ratio, format!("{verdict:<widest$}")])
        .collect();
    let header = format!("{:<widest$}", "verdict");
    let mut text = format!("{heading}\n{}", columns(&["cell", "runs", "A", "B", "B / A", header.as_str()], &padded, 1));
    for row in rows {
        for note in &row.notes {
            text.push_str(&format!("\n  {}: {note}", row.label));
        }
    }
    text
}

fn line(metric: Metric, row: &Row, threshold: f64) -> [String; 6] {
    let size = row.a.as_ref().or(row.b.as_ref()).map_or(0.0, |figure| figure.interval.estimate);
    let digits = metric.digits(size);
    let figure = |figure: &Option<Figure>| match figure {
        Some(Figure { interval, .. }) if interval.width() == 0.0 => format!("{:.digits$}", interval.estimate),
        Some(Figure { interval, .. }) => interval.text(digits),
        None => "-".into(),
    };
    let ratio = row.comparison.and_then(|comparison| comparison.ratio);
    let ratio =
        ratio.map_or(
            "-".into(),
            |ratio| if ratio.width() == 0.0 { format!("{:.3}", ratio.estimate) } else { ratio.text(3) },
        );
    let count = |figure: &Option<Figure>| figure.as_ref().map_or(0, |figure| figure.runs);
    let runs = match (count(&row.a), count(&row.b)) {
        (a, b) if a == b => a.to_string(),
        (a, b) => format!("{a}, {b}"),
    };
    [row.label.clone(), runs, figure(&row.a), figure(&row.b), ratio, verdict(metric, row, digits, threshold)]
}

fn verdict(metric: Metric, row: &Row, digits: usize, threshold: f64) -> String {
    let Some(comparison) = row.comparison else {
        return match row.outcome {
            Outcome::Gone => "REGRESSION: no figures any more".into(),
            _ => "no figures to compare".into(),
        };
    };
    let words = comparison.words(metric.comparatives(), metric.unit(), digits);
    match row.outcome {
        Outcome::Regression => format!("REGRESSION: {words}"),
        Outcome::Improvement => format!("improvement: {words}"),
        Outcome::Small => format!("{words}, within {}", percent(threshold)),
        Outcome::Same
            if comparison.verdict == Verdict::NoSignificantDifference && comparison.difference.width() > 0.0 =>
        {
            format!("the same within {}", percent(threshold))
        }
        _ => words,
    }
}

fn percent(share: f64) -> String {
    format!("{} %", (share * 1e4).round() / 100.0)
}

fn end(findings: &Findings) -> String {
    let several = findings.tables.len() > 1;
    let rows = || findings.tables.iter().flat_map(|table| table.rows.iter().map(|row| (table.metric, row)));
    let name = |(metric, row): (Metric, &Row)| {
        if several { format!("{metric} of {}", row.label) } else { row.label.clone() }
    };
    let named = |outcomes: &[Outcome]| -> Vec<String> {
        rows().filter(|(_, row)| outcomes.contains(&row.outcome)).map(name).collect()
    };
    let line = |what: &str, cells: Vec<String>| {
        let names = if cells.is_empty() { String::new() } else { format!(": {}", listed(&cells)) };
        format!("{what}: {}{names}", cells.len())
    };
    let mut lines = vec![
        line("regressions", named(&[Outcome::Regression, Outcome::Gone])),
        line("improvements", named(&[Outcome::Improvement])),
        line("undecided", named(&[Outcome::Open])),
    ];
    let compared = rows().filter(|(_, row)| row.comparison.is_some()).count();
    let by_chance = (1.0 - LEVEL) * compared as f64;
    if by_chance >= 1.0 {
        lines.push(format!(
            "By chance alone about {by_chance:.0} of {compared} comparisons differ significantly; a change counts here only if it also \
             exceeds {}.",
            percent(findings.threshold)
        ));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use rig::flag::{Flag, FlagKind};
    use rig::record::{Record, Status};
    use rig::results::Results;
    use rig::stats::made_up::{cell, record};

    fn results(records: Vec<Record>, warnings: Vec<String>) -> Results {
        Results { file: PathBuf::from("x/results.jsonl"), records, warnings, whole_bytes: 0 }
    }

    #[test]
    fn what_may_explain_comes_first_and_then_figures() {
        let steps = |ms: f64| (0..20).map(|step| ms + f64::from(step * 7 % 11) / 5.0).collect::<Vec<_>>();
        let made = |name: &str, round: u32, ms: f64| record(cell(name), round, &steps(ms + f64::from(round) / 10.0));
        let mut a: Vec<Record> =
            (1..=3).flat_map(|round| ["ddp", "ring"].map(|name| made(name, round, 40.0))).collect();
        let mut b = a.clone();
        a.push(made("ps", 1, 40.0));
        for run in b.iter_mut().filter(|run| run.cell.strategy == "ring") {
            *run = Record { status: Status::Failed("it broke".into()), measured: None, ..run.clone() };
        }
        for run in b.iter_mut().filter_map(|run| run.measured.as_mut()) {
            run.weights_hash = "def".into();
            run.ranks[0].payload_bytes = Some(7);
        }
        b[0].flags.push(Flag { kind: FlagKind::MachineBusy, what: "others took 40 %".into() });
        let (a, b) = (results(a, Vec::new()), results(b, vec!["the last line is cut off".into()]));
        let findings = Findings::of(&a, &b, &[Metric::Step, Metric::Bytes], 0.05).unwrap();
        let text = text(&findings);
        println!("{text}");
        let places: Vec<usize> = [
            "A: x/results.jsonl (made-up: 3 cells, 7 runs)\nB: x/results.jsonl (made-up: 2 cells, 6 runs, 3 of",
            "warning: the last line is cut off",
            "payload bytes a step, by rank: 1000, 999 → 7, 999 (ddp tcp loopback)",
            "weights after training: differ (ddp tcp loopback)",
            "Only in A: ps tcp loopback",
            "Step time, ms (with 95 % intervals over runs)\ncell               runs",
            "the same within 5 %",
            "  -  REGRESSION: no figures any more",
            "  ddp tcp loopback: B: 1 run on a busy machine: others took 40 %",
            "  ring tcp loopback: B: 3 runs failed: it broke",
            "less by 1 bytes",
            "regressions: 2: step of ring tcp loopback; bytes of ring tcp loopback",
        ]
        .map(|part| text.find(part).unwrap_or_else(|| panic!("no {part:?} in:\n{text}")))
        .to_vec();
        assert!(places.is_sorted(), "{places:?} in:\n{text}");
    }

    #[test]
    fn shares_and_long_lists() {
        assert_eq!((percent(0.05), percent(0.125)), ("5 %".into(), "12.5 %".into()));
        let names: Vec<String> = (0..8).map(|number| number.to_string()).collect();
        assert_eq!(listed(&names), "0; 1; 2; 3; 4; 5; and 2 more");
    }
}
