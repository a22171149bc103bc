//! Messages through the rings of one lane.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

use super::layout::{ALIGN, Layout};
use super::single_copy::{PeerMemory, SingleCopy};
use super::sys::{Consumer, FutexWaker, Producer, Segment, after_stores};

use crate::control::RankResult;
use crate::deadline::Deadline;
use crate::error::{Error, Result};
use crate::header::{HEADER_LEN, Header};
use crate::spinner::{Next, Spinner, Wait};
use crate::transport::{Incoming, Outgoing};
use crate::waiting::Waiting;

/// What a rank says of itself in the segment of each peer.
pub(super) mod state {
    /// It may send.
    pub(in crate::shm) const OPEN: u32 = 0;
    /// It has closed its connections; nothing follows what is in its rings.
    pub(in crate::shm) const CLOSED: u32 = 1;
    /// The same, without having closed them.
    pub(in crate::shm) const ENDED: u32 = 2;
}

/// Most bytes that one message moves before the others get their turn, so that both ends of a ring work at the same time.
const LONGEST_STEP: usize = 64 << 10;

/// Most bytes of a lent message that are read before the others get their turn: into a block that is handed on, which stays in a core's second
/// cache, and straight to where they belong.
const LONGEST_BLOCK: usize = 256 << 10;
const LONGEST_READ: usize = 512 << 10;

const _: () = assert!(HEADER_LEN == ALIGN, "a header fills what a ring keeps together");

/// Looks without a look at the clock. A look takes some nanoseconds, the clock some tens.
const LOOKS: u32 = 16;

/// After so long a sleeper looks by itself.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);

/// What all lanes of a transport share.
pub(super) struct TransportState {
    pub(super) rank: usize,
    pub(super) waiting: Waiting,
    /// By rank; this rank's own is that into which the others write.
    pub(super) segments: Vec<Arc<Segment>>,
    /// By rank: whether its threads ever sleep inside an exchange, and so must be notified.
    pub(super) parks: Vec<bool>,
    /// What lent messages take, or why there are none.
    pub(super) single_copy: RankResult<SingleCopy>,
}

impl TransportState {
    pub(super) fn mine(&self) -> &Segment {
        &self.segments[self.rank]
    }

    /// Whether a message with so long a payload is lent: one that does not fit into the ring. All ranks say the same.
    fn lends(&self, payload_len: u64) -> bool {
        let room = (self.mine().layout().ring_bytes() - HEADER_LEN) as u64;
        self.single_copy.is_ok() && payload_len > room
    }

    fn memory_of(&self, peer: usize) -> Result<&PeerMemory> {
        let memory = self.single_copy.as_ref().ok().and_then(|single_copy| single_copy.peers.get(peer)?.as_ref());
        memory.ok_or_else(|| Error::Internal(format!("a message that rank {peer} lends, without its memory")))
    }

    /// What `peer` says of itself.
    pub(super) fn state_of(&self, peer: usize) -> u32 {
        self.mine().state(Layout::slot(self.rank, peer)).load(std::sync::atomic::Ordering::Acquire)
    }

    /// All ranks but this one.
    pub(super) fn peers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.segments.len()).filter(|peer| *peer != self.rank)
    }
}

/// One lane: its rings, and what an exchange needs to know, kept so that an exchange allocates nothing.
pub(super) struct ShmLane {
    number: usize,
    spinner: Spinner,
    /// By rank; none for this one.
    producers: Vec<Option<Producer>>,
    consumers: Vec<Option<Consumer>>,
    sends: Vec<Sending>,
    receives: Vec<Receiving>,
    /// For what is read of lent messages and has to be looked at; of eight-byte words, so that it is aligned for every element type.
    block: Vec<u64>,
}

