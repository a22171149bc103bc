//! Connections from which a packet filter keeps strangers.
//!
//! Each connection has a listener of its own, which is [closed](filter::close_to_all) from the start: whoever asks for a connection is
//! answered by the kernel, and no connection comes about. The ranks connect in three steps, with the control plane between them:
//!
//! 1. The dialling rank has `zeromq` ask for its connection and then lets it wait. Before `zeromq` has sent anything, the rank learns from
//!    the kernel from which address it asked, and that it was answered; it tells the listening rank the address.
//! 2. The listening rank opens the filter to what comes from that address, new requests excepted, and asks whether the kernel knows the
//!    request. If it does not, the address is translated on its way. Only then does `zeromq` get the listener.
//! 3. The dialling rank lets `zeromq` go on. What it sends first completes the connection.
//!
//! So `zeromq` never accepts a connection of a stranger. Nothing is copied or sent twice.

use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use comm_core::control::ControlExt;
use comm_core::descriptors::ran_out;
use comm_core::driver::Driver;
use comm_core::location::{NetworkLocation, OfferedAddress, bind_address};
use comm_core::{Control, Deadline, Error, Result};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use zeromq::{DealerSocket, Listener, Socket, ZmqError};

use super::connect::{BoundSocket, Connected, GateInUse, Own, PeerConnector, SocketInfo, need, pool, port_of};
use super::connection::PeerEvent;
use super::filter;
use crate::auth::{self, Edge, Key};
use crate::connecting::{AT_ONCE, PendingConnections};
use crate::core::Core;
use crate::kernel_sockets::{self, ConnectionLookup, State, TcpSocket, is_same};
use crate::options::TcpOptions;
use crate::rendezvous::{Addresses, PeerInfo, edge, expected_edges};
use crate::runtime::Join;
use crate::socket::{self, SocketFacts};

/// How long a rank waits at most until its requests are answered, before all use the relay. The kernel repeats a request after 1, 3 and
/// 7 seconds.
const PATIENCE: Duration = Duration::from_secs(8);

/// Pauses between looks at the sockets, the first and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(16));

/// How many times a connection is looked for that should be there.
const LOOKS: usize = 5;

/// With more connections than this in a job, which may all be on one machine, its listeners might not all get a port of one address: the system
/// has 28,232 that it gives by itself, if nobody has changed that.
const MANY: usize = 8192;

/// A value, or why the ranks must do without the filter.
type Filtered<T> = std::result::Result<T, String>;

/// From where a rank has asked for its connections: for each of its addresses, with port 0, the ports by listener and lane, 0 where it has not
/// asked from there. Nearly always it is one address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Sources(Vec<(OfferedAddress, Vec<u16>)>);

impl Sources {
    fn add(&mut self, core: &Core, edge: Edge, source: SocketAddr) {
        let mut address = source;
        address.set_port(0);
        let at = self.0.iter().position(|(known, _)| known.0 == address).unwrap_or_else(|| {
            self.0.push((OfferedAddress(address), vec![0; core.world_size * core.lanes]));
            self.0.len() - 1
        });
        let slot = self.0.get_mut(at).and_then(|(_, ports)| ports.get_mut(Sources::place(core, edge)));
        slot.into_iter().for_each(|port| *port = source.port());
    }

    /// From where it has asked for this connection.
    fn find(&self, core: &Core, edge: Edge) -> Option<SocketAddr> {
        self.0.iter().find_map(|(OfferedAddress(address), ports)| {
            let port = *ports.get(Sources::place(core, edge)).filter(|port| **port != 0)?;
            Some(SocketAddr::new(address.ip(), port))
        })
    }

    fn place(core: &Core, edge: Edge) -> usize {
        edge.listener as usize * core.lanes + edge.lane as usize
    }
}

