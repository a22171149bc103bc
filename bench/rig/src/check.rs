//! Checks of arguments.

use std::fmt::Display;
use std::ops::RangeInclusive;

/// Whether the value of the option `name` is one of `range`.
///
/// # Errors
/// It is not, with the range.
pub fn between<T: PartialOrd + Display>(name: &str, value: &T, range: RangeInclusive<T>) -> Result<(), String> {
    if range.contains(value) {
        return Ok(());
    }
    Err(format!("{name} {value} must be from {} to {}", range.start(), range.end()))
}

/// Whether every rank gets as many of the `batch` sequences of a step.
///
/// # Errors
/// It does not.
pub fn even_batch(batch: usize, ranks: usize) -> Result<(), String> {
    if batch > 0 && batch.is_multiple_of(ranks) {
        return Ok(());
    }
    Err(format!("--batch {batch} cannot be divided evenly among {ranks} ranks"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_outside_is_refused_with_the_range() {
        assert!(between("--ranks", &2, 2..=4).is_ok() && between("--ranks", &4, 2..=4).is_ok());
        assert_eq!(between("--ranks", &5, 2..=4).unwrap_err(), "--ranks 5 must be from 2 to 4");
        assert!(between("--seconds", &f64::NAN, 0.5..=60.0).unwrap_err().contains("NaN"));
    }

    #[test]
    fn a_batch_is_shared_evenly_or_refused() {
        assert!(even_batch(12, 3).is_ok());
        assert_eq!(even_batch(10, 3).unwrap_err(), "--batch 10 cannot be divided evenly among 3 ranks");
        assert!(even_batch(0, 3).is_err());
    }
}
