//! The handshake at the start of every raw TCP connection: both sides prove that they know the job's key.
//!
//! | bytes | from | content |
//! |---|---|---|
//! | 32 | listener | nonce |
//! | 52 + 32 | dialler | magic, dialler, listener, lane, nonce; proof over all of it and the listener's nonce |
//! | 32 | listener | proof over the same |
//!
//! What follows is neither encrypted nor authenticated: the handshake keeps strangers and mistaken ranks out, not an
//! attacker who can alter packets on the way.

#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::auth::{Edge, Key, PROOF_LEN, same};

const MAGIC: [u8; 8] = *b"isoraw01";
const DIAL: &[u8; 8] = b"raw dial";
const ACCEPT: &[u8; 8] = b"raw acpt";
const HELLO_LEN: usize = 8 + 3 * 4 + 2 * PROOF_LEN;

/// The listener's side. `None` for a connection that does not prove to be from a dialler of `listener` (this rank).
pub(crate) async fn accept(
    mut stream: TcpStream,
    key: &Key,
    listener: u32,
    our_nonce: [u8; PROOF_LEN],
) -> Option<(Edge, TcpStream)> {
    stream.write_all(&our_nonce).await.ok()?;
    let mut hello = [0; HELLO_LEN];
    stream.read_exact(&mut hello).await.ok()?;
    let mut rest = &hello[..];
    if take::<8>(&mut rest)? != MAGIC {
        return None;
    }
    let edge = Edge {
        dialler: u32::from_le_bytes(take(&mut rest)?),
        listener: u32::from_le_bytes(take(&mut rest)?),
        lane: u32::from_le_bytes(take(&mut rest)?),
    };
    let their_nonce = take::<PROOF_LEN>(&mut rest)?;
    let proof = take::<PROOF_LEN>(&mut rest)?;
    if edge.listener != listener || !same(&key.proof(DIAL, edge, &[&our_nonce, &their_nonce]), &proof) {
        return None;
    }
    // Without a wait, so that nothing can come between the check and the caller's note that this connection is taken. The
    // send buffer of a new connection is large enough.
    let ours = key.proof(ACCEPT, edge, &[&our_nonce, &their_nonce]);
    matches!(stream.try_write(&ours), Ok(PROOF_LEN)).then_some((edge, stream))
}

/// The dialler's side.
///
/// # Errors
/// `InvalidData` when the listener does not know the key; else the connection's own.
pub(crate) async fn dial(stream: &mut TcpStream, key: &Key, edge: Edge, our_nonce: [u8; PROOF_LEN]) -> io::Result<()> {
    let mut their_nonce = [0; PROOF_LEN];
    stream.read_exact(&mut their_nonce).await?;
    let mut hello = Vec::with_capacity(HELLO_LEN);
    hello.extend_from_slice(&MAGIC);
    hello.extend_from_slice(&edge.dialler.to_le_bytes());
    hello.extend_from_slice(&edge.listener.to_le_bytes());
    hello.extend_from_slice(&edge.lane.to_le_bytes());
    hello.extend_from_slice(&our_nonce);
    hello.extend_from_slice(&key.proof(DIAL, edge, &[&their_nonce, &our_nonce]));
    stream.write_all(&hello).await?;
    let mut proof = [0; PROOF_LEN];
    stream.read_exact(&mut proof).await?;
    if !same(&key.proof(ACCEPT, edge, &[&their_nonce, &our_nonce]), &proof) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the listener does not know this job's key"));
    }
    Ok(())
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (head, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*head)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    const EDGE: Edge = Edge { dialler: 1, listener: 0, lane: 3 };

    async fn meet(listener_key: [u8; 32], dialler_key: [u8; 32], listener: u32) -> (Option<Edge>, io::Result<()>) {
        let socket = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let accepting = async {
            let (stream, _) = socket.accept().await.unwrap();
            accept(stream, &Key(listener_key), listener, [1; 32]).await.map(|(edge, stream)| {
                // Kept open until the dialler has read the proof.
                std::mem::forget(stream);
                edge
            })
        };
        let dialling = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            dial(&mut stream, &Key(dialler_key), EDGE, [2; 32]).await
        };
        tokio::join!(accepting, dialling)
    }

    #[tokio::test]
    async fn both_sides_must_know_the_key_and_mean_the_same_connection() {
        let (accepted, dialled) = meet([7; 32], [7; 32], 0).await;
        assert_eq!(accepted, Some(EDGE));
        dialled.unwrap();
        let (accepted, dialled) = meet([7; 32], [8; 32], 0).await;
        assert!(accepted.is_none() && dialled.is_err());
        let (accepted, dialled) = meet([7; 32], [7; 32], 2).await;
        assert!(accepted.is_none() && dialled.is_err());
    }
}
