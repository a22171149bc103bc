//! The table at the end.

use crate::cell::Row;

const COLUMNS: usize = 11;

const HEADER: [&str; COLUMNS] = [
    "strategy",
    "transport",
    "ranks",
    "tokens/s",
    "step ms",
    "exposed ms",
    "share",
    "payload/step",
    "formula",
    "final loss",
    "peak MB",
];

/// The rows as text, with the reason instead of figures where there are none.
pub(crate) fn render(rows: &[Row]) -> String {
    let lines: Vec<[String; COLUMNS]> = rows.iter().map(line).collect();
    let mut widths = HEADER.map(str::len);
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = join(&HEADER.map(String::from), &widths);
    for (row, line) in rows.iter().zip(&lines) {
        text.push('\n');
        text.push_str(&join(line, &widths));
        if !row.is_sound() {
            text.push_str("  ");
            text.push_str(&row.status);
        }
    }
    if rows.iter().any(|row| row.peak_rss_is_shared && row.peak_rss_bytes.is_some()) {
        text.push_str("\n* memory of the one process, divided by its ranks");
    }
    text
}

fn line(row: &Row) -> [String; COLUMNS] {
    let number = |value: Option<f64>, digits: usize| value.map_or("-".into(), |value| format!("{value:.digits$}"));
    let share = row.exposed_ms.zip(row.step_ms).map(|(exposed, step)| format!("{:.1}%", 100.0 * exposed / step));
    let bytes = |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| format!("{:.3} MB", bytes as f64 / 1e6));
    let transport = match &row.node_transport {
        Some(inside) => format!("{} ({inside} inside)", row.transport),
        None => row.transport.clone(),
    };
    let mark = if row.peak_rss_is_shared { "*" } else { "" };
    [
        row.strategy.clone(),
        transport,
        row.ranks.to_string(),
        number(row.tokens_per_s, 0),
        number(row.step_ms, 1),
        number(row.exposed_ms, 2),
        share.unwrap_or_else(|| "-".into()),
        bytes(row.bytes_counted),
        bytes(row.bytes_expected),
        number(row.final_loss, 4),
        row.peak_rss_bytes.map_or("-".into(), |bytes| format!("{:.0}{mark}", bytes as f64 / 1e6)),
    ]
}

/// Two columns of names to the left, figures to the right.
fn join(cells: &[String; COLUMNS], widths: &[usize; COLUMNS]) -> String {
    let columns: Vec<String> = cells
        .iter()
        .zip(widths)
        .enumerate()
        .map(|(index, (cell, width))| if index < 2 { format!("{cell:<width$}") } else { format!("{cell:>width$}") })
        .collect();
    columns.join("  ")
}
