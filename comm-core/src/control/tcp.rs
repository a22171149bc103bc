//! The control plane over plain TCP: a star through rank 0, authenticated, for the life of the job.

use std::net::SocketAddr;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::acceptor::Acceptor;
use super::auth;
use super::event_loop::{Connection, EventLoop};
use super::missing::{MissingRanks, MissingRanksHook};
use super::options::TcpOptions;
use super::rendezvous;
use super::send_half::SendHalf;
use super::shared::SharedState;
use super::state::State;
use super::wire::{MAX_LABEL, Message, Wait};
use super::{Activity, Control, MAX_BLOB, StallReport};
use crate::clock;
use crate::deadline::Deadline;
use crate::descriptors;
use crate::error::{Error, Result};
use crate::job::{Address, Job, Network};

/// How long rank 0 waits for the others to close their connections after all have left.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// One rank's end of the control plane.
///
/// Every rank but 0 keeps one connection, to rank 0, which relays. One thread a rank serves it, however many ranks there are.
/// Dropping it without [`leave`](Control::leave) is this rank's death to the others.
pub struct TcpControl {
    job: Job,
    shared: Arc<SharedState>,
    /// The fingerprint of the settings that all ranks have in common.
    settings: [u8; 32],
    session: [u8; 32],
    /// Where rank 0 listens, at rank 0 of more than one.
    listening: Option<SocketAddr>,
    /// To be removed at the end.
    address_file: Option<PathBuf>,
    thread: Option<JoinHandle<()>>,
}

impl TcpControl {
    /// Connects with the other ranks of `job`: returns when all are there and agree on `config`, a list of (name, value) of whatever must
    /// be the same on all ranks.
    ///
    /// # Errors
    /// [`Error::Timeout`] naming the ranks that did not come, [`Error::Rendezvous`] when ranks disagree or have the same number,
    /// when the address cannot be used or something listens there already, [`Error::PeerLost`] when a rank ends meanwhile,
    /// [`Error::InvalidArgument`].
    pub fn connect(job: &Job, config: &[(&str, String)], deadline: Deadline) -> Result<Arc<Self>> {
        Self::connect_with(job, config, TcpOptions::default(), deadline)
    }

    /// As [`connect`](TcpControl::connect), with other intervals than the default's.
    ///
    /// # Errors
    /// As [`connect`](TcpControl::connect).
    pub fn connect_with(
        job: &Job,
        config: &[(&str, String)],
        options: TcpOptions,
        deadline: Deadline,
    ) -> Result<Arc<Self>> {
        Self::connect_watched(job, config, options, deadline, (None, &|_| ()))
    }

