//! Who listens for whom, and where.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};

use comm_core::place::{Place, check_reachable};
use comm_core::{Control, Deadline, Error, Result};

use crate::auth::{Edge, PROOF_LEN};
use crate::house::Folder;
use crate::options::TcpOptions;

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Advert {
    /// Goes into every proof towards this rank, so that a proof is of no use elsewhere.
    pub(crate) salt: [u8; PROOF_LEN],
    /// Where the rank is.
    pub(crate) place: Place,
    pub(crate) addresses: Addresses,
}

/// Where a rank listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Addresses {
    /// One address for all, or one for each peer and lane (see [`Advert::address`]).
    Tcp(Vec<SocketAddr>),
    /// A folder with a Unix socket for each peer and lane.
    Unix(Folder),
}

/// What the line of a folder begins with.
const UNIX: &str = "unix ";

impl Advert {
    /// Where the rank with this advert listens for the dialler `peer` on `lane`.
    pub(crate) fn address(&self, peer: usize, lane: usize, lanes: usize) -> Option<SocketAddr> {
        match &self.addresses {
            Addresses::Tcp(addresses) => match addresses[..] {
                [only] => Some(only),
                _ => addresses.get(peer * lanes + lane).copied(),
            },
            Addresses::Unix(_) => None,
        }
    }

    /// The folder with this rank's Unix sockets.
    pub(crate) fn folder(&self) -> Option<&Folder> {
        match &self.addresses {
            Addresses::Unix(folder) => Some(folder),
            Addresses::Tcp(_) => None,
        }
    }

    /// Where the rank listens for `peer` on `lane`, for people.
    pub(crate) fn describe(&self, peer: usize, lane: usize, lanes: usize) -> String {
        match self.folder() {
            Some(folder) => folder.path.clone(),
            None => self.address(peer, lane, lanes).map_or("no address".into(), |address| address.to_string()),
        }
    }

    /// Exchanges adverts; checks that all ranks were given the same settings, and that none offers loopback to other machines.
    pub(crate) fn exchange(
        &self,
        transport: &str,
        options: &TcpOptions,
        control: &dyn Control,
        deadline: Deadline,
    ) -> Result<Vec<Advert>> {
        let settings = format!(
            "lanes={} window={} segment={} gate={} ipc={}",
            options.lanes, options.window, options.segment, options.gate, options.ipc
        );
        let blobs =
            control.all_gather(&format!("{transport} addresses"), self.encode(&settings).as_bytes(), deadline)?;
        if blobs.len() != control.world_size() {
            return Err(Error::Rendezvous(format!(
                "{} ranks gave {transport} addresses, but there are {}",
                blobs.len(),
                control.world_size()
            )));
        }
        let decode = |(rank, blob): (usize, &Vec<u8>)| Advert::decode(blob, &settings, rank);
        let adverts = blobs.iter().enumerate().map(decode).collect::<Result<Vec<_>>>()?;
        let offers: Vec<_> = adverts.iter().map(|advert| (&advert.place, advert.ips())).collect();
        check_reachable(&offers)?;
        Ok(adverts)
    }

    /// The addresses that it has, each once.
    fn ips(&self) -> Vec<IpAddr> {
        let Addresses::Tcp(addresses) = &self.addresses else { return Vec::new() };
        let mut ips: Vec<IpAddr> = addresses.iter().map(SocketAddr::ip).collect();
        ips.dedup();
        ips
    }

    fn encode(&self, settings: &str) -> String {
        let mut text = format!("{settings}\n");
        text.extend(self.salt.iter().map(|byte| format!("{byte:02x}")));
        text.push_str(&format!("\n{}", self.place.encode()));
        match &self.addresses {
            Addresses::Tcp(addresses) => text.extend(addresses.iter().map(|address| format!("\n{address}"))),
            Addresses::Unix(folder) => text.push_str(&format!("\n{UNIX}{}", folder.encode())),
        }
        text
    }

    fn decode(blob: &[u8], settings: &str, rank: usize) -> Result<Advert> {
        let malformed = || Error::Rendezvous(format!("rank {rank} sent an address list that is not understood"));
        let mut lines = std::str::from_utf8(blob).map_err(|_| malformed())?.lines();
        let theirs = lines.next().ok_or_else(malformed)?;
        if theirs != settings {
            return Err(Error::Rendezvous(format!(
                "the ranks were started with different settings: here {settings}, on rank {rank} {theirs}"
            )));
        }
        let hex = lines.next().filter(|hex| hex.len() == 2 * PROOF_LEN && hex.is_ascii()).ok_or_else(malformed)?;
        let mut salt = [0; PROOF_LEN];
        for (byte, digits) in salt.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| malformed())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| malformed())?;
        }
        let place = lines.next().and_then(Place::decode).ok_or_else(malformed)?;
        let mut lines = lines.peekable();
        let addresses = match lines.peek().and_then(|line| line.strip_prefix(UNIX)) {
            Some(folder) => Addresses::Unix(Folder::decode(folder).ok_or_else(malformed)?),
            None => Addresses::Tcp(lines.map(|line| line.parse().map_err(|_| malformed())).collect::<Result<_>>()?),
        };
        let advert = Advert { salt, place, addresses };
        // An advert has one encoding: signs, white space and leading zeros, which numbers may have, are none of ours.
        if advert.encode(settings).as_bytes() == blob { Ok(advert) } else { Err(malformed()) }
    }
}

#[cfg(test)]
mod tests {
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
    fn an_advert_survives_the_control_plane() {
        let addresses = Addresses::Tcp(vec!["127.0.0.1:4000".parse().unwrap()]);
        let place = Place::decode("0123456789abcdef0123456789abcdef 10.0.0.1").unwrap();
        let advert = Advert { salt: [0xa5; 32], place, addresses };
        let blob = advert.encode("lanes=2");
        assert_eq!(Advert::decode(blob.as_bytes(), "lanes=2", 1).unwrap(), advert);
        assert!(Advert::decode(blob.as_bytes(), "lanes=3", 1).unwrap_err().to_string().contains("lanes=3"));
        // Numbers that Rust reads and does not write.
        for (ours, theirs) in
            [("a5a5", "+5a5"), ("a5a5", "A5a5"), ("\n", "\r\n"), (":4000", ":04000"), ("4000", "4000\n")]
        {
            let other = blob.replacen(ours, theirs, 1);
            assert!(Advert::decode(other.as_bytes(), "lanes=2", 1).is_err(), "{other:?}");
        }
        let salt_end = blob.rfind('\n').unwrap();
        for cut in 0..salt_end {
            assert!(Advert::decode(&blob.as_bytes()[..cut], "lanes=2", 1).is_err(), "{cut}");
        }
    }

    #[test]
    fn a_folder_survives_the_control_plane() {
        let (machine, path) = ("0b1d".to_string(), "/tmp/with a space".to_string());
        let folder = Folder { machine, device: 1, inode: u64::MAX, path };
        let place = Place::decode("- -").unwrap();
        let advert = Advert { salt: [7; 32], place, addresses: Addresses::Unix(folder.clone()) };
        let blob = advert.encode("ipc");
        let back = Advert::decode(blob.as_bytes(), "ipc", 1).unwrap();
        assert_eq!((back.folder(), back.address(0, 0, 1)), (Some(&folder), None));
        for (ours, theirs) in [(" 1 ", " 01 "), (" /tmp", " tmp"), (" space", " space\n"), ("unix", "linux")] {
            let other = blob.replacen(ours, theirs, 1);
            assert!(Advert::decode(other.as_bytes(), "ipc", 1).is_err(), "{other:?}");
        }
    }
}