/// How far an outgoing message is.
struct Sending {
    header: [u8; HEADER_LEN],
    at: SendPhase,
    moved: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum SendPhase {
    /// So many bytes of header and payload are in the ring.
    Copying(usize),
    /// Header and loan are to go into the ring.
    Lending,
    /// The receiver reads.
    Lent,
    End,
}

/// How far an incoming message is.
struct Receiving {
    at: ReceivePhase,
    moved: bool,
}

enum ReceivePhase {
    Header,
    /// So many bytes of the payload are missing.
    Payload(u64),
    /// A payload of so many bytes is lent, and it has not been said where it lies.
    Loan(u64),
    /// So many bytes are missing, the next of them at this address of the sender.
    Lent {
        address: u64,
        missing: u64,
    },
    End,
}

impl ShmLane {
    pub(super) fn new(number: usize, shared: &TransportState) -> Self {
        let (me, ranks) = (shared.rank, shared.segments.len());
        let producer = |peer: usize| {
            let segment = shared.segments[peer].clone();
            (peer != me).then(|| Producer::new(segment, Layout::slot(peer, me), number, peer))
        };
        let consumer = |peer: usize| {
            let segment = shared.segments[me].clone();
            (peer != me).then(|| Consumer::new(segment, Layout::slot(me, peer), number, peer))
        };
        ShmLane {
            number,
            spinner: Spinner::new(shared.waiting),
            producers: (0..ranks).map(producer).collect(),
            consumers: (0..ranks).map(consumer).collect(),
            sends: Vec::with_capacity(ranks),
            receives: Vec::with_capacity(ranks),
            block: Vec::new(),
        }
    }

