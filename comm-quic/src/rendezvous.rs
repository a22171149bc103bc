//! How the ranks find each other: addresses and fingerprints through the control plane, then one connection a pair.
//!
//! The higher rank dials. It opens one stream a lane and names the lane in the first bytes; the lower rank answers on each. Only
//! that answer tells the dialling side that its certificate was accepted: in TLS 1.3 the client is ready before the server has
//! looked at it.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use comm_core::control::ControlExt;
use comm_core::driver::within;
use comm_core::location::{NetworkLocation, OfferedAddress, check_reachable};
use comm_core::{Control, Deadline, Error, Result};
use quinn::{Connection, ConnectionError, Endpoint, Incoming, RecvStream, SendStream, TransportErrorCode, VarInt};
use serde::{Deserialize, Serialize};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::sleep;

use crate::message::{Channel, describe};
use crate::protection::Protection;
use crate::tls::{Fingerprint, Pins, SERVER_NAME};

/// What each rank tells the others before they connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerInfo {
    /// [`Protection::code`].
    pub(crate) protection: u8,
    pub(crate) address: OfferedAddress,
    /// Where the rank is.
    pub(crate) location: NetworkLocation,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) lanes: u32,
    /// Bytes that its UDP receive buffer holds.
    pub(crate) receive_buffer: u64,
}

impl PeerInfo {
    /// Exchanges the information of all ranks, of which this rank's is `mine`, and returns it in order. If a rank has none, which is an
    /// error there, all fail.
    pub(crate) fn exchange(
        mine: Result<PeerInfo>,
        protection: Protection,
        lanes: usize,
        control: &dyn Control,
        deadline: Deadline,
    ) -> Result<Vec<PeerInfo>> {
        let peer_infos = control.gather_all("quic introduction", protection.transport_name(), mine, deadline)?;
        let found = |differs: &dyn Fn(&PeerInfo) -> bool| peer_infos.iter().position(differs);
        if let Some(rank) = found(&|other| other.protection != protection.code()) {
            return Err(Error::Rendezvous(format!(
                "rank {rank} uses another packet protection for QUIC than rank {} ({}); start all ranks with the same transport",
                control.rank(),
                protection.cipher_suite()
            )));
        }
        if let Some(rank) = found(&|other| other.lanes as usize != lanes) {
            return Err(Error::Rendezvous(format!(
                "rank {} has {lanes} QUIC lanes, but rank {rank} has {}; start all ranks with the same number",
                control.rank(),
                peer_infos[rank].lanes
            )));
        }
        let offers: Vec<_> = peer_infos.iter().map(|other| (&other.location, vec![other.address.0.ip()])).collect();
        check_reachable(&offers)?;
        Ok(peer_infos)
    }
}

/// A peer with which this rank is connected.
pub(crate) struct PeerConnection {
    pub(crate) connection: Connection,
    /// In lane order.
    pub(crate) channels: Vec<Channel>,
}

/// A rank to dial.
pub(crate) struct DialTarget {
    pub(crate) peer: usize,
    pub(crate) address: SocketAddr,
    /// Accepts this peer's certificate only.
    pub(crate) config: quinn::ClientConfig,
    /// Takes why an attempt failed.
    pub(crate) dial_errors: DialErrors,
}

/// By peer that is being dialled: why the last attempt failed.
pub(crate) type DialErrors = Arc<Mutex<BTreeMap<usize, String>>>;

/// Ranks that a rank dials at a time. With hundreds of ranks on few cores a handshake takes as long as all that are under way together, and
/// must end in [`ACCEPT_TIMEOUT`].
const DIALS_AT_ONCE: usize = 8;

/// Most handshakes under way from addresses that no rank announced.
const MAX_UNVERIFIED: usize = 64;

/// Such a handshake may be dropped for a new one once it is this old, so that idle ones do not keep out a rank whose address differs from
/// the one that it announced. With a shorter time a flood could make and drop connections without end.
const UNVERIFIED_GRACE: Duration = Duration::from_millis(500);

/// An accepted connection that has not opened its lanes by then is closed.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause before a peer that was too busy is dialled again.
const DIAL_AGAIN: Duration = Duration::from_millis(20);

/// A connection of a rank that broke the protocol is closed with this code. A connection that is dropped for a new one ends with 0,
/// and its rank dials again.
const REFUSED: VarInt = VarInt::from_u32(3);

