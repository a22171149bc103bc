//! ZeroMQ.

mod connect;
mod connection;
mod filter;
mod filtered;
mod frame;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
mod gate;
mod pool;
#[cfg(feature = "fuzzing")]
mod samples;
mod token;
mod zmtp;

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;

use comm_core::driver::Driver;
use comm_core::lanes::Lanes;
use comm_core::spinner::Spinner;
use comm_core::{Control, Deadline, Error, Incoming, Outgoing, Result, Sink, Transport, Waiting};
use tokio::sync::Notify;

use self::connect::{Connected, GateInUse, Relays, SocketInfo};
use self::connection::Connection;
use crate::core::{Core, describe};
use crate::options::TcpOptions;
use crate::runtime::Join;
use crate::socket;

/// After a longer payload the kernel may not have taken all: the lane's own thread sees to the rest.
const LARGE: usize = 256 << 10;

/// Messages over ZeroMQ: one DEALER pair for each (pair of ranks, lane).
///
/// A payload travels in segments, at most a window of them in flight; the receiver gives credit back as it uses them up.
/// The sender copies each byte once into a segment, and `zeromq` once more when it encodes it.
///
/// The sockets of a lane are driven by the thread in its [`exchange`](Transport::exchange), which waits as
/// [`TcpOptions::waiting`] says, and by a thread of the lane's own while there is none.
pub struct ZmqTransport {
    lanes: Lanes<Sockets>,
    core: Core,
    /// Wakes waiting exchanges when the transport is aborted.
    abort_notify: Notify,
    facts: Vec<(String, String)>,
    ipc: bool,
    _relays: Option<Relays>,
}

/// The sockets of one lane and what drives them.
struct Sockets {
    /// By peer; `None` for this rank.
    connections: Vec<Option<Connection>>,
    driver: Driver,
    /// How its exchanges wait.
    spinner: Spinner,
}

impl ZmqTransport {
    /// Connects every pair of ranks. All ranks call it with the same options; addresses travel over the control plane.
    ///
    /// # Errors
    /// `InvalidArgument` for options that make no sense, `Unsupported` for an unknown congestion control or, over IPC, for ranks
    /// that cannot reach each other's sockets, `Rendezvous` when ranks have different settings, `Timeout` naming the ranks that
    /// did not connect, or the job's failure.
    pub fn connect(control: &dyn Control, options: &TcpOptions, deadline: Deadline) -> Result<Self> {
        options.validate()?;
        let core = Core::new(control.rank(), control.world_size(), options.lanes);
        comm_core::driver::may_block()?;
        let made = connect::need(&core, options, options.lanes).check();
        let made = made.and_then(|()| (0..options.lanes).map(|_| Driver::new("comm-tcp")).collect::<Result<Vec<_>>>());
        let (made, drivers) = match made {
            Ok(drivers) => (Ok(()), drivers),
            Err(error) => (Err(error), Vec::new()),
        };
        let Connected { connections, relays, sockets: socket_info, gate } =
            connect::all(&core, control, options, made, &drivers, deadline)?;
        let spinner = Spinner::new(options.waiting);
        let sockets = |(connections, driver)| Sockets { connections, driver, spinner: spinner.clone() };
        Ok(ZmqTransport {
            lanes: Lanes::new(connections.into_iter().zip(drivers).map(sockets)),
            core,
            abort_notify: Notify::new(),
            facts: facts(options, socket_info, gate),
            ipc: options.ipc,
            _relays: relays,
        })
    }

    /// Runs `join` on a driver until it ends, the deadline passes, or the transport is aborted, whichever comes first.
    fn run(
        &self,
        driver: &Driver,
        spinner: &mut Spinner,
        leaves_work: bool,
        mut join: Join<'_>,
        operation: impl FnOnce() -> String,
        deadline: Deadline,
    ) -> Result<()> {
        let unless_aborted = async {
            let mut aborted = pin!(self.abort_notify.notified());
            // From here on no notification is missed.
            aborted.as_mut().enable();
            poll_fn(|cx| {
                if let Poll::Ready(outcome) = Pin::new(&mut join).poll(cx) {
                    return Poll::Ready(outcome);
                }
                let _ = aborted.as_mut().poll(cx);
                self.core.aborted().map_or(Poll::Pending, |error| Poll::Ready(Err(error)))
            })
            .await
        };
        match driver.run(spinner, deadline, leaves_work, unless_aborted)? {
            Some(()) => Ok(()),
            None => Err(self.core.timeout(operation(), deadline, join.waiting_for())),
        }
    }
}

