//! What more ranks do: time of a step, speed, and bytes against the formula.

use rig::flag::FlagKind;
use rig::plot::{Labels, Point, Scale, curves};
use rig::record::Axis;
use rig::stats::Interval;

use super::charts::{by_strategy, each_group, titled};
use super::digest::{Case, Digest, Grouped, SINGLE, distinct, is_timing_only};
use super::html::{Page, Table};
use super::text::bytes;

/// Values that are this many times as large as others need an axis by ratios.
const WIDE: f64 = 5.0;

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    let timed = |case: &&Case<'_>| case.step.is_some();
    if digest.cases.iter().filter(timed).count() == 0 {
        return;
    }
    page.topic("scaling", "More ranks: step time, speed, and bytes sent");
    if digest.axes.contains(&Axis::Ranks) {
        let shared = digest.cases.iter().any(|case| case.is_flagged(FlagKind::SharedCores));
        let shared = if shared { " (ranks share cores)" } else { "" };
        if !shared.is_empty() {
            page.warning(
                "if there are more ranks than cores, ranks share cores, so steps take longer with more ranks, independently of the \
                 network. Bytes are not affected.",
            );
        }
        let scaled = |cases: &[&Case<'_>]| {
            distinct(cases.iter().filter(|case| case.cell.strategy != SINGLE).map(|case| case.cell.ranks)).len() > 1
        };
        each_group(page, digest.groups_and_single(&[Axis::Strategy, Axis::Ranks]), scaled, |page, label, cases| {
            chart(
                page,
                &titled(&format!("Step time over ranks{shared}"), label),
                "milliseconds a step",
                cases,
                |case| case.step,
            );
            let title = titled(&format!("Speed over ranks{shared}"), label);
            chart(page, &title, "tokens a second", cases, |case| case.tokens_per_s());
        });
    } else {
        page.text("All cells have the same number of ranks, so this section shows the bytes sent, and no scaling.");
    }
    payload(page, digest);
}

fn chart(page: &mut Page, title: &str, y: &str, cases: &[&Case<'_>], value: impl Fn(&Case<'_>) -> Option<Interval>) {
    let point = |case: &Case<'_>| {
        let Interval { estimate, low, high, .. } = value(case)?;
        Some(Point { x: case.cell.ranks as f64, y: estimate, interval: Some((low, high)) })
    };
    // On an axis by differences one that is much longer would make the others flat: one rank alone, mostly.
    let values = cases.iter().filter_map(|case| value(case)).map(|value| value.estimate).filter(|value| *value > 0.0);
    let (low, high) = values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)));
    let log_y = high > WIDE * low;
    let scale = Scale { whole_x: true, from_zero: !log_y, log_y, ..Scale::default() };
    let picture = curves(&Labels { title, x: "ranks", y }, &by_strategy(cases, point), scale);
    let caption = if log_y {
        "With the interval of each; the axis to the left is logarithmic."
    } else {
        "With the interval of each."
    };
    page.figure(title, picture, caption);
}

/// Bytes of gradients and parameters that ranks send a step. They depend on neither transport nor link, so that one line tells of all.
fn payload(page: &mut Page, digest: &Digest<'_>) {
    let mut table = Table::new(
        &["cells", "ranks", "the rank that sends most", "by formula", "all ranks together", "by formula", "equal"],
        1,
    );
    for Grouped { label, cases, .. } in
        digest.groups(&[Axis::Transport, Axis::Link, Axis::Congestion, Axis::QuicMtu, Axis::Threads])
    {
        let most = |values: Vec<f64>| values.into_iter().max_by(f64::total_cmp);
        let sum = |values: Vec<f64>| Some(values.iter().sum::<f64>());
        // Over `null` nothing arrives, and nothing is counted.
        let counts = |case: &&Case<'_>| case.step.is_some() && !is_timing_only(case.cell);
        let timed: Vec<&Case<'_>> = cases.into_iter().filter(counts).collect();
        let counted = |case: &&Case<'_>| {
            let counted = case.by_rank(|rank| rank.payload_bytes.map(|bytes| bytes as f64), most);
            let expected = case.by_rank(|rank| Some(rank.payload_expected as f64), most);
            let all = case.by_rank(|rank| rank.payload_bytes.map(|bytes| bytes as f64), sum);
            let all_expected = case.by_rank(|rank| Some(rank.payload_expected as f64), sum);
            [counted, expected, all, all_expected].map(|value| value.map_or("–".into(), bytes))
        };
        for figures in distinct(timed.iter().map(counted)) {
            let same: Vec<&&Case<'_>> = timed.iter().filter(|case| counted(case) == figures).collect();
            let Some(first) = same.first() else { continue };
            let off = same.iter().any(|case| case.is_flagged(FlagKind::OffTheFormula));
            let name = if label.is_empty() { first.cell.strategy.clone() } else { label.clone() };
            let name = if same.len() == 1 { name } else { format!("{name} ({} cells)", same.len()) };
            let nothing = figures[0] == "–";
            let [counted, expected, all, all_expected] = figures;
            let judged = if off {
                "NO"
            } else if nothing {
                "not counted"
            } else {
                "yes"
            };
            table.row(vec![name, first.cell.ranks.to_string(), counted, expected, all, all_expected, judged.into()]);
        }
    }
    if !table.rows.is_empty() {
        page.heading("Payload a step, counted and by formula");
        page.table(&table);
    }
}
