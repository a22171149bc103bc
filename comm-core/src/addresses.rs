//! Addresses and ports of this machine: which can be listened on so that other ranks reach it.

use std::fmt;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};
use std::str::FromStr;

use crate::descriptors;
use crate::error::{Error, Result};

/// The ports that listeners take, for firewalls: `20000-20100`, or one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// From `first` to `last`, both included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that begins with 0, or ends before it begins.
    pub fn new(first: u16, last: u16) -> Result<Self> {
        match first >= 1 && first <= last {
            true => Ok(PortRange { first, last }),
            false => {
                Err(Error::invalid(format!("{first}-{last} is not a range of ports; write for example 20000-20100")))
            }
        }
    }

    /// How many there are.
    pub fn count(self) -> usize {
        usize::from(self.last - self.first) + 1
    }

    /// The port at `place`, counted on from the first and round again.
    pub(crate) fn at(self, place: u64) -> u16 {
        let place = place % self.count() as u64;
        // Less than 65,536.
        self.first + place as u16
    }

    /// Binds a free port of `ports` by `bind`, which gets `address` with one port after another, from a random one on; without a range it
    /// gets `address` as it is, for a port that the system chooses.
    ///
    /// # Errors
    /// Those of `bind`: of kind `AddrInUse` where every port is taken, with the range.
    pub fn bind<T>(
        ports: Option<PortRange>,
        mut address: SocketAddr,
        mut bind: impl FnMut(SocketAddr) -> io::Result<T>,
    ) -> io::Result<T> {
        let Some(ports) = ports else { return bind(address) };
        let mut start = [0; 8];
        getrandom::fill(&mut start).map_err(|e| io::Error::other(e.to_string()))?;
        for place in 0..ports.count() as u64 {
            address.set_port(ports.at((u64::from_le_bytes(start) >> 1) + place));
            match bind(address) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                other => return other,
            }
        }
        let many = ports.count();
        Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            format!(
                "all {many} ports of COMM_PORT_RANGE={ports} are in use there; give a larger range: a rank may need one port for each \
                 other rank and lane"
            ),
        ))
    }
}

impl FromStr for PortRange {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (first.trim().parse(), last.trim().parse()) {
            (Ok(first), Ok(last)) => Self::new(first, last),
            _ => Err(Error::invalid(format!("'{text}' is not a range of ports; write for example 20000-20100"))),
        }
    }
}

impl fmt::Display for PortRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// Refuses addresses that do not name one interface: the unspecified one (every interface), broadcast, multicast.
///
/// # Errors
/// [`Error::InvalidArgument`].
pub(crate) fn check_address(ip: IpAddr) -> Result<()> {
    let what = match ip.to_canonical() {
        ip if ip.is_unspecified() => "means every interface",
        ip if ip.is_multicast() => "is a multicast address, which is not that of one machine",
        IpAddr::V4(ip) if ip.is_broadcast() || ip.octets() == [127, 255, 255, 255] => {
            "is a broadcast address, which is not that of one machine"
        }
        _ => return Ok(()),
    };
    Err(Error::invalid(format!("{ip} {what}; name the one address of this machine that the other ranks can reach")))
}

/// Refuses an address on which this machine cannot listen so that others reach it: every interface, broadcast, multicast, those that are not
/// its own, and the broadcast addresses of its networks. Nothing is sent.
///
/// # Errors
/// [`Error::InvalidArgument`].
pub fn check_own_address(ip: IpAddr) -> Result<()> {
    check_own_socket_address(with_scope(ip))
}

/// As [`check_own_address`], with the interface of a link-local address. The port does not matter.
pub(crate) fn check_own_socket_address(mut address: SocketAddr) -> Result<()> {
    let ip = address.ip();
    check_address(ip)?;
    address.set_port(0);
    let socket = UdpSocket::bind(address).map_err(|e| match e {
        e if descriptors::ran_out(&e) => Error::io(format!("trying out the address {ip}"), e),
        e => Error::invalid(format!(
            "cannot listen on {ip}: {e}; name an address of this machine (`ip address` lists them)"
        )),
    })?;
    // The kernel lets a socket be bound to a broadcast address, but not be connected to one.
    address.set_port(9);
    match socket.connect(address) {
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Err(Error::invalid(format!(
            "{ip} is the broadcast address of a network; name the one address of this machine that the other ranks can reach"
        ))),
        _ => Ok(()),
    }
}

