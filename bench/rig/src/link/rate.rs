//! Rates of links, written as `tc` writes them.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A rate of at least 8 kbit/s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    bits_per_second: u64,
}

/// A rate, or none, as a command line says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit(pub Option<Rate>);

/// Units, largest first.
const UNITS: [(&str, u64); 4] = [("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000), ("bit", 1)];

const LEAST: u64 = 8_000;
const MOST: u64 = 1_000_000_000_000;

impl Rate {
    /// A rate that has been checked before.
    pub(super) fn of_bits(bits_per_second: u64) -> Self {
        Rate { bits_per_second }
    }

    pub fn bits_per_second(self) -> u64 {
        self.bits_per_second
    }

    /// Bytes that pass in `milliseconds`.
    pub fn bytes_in(self, milliseconds: u64) -> u64 {
        self.bits_per_second.saturating_mul(milliseconds) / 8_000
    }

    /// How long `bytes` take, in milliseconds.
    pub fn ms_of(self, bytes: u64) -> f64 {
        bytes as f64 * 8e3 / self.bits_per_second as f64
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("`{text}` is not a rate; write for example 1gbit, 100mbit or 1.5gbit");
        let lower = text.to_ascii_lowercase();
        let (number, unit) =
            UNITS.iter().find_map(|(name, unit)| Some((lower.strip_suffix(name)?, *unit))).ok_or_else(refused)?;
        let number: f64 = number.trim().parse().map_err(|_| refused())?;
        let bits = number * unit as f64;
        if !(bits >= LEAST as f64 && bits <= MOST as f64) {
            return Err(format!("`{text}` is out of range; a link can have 8kbit to 1000gbit"));
        }
        Ok(Rate { bits_per_second: bits.round() as u64 })
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bits = self.bits_per_second;
        let (name, unit) = UNITS.iter().find(|(_, unit)| bits.is_multiple_of(*unit)).unwrap_or(&UNITS[3]);
        write!(f, "{}{name}", bits / unit)
    }
}

impl Serialize for Rate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl FromStr for RateLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(RateLimit(None));
        }
        text.parse().map(|rate| RateLimit(Some(rate))).map_err(|why| format!("{why}, or none"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_and_written() {
        for (text, bits, written) in [
            ("1gbit", 1_000_000_000, "1gbit"),
            ("1.5gbit", 1_500_000_000, "1500mbit"),
            ("1000mbit", 1_000_000_000, "1gbit"),
            ("250Kbit", 250_000, "250kbit"),
            ("8001bit", 8_001, "8001bit"),
        ] {
            let rate: Rate = text.parse().unwrap();
            assert_eq!((rate.bits_per_second(), rate.to_string().as_str()), (bits, written), "{text}");
        }
        for text in ["", "fast", "gbit", "-1gbit", "0mbit", "nangbit", "infgbit", "1e30gbit", "10", "1gbps"] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        assert_eq!("none".parse(), Ok(RateLimit(None)));
        assert!("slow".parse::<RateLimit>().unwrap_err().contains("none"));
    }

    #[test]
    fn bytes_take_their_time() {
        let rate: Rate = "1gbit".parse().unwrap();
        assert_eq!(rate.bytes_in(2), 250_000);
        assert!((rate.ms_of(12_500_000) - 100.0).abs() < 1e-9);
    }
}
