//! Connecting the pairs of ranks, the part that is common to both protocols.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use comm_core::descriptors::{self, ran_out};
use comm_core::driver::within;
use comm_core::location::to_dial;
use comm_core::{Control, Deadline, Error, Result};

use crate::core::{Core, DescriptorNeed};
use crate::rendezvous::{PeerInfo, listens};
use crate::runtime::{Join, unless_failed};
use crate::socket_folder::FolderInfo;

/// The connections of one rank while they are being made.
pub(crate) struct PendingConnections<'a, L> {
    core: &'a Core,
    /// Of all ranks, in order.
    peer_infos: &'a [PeerInfo],
    /// Where this rank's listeners are.
    own: SocketAddr,
    need: DescriptorNeed,
    /// `[lane][peer]`.
    connections: RefCell<Vec<Vec<Option<L>>>>,
    /// Of each peer that is being dialled why the last attempt failed, for the error at the deadline.
    dial_errors: RefCell<BTreeMap<usize, String>>,
    /// What went wrong in a task that accepts, and ends connecting.
    accept_error: Arc<OnceLock<AcceptError>>,
    /// When it was last looked whether there are descriptors left, and that there were none.
    looked: Cell<Instant>,
    exhausted: Cell<bool>,
}

/// What went wrong in a task that accepts connections. Those who wait for the connections report it.
#[derive(Debug)]
pub(crate) struct AcceptError {
    pub(crate) doing: String,
    pub(crate) error: io::Error,
}

/// An attempt to dial that failed.
pub(crate) enum DialError {
    /// Another one may succeed.
    Failed(String),
    /// There are no descriptors left.
    RanOut(io::Error),
    Hopeless(Error),
}

impl From<io::Error> for DialError {
    fn from(error: io::Error) -> Self {
        if ran_out(&error) { DialError::RanOut(error) } else { DialError::Failed(error.to_string()) }
    }
}

/// Once the process has been out of descriptors for so long, connecting is given up.
const STARVED: Duration = Duration::from_secs(1);

/// Connections that a rank opens at a time. With hundreds of ranks on few cores a handshake takes as long as all that are under way together.
pub(crate) const AT_ONCE: usize = 16;

/// Most peers of which an error says where they were looked for.
const MAX_SHOWN: usize = 4;

impl<'a, L> PendingConnections<'a, L> {
    pub(crate) fn new(core: &'a Core, peer_infos: &'a [PeerInfo], own: SocketAddr, need: DescriptorNeed) -> Self {
        let none = || (0..core.world_size).map(|_| None).collect();
        let connections = RefCell::new((0..core.lanes).map(|_| none()).collect());
        PendingConnections {
            core,
            peer_infos,
            own,
            need,
            connections,
            dial_errors: RefCell::default(),
            accept_error: Arc::default(),
            looked: Cell::new(Instant::now()),
            exhausted: Cell::new(false),
        }
    }

    /// The peers that this rank dials, from itself on and round again, so that the ranks do not all dial the same ones first.
    pub(crate) fn dialled(&self) -> impl Iterator<Item = usize> + use<L> {
        let (rank, world_size) = (self.core.rank, self.core.world_size);
        (rank + 1..world_size).chain(0..rank).filter(move |peer| !listens(rank, *peer))
    }

    /// Where `peer` listens for this rank on `lane`.
    pub(crate) fn address(&self, peer: usize, lane: usize) -> Result<(&'a PeerInfo, SocketAddr)> {
        let Core { rank, lanes, .. } = *self.core;
        (self.peer_infos.get(peer))
            .and_then(|peer_info| Some((peer_info, to_dial(peer_info.address(rank, lane, lanes)?, self.own))))
            .ok_or_else(|| Error::Rendezvous(format!("rank {peer} gave no address for rank {rank} on lane {lane}")))
    }

    /// The folder in which `peer` listens, if it does in one.
    pub(crate) fn folder(&self, peer: usize) -> Option<(&'a PeerInfo, &'a FolderInfo)> {
        self.peer_infos.get(peer).and_then(|peer_info| Some((peer_info, peer_info.folder()?)))
    }

    /// For what accepts elsewhere: where to put what ends this.
    pub(crate) fn accept_error(&self) -> Arc<OnceLock<AcceptError>> {
        self.accept_error.clone()
    }

    /// There were no descriptors left for `doing` something.
    pub(crate) fn ran_out(&self, doing: &str, error: &io::Error) -> Error {
        self.need.unmet(&format!("rank {}: {doing}", self.core.rank), error)
    }

    /// An error of a task that accepts, as this rank's error.
    fn own_error(&self, AcceptError { doing, error }: &AcceptError) -> Error {
        if ran_out(error) {
            return self.ran_out(doing, error);
        }
        let error = io::Error::new(error.kind(), error.to_string());
        Error::io(format!("rank {}: {doing}", self.core.rank), error)
    }

