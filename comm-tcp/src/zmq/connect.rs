//! How the DEALER sockets of a transport find their peers.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};

use comm_core::driver::{Driver, may_block};
use comm_core::place::{Offer, Place, bind_address};
use comm_core::{Control, Deadline, Error, Result};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use zeromq::util::PeerIdentity;
use zeromq::{DealerSocket, Listener, Socket, SocketOptions, ZmqError};

use super::gate::{self, News, Rooms};
use super::link::{Link, PeerEvent, watch};
use super::pool::Pool;
use super::token;
use crate::auth::{self, Edge, Key, PROOF_LEN};
use crate::connecting::{Attempt, Connecting};
use crate::core::{Core, Need};
use crate::house::{self, Folder, House};
use crate::options::{OVERHEAD, TcpOptions};
use crate::rendezvous::{Addresses, Advert, edge, expected_edges};
use crate::runtime::Join;
use crate::socket::{self, SocketFacts};

/// All connections of this rank.
pub(super) struct Connected {
    /// `[lane][peer]`.
    pub(super) links: Vec<Vec<Option<Link>>>,
    /// What runs the gate's relays, if there are any.
    pub(super) relays: Option<Relays>,
    pub(super) sockets: About,
}

/// What the kernel says of the sockets.
pub(super) enum About {
    /// Of a connection that came through the gate.
    Tcp(Option<SocketFacts>),
    Unix {
        buffers: String,
    },
}

/// Descriptors beside those of the connections: the gate's listener and runtime, and a little for the sockets' accepting.
const BESIDE: usize = 8;

/// Descriptors of a lane's driver.
const DRIVER: usize = 4;

/// What [`all`] and the drivers take.
pub(super) fn need(core: &Core, options: &TcpOptions) -> Need {
    // Of a connection behind the gate the public end, both ends of the private one, and the listener that waits for it.
    let accepted = if options.gate && !options.ipc { 4 } else { 2 };
    core.need(if options.ipc { "tcp-ipc" } else { "tcp" }, accepted, BESIDE + DRIVER * core.lanes)
}

/// Connects this rank with all others, lane after lane. The sockets of a lane belong to that lane's driver.
///
/// Listening sockets are served all the time, by a driver's keeper if nobody else, so it does not matter how far the others are.
pub(super) fn all(
    core: &Core,
    control: &dyn Control,
    options: &TcpOptions,
    drivers: &[Driver],
    deadline: Deadline,
) -> Result<Connected> {
    may_block()?;
    let need = need(core, options);
    let key = Key(control.derive_key("zeromq"));
    let opened = bind_address(options.bind, control).and_then(|own| {
        let doors = Doors::open(core, options, own, drivers)?;
        let advert =
            Advert { salt: auth::nonce()?, place: Place::of(control), addresses: doors.addresses(core, options)? };
        Ok((own, doors, advert))
    });
    let advert = opened.as_ref().map(|(.., advert)| advert.clone()).map_err(Clone::clone);
    let adverts = Advert::exchange(advert, "tcp", options, control, deadline)?;
    let (own, mut doors, Advert { salt, .. }) = opened?;
    let folders: Vec<&Folder> = adverts.iter().filter_map(Advert::folder).collect();
    if options.ipc {
        house::see_all(core.rank, &folders, control, deadline)?;
    }
    let accepted = Arc::new(Mutex::new(None));
    let connecting = Connecting::new(core, &adverts, own, need);
    let mut relays = None;
    if let Some(listener) = doors.gate.take() {
        let started = Relays::start(core.rank)?;
        let news = News { accepted: accepted.clone(), trouble: connecting.trouble() };
        started.keep(listener, key.clone(), salt, std::mem::take(&mut doors.rooms), news)?;
        relays = Some(started);
    }
    let joining = Joining { core, options, key, salt, deadline, connecting, pool: pool(options) };
    for (lane, driver) in drivers.iter().enumerate() {
        driver.block_on(async {
            let mut join = Join::default();
            for (edge, bound) in doors.bound.extract_if(|edge, _| edge.lane as usize == lane) {
                join.push(edge.dialler as usize, joining.welcome(edge, bound));
            }
            for peer in joining.connecting.dialled() {
                let edge = edge(core.rank, peer, lane)?;
                let (salt, endpoint) = joining.endpoint(edge)?;
                join.push(peer, joining.dial(edge, endpoint, salt));
            }
            joining.connecting.run(control, "ZeroMQ", deadline, join).await
        })?;
    }
    let sockets = if options.ipc {
        About::Unix { buffers: house::enlarge_buffers(&folders) }
    } else {
        About::Tcp(accepted.lock().unwrap_or_else(PoisonError::into_inner).take())
    };
    Ok(Connected { links: joining.connecting.into_links(), relays, sockets })
}

