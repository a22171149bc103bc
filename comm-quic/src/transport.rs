//! The transport itself.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use comm_core::{Control, Deadline, Error, Incoming, Outgoing, Result, Transport};
use quinn::{Connection, ConnectionError, Endpoint, ReadError, Runtime as _, StoppedError, TokioRuntime};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{Mutex, watch};
use tokio::time::{sleep, sleep_until, timeout};

use crate::config::{DatagramSizes, effective_congestion, endpoint_config, receive_window, transport_config};
use crate::congestion::Congestion;
use crate::message::{Channel, Context, DONE, DROPPED, is_done, receive, send};
use crate::options::QuicOptions;
use crate::path::PeerPath;
use crate::rendezvous::{Appointment, Introduction, Link, meet, server_config};
use crate::socket::{BoundSocket, CappedSocket};
use crate::tls::{CIPHER_SUITE, Identity, Pins};

/// A QUIC connection to every other rank.
///
/// One thread, named `quic-RANK`, drives the socket, the connections and their timers, whatever the number of peers; an exchange
/// runs in its caller's thread. Not to be used from inside an asynchronous runtime: calls block, and say so instead.
pub struct QuicTransport {
    rank: usize,
    world_size: usize,
    /// By lane. Held for the length of an exchange.
    lanes: Vec<Mutex<Lane>>,
    /// By rank, `None` for this one.
    connections: Vec<Option<Connection>>,
    endpoint: Endpoint,
    address: SocketAddr,
    aborted: watch::Sender<Option<Error>>,
    closed: AtomicBool,
    settings: Settings,
    /// `None` only while it is being dropped.
    runtime: Option<Runtime>,
}

/// What [`Transport::facts`] tells.
struct Settings {
    options: QuicOptions,
    congestion: Congestion,
    sizes: DatagramSizes,
    segments: usize,
    receive_buffer: usize,
    send_buffer: usize,
}

struct Lane {
    /// What an exchange on it is called in errors.
    operation: String,
    /// By rank, `None` for this one.
    channels: Vec<Option<Channel>>,
    /// An exchange failed halfway: what would come next on the streams is the rest of it.
    broken: Option<Error>,
}

