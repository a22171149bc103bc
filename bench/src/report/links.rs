//! What is known of a cell's link: its rate, by its description, and its round-trip time, as the connections saw it.

use std::cmp::Ordering;

use crate::collectives::stats::median;
use crate::record::Record;

/// What a link is like.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Traits {
    /// Megabits a second.
    pub(crate) rate: Option<f64>,
    /// The smallest round trip that the connections saw, in milliseconds.
    pub(crate) rtt: Option<f64>,
    pub(crate) description: String,
}

impl Traits {
    pub(crate) fn of(runs: &[&Record]) -> Self {
        let measured = || runs.iter().filter_map(|run| run.measured.as_ref());
        let description = measured().map(|measured| measured.link.description.clone()).next().unwrap_or_default();
        let connections = measured().flat_map(|measured| &measured.ranks).flat_map(|rank| &rank.network.connections);
        let trips: Vec<f64> =
            connections.filter_map(|connection| connection.min_rtt_ms).filter(|ms| *ms > 0.0).collect();
        Traits { rate: rate(&description), rtt: median(&trips), description }
    }

    /// Fast links first; those without a rate are the fastest.
    pub(crate) fn order(&self, other: &Self) -> Ordering {
        let rate = |traits: &Self| traits.rate.unwrap_or(f64::INFINITY);
        rate(other).total_cmp(&rate(self))
    }
}

/// The first number in a description that has a unit of rate behind it, in Mbit/s.
fn rate(description: &str) -> Option<f64> {
    let words: Vec<&str> = description.split([' ', ',', ';', '(', ')']).filter(|word| !word.is_empty()).collect();
    words.iter().enumerate().find_map(|(index, word)| {
        let end = word.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(word.len());
        let value: f64 = word[..end].parse().ok()?;
        let unit = if end < word.len() { &word[end..] } else { words.get(index + 1).copied().unwrap_or_default() };
        let factor = match unit.trim_end_matches("/s").trim_end_matches("ps") {
            "Gbit" | "gbit" => 1e3,
            "Mbit" | "mbit" => 1.0,
            "kbit" => 1e-3,
            "bit" => 1e-6,
            _ => return None,
        };
        Some(value * factor)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_from_what_describes_a_link() {
        assert_eq!(rate("two network namespaces, veth, 200mbit (tbf, burst 50 kB)"), Some(200.0));
        assert_eq!(rate("1 Gbit/s, 0.5 ms each way"), Some(1000.0));
        assert_eq!(rate("500 kbit/s"), Some(0.5));
        assert_eq!(rate("loopback, no limit, 3 ms"), None);
    }
}
