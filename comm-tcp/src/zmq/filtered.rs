//! Connections from which a packet filter keeps strangers.
//!
//! Each connection has a listener of its own, which is [closed](filter::close_to_all) from the start: whoever asks for a connection is
//! answered by the kernel, and no connection comes about. The ranks connect in three steps, with the control plane between them:
//!
//! 1. The dialling rank has `zeromq` ask for its connection and then lets it wait. Before `zeromq` has sent anything, the rank learns from
//!    the kernel's table of sockets from which address it asked, and that it was answered; it tells the listening rank the address.
//! 2. The listening rank opens the filter to what comes from that address, new requests excepted, and looks whether the kernel knows the
//!    request. If it does not, the address is translated on its way. Only then does `zeromq` get the listener.
//! 3. The dialling rank lets `zeromq` go on. What it sends first completes the connection.
//!
//! So `zeromq` never accepts a connection of a stranger. Nothing is copied or sent twice.

use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::io;
use std::net::{SocketAddr, TcpListener};
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
use crate::connecting::PendingConnections;
use crate::core::Core;
use crate::options::TcpOptions;
use crate::rendezvous::{Addresses, PeerInfo, edge, expected_edges};
use crate::runtime::Join;
use crate::socket::{self, SocketFacts};
use crate::socket_table::{self, Row, State, is_same};

/// How long a rank waits at most until its requests are answered, before all use the relay. The kernel repeats a request after 1, 3 and
/// 7 seconds.
const PATIENCE: Duration = Duration::from_secs(8);

/// Pauses between looks at the table of sockets, the first and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(16));

/// How many times a row is looked for that should be there: one is left out when the table changes while it is read.
const LOOKS: usize = 5;

/// A value, or why the ranks must do without the filter.
type Filtered<T> = std::result::Result<T, String>;

/// From where a rank has asked for a connection to `listener` on `lane`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Source {
    listener: u32,
    lane: u32,
    address: OfferedAddress,
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
        let doors = Doors::open(core, options, (own, control.network().ports))?;
        let location = NetworkLocation::of(control);
        Ok((own, PeerInfo { salt: auth::nonce()?, location, addresses: doors.addresses(core) }, doors))
    });
    let peer_info = opened.as_ref().map(|(_, peer_info, _)| peer_info.clone()).map_err(Clone::clone);
    let peer_infos = PeerInfo::exchange(peer_info, "tcp", options, control, deadline)?;
    let (own, PeerInfo { salt, .. }, mut doors) = opened?;
    let connector = PeerConnector {
        core,
        options,
        key: Key(control.derive_key("zeromq")),
        salt,
        deadline,
        pending: PendingConnections::new(core, &peer_infos, own, need(core, options, core.lanes)),
        pool: pool(options),
    };
    let dials = match &doors.refused {
        None => Dials::ask(&connector, control, drivers)?,
        Some(why) => Err(why.clone()),
    };
    let sources = dials.as_ref().map(Dials::sources).map_err(Clone::clone);
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
        for dial in dials.0.extract_if(.., |dial| dial.edge.lane as usize == lane) {
            join.push(dial.edge.listener as usize, dial.finish(&connector));
        }
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

/// All listeners of this rank.
struct Doors {
    doors: Vec<Door>,
    /// Why they have no filter.
    refused: Option<String>,
}

impl Doors {
    fn open(core: &Core, options: &TcpOptions, (own, ports): Own) -> Result<Doors> {
        let mut refused = None;
        let mut doors = Vec::new();
        for edge in expected_edges(core.rank, core.world_size, core.lanes)? {
            let listener = socket::listen_prepared(own, ports, options.congestion.as_deref(), |socket| {
                if let Err(error) = filter::close_to_all(socket) {
                    refused.get_or_insert_with(|| format!("the system refuses it ({error})"));
                }
            })?;
            doors.push(Door { edge, address: port_of(&listener, core.rank)?, listener });
        }
        Ok(Doors { doors, refused })
    }

    fn addresses(&self, core: &Core) -> Addresses {
        Addresses::each(core.world_size, core.lanes, self.doors.iter().map(|door| (&door.edge, &door.address)))
    }