impl QuicTransport {
    /// Connects the ranks of `control` with each other. All call it, at the same point of their use of `control`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for options that cannot work, [`Error::Io`] when the socket cannot be bound,
    /// [`Error::Rendezvous`] when the ranks disagree, [`Error::PeerLost`] when a rank refuses, [`Error::Timeout`] naming the ranks
    /// that are missing at the deadline, or the job's failure.
    pub fn connect(control: &dyn Control, options: &QuicOptions, deadline: Deadline) -> Result<QuicTransport> {
        refuse_inside_runtime("connecting over QUIC")?;
        options.check()?;
        let (rank, world_size) = (control.rank(), control.world_size());
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name(format!("quic-{rank}"))
            .enable_all()
            .build()
            .map_err(|error| Error::io("starting the thread for QUIC", error))?;

        let BoundSocket { socket, address, receive_buffer, send_buffer } = BoundSocket::bind(options.bind)?;
        let identity = Identity::generate()?;
        let introduction = Introduction {
            address,
            fingerprint: identity.fingerprint(),
            lanes: u32::try_from(options.lanes).unwrap_or(u32::MAX),
            receive_buffer: receive_buffer as u64,
        };
        let ranks = introduction.exchange(control, deadline)?;

        let sizes = DatagramSizes::choose(options);
        let smallest_buffer = ranks.iter().map(|rank| rank.receive_buffer).min().unwrap_or_default();
        let congestion = effective_congestion(options.congestion, sizes, smallest_buffer, world_size - 1)?;

        // The higher rank dials, so that each pair has one connection.
        let pins = Pins::new(ranks.iter().map(|other| other.fingerprint).enumerate().skip(rank + 1));
        let server =
            server_config(identity.server_config(&pins)?, transport_config(options, congestion, sizes, options.lanes)?);
        let outgoing = transport_config(options, congestion, sizes, 0)?;
        let appointments = ranks
            .iter()
            .enumerate()
            .take(rank)
            .map(|(peer, other)| {
                let mut config = quinn::ClientConfig::new(identity.client_config(other.fingerprint)?);
                config.transport_config(Arc::clone(&outgoing));
                Ok(Appointment { peer, address: other.address, config })
            })
            .collect::<Result<Vec<_>>>()?;

        let failed = failure_of(control);
        let inside = runtime.enter();
        let quinn_socket = TokioRuntime
            .wrap_udp_socket(socket)
            .map_err(|error| Error::io("preparing the UDP socket for QUIC", error))?;
        let socket = Arc::new(CappedSocket::new(quinn_socket, sizes.largest));
        let segments = quinn::AsyncUdpSocket::max_transmit_segments(&*socket).min(10);
        let endpoint =
            Endpoint::new_with_abstract_socket(endpoint_config()?, Some(server), socket, Arc::new(TokioRuntime))
                .map_err(|error| Error::io("starting QUIC on the UDP socket", error))?;
        drop(inside);

        let mut links: Vec<Option<Link>> = (0..world_size).map(|_| None).collect();
        let outcome = runtime.block_on(async {
            tokio::select! {
                met = meet(&endpoint, appointments, &pins, rank, options.lanes, &mut links) => Some(met),
                error = told(failed) => Some(Err(error)),
                () = sleep_until(deadline.instant().into()) => None,
            }
        });
        outcome.unwrap_or_else(|| {
            let missing = links.iter().enumerate().filter(|(peer, link)| *peer != rank && link.is_none());
            Err(Error::Timeout {
                rank,
                operation: "connecting over QUIC".into(),
                waited: deadline.waited(),
                waiting_for: missing.map(|(peer, _)| peer).collect(),
            })
        })?;

        let mut lanes: Vec<Lane> = (0..options.lanes)
            .map(|lane| Lane {
                operation: format!("an exchange on QUIC lane {lane}"),
                channels: Vec::with_capacity(world_size),
                broken: None,
            })
            .collect();
        let mut connections = Vec::with_capacity(world_size);
        for link in links {
            let (connection, channels) = match link {
                Some(link) => (Some(link.connection), link.channels),
                None => (None, Vec::new()),
            };
            connections.push(connection);
            let mut channels = channels.into_iter();
            for lane in &mut lanes {
                lane.channels.push(channels.next());
            }
        }
        Ok(QuicTransport {
            rank,
            world_size,
            lanes: lanes.into_iter().map(Mutex::new).collect(),
            connections,
            endpoint,
            address,
            aborted: watch::Sender::new(None),
            closed: AtomicBool::new(false),
            settings: Settings { options: options.clone(), congestion, sizes, segments, receive_buffer, send_buffer },
            runtime: Some(runtime),
        })
    }

    /// The UDP address of this rank.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// State and counters of the connection to every peer, in rank order.
    pub fn paths(&self) -> Vec<PeerPath> {
        self.connections
            .iter()
            .enumerate()
            .filter_map(|(peer, connection)| Some(PeerPath::of(peer, connection.as_ref()?)))
            .collect()
    }

    fn runtime(&self) -> Result<&Runtime> {
        self.runtime.as_ref().ok_or_else(|| Error::invalid("the QUIC transport is being dropped"))
    }

    fn abort_error(&self) -> Option<Error> {
        self.aborted.borrow().clone()
    }

    /// Runs `jobs` to the end, or to the first error, the abort or the deadline.
    fn drive(&self, mut jobs: Vec<Job<'_>>, operation: &str, deadline: Deadline) -> Result<()> {
        let aborted = self.aborted.subscribe();
        let outcome = self.runtime()?.block_on(async {
            tokio::select! {
                // First what is there: a deadline that has passed does not undo what has arrived.
                biased;
                outcome = all(&mut jobs) => Some(outcome),
                error = told(aborted) => Some(Err(error)),
                () = sleep_until(deadline.instant().into()) => None,
            }
        });
        outcome.unwrap_or_else(|| {
            let mut waiting_for: Vec<usize> = jobs.iter().filter(|job| !job.done).map(|job| job.peer).collect();
            waiting_for.sort_unstable();
            waiting_for.dedup();
            let operation = operation.to_string();
            Err(Error::Timeout { rank: self.rank, operation, waited: deadline.waited(), waiting_for })
        })
    }

