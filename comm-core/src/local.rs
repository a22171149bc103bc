//! Ranks that are threads of one process.
//!
//! [`group`] makes the ranks of a job: each gets a [`LocalTransport`] and a [`LocalControl`], to be moved to a thread of its own.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::control::{Activity, Control, MAX_BLOB, StallReport, abridged, guarded};
use crate::deadline::Deadline;
use crate::error::{Error, Result, text_of};
use crate::header::Header;
use crate::lanes::{Lanes, check_messages};
use crate::mesh::{Mesh, MeshOptions};
use crate::transport::{Incoming, Outgoing, Transport};

/// What one rank of a local job needs.
pub struct LocalRank {
    /// Its control plane.
    pub control: Arc<LocalControl>,
    /// Its transport.
    pub transport: LocalTransport,
}

/// The ranks of a new local job, in order.
///
/// # Panics
/// If `ranks` or `lanes` is zero.
pub fn group(ranks: usize, lanes: usize) -> Vec<LocalRank> {
    assert!(ranks > 0 && lanes > 0, "a job needs at least one rank and one lane");
    let hub = Arc::new(Hub::new(ranks));
    let fabric = Arc::new(Fabric::new(ranks, lanes));
    (0..ranks)
        .map(|rank| LocalRank {
            control: Arc::new(LocalControl { hub: hub.clone(), rank }),
            transport: LocalTransport {
                fabric: fabric.clone(),
                rank,
                lanes: Lanes::new((0..lanes).map(|_| Progress::default())),
                aborted: Mutex::new(None),
            },
        })
        .collect()
}

/// Runs `work` as every rank of a new local job, each in a thread of its own with a [`Mesh`] of two lanes, and gives what they
/// return, in rank order.
///
/// A rank that returns without [`finish`](crate::Communicator::finish) is lost to those that wait for it from then on: they get
/// [`Error::PeerLost`] at once, unless what they wait for was sent before. A rank that panics ends the whole job with that error.
///
/// ```
/// use comm_core::{Communicator, CommunicatorExt, local};
///
/// let wholes = local::run(3, |comm| comm.all_gather(&[comm.rank() as i32], 3).unwrap());
/// assert_eq!(wholes, [[0, 1, 2], [0, 1, 2], [0, 1, 2]]);
/// ```
///
/// # Panics
/// If `ranks` is zero. If `work` panics, with the panic that was the first in time, once all ranks have ended.
pub fn run<R: Send>(ranks: usize, work: impl Fn(&Mesh<LocalTransport>) -> R + Sync) -> Vec<R> {
    let group = group(ranks, 2);
    // A control plane that is dropped ends the job: it outlives the ranks, as a rank that returns early harms only who waits for it.
    let controls: Vec<Arc<LocalControl>> = group.iter().map(|rank| rank.control.clone()).collect();
    let first_panic = Mutex::new(None);
    let (work, first_panic) = (&work, &first_panic);
    let run = move |LocalRank { control, transport }: LocalRank| {
        let mesh = Mesh::over(transport, control.clone(), MeshOptions::default());
        let outcome = catch_unwind(AssertUnwindSafe(|| work(&mesh)));
        outcome.map_err(|panic| {
            let detail = format!("its thread panicked: {}", text_of(&*panic));
            // Before the others learn of it, whose panics are only its echo.
            lock(first_panic).get_or_insert(panic);
            control.poison(&Error::PeerLost { rank: control.rank, operation: String::new(), detail });
        })
        // Here the mesh goes, and with it the rank's connections.
    };
    let outcomes: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = group.into_iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    });
    drop(controls);
    if let Some(panic) = lock(first_panic).take() {
        resume_unwind(panic);
    }
    // A rank that has not returned has panicked.
    outcomes.into_iter().filter_map(Result::ok).collect()
}

/// Moves messages through memory. A message is copied once, into the channel, and reduced or copied from there;
/// the channels keep the memory for it.
pub struct LocalTransport {
    fabric: Arc<Fabric>,
    rank: usize,
    lanes: Lanes<Progress>,
    aborted: Mutex<Option<Error>>,
}

