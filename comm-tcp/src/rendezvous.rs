//! Which rank of a pair listens, and where.

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use comm_core::control::ControlExt;
use comm_core::location::{NetworkLocation, OfferedAddress, check_reachable};
use comm_core::{Control, Deadline, Error, Result};
use serde::{Deserialize, Serialize};

use crate::auth::{Edge, PROOF_LEN};
use crate::options::TcpOptions;
use crate::socket_folder::FolderInfo;

/// Whether `rank` listens for `peer` (else it dials). Every rank listens for about half of the others, so that no rank
/// carries the relays of all.
pub(crate) fn listens(rank: usize, peer: usize) -> bool {
    if (rank + peer).is_multiple_of(2) { rank < peer } else { rank > peer }
}

/// The connection that `dialler` makes to `listener` on `lane`.
pub(crate) fn edge(dialler: usize, listener: usize, lane: usize) -> Result<Edge> {
    let narrow = |value: usize| u32::try_from(value).map_err(|_| Error::invalid(format!("rank or lane {value}")));
    Ok(Edge { dialler: narrow(dialler)?, listener: narrow(listener)?, lane: narrow(lane)? })
}

/// The connections that `rank` listens for.
pub(crate) fn expected_edges(rank: usize, world_size: usize, lanes: usize) -> Result<HashSet<Edge>> {
    (0..world_size)
        .filter(|peer| *peer != rank && listens(rank, *peer))
        .flat_map(|peer| (0..lanes).map(move |lane| edge(peer, rank, lane)))
        .collect()
}

/// What every rank tells every other one over the control plane before they connect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerInfo {
    /// Goes into every proof towards this rank, so that a proof is of no use elsewhere.
    pub(crate) salt: [u8; PROOF_LEN],
    /// Where the rank is.
    pub(crate) location: NetworkLocation,
    pub(crate) addresses: Addresses,
}

/// Where a rank listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Addresses {
    /// Nowhere.
    None,
    /// One address for all.
    One(OfferedAddress),
    /// The IP address of this one, with a port for each peer and lane (see [`PeerInfo::address`]), 0 for those that are not listened for.
    Each(OfferedAddress, Vec<u16>),
    /// A folder with a Unix socket for each peer and lane.
    Unix(FolderInfo),
    /// Nowhere: why the rank cannot listen behind a packet filter.
    Refused(String),
}

impl Addresses {
    /// Of a rank with one listener for each connection, all on the same IP address.
    pub(crate) fn each<'l>(
        world_size: usize,
        lanes: usize,
        listeners: impl Iterator<Item = (&'l Edge, &'l SocketAddr)>,
    ) -> Addresses {
        let mut ports = vec![0; world_size * lanes];
        let mut one = None;
        for (edge, address) in listeners {
            one = Some(*address);
            if let Some(slot) = ports.get_mut(edge.dialler as usize * lanes + edge.lane as usize) {
                *slot = address.port();
            }
        }
        one.map_or(Addresses::None, |address| Addresses::Each(OfferedAddress(address), ports))
    }
}

impl PeerInfo {
    /// Where the rank with this information listens for the dialler `peer` on `lane`.
    pub(crate) fn address(&self, peer: usize, lane: usize, lanes: usize) -> Option<SocketAddr> {
        match &self.addresses {
            Addresses::One(only) => Some(only.0),
            Addresses::Each(offer, ports) => {
                let mut address = offer.0;
                address.set_port(*ports.get(peer * lanes + lane).filter(|port| **port != 0)?);
                Some(address)
            }
            Addresses::None | Addresses::Unix(_) | Addresses::Refused(_) => None,
        }
    }

    /// The folder with this rank's Unix sockets.
    pub(crate) fn folder(&self) -> Option<&FolderInfo> {
        match &self.addresses {
            Addresses::Unix(folder) => Some(folder),
            Addresses::None | Addresses::One(_) | Addresses::Each(..) | Addresses::Refused(_) => None,
        }
    }

    /// Why this rank cannot listen behind a packet filter, if so.
    pub(crate) fn refusal(&self) -> Option<&str> {
        match &self.addresses {
            Addresses::Refused(why) => Some(why),
            _ => None,
        }
    }

    /// Where the rank listens for `peer` on `lane`, for people.
    pub(crate) fn describe(&self, peer: usize, lane: usize, lanes: usize) -> String {
        match self.folder() {
            Some(folder) => folder.path.clone(),
            None => self.address(peer, lane, lanes).map_or("no address".into(), |address| address.to_string()),
        }
    }