    /// Opens each listener to its peer's address, of which rank `peer` has told `sources[peer]`.
    fn admit(
        &self,
        connector: &PeerConnector<'_>,
        control: &dyn Control,
        sources: &[Vec<Source>],
    ) -> Result<Filtered<()>> {
        let mut expected = Vec::with_capacity(self.doors.len());
        for Door { edge, listener, address } in &self.doors {
            let mut told = sources.get(edge.dialler as usize).into_iter().flatten();
            let source = told.find(|source| (source.listener, source.lane) == (edge.listener, edge.lane));
            let Some(Source { address: OfferedAddress(source), .. }) = source else {
                return Err(Error::Protocol {
                    who: format!("rank {}", control.job_rank(edge.dialler as usize)),
                    what: format!("no address from which it connects on lane {}", edge.lane),
                });
            };
            if let Err(error) = filter::admit_only(listener, *source) {
                return Ok(Err(format!("the system refuses it ({error})")));
            }
            expected.push((*edge, *address, *source));
        }
        let mut looks = Looks::default();
        loop {
            let rows = match connector.rows()? {
                Ok(rows) => rows,
                Err(why) => return Ok(Err(why)),
            };
            let is_known = |address: SocketAddr, source: SocketAddr| {
                rows.iter().any(|row| {
                    matches!(row.state, State::Answered | State::Established)
                        && is_same(row.local, address)
                        && is_same(row.remote, source)
                })
            };
            let Some((edge, address, source)) =
                expected.iter().find(|(_, address, source)| !is_known(*address, *source))
            else {
                return Ok(Ok(()));
            };
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

/// All connections that this rank dials.
struct Dials(Vec<Dial>);

impl Dials {
    /// Asks for all connections, until all are answered.
    fn ask(connector: &PeerConnector<'_>, control: &dyn Control, drivers: &[Driver]) -> Result<Filtered<Dials>> {
        let patience = Deadline::after(PATIENCE.min(connector.deadline.remaining() / 2));
        let mut known: HashSet<u64> = match connector.rows()? {
            Ok(rows) => rows.iter().map(|row| row.inode).collect(),
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
            let (rows, own) = match (connector.rows()?, connector.own_sockets()?) {
                (Ok(rows), Ok(own)) => (rows, own),
                (Err(why), _) | (_, Err(why)) => return Ok(Err(why)),
            };
            let is_new = |row: &Row| own.contains(&row.inode) && !known.contains(&row.inode);
            let new: Vec<Row> = rows.into_iter().filter(is_new).collect();
            for dial in dials.iter_mut().filter(|dial| dial.source.is_none()) {
                let sockets: Vec<&Row> = new.iter().filter(|row| is_same(row.remote, dial.address)).collect();
                match sockets[..] {
                    [Row { state: State::Established, local, .. }] => dial.source = Some(*local),
                    [Row { state: State::Asked, .. }] if !patience.has_passed() => {}
                    [] if dial.missed < LOOKS => dial.missed += 1,
                    [_] | [] => return Ok(Err(format!("nothing answers at {}", dial.address))),
                    // Another part of this program has connected there at the same time. It is not known which one is whose.
                    [..] if dial.missed == LOOKS => {
                        return Ok(Err(format!("this process connects to {} again and again", dial.address)));
                    }
                    [..] => {
                        dial.missed += 1;
                        known.extend(sockets.iter().map(|row| row.inode));
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

    fn sources(&self) -> Vec<Source> {
        let told = |dial: &Dial| {
            let Edge { listener, lane, .. } = dial.edge;
            Some(Source { listener, lane, address: OfferedAddress(dial.source?) })
        };
        self.0.iter().filter_map(told).collect()
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

    /// The kernel's table of sockets.
    fn rows(&self) -> Result<Filtered<Vec<Row>>> {
        self.read("the table of sockets", socket_table::rows())
    }

    fn own_sockets(&self) -> Result<Filtered<HashSet<u64>>> {
        self.read("the list of this process's descriptors", socket_table::own_sockets())
    }

    fn read<T>(&self, what: &str, read: io::Result<T>) -> Result<Filtered<T>> {
        match read {
            Ok(value) => Ok(Ok(value)),
            Err(error) if ran_out(&error) => Err(self.pending.ran_out(&format!("reading {what}"), &error)),
            Err(error) => Ok(Err(format!("{what} cannot be read ({error})"))),
        }
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