/// Connects all pairs of ranks; or says, on all ranks alike, why there is no filter between some of them.
pub(super) fn connect(
    core: &Core,
    control: &dyn Control,
    options: &TcpOptions,
    made: Result<()>,
    drivers: &[Driver],
    deadline: Deadline,
) -> Result<Filtered<Connected>> {
    let opened = made.and_then(|()| bind_address(options.bind.as_ref(), control)).and_then(|own| {
        let is_chosen = options.bind.is_none() && control.network().bind.is_none();
        let listen_on = if is_chosen { apart_from_others(core, own) } else { own };
        let doors = Doors::open(core, options, (listen_on, control.network().ports))?;
        let location = NetworkLocation::of(control);
        Ok((own, PeerInfo { salt: auth::nonce()?, location, addresses: doors.addresses(core) }, doors))
    });
    let peer_info = opened.as_ref().map(|(_, peer_info, _)| peer_info.clone()).map_err(Clone::clone);
    let peer_infos = PeerInfo::exchange(peer_info, "tcp", options, control, deadline)?;
    let (own, PeerInfo { salt, .. }, mut doors) = opened?;
    let refusals = peer_infos.iter().enumerate();
    let mut refusals = refusals.filter_map(|(rank, peer_info)| Some((rank, peer_info.refusal()?)));
    if let Some((rank, why)) = refusals.next() {
        return Ok(Err(format!("rank {}: {why}", control.job_rank(rank))));
    }
    let connector = PeerConnector {
        core,
        options,
        key: Key(control.derive_key("zeromq")),
        salt,
        deadline,
        pending: PendingConnections::new(core, &peer_infos, own, need(core, options, core.lanes)),
        pool: pool(options),
    };
    let dials = Dials::ask(&connector, control, drivers)?;
    let sources = dials.as_ref().map(|dials| dials.sources(core)).map_err(Clone::clone);
    let sources = match agree(control, "tcp sources", &sources, deadline)? {
        Ok(sources) => sources,
        Err(why) => return Ok(Err(why)),
    };
    let admitted = doors.admit(&connector, control, &sources)?;
    if let Err(why) = agree(control, "tcp admitted", &admitted, deadline)? {
        return Ok(Err(why));
    }
    let Ok(mut dials) = dials else { return Err(Error::Internal("the ranks agreed on what one lacks".into())) };
    // What accepted sockets inherit; `zeromq` asks for the buffers itself.
    let facts = doors
        .doors
        .first()
        .map(|door| SocketFacts { buffers: socket::buffers_asked_for(), ..SocketFacts::read(&door.listener) });
    for (lane, driver) in drivers.iter().enumerate() {
        let mut join = Join::default();
        for Door { edge, listener, .. } in doors.doors.extract_if(.., |door| door.edge.lane as usize == lane) {
            let connector = &connector;
            join.push(edge.dialler as usize, async move {
                let bound = BoundSocket::adopt(core.rank, Listener::Tcp(listener)).await?;
                connector.accept_peer(edge, bound).await
            });
        }
        let (connector, of_lane) = (&connector, dials.0.extract_if(.., |dial| dial.edge.lane as usize == lane));
        join.share(core.rank, AT_ONCE, of_lane.collect::<Vec<_>>().into_iter(), move |dial| dial.finish(connector));
        driver.block_on(connector.pending.run(control, "ZeroMQ", deadline, join))?;
    }
    let connections = connector.pending.into_connections();
    Ok(Ok(Connected { connections, relays: None, sockets: SocketInfo::Tcp(facts), gate: GateInUse::Filter }))
}

/// What every rank has; or why one has none, with its number.
fn agree<T: Serialize + for<'de> Deserialize<'de>>(
    control: &dyn Control,
    label: &str,
    mine: &Filtered<T>,
    deadline: Deadline,
) -> Result<Filtered<Vec<T>>> {
    let told: Vec<Filtered<T>> = control.gather(label, mine, deadline)?;
    let named = told
        .into_iter()
        .enumerate()
        .map(|(rank, told)| told.map_err(|why| format!("rank {}: {why}", control.job_rank(rank))));
    Ok(named.collect())
}

/// A listener for one connection.
struct Door {
    edge: Edge,
    listener: TcpListener,
    address: SocketAddr,
}

/// All listeners of this rank; or why they have no filter.
struct Doors {
    doors: Vec<Door>,
    refused: Option<String>,
}

impl Doors {
    fn open(core: &Core, options: &TcpOptions, (own, ports): Own) -> Result<Doors> {
        let mut refused_by_kernel = None;
        let mut doors = Vec::new();
        let refuse = |why| Ok(Doors { doors: Vec::new(), refused: Some(why) });
        for edge in expected_edges(core.rank, core.world_size, core.lanes)? {
            let opened = socket::listen_prepared(own, ports, options.congestion.as_deref(), |socket| {
                if let Err(error) = filter::close_to_all(socket) {
                    refused_by_kernel.get_or_insert_with(|| refused(&error));
                }
            });
            let listener = match opened {
                Ok(listener) => listener,
                Err(Error::Io { source, .. }) if ports.is_none() && source.kind() == io::ErrorKind::AddrInUse => {
                    return refuse(format!(
                        "{} of this machine has no free ports left for a listener for each connection",
                        own.ip()
                    ));
                }
                Err(error) => return Err(error),
            };
            if let Some(why) = refused_by_kernel {
                return refuse(why);
            }
            doors.push(Door { edge, address: port_of(&listener, core.rank)?, listener });
        }
        Ok(Doors { doors, refused: None })
    }

