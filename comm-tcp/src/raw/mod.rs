//! Raw TCP: the control beside ZeroMQ.

mod connect;
mod connection;
mod engine;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod prelude;

use std::os::fd::{AsFd, BorrowedFd};

use comm_core::lanes::Lanes;
use comm_core::spinner::Spinner;
use comm_core::{Control, Deadline, Error, Incoming, Outgoing, Result, Transport};
use rustix::event::PollFlags;

use self::connection::Connection;
use self::engine::{AbortSignal, PartState, PolledOperation};
use crate::core::{Core, describe};
use crate::options::TcpOptions;
use crate::socket::SocketFacts;

/// Messages over plain TCP connections, one for each (pair of ranks, lane): a 64-byte header, then the payload.
///
/// It has no thread: the caller of [`exchange`](Transport::exchange) reads and writes the sockets, and waits as
/// [`TcpOptions::waiting`] says. Sends go from the caller's slice to the kernel without a copy. Received payload goes straight
/// into the memory that a sink lends, else through one buffer of 128 KiB a lane; a small message takes one call of the kernel
/// on each side. Socket settings and authentication match [`ZmqTransport`](crate::ZmqTransport).
pub struct RawTcpTransport {
    lanes: Lanes<LaneConnections>,
    core: Core,
    abort_signal: AbortSignal,
    facts: Vec<(String, String)>,
}

impl RawTcpTransport {
    /// Connects every pair of ranks. All ranks call it with the same `lanes`; addresses travel over the control plane.
    ///
    /// # Errors
    /// `InvalidArgument` for options that make no sense, `Unsupported` for an unknown congestion control, `Rendezvous` when
    /// ranks have different settings, `Timeout` naming the ranks that did not connect, or the job's failure.
    pub fn connect(control: &dyn Control, options: &TcpOptions, deadline: Deadline) -> Result<Self> {
        options.validate()?;
        let core = Core::new(control.rank(), control.world_size(), options.lanes);
        let connections = connect::all(&core, control, options, deadline)?;
        let facts = facts(options, connections.iter().flatten().flatten().next());
        let spinner = Spinner::new(options.waiting);
        let lanes =
            Lanes::new(connections.into_iter().map(|connections| LaneConnections::new(connections, spinner.clone())));
        Ok(RawTcpTransport { lanes, core, abort_signal: AbortSignal::new()?, facts })
    }
}

impl Transport for RawTcpTransport {
    fn name(&self) -> &str {
        "tcp-raw"
    }

    fn rank(&self) -> usize {
        self.core.rank
    }

    fn world_size(&self) -> usize {
        self.core.world_size
    }

    fn lanes(&self) -> usize {
        self.core.lanes
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        self.core.check_messages(outgoing, incoming)?;
        self.lanes.run(lane, |LaneConnections { connections, scratch, states, spinner }| {
            let mut work = Exchange { lane, connections, scratch, outgoing, incoming };
            engine::run(&self.core, &self.abort_signal, &mut work, states, spinner, deadline)
        })
    }

    fn abort(&self, error: &Error) {
        self.core.abort(error);
        self.abort_signal.raise();
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        self.lanes.close(
            self.core.rank,
            deadline,
            || self.core.check(),
            |lanes| {
                // Closing may take its time: it parks instead of spinning.
                let mut spinner = Spinner::new(comm_core::Waiting::Park);
                let connections = lanes.iter_mut().flat_map(|lane| lane.connections.iter_mut().enumerate());
                let connections =
                    connections.filter_map(|(peer, connection)| Some((peer, connection.as_mut()?))).collect();
                let mut work = CloseHandshake { connections, scratch: vec![0; connection::SCRATCH] };
                engine::run(&self.core, &self.abort_signal, &mut work, &mut Vec::new(), &mut spinner, deadline)?;
                lanes.iter_mut().for_each(|lane| lane.connections.clear());
                Ok(())
            },
        )
    }

    fn facts(&self) -> Vec<(String, String)> {
        self.facts.clone()
    }
}

/// The connections of one lane, and memory that its exchanges use again.
struct LaneConnections {
    /// By peer; `None` for this rank.
    connections: Vec<Option<Connection>>,
    scratch: Vec<u8>,
    states: Vec<PartState>,
    /// How its exchanges wait.
    spinner: Spinner,
}

