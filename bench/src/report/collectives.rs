//! Collectives alone, where `bench collectives` left its rows in the same folder: time and bus bandwidth over size.

use std::fs;
use std::path::Path;

use rig::plot::{Curve, Labels, Point, Scale, curves};
use serde_json::Value;

use super::digest::distinct;
use super::html::{Page, Table};
use super::order::{self, known};
use super::text::{bytes, figure};

/// Its rows.
const FILE: &str = "collectives.jsonl";

/// What one row says of one place. Rows of other versions may lack any of it.
struct Row {
    transport: String,
    /// Operation, type and ranks: what belongs on one chart.
    what: String,
    size: f64,
    time_us: f64,
    interval: Option<(f64, f64)>,
    busbw: Option<f64>,
}

pub(super) fn write(page: &mut Page, folder: &Path) {
    let Ok(text) = fs::read_to_string(folder.join(FILE)) else { return };
    let rows: Vec<Row> = text.lines().filter_map(|line| row(&serde_json::from_str(line).ok()?)).collect();
    page.topic("collectives", "Collectives alone");
    if rows.is_empty() {
        page.text(&format!("No row of {FILE} has a transport, a size and a time."));
        return;
    }
    let whats = distinct(rows.iter().map(|row| row.what.clone()));
    for (index, what) in whats.iter().enumerate() {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.what == *what).collect();
        if index == 0 {
            charts(page, what, &rows);
        } else {
            page.folded(what, |page| charts(page, what, &rows));
        }
    }
}

fn row(value: &Value) -> Option<Row> {
    let text = |name: &str| value.get(name).and_then(Value::as_str);
    let figures = ["in_place", "out_of_place"].into_iter().find_map(|place| {
        let figures = value.get(place)?;
        figures.get("time_us").and_then(Value::as_f64).filter(|time| *time > 0.0)?;
        Some(figures)
    });
    let figures = figures.unwrap_or(value);
    let number = |name: &str| figures.get(name).and_then(Value::as_f64).filter(|number| number.is_finite());
    let parts = [text("operation"), text("type"), text("redop")];
    let ranks = value.get("ranks").and_then(Value::as_u64).map(|ranks| format!("{ranks} ranks"));
    let what: Vec<String> = parts.into_iter().flatten().map(String::from).chain(ranks).collect();
    Some(Row {
        transport: text("transport")?.to_string(),
        what: what.join(", "),
        size: value.get("size").and_then(Value::as_f64)?,
        time_us: number("time_us").filter(|time| *time > 0.0)?,
        interval: number("min_us").zip(number("max_us")),
        busbw: number("busbw"),
    })
}

fn charts(page: &mut Page, what: &str, rows: &[&Row]) {
    let mut transports = distinct(rows.iter().map(|row| row.transport.as_str()));
    transports.sort_by_key(|name| known(&order::transports(), name));
    let lines = |point: &dyn Fn(&Row) -> Option<Point>| -> Vec<Curve> {
        let line = |(number, transport): (usize, &&str)| {
            let mine = rows.iter().filter(|row| row.transport == **transport);
            let mut points: Vec<Point> = mine.filter_map(|row| point(row)).collect();
            points.sort_by(|a, b| a.x.total_cmp(&b.x));
            let (colour, dashed, mark) = (number % 8, number % 2 == 1, Some(number % 6));
            Curve { name: transport.to_string(), points, colour, dashed, width: 2.0, mark }
        };
        transports.iter().enumerate().map(line).collect()
    };
    let time = lines(&|row| Some(Point { x: row.size, y: row.time_us, interval: row.interval }));
    let title = format!("Time over size: {what}");
    let labels = Labels { title: &title, x: "bytes", y: "microseconds" };
    let both = Scale { log_x: true, log_y: true, ..Scale::default() };
    page.figure(&title, curves(&labels, &time, both), "Median over rounds; from the fastest to the slowest round.");
    let speed = lines(&|row| Some(Point { x: row.size, y: row.busbw?, interval: None }));
    let title = format!("Bus bandwidth over size: {what}");
    let labels = Labels { title: &title, x: "bytes", y: "GB/s" };
    let scale = Scale { log_x: true, from_zero: true, ..Scale::default() };
    page.figure(&title, curves(&labels, &speed, scale), "Size by time, times the factor of the operation.");
    let mut table = Table::new(&["transport", "size", "time (µs)", "least", "most", "busbw (GB/s)"], 1);
    for row in rows {
        let (least, most) =
            row.interval.map_or(("–".into(), "–".into()), |(low, high)| (figure(low), figure(high)));
        let busbw = super::text::maybe(row.busbw);
        table.row(vec![row.transport.clone(), bytes(row.size), figure(row.time_us), least, most, busbw]);
    }
    page.folded_table("The same as a table", &table);
}