/// How far the messages of an exchange are, kept from one to the next.
#[derive(Default)]
struct Progress {
    sent: Vec<bool>,
    received: Vec<bool>,
}

/// A channel holds at most this many payload bytes, and always at least one message.
const CHANNEL_BYTES: usize = 64 << 20;

/// A channel keeps at most this many buffers of received messages, and none longer than [`SPARE_BYTES`].
const SPARES: usize = 4;

/// See [`SPARES`]: longer ones cost little to get in comparison with what is copied into them.
const SPARE_BYTES: usize = 4 << 20;

struct Fabric {
    ranks: usize,
    lanes: usize,
    /// Indexed by [`Fabric::channel`].
    channels: Vec<Mutex<Channel>>,
    /// Indexed by [`Fabric::event`]: something changed that a rank may be waiting for on that lane.
    events: Vec<Event>,
}

#[derive(Default)]
struct Channel {
    messages: VecDeque<(Header, Vec<u8>)>,
    bytes: usize,
    /// Memory of messages that were received, for those to come.
    spare: Vec<Vec<u8>>,
    /// The sender is gone: nothing follows what is queued.
    ended: bool,
    /// The receiver is gone: what is queued stays there.
    abandoned: bool,
}

#[derive(Default)]
struct Event {
    seen: Mutex<EventState>,
    changed: Condvar,
}

#[derive(Default)]
struct EventState {
    count: u64,
    /// A thread sleeps: without this, every signal would be a system call.
    is_awaited: bool,
}

impl Fabric {
    fn new(ranks: usize, lanes: usize) -> Self {
        Fabric {
            ranks,
            lanes,
            channels: (0..ranks * ranks * lanes).map(|_| Mutex::default()).collect(),
            events: (0..ranks * lanes).map(|_| Event::default()).collect(),
        }
    }

    fn channel(&self, from: usize, to: usize, lane: usize) -> MutexGuard<'_, Channel> {
        lock(&self.channels[(from * self.ranks + to) * self.lanes + lane])
    }

    fn event(&self, rank: usize, lane: usize) -> &Event {
        &self.events[rank * self.lanes + lane]
    }
}

impl Event {
    fn count(&self) -> u64 {
        lock(&self.seen).count
    }

    fn signal(&self) {
        let mut seen = lock(&self.seen);
        seen.count += 1;
        if std::mem::take(&mut seen.is_awaited) {
            drop(seen);
            self.changed.notify_all();
        }
    }