impl LaneConnections {
    fn new(connections: Vec<Option<Connection>>, spinner: Spinner) -> Self {
        LaneConnections { connections, scratch: vec![0; connection::SCRATCH], states: Vec::new(), spinner }
    }
}

/// The messages of one exchange: first those that go out, then those that come in.
struct Exchange<'e, 'o, 'i> {
    lane: usize,
    connections: &'e mut [Option<Connection>],
    scratch: &'e mut [u8],
    outgoing: &'e [Outgoing<'o>],
    incoming: &'e mut [Incoming<'i>],
}

impl PolledOperation for Exchange<'_, '_, '_> {
    fn parts(&self) -> usize {
        self.outgoing.len() + self.incoming.len()
    }

    fn advance(&mut self, part: usize) -> Result<PartState> {
        let peer = self.peer(part).ok_or_else(no_such)?;
        let connection = self.connections.get_mut(peer).and_then(Option::as_mut).ok_or_else(no_such)?;
        let outcome = match self.outgoing.get(part) {
            Some(message) => connection.send(message),
            None => match self.incoming.get_mut(part - self.outgoing.len()) {
                Some(message) => connection.receive(peer, message.sink, self.scratch),
                None => return Err(no_such()),
            },
        };
        outcome.map_err(|fault| fault.blame(peer, || self.operation()))
    }

    fn interest(&self, part: usize) -> Result<(BorrowedFd<'_>, PollFlags)> {
        let connection = self.peer(part).and_then(|peer| self.connections.get(peer)?.as_ref()).ok_or_else(no_such)?;
        let events = if part < self.outgoing.len() { PollFlags::OUT } else { PollFlags::IN };
        Ok((connection.stream.as_fd(), events))
    }

    fn peer(&self, part: usize) -> Option<usize> {
        match self.outgoing.get(part) {
            Some(message) => Some(message.peer),
            None => self.incoming.get(part - self.outgoing.len()).map(|message| message.peer),
        }
    }

    fn operation(&self) -> String {
        describe(self.lane, self.outgoing)
    }
}

/// The close messages of all connections: even parts send ours, odd ones wait for the peer's.
struct CloseHandshake<'l> {
    connections: Vec<(usize, &'l mut Connection)>,
    scratch: Vec<u8>,
}

impl PolledOperation for CloseHandshake<'_> {
    fn parts(&self) -> usize {
        2 * self.connections.len()
    }

    fn advance(&mut self, part: usize) -> Result<PartState> {
        let (peer, connection) = self.connections.get_mut(part / 2).ok_or_else(no_such)?;
        let outcome =
            if part.is_multiple_of(2) { connection.send_close() } else { connection.drain(*peer, &mut self.scratch) };
        outcome.map_err(|fault| fault.blame(*peer, || "closing".into()))
    }

    fn interest(&self, part: usize) -> Result<(BorrowedFd<'_>, PollFlags)> {
        let (_, connection) = self.connections.get(part / 2).ok_or_else(no_such)?;
        Ok((connection.stream.as_fd(), if part.is_multiple_of(2) { PollFlags::OUT } else { PollFlags::IN }))
    }

    fn peer(&self, part: usize) -> Option<usize> {
        self.connections.get(part / 2).map(|(peer, _)| *peer)
    }

    fn operation(&self) -> String {
        "closing".to_string()
    }
}

fn no_such() -> Error {
    Error::Internal("a message of an exchange has no connection".into())
}

fn facts(options: &TcpOptions, connection: Option<&Connection>) -> Vec<(String, String)> {
    let mut facts = vec![
        ("connections".to_string(), format!("one TCP connection a pair and lane, {} lanes", options.lanes)),
        ("waiting".to_string(), options.waiting.to_string()),
    ];
    if let Some(connection) = connection {
        let socket = SocketFacts::read(&connection.stream);
        facts.push(("congestion control".to_string(), socket.congestion));
        facts.push(("socket buffers (B)".to_string(), socket.buffers));
    }
    facts.push(("encryption".to_string(), "none".to_string()));
    facts
}
