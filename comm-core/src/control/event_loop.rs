//! The one thread of a rank's control plane: it reads, sends what could not be sent at once, keeps the heartbeat, notices who
//! is gone, and at rank 0 admits others.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::acceptor::{Acceptor, AuthenticatedConnection};
use super::auth::Authenticated;
use super::options::TcpOptions;
use super::send_half::SendHalf;
use super::shared::SharedState;
use super::state::{Admission, State, rank_0_is_silent};
use super::wire::{Message, Opener};
use crate::clock;
use crate::error::{Error, Result};
use crate::sys::{self, Waiter};

/// How long a refused connection is kept open, so that the reason arrives.
const REFUSED: Duration = Duration::from_secs(2);

/// Most bytes read from one connection before the others get their turn.
const READ_TURN: usize = 4 << 20;

pub(super) struct EventLoop {
    pub(super) shared: Arc<SharedState>,
    pub(super) options: TcpOptions,
    /// At rank 0.
    pub(super) acceptor: Option<Acceptor>,
    /// Readable when another thread wants attention.
    pub(super) waker: UnixStream,
    pub(super) connections: Vec<Connection>,
    /// For how long this loop has been looking, and the [`clock`] when it last did. Silence is measured in this: a loop that
    /// was stopped, or got no turn, has not listened, and accuses nobody of what it has not heard.
    attended: Duration,
    looked: Duration,
}

/// The receiving side of a connection.
pub(super) struct Connection {
    send_half: Arc<SendHalf>,
    opener: Opener,
    /// `Err`: refused, to be closed at this time.
    peer: std::result::Result<usize, Duration>,
    /// By the loop's attention.
    last_heard: Duration,
    /// Given up as lost; nothing more is concluded from it.
    silent: bool,
}

impl Connection {
    /// To a loop that has not begun.
    pub(super) fn new(send_half: Arc<SendHalf>, opener: Opener, peer: usize) -> Self {
        Connection { send_half, opener, peer: Ok(peer), last_heard: Duration::ZERO, silent: false }
    }
}

impl EventLoop {
    pub(super) fn new(shared: Arc<SharedState>, options: TcpOptions, waker: UnixStream) -> Self {
        let (acceptor, connections, attended) = (None, Vec::new(), Duration::ZERO);
        EventLoop { shared, options, acceptor, waker, connections, attended, looked: clock::running() }
    }

