//! How the connections of raw TCP are made.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use comm_core::driver::may_block;
use comm_core::location::{NetworkLocation, OfferedAddress, bind_address};
use comm_core::{Control, Deadline, Error, Result};
use tokio::net::{TcpSocket, TcpStream};

use super::connection::Connection;
use super::prelude;
use crate::acceptor::Acceptor;
use crate::auth::{self, Edge, Key};
use crate::connecting::{AT_ONCE, DialError, PendingConnections};
use crate::core::Core;
use crate::options::TcpOptions;
use crate::rendezvous::{Addresses, PeerInfo, edge, expected_edges};
use crate::runtime::{self, Join};
use crate::socket;

/// Descriptors beside those of the connections: the listener, the runtime's, the abort signal.
const BESIDE: usize = 8;

/// Connects this rank with all others: `[lane][peer]`. The runtime lives only as long as this takes.
pub(super) fn all(
    core: &Core,
    control: &dyn Control,
    options: &TcpOptions,
    deadline: Deadline,
) -> Result<Vec<Vec<Option<Connection>>>> {
    // Connecting waits in a runtime, though what follows has none.
    may_block()?;
    let Core { rank, world_size, lanes, .. } = *core;
    let congestion = options.congestion.as_deref();
    let need = core.need("tcp-raw", 1, BESIDE);
    let opened = need.check().and_then(|()| bind_address(options.bind.as_ref(), control)).and_then(|own| {
        let listener = socket::listen(own, control.network().ports, congestion)?;
        let address =
            listener.local_addr().map_err(|error| Error::io(format!("rank {rank}: reading a port"), error))?;
        let addresses = Addresses::One(OfferedAddress(address));
        Ok((own, listener, PeerInfo { salt: auth::nonce()?, location: NetworkLocation::of(control), addresses }))
    });
    let peer_info = opened.as_ref().map(|(.., peer_info)| peer_info.clone()).map_err(Clone::clone);
    let peer_infos = PeerInfo::exchange(peer_info, "tcp-raw", options, control, deadline)?;
    let (own, listener, _) = opened?;
    let pending = PendingConnections::new(core, &peer_infos, own, need);
    let key = Key(control.derive_key("tcp-raw"));
    runtime::temporary(rank)?.block_on(async {
        let mut join = Join::default();
        let (pending, key) = (&pending, &key);
        let dialled = pending.dialled().flat_map(|peer| (0..lanes).map(move |lane| (peer, lane)));
        join.share(rank, AT_ONCE, dialled, move |(peer, lane)| async move {
            let (_, address) = pending.address(peer, lane)?;
            dial(pending, key, edge(rank, peer, lane)?, address, congestion).await
        });
        let expected = expected_edges(rank, world_size, lanes)?;
        if !expected.is_empty() {
            join.push(rank, accept(pending, key, listener, edge(0, rank, 0)?.listener, expected));
        }
        pending.run(control, "raw TCP", deadline, join).await
    })?;
    Ok(pending.into_connections())
}

async fn accept(
    pending: &PendingConnections<'_, Connection>,
    key: &Key,
    listener: std::net::TcpListener,
    rank: u32,
    expected: HashSet<Edge>,
) -> Result<()> {
    let expected = Mutex::new(expected);
    let missing = || expected.lock().unwrap_or_else(PoisonError::into_inner);
    let listener = tokio::net::TcpListener::from_std(listener)
        .map_err(|error| Error::io("registering a listener with the runtime", error))?;
    let mut acceptor = Acceptor::open(listener);
    while !missing().is_empty() {
        let (edge, stream) = acceptor
            .admit(|stream| {
                let missing = &missing;
                async move {
                    socket::tune(&stream).ok()?;
                    let admitted = prelude::accept(stream, key, rank, auth::nonce().ok()?).await?;
                    // Each connection is admitted once: a second proof for it is not another connection.
                    missing().remove(&admitted.0).then_some(admitted)
                }
            })
            .await
            .map_err(|error| pending.ran_out("accepting a connection", &error))?;
        let leave = |error| Error::io("taking a connection out of the runtime", error);
        pending.store(edge.lane, edge.dialler, leave_runtime(stream).map_err(leave)?);
    }
    Ok(())
}

async fn dial(
    pending: &PendingConnections<'_, Connection>,
    key: &Key,
    edge: Edge,
    address: SocketAddr,
    congestion: Option<&str>,
) -> Result<()> {
    let attempt = || async {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket::set_congestion(&socket, congestion).map_err(DialError::Hopeless)?;
        let mut stream = socket.connect(address).await?;
        // While nothing listens there on a port of the ephemeral range, the kernel may connect a dialler to itself.
        if stream.local_addr()? == address {
            return Err(DialError::Failed("nothing listens there".into()));
        }
        socket::tune(&stream)?;
        let nonce = auth::nonce().map_err(DialError::Hopeless)?;
        prelude::dial(&mut stream, key, edge, nonce).await?;
        Ok(leave_runtime(stream)?)
    };
    let connection = pending.dial(edge.listener, address, attempt).await?;
    pending.store(edge.lane, edge.listener, connection);
    Ok(())
}

/// The socket itself, still non-blocking.
fn leave_runtime(stream: TcpStream) -> std::io::Result<Connection> {
    stream.into_std().map(Connection::new)
}
