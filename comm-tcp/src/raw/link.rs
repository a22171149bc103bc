//! One raw TCP connection: headers and payloads back to back.

use std::io::IoSlice;

use comm_core::{Error, HEADER_LEN, Header, Outgoing, Result, Sink};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};

/// Received bytes are handed on in pieces of at most this size: large enough to be cheap, small enough to stay in cache.
const INBOX: usize = 256 << 10;

/// Stands where a header would: nothing follows it.
const BYE: [u8; HEADER_LEN] = *b"isocomm bye: this rank has sent all that it will ever send here.";

/// A connection to one peer on one lane.
pub(crate) struct Link {
    pub(crate) stream: TcpStream,
    inbox: Inbox,
}

impl Link {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Link { stream, inbox: Inbox { buffer: vec![0; INBOX], start: 0, end: 0 } }
    }

    /// Its two directions, which progress independently.
    pub(crate) fn split(&mut self, peer: usize) -> (Sender<'_>, Receiver<'_>) {
        let (read, write) = self.stream.split();
        (Sender { peer, write }, Receiver { peer, read, inbox: &mut self.inbox })
    }
}

/// The sending direction.
pub(crate) struct Sender<'a> {
    peer: usize,
    write: WriteHalf<'a>,
}

impl Sender<'_> {
    /// Hands a message to the kernel, without a copy of its own.
    pub(crate) async fn send(mut self, message: &Outgoing<'_>, operation: &str) -> Result<()> {
        let header = message.header.encode();
        let total = HEADER_LEN + message.payload.len();
        let mut sent = 0;
        while sent < total {
            let wrote = if sent < HEADER_LEN {
                self.write.write_vectored(&[IoSlice::new(&header[sent..]), IoSlice::new(message.payload)]).await
            } else {
                self.write.write(&message.payload[sent - HEADER_LEN..]).await
            };
            match wrote {
                Ok(0) => return Err(lost(self.peer, operation, "the connection takes no more bytes")),
                Ok(wrote) => sent += wrote,
                Err(error) => return Err(lost(self.peer, operation, &error.to_string())),
            }
        }
        Ok(())
    }

    /// Says that nothing follows.
    pub(crate) async fn close(mut self) -> Result<()> {
        let outcome = async {
            self.write.write_all(&BYE).await?;
            self.write.shutdown().await
        };
        outcome.await.map_err(|error| lost(self.peer, "closing", &error.to_string()))
    }
}

/// The receiving direction.
pub(crate) struct Receiver<'a> {
    peer: usize,
    read: ReadHalf<'a>,
    inbox: &'a mut Inbox,
}

impl Receiver<'_> {
    /// Receives the next message into `sink`.
    pub(crate) async fn receive(mut self, sink: &mut dyn Sink, operation: &str) -> Result<()> {
        let Some(header) = self.header(operation).await? else {
            return Err(lost(self.peer, operation, "it closed its transport"));
        };
        sink.begin(&header)?;
        let mut remaining = header.payload_len;
        while remaining > 0 {
            let piece = self.piece(remaining, operation).await?;
            remaining -= piece.len() as u64;
            sink.piece(piece)?;
        }
        Ok(())
    }

    /// Reads to the peer's end, dropping messages that nobody asked for.
    pub(crate) async fn drain(mut self) -> Result<()> {
        while let Some(header) = self.header("closing").await? {
            let mut remaining = header.payload_len;
            while remaining > 0 {
                remaining -= self.piece(remaining, "closing").await?.len() as u64;
            }
        }
        match self.read.read(&mut [0; 1]).await {
            Ok(0) if self.inbox.bytes().is_empty() => Ok(()),
            Ok(_) => Err(Error::Protocol { who: who(self.peer), what: "bytes after its last message".into() }),
            Err(error) => Err(lost(self.peer, "closing", &error.to_string())),
        }
    }

    /// The next header; `None` for the peer's farewell.
    async fn header(&mut self, operation: &str) -> Result<Option<Header>> {
        loop {
            if let Some(bytes) = self.inbox.bytes().first_chunk::<HEADER_LEN>() {
                let bytes = *bytes;
                self.inbox.start += HEADER_LEN;
                return if bytes == BYE { Ok(None) } else { Header::decode(&bytes, &who(self.peer)).map(Some) };
            }
            self.fill(operation).await?;
        }
    }

    /// Between 1 and `limit` bytes of payload.
    async fn piece(&mut self, limit: u64, operation: &str) -> Result<&[u8]> {
        if self.inbox.bytes().is_empty() {
            self.fill(operation).await?;
        }
        let start = self.inbox.start;
        let length = self.inbox.bytes().len().min(usize::try_from(limit).unwrap_or(usize::MAX));
        self.inbox.start += length;
        Ok(&self.inbox.buffer[start..start + length])
    }

    async fn fill(&mut self, operation: &str) -> Result<()> {
        self.inbox.compact();
        match self.read.read(&mut self.inbox.buffer[self.inbox.end..]).await {
            Ok(0) => Err(lost(self.peer, operation, "it closed the connection without a farewell")),
            Ok(read) => {
                self.inbox.end += read;
                Ok(())
            }
            Err(error) => Err(lost(self.peer, operation, &error.to_string())),
        }
    }
}

/// Received bytes that have not been handed on: `buffer[start..end]`.
struct Inbox {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl Inbox {
    fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Makes room at the end; what is left is less than a header.
    fn compact(&mut self) {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
    }
}

fn who(peer: usize) -> String {
    format!("rank {peer}")
}

fn lost(peer: usize, operation: &str, detail: &str) -> Error {
    Error::PeerLost { rank: peer, operation: operation.to_string(), detail: detail.to_string() }
}