    /// Exchanges the information of all ranks, of which this rank's is `mine`; checks that all ranks were given the same settings, and that
    /// none offers loopback to other machines. If a rank has none, which is an error there, all fail.
    pub(crate) fn exchange(
        mine: Result<PeerInfo>,
        transport: &str,
        options: &TcpOptions,
        control: &dyn Control,
        deadline: Deadline,
    ) -> Result<Vec<PeerInfo>> {
        let settings = format!(
            "lanes={} window={} segment={} gate={} ipc={}",
            options.lanes, options.window, options.segment, options.gate, options.ipc
        );
        let mine = mine.map(|peer_info| (settings.clone(), peer_info));
        let gathered = control.gather_all(&format!("{transport} addresses"), transport, mine, deadline)?;
        if let Some((rank, (theirs, _))) = gathered.iter().enumerate().find(|(_, (theirs, _))| *theirs != settings) {
            return Err(Error::Rendezvous(format!(
                "the ranks were started with different settings: here {settings}, on rank {rank} {theirs}"
            )));
        }
        let peer_infos: Vec<PeerInfo> = gathered.into_iter().map(|(_, peer_info)| peer_info).collect();
        let offers: Vec<_> =
            peer_infos.iter().map(|peer_info| (&peer_info.location, peer_info.ip().into_iter().collect())).collect();
        check_reachable(&offers)?;
        Ok(peer_infos)
    }

    /// The IP address that it offers.
    fn ip(&self) -> Option<IpAddr> {
        match &self.addresses {
            Addresses::One(offer) | Addresses::Each(offer, _) => Some(offer.0.ip()),
            Addresses::None | Addresses::Unix(_) | Addresses::Refused(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use comm_core::local::LocalRank;

    use super::*;

    #[test]
    fn exactly_one_of_two_ranks_listens_and_the_load_is_even() {
        for world in [2, 3, 4, 7, 16] {
            for rank in 0..world {
                let peers = (0..world).filter(|peer| *peer != rank);
                for peer in peers.clone() {
                    assert_ne!(listens(rank, peer), listens(peer, rank));
                }
                let listening = peers.filter(|peer| listens(rank, *peer)).count();
                assert!(listening.abs_diff(world - 1 - listening) <= 2, "rank {rank} of {world}: {listening}");
            }
        }
    }

    #[test]
    fn each_peer_and_lane_may_have_a_port_of_its_own() {
        let address = OfferedAddress("[fe80::1%2]:7".parse().unwrap());
        let peer_info = PeerInfo {
            salt: [0; 32],
            location: NetworkLocation::default(),
            addresses: Addresses::Each(address, vec![1, 2, 0, 4]),
        };
        let port = |peer, lane| peer_info.address(peer, lane, 2).map(|address| address.to_string());
        assert_eq!(port(0, 1).unwrap(), "[fe80::1%2]:2");
        assert_eq!((port(1, 0), port(1, 1).is_some(), port(2, 0)), (None, true, None));
    }

    #[test]
    fn peer_infos_are_exchanged_and_settings_compared() {
        let peer_info = |rank: usize| PeerInfo {
            salt: [rank as u8; 32],
            location: NetworkLocation::default(),
            addresses: Addresses::One(OfferedAddress(format!("127.0.0.1:400{rank}").parse().unwrap())),
        };
        let exchange = |lanes: [usize; 2], mine: &(dyn Fn(usize) -> Result<PeerInfo> + Sync)| {
            let ranks = comm_core::local::group(2, 1);
            std::thread::scope(|scope| {
                let threads: Vec<_> = ranks
                    .iter()
                    .map(|LocalRank { control, .. }| {
                        let options = TcpOptions { lanes: lanes[control.rank()], ..TcpOptions::default() };
                        let deadline = Deadline::after(Duration::from_secs(30));
                        let mine = mine(control.rank());
                        scope.spawn(move || PeerInfo::exchange(mine, "tcp", &options, &**control, deadline))
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            })
        };
        for outcome in exchange([2, 2], &|rank| Ok(peer_info(rank))) {
            assert_eq!(outcome.unwrap(), [peer_info(0), peer_info(1)]);
        }
        for outcome in exchange([2, 3], &|rank| Ok(peer_info(rank))) {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("lanes=2") && error.contains("lanes=3"), "{error}");
        }
        // Who cannot listen says so to those who would dial it.
        let outcomes =
            exchange([2, 2], &|rank| if rank == 0 { Ok(peer_info(0)) } else { Err(Error::invalid("no such port")) });
        assert!(matches!(outcomes[1], Err(Error::InvalidArgument(_))), "{outcomes:?}");
        let error = outcomes[0].as_ref().unwrap_err().to_string();
        assert!(error.contains("rank 1: ") && error.contains("no such port"), "{error}");
    }
}