    /// Waits for the lanes, which running exchanges hold, and says goodbye on each.
    fn say_goodbye(&self, deadline: Deadline) -> Result<()> {
        let operation = "closing the QUIC transport";
        let aborted = self.aborted.subscribe();
        let lock_all = async {
            let mut guards = Vec::with_capacity(self.lanes.len());
            for lane in &self.lanes {
                guards.push(lane.lock().await);
            }
            guards
        };
        let mut guards = self.runtime()?.block_on(async {
            tokio::select! {
                biased;
                error = told(aborted) => Err(error),
                guards = lock_all => Ok(guards),
                () = sleep_until(deadline.instant().into()) => Err(Error::Timeout {
                    rank: self.rank,
                    operation: format!("{operation} (an exchange is still running)"),
                    waited: deadline.waited(),
                    waiting_for: Vec::new(),
                }),
            }
        })?;
        let mut jobs = Vec::new();
        for guard in &mut guards {
            if let Some(error) = &guard.broken {
                return Err(error.clone());
            }
            for (peer, channel) in guard.channels.iter_mut().enumerate() {
                let Some(Channel { send, receive }) = channel else { continue };
                let context = Context { peer, operation };
                // An error says that it was finished before.
                let _ = send.finish();
                let stopped = send.stopped();
                jobs.push(Job::new(peer, async move { acknowledged(stopped.await, context) }));
                jobs.push(Job::new(peer, async move {
                    // What nobody asked for is not kept.
                    while receive.read_chunk(usize::MAX, true).await.map(|chunk| chunk.is_some()).or_else(|error| {
                        match &error {
                            ReadError::ConnectionLost(lost) if is_done(lost) => Ok(false),
                            _ => Err(context.read_error(&error)),
                        }
                    })? {}
                    Ok(())
                }));
            }
        }
        self.drive(jobs, operation, deadline)
    }
}

impl Transport for QuicTransport {
    fn name(&self) -> &str {
        "quic"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn lanes(&self) -> usize {
        self.lanes.len()
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        refuse_inside_runtime("an exchange over QUIC")?;
        if let Some(error) = self.abort_error() {
            return Err(error);
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::invalid("the QUIC transport is closed"));
        }
        let lock = self
            .lanes
            .get(lane)
            .ok_or_else(|| Error::invalid(format!("lane {lane} does not exist; there are {}", self.lanes.len())))?;
        let mut guard = lock
            .try_lock()
            .map_err(|_| Error::invalid(format!("lane {lane}: another exchange is running on it, or close")))?;
        let Lane { operation, channels, broken } = &mut *guard;
        if let Some(error) = broken {
            return Err(error.clone());
        }

        let mut ends: Vec<_> = channels
            .iter_mut()
            .map(|channel| match channel {
                Some(Channel { send, receive }) => (Some(send), Some(receive)),
                None => (None, None),
            })
            .collect();
        let mut jobs = Vec::with_capacity(outgoing.len() + incoming.len());
        for message in outgoing {
            if message.header.payload_len != message.payload.len() as u64 {
                return Err(Error::invalid(format!(
                    "{operation}: a header for {} B before a payload of {} B",
                    message.header.payload_len,
                    message.payload.len()
                )));
            }
            let stream = ends
                .get_mut(message.peer)
                .and_then(|(send, _)| send.take())
                .ok_or_else(|| self.no_such_peer(operation, message.peer, "to"))?;
            let context = Context { peer: message.peer, operation };
            jobs.push(Job::new(message.peer, send(stream, message, context)));
        }
        for Incoming { peer, sink } in incoming {
            let stream = ends
                .get_mut(*peer)
                .and_then(|(_, receive)| receive.take())
                .ok_or_else(|| self.no_such_peer(operation, *peer, "from"))?;
            let context = Context { peer: *peer, operation };
            jobs.push(Job::new(*peer, receive(stream, &mut **sink, context)));
        }
        let outcome = self.drive(jobs, operation, deadline);
        if let Err(error) = &outcome {
            *broken = Some(error.clone());
        }
        outcome
    }

    fn abort(&self, error: &Error) {
        self.aborted.send_if_modified(|aborted| {
            let first = aborted.is_none();
            if first {
                *aborted = Some(error.clone());
            }
            first
        });
    }