enum ConnectOutcome {
    Dialled(usize, Result<PeerConnection>),
    Accepted(Result<(usize, PeerConnection), String>),
}

/// Handshakes from addresses that no rank announced, the oldest first.
#[derive(Default)]
struct UnverifiedHandshakes(VecDeque<(AbortHandle, Instant)>);

impl UnverifiedHandshakes {
    /// Whether one more may begin, which may end the oldest.
    fn make_space(&mut self) -> bool {
        self.0.retain(|(handshake, _)| !handshake.is_finished());
        if self.0.len() < MAX_UNVERIFIED {
            return true;
        }
        let is_over = self.0.front().is_some_and(|(_, since)| since.elapsed() >= UNVERIFIED_GRACE);
        if is_over && let Some((handshake, _)) = self.0.pop_front() {
            handshake.abort();
        }
        is_over
    }

    fn enter(&mut self, handshake: AbortHandle) {
        self.0.push_back((handshake, Instant::now()));
    }
}

/// Dials the ranks of `dial_targets`, in this order and a few at a time, accepts those that are pinned, and stores the connections as they are
/// made. A rank dials from the address that it announced, one of `expected`, and is served at once; handshakes from elsewhere share the few
/// that [`MAX_UNVERIFIED`] allows.
///
/// # Errors
/// `PeerLost` when a dialled rank refuses for good.
pub(crate) async fn connect_peers(
    endpoint: &Endpoint,
    dial_targets: Vec<DialTarget>,
    pins: &Pins,
    expected: &HashSet<(IpAddr, u16)>,
    rank: usize,
    lanes: usize,
    peers: &mut [Option<PeerConnection>],
) -> Result<()> {
    let (mut tasks, mut unverified) = (JoinSet::new(), UnverifiedHandshakes::default());
    let mut dial_targets = dial_targets.into_iter();
    for target in dial_targets.by_ref().take(DIALS_AT_ONCE) {
        tasks.spawn(dial_target(endpoint.clone(), target, rank, lanes));
    }
    while peers.iter().enumerate().any(|(peer, peer_connection)| peer != rank && peer_connection.is_none()) {
        tokio::select! {
            Some(outcome) = tasks.join_next() => match outcome {
                Ok(ConnectOutcome::Dialled(peer, peer_connection)) => {
                    store(peers, peer, peer_connection?);
                    if let Some(target) = dial_targets.next() {
                        tasks.spawn(dial_target(endpoint.clone(), target, rank, lanes));
                    }
                }
                Ok(ConnectOutcome::Accepted(accepted)) => {
                    // A refused connection from outside is not a failure of the job.
                    if let Ok((peer, peer_connection)) = accepted {
                        store(peers, peer, peer_connection);
                    }
                }
                Err(error) if error.is_cancelled() => {}
                Err(error) => return Err(Error::Rendezvous(format!("a QUIC connection attempt ended: {error}"))),
            },
            incoming = endpoint.accept() => {
                let Some(incoming) = incoming else {
                    return Err(Error::Rendezvous("the UDP socket for QUIC failed".into()));
                };
                if !incoming.remote_address_validated() {
                    // Nothing is kept for an address that may be forged; a rank answers, one round trip later.
                    drop(incoming.retry());
                    continue;
                }
                let from = incoming.remote_address();
                let is_expected = expected.contains(&(from.ip(), from.port()));
                if !is_expected && !unverified.make_space() {
                    incoming.ignore();
                    continue;
                }
                let pins = pins.clone();
                let handshake = tasks.spawn(async move {
                    let accepted = within(Deadline::after(ACCEPT_TIMEOUT), admit(incoming, &pins, lanes)).await;
                    ConnectOutcome::Accepted(accepted.unwrap_or_else(|| Err("it did not finish in time".into())))
                });
                if !is_expected {
                    unverified.enter(handshake);
                }
            }
        }
    }
    refuse_new(endpoint).await;
    Ok(())
}

async fn dial_target(endpoint: Endpoint, target: DialTarget, rank: usize, lanes: usize) -> ConnectOutcome {
    let DialTarget { peer, address, config, dial_errors } = target;
    let note_error = |why: &ConnectionError| {
        dial_errors.lock().unwrap_or_else(PoisonError::into_inner).insert(peer, describe(why));
    };
    ConnectOutcome::Dialled(peer, dial(&endpoint, config, address, rank, peer, lanes, &note_error).await)
}

