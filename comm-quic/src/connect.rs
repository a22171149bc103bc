//! How a transport comes about.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

use comm_core::driver::{Driver, may_block, passed};
use comm_core::lanes::Lanes;
use comm_core::location::{NetworkLocation, OfferedAddress, bind_address, to_dial};
use comm_core::spinner::Spinner;
use comm_core::{Control, Deadline, Error, Result, descriptors};
use quinn::{Endpoint, Runtime as _};
use tokio::sync::watch;

use crate::clock::RunningTime;
use crate::config::{DatagramSizes, effective_congestion, endpoint_config, send_window, transport_config};
use crate::exchange::announced_error;
use crate::options::QuicOptions;
use crate::protection::Protection;
use crate::rendezvous::{DialErrors, DialTarget, PeerConnection, PeerInfo, connect_peers, server_config};
use crate::socket::{BoundSocket, CountingSocket};
use crate::tls::{Identity, Pins};
use crate::transport::{QuicLane, QuicTransport, Settings};

/// Most peers of which an error says where they were looked for.
const MAX_SHOWN: usize = 4;

impl QuicTransport {
    /// Connects the ranks of `control` with each other. All call it, at the same point of their use of `control`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for options that cannot work, [`Error::Io`] when the socket cannot be bound,
    /// [`Error::Rendezvous`] when the ranks disagree, [`Error::PeerLost`] when a rank refuses, [`Error::Timeout`] naming the ranks
    /// that are missing at the deadline, or the job's failure.
    pub fn connect(control: &dyn Control, options: &QuicOptions, deadline: Deadline) -> Result<QuicTransport> {
        connect(control, options, Protection::Full, deadline)
    }
}

/// Connects the ranks of `control` with each other; see [`QuicTransport::connect`].
pub(crate) fn connect(
    control: &dyn Control,
    options: &QuicOptions,
    protection: Protection,
    deadline: Deadline,
) -> Result<QuicTransport> {
    may_block()?;
    options.check()?;
    let (rank, world_size) = (control.rank(), control.world_size());
    let driver = Driver::new(&format!("comm-quic-{rank}"))?;

    let opened = Opened::new(control, options, protection);
    let peer_info = opened.as_ref().map(|opened| opened.peer_info).map_err(Clone::clone);
    let ranks = PeerInfo::exchange(peer_info, protection, options.lanes, control, deadline)?;
    let Opened { own, socket, identity, .. } = opened?;
    let BoundSocket { socket, address, receive_buffer, send_buffer } = socket;

    let sizes = DatagramSizes::choose(options, own.ip());
    let smallest_buffer = ranks.iter().map(|rank| rank.receive_buffer).min().unwrap_or_default();
    let congestion = effective_congestion(options.congestion, own.ip(), sizes, smallest_buffer, world_size - 1)?;

    // The higher rank dials, so that each pair has one connection.
    let pins = Pins::new(ranks.iter().map(|other| other.fingerprint).enumerate().skip(rank + 1));
    let expected: HashSet<_> =
        ranks.iter().skip(rank + 1).map(|other| (other.address.0.ip(), other.address.0.port())).collect();
    let server = server_config(
        protection.server(identity.server_config(&pins)?),
        transport_config(options, congestion, sizes, options.lanes)?,
    );
    let outgoing = transport_config(options, congestion, sizes, 0)?;
    let dial_errors = DialErrors::default();
    let dial = |(peer, other): (usize, &PeerInfo)| {
        let crypto = protection.client(identity.client_config(peer, other.fingerprint)?);
        let mut config = quinn::ClientConfig::new(crypto);
        config.transport_config(Arc::clone(&outgoing));
        let address = to_dial(other.address.0, own);
        Ok(DialTarget { peer, address, config, dial_errors: Arc::clone(&dial_errors) })
    };
    // From its neighbour on, so that the ranks do not all dial rank 0 first.
    let dial_targets = ranks.iter().enumerate().take(rank).rev().map(dial).collect::<Result<Vec<_>>>()?;

    let failed = failure_of(control);
    let (endpoint, socket) = endpoint(&driver, socket, sizes, (rank + 1 < world_size).then_some(server))?;
    let segments = quinn::AsyncUdpSocket::max_transmit_segments(&*socket).min(10);

    let mut peers: Vec<Option<PeerConnection>> = (0..world_size).map(|_| None).collect();
    let outcome = driver.block_on(async {
        Ok(tokio::select! {
            connected = connect_peers(&endpoint, dial_targets, &pins, &expected, rank, options.lanes, &mut peers) => Some(connected),
            error = announced_error(failed) => Some(Err(error)),
            () = passed(deadline) => None,
        })
    })?;
    outcome.unwrap_or_else(|| {
        let missing =
            peers.iter().enumerate().filter(|(peer, peer_connection)| *peer != rank && peer_connection.is_none());
        let missing: Vec<usize> = missing.map(|(peer, _)| peer).collect();
        Err(timeout(control, missing, &ranks, &dial_errors, deadline))
    })?;

    let (connections, lanes) = by_lane(peers, options);
    let send_window = send_window(options, congestion);
    Ok(QuicTransport {
        rank,
        world_size,
        lanes: Lanes::new(lanes),
        connections: connections.into(),
        endpoint,
        socket,
        address,
        aborted: watch::Sender::new(None),
        settings: Settings {
            options: options.clone(),
            protection,
            congestion,
            sizes,
            segments,
            send_window,
            receive_buffer,
            send_buffer,
        },
        driver,
    })
}