    /// Waits until the count is no longer `seen`; false at the deadline.
    fn wait(&self, seen: u64, deadline: Deadline) -> bool {
        let mut now = lock(&self.seen);
        while now.count == seen {
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            now.is_awaited = true;
            now = self.changed.wait_timeout(now, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl LocalTransport {
    fn send(&self, lane: usize, message: &Outgoing<'_>) -> Result<bool> {
        let mut channel = self.fabric.channel(self.rank, message.peer, lane);
        if channel.bytes > 0 && channel.bytes + message.payload.len() > CHANNEL_BYTES {
            return if channel.abandoned { Err(ended(message.peer)) } else { Ok(false) };
        }
        // Its place is taken before it is there, so that the receiver need not wait for the copy to look at the channel.
        channel.bytes += message.payload.len();
        let mut payload = channel.spare.pop().unwrap_or_default();
        drop(channel);
        payload.extend_from_slice(message.payload);
        self.fabric.channel(self.rank, message.peer, lane).messages.push_back((message.header, payload));
        self.fabric.event(message.peer, lane).signal();
        Ok(true)
    }

    fn receive(&self, lane: usize, incoming: &mut Incoming<'_>) -> Result<bool> {
        let mut channel = self.fabric.channel(incoming.peer, self.rank, lane);
        let Some((header, mut payload)) = channel.messages.pop_front() else {
            return if channel.ended { Err(ended(incoming.peer)) } else { Ok(false) };
        };
        channel.bytes -= payload.len();
        drop(channel);
        self.fabric.event(incoming.peer, lane).signal();
        incoming.sink.begin(&header)?;
        if !payload.is_empty() {
            incoming.sink.piece(&payload)?;
        }
        if payload.capacity() <= SPARE_BYTES {
            payload.clear();
            let mut channel = self.fabric.channel(incoming.peer, self.rank, lane);
            if channel.spare.len() < SPARES {
                channel.spare.push(payload);
            }
        }
        Ok(true)
    }

    fn exchange_on(
        &self,
        lane: usize,
        Progress { sent, received }: &mut Progress,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        let event = self.fabric.event(self.rank, lane);
        for (done, messages) in [(&mut *sent, outgoing.len()), (&mut *received, incoming.len())] {
            done.clear();
            done.resize(messages, false);
        }
        loop {
            let seen = event.count();
            self.check()?;
            for (message, sent) in outgoing.iter().zip(&mut *sent).filter(|(_, sent)| !**sent) {
                *sent = self.send(lane, message)?;
            }
            for (incoming, received) in incoming.iter_mut().zip(&mut *received).filter(|(_, received)| !**received) {
                *received = self.receive(lane, incoming)?;
            }
            if sent.iter().chain(&*received).all(|done| *done) {
                return Ok(());
            }
            if !event.wait(seen, deadline) {
                let late = outgoing.iter().zip(&*sent).filter(|(_, sent)| !**sent).map(|(message, _)| message.peer);
                let silent =
                    incoming.iter().zip(&*received).filter(|(_, done)| !**done).map(|(incoming, _)| incoming.peer);
                return Err(Error::timeout(self.rank, "an exchange", deadline, late.chain(silent)));
            }
        }
    }

    /// Fails once the transport was aborted.
    fn check(&self) -> Result<()> {
        lock(&self.aborted).clone().map_or(Ok(()), Err)
    }

    fn signal_all(&self) {
        for event in &self.fabric.events {
            event.signal();
        }
    }
}

impl Transport for LocalTransport {
    fn name(&self) -> &str {
        "local"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.fabric.ranks
    }

    fn lanes(&self) -> usize {
        self.fabric.lanes
    }

    fn exchange(
        &self,
        lane: usize,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
    ) -> Result<()> {
        self.check()?;
        check_messages(self.rank, self.fabric.ranks, outgoing, incoming)?;
        self.lanes.run(lane, |progress| self.exchange_on(lane, progress, outgoing, incoming, deadline))
    }

    fn abort(&self, error: &Error) {
        lock(&self.aborted).get_or_insert_with(|| error.clone());
        self.signal_all();
    }

    /// There is nothing to flush: what was sent is in the receiver's memory already.
    fn close(&self, deadline: Deadline) -> Result<()> {
        self.lanes.close(self.rank, deadline, || self.check(), |_| Ok(()))
    }
}

impl Drop for LocalTransport {
    fn drop(&mut self) {
        for peer in 0..self.fabric.ranks {
            for lane in 0..self.fabric.lanes {
                self.fabric.channel(self.rank, peer, lane).ended = true;
                self.fabric.channel(peer, self.rank, lane).abandoned = true;
            }
        }
        self.signal_all();
    }
}

/// That `peer` sends and receives nothing any more.
fn ended(peer: usize) -> Error {
    Error::PeerLost { rank: peer, operation: String::new(), detail: "its thread ended".into() }
}

/// The control plane of a local job, in memory.
pub struct LocalControl {
    hub: Arc<Hub>,
    rank: usize,
}

struct Hub {
    ranks: usize,
    key: [u8; 32],
    state: Mutex<HubState>,
    changed: Condvar,
}

type FailureHook = Box<dyn Fn(&Error) + Send + Sync>;

struct HubState {
    failure: Option<Error>,
    hooks: Vec<FailureHook>,
    /// Number of gathers each rank has taken part in.
    entered: Vec<u64>,
    /// The gathers not yet read by every rank, oldest first, with the number of the first.
    rounds: VecDeque<Round>,
    first_round: u64,
    left: usize,
    is_gone: Vec<bool>,
    /// By rank.
    activities: Vec<Vec<Weak<dyn Activity>>>,
    stall_hooks: Vec<StallHook>,
    /// Whether a thread looks after the activities.
    is_watched: bool,
}

type StallHook = Arc<dyn Fn(&StallReport) + Send + Sync>;

/// How often the activities of a group are looked at, if anybody wants to know.
const LOOK: Duration = Duration::from_millis(100);

struct Round {
    label: String,
    blobs: Vec<Option<Vec<u8>>>,
    readers: usize,
}

impl Hub {
    fn new(ranks: usize) -> Self {
        let mut key = [0; 32];
        // Without randomness the keys are the same in every process, which does no harm: they stay inside it.
        let _ = getrandom::fill(&mut key);
        Hub {
            ranks,
            key,
            state: Mutex::new(HubState {
                failure: None,
                hooks: Vec::new(),
                entered: vec![0; ranks],
                rounds: VecDeque::new(),
                first_round: 0,
                left: 0,
                is_gone: vec![false; ranks],
                activities: vec![Vec::new(); ranks],
                stall_hooks: Vec::new(),
                is_watched: false,
            }),
            changed: Condvar::new(),
        }
    }

    fn fail(&self, error: &Error) {
        let mut state = lock(&self.state);
        if state.failure.is_some() {
            return;
        }
        state.failure = Some(error.clone());
        let hooks = std::mem::take(&mut state.hooks);
        drop(state);
        self.changed.notify_all();
        for hook in hooks {
            hook(error);
        }
    }

    /// Looks whether an operation takes too long, and tells the hooks.
    fn look_for_stalls(&self) {
        let state = lock(&self.state);
        if state.failure.is_some() {
            return;
        }
        let activities: Vec<Vec<Arc<dyn Activity>>> =
            state.activities.iter().map(|own| own.iter().filter_map(Weak::upgrade).collect()).collect();
        let hooks = state.stall_hooks.clone();
        drop(state);
        let overdue = activities
            .iter()
            .enumerate()
            .find_map(|(rank, own)| Some((rank, own.iter().find_map(|activity| activity.overdue())?)));
        let Some((rank, stalled)) = overdue else { return };
        let answer = |own: &Vec<Arc<dyn Activity>>| {
            (!own.is_empty()).then(|| abridged(own.iter().flat_map(|activity| activity.doing()).collect()))
        };
        let answers: Vec<_> = activities.iter().map(answer).collect();
        let report = StallReport::new(rank, stalled, &answers);
        activities.iter().flatten().for_each(|activity| activity.on_stall(&report));
        hooks.iter().for_each(|hook| guarded(|| hook(&report)));
    }

    /// Waits until `ready` gives something, the job fails or the deadline passes.
    fn wait<R>(
        &self,
        deadline: Deadline,
        mut ready: impl FnMut(&mut HubState) -> Option<R>,
        timeout: impl FnOnce(&HubState) -> Error,
    ) -> Result<R> {
        let mut state = lock(&self.state);
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            if let Some(error) = &state.failure {
                return Err(error.clone());
            }
            let left = deadline.remaining();
            if left.is_zero() {
                return Err(timeout(&state));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Control for LocalControl {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.hub.ranks
    }

    fn all_gather(&self, label: &str, blob: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>> {
        if blob.len() > MAX_BLOB {
            return Err(Error::invalid(format!("a control message of {} bytes; at most {MAX_BLOB}", blob.len())));
        }
        let ranks = self.hub.ranks;
        let mut state = lock(&self.hub.state);
        let round = state.entered[self.rank];
        state.entered[self.rank] += 1;
        let index = (round - state.first_round) as usize;
        if state.rounds.len() == index {
            state.rounds.push_back(Round { label: label.into(), blobs: vec![None; ranks], readers: 0 });
        }
        let theirs = state.rounds[index].label.clone();
        if theirs != label {
            drop(state);
            let error = Error::Rendezvous(format!(
                "rank {} gathers '{label}' while another rank gathers '{theirs}'",
                self.rank
            ));
            self.hub.fail(&error);
            return Err(error);
        }
        state.rounds[index].blobs[self.rank] = Some(blob.to_vec());
        drop(state);
        self.hub.changed.notify_all();

        let gathered = self.hub.wait(
            deadline,
            |state| {
                let round = &mut state.rounds[(round - state.first_round) as usize];
                let blobs: Option<Vec<Vec<u8>>> = round.blobs.iter().cloned().collect();
                if blobs.is_some() {
                    round.readers += 1;
                    while state.rounds.front().is_some_and(|round| round.readers == ranks) {
                        state.rounds.pop_front();
                        state.first_round += 1;
                    }
                }
                blobs
            },
            |state| {
                let round = &state.rounds[(round - state.first_round) as usize];
                let missing = (0..ranks).filter(|rank| round.blobs[*rank].is_none());
                Error::timeout(self.rank, format!("gathering '{label}'"), deadline, missing)
            },
        );
        gathered.map_err(|error| match error {
            // All ranks are told, and all say the same.
            Error::Timeout { .. } => self.verdict(error, Duration::ZERO),
            other => other,
        })
    }

    fn derive_key(&self, label: &str) -> [u8; 32] {
        Sha256::new().chain_update(self.hub.key).chain_update(label).finalize().into()
    }

    fn poison(&self, error: &Error) {
        self.hub.fail(error);
    }

    fn failure(&self) -> Option<Error> {
        lock(&self.hub.state).failure.clone()
    }

    fn verdict(&self, observed: Error, _grace: Duration) -> Error {
        // Deaths are recorded before the data path can show them, so there is nothing to wait for.
        self.hub.fail(&observed);
        self.failure().unwrap_or(observed)
    }

    fn on_failure(&self, hook: Box<dyn Fn(&Error) + Send + Sync>) {
        let mut state = lock(&self.hub.state);
        match state.failure.clone() {
            None => state.hooks.push(hook),
            Some(error) => {
                drop(state);
                hook(&error);
            }
        }
    }

    fn watch(&self, activity: Weak<dyn Activity>) {
        let own = &mut lock(&self.hub.state).activities[self.rank];
        own.retain(|activity| activity.strong_count() > 0);
        own.push(activity);
    }

    fn on_stall(&self, hook: Box<dyn Fn(&StallReport) + Send + Sync>) {
        let mut state = lock(&self.hub.state);
        state.stall_hooks.push(hook.into());
        if std::mem::replace(&mut state.is_watched, true) {
            return;
        }
        let hub = Arc::downgrade(&self.hub);
        let look = move || {
            while let Some(hub) = hub.upgrade() {
                hub.look_for_stalls();
                drop(hub);
                thread::sleep(LOOK);
            }
        };
        // Without the thread there are no reports, which nothing depends on.
        state.is_watched = thread::Builder::new().name("comm-watch".into()).spawn(look).is_ok();
    }

    fn leave(&self, deadline: Deadline) -> Result<()> {
        let mut state = lock(&self.hub.state);
        state.left += usize::from(!std::mem::replace(&mut state.is_gone[self.rank], true));
        drop(state);
        self.hub.changed.notify_all();
        let ranks = self.hub.ranks;
        self.hub.wait(
            deadline,
            |state| (state.left == ranks).then_some(()),
            |state| {
                let missing = (0..ranks).filter(|rank| !state.is_gone[*rank]);
                Error::timeout(self.rank, "leaving the job", deadline, missing)
            },
        )
    }
}

impl Drop for LocalControl {
    fn drop(&mut self) {
        if !lock(&self.hub.state).is_gone[self.rank] {
            self.hub.fail(&Error::PeerLost {
                rank: self.rank,
                operation: String::new(),
                detail: "its thread ended without leaving the job".into(),
            });
        }
    }
}

/// A panic of one rank's thread must not become a panic of another's: nothing here is left half-changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::collectives::CommunicatorExt;
    use crate::communicator::Communicator;
    use crate::op::{Call, Op};
    use crate::{Buffer, Failed};

    /// Far below the deadline of operations (120 s), far above what a busy machine takes.
    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn a_rank_that_returns_early_is_lost_to_those_that_wait_for_it() {
        let began = Instant::now();
        let outcomes = run(3, |comm| if comm.rank() == 1 { Ok(()) } else { comm.barrier() });
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        assert!(outcomes[1].is_ok());
        for outcome in [&outcomes[0], &outcomes[2]] {
            let Err(Error::PeerLost { rank: 1, operation, detail }) = outcome else { panic!("{outcome:?}") };
            assert!(operation.contains("barrier") && detail.contains("ended"), "{operation}: {detail}");
        }
    }

    #[test]
    fn what_a_rank_sent_before_it_returned_still_comes_and_others_go_on() {
        let sums = run(3, |comm| {
            let sum = comm.all_reduce_scalar(comm.rank() as i64 + 1, crate::ReduceOp::Sum).unwrap();
            if comm.rank() == 0 {
                comm.send(&[5u8; 1000], 1).unwrap();
                return sum;
            }
            // Ranks 1 and 2 still have much to say to each other.
            for round in 0..200 {
                let peer = 3 - comm.rank();
                let got = if comm.rank() == 1 {
                    comm.send(&[round], peer).unwrap();
                    comm.recv::<i64>(1, peer).unwrap()
                } else {
                    let got = comm.recv::<i64>(1, peer).unwrap();
                    comm.send(&got, peer).unwrap();
                    got
                };
                assert_eq!(got, [round]);
            }
            if comm.rank() == 1 {
                assert_eq!(comm.recv::<u8>(1000, 0).unwrap(), [5; 1000]);
            }
            sum
        });
        assert_eq!(sums, [6, 6, 6]);
    }

    #[test]
    fn a_message_to_a_rank_that_has_returned_waits_for_no_room() {
        let began = Instant::now();
        let outcomes = run(2, |comm| {
            // Twice what a channel holds: the second waits for space that nobody frees.
            let send = || comm.send(&vec![0u8; CHANNEL_BYTES / 2 + 1], 1);
            if comm.rank() == 0 { send().and_then(|()| send()) } else { Ok(()) }
        });
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        assert!(matches!(outcomes[0], Err(Error::PeerLost { rank: 1, .. })), "{:?}", outcomes[0]);
    }

    #[test]
    fn the_first_panic_comes_out_and_reaches_the_others_at_once() {
        for culprit in 0..3 {
            let began = Instant::now();
            let (told, seen) = std::sync::mpsc::channel();
            let told = Mutex::new(told);
            let work = |comm: &Mesh<LocalTransport>| {
                if comm.rank() == culprit {
                    resume_unwind(Box::new(format!("the cause on rank {culprit}")));
                }
                // None of them waits for the culprit: they would wait for each other until their deadlines.
                let from = (0..3).find(|rank| *rank != culprit && *rank != comm.rank()).unwrap();
                let call = Call::background(Op::Recv { from }, Buffer::from_vec(vec![0u8]), 1);
                let error = comm.start(call).wait().map_err(Failed::into_error).unwrap_err();
                lock(&told).send(error).unwrap();
                resume_unwind(Box::new("an echo".to_string()));
            };
            let panic = catch_unwind(AssertUnwindSafe(|| run(3, work).len())).unwrap_err();
            assert_eq!(text_of(&*panic), format!("the cause on rank {culprit}"));
            assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
            for error in seen.try_iter().collect::<Vec<_>>() {
                let Error::PeerLost { rank, detail, .. } = &error else { panic!("{error}") };
                assert_eq!(*rank, culprit);
                assert!(detail.contains("the cause on rank"), "{detail}");
            }
        }
    }
}