    /// As [`connect_with`](TcpControl::connect_with). Once it has waited for other ranks for `stall_after`, `report` is called in the
    /// caller's thread, which waits meanwhile; again each time it has waited for twice as long.
    ///
    /// # Errors
    /// As [`connect`](TcpControl::connect).
    pub fn connect_watched(
        job: &Job,
        config: &[(&str, String)],
        options: TcpOptions,
        deadline: Deadline,
        (stall_after, report): MissingRanksHook<'_>,
    ) -> Result<Arc<Self>> {
        // The fields of both are public, so this is where they are checked.
        job.check()?;
        options.check()?;
        let own = [
            ("control heartbeat", format!("{:?}", options.heartbeat)),
            ("control liveness bound", format!("{:?}", options.liveness)),
        ];
        let config: Vec<(String, String)> =
            config.iter().chain(&own).map(|(name, value)| ((*name).to_string(), value.clone())).collect();
        let join = Message::Join { config: config.clone() };
        join.encode().map_err(|why| Error::invalid(format!("the settings to compare do not fit: {why}")))?;

        let settings = auth::fingerprint(&config);
        let mut missing_ranks = MissingRanks::new(job.rank, stall_after, report);
        let mut address = job.address.to_string();
        let (waker, woken) = UnixStream::pair().map_err(|e| Error::io("making a socket pair", e))?;
        for end in [&waker, &woken] {
            end.set_nonblocking(true).map_err(|e| Error::io("making a socket pair non-blocking", e))?;
        }
        let shared = Arc::new(SharedState::new(State::new(job, config), waker));
        let mut control = TcpControl {
            job: job.clone(),
            shared: Arc::clone(&shared),
            settings,
            session: [0; 32],
            listening: None,
            address_file: None,
            thread: None,
        };
        let mut event_loop = EventLoop::new(Arc::clone(&shared), options, woken);
        if job.world_size == 1 {
            shared.update(State::start_if_complete);
        } else if job.rank == 0 {
            let others = job.world_size - 1;
            descriptors::check(others, || "rank 0 has 1 for each other rank".into()).map_err(|why| {
                let what = format!("a control plane between {} ranks", job.world_size);
                Error::Unsupported { what, why }
            })?;
            let listeners = rendezvous::listen(job, deadline, &mut missing_ranks)?;
            control.listening = listeners.first().and_then(|listener| listener.local_addr().ok());
            address += &rendezvous::where_it_listens(&job.address, &listeners);
            if let Address::File(path) = &job.address {
                control.address_file = Some(path.clone());
            }
            event_loop.acceptor = Some(Acceptor::open(listeners, job, options.handshake));
        } else {
            let dialled = rendezvous::dial(job, options.handshake, deadline, &mut missing_ranks)?;
            let send_half = SendHalf::new(dialled.stream, dialled.session.sealer)
                .map_err(|e| Error::io(format!("setting up the connection to rank 0 at {}", dialled.addr), e))?;
            let send_half = Arc::new(send_half);
            event_loop.connections.push(Connection::new(Arc::clone(&send_half), dialled.session.opener, 0));
            send_half.send(&join);
            shared.update(|state| {
                if let Some(slot) = state.send_halves.first_mut() {
                    *slot = Some(send_half);
                }
            });
        }
        let name = format!("comm-control-{}", job.rank);
        let thread = thread::Builder::new().name(name).spawn(move || event_loop.run());
        control.thread = Some(thread.map_err(|e| Error::io("starting the thread of the control plane", e))?);

        let started = control.wait_for_start(&address, &mut missing_ranks, deadline);
        control.session = started.inspect_err(|error| {
            // The others learn what this rank has given up on, rather than that it is gone.
            shared.update(|state| state.fail(error));
        })?;
        Ok(Arc::new(control))
    }

    /// Waits until all ranks are there, at `address`: the session, in which they are.
    fn wait_for_start(
        &self,
        address: &str,
        missing_ranks: &mut MissingRanks<'_>,
        deadline: Deadline,
    ) -> Result<[u8; 32]> {
        let operation = || format!("meeting {} ranks at {address}", self.job.world_size);
        loop {
            // A wait that ends early names who is missing.
            let until = missing_ranks.until(deadline);
            let started = self.wait(Wait::Start, until, &operation, |state| {
                if let Some(error) = state.due_rendezvous_error() {
                    state.fail(&error);
                }
                state.session().copied()
            });
            let Err(Error::Timeout { rank, operation, waiting_for, .. }) = started else { return started };
            if let Some(error) = self.shared.lock().settled_failure() {
                return Err(error.clone());
            }
            if deadline.has_passed() {
                return Err(Error::timeout(rank, operation, deadline, waiting_for));
            }
            missing_ranks.report_if_due(&waiting_for, || operation);
        }
    }

    /// Where rank 0 listens, at rank 0 of more than one.
    pub fn listening(&self) -> Option<SocketAddr> {
        self.listening
    }

