//! ZeroMQ.

mod frame;
mod gate;
mod link;
mod pool;
mod token;
mod zmtp;

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use comm_core::{Control, Deadline, Error, Incoming, Outgoing, Result, Transport};
use tempfile::TempDir;
use tokio::sync::mpsc;
use zeromq::util::PeerIdentity;
use zeromq::{DealerSocket, Listener, Socket, SocketOptions, ZmqError};

pub(crate) use self::frame::OVERHEAD;
use self::gate::Rooms;
use self::link::{Link, PeerEvent, watch};
use self::pool::Pool;
use crate::auth::{self, Edge, Key};
use crate::lanes::{Lanes, sinks_by_peer};
use crate::options::TcpOptions;
use crate::rendezvous::{Advert, edge, expected_edges, listens};
use crate::runtime::{Core, Join, describe, unless_failed};
use crate::socket::{self, SocketFacts};

/// Messages over ZeroMQ: one DEALER pair for each (pair of ranks, lane).
///
/// A payload travels in segments, at most a window of them in flight; the receiver gives credit back as it uses them up.
/// The sender copies each byte once into a segment, and `zeromq` once more when it encodes it.
pub struct ZmqTransport {
    lanes: Lanes<Link>,
    core: Core,
    facts: Vec<(String, String)>,
    closed: AtomicBool,
}

impl ZmqTransport {
    /// Connects every pair of ranks. All ranks call it with the same options; addresses travel over the control plane.
    ///
    /// # Errors
    /// `InvalidArgument` for options that make no sense, `Unsupported` for an unknown congestion control, `Rendezvous` when
    /// ranks have different settings, `Timeout` naming the ranks that did not connect, or the job's failure.
    pub fn connect(control: &dyn Control, options: &TcpOptions, deadline: Deadline) -> Result<Self> {
        options.validate()?;
        let (rank, world_size) = (control.rank(), control.world_size());
        let core = Core::new("tcp", rank, world_size, options.lanes)?;
        let salt = auth::nonce()?;
        let key = Key(control.derive_key("zeromq"));
        let mut doors = core.block_on(Doors::open(rank, world_size, options))?;
        let advert = Advert { salt, addresses: doors.addresses(world_size, options.lanes)? };
        let adverts = advert.exchange("tcp", options, control, deadline)?;
        let connecting = Connecting {
            rank,
            options,
            key,
            deadline,
            links: RefCell::new((0..options.lanes).map(|_| (0..world_size).map(|_| None).collect()).collect()),
            complaint: RefCell::new(String::new()),
            pool: Pool::new(options.segment + OVERHEAD, 2 * options.window / options.segment),
        };
        let accepted_facts = RefCell::new(None);
        core.block_on(unless_failed(control, async {
            let mut join = Join::default();
            for (edge, bound) in doors.bound.drain() {
                let peer = edge.dialler as usize;
                join.push(peer, connecting.welcome(edge, bound, &salt));
            }
            if let Some(listener) = doors.gate.take() {
                join.push(rank, gate::keep(listener, &connecting.key, &salt, &doors.rooms, &accepted_facts));
            }
            for (peer, advert) in adverts.iter().enumerate() {
                for lane in (0..options.lanes).filter(|_| peer != rank && !listens(rank, peer)) {
                    let address = advert.address(rank, lane, options.lanes).ok_or_else(|| {
                        Error::Rendezvous(format!("rank {peer} gave no address for rank {rank} on lane {lane}"))
                    })?;
                    join.push(peer, connecting.dial(edge(rank, peer, lane)?, address, advert));
                }
            }
            let operation = || format!("connecting over ZeroMQ{}", connecting.complaint.borrow());
            core.bounded(operation, deadline, &mut join, |_| connecting.missing()).await
        }))?;
        let links = connecting.links.into_inner();
        let facts = facts(options, accepted_facts.into_inner());
        Ok(ZmqTransport { lanes: Lanes::new(links), core, facts, closed: AtomicBool::new(false) })
    }
}

