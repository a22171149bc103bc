//! What a network interface carried.

use std::fs;

use super::figures::Interface;

/// The counters of an interface of this thread's network namespace, headers of the link included; `None` if there is no such interface.
/// A packet that the kernel or the card cuts up later (TSO, GSO) may count as one.
///
/// Not from `/sys`, which shows the namespace in which it was mounted.
pub(super) fn counters(interface: &str) -> Option<Interface> {
    parse(&fs::read_to_string("/proc/thread-self/net/dev").ok()?, interface)
}

pub(super) fn since(now: Interface, before: Interface) -> Interface {
    Interface {
        bytes_sent: now.bytes_sent.saturating_sub(before.bytes_sent),
        bytes_received: now.bytes_received.saturating_sub(before.bytes_received),
        packets_sent: now.packets_sent.saturating_sub(before.packets_sent),
        packets_received: now.packets_received.saturating_sub(before.packets_received),
    }
}

/// Each line is a name and eight counters each of what was received and sent, of which the first two are bytes and packets.
fn parse(table: &str, interface: &str) -> Option<Interface> {
    let line = |line: &str| Some(line.trim_start().strip_prefix(interface)?.strip_prefix(':')?.to_string());
    let counters = table.lines().find_map(line)?;
    let mut counters = counters.split_whitespace().map(|count| count.parse::<u64>().ok());
    let mut count = |skipped: usize| counters.nth(skipped).flatten();
    let (bytes_received, packets_received) = (count(0)?, count(0)?);
    let (bytes_sent, packets_sent) = (count(6)?, count(0)?);
    Some(Interface { bytes_sent, bytes_received, packets_sent, packets_received })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "Inter-|   Receive                                                |  Transmit\n \
         face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n    \
         lo:    1000      10    0    0    0     0          0         0     1000      10    0    0    0     0       0          0\n  \
         eth0: 18446744073709551615 7    1    2    3     4          5         6     99      8    0    0    0     0       0          0\n \
         eth01:1\n";

    #[test]
    fn bytes_and_packets_of_both_directions_are_read() {
        let eth0 = Interface { bytes_sent: 99, bytes_received: u64::MAX, packets_sent: 8, packets_received: 7 };
        assert_eq!(parse(TABLE, "eth0"), Some(eth0));
        for absent in ["eth", "eth01", "eth1", "", "face", "bytes"] {
            assert_eq!(parse(TABLE, absent), None, "{absent:?}");
        }
        for length in 0..TABLE.len() {
            let _ = parse(&TABLE[..length], "eth0");
        }
        assert!(counters("lo").is_some() && counters("no-such-interface").is_none());
    }
}
