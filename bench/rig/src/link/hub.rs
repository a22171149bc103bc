//! Virtual cables from every end to one bridge, with the kernel's token bucket filters.

use std::sync::{Mutex, PoisonError};

use serde::Deserialize;

use super::emulator::PipeSpec;
use super::pipe::Pipe;
use super::profile::Profile;
use super::rate::Rate;
use super::tools::Namespace;
use super::{INTERFACE, address};

/// The bridge and the namespace that it lives in.
#[derive(Debug)]
pub(super) struct Hub {
    namespace: Namespace,
    /// Filters, in the order of their pipes.
    filters: Vec<Filter>,
    /// What they had counted when counting began.
    before: Mutex<Vec<Counts>>,
}

/// The filter of one direction of one end.
#[derive(Debug)]
struct Filter {
    end: usize,
    is_up: bool,
}

/// What a filter has counted, as `tc` writes it.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct Counts {
    bytes: u64,
    packets: u64,
    drops: u64,
}

const BRIDGE: &str = "br0";

/// Of an Ethernet frame: the filter counts it, and our rates are those of IP packets.
const HEADER: u64 = 14;

/// A kernel hands large packets to a virtual cable in one piece, of up to 64 KiB. Where queues are so short that a few of them would
/// fill one, pieces are no more than this share of it, so that it drops packets as a switch would.
const PIECES_IN_A_QUEUE: u64 = 8;

impl Hub {
    /// Joins the ends as the profile says.
    ///
    /// # Errors
    /// What `ip` or `tc` say, for the user.
    pub(super) fn new(profile: &Profile, ends: &[Namespace]) -> Result<Self, String> {
        let namespace = Namespace::new()?;
        let mtu = profile.mtu.to_string();
        let bridge = ["type", "bridge", "stp_state", "0", "mcast_snooping", "0"];
        namespace.ip(&[&["link", "add", BRIDGE, "mtu", &mtu][..], &bridge].concat())?;
        quiet(&namespace, BRIDGE)?;
        let mut filters = Vec::new();
        for (number, end) in ends.iter().enumerate() {
            let pipes = profile.pipes(number);
            let port = port(number);
            let cable = ["type", "veth", "peer", "name", &port, "mtu", &mtu, "netns", namespace.name()];
            end.ip(&[&["link", "add", INTERFACE, "mtu", &mtu][..], &cable].concat())?;
            if let Some(packets) = packets_in_a_piece(profile) {
                end.ip(&["link", "set", INTERFACE, "gso_max_segs", &packets.to_string()])?;
            }
            namespace.ip(&["link", "set", &port, "master", BRIDGE])?;
            quiet(&namespace, &port)?;
            quiet(end, INTERFACE)?;
            end.ip(&["address", "add", &format!("{}/24", address(number)), "dev", INTERFACE])?;
            for (place, device, pipe, is_up) in
                [(end, INTERFACE, &pipes.up, true), (&namespace, &port, &pipes.down, false)]
            {
                if filter(place, device, pipe, profile.mtu)? {
                    filters.push(Filter { end: number, is_up });
                }
            }
        }
        let before = Mutex::new(vec![Counts::default(); filters.len()]);
        Ok(Hub { namespace, filters, before })
    }

    #[cfg(test)]
    pub(super) fn name(&self) -> &str {
        self.namespace.name()
    }

    /// What passed each filter since [`reset`](Hub::reset).
    ///
    /// # Errors
    /// What `tc` says.
    pub(super) fn pipes(&self, ends: &[Namespace]) -> Result<Vec<Pipe>, String> {
        let now = self.counts(ends)?;
        let before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let pipe = |((filter, now), before): ((&Filter, &Counts), &Counts)| {
            let packets = now.packets.saturating_sub(before.packets);
            Pipe {
                end: filter.end,
                direction: if filter.is_up { "up" } else { "down" }.into(),
                packets,
                bytes: now.bytes.saturating_sub(before.bytes).saturating_sub(packets * HEADER),
                overflowed: now.drops.saturating_sub(before.drops),
                ..Pipe::default()
            }
        };
        Ok(self.filters.iter().zip(&now).zip(before.iter()).map(pipe).collect())
    }

    /// Counts from here on.
    ///
    /// # Errors
    /// What `tc` says.
    pub(super) fn reset(&self, ends: &[Namespace]) -> Result<(), String> {
        let now = self.counts(ends)?;
        *self.before.lock().unwrap_or_else(PoisonError::into_inner) = now;
        Ok(())
    }