    fn close(&self, deadline: Deadline) -> Result<()> {
        refuse_inside_runtime("closing the QUIC transport")?;
        if self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        if let Some(error) = self.abort_error() {
            return Err(error);
        }
        self.say_goodbye(deadline)?;
        self.closed.store(true, Ordering::Release);
        self.endpoint.close(DONE, b"done");
        // Until then a peer that missed the last packets is told again. Nothing depends on it but the peer's speed.
        let patience = deadline.remaining().min(FAREWELL);
        let _ = self.runtime()?.block_on(async { timeout(patience, self.endpoint.wait_idle()).await });
        Ok(())
    }

    fn facts(&self) -> Vec<(String, String)> {
        let Settings { options, congestion, sizes, segments, receive_buffer, send_buffer } = &self.settings;
        let mut facts = vec![
            ("quic.congestion".to_string(), congestion.to_string()),
            ("quic.congestion_asked".to_string(), options.congestion.to_string()),
            ("quic.mtu_asked".to_string(), options.mtu.map_or("largest".to_string(), |mtu| mtu.to_string())),
            ("quic.mtu_initial".to_string(), sizes.initial.to_string()),
            ("quic.mtu_largest".to_string(), sizes.largest.to_string()),
            ("quic.datagrams_per_call".to_string(), segments.to_string()),
            ("quic.cipher_suite".to_string(), CIPHER_SUITE.to_string()),
            ("quic.stream_window".to_string(), options.stream_window.to_string()),
            ("quic.receive_window".to_string(), receive_window(options).to_string()),
            ("quic.send_window".to_string(), options.send_window.to_string()),
            ("quic.udp_receive_buffer".to_string(), receive_buffer.to_string()),
            ("quic.udp_send_buffer".to_string(), send_buffer.to_string()),
            ("quic.idle_timeout_ms".to_string(), options.idle_timeout.as_millis().to_string()),
            ("quic.keep_alive_ms".to_string(), options.keep_alive.as_millis().to_string()),
        ];
        facts.extend(self.paths().iter().map(|path| (format!("quic.mtu_to_rank_{}", path.peer), path.mtu.to_string())));
        facts
    }
}

impl Drop for QuicTransport {
    fn drop(&mut self) {
        let Some(runtime) = self.runtime.take() else { return };
        let mut reset = vec![0; self.world_size];
        for lane in &mut self.lanes {
            for (channel, reset) in lane.get_mut().channels.iter_mut().zip(&mut reset) {
                if let Some(channel) = channel
                    && channel.send.reset(DROPPED).is_ok()
                {
                    *reset += 1;
                }
            }
        }
        // A peer that is not told would learn of it at the idle timeout. Blocking is not allowed inside a runtime.
        if Handle::try_current().is_ok() {
            self.endpoint.close(DROPPED, b"dropped");
            runtime.shutdown_background();
            return;
        }
        // quinn-proto 0.11.19 puts off the last packet of a connection while stream data waits for the congestion window, and
        // then, as a closed connection takes no acknowledgements, never sends it. So streams are reset first.
        let peers = || self.connections.iter().zip(&reset).filter_map(|(peer, reset)| Some((peer.as_ref()?, *reset)));
        let streams_are_reset = || {
            peers().all(|(peer, reset)| peer.close_reason().is_some() || peer.stats().frame_tx.reset_stream >= reset)
        };
        let peers_are_told = || {
            peers().all(|(peer, _)| match peer.close_reason() {
                None => false,
                Some(ConnectionError::LocallyClosed) => peer.stats().frame_tx.connection_close > 0,
                Some(_) => true,
            })
        };
        runtime.block_on(async {
            let _ = timeout(LAST_WORDS, until(streams_are_reset)).await;
            self.endpoint.close(DROPPED, b"dropped");
            let _ = timeout(LAST_WORDS, until(peers_are_told)).await;
        });
        runtime.shutdown_background();
    }
}

impl QuicTransport {
    fn no_such_peer(&self, operation: &str, peer: usize, direction: &str) -> Error {
        Error::invalid(format!(
            "{operation} on rank {} of {}: no message, or no second one, can go {direction} rank {peer}",
            self.rank, self.world_size
        ))
    }
}

