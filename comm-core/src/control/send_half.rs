//! The sending half of an authenticated connection: any thread may send on it, without ever blocking.

use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::wire::{Message, Sealer};

/// The sending side of a connection, and its socket.
pub(super) struct SendHalf {
    /// Non-blocking.
    stream: TcpStream,
    writer: Mutex<Writer>,
}

struct Writer {
    sealer: Sealer,
    /// What the socket has not taken yet.
    queue: Vec<u8>,
    /// Nothing more can be sent.
    closed: bool,
    /// End the sending direction when the queue is empty.
    finishing: bool,
}

impl SendHalf {
    pub(super) fn new(stream: TcpStream, sealer: Sealer) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let writer = Writer { sealer, queue: Vec::new(), closed: false, finishing: false };
        Ok(SendHalf { stream, writer: Mutex::new(writer) })
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sends `message` as far as the socket takes it; true when a rest waits for [`flush`](SendHalf::flush). A broken connection
    /// is no error here: the reading side notices it.
    pub(super) fn send(&self, message: &Message) -> bool {
        match message.encode() {
            Ok(payload) => self.send_encoded(&payload),
            Err(why) => {
                debug_assert!(false, "{why}: what callers pass in is checked before it gets here");
                false
            }
        }
    }

    /// As [`send`](SendHalf::send), for one message to many.
    pub(super) fn send_encoded(&self, payload: &[u8]) -> bool {
        let mut writer = self.writer();
        if writer.closed || writer.finishing {
            return false;
        }
        let Writer { sealer, queue, .. } = &mut *writer;
        sealer.seal(payload, queue);
        self.push(&mut writer)
    }

    /// Sends what waits, as far as the socket takes it; true when a rest remains.
    pub(super) fn flush(&self) -> bool {
        self.push(&mut self.writer())
    }

    /// Whether something waits to be sent.
    pub(super) fn is_waiting(&self) -> bool {
        let writer = self.writer();
        !writer.closed && !writer.queue.is_empty()
    }

    /// Nothing more will be sent: the other end sees the end of the stream once it has read everything.
    pub(super) fn finish(&self) -> bool {
        let mut writer = self.writer();
        writer.finishing = true;
        self.push(&mut writer)
    }

    /// Ends both directions now.
    pub(super) fn close(&self) {
        let mut writer = self.writer();
        self.push(&mut writer);
        writer.closed = true;
        // Fails only when the connection is gone already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn push(&self, writer: &mut Writer) -> bool {
        let mut sent = 0;
        while !writer.closed {
            let rest = writer.queue.get(sent..).unwrap_or_default();
            if rest.is_empty() {
                break;
            }
            match (&self.stream).write(rest) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => writer.closed = true,
            }
        }
        writer.queue.drain(..sent);
        if writer.finishing && !writer.closed && writer.queue.is_empty() {
            writer.closed = true;
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        !writer.closed && !writer.queue.is_empty()
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
