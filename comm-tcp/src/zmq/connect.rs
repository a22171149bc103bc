//! How the DEALER sockets of a transport find their peers: behind a packet filter or a relay, or without a gate.

use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};

use comm_core::addresses::PortRange;
use comm_core::driver::Driver;
use comm_core::location::{NetworkLocation, OfferedAddress, bind_address};
use comm_core::{Control, Deadline, Error, Result};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use zeromq::util::PeerIdentity;
use zeromq::{DealerSocket, Listener, Socket, SocketOptions, ZmqError};

use super::connection::{Connection, PeerEvent, watch};
use super::filtered;
use super::gate::{self, GateReport, PrivateSockets};
use super::pool::Pool;
use super::token;
use crate::auth::{self, Edge, Key, PROOF_LEN};
use crate::connecting::{AT_ONCE, DialError, PendingConnections};
use crate::core::{Core, DescriptorNeed};
use crate::options::{Gate, OVERHEAD, TcpOptions};
use crate::rendezvous::{Addresses, PeerInfo, edge, expected_edges};
use crate::runtime::Join;
use crate::socket::{self, SocketFacts};
use crate::socket_folder::{self, FolderInfo, SocketFolder};

/// All connections of this rank.
pub(super) struct Connected {
    /// `[lane][peer]`.
    pub(super) connections: Vec<Vec<Option<Connection>>>,
    /// What runs the gate's relays, if there are any.
    pub(super) relays: Option<Relays>,
    pub(super) sockets: SocketInfo,
    pub(super) gate: GateInUse,
}

/// What keeps strangers from the sockets.
pub(super) enum GateInUse {
    Filter,
    /// `because` the filter, which was asked for, is not to be had.
    Relay {
        because: Option<String>,
    },
    Off,
    Folder,
}

/// What the kernel says of the sockets.
pub(super) enum SocketInfo {
    /// Of a connection that a peer made, or what it inherits from its listener.
    Tcp(Option<SocketFacts>),
    Unix {
        buffers: String,
    },
}

/// Descriptors beside those of the connections: the gate's listener and runtime, and a little for the sockets' accepting.
const BESIDE: usize = 8;

/// Descriptors of a lane's driver.
const DRIVER: usize = 4;

/// What [`all`] takes, and so many drivers that are still to be made.
pub(super) fn need(core: &Core, options: &TcpOptions, drivers: usize) -> DescriptorNeed {
    // Of a connection behind the gate the public end, both ends of the private one, and the listener that waits for it.
    let accepted = if options.gate == Gate::Relay && !options.ipc { 4 } else { 2 };
    core.need(if options.ipc { "tcp-ipc" } else { "tcp" }, accepted, BESIDE + DRIVER * drivers)
}

/// Connects this rank with all others. The sockets of a lane belong to that lane's driver. A rank that could not be `made` ready for this
/// tells the others, and all fail.
pub(super) fn all(
    core: &Core,
    control: &dyn Control,
    options: &TcpOptions,
    made: Result<()>,
    drivers: &[Driver],
    deadline: Deadline,
) -> Result<Connected> {
    if options.ipc || options.gate != Gate::Filter {
        return unfiltered(core, control, options, made, drivers, deadline);
    }
    filtered::connect(core, control, options, made, drivers, deadline)?.or_else(|why| {
        let options = TcpOptions { gate: Gate::Relay, ..options.clone() };
        // It takes more than the filter. The drivers are there.
        let made = need(core, &options, 0).check();
        let connected = unfiltered(core, control, &options, made, drivers, deadline)?;
        Ok(Connected { gate: GateInUse::Relay { because: Some(why) }, ..connected })
    })
}

