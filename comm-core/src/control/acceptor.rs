//! Rank 0's listener, and the handshakes that are under way on its connections.
//!
//! What connections from outside the job can cost is bounded: [`MAX_HANDSHAKES`] sockets with a few hundred bytes each, for the length of a
//! handshake, and no thread; [`MAX_LATE_HANDSHAKES`] once the job is running.
//! One connection above the limit closes the oldest, so that idle ones keep a rank out for no longer than it takes to reach the limit
//! again; a rank whose connection was closed dials again.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use super::auth::{Authenticated, Hello, Rejection, ServerHandshake, Step, version_notice};
use super::send_half::SendHalf;
use crate::clock;
use crate::descriptors;
use crate::error::Error;
use crate::job::{Job, Secret};
use crate::sys::Waiter;

/// Most handshakes at a time.
const MAX_HANDSHAKES: usize = 256;

/// The same once all ranks are connected: a connection is refused then in any case, and the job needs its descriptors.
const MAX_LATE_HANDSHAKES: usize = 16;

/// Most connections accepted before the handshakes under way are served: a rank must get through its handshake in the time that others
/// take to reach the limit.
const ACCEPT_TURN: usize = 32;

/// While the process is out of descriptors and ranks are still expected, a connection whose handshake has taken this long is closed to free
/// one. A rank needs far less time; with a shorter one it would dial again and take the last descriptor again, for ever.
const GRACE: Duration = Duration::from_secs(1);

/// Pause of accepting after the process ran out of descriptors.
const PAUSE: Duration = Duration::from_millis(10);

/// Pause between two rounds of accepting in a running job, which expects no connection: what others cost it counts more than their wait.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(50);

/// Accepts connections and authenticates them.
pub(super) struct Acceptor {
    listeners: Vec<TcpListener>,
    secret: Secret,
    /// Of which job these are ranks, and of which start of it.
    job: (String, u64),
    /// How long a handshake may take.
    timeout: Duration,
    /// Handshakes under way, the oldest first.
    pending: VecDeque<PendingHandshake>,
    /// Nothing is accepted before this, on the [`clock`].
    accepts_from: Duration,
    /// Why nothing can be accepted any more.
    accept_error: Option<Error>,
}

/// A connection that has passed the handshake.
pub(super) struct AuthenticatedConnection {
    pub(super) stream: TcpStream,
    pub(super) peer: Box<Authenticated>,
}

/// A connection that was not admitted.
pub(super) struct RejectedConnection {
    pub(super) addr: String,
    pub(super) why: Rejection,
}

/// All connections that were not admitted: how many, and the most telling reason.
#[derive(Default)]
pub(super) struct RejectedConnections {
    count: usize,
    reason: Option<(ReasonRank, String)>,
}

/// How much a reason says about a missing rank, least first. What any program can cause says least, so that it does not hide the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ReasonRank {
    /// It was silent, slow, or its connection failed.
    Silence,
    /// It speaks another protocol.
    Rubbish,
    /// It speaks another version of this one.
    OtherVersion,
    /// It knows another secret.
    OtherSecret,
    /// It knows the secret, and was refused.
    Refusal,
}

struct PendingHandshake {
    stream: TcpStream,
    addr: SocketAddr,
    server: ServerHandshake,
    /// See [`GRACE`], on the [`clock`].
    grace: Duration,
    until: Duration,
}

impl Acceptor {
    pub(super) fn open(listeners: Vec<TcpListener>, job: &Job, timeout: Duration) -> Self {
        Acceptor {
            listeners,
            secret: job.secret.clone(),
            job: (job.id.clone(), job.epoch),
            timeout,
            pending: VecDeque::new(),
            accepts_from: clock::running(),
            accept_error: None,
        }
    }

    /// The error that ends accepting, once: the process is out of descriptors, and no handshake holds one that could be freed.
    pub(super) fn take_accept_error(&mut self) -> Option<Error> {
        self.accept_error.take()
    }

