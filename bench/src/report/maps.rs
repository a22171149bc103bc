//! Heat maps: strategy by transport, and strategy by link.

use rig::plot::{Heat, Square, heat};
use rig::record::Axis;
use rig::stats::median;

use super::case::NETWORK;
use super::charts::{each_group, titled, varies};
use super::digest::{Case, Digest, distinct};
use super::html::{Page, Table};
use super::text::{figure, interval};

/// Share of a step from which on a link is slow.
const SLOW: f64 = 0.5;

pub(super) fn write(page: &mut Page, digest: &Digest<'_>) {
    if digest.cases.is_empty() {
        return;
    }
    page.topic("maps", "Step time by strategy, transport and link");
    page.small(
        "Each square has the milliseconds of a step, their interval, and the ratio to the best, which also gives the shade. Where transports are \
         compared, the best is that of the row. Where links are compared, or where ranks wait for the network most of the time, it is that of the \
         column, so that the shade compares strategies. Hatched squares have no figures; the table gives the reason, and so does the square when a \
         pointer rests on it.",
    );
    let transports = |cases: &[&Case<'_>]| varies(cases, Axis::Transport) || !varies_anywhere(digest, Axis::Transport);
    each_group(page, digest.groups(&[Axis::Strategy, Axis::Transport]), transports, |page, label, cases| {
        map(page, &titled("Step time by transport", label), cases, Axis::Transport);
    });
    if varies_anywhere(digest, Axis::Link) {
        page.heading("The same by link");
        let links = |cases: &[&Case<'_>]| varies(cases, Axis::Link);
        each_group(page, digest.groups(&[Axis::Strategy, Axis::Link]), links, |page, label, cases| {
            map(page, &titled("Step time by link", label), cases, Axis::Link);
        });
    }
}

fn varies_anywhere(digest: &Digest<'_>, axis: Axis) -> bool {
    digest.axes.contains(&axis)
}

fn map(page: &mut Page, title: &str, cases: &[&Case<'_>], across: Axis) {
    let strategies = distinct(cases.iter().map(|case| case.cell.strategy.clone()));
    let mut columns: Vec<String> = distinct(cases.iter().map(|case| case.cell.value(across)));
    if across == Axis::Transport {
        columns.sort_by_key(|name| super::order::known(&super::order::transports(), name));
    }
    let down = across == Axis::Link || slow(cases);
    let at = |strategy: &str, column: &str| {
        cases.iter().find(|case| case.cell.strategy == strategy && case.cell.value(across) == column)
    };
    let best = |cases: Vec<&&Case<'_>>| {
        cases.into_iter().filter_map(|case| case.step).map(|step| step.estimate).fold(f64::INFINITY, f64::min)
    };
    let across_name = across.to_string();
    let mut table = Table::new(
        &[
            "strategy",
            &across_name,
            "step (ms)",
            "by the row's best",
            "by the column's best",
            "tokens/s",
            "rounds",
            "why no figures",
        ],
        2,
    );
    let mut rows = Vec::new();
    for strategy in &strategies {
        let row_best = best(columns.iter().filter_map(|column| at(strategy, column)).collect());
        let mut squares = Vec::new();
        for column in &columns {
            let Some(case) = at(strategy, column) else {
                squares.push(Square::Empty);
                continue;
            };
            let column_best = best(strategies.iter().filter_map(|strategy| at(strategy, column)).collect());
            squares.push(square(case, if down { column_best } else { row_best }));
            let ratio = |best: f64| case.step.map_or("–".into(), |step| format!("{}×", figure(step.estimate / best)));
            table.row(vec![
                strategy.clone(),
                column.clone(),
                case.step_text(),
                ratio(row_best),
                ratio(column_best),
                case.tokens_per_s().map_or("–".into(), |speed| interval(&speed)),
                case.good.len().to_string(),
                if case.step.is_none() { case.hole().1 } else { String::new() },
            ]);
        }
        rows.push((strategy.clone(), squares));
    }
    let of = if down { "column" } else { "row" };
    let ratio = format!("times the best of the {of}");
    let picture = heat(&Heat { title, ratio: &ratio, columns, rows });
    let caption =
        format!("Step time divided by the best of the {of}: the darker (on a dark page the lighter), the slower.");
    page.figure(title, picture, &caption);
    page.folded_table("The same as a table", &table);
}

/// Whether waiting for the network is most of the step in half of the cells.
fn slow(cases: &[&Case<'_>]) -> bool {
    let shares: Vec<f64> =
        cases.iter().filter_map(|case| case.share_of(&NETWORK)).map(|share| share.estimate).collect();
    median(&shares).is_some_and(|share| share > SLOW)
}

fn square(case: &Case<'_>, best: f64) -> Square {
    match case.step {
        Some(step) => {
            let ratio = step.estimate / best;
            let ends = step.has_ends().then(|| format!("[{}, {}]", figure(step.low), figure(step.high)));
            let lines = [Some(format!("{} ms", figure(step.estimate))), ends, Some(format!("{}×", figure(ratio)))];
            let (strategy, transport, link) = (&case.cell.strategy, &case.cell.transport, &case.cell.link);
            let rounds = super::text::count(case.good.len(), "round");
            Square::Value {
                ratio,
                lines: lines.into_iter().flatten().collect(),
                tip: format!("{strategy}, {transport}, {link}: {} ms a step over {rounds}", interval(&step)),
            }
        }
        None => {
            let (word, why) = case.hole();
            Square::Hole { word, why }
        }
    }
}