    /// Runs until the control is dropped.
    pub(super) fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.turns()));
        let error = match ended {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(panic) => {
                let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
                let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
                Error::Internal(format!("the thread of the control plane panicked: {text}"))
            }
        };
        // Nothing reads rank 0's answer any more.
        self.shared.update(|state| state.decide_alone(&error));
    }

    fn turns(&mut self) -> Result<()> {
        self.looked = clock::running();
        let mut next_beat = self.looked.saturating_add(self.options.heartbeat);
        let (mut stall_check_at, mut settles_at): (Option<Duration>, Option<Duration>) = (None, None);
        let mut buffer = vec![0; 64 << 10];
        while !self.shared.stop.load(Ordering::Acquire) {
            let until = [stall_check_at, settles_at].into_iter().flatten().fold(next_beat, Duration::min);
            let (ready, acceptor_ready) =
                self.wait(until).map_err(|error| Error::io("waiting for control connections", error))?;
            self.attend();
            self.serve_acceptor(&acceptor_ready);
            // Everything that has come is read before anyone is declared silent: the others' signs of life may be waiting.
            for (at, readable) in ready.into_iter().enumerate().rev() {
                let Some(connection) = self.connections.get_mut(at) else { continue };
                connection.send_half.flush();
                if readable && !connection.read(&self.shared, self.attended, &mut buffer) {
                    let gone = self.connections.swap_remove(at);
                    gone.send_half.close();
                }
            }
            self.shared.update(State::decide_reported);
            self.check_liveness();
            let now = clock::running();
            let is_beat = now >= next_beat;
            if is_beat {
                self.beat();
                next_beat = now.saturating_add(self.options.heartbeat);
            }
            if is_beat || stall_check_at.is_some_and(|at| now >= at) {
                self.shared.update(|state| state.check_stall(now));
            }
            if settles_at.is_some_and(|end| now >= end) {
                self.shared.update(State::settle);
            }
            (stall_check_at, settles_at) = self.shared.timers();
        }
        Ok(())
    }

    /// Takes note that this loop looks, before it reads what has come.
    fn attend(&mut self) {
        let now = clock::running();
        let most = self.options.heartbeat.saturating_mul(2);
        self.attended = self.attended.saturating_add(now.saturating_sub(self.looked).min(most));
        self.looked = now;
    }

    /// Waits for something to do; which connections are readable, and which sockets of the listeners and handshakes are.
    fn wait(&self, until: Duration) -> io::Result<(Vec<bool>, Vec<bool>)> {
        let mut waiters: Vec<Waiter<'_>> = self
            .connections
            .iter()
            .map(|c| Waiter::new(c.send_half.stream().as_fd(), c.send_half.is_waiting()))
            .collect();
        waiters.push(Waiter::new(self.waker.as_fd(), false));
        waiters.extend(self.acceptor.iter().flat_map(Acceptor::waiters));
        let next = self.acceptor.as_ref().and_then(Acceptor::next_turn).map_or(until, |turn| turn.min(until));
        sys::poll(&mut waiters, next.saturating_sub(clock::running()))?;
        let mut found: Vec<bool> = waiters.iter().map(|w| w.readable).collect();
        drop(waiters);
        // Wake-ups are not counted; any number of bytes is one.
        let mut bytes = [0; 64];
        while matches!((&self.waker).read(&mut bytes), Ok(n) if n == bytes.len()) {}
        let acceptor_ready = found.split_off(self.connections.len() + 1);
        found.pop();
        Ok((found, acceptor_ready))
    }

    /// Admits connections that prove that they belong to the job, and notes why others are rejected.
    fn serve_acceptor(&mut self, ready: &[bool]) {
        let Some(acceptor) = &mut self.acceptor else { return };
        let is_running = self.shared.update(|state| state.session().is_some());
        let (authenticated, rejected) = acceptor.turn(ready, is_running);
        if let Some(error) = acceptor.take_accept_error() {
            self.shared.update(|state| state.fail(&error));
        }
        if !rejected.is_empty() {
            self.shared.update(|state| rejected.iter().for_each(|connection| state.note_rejected(connection)));
        }
        for AuthenticatedConnection { stream, peer } in authenticated {
            let Authenticated { hello, session, .. } = *peer;
            let Ok(send_half) = SendHalf::new(stream, session.sealer) else { continue };
            let send_half = Arc::new(send_half);
            let admission = self.shared.update(|state| state.admit(Arc::clone(&send_half), &hello));
            let mut connection = Connection::new(send_half, session.opener, 0);
            connection.last_heard = self.attended;
            connection.peer = match admission {
                Admission::Admitted(rank) => Ok(rank),
                Admission::Refused => Err(clock::running() + REFUSED),
            };
            self.connections.push(connection);
        }
    }

    fn beat(&self) {
        let Ok(beat) = Message::Heartbeat.encode() else { return };
        for connection in &self.connections {
            // Whatever waits to be sent is a sign of life too.
            if connection.peer.is_ok() && !connection.send_half.is_waiting() {
                connection.send_half.send_encoded(&beat);
            }
        }
    }

    fn check_liveness(&mut self) {
        let bound = self.options.liveness;
        for connection in &mut self.connections {
            let quiet = self.attended.saturating_sub(connection.last_heard) >= bound;
            if let (Ok(peer), true, false) = (connection.peer, quiet, connection.silent) {
                connection.silent = true;
                let error = if peer == 0 {
                    rank_0_is_silent()
                } else {
                    let detail = format!(
                        "it sent no heartbeat for {:.1} s; its process is stopped, or the network to it is down",
                        bound.as_secs_f64()
                    );
                    Error::PeerLost { rank: peer, operation: String::new(), detail }
                };
                self.shared.update(|state| state.on_lost(peer, &error));
            }
        }
        let now = clock::running();
        self.connections.retain(|connection| match connection.peer {
            Err(until) if now >= until => {
                connection.send_half.close();
                false
            }
            _ => true,
        });
    }
}

impl Connection {
    /// Reads what is there; false when the connection is at its end.
    fn read(&mut self, shared: &SharedState, attended: Duration, buffer: &mut [u8]) -> bool {
        let mut total = 0;
        while total < READ_TURN {
            let count = match self.send_half.stream().read(buffer) {
                Ok(0) => return self.lost(shared, "its control connection was closed"),
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                // A process that ends with unread bytes resets the connection: the same to the others.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => {
                    return self.lost(shared, "its control connection was closed");
                }
                Err(e) => return self.lost(shared, &format!("its control connection failed: {e}")),
            };
            total += count;
            self.last_heard = attended;
            let Ok(peer) = self.peer else { continue };
            self.opener.push(buffer.get(..count).unwrap_or_default());
            loop {
                let taken = match self.opener.next() {
                    Ok(None) => break,
                    Ok(Some(payload)) => Message::decode(&payload)
                        .and_then(|message| shared.update(|state| state.on_message(peer, message))),
                    Err(what) => Err(what),
                };
                if let Err(what) = taken {
                    shared.update(|state| {
                        state.on_nonsense(peer, &what);
                        state.remove_send_half(peer);
                    });
                    return false;
                }
            }
        }
        true
    }

    fn lost(&self, shared: &SharedState, detail: &str) -> bool {
        // The end of this rank's own connections, when it drops the control, says nothing of others.
        if let Ok(peer) = self.peer
            && !shared.stop.load(Ordering::Acquire)
        {
            let error = Error::PeerLost { rank: peer, operation: String::new(), detail: detail.to_string() };
            shared.update(|state: &mut State| {
                state.on_lost(peer, &error);
                state.remove_send_half(peer);
            });
        }
        false
    }
}