    /// The sockets to wait for: those of the handshakes in their order, then the listeners.
    pub(super) fn waiters(&self) -> impl Iterator<Item = Waiter<'_>> {
        let is_open = self.accepts_from <= clock::running();
        let listeners =
            self.listeners.iter().filter(move |_| is_open).map(|listener| Waiter::new(listener.as_fd(), false));
        self.pending.iter().map(|handshake| Waiter::new(handshake.stream.as_fd(), false)).chain(listeners)
    }

    /// When there is something to do even if no socket becomes ready.
    pub(super) fn next_turn(&self) -> Option<Duration> {
        let paused = (self.accepts_from > clock::running()).then_some(self.accepts_from);
        self.pending.front().map(|handshake| handshake.until).into_iter().chain(paused).min()
    }

    /// Serves those of the [waiters](Acceptor::waiters) that are `ready`. Returns the connections that were admitted, and those
    /// that were not. The job is running when no rank is expected any more.
    pub(super) fn turn(
        &mut self,
        ready: &[bool],
        is_running: bool,
    ) -> (Vec<AuthenticatedConnection>, Vec<RejectedConnection>) {
        let (mut authenticated, mut rejected) = (Vec::new(), Vec::new());
        let there = self.pending.len();
        let pending = std::mem::take(&mut self.pending);
        let now = clock::running();
        for (at, handshake) in pending.into_iter().enumerate() {
            let outcome = if ready.get(at) == Some(&true) {
                handshake.serve(&self.secret, (&self.job.0, self.job.1))
            } else {
                HandshakeOutcome::Pending(handshake)
            };
            match outcome {
                HandshakeOutcome::Pending(handshake) if now >= handshake.until => {
                    rejected.push(handshake.reject(late()))
                }
                HandshakeOutcome::Pending(handshake) => self.pending.push_back(handshake),
                HandshakeOutcome::Authenticated(connection) => authenticated.push(connection),
                HandshakeOutcome::Rejected(connection) => rejected.push(connection),
            }
        }
        for at in 0..self.listeners.len() {
            if ready.get(there + at) == Some(&true) {
                self.accept(at, is_running, &mut rejected);
                if is_running {
                    self.accepts_from = clock::running() + ACCEPT_INTERVAL;
                }
            }
        }
        (authenticated, rejected)
    }

    /// Accepts what waits at one of the listeners.
    fn accept(&mut self, listener: usize, is_running: bool, rejected: &mut Vec<RejectedConnection>) {
        let limit = if is_running { MAX_LATE_HANDSHAKES } else { MAX_HANDSHAKES };
        for _ in 0..ACCEPT_TURN {
            let Some(listener) = self.listeners.get(listener) else { return };
            let accepted = match listener.accept() {
                Ok((stream, addr)) => PendingHandshake::new(stream, addr, self.timeout),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if descriptors::ran_out(&e) && !is_running => {
                    // The system says so even when no connection waits. Handshakes go on meanwhile.
                    let now = clock::running();
                    match self.pending.front().map(|first| first.grace <= now) {
                        None => {
                            self.accept_error = Some(Error::io("rank 0: accepting a connection of another rank", e))
                        }
                        Some(true) => self.drop_oldest(rejected),
                        Some(false) => {}
                    }
                    self.accepts_from = now + PAUSE;
                    return;
                }
                Err(e) => {
                    // The connection is gone already, or a running job is out of descriptors: it expects no connection, and needs them.
                    rejected.push(RejectedConnection { addr: "accepting".into(), why: e.into() });
                    self.drop_oldest(rejected);
                    thread::sleep(Duration::from_millis(1));
                    return;
                }
            };
            match accepted {
                Ok(handshake) => {
                    while self.pending.len() >= limit {
                        self.drop_oldest(rejected);
                    }
                    self.pending.push_back(handshake);
                }
                Err(connection) => rejected.push(connection),
            }
        }
    }

    fn drop_oldest(&mut self, rejected: &mut Vec<RejectedConnection>) {
        if let Some(handshake) = self.pending.pop_front() {
            let why = io::Error::new(
                io::ErrorKind::TimedOut,
                "it did not finish its handshake before its place was needed for other connections",
            );
            rejected.push(handshake.reject(why.into()));
        }
    }
}

impl RejectedConnections {
    pub(super) fn note(&mut self, connection: &RejectedConnection) {
        let rank = match &connection.why {
            Rejection::Io(_) => ReasonRank::Silence,
            Rejection::Foreign(_) => ReasonRank::Rubbish,
            Rejection::Version(_) => ReasonRank::OtherVersion,
            Rejection::Left | Rejection::WrongSecret => ReasonRank::OtherSecret,
            Rejection::Earlier | Rejection::Later(_) => ReasonRank::Refusal,
        };
        self.add(rank, || format!("{}: {}", connection.addr, connection.why));
    }

    /// The other end of `send_half` knows the secret, but has been refused.
    pub(super) fn note_refusal(&mut self, send_half: &SendHalf, why: &str) {
        let addr =
            send_half.stream().peer_addr().map_or_else(|_| "an unknown address".to_string(), |addr| addr.to_string());
        self.add(ReasonRank::Refusal, || format!("{addr}: {why}"));
    }

    fn add(&mut self, rank: ReasonRank, text: impl FnOnce() -> String) {
        self.count += 1;
        if self.reason.as_ref().is_none_or(|(most, _)| rank >= *most) {
            self.reason = Some((rank, text()));
        }
    }
}

/// For the end of an error's text; empty if there were none.
impl fmt::Display for RejectedConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.reason {
            None => Ok(()),
            Some((_, reason)) if self.count == 1 => write!(f, " (1 connection was rejected: {reason})"),
            Some((_, reason)) => write!(f, " ({} connections were rejected; one of them: {reason})", self.count),
        }
    }
}

enum HandshakeOutcome {
    Pending(PendingHandshake),
    Authenticated(AuthenticatedConnection),
    Rejected(RejectedConnection),
}

