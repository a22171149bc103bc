//! What was measured, beside what was asked for.

use std::fmt;

use rig::text::columns;
use serde::Serialize;

use super::judge::Range;

/// One figure of one profile.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) profile: String,
    /// `rate`, `delay`, …
    pub(super) what: String,
    /// `1 > 0`, by ends.
    pub(super) way: String,
    /// `udp`, `tcp` or `quic` for what was sent, `emulator` for what it has counted itself.
    pub(super) by: String,
    pub(super) unit: Unit,
    pub(super) asked: Option<f64>,
    pub(super) measured: f64,
    /// What is right.
    pub(super) range: Option<Range>,
    pub(super) verdict: Verdict,
    /// Why it is as it is.
    pub(super) note: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    Ok,
    Out,
    /// This machine cannot fill the link, so nothing is known of it.
    NotFilled,
    /// Nothing was asked for.
    Told,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Unit {
    #[serde(rename = "Mbit/s")]
    Mbit,
    #[serde(rename = "ms")]
    Ms,
    #[serde(rename = "%")]
    Percent,
}

impl Row {
    pub(super) fn is_out(&self) -> bool {
        self.verdict == Verdict::Out
    }
}

impl Verdict {
    /// Of what was measured, where `range` is right.
    pub(super) fn of(measured: f64, range: Option<Range>) -> Self {
        match range {
            None => Verdict::Told,
            Some(range) if range.holds(measured) => Verdict::Ok,
            Some(_) => Verdict::Out,
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Ok => "ok",
            Verdict::Out => "OUT",
            Verdict::NotFilled => "not filled",
            Verdict::Told => "-",
        })
    }
}

const HEADER: [&str; 10] = ["profile", "what", "way", "by", "asked", "measured", "unit", "right", "verdict", "note"];

/// The rows as text.
pub(super) fn table(rows: &[Row]) -> String {
    let lines: Vec<[String; 10]> = rows.iter().map(line).collect();
    // All to the left: figures of one column are of different things.
    let mut text = columns(&HEADER, &lines, HEADER.len());
    let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
    let (ok, out, unknown) = (count(Verdict::Ok), count(Verdict::Out), count(Verdict::NotFilled));
    text += &format!("\n{ok} ok, {out} OUT of range");
    if unknown > 0 {
        text += &format!(", {unknown} not filled (faster than this machine can send)");
    }
    text
}

fn line(row: &Row) -> [String; 10] {
    let show = |value: f64| row.unit.show(value);
    let range = row.range.map_or("-".into(), |range| match range.least {
        0.0 if range.most == 0.0 => "none".into(),
        0.0 => format!("up to {}", show(range.most)),
        least => format!("{} to {}", show(least), show(range.most)),
    });
    [
        row.profile.clone(),
        row.what.clone(),
        row.way.clone(),
        row.by.clone(),
        row.asked.map_or("-".into(), show),
        show(row.measured),
        row.unit.name().into(),
        range,
        row.verdict.to_string(),
        row.note.clone(),
    ]
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Unit::Mbit => "Mbit/s",
            Unit::Ms => "ms",
            Unit::Percent => "%",
        }
    }

    fn show(self, value: f64) -> String {
        match self {
            Unit::Mbit => format!("{value:.1}"),
            Unit::Ms => format!("{value:.3}"),
            Unit::Percent => format!("{value:.3}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(measured: f64, range: Option<Range>) -> Row {
        Row {
            profile: "wan".into(),
            what: "rate".into(),
            way: "0 > 1".into(),
            by: "udp".into(),
            unit: Unit::Mbit,
            asked: Some(100.0),
            measured,
            range,
            verdict: Verdict::of(measured, range),
            note: String::new(),
        }
    }

    #[test]
    fn a_table_says_what_is_out() {
        let range = Some(Range::of_rate(100.0));
        let rows = [row(99.0, range), row(90.0, range), row(f64::NAN, range), row(1.0, None)];
        assert_eq!(rows.iter().map(Row::is_out).collect::<Vec<_>>(), [false, true, true, false]);
        let text = table(&rows);
        assert!(
            text.contains("97.0 to 103.0") && text.contains("OUT") && text.ends_with("1 ok, 2 OUT of range"),
            "{text}"
        );
        let none = Row { unit: Unit::Percent, range: Some(Range::of_share(0.0, 9, 1.0)), ..row(0.0, None) };
        assert!(table(&[none]).contains("none"));
    }
}
