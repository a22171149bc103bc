//! Network interfaces by name, for machines that have several: which of them a job's listeners take.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::addresses::{check_address, check_own_address};
use crate::error::{Error, Result};
use crate::sys;

/// Where the listeners of a rank are bound, if not at the address that routes to rank 0.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum Bind {
    /// An address of this machine, exactly.
    Address(IpAddr),
    /// An address of one of these interfaces.
    Interfaces(InterfaceFilter),
}

/// Names of interfaces, written as NCCL has them in `NCCL_SOCKET_IFNAME`: prefixes, separated by commas (`eth,ib`); with `=` before
/// them whole names (`=eth0,eth1`); with `^` before them those that are not meant (`^docker,lo`, `^=eth1`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceFilter {
    excluded: bool,
    exact: bool,
    names: Vec<String>,
}

/// An address of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The name of its interface.
    pub interface: String,
    /// The address, with the number of the interface where it is link-local, and port 0.
    pub address: SocketAddr,
}

impl Bind {
    /// Whether this machine has what is asked for.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an address that is not this machine's or that nobody can dial, and for interfaces of which there are
    /// none with an address.
    pub fn check(&self) -> Result<()> {
        match self {
            Bind::Address(ip) => check_own_address(*ip),
            Bind::Interfaces(filter) => filter.choose(&addresses()?, None).map(drop),
        }
    }
}

impl FromStr for Bind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if let Ok(ip) = text.parse() {
            return Ok(Bind::Address(ip));
        }
        // Names of interfaces have letters, and no colons.
        if text.contains(':') || text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
            return Err(Error::invalid(format!("'{text}' is neither an IP address nor names of interfaces")));
        }
        text.parse().map(Bind::Interfaces)
    }
}

impl fmt::Display for Bind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bind::Address(ip) => ip.fmt(f),
            Bind::Interfaces(filter) => filter.fmt(f),
        }
    }
}

impl From<Bind> for String {
    fn from(bind: Bind) -> String {
        bind.to_string()
    }
}

impl TryFrom<String> for Bind {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<IpAddr> for Bind {
    fn from(ip: IpAddr) -> Self {
        Bind::Address(ip)
    }
}

impl From<Ipv4Addr> for Bind {
    fn from(ip: Ipv4Addr) -> Self {
        Bind::Address(ip.into())
    }
}

impl From<Ipv6Addr> for Bind {
    fn from(ip: Ipv6Addr) -> Self {
        Bind::Address(ip.into())
    }
}

impl FromStr for InterfaceFilter {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (excluded, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        let is_name = |name: &str| {
            let is_odd = |c: char| c.is_whitespace() || c.is_control() || ['/', '^', '=', ':'].contains(&c);
            !name.is_empty() && name.len() < 16 && !name.contains(is_odd)
        };
        let names: Vec<String> = rest.split(',').map(String::from).collect();
        match names.iter().find(|name| !is_name(name)) {
            None => Ok(InterfaceFilter { excluded, exact, names }),
            Some(name) => Err(Error::invalid(format!(
                "'{text}' does not name interfaces: '{name}' is not the name of one; write for example eth0, =eth0, eth,ib or ^docker,lo"
            ))),
        }
    }
}

impl fmt::Display for InterfaceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (not, whole) = (if self.excluded { "^" } else { "" }, if self.exact { "=" } else { "" });
        write!(f, "{not}{whole}{}", self.names.join(","))
    }
}

impl InterfaceFilter {
    /// Whether the interface of that name is meant.
    pub fn is_meant(&self, interface: &str) -> bool {
        self.place(interface).is_some()
    }

    /// Where in the order of the names an interface comes that is meant.
    fn place(&self, interface: &str) -> Option<usize> {
        let is_named = |name: &String| if self.exact { name == interface } else { interface.starts_with(name) };
        match (self.names.iter().position(is_named), self.excluded) {
            (place, false) => place,
            (None, true) => Some(0),
            (Some(_), true) => None,
        }
    }

    /// Those of `there` that are meant, the best first: of the names in their order, before loopback what is not, before link-local
    /// addresses what is not.
    fn meant<'a>(&self, there: &'a [InterfaceAddress]) -> Vec<&'a InterfaceAddress> {
        let mut meant: Vec<(usize, &InterfaceAddress)> =
            there.iter().filter_map(|one| Some((self.place(&one.interface)?, one))).collect();
        let is_link_local = |ip: IpAddr| match ip {
            IpAddr::V4(v4) => v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        meant.sort_by_key(|(place, one)| {
            let ip = one.address.ip();
            (self.excluded && ip.is_loopback(), is_link_local(ip), *place)
        });
        meant.into_iter().map(|(_, one)| one).collect()
    }

    /// The addresses of `there` on which others are listened for: all that are meant, without those of loopback.
    pub(crate) fn reachable(&self, there: &[InterfaceAddress]) -> Vec<SocketAddr> {
        self.meant(there).iter().map(|one| one.address).filter(|address| !address.ip().is_loopback()).collect()
    }

    /// Of `there` the address to take: `routed`, by which rank 0 is reached, if its interface is meant; else the best one of the same
    /// family; else the best one.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] where none is meant, with what there is.
    pub(crate) fn choose(&self, there: &[InterfaceAddress], routed: Option<SocketAddr>) -> Result<SocketAddr> {
        let meant = self.meant(there);
        let routed = routed.map(|address| address.ip().to_canonical());
        let is_routed = |one: &&&InterfaceAddress| Some(one.address.ip()) == routed;
        let is_of_family = |one: &&&InterfaceAddress| routed.is_none_or(|ip| ip.is_ipv4() == one.address.is_ipv4());
        let found = meant.iter().find(is_routed).or_else(|| meant.iter().find(is_of_family)).or(meant.first());
        let Some(one) = found else {
            let mut names: Vec<&str> = there.iter().map(|one| one.interface.as_str()).collect();
            names.sort_unstable();
            names.dedup();
            return Err(Error::invalid(format!(
                "no interface of this machine that has an address matches {self}: there are {}; see --bind and COMM_IFNAME",
                if names.is_empty() { "none".into() } else { names.join(", ") }
            )));
        };
        check_address(one.address.ip())?;
        Ok(one.address)
    }
}