    /// See [`Transport::exchange`](crate::Transport::exchange); the messages are those of other ranks, one each way at most. `check` fails
    /// once the transport was aborted.
    pub(super) fn exchange(
        &mut self,
        shared: &TransportState,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
        check: impl Fn() -> Result<()>,
    ) -> Result<()> {
        self.sends.clear();
        self.sends.extend(outgoing.iter().map(|message| {
            let is_lent = shared.lends(message.payload.len() as u64);
            let at = if is_lent { SendPhase::Lending } else { SendPhase::Copying(0) };
            Sending { header: message.header.encode(), at, moved: false }
        }));
        self.receives.clear();
        self.receives.extend(incoming.iter().map(|_| Receiving { at: ReceivePhase::Header, moved: false }));

        // Apart from the rest, because a wait borrows it.
        let mut spinner = std::mem::replace(&mut self.spinner, Spinner::new(shared.waiting));
        let result =
            catch_unwind(AssertUnwindSafe(|| self.run(&mut spinner, shared, outgoing, incoming, deadline, check)));
        self.spinner = spinner;
        if !matches!(result, Ok(Ok(()))) {
            self.revoke(outgoing);
        }
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Takes back what is still lent: the caller may do with it what it likes once the exchange has failed.
    fn revoke(&self, outgoing: &[Outgoing<'_>]) {
        let lent = outgoing.iter().zip(&self.sends).filter(|(_, sending)| sending.at == SendPhase::Lent);
        lent.filter_map(|(message, _)| self.producers.get(message.peer)?.as_ref()).for_each(Producer::revoke);
    }

    fn run(
        &mut self,
        spinner: &mut Spinner,
        shared: &TransportState,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
        deadline: Deadline,
        check: impl Fn() -> Result<()>,
    ) -> Result<()> {
        loop {
            check()?;
            let mut step = self.turn(shared, outgoing, incoming)?;
            if step.is_done {
                return Ok(());
            }
            if !step.has_moved {
                let mut idle_wait = IdleWait::new(shared, self.number, spinner);
                while !step.has_moved {
                    if !idle_wait.once(deadline) {
                        return Err(self.timeout(shared, outgoing, incoming, deadline));
                    }
                    check()?;
                    step = self.turn(shared, outgoing, incoming)?;
                }
                if step.is_done {
                    return Ok(());
                }
            }
            // A peer that sends bit by bit does not extend the deadline.
            if deadline.has_passed() {
                return Err(self.timeout(shared, outgoing, incoming, deadline));
            }
        }
    }

    /// One turn of all messages.
    fn turn(
        &mut self,
        shared: &TransportState,
        outgoing: &[Outgoing<'_>],
        incoming: &mut [Incoming<'_>],
    ) -> Result<Step> {
        let (sent, received) = (self.send(shared, outgoing)?, self.receive(shared, incoming)?);
        Ok(Step { is_done: sent.is_done && received.is_done, has_moved: sent.has_moved || received.has_moved })
    }

    /// Puts as much into the rings as fits, at most [`LONGEST_STEP`] a message.
    fn send(&mut self, shared: &TransportState, outgoing: &[Outgoing<'_>]) -> Result<Step> {
        let mut step = Step { is_done: true, has_moved: false };
        for (message, sending) in outgoing.iter().zip(&mut self.sends) {
            sending.moved = false;
            if sending.at == SendPhase::End {
                continue;
            }
            let Some(producer) = self.producers.get_mut(message.peer).and_then(Option::as_mut) else { continue };
            let is_open = shared.state_of(message.peer) == state::OPEN;
            // A peer that has left did before that what it did, so this looks after that.
            if sending.advance(producer, message.payload)? {
                step.has_moved = true;
            } else if !is_open {
                return Err(lost(shared, message.peer));
            }
            step.is_done &= sending.at == SendPhase::End;
        }
        if step.has_moved {
            let moved = outgoing.iter().zip(&self.sends).filter(|(_, sending)| sending.moved);
            self.notify(shared, moved.map(|(message, _)| message.peer));
        }
        Ok(step)
    }

    /// Hands on what is in the rings, at most [`LONGEST_STEP`] a message.
    fn receive(&mut self, shared: &TransportState, incoming: &mut [Incoming<'_>]) -> Result<Step> {
        let mut step = Step { is_done: true, has_moved: false };
        for (message, receiving) in incoming.iter_mut().zip(&mut self.receives) {
            receiving.moved = false;
            if matches!(receiving.at, ReceivePhase::End) {
                continue;
            }
            let Some(consumer) = self.consumers.get_mut(message.peer).and_then(Option::as_mut) else { continue };
            if consumer.available(1)? == 0 {
                if shared.state_of(message.peer) != state::OPEN {
                    // What it sent last may have come between the two looks.
                    if consumer.available(1)? == 0 {
                        return Err(lost(shared, message.peer));
                    }
                } else {
                    step.is_done = false;
                    continue;
                }
            }
            receiving.take(shared, consumer, message, &mut self.block)?;
            // The sender of a lent message waits for its end alone.
            if !matches!(receiving.at, ReceivePhase::Lent { .. }) {
                consumer.release();
                receiving.moved = true;
            }
            step.is_done &= matches!(receiving.at, ReceivePhase::End);
            step.has_moved = true;
        }
        if step.has_moved {
            let moved = incoming.iter().zip(&self.receives).filter(|(_, receiving)| receiving.moved);
            self.notify(shared, moved.map(|(message, _)| message.peer));
        }
        Ok(step)
    }

    /// Wakes those of `peers` that sleep.
    fn notify(&self, shared: &TransportState, peers: impl Iterator<Item = usize>) {
        let mut is_ordered = false;
        for peer in peers.filter(|peer| shared.parks[*peer]) {
            if !is_ordered {
                after_stores();
                is_ordered = true;
            }
            shared.segments[peer].futex(self.number).notify();
        }
    }

    fn timeout(
        &self,
        shared: &TransportState,
        outgoing: &[Outgoing<'_>],
        incoming: &[Incoming<'_>],
        deadline: Deadline,
    ) -> Error {
        let unsent = outgoing
            .iter()
            .zip(&self.sends)
            .filter(|(_, sending)| sending.at != SendPhase::End)
            .map(|(message, _)| message.peer);
        let missing = incoming
            .iter()
            .zip(&self.receives)
            .filter(|(_, receiving)| !matches!(receiving.at, ReceivePhase::End))
            .map(|(message, _)| message.peer);
        Error::timeout(shared.rank, "an exchange", deadline, unsent.chain(missing))
    }
}

/// What one turn of several messages came to.
struct Step {
    is_done: bool,
    has_moved: bool,
}

impl Sending {
    /// Does what can be done now, and returns whether that was anything.
    fn advance(&mut self, producer: &mut Producer, payload: &[u8]) -> Result<bool> {
        match self.at {
            SendPhase::Copying(done) => {
                let whole = HEADER_LEN + payload.len();
                let free = producer.free(whole - done)?;
                if free < ALIGN {
                    return Ok(false);
                }
                let (mut done, mut space) = (done, free.min(LONGEST_STEP));
                if done == 0 {
                    done += producer.write(&self.header);
                    space -= HEADER_LEN;
                }
                let rest = &payload[done - HEADER_LEN..];
                done += producer.write(&rest[..rest.len().min(space)]);
                if done == whole {
                    producer.align();
                }
                self.at = if done == whole { SendPhase::End } else { SendPhase::Copying(done) };
            }
            SendPhase::Lending => {
                if producer.free(HEADER_LEN + ALIGN)? < HEADER_LEN + ALIGN {
                    return Ok(false);
                }
                producer.write(&self.header);
                producer.lend(payload);
                self.at = SendPhase::Lent;
            }
            SendPhase::Lent => {
                if !producer.is_all_taken()? {
                    return Ok(false);
                }
                // Nothing that the receiver waits for.
                self.at = SendPhase::End;
                return Ok(true);
            }
            SendPhase::End => return Ok(false),
        }
        producer.publish();
        self.moved = true;
        Ok(true)
    }
}

impl Receiving {
    /// Takes what has come of this message.
    fn take(
        &mut self,
        shared: &TransportState,
        consumer: &mut Consumer,
        message: &mut Incoming<'_>,
        block: &mut Vec<u64>,
    ) -> Result<()> {
        let mut budget = LONGEST_STEP;
        if matches!(self.at, ReceivePhase::Header) {
            let bytes: &[u8; HEADER_LEN] =
                consumer.peek(HEADER_LEN).try_into().map_err(|_| Error::Internal("a header in two pieces".into()))?;
            // Copied first, so that what is checked is what is used.
            let bytes = *bytes;
            let header = match Header::decode(&bytes, "") {
                Ok(header) => header,
                Err(Error::Protocol { what, .. }) => {
                    return Err(Error::Protocol { who: format!("rank {}", message.peer), what });
                }
                Err(other) => return Err(other),
            };
            message.sink.begin(&header)?;
            consumer.skip(HEADER_LEN);
            budget -= HEADER_LEN;
            let is_lent = shared.lends(header.payload_len);
            let payload_len = header.payload_len;
            self.at = if is_lent { ReceivePhase::Loan(payload_len) } else { ReceivePhase::Payload(payload_len) };
        }
        if matches!(self.at, ReceivePhase::Loan(_) | ReceivePhase::Lent { .. }) {
            return self.take_lent(shared, consumer, message, block);
        }
        let ReceivePhase::Payload(missing) = &mut self.at else { return Ok(()) };
        // Twice where the ring's end lies within.
        while *missing > 0 && budget > 0 {
            let most = usize::try_from(*missing).unwrap_or(usize::MAX).min(budget);
            if consumer.available(1)? == 0 {
                break;
            }
            let piece = consumer.peek(most);
            let count = match message.sink.space() {
                Some(space) if !space.is_empty() => {
                    let count = piece.len().min(space.len());
                    crate::copy(&mut space[..count], &piece[..count]);
                    message.sink.filled(count)?;
                    count
                }
                _ => {
                    message.sink.piece(piece)?;
                    piece.len()
                }
            };
            consumer.skip(count);
            *missing -= count as u64;
            budget -= count;
        }
        if *missing == 0 {
            consumer.align();
            self.at = ReceivePhase::End;
        }
        Ok(())
    }

    /// Reads the next part of a lent message.
    fn take_lent(
        &mut self,
        shared: &TransportState,
        consumer: &mut Consumer,
        message: &mut Incoming<'_>,
        block: &mut Vec<u64>,
    ) -> Result<()> {
        if let ReceivePhase::Loan(missing) = self.at {
            let Some(address) = consumer.loan()? else { return Ok(()) };
            self.at = ReceivePhase::Lent { address, missing };
        }
        let ReceivePhase::Lent { address, missing } = &mut self.at else { return Ok(()) };
        let left = usize::try_from(*missing).unwrap_or(usize::MAX);
        let read = |into: &mut [u8]| -> Result<()> {
            let outcome = shared.memory_of(message.peer)?.read(*address, into);
            if outcome.is_ok() && consumer.is_still_lent() {
                return Ok(());
            }
            if shared.state_of(message.peer) != state::OPEN {
                return Err(lost(shared, message.peer));
            }
            let detail = match outcome {
                Err(error) => format!("a message can no longer be read from its memory: {error}"),
                Ok(()) => "it gave up a message that was being read".into(),
            };
            Err(Error::PeerLost { rank: message.peer, operation: String::new(), detail })
        };
        let count = match message.sink.space() {
            Some(space) if !space.is_empty() => {
                let count = space.len().min(left).min(LONGEST_READ);
                read(&mut space[..count])?;
                message.sink.filled(count)?;
                count
            }
            _ => {
                let count = left.min(LONGEST_BLOCK);
                block.resize(LONGEST_BLOCK / size_of::<u64>(), 0);
                let piece = &mut bytemuck::cast_slice_mut(block)[..count];
                read(piece)?;
                message.sink.piece(piece)?;
                count
            }
        };
        *missing -= count as u64;
        // An address that goes round is one that cannot be read.
        *address = address.wrapping_add(count as u64);
        if *missing == 0 {
            consumer.skip(ALIGN);
            self.at = ReceivePhase::End;
        }
        Ok(())
    }
}

/// The time in which nothing moves: what to do between two looks.
pub(super) struct IdleWait<'a> {
    futex: FutexWaker<'a>,
    wait: Wait<'a>,
    looks: u32,
    most_looks: u32,
    will_sleep: bool,
}

impl<'a> IdleWait<'a> {
    /// The futex is one of this rank's own, on which only the caller sleeps.
    pub(super) fn new(shared: &'a TransportState, futex: usize, spinner: &'a mut Spinner) -> Self {
        let most_looks = if shared.waiting == Waiting::Park { 0 } else { LOOKS };
        IdleWait { futex: shared.mine().futex(futex), wait: spinner.wait(), looks: 0, most_looks, will_sleep: false }
    }

    /// Waits a little, or until a peer wakes it, and returns whether to look again; false at the deadline.
    pub(super) fn once(&mut self, deadline: Deadline) -> bool {
        if self.will_sleep {
            self.will_sleep = false;
            let left = deadline.remaining();
            if !left.is_zero() {
                // A peer interrupted between its message and its notification must not keep another's message waiting.
                self.futex.sleep(left.min(LONGEST_SLEEP));
            }
            self.futex.cancel_sleep();
            return !left.is_zero();
        }
        if self.looks < self.most_looks {
            self.looks += 1;
            std::hint::spin_loop();
            return true;
        }
        self.looks = 0;
        match self.wait.next(deadline) {
            Next::Look => true,
            Next::Expired => false,
            Next::Park => {
                // Sleeps the next time, if there is still nothing then.
                self.futex.announce_sleep();
                self.will_sleep = true;
                true
            }
        }
    }
}

impl Drop for IdleWait<'_> {
    fn drop(&mut self) {
        if self.will_sleep {
            self.futex.cancel_sleep();
        }
    }
}

/// `peer` is no longer there.
pub(super) fn lost(shared: &TransportState, peer: usize) -> Error {
    let detail =
        if shared.state_of(peer) == state::CLOSED { "it has closed its connections" } else { "its transport ended" };
    Error::PeerLost { rank: peer, operation: String::new(), detail: detail.into() }
}