/// Keeps the first connection with a peer.
fn store(peers: &mut [Option<PeerConnection>], peer: usize, peer_connection: PeerConnection) {
    if let Some(slot @ None) = peers.get_mut(peer) {
        *slot = Some(peer_connection);
    }
}

/// Refuses further connections.
async fn refuse_new(endpoint: &Endpoint) {
    endpoint.set_server_config(None);
    loop {
        tokio::select! {
            biased;
            Some(incoming) = endpoint.accept() => incoming.ignore(),
            () = std::future::ready(()) => return,
        }
    }
}

async fn dial(
    endpoint: &Endpoint,
    config: quinn::ClientConfig,
    address: SocketAddr,
    rank: usize,
    peer: usize,
    lanes: usize,
    note_error: &(dyn Fn(&ConnectionError) + Sync),
) -> Result<PeerConnection> {
    let lost = |why: String| Error::PeerLost {
        rank: peer,
        operation: "connecting over QUIC".into(),
        detail: format!("{why} at {address}"),
    };
    loop {
        let connecting =
            endpoint.connect_with(config.clone(), address, SERVER_NAME).map_err(|error| lost(error.to_string()))?;
        match connecting.await {
            Ok(connection) => match (open_lanes(&connection, rank, peer, lanes).await, connection.close_reason()) {
                (Ok(channels), _) => return Ok(PeerConnection { connection, channels }),
                (Err(_), Some(reason)) if is_passing(&reason) => note_error(&reason),
                (Err(why), _) => return Err(lost(why)),
            },
            Err(error) if is_passing(&error) => note_error(&error),
            Err(error) => return Err(lost(describe(&error))),
        }
        sleep(DIAL_AGAIN).await;
    }
}

/// Whether dialling again may help: the peer was busy with other connections, or packets were lost.
fn is_passing(error: &ConnectionError) -> bool {
    match error {
        ConnectionError::ConnectionClosed(close) => {
            // The last one where a peer that is busy with many ranks has answered after its token's time.
            matches!(
                close.error_code,
                TransportErrorCode::CONNECTION_REFUSED
                    | TransportErrorCode::APPLICATION_ERROR
                    | TransportErrorCode::INVALID_TOKEN
            )
        }
        ConnectionError::ApplicationClosed(close) => close.error_code == VarInt::from_u32(0),
        ConnectionError::TimedOut | ConnectionError::Reset => true,
        _ => false,
    }
}

/// The dialling side's half of agreeing on lanes.
async fn open_lanes(connection: &Connection, rank: usize, peer: usize, lanes: usize) -> Result<Vec<Channel>, String> {
    let mut channels = Vec::with_capacity(lanes);
    for lane in 0..lanes {
        // No more than the peer allows: it allows one stream a lane.
        let (mut send, receive) = connection.open_bi().await.map_err(|error| describe(&error))?;
        greet(&mut send, lane, rank).await?;
        channels.push(Channel::new(peer, connection, send, receive));
    }
    for (lane, channel) in channels.iter_mut().enumerate() {
        let (answered, _) = greeting(&mut channel.receive).await?;
        if answered != lane {
            return Err(format!("it answered for lane {answered} on lane {lane}"));
        }
    }
    Ok(channels)
}

/// The accepting side's half.
async fn admit(incoming: Incoming, pins: &Pins, lanes: usize) -> Result<(usize, PeerConnection), String> {
    let lost = |error: ConnectionError| describe(&error);
    let connection = incoming.accept().map_err(lost)?.await.map_err(lost)?;
    let admitted = match pins.rank_of(&connection) {
        Some(peer) => answer_lanes(&connection, peer, lanes).await.map(|channels| (peer, channels)),
        None => Err("its certificate is not pinned".into()),
    };
    match admitted {
        Ok((peer, channels)) => Ok((peer, PeerConnection { connection, channels })),
        Err(why) => {
            connection.close(REFUSED, why.as_bytes());
            Err(why)
        }
    }
}

