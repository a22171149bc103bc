//! Addresses of this machine: which can be listened on so that other ranks reach it.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};

use crate::descriptors;
use crate::error::{Error, Result};

/// Refuses addresses that do not name one interface: the unspecified one (every interface), broadcast, multicast.
///
/// # Errors
/// [`Error::InvalidArgument`].
pub(crate) fn check_address(ip: IpAddr) -> Result<()> {
    let what = match ip.to_canonical() {
        ip if ip.is_unspecified() => "means every interface",
        ip if ip.is_multicast() => "is a multicast address, which stands for many machines",
        IpAddr::V4(ip) if ip.is_broadcast() || ip.octets() == [127, 255, 255, 255] => {
            "is a broadcast address, which stands for many machines"
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
    fn link_local_addresses_keep_their_interface() {
        let table = "00000000000000000000000000000001 01 80 10 80       lo\n\
             fe800000000000000000000000000007 0b 40 20 80     eth0\n";
        assert_eq!(interface_of(table, "fe80::7".parse().unwrap()), Some(11));
        assert_eq!(interface_of(table, "fe80::8".parse().unwrap()), None);
    }
}