/// Connects lane after lane, without a packet filter.
///
/// Listening sockets are served all the time, by a driver's keeper if nobody else, so it does not matter how far the others are.
fn unfiltered(
    core: &Core,
    control: &dyn Control,
    options: &TcpOptions,
    made: Result<()>,
    drivers: &[Driver],
    deadline: Deadline,
) -> Result<Connected> {
    let key = Key(control.derive_key("zeromq"));
    let opened = made.and_then(|()| bind_address(options.bind.as_ref(), control)).and_then(|own| {
        let listeners = Listeners::open(core, options, (own, control.network().ports), drivers)?;
        let peer_info = PeerInfo {
            salt: auth::nonce()?,
            location: NetworkLocation::of(control),
            addresses: listeners.addresses(core, options)?,
        };
        Ok((own, listeners, peer_info))
    });
    let peer_info = opened.as_ref().map(|(.., peer_info)| peer_info.clone()).map_err(Clone::clone);
    let peer_infos = PeerInfo::exchange(peer_info, "tcp", options, control, deadline)?;
    let (own, mut listeners, PeerInfo { salt, .. }) = opened?;
    let folders: Vec<&FolderInfo> = peer_infos.iter().filter_map(PeerInfo::folder).collect();
    if options.ipc {
        socket_folder::check_all_reachable(core.rank, &folders, control, deadline)?;
    }
    let accepted = Arc::new(Mutex::new(None));
    let pending = PendingConnections::new(core, &peer_infos, own, need(core, options, core.lanes));
    let mut relays = None;
    if let Some(listener) = listeners.gate.take() {
        let started = Relays::start(core.rank)?;
        let report = GateReport { accepted: accepted.clone(), accept_error: pending.accept_error() };
        started.open_gate(listener, key.clone(), salt, std::mem::take(&mut listeners.private_sockets), report)?;
        relays = Some(started);
    }
    let connector = PeerConnector { core, options, key, salt, deadline, pending, pool: pool(options) };
    for (lane, driver) in drivers.iter().enumerate() {
        driver.block_on(async {
            let mut join = Join::default();
            for (edge, bound) in listeners.bound.extract_if(|edge, _| edge.lane as usize == lane) {
                join.push(edge.dialler as usize, connector.accept_peer(edge, bound));
            }
            let connector = &connector;
            join.share(core.rank, AT_ONCE, connector.pending.dialled(), move |peer| async move {
                let edge = edge(core.rank, peer, lane)?;
                let (salt, endpoint) = connector.endpoint(edge)?;
                connector.dial(edge, endpoint, salt).await
            });
            connector.pending.run(control, "ZeroMQ", deadline, join).await
        })?;
    }
    let sockets = if options.ipc {
        SocketInfo::Unix { buffers: socket_folder::enlarge_buffers(&folders) }
    } else {
        SocketInfo::Tcp(accepted.lock().unwrap_or_else(PoisonError::into_inner).take())
    };
    let gate = match options.gate {
        _ if options.ipc => GateInUse::Folder,
        Gate::Off => GateInUse::Off,
        Gate::Relay | Gate::Filter => GateInUse::Relay { because: None },
    };
    Ok(Connected { connections: connector.pending.into_connections(), relays, sockets, gate })
}

pub(super) fn pool(options: &TcpOptions) -> Pool {
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
    fn open_gate(
        &self,
        listener: TcpListener,
        key: Key,
        salt: [u8; PROOF_LEN],
        private_sockets: PrivateSockets,
        report: GateReport,
    ) -> Result<()> {
        let Some(runtime) = &self.runtime else { return Err(Error::Internal("the gate is being dropped".into())) };
        let _context = runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener)
            .map_err(|error| Error::io("registering the gate's listener with the runtime", error))?;
        runtime.spawn(gate::serve(listener, key, salt, private_sockets, report));
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
pub(super) struct BoundSocket {
    socket: DealerSocket,
    events: mpsc::Receiver<PeerEvent>,
}

impl BoundSocket {
    /// A socket that accepts connections of `listener`. To be called within the runtime of its driver.
    pub(super) async fn adopt(rank: usize, listener: Listener) -> Result<BoundSocket> {
        let mut socket = DealerSocket::new();
        let events = watch(&mut socket);
        socket.bind_listener(listener).await.map_err(|error| failed(rank, "binding", &error))?;
        Ok(BoundSocket { socket, events })
    }
}

/// The address that listeners take, with port 0, and the ports that they may have.
pub(super) type Own = (SocketAddr, Option<PortRange>);

/// Everything that listens while a transport connects.
struct Listeners {
    bound: HashMap<Edge, BoundSocket>,
    /// Over TCP without a gate: where each socket listens.
    public: HashMap<Edge, SocketAddr>,
    /// With a gate: its listener, and where each socket listens behind it.
    gate: Option<TcpListener>,
    private_sockets: PrivateSockets,
    /// Holds the Unix sockets: those behind the gate, or those that the peers dial themselves.
    socket_folder: Option<SocketFolder>,
}

impl Listeners {
    fn open(core: &Core, options: &TcpOptions, own: Own, drivers: &[Driver]) -> Result<Self> {
        let edges = expected_edges(core.rank, core.world_size, core.lanes)?;
        let (bound, public) = (HashMap::new(), HashMap::new());
        let mut listeners =
            Listeners { bound, public, gate: None, private_sockets: PrivateSockets::new(), socket_folder: None };
        if options.ipc {
            listeners.socket_folder = Some(SocketFolder::create(core.rank)?);
        } else if options.gate != Gate::Off && !edges.is_empty() {
            listeners.gate = Some(socket::listen(own.0, own.1, options.congestion.as_deref())?);
            listeners.socket_folder = Some(SocketFolder::create(core.rank)?);
        }
        for edge in edges {
            let driver =
                drivers.get(edge.lane as usize).ok_or_else(|| Error::Internal("a lane has no driver".into()))?;
            let listener = listeners.listen(core.rank, edge, options, own)?;
            let bound = driver.block_on(BoundSocket::adopt(core.rank, listener))?;
            listeners.bound.insert(edge, bound);
        }
        Ok(listeners)
    }

    fn listen(&mut self, rank: usize, edge: Edge, options: &TcpOptions, own: Own) -> Result<Listener> {
        if let Some(socket_folder) = &self.socket_folder {
            let (listener, path) = socket_folder.listen(rank, edge)?;
            self.private_sockets.insert(edge, path);
            return Ok(Listener::Ipc(listener));
        }
        let listener = socket::listen(own.0, own.1, options.congestion.as_deref())?;
        self.public.insert(edge, port_of(&listener, rank)?);
        Ok(Listener::Tcp(listener))
    }

    /// The folder of the Unix sockets; or one address, or a port for each connection.
    fn addresses(&self, core: &Core, options: &TcpOptions) -> Result<Addresses> {
        let Core { rank, world_size, lanes, .. } = *core;
        if let Some(socket_folder) = self.socket_folder.as_ref().filter(|_| options.ipc) {
            return Ok(Addresses::Unix(socket_folder.announce(rank)?));
        }
        if let Some(gate) = &self.gate {
            return Ok(Addresses::One(OfferedAddress(port_of(gate, rank)?)));
        }
        Ok(Addresses::each(world_size, lanes, self.public.iter()))
    }
}

/// The address of a listener, with its port.
pub(super) fn port_of(listener: &TcpListener, rank: usize) -> Result<SocketAddr> {
    listener.local_addr().map_err(|error| Error::io(format!("rank {rank}: reading a port"), error))
}

pub(super) struct PeerConnector<'a> {
    pub(super) core: &'a Core,
    pub(super) options: &'a TcpOptions,
    pub(super) key: Key,
    pub(super) salt: [u8; PROOF_LEN],
    pub(super) deadline: Deadline,
    pub(super) pending: PendingConnections<'a, Connection>,
    pub(super) pool: Pool,
}