async fn answer_lanes(connection: &Connection, peer: usize, lanes: usize) -> Result<Vec<Channel>, String> {
    let mut slots: Vec<Option<Channel>> = (0..lanes).map(|_| None).collect();
    for _ in 0..lanes {
        let (send, mut receive) = connection.accept_bi().await.map_err(|error| describe(&error))?;
        let (lane, claims) = greeting(&mut receive).await?;
        match slots.get_mut(lane) {
            Some(slot @ None) if claims == peer => *slot = Some(Channel::new(peer, connection, send, receive)),
            _ => return Err(format!("rank {peer} opened lane {lane} as rank {claims}")),
        }
    }
    let mut channels: Vec<Channel> = slots.into_iter().flatten().collect();
    for (lane, channel) in channels.iter_mut().enumerate() {
        greet(&mut channel.send, lane, peer).await?;
    }
    Ok(channels)
}

/// First bytes on a stream, each way: magic, lane, rank of the dialling side.
const MAGIC: [u8; 8] = *b"isoquic1";
const GREETING_LEN: usize = MAGIC.len() + 4 + 4;

async fn greet(stream: &mut SendStream, lane: usize, rank: usize) -> Result<(), String> {
    stream.write_all(&greeting_of(lane, rank)).await.map_err(|error| format!("opening lane {lane}: {error}"))
}

fn greeting_of(lane: usize, rank: usize) -> Vec<u8> {
    let number = |value: usize| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
    [&MAGIC[..], &number(lane), &number(rank)].concat()
}

async fn greeting(stream: &mut RecvStream) -> Result<(usize, usize), String> {
    let mut bytes = [0; GREETING_LEN];
    stream.read_exact(&mut bytes).await.map_err(|error| format!("opening a lane: {error}"))?;
    read_greeting(bytes)
}

/// Lane and rank.
fn read_greeting(bytes: [u8; GREETING_LEN]) -> Result<(usize, usize), String> {
    let [magic @ .., l0, l1, l2, l3, r0, r1, r2, r3] = bytes;
    if magic != MAGIC {
        return Err("a stream that does not begin with a lane".into());
    }
    Ok((u32::from_le_bytes([l0, l1, l2, l3]) as usize, u32::from_le_bytes([r0, r1, r2, r3]) as usize))
}

/// How long an address that has shown that it receives may take to come back with its token. With hundreds of ranks on few cores it takes
/// longer than the 15 s that are usual.
const RETRY_TOKEN_LIFETIME: Duration = Duration::from_secs(300);

/// The settings for all incoming connections.
pub(crate) fn server_config(
    crypto: Arc<dyn quinn::crypto::ServerConfig>,
    transport: Arc<quinn::TransportConfig>,
) -> quinn::ServerConfig {
    let mut config = quinn::ServerConfig::with_crypto(crypto);
    config
        .transport_config(transport)
        .migration(false)
        .retry_token_lifetime(RETRY_TOKEN_LIFETIME)
        .max_incoming(256)
        .incoming_buffer_size(128 << 10)
        .incoming_buffer_size_total(8 << 20);
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_other_lanes_or_protection_are_refused_by_all() {
        let exchange = |peer_infos: [PeerInfo; 2]| {
            let ranks = comm_core::local::group(2, 1);
            std::thread::scope(|scope| {
                let threads: Vec<_> = ranks
                    .iter()
                    .zip(peer_infos)
                    .map(|(rank, mine)| {
                        let deadline = Deadline::after(Duration::from_secs(30));
                        let lanes = mine.lanes as usize;
                        scope.spawn(move || {
                            PeerInfo::exchange(Ok(mine), Protection::Full, lanes, &*rank.control, deadline)
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            })
        };
        let peer_info = PeerInfo {
            protection: Protection::Full.code(),
            address: OfferedAddress("127.0.0.1:4433".parse().unwrap()),
            location: NetworkLocation::default(),
            fingerprint: [7; 32],
            lanes: 2,
            receive_buffer: 1 << 23,
        };
        let other = PeerInfo { fingerprint: [8; 32], ..peer_info };
        for outcome in exchange([peer_info, other]) {
            assert_eq!(outcome.unwrap(), [peer_info, other]);
        }
        for outcome in exchange([peer_info, PeerInfo { lanes: 3, ..other }]) {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("QUIC lanes, but rank"), "{error}");
        }
        for outcome in exchange([peer_info, PeerInfo { protection: 9, ..other }]) {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("rank 1 uses another packet protection"), "{error}");
        }
    }
}