/// 127.0.0.1, or ::1 where loopback has no other.
pub(crate) fn loopback() -> IpAddr {
    let (v4, v6) = (IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST));
    let is_there = |ip| UdpSocket::bind((ip, 0)).is_ok();
    if !is_there(v4) && is_there(v6) { v6 } else { v4 }
}

/// With the interface that a link-local address belongs to: the same may be used on several, but a machine has its own once.
pub(crate) fn with_scope(ip: IpAddr) -> SocketAddr {
    match ip {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => {
            let table = fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
            SocketAddrV6::new(v6, 0, 0, interface_of(&table, v6).unwrap_or(0)).into()
        }
        ip => SocketAddr::new(ip, 0),
    }
}

/// The number of the interface that has `ip`, from a kernel's table of IPv6 addresses.
fn interface_of(table: &str, ip: Ipv6Addr) -> Option<u32> {
    let hex = format!("{:032x}", u128::from(ip));
    let line = table.lines().find(|line| line.starts_with(&hex))?;
    u32::from_str_radix(line.split_whitespace().nth(1)?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_everybody_are_refused() {
        for ip in ["0.0.0.0", "::", "::ffff:0.0.0.0", "255.255.255.255", "127.255.255.255", "224.0.0.1", "ff02::1"] {
            assert!(check_address(ip.parse().unwrap()).is_err(), "{ip}");
            assert!(check_own_address(ip.parse().unwrap()).is_err(), "{ip}");
        }
        check_own_address("127.0.0.1".parse().unwrap()).unwrap();
        check_own_address("127.0.0.2".parse().unwrap()).unwrap();
        // For documentation only (RFC 5737): no machine has it.
        let error = check_own_address("203.0.113.1".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("203.0.113.1") && error.contains("of this machine"), "{error}");
        check_address("203.0.113.1".parse().unwrap()).unwrap();
    }

    #[test]
    fn ranges_of_ports_are_read_as_they_are_written() {
        for (text, count) in [("20000-20100", 101), ("1-65535", 65535), ("7", 1), ("20000 - 20001", 2)] {
            let ports: PortRange = text.parse().unwrap();
            assert_eq!((ports.count(), ports.to_string().parse::<PortRange>().unwrap()), (count, ports), "{text}");
        }
        for text in ["", "0-7", "8-7", "1-65536", "a-b", "1-2-3", "-7", "20000:20100"] {
            assert!(text.parse::<PortRange>().unwrap_err().to_string().contains("20000-20100"), "{text}");
        }
        let ports = PortRange::new(100, 102).unwrap();
        assert_eq!([0, 1, 2, 3, 7].map(|place| ports.at(place)), [100, 101, 102, 100, 101]);
    }

    #[test]
    fn every_port_of_a_range_is_used_and_no_other() {
        let ports = PortRange::new(100, 107).unwrap();
        let mut taken = std::collections::BTreeSet::new();
        let bind = |address: SocketAddr| match taken.insert(address.port()) {
            true => Ok(address.port()),
            false => Err(io::ErrorKind::AddrInUse.into()),
        };
        let mut bind = bind;
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut found: Vec<u16> = (0..8).map(|_| PortRange::bind(Some(ports), any, &mut bind).unwrap()).collect();
        found.sort_unstable();
        assert_eq!(found, (100..=107).collect::<Vec<_>>());
        let error = PortRange::bind(Some(ports), any, &mut bind).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().contains("100-107"), "{error}");
        // Another error is final, and without a range the system chooses.
        let denied = PortRange::bind(Some(ports), any, |_| Err::<(), _>(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(denied.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(PortRange::bind(None, any, |address| Ok(address.port())).unwrap(), 0);
    }

    #[test]
    fn link_local_addresses_keep_their_interface() {
        let table = "00000000000000000000000000000001 01 80 10 80       lo\n\
             fe800000000000000000000000000007 0b 40 20 80     eth0\n";
        assert_eq!(interface_of(table, "fe80::7".parse().unwrap()), Some(11));
        assert_eq!(interface_of(table, "fe80::8".parse().unwrap()), None);
    }
}
