//! Raw TCP: the control beside ZeroMQ.

mod link;
mod prelude;

use std::cell::RefCell;
use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use comm_core::{Control, Deadline, Error, Incoming, Outgoing, Result, Transport};
use tokio::net::{TcpSocket, TcpStream};

use self::link::Link;
use crate::auth::{self, Edge, Key};
use crate::door::Door;
use crate::lanes::{Lanes, sinks_by_peer};
use crate::options::TcpOptions;
use crate::rendezvous::{Advert, edge, expected_edges, listens};
use crate::runtime::{Core, Join, describe, unless_failed};
use crate::socket::{self, SocketFacts};

/// Messages over plain TCP connections, one for each (pair of ranks, lane): a 64-byte header, then the payload.
///
/// Sends go from the caller's slice to the kernel without a copy; received bytes pass through one reused buffer of 256 KiB
/// for each connection. The runtime, the socket settings and the authentication match [`ZmqTransport`](crate::ZmqTransport),
/// so the difference between the two is the price of ZeroMQ.
pub struct RawTcpTransport {
    lanes: Lanes<Link>,
    core: Core,
    facts: Vec<(String, String)>,
    closed: AtomicBool,
}

impl RawTcpTransport {
    /// Connects every pair of ranks. All ranks call it with the same `lanes`; addresses travel over the control plane.
    ///
    /// # Errors
    /// `InvalidArgument` for options that make no sense, `Unsupported` for an unknown congestion control, `Rendezvous` when
    /// ranks have different settings, `Timeout` naming the ranks that did not connect, or the job's failure.
    pub fn connect(control: &dyn Control, options: &TcpOptions, deadline: Deadline) -> Result<Self> {
        options.validate()?;
        let (rank, world_size) = (control.rank(), control.world_size());
        let core = Core::new("tcp-raw", rank, world_size, options.lanes)?;
        let congestion = options.congestion.as_deref();
        let listener = socket::listen(options.bind, congestion, world_size * options.lanes)?;
        let address =
            listener.local_addr().map_err(|error| Error::io(format!("rank {rank}: reading a port"), error))?;
        let advert = Advert { salt: auth::nonce()?, addresses: vec![address] };
        let adverts = advert.exchange("tcp-raw", options, control, deadline)?;
        let connecting = Connecting {
            key: Key(control.derive_key("tcp-raw")),
            congestion,
            links: RefCell::new((0..options.lanes).map(|_| (0..world_size).map(|_| None).collect()).collect()),
            complaint: RefCell::new(String::new()),
        };
        core.block_on(unless_failed(control, async {
            let mut join = Join::default();
            for peer in (0..world_size).filter(|peer| *peer != rank && !listens(rank, *peer)) {
                for lane in 0..options.lanes {
                    let Some(address) = adverts.get(peer).and_then(|advert| advert.address(rank, lane, options.lanes))
                    else {
                        return Err(Error::Rendezvous(format!("rank {peer} gave no address for lane {lane}")));
                    };
                    join.push(peer, connecting.dial(edge(rank, peer, lane)?, address));
                }
            }
            let expected = expected_edges(rank, world_size, options.lanes)?;
            if !expected.is_empty() {
                join.push(rank, connecting.accept(listener, edge(0, rank, 0)?.listener, expected));
            }
            let operation = || format!("connecting over raw TCP{}", connecting.complaint.borrow());
            core.bounded(operation, deadline, &mut join, |_| connecting.missing(rank)).await
        }))?;
        let links = connecting.links.into_inner();
        let facts = facts(options, links.iter().flatten().flatten().next());
        Ok(RawTcpTransport { lanes: Lanes::new(links), core, facts, closed: AtomicBool::new(false) })
    }
}

impl Transport for RawTcpTransport {
    fn name(&self) -> &str {
        "tcp-raw"
    }

    fn rank(&self) -> usize {
        self.core.rank
    }

    fn world_size(&self) -> usize {
        self.core.world_size
    }

    fn lanes(&self) -> usize {
        self.core.lanes
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        self.core.check(lane, outgoing, incoming)?;
        let operation = describe(lane, outgoing);
        self.core.block_on(async {
            let mut lane = self.lanes.lock(&self.core, lane, deadline).await?;
            let mut sinks = sinks_by_peer(self.core.world_size, incoming).into_iter();
            let mut join = Join::default();
            for (peer, link) in lane.links.iter_mut().enumerate() {
                let sink = sinks.next().flatten();
                let Some(link) = link else { continue };
                let (sender, receiver) = link.split(peer);
                if let Some(message) = outgoing.iter().find(|message| message.peer == peer) {
                    join.push(peer, sender.send(message, &operation));
                }
                if let Some(sink) = sink {
                    join.push(peer, receiver.receive(sink, &operation));
                }
            }
            let outcome = self.core.bounded(|| operation.clone(), deadline, &mut join, Join::waiting_for).await;
            drop(join);
            lane.settle(outcome)
        })
    }

