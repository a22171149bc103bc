//! Where a rank is in the network: which address its listeners take, and whether the others can reach what it offers them.

use std::fs;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::addresses::{check_address, check_own_socket_address, loopback, with_scope};
use crate::control::Control;
use crate::error::{Error, Result};
use crate::interfaces::{self, Bind};

/// Where a rank is: what it tells the others beside the addresses that it offers them. By default nothing is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkLocation {
    /// Stands for the network of the process: addresses of loopback lead to the same place in processes that have the same. `None`
    /// where the system does not tell.
    network: Option<u128>,
    /// The address by which it reaches rank 0; rank 0's is the one that the others reach.
    came_from: Option<IpAddr>,
}

impl NetworkLocation {
    /// Of this process, as a rank of `control`.
    pub fn of(control: &dyn Control) -> NetworkLocation {
        NetworkLocation { network: network(), came_from: control.local_address().map(|address| address.ip()) }
    }

    /// Whether both are known to be in different networks.
    fn is_apart_from(&self, other: &NetworkLocation) -> bool {
        matches!((self.network, other.network), (Some(one), Some(other)) if one != other)
    }
}

/// An address that a rank offers to others, which travels as text, with the interface of a link-local one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct OfferedAddress(pub SocketAddr);

impl From<OfferedAddress> for String {
    fn from(offer: OfferedAddress) -> String {
        offer.0.to_string()
    }
}

/// Takes what [`String::from`] gives, and no other way to write an address.
impl TryFrom<String> for OfferedAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let address = text.parse::<SocketAddr>().ok().filter(|address| address.to_string() == text);
        address.map(OfferedAddress).ok_or_else(|| format!("'{text}' is not an address with a port"))
    }
}

/// This start of the machine, and the network namespace of this process.
fn network() -> Option<u128> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::metadata("/proc/self/ns/net").ok()?;
    let hash = Sha256::new().chain_update(boot.trim()).chain_update(namespace.ino().to_le_bytes()).finalize();
    hash.first_chunk().map(|bytes| u128::from_le_bytes(*bytes))
}

/// Refuses, on all ranks alike, that a rank offers an address of loopback to ranks of other machines: `ranks` is where each rank is,
/// and what it offers, in order.
///
/// # Errors
/// [`Error::Rendezvous`] with both ranks, the addresses and what to do.
pub fn check_reachable(ranks: &[(&NetworkLocation, Vec<IpAddr>)]) -> Result<()> {
    for (rank, (location, offers)) in ranks.iter().enumerate() {
        let Some(loopback) = offers.iter().find(|ip| ip.to_canonical().is_loopback()) else { continue };
        let Some(other) = ranks.iter().position(|(other, _)| location.is_apart_from(other)) else { continue };
        let came_from = match location.came_from {
            Some(ip) if !ip.is_loopback() && rank == 0 => format!("is reached at {ip} but "),
            Some(ip) if !ip.is_loopback() => format!("came from {ip} but "),
            _ => String::new(),
        };
        return Err(Error::Rendezvous(format!(
            "rank {rank} {came_from}offers {loopback}, which only its own machine can reach, and rank {other} runs on another machine or \
             in another container; leave out --bind and COMM_IFNAME (in the library: `bind`), or give rank {rank} an address of its \
             machine that the others can reach"
        )));
    }
    Ok(())
}

/// The address that this rank's listeners take, with port 0: `asked`, or else what the job's [network](crate::job::Network) asks for, if it is
/// one of this machine's; by default the one by which it reaches rank 0 (rank 0: by which the others reach it), for that one routes; in a
/// job whose ranks are threads or that has only one, loopback.
///
/// # Errors
/// [`Error::InvalidArgument`] for an address that is not this machine's or that nobody can dial, and for interfaces that it does not have.
pub fn bind_address(asked: Option<&Bind>, control: &dyn Control) -> Result<SocketAddr> {
    let of_job = control.network().bind;
    let address = match (asked.or(of_job.as_ref()), control.local_address()) {
        (Some(Bind::Address(ip)), _) => {
            check_address(*ip)?;
            with_scope(*ip)
        }
        (Some(Bind::Interfaces(filter)), routed) => filter.choose(&interfaces::addresses()?, routed)?,
        (None, Some(SocketAddr::V6(v6))) if v6.ip().to_ipv4_mapped().is_none() => {
            SocketAddrV6::new(*v6.ip(), 0, 0, v6.scope_id()).into()
        }
        (None, Some(address)) => SocketAddr::new(address.ip().to_canonical(), 0),
        (None, None) => return Ok(SocketAddr::new(loopback(), 0)),
    };
    check_own_socket_address(address)?;
    Ok(address)
}

