//! Times as users write them.

use std::time::Duration;

/// A time from `500ms`, `30s`, `5m`, `2h`, or a number of seconds.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time; write for example 500ms, 30s, 5m or 2h");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: f64 = digits.parse().map_err(|_| wrong())?;
    let seconds = match text.get(digits.len()..).unwrap_or_default() {
        "ms" => number / 1000.0,
        "" | "s" => number,
        "m" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(wrong()),
    };
    let time = Duration::try_from_secs_f64(seconds).map_err(|_| wrong())?;
    if time.is_zero() || time > Duration::from_secs(30 * 24 * 3600) { Err(wrong()) } else { Ok(time) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        assert_eq!(parse_time("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(parse_time("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_time("2"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_time("1h"), Ok(Duration::from_secs(3600)));
        for wrong in ["", "s", "0s", "-1s", "5 s", "1d", "nan", "1e300h"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
