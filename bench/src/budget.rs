//! Time that a command may take.

use std::time::Duration;

/// A time from `90s`, `5m` or a plain number of seconds.
pub(crate) fn budget(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, f64); 4] = [("h", 3600.0), ("m", 60.0), ("s", 1.0), ("", 1.0)];
    let of = |(unit, seconds): (&str, f64)| Some(text.strip_suffix(unit)?.trim().parse::<f64>().ok()? * seconds);
    let seconds = UNITS.into_iter().find_map(of).ok_or_else(|| "write for example 90s or 5m".to_string())?;
    if !(0.0..=86_400.0).contains(&seconds) {
        return Err("0s to 24h are possible".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_has_a_unit_or_is_in_seconds() {
        let seconds = |text: &str| budget(text).map(|budget| budget.as_secs_f64());
        assert_eq!(
            [seconds("90s"), seconds("1.5m"), seconds("1h"), seconds("7")],
            [Ok(90.0), Ok(90.0), Ok(3600.0), Ok(7.0)]
        );
        for wrong in ["", "m", "-1s", "5 days", "nan", "25h"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
