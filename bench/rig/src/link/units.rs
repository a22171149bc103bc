//! Sizes, times and shares as files of profiles write them; rates are in `rate`.

use std::time::Duration;

/// Units of bytes.
const SIZES: [(&str, f64); 6] =
    [("KiB", 1024.0), ("MiB", 1024.0 * 1024.0), ("kB", 1e3), ("MB", 1e6), ("GB", 1e9), ("B", 1.0)];

/// Units of time.
const TIMES: [(&str, f64); 4] = [("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)];

const MOST_BYTES: f64 = 4e9;
const MOST_SECONDS: f64 = 60.0;

/// Bytes, from `625kB`.
///
/// # Errors
/// What cannot be, for the user.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    let bytes = number(text, &SIZES)
        .ok_or_else(|| format!("`{text}` is not a size; write for example 1500B, 625kB or 64KiB"))?;
    if !(0.0..=MOST_BYTES).contains(&bytes) {
        return Err(format!("`{text}` is out of range; 0B to 4GB are possible"));
    }
    Ok(bytes.round() as u64)
}

/// A time, from `25ms`.
///
/// # Errors
/// What cannot be, for the user.
pub(super) fn time(text: &str) -> Result<Duration, String> {
    let seconds =
        number(text, &TIMES).ok_or_else(|| format!("`{text}` is not a time; write for example 250us, 25ms or 1.5s"))?;
    if !(0.0..=MOST_SECONDS).contains(&seconds) {
        return Err(format!("`{text}` is out of range; 0ms to 60s are possible"));
    }
    Ok(Duration::from_nanos((seconds * 1e9).round() as u64))
}

/// A share between 0 and 1, from `0.5%`.
///
/// # Errors
/// What cannot be, for the user.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let percent =
        number(text, &[("%", 1.0)]).ok_or_else(|| format!("`{text}` is not a percentage; write for example 0.5%"))?;
    if !(0.0..=100.0).contains(&percent) {
        return Err(format!("`{text}` is out of range; 0% to 100% are possible"));
    }
    Ok(percent / 100.0)
}

/// Whether the text ends like a time.
pub(super) fn is_time(text: &str) -> bool {
    text.trim().ends_with('s')
}

fn number(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let text = text.trim();
    let (number, unit) = units.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))?;
    let number: f64 = number.trim_end().parse().ok()?;
    number.is_finite().then_some(number * unit)
}

/// `25 ms`.
pub(super) fn show_time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        s if s >= 1.0 => format!("{s} s"),
        s if s >= 1e-3 => format!("{} ms", (s * 1e6).round() / 1e3),
        s => format!("{:.0} us", s * 1e6),
    }
}

/// `625 kB`.
pub(super) fn show_bytes(bytes: u64) -> String {
    match bytes {
        0..10_000 => format!("{bytes} B"),
        10_000..10_000_000 => format!("{} kB", bytes as f64 / 1e3),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

/// `0.5%`.
pub(super) fn show_share(share: f64) -> String {
    let percent = (share * 1e8).round() / 1e6;
    format!("{percent}%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_files_say_is_read() {
        let sizes = [("625kB", 625_000), ("64KiB", 65_536), ("1.5 MB", 1_500_000), ("0B", 0), ("9000B", 9000)];
        for (text, expected) in sizes {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for (text, us) in [("25ms", 25_000), ("0.5s", 500_000), ("250us", 250), ("250µs", 250), ("0ms", 0)] {
            assert_eq!(time(text), Ok(Duration::from_micros(us)), "{text}");
        }
        assert_eq!((share("0.5%"), share("100 %"), share("0%")), (Ok(0.005), Ok(1.0), Ok(0.0)));
        assert!(is_time("50ms") && !is_time("50kB"));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for text in ["", "kB", "-1kB", "nankB", "infB", "12", "12 apples", "5GB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
        for text in ["", "ms", "-1ms", "61s", "12", "1h"] {
            assert!(time(text).is_err(), "{text}");
        }
        for text in ["", "%", "0.5", "101%", "-1%", "NaN%"] {
            assert!(share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_shown_is_short() {
        assert_eq!((show_bytes(1500).as_str(), show_bytes(625_000).as_str()), ("1500 B", "625 kB"));
        assert_eq!(show_time(Duration::from_millis(25)), "25 ms");
        assert_eq!(show_share(0.005), "0.5%");
    }
}