/// `offered` by another rank, as this one, whose listeners take the address `own`, has to dial it: numbers of interfaces, which
/// link-local addresses have, mean something on their own machine only.
pub fn to_dial(offered: SocketAddr, own: SocketAddr) -> SocketAddr {
    match (offered, own) {
        (SocketAddr::V6(mut offered), SocketAddr::V6(own)) if offered.ip().is_unicast_link_local() => {
            offered.set_scope_id(own.scope_id());
            offered.into()
        }
        _ => offered,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{decode, encode};

    fn location(network: u128, came_from: &str) -> NetworkLocation {
        NetworkLocation { network: Some(network), came_from: Some(came_from.parse().unwrap()) }
    }

    #[test]
    fn what_is_offered_survives_the_control_plane() {
        let here = NetworkLocation { network: network(), came_from: Some("10.9.0.2".parse().unwrap()) };
        assert!(here.network.is_some());
        for address in ["127.0.0.1:4000", "[fe80::1%2]:65535", "[::1]:80"] {
            let told = (here, NetworkLocation::default(), OfferedAddress(address.parse().unwrap()));
            assert_eq!(decode::<(NetworkLocation, NetworkLocation, OfferedAddress)>(&encode(&told).unwrap()), Ok(told));
        }
        for other in ["localhost:80", "127.0.0.1", "127.0.0.1:080", "[0:0:0:0:0:0:0:1]:80", " 127.0.0.1:80"] {
            assert!(decode::<OfferedAddress>(&encode(&other).unwrap()).is_err(), "{other}");
        }
    }

    #[test]
    fn loopback_is_refused_between_machines_and_only_there() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let (here, there) = (location(1, "10.9.0.1"), location(2, "10.9.0.2"));
        let check = |offers: [(&NetworkLocation, &str); 3]| {
            check_reachable(&offers.map(|(location, offer)| (location, vec![ip(offer)])))
                .map_err(|error| error.to_string())
        };
        check([(&here, "127.0.0.1"), (&here, "127.0.0.1"), (&here, "::1")]).unwrap();
        check([(&here, "10.9.0.1"), (&there, "10.9.0.2"), (&here, "10.9.0.1")]).unwrap();
        let error = check([(&here, "10.9.0.1"), (&there, "127.0.0.1"), (&here, "10.9.0.1")]).unwrap_err();
        for part in ["rank 1 came from 10.9.0.2 but offers 127.0.0.1", "rank 0 runs on another machine", "--bind"] {
            assert!(error.contains(part), "{error}");
        }
        let error = check([(&here, "::1"), (&here, "10.9.0.1"), (&there, "10.9.0.2")]).unwrap_err();
        assert!(error.contains("rank 0 is reached at 10.9.0.1 but offers ::1"), "{error}");
        // Where the system does not tell, nothing is concluded.
        let unknown = NetworkLocation { network: None, came_from: None };
        check([(&here, "127.0.0.1"), (&unknown, "127.0.0.1"), (&unknown, "127.0.0.1")]).unwrap();
    }

    #[test]
    fn what_is_asked_for_wins_and_must_be_this_machines() {
        let ranks = crate::local::group(1, 1);
        let bind = |text: Option<&str>| {
            let asked: Option<Bind> = text.map(|text| text.parse().unwrap());
            bind_address(asked.as_ref(), &*ranks[0].control)
        };
        assert_eq!(bind(Some("127.0.0.2")).unwrap().to_string(), "127.0.0.2:0");
        assert!(bind(None).unwrap().ip().is_loopback());
        for wrong in ["0.0.0.0", "203.0.113.1", "224.0.0.1"] {
            assert!(bind(Some(wrong)).unwrap_err().to_string().contains(wrong));
        }
    }

    #[test]
    fn link_local_addresses_are_dialled_by_this_machines_interface() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(to_dial(address("[fe80::7%11]:80"), address("[fe80::9%2]:0")), address("[fe80::7%2]:80"));
        assert_eq!(to_dial(address("[fd00::7]:80"), address("[fe80::9%2]:0")), address("[fd00::7]:80"));
        assert_eq!(to_dial(address("10.0.0.1:80"), address("[fe80::9%2]:0")), address("10.0.0.1:80"));
    }
}