fn pool(options: &TcpOptions) -> Pool {
    Pool::new(options.segment + OVERHEAD, 2 * options.window / options.segment)
}

/// A runtime with a thread of its own, for relaying must go on whatever the callers do.
pub(super) struct Relays {
    runtime: Option<Runtime>,
}

impl Relays {
    fn start(rank: usize) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("comm-tcp-gate")
            .enable_all()
            .build()
            .map_err(|error| Error::io(format!("rank {rank}: starting the runtime of the gate"), error))?;
        Ok(Relays { runtime: Some(runtime) })
    }

    /// Opens the gate in front of these sockets.
    fn keep(&self, listener: TcpListener, key: Key, salt: [u8; PROOF_LEN], rooms: Rooms, news: News) -> Result<()> {
        let Some(runtime) = &self.runtime else { return Err(Error::Internal("the gate is being dropped".into())) };
        let _context = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener)
            .map_err(|error| Error::io("registering the gate's listener with the runtime", error))?;
        runtime.spawn(gate::keep(listener, key, salt, rooms, news));
        Ok(())
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waits for nothing, so that it may happen anywhere.
            runtime.shutdown_background();
        }
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
    /// Over TCP without a gate: where each socket listens.
    public: HashMap<Edge, SocketAddr>,
    /// With a gate: its listener, and where each socket listens behind it.
    gate: Option<TcpListener>,
    rooms: Rooms,
    /// Holds the Unix sockets: those behind the gate, or those that the peers dial themselves.
    house: Option<House>,
}

impl Doors {
    fn open(core: &Core, options: &TcpOptions, own: SocketAddr, drivers: &[Driver]) -> Result<Self> {
        let edges = expected_edges(core.rank, core.world_size, core.lanes)?;
        let (bound, public) = (HashMap::new(), HashMap::new());
        let mut doors = Doors { bound, public, gate: None, rooms: Rooms::new(), house: None };
        if options.ipc {
            doors.house = Some(House::build(core.rank)?);
        } else if options.gate && !edges.is_empty() {
            doors.gate = Some(socket::listen(own, options.congestion.as_deref())?);
            doors.house = Some(House::build(core.rank)?);
        }
        for edge in edges {
            let driver =
                drivers.get(edge.lane as usize).ok_or_else(|| Error::Internal("a lane has no driver".into()))?;
            let listener = doors.listen(core.rank, edge, options, own)?;
            let bound = driver.block_on(async {
                let mut socket = DealerSocket::new();
                let events = watch(&mut socket);
                socket.bind_listener(listener).await.map_err(|error| failed(core.rank, "binding", &error))?;
                Ok(Bound { socket, events })
            })?;
            doors.bound.insert(edge, bound);
        }
        Ok(doors)
    }

    fn listen(&mut self, rank: usize, edge: Edge, options: &TcpOptions, own: SocketAddr) -> Result<Listener> {
        if let Some(house) = &self.house {
            let (listener, path) = house.listen(rank, edge)?;
            self.rooms.insert(edge, path);
            return Ok(Listener::Ipc(listener));
        }
        let listener = socket::listen(own, options.congestion.as_deref())?;
        let address =
            listener.local_addr().map_err(|error| Error::io(format!("rank {rank}: reading a port"), error))?;
        self.public.insert(edge, address);
        Ok(Listener::Tcp(listener))
    }

