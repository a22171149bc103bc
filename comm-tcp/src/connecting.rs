//! What connecting the pairs of ranks has in common, whatever the protocol.

use std::cell::RefCell;
use std::fmt::Display;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use comm_core::driver::within;
use comm_core::{Control, Deadline, Error, Result};

use crate::core::Core;
use crate::rendezvous::{Advert, listens};
use crate::runtime::{Join, unless_failed};

/// The links of one rank while they are being made.
pub(crate) struct Connecting<'a, L> {
    core: &'a Core,
    /// `[lane][peer]`.
    links: RefCell<Vec<Vec<Option<L>>>>,
    /// Why the last attempt to dial failed, for the error at the deadline.
    complaint: RefCell<String>,
}

/// An attempt to dial that failed.
pub(crate) enum Attempt {
    /// Another one may succeed.
    Failed(String),
    Hopeless(Error),
}

impl From<std::io::Error> for Attempt {
    fn from(error: std::io::Error) -> Self {
        Attempt::Failed(error.to_string())
    }
}

impl<'a, L> Connecting<'a, L> {
    pub(crate) fn new(core: &'a Core) -> Self {
        let none = || (0..core.world_size).map(|_| None).collect();
        let links = RefCell::new((0..core.lanes).map(|_| none()).collect());
        Connecting { core, links, complaint: RefCell::new(String::new()) }
    }

    /// The peers that this rank dials.
    pub(crate) fn dialled(&self) -> impl Iterator<Item = usize> + use<L> {
        let (rank, world_size) = (self.core.rank, self.core.world_size);
        (0..world_size).filter(move |peer| *peer != rank && !listens(rank, *peer))
    }

    /// Where `peer`, of these `adverts`, listens for this rank on `lane`.
    pub(crate) fn address<'b>(
        &self,
        adverts: &'b [Advert],
        peer: usize,
        lane: usize,
    ) -> Result<(&'b Advert, SocketAddr)> {
        let Core { rank, lanes, .. } = *self.core;
        (adverts.get(peer))
            .and_then(|advert| Some((advert, advert.address(rank, lane, lanes)?)))
            .ok_or_else(|| Error::Rendezvous(format!("rank {peer} gave no address for rank {rank} on lane {lane}")))
    }

    /// Attempts again and again: a listener turns connections away when strangers crowd it. The deadline is the caller's.
    pub(crate) async fn dial<F>(&self, address: impl Display, mut attempt: impl FnMut() -> F) -> Result<L>
    where
        F: Future<Output = std::result::Result<L, Attempt>>,
    {
        loop {
            match attempt().await {
                Ok(link) => return Ok(link),
                Err(Attempt::Hopeless(error)) => return Err(error),
                Err(Attempt::Failed(error)) => {
                    *self.complaint.borrow_mut() = format!(" (last attempt, to {address}: {error})");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    pub(crate) fn store(&self, lane: u32, peer: u32, link: L) {
        let mut links = self.links.borrow_mut();
        if let Some(slot) = links.get_mut(lane as usize).and_then(|lane| lane.get_mut(peer as usize)) {
            *slot = Some(link);
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
                let operation = format!("connecting over {protocol}{}", self.complaint.borrow());
                Err(self.core.timeout(operation, deadline, self.missing()))
            })
        };
        unless_failed(control, bounded).await
    }

    /// `[lane][peer]`.
    pub(crate) fn into_links(self) -> Vec<Vec<Option<L>>> {
        self.links.into_inner()
    }

    /// The peers that are missing on the first lane on which one is: the lanes after it may not have begun.
    fn missing(&self) -> Vec<usize> {
        let links = self.links.borrow();
        let of_lane = |lane: &Vec<Option<L>>| -> Vec<usize> {
            let holes = lane.iter().enumerate().filter(|(_, link)| link.is_none());
            holes.map(|(peer, _)| peer).filter(|peer| *peer != self.core.rank).collect()
        };
        links.iter().map(of_lane).find(|missing| !missing.is_empty()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_connected_on_the_lane_under_way_is_not_missing() {
        let core = Core::new(2, 4, 2);
        let connecting = Connecting::new(&core);
        connecting.store(0, 0, ());
        assert_eq!(connecting.missing(), [1, 3]);
        connecting.store(0, 1, ());
        connecting.store(0, 3, ());
        connecting.store(1, 1, ());
        assert_eq!(connecting.missing(), [0, 3]);
    }
}