/// Most time that closing spends on repeating its last packet.
const FAREWELL: Duration = Duration::from_secs(3);

/// Most time that dropping spends on each of its two last packets.
const LAST_WORDS: Duration = Duration::from_millis(100);

/// Asks again and again; quinn does not announce what it has sent.
async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        sleep(Duration::from_millis(1)).await;
    }
}

/// One direction of an exchange with one peer.
struct Job<'a> {
    peer: usize,
    future: Pin<Box<dyn Future<Output = Result<()>> + 'a>>,
    done: bool,
}

impl<'a> Job<'a> {
    fn new(peer: usize, future: impl Future<Output = Result<()>> + 'a) -> Self {
        Job { peer, future: Box::pin(future), done: false }
    }
}

/// Ends when all jobs have, or with the first error. Each wake-up looks at all that are left: they are few.
async fn all(jobs: &mut [Job<'_>]) -> Result<()> {
    poll_fn(|cx| {
        let mut pending = false;
        for job in jobs.iter_mut().filter(|job| !job.done) {
            match job.future.as_mut().poll(cx) {
                Poll::Ready(Ok(())) => job.done = true,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => pending = true,
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(Ok(())) }
    })
    .await
}

/// The error that is announced on `channel`, when it is.
async fn told(mut channel: watch::Receiver<Option<Error>>) -> Error {
    let announced = channel.wait_for(Option::is_some).await.ok().and_then(|error| error.clone());
    match announced {
        Some(error) => error,
        // Nobody is left who could announce one.
        None => std::future::pending().await,
    }
}

/// The job's failure while the ranks connect.
fn failure_of(control: &dyn Control) -> watch::Receiver<Option<Error>> {
    let (sender, receiver) = watch::channel(None);
    control.on_failure(Box::new(move |error| {
        sender.send_replace(Some(error.clone()));
    }));
    receiver
}

/// Whether the peer has all that was sent to it on a stream.
fn acknowledged(stopped: Result<Option<quinn::VarInt>, StoppedError>, context: Context<'_>) -> Result<()> {
    match stopped {
        Ok(None) => Ok(()),
        Ok(Some(code)) => Err(context.lost(format!("it stopped reading (code {code})"))),
        Err(StoppedError::ConnectionLost(error)) if is_done(&error) => Ok(()),
        Err(StoppedError::ConnectionLost(error)) => Err(context.lost(crate::message::describe(&error))),
        Err(error) => Err(context.lost(error.to_string())),
    }
}

/// Blocking a thread that drives other tasks would stop them, and tokio panics.
fn refuse_inside_runtime(what: &str) -> Result<()> {
    if Handle::try_current().is_ok() {
        return Err(Error::invalid(format!("{what} blocks: call it from a thread outside of any tokio runtime")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use comm_core::{Header, Sink};

    use super::*;
    use crate::stranger_tests::two_ranks;

    struct Nothing;

    impl Sink for Nothing {
        fn begin(&mut self, header: &Header) -> Result<()> {
            panic!("nothing was announced, but {header} came")
        }

        fn piece(&mut self, _bytes: &[u8]) -> Result<()> {
            panic!("nothing was announced, but bytes came")
        }
    }

    #[test]
    fn bytes_that_are_no_message_are_named_as_such() {
        let outcome = two_ranks(
            |ranks| ranks,
            |transport| {
                let deadline = Deadline::after(Duration::from_secs(10));
                if transport.rank() == 0 {
                    let mut lane = transport.lanes[1].try_lock().unwrap();
                    let channel = lane.channels[1].as_mut().unwrap();
                    transport.runtime().unwrap().block_on(channel.send.write_all(&[0xab; 200])).unwrap();
                    // Leaving would lose them.
                    drop(lane);
                    let _ = transport.exchange(0, &[], &mut [Incoming { peer: 1, sink: &mut Nothing }], deadline);
                    return;
                }
                let error =
                    transport.exchange(1, &[], &mut [Incoming { peer: 0, sink: &mut Nothing }], deadline).unwrap_err();
                assert!(matches!(&error, Error::Protocol { who, .. } if who == "rank 0"), "{error}");
            },
        );
        for outcome in outcome {
            outcome.unwrap();
        }
    }
}