impl PendingHandshake {
    fn new(stream: TcpStream, addr: SocketAddr, timeout: Duration) -> Result<Self, RejectedConnection> {
        let failed = |why: io::Error| RejectedConnection { addr: addr.to_string(), why: why.into() };
        stream.set_nonblocking(true).map_err(failed)?;
        let server = ServerHandshake::new().map_err(|e| failed(io::Error::other(e.to_string())))?;
        let now = clock::running();
        Ok(PendingHandshake { stream, addr, server, grace: now + GRACE, until: now.saturating_add(timeout) })
    }

    /// Reads what is there, no further than the handshake goes, and answers, for a start of the job with this id and epoch.
    fn serve(mut self, secret: &Secret, (id, epoch): (&str, u64)) -> HandshakeOutcome {
        let mut buffer = [0; 512];
        loop {
            let wanted = self.server.wanted().min(buffer.len());
            let bytes = match (&self.stream).read(buffer.get_mut(..wanted).unwrap_or_default()) {
                Ok(0) if self.server.has_replied() => return HandshakeOutcome::Rejected(self.reject(Rejection::Left)),
                Ok(0) => {
                    let why = io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection");
                    return HandshakeOutcome::Rejected(self.reject(why.into()));
                }
                Ok(count) => buffer.get(..count).unwrap_or_default(),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return HandshakeOutcome::Pending(self),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) if self.server.has_replied() => return HandshakeOutcome::Rejected(self.reject(Rejection::Left)),
                Err(e) => return HandshakeOutcome::Rejected(self.reject(e.into())),
            };
            let step = self.server.take(bytes, secret);
            let said = match step {
                Ok(Step::More) => Ok(()),
                Ok(Step::Reply(reply)) => say(&self.stream, &reply),
                Ok(Step::Proven(peer)) if peer.hello.job == id && peer.hello.epoch > epoch => {
                    let Hello { rank, epoch: theirs, .. } = peer.hello;
                    let what =
                        format!("rank {rank} has epoch {theirs}, but this job has epoch {epoch}, an earlier start");
                    match say(&self.stream, &peer.earlier) {
                        Ok(()) => return HandshakeOutcome::Rejected(self.reject(Rejection::Later(what))),
                        Err(e) => Err(e),
                    }
                }
                Ok(Step::Proven(peer)) => match say(&self.stream, &peer.confirmation) {
                    Ok(()) => {
                        return HandshakeOutcome::Authenticated(AuthenticatedConnection { stream: self.stream, peer });
                    }
                    Err(e) => Err(e),
                },
                Err(why) => {
                    if matches!(why, Rejection::Version(_)) {
                        // It can say so; the rest of a reply would mean nothing to it.
                        let _ = say(&self.stream, &version_notice());
                    }
                    return HandshakeOutcome::Rejected(self.reject(why));
                }
            };
            if let Err(e) = said {
                return HandshakeOutcome::Rejected(self.reject(e.into()));
            }
        }
    }

    fn reject(self, why: Rejection) -> RejectedConnection {
        RejectedConnection { addr: self.addr.to_string(), why }
    }
}

/// Sends a few hundred bytes at most, which fit in the buffer of a new socket.
fn say(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    match stream.write(bytes)? {
        count if count == bytes.len() => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::WriteZero, "it does not read what is sent to it")),
    }
}

fn late() -> Rejection {
    io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time").into()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::Command;

    use super::*;
    use crate::job::Address;

    /// The system reports that it is out of descriptors even though no other connection waits.
    #[test]
    fn who_comes_on_the_last_descriptor_stays_for_its_grace() {
        const NAME: &str = "control::acceptor::tests::who_comes_on_the_last_descriptor_stays_for_its_grace";
        const INSIDE: &str = "ACCEPTOR_TEST";
        if std::env::var(INSIDE).is_err() {
            let output = Command::new("sh")
                .args(["-c", "ulimit -n 64; exec \"$@\"", "sh"])
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", NAME, "--nocapture"])
                .env(INSIDE, NAME)
                .output()
                .unwrap();
            let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
            assert!(output.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let _rank = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut hoard: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        hoard.pop();
        let secret = Secret::new("a secret for tests only").unwrap();
        let job = Job::new(0, 2, Address::File("unused".into()), secret).unwrap();
        let mut acceptor = Acceptor::open(vec![listener], &job, Duration::from_secs(60));
        let (authenticated, rejected) = acceptor.turn(&[true], false);
        assert_eq!((authenticated.len(), rejected.len(), acceptor.pending.len()), (0, 0, 1));
        assert!(acceptor.take_accept_error().is_none() && acceptor.accepts_from > clock::running());
        // Longer than a rank takes: another one may need the descriptor.
        acceptor.pending[0].grace = Duration::ZERO;
        let (_, rejected) = acceptor.turn(&[false, true], false);
        assert_eq!((rejected.len(), acceptor.pending.len()), (1, 0));
        hoard.push(File::open("/dev/null").unwrap());
        acceptor.turn(&[true], false);
        let accept_error = acceptor.take_accept_error().unwrap().to_string();
        assert!(accept_error.contains("rank 0") && accept_error.contains("ulimit -n"), "{accept_error}");
    }
}
