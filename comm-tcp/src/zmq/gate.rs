//! The gate that relays: the public TCP listener in front of this rank's private DEALER sockets.
//!
//! A connection first has to get through the opening of ZMTP with the gate itself, which reads a fixed number of bytes at
//! each step. Only after its token has been found good is it connected to the private socket it is meant for, over a Unix
//! socket in a directory that nobody else may enter: the gate repeats there what it has read, drops the private side's
//! greeting, since it has given an equal one already, and from then on only copies bytes. The private side's READY is the first
//! thing that the dialler reads from it.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use super::token;
use super::zmtp::{GREETING, GREETING_LEN, SHORT_COMMAND, dealer_identity};
use crate::acceptor::Acceptor;
use crate::auth::{Edge, Key, PROOF_LEN};
use crate::connecting::AcceptError;
use crate::socket::{self, SocketFacts};

/// Bytes copied at a time, in each direction.
const RELAY_BUFFER: usize = 256 << 10;

/// Where the private sockets listen.
pub(crate) type PrivateSockets = HashMap<Edge, PathBuf>;

/// What the gate reports while the ranks connect.
#[derive(Clone)]
pub(super) struct GateReport {
    /// What the kernel says of the first connection that was admitted.
    pub(super) accepted: Arc<Mutex<Option<SocketFacts>>>,
    /// Why a connection cannot be accepted.
    pub(super) accept_error: Arc<OnceLock<AcceptError>>,
}

/// Admits every connection of `private_sockets` once, and spawns a task that relays its bytes. Ends when all are admitted, or when no
/// more can be, closing the listener.
pub(super) async fn serve(
    listener: TcpListener,
    key: Key,
    salt: [u8; PROOF_LEN],
    private_sockets: PrivateSockets,
    report: GateReport,
) {
    let waiting: Mutex<HashSet<Edge>> = Mutex::new(private_sockets.keys().copied().collect());
    let missing = || waiting.lock().unwrap_or_else(PoisonError::into_inner);
    let mut acceptor = Acceptor::open(listener);
    while !missing().is_empty() {
        let verified = acceptor
            .admit(|stream| {
                let (missing, key, salt) = (&missing, &key, &salt);
                async move {
                    socket::tune(&stream).ok()?;
                    let verified = identify(stream, key, salt).await?;
                    // The token is used up here.
                    missing().remove(&verified.edge).then_some(verified)
                }
            })
            .await;
        let verified = match verified {
            Ok(verified) => verified,
            Err(error) => {
                let _ =
                    report.accept_error.set(AcceptError { doing: "accepting a connection at the gate".into(), error });
                return;
            }
        };
        let read = || SocketFacts::read(&verified.stream);
        report.accepted.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(read);
        if let Some(path) = private_sockets.get(&verified.edge) {
            tokio::spawn(relay(verified, path.clone(), report.accept_error.clone()));
        }
    }
}

/// A connection whose token was verified.
struct VerifiedPeer {
    edge: Edge,
    stream: TcpStream,
    /// The READY command as it came, with its frame.
    ready: Vec<u8>,
}

/// The opening of ZMTP, up to and including the peer's READY.
async fn identify(mut stream: TcpStream, key: &Key, salt: &[u8; PROOF_LEN]) -> Option<VerifiedPeer> {
    let mut greeting = [0; GREETING_LEN];
    stream.read_exact(&mut greeting).await.ok()?;
    if greeting != GREETING {
        return None;
    }
    stream.write_all(&GREETING).await.ok()?;
    let mut frame = [0; 2];
    stream.read_exact(&mut frame).await.ok()?;
    let [flags, length] = frame;
    if flags != SHORT_COMMAND {
        return None;
    }
    let mut ready = vec![0; frame.len() + usize::from(length)];
    let (head, body) = ready.split_at_mut(frame.len());
    head.copy_from_slice(&frame);
    stream.read_exact(body).await.ok()?;
    let edge = token::verify(dealer_identity(body)?, key, salt)?;
    Some(VerifiedPeer { edge, stream, ready })
}

/// Connects a verified connection to its private socket and copies bytes until both sides have ended. What goes wrong before that is
/// stored in `accept_error`: the token is used up, so the peer cannot try again. What goes wrong later ends both connections, which both
/// sockets notice.
async fn relay(verified: VerifiedPeer, path: PathBuf, accept_error: Arc<OnceLock<AcceptError>>) {
    let private = match connect_private(&verified, &path).await {
        Ok(private) => private,
        Err(error) => {
            let _ =
                accept_error.set(AcceptError { doing: format!("connecting the gate with {}", path.display()), error });
            return;
        }
    };
    let (public_read, public_write) = verified.stream.into_split();
    let (private_read, private_write) = private.into_split();
    // One direction may end before the other: its last bytes still arrive.
    tokio::join!(copy(public_read, private_write), copy(private_read, public_write));
}

/// Opens the connection to the private socket, after both greetings and the peer's READY command.
async fn connect_private(verified: &VerifiedPeer, path: &Path) -> io::Result<UnixStream> {
    let mut private = UnixStream::connect(path).await?;
    socket::enlarge_buffers(&SockRef::from(&private));
    let mut greeting = [0; GREETING_LEN];
    private.write_all(&GREETING).await?;
    private.write_all(&verified.ready).await?;
    private.read_exact(&mut greeting).await?;
    if greeting != GREETING {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the socket behind the gate has an unknown greeting"));
    }
    Ok(private)
}

async fn copy(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) {
    let mut buffer = vec![0; RELAY_BUFFER];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        if to.write_all(&buffer[..read]).await.is_err() {
            break;
        }
    }
    let _ = to.shutdown().await;
}