impl Transport for ZmqTransport {
    fn name(&self) -> &str {
        if self.ipc { "tcp-ipc" } else { "tcp" }
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
        self.may_block()?;
        self.lanes.run(lane, |Sockets { connections, driver, spinner }| {
            let operation = || describe(lane, outgoing);
            let mut sinks = sinks_by_peer(self.core.world_size, incoming).into_iter();
            let mut join = Join::default();
            for (peer, connection) in connections.iter_mut().enumerate() {
                let sink = sinks.next().flatten();
                let message = outgoing.iter().find(|message| message.peer == peer);
                if let (Some(connection), true) = (connection, sink.is_some() || message.is_some()) {
                    join.push(peer, async move {
                        connection.exchange(message, sink).await.map_err(|fault| fault.blame(peer, operation))
                    });
                }
            }
            let leaves_work = outgoing.iter().any(|message| message.payload.len() > LARGE);
            self.run(driver, spinner, leaves_work, join, operation, deadline)
        })
    }

    fn may_block(&self) -> Result<()> {
        comm_core::driver::may_block()
    }

    fn abort(&self, error: &Error) {
        self.core.abort(error);
        self.abort_notify.notify_waiters();
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        self.may_block()?;
        let close_handshake = |lanes: &mut [&mut Sockets]| {
            self.close_handshake(lanes, deadline)?;
            lanes.iter_mut().for_each(|sockets| sockets.connections.clear());
            Ok(())
        };
        self.lanes.close(self.core.rank, deadline, || self.core.check(), close_handshake)
    }

    fn facts(&self) -> Vec<(String, String)> {
        self.facts.clone()
    }
}

impl ZmqTransport {
    /// Exchanges close messages with all peers on all lanes at once. The first lane's driver waits; the others have their keepers.
    fn close_handshake(&self, lanes: &mut [&mut Sockets], deadline: Deadline) -> Result<()> {
        let mut join = Join::default();
        let mut first = None;
        for Sockets { connections, driver, .. } in lanes {
            first.get_or_insert(&*driver);
            for (peer, connection) in connections.iter_mut().enumerate() {
                if let Some(connection) = connection {
                    join.push(peer, async move {
                        connection.close().await.map_err(|fault| fault.blame(peer, || "closing".into()))
                    });
                }
            }
        }
        let Some(driver) = first else { return Ok(()) };
        // Closing may take its time: it parks instead of spinning.
        let mut spinner = Spinner::new(Waiting::Park);
        self.run(driver, &mut spinner, true, join, || "closing".to_string(), deadline)
    }
}

/// The sinks of an exchange by peer. The peers have been checked.
fn sinks_by_peer<'s>(world_size: usize, incoming: &'s mut [Incoming<'_>]) -> Vec<Option<&'s mut dyn Sink>> {
    let mut sinks: Vec<Option<&'s mut dyn Sink>> = (0..world_size).map(|_| None).collect();
    for message in incoming {
        if let Some(slot) = sinks.get_mut(message.peer) {
            *slot = Some(&mut *message.sink);
        }
    }
    sinks
}

fn facts(options: &TcpOptions, socket_info: SocketInfo, gate: GateInUse) -> Vec<(String, String)> {
    let fact = |name: &str, value: String| (name.to_string(), value);
    let over = if options.ipc { " over a Unix socket" } else { "" };
    let gate = match gate {
        GateInUse::Folder => "none: only this user may enter the sockets' directory".into(),
        GateInUse::Filter => "packet filter".into(),
        GateInUse::Relay { because: None } => "relay".into(),
        GateInUse::Relay { because: Some(why) } => format!("relay, because a packet filter is not possible: {why}"),
        GateInUse::Off => "off".into(),
    };
    let mut facts = vec![
        fact("connections", format!("one DEALER pair{over} a pair of ranks and lane, {} lanes", options.lanes)),
        fact("waiting", options.waiting.to_string()),
        fact("gate", gate),
        fact("window (B)", options.window.to_string()),
        fact("segment (B)", options.segment.to_string()),
    ];
    let congestion = "congestion control (accepted side)";
    let buffers = "socket buffers (B)";
    match socket_info {
        SocketInfo::Unix { buffers: granted } => {
            facts.push(fact("congestion control", "none: Unix sockets".to_string()));
            facts.push(fact(buffers, granted));
        }
        SocketInfo::Tcp(accepted) => {
            let (used, granted) = accepted.map_or_else(
                || {
                    let asked = options.congestion.as_deref().unwrap_or("the kernel's default");
                    (format!("asked for {asked}"), socket::buffers_asked_for())
                },
                |socket| (socket.congestion, socket.buffers),
            );
            facts.push(fact(congestion, used));
            facts.push(fact(buffers, granted));
            let default = format!("{}, unless a route says otherwise", socket::default_congestion());
            facts.push(fact("congestion control (dialled side)", default));
        }
    }
    facts.push(fact("encryption", "none".to_string()));
    facts
}