    fn counts(&self, ends: &[Namespace]) -> Result<Vec<Counts>, String> {
        let count = |filter: &Filter| {
            let port = port(filter.end);
            let end = ends.get(filter.end).filter(|_| filter.is_up);
            let (place, device) = end.map_or((&self.namespace, port.as_str()), |end| (end, INTERFACE));
            let said = place.tc(&["-s", "-j", "qdisc", "show", "dev", device, "root"])?;
            let mut counts: Vec<Counts> = serde_json::from_slice(&said)
                .map_err(|error| format!("`tc -s -j qdisc show dev {device}` printed something unexpected: {error}"))?;
            counts.pop().ok_or_else(|| format!("the filter of end {} is gone", filter.end))
        };
        self.filters.iter().map(count).collect()
    }
}

/// How many packets a piece may have at most, where not as many as a kernel likes.
fn packets_in_a_piece(profile: &Profile) -> Option<u64> {
    let packets = profile.shortest_queue()? / PIECES_IN_A_QUEUE / u64::from(profile.mtu);
    (packets * u64::from(profile.mtu) < 64 << 10).then_some(packets.max(1))
}

/// The hub's side of an end's cable.
fn port(end: usize) -> String {
    format!("end{end}")
}

/// Brings a device up that says nothing of its own accord.
fn quiet(namespace: &Namespace, device: &str) -> Result<(), String> {
    namespace.ip(&["link", "set", device, "addrgenmode", "none"])?;
    namespace.ip(&["link", "set", device, "up"])
}

/// Holds what leaves `device` to the pipe's rate, where it has one.
fn filter(namespace: &Namespace, device: &str, pipe: &PipeSpec, mtu: u32) -> Result<bool, String> {
    let (Some(bits), Some(queue)) = (pipe.rate_bits_per_s, pipe.queue_bytes) else { return Ok(false) };
    let of_frames = with_headers(bits, mtu);
    let (rate, burst, limit) = (format!("{of_frames}bit"), burst(pipe, mtu).to_string(), queue.to_string());
    let filter = ["root", "tbf", "rate", &rate, "burst", &burst, "limit", &limit];
    namespace.tc(&[&["qdisc", "add", "dev", device][..], &filter].concat()).map_err(|why| {
        let rate = Rate::of_bits(bits);
        format!("the link cannot be limited to {rate}: {why}. This needs the kernel's tbf (module sch_tbf); links without a rate do not")
    })?;
    Ok(true)
}

/// At this rate of whole frames IP packets of full size pass at `bits`.
fn with_headers(bits: u64, mtu: u32) -> u64 {
    let mtu = u128::from(mtu);
    u64::try_from(u128::from(bits) * (mtu + u128::from(HEADER)) / mtu).unwrap_or(bits)
}

/// Bytes that may leave at once: what passes in 2 ms, as the kernel may look after the filter that late, but no more than the queue, and
/// two packets at least.
pub(super) fn burst(pipe: &PipeSpec, mtu: u32) -> u64 {
    let passes = pipe.rate_bits_per_s.map_or(0, |bits| Rate::of_bits(bits).bytes_in(2)).max(32 << 10);
    passes.min(pipe.queue_bytes.unwrap_or(u64::MAX)).max(2 * (u64::from(mtu) + HEADER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_of_full_size_pass_at_the_rate() {
        assert_eq!(with_headers(1_000_000_000, 1400), 1_010_000_000);
        assert_eq!(with_headers(u64::MAX, 1400), u64::MAX, "out of range, but no panic");
    }

    #[test]
    fn a_burst_is_no_more_than_what_may_wait() {
        let pipe = |bits, queue| PipeSpec { rate_bits_per_s: bits, queue_bytes: queue, ..PipeSpec::default() };
        assert_eq!(burst(&pipe(Some(1_000_000_000), Some(1_250_000)), 1500), 250_000);
        assert_eq!(burst(&pipe(Some(1_000_000_000), Some(64_000)), 1500), 64_000);
        assert_eq!(burst(&pipe(Some(8_000), Some(100_000)), 1500), 32 << 10);
        assert_eq!(burst(&pipe(Some(8_000), Some(3_000)), 1500), 3_028);
    }

    #[test]
    fn short_queues_take_small_pieces() {
        let pieces = |name: &str| packets_in_a_piece(&Profile::find(name).unwrap());
        assert_eq!((pieces("incast"), pieces("lan-1g"), pieces("loopback")), (Some(5), None, None));
    }

    #[test]
    fn what_tc_counts_is_understood() {
        let said = r#"[{"kind":"tbf","handle":"8001:","root":true,"refcnt":3,"options":{"rate":125000000,"burst":250000,"limit":64000},
            "bytes":3028,"packets":2,"drops":1,"overlimits":0,"requeues":0,"backlog":0,"qlen":0}]"#;
        let counts: Vec<Counts> = serde_json::from_str(said).unwrap();
        assert_eq!((counts[0].bytes, counts[0].packets, counts[0].drops), (3028, 2, 1));
    }
}