    fn addresses(&self, core: &Core) -> Addresses {
        match &self.refused {
            Some(why) => Addresses::Refused(why.clone()),
            None => {
                Addresses::each(core.world_size, core.lanes, self.doors.iter().map(|door| (&door.edge, &door.address)))
            }
        }
    }

    /// Opens each listener to its peer's address, of which rank `peer` has told `sources[peer]`.
    fn admit(&self, connector: &PeerConnector<'_>, control: &dyn Control, sources: &[Sources]) -> Result<Filtered<()>> {
        let mut expected = Vec::with_capacity(self.doors.len());
        for Door { edge, listener, address } in &self.doors {
            let Some(source) = sources.get(edge.dialler as usize).and_then(|told| told.find(connector.core, *edge))
            else {
                return Err(Error::Protocol {
                    who: format!("rank {}", control.job_rank(edge.dialler as usize)),
                    what: format!("no address from which it connects on lane {}", edge.lane),
                });
            };
            if let Err(error) = filter::admit_only(listener, source) {
                return Ok(Err(refused(&error)));
            }
            expected.push((*edge, *address, source));
        }
        let mut looks = Looks::default();
        loop {
            expected = match connector.unknown(expected)? {
                Ok(unknown) => unknown,
                Err(why) => return Ok(Err(why)),
            };
            let Some((edge, address, source)) = expected.first() else { return Ok(Ok(())) };
            if looks.count == LOOKS {
                return Ok(Err(format!(
                    "the connection of rank {} from {source} to {address} arrives from another address: it is translated on its way, or \
                     too many other programs connect",
                    control.job_rank(edge.dialler as usize)
                )));
            }
            looks.pause(control)?;
        }
    }
}

type Asking = Pin<Box<dyn Future<Output = (Result<(), ZmqError>, DealerSocket, mpsc::Receiver<PeerEvent>)> + Send>>;

/// A connection that `zeromq` has asked for.
struct Dial {
    edge: Edge,
    address: SocketAddr,
    /// `zeromq`'s dialling. It has been polled once, and waits for the kernel's answer.
    asking: Asking,
    /// From where it has asked, once it was answered.
    source: Option<SocketAddr>,
    /// How many times its socket was not found, or not alone.
    missed: usize,
}

impl Dial {
    /// Lets `zeromq` open the connection.
    async fn finish(self, connector: &PeerConnector<'_>) -> Result<()> {
        let Dial { edge, address, asking, .. } = self;
        let (outcome, socket, events) = asking.await;
        outcome.map_err(|error| Error::PeerLost {
            rank: edge.listener as usize,
            operation: "connecting over ZeroMQ".into(),
            detail: format!("{address}: {error}"),
        })?;
        connector.pending.store(edge.lane, edge.listener, connector.connection(edge.listener, socket, events));
        Ok(())
    }
}

/// A connection that this rank listens for, where, and from where it comes.
type Expected = (Edge, SocketAddr, SocketAddr);

/// All connections that this rank dials.
struct Dials(Vec<Dial>);