impl Transport for ZmqTransport {
    fn name(&self) -> &str {
        "tcp"
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
                let message = outgoing.iter().find(|message| message.peer == peer);
                if let (Some(link), true) = (link, sink.is_some() || message.is_some()) {
                    join.push(peer, link.exchange(message, sink, &operation));
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
                    if let Some(link) = link {
                        join.push(peer, link.close());
                    }
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

/// A socket that waits for its only peer.
struct Bound {
    socket: DealerSocket,
    events: mpsc::Receiver<PeerEvent>,
}

/// Everything that listens while a transport connects.
struct Doors {
    bound: HashMap<Edge, Bound>,
    /// Without a gate: where each socket listens.
    public: HashMap<Edge, SocketAddr>,
    /// With a gate: its listener, and where each socket listens behind it.
    gate: Option<TcpListener>,
    rooms: Rooms,
    /// Holds the Unix sockets; removed with this value.
    _house: Option<TempDir>,
}

impl Doors {
    async fn open(rank: usize, world_size: usize, options: &TcpOptions) -> Result<Self> {
        let edges = expected_edges(rank, world_size, options.lanes)?;
        let congestion = options.congestion.as_deref();
        let mut doors =
            Doors { bound: HashMap::new(), public: HashMap::new(), gate: None, rooms: Rooms::new(), _house: None };
        if edges.is_empty() {
            return Ok(doors);
        }
        let house = match options.gate {
            true => {
                doors.gate = Some(socket::listen(options.bind, congestion, edges.len())?);
                Some(private_directory(rank)?)
            }
            false => None,
        };
        for edge in edges {
            let listener = match &house {
                Some(house) => {
                    let path = house.path().join(format!("{}-{}", edge.dialler, edge.lane));
                    let listener = UnixListener::bind(&path).map_err(|error| {
                        Error::io(format!("rank {rank}: listening on the Unix socket {}", path.display()), error)
                    })?;
                    doors.rooms.insert(edge, path);
                    Listener::Ipc(listener)
                }
                None => {
                    let listener = socket::listen(options.bind, congestion, 1)?;
                    let address = listener
                        .local_addr()
                        .map_err(|error| Error::io(format!("rank {rank}: reading a port"), error))?;
                    doors.public.insert(edge, address);
                    Listener::Tcp(listener)
                }
            };
            let mut socket = DealerSocket::new();
            let events = watch(&mut socket);
            socket.bind_listener(listener).await.map_err(|error| zmq_failed(rank, "binding", &error))?;
            doors.bound.insert(edge, Bound { socket, events });
        }
        doors._house = house;
        Ok(doors)
    }

    /// One address, or one for each rank and lane where ranks that do not dial get the first of all.
    fn addresses(&self, world_size: usize, lanes: usize) -> Result<Vec<SocketAddr>> {
        if let Some(gate) = &self.gate {
            let address = gate.local_addr().map_err(|error| Error::io("reading the gate's port", error))?;
            return Ok(vec![address]);
        }
        let Some(filler) = self.public.values().next() else { return Ok(Vec::new()) };
        let mut addresses = vec![*filler; world_size * lanes];
        for (edge, address) in &self.public {
            if let Some(slot) = addresses.get_mut(edge.dialler as usize * lanes + edge.lane as usize) {
                *slot = *address;
            }
        }
        Ok(addresses)
    }
}

/// A fresh directory that only this user may enter.
fn private_directory(rank: usize) -> Result<TempDir> {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new()
        .prefix("comm-tcp-")
        .permissions(std::fs::Permissions::from_mode(0o700))
        .tempdir()
        .map_err(|error| Error::io(format!("rank {rank}: making a private directory for Unix sockets"), error))
}

struct Connecting<'a> {
    rank: usize,
    options: &'a TcpOptions,
    key: Key,
    deadline: Deadline,
    /// `[lane][peer]`.
    links: RefCell<Vec<Vec<Option<Link>>>>,
    /// Why the last attempt to dial failed, for the error at the deadline.
    complaint: RefCell<String>,
    pool: Pool,
}

impl Connecting<'_> {
    /// Waits for the peer of a bound socket, then stops listening.
    async fn welcome(&self, edge: Edge, bound: Bound, salt: &[u8; auth::PROOF_LEN]) -> Result<()> {
        let Bound { mut socket, mut events } = bound;
        match events.recv().await {
            // The gate has checked it already; without a gate this is the only check.
            Some(PeerEvent::Accepted(identity)) if token::verify(&identity, &self.key, salt) == Some(edge) => {}
            Some(PeerEvent::Accepted(_)) => {
                return Err(Error::Protocol {
                    who: format!("somebody who connected in place of rank {}", edge.dialler),
                    what: "a ZMTP identity that is no token of this job".into(),
                });
            }
            Some(PeerEvent::Disconnected) | None => {
                return Err(Error::PeerLost {
                    rank: edge.dialler as usize,
                    operation: "connecting over ZeroMQ".into(),
                    detail: "its connection ended".into(),
                });
            }
        }
        if let Some(error) = socket.unbind_all().await.first() {
            return Err(zmq_failed(self.rank, "unbinding", error));
        }
        self.store(edge.lane, edge.dialler, socket, events);
        Ok(())
    }

    async fn dial(&self, edge: Edge, address: SocketAddr, advert: &Advert) -> Result<()> {
        loop {
            let token = token::issue(&self.key, edge, &advert.salt);
            let identity =
                PeerIdentity::try_from(token).map_err(|error| zmq_failed(self.rank, "making an identity", &error))?;
            let mut options = SocketOptions::default();
            options.peer_identity(identity).connect_timeout(self.deadline.remaining());
            let mut socket = DealerSocket::with_options(options);
            let events = watch(&mut socket);
            match socket.connect(&format!("tcp://{address}")).await {
                Ok(()) => {
                    self.store(edge.lane, edge.listener, socket, events);
                    return Ok(());
                }
                // The gate turns connections away when strangers crowd it; the deadline of all attempts is the caller's.
                Err(error) => {
                    *self.complaint.borrow_mut() = format!(" (last attempt, to {address}: {error})");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
    }

    fn store(&self, lane: u32, peer: u32, socket: DealerSocket, events: mpsc::Receiver<PeerEvent>) {
        let (lane, peer) = (lane as usize, peer as usize);
        if let Some(slot) = self.links.borrow_mut().get_mut(lane).and_then(|lane| lane.get_mut(peer)) {
            let TcpOptions { segment, window, .. } = *self.options;
            *slot = Some(Link::new(peer, socket, events, segment, window, self.pool.clone()));
        }
    }

    /// The peers to whom some connection is missing.
    fn missing(&self) -> Vec<usize> {
        let links = self.links.borrow();
        let world_size = links.first().map_or(0, Vec::len);
        (0..world_size)
            .filter(|peer| *peer != self.rank && links.iter().any(|lane| lane.get(*peer).is_some_and(Option::is_none)))
            .collect()
    }
}

fn zmq_failed(rank: usize, what: &str, error: &ZmqError) -> Error {
    Error::io(format!("rank {rank}: {what} a ZeroMQ socket"), std::io::Error::other(error.to_string()))
}

fn facts(options: &TcpOptions, accepted: Option<SocketFacts>) -> Vec<(String, String)> {
    let fact = |name: &str, value: String| (name.to_string(), value);
    let asked = options.congestion.as_deref().unwrap_or("the kernel's default");
    let mut facts = vec![
        fact("connections", format!("one DEALER pair a pair of ranks and lane, {} lanes", options.lanes)),
        fact("gate", if options.gate { "on" } else { "off" }.to_string()),
        fact("window (B)", options.window.to_string()),
        fact("segment (B)", options.segment.to_string()),
    ];
    match accepted {
        Some(socket) => {
            facts.push(fact("congestion control (accepted side)", socket.congestion));
            facts.push(fact("socket buffers (B)", socket.buffers));
        }
        None => {
            facts.push(fact("congestion control (accepted side)", format!("asked for {asked}")));
            facts.push(fact("socket buffers (B)", format!("asked for {} each way", socket::SOCKET_BUFFER)));
        }
    }
    facts.push(fact(
        "congestion control (dialled side)",
        format!("{}, unless a route says otherwise", socket::default_congestion()),
    ));
    facts.push(fact("encryption", "none".to_string()));
    facts
}