    /// The folder of the Unix sockets; or one address, or one for each rank and lane where ranks that do not dial get the first
    /// of all.
    fn addresses(&self, core: &Core, options: &TcpOptions) -> Result<Addresses> {
        let Core { rank, world_size, lanes, .. } = *core;
        if let Some(house) = self.house.as_ref().filter(|_| options.ipc) {
            return Ok(Addresses::Unix(house.announce(rank)?));
        }
        if let Some(gate) = &self.gate {
            let address = gate.local_addr().map_err(|error| Error::io("reading the gate's port", error))?;
            return Ok(Addresses::Tcp(vec![Offer(address)]));
        }
        let Some(filler) = self.public.values().next() else { return Ok(Addresses::Tcp(Vec::new())) };
        let mut addresses = vec![Offer(*filler); world_size * lanes];
        for (edge, address) in &self.public {
            if let Some(slot) = addresses.get_mut(edge.dialler as usize * lanes + edge.lane as usize) {
                *slot = Offer(*address);
            }
        }
        Ok(Addresses::Tcp(addresses))
    }
}

struct Joining<'a> {
    core: &'a Core,
    options: &'a TcpOptions,
    key: Key,
    salt: [u8; PROOF_LEN],
    deadline: Deadline,
    connecting: Connecting<'a, Link>,
    pool: Pool,
}

impl Joining<'_> {
    /// Waits for the peer of a bound socket, then stops listening.
    async fn welcome(&self, edge: Edge, bound: Bound) -> Result<()> {
        let Bound { mut socket, mut events } = bound;
        match events.recv().await {
            // The gate has checked it already; without a gate this is the only check.
            Some(PeerEvent::Accepted(identity)) if token::verify(&identity, &self.key, &self.salt) == Some(edge) => {}
            Some(PeerEvent::Accepted(_)) => {
                return Err(Error::Protocol {
                    who: format!("the process that connected in place of rank {}", edge.dialler),
                    what: "a ZMTP identity that is not a token of this job".into(),
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
            return Err(failed(self.core.rank, "unbinding", error));
        }
        self.connecting.store(edge.lane, edge.dialler, self.link(edge.dialler, socket, events));
        Ok(())
    }

    /// Where to dial for a connection, as `zeromq` writes it, and the salt of the token.
    fn endpoint(&self, edge: Edge) -> Result<(&[u8; PROOF_LEN], String)> {
        let (peer, lane) = (edge.listener as usize, edge.lane as usize);
        if let Some((advert, folder)) = self.connecting.folder(peer) {
            return Ok((&advert.salt, format!("ipc://{}", folder.socket(edge).display())));
        }
        let (advert, address) = self.connecting.address(peer, lane)?;
        Ok((&advert.salt, format!("tcp://{address}")))
    }

    async fn dial(&self, edge: Edge, endpoint: String, salt: &[u8; PROOF_LEN]) -> Result<()> {
        let attempt = || async {
            let token = token::issue(&self.key, edge, salt);
            let identity = PeerIdentity::try_from(token)
                .map_err(|error| Attempt::Hopeless(failed(self.core.rank, "making an identity", &error)))?;
            let mut options = SocketOptions::default();
            options.peer_identity(identity).connect_timeout(self.deadline.remaining());
            let mut socket = DealerSocket::with_options(options);
            let events = watch(&mut socket);
            match socket.connect(&endpoint).await {
                Ok(()) => Ok(self.link(edge.listener, socket, events)),
                Err(ZmqError::Network(error)) => Err(error.into()),
                Err(error) => Err(Attempt::Failed(error.to_string())),
            }
        };
        let link = self.connecting.dial(edge.listener, &endpoint, attempt).await?;
        self.connecting.store(edge.lane, edge.listener, link);
        Ok(())
    }

    fn link(&self, peer: u32, socket: DealerSocket, events: mpsc::Receiver<PeerEvent>) -> Link {
        let TcpOptions { segment, window, .. } = *self.options;
        Link::new(peer as usize, socket, events, segment, window, self.pool.clone())
    }
}

fn failed(rank: usize, what: &str, error: &ZmqError) -> Error {
    Error::io(format!("rank {rank}: {what} a ZeroMQ socket"), std::io::Error::other(error.to_string()))
}