impl Dials {
    /// Asks for all connections, until all are answered.
    fn ask(connector: &PeerConnector<'_>, control: &dyn Control, drivers: &[Driver]) -> Result<Filtered<Dials>> {
        let patience = Deadline::after(PATIENCE.min(connector.deadline.remaining() / 2));
        let mut known: HashSet<u64> = match connector.own_sockets()? {
            Ok(own) => own.into_iter().map(|(_, inode)| inode).collect(),
            Err(why) => return Ok(Err(why)),
        };
        let mut dials = Vec::new();
        for (lane, driver) in drivers.iter().enumerate() {
            for peer in connector.pending.dialled() {
                let edge = edge(connector.core.rank, peer, lane)?;
                match connector.ask(edge, driver)? {
                    Ok((address, asking)) => dials.push(Dial { edge, address, asking, source: None, missed: 0 }),
                    Err(why) => return Ok(Err(why)),
                }
            }
        }
        let mut looks = Looks::default();
        while dials.iter().any(|dial| dial.source.is_none()) {
            let own = match connector.own_sockets()? {
                Ok(own) => own,
                Err(why) => return Ok(Err(why)),
            };
            let new: Vec<TcpSocket> =
                (own.into_iter().filter(|(_, inode)| !known.contains(inode))).filter_map(TcpSocket::of).collect();
            // Of a socket that has not been answered the kernel does not tell whom it asks.
            let is_asking = new.iter().any(|socket| socket.state == State::Asked) && !patience.has_passed();
            for dial in dials.iter_mut().filter(|dial| dial.source.is_none()) {
                let sockets = new.iter().filter(|socket| socket.remote.is_some_and(|to| is_same(to, dial.address)));
                match sockets.collect::<Vec<_>>()[..] {
                    [TcpSocket { state: State::Established, local, .. }] => dial.source = Some(*local),
                    [] if is_asking => {}
                    [] if dial.missed < LOOKS => dial.missed += 1,
                    [_] | [] => return Ok(Err(format!("nothing answers at {}", dial.address))),
                    // Another part of this program has connected there at the same time. It is not known which one is whose.
                    [..] if dial.missed == LOOKS => {
                        return Ok(Err(format!("this process connects to {} again and again", dial.address)));
                    }
                    ref all @ [..] => {
                        dial.missed += 1;
                        known.extend(all.iter().map(|socket| socket.inode));
                        let driver = drivers.get(dial.edge.lane as usize);
                        let driver = driver.ok_or_else(|| Error::Internal("a lane has no driver".into()))?;
                        match connector.ask(dial.edge, driver)? {
                            Ok((_, asking)) => dial.asking = asking,
                            Err(why) => return Ok(Err(why)),
                        }
                    }
                }
            }
            if dials.iter().any(|dial| dial.source.is_none()) {
                looks.pause(control)?;
            }
        }
        Ok(Ok(Dials(dials)))
    }

    fn sources(&self, core: &Core) -> Sources {
        let mut sources = Sources::default();
        for dial in &self.0 {
            dial.source.into_iter().for_each(|source| sources.add(core, dial.edge, source));
        }
        sources
    }
}

impl PeerConnector<'_> {
    /// Has `zeromq` ask for a connection, and stops it before it sends anything.
    fn ask(&self, edge: Edge, driver: &Driver) -> Result<Filtered<(SocketAddr, Asking)>> {
        let (peer_info, address) = self.pending.address(edge.listener as usize, edge.lane as usize)?;
        let (asking, outcome) = driver.block_on(async {
            let (mut socket, events) = self.dealer(edge, &peer_info.salt)?;
            let mut asking: Asking = Box::pin(async move {
                let outcome = socket.connect(&format!("tcp://{address}")).await;
                (outcome, socket, events)
            });
            // The socket becomes writable in a turn of the runtime, so `zeromq` cannot get further than this.
            let outcome = poll_fn(|cx| Poll::Ready(asking.as_mut().poll(cx))).await;
            Ok((asking, outcome))
        })?;
        match outcome {
            Poll::Pending => Ok(Ok((address, asking))),
            Poll::Ready((Err(ZmqError::Network(error)), ..)) if ran_out(&error) => {
                Err(self.pending.ran_out(&format!("dialling {address}"), &error))
            }
            Poll::Ready((Err(error), ..)) => Ok(Err(format!("dialling {address}: {error}"))),
            Poll::Ready((Ok(()), ..)) => Err(Error::Internal(format!("zeromq connected to {address} without waiting"))),
        }
    }

    fn own_sockets(&self) -> Result<Filtered<Vec<kernel_sockets::OwnSocket>>> {
        self.read("the list of this process's descriptors", kernel_sockets::own())
    }

    /// Those of the expected connections that the kernel does not know.
    fn unknown(&self, expected: Vec<Expected>) -> Result<Filtered<Vec<Expected>>> {
        self.read("what the kernel knows of a connection", unknown(expected))
    }

    fn read<T>(&self, what: &str, read: io::Result<T>) -> Result<Filtered<T>> {
        match read {
            Ok(value) => Ok(Ok(value)),
            Err(error) if ran_out(&error) => Err(self.pending.ran_out(&format!("reading {what}"), &error)),
            Err(error) => Ok(Err(format!("{what} cannot be read ({error})"))),
        }
    }
}

