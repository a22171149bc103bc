//! What the network interface of an address carries.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::options::LARGEST_MTU;

/// The largest UDP payload in one packet of the interface that has the address `ip`; `None` where the system does not say.
pub(crate) fn largest_payload(ip: IpAddr) -> Option<u16> {
    let read = |path: &str| fs::read_to_string(path).ok();
    let name = match ip {
        ip if ip.is_loopback() => "lo".to_string(),
        IpAddr::V4(ip) => interface_v4(&read("/proc/net/route")?, ip)?,
        IpAddr::V6(ip) => interface_v6(&read("/proc/net/if_inet6")?, ip)?,
    };
    // A name is never a path.
    if name.contains('/') || name.starts_with('.') {
        return None;
    }
    let mtu: u32 = read(&format!("/sys/class/net/{name}/mtu"))?.trim().parse().ok()?;
    let headers = if ip.is_ipv4() { 20 + 8 } else { 40 + 8 };
    u16::try_from(mtu.saturating_sub(headers).min(u32::from(LARGEST_MTU))).ok()
}

/// The interface whose own network contains `ip`, from a kernel's table of IPv4 routes: addresses themselves are not listed.
fn interface_v4(routes: &str, ip: Ipv4Addr) -> Option<String> {
    // Numbers are in the byte order of the network, printed as if they were the machine's.
    let address = |hex: &str| u32::from_str_radix(hex, 16).ok().map(|value| u32::from_be_bytes(value.to_ne_bytes()));
    let candidates = routes.lines().skip(1).filter_map(|line| {
        let mut fields = line.split_whitespace();
        let name = fields.next()?;
        let (network, gateway) = (address(fields.next()?)?, address(fields.next()?)?);
        let mask = address(fields.nth(4)?)?;
        (gateway == 0 && mask != 0 && u32::from(ip) & mask == network).then_some((mask.count_ones(), name))
    });
    candidates.max().map(|(_, name)| name.to_string())
}

/// The interface that has the address `ip`, from a kernel's table of IPv6 addresses.
fn interface_v6(addresses: &str, ip: Ipv6Addr) -> Option<String> {
    let hex = format!("{:032x}", u128::from(ip));
    let line = addresses.lines().find(|line| line.starts_with(&hex))?;
    line.split_whitespace().last().map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_endian = "little")]
    #[test]
    fn the_interface_of_an_ipv4_address_is_that_of_the_longest_prefix() {
        let routes = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
             eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
             eth0\t0000000A\t00000000\t0001\t0\t0\t0\t000000FF\t0\t0\t0\n\
             ib0\t0001000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
             broken\tline\n";
        let of = |ip: [u8; 4]| interface_v4(routes, ip.into());
        assert_eq!(of([10, 0, 1, 7]).as_deref(), Some("ib0"));
        assert_eq!(of([10, 9, 1, 7]).as_deref(), Some("eth0"));
        // Only through a gateway: no address of this host.
        assert_eq!(of([192, 168, 0, 1]), None);
    }

    #[test]
    fn the_interface_of_an_ipv6_address_is_the_one_that_has_it() {
        let addresses = "00000000000000000000000000000001 01 80 10 80       lo\n\
             fd000000000000000000000000000002 02 40 00 80     eth0\n";
        assert_eq!(interface_v6(addresses, "fd00::2".parse().unwrap()).as_deref(), Some("eth0"));
        assert_eq!(interface_v6(addresses, "fd00::3".parse().unwrap()), None);
    }

    #[test]
    fn loopback_carries_more_than_ethernet() {
        assert!(largest_payload(Ipv4Addr::LOCALHOST.into()).is_none_or(|payload| payload > 1472));
    }
}
