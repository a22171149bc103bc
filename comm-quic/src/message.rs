//! Messages on a lane's stream: a header of 64 bytes and its payload, one after the other.

use bytes::Bytes;
use comm_core::{Error, HEADER_LEN, Header, Outgoing, Result, Sink};
use quinn::{ConnectionError, ReadError, RecvStream, SendStream, VarInt, WriteError};

/// A side closes its connections with this code when it has received and delivered everything.
pub(crate) const DONE: VarInt = VarInt::from_u32(1);

/// A side closes its connections with this code when the transport is dropped, which loses what is under way.
pub(crate) const DROPPED: VarInt = VarInt::from_u32(2);

/// Payload bytes copied to quinn at once. quinn gives a piece's memory back when all of it is acknowledged, so pieces are small
/// against the send window; and below the size from which glibc's allocator maps fresh pages for each.
const PIECE: usize = 64 << 10;

/// Bytes received in a row before the other futures of an exchange get their turn.
const TURN: u64 = 512 << 10;

/// Both directions of a lane to one peer.
pub(crate) struct Channel {
    pub(crate) send: SendStream,
    pub(crate) receive: RecvStream,
}

/// Whom an error is about.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) peer: usize,
    pub(crate) operation: &'a str,
}

impl Context<'_> {
    pub(crate) fn lost(&self, detail: String) -> Error {
        Error::PeerLost { rank: self.peer, operation: self.operation.to_string(), detail }
    }

    pub(crate) fn read_error(&self, error: &ReadError) -> Error {
        self.lost(match error {
            ReadError::ConnectionLost(error) => describe(error),
            ReadError::Reset(code) if *code == DROPPED => WITHOUT_CLOSING.into(),
            other => format!("reading its stream: {other}"),
        })
    }

    fn write_error(&self, error: &WriteError) -> Error {
        self.lost(match error {
            WriteError::ConnectionLost(error) => describe(error),
            other => format!("writing to its stream: {other}"),
        })
    }
}

/// Hands a message over to quinn.
pub(crate) async fn send(stream: &mut SendStream, message: &Outgoing<'_>, context: Context<'_>) -> Result<()> {
    // Header and first bytes go together, so that a small message is one packet.
    let (first, rest) = message.payload.split_at(message.payload.len().min(PIECE - HEADER_LEN));
    let mut start = Vec::with_capacity(HEADER_LEN + first.len());
    start.extend_from_slice(&message.header.encode());
    start.extend_from_slice(first);
    let lost = |error| context.write_error(&error);
    stream.write_chunk(Bytes::from(start)).await.map_err(lost)?;
    for piece in rest.chunks(PIECE) {
        stream.write_chunk(Bytes::copy_from_slice(piece)).await.map_err(lost)?;
    }
    Ok(())
}

/// Receives the next message into `sink`.
pub(crate) async fn receive(stream: &mut RecvStream, sink: &mut dyn Sink, context: Context<'_>) -> Result<()> {
    let mut encoded = [0; HEADER_LEN];
    let mut filled = 0;
    while filled < HEADER_LEN {
        let bytes = next(stream, HEADER_LEN - filled, context).await?;
        let end = filled + bytes.len();
        let space = encoded.get_mut(filled..end).ok_or_else(|| Error::Protocol {
            who: format!("rank {}", context.peer),
            what: "more bytes than were asked for".into(),
        })?;
        space.copy_from_slice(&bytes);
        filled = end;
    }
    let header = Header::decode(&encoded, &format!("rank {}", context.peer))?;
    sink.begin(&header)?;
    let mut left = header.payload_len;
    let mut turn = 0;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX);
        let bytes = next(stream, most, context).await?;
        sink.piece(&bytes)?;
        left = left.saturating_sub(bytes.len() as u64);
        turn += bytes.len() as u64;
        if turn >= TURN && left > 0 {
            turn = 0;
            tokio::task::yield_now().await;
        }
    }
    Ok(())
}

/// The next bytes of a stream, at least one and at most `most`.
async fn next(stream: &mut RecvStream, most: usize, context: Context<'_>) -> Result<Bytes> {
    match stream.read_chunk(most, true).await {
        Ok(Some(chunk)) => Ok(chunk.bytes),
        Ok(None) => Err(context.lost("it closed its side while a message from it was expected".into())),
        Err(error) => Err(context.read_error(&error)),
    }
}

const WITHOUT_CLOSING: &str = "it dropped its transport without closing it";

/// What happened to a connection, in words.
pub(crate) fn describe(error: &ConnectionError) -> String {
    match error {
        ConnectionError::ApplicationClosed(close) if close.error_code == DONE => "it has closed its connections".into(),
        ConnectionError::ApplicationClosed(close) if close.error_code == DROPPED => WITHOUT_CLOSING.into(),
        ConnectionError::ApplicationClosed(close) => format!("it ended the connection: {close}"),
        ConnectionError::TimedOut => "nothing came from it for the whole idle timeout".into(),
        ConnectionError::Reset => "it no longer knows the connection".into(),
        ConnectionError::LocallyClosed => "this rank has closed the connection".into(),
        other => format!("the QUIC connection failed: {other}"),
    }
}

/// Whether the peer closed because it had everything and had delivered everything.
pub(crate) fn is_done(error: &ConnectionError) -> bool {
    matches!(error, ConnectionError::ApplicationClosed(close) if close.error_code == DONE)
}