/// Those of the expected connections that the kernel does not know.
fn unknown(expected: Vec<Expected>) -> io::Result<Vec<Expected>> {
    if expected.is_empty() {
        return Ok(expected);
    }
    let (mut lookup, mut unknown) = (ConnectionLookup::open()?, Vec::new());
    for expected @ (_, address, source) in expected {
        if !matches!(lookup.state(address, source)?, Some(State::Answered | State::Established)) {
            unknown.push(expected);
        }
    }
    Ok(unknown)
}

fn refused(error: &io::Error) -> String {
    format!("the system refuses it ({error})")
}

/// Where a rank listens that may listen anywhere on its machine: where a job has many connections over loopback, on an address of its own.
fn apart_from_others(core: &Core, own: SocketAddr) -> SocketAddr {
    /// The one of rank 0 is 127.1.0.1.
    const FIRST: u32 = 0x7f01_0001;
    let connections = core.world_size * (core.world_size - 1) / 2 * core.lanes;
    let rank = u32::try_from(core.rank).ok().filter(|rank| *rank < 1 << 16);
    match rank.map(|rank| SocketAddr::from((Ipv4Addr::from(FIRST + rank), 0))) {
        // Where loopback has no other addresses it cannot be bound.
        Some(apart)
            if connections > MANY
                && own.ip() == IpAddr::V4(Ipv4Addr::LOCALHOST)
                && TcpListener::bind(apart).is_ok() =>
        {
            apart
        }
        _ => own,
    }
}

/// Counts looks at something that changes by itself.
#[derive(Default)]
struct Looks {
    count: usize,
}

impl Looks {
    /// Waits until the next look, while the job lives.
    fn pause(&mut self, control: &dyn Control) -> Result<()> {
        let factor = 1 << self.count.min(4);
        self.count += 1;
        std::thread::sleep((PAUSES.0 * factor).min(PAUSES.1));
        match control.failure().and_then(|_| control.settled_failure()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_found_by_listener_and_lane() {
        let core = Core::new(2, 4, 3);
        let edge = |listener, lane| Edge { dialler: 2, listener, lane };
        let told = [(edge(0, 0), "10.9.0.2:400"), (edge(3, 2), "10.9.0.2:401"), (edge(0, 2), "[fe80::1%7]:402")];
        let mut sources = Sources::default();
        told.into_iter().for_each(|(edge, source)| sources.add(&core, edge, source.parse().unwrap()));
        assert_eq!(sources.0.len(), 2);
        let sources: Sources = postcard::from_bytes(&postcard::to_stdvec(&sources).unwrap()).unwrap();
        let find = |listener, lane| sources.find(&core, edge(listener, lane)).map(|source| source.to_string());
        assert_eq!(find(0, 0).as_deref(), Some("10.9.0.2:400"));
        assert_eq!(find(3, 2).as_deref(), Some("10.9.0.2:401"));
        // What a filter and a look-up need of it.
        assert_eq!(find(0, 2).as_deref(), Some("[fe80::1]:402"));
        assert_eq!((find(3, 0), find(9, 0)), (None, None));
        // A rank may tell fewer ports than there are connections.
        let short = Sources(vec![(OfferedAddress("10.9.0.2:0".parse().unwrap()), vec![7])]);
        assert_eq!(
            (short.find(&core, edge(0, 0)).map(|source| source.port()), short.find(&core, edge(3, 0))),
            (Some(7), None)
        );
    }

    #[test]
    fn only_ranks_of_many_connections_over_loopback_listen_apart_from_one_another() {
        let loopback: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let of = |rank, world_size, lanes, own| apart_from_others(&Core::new(rank, world_size, lanes), own);
        if TcpListener::bind("127.1.0.1:0").is_err() {
            println!("skipped: loopback has no other addresses here");
            return;
        }
        assert_eq!(of(0, 256, 1, loopback).to_string(), "127.1.0.1:0");
        assert_eq!(of(255, 256, 1, loopback).to_string(), "127.1.1.0:0");
        assert_eq!(of(1, 64, 4, loopback), loopback);
        assert_ne!(of(1, 64, 8, loopback), loopback);
        let other: SocketAddr = "10.9.0.1:0".parse().unwrap();
        assert_eq!(of(1, 256, 1, other), other);
    }
}