    fn abort(&self, error: &Error) {
        self.core.abort(error);
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Some(error) = self.core.aborted() {
            return Err(error);
        }
        self.core.block_on(async {
            let mut lanes = Vec::new();
            for lane in 0..self.core.lanes {
                lanes.push(self.lanes.lock(&self.core, lane, deadline).await?);
            }
            let mut join = Join::default();
            for lane in &mut lanes {
                for (peer, link) in lane.links.iter_mut().enumerate() {
                    let Some(link) = link else { continue };
                    let (sender, receiver) = link.split(peer);
                    join.push(peer, sender.close());
                    join.push(peer, receiver.drain());
                }
            }
            let outcome = self.core.bounded(|| "closing".to_string(), deadline, &mut join, Join::waiting_for).await;
            drop(join);
            for lane in &mut lanes {
                match &outcome {
                    Ok(()) => lane.close(),
                    Err(error) => lane.fail(error),
                }
            }
            outcome?;
            self.closed.store(true, Ordering::Release);
            Ok(())
        })
    }

    fn facts(&self) -> Vec<(String, String)> {
        self.facts.clone()
    }
}

struct Connecting<'a> {
    key: Key,
    congestion: Option<&'a str>,
    /// `[lane][peer]`.
    links: RefCell<Vec<Vec<Option<Link>>>>,
    /// Why the last attempt to dial failed, for the error at the deadline.
    complaint: RefCell<String>,
}

impl Connecting<'_> {
    async fn accept(&self, listener: std::net::TcpListener, rank: u32, expected: HashSet<Edge>) -> Result<()> {
        let expected = RefCell::new(expected);
        let mut door = Door::open(listener)?;
        while !expected.borrow().is_empty() {
            let (edge, stream) = door
                .admit(|stream| {
                    let expected = &expected;
                    async move {
                        socket::tune(&stream).ok()?;
                        let admitted = prelude::accept(stream, &self.key, rank, auth::nonce().ok()?).await?;
                        // Each connection is let in once: a second proof for it is not another connection.
                        expected.borrow_mut().remove(&admitted.0).then_some(admitted)
                    }
                })
                .await;
            self.store(edge.lane, edge.dialler, stream);
        }
        Ok(())
    }

    async fn dial(&self, edge: Edge, address: SocketAddr) -> Result<()> {
        loop {
            match self.attempt(edge, address).await {
                Ok(stream) => {
                    self.store(edge.lane, edge.listener, stream);
                    return Ok(());
                }
                Err(Attempt::Hopeless(error)) => return Err(error),
                // The listener turns connections away when strangers crowd it; its deadline is ours.
                Err(Attempt::Failed(error)) => {
                    *self.complaint.borrow_mut() = format!(" (last attempt, to {address}: {error})");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    async fn attempt(&self, edge: Edge, address: SocketAddr) -> std::result::Result<TcpStream, Attempt> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket::set_congestion(&socket, self.congestion).map_err(Attempt::Hopeless)?;
        let mut stream = socket.connect(address).await?;
        socket::tune(&stream)?;
        let nonce = auth::nonce().map_err(Attempt::Hopeless)?;
        prelude::dial(&mut stream, &self.key, edge, nonce).await?;
        Ok(stream)
    }

    fn store(&self, lane: u32, peer: u32, stream: TcpStream) {
        if let Some(slot) = self.links.borrow_mut().get_mut(lane as usize).and_then(|lane| lane.get_mut(peer as usize))
        {
            *slot = Some(Link::new(stream));
        }
    }

    /// The peers to whom some connection is missing.
    fn missing(&self, rank: usize) -> Vec<usize> {
        let links = self.links.borrow();
        let world_size = links.first().map_or(0, Vec::len);
        (0..world_size)
            .filter(|peer| *peer != rank && links.iter().any(|lane| lane.get(*peer).is_some_and(Option::is_none)))
            .collect()
    }
}

enum Attempt {
    Failed(std::io::Error),
    Hopeless(Error),
}

impl From<std::io::Error> for Attempt {
    fn from(error: std::io::Error) -> Self {
        Attempt::Failed(error)
    }
}

fn facts(options: &TcpOptions, link: Option<&Link>) -> Vec<(String, String)> {
    let mut facts =
        vec![("connections".to_string(), format!("one TCP connection a pair and lane, {} lanes", options.lanes))];
    if let Some(link) = link {
        let socket = SocketFacts::read(&link.stream);
        facts.push(("congestion control".to_string(), socket.congestion));
        facts.push(("socket buffers (B)".to_string(), socket.buffers));
    }
    facts.push(("encryption".to_string(), "none".to_string()));
    facts
}