    /// Attempts to reach `peer` again and again: a listener drops connections when it has too many handshakes. The deadline is the
    /// caller's.
    pub(crate) async fn dial<F>(&self, peer: u32, address: impl Display, mut attempt: impl FnMut() -> F) -> Result<L>
    where
        F: Future<Output = std::result::Result<L, DialError>>,
    {
        loop {
            match attempt().await {
                Ok(connection) => return Ok(connection),
                Err(DialError::Hopeless(error)) => return Err(error),
                Err(DialError::RanOut(error)) => return Err(self.ran_out(&format!("dialling {address}"), &error)),
                Err(DialError::Failed(error)) => {
                    self.dial_errors.borrow_mut().insert(peer as usize, error);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    pub(crate) fn store(&self, lane: u32, peer: u32, connection: L) {
        let mut connections = self.connections.borrow_mut();
        if let Some(slot) = connections.get_mut(lane as usize).and_then(|lane| lane.get_mut(peer as usize)) {
            *slot = Some(connection);
        }
    }

    /// Waits until every part has ended, while the job lives.
    pub(crate) async fn run(
        &self,
        control: &dyn Control,
        protocol: &str,
        deadline: Deadline,
        parts: Join<'_>,
    ) -> Result<()> {
        let bounded = async {
            within(deadline, parts).await.unwrap_or_else(|| {
                let (lane, missing) = self.missing();
                let operation = format!(
                    "connecting over {protocol}{}{}",
                    self.where_looked_for(control, lane, &missing),
                    descriptors::shortage()
                );
                Err(self.core.timeout(operation, deadline, missing))
            })
        };
        let own_error =
            || self.accept_error.get().map(|accept_error| self.own_error(accept_error)).or_else(|| self.starved());
        unless_failed(control, &own_error, bounded).await
    }

    /// The error, when there have been no descriptors left for a while: `zeromq` keeps it to itself when it cannot accept.
    fn starved(&self) -> Option<Error> {
        if self.looked.get().elapsed() < STARVED / 2 {
            return None;
        }
        self.looked.set(Instant::now());
        let error = descriptors::exhausted();
        let before = self.exhausted.replace(error.is_some());
        error.filter(|_| before).map(|error| self.ran_out("connecting", &error))
    }

    /// Where those who are missing on `lane` were dialled or expected, by their number in the job.
    fn where_looked_for(&self, control: &dyn Control, lane: usize, missing: &[usize]) -> String {
        let Core { rank, lanes, .. } = *self.core;
        let dial_errors = self.dial_errors.borrow();
        let address_of = |listener: usize, dialler: usize| {
            self.peer_infos
                .get(listener)
                .map_or("no address".into(), |peer_info| peer_info.describe(dialler, lane, lanes))
        };
        let mut parts: Vec<String> = (missing.iter().take(MAX_SHOWN))
            .map(|peer| {
                let number = control.job_rank(*peer);
                if listens(rank, *peer) {
                    return format!("rank {number} has not connected to {}", address_of(rank, *peer));
                }
                let why = dial_errors.get(peer).map_or("no answer", String::as_str);
                format!("rank {number} at {}: {why}", address_of(*peer, rank))
            })
            .collect();
        match (parts.len(), missing.len() - parts.len()) {
            (0, _) => return String::new(),
            (_, 0) => {}
            (_, more) => parts.push(format!("and {more} more")),
        }
        format!(" ({})", parts.join("; "))
    }

    /// `[lane][peer]`.
    pub(crate) fn into_connections(self) -> Vec<Vec<Option<L>>> {
        self.connections.into_inner()
    }

    /// The first lane on which peers are missing, and these: the lanes after it may not have begun.
    fn missing(&self) -> (usize, Vec<usize>) {
        let connections = self.connections.borrow();
        let of_lane = |lane: &Vec<Option<L>>| -> Vec<usize> {
            let holes = lane.iter().enumerate().filter(|(_, connection)| connection.is_none());
            holes.map(|(peer, _)| peer).filter(|peer| *peer != self.core.rank).collect()
        };
        connections.iter().map(of_lane).enumerate().find(|(_, missing)| !missing.is_empty()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use comm_core::location::{NetworkLocation, OfferedAddress};

    use super::*;
    use crate::rendezvous::Addresses;

    fn peer_infos() -> Vec<PeerInfo> {
        (0..4)
            .map(|rank| {
                let addresses = Addresses::One(OfferedAddress(format!("10.9.0.{rank}:40{rank}0").parse().unwrap()));
                PeerInfo { salt: [0; 32], location: NetworkLocation::default(), addresses }
            })
            .collect()
    }

    #[test]
    fn whoever_is_connected_on_the_lane_under_way_is_not_missing() {
        let core = Core::new(2, 4, 2);
        let peer_infos = peer_infos();
        let own = "10.9.0.2:0".parse().unwrap();
        let pending = PendingConnections::new(&core, &peer_infos, own, core.need("tcp-raw", 1, 0));
        pending.store(0, 0, ());
        assert_eq!(pending.missing(), (0, vec![1, 3]));
        pending.store(0, 1, ());
        pending.store(0, 3, ());
        pending.store(1, 1, ());
        assert_eq!(pending.missing(), (1, vec![0, 3]));
    }

    #[test]
    fn who_is_missing_is_named_with_the_address_and_how_it_was_tried() {
        let ranks = comm_core::local::group(4, 1);
        let core = Core::new(2, 4, 2);
        let peer_infos = peer_infos();
        let own = "10.9.0.2:0".parse().unwrap();
        let pending: PendingConnections<'_, ()> =
            PendingConnections::new(&core, &peer_infos, own, core.need("tcp-raw", 1, 0));
        pending.dial_errors.borrow_mut().insert(3, "Connection refused".into());
        assert_eq!(pending.dialled().collect::<Vec<_>>(), [3, 0]);
        let text = pending.where_looked_for(&*ranks[2].control, 0, &[0, 1, 3]);
        assert_eq!(
            text,
            " (rank 0 at 10.9.0.0:4000: no answer; rank 1 has not connected to 10.9.0.2:4020; rank 3 at 10.9.0.3:4030: Connection refused)"
        );
        let all: Vec<usize> = (0..7).collect();
        assert!(pending.where_looked_for(&*ranks[2].control, 0, &all).contains("and 3 more"));
    }
}
