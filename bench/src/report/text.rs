//! Figures as a reader wants them: three or four digits, thousands apart, never `NaN`.

use rig::stats::Interval;

/// A number with about four digits, whatever its size.
pub(crate) fn figure(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if !value.is_finite() => "?".into(),
        _ if size >= 1e15 => format!("{value:.1e}"),
        _ if size >= 1000.0 => grouped(value),
        _ if size >= 100.0 => format!("{value:.1}"),
        _ if size >= 1.0 => format!("{value:.2}"),
        0.0 => "0".into(),
        _ if size >= 0.0005 => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    }
}

/// A number that may be missing.
pub(crate) fn maybe(value: Option<f64>) -> String {
    value.map_or("–".into(), figure)
}

/// `210.3 [208.1, 213.0]`, or the estimate alone where too little is known for ends.
pub(crate) fn interval(interval: &Interval) -> String {
    let Interval { estimate, low, high, .. } = interval;
    if !interval.has_ends() {
        return figure(*estimate);
    }
    format!("{} [{}, {}]", figure(*estimate), figure(*low), figure(*high))
}

/// A share as per cent.
pub(crate) fn share(value: f64) -> String {
    if value.is_finite() { format!("{:.1} %", 100.0 * value) } else { "?".into() }
}

/// `12.3 % [11.9, 12.7]`.
pub(crate) fn share_interval(interval: &Interval) -> String {
    let Interval { estimate, low, high, .. } = interval;
    if !interval.has_ends() {
        return share(*estimate);
    }
    // Nothing has less than no share, whatever an interval is made of.
    let end = |value: f64| match value.is_finite() {
        true => format!("{:.1}", 100.0 * value.clamp(0.0, 1.0)),
        false => "?".into(),
    };
    format!("{} [{}, {}]", share(*estimate), end(*low), end(*high))
}

/// Bytes in the unit that suits them.
pub(crate) fn bytes(value: f64) -> String {
    let units = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let unit = units.into_iter().find(|(unit, _)| value.abs() >= *unit);
    unit.map_or_else(|| format!("{} B", figure(value)), |(unit, name)| format!("{} {name}", figure(value / unit)))
}

/// A whole number, thousands apart.
pub(crate) fn grouped(value: f64) -> String {
    let plain = format!("{value:.0}");
    let (sign, digits) = plain.strip_prefix('-').map_or(("", plain.as_str()), |digits| ("-", digits));
    let mut text = String::from(sign);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            // Narrow, and no place to break a line.
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// `1 cell`, `2 cells`.
pub(crate) fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// At most `most` of the texts, and how many there are besides.
pub(crate) fn listed(texts: &[String], most: usize) -> String {
    let shown: Vec<&str> = texts.iter().take(most).map(String::as_str).collect();
    let rest = texts.len().saturating_sub(most);
    if rest == 0 { shown.join(", ") } else { format!("{} and {rest} more", shown.join(", ")) }
}

/// The day of a time in seconds since 1970, in universal time: `2026-11-29`.
pub(crate) fn day(unix_s: f64) -> String {
    let mut days = (unix_s / 86_400.0).floor().clamp(0.0, 1e6) as u32;
    let mut year = 1970;
    let leap = |year: u32| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while days >= 365 + u32::from(leap(year)) {
        days -= 365 + u32::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u32::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while month < 11 && days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    format!("{year}-{:02}-{:02}", month + 1, days + 1)
}

/// `a, b and c`; nothing of none.
pub(crate) fn all_of(texts: &[String]) -> Option<String> {
    let (last, others) = texts.split_last()?;
    Some(if others.is_empty() { last.clone() } else { format!("{} and {last}", others.join(", ")) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_never_nonsense() {
        let values = [0.0, 0.000_12, 0.0123, 1.234, 21.345, 210.34, 12_345.6, -1_234_567.0, f64::NAN, f64::INFINITY];
        let texts =
            ["0", "1.2e-4", "0.012", "1.23", "21.34", "210.3", "12\u{202f}346", "-1\u{202f}234\u{202f}567", "?", "?"];
        assert_eq!(values.map(figure), texts.map(String::from));
        assert_eq!(bytes(1_500_000.0), "1.50 MB");
        assert_eq!(bytes(12.0), "12.00 B");
        assert_eq!(share(0.1234), "12.3 %");
        let wide = Interval { estimate: 0.02, low: -0.01, high: 0.05, level: 0.95 };
        assert_eq!(share_interval(&wide), "2.0 % [0.0, 5.0]");
        assert_eq!(
            (share_interval(&wide.without_ends()), super::interval(&wide.without_ends())),
            ("2.0 %".into(), "0.020".into())
        );
        assert_eq!(listed(&["a".into(), "b".into(), "c".into()], 2), "a, b and 1 more");
        let days = [0.0, 951_782_400.0, 1_709_251_199.0, 1_798_761_600.0, f64::NAN].map(day);
        assert_eq!(days, ["1970-01-01", "2000-02-29", "2024-02-29", "2027-01-01", "1970-01-01"]);
        let names = ["a".to_string(), "b".into(), "c".into()];
        let lists = [0, 1, 2, 3].map(|count| all_of(&names[..count]));
        assert_eq!(lists, [None, Some("a".into()), Some("a and b".into()), Some("a, b and c".into())]);
        assert_eq!((count(1, "cell"), count(2, "cell")), ("1 cell".into(), "2 cells".into()));
    }
}