/// What a rank has before it knows of the others.
struct Opened {
    /// The address that its socket takes.
    own: SocketAddr,
    socket: BoundSocket,
    identity: Identity,
    /// What it tells the others.
    peer_info: PeerInfo,
}

impl Opened {
    fn new(control: &dyn Control, options: &QuicOptions, protection: Protection) -> Result<Self> {
        let own = bind_address(options.bind.as_ref(), control)?;
        let socket = BoundSocket::bind(own, control.network().ports)?;
        let identity = Identity::generate()?;
        let peer_info = PeerInfo {
            protection: protection.code(),
            address: OfferedAddress(socket.address),
            location: NetworkLocation::of(control),
            fingerprint: identity.fingerprint(),
            lanes: u32::try_from(options.lanes).unwrap_or(u32::MAX),
            receive_buffer: socket.receive_buffer as u64,
        };
        Ok(Opened { own, socket, identity, peer_info })
    }
}

/// QUIC on `socket`, driven by `driver`, for connections to others and, with a `server`, from others.
fn endpoint(
    driver: &Driver,
    socket: std::net::UdpSocket,
    sizes: DatagramSizes,
    server: Option<quinn::ServerConfig>,
) -> Result<(Endpoint, Arc<CountingSocket>)> {
    let _inside = driver.handle()?.enter();
    let socket =
        RunningTime.wrap_udp_socket(socket).map_err(|error| Error::io("preparing the UDP socket for QUIC", error))?;
    let socket = Arc::new(CountingSocket::new(socket, sizes.largest));
    let abstracted: Arc<dyn quinn::AsyncUdpSocket> = socket.clone();
    let endpoint = Endpoint::new_with_abstract_socket(endpoint_config()?, server, abstracted, Arc::new(RunningTime))
        .map_err(|error| Error::io("starting QUIC on the UDP socket", error))?;
    Ok((endpoint, socket))
}

/// The connections to all ranks, and the channels that they carry, by lane.
fn by_lane(
    peers: Vec<Option<PeerConnection>>,
    options: &QuicOptions,
) -> (Vec<Option<quinn::Connection>>, Vec<QuicLane>) {
    let mut lanes: Vec<QuicLane> = (0..options.lanes)
        .map(|lane| QuicLane {
            operation: format!("an exchange on QUIC lane {lane}"),
            channels: Vec::with_capacity(peers.len()),
            spinner: Spinner::new(options.waiting),
        })
        .collect();
    let mut connections = Vec::with_capacity(peers.len());
    for peer_connection in peers {
        let (connection, channels) = match peer_connection {
            Some(peer_connection) => (Some(peer_connection.connection), peer_connection.channels),
            None => (None, Vec::new()),
        };
        connections.push(connection);
        let mut channels = channels.into_iter();
        for lane in &mut lanes {
            lane.channels.push(channels.next());
        }
    }
    (connections, lanes)
}

/// The error when the `missing` ranks have not connected by the `deadline`.
fn timeout(
    control: &dyn Control,
    missing: Vec<usize>,
    ranks: &[PeerInfo],
    dial_errors: &DialErrors,
    deadline: Deadline,
) -> Error {
    let addresses: Vec<SocketAddr> = ranks.iter().map(|other| other.address.0).collect();
    let looked_for = where_looked_for(control, &missing, &addresses, dial_errors);
    let operation = format!("connecting over QUIC{looked_for}{}", descriptors::shortage());
    Error::timeout(control.rank(), operation, deadline, missing)
}

/// Where the `missing` ranks were dialled or expected, by their number in the job.
fn where_looked_for(
    control: &dyn Control,
    missing: &[usize],
    addresses: &[SocketAddr],
    dial_errors: &DialErrors,
) -> String {
    let dial_errors = dial_errors.lock().unwrap_or_else(PoisonError::into_inner);
    let of = |rank: usize| addresses.get(rank).map_or("no address".into(), SocketAddr::to_string);
    let mut parts: Vec<String> = (missing.iter().take(MAX_SHOWN))
        .map(|peer| {
            let number = control.job_rank(*peer);
            if *peer > control.rank() {
                return format!("rank {number} has not connected to {}", of(control.rank()));
            }
            let why = dial_errors.get(peer).map_or("no answer", String::as_str);
            format!("rank {number} at {}: {why}", of(*peer))
        })
        .collect();
    match (parts.len(), missing.len() - parts.len()) {
        (0, _) => return String::new(),
        (_, 0) => {}
        (_, more) => parts.push(format!("and {more} more")),
    }
    format!(" ({})", parts.join("; "))
}

/// The job's failure while the ranks connect.
fn failure_of(control: &dyn Control) -> watch::Receiver<Option<Error>> {
    let (sender, receiver) = watch::channel(None);
    control.on_failure(Box::new(move |error| {
        sender.send_replace(Some(error.clone()));
    }));
    receiver
}