impl PeerConnector<'_> {
    /// Waits for the peer of a bound socket, then stops listening.
    pub(super) async fn accept_peer(&self, edge: Edge, bound: BoundSocket) -> Result<()> {
        let BoundSocket { mut socket, mut events } = bound;
        match events.recv().await {
            // The relay has checked it already, and the filter has let only the peer's connection in; without a gate this is the only check.
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
        self.pending.store(edge.lane, edge.dialler, self.connection(edge.dialler, socket, events));
        Ok(())
    }

    /// A socket for the connection `edge` to the rank that announced `salt`, and its events. To be made within the runtime of its driver.
    pub(super) fn dealer(
        &self,
        edge: Edge,
        salt: &[u8; PROOF_LEN],
    ) -> Result<(DealerSocket, mpsc::Receiver<PeerEvent>)> {
        let token = token::issue(&self.key, edge, salt);
        let identity =
            PeerIdentity::try_from(token).map_err(|error| failed(self.core.rank, "making an identity", &error))?;
        let mut options = SocketOptions::default();
        // Whoever waits for the connection has the deadline.
        options.peer_identity(identity).no_connect_timeout();
        let mut socket = DealerSocket::with_options(options);
        let events = watch(&mut socket);
        Ok((socket, events))
    }

    /// Where to dial for a connection, as `zeromq` writes it, and the salt of the token.
    fn endpoint(&self, edge: Edge) -> Result<(&[u8; PROOF_LEN], String)> {
        let (peer, lane) = (edge.listener as usize, edge.lane as usize);
        if let Some((peer_info, folder)) = self.pending.folder(peer) {
            return Ok((&peer_info.salt, format!("ipc://{}", folder.socket(edge).display())));
        }
        let (peer_info, address) = self.pending.address(peer, lane)?;
        Ok((&peer_info.salt, format!("tcp://{address}")))
    }

    async fn dial(&self, edge: Edge, endpoint: String, salt: &[u8; PROOF_LEN]) -> Result<()> {
        let attempt = || async {
            let (mut socket, events) = self.dealer(edge, salt).map_err(DialError::Hopeless)?;
            match socket.connect(&endpoint).await {
                Ok(()) => Ok(self.connection(edge.listener, socket, events)),
                Err(ZmqError::Network(error)) => Err(error.into()),
                Err(error) => Err(DialError::Failed(error.to_string())),
            }
        };
        let connection = self.pending.dial(edge.listener, &endpoint, attempt).await?;
        self.pending.store(edge.lane, edge.listener, connection);
        Ok(())
    }

    pub(super) fn connection(&self, peer: u32, socket: DealerSocket, events: mpsc::Receiver<PeerEvent>) -> Connection {
        let TcpOptions { segment, window, .. } = *self.options;
        Connection::new(peer as usize, socket, events, segment, window, self.pool.clone())
    }
}

fn failed(rank: usize, what: &str, error: &ZmqError) -> Error {
    Error::io(format!("rank {rank}: {what} a ZeroMQ socket"), std::io::Error::other(error.to_string()))
}