/// The addresses of this machine's interfaces that are up, in the kernel's order.
///
/// # Errors
/// [`Error::Io`] where the system does not tell.
pub fn addresses() -> Result<Vec<InterfaceAddress>> {
    let found = sys::interface_addresses().map_err(|e| Error::io("listing the addresses of this machine", e))?;
    Ok(found.into_iter().map(|(interface, address)| InterfaceAddress { interface, address }).collect())
}

/// The name of the interface that has the address `ip`, as far as the system tells.
pub fn name_of(ip: IpAddr) -> Option<String> {
    addresses().ok()?.into_iter().find(|one| one.address.ip() == ip).map(|one| one.interface)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Vec<InterfaceAddress> {
        [
            ("lo", "127.0.0.1:0"),
            ("eth0", "10.0.0.7:0"),
            ("docker0", "172.17.0.1:0"),
            ("ib0", "10.1.0.7:0"),
            ("lo", "[::1]:0"),
            ("eth0", "[fe80::7%2]:0"),
            ("eth0", "[fd00::7]:0"),
            ("eth10", "10.2.0.7:0"),
        ]
        .map(|(interface, address)| InterfaceAddress { interface: interface.into(), address: address.parse().unwrap() })
        .into()
    }

    #[test]
    fn interfaces_are_meant_as_with_nccl() {
        for (filter, meant) in [
            ("eth0", "eth0"),
            ("eth", "eth0 eth10"),
            ("eth1", "eth10"),
            ("=eth1", ""),
            ("=eth0", "eth0"),
            ("ib,eth", "eth0 ib0 eth10"),
            ("=ib0,docker0", "docker0 ib0"),
            ("^docker", "lo eth0 ib0 eth10"),
            ("^docker,lo,eth", "ib0"),
            ("^=eth0", "lo docker0 ib0 eth10"),
        ] {
            let parsed: InterfaceFilter = filter.parse().unwrap();
            let names = ["lo", "eth0", "docker0", "ib0", "eth10"];
            let found: Vec<&str> = names.into_iter().filter(|name| parsed.is_meant(name)).collect();
            assert_eq!((found.join(" ").as_str(), parsed.to_string().as_str()), (meant, filter));
        }
    }

    #[test]
    fn the_address_that_routes_is_taken_where_its_interface_is_meant() {
        for (filter, routed, address) in [
            ("^docker", Some("10.0.0.7:4000"), "10.0.0.7:0"),
            ("^docker", Some("10.2.0.7:4000"), "10.2.0.7:0"),
            ("^docker", Some("172.17.0.1:4000"), "10.0.0.7:0"),
            ("^docker,eth", Some("10.0.0.7:4000"), "10.1.0.7:0"),
            ("ib,eth", Some("192.0.2.1:4000"), "10.1.0.7:0"),
            ("ib,eth", Some("10.0.0.7:4000"), "10.0.0.7:0"),
            ("eth", Some("[fd00::9]:4000"), "[fd00::7]:0"),
            ("=ib0", Some("[fd00::7]:4000"), "10.1.0.7:0"),
            ("eth0", Some("127.0.0.1:4000"), "10.0.0.7:0"),
            ("lo", Some("10.0.0.7:4000"), "127.0.0.1:0"),
            ("eth", None, "10.0.0.7:0"),
        ] {
            let filter: InterfaceFilter = filter.parse().unwrap();
            let chosen = filter.choose(&machine(), routed.map(|routed| routed.parse().unwrap())).unwrap();
            assert_eq!(chosen.to_string(), address, "{filter} {routed:?}");
        }
        let error = "=wlan0".parse::<InterfaceFilter>().unwrap().choose(&machine(), None).unwrap_err().to_string();
        assert!(error.contains("=wlan0") && error.contains("eth0") && error.contains("COMM_IFNAME"), "{error}");
        let reachable = "^docker,eth".parse::<InterfaceFilter>().unwrap().reachable(&machine());
        assert_eq!(reachable, ["10.1.0.7:0".parse().unwrap()]);
    }

    #[test]
    fn what_to_bind_is_an_address_or_interfaces() {
        for text in ["10.0.0.7", "::1", "fe80::7", "eth0", "=ib0", "^docker,lo", "eth0.100", "enp3s0"] {
            assert_eq!(text.parse::<Bind>().unwrap().to_string(), text);
        }
        assert_eq!("::1".parse::<Bind>().unwrap(), Bind::Address("::1".parse().unwrap()));
        for text in
            ["", "10.0.0.300", "10.0.0", "eth0:1", "::x", "^", "=", "a,,b", "eth 0", "a/b", "^^a", "0123456789abcdefg"]
        {
            assert!(text.parse::<Bind>().is_err(), "{text}");
        }
    }

    #[test]
    fn this_machine_has_loopback() {
        let there = addresses().unwrap();
        let loopback = there.iter().find(|one| one.address.ip().is_loopback()).expect("loopback");
        let named = Bind::Interfaces(format!("={}", loopback.interface).parse().unwrap());
        named.check().unwrap();
        assert!("no-such".parse::<Bind>().unwrap().check().is_err());
    }
}
