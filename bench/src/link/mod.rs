//! Two network namespaces joined by a cable, and jobs whose ranks live in them.
//!
//! The cable is a veth pair, with the kernel's token bucket filter (`tbf`) on both ends where it has a rate. It is made by `ip` and
//! `tc`, needs root, and is taken away when it is dropped; what a killed run has left behind, the next one takes away.

mod enter;
mod place;
mod probe;
mod rate;
mod tools;
mod training;

use std::net::Ipv4Addr;

pub(crate) use enter::{EnterArgs, enter};
pub(crate) use place::{Place, run};
pub(crate) use probe::{Probe, ProbeArgs, run_probe};
pub(crate) use rate::{Rate, RateLimit};
pub(crate) use training::{Figures, RankArgs, Training, run_rank};

use tools::{Namespace, ip, may_make_namespaces, remove_leftovers, tc};

/// What a link is like.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LinkOptions {
    /// `None` for as fast as the kernel copies.
    pub(crate) rate: Option<Rate>,
    /// Largest packet in bytes, with the IP header.
    pub(crate) mtu: u32,
    /// TCP congestion control of everything that goes over the link, by its kernel name; `None` for the kernel's default.
    pub(crate) congestion: Option<String>,
}

/// The interface at each end.
pub(crate) const INTERFACE: &str = "link0";

/// Smallest and largest packets that the kernel and all transports can do with.
const MTU: std::ops::RangeInclusive<u32> = 1280..=65_535;

/// A packet waits no longer than this for a rate-limited link; then it is dropped.
const QUEUE: &str = "50ms";

/// Two namespaces and the cable between them.
#[derive(Debug)]
pub(crate) struct Link {
    ends: [Namespace; 2],
    options: LinkOptions,
}

impl Link {
    /// Takes away what dead runs have left, and makes a link.
    ///
    /// # Errors
    /// What is missing, for the user.
    pub(crate) fn new(options: LinkOptions) -> Result<Self, String> {
        options.check()?;
        may_make_namespaces()?;
        for name in remove_leftovers() {
            eprintln!("removed the network namespace {name}, which a killed run had left");
        }
        let link = Link { ends: [Namespace::new()?, Namespace::new()?], options };
        link.connect()?;
        Ok(link)
    }

    fn connect(&self) -> Result<(), String> {
        let [a, b] = self.names();
        ip(&["-netns", a, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", b])?;
        let mtu = self.options.mtu.to_string();
        for (end, name) in self.names().into_iter().enumerate() {
            let address = Link::address(end).to_string();
            ip(&["-netns", name, "link", "set", "lo", "up"])?;
            ip(&["-netns", name, "link", "set", INTERFACE, "mtu", &mtu, "up"])?;
            ip(&["-netns", name, "address", "add", &format!("{address}/24"), "dev", INTERFACE])?;
            if let Some(congestion) = &self.options.congestion {
                let route = ["route", "replace", SUBNET, "dev", INTERFACE, "src", &address, "congctl", congestion];
                ip(&[&["-netns", name][..], &route].concat())
                    .map_err(|why| format!("--congestion {congestion}: {why}"))?;
            }
            if let Some(rate) = self.options.rate {
                let (bits, burst) = (format!("{}bit", rate.bits_per_second()), self.burst(rate).to_string());
                let filter = ["root", "tbf", "rate", &bits, "burst", &burst, "latency", QUEUE];
                tc(&[&["-netns", name, "qdisc", "add", "dev", INTERFACE][..], &filter].concat()).map_err(|why| {
                    format!("the link cannot be held to {rate}: {why}; it takes the kernel's tbf (module sch_tbf); --rate none goes without")
                })?;
            }
        }
        Ok(())
    }

    /// Bytes that may leave at once: what passes in 2 ms, and a few packets at least.
    fn burst(&self, rate: Rate) -> u64 {
        rate.bytes_in(2).max(32 << 10).max(2 * u64::from(self.options.mtu))
    }

    pub(crate) fn options(&self) -> &LinkOptions {
        &self.options
    }

    /// The namespaces' names.
    fn names(&self) -> [&str; 2] {
        [self.ends[0].name(), self.ends[1].name()]
    }

    /// The address of an end. The same for every link: nobody else is in its namespaces.
    fn address(end: usize) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, if end == 0 { 1 } else { 2 })
    }

    /// One line about the link.
    pub(crate) fn describe(&self) -> String {
        let LinkOptions { rate, mtu, congestion } = &self.options;
        let rate = match rate {
            Some(rate) => format!("{rate} (tbf, burst {} kB, queue {QUEUE})", self.burst(*rate) / 1000),
            None => "no limit".into(),
        };
        let congestion = congestion.as_ref().map_or("the kernel's default", |name| name);
        format!("two network namespaces, veth, {rate}, MTU {mtu}, TCP congestion control {congestion}")
    }
}

const SUBNET: &str = "10.77.0.0/24";

impl LinkOptions {
    /// Whether there can be such a link.
    ///
    /// # Errors
    /// What cannot be, for the user.
    pub(crate) fn check(&self) -> Result<(), String> {
        if !MTU.contains(&self.mtu) {
            return Err(format!("--mtu {} must lie between {} and {}", self.mtu, MTU.start(), MTU.end()));
        }
        if self.congestion.as_ref().is_some_and(|name| name.is_empty() || name.len() > 15) {
            return Err("--congestion: a name has 1 to 15 letters".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn options() -> LinkOptions {
        LinkOptions { rate: Some("1gbit".parse().unwrap()), mtu: 1500, congestion: None }
    }

    #[test]
    fn a_link_is_gone_when_it_is_dropped() {
        let link = match Link::new(options()) {
            Ok(link) => link,
            // Named, and only where it is the reason.
            Err(why) => {
                assert!(may_make_namespaces().is_err() || why.contains("iproute2") || why.contains("tbf"), "{why}");
                eprintln!("skipped: {why}");
                return;
            }
        };
        let paths: Vec<_> = link.names().iter().map(|name| Path::new("/var/run/netns").join(name)).collect();
        assert!(paths.iter().all(|path| path.exists()));
        assert!(link.describe().contains("1gbit"), "{}", link.describe());
        let other = Link::new(LinkOptions { rate: None, mtu: 9000, congestion: None }).unwrap();
        assert_ne!(link.names(), other.names());
        drop(link);
        assert!(paths.iter().all(|path| !path.exists()));
    }

    #[test]
    fn impossible_links_are_refused() {
        let refused = |change: &dyn Fn(&mut LinkOptions)| {
            let mut options = options();
            change(&mut options);
            options.check().unwrap_err()
        };
        assert!(refused(&|o| o.mtu = 500).contains("--mtu 500"));
        assert!(refused(&|o| o.mtu = 70_000).contains("--mtu 70000"));
        assert!(refused(&|o| o.congestion = Some(String::new())).contains("--congestion"));
    }

    #[test]
    fn a_congestion_control_that_is_not_there_leaves_no_namespace() {
        if may_make_namespaces().is_err() {
            eprintln!("skipped: not root");
            return;
        }
        let why = Link::new(LinkOptions { congestion: Some("pigeon".into()), ..options() }).unwrap_err();
        // What `ip` does with a name that the kernel does not know is its own affair; it must not pass in silence.
        assert!(why.contains("pigeon") || why.contains("iproute2"), "{why}");
    }
}
