//! What is known of a cell's link: its rate, by its description, and its round-trip time, as the connections saw it.

use std::cmp::Ordering;

use isocomm::{Medium, Rung};
use rig::record::{Link, Measured, Record};
use rig::stats::median;
use rig::why::Connection;

/// What a link is like.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Traits {
    /// Megabits a second.
    pub(crate) rate: Option<f64>,
    /// The smallest round trip that the connections saw, in milliseconds.
    pub(crate) rtt: Option<f64>,
    /// Whether packets are lost at random.
    pub(crate) lossy: bool,
}

impl Traits {
    pub(crate) fn of(runs: &[&Record]) -> Self {
        let measured = || runs.iter().filter_map(|run| Some((*run, run.measured.as_ref()?)));
        let rate = measured().find_map(|(_, measured)| rate(&measured.link.description));
        let connections = measured().flat_map(|(run, measured)| carrying(&run.cell.transport, measured));
        let trips: Vec<f64> =
            connections.filter_map(|connection| connection.min_rtt_ms).filter(|ms| *ms > 0.0).collect();
        let lossy = measured().any(|(_, measured)| is_lossy(&measured.link));
        Traits { rate, rtt: median(&trips), lossy }
    }

    /// `100 Mbit/s, 50 ms round trip`.
    pub(crate) fn words(&self) -> Option<String> {
        let rate = self.rate.map(|rate| match rate {
            rate if rate >= 1000.0 => format!("{} Gbit/s", rate / 1000.0),
            rate => format!("{rate} Mbit/s"),
        });
        let trip = self.rtt.filter(|ms| *ms >= 1.0).map(|ms| format!("{ms:.0} ms round trip"));
        let parts: Vec<String> = rate.into_iter().chain(trip).chain(self.lossy.then(|| "lossy".into())).collect();
        (!parts.is_empty()).then(|| parts.join(", "))
    }

    /// Slow links first, and of those that are as fast those that lose packets or are far; those without a rate are the fastest.
    pub(crate) fn order(&self, other: &Self) -> Ordering {
        let key = |traits: &Self| (traits.rate.unwrap_or(f64::INFINITY), -traits.rtt.unwrap_or(0.0));
        let ((rate, rtt), (other_rate, other_rtt)) = (key(self), key(other));
        let losses = other.lossy.cmp(&self.lossy);
        rate.total_cmp(&other_rate).then(losses).then_with(|| rtt.total_cmp(&other_rtt))
    }
}

/// A connection speaks for its run from this share of the run's bytes on: others only keep ranks in touch.
const CARRIES: f64 = 0.01;

/// The connections of the transport's own protocol that carry the run's bytes; all of that protocol, where none tells of bytes.
pub(crate) fn carrying<'m>(transport: &str, measured: &'m Measured) -> Vec<&'m Connection> {
    let is_udp = transport.parse().is_ok_and(|rung: Rung| rung.transport().medium() == Medium::Udp);
    let protocol = if is_udp { "quic" } else { "tcp" };
    let all = measured.ranks.iter().flat_map(|rank| &rank.network.connections);
    let own: Vec<&Connection> = all.filter(|one| one.protocol == protocol).collect();
    let bytes: f64 = own.iter().map(|one| one.bytes_sent as f64).sum();
    // What is received is sent by the other end, which names its congestion control itself.
    own.into_iter().filter(|one| bytes <= 0.0 || one.bytes_sent as f64 > CARRIES * bytes).collect()
}

/// How many ends an emulated link has: network namespaces, or what its emulator counts.
pub(crate) fn ends(link: &Link) -> Option<usize> {
    let words: Vec<&str> = link.description.split_whitespace().collect();
    let told = words.windows(3).find_map(|three| match three {
        [number, "network", what] if what.starts_with("namespace") => number.parse().ok(),
        _ => None,
    });
    told.or_else(|| link.emulator.iter().map(|pipe| pipe.end + 1).max())
}

fn is_lossy(link: &Link) -> bool {
    let words: Vec<&str> = link.description.split([' ', ',', ';', '(', ')']).collect();
    let says = words.windows(2).any(|pair| {
        pair[0] == "loss" && pair[1].trim_end_matches('%').parse::<f64>().is_ok_and(|percent| percent > 0.0)
    });
    says || link.emulator.iter().any(|pipe| pipe.lost > 0)
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

    #[test]
    fn ends_and_losses_are_read_from_what_describes_a_link() {
        let link = |description: &str| Link { description: description.into(), ..Link::default() };
        let emulated =
            link("wan: 2 network namespaces, emulated; up (100mbit, delay 25 ms, loss 0.5%), down (100mbit)");
        assert_eq!((ends(&emulated), is_lossy(&emulated)), (Some(2), true));
        let none = link("lan: 4 network namespaces, veth with tbf; up (1gbit, loss 0 %)");
        assert_eq!((ends(&none), is_lossy(&none)), (Some(4), false));
        assert_eq!((ends(&link("loopback")), is_lossy(&link("loopback"))), (None, false));
    }

    #[test]
    fn slow_links_come_first_and_lossy_ones_before_others_of_their_rate() {
        let traits = |rate, lossy, rtt| Traits { rate, rtt: Some(rtt), lossy };
        let order = [
            traits(Some(50.0), false, 60.0),
            traits(Some(100.0), true, 50.0),
            traits(Some(100.0), false, 50.0),
            traits(Some(100.0), false, 1.0),
            traits(None, false, 0.1),
        ];
        let mut sorted = order.clone();
        sorted.reverse();
        sorted.sort_by(Traits::order);
        assert_eq!(sorted, order);
    }

    #[test]
    fn connections_that_only_keep_in_touch_do_not_speak_for_a_run() {
        let connection = |protocol: &str, congestion: &str, bytes_sent| Connection {
            protocol: protocol.into(),
            congestion: congestion.into(),
            bytes_sent,
            ..Connection::default()
        };
        let mut measured = Measured::default();
        let connections =
            vec![connection("quic", "cubic", 90_000), connection("quic", "reno", 80), connection("tcp", "bbr", 90_000)];
        let network = rig::why::Network { connections, ..Default::default() };
        measured.ranks.push(rig::record::Rank { network, ..Default::default() });
        let names =
            |transport| carrying(transport, &measured).iter().map(|one| one.congestion.as_str()).collect::<Vec<_>>();
        assert_eq!((names("quic"), names("tcp-raw")), (vec!["cubic"], vec!["bbr"]));
    }
}