    /// Waits until `ready` has something, the job has failed or the deadline has passed.
    fn wait<R>(
        &self,
        what: Wait,
        deadline: Deadline,
        operation: &dyn Fn() -> String,
        mut ready: impl FnMut(&mut State) -> Option<R>,
    ) -> Result<R> {
        // Shortly before time is up, rank 0 is asked who is late, to be able to name them.
        let margin = (deadline.remaining() / 4).min(Duration::from_millis(500));
        let mut asked = self.job.rank == 0;
        let mut state = self.shared.lock();
        loop {
            let result = ready(&mut state);
            state.settle();
            if let Some((hooks, error)) = state.due_hooks() {
                drop(state);
                hooks.iter().for_each(|hook| super::guarded(|| hook(&error)));
                state = self.shared.lock();
            }
            if let Some(result) = result {
                return Ok(result);
            }
            if let Some(error) = state.settled_failure() {
                return Err(error.clone());
            }
            let left = deadline.remaining();
            if left.is_zero() {
                let rejected = if what == Wait::Start { state.rejected() } else { String::new() };
                return Err(Error::timeout(self.job.rank, operation() + &rejected, deadline, state.late(what)));
            }
            if !asked && left <= margin {
                asked = true;
                state.ask_who_is_late(what);
            }
            let now = clock::running();
            let times = [state.settles_at(), state.rendezvous_error_due_at()].into_iter().flatten();
            let until_asked = (!asked).then(|| left - margin);
            let times = times.filter(|time| *time > now).map(|time| time - now);
            let left = times.chain(until_asked).fold(left, Duration::min);
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes part in the next gathering, whose result all ranks get, or rank 0 alone.
    fn gather_for(&self, label: &str, blob: &[u8], for_root: bool, deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        if blob.len() > MAX_BLOB || label.len() > MAX_LABEL {
            return Err(Error::invalid(format!(
                "gathering {} bytes under a label of {} bytes: at most {MAX_BLOB} and {MAX_LABEL} are possible",
                blob.len(),
                label.len()
            )));
        }
        let sequence = self.shared.update(|state| {
            if let Some(error) = state.settled_failure() {
                return Err(error.clone());
            }
            if state.is_leaving() {
                return Err(Error::invalid(format!("gathering {label:?} after leaving the job")));
            }
            Ok(state.begin_gather(label, blob, for_root))
        })?;
        self.shared.send_rest();
        let operation = || format!("gathering {label:?}");
        let gathered = self.wait(Wait::Gather(sequence), deadline, &operation, |state| state.take_gathered(sequence));
        gathered.map_err(|error| match error {
            // All ranks are told, and all say the same.
            Error::Timeout { .. } => self.verdict(error, Duration::ZERO),
            other => other,
        })
    }
}

impl Control for TcpControl {
    fn rank(&self) -> usize {
        self.job.rank
    }

    fn world_size(&self) -> usize {
        self.job.world_size
    }

    fn all_gather(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        self.gather_for(label, blob, false, deadline)
    }

    fn gather_at_0(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        let all = self.gather_for(label, blob, true, deadline)?;
        Ok(if self.job.rank == 0 { all } else { Vec::new() })
    }

    fn derive_key(&self, label: &str) -> [u8; 32] {
        auth::derive_key(&self.job, &self.settings, &self.session, label)
    }

    fn poison(&self, error: &Error) {
        self.shared.update(|state| state.fail(error));
        self.shared.send_rest();
    }

    fn failure(&self) -> Option<Error> {
        self.shared.lock().failure().cloned()
    }

    fn settled_failure(&self) -> Option<Error> {
        // Asked before every operation.
        if !self.shared.is_failing.load(Ordering::Acquire) {
            return None;
        }
        self.shared.settled_within(Duration::ZERO)
    }

    fn verdict(&self, observed: Error, grace: Duration) -> Error {
        if let Some(error) = self.shared.settled_within(grace) {
            return error;
        }
        self.poison(&observed);
        self.shared.settled_within(Duration::ZERO).unwrap_or(observed)
    }

    fn on_failure(&self, hook: Box<dyn Fn(&Error) + Send + Sync>) {
        self.shared.update(|state| state.add_hook(hook));
    }

    fn watch(&self, activity: Weak<dyn Activity>) {
        self.shared.update(|state| state.watch(activity));
        // From now on the thread looks more often.
        self.shared.wake();
    }

    fn on_stall(&self, hook: Box<dyn Fn(&StallReport) + Send + Sync>) {
        self.shared.update(|state| state.add_stall_hook(hook.into()));
    }

    fn local_address(&self) -> Option<SocketAddr> {
        let state = self.shared.lock();
        // With whether the other end is another machine: within one both ends have the same address.
        let ends = |send_half: &Arc<SendHalf>| {
            let (local, peer) = (send_half.stream().local_addr().ok()?, send_half.stream().peer_addr().ok()?);
            Some((local, !local.ip().is_loopback() && local.ip() != peer.ip()))
        };
        let ours: Vec<(SocketAddr, bool)> = state.send_halves.iter().flatten().filter_map(ends).collect();
        best_reached(&ours)
    }

    fn network(&self) -> Network {
        self.job.network.clone()
    }

    fn leave(&self, deadline: Deadline) -> Result<()> {
        self.shared.update(|state| match state.settled_failure() {
            Some(error) => Err(error.clone()),
            None => {
                state.begin_leave();
                Ok(())
            }
        })?;
        self.shared.send_rest();
        self.wait(Wait::Leave, deadline, &|| "leaving the job".to_string(), |state| state.all_left().then_some(()))?;
        if self.job.rank == 0 {
            // The others close their connections when the word has reached them. One that is slow to do so is no failure.
            let close_deadline = deadline.at_most(CLOSE_TIMEOUT);
            let mut state = self.shared.lock();
            while state.send_halves.iter().any(Option::is_some) && !close_deadline.has_passed() {
                let left = close_deadline.remaining();
                state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        Ok(())
    }
}

impl Drop for TcpControl {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for send_half in self.shared.lock().send_halves.iter().flatten() {
            send_half.close();
        }
        self.shared.wake();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            // The thread never waits for anything but the waker and sockets; a panic in it has nobody left to tell.
            let _ = thread.join();
        }
        if let Some(path) = &self.address_file {
            // It may have been removed with its directory.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl std::fmt::Debug for TcpControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpControl").field("job", &self.job).finish_non_exhaustive()
    }
}

/// Of a rank's own addresses, each with whether the other end is on another machine, the one that the other ranks reach best.
fn best_reached(ours: &[(SocketAddr, bool)]) -> Option<SocketAddr> {
    let uses = |address: &SocketAddr| ours.iter().filter(|(other, _)| other.ip() == address.ip()).count();
    // What other machines reach; then what is not loopback; then what most use, of several that of the first rank.
    let best = |(address, is_apart): &&(SocketAddr, bool)| (*is_apart, !address.ip().is_loopback(), uses(address));
    ours.iter().rev().max_by_key(best).map(|(address, _)| *address)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

    use super::*;

    #[test]
    fn listeners_are_best_where_other_machines_and_most_ranks_come_in() {
        let of = |ends: &[(&str, bool)]| {
            let ends: Vec<(SocketAddr, bool)> =
                ends.iter().map(|(ip, is_apart)| (SocketAddr::new(ip.parse().unwrap(), 1), *is_apart)).collect();
            best_reached(&ends).map(|address| address.ip().to_string())
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("127.0.0.1", false)]).as_deref(), Some("127.0.0.1"));
        assert_eq!(of(&[("127.0.0.1", false), ("127.0.0.1", false), ("10.0.0.1", false)]).as_deref(), Some("10.0.0.1"));
        // One rank on another machine counts for more than many on this one.
        let mixed = [("10.0.0.1", false), ("10.0.0.1", false), ("192.168.0.1", true), ("127.0.0.1", false)];
        assert_eq!(of(&mixed).as_deref(), Some("192.168.0.1"));
        let most = [("10.0.0.1", true), ("10.0.0.2", true), ("10.0.0.2", true)];
        assert_eq!(of(&most).as_deref(), Some("10.0.0.2"));
        assert_eq!(of(&most[..2]).as_deref(), Some("10.0.0.1"));
    }
}
